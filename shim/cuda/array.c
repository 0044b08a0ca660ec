/* Arrays and mipmaps: charged what the driver says that they take. */
#include "compat.h"
#include "account.h"
#include "trace.h"

#define FLAG_LAYERED 0x01u
#define FLAG_CUBEMAP 0x04u
#define FLAG_SPARSE 0x40u
#define FLAG_DEFERRED 0x80u

/* Block-linear layout: rows in gobs of 64 bytes by 8 rows; physical memory in 64 KiB pages. */
#define GOB_BYTES 64ull
#define GOB_ROWS 8ull
#define ARRAY_PAGE (64ull << 10)

static uint64_t format_bytes(CUarray_format f)
{
	switch ((int)f) {
	case CU_AD_FORMAT_UNSIGNED_INT8:
	case CU_AD_FORMAT_SIGNED_INT8:
		return 1;
	case CU_AD_FORMAT_UNSIGNED_INT16:
	case CU_AD_FORMAT_SIGNED_INT16:
	case CU_AD_FORMAT_HALF:
		return 2;
	case CU_AD_FORMAT_UNSIGNED_INT32:
	case CU_AD_FORMAT_SIGNED_INT32:
	case CU_AD_FORMAT_FLOAT:
		return 4;
	default:
		return 8; /* packed and planar formats: more than any takes per channel */
	}
}

/* Bytes of one mip level: an upper estimate where the driver cannot be asked. */
static uint64_t level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned level)
{
	size_t w = d->Width >> level, h = d->Height >> level;
	size_t z = (d->Flags & (FLAG_LAYERED | FLAG_CUBEMAP)) ? d->Depth : d->Depth >> level;
	uint64_t row = (w == 0 ? 1 : w) * format_bytes(d->Format) *
		       (d->NumChannels == 0 ? 1 : d->NumChannels);
	uint64_t rows = h == 0 ? 1 : h;
	if (d->Height != 0)
		rows = tr_round_up(rows, GOB_ROWS);
	return tr_round_up(row, GOB_BYTES) * rows * (z == 0 ? 1 : z);
}

static uint64_t estimate(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels)
{
	uint64_t sum = 0;
	for (unsigned i = 0; i < levels && i < 32; i++)
		sum += level_bytes(d, i);
	return tr_round_up(sum, ARRAY_PAGE);
}

static bool no_memory(const CUDA_ARRAY3D_DESCRIPTOR *d)
{
	return (d->Flags & (FLAG_SPARSE | FLAG_DEFERRED)) != 0;
}

/* The driver tells exactly what an array takes only when it may be mapped later, so one without
 * memory is made, asked and destroyed (CUDA 11.6 and newer). 0: the driver did not say. */
static uint64_t ask_array(const CUDA_ARRAY3D_DESCRIPTOR *d)
{
	CUDA_ARRAY3D_DESCRIPTOR probe = *d;
	CUDA_ARRAY_MEMORY_REQUIREMENTS need = {0};
	CUarray a;
	CUdevice dev;
	probe.Flags |= FLAG_DEFERRED;
	if (REAL(cuArrayGetMemoryRequirements) == NULL ||
	    REAL(cuCtxGetDevice)(&dev) != CUDA_SUCCESS ||
	    REAL(cuArray3DCreate_v2)(&a, &probe) != CUDA_SUCCESS)
		return 0;
	if (REAL(cuArrayGetMemoryRequirements)(&need, a, dev) != CUDA_SUCCESS)
		need.size = 0;
	REAL(cuArrayDestroy)(a);
	return need.size;
}

static uint64_t ask_mipmap(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels)
{
	CUDA_ARRAY3D_DESCRIPTOR probe = *d;
	CUDA_ARRAY_MEMORY_REQUIREMENTS need = {0};
	CUmipmappedArray m;
	CUdevice dev;
	probe.Flags |= FLAG_DEFERRED;
	if (REAL(cuMipmappedArrayGetMemoryRequirements) == NULL ||
	    REAL(cuCtxGetDevice)(&dev) != CUDA_SUCCESS ||
	    REAL(cuMipmappedArrayCreate)(&m, &probe, levels) != CUDA_SUCCESS)
		return 0;
	if (REAL(cuMipmappedArrayGetMemoryRequirements)(&need, m, dev) != CUDA_SUCCESS)
		need.size = 0;
	REAL(cuMipmappedArrayDestroy)(m);
	return need.size;
}

/* Charges for one; *dev < 0: nothing to charge. */
static bool charge(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels, bool mip, int *dev,
		   uint32_t *units, CUresult *error)
{
	*dev = tr_enter_current(error);
	*units = 0;
	if (*dev < 0)
		return *error == CUDA_SUCCESS;
	if (no_memory(d))
		return true;
	uint64_t bytes = mip ? ask_mipmap(d, levels) : ask_array(d);
	if (bytes == 0)
		bytes = estimate(d, levels);
	*units = tr_units(bytes);
	*error = CUDA_ERROR_OUT_OF_MEMORY;
	return tr_charge(*dev, *units);
}

static CUresult keep(CUresult r, uint64_t key, enum tr_kind kind, int dev, uint32_t units)
{
	if (dev < 0)
		return r;
	if (r != CUDA_SUCCESS) {
		tr_uncharge(dev, units);
		return r;
	}
	CUcontext ctx = NULL;
	REAL(cuCtxGetCurrent)(&ctx);
	struct tr_entry e = {.key = key,
			     .owner = (uint64_t)(uintptr_t)ctx,
			     .units = units,
			     .dev = (uint8_t)dev,
			     .kind = (uint8_t)kind};
	tr_remember(&e); /* if that fails it is charged to the end of the process */
	return r;
}

#define KEY(handle) ((uint64_t)(uintptr_t)(handle))

/* The body of a hook that makes an array (or, with levels, a mipmap) as DESC, a pointer to a
 * descriptor of the newest form, says. */
#define CREATE(name, asked, kind, levels, desc, ...)                                               \
	do {                                                                                       \
		int dev = -1;                                                                      \
		uint32_t units = 0;                                                                \
		CUresult r;                                                                        \
		if (pHandle == NULL || (asked) == NULL)                                            \
			return REAL(name)(pHandle, __VA_ARGS__);                                   \
		if (!charge(desc, levels, (kind) == TR_MIPMAP, &dev, &units, &r))                  \
			return r;                                                                  \
		r = REAL(name)(pHandle, __VA_ARGS__);                                              \
		return keep(r, KEY(*pHandle), kind, dev, units);                                   \
	} while (0)

/* Descriptors of older forms, as the newest one; for two dimensions there is neither depth nor
 * flags. */
#define WIDEN_2D(d)                                                                                \
	.Width = (d)->Width, .Height = (d)->Height, .Format = (d)->Format,                         \
	.NumChannels = (d)->NumChannels
#define AS_3D(...) (&(CUDA_ARRAY3D_DESCRIPTOR){__VA_ARGS__})

CUresult EXPORT cuArray3DCreate_v2(CUarray *pHandle,
				   const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray)
{
	CREATE(cuArray3DCreate_v2, pAllocateArray, TR_ARRAY, 1, pAllocateArray, pAllocateArray);
}

CUresult EXPORT cuArray3DCreate(CUarray *pHandle,
				const CUDA_ARRAY3D_DESCRIPTOR_v1 *pAllocateArray)
{
	CREATE(cuArray3DCreate, pAllocateArray, TR_ARRAY, 1,
	       AS_3D(WIDEN_2D(pAllocateArray), .Depth = pAllocateArray->Depth,
		     .Flags = pAllocateArray->Flags),
	       pAllocateArray);
}

CUresult EXPORT cuArrayCreate_v2(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray)
{
	CREATE(cuArrayCreate_v2, pAllocateArray, TR_ARRAY, 1, AS_3D(WIDEN_2D(pAllocateArray)),
	       pAllocateArray);
}

CUresult EXPORT cuArrayCreate(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR_v1 *pAllocateArray)
{
	CREATE(cuArrayCreate, pAllocateArray, TR_ARRAY, 1, AS_3D(WIDEN_2D(pAllocateArray)),
	       pAllocateArray);
}

CUresult EXPORT cuMipmappedArrayCreate(CUmipmappedArray *pHandle,
				       const CUDA_ARRAY3D_DESCRIPTOR *pMipmappedArrayDesc,
				       unsigned int numMipmapLevels)
{
	CREATE(cuMipmappedArrayCreate, pMipmappedArrayDesc, TR_MIPMAP, numMipmapLevels,
	       pMipmappedArrayDesc, pMipmappedArrayDesc, numMipmapLevels);
}

CUresult EXPORT cuArrayDestroy(CUarray hArray)
{
	struct tr_entry e;
	bool known = tr_forget(KEY(hArray), &e);
	return tr_freed(REAL(cuArrayDestroy)(hArray), known, &e);
}

CUresult EXPORT cuMipmappedArrayDestroy(CUmipmappedArray hMipmappedArray)
{
	struct tr_entry e;
	bool known = tr_forget(KEY(hMipmappedArray), &e);
	return tr_freed(REAL(cuMipmappedArrayDestroy)(hMipmappedArray), known, &e);
}
