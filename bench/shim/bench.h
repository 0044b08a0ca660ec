/* The bench of the library's cost: the same calls straight to the driver and through the library,
 * over one and the same driver in one process, in alternating blocks. */
#ifndef BENCH_BENCH_H
#define BENCH_BENCH_H
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include "cuda_abi.h"
#include "slice.h"

void die(const char *fmt, ...) __attribute__((noreturn, format(printf, 1, 2)));

/* --- the two ways to the driver (api.c) ----------------------------------------------------- */

#define API(X)                                                                                     \
	X(cuInit)                                                                                  \
	X(cuDeviceGet)                                                                             \
	X(cuDeviceGetUuid)                                                                         \
	X(cuDevicePrimaryCtxRetain)                                                                \
	X(cuCtxSetCurrent)                                                                         \
	X(cuCtxSynchronize)                                                                        \
	X(cuModuleLoadData)                                                                        \
	X(cuModuleGetFunction)                                                                     \
	X(cuLaunchKernel)                                                                          \
	X(cuMemAlloc_v2)                                                                           \
	X(cuMemFree_v2)

struct api {
#define X(name) __typeof__(&name) name;
	API(X)
#undef X
};

struct setting {
	const char *null_driver, *shim;
	bool quick; /* fewer repetitions: a check that the bench works */
};

/* Both ways open in this process and their context current. */
struct pair {
	struct api direct, ours;
	CUfunction kernel;
	CUcontext context;
	const volatile unsigned long *calls; /* the null driver's count of this thread's calls */
	char dir[64];				  /* the slice */
};
/* Lays out a slice with this compute limit (0: none) and opens both ways. */
void pair_open(struct pair *p, const struct setting *s, unsigned cores);
/* The same over a slice that slice_for has laid out. */
void pair_open_in(struct pair *p, const struct setting *s, const char *library);
void pair_close(struct pair *p);
/* The pieces of it. */
void api_open(struct api *a, const char *path);
CUcontext api_start(const struct api *a);
void slice_for(const struct setting *s, unsigned cores, char *dir, unsigned dir_size, char *library,
	       unsigned library_size);

/* --- time and statistics (stats.c) ------------------------------------------------------------ */

double now_ns(void);
/* Time stamp counter with the instructions before it complete, and its length in ns. */
uint64_t ticks(void);
double ns_per_tick(void);
/* Ticks of an empty measurement, at the median. */
uint64_t ticks_overhead(void);
void pin_to_cpu(void);

struct stats {
	double min, p25, median, p75, p99, mean;
};
/* Sorts x. */
struct stats stats_of(double *x, unsigned n);

/* --- results (report.c) ----------------------------------------------------------------------- */

#define NO_TARGET (-1.0)
/* What the rows that follow are about, in the file. */
void report_group(const char *name);
void report_head(const char *title, const char *unit);
/* One line of the table and two rows of the file: what is added at min and at median. */
void report_added(const char *name, const char *unit, struct stats direct, struct stats ours,
		  double target);
/* One line and one row without a comparison. */
void report_value(const char *name, const char *metric, const char *unit, double value);
void report_open(const char *json);
/* Number of targets missed. */
unsigned report_close(void);

/* --- other processes of the tenant (crowd.c) --------------------------------------------------- */

struct crowd {
	unsigned n;
	int go;	     /* closes to end them */
	int *pid;
};
/* Forks `n` processes that open `library`, initialise CUDA, allocate once and stay. Returns when
 * all have. To be called before this process opens a library. */
void crowd_start(struct crowd *c, const char *library, unsigned n);
void crowd_end(struct crowd *c);

/* --- cases, each in a process of its own ------------------------------------------------------------------------------------ */
void case_launch(const struct setting *s);
void case_launch_limited(const struct setting *s);
void case_threads(const struct setting *s);
void case_threads_limited(const struct setting *s);
void case_memory(const struct setting *s);
void case_memory_processes(const struct setting *s);
void case_init(const struct setting *s);
#endif
