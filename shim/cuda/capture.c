/* Stream capture: how many are going on in the process, so that the meter can stand aside. What
 * is captured does not run and is not charged; the graph is, when it is launched.
 *
 * Counted before the driver begins a capture and until it has surely ended: too many means only
 * that each launch asks whether its stream captures. */
#include "compat.h"
#include "meter.h"
#include "real.h"

#define DEFINE_BEGIN(name, PARAMS, ARGS)                                                           \
	CUresult EXPORT name PARAMS                                                                \
	{                                                                                          \
		tr_meter_capture(1);                                                               \
		CUresult r = REAL(name) ARGS;                                                      \
		if (r != CUDA_SUCCESS)                                                             \
			tr_meter_capture(-1);                                                      \
		return r;                                                                          \
	}
#define DEFINE_END(name)                                                                           \
	CUresult EXPORT name(CUstream hStream, CUgraph *phGraph)                                   \
	{                                                                                          \
		CUresult r = REAL(name)(hStream, phGraph);                                         \
		if (ended(r))                                                                      \
			tr_meter_capture(-1);                                                      \
		return r;                                                                          \
	}

/* Whether an attempt to end a capture ended it: by success, or because it had been spoilt. */
static bool ended(CUresult r)
{
	return r == CUDA_SUCCESS || r == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED ||
	       r == CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
}

DEFINE_BEGIN(cuStreamBeginCapture, (CUstream hStream), (hStream))
DEFINE_BEGIN(cuStreamBeginCapture_ptsz, (CUstream hStream), (hStream))
DEFINE_BEGIN(cuStreamBeginCapture_v2, (CUstream hStream, CUstreamCaptureMode mode), (hStream, mode))
DEFINE_BEGIN(cuStreamBeginCapture_v2_ptsz, (CUstream hStream, CUstreamCaptureMode mode),
	     (hStream, mode))

#define TO_GRAPH_PARAMS                                                                            \
	(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,                        \
	 const CUgraphEdgeData *dependencyData, size_t numDependencies, CUstreamCaptureMode mode)
#define TO_GRAPH_ARGS (hStream, hGraph, dependencies, dependencyData, numDependencies, mode)
DEFINE_BEGIN(cuStreamBeginCaptureToGraph, TO_GRAPH_PARAMS, TO_GRAPH_ARGS)
DEFINE_BEGIN(cuStreamBeginCaptureToGraph_ptsz, TO_GRAPH_PARAMS, TO_GRAPH_ARGS)
DEFINE_END(cuStreamEndCapture)
DEFINE_END(cuStreamEndCapture_ptsz)
