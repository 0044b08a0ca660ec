/* What the command line asks for. */
#ifndef GPULOAD_OPTIONS_H
#define GPULOAD_OPTIONS_H
#include <stdbool.h>
#include <stdint.h>

#define MAX_ALLOCS 16

struct alloc_pattern {
	char family[12]; /* plain, pitched, ... : alloc.h */
	uint64_t size;	 /* bytes of each allocation */
	uint64_t count;	 /* allocations; 0: until one is refused */
};

struct options {
	const char *libcuda;
	int gpu;
	bool json;

	int64_t kernel_ns; /* 0: no kernels */
	unsigned grid, block;
	double rate;	/* launches a second, all threads together; 0: as fast as possible */
	bool poisson;	/* at random times, so many a second in the mean */
	bool latency;	/* how long each launch takes from the time it was due */
	bool probe;	/* the kernels record when they ran */
	unsigned depth; /* launches in flight for each stream; 0: unbounded */
	bool sync_each;
	unsigned streams; /* of each thread */
	unsigned graph;	  /* kernels in the graph that each launch is; 0: plain launches */
	bool capture;	  /* make the graph by capture rather than node by node */
	unsigned threads;
	double time_s, warmup_s;
	double delay_s;	      /* idle before the first launch */
	double on_s, off_s;   /* launch and be idle in turn; off_s 0: launch all the time */
	double flag_s; /* a kernel that spins until the host sets a flag, for so long */

	struct alloc_pattern alloc[MAX_ALLOCS];
	unsigned n_alloc;
	double hold_s; /* keep what was allocated for so long */

	double random_s; /* allocate and free at random for so long */
	uint64_t random_max;
	unsigned random_forks; /* idle children forked on the way */
	unsigned seed;

	unsigned procs;
	uint64_t ipc_size; /* one exporter of so many bytes ... */
	unsigned ipc_importers;
};

/* Ends the program with a line of help when the command line is wrong. */
void options_parse(struct options *o, int argc, char **argv);
#endif
