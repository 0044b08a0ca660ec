/* Memory of graph allocation nodes: addresses per node, memory from one pool per device that grows by
 * chunks and shrinks only when asked. */
#include <stdlib.h>
#include "mem.h"

struct node {
	struct mem_block *block;
	uint64_t bytes;
	bool mapped;
};

static struct graph_pool {
	uint64_t used, used_high, reserved, reserved_high;
} pools[SIM_MAX_GPUS];

static struct mem_range *node_at(CUdeviceptr p)
{
	struct mem_range *r = mem_find_exact(p);
	return r && r->kind == MEM_GRAPH ? r : NULL;
}

CUresult sim_graphmem_address(struct CUctx_st *ctx, size_t bytes, CUdeviceptr *dptr)
{
	CUresult e = CUDA_ERROR_OUT_OF_MEMORY;
	if (!bytes)
		return CUDA_ERROR_INVALID_VALUE;
	mem_lock();
	struct node *n = calloc(1, sizeof *n);
	struct mem_block *b = n && bytes <= sim_ctx_gpu(ctx)->capacity && mem_arena_fd(ctx->gpu) >= 0 ?
				      mem_block_address(ctx->gpu, MEM_ROUND(bytes, MEM_BLOCK)) : NULL;
	struct mem_range *r = b ? mem_range_new(mem_block_base(b), bytes, MEM_GRAPH, ctx->gpu, ctx) : NULL;
	if (r) {
		*n = (struct node){ .block = b, .bytes = mem_block_bytes(b) };
		r->owner = n;
		*dptr = r->base;
		e = CUDA_SUCCESS;
	} else {
		if (b)
			mem_block_free(b);
		free(n);
	}
	mem_unlock();
	return e;
}

/* The pool has room for bytes more. */
static bool reserve(int gpu, uint64_t bytes)
{
	struct graph_pool *p = &pools[gpu];
	uint64_t want = MEM_ROUND(p->used + bytes, MEM_POOL_CHUNK);
	if (want > p->reserved) {
		if (!mem_charge(gpu, want - p->reserved))
			return false;
		p->reserved = want;
	}
	if (p->reserved > p->reserved_high)
		p->reserved_high = p->reserved;
	return true;
}

CUresult sim_graphmem_map(struct CUctx_st *ctx, CUdeviceptr dptr)
{
	CUresult e = CUDA_SUCCESS;
	(void)ctx;
	mem_lock();
	struct mem_range *r = node_at(dptr);
	struct node *n = r ? r->owner : NULL;
	if (!n) {
		e = CUDA_ERROR_INVALID_VALUE;
	} else if (!n->mapped) {
		n->mapped = reserve(r->gpu, n->bytes);
		e = n->mapped ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
		struct graph_pool *p = &pools[r->gpu];
		p->used += n->mapped ? n->bytes : 0;
		if (p->used > p->used_high)
			p->used_high = p->used;
	}
	mem_unlock();
	return e;
}

static void unmap(struct mem_range *r)
{
	struct node *n = r->owner;
	if (!n->mapped)
		return;
	n->mapped = false;
	pools[r->gpu].used -= n->bytes;
	mem_block_punch(n->block);
}

CUresult sim_graphmem_unmap(CUdeviceptr dptr)
{
	mem_lock();
	struct mem_range *r = node_at(dptr);
	if (r)
		unmap(r);
	mem_unlock();
	return r ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void sim_graphmem_forget(CUdeviceptr dptr)
{
	mem_lock();
	struct mem_range *r = node_at(dptr);
	if (r) {
		struct node *n = r->owner;
		unmap(r);
		mem_block_free(n->block);
		free(n);
		mem_range_delete(r);
	}
	mem_unlock();
}

bool sim_graphmem_is(CUdeviceptr dptr)
{
	mem_lock();
	bool yes = node_at(dptr) != NULL;
	mem_unlock();
	return yes;
}

CUresult cuDeviceGraphMemTrim(CUdevice device)
{
	SIM_CALL(cuDeviceGraphMemTrim);
	int gpu = sim_dev_gpu(device);
	if (gpu < 0)
		return CUDA_ERROR_INVALID_DEVICE;
	mem_lock();
	struct graph_pool *p = &pools[gpu];
	uint64_t keep = MEM_ROUND(p->used, MEM_POOL_CHUNK);
	if (p->reserved > keep)
		sim_mem_uncharge(gpu, p->reserved - keep);
	p->reserved = keep;
	mem_unlock();
	return CUDA_SUCCESS;
}

static CUresult attribute(CUdevice device, CUgraphMem_attribute attr, cuuint64_t *v, bool set)
{
	int gpu = sim_dev_gpu(device);
	if (gpu < 0)
		return CUDA_ERROR_INVALID_DEVICE;
	struct graph_pool *p = &pools[gpu];
	bool high = attr == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH || attr == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH;
	if (!v || (set && (!high || *v)))
		return CUDA_ERROR_INVALID_VALUE;
	mem_lock();
	if (set && attr == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH)
		p->used_high = p->used;
	else if (set)
		p->reserved_high = p->reserved;
	else
		*v = attr == CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT ? p->used :
		     attr == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH    ? p->used_high :
		     attr == CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT ? p->reserved : p->reserved_high;
	mem_unlock();
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void *value)
{
	SIM_CALL(cuDeviceGetGraphMemAttribute);
	return attribute(device, attr, value, false);
}

CUresult cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void *value)
{
	SIM_CALL(cuDeviceSetGraphMemAttribute);
	return attribute(device, attr, value, true);
}
