/* A GPU, its driver and a clock for the tests of the meter, all in virtual time: the meter's own
 * files run unchanged against them, in one thread, and every run gives the same figures.
 * What the meter cannot see, when kernels really ran, is kept as the truth. */
#ifndef METER_WORLD_H
#define METER_WORLD_H
#include <stdbool.h>
#include <stdint.h>
#include "cuda_abi.h"

extern int64_t world_now;
struct world_conf {
	bool parallel;	    /* kernels of different streams run side by side */
	int64_t launch_ns;  /* host time of a launch */
	int64_t late_ns;    /* a sleeper wakes up to this much late */
	int64_t stall_every_ns, stall_ns; /* the host loses the processor now and then */
};
extern struct world_conf world;

/* A fresh world: one device with `cores`; 0: no limit. */
void world_start(int cores);
void world_set_cores(int cores);
/* The program computes on the CPU; the helper's rounds happen meanwhile. */
void world_compute(int64_t ns);
/* Launches of kernel number k (its handle) with that duration. dur < 0: until world_release. */
CUresult world_launch(int k, int64_t dur, unsigned blocks, CUstream s);
CUresult world_launch_graph(int k, int64_t dur, CUstream s);
void world_release(void);
void world_sync(CUstream s);
CUstream world_stream(int i);
/* Time in [from, to) in which at least one kernel ran. */
int64_t world_busy(int64_t from, int64_t to);
/* Work launched and not done. */
int64_t world_queued(void);
struct world_calls {
	long launches, records, queries, on_capturing;
};
extern struct world_calls world_calls;
extern bool world_capturing[8];
struct tr_account *world_account(void);
#endif
