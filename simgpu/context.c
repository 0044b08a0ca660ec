/* Contexts: primary ones with a count of users, others, and each thread's stack of them. */
#include <stdlib.h>
#include "mem.h"

#define STACK_DEPTH 64

static __thread struct CUctx_st *stack[STACK_DEPTH];
static __thread int depth;
static pthread_mutex_t ctx_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct CUctx_st *contexts; /* all that ever were, dead ones stay */
static struct CUctx_st *primary[SIM_MAX_GPUS]; /* by ordinal */
static unsigned primary_flags[SIM_MAX_GPUS];
static uint32_t next_id = 1;

struct CUctx_st *sim_ctx_current(void)
{
	return depth ? stack[depth - 1] : NULL;
}

struct CUctx_st *sim_ctx_of(CUcontext h)
{
	struct CUctx_st *c;
	for (c = __atomic_load_n(&contexts, __ATOMIC_ACQUIRE); c; c = c->next)
		if (c == h)
			return c->dead ? NULL : c;
	return NULL;
}

CUresult sim_ctx_need(struct CUctx_st **ctx)
{
	struct CUctx_st *c = sim_ctx_current();
	if (!c)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (c->dead)
		return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	if (c->sticky)
		return (CUresult)c->sticky;
	if (__builtin_expect(sim_ctx_gpu(c)->lost, 0))
		return CUDA_ERROR_UNKNOWN;
	*ctx = c;
	return CUDA_SUCCESS;
}

static void count_context(struct CUctx_st *c, int by)
{
	sim_lock();
	struct sim_proc_gpu *p = &sim_shared->proc[sim_proc_slot()].gpu[c->gpu];
	p->n_contexts += (uint64_t)(int64_t)by;
	p->contexts += (uint64_t)((int64_t)by * (int64_t)sim_ctx_gpu(c)->model.context_bytes);
	if (!p->start_us)
		p->start_us = sim_realtime_us();
	sim_unlock();
}

static void set_limits(struct CUctx_st *c)
{
	c->limit[CU_LIMIT_STACK_SIZE] = 1024;
	c->limit[CU_LIMIT_PRINTF_FIFO_SIZE] = 1 << 20;
	c->limit[CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20;
	c->limit[CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH] = 2;
	c->limit[CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048;
	c->limit[CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64;
}

/* ctx_mutex held. */
static CUresult make(CUdevice dev, unsigned flags, bool is_primary, struct CUctx_st **out)
{
	int gpu = sim_dev_gpu(dev);
	if (sim_shared->gpu[gpu].lost)
		return CUDA_ERROR_UNKNOWN;
	uint64_t bytes = sim_shared->gpu[gpu].model.context_bytes;
	struct CUctx_st *c = calloc(1, sizeof *c);
	if (!c)
		return CUDA_ERROR_OUT_OF_MEMORY;
	c->magic = SIM_CTX_MAGIC;
	c->dev = dev;
	c->gpu = gpu;
	c->flags = flags;
	c->primary = is_primary;
	c->api_version = 3020;
	c->shared_config = 1;
	set_limits(c);
	mem_lock();
	bool fits = mem_charge(gpu, bytes);
	mem_unlock();
	CUresult e = fits ? sim_time_ctx_create(c) : CUDA_ERROR_OUT_OF_MEMORY;
	if (e) {
		if (fits)
			sim_mem_uncharge(gpu, bytes);
		free(c);
		return e;
	}
	count_context(c, 1);
	c->id = next_id++;
	c->next = contexts;
	__atomic_store_n(&contexts, c, __ATOMIC_RELEASE);
	*out = c;
	return CUDA_SUCCESS;
}

/* ctx_mutex held. */
static void end(struct CUctx_st *c)
{
	c->dead = true;
	sim_time_ctx_destroy(c);
	module_ctx_end(c);
	array_ctx_end(c);
	mem_ctx_end(c);
	count_context(c, -1);
	sim_mem_uncharge(c->gpu, sim_ctx_gpu(c)->model.context_bytes);
}

static CUresult create(CUcontext *pctx, unsigned flags, CUdevice dev)
{
	if (!pctx || (flags & 7) > 4 || flags & ~0xffu)
		return CUDA_ERROR_INVALID_VALUE;
	if (sim_dev_gpu(dev) < 0)
		return CUDA_ERROR_INVALID_DEVICE;
	if (depth == STACK_DEPTH)
		return CUDA_ERROR_OUT_OF_MEMORY;
	struct CUctx_st *c;
	pthread_mutex_lock(&ctx_mutex);
	CUresult e = make(dev, flags, false, &c);
	pthread_mutex_unlock(&ctx_mutex);
	if (e)
		return e;
	stack[depth++] = c;
	*pctx = c;
	return CUDA_SUCCESS;
}

CUresult cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
	SIM_CALL(cuCtxCreate);
	CUresult e = create(pctx, flags, dev);
	if (!e)
		(*pctx)->api_version = 3010;
	return e;
}

CUresult cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
	SIM_CALL(cuCtxCreate_v2);
	return create(pctx, flags, dev);
}

CUresult cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams, unsigned int flags,
			CUdevice dev)
{
	SIM_CALL(cuCtxCreate_v3);
	if (numParams < 0 || (numParams && !paramsArray))
		return CUDA_ERROR_INVALID_VALUE;
	if (numParams) /* SM affinity needs MPS */
		return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
	return create(pctx, flags, dev);
}

CUresult cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev)
{
	SIM_CALL(cuCtxCreate_v4);
	(void)ctxCreateParams;
	return create(pctx, flags, dev);
}

static CUresult destroy(CUcontext h)
{
	struct CUctx_st *c = sim_ctx_of(h);
	if (!c || c->primary)
		return c ? CUDA_ERROR_INVALID_CONTEXT : h ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&ctx_mutex);
	bool mine = !c->dead;
	if (mine)
		end(c);
	pthread_mutex_unlock(&ctx_mutex);
	if (mine && depth && stack[depth - 1] == c)
		depth--;
	return mine ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult cuCtxDestroy_v2(CUcontext ctx)
{
	SIM_CALL(cuCtxDestroy_v2);
	return destroy(ctx);
}

CUresult cuCtxDestroy(CUcontext ctx)
{
	SIM_CALL(cuCtxDestroy);
	return destroy(ctx);
}

CUresult cuCtxAttach(CUcontext *pctx, unsigned int flags)
{
	SIM_CALL_CTX(cuCtxAttach, c);
	if (!pctx || flags)
		return CUDA_ERROR_INVALID_VALUE;
	c->refs++;
	*pctx = c;
	return CUDA_SUCCESS;
}

CUresult cuCtxDetach(CUcontext ctx)
{
	SIM_CALL(cuCtxDetach);
	struct CUctx_st *c = sim_ctx_of(ctx);
	if (!c || c->primary)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (c->refs > 0) {
		c->refs--;
		return CUDA_SUCCESS;
	}
	return destroy(ctx);
}

/* --- primary contexts ---------------------------------------------------------------------------- */

CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
	SIM_CALL(cuDevicePrimaryCtxRetain);
	if (!pctx)
		return CUDA_ERROR_INVALID_VALUE;
	if (sim_dev_gpu(dev) < 0)
		return CUDA_ERROR_INVALID_DEVICE;
	CUresult e = CUDA_SUCCESS;
	pthread_mutex_lock(&ctx_mutex);
	if (!primary[dev] || primary[dev]->dead)
		e = make(dev, primary_flags[dev], true, &primary[dev]);
	if (!e) {
		primary[dev]->refs++;
		*pctx = primary[dev];
	}
	pthread_mutex_unlock(&ctx_mutex);
	return e;
}

static CUresult primary_drop(CUdevice dev, bool reset)
{
	if (sim_dev_gpu(dev) < 0)
		return CUDA_ERROR_INVALID_DEVICE;
	CUresult e = CUDA_SUCCESS;
	pthread_mutex_lock(&ctx_mutex);
	struct CUctx_st *c = primary[dev];
	bool active = c && !c->dead;
	if (active && (reset || --c->refs == 0))
		end(c);
	else if (!active && !reset)
		e = CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_unlock(&ctx_mutex);
	return e;
}

#define PRIMARY(name, reset)                                                                       \
	CUresult name(CUdevice dev)                                                                \
	{                                                                                          \
		SIM_CALL(name);                                                                    \
		return primary_drop(dev, reset);                                                   \
	}
PRIMARY(cuDevicePrimaryCtxRelease, false)
PRIMARY(cuDevicePrimaryCtxRelease_v2, false)
PRIMARY(cuDevicePrimaryCtxReset, true)
PRIMARY(cuDevicePrimaryCtxReset_v2, true)

static CUresult primary_set_flags(CUdevice dev, unsigned flags)
{
	if (sim_dev_gpu(dev) < 0)
		return CUDA_ERROR_INVALID_DEVICE;
	if ((flags & 7) > 4 || flags & ~0xffu)
		return CUDA_ERROR_INVALID_VALUE;
	primary_flags[dev] = flags;
	if (primary[dev] && !primary[dev]->dead)
		primary[dev]->flags = flags;
	return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned int flags)
{
	SIM_CALL(cuDevicePrimaryCtxSetFlags);
	return primary_set_flags(dev, flags);
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags)
{
	SIM_CALL(cuDevicePrimaryCtxSetFlags_v2);
	return primary_set_flags(dev, flags);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
{
	SIM_CALL(cuDevicePrimaryCtxGetState);
	if (sim_dev_gpu(dev) < 0)
		return CUDA_ERROR_INVALID_DEVICE;
	if (flags)
		*flags = primary_flags[dev];
	if (active)
		*active = primary[dev] && !primary[dev]->dead;
	return CUDA_SUCCESS;
}

/* --- the stack ----------------------------------------------------------------------------------- */

static CUresult push(CUcontext h)
{
	struct CUctx_st *c = sim_ctx_of(h);
	if (!c)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (depth == STACK_DEPTH)
		return CUDA_ERROR_INVALID_CONTEXT;
	stack[depth++] = c;
	return CUDA_SUCCESS;
}

static CUresult pop(CUcontext *pctx)
{
	if (!depth)
		return CUDA_ERROR_INVALID_CONTEXT;
	depth--;
	if (pctx)
		*pctx = stack[depth];
	return CUDA_SUCCESS;
}

#define STACK_CALL(name, type, fn)                                                                 \
	CUresult name(type arg)                                                                    \
	{                                                                                          \
		SIM_CALL(name);                                                                    \
		return fn(arg);                                                                    \
	}
STACK_CALL(cuCtxPushCurrent, CUcontext, push)
STACK_CALL(cuCtxPushCurrent_v2, CUcontext, push)
STACK_CALL(cuCtxPopCurrent, CUcontext *, pop)
STACK_CALL(cuCtxPopCurrent_v2, CUcontext *, pop)

CUresult cuCtxSetCurrent(CUcontext ctx)
{
	SIM_CALL(cuCtxSetCurrent);
	if (!ctx) {
		depth -= depth > 0;
		return CUDA_SUCCESS;
	}
	struct CUctx_st *c = sim_ctx_of(ctx);
	if (!c)
		return CUDA_ERROR_INVALID_CONTEXT;
	depth += !depth;
	stack[depth - 1] = c;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *pctx)
{
	SIM_CALL(cuCtxGetCurrent);
	if (!pctx)
		return CUDA_ERROR_INVALID_VALUE;
	*pctx = sim_ctx_current();
	return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
	SIM_CALL_CTX(cuCtxGetDevice, c);
	if (!device)
		return CUDA_ERROR_INVALID_VALUE;
	*device = c->dev;
	return CUDA_SUCCESS;
}

/* --- properties ---------------------------------------------------------------------------------- */

CUresult cuCtxGetFlags(unsigned int *flags)
{
	SIM_CALL_CTX(cuCtxGetFlags, c);
	if (!flags)
		return CUDA_ERROR_INVALID_VALUE;
	*flags = c->flags;
	return CUDA_SUCCESS;
}

CUresult cuCtxSetFlags(unsigned int flags)
{
	SIM_CALL_CTX(cuCtxSetFlags, c);
	c->flags = flags;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext ctx, unsigned long long *ctxId)
{
	SIM_CALL(cuCtxGetId);
	struct CUctx_st *c = ctx ? sim_ctx_of(ctx) : sim_ctx_current();
	if (!ctxId)
		return CUDA_ERROR_INVALID_VALUE;
	if (!c)
		return ctx ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
	*ctxId = c->id;
	return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
	SIM_CALL_CTX(cuCtxSetLimit, c);
	if ((unsigned)limit >= CU_LIMIT_MAX)
		return CUDA_ERROR_UNSUPPORTED_LIMIT;
	c->limit[limit] = value;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *pvalue, CUlimit limit)
{
	SIM_CALL_CTX(cuCtxGetLimit, c);
	if (!pvalue)
		return CUDA_ERROR_INVALID_VALUE;
	if ((unsigned)limit >= CU_LIMIT_MAX)
		return CUDA_ERROR_UNSUPPORTED_LIMIT;
	*pvalue = c->limit[limit];
	return CUDA_SUCCESS;
}

#define CONFIG(get, set, type, field)                                                              \
	CUresult get(type *out)                                                                    \
	{                                                                                          \
		SIM_CALL_CTX(get, c);                                                              \
		if (!out)                                                                          \
			return CUDA_ERROR_INVALID_VALUE;                                           \
		*out = (type)c->field;                                                             \
		return CUDA_SUCCESS;                                                               \
	}                                                                                          \
	CUresult set(type value)                                                                   \
	{                                                                                          \
		SIM_CALL_CTX(set, c);                                                              \
		c->field = (int)value;                                                             \
		return CUDA_SUCCESS;                                                               \
	}
CONFIG(cuCtxGetCacheConfig, cuCtxSetCacheConfig, CUfunc_cache, cache_config)
CONFIG(cuCtxGetSharedMemConfig, cuCtxSetSharedMemConfig, CUsharedconfig, shared_config)

CUresult cuCtxGetApiVersion(CUcontext ctx, unsigned int *version)
{
	SIM_CALL(cuCtxGetApiVersion);
	struct CUctx_st *c = ctx ? sim_ctx_of(ctx) : sim_ctx_current();
	if (!c)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!version)
		return CUDA_ERROR_INVALID_VALUE;
	*version = c->api_version;
	return CUDA_SUCCESS;
}

CUresult cuCtxResetPersistingL2Cache(void)
{
	SIM_CALL_CTX(cuCtxResetPersistingL2Cache, c);
	(void)c;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetExecAffinity(CUexecAffinityParam *pExecAffinity, CUexecAffinityType type)
{
	SIM_CALL_CTX(cuCtxGetExecAffinity, c);
	if (!pExecAffinity || type != CU_EXEC_AFFINITY_TYPE_SM_COUNT)
		return CUDA_ERROR_INVALID_VALUE;
	pExecAffinity->type = type;
	pExecAffinity->param.smCount.val = sim_ctx_gpu(c)->model.sms;
	return CUDA_SUCCESS;
}

static CUresult peer(CUcontext other, unsigned flags, bool enable)
{
	struct CUctx_st *c, *o = sim_ctx_of(other);
	CUresult e = sim_ctx_need(&c);
	if (e)
		return e;
	if (!o || o == c)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	uint64_t bit = 1ull << o->dev;
	if (o->dev == c->dev)
		return CUDA_ERROR_INVALID_DEVICE;
	if (enable == !!(c->peers & bit))
		return enable ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
	c->peers ^= bit;
	return CUDA_SUCCESS;
}

CUresult cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags)
{
	SIM_CALL(cuCtxEnablePeerAccess);
	return peer(peerContext, Flags, true);
}

CUresult cuCtxDisablePeerAccess(CUcontext peerContext)
{
	SIM_CALL(cuCtxDisablePeerAccess);
	return peer(peerContext, 0, false);
}
