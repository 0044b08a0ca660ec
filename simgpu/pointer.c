/* What a pointer is. */
#include <string.h>
#include "pool.h"

static unsigned memory_type(const struct mem_range *r)
{
	return r->gpu < 0 ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
}

static CUresult attribute(void *data, CUpointer_attribute a, CUdeviceptr p, struct mem_range *r)
{
	struct pool_piece *piece = r->kind == MEM_POOL ? r->owner : NULL;
	struct CUctx_st *ctx = r->ctx && !r->ctx->dead ? r->ctx : NULL;
	switch (a) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		*(CUcontext *)data = ctx;
		return ctx ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data = memory_type(r); break;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = p; break;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		if (r->gpu >= 0 && r->kind != MEM_MANAGED)
			return CUDA_ERROR_INVALID_VALUE;
		*(void **)data = (void *)(uintptr_t)p;
		break;
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(unsigned *)data = r->sync_memops; break;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)data = r->id; break;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)data = r->kind == MEM_MANAGED; break;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		*(int *)data = r->gpu >= 0 ? sim_gpu_dev(r->gpu) : ctx ? ctx->dev : 0;
		break;
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(unsigned *)data = r->kind == MEM_PLAIN; break;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
	case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: *(CUdeviceptr *)data = r->base; break;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
	case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: *(size_t *)data = r->size; break;
	case CU_POINTER_ATTRIBUTE_MAPPED: *(unsigned *)data = 1; break;
	case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
		*(unsigned long long *)data = piece ? piece->chunk->pool->handle_types : r->kind == MEM_VMM;
		break;
	case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *(unsigned *)data = 0; break;
	case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: *(unsigned *)data = 3; break;
	case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
		*(CUmemoryPool *)data = piece ? piece->chunk->pool : NULL;
		break;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute a, CUdeviceptr ptr)
{
	SIM_CALL(cuPointerGetAttribute);
	if (!data)
		return CUDA_ERROR_INVALID_VALUE;
	mem_lock();
	struct mem_range *r = mem_find(ptr);
	CUresult e = r ? attribute(data, a, ptr, r) : CUDA_ERROR_INVALID_VALUE;
	mem_unlock();
	return e;
}

/* What is written for a pointer that CUDA does not know. */
static void unknown(void *data, CUpointer_attribute a)
{
	switch (a) {
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = -2; break;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
	case CU_POINTER_ATTRIBUTE_MAPPED:
	case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
	case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: *(unsigned *)data = 0; break;
	default: memset(data, 0, 8);
	}
}

CUresult cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes, void **data,
				CUdeviceptr ptr)
{
	SIM_CALL(cuPointerGetAttributes);
	if (!numAttributes || !attributes || !data)
		return CUDA_ERROR_INVALID_VALUE;
	mem_lock();
	struct mem_range *r = mem_find(ptr);
	for (unsigned i = 0; i < numAttributes; i++)
		if (!r || attribute(data[i], attributes[i], ptr, r))
			unknown(data[i], attributes[i]);
	mem_unlock();
	return CUDA_SUCCESS;
}

CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute a, CUdeviceptr ptr)
{
	SIM_CALL(cuPointerSetAttribute);
	mem_lock();
	struct mem_range *r = mem_find(ptr);
	bool ok = r && value && a == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS;
	if (ok)
		r->sync_memops = *(const unsigned *)value;
	mem_unlock();
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
