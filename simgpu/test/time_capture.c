/* Stream capture: what becomes of a graph, and every way in which it goes wrong. */
#include <pthread.h>
#include "time_test.h"

#define MS 1000000ull

static size_t count_nodes(CUgraph g)
{
	size_t n = 0;
	OK(cuGraphGetNodes(g, NULL, &n));
	return n;
}

/* Two streams, forked and joined with events; the graph then runs as one. */
static void test_fork_join(void)
{
	setup();
	CUstream a = stream(), b = stream();
	CUevent fork_e = event(), join_e = event();
	CUstreamCaptureStatus st;
	CUgraph g = NULL;
	CUgraphExec x;
	cuuint64_t id1 = 0, id2 = 0;
	OK(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_GLOBAL));
	launch_spin(a, 5 * MS);
	OK(cuEventRecord(fork_e, a));
	OK(cuStreamWaitEvent(b, fork_e, 0));
	launch_spin(b, 7 * MS);
	OK(cuEventRecord(join_e, b));
	OK(cuStreamIsCapturing(b, &st));
	CHECK(st == CU_STREAM_CAPTURE_STATUS_ACTIVE, "%d", st);
	OK(cuStreamGetCaptureInfo(a, &st, &id1));
	OK(cuStreamGetCaptureInfo(b, &st, &id2));
	CHECK(id1 == id2 && id1 != 0, "");
	launch_spin(a, 3 * MS);
	OK(cuStreamWaitEvent(a, join_e, 0));
	launch_spin(a, MS);
	CUgraph inside;
	const CUgraphNode *dep;
	size_t n;
	OK(cuStreamGetCaptureInfo_v2(a, &st, &id1, &inside, &dep, &n));
	CHECK(n == 1, "%zu", n);
	OK(cuStreamEndCapture(a, &g));
	CHECK(g == inside && count_nodes(g) == 4, "%zu", count_nodes(g));
	CHECK(busy_ns(0, getpid()) == 0, "nothing ran");
	OK(cuStreamIsCapturing(b, &st));
	CHECK(st == CU_STREAM_CAPTURE_STATUS_NONE, "%d", st);
	WANT(CUDA_ERROR_CAPTURED_EVENT, cuEventQuery(fork_e));
	size_t edges = 0;
	OK(cuGraphGetEdges(g, NULL, NULL, &edges));
	CHECK(edges == 4, "%zu", edges);
	OK(cuGraphInstantiateWithFlags(&x, g, 0));
	OK(cuGraphDestroy(g));
	OK(cuGraphLaunch(x, a));
	OK(cuGraphLaunch(x, b));
	OK(cuCtxSynchronize());
	CHECK(busy_ns(0, getpid()) == 32 * MS, "%llu", (unsigned long long)busy_ns(0, getpid()));
	OK(cuEventRecord(fork_e, a)); /* usable again */
	OK(cuEventSynchronize(fork_e));
	OK(cuGraphExecDestroy(x));
}

static void test_errors(void)
{
	setup();
	CUstream a = stream(), b = stream(), blocking;
	CUevent e = event(), e2 = event();
	CUstreamCaptureStatus st;
	CUgraph g = (CUgraph)1;
	OK(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
	WANT(CUDA_ERROR_ILLEGAL_STATE, cuStreamEndCapture(a, &g));
	WANT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamBeginCapture_v2(NULL, 0));

	/* asking a capturing stream: 900, then everything 901 */
	OK(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED));
	WANT(CUDA_ERROR_ILLEGAL_STATE, cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED));
	WANT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamQuery(a));
	OK(cuStreamIsCapturing(a, &st));
	CHECK(st == CU_STREAM_CAPTURE_STATUS_INVALIDATED, "%d", st);
	WANT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuEventRecord(e, a));
	WANT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(a, &g));
	CHECK(g == NULL, "");
	launch_spin(a, 1000); /* and it is an ordinary stream again */
	OK(cuStreamSynchronize(a));

	/* 902: two captures can't merge */
	OK(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED));
	OK(cuStreamBeginCapture_v2(b, CU_STREAM_CAPTURE_MODE_RELAXED));
	OK(cuEventRecord(e, a));
	WANT(CUDA_ERROR_STREAM_CAPTURE_MERGE, cuStreamWaitEvent(b, e, 0));
	WANT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(a, &g));
	WANT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(b, &g));

	/* 903: ended on a stream that joined later; 904: fork not joined */
	OK(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED));
	OK(cuEventRecord(e, a));
	OK(cuStreamWaitEvent(b, e, 0));
	launch_spin(b, MS);
	WANT(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, cuStreamEndCapture(b, &g));
	WANT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(a, &g));
	OK(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED));
	OK(cuEventRecord(e, a));
	OK(cuStreamWaitEvent(b, e, 0));
	launch_spin(b, MS);
	WANT(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, cuStreamEndCapture(a, &g));
	OK(cuStreamIsCapturing(b, &st));
	CHECK(st == CU_STREAM_CAPTURE_STATUS_NONE, "%d", st);

	/* 905: waiting for work outside */
	OK(cuEventRecord(e2, b));
	OK(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED));
	WANT(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, cuStreamWaitEvent(a, e2, 0));
	WANT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(a, &g));

	/* 906: the legacy stream while a blocking stream captures. Asking leaves the capture alone. */
	OK(cuStreamBeginCapture_v2(blocking, CU_STREAM_CAPTURE_MODE_RELAXED));
	WANT(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, cuStreamIsCapturing(NULL, &st));
	OK(cuStreamIsCapturing(blocking, &st));
	CHECK(st == CU_STREAM_CAPTURE_STATUS_ACTIVE, "%d", st);
	WANT(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, cuEventRecord(e2, NULL));
	WANT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(blocking, &g));
	/* not so for a non-blocking one */
	OK(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED));
	OK(cuStreamIsCapturing(NULL, &st));
	OK(cuEventRecord(e2, NULL));
	OK(cuStreamEndCapture(a, &g));
	OK(cuGraphDestroy(g));

	/* 907: an event that was recorded in a capture */
	OK(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED));
	OK(cuEventRecord(e, a));
	WANT(CUDA_ERROR_CAPTURED_EVENT, cuEventQuery(e));
	WANT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(a, &g));
	OK(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED));
	WANT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuCtxSynchronize());
	WANT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(a, &g));
}

static CUstream shared_stream;
static CUevent shared_event;
static CUresult in_thread[4];

static void *ask_from_thread(void *arg)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	CUgraph g;
	(void)arg;
	cuCtxSetCurrent(ctx0);
	cuThreadExchangeStreamCaptureMode(&mode);
	in_thread[0] = cuEventQuery(shared_event); /* relaxed: allowed */
	in_thread[1] = cuStreamEndCapture(shared_stream, &g);
	cuThreadExchangeStreamCaptureMode(&mode);
	in_thread[2] = cuEventQuery(shared_event); /* global again: breaks a global capture */
	return NULL;
}

/* Which calls of which thread break which capture. */
static void test_modes(void)
{
	setup();
	CUgraph g;
	CUdeviceptr d;
	pthread_t t;
	shared_stream = stream();
	shared_event = event();
	CUstreamCaptureMode relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;

	OK(cuStreamBeginCapture_v2(shared_stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
	pthread_create(&t, NULL, ask_from_thread, NULL);
	pthread_join(t, NULL);
	CHECK(in_thread[0] == CUDA_SUCCESS, "%d", in_thread[0]);
	CHECK(in_thread[1] == CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "%d", in_thread[1]);
	CHECK(in_thread[2] == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "%d", in_thread[2]);
	WANT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(shared_stream, &g));

	OK(cuStreamBeginCapture_v2(shared_stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	pthread_create(&t, NULL, ask_from_thread, NULL);
	pthread_join(t, NULL);
	CHECK(in_thread[2] == CUDA_SUCCESS, "other threads do not matter: %d", in_thread[2]);
	WANT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuMemAlloc_v2(&d, 1024));
	WANT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(shared_stream, &g));

	OK(cuStreamBeginCapture_v2(shared_stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	OK(cuMemAlloc_v2(&d, 1024));
	OK(cuEventQuery(shared_event));
	OK(cuStreamEndCapture(shared_stream, &g));
	OK(cuGraphDestroy(g));

	OK(cuStreamBeginCapture_v2(shared_stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
	OK(cuThreadExchangeStreamCaptureMode(&relaxed));
	CHECK(relaxed == CU_STREAM_CAPTURE_MODE_GLOBAL, "the old one comes back");
	OK(cuEventQuery(shared_event));
	OK(cuThreadExchangeStreamCaptureMode(&relaxed));
	OK(cuStreamEndCapture(shared_stream, &g));
	OK(cuGraphDestroy(g));
}

/* Copies, host functions, memory and other graphs in a capture; capture into a given graph. */
static void nothing(void *p)
{
	++*(int *)p;
}

static void test_kinds(void)
{
	setup();
	CUstream s = stream();
	CUdeviceptr d, m;
	CUgraph g, mine;
	CUgraphExec x;
	CUgraphNode n[16], extra;
	size_t count = 16;
	int calls = 0;
	static uint32_t in = 77, out;
	OK(cuMemAlloc_v2(&d, 4096));
	OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
	OK(cuMemcpyHtoDAsync_v2(d, &in, 4, s));
	OK(cuMemsetD32Async(d + 4, 9, 1, s));
	OK(cuLaunchHostFunc(s, nothing, &calls));
	OK(cuMemAllocAsync(&m, 1 << 20, s));
	OK(cuMemcpyDtoDAsync_v2(m, d, 4, s));
	OK(cuMemcpyDtoHAsync_v2(&out, m, 4, s));
	OK(cuMemFreeAsync(m, s));
	OK(cuStreamEndCapture(s, &g));
	OK(cuGraphGetNodes(g, n, &count));
	const CUgraphNodeType want[] = { CU_GRAPH_NODE_TYPE_MEMCPY, CU_GRAPH_NODE_TYPE_MEMSET,
					 CU_GRAPH_NODE_TYPE_HOST, CU_GRAPH_NODE_TYPE_MEM_ALLOC,
					 CU_GRAPH_NODE_TYPE_MEMCPY, CU_GRAPH_NODE_TYPE_MEMCPY,
					 CU_GRAPH_NODE_TYPE_MEM_FREE };
	CHECK(count == 7, "%zu", count);
	for (size_t i = 0; i < 7 && count == 7; i++) {
		CUgraphNodeType t;
		OK(cuGraphNodeGetType(n[i], &t));
		CHECK(t == want[i], "%zu: %d", i, t);
	}
	CHECK(out == 0 && calls == 0, "nothing happened yet");
	OK(cuGraphInstantiateWithFlags(&x, g, 0));
	OK(cuGraphLaunch(x, s));
	OK(cuStreamSynchronize(s));
	CHECK(out == 77 && calls == 1, "%u %d", out, calls);
	in = 78;
	OK(cuGraphLaunch(x, s));
	OK(cuStreamSynchronize(s));
	CHECK(out == 78 && calls == 2, "%u %d", out, calls);

	OK(cuGraphCreate(&mine, 0));
	OK(cuGraphAddEmptyNode(&extra, mine, NULL, 0));
	OK(cuStreamBeginCaptureToGraph(s, mine, &extra, NULL, 1, CU_STREAM_CAPTURE_MODE_GLOBAL));
	launch_spin(s, MS);
	OK(cuStreamUpdateCaptureDependencies(s, &extra, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES));
	launch_spin(s, MS);
	OK(cuStreamEndCapture(s, &g));
	CHECK(g == mine && count_nodes(mine) == 3, "");
	size_t roots = 0;
	OK(cuGraphNodeGetDependentNodes(extra, NULL, &roots));
	CHECK(roots == 2, "%zu", roots);
	OK(cuGraphExecDestroy(x));
	OK(cuGraphDestroy(mine));
}

const struct test capture_tests[] = { { "capture: fork and join", test_fork_join },
				      { "capture: errors", test_errors },
				      { "capture: modes", test_modes },
				      { "capture: kinds of nodes", test_kinds },
				      { NULL, NULL } };
