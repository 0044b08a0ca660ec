/* The CUDA driver, opened at run time so that the program starts on a box without one. */
#ifndef GPULOAD_DRIVER_H
#define GPULOAD_DRIVER_H
#include <stdbool.h>
#include "compat.h"
#include "cuda_abi.h"

/* Functions the program cannot work without. */
#define DRIVER_NEEDED(X)                                                                           \
	X(cuInit)                                                                                  \
	X(cuGetErrorName)                                                                          \
	X(cuDriverGetVersion)                                                                      \
	X(cuDeviceGetCount)                                                                        \
	X(cuDeviceGet)                                                                             \
	X(cuDeviceGetName)                                                                         \
	X(cuDeviceTotalMem_v2)                                                                     \
	X(cuDevicePrimaryCtxRetain)                                                                \
	X(cuCtxSetCurrent)                                                                         \
	X(cuCtxSynchronize)                                                                        \
	X(cuMemGetInfo_v2)                                                                         \
	X(cuMemAlloc_v2)                                                                           \
	X(cuMemFree_v2)                                                                            \
	X(cuModuleLoadData)                                                                        \
	X(cuModuleGetFunction)                                                                     \
	X(cuLaunchKernel)                                                                          \
	X(cuStreamCreate)                                                                          \
	X(cuStreamSynchronize)                                                                     \
	X(cuEventCreate)                                                                           \
	X(cuEventRecord)                                                                           \
	X(cuEventQuery)                                                                            \
	X(cuEventSynchronize)

/* Functions of some options only: NULL where the driver lacks them. */
#define DRIVER_WANTED(X)                                                                           \
	X(cuMemAllocPitch_v2)                                                                      \
	X(cuMemAllocManaged)                                                                       \
	X(cuMemHostAlloc)                                                                          \
	X(cuMemHostGetDevicePointer_v2)                                                            \
	X(cuMemsetD8_v2)                                                                           \
	X(cuMemcpyDtoH_v2)                                                                         \
	X(cuArrayCreate_v2)                                                                        \
	X(cuArray3DCreate_v2)                                                                      \
	X(cuArrayDestroy)                                                                          \
	X(cuMipmappedArrayCreate)                                                                  \
	X(cuMipmappedArrayDestroy)                                                                 \
	X(cuMemAllocAsync)                                                                         \
	X(cuMemFreeAsync)                                                                          \
	X(cuMemPoolCreate)                                                                         \
	X(cuMemPoolDestroy)                                                                        \
	X(cuMemPoolSetAttribute)                                                                   \
	X(cuMemAllocFromPoolAsync)                                                                 \
	X(cuMemGetAllocationGranularity)                                                           \
	X(cuMemCreate)                                                                             \
	X(cuMemRelease)                                                                            \
	X(cuMemAddressReserve)                                                                     \
	X(cuMemAddressFree)                                                                        \
	X(cuMemMap)                                                                                \
	X(cuMemUnmap)                                                                              \
	X(cuMemSetAccess)                                                                          \
	X(cuGraphCreate)                                                                           \
	X(cuGraphDestroy)                                                                          \
	X(cuGraphAddKernelNode)                                                                    \
	X(cuGraphAddMemAllocNode)                                                                  \
	X(cuGraphInstantiateWithFlags)                                                             \
	X(cuGraphExecDestroy)                                                                      \
	X(cuGraphLaunch)                                                                           \
	X(cuDeviceGraphMemTrim)                                                                    \
	X(cuStreamBeginCapture_v2)                                                                 \
	X(cuStreamEndCapture)                                                                      \
	X(cuIpcGetMemHandle)                                                                       \
	X(cuIpcOpenMemHandle_v2)                                                                   \
	X(cuIpcCloseMemHandle)                                                                     \
	X(cuEventElapsedTime)                                                                      \
	X(cuThreadExchangeStreamCaptureMode)

struct driver {
#define X(name) __typeof__(&name) name;
	DRIVER_NEEDED(X)
	DRIVER_WANTED(X)
#undef X
};
extern struct driver cu;

/* Loads `path`, initialises CUDA, and makes the primary context of device `ordinal` current.
 * Ends the program with one line on stderr when that fails. */
void driver_open(const char *path, int ordinal);
CUdevice driver_device(void);
/* Makes the context current in another thread. */
void driver_attach(void);

/* The name CUDA gives an error ("CUDA_ERROR_OUT_OF_MEMORY"). */
const char *driver_error(CUresult r);
/* Ends the program when `r` is an error: "gpuload: cuThing: CUDA_ERROR_...". */
void driver_must(CUresult r, const char *what);
#define MUST(call) driver_must(cu.call, #call)

/* The program's name in front of its messages. */
extern const char *const program;
void die(const char *fmt, ...) __attribute__((noreturn, format(printf, 1, 2)));

/* CLOCK_MONOTONIC in ns. */
int64_t now_ns(void);
void sleep_until_ns(int64_t t);
#endif
