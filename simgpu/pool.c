/* Pools and stream-ordered allocation. What is allocated is there at once; what is freed can be used
 * again at once; memory goes back to the GPU when the host synchronises, beyond the threshold. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "pool.h"

static struct CUmemPoolHandle_st *pools;
static struct CUmemPoolHandle_st *default_pool[SIM_MAX_GPUS], *current_pool[SIM_MAX_GPUS]; /* by ordinal */
static _Atomic uint64_t returned; /* bytes given back to pools since the last synchronisation */

/* --- chunks and pieces ----------------------------------------------------------------------------- */

uint64_t pool_piece_base(const struct pool_piece *piece)
{
	return piece->chunk->base + piece->offset;
}

struct CUmemPoolHandle_st *pool_new(int gpu)
{
	struct CUmemPoolHandle_st *p = calloc(1, sizeof *p);
	if (!p)
		return NULL;
	p->magic = POOL_MAGIC;
	p->gpu = gpu;
	p->object = -1;
	p->reuse[0] = p->reuse[1] = p->reuse[2] = 1;
	p->next = pools;
	pools = p;
	return p;
}

static struct pool_chunk *chunk_new(struct CUmemPoolHandle_st *p, uint64_t bytes)
{
	uint64_t size = MEM_ROUND(bytes, MEM_POOL_CHUNK);
	if (p->max_size && p->reserved + size > p->max_size)
		return NULL;
	struct mem_block *b = p->gpu >= 0 ? mem_block_new(p->gpu, size, false) : NULL;
	struct pool_chunk *c = calloc(1, sizeof *c);
	struct pool_piece *piece = calloc(1, sizeof *piece);
	void *host = MAP_FAILED;
	if (p->gpu < 0)
		host = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if ((!b && host == MAP_FAILED) || !c || !piece) {
		if (b)
			mem_block_free(b);
		free(c);
		free(piece);
		return NULL;
	}
	*piece = (struct pool_piece){ .size = size, .chunk = c };
	*c = (struct pool_chunk){ .block = b, .base = b ? mem_block_base(b) : (uint64_t)(uintptr_t)host,
				  .size = size, .pieces = piece, .next = p->chunks, .pool = p };
	p->chunks = c;
	p->reserved += size;
	if (p->reserved > p->reserved_high)
		p->reserved_high = p->reserved;
	return c;
}

static struct pool_piece *chunk_take(struct pool_chunk *c, uint64_t size)
{
	struct pool_piece *t = c->pieces;
	if (c->size - c->used < size)
		return NULL;
	while (t && (t->taken || t->size < size))
		t = t->next;
	if (!t)
		return NULL;
	if (t->size > size) {
		struct pool_piece *rest = calloc(1, sizeof *rest);
		if (!rest)
			return NULL;
		*rest = (struct pool_piece){ .offset = t->offset + size, .size = t->size - size, .chunk = c,
					     .next = t->next, .prev = t };
		if (t->next)
			t->next->prev = rest;
		t->next = rest;
		t->size = size;
	}
	t->taken = true;
	c->used += size;
	return t;
}

struct pool_piece *pool_take(struct CUmemPoolHandle_st *p, uint64_t bytes)
{
	uint64_t size = MEM_ROUND(bytes, MEM_GRANULE);
	struct pool_piece *t = NULL;
	for (struct pool_chunk *c = p->chunks; c && !t; c = c->next)
		t = chunk_take(c, size);
	if (!t) {
		struct pool_chunk *c = chunk_new(p, size);
		t = c ? chunk_take(c, size) : NULL;
	}
	if (!t)
		return NULL;
	p->live++;
	p->used += size;
	if (p->used > p->used_high)
		p->used_high = p->used;
	return t;
}

static void join(struct pool_piece *a, struct pool_piece *b)
{
	a->size += b->size;
	a->next = b->next;
	if (b->next)
		b->next->prev = a;
	free(b);
}

void pool_give(struct pool_piece *t)
{
	struct pool_chunk *c = t->chunk;
	c->pool->live--;
	c->pool->used -= t->size;
	c->used -= t->size;
	returned += t->size;
	t->taken = false;
	if (t->next && !t->next->taken)
		join(t, t->next);
	if (t->prev && !t->prev->taken)
		join(t->prev, t);
}

static void chunk_free(struct pool_chunk *c)
{
	c->pool->reserved -= c->size;
	if (c->block)
		mem_block_free(c->block);
	else
		munmap((void *)(uintptr_t)c->base, c->size);
	free(c->pieces);
	free(c);
}

bool pool_trim(struct CUmemPoolHandle_st *p, uint64_t keep)
{
	bool any = false;
	for (struct pool_chunk **at = &p->chunks; *at && p->reserved > keep;) {
		struct pool_chunk *c = *at;
		if (c->used) {
			at = &c->next;
			continue;
		}
		*at = c->next;
		chunk_free(c);
		any = true;
	}
	return any;
}

bool pool_trim_all(int gpu)
{
	bool any = false;
	for (struct CUmemPoolHandle_st *p = pools; p; p = p->next)
		if (p->gpu == gpu && !p->imported)
			any |= pool_trim(p, 0);
	return any;
}

/* A destroyed pool ends when its last allocation is freed. */
static void pool_end(struct CUmemPoolHandle_st *p)
{
	if (!p->destroyed || p->live)
		return;
	pool_trim(p, 0);
	if (p->object >= 0 && p->imported)
		sim_object_unhold(p->object);
	else if (p->object >= 0)
		sim_object_drop(p->object);
	for (struct CUmemPoolHandle_st **at = &pools; *at; at = &(*at)->next)
		if (*at == p) {
			*at = p->next;
			break;
		}
	free(p);
}

void sim_mem_on_sync(struct CUctx_st *ctx)
{
	if (!returned)
		return;
	mem_lock();
	returned = 0;
	for (struct CUmemPoolHandle_st *p = pools; p; p = p->next)
		if (p->gpu == ctx->gpu && !p->imported)
			pool_trim(p, p->threshold);
	mem_unlock();
}

/* --- which pool -------------------------------------------------------------------------------------- */

static struct CUmemPoolHandle_st *pool_of(CUmemoryPool h)
{
	struct CUmemPoolHandle_st *p = pools;
	while (p && p != h)
		p = p->next;
	return p && !p->destroyed ? p : NULL;
}

static struct CUmemPoolHandle_st *device_pool(CUdevice dev, bool current)
{
	if (current && current_pool[dev])
		return current_pool[dev];
	if (!default_pool[dev] && (default_pool[dev] = pool_new(sim_dev_gpu(dev))))
		default_pool[dev]->is_default = true;
	return default_pool[dev];
}

static CUresult get_pool(CUmemoryPool *out, CUdevice dev, bool current)
{
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	if (sim_dev_gpu(dev) < 0)
		return CUDA_ERROR_INVALID_DEVICE;
	mem_lock();
	*out = device_pool(dev, current);
	mem_unlock();
	return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev)
{
	SIM_CALL(cuDeviceGetDefaultMemPool);
	return get_pool(pool_out, dev, false);
}

CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)
{
	SIM_CALL(cuDeviceGetMemPool);
	return get_pool(pool, dev, true);
}

CUresult cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool)
{
	SIM_CALL(cuDeviceSetMemPool);
	int gpu = sim_dev_gpu(dev);
	if (gpu < 0)
		return CUDA_ERROR_INVALID_DEVICE;
	mem_lock();
	struct CUmemPoolHandle_st *p = pool_of(pool);
	bool ok = p && p->gpu == gpu;
	if (ok)
		current_pool[dev] = p;
	mem_unlock();
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* --- allocation ---------------------------------------------------------------------------------------- */

static CUresult alloc_from(struct CUctx_st *ctx, struct CUmemPoolHandle_st *p, size_t bytes, CUdeviceptr *out)
{
	if (p->imported)
		return CUDA_ERROR_NOT_SUPPORTED;
	struct pool_piece *t = pool_take(p, bytes);
	struct mem_range *r = t ? mem_range_new(pool_piece_base(t), bytes, MEM_POOL, p->gpu, ctx) : NULL;
	if (!r) {
		if (t)
			pool_give(t);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	r->owner = t;
	*out = r->base;
	return CUDA_SUCCESS;
}

static CUresult alloc_async(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, bool named, CUstream s)
{
	struct CUctx_st *ctx;
	bool capturing;
	CUresult e = sim_ctx_need(&ctx);
	if (e)
		return e;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	if ((e = sim_stream_capturing(ctx, s, &capturing)))
		return e;
	mem_lock();
	struct CUmemPoolHandle_st *p = named ? pool_of(pool) : device_pool(ctx->dev, true);
	e = !p ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
	if (!e && !bytes) {
		*out = 0;
		mem_unlock();
		return CUDA_SUCCESS;
	}
	CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
				 .location = { CU_MEM_LOCATION_TYPE_DEVICE, p ? sim_gpu_dev(p->gpu) : 0 } };
	if (!e && !capturing)
		e = alloc_from(ctx, p, bytes, out);
	mem_unlock();
	return !e && capturing ? sim_capture_mem_alloc(ctx, s, &props, bytes, out) : e;
}

static CUresult free_async(CUdeviceptr p, CUstream s)
{
	struct CUctx_st *ctx;
	bool capturing;
	CUresult e = sim_ctx_need(&ctx);
	if (e || (e = sim_stream_capturing(ctx, s, &capturing)))
		return e;
	if (capturing)
		return sim_capture_mem_free(ctx, s, p);
	if (!p)
		return CUDA_SUCCESS;
	if (sim_graphmem_is(p))
		return sim_graphmem_unmap(p);
	mem_lock();
	struct mem_range *r = mem_find_exact(p);
	if (!r)
		e = CUDA_ERROR_INVALID_VALUE;
	else if (r->kind == MEM_POOL || r->kind == MEM_POOL_IMPORT)
		e = pool_free(r);
	else if (r->kind == MEM_PLAIN)
		mem_free(r);
	else
		e = CUDA_ERROR_INVALID_VALUE;
	mem_unlock();
	return e;
}

#define CALL(name, params, call)                                                                   \
	CUresult name params                                                                       \
	{                                                                                          \
		SIM_CALL(name);                                                                    \
		return call;                                                                       \
	}
CALL(cuMemAllocAsync, (CUdeviceptr *d, size_t n, CUstream s), alloc_async(d, n, NULL, false, s))
CALL(cuMemAllocAsync_ptsz, (CUdeviceptr *d, size_t n, CUstream s), alloc_async(d, n, NULL, false, sim_pt(s)))
CALL(cuMemAllocFromPoolAsync, (CUdeviceptr *d, size_t n, CUmemoryPool p, CUstream s), alloc_async(d, n, p, true, s))
CALL(cuMemAllocFromPoolAsync_ptsz, (CUdeviceptr *d, size_t n, CUmemoryPool p, CUstream s),
     alloc_async(d, n, p, true, sim_pt(s)))
CALL(cuMemFreeAsync, (CUdeviceptr d, CUstream s), free_async(d, s))
CALL(cuMemFreeAsync_ptsz, (CUdeviceptr d, CUstream s), free_async(d, sim_pt(s)))

/* --- imported pointers ------------------------------------------------------------------------------ */

struct import {
	struct CUmemPoolHandle_st *pool;
	int object;
	uint64_t base, size; /* what is mapped */
};

CUresult pool_free(struct mem_range *r)
{
	struct CUmemPoolHandle_st *p;
	if (r->kind == MEM_POOL) {
		struct pool_piece *t = r->owner;
		p = t->chunk->pool;
		pool_give(t);
	} else {
		struct import *i = r->owner;
		p = i->pool;
		p->live--;
		munmap((void *)(uintptr_t)i->base, i->size);
		sim_object_unhold(i->object);
		free(i);
	}
	mem_range_delete(r);
	pool_end(p);
	return CUDA_SUCCESS;
}

/* --- pools by hand ------------------------------------------------------------------------------------ */

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)
{
	SIM_CALL(cuMemPoolCreate);
	if (!pool || !poolProps || poolProps->allocType != CU_MEM_ALLOCATION_TYPE_PINNED ||
	    (poolProps->handleTypes != CU_MEM_HANDLE_TYPE_NONE &&
	     poolProps->handleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
		return CUDA_ERROR_INVALID_VALUE;
	bool device = poolProps->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
	int gpu = device ? sim_dev_gpu(poolProps->location.id) : -1;
	if (device && gpu < 0)
		return CUDA_ERROR_INVALID_DEVICE;
	mem_lock();
	struct CUmemPoolHandle_st *p = pool_new(gpu);
	if (p) {
		p->handle_types = poolProps->handleTypes;
		p->max_size = MEM_ROUND(poolProps->maxSize, MEM_POOL_CHUNK);
	}
	mem_unlock();
	*pool = p;
	return p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
	SIM_CALL(cuMemPoolDestroy);
	mem_lock();
	struct CUmemPoolHandle_st *p = pool_of(pool);
	bool ok = p && !p->is_default;
	if (ok) {
		p->destroyed = true;
		for (int i = 0; i < SIM_MAX_GPUS; i++)
			if (current_pool[i] == p)
				current_pool[i] = NULL;
		pool_trim(p, 0);
		pool_end(p);
	}
	mem_unlock();
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)
{
	SIM_CALL(cuMemPoolTrimTo);
	mem_lock();
	struct CUmemPoolHandle_st *p = pool_of(pool);
	if (p && !p->imported)
		pool_trim(p, minBytesToKeep);
	mem_unlock();
	return p ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult attribute(struct CUmemPoolHandle_st *p, CUmemPool_attribute a, void *value, bool set)
{
	cuuint64_t *v = value;
	int *flag = value;
	switch (a) {
	case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
		if (set)
			p->reuse[a - 1] = *flag;
		else
			*flag = p->reuse[a - 1];
		return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
		if (set)
			p->threshold = *v;
		else
			*v = p->threshold;
		return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
	case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
		if (set && *v)
			return CUDA_ERROR_INVALID_VALUE;
		if (set)
			*(a == CU_MEMPOOL_ATTR_USED_MEM_HIGH ? &p->used_high : &p->reserved_high) =
				a == CU_MEMPOOL_ATTR_USED_MEM_HIGH ? p->used : p->reserved;
		else
			*v = a == CU_MEMPOOL_ATTR_USED_MEM_HIGH ? p->used_high : p->reserved_high;
		return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
	case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
		if (set)
			return CUDA_ERROR_INVALID_VALUE;
		*v = a == CU_MEMPOOL_ATTR_USED_MEM_CURRENT ? p->used : p->reserved;
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
}

static CUresult pool_attribute(CUmemoryPool pool, CUmemPool_attribute a, void *value, bool set)
{
	mem_lock();
	struct CUmemPoolHandle_st *p = pool_of(pool);
	CUresult e = p && value ? attribute(p, a, value, set) : CUDA_ERROR_INVALID_VALUE;
	mem_unlock();
	return e;
}
CALL(cuMemPoolSetAttribute, (CUmemoryPool p, CUmemPool_attribute a, void *v), pool_attribute(p, a, v, true))
CALL(cuMemPoolGetAttribute, (CUmemoryPool p, CUmemPool_attribute a, void *v), pool_attribute(p, a, v, false))

static CUresult pool_known(CUmemoryPool pool, bool more)
{
	mem_lock();
	bool ok = pool_of(pool) && more;
	mem_unlock();
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CALL(cuMemPoolSetAccess, (CUmemoryPool p, const CUmemAccessDesc *map, size_t n), pool_known(p, map || !n))

CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool memPool, CUmemLocation *location)
{
	SIM_CALL(cuMemPoolGetAccess);
	CUresult e = pool_known(memPool, flags && location);
	if (!e)
		*flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	return e;
}

/* --- between processes ---------------------------------------------------------------------------------- */

CUresult cuMemPoolExportToShareableHandle(void *handle_out, CUmemoryPool pool, CUmemAllocationHandleType handleType,
					  unsigned long long flags)
{
	SIM_CALL(cuMemPoolExportToShareableHandle);
	int fd = -1;
	if (!handle_out || flags || handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_INVALID_VALUE;
	mem_lock();
	struct CUmemPoolHandle_st *p = pool_of(pool);
	if (p && !p->imported && p->gpu >= 0 && p->handle_types & (unsigned)handleType) {
		/* The object takes no memory: it names the pool. */
		if (p->object < 0)
			p->object = sim_object_new(MEM_POOL, p->gpu, -1, 0, 0);
		fd = p->object >= 0 ? sim_object_export(p->object) : -1;
	}
	mem_unlock();
	if (fd < 0)
		return p ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
	*(int *)handle_out = fd;
	return CUDA_SUCCESS;
}

CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *pool_out, void *handle, CUmemAllocationHandleType handleType,
					    unsigned long long flags)
{
	SIM_CALL(cuMemPoolImportFromShareableHandle);
	if (!pool_out || flags || handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_INVALID_VALUE;
	int k = sim_object_of_fd((int)(intptr_t)handle);
	if (k < 0 || sim_shared->object[k].kind != MEM_POOL || !sim_object_hold(k, 0))
		return CUDA_ERROR_INVALID_VALUE;
	mem_lock();
	struct CUmemPoolHandle_st *p = pool_new((int)sim_shared->object[k].gpu);
	if (p) {
		p->imported = true;
		p->object = k;
	}
	mem_unlock();
	*pool_out = p;
	return p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

struct pointer_data {
	uint64_t object, serial, offset, size, pool_serial;
};
_Static_assert(sizeof(struct pointer_data) <= sizeof(CUmemPoolPtrExportData), "fits");

CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *shareData_out, CUdeviceptr ptr)
{
	SIM_CALL(cuMemPoolExportPointer);
	CUresult e = CUDA_ERROR_INVALID_VALUE;
	if (!shareData_out)
		return e;
	mem_lock();
	struct mem_range *r = mem_find_exact(ptr);
	struct pool_piece *t = r && r->kind == MEM_POOL ? r->owner : NULL;
	int k = t && t->chunk->block && t->chunk->pool->object >= 0 ? mem_block_object(t->chunk->block) : -1;
	if (k >= 0) {
		struct pointer_data d = { (uint64_t)k, sim_shared->object[k].serial, t->offset, r->size,
					  sim_shared->object[t->chunk->pool->object].serial };
		memset(shareData_out, 0, sizeof *shareData_out);
		memcpy(shareData_out, &d, sizeof d);
		e = CUDA_SUCCESS;
	}
	mem_unlock();
	return e;
}

CUresult cuMemPoolImportPointer(CUdeviceptr *ptr_out, CUmemoryPool pool, CUmemPoolPtrExportData *shareData)
{
	SIM_CALL_CTX(cuMemPoolImportPointer, ctx);
	struct pointer_data d;
	if (!ptr_out || !shareData)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(&d, shareData, sizeof d);
	CUresult e = CUDA_ERROR_INVALID_VALUE;
	mem_lock();
	struct CUmemPoolHandle_st *p = pool_of(pool);
	if (p && p->imported && d.object < SIM_MAX_OBJECTS && sim_object_hold((int)d.object, d.serial)) {
		struct import *i = calloc(1, sizeof *i);
		uint64_t lead = d.offset % 4096, size = MEM_ROUND(lead + d.size, 4096);
		int fd = sim_object_open((int)d.object);
		void *at = fd < 0 || !i ? MAP_FAILED :
			mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
			     (off_t)(sim_shared->object[d.object].offset + d.offset - lead));
		struct mem_range *r = at == MAP_FAILED ? NULL :
			mem_range_new((uint64_t)(uintptr_t)at + lead, d.size, MEM_POOL_IMPORT, p->gpu, ctx);
		if (fd >= 0)
			close(fd);
		if (r) {
			*i = (struct import){ p, (int)d.object, (uint64_t)(uintptr_t)at, size };
			r->owner = i;
			p->live++;
			*ptr_out = r->base;
			e = CUDA_SUCCESS;
		} else {
			free(i);
			sim_object_unhold((int)d.object);
		}
	}
	mem_unlock();
	return e;
}
