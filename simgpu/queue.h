/* Between engine.c and queue.c only. */
#ifndef SIM_QUEUE_H
#define SIM_QUEUE_H
#include "engine.h"

/* The streams of a context that have work, each at most once, ended even if the list is torn. */
#define FOR_ACTIVE(c, s)                                                                           \
	for (uint32_t s = (c)->active, n_##s = 0; s < SIM_ENGINE_STREAMS && n_##s < SIM_ENGINE_STREAMS; \
	     s = (c)->stream[s].next_active, n_##s++)

/* Complete what can complete at e->t_ns, start what can start, and work out which kernels may run.
 * True if anything completed (others may have waited for it). */
bool sim_queue_settle(struct sim_engine *e, uint32_t ctx);
#endif
