/* Entry points and types of CUDA drivers newer than the header behind cuda_abi.h, and of the
 * parts that it leaves out, written from NVIDIA's public documentation. */
#ifndef TRANCHE_CUDA_NEW_H
#define TRANCHE_CUDA_NEW_H
#include "cuda_abi.h"

/* CUDA 12.5: cuCtxCreate_v4 (also what cuCtxCreate means in CUDA 13). The parameters are passed
 * on unread. */
typedef struct CUctxCreateParams_st CUctxCreateParams;
CUresult cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags,
			CUdevice dev);

/* CUDA 13.1: a bind for one device of several. */
CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset,
			       CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size,
			       unsigned long long flags);
CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev,
				size_t mcOffset, CUdeviceptr memptr, size_t size,
				unsigned long long flags);

/* From cudaGL.h and cudaVDPAU.h. */
CUresult cuGLCtxCreate(CUcontext *pctx, unsigned int Flags, CUdevice device);
CUresult cuGLCtxCreate_v2(CUcontext *pctx, unsigned int Flags, CUdevice device);
CUresult cuVDPAUCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice device, uint32_t vdpDevice,
			  void *vdpGetProcAddress);
CUresult cuVDPAUCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice device,
			     uint32_t vdpDevice, void *vdpGetProcAddress);

#define CU_STREAM_LEGACY_HANDLE ((CUstream)0x1)
#define CU_STREAM_PER_THREAD_HANDLE ((CUstream)0x2)
#endif
