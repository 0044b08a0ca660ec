#include "compat.h"
#include "context.h"
#include <stdlib.h>
#include "account.h"
#include "device.h"
#include "meter.h"
#include "pool.h"
#include "slice.h"
#include "trace.h"

/* In-kernel malloc() starts with this heap, which the figure of a context includes. */
#define HEAP_DEFAULT (8ull << 20)

struct context {
	CUcontext handle;
	struct context *next;
	int dev;
	uint32_t units; /* charged for the context itself */
	uint32_t heap;	/* charged for a heap beyond the default */
	bool primary;
};

/* Guards the list, and for primary contexts keeps "ask the driver, then adjust" whole. */
static struct tr_lock contexts_lock;
static struct context *contexts;

void tr_contexts_after_fork(void)
{
	contexts_lock.word = 0;
	contexts = NULL;
}

static uint32_t context_units(int dev)
{
	return tr_units(__atomic_load_n(&tr_limits()->dev[dev].context_bytes, __ATOMIC_RELAXED));
}

static void note_charge(int dev, int64_t units)
{
	struct tr_slot_dev *sd = &tr_ledger()->slot[tr_slot_index()].dev[dev];
	__atomic_fetch_add(&sd->context, (uint64_t)(units * (int64_t)TR_UNIT), __ATOMIC_RELAXED);
}

static bool charge(int dev, uint32_t units)
{
	if (!tr_charge(dev, units))
		return false;
	note_charge(dev, units);
	return true;
}

static void uncharge(int dev, uint32_t units)
{
	tr_uncharge(dev, units);
	note_charge(dev, -(int64_t)units);
}

/* The caller holds contexts_lock. */
static bool add(CUcontext handle, int dev, uint32_t units, bool primary)
{
	struct context *c = calloc(1, sizeof *c);
	if (c == NULL)
		return false;
	*c = (struct context){
		.handle = handle, .next = contexts, .dev = dev, .units = units, .primary = primary};
	contexts = c;
	TR_TRACE("context on device %d charged %llu MiB", dev,
		 (unsigned long long)(units * TR_UNIT) >> 20);
	return true;
}

static struct context *take(struct context **at)
{
	struct context *c = *at;
	if (c != NULL)
		*at = c->next;
	return c;
}

static struct context **find(CUcontext handle)
{
	struct context **at = &contexts;
	while (*at != NULL && (*at)->handle != handle)
		at = &(*at)->next;
	return at;
}

static struct context **find_primary(int dev)
{
	struct context **at = &contexts;
	while (*at != NULL && !((*at)->primary && (*at)->dev == dev))
		at = &(*at)->next;
	return at;
}

/* The driver has destroyed the context, and with it what was allocated in it. */
static void gone(struct context *c)
{
	if (c == NULL)
		return;
	tr_context_freed(c->handle);
	tr_pools_settle(c->dev);
	uncharge(c->dev, c->units + c->heap);
	free(c);
}

/* Which slice device a context may be made on. */
static CUresult enter_device(CUdevice dev, int *index)
{
	CUresult r = tr_enter();
	if (r != CUDA_SUCCESS)
		return r;
	*index = tr_device_index(dev);
	if (*index >= 0)
		return CUDA_SUCCESS;
	/* Before cuInit there are no devices; the driver's own error says so. */
	return tr_visible_devices == 0 ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_INVALID_DEVICE;
}

/* --- contexts of their own ----------------------------------------------------------------- */

static CUresult before_create(CUdevice dev, int *index, uint32_t *units)
{
	CUresult r = enter_device(dev, index);
	if (r != CUDA_SUCCESS)
		return r;
	*units = context_units(*index);
	return charge(*index, *units) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult after_create(CUresult r, const CUcontext *ctx, int index, uint32_t units)
{
	if (r != CUDA_SUCCESS) {
		uncharge(index, units);
		return r;
	}
	tr_lock(&contexts_lock);
	add(*ctx, index, units, false);
	tr_unlock(&contexts_lock);
	return r;
}

#define CREATE(name, dev, ...)                                                                     \
	do {                                                                                       \
		int index;                                                                         \
		uint32_t units;                                                                    \
		if (REAL(name) == NULL)                                                            \
			return CUDA_ERROR_NOT_SUPPORTED;                                           \
		CUresult r = before_create(dev, &index, &units);                                   \
		if (r != CUDA_SUCCESS)                                                             \
			return r;                                                                  \
		return after_create(REAL(name)(pctx, __VA_ARGS__), pctx, index, units);            \
	} while (0)

CUresult EXPORT cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
	CREATE(cuCtxCreate, dev, flags, dev);
}

CUresult EXPORT cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
	CREATE(cuCtxCreate_v2, dev, flags, dev);
}

CUresult EXPORT cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams,
			       unsigned int flags, CUdevice dev)
{
	CREATE(cuCtxCreate_v3, dev, paramsArray, numParams, flags, dev);
}

CUresult EXPORT cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *ctxCreateParams,
			       unsigned int flags, CUdevice dev)
{
	CREATE(cuCtxCreate_v4, dev, ctxCreateParams, flags, dev);
}

CUresult EXPORT cuGLCtxCreate(CUcontext *pctx, unsigned int Flags, CUdevice device)
{
	CREATE(cuGLCtxCreate, device, Flags, device);
}

CUresult EXPORT cuGLCtxCreate_v2(CUcontext *pctx, unsigned int Flags, CUdevice device)
{
	CREATE(cuGLCtxCreate_v2, device, Flags, device);
}

CUresult EXPORT cuVDPAUCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice device,
				 uint32_t vdpDevice, void *vdpGetProcAddress)
{
	CREATE(cuVDPAUCtxCreate, device, flags, device, vdpDevice, vdpGetProcAddress);
}

CUresult EXPORT cuVDPAUCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice device,
				    uint32_t vdpDevice, void *vdpGetProcAddress)
{
	CREATE(cuVDPAUCtxCreate_v2, device, flags, device, vdpDevice, vdpGetProcAddress);
}

static CUresult after_destroy(CUresult r, struct context *c)
{
	if (r == CUDA_SUCCESS) {
		gone(c);
	} else if (c != NULL) {
		tr_lock(&contexts_lock);
		c->next = contexts;
		contexts = c;
		tr_unlock(&contexts_lock);
	}
	return r;
}

/* Takes the record before the driver destroys the context; pools and the meter let go of its
 * events. */
static struct context *forget(CUcontext ctx)
{
	tr_pools_context_ending(ctx);
	tr_meter_context_gone(ctx);
	tr_lock(&contexts_lock);
	struct context **at = find(ctx);
	struct context *c = *at != NULL && !(*at)->primary ? take(at) : NULL;
	tr_unlock(&contexts_lock);
	return c;
}

CUresult EXPORT cuCtxDestroy_v2(CUcontext ctx)
{
	struct context *c = forget(ctx);
	return after_destroy(REAL(cuCtxDestroy_v2)(ctx), c);
}

CUresult EXPORT cuCtxDestroy(CUcontext ctx)
{
	struct context *c = forget(ctx);
	return after_destroy(REAL(cuCtxDestroy)(ctx), c);
}

/* A detach destroys only with the last use; contexts attached more than once are rare and old. */
CUresult EXPORT cuCtxDetach(CUcontext ctx)
{
	struct context *c = forget(ctx);
	return after_destroy(REAL(cuCtxDetach)(ctx), c);
}

/* --- primary contexts: the driver knows whether one is active ------------------------------ */

static bool active(CUdevice dev)
{
	unsigned int flags;
	int on = 0;
	return REAL(cuDevicePrimaryCtxGetState)(dev, &flags, &on) == CUDA_SUCCESS && on != 0;
}

/* Drops the record when the driver says that the primary context is no more. */
static void settle_primary(CUdevice dev)
{
	int index = tr_device_index(dev);
	if (index < 0)
		return;
	tr_lock(&contexts_lock);
	struct context *c = active(dev) ? NULL : take(find_primary(index));
	tr_unlock(&contexts_lock);
	gone(c);
}

/* Charges before a call that may activate the primary context of `dev`. *units: what was charged,
 * 0 when it is active already. */
static CUresult before_primary(CUdevice dev, int *index, uint32_t *units)
{
	CUresult r = enter_device(dev, index);
	*units = 0;
	if (r != CUDA_SUCCESS)
		return r;
	tr_lock(&contexts_lock);
	bool known = *find_primary(*index) != NULL;
	tr_unlock(&contexts_lock);
	if (known)
		return CUDA_SUCCESS;
	*units = context_units(*index);
	if (charge(*index, *units))
		return CUDA_SUCCESS;
	*units = 0;
	/* Another thread may have made it with the last of the memory. */
	return active(dev) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* The record, if there is none yet. What was charged for nothing goes back; what was not charged,
 * as the context was active before the call and ended meanwhile, is charged now. */
static void after_primary(CUresult r, CUcontext ctx, int index, uint32_t units)
{
	uint32_t need = context_units(index);
	tr_lock(&contexts_lock);
	bool missing = r == CUDA_SUCCESS && ctx != NULL && *find_primary(index) == NULL;
	if (missing)
		missing = add(ctx, index, units == 0 ? need : units, true);
	tr_unlock(&contexts_lock);
	if (!missing && units > 0)
		uncharge(index, units);
	if (missing && units == 0) {
		tr_charge_taken(index, need);
		note_charge(index, need);
	}
}

CUresult EXPORT cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
	int index;
	uint32_t units;
	CUresult r = before_primary(dev, &index, &units);
	if (r != CUDA_SUCCESS)
		return r;
	r = REAL(cuDevicePrimaryCtxRetain)(pctx, dev);
	after_primary(r, r == CUDA_SUCCESS ? *pctx : NULL, index, units);
	return r;
}

/* This may be the end of the primary context, which only the driver knows. The meter lets go of its
 * events; if the context lives on it makes new ones. */
static void may_end(CUdevice dev)
{
	int index = tr_limits() == NULL ? -1 : tr_device_index(dev);
	if (index < 0)
		return;
	tr_lock(&contexts_lock);
	struct context *c = *find_primary(index);
	CUcontext handle = c == NULL ? NULL : c->handle;
	tr_unlock(&contexts_lock);
	if (handle == NULL)
		return;
	tr_pools_context_ending(handle);
	tr_meter_context_gone(handle);
}

static CUresult ended(CUresult r, CUdevice dev)
{
	if (r == CUDA_SUCCESS && tr_limits() != NULL)
		settle_primary(dev);
	return r;
}

CUresult EXPORT cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
	may_end(dev);
	return ended(REAL(cuDevicePrimaryCtxRelease_v2)(dev), dev);
}

CUresult EXPORT cuDevicePrimaryCtxRelease(CUdevice dev)
{
	may_end(dev);
	return ended(REAL(cuDevicePrimaryCtxRelease)(dev), dev);
}

CUresult EXPORT cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
	may_end(dev);
	return ended(REAL(cuDevicePrimaryCtxReset_v2)(dev), dev);
}

CUresult EXPORT cuDevicePrimaryCtxReset(CUdevice dev)
{
	may_end(dev);
	return ended(REAL(cuDevicePrimaryCtxReset)(dev), dev);
}

/* A green context is a part of the primary context, which it retains. */
CUresult EXPORT cuGreenCtxCreate(CUgreenCtx *phCtx, CUdevResourceDesc desc, CUdevice dev,
				 unsigned int flags)
{
	int index;
	uint32_t units;
	CUcontext primary = NULL;
	if (REAL(cuGreenCtxCreate) == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult r = before_primary(dev, &index, &units);
	if (r != CUDA_SUCCESS)
		return r;
	r = REAL(cuGreenCtxCreate)(phCtx, desc, dev, flags);
	if (r == CUDA_SUCCESS && REAL(cuDevicePrimaryCtxRetain)(&primary, dev) == CUDA_SUCCESS)
		REAL(cuDevicePrimaryCtxRelease_v2)(dev);
	after_primary(r, primary, index, units);
	return r;
}

CUresult EXPORT cuGreenCtxDestroy(CUgreenCtx hCtx)
{
	CUresult r = REAL(cuGreenCtxDestroy)(hCtx);
	for (int i = 0; r == CUDA_SUCCESS && i < tr_visible_devices; i++)
		settle_primary(tr_visible_handle(i));
	return r;
}

/* --- the heap of in-kernel malloc() -------------------------------------------------------- */

CUresult EXPORT cuCtxSetLimit(CUlimit limit, size_t value)
{
	CUresult r;
	CUcontext ctx = NULL;
	int dev = limit == CU_LIMIT_MALLOC_HEAP_SIZE ? tr_enter_current(&r) : -1;
	if (dev < 0 || REAL(cuCtxGetCurrent)(&ctx) != CUDA_SUCCESS)
		return REAL(cuCtxSetLimit)(limit, value);
	uint32_t want = value > HEAP_DEFAULT
				? tr_units(tr_round_up(value - HEAP_DEFAULT, TR_BLOCK))
				: 0;
	tr_lock(&contexts_lock);
	struct context *c = *find(ctx);
	uint32_t have = c == NULL ? 0 : c->heap;
	tr_unlock(&contexts_lock);
	if (c == NULL)
		return REAL(cuCtxSetLimit)(limit, value);
	if (want > have && !charge(dev, want - have))
		return CUDA_ERROR_OUT_OF_MEMORY;
	r = REAL(cuCtxSetLimit)(limit, value);
	if (r != CUDA_SUCCESS && want > have)
		uncharge(dev, want - have);
	if (r != CUDA_SUCCESS)
		return r;
	if (want < have)
		uncharge(dev, have - want);
	tr_lock(&contexts_lock);
	c = *find(ctx);
	if (c != NULL)
		c->heap = want;
	tr_unlock(&contexts_lock);
	return r;
}
