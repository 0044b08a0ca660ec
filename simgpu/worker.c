/* What the host does in the course of a stream: host functions, waits for values, copies that come
 * after those. Two threads of the driver, started when first needed, look after it: one calls the
 * user's functions, in turn; the other does the rest, so that a function may wait for it. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include "work.h"

struct worker {
	pthread_mutex_t lock;
	pthread_cond_t posted;
	struct sim_action *list; /* in order of posting */
	bool started;
};
static struct worker worker[2] = {
	{ .lock = PTHREAD_MUTEX_INITIALIZER, .posted = PTHREAD_COND_INITIALIZER },
	{ .lock = PTHREAD_MUTEX_INITIALIZER, .posted = PTHREAD_COND_INITIALIZER },
};

static bool calls_user(const struct sim_action *a)
{
	return a->kind == SIM_ACT_CALL || a->kind == SIM_ACT_CALLBACK;
}

struct sim_action *sim_action_new(enum sim_action_kind kind, struct CUctx_st *ctx)
{
	struct sim_action *a = calloc(1, sizeof *a);
	if (!a)
		return NULL;
	a->kind = kind;
	a->ctx = ctx;
	a->time = ctx->time;
	a->gpu = sim_ctx_gpu(ctx);
	return a;
}

void sim_action_free(struct sim_action *a)
{
	free(a->memop);
	free(a);
}

/* --- is it time, and is it done? ---------------------------------------------------------------- */

enum stage { GONE, QUEUED, REACHED };

static enum stage stage_of(const struct sim_action *a, uint64_t *eta_ns)
{
	struct sim_engine *e = &a->gpu->engine;
	uint32_t ctx = a->ticket.ctx;
	enum stage st = GONE;
	sim_engine_enter(a->gpu);
	if (e->ctx[ctx].gen == a->ticket.ctx_gen && sim_engine_queued(e, ctx, a->op, a->op_id))
		st = sim_engine_reached(e, ctx, a->op, a->op_id) ? REACHED : QUEUED;
	*eta_ns = st == QUEUED ? sim_engine_eta(e, &a->ticket) : 0;
	sim_gpu_unlock(a->gpu);
	return st;
}

static bool load_value(const struct sim_action *a, uint64_t *value)
{
	struct sim_memop op;
	*value = 0;
	sim_memop_linear(&op, (CUdeviceptr)(uintptr_t)value, a->addr, a->wide ? 8 : 4);
	return sim_memop_run(&op) == CUDA_SUCCESS;
}

static bool compares(const struct sim_action *a, uint64_t v)
{
	switch (a->flags & ~(unsigned)CU_STREAM_WAIT_VALUE_FLUSH) {
	case CU_STREAM_WAIT_VALUE_EQ:
		return v == a->value;
	case CU_STREAM_WAIT_VALUE_AND:
		return (v & a->value) != 0;
	case CU_STREAM_WAIT_VALUE_NOR:
		return (a->wide ? ~(v | a->value) : (uint32_t)~(v | a->value)) != 0;
	default: /* GEQ: by the sign of the difference, as documented */
		return a->wide ? (int64_t)(v - a->value) >= 0 : (int32_t)((uint32_t)v - (uint32_t)a->value) >= 0;
	}
}

/* Whether a reached action may end now. Memory that is gone ends it: nobody can write it any more. */
static bool ripe(const struct sim_action *a)
{
	uint64_t v;
	switch (a->kind) {
	case SIM_ACT_WAIT:
		return !load_value(a, &v) || compares(a, v);
	case SIM_ACT_FLAG:
		return !load_value(a, &v) || v != 0;
	case SIM_ACT_OTHER_GPU: {
		sim_engine_enter(a->other);
		bool passed = sim_engine_passed(&a->other->engine, &a->until) || a->other->engine.lost;
		sim_gpu_unlock(a->other);
		return passed;
	}
	default:
		return true;
	}
}

static void store_value(const struct sim_action *a)
{
	struct sim_memop op;
	uint64_t v = a->value;
	sim_memop_linear(&op, a->addr, (CUdeviceptr)(uintptr_t)&v, a->wide ? 8 : 4);
	if (sim_memop_run(&op))
		a->ctx->sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
}

static void perform(struct sim_action *a)
{
	switch (a->kind) {
	case SIM_ACT_CALL:
		a->fn(a->arg);
		break;
	case SIM_ACT_CALLBACK:
		a->callback(a->stream, a->ctx->sticky ? (CUresult)a->ctx->sticky : CUDA_SUCCESS, a->arg);
		break;
	case SIM_ACT_MEMOP:
		if (sim_memop_run(a->memop))
			a->ctx->sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
		break;
	case SIM_ACT_UNMAP:
		sim_graphmem_unmap(a->addr);
		break;
	case SIM_ACT_WRITE:
		store_value(a);
		break;
	default:
		break;
	}
}

/* The context may be destroyed at any time: its figures are touched only if the queue still is its. */
static void finish(struct sim_action *a)
{
	struct sim_engine *e = &a->gpu->engine;
	uint64_t now = sim_engine_enter(a->gpu);
	if (e->ctx[a->ticket.ctx].gen == a->ticket.ctx_gen)
		sim_engine_release(e, a->ticket.ctx, a->op, a->op_id, now);
	sim_gpu_unlock(a->gpu);
}

/* --- the threads --------------------------------------------------------------------------------- */

static void retire(struct sim_action *a)
{
	a->time->actions--;
	sim_action_free(a);
}

/* Takes the first action that can be performed off the list; NULL: none, and when to look again. */
static struct sim_action *take_ripe(struct worker *w, uint64_t *nap_ns)
{
	struct sim_action **link = &w->list;
	*nap_ns = 1000000;
	while (*link) {
		struct sim_action *a = *link;
		uint64_t eta;
		enum stage st = stage_of(a, &eta);
		if (st == GONE) {
			*link = a->next;
			retire(a);
			continue;
		}
		if (st == REACHED && ripe(a)) {
			*link = a->next;
			return a;
		}
		uint64_t nap = st == REACHED || eta < 100000 ? 40000 : eta - 60000;
		if (nap < *nap_ns)
			*nap_ns = nap;
		link = &a->next;
	}
	return NULL;
}

static void nap_until_posted(struct worker *w, uint64_t ns)
{
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	ns += (uint64_t)t.tv_nsec;
	t.tv_sec += (time_t)(ns / 1000000000u);
	t.tv_nsec = (long)(ns % 1000000000u);
	pthread_cond_timedwait(&w->posted, &w->lock, &t);
}

static void *work(void *arg)
{
	struct worker *w = arg;
	pthread_mutex_lock(&w->lock);
	for (;;) {
		uint64_t nap_ns;
		if (!w->list) {
			pthread_cond_wait(&w->posted, &w->lock);
			continue;
		}
		struct sim_action *a = take_ripe(w, &nap_ns);
		if (a) {
			pthread_mutex_unlock(&w->lock);
			perform(a);
			finish(a);
			retire(a);
			pthread_mutex_lock(&w->lock);
		} else if (w->list) {
			nap_until_posted(w, nap_ns);
		}
	}
	return NULL;
}

/* With all signals blocked, so that handlers of the program run on its own threads. */
static void start(struct worker *w)
{
	sigset_t all, old;
	pthread_t t;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	w->started = !pthread_create(&t, NULL, work, w);
	if (w->started)
		pthread_detach(t);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
}

void sim_action_post(struct sim_action *a)
{
	struct worker *w = &worker[calls_user(a)];
	struct sim_action **link;
	pthread_mutex_lock(&w->lock);
	for (link = &w->list; *link; link = &(*link)->next)
		;
	a->next = NULL;
	*link = a;
	if (!w->started)
		start(w);
	pthread_cond_signal(&w->posted);
	pthread_mutex_unlock(&w->lock);
}

CUresult sim_enqueue_action(struct CUstream_st *s, struct sim_action *a)
{
	struct sim_op_desc d = { .kind = SIM_OP_HOST };
	if (!a)
		return CUDA_ERROR_OUT_OF_MEMORY;
	a->time->actions++;
	CUresult r = sim_enqueue(s, &d, NULL, a);
	if (r)
		retire(a);
	return r;
}
