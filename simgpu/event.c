/* Events. Their time stamps are the engine's time at the moment when everything before the record
 * was done: wall time of the device, whoever else had the engine in between. */
#include <stdlib.h>
#include <string.h>
#include "work.h"

#define RESOLUTION_NS 500 /* of a time stamp */

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUevent_st *pool;

struct CUevent_st *sim_event_of(CUevent h)
{
	return h && __atomic_load_n(&h->magic, __ATOMIC_ACQUIRE) == SIM_EVENT_MAGIC ? h : NULL;
}

/* The cells of a destroyed context are somebody else's. */
static bool cells_gone(const struct CUevent_st *e)
{
	const struct sim_time_ctx *t = e->ctx->time;
	return __atomic_load_n(&sim_ctx_gpu(e->ctx)->engine.ctx[t->queue].gen, __ATOMIC_ACQUIRE) !=
	       t->queue_gen;
}

static const struct sim_cell *cell_of(const struct CUevent_st *e)
{
	return &sim_ctx_gpu(e->ctx)->engine.ctx[e->ctx->time->queue].cell[e->cell];
}

/* Whether the newest record has completed, as far as the engine has been worked out. */
static bool stamped(const struct CUevent_st *e)
{
	uint64_t rec = __atomic_load_n(&e->rec, __ATOMIC_ACQUIRE);
	return !rec || __atomic_load_n(&cell_of(e)->done, __ATOMIC_ACQUIRE) >= rec;
}

/* CUDA_SUCCESS, CUDA_ERROR_NOT_READY, or what else there is to say about the event. */
static CUresult state(struct CUevent_st *e)
{
	struct sim_gpu *g = sim_ctx_gpu(e->ctx);
	if (!e->rec)
		return CUDA_SUCCESS;
	if (__atomic_load_n(&g->lost, __ATOMIC_RELAXED))
		return CUDA_ERROR_UNKNOWN;
	if (cells_gone(e))
		return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	if (stamped(e))
		return CUDA_SUCCESS;
	sim_engine_enter(g);
	bool done = stamped(e);
	sim_gpu_unlock(g);
	return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventCreate(CUevent *phEvent, unsigned int Flags)
{
	SIM_CALL_CTX(cuEventCreate, ctx);
	const unsigned known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
	if (!phEvent || (Flags & ~known) ||
	    ((Flags & CU_EVENT_INTERPROCESS) && !(Flags & CU_EVENT_DISABLE_TIMING)))
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&pool_lock);
	struct CUevent_st *e = pool;
	if (e)
		pool = e->next;
	pthread_mutex_unlock(&pool_lock);
	if (!e)
		e = malloc(sizeof *e);
	if (!e)
		return CUDA_ERROR_OUT_OF_MEMORY;
	memset(e, 0, sizeof *e);
	e->flags = Flags;
	e->ctx = ctx;
	e->cell = SIM_NONE;
	__atomic_store_n(&e->magic, SIM_EVENT_MAGIC, __ATOMIC_RELEASE);
	*phEvent = e;
	return CUDA_SUCCESS;
}

static CUresult destroy(CUevent h)
{
	struct CUevent_st *e = sim_event_of(h);
	uint32_t magic = SIM_EVENT_MAGIC;
	if (!e || !__atomic_compare_exchange_n(&e->magic, &magic, 0, false, __ATOMIC_ACQ_REL,
					       __ATOMIC_RELAXED))
		return CUDA_ERROR_INVALID_HANDLE;
	sim_capture_forget_event(e);
	if (e->cell != SIM_NONE) {
		struct sim_gpu *g = sim_ctx_gpu(e->ctx);
		sim_gpu_lock(g);
		if (!cells_gone(e))
			sim_engine_cell_close(&g->engine, e->ctx->time->queue, e->cell);
		sim_gpu_unlock(g);
	}
	pthread_mutex_lock(&pool_lock);
	e->next = pool;
	pool = e;
	pthread_mutex_unlock(&pool_lock);
	return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent hEvent)
{
	SIM_CALL(cuEventDestroy_v2);
	return destroy(hEvent);
}

CUresult cuEventDestroy(CUevent hEvent)
{
	SIM_CALL(cuEventDestroy);
	return destroy(hEvent);
}

/* A cell at the first record, a number for each. */
static CUresult new_record(struct CUevent_st *e, uint64_t *rec)
{
	struct sim_gpu *g = sim_ctx_gpu(e->ctx);
	uint32_t queue = e->ctx->time->queue;
	CUresult r = CUDA_SUCCESS;
	sim_gpu_lock(g);
	if (cells_gone(e))
		r = CUDA_ERROR_CONTEXT_IS_DESTROYED;
	else if (e->cell == SIM_NONE && (e->cell = sim_engine_cell_open(&g->engine, queue)) == SIM_NONE)
		r = CUDA_ERROR_OUT_OF_MEMORY;
	else
		*rec = sim_engine_next_rec(&g->engine, queue);
	sim_gpu_unlock(g);
	return r;
}

CUresult sim_do_record(struct CUstream_st *s, struct CUevent_st *e)
{
	struct sim_op_desc d = { .kind = SIM_OP_MARK };
	struct sim_ticket t;
	if (s->ctx != e->ctx)
		return CUDA_ERROR_INVALID_HANDLE;
	CUresult r = new_record(e, &d.rec);
	if (r)
		return r;
	d.cell = e->cell;
	/* Not ready from here on, not only once it is queued. */
	__atomic_store_n(&e->rec, d.rec, __ATOMIC_RELEASE);
	r = sim_enqueue(s, &d, &t, NULL);
	if (!r)
		e->ticket = t;
	return r;
}

static CUresult record(struct CUctx_st *ctx, CUevent h, CUstream stream, unsigned flags)
{
	struct CUevent_st *e = sim_event_of(h);
	struct CUstream_st *s;
	struct sim_capture *capture;
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	if (flags & ~(unsigned)CU_EVENT_RECORD_EXTERNAL)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = sim_begin_op(ctx, stream, &s, &capture);
	if (r)
		return r;
	if (capture)
		return sim_capture_record(s, e, flags);
	if (flags & CU_EVENT_RECORD_EXTERNAL)
		return CUDA_ERROR_ILLEGAL_STATE;
	if (__atomic_load_n(&e->capture_id, __ATOMIC_RELAXED))
		sim_capture_forget_event(e);
	return sim_do_record(s, e);
}

CUresult cuEventRecord(CUevent hEvent, CUstream hStream)
{
	SIM_CALL_CTX(cuEventRecord, ctx);
	return record(ctx, hEvent, hStream, 0);
}

CUresult cuEventRecord_ptsz(CUevent hEvent, CUstream hStream)
{
	SIM_CALL_CTX(cuEventRecord_ptsz, ctx);
	return record(ctx, hEvent, sim_pt(hStream), 0);
}

CUresult cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags)
{
	SIM_CALL_CTX(cuEventRecordWithFlags, ctx);
	return record(ctx, hEvent, hStream, flags);
}

CUresult cuEventRecordWithFlags_ptsz(CUevent hEvent, CUstream hStream, unsigned int flags)
{
	SIM_CALL_CTX(cuEventRecordWithFlags_ptsz, ctx);
	return record(ctx, hEvent, sim_pt(hStream), flags);
}

CUresult cuEventQuery(CUevent hEvent)
{
	SIM_CALL(cuEventQuery);
	struct CUevent_st *e = sim_event_of(hEvent);
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	CUresult r = sim_capture_host_event(e);
	return r ? r : state(e);
}

CUresult cuEventSynchronize(CUevent hEvent)
{
	SIM_CALL(cuEventSynchronize);
	struct CUevent_st *e = sim_event_of(hEvent);
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	CUresult r = sim_capture_host_event(e);
	struct CUctx_st *ctx = e->ctx;
	struct sim_ticket t = e->ticket;
	if (!r)
		r = state(e);
	if (r == CUDA_ERROR_NOT_READY)
		r = sim_wait(sim_ctx_gpu(ctx), &t);
	if (r)
		return r;
	sim_mem_on_sync(ctx);
	return ctx->sticky ? (CUresult)ctx->sticky : CUDA_SUCCESS;
}

/* Time stamps have a grain; the difference of two is a multiple of it. */
static int64_t grains(const struct CUevent_st *e)
{
	return (int64_t)(__atomic_load_n(&cell_of(e)->ts_ns, __ATOMIC_RELAXED) / RESOLUTION_NS);
}

CUresult cuEventElapsedTime(float *pMilliseconds, CUevent hStart, CUevent hEnd)
{
	SIM_CALL(cuEventElapsedTime);
	struct CUevent_st *a = sim_event_of(hStart), *b = sim_event_of(hEnd);
	if (!pMilliseconds)
		return CUDA_ERROR_INVALID_VALUE;
	if (!a || !b || ((a->flags | b->flags) & CU_EVENT_DISABLE_TIMING))
		return CUDA_ERROR_INVALID_HANDLE;
	if (a->capture_id || b->capture_id)
		return CUDA_ERROR_CAPTURED_EVENT;
	if (!a->rec || !b->rec || a->ctx->gpu != b->ctx->gpu)
		return CUDA_ERROR_INVALID_HANDLE;
	CUresult r = state(a);
	if (!r)
		r = state(b);
	if (r)
		return r;
	*pMilliseconds = (float)((double)((grains(b) - grains(a)) * RESOLUTION_NS) / 1e6);
	return CUDA_SUCCESS;
}

CUresult sim_do_wait_ticket(struct CUstream_st *s, struct CUctx_st *ctx, const struct sim_ticket *t)
{
	struct sim_gpu *g = sim_ctx_gpu(ctx);
	if (sim_engine_passed(&g->engine, t))
		return CUDA_SUCCESS;
	if (ctx->gpu == s->ctx->gpu) {
		struct sim_op_desc d = { .kind = SIM_OP_WAIT, .wait = *t };
		return sim_enqueue(s, &d, NULL, NULL);
	}
	struct sim_action *a = sim_action_new(SIM_ACT_OTHER_GPU, s->ctx);
	if (a) {
		a->other = g;
		a->until = *t;
	}
	return sim_enqueue_action(s, a);
}

CUresult sim_do_wait_event(struct CUstream_st *s, struct CUevent_st *e)
{
	if (!e->rec || cells_gone(e))
		return CUDA_SUCCESS;
	return sim_do_wait_ticket(s, e->ctx, &e->ticket);
}

static CUresult wait_event(struct CUctx_st *ctx, CUstream stream, CUevent h, unsigned flags)
{
	struct CUevent_st *e = sim_event_of(h);
	struct CUstream_st *s;
	struct sim_capture *capture;
	CUresult r;
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	if (flags & ~(unsigned)CU_EVENT_WAIT_EXTERNAL)
		return CUDA_ERROR_INVALID_VALUE;
	if (__atomic_load_n(&e->capture_id, __ATOMIC_RELAXED)) {
		r = sim_stream_of(ctx, stream, &s);
		if (r || sim_capture_join(s, e, &r))
			return r;
	}
	r = sim_begin_op(ctx, stream, &s, &capture);
	if (r)
		return r;
	if (capture)
		return sim_capture_wait(s, e, flags);
	if (flags & CU_EVENT_WAIT_EXTERNAL)
		return CUDA_ERROR_ILLEGAL_STATE;
	return sim_do_wait_event(s, e);
}

CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
	SIM_CALL_CTX(cuStreamWaitEvent, ctx);
	return wait_event(ctx, hStream, hEvent, Flags);
}

CUresult cuStreamWaitEvent_ptsz(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
	SIM_CALL_CTX(cuStreamWaitEvent_ptsz, ctx);
	return wait_event(ctx, sim_pt(hStream), hEvent, Flags);
}
