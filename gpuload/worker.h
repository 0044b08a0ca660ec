/* A launching thread: its streams, and what is in flight on them. */
#ifndef GPULOAD_WORKER_H
#define GPULOAD_WORKER_H
#include <pthread.h>
#include <stdatomic.h>
#include "driver.h"
#include "load.h"
#include "options.h"
#include "pace.h"

#define MARKS 512 /* events in a stream's ring */

/* A stream and the launches in flight on it. An event follows every few launches; what lies
 * before a completed event is complete. */
struct lane {
	CUstream stream;
	CUevent event[MARKS];
	unsigned covers[MARKS]; /* launches that the event completes */
	unsigned first, n;	/* ring of recorded events */
	unsigned unmarked;	/* launches after the last event */
	unsigned in_flight;	/* launches not known to be complete */
};

struct worker {
	pthread_t thread;
	unsigned number;
	const struct options *o;
	CUfunction kernel;
	CUdeviceptr probe; /* where the kernels record, 0: they do not */
	CUgraphExec graph;
	struct lane *lane;
	atomic_ullong completed; /* kernels */
	struct pace pace;
};

/* Set when the measured time is over. */
extern atomic_bool load_stopping;

void worker_launch(const struct worker *w, CUstream stream);
/* The thread's function: launches at its pace until load_stopping. */
void *worker_run(void *worker);
/* The same, and measures each launch (latency.c). */
void *latency_run(void *worker);
/* Requests due from `from_ns` on, after the thread has ended. */
void latency_result(int64_t from_ns, struct latency *out);
#endif
