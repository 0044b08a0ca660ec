/* Between the calling thread and the engine: enqueueing and waiting. */
#include <time.h>
#include "work.h"

#define LOOK_NS 10000000ull /* how soon a dead process's work is noticed */
#define MAX_NAP_NS 5000000ull
#define SLACK_NS 60000ull /* what the kernel adds to a sleep */
#define SPIN_NS 25000ull
#define MIN_ROOM_NS 50000ull

uint64_t sim_engine_enter(struct sim_gpu *g)
{
	sim_gpu_lock(g);
	uint64_t now = sim_now_ns();
	sim_engine_advance(&g->engine, now);
	return now;
}

static void sleep_ns(uint64_t ns)
{
	struct timespec t = { .tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u) };
	nanosleep(&t, NULL);
}

void sim_nap(uint64_t eta_ns, unsigned round)
{
	if (eta_ns == 0) {
		uint64_t ns = 10000ull << (round / 16 < 5 ? round / 16 : 5);
		sleep_ns(ns);
	} else if (eta_ns <= SPIN_NS) {
		uint64_t end = sim_now_ns() + eta_ns;
		while (sim_now_ns() < end)
			__asm__ volatile("" ::: "memory");
	} else if (eta_ns <= SLACK_NS + 20000) {
		sleep_ns(1000);
	} else {
		sleep_ns(eta_ns > MAX_NAP_NS ? MAX_NAP_NS : eta_ns - SLACK_NS);
	}
}

/* Slots of other processes that have contexts with work here. Under the lock. */
static bool find_dead(struct sim_gpu *g, uint64_t now_ns)
{
	struct sim_engine *e = &g->engine;
	bool foreign = false;
	for (uint32_t w = 0; w < SIM_ENGINE_CTXS / 64; w++) {
		for (uint64_t bits = e->busy_ctx[w]; bits; bits &= bits - 1) {
			uint32_t slot = e->ctx[w * 64 + (uint32_t)__builtin_ctzll(bits)].proc;
			if (slot == (uint32_t)sim_proc_slot() || slot >= SIM_MAX_PROCS)
				continue;
			struct sim_proc *p = &sim_shared->proc[slot];
			if (!sim_proc_alive(p))
				sim_engine_drop_proc(e, slot, now_ns, false);
			else if (p->pidns != sim_shared->proc[sim_proc_slot()].pidns)
				foreign = true; /* only its lock can tell */
		}
	}
	return foreign;
}

void sim_look_for_dead(struct sim_gpu *g)
{
	uint64_t now = sim_now_ns(), last = __atomic_load_n(&g->engine.liveness_ns, __ATOMIC_RELAXED);
	if (now < last + LOOK_NS ||
	    !__atomic_compare_exchange_n(&g->engine.liveness_ns, &last, now, false, __ATOMIC_RELAXED,
					 __ATOMIC_RELAXED))
		return;
	sim_gpu_lock(g);
	bool foreign = find_dead(g, now);
	sim_gpu_unlock(g);
	if (foreign)
		sim_reap();
}

static bool lost(const struct sim_gpu *g)
{
	return __atomic_load_n(&g->lost, __ATOMIC_RELAXED) || g->engine.lost;
}

static __thread uint64_t batch_ns; /* when the submission under way was made; 0: none */

void sim_batch_begin(void)
{
	batch_ns = sim_now_ns();
}

void sim_batch_end(void)
{
	batch_ns = 0;
}

/* One try. 1: done, 0: full, -1: the context is gone. */
static int try_push(struct CUstream_st *s, const struct sim_op_desc *desc, struct sim_ticket *ticket,
		    struct sim_action *a, uint64_t *eta_ns)
{
	struct sim_gpu *g = sim_ctx_gpu(s->ctx);
	struct sim_time_ctx *t = s->ctx->time;
	struct sim_ticket tail;
	uint32_t op;
	int r = 0;
	sim_gpu_lock(g);
	if (!t || g->engine.ctx[t->queue].gen != t->queue_gen) {
		r = -1;
	} else if (sim_engine_push(&g->engine, t->queue, s->queue, desc,
				   batch_ns ? batch_ns : sim_now_ns(), &op, &tail)) {
		r = 1;
		if (ticket)
			*ticket = tail;
		if (a) {
			a->op = op;
			a->op_id = g->engine.ctx[t->queue].op[op].id;
			a->ticket = tail;
		}
	} else {
		*eta_ns = sim_engine_head_eta(&g->engine, t->queue);
	}
	sim_gpu_unlock(g);
	return r;
}

CUresult sim_enqueue(struct CUstream_st *s, const struct sim_op_desc *desc, struct sim_ticket *ticket,
		     struct sim_action *action)
{
	struct sim_gpu *g = sim_ctx_gpu(s->ctx);
	for (unsigned round = 0;; round++) {
		uint64_t eta = 0;
		if (lost(g))
			return CUDA_ERROR_UNKNOWN;
		int r = try_push(s, desc, ticket, action, &eta);
		if (r < 0)
			return lost(g) ? CUDA_ERROR_UNKNOWN : CUDA_ERROR_CONTEXT_IS_DESTROYED;
		if (r > 0)
			break;
		/* the queue is deep: let several complete rather than spin for each */
		sim_nap(eta < MIN_ROOM_NS ? MIN_ROOM_NS : eta < 1000000 ? eta : 1000000, round);
		if (batch_ns) /* too large to arrive at once */
			batch_ns = sim_now_ns();
		sim_look_for_dead(g);
	}
	if (action)
		sim_action_post(action);
	return CUDA_SUCCESS;
}

CUresult sim_wait(struct sim_gpu *g, const struct sim_ticket *ticket)
{
	bool slept = false;
	for (unsigned round = 0;; round++) {
		if (lost(g))
			return CUDA_ERROR_UNKNOWN;
		if (sim_engine_passed(&g->engine, ticket))
			break;
		sim_engine_enter(g);
		uint64_t eta = sim_engine_eta(&g->engine, ticket);
		bool passed = sim_engine_passed(&g->engine, ticket);
		sim_gpu_unlock(g);
		if (passed)
			break;
		sim_nap(eta, round);
		slept = true;
		sim_look_for_dead(g);
	}
	if (slept && sim_shared->sync_ns)
		sleep_ns(sim_shared->sync_ns);
	return CUDA_SUCCESS;
}

CUresult sim_wait_ctx(struct CUctx_st *ctx)
{
	struct sim_gpu *g = sim_ctx_gpu(ctx);
	struct sim_ticket tail[SIM_ENGINE_STREAMS];
	uint32_t n = 0;
	if (lost(g))
		return CUDA_ERROR_UNKNOWN;
	sim_engine_enter(g);
	if (ctx->time && g->engine.ctx[ctx->time->queue].gen == ctx->time->queue_gen)
		n = sim_engine_ctx_tails(&g->engine, ctx->time->queue, tail, SIM_ENGINE_STREAMS);
	sim_gpu_unlock(g);
	for (uint32_t i = 0; i < n; i++) {
		CUresult r = sim_wait(g, &tail[i]);
		if (r)
			return r;
	}
	return CUDA_SUCCESS;
}
