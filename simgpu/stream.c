/* Streams: handles, default streams, and asking and waiting for them. */
#include <stdlib.h>
#include <string.h>
#include "work.h"

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st *pool; /* destroyed streams, for reuse */
static struct sim_time_ctx *contexts; /* of all contexts ever made; under pool_lock */
static uint64_t last_id;

/* --- making and ending ---------------------------------------------------------------------------- */

static struct CUstream_st *handle_new(void)
{
	pthread_mutex_lock(&pool_lock);
	struct CUstream_st *s = pool;
	if (s)
		pool = s->next;
	uint64_t id = ++last_id;
	pthread_mutex_unlock(&pool_lock);
	if (!s)
		s = malloc(sizeof *s);
	if (!s)
		return NULL;
	memset(s, 0, sizeof *s);
	s->id = id;
	return s;
}

static void handle_free(struct CUstream_st *s)
{
	s->magic = 0;
	pthread_mutex_lock(&pool_lock);
	s->next = pool;
	pool = s;
	pthread_mutex_unlock(&pool_lock);
}

/* A stream with a queue of its own; the legacy stream's queue is 0 and always there. */
static struct CUstream_st *stream_new(struct CUctx_st *ctx, unsigned flags, int priority, bool legacy)
{
	struct CUstream_st *s = handle_new();
	struct sim_gpu *g = sim_ctx_gpu(ctx);
	if (!s)
		return NULL;
	if (!legacy) {
		sim_engine_enter(g);
		s->queue = sim_engine_stream_open(&g->engine, ctx->time->queue,
						  flags & CU_STREAM_NON_BLOCKING ? SIM_STREAM_NON_BLOCKING : 0);
		sim_gpu_unlock(g);
		if (s->queue == SIM_NONE) {
			handle_free(s);
			return NULL;
		}
	}
	s->ctx = ctx;
	s->flags = flags;
	s->priority = priority;
	s->legacy = legacy;
	__atomic_store_n(&s->magic, SIM_STREAM_MAGIC, __ATOMIC_RELEASE);
	return s;
}

static void add_to_ctx(struct CUstream_st *s)
{
	struct sim_time_ctx *t = s->ctx->time;
	pthread_mutex_lock(&t->lock);
	s->next = t->streams;
	t->streams = s;
	pthread_mutex_unlock(&t->lock);
}

/* False: another thread was faster. */
static bool take_from_ctx(struct CUstream_st *s)
{
	struct sim_time_ctx *t = s->ctx->time;
	struct CUstream_st **link;
	pthread_mutex_lock(&t->lock);
	for (link = &t->streams; *link && *link != s; link = &(*link)->next)
		;
	bool found = *link != NULL;
	if (found)
		*link = s->next;
	pthread_mutex_unlock(&t->lock);
	return found;
}

/* Its work still completes. */
static void stream_end(struct CUstream_st *s)
{
	struct sim_gpu *g = sim_ctx_gpu(s->ctx);
	sim_capture_drop_stream(s);
	sim_engine_enter(g);
	if (g->engine.ctx[s->ctx->time->queue].gen == s->ctx->time->queue_gen)
		sim_engine_stream_close(&g->engine, s->ctx->time->queue, s->queue);
	sim_gpu_unlock(g);
	handle_free(s);
}

CUresult sim_time_ctx_create(struct CUctx_st *ctx)
{
	struct sim_gpu *g = sim_ctx_gpu(ctx);
	struct sim_time_ctx *t = calloc(1, sizeof *t);
	if (!t)
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_init(&t->lock, NULL);
	t->owner = ctx;
	uint64_t now = sim_engine_enter(g);
	t->queue = sim_engine_ctx_open(&g->engine, (uint32_t)sim_proc_slot(),
				       sim_shared->proc[sim_proc_slot()].pid, now);
	if (t->queue != SIM_NONE)
		t->queue_gen = g->engine.ctx[t->queue].gen;
	sim_gpu_unlock(g);
	ctx->time = t;
	t->legacy = t->queue == SIM_NONE ? NULL : stream_new(ctx, 0, 0, true);
	if (!t->legacy) {
		ctx->time = NULL;
		free(t);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	pthread_mutex_lock(&pool_lock);
	t->next = contexts;
	contexts = t;
	pthread_mutex_unlock(&pool_lock);
	return CUDA_SUCCESS;
}

/* The struct stays (a worker or a waiting thread may still look at it); it holds nothing. */
void sim_time_ctx_destroy(struct CUctx_st *ctx)
{
	struct sim_time_ctx *t = ctx->time;
	struct sim_gpu *g = sim_ctx_gpu(ctx);
	struct CUstream_st *s;
	if (!t || !t->legacy)
		return;
	uint64_t now = sim_engine_enter(g);
	if (g->engine.ctx[t->queue].gen == t->queue_gen)
		sim_engine_ctx_close(&g->engine, t->queue, now);
	sim_gpu_unlock(g);
	pthread_mutex_lock(&t->lock);
	struct CUstream_st *list = t->streams;
	t->streams = NULL;
	pthread_mutex_unlock(&t->lock);
	while ((s = list)) {
		list = s->next;
		stream_end(s);
	}
	sim_capture_drop_stream(t->legacy);
	handle_free(t->legacy);
	t->legacy = NULL;
}

/* --- per-thread default streams ------------------------------------------------------------------- */

static pthread_key_t thread_key;
static pthread_once_t thread_once = PTHREAD_ONCE_INIT;
static uint64_t last_thread;

static struct CUstream_st *find_thread_stream(struct sim_time_ctx *t, uint64_t thread)
{
	struct CUstream_st *s;
	pthread_mutex_lock(&t->lock);
	for (s = t->streams; s && s->thread != thread; s = s->next)
		;
	pthread_mutex_unlock(&t->lock);
	return s;
}

/* The thread ends: its default streams go. */
static void thread_ends(void *id)
{
	pthread_mutex_lock(&pool_lock);
	struct sim_time_ctx *t = contexts;
	pthread_mutex_unlock(&pool_lock);
	for (; t; t = t->next) {
		struct CUstream_st *s = find_thread_stream(t, (uint64_t)(uintptr_t)id);
		if (s && take_from_ctx(s))
			stream_end(s);
	}
}

static void make_key(void)
{
	pthread_key_create(&thread_key, thread_ends);
}

static CUresult thread_stream(struct CUctx_st *ctx, struct CUstream_st **out)
{
	pthread_once(&thread_once, make_key);
	uint64_t id = (uint64_t)(uintptr_t)pthread_getspecific(thread_key);
	if (!id) {
		id = __atomic_add_fetch(&last_thread, 1, __ATOMIC_RELAXED);
		pthread_setspecific(thread_key, (void *)(uintptr_t)id);
	}
	struct CUstream_st *s = find_thread_stream(ctx->time, id);
	if (!s) {
		s = stream_new(ctx, 0, 0, false);
		if (!s)
			return CUDA_ERROR_OUT_OF_MEMORY;
		s->thread = id;
		add_to_ctx(s);
	}
	*out = s;
	return CUDA_SUCCESS;
}

CUresult sim_stream_of(struct CUctx_st *ctx, CUstream h, struct CUstream_st **s)
{
	if (!h || h == CU_STREAM_LEGACY_HANDLE) {
		*s = ctx->time->legacy;
		return *s ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
	}
	if (h == CU_STREAM_PER_THREAD_HANDLE)
		return thread_stream(ctx, s);
	if (__atomic_load_n(&h->magic, __ATOMIC_ACQUIRE) != SIM_STREAM_MAGIC)
		return CUDA_ERROR_INVALID_HANDLE;
	*s = h;
	return CUDA_SUCCESS;
}

/* --- entry points ---------------------------------------------------------------------------------- */

static CUresult create(CUstream *out, struct CUctx_st *ctx, unsigned flags, int priority)
{
	if (!out || (flags & ~(unsigned)CU_STREAM_NON_BLOCKING))
		return CUDA_ERROR_INVALID_VALUE;
	/* clamped to what cuCtxGetStreamPriorityRange says */
	priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
	struct CUstream_st *s = stream_new(ctx, flags, priority, false);
	if (!s)
		return CUDA_ERROR_OUT_OF_MEMORY;
	add_to_ctx(s);
	*out = s;
	return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *phStream, unsigned int Flags)
{
	SIM_CALL_CTX(cuStreamCreate, ctx);
	return create(phStream, ctx, Flags, 0);
}

CUresult cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority)
{
	SIM_CALL_CTX(cuStreamCreateWithPriority, ctx);
	return create(phStream, ctx, flags, priority);
}

static CUresult destroy(CUstream h)
{
	if (!h || h == CU_STREAM_LEGACY_HANDLE || h == CU_STREAM_PER_THREAD_HANDLE ||
	    __atomic_load_n(&h->magic, __ATOMIC_ACQUIRE) != SIM_STREAM_MAGIC || h->legacy)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!take_from_ctx(h))
		return CUDA_ERROR_INVALID_HANDLE;
	stream_end(h);
	return CUDA_SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream hStream)
{
	SIM_CALL(cuStreamDestroy_v2);
	return destroy(hStream);
}

CUresult cuStreamDestroy(CUstream hStream)
{
	SIM_CALL(cuStreamDestroy);
	return destroy(hStream);
}

CUresult cuCtxGetStreamPriorityRange(int *leastPriority, int *greatestPriority)
{
	SIM_CALL_CTX(cuCtxGetStreamPriorityRange, ctx);
	(void)ctx;
	if (leastPriority)
		*leastPriority = 0;
	if (greatestPriority)
		*greatestPriority = -5;
	return CUDA_SUCCESS;
}

/* The points that say that a stream is done: its own tail; for the legacy stream, which waits for
 * all blocking ones, theirs too. At most SIM_ENGINE_STREAMS. The GPU's lock is held. */
static uint32_t tails_of(const struct CUstream_st *s, struct sim_ticket *t)
{
	const struct sim_engine *e = &sim_ctx_gpu(s->ctx)->engine;
	uint32_t queue = s->ctx->time->queue, n = 0;
	if (e->ctx[queue].gen != s->ctx->time->queue_gen)
		return 0;
	if (!s->legacy) {
		t[0] = sim_engine_tail(e, queue, s->queue);
		return 1;
	}
	uint32_t all = sim_engine_ctx_tails(e, queue, t, SIM_ENGINE_STREAMS);
	for (uint32_t i = 0; i < all; i++)
		if (!(e->ctx[queue].stream[t[i].stream].flags & SIM_STREAM_NON_BLOCKING))
			t[n++] = t[i];
	return n;
}

static CUresult query(struct CUctx_st *ctx, CUstream h)
{
	struct sim_ticket t[SIM_ENGINE_STREAMS];
	struct CUstream_st *s;
	CUresult r = sim_stream_of(ctx, h, &s);
	if (!r)
		r = sim_capture_host_stream(s);
	if (r)
		return r;
	struct sim_gpu *g = sim_ctx_gpu(s->ctx);
	sim_engine_enter(g);
	bool passed = true;
	for (uint32_t i = 0, n = tails_of(s, t); i < n && passed; i++)
		passed = sim_engine_passed(&g->engine, &t[i]);
	sim_gpu_unlock(g);
	if (!passed)
		return CUDA_ERROR_NOT_READY;
	sim_mem_on_sync(s->ctx);
	return CUDA_SUCCESS;
}
TWINS(cuStreamQuery, query, (CUstream hStream))

static CUresult synchronize(struct CUctx_st *ctx, CUstream h)
{
	struct sim_ticket t[SIM_ENGINE_STREAMS];
	struct CUstream_st *s;
	CUresult r = sim_stream_of(ctx, h, &s);
	if (!r)
		r = sim_capture_host_stream(s);
	if (r)
		return r;
	struct CUctx_st *owner = s->ctx;
	struct sim_gpu *g = sim_ctx_gpu(owner);
	sim_engine_enter(g);
	uint32_t n = tails_of(s, t);
	sim_gpu_unlock(g);
	for (uint32_t i = 0; i < n && !r; i++)
		r = sim_wait(g, &t[i]);
	if (r)
		return r;
	sim_mem_on_sync(owner);
	return owner->sticky ? (CUresult)owner->sticky : CUDA_SUCCESS;
}
TWINS(cuStreamSynchronize, synchronize, (CUstream hStream))

CUresult sim_ctx_sync(struct CUctx_st *ctx)
{
	CUresult r = sim_capture_host_ctx(ctx);
	if (!r)
		r = sim_wait_ctx(ctx);
	if (r)
		return r;
	sim_mem_on_sync(ctx);
	return ctx->sticky ? (CUresult)ctx->sticky : CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void)
{
	SIM_CALL_CTX(cuCtxSynchronize, ctx);
	return sim_ctx_sync(ctx);
}

static CUresult get_flags(struct CUctx_st *ctx, CUstream h, unsigned int *flags)
{
	struct CUstream_st *s;
	CUresult r = sim_stream_of(ctx, h, &s);
	if (!r && !flags)
		r = CUDA_ERROR_INVALID_VALUE;
	if (!r)
		*flags = s->flags;
	return r;
}
TWINS(cuStreamGetFlags, get_flags, (CUstream hStream, unsigned int *flags), flags)

static CUresult get_priority(struct CUctx_st *ctx, CUstream h, int *priority)
{
	struct CUstream_st *s;
	CUresult r = sim_stream_of(ctx, h, &s);
	if (!r && !priority)
		r = CUDA_ERROR_INVALID_VALUE;
	if (!r)
		*priority = s->priority;
	return r;
}
TWINS(cuStreamGetPriority, get_priority, (CUstream hStream, int *priority), priority)

static CUresult get_id(struct CUctx_st *ctx, CUstream h, unsigned long long *id)
{
	struct CUstream_st *s;
	CUresult r = sim_stream_of(ctx, h, &s);
	if (!r && !id)
		r = CUDA_ERROR_INVALID_VALUE;
	if (!r)
		*id = s->id;
	return r;
}
TWINS(cuStreamGetId, get_id, (CUstream hStream, unsigned long long *streamId), streamId)

static CUresult get_ctx(struct CUctx_st *ctx, CUstream h, CUcontext *out)
{
	struct CUstream_st *s;
	CUresult r = sim_stream_of(ctx, h, &s);
	if (!r && !out)
		r = CUDA_ERROR_INVALID_VALUE;
	if (!r)
		*out = s->ctx;
	return r;
}
TWINS(cuStreamGetCtx, get_ctx, (CUstream hStream, CUcontext *pctx), pctx)

static CUresult get_attribute(struct CUctx_st *ctx, CUstream h, CUstreamAttrID id, CUstreamAttrValue *v)
{
	struct CUstream_st *s;
	CUresult r = sim_stream_of(ctx, h, &s);
	if (r)
		return r;
	if (!v || (int)id <= 0 || (int)id >= CU_LAUNCH_ATTRIBUTE_MAX)
		return CUDA_ERROR_INVALID_VALUE;
	if (id == CU_LAUNCH_ATTRIBUTE_PRIORITY)
		v->priority = s->priority;
	else
		*v = s->attr[(unsigned)id % 8];
	return CUDA_SUCCESS;
}
TWINS(cuStreamGetAttribute, get_attribute,
      (CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue *value_out), attr, value_out)

static CUresult set_attribute(struct CUctx_st *ctx, CUstream h, CUstreamAttrID id,
			      const CUstreamAttrValue *v)
{
	struct CUstream_st *s;
	CUresult r = sim_stream_of(ctx, h, &s);
	if (r)
		return r;
	if (!v || (int)id <= 0 || (int)id >= CU_LAUNCH_ATTRIBUTE_MAX)
		return CUDA_ERROR_INVALID_VALUE;
	if (id == CU_LAUNCH_ATTRIBUTE_PRIORITY)
		s->priority = v->priority > 0 ? 0 : v->priority < -5 ? -5 : v->priority;
	else
		s->attr[(unsigned)id % 8] = *v;
	return CUDA_SUCCESS;
}
TWINS(cuStreamSetAttribute, set_attribute,
      (CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue *value), attr, value)

static CUresult copy_attributes(struct CUctx_st *ctx, CUstream dst, CUstream src)
{
	struct CUstream_st *d, *s;
	CUresult r = sim_stream_of(ctx, dst, &d);
	if (!r)
		r = sim_stream_of(ctx, src, &s);
	if (r)
		return r;
	memcpy(d->attr, s->attr, sizeof d->attr);
	return CUDA_SUCCESS;
}

CUresult cuStreamCopyAttributes(CUstream dst, CUstream src)
{
	SIM_CALL_CTX(cuStreamCopyAttributes, ctx);
	return copy_attributes(ctx, dst, src);
}

CUresult cuStreamCopyAttributes_ptsz(CUstream dst, CUstream src)
{
	SIM_CALL_CTX(cuStreamCopyAttributes_ptsz, ctx);
	return copy_attributes(ctx, sim_pt(dst), sim_pt(src));
}
