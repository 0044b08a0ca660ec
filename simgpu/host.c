/* Page-locked host memory. Never charged to a GPU. The device address is the host address. */
#include <stdlib.h>
#include <sys/mman.h>
#include "mem.h"

static CUresult host_alloc(struct CUctx_st *ctx, void **pp, size_t bytes, unsigned flags)
{
	if (!pp || !bytes || flags & ~7u)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult e = sim_capture_guard(ctx);
	if (e)
		return e;
	void *p = mmap(NULL, MEM_ROUND(bytes, 4096), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	mem_lock();
	struct mem_range *r = mem_range_new((uint64_t)(uintptr_t)p, bytes, MEM_HOST, -1, ctx);
	if (r)
		r->flags = flags | 2u /* mapped */;
	mem_unlock();
	if (!r) {
		munmap(p, MEM_ROUND(bytes, 4096));
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*pp = p;
	return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags)
{
	SIM_CALL_CTX(cuMemHostAlloc, ctx);
	return host_alloc(ctx, pp, bytesize, Flags);
}

CUresult cuMemAllocHost_v2(void **pp, size_t bytesize)
{
	SIM_CALL_CTX(cuMemAllocHost_v2, ctx);
	return host_alloc(ctx, pp, bytesize, 0);
}

CUresult cuMemAllocHost(void **pp, unsigned int bytesize)
{
	SIM_CALL_CTX(cuMemAllocHost, ctx);
	return host_alloc(ctx, pp, bytesize, 0);
}

CUresult host_free(struct mem_range *r)
{
	if (r->kind == MEM_HOST)
		munmap((void *)(uintptr_t)r->base, MEM_ROUND(r->size, 4096));
	mem_range_delete(r);
	return CUDA_SUCCESS;
}

static CUresult host_free_kind(void *p, enum mem_kind kind, CUresult missing)
{
	mem_lock();
	struct mem_range *r = mem_find_exact((uint64_t)(uintptr_t)p);
	CUresult e = r && r->kind == kind ? host_free(r) : missing;
	mem_unlock();
	return e;
}

CUresult cuMemFreeHost(void *p)
{
	SIM_CALL_CTX(cuMemFreeHost, ctx);
	CUresult e = sim_ctx_sync(ctx);
	if (e || !p)
		return e;
	return host_free_kind(p, MEM_HOST, CUDA_ERROR_INVALID_VALUE);
}

static CUresult host_register(struct CUctx_st *ctx, void *p, size_t bytes, unsigned flags)
{
	if (!p || !bytes || flags & ~15u)
		return CUDA_ERROR_INVALID_VALUE;
	uint64_t base = (uint64_t)(uintptr_t)p;
	mem_lock();
	struct mem_range *after = mem_next(base), *r = NULL;
	bool taken = mem_find(base) || (after && after->base < base + bytes);
	if (!taken)
		r = mem_range_new(base, bytes, MEM_REGISTERED, -1, ctx);
	if (r)
		r->flags = flags;
	mem_unlock();
	return r ? CUDA_SUCCESS :
	       taken ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags)
{
	SIM_CALL_CTX(cuMemHostRegister_v2, ctx);
	return host_register(ctx, p, bytesize, Flags);
}

CUresult cuMemHostRegister(void *p, size_t bytesize, unsigned int Flags)
{
	SIM_CALL_CTX(cuMemHostRegister, ctx);
	return host_register(ctx, p, bytesize, Flags);
}

CUresult cuMemHostUnregister(void *p)
{
	SIM_CALL_CTX(cuMemHostUnregister, ctx);
	CUresult e = sim_ctx_sync(ctx);
	return e ? e : host_free_kind(p, MEM_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

static CUresult device_pointer(CUdeviceptr *out, void *p, unsigned flags)
{
	if (!out || !p || flags)
		return CUDA_ERROR_INVALID_VALUE;
	mem_lock();
	struct mem_range *r = mem_find((uint64_t)(uintptr_t)p);
	bool ok = r && (r->kind == MEM_HOST || r->kind == MEM_REGISTERED || r->kind == MEM_MANAGED);
	mem_unlock();
	if (!ok)
		return CUDA_ERROR_INVALID_VALUE;
	*out = (CUdeviceptr)(uintptr_t)p;
	return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int Flags)
{
	SIM_CALL(cuMemHostGetDevicePointer_v2);
	return device_pointer(pdptr, p, Flags);
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr_v1 *pdptr, void *p, unsigned int Flags)
{
	CUdeviceptr d;
	SIM_CALL(cuMemHostGetDevicePointer);
	CUresult e = pdptr ? device_pointer(&d, p, Flags) : CUDA_ERROR_INVALID_VALUE;
	if (!e && d > UINT32_MAX)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (!e)
		*pdptr = (CUdeviceptr_v1)d;
	return e;
}

CUresult cuMemHostGetFlags(unsigned int *pFlags, void *p)
{
	SIM_CALL(cuMemHostGetFlags);
	mem_lock();
	struct mem_range *r = mem_find((uint64_t)(uintptr_t)p);
	bool ok = r && r->kind == MEM_HOST && pFlags;
	if (ok)
		*pFlags = r->flags;
	mem_unlock();
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
