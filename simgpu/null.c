/* The null driver: every call succeeds and does nothing, as cheaply as a function can. The base
 * line of the benchmarks of what the libraries in front of a driver cost.
 *
 * One device. Allocations get addresses that were never given before, 2 MiB apart. Whoever needs
 * more than that must use the simulated driver. */
#include <string.h>
#include "../include/cuda_abi.h"
#include "../include/cuda_new.h"
#include "procaddr.h"

#define EXPORT __attribute__((visibility("default")))

/* Driver calls of this thread. */
EXPORT extern __thread unsigned long tr_null_calls __attribute__((tls_model("initial-exec")));
__thread unsigned long tr_null_calls;

#define CALL() (tr_null_calls++)
#define TOTAL (80ull << 30)

static unsigned long long next_address = 1ull << 40;

static CUdeviceptr take(size_t bytes)
{
	unsigned long long step = (bytes + (2ull << 20) - 1) & ~((2ull << 20) - 1);
	return __atomic_fetch_add(&next_address, step, __ATOMIC_RELAXED);
}

CUresult EXPORT cuDriverGetVersion(int *version)
{
	CALL();
	*version = 12040;
	return CUDA_SUCCESS;
}

CUresult EXPORT cuDeviceGetCount(int *count)
{
	CALL();
	*count = 1;
	return CUDA_SUCCESS;
}

CUresult EXPORT cuDeviceGet(CUdevice *device, int ordinal)
{
	CALL();
	*device = 0;
	return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

static CUresult uuid_of(CUuuid *uuid)
{
	for (int i = 0; i < 16; i++)
		uuid->bytes[i] = (char)(0xa0 + i);
	return CUDA_SUCCESS;
}

CUresult EXPORT cuDeviceGetUuid(CUuuid *uuid, CUdevice dev)
{
	(void)dev;
	CALL();
	return uuid_of(uuid);
}

CUresult EXPORT cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev)
{
	(void)dev;
	CALL();
	return uuid_of(uuid);
}

CUresult EXPORT cuDeviceGetName(char *name, int len, CUdevice dev)
{
	(void)dev;
	CALL();
	if (len > 0) {
		strncpy(name, "null", (size_t)len - 1);
		name[len - 1] = 0;
	}
	return CUDA_SUCCESS;
}

CUresult EXPORT cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)
{
	(void)attrib;
	(void)dev;
	CALL();
	*pi = 1;
	return CUDA_SUCCESS;
}

CUresult EXPORT cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
	(void)dev;
	CALL();
	*bytes = TOTAL;
	return CUDA_SUCCESS;
}

CUresult EXPORT cuMemGetInfo_v2(size_t *free, size_t *total)
{
	CALL();
	*free = *total = TOTAL;
	return CUDA_SUCCESS;
}

/* --- contexts: one for all --- */

static char the_context;
#define CONTEXT ((CUcontext)(void *)&the_context)

CUresult EXPORT cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
	(void)flags;
	(void)dev;
	CALL();
	*pctx = CONTEXT;
	return CUDA_SUCCESS;
}

CUresult EXPORT cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
	(void)dev;
	CALL();
	*pctx = CONTEXT;
	return CUDA_SUCCESS;
}

CUresult EXPORT cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
{
	(void)dev;
	CALL();
	*flags = 0;
	*active = 1;
	return CUDA_SUCCESS;
}

CUresult EXPORT cuCtxGetCurrent(CUcontext *pctx)
{
	CALL();
	*pctx = CONTEXT;
	return CUDA_SUCCESS;
}

CUresult EXPORT cuCtxPopCurrent_v2(CUcontext *pctx)
{
	CALL();
	if (pctx != NULL)
		*pctx = CONTEXT;
	return CUDA_SUCCESS;
}

CUresult EXPORT cuCtxGetDevice(CUdevice *device)
{
	CALL();
	*device = 0;
	return CUDA_SUCCESS;
}

/* --- memory --- */

CUresult EXPORT cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
	CALL();
	*dptr = take(bytesize);
	return CUDA_SUCCESS;
}

CUresult EXPORT cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
	(void)flags;
	CALL();
	*dptr = take(bytesize);
	return CUDA_SUCCESS;
}

CUresult EXPORT cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes,
				   size_t Height, unsigned int ElementSizeBytes)
{
	(void)ElementSizeBytes;
	CALL();
	*pPitch = (WidthInBytes + 511) & ~511ull;
	*dptr = take(*pPitch * Height);
	return CUDA_SUCCESS;
}

CUresult EXPORT cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
	(void)hStream;
	CALL();
	*dptr = take(bytesize);
	return CUDA_SUCCESS;
}

CUresult EXPORT cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
			    const CUmemAllocationProp *prop, unsigned long long flags)
{
	(void)prop;
	(void)flags;
	CALL();
	*handle = take(size);
	return CUDA_SUCCESS;
}

/* --- modules, streams, events: a handle each, the same one --- */

static char the_object;
#define OBJECT(type) ((type)(void *)&the_object)

CUresult EXPORT cuModuleLoadData(CUmodule *module, const void *image)
{
	(void)image;
	CALL();
	*module = OBJECT(CUmodule);
	return CUDA_SUCCESS;
}

CUresult EXPORT cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name)
{
	(void)hmod;
	(void)name;
	CALL();
	*hfunc = OBJECT(CUfunction);
	return CUDA_SUCCESS;
}

CUresult EXPORT cuStreamCreate(CUstream *phStream, unsigned int Flags)
{
	(void)Flags;
	CALL();
	*phStream = OBJECT(CUstream);
	return CUDA_SUCCESS;
}

CUresult EXPORT cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *captureStatus)
{
	(void)hStream;
	CALL();
	*captureStatus = CU_STREAM_CAPTURE_STATUS_NONE;
	return CUDA_SUCCESS;
}

CUresult EXPORT cuEventCreate(CUevent *phEvent, unsigned int Flags)
{
	(void)Flags;
	CALL();
	*phEvent = OBJECT(CUevent);
	return CUDA_SUCCESS;
}

CUresult EXPORT cuEventElapsedTime(float *pMilliseconds, CUevent hStart, CUevent hEnd)
{
	(void)hStart;
	(void)hEnd;
	CALL();
	*pMilliseconds = 0.001f;
	return CUDA_SUCCESS;
}

/* --- look-up by name --- */

CUresult EXPORT cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion,
				    cuuint64_t flags, CUdriverProcAddressQueryResult *symbolStatus)
{
	enum sim_proc_status status;
	CALL();
	void (*f)(void) = sim_proc_find(symbol, (unsigned)cudaVersion, (unsigned)flags, &status);
	memcpy(pfn, &f, sizeof f);
	if (symbolStatus != NULL)
		*symbolStatus = status == SIM_PROC_FOUND ? CU_GET_PROC_ADDRESS_SUCCESS
				: status == SIM_PROC_NO_SYMBOL
					? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
					: CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
	return CUDA_SUCCESS;
}

CUresult EXPORT cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)
{
	enum sim_proc_status status;
	CALL();
	void (*f)(void) = sim_proc_find(symbol, (unsigned)cudaVersion, (unsigned)flags, &status);
	if (f == NULL)
		return CUDA_ERROR_NOT_FOUND;
	memcpy(pfn, &f, sizeof f);
	return CUDA_SUCCESS;
}
