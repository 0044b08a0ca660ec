/* Kernel launches at a given rate and depth, and what became of them. */
#ifndef GPULOAD_LOAD_H
#define GPULOAD_LOAD_H
#include <stdint.h>
#include "options.h"
#include "pace.h"
#include "probe.h"

#define LOAD_INTERVALS 4096

/* How long requests took, from when they were due to when they were done. */
struct latency {
	unsigned requests;
	double p50_ms, p90_ms, p99_ms, max_ms;
};

/* What one process achieved. Shared by the processes of one run. A share is kernels completed
 * times their duration, as a part of the time: 1 is one whole GPU. */
struct load_result {
	uint64_t kernels; /* completed in the measured time */
	double wall_s;
	double share, share_first_s, share_after_2s; /* the last one -1 in a run of 2 s or less */
	unsigned n_intervals;			     /* of one second each */
	float interval[LOAD_INTERVALS];
	struct latency latency;
	int64_t wake[PACE_WAKES]; /* when it began to launch, CLOCK_MONOTONIC */
	unsigned wakes;
	struct probe probe;
};

/* `start` is called when all is set up, before the first launch. */
void load_run(const struct options *o, void (*start)(void), struct load_result *out);
/* Adds up the results of several processes and reports them. */
void load_report(const struct options *o, const struct load_result *r, unsigned n);
/* One kernel that spins on a flag for o->flag_s. */
void load_flag(const struct options *o);
#endif
