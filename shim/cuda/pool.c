#include "compat.h"
#define _GNU_SOURCE
#include "pool.h"
#include <stdlib.h>
#include "account.h"
#include "device.h"
#include "graphmem.h"
#include "slice.h"
#include "trace.h"

/* Pools grow in chunks of this size (observed; documented nowhere). When a driver's chunks are
 * larger, settling learns it. */
#define CHUNK_FIRST (32ull << 20)

struct pool {
	CUmemoryPool handle;
	struct pool *next;
	uint32_t charged;     /* units: reserved by the driver + in_flight */
	uint32_t in_flight;   /* units reserved by calls under way */
	uint32_t outstanding; /* allocations not freed, and calls under way */
	int dev;	      /* -1: not device memory, never charged */
	bool destroyed;	      /* lives until the last allocation is freed */
	bool exported;
	uint32_t shared;      /* of an exported pool: units that others may hold, the reserved ones */
};

/* Guards the list and keeps "ask the driver, then adjust" whole. Not held while allocating. */
static struct tr_lock pools_lock;
static struct pool *pools;
static uint64_t chunk = CHUNK_FIRST;
static bool dirty; /* something was freed since the last settling */

/* Plain memory freed in stream order is the driver's again only when the stream gets there, so it
 * stays charged until an event behind it has passed. */
struct late_free {
	struct tr_entry entry;
	CUevent event;
	CUcontext ctx; /* of the event */
	struct late_free *next;
};
static struct late_free *late;

void tr_pools_after_fork(void)
{
	pools_lock.word = 0;
	pools = NULL;
	late = NULL;
}

static struct pool *find(CUmemoryPool handle)
{
	for (struct pool *p = pools; p != NULL; p = p->next)
		if (p->handle == handle && !p->destroyed)
			return p;
	return NULL;
}

static struct pool *add(CUmemoryPool handle, int dev)
{
	struct pool *p = calloc(1, sizeof *p);
	if (p == NULL)
		return NULL;
	p->handle = handle;
	p->dev = dev;
	p->next = pools;
	pools = p;
	return p;
}

/* What an exported pool gives back may live on with those who imported it; what is only reserved
 * for calls under way may not. */
static void share(struct pool *p, uint32_t reserved)
{
	if (reserved > p->shared) {
		tr_exported(p->dev, (int64_t)((reserved - p->shared) * TR_UNIT));
	} else if (reserved < p->shared) {
		tr_uncharge_exported(p->dev, p->shared - reserved);
		p->charged -= p->shared - reserved;
	}
	p->shared = reserved;
}

/* The driver has so many units reserved. */
static void adjust(struct pool *p, uint32_t reserved)
{
	if (p->dev < 0)
		return;
	if (p->exported)
		share(p, reserved);
	uint32_t target = reserved + p->in_flight;
	if (target > p->charged)
		tr_charge_taken(p->dev, target - p->charged);
	else
		tr_uncharge(p->dev, p->charged - target);
	p->charged = target;
}

/* The caller holds pools_lock. False: the driver does not tell. */
static bool settle(struct pool *p)
{
	cuuint64_t reserved = 0;
	if (p->dev < 0 || p->destroyed ||
	    REAL(cuMemPoolGetAttribute)(p->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
					&reserved) != CUDA_SUCCESS)
		return false;
	adjust(p, tr_units(reserved));
	return true;
}

static void late_frees_settle(void);

void tr_pools_settle(int dev)
{
	late_frees_settle();
	tr_lock(&pools_lock);
	for (struct pool *p = pools; p != NULL; p = p->next)
		if (p->dev == dev)
			settle(p);
	tr_unlock(&pools_lock);
}

void tr_pools_trim(int dev)
{
	late_frees_settle();
	tr_lock(&pools_lock);
	for (struct pool *p = pools; p != NULL; p = p->next)
		if (p->dev == dev && !p->destroyed) {
			REAL(cuMemPoolTrimTo)(p->handle, 0);
			settle(p);
		}
	tr_unlock(&pools_lock);
}

void tr_pools_after_sync(void)
{
	if (!__atomic_load_n(&dirty, __ATOMIC_RELAXED) ||
	    !__atomic_exchange_n(&dirty, false, __ATOMIC_RELAXED))
		return;
	late_frees_settle();
	tr_lock(&pools_lock);
	for (struct pool *p = pools; p != NULL; p = p->next)
		settle(p);
	tr_unlock(&pools_lock);
}

/* --- allocation ---------------------------------------------------------------------------- */

static bool capturing(CUstream s, bool ptsz)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	CUresult r = ptsz ? REAL(cuStreamIsCapturing_ptsz)(s, &status)
			  : REAL(cuStreamIsCapturing)(s, &status);
	return r == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ||
	       (r == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE);
}

static bool special_stream(CUstream s)
{
	return s == NULL || s == CU_STREAM_LEGACY_HANDLE || s == CU_STREAM_PER_THREAD_HANDLE;
}

/* The driver's handle of the device whose pool serves this stream. */
static bool stream_device(CUstream s, CUdevice *out)
{
	CUcontext ctx, popped;
	if (tr_visible_devices == 1 || special_stream(s) || REAL(cuStreamGetCtx) == NULL ||
	    REAL(cuStreamGetCtx)(s, &ctx) != CUDA_SUCCESS ||
	    REAL(cuCtxPushCurrent_v2)(ctx) != CUDA_SUCCESS)
		return REAL(cuCtxGetDevice)(out) == CUDA_SUCCESS;
	bool ok = REAL(cuCtxGetDevice)(out) == CUDA_SUCCESS;
	REAL(cuCtxPopCurrent_v2)(&popped);
	return ok;
}

/* The pool of a call, and its worst growth charged. */
struct ticket {
	struct pool *pool;
	uint32_t units;
};

/* The caller holds pools_lock. A destroyed pool ends with its last use. */
static void release(struct pool *p)
{
	if (--p->outstanding > 0 || !p->destroyed)
		return;
	adjust(p, 0);
	for (struct pool **at = &pools; *at != NULL; at = &(*at)->next)
		if (*at == p) {
			*at = p->next;
			free(p);
			return;
		}
}

/* A pool that was not made here is the default pool of some device, not necessarily the stream's. */
static int default_pool_device(CUmemoryPool handle, int otherwise)
{
	CUmemoryPool pool;
	for (int i = 0; i < tr_visible_devices; i++)
		if (REAL(cuDeviceGetDefaultMemPool)(&pool, tr_visible_handle(i)) == CUDA_SUCCESS &&
		    pool == handle)
			return tr_device_index(tr_visible_handle(i));
	return otherwise;
}

static bool begin(CUmemoryPool handle, int dev, uint64_t bytes, struct ticket *t)
{
	tr_lock(&pools_lock);
	struct pool *p = find(handle);
	if (p == NULL)
		p = add(handle, default_pool_device(handle, dev));
	t->pool = p;
	t->units = p == NULL || p->dev < 0 ? 0 : tr_units(tr_round_up(bytes, chunk));
	dev = p == NULL ? -1 : p->dev;
	if (p != NULL)
		p->outstanding++;
	tr_unlock(&pools_lock);
	if (p == NULL)
		return false;
	if (t->units == 0)
		return true;
	if (!tr_charge(dev, t->units)) {
		tr_lock(&pools_lock);
		release(p);
		tr_unlock(&pools_lock);
		return false;
	}
	tr_lock(&pools_lock);
	p->in_flight += t->units;
	p->charged += t->units;
	tr_unlock(&pools_lock);
	return true;
}

static void end(const struct ticket *t, bool got)
{
	struct pool *p = t->pool;
	tr_lock(&pools_lock);
	uint32_t before = p->charged;
	p->in_flight -= t->units;
	if (!settle(p) && !got)
		adjust(p, p->charged - t->units - p->in_flight);
	if (p->charged > before && t->units > 0 && p->in_flight == 0) {
		chunk *= 2;
		TR_TRACE("pool grew beyond its chunk: chunks of %llu MiB now",
			 (unsigned long long)chunk >> 20);
	}
	if (!got)
		release(p);
	tr_unlock(&pools_lock);
}

static CUresult keep(CUresult r, const CUdeviceptr *ptr, size_t bytes, const struct ticket *t)
{
	if (r == CUDA_SUCCESS) {
		struct tr_entry e = {.key = *ptr,
				     .aux = (uint64_t)(uintptr_t)t->pool,
				     .units = tr_units(bytes),
				     .dev = (uint8_t)(t->pool->dev < 0 ? 0 : t->pool->dev),
				     .kind = TR_POOLED};
		tr_remember(&e);
	}
	end(t, r == CUDA_SUCCESS);
	return r;
}

typedef CUresult (*alloc_fn)(CUdeviceptr *, size_t, CUstream);
typedef CUresult (*alloc_from_fn)(CUdeviceptr *, size_t, CUmemoryPool, CUstream);

static CUresult alloc_async(alloc_fn real, bool ptsz, CUdeviceptr *dptr, size_t bytes, CUstream s)
{
	CUresult r = tr_enter();
	if (r != CUDA_SUCCESS)
		return r;
	CUdevice dev;
	CUmemoryPool handle;
	if (capturing(s, ptsz)) {
		tr_graphmem_seen();
		return real(dptr, bytes, s);
	}
	if (!stream_device(s, &dev) || tr_device_index(dev) < 0 ||
	    REAL(cuDeviceGetMemPool)(&handle, dev) != CUDA_SUCCESS)
		return real(dptr, bytes, s);
	struct ticket t;
	if (!begin(handle, tr_device_index(dev), bytes, &t))
		return CUDA_ERROR_OUT_OF_MEMORY;
	return keep(real(dptr, bytes, s), dptr, bytes, &t);
}

static CUresult alloc_from(alloc_from_fn real, bool ptsz, CUdeviceptr *dptr, size_t bytes,
			   CUmemoryPool pool, CUstream s)
{
	CUresult r = tr_enter();
	if (r != CUDA_SUCCESS)
		return r;
	if (capturing(s, ptsz)) {
		tr_graphmem_seen();
		return real(dptr, bytes, pool, s);
	}
	CUdevice dev;
	int index = stream_device(s, &dev) ? tr_device_index(dev) : -1;
	struct ticket t;
	if (!begin(pool, index, bytes, &t))
		return CUDA_ERROR_OUT_OF_MEMORY;
	return keep(real(dptr, bytes, pool, s), dptr, bytes, &t);
}

CUresult EXPORT cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
	return alloc_async(REAL(cuMemAllocAsync), false, dptr, bytesize, hStream);
}

CUresult EXPORT cuMemAllocAsync_ptsz(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
	return alloc_async(REAL(cuMemAllocAsync_ptsz), true, dptr, bytesize, hStream);
}

CUresult EXPORT cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool,
					CUstream hStream)
{
	return alloc_from(REAL(cuMemAllocFromPoolAsync), false, dptr, bytesize, pool, hStream);
}

CUresult EXPORT cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool,
					     CUstream hStream)
{
	return alloc_from(REAL(cuMemAllocFromPoolAsync_ptsz), true, dptr, bytesize, pool, hStream);
}

/* --- freeing ------------------------------------------------------------------------------- */

void tr_pool_freed(const struct tr_entry *e)
{
	struct pool *p = (struct pool *)(uintptr_t)e->aux;
	__atomic_store_n(&dirty, true, __ATOMIC_RELAXED);
	tr_lock(&pools_lock);
	release(p);
	tr_unlock(&pools_lock);
}

/* What is asked here concerns no capture of the application. */
static CUstreamCaptureMode relax_capture(CUstreamCaptureMode mode)
{
	if (REAL(cuThreadExchangeStreamCaptureMode) != NULL)
		REAL(cuThreadExchangeStreamCaptureMode)(&mode);
	return mode;
}

/* Those whose event has passed; of a context that is about to end, once they have. */
static void late_frees_end(CUcontext ending)
{
	if (__atomic_load_n(&late, __ATOMIC_RELAXED) == NULL)
		return;
	CUstreamCaptureMode mode = relax_capture(CU_STREAM_CAPTURE_MODE_RELAXED);
	tr_lock(&pools_lock);
	struct late_free **at = &late, *done = NULL;
	while (*at != NULL) {
		struct late_free *f = *at;
		bool wait = ending != NULL && f->ctx == ending;
		if (!wait && REAL(cuEventQuery)(f->event) == CUDA_ERROR_NOT_READY) {
			at = &f->next;
			continue;
		}
		*at = f->next;
		f->next = done;
		done = f;
	}
	if (late != NULL)
		__atomic_store_n(&dirty, true, __ATOMIC_RELAXED);
	tr_unlock(&pools_lock);
	while (done != NULL) {
		struct late_free *f = done;
		done = f->next;
		REAL(cuEventSynchronize)(f->event); /* has passed already, but for a context's end */
		REAL(cuEventDestroy_v2)(f->event);
		tr_entry_freed(&f->entry);
		free(f);
	}
	relax_capture(mode);
}

static void late_frees_settle(void)
{
	late_frees_end(NULL);
}

void tr_pools_context_ending(CUcontext ctx)
{
	late_frees_end(ctx);
}

static void free_later(const struct tr_entry *e, CUstream s, bool ptsz)
{
	struct late_free *f = calloc(1, sizeof *f);
	if (f == NULL)
		return; /* stays charged: the safe side */
	f->entry = *e;
	REAL(cuCtxGetCurrent)(&f->ctx);
	CUresult r = REAL(cuEventCreate)(&f->event, CU_EVENT_DISABLE_TIMING);
	if (r == CUDA_SUCCESS)
		r = ptsz ? REAL(cuEventRecord_ptsz)(f->event, s) : REAL(cuEventRecord)(f->event, s);
	if (r != CUDA_SUCCESS) {
		REAL(cuEventDestroy_v2)(f->event);
		free(f);
		return;
	}
	tr_lock(&pools_lock);
	f->next = late;
	__atomic_store_n(&late, f, __ATOMIC_RELAXED);
	tr_unlock(&pools_lock);
	__atomic_store_n(&dirty, true, __ATOMIC_RELAXED);
}

typedef CUresult (*free_fn)(CUdeviceptr, CUstream);

static CUresult free_async(free_fn real, bool ptsz, CUdeviceptr dptr, CUstream s)
{
	struct tr_entry e;
	late_frees_settle();
	bool captured = capturing(s, ptsz);
	bool known = !captured && tr_forget(dptr, &e);
	CUresult r = real(dptr, s);
	if (!known)
		return r;
	if (r != CUDA_SUCCESS)
		tr_remember(&e);
	else if (e.kind == TR_POOLED)
		tr_pool_freed(&e);
	else
		free_later(&e, s, ptsz);
	return r;
}

CUresult EXPORT cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream)
{
	return free_async(REAL(cuMemFreeAsync), false, dptr, hStream);
}

CUresult EXPORT cuMemFreeAsync_ptsz(CUdeviceptr dptr, CUstream hStream)
{
	return free_async(REAL(cuMemFreeAsync_ptsz), true, dptr, hStream);
}

/* --- pools themselves ---------------------------------------------------------------------- */

CUresult EXPORT cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)
{
	CUresult r = tr_enter();
	if (r != CUDA_SUCCESS)
		return r;
	bool on_device = poolProps != NULL && poolProps->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
	int dev = on_device ? tr_device_index(poolProps->location.id) : -1;
	if (on_device && dev < 0)
		return CUDA_ERROR_INVALID_DEVICE;
	r = REAL(cuMemPoolCreate)(pool, poolProps);
	if (r != CUDA_SUCCESS)
		return r;
	tr_lock(&pools_lock);
	bool kept = add(*pool, dev) != NULL;
	tr_unlock(&pools_lock);
	if (kept)
		return r;
	REAL(cuMemPoolDestroy)(*pool);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult EXPORT cuMemPoolDestroy(CUmemoryPool pool)
{
	tr_lock(&pools_lock);
	struct pool *p = find(pool);
	if (p != NULL) {
		settle(p);
		p->outstanding++;
		p->destroyed = true;
	}
	tr_unlock(&pools_lock);
	CUresult r = REAL(cuMemPoolDestroy)(pool);
	if (p == NULL)
		return r;
	tr_lock(&pools_lock);
	if (r != CUDA_SUCCESS)
		p->destroyed = false;
	release(p);
	tr_unlock(&pools_lock);
	return r;
}

CUresult EXPORT cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)
{
	CUresult r = REAL(cuMemPoolTrimTo)(pool, minBytesToKeep);
	tr_lock(&pools_lock);
	struct pool *p = find(pool);
	if (p != NULL)
		settle(p);
	tr_unlock(&pools_lock);
	return r;
}

CUresult EXPORT cuMemPoolExportToShareableHandle(void *handle_out, CUmemoryPool pool,
						 CUmemAllocationHandleType handleType,
						 unsigned long long flags)
{
	CUresult r = REAL(cuMemPoolExportToShareableHandle)(handle_out, pool, handleType, flags);
	if (r != CUDA_SUCCESS)
		return r;
	tr_lock(&pools_lock);
	struct pool *p = find(pool);
	if (p != NULL && p->dev >= 0 && !p->exported) {
		p->exported = true;
		share(p, p->charged - p->in_flight);
	}
	tr_unlock(&pools_lock);
	return r;
}

/* An imported pool allocates nothing here: its memory is its creator's. */
CUresult EXPORT cuMemPoolImportFromShareableHandle(CUmemoryPool *pool_out, void *handle,
						   CUmemAllocationHandleType handleType,
						   unsigned long long flags)
{
	CUresult r =
		REAL(cuMemPoolImportFromShareableHandle)(pool_out, handle, handleType, flags);
	if (r != CUDA_SUCCESS)
		return r;
	tr_lock(&pools_lock);
	add(*pool_out, -1);
	tr_unlock(&pools_lock);
	return r;
}

CUresult EXPORT cuMemPoolImportPointer(CUdeviceptr *ptr_out, CUmemoryPool pool,
				       CUmemPoolPtrExportData *shareData)
{
	CUresult r;
	int dev = tr_enter_current(&r);
	if (r != CUDA_SUCCESS)
		return r;
	uint64_t guess = tr_import_begin(dev);
	r = REAL(cuMemPoolImportPointer)(ptr_out, pool, shareData);
	size_t bytes = 0;
	CUdeviceptr base;
	/* It holds the chunks that it lies in. */
	if (dev >= 0 && r == CUDA_SUCCESS &&
	    REAL(cuMemGetAddressRange_v2)(&base, &bytes, *ptr_out) == CUDA_SUCCESS)
		tr_import_opened(*ptr_out, tr_round_up(bytes, chunk), dev);
	tr_import_end(dev, guess);
	return r;
}
