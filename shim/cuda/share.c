/* Memory of others: IPC handles, which are free inside the tenant, and external memory (graphics
 * and the like), which is charged. */
#include "compat.h"
#include "account.h"
#include "trace.h"

CUresult EXPORT cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr)
{
	CUresult r = REAL(cuIpcGetMemHandle)(pHandle, dptr);
	CUdeviceptr base;
	size_t size;
	if (r == CUDA_SUCCESS && REAL(cuMemGetAddressRange_v2)(&base, &size, dptr) == CUDA_SUCCESS)
		tr_entry_exported(base);
	return r;
}

typedef CUresult (*open_fn)(CUdeviceptr *, CUipcMemHandle, unsigned int);

static CUresult open_handle(open_fn real, CUdeviceptr *ptr, CUipcMemHandle handle, unsigned flags)
{
	CUdeviceptr base;
	size_t size = 0;
	CUresult r;
	int dev = tr_enter_current(&r);
	if (r != CUDA_SUCCESS)
		return r;
	uint64_t guess = tr_import_begin(dev);
	r = real(ptr, handle, flags);
	if (dev >= 0 && r == CUDA_SUCCESS &&
	    REAL(cuMemGetAddressRange_v2)(&base, &size, *ptr) == CUDA_SUCCESS)
		tr_import_opened(*ptr, tr_round_up(size, TR_BLOCK), dev);
	tr_import_end(dev, guess);
	return r;
}

CUresult EXPORT cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
{
	return open_handle(REAL(cuIpcOpenMemHandle), pdptr, handle, Flags);
}

CUresult EXPORT cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle,
				      unsigned int Flags)
{
	return open_handle(REAL(cuIpcOpenMemHandle_v2), pdptr, handle, Flags);
}

CUresult EXPORT cuIpcCloseMemHandle(CUdeviceptr dptr)
{
	struct tr_entry e;
	bool last = tr_import_close(dptr, &e);
	CUresult r = REAL(cuIpcCloseMemHandle)(dptr);
	if (!last)
		return r;
	if (r == CUDA_SUCCESS) {
		tr_entry_freed(&e);
	} else {
		e.units = 1;
		tr_remember(&e);
	}
	return r;
}

CUresult EXPORT cuImportExternalMemory(CUexternalMemory *extMem_out,
				       const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *memHandleDesc)
{
	CUresult r;
	int dev = tr_enter_current(&r);
	if (dev < 0 || memHandleDesc == NULL)
		return r != CUDA_SUCCESS ? r
					 : REAL(cuImportExternalMemory)(extMem_out, memHandleDesc);
	uint32_t units = tr_units(tr_round_up(memHandleDesc->size, TR_BLOCK));
	if (!tr_charge(dev, units))
		return CUDA_ERROR_OUT_OF_MEMORY;
	r = REAL(cuImportExternalMemory)(extMem_out, memHandleDesc);
	if (r != CUDA_SUCCESS) {
		tr_uncharge(dev, units);
		return r;
	}
	/* Without an owner: no documentation says that it ends with a context. */
	struct tr_entry e = {.key = (uint64_t)(uintptr_t)*extMem_out,
			     .units = units,
			     .dev = (uint8_t)dev,
			     .kind = TR_EXTERNAL};
	tr_remember(&e); /* if that fails it is charged to the end of the process */
	return r;
}

CUresult EXPORT cuDestroyExternalMemory(CUexternalMemory extMem)
{
	struct tr_entry e;
	bool known = tr_forget((uint64_t)(uintptr_t)extMem, &e);
	return tr_freed(REAL(cuDestroyExternalMemory)(extMem), known, &e);
}
