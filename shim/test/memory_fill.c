/* Every family of allocations: to the limit, to one granule of the family; one granule more is refused;
 * what one gives back another may have; at the end all is as before. */
#include "suite.h"
#include <string.h>

struct family {
	const char *name;
	uint64_t granule; /* bytes that one piece takes */
	CUresult (*take)(uint64_t *handle);
	CUresult (*drop)(uint64_t handle);
	void (*settle)(void); /* makes the driver take back what was dropped */
	bool unseen;	      /* the simulator does not model this memory: the ledger only */
};

static void settle(const struct family *f)
{
	if (f->settle != NULL)
		f->settle();
}

#define PIECES 4096

static void fill(const struct family *f)
{
	static uint64_t handle[PIECES];
	uint64_t extra;
	CUresult r = CUDA_SUCCESS;
	int n = 0;
	start();
	uint64_t before = charged(0), room = LIMIT - before;
	both(0, CONTEXT);
	while (n < PIECES && (r = f->take(&handle[n])) == CUDA_SUCCESS)
		n++;
	IS(r, OOM);
	uint64_t full = charged(0);
	printf("  %-16s %4d x %8llu bytes: %llu of %llu, the driver says %llu\n", f->name, n,
	       (unsigned long long)f->granule, (unsigned long long)full, (unsigned long long)LIMIT,
	       (unsigned long long)sim_used(0));
	EQUAL(n, room / f->granule);
	EQUAL(full, before + (uint64_t)n * f->granule);
	if (!f->unseen)
		EQUAL(sim_used(0), full);
	CHECK(suite_ledger->account[0].allocs_refused > 0);
	IS(f->take(&extra), OOM);
	OK(f->drop(handle[0]));
	settle(f);
	OK(f->take(&handle[0]));
	IS(f->take(&extra), OOM);
	EQUAL(charged(0), full);
	while (n > 0)
		OK(f->drop(handle[--n]));
	settle(f);
	both(0, before);
}

/* --- plain --------------------------------------------------------------------------------- */

static CUresult plain(uint64_t *h)
{
	return cuMemAlloc_v2((CUdeviceptr *)h, 2 * MIB);
}

static CUresult plain_free(uint64_t h)
{
	return cuMemFree_v2(h);
}

/* Four to a block of 2 MiB. The last block of all gets no more than one: that the others would fit
 * is not known before. */
static CUresult small(uint64_t *h)
{
	CUdeviceptr *p = calloc(4, sizeof *p);
	CUresult r = cuMemAlloc_v2(&p[0], 512 << 10);
	for (int i = 1; i < 4 && r == CUDA_SUCCESS; i++)
		if (cuMemAlloc_v2(&p[i], 512 << 10) != CUDA_SUCCESS)
			p[i] = 0;
	*h = (uint64_t)(uintptr_t)p;
	return r;
}

static CUresult small_free(uint64_t h)
{
	CUdeviceptr *p = (CUdeviceptr *)(uintptr_t)h;
	for (int i = 0; i < 4; i++)
		if (p[i] != 0)
			OK(cuMemFree_v2(p[i]));
	free(p);
	return CUDA_SUCCESS;
}

static CUresult managed(uint64_t *h)
{
	return cuMemAllocManaged((CUdeviceptr *)h, 2 * MIB - 100, CU_MEM_ATTACH_GLOBAL);
}

static CUresult pitched(uint64_t *h)
{
	size_t pitch;
	return cuMemAllocPitch_v2((CUdeviceptr *)h, &pitch, 1000, 2048, 4);
}

static CUresult first_generation(uint64_t *h)
{
	CUdeviceptr_v1 p = 0;
	CUresult r = cuMemAlloc(&p, 4 << 20);
	*h = p;
	return r;
}

static CUresult first_generation_free(uint64_t h)
{
	return cuMemFree((CUdeviceptr_v1)h);
}

/* --- arrays -------------------------------------------------------------------------------- */

static CUresult array_2d(uint64_t *h)
{
	CUDA_ARRAY_DESCRIPTOR d = {
		.Width = 256, .Height = 256, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
	return cuArrayCreate_v2((CUarray *)h, &d);
}

static CUresult array_layered(uint64_t *h)
{
	CUDA_ARRAY3D_DESCRIPTOR d = {.Width = 256,
				     .Height = 256,
				     .Depth = 4,
				     .Flags = 1,
				     .Format = CU_AD_FORMAT_FLOAT,
				     .NumChannels = 1};
	return cuArray3DCreate_v2((CUarray *)h, &d);
}

static CUresult array_free(uint64_t h)
{
	return cuArrayDestroy((CUarray)(uintptr_t)h);
}

/* 512 x 512 floats and the nine smaller levels: 1366 KiB in gobs, in pages of 64 KiB. */
static CUresult mipmap(uint64_t *h)
{
	CUDA_ARRAY3D_DESCRIPTOR d = {
		.Width = 512, .Height = 512, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
	return cuMipmappedArrayCreate((CUmipmappedArray *)h, &d, 10);
}

static CUresult mipmap_free(uint64_t h)
{
	return cuMipmappedArrayDestroy((CUmipmappedArray)(uintptr_t)h);
}

/* --- stream-ordered ------------------------------------------------------------------------ */

static void synchronise(void)
{
	OK(cuStreamSynchronize(NULL));
}

static CUresult async(uint64_t *h)
{
	return cuMemAllocAsync((CUdeviceptr *)h, 32 * MIB, NULL);
}

static CUresult async_free(uint64_t h)
{
	return cuMemFreeAsync(h, NULL);
}

static const CUmemPoolProps pool_props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
					  .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
static CUmemoryPool own_pool;

static CUresult pooled(uint64_t *h)
{
	if (own_pool == NULL)
		OK(cuMemPoolCreate(&own_pool, &pool_props));
	return cuMemAllocFromPoolAsync((CUdeviceptr *)h, 20 * MIB, own_pool, NULL);
}

/* --- graphs -------------------------------------------------------------------------------- */

struct graph {
	CUgraph graph;
	CUgraphExec exec;
	CUdeviceptr ptr;
};

static CUresult graph(uint64_t *h)
{
	struct graph *g = calloc(1, sizeof *g);
	CUgraphNode node;
	CUDA_MEM_ALLOC_NODE_PARAMS p = {.poolProps = pool_props, .bytesize = 32 * MIB};
	OK(cuGraphCreate(&g->graph, 0));
	OK(cuGraphAddMemAllocNode(&node, g->graph, NULL, 0, &p));
	g->ptr = p.dptr;
	OK(cuGraphInstantiateWithFlags(&g->exec, g->graph, 0));
	CUresult r = cuGraphLaunch(g->exec, NULL);
	*h = (uint64_t)(uintptr_t)g;
	if (r == CUDA_SUCCESS)
		return cuStreamSynchronize(NULL);
	OK(cuGraphExecDestroy(g->exec));
	OK(cuGraphDestroy(g->graph));
	free(g);
	return r;
}

static CUresult graph_free(uint64_t h)
{
	struct graph *g = (struct graph *)(uintptr_t)h;
	OK(cuMemFreeAsync(g->ptr, NULL));
	OK(cuStreamSynchronize(NULL));
	OK(cuGraphExecDestroy(g->exec));
	OK(cuGraphDestroy(g->graph));
	free(g);
	return CUDA_SUCCESS;
}

static void graph_trim(void)
{
	OK(cuDeviceGraphMemTrim(0));
}

/* --- others -------------------------------------------------------------------------------- */

static CUresult vmm(uint64_t *h)
{
	CUmemAllocationProp p = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
				 .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
	return cuMemCreate((CUmemGenericAllocationHandle *)h, 2 * MIB, &p, 0);
}

static CUresult vmm_free(uint64_t h)
{
	return cuMemRelease(h);
}

static CUresult context(uint64_t *h)
{
	return cuCtxCreate_v2((CUcontext *)h, 0, 0);
}

static CUresult context_free(uint64_t h)
{
	return cuCtxDestroy_v2((CUcontext)(uintptr_t)h);
}

static uint64_t heap_now = 8 * MIB;

static CUresult heap(uint64_t *h)
{
	CUresult r = cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, heap_now + 2 * MIB);
	*h = 1;
	heap_now += r == CUDA_SUCCESS ? 2 * MIB : 0;
	return r;
}

static CUresult heap_free(uint64_t h)
{
	(void)h;
	heap_now -= 2 * MIB;
	return cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, heap_now);
}

static CUresult external(uint64_t *h)
{
	CUDA_EXTERNAL_MEMORY_HANDLE_DESC d = {.type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD,
					      .handle.fd = -1,
					      .size = 2 * MIB};
	return cuImportExternalMemory((CUexternalMemory *)h, &d);
}

static CUresult external_free(uint64_t h)
{
	return cuDestroyExternalMemory((CUexternalMemory)(uintptr_t)h);
}

#define FAMILY(fn, ...)                                                                            \
	static void fill_##fn(void)                                                                \
	{                                                                                          \
		fill(&(struct family){#fn, __VA_ARGS__});                                          \
	}
FAMILY(plain, 2 * MIB, plain, plain_free, NULL, false)
FAMILY(small, 2 * MIB, small, small_free, NULL, false)
FAMILY(managed, 2 * MIB, managed, plain_free, NULL, false)
FAMILY(pitched, 2 * MIB, pitched, plain_free, NULL, false)
FAMILY(first_generation, 4 * MIB, first_generation, first_generation_free, NULL, false)
FAMILY(array_2d, 256 << 10, array_2d, array_free, NULL, false)
FAMILY(array_layered, MIB, array_layered, array_free, NULL, false)
FAMILY(mipmap, 1408 << 10, mipmap, mipmap_free, NULL, false)
FAMILY(async, 32 * MIB, async, async_free, synchronise, false)
FAMILY(pooled, 32 * MIB, pooled, async_free, synchronise, false)
FAMILY(graph, 32 * MIB, graph, graph_free, graph_trim, false)
FAMILY(vmm, 2 * MIB, vmm, vmm_free, NULL, false)
FAMILY(context, CONTEXT, context, context_free, NULL, false)
FAMILY(heap, 2 * MIB, heap, heap_free, NULL, true)
FAMILY(external, 2 * MIB, external, external_free, NULL, false)

/* --- what an array takes, by shape and format ------------------------------------------------ */

static void array_shapes(void)
{
	static const CUDA_ARRAY3D_DESCRIPTOR shapes[] = {
		{.Width = 100000},
		{.Width = 333, .Height = 77},
		{.Width = 65, .Height = 9, .Depth = 7},
		{.Width = 130, .Height = 70, .Depth = 3, .Flags = 0x01},
		{.Width = 5000, .Depth = 3, .Flags = 0x01},
		{.Width = 96, .Height = 96, .Depth = 6, .Flags = 0x04},
		{.Width = 96, .Height = 96, .Depth = 12, .Flags = 0x05},
		{.Width = 333, .Height = 77, .Flags = 0x02},
	};
	int made = 0;
	start();
	for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
		for (int f = 1; f <= 0xff; f++)
			for (unsigned channels = 1; channels <= 4; channels *= 2) {
				CUDA_ARRAY3D_DESCRIPTOR d = shapes[s];
				CUarray a;
				d.Format = (CUarray_format)f;
				d.NumChannels = channels;
				if (cuArray3DCreate_v2(&a, &d) == CUDA_SUCCESS) {
					both(0, sim_used(0));
					CHECK(sim_used(0) > CONTEXT);
					OK(cuArrayDestroy(a));
					made++;
				}
				both(0, CONTEXT);
			}
	printf("  %d arrays of different kinds\n", made);
	CHECK(made > 150);
}

static void mipmap_shapes(void)
{
	start();
	for (unsigned levels = 1; levels <= 9; levels++)
		for (unsigned size = 1 << (levels - 1); size <= 1024; size *= 3) {
			CUDA_ARRAY3D_DESCRIPTOR d = {.Width = size + 1,
						     .Height = size,
						     .Format = CU_AD_FORMAT_HALF,
						     .NumChannels = 2};
			CUmipmappedArray m;
			if (cuMipmappedArrayCreate(&m, &d, levels) != CUDA_SUCCESS)
				continue;
			both(0, sim_used(0));
			OK(cuMipmappedArrayDestroy(m));
			both(0, CONTEXT);
		}
}

/* --- pools ----------------------------------------------------------------------------------- */

/* Plain memory freed in stream order is the driver's again when the stream was there, and then
 * somebody else may have it. */
static void plain_freed_in_stream_order(void)
{
	CUdeviceptr p;
	start();
	for (int i = 0; i < 20; i++) {
		OK(cuMemAlloc_v2(&p, 200 * MIB));
		OK(cuMemFreeAsync(p, NULL));
		OK(cuStreamSynchronize(NULL));
	}
	for (int i = 0; i < 5; i++) { /* nobody waits for the stream; it gets there all the same */
		OK(cuMemAlloc_v2(&p, 200 * MIB));
		OK(cuMemFreeAsync(p, NULL));
		nap_ms(20);
	}
	OK(cuMemAlloc_v2(&p, 200 * MIB));
	OK(cuMemFreeAsync(p, NULL));
	OK(cuCtxSynchronize());
	both(0, CONTEXT);
}

/* What a pool keeps is given back before anything is refused. */
static void pools_trimmed_before_refusal(void)
{
	CUmemoryPool pool;
	CUdeviceptr p;
	cuuint64_t keep = UINT64_MAX;
	start();
	OK(cuDeviceGetDefaultMemPool(&pool, 0));
	OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
	OK(cuMemAllocAsync(&p, 160 * MIB, NULL));
	OK(cuMemFreeAsync(p, NULL));
	OK(cuStreamSynchronize(NULL));
	both(0, CONTEXT + 160 * MIB);
	OK(cuMemAlloc_v2(&p, 200 * MIB));
	both(0, CONTEXT + 200 * MIB);
	OK(cuMemFree_v2(p));
}

/* A destroyed pool lives until its last allocation is freed. */
static void pool_destroyed_first(void)
{
	CUmemoryPool pool;
	CUdeviceptr p;
	start();
	OK(cuMemPoolCreate(&pool, &pool_props));
	OK(cuMemAllocFromPoolAsync(&p, 1000, pool, NULL));
	OK(cuMemPoolDestroy(pool));
	both(0, CONTEXT + 32 * MIB);
	IS(cuMemAllocFromPoolAsync(&p, 1000, pool, NULL), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemFree_v2(p));
	both(0, CONTEXT);
}

/* Two graphs that take turns with the same memory, then need it at the same time. */
static void graphs_share_their_pool(void)
{
	uint64_t h[2];
	CUdeviceptr held;
	struct graph *g[2];
	start();
	OK(graph(&h[0]));
	OK(graph(&h[1]));
	for (int i = 0; i < 2; i++) {
		g[i] = (struct graph *)(uintptr_t)h[i];
		OK(cuMemFreeAsync(g[i]->ptr, NULL));
	}
	OK(cuStreamSynchronize(NULL));
	OK(cuDeviceGraphMemTrim(0));
	both(0, CONTEXT);
	for (int i = 0; i < 2; i++) {
		OK(cuGraphLaunch(g[i]->exec, NULL));
		OK(cuMemFreeAsync(g[i]->ptr, NULL));
		OK(cuStreamSynchronize(NULL));
	}
	both(0, CONTEXT + 32 * MIB);
	OK(cuMemAlloc_v2(&held, LIMIT - CONTEXT - 32 * MIB));
	both(0, LIMIT);
	OK(cuGraphLaunch(g[0]->exec, NULL));
	OK(cuStreamSynchronize(NULL));
	IS(cuGraphLaunch(g[1]->exec, NULL), OOM);
	OK(cuMemFree_v2(held));
	OK(cuGraphLaunch(g[1]->exec, NULL));
	OK(cuStreamSynchronize(NULL));
	both(0, CONTEXT + 64 * MIB);
	for (int i = 0; i < 2; i++)
		OK(graph_free(h[i]));
	OK(cuDeviceGraphMemTrim(0));
	both(0, CONTEXT);
}

/* Many small nodes take what they add up to, not a chunk each. */
static void graph_of_many_small(void)
{
	CUgraph g;
	CUgraphExec exec;
	start();
	OK(cuGraphCreate(&g, 0));
	for (int i = 0; i < 40; i++) {
		CUgraphNode node;
		CUDA_MEM_ALLOC_NODE_PARAMS p = {.poolProps = pool_props, .bytesize = MIB};
		OK(cuGraphAddMemAllocNode(&node, g, NULL, 0, &p));
	}
	OK(cuGraphInstantiateWithFlags(&exec, g, 0));
	OK(cuGraphLaunch(exec, NULL));
	OK(cuStreamSynchronize(NULL));
	both(0, sim_used(0));
}

/* Frees are as cheap with many allocations alive, and so is the end of their context. */
static void context_with_many(void)
{
	CUdeviceptr p;
	CUcontext c = start();
	for (int i = 0; i < 60000; i++)
		OK(cuMemAlloc_v2(&p, 512));
	OK(cuCtxDestroy_v2(c));
	both(0, 0);
}

#define T(f) {.name = #f, .run = f}
const struct suite_test fill_tests[] = {T(fill_plain),
					T(fill_small),
					T(fill_managed),
					T(fill_pitched),
					T(fill_first_generation),
					T(fill_array_2d),
					T(fill_array_layered),
					T(fill_mipmap),
					T(fill_async),
					T(fill_pooled),
					T(fill_graph),
					T(fill_vmm),
					T(fill_context),
					T(fill_heap),
					T(fill_external),
					T(array_shapes),
					T(mipmap_shapes),
					T(plain_freed_in_stream_order),
					T(pools_trimmed_before_refusal),
					T(pool_destroyed_first),
					T(graphs_share_their_pool),
					T(graph_of_many_small),
					T(context_with_many),
					{.name = NULL}};
