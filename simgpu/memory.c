/* Plain, pitched and managed memory; what is free; freeing of everything that cuMemFree takes. */
#include "mem.h"

static CUresult alloc(struct CUctx_st *ctx, enum mem_kind kind, size_t bytes, bool low, CUdeviceptr *out)
{
	struct mem_range *r;
	CUresult e = sim_capture_guard(ctx);
	if (e)
		return e;
	mem_lock();
	e = mem_alloc(ctx, kind, bytes, low, &r);
	if (!e)
		*out = r->base;
	mem_unlock();
	return e;
}

CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
	SIM_CALL_CTX(cuMemAlloc_v2, ctx);
	if (!dptr || !bytesize)
		return CUDA_ERROR_INVALID_VALUE;
	return alloc(ctx, MEM_PLAIN, bytesize, false, dptr);
}

CUresult cuMemAlloc(CUdeviceptr_v1 *dptr, unsigned int bytesize)
{
	CUdeviceptr p;
	SIM_CALL_CTX(cuMemAlloc, ctx);
	if (!dptr || !bytesize)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult e = alloc(ctx, MEM_PLAIN, bytesize, true, &p);
	if (!e)
		*dptr = (CUdeviceptr_v1)p;
	return e;
}

static CUresult alloc_pitch(struct CUctx_st *ctx, size_t width, size_t height, unsigned element, bool low,
			    CUdeviceptr *p, size_t *pitch)
{
	if (!width || !height || (element != 4 && element != 8 && element != 16))
		return CUDA_ERROR_INVALID_VALUE;
	*pitch = MEM_ROUND(width, 512);
	if (*pitch < width || *pitch > SIZE_MAX / height)
		return CUDA_ERROR_OUT_OF_MEMORY;
	return alloc(ctx, MEM_PLAIN, *pitch * height, low, p);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
			    unsigned int ElementSizeBytes)
{
	size_t pitch;
	SIM_CALL_CTX(cuMemAllocPitch_v2, ctx);
	if (!dptr || !pPitch)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult e = alloc_pitch(ctx, WidthInBytes, Height, ElementSizeBytes, false, dptr, &pitch);
	if (!e)
		*pPitch = pitch;
	return e;
}

CUresult cuMemAllocPitch(CUdeviceptr_v1 *dptr, unsigned int *pPitch, unsigned int WidthInBytes,
			 unsigned int Height, unsigned int ElementSizeBytes)
{
	CUdeviceptr p;
	size_t pitch;
	SIM_CALL_CTX(cuMemAllocPitch, ctx);
	if (!dptr || !pPitch)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult e = alloc_pitch(ctx, WidthInBytes, Height, ElementSizeBytes, true, &p, &pitch);
	if (!e) {
		*dptr = (CUdeviceptr_v1)p;
		*pPitch = (unsigned)pitch;
	}
	return e;
}

CUresult cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
	SIM_CALL_CTX(cuMemAllocManaged, ctx);
	if (!dptr || !bytesize || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST))
		return CUDA_ERROR_INVALID_VALUE;
	return alloc(ctx, MEM_MANAGED, bytesize, false, dptr);
}

static CUresult free_range(struct mem_range *r)
{
	switch (r->kind) {
	case MEM_PLAIN:
	case MEM_MANAGED:
		mem_free(r);
		return CUDA_SUCCESS;
	case MEM_POOL:
	case MEM_POOL_IMPORT:
		return pool_free(r);
	case MEM_EXTERNAL:
		return CUDA_SUCCESS; /* the mapping goes with cuDestroyExternalMemory */
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
}

static CUresult free_at(struct CUctx_st *ctx, CUdeviceptr p)
{
	if (!p)
		return CUDA_SUCCESS;
	CUresult e = sim_capture_guard(ctx);
	if (e)
		return e;
	if ((e = sim_ctx_sync(ctx)))
		return e;
	if (sim_graphmem_is(p)) {
		e = sim_graphmem_unmap(p);
		return e;
	}
	mem_lock();
	struct mem_range *r = mem_find_exact(p);
	e = r ? free_range(r) : CUDA_ERROR_INVALID_VALUE;
	mem_unlock();
	return e;
}

CUresult cuMemFree_v2(CUdeviceptr dptr)
{
	SIM_CALL_CTX(cuMemFree_v2, ctx);
	return free_at(ctx, dptr);
}

CUresult cuMemFree(CUdeviceptr_v1 dptr)
{
	SIM_CALL_CTX(cuMemFree, ctx);
	return free_at(ctx, dptr);
}

CUresult cuMemGetInfo_v2(size_t *free, size_t *total)
{
	SIM_CALL_CTX(cuMemGetInfo_v2, ctx);
	struct sim_gpu *g = sim_ctx_gpu(ctx);
	sim_reap(); /* what the dead held is free */
	if (free)
		*free = g->capacity - __atomic_load_n(&g->used, __ATOMIC_RELAXED);
	if (total)
		*total = g->model.memory;
	return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(unsigned int *free, unsigned int *total)
{
	size_t f, t;
	SIM_CALL(cuMemGetInfo);
	CUresult e = cuMemGetInfo_v2(&f, &t);
	if (!e && free)
		*free = f > UINT32_MAX ? UINT32_MAX : (unsigned)f;
	if (!e && total)
		*total = t > UINT32_MAX ? UINT32_MAX : (unsigned)t;
	return e;
}

static CUresult address_range(CUdeviceptr p, CUdeviceptr *base, size_t *size)
{
	mem_lock();
	struct mem_range *r = mem_find(p);
	if (r && base)
		*base = r->base;
	if (r && size)
		*size = r->size;
	mem_unlock();
	return r ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
	SIM_CALL(cuMemGetAddressRange_v2);
	return address_range(dptr, pbase, psize);
}

CUresult cuMemGetAddressRange(CUdeviceptr_v1 *pbase, unsigned int *psize, CUdeviceptr_v1 dptr)
{
	CUdeviceptr base;
	size_t size;
	SIM_CALL(cuMemGetAddressRange);
	CUresult e = address_range(dptr, &base, &size);
	if (!e && pbase)
		*pbase = (CUdeviceptr_v1)base;
	if (!e && psize)
		*psize = (unsigned)size;
	return e;
}

bool sim_mem_is_device(CUdeviceptr p, size_t n, int *gpu)
{
	mem_lock();
	struct mem_range *r = mem_find(p);
	bool yes = r && r->gpu >= 0 && n <= r->size - (p - r->base);
	/* VMM mappings side by side are one range to a copy. */
	while (r && r->kind == MEM_VMM && r->gpu >= 0 && !yes) {
		uint64_t end = r->base + r->size;
		r = mem_find_exact(end);
		yes = r && r->kind == MEM_VMM && p + n <= r->base + r->size;
	}
	if (yes && gpu)
		*gpu = r->gpu;
	mem_unlock();
	return yes;
}

void mem_ctx_end(struct CUctx_st *ctx)
{
	mem_lock();
	for (struct mem_range *r = mem_next(0); r;) {
		uint64_t after = r->base + 1;
		if (r->ctx == ctx) {
			if (r->kind == MEM_IPC)
				ipc_close(r);
			else if (r->kind == MEM_HOST || r->kind == MEM_REGISTERED)
				host_free(r);
			else if (r->kind == MEM_PLAIN || r->kind == MEM_MANAGED)
				mem_free(r);
		}
		r = mem_next(after);
	}
	mem_unlock();
}

/* --- managed memory: hints change nothing here --------------------------------------------------- */

static CUresult hint(CUdeviceptr p, size_t n)
{
	return n && sim_mem_is_device(p, n, NULL) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

#define HINT(name, ...)                                                                            \
	CUresult name(CUdeviceptr devPtr, size_t count, __VA_ARGS__)                               \
	{                                                                                          \
		SIM_CALL(name);                                                                    \
		return hint(devPtr, count);                                                        \
	}
#pragma GCC diagnostic ignored "-Wunused-parameter"
HINT(cuMemPrefetchAsync, CUdevice dst, CUstream s)
HINT(cuMemPrefetchAsync_ptsz, CUdevice dst, CUstream s)
HINT(cuMemPrefetchAsync_v2, CUmemLocation location, unsigned int flags, CUstream s)
HINT(cuMemPrefetchAsync_v2_ptsz, CUmemLocation location, unsigned int flags, CUstream s)
HINT(cuMemAdvise, CUmem_advise advice, CUdevice device)
HINT(cuMemAdvise_v2, CUmem_advise advice, CUmemLocation location)
