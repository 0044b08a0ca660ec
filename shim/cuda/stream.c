/* Calls in which a thread waits for the GPU, or puts something else than a launch on a stream:
 * the open batch ends there, so that its time ends when its work does. */
#include "compat.h"
#include "meter.h"
#include "pool.h"
#include "real.h"

#define DEFINE(name, PARAMS, ARGS, WHAT)                                                           \
	CUresult EXPORT name PARAMS                                                                \
	{                                                                                          \
		if (tr_meter_on())                                                                 \
			WHAT;                                                                      \
		return REAL(name) ARGS;                                                            \
	}

/* --- waiting --------------------------------------------------------------------------------- */

/* A good moment to notice a limit set or lifted while the program runs, and memory that pools have
 * returned, too. */
#define DEFINE_WAIT(name, PARAMS, ARGS)                                                            \
	CUresult EXPORT name PARAMS                                                                \
	{                                                                                          \
		tr_meter_rearm();                                                                  \
		if (tr_meter_on())                                                                 \
			tr_meter_pause();                                                          \
		CUresult r = REAL(name) ARGS;                                                      \
		tr_pools_after_sync();                                                             \
		return r;                                                                          \
	}
DEFINE_WAIT(cuStreamSynchronize, (CUstream hStream), (hStream))
DEFINE_WAIT(cuStreamSynchronize_ptsz, (CUstream hStream), (hStream))
DEFINE_WAIT(cuCtxSynchronize, (void), ())
DEFINE_WAIT(cuEventSynchronize, (CUevent hEvent), (hEvent))
DEFINE_WAIT(cuMemcpyDtoH_v2, (void *dstHost, CUdeviceptr srcDevice, size_t ByteCount),
	    (dstHost, srcDevice, ByteCount))
DEFINE_WAIT(cuMemcpyDtoH_v2_ptds, (void *dstHost, CUdeviceptr srcDevice, size_t ByteCount),
	    (dstHost, srcDevice, ByteCount))
DEFINE_WAIT(cuMemcpyHtoD_v2, (CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount),
	    (dstDevice, srcHost, ByteCount))
DEFINE_WAIT(cuMemcpyHtoD_v2_ptds, (CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount),
	    (dstDevice, srcHost, ByteCount))
DEFINE_WAIT(cuMemcpy, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount), (dst, src, ByteCount))
DEFINE_WAIT(cuMemcpy_ptds, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount),
	    (dst, src, ByteCount))

/* Programs wait by polling with these. After the first poll there is nothing left to close. */
DEFINE(cuStreamQuery, (CUstream hStream), (hStream), tr_meter_pause())
DEFINE(cuStreamQuery_ptsz, (CUstream hStream), (hStream), tr_meter_pause())

/* --- something else on the stream ------------------------------------------------------------ */

DEFINE(cuMemcpyHtoDAsync_v2,
       (CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream),
       (dstDevice, srcHost, ByteCount, hStream), tr_meter_foreign(hStream, false))
DEFINE(cuMemcpyHtoDAsync_v2_ptsz,
       (CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream),
       (dstDevice, srcHost, ByteCount, hStream), tr_meter_foreign(hStream, true))
DEFINE(cuMemcpyDtoHAsync_v2,
       (void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream),
       (dstHost, srcDevice, ByteCount, hStream), tr_meter_foreign(hStream, false))
DEFINE(cuMemcpyDtoHAsync_v2_ptsz,
       (void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream),
       (dstHost, srcDevice, ByteCount, hStream), tr_meter_foreign(hStream, true))
DEFINE(cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream),
       (dst, src, ByteCount, hStream), tr_meter_foreign(hStream, false))
DEFINE(cuMemcpyAsync_ptsz, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream),
       (dst, src, ByteCount, hStream), tr_meter_foreign(hStream, true))
DEFINE(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *pCopy, CUstream hStream), (pCopy, hStream),
       tr_meter_foreign(hStream, false))
DEFINE(cuMemcpy2DAsync_v2_ptsz, (const CUDA_MEMCPY2D *pCopy, CUstream hStream), (pCopy, hStream),
       tr_meter_foreign(hStream, true))
DEFINE(cuLaunchHostFunc, (CUstream hStream, CUhostFn fn, void *userData), (hStream, fn, userData),
       tr_meter_foreign(hStream, false))
DEFINE(cuLaunchHostFunc_ptsz, (CUstream hStream, CUhostFn fn, void *userData),
       (hStream, fn, userData), tr_meter_foreign(hStream, true))
DEFINE(cuStreamWaitEvent, (CUstream hStream, CUevent hEvent, unsigned int Flags),
       (hStream, hEvent, Flags), tr_meter_foreign(hStream, false))
DEFINE(cuStreamWaitEvent_ptsz, (CUstream hStream, CUevent hEvent, unsigned int Flags),
       (hStream, hEvent, Flags), tr_meter_foreign(hStream, true))

/* --- the end of a stream --------------------------------------------------------------------- */

DEFINE(cuStreamDestroy, (CUstream hStream), (hStream), tr_meter_stream_gone(hStream))
DEFINE(cuStreamDestroy_v2, (CUstream hStream), (hStream), tr_meter_stream_gone(hStream))
