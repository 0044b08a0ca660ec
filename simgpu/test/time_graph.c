/* Graphs made by hand: what they run, how they change. */
#include "time_test.h"

#define MS 1000000ull

static CUDA_KERNEL_NODE_PARAMS_v1 spin_node(void **params)
{
	return (CUDA_KERNEL_NODE_PARAMS_v1){ .func = spin, .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1,
					     .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1,
					     .kernelParams = params };
}

static CUgraphNode add_spin(CUgraph g, CUgraphNode after, uint64_t ns)
{
	void *params[] = { &ns };
	CUDA_KERNEL_NODE_PARAMS_v1 p = spin_node(params);
	CUgraphNode n = NULL;
	OK(cuGraphAddKernelNode(&n, g, after ? &after : NULL, after ? 1 : 0, &p));
	return n;
}

static uint64_t run(CUgraphExec x)
{
	uint64_t before = busy_ns(0, getpid());
	OK(cuGraphLaunch(x, NULL));
	OK(cuCtxSynchronize());
	return busy_ns(0, getpid()) - before;
}

static void test_kernels(void)
{
	setup();
	CUgraph g, child;
	CUgraphExec x;
	CUgraphNode last = NULL, first = NULL;
	OK(cuGraphCreate(&g, 0));
	for (int i = 0; i < 50; i++) {
		last = add_spin(g, last, 100000);
		if (!first)
			first = last;
	}
	OK(cuGraphInstantiate_v2(&x, g, NULL, NULL, 0));
	CHECK(run(x) == 5 * MS, "");

	/* one node of the executable graph changes, the graph does not */
	uint64_t ns = 3 * MS;
	void *params[] = { &ns };
	CUDA_KERNEL_NODE_PARAMS_v1 p = spin_node(params), q;
	OK(cuGraphExecKernelNodeSetParams(x, first, &p));
	CHECK(run(x) == 5 * MS + 2900000, "");
	OK(cuGraphKernelNodeGetParams(first, &q));
	CHECK(q.func == spin && *(uint64_t *)q.kernelParams[0] == 100000, "");
	OK(cuGraphNodeSetEnabled(x, first, 0));
	CHECK(run(x) == 4900000, "");

	/* the graph changes and is taken over */
	ns = 2 * MS;
	OK(cuGraphKernelNodeSetParams(last, &p));
	CUgraphExecUpdateResultInfo info;
	OK(cuGraphExecUpdate_v2(x, g, &info));
	OK(cuGraphNodeSetEnabled(x, first, 1));
	CHECK(run(x) == 4900000 + 2 * MS, "");
	add_spin(g, last, MS);
	WANT(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, cuGraphExecUpdate_v2(x, g, &info));
	CHECK(info.result == CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, "%d", info.result);
	OK(cuGraphExecDestroy(x));
	WANT(CUDA_ERROR_INVALID_VALUE, cuGraphLaunch(NULL, NULL));

	/* as a child, twice, in a clone */
	CUgraph parent, clone;
	CUgraphNode c1, c2;
	OK(cuGraphClone(&child, g));
	OK(cuGraphDestroy(g));
	OK(cuGraphCreate(&parent, 0));
	OK(cuGraphAddChildGraphNode(&c1, parent, NULL, 0, child));
	OK(cuGraphAddChildGraphNode(&c2, parent, &c1, 1, child));
	OK(cuGraphDestroy(child));
	OK(cuGraphClone(&clone, parent));
	CUgraphNode found;
	OK(cuGraphNodeFindInClone(&found, c2, clone));
	OK(cuGraphInstantiateWithFlags(&x, clone, 0));
	CHECK(run(x) == 2 * (4900000 + 2 * MS + MS), "");
	OK(cuGraphDestroy(parent));
	OK(cuGraphDestroy(clone));
	OK(cuGraphExecDestroy(x));
}

static void note(void *p)
{
	*(char *)p = 'x';
}

static void test_others(void)
{
	setup();
	CUgraph g;
	CUgraphExec x;
	CUgraphNode n1, n2, n3, n4, n5;
	CUevent e1 = event(), e2 = event(), e3 = event();
	CUdeviceptr d;
	static char called;
	static uint32_t out[4];
	OK(cuMemAlloc_v2(&d, 4096));
	OK(cuGraphCreate(&g, 0));
	CUDA_MEMSET_NODE_PARAMS set = { .dst = d, .value = 0x1234, .elementSize = 4, .width = 4, .height = 1 };
	OK(cuGraphAddMemsetNode(&n1, g, NULL, 0, &set, ctx0));
	CUDA_MEMCPY3D copy = { .srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = d,
			       .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = out, .WidthInBytes = 16,
			       .Height = 1, .Depth = 1 };
	OK(cuGraphAddMemcpyNode(&n2, g, &n1, 1, &copy, ctx0));
	OK(cuGraphAddEventRecordNode(&n3, g, &n2, 1, e1));
	n4 = add_spin(g, n3, 4 * MS);
	OK(cuGraphAddEventRecordNode(&n5, g, &n4, 1, e2));
	CUDA_HOST_NODE_PARAMS host = { .fn = note, .userData = &called };
	OK(cuGraphAddHostNode(&n1, g, &n5, 1, &host));
	OK(cuGraphInstantiateWithFlags(&x, g, 0));
	CHECK(out[0] == 0, "");
	run(x);
	CHECK(out[3] == 0x1234 && called == 'x', "%x %c", out[3], called);
	float ms = elapsed_ms(e1, e2);
	CHECK(ms > 3.999 && ms < 4.001, "%f", ms);
	OK(cuGraphExecEventRecordNodeSetEvent(x, n5, e3));
	run(x);
	ms = elapsed_ms(e1, e3);
	CHECK(ms > 3.999 && ms < 4.001, "%f", ms);

	/* a cycle can't run */
	OK(cuGraphAddDependencies(g, &n4, &n3, 1));
	CUgraphExec bad;
	WANT(CUDA_ERROR_INVALID_VALUE, cuGraphInstantiateWithFlags(&bad, g, 0));
	OK(cuGraphRemoveDependencies(g, &n4, &n3, 1));
	OK(cuGraphInstantiateWithFlags(&bad, g, 0));
	OK(cuGraphDebugDotPrint(g, "/dev/null", 0));
}

/* Memory of a graph: none before the launch, given back to the pool by the free node. */
static void test_memory(void)
{
	setup();
	CUgraph g;
	CUgraphExec x, second;
	CUgraphNode a, f, c;
	cuuint64_t used = 1, high = 0;
	static uint32_t in = 5, out;
	CUDA_MEM_ALLOC_NODE_PARAMS p = { .poolProps = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
							.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } },
					 .bytesize = 8 << 20 };
	OK(cuGraphCreate(&g, 0));
	OK(cuGraphAddMemAllocNode(&a, g, NULL, 0, &p));
	CHECK(p.dptr != 0, "");
	CUDA_MEMCPY3D to = { .srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = &in,
			     .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = p.dptr,
			     .WidthInBytes = 4, .Height = 1, .Depth = 1 };
	CUDA_MEMCPY3D from = { .srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = p.dptr,
			       .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = &out, .WidthInBytes = 4,
			       .Height = 1, .Depth = 1 };
	OK(cuGraphAddMemcpyNode(&c, g, &a, 1, &to, ctx0));
	OK(cuGraphAddMemcpyNode(&c, g, &c, 1, &from, ctx0));
	OK(cuGraphAddMemFreeNode(&f, g, &c, 1, p.dptr));
	OK(cuGraphInstantiateWithFlags(&x, g, 0));
	WANT(CUDA_ERROR_NOT_SUPPORTED, cuGraphInstantiateWithFlags(&second, g, 0));
	OK(cuDeviceGetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &used));
	CHECK(used == 0, "%llu", (unsigned long long)used);
	run(x);
	CHECK(out == 5, "%u", out);
	OK(cuDeviceGetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &used));
	OK(cuDeviceGetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, &high));
	CHECK(used == 0 && high >= 8 << 20, "%llu %llu", (unsigned long long)used, (unsigned long long)high);
	OK(cuGraphExecDestroy(x));
	OK(cuGraphDestroy(g));
}

const struct test graph_tests[] = { { "graph: kernels", test_kernels },
				    { "graph: other nodes", test_others },
				    { "graph: memory", test_memory },
				    { NULL, NULL } };
