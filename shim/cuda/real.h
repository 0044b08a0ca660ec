/* The driver's own functions, by exported name: REAL(cuMemAlloc_v2)(...). A pointer is NULL where
 * the installed driver lacks the function. Filled by the constructor (init.c), before any caller
 * can reach a hook. */
#ifndef TRANCHE_REAL_H
#define TRANCHE_REAL_H
#include <stdbool.h>
#include "cuda_abi.h"
#include "cuda_new.h"

/* Of a hook: everything else is hidden. */
#define EXPORT __attribute__((visibility("default")))

/* Functions that the library calls though it does not intercept them. */
#define TR_CALLED(X)                                                                               \
	X(cuCtxGetCurrent)                                                                         \
	X(cuCtxGetDevice)                                                                          \
	X(cuCtxPushCurrent_v2)                                                                     \
	X(cuCtxPopCurrent_v2)                                                                      \
	X(cuDeviceGetUuid)                                                                         \
	X(cuDevicePrimaryCtxGetState)                                                              \
	X(cuDeviceGetMemPool)                                                                      \
	X(cuDeviceGetDefaultMemPool)                                                               \
	X(cuDeviceGetGraphMemAttribute)                                                            \
	X(cuMemPoolGetAttribute)                                                                   \
	X(cuMemGetAllocationPropertiesFromHandle)                                                  \
	X(cuMemGetAddressRange_v2)                                                                 \
	X(cuArrayGetMemoryRequirements)                                                            \
	X(cuMipmappedArrayGetMemoryRequirements)                                                   \
	X(cuStreamGetCtx)                                                                          \
	X(cuStreamIsCapturing)                                                                     \
	X(cuStreamIsCapturing_ptsz)                                                                \
	X(cuThreadExchangeStreamCaptureMode)                                                       \
	X(cuEventCreate)                                                                           \
	X(cuEventDestroy_v2)                                                                       \
	X(cuEventRecord)                                                                           \
	X(cuEventRecord_ptsz)                                                                      \
	X(cuEventQuery)                                                                            \
	X(cuEventElapsedTime)                                                                      \
	X(cuGraphGetNodes)                                                                         \
	X(cuGraphNodeGetType)                                                                      \
	X(cuGraphMemAllocNodeGetParams)                                                            \
	X(cuGraphChildGraphNodeGetGraph)

struct tr_real {
#define TR_HOOK(name) __typeof__(&name) name;
#include "hooks.def"
#undef TR_HOOK
#define X(name) __typeof__(&name) name;
	TR_CALLED(X)
#undef X
};
extern struct tr_real tr_real;
#define REAL(name) (tr_real.name)

/* Device index in the slice (0 .. tr_limits_devices() - 1) of the calling thread's current
 * context. -1: no current context, or a device that the slice does not have. Asks the driver,
 * so never on the launch path of a process with one device. device.c */
int tr_current_device(void);
/* The same for a driver device handle. */
int tr_device_index(CUdevice dev);
/* Number of devices of the slice that this process sees, and whether any has a compute limit:
 * fixed after cuInit, but for live changes which the page carries. */
extern int tr_visible_devices;

/* What a hook does first. CUDA_SUCCESS once the slice is open; else the error to return
 * (CUDA_ERROR_SYSTEM_NOT_READY), already explained on stderr. init.c */
CUresult tr_enter(void);
#endif
