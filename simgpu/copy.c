/* The copy functions of the API, each under every name that it is exported as: the first generation
 * (32-bit addresses), the second, and the flavours with a per-thread default stream. All of them build
 * one descriptor and hand it to sim_submit_memop. */
#include <string.h>
#include "mem.h"

#define P(p) ((CUdeviceptr)(uintptr_t)(p))
#pragma GCC diagnostic ignored "-Wcast-qual"

static CUresult submit(const CUDA_MEMCPY3D_PEER *c, CUstream s, bool sync)
{
	struct sim_memop op = { .kind = SIM_MEMOP_COPY, .copy = *c };
	struct CUctx_st *ctx;
	CUresult e = sim_ctx_need(&ctx);
	return e ? e : sim_submit_memop(ctx, s, &op, sync);
}

/* Plain pointers. want: which sides must be device memory (or page-locked): 1 source, 2 destination. */
static CUresult linear(CUdeviceptr dst, CUdeviceptr src, size_t n, int want, CUstream s, bool sync)
{
	CUDA_MEMCPY3D_PEER c = {
		.srcMemoryType = want & 1 ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_UNIFIED,
		.dstMemoryType = want & 2 ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_UNIFIED,
		.srcDevice = src, .dstDevice = dst, .WidthInBytes = n, .Height = 1, .Depth = 1,
	};
	return submit(&c, s, sync);
}

/* Between a 1D array and a pointer or another array; NULL arrays mean the pointer. */
static CUresult arrays(CUarray da, size_t doff, CUdeviceptr dp, bool dhost, CUarray sa, size_t soff, CUdeviceptr sp,
		       bool shost, size_t n, CUstream s, bool sync)
{
	CUDA_MEMCPY3D_PEER c = {
		.srcXInBytes = soff, .dstXInBytes = doff, .srcArray = sa, .dstArray = da, .srcDevice = sp,
		.dstDevice = dp, .srcHost = (const void *)(uintptr_t)sp, .dstHost = (void *)(uintptr_t)dp,
		.WidthInBytes = n, .Height = 1, .Depth = 1,
	};
	c.srcMemoryType = sa ? CU_MEMORYTYPE_ARRAY : shost ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
	c.dstMemoryType = da ? CU_MEMORYTYPE_ARRAY : dhost ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
	return submit(&c, s, sync);
}

static CUresult copy_2d(const CUDA_MEMCPY2D *p, CUstream s, bool sync)
{
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	CUDA_MEMCPY3D_PEER c = {
		.srcXInBytes = p->srcXInBytes, .srcY = p->srcY, .srcMemoryType = p->srcMemoryType,
		.srcHost = p->srcHost, .srcDevice = p->srcDevice, .srcArray = p->srcArray, .srcPitch = p->srcPitch,
		.dstXInBytes = p->dstXInBytes, .dstY = p->dstY, .dstMemoryType = p->dstMemoryType,
		.dstHost = p->dstHost, .dstDevice = p->dstDevice, .dstArray = p->dstArray, .dstPitch = p->dstPitch,
		.WidthInBytes = p->WidthInBytes, .Height = p->Height, .Depth = 1,
	};
	return submit(&c, s, sync);
}

static CUresult copy_2d_v1(const CUDA_MEMCPY2D_v1 *p, CUstream s, bool sync)
{
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	CUDA_MEMCPY2D c = {
		.srcXInBytes = p->srcXInBytes, .srcY = p->srcY, .srcMemoryType = p->srcMemoryType,
		.srcHost = p->srcHost, .srcDevice = p->srcDevice, .srcArray = p->srcArray, .srcPitch = p->srcPitch,
		.dstXInBytes = p->dstXInBytes, .dstY = p->dstY, .dstMemoryType = p->dstMemoryType,
		.dstHost = p->dstHost, .dstDevice = p->dstDevice, .dstArray = p->dstArray, .dstPitch = p->dstPitch,
		.WidthInBytes = p->WidthInBytes, .Height = p->Height,
	};
	return copy_2d(&c, s, sync);
}

static CUresult copy_3d(const CUDA_MEMCPY3D *p, CUstream s, bool sync)
{
	struct sim_memop op;
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	sim_memop_3d(&op, p);
	return submit(&op.copy, s, sync);
}

static CUresult copy_3d_v1(const CUDA_MEMCPY3D_v1 *p, CUstream s, bool sync)
{
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	CUDA_MEMCPY3D c = {
		.srcXInBytes = p->srcXInBytes, .srcY = p->srcY, .srcZ = p->srcZ, .srcMemoryType = p->srcMemoryType,
		.srcHost = p->srcHost, .srcDevice = p->srcDevice, .srcArray = p->srcArray, .srcPitch = p->srcPitch,
		.srcHeight = p->srcHeight, .dstXInBytes = p->dstXInBytes, .dstY = p->dstY, .dstZ = p->dstZ,
		.dstMemoryType = p->dstMemoryType, .dstHost = p->dstHost, .dstDevice = p->dstDevice,
		.dstArray = p->dstArray, .dstPitch = p->dstPitch, .dstHeight = p->dstHeight,
		.WidthInBytes = p->WidthInBytes, .Height = p->Height, .Depth = p->Depth,
	};
	return copy_3d(&c, s, sync);
}

static CUresult copy_peer(const CUDA_MEMCPY3D_PEER *p, CUstream s, bool sync)
{
	return p ? submit(p, s, sync) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult set(CUdeviceptr dst, size_t pitch, unsigned value, unsigned element, size_t width, size_t height,
		    CUstream s, bool sync)
{
	struct CUctx_st *ctx;
	struct sim_memop op = { .kind = SIM_MEMOP_MEMSET,
				.set = { dst, pitch, value, element, width, height } };
	CUresult e = sim_ctx_need(&ctx);
	return e ? e : sim_submit_memop(ctx, s, &op, sync);
}

/* F(name, (parameters), call with STREAM and SYNC). */
#define F(name, params, call)                                                                      \
	CUresult name params                                                                       \
	{                                                                                          \
		SIM_CALL(name);                                                                    \
		return call;                                                                       \
	}

/* --- pointers */
F(cuMemcpy, (CUdeviceptr d, CUdeviceptr p, size_t n), linear(d, p, n, 0, NULL, true))
F(cuMemcpy_ptds, (CUdeviceptr d, CUdeviceptr p, size_t n), linear(d, p, n, 0, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemcpyAsync, (CUdeviceptr d, CUdeviceptr p, size_t n, CUstream s), linear(d, p, n, 0, s, false))
F(cuMemcpyAsync_ptsz, (CUdeviceptr d, CUdeviceptr p, size_t n, CUstream s), linear(d, p, n, 0, sim_pt(s), false))
F(cuMemcpyPeer, (CUdeviceptr d, CUcontext dc, CUdeviceptr p, CUcontext pc, size_t n), ((void)dc, (void)pc, linear(d, p, n, 3, NULL, true)))
F(cuMemcpyPeer_ptds, (CUdeviceptr d, CUcontext dc, CUdeviceptr p, CUcontext pc, size_t n), ((void)dc, (void)pc, linear(d, p, n, 3, CU_STREAM_PER_THREAD_HANDLE, true)))
F(cuMemcpyPeerAsync, (CUdeviceptr d, CUcontext dc, CUdeviceptr p, CUcontext pc, size_t n, CUstream s), ((void)dc, (void)pc, linear(d, p, n, 3, s, false)))
F(cuMemcpyPeerAsync_ptsz, (CUdeviceptr d, CUcontext dc, CUdeviceptr p, CUcontext pc, size_t n, CUstream s), ((void)dc, (void)pc, linear(d, p, n, 3, sim_pt(s), false)))
F(cuMemcpyHtoD, (CUdeviceptr_v1 d, const void *p, unsigned int n), linear(d, P(p), n, 2, NULL, true))
F(cuMemcpyHtoD_v2, (CUdeviceptr d, const void *p, size_t n), linear(d, P(p), n, 2, NULL, true))
F(cuMemcpyHtoD_v2_ptds, (CUdeviceptr d, const void *p, size_t n), linear(d, P(p), n, 2, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemcpyHtoDAsync, (CUdeviceptr_v1 d, const void *p, unsigned int n, CUstream s), linear(d, P(p), n, 2, s, false))
F(cuMemcpyHtoDAsync_v2, (CUdeviceptr d, const void *p, size_t n, CUstream s), linear(d, P(p), n, 2, s, false))
F(cuMemcpyHtoDAsync_v2_ptsz, (CUdeviceptr d, const void *p, size_t n, CUstream s), linear(d, P(p), n, 2, sim_pt(s), false))
F(cuMemcpyDtoH, (void *d, CUdeviceptr_v1 p, unsigned int n), linear(P(d), p, n, 1, NULL, true))
F(cuMemcpyDtoH_v2, (void *d, CUdeviceptr p, size_t n), linear(P(d), p, n, 1, NULL, true))
F(cuMemcpyDtoH_v2_ptds, (void *d, CUdeviceptr p, size_t n), linear(P(d), p, n, 1, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemcpyDtoHAsync, (void *d, CUdeviceptr_v1 p, unsigned int n, CUstream s), linear(P(d), p, n, 1, s, false))
F(cuMemcpyDtoHAsync_v2, (void *d, CUdeviceptr p, size_t n, CUstream s), linear(P(d), p, n, 1, s, false))
F(cuMemcpyDtoHAsync_v2_ptsz, (void *d, CUdeviceptr p, size_t n, CUstream s), linear(P(d), p, n, 1, sim_pt(s), false))
F(cuMemcpyDtoD, (CUdeviceptr_v1 d, CUdeviceptr_v1 p, unsigned int n), linear(d, p, n, 3, NULL, true))
F(cuMemcpyDtoD_v2, (CUdeviceptr d, CUdeviceptr p, size_t n), linear(d, p, n, 3, NULL, true))
F(cuMemcpyDtoD_v2_ptds, (CUdeviceptr d, CUdeviceptr p, size_t n), linear(d, p, n, 3, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemcpyDtoDAsync, (CUdeviceptr_v1 d, CUdeviceptr_v1 p, unsigned int n, CUstream s), linear(d, p, n, 3, s, false))
F(cuMemcpyDtoDAsync_v2, (CUdeviceptr d, CUdeviceptr p, size_t n, CUstream s), linear(d, p, n, 3, s, false))
F(cuMemcpyDtoDAsync_v2_ptsz, (CUdeviceptr d, CUdeviceptr p, size_t n, CUstream s), linear(d, p, n, 3, sim_pt(s), false))
/* --- one-dimensional arrays */
F(cuMemcpyDtoA, (CUarray d, unsigned int o, CUdeviceptr_v1 p, unsigned int n), arrays(d, o, 0, false, NULL, 0, p, false, n, NULL, true))
F(cuMemcpyDtoA_v2, (CUarray d, size_t o, CUdeviceptr p, size_t n), arrays(d, o, 0, false, NULL, 0, p, false, n, NULL, true))
F(cuMemcpyDtoA_v2_ptds, (CUarray d, size_t o, CUdeviceptr p, size_t n), arrays(d, o, 0, false, NULL, 0, p, false, n, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemcpyAtoD, (CUdeviceptr_v1 d, CUarray p, unsigned int o, unsigned int n), arrays(NULL, 0, d, false, p, o, 0, false, n, NULL, true))
F(cuMemcpyAtoD_v2, (CUdeviceptr d, CUarray p, size_t o, size_t n), arrays(NULL, 0, d, false, p, o, 0, false, n, NULL, true))
F(cuMemcpyAtoD_v2_ptds, (CUdeviceptr d, CUarray p, size_t o, size_t n), arrays(NULL, 0, d, false, p, o, 0, false, n, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemcpyHtoA, (CUarray d, unsigned int o, const void *p, unsigned int n), arrays(d, o, 0, false, NULL, 0, P(p), true, n, NULL, true))
F(cuMemcpyHtoA_v2, (CUarray d, size_t o, const void *p, size_t n), arrays(d, o, 0, false, NULL, 0, P(p), true, n, NULL, true))
F(cuMemcpyHtoA_v2_ptds, (CUarray d, size_t o, const void *p, size_t n), arrays(d, o, 0, false, NULL, 0, P(p), true, n, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemcpyHtoAAsync, (CUarray d, unsigned int o, const void *p, unsigned int n, CUstream s), arrays(d, o, 0, false, NULL, 0, P(p), true, n, s, false))
F(cuMemcpyHtoAAsync_v2, (CUarray d, size_t o, const void *p, size_t n, CUstream s), arrays(d, o, 0, false, NULL, 0, P(p), true, n, s, false))
F(cuMemcpyHtoAAsync_v2_ptsz, (CUarray d, size_t o, const void *p, size_t n, CUstream s), arrays(d, o, 0, false, NULL, 0, P(p), true, n, sim_pt(s), false))
F(cuMemcpyAtoH, (void *d, CUarray p, unsigned int o, unsigned int n), arrays(NULL, 0, P(d), true, p, o, 0, false, n, NULL, true))
F(cuMemcpyAtoH_v2, (void *d, CUarray p, size_t o, size_t n), arrays(NULL, 0, P(d), true, p, o, 0, false, n, NULL, true))
F(cuMemcpyAtoH_v2_ptds, (void *d, CUarray p, size_t o, size_t n), arrays(NULL, 0, P(d), true, p, o, 0, false, n, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemcpyAtoHAsync, (void *d, CUarray p, unsigned int o, unsigned int n, CUstream s), arrays(NULL, 0, P(d), true, p, o, 0, false, n, s, false))
F(cuMemcpyAtoHAsync_v2, (void *d, CUarray p, size_t o, size_t n, CUstream s), arrays(NULL, 0, P(d), true, p, o, 0, false, n, s, false))
F(cuMemcpyAtoHAsync_v2_ptsz, (void *d, CUarray p, size_t o, size_t n, CUstream s), arrays(NULL, 0, P(d), true, p, o, 0, false, n, sim_pt(s), false))
F(cuMemcpyAtoA, (CUarray d, unsigned int o, CUarray p, unsigned int q, unsigned int n), arrays(d, o, 0, false, p, q, 0, false, n, NULL, true))
F(cuMemcpyAtoA_v2, (CUarray d, size_t o, CUarray p, size_t q, size_t n), arrays(d, o, 0, false, p, q, 0, false, n, NULL, true))
F(cuMemcpyAtoA_v2_ptds, (CUarray d, size_t o, CUarray p, size_t q, size_t n), arrays(d, o, 0, false, p, q, 0, false, n, CU_STREAM_PER_THREAD_HANDLE, true))
/* --- two and three dimensions */
F(cuMemcpy2D, (const CUDA_MEMCPY2D_v1 *p), copy_2d_v1(p, NULL, true))
F(cuMemcpy2D_v2, (const CUDA_MEMCPY2D *p), copy_2d(p, NULL, true))
F(cuMemcpy2D_v2_ptds, (const CUDA_MEMCPY2D *p), copy_2d(p, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemcpy2DAsync, (const CUDA_MEMCPY2D_v1 *p, CUstream s), copy_2d_v1(p, s, false))
F(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *p, CUstream s), copy_2d(p, s, false))
F(cuMemcpy2DAsync_v2_ptsz, (const CUDA_MEMCPY2D *p, CUstream s), copy_2d(p, sim_pt(s), false))
F(cuMemcpy2DUnaligned, (const CUDA_MEMCPY2D_v1 *p), copy_2d_v1(p, NULL, true))
F(cuMemcpy2DUnaligned_v2, (const CUDA_MEMCPY2D *p), copy_2d(p, NULL, true))
F(cuMemcpy2DUnaligned_v2_ptds, (const CUDA_MEMCPY2D *p), copy_2d(p, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemcpy3D, (const CUDA_MEMCPY3D_v1 *p), copy_3d_v1(p, NULL, true))
F(cuMemcpy3D_v2, (const CUDA_MEMCPY3D *p), copy_3d(p, NULL, true))
F(cuMemcpy3D_v2_ptds, (const CUDA_MEMCPY3D *p), copy_3d(p, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemcpy3DAsync, (const CUDA_MEMCPY3D_v1 *p, CUstream s), copy_3d_v1(p, s, false))
F(cuMemcpy3DAsync_v2, (const CUDA_MEMCPY3D *p, CUstream s), copy_3d(p, s, false))
F(cuMemcpy3DAsync_v2_ptsz, (const CUDA_MEMCPY3D *p, CUstream s), copy_3d(p, sim_pt(s), false))
F(cuMemcpy3DPeer, (const CUDA_MEMCPY3D_PEER *p), copy_peer(p, NULL, true))
F(cuMemcpy3DPeer_ptds, (const CUDA_MEMCPY3D_PEER *p), copy_peer(p, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemcpy3DPeerAsync, (const CUDA_MEMCPY3D_PEER *p, CUstream s), copy_peer(p, s, false))
F(cuMemcpy3DPeerAsync_ptsz, (const CUDA_MEMCPY3D_PEER *p, CUstream s), copy_peer(p, sim_pt(s), false))
/* --- memsets: the asynchronous ones never had a second version */
F(cuMemsetD8, (CUdeviceptr_v1 d, unsigned char v, unsigned int n), set(d, 0, v, 1, n, 1, NULL, true))
F(cuMemsetD8_v2, (CUdeviceptr d, unsigned char v, size_t n), set(d, 0, v, 1, n, 1, NULL, true))
F(cuMemsetD8_v2_ptds, (CUdeviceptr d, unsigned char v, size_t n), set(d, 0, v, 1, n, 1, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemsetD8Async, (CUdeviceptr d, unsigned char v, size_t n, CUstream s), set(d, 0, v, 1, n, 1, s, false))
F(cuMemsetD8Async_ptsz, (CUdeviceptr d, unsigned char v, size_t n, CUstream s), set(d, 0, v, 1, n, 1, sim_pt(s), false))
F(cuMemsetD2D8, (CUdeviceptr_v1 d, unsigned int pitch, unsigned char v, unsigned int width, unsigned int n), set(d, pitch, v, 1, width, n, NULL, true))
F(cuMemsetD2D8_v2, (CUdeviceptr d, size_t pitch, unsigned char v, size_t width, size_t n), set(d, pitch, v, 1, width, n, NULL, true))
F(cuMemsetD2D8_v2_ptds, (CUdeviceptr d, size_t pitch, unsigned char v, size_t width, size_t n), set(d, pitch, v, 1, width, n, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemsetD2D8Async, (CUdeviceptr d, size_t pitch, unsigned char v, size_t width, size_t n, CUstream s), set(d, pitch, v, 1, width, n, s, false))
F(cuMemsetD2D8Async_ptsz, (CUdeviceptr d, size_t pitch, unsigned char v, size_t width, size_t n, CUstream s), set(d, pitch, v, 1, width, n, sim_pt(s), false))
F(cuMemsetD16, (CUdeviceptr_v1 d, unsigned short v, unsigned int n), set(d, 0, v, 2, n, 1, NULL, true))
F(cuMemsetD16_v2, (CUdeviceptr d, unsigned short v, size_t n), set(d, 0, v, 2, n, 1, NULL, true))
F(cuMemsetD16_v2_ptds, (CUdeviceptr d, unsigned short v, size_t n), set(d, 0, v, 2, n, 1, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemsetD16Async, (CUdeviceptr d, unsigned short v, size_t n, CUstream s), set(d, 0, v, 2, n, 1, s, false))
F(cuMemsetD16Async_ptsz, (CUdeviceptr d, unsigned short v, size_t n, CUstream s), set(d, 0, v, 2, n, 1, sim_pt(s), false))
F(cuMemsetD2D16, (CUdeviceptr_v1 d, unsigned int pitch, unsigned short v, unsigned int width, unsigned int n), set(d, pitch, v, 2, width, n, NULL, true))
F(cuMemsetD2D16_v2, (CUdeviceptr d, size_t pitch, unsigned short v, size_t width, size_t n), set(d, pitch, v, 2, width, n, NULL, true))
F(cuMemsetD2D16_v2_ptds, (CUdeviceptr d, size_t pitch, unsigned short v, size_t width, size_t n), set(d, pitch, v, 2, width, n, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemsetD2D16Async, (CUdeviceptr d, size_t pitch, unsigned short v, size_t width, size_t n, CUstream s), set(d, pitch, v, 2, width, n, s, false))
F(cuMemsetD2D16Async_ptsz, (CUdeviceptr d, size_t pitch, unsigned short v, size_t width, size_t n, CUstream s), set(d, pitch, v, 2, width, n, sim_pt(s), false))
F(cuMemsetD32, (CUdeviceptr_v1 d, unsigned int v, unsigned int n), set(d, 0, v, 4, n, 1, NULL, true))
F(cuMemsetD32_v2, (CUdeviceptr d, unsigned int v, size_t n), set(d, 0, v, 4, n, 1, NULL, true))
F(cuMemsetD32_v2_ptds, (CUdeviceptr d, unsigned int v, size_t n), set(d, 0, v, 4, n, 1, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemsetD32Async, (CUdeviceptr d, unsigned int v, size_t n, CUstream s), set(d, 0, v, 4, n, 1, s, false))
F(cuMemsetD32Async_ptsz, (CUdeviceptr d, unsigned int v, size_t n, CUstream s), set(d, 0, v, 4, n, 1, sim_pt(s), false))
F(cuMemsetD2D32, (CUdeviceptr_v1 d, unsigned int pitch, unsigned int v, unsigned int width, unsigned int n), set(d, pitch, v, 4, width, n, NULL, true))
F(cuMemsetD2D32_v2, (CUdeviceptr d, size_t pitch, unsigned int v, size_t width, size_t n), set(d, pitch, v, 4, width, n, NULL, true))
F(cuMemsetD2D32_v2_ptds, (CUdeviceptr d, size_t pitch, unsigned int v, size_t width, size_t n), set(d, pitch, v, 4, width, n, CU_STREAM_PER_THREAD_HANDLE, true))
F(cuMemsetD2D32Async, (CUdeviceptr d, size_t pitch, unsigned int v, size_t width, size_t n, CUstream s), set(d, pitch, v, 4, width, n, s, false))
F(cuMemsetD2D32Async_ptsz, (CUdeviceptr d, size_t pitch, unsigned int v, size_t width, size_t n, CUstream s), set(d, pitch, v, 4, width, n, sim_pt(s), false))
