/* Plain, pitched and managed memory, and what is free. */
#include "compat.h"
#include "account.h"
#include "device.h"
#include "ledger.h"
#include "pool.h"
#include "slice.h"
#include "trace.h"

/* What the driver takes at most for so many bytes: whole blocks. */
static uint32_t worst_units(uint64_t bytes)
{
	return tr_units(tr_round_up(bytes, TR_BLOCK));
}

static CUresult got(CUresult r, CUdeviceptr ptr, uint64_t bytes, int dev, uint32_t charged)
{
	if (r != CUDA_SUCCESS) {
		tr_uncharge(dev, charged);
		return r;
	}
	if (!tr_plain_got(ptr, bytes, dev, charged)) /* charged to the end of the process */
		tr_complain("out of host memory for the ledger of allocations");
	return r;
}

CUresult EXPORT cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
	CUresult r;
	int dev = tr_enter_current(&r);
	if (dev < 0)
		return r != CUDA_SUCCESS ? r : REAL(cuMemAlloc_v2)(dptr, bytesize);
	uint32_t units = worst_units(bytesize);
	if (!tr_charge(dev, units))
		return CUDA_ERROR_OUT_OF_MEMORY;
	r = REAL(cuMemAlloc_v2)(dptr, bytesize);
	return got(r, r == CUDA_SUCCESS ? *dptr : 0, bytesize, dev, units);
}

CUresult EXPORT cuMemAlloc(CUdeviceptr_v1 *dptr, unsigned int bytesize)
{
	CUresult r;
	int dev = tr_enter_current(&r);
	if (dev < 0)
		return r != CUDA_SUCCESS ? r : REAL(cuMemAlloc)(dptr, bytesize);
	uint32_t units = worst_units(bytesize);
	if (!tr_charge(dev, units))
		return CUDA_ERROR_OUT_OF_MEMORY;
	r = REAL(cuMemAlloc)(dptr, bytesize);
	return got(r, r == CUDA_SUCCESS ? *dptr : 0, bytesize, dev, units);
}

CUresult EXPORT cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
	CUresult r;
	int dev = tr_enter_current(&r);
	if (dev < 0)
		return r != CUDA_SUCCESS ? r : REAL(cuMemAllocManaged)(dptr, bytesize, flags);
	uint32_t units = worst_units(bytesize);
	if (!tr_charge(dev, units))
		return CUDA_ERROR_OUT_OF_MEMORY;
	r = REAL(cuMemAllocManaged)(dptr, bytesize, flags);
	return got(r, r == CUDA_SUCCESS ? *dptr : 0, bytesize, dev, units);
}

/* No driver pads a row to more than this (textures ask for 512 bytes, some parts for less). */
#define PITCH_MAX_ALIGN 512ull

static uint64_t worst_pitched(size_t width, size_t height)
{
	uint64_t row = tr_round_up(width, PITCH_MAX_ALIGN);
	return height != 0 && row > UINT64_MAX / 2 / height ? UINT64_MAX / 2 : row * height;
}

/* The pitch is known now: what was reserved beyond pitch * height goes back. */
static CUresult got_pitched(CUresult r, CUdeviceptr ptr, uint64_t bytes, int dev, uint32_t charged)
{
	uint32_t units = worst_units(bytes);
	if (r == CUDA_SUCCESS && units < charged) {
		tr_uncharge(dev, charged - units);
		charged = units;
	} else if (r == CUDA_SUCCESS && units > charged) {
		tr_charge_taken(dev, units - charged);
		charged = units;
	}
	return got(r, ptr, bytes, dev, charged);
}

CUresult EXPORT cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes,
				   size_t Height, unsigned int ElementSizeBytes)
{
	CUresult r;
	int dev = tr_enter_current(&r);
	if (dev < 0)
		return r != CUDA_SUCCESS ? r
					 : REAL(cuMemAllocPitch_v2)(dptr, pPitch, WidthInBytes,
								    Height, ElementSizeBytes);
	uint32_t units = worst_units(worst_pitched(WidthInBytes, Height));
	if (!tr_charge(dev, units))
		return CUDA_ERROR_OUT_OF_MEMORY;
	r = REAL(cuMemAllocPitch_v2)(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
	bool ok = r == CUDA_SUCCESS;
	return got_pitched(r, ok ? *dptr : 0, ok ? *pPitch * Height : 0, dev, units);
}

CUresult EXPORT cuMemAllocPitch(CUdeviceptr_v1 *dptr, unsigned int *pPitch,
				unsigned int WidthInBytes, unsigned int Height,
				unsigned int ElementSizeBytes)
{
	CUresult r;
	int dev = tr_enter_current(&r);
	if (dev < 0)
		return r != CUDA_SUCCESS ? r
					 : REAL(cuMemAllocPitch)(dptr, pPitch, WidthInBytes, Height,
								 ElementSizeBytes);
	uint32_t units = worst_units(worst_pitched(WidthInBytes, Height));
	if (!tr_charge(dev, units))
		return CUDA_ERROR_OUT_OF_MEMORY;
	r = REAL(cuMemAllocPitch)(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
	bool ok = r == CUDA_SUCCESS;
	return got_pitched(r, ok ? *dptr : 0, ok ? (uint64_t)*pPitch * Height : 0, dev, units);
}

CUresult EXPORT cuMemFree_v2(CUdeviceptr dptr)
{
	struct tr_entry e;
	bool known = tr_forget(dptr, &e);
	return tr_freed(REAL(cuMemFree_v2)(dptr), known, &e);
}

CUresult EXPORT cuMemFree(CUdeviceptr_v1 dptr)
{
	struct tr_entry e;
	bool known = tr_forget(dptr, &e);
	return tr_freed(REAL(cuMemFree)(dptr), known, &e);
}

/* The slice's own figures; never more than the GPU itself has left. */
static void show_slice(uint64_t *free_bytes, uint64_t *total, int dev)
{
	uint64_t limit = tr_memory_limit(dev);
	if (limit == UINT64_MAX)
		return;
	tr_pools_settle(dev);
	tr_reclaim();
	uint64_t used = tr_account_bytes(tr_ledger(), dev);
	uint64_t left = used < limit ? limit - used : 0;
	if (left < *free_bytes)
		*free_bytes = left;
	if (limit < *total)
		*total = limit;
}

CUresult EXPORT cuMemGetInfo_v2(size_t *free, size_t *total)
{
	CUresult r;
	int dev = tr_enter_current(&r);
	if (r != CUDA_SUCCESS)
		return r;
	uint64_t f = 0, t = 0;
	r = REAL(cuMemGetInfo_v2)((size_t *)&f, (size_t *)&t);
	if (r != CUDA_SUCCESS)
		return r;
	if (dev >= 0)
		show_slice(&f, &t, dev);
	if (free != NULL)
		*free = f;
	if (total != NULL)
		*total = t;
	return r;
}

CUresult EXPORT cuMemGetInfo(unsigned int *free, unsigned int *total)
{
	size_t f = 0, t = 0;
	CUresult r = cuMemGetInfo_v2(&f, &t);
	if (r != CUDA_SUCCESS)
		return r;
	if (free != NULL)
		*free = f > UINT32_MAX ? UINT32_MAX : (unsigned int)f;
	if (total != NULL)
		*total = t > UINT32_MAX ? UINT32_MAX : (unsigned int)t;
	return r;
}
