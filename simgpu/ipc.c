/* Memory of others: legacy IPC handles, and memory of graphics programs. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "mem.h"

#define IPC_MAGIC 0x49504353494d47ull

struct ipc_handle {
	uint64_t magic, object, serial, offset, size;
	uint32_t pid, unused;
};
_Static_assert(sizeof(struct ipc_handle) <= sizeof(CUipcMemHandle), "fits");

struct ipc_import {
	int object;
	uint64_t serial, opens;
	uint64_t map, map_size;
};

CUresult cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr)
{
	SIM_CALL(cuIpcGetMemHandle);
	CUresult e = CUDA_ERROR_INVALID_VALUE;
	if (!pHandle)
		return e;
	mem_lock();
	struct mem_range *r = mem_find(dptr);
	int k = r && r->kind == MEM_PLAIN ? mem_block_object(r->block) : -1;
	if (k >= 0) {
		struct ipc_handle h = { .magic = IPC_MAGIC, .object = (uint64_t)k,
					.serial = sim_shared->object[k].serial,
					.offset = r->base - mem_block_base(r->block), .size = r->size,
					.pid = (uint32_t)getpid() };
		memset(pHandle, 0, sizeof *pHandle);
		memcpy(pHandle, &h, sizeof h);
		e = CUDA_SUCCESS;
	} else if (r && r->kind == MEM_PLAIN) {
		e = CUDA_ERROR_OUT_OF_MEMORY;
	}
	mem_unlock();
	return e;
}

/* An import of the same object that is open already. */
static struct mem_range *opened(const struct ipc_handle *h)
{
	for (struct mem_range *r = mem_next(0); r; r = mem_next(r->base + 1)) {
		struct ipc_import *i = r->kind == MEM_IPC ? r->owner : NULL;
		if (i && i->serial == h->serial && r->base == i->map + h->offset % MEM_BLOCK)
			return r;
	}
	return NULL;
}

/* mem_mutex held; the object is held for us. */
static CUresult open_new(struct CUctx_st *ctx, const struct ipc_handle *h, CUdeviceptr *out)
{
	struct sim_object *o = &sim_shared->object[h->object];
	struct ipc_import *i = calloc(1, sizeof *i);
	int fd = i ? sim_object_open((int)h->object) : -1;
	uint8_t *raw = fd < 0 ? MAP_FAILED :
		mmap(NULL, o->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, (off_t)o->offset);
	struct mem_range *r = raw == MAP_FAILED ? NULL :
		mem_range_new((uint64_t)(uintptr_t)raw + h->offset, h->size, MEM_IPC, (int)o->gpu, ctx);
	if (fd >= 0)
		close(fd);
	if (!r) {
		if (raw != MAP_FAILED)
			munmap(raw, o->size);
		free(i);
		return CUDA_ERROR_MAP_FAILED;
	}
	*i = (struct ipc_import){ (int)h->object, h->serial, 1, (uint64_t)(uintptr_t)raw, o->size };
	r->owner = i;
	*out = r->base;
	return CUDA_SUCCESS;
}

static CUresult ipc_open(CUdeviceptr *out, const CUipcMemHandle *handle, unsigned flags)
{
	struct ipc_handle h;
	struct CUctx_st *ctx;
	CUresult e = sim_ctx_need(&ctx);
	if (e)
		return e;
	memcpy(&h, handle, sizeof h);
	if (!out || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || h.magic != IPC_MAGIC || h.object >= SIM_MAX_OBJECTS)
		return CUDA_ERROR_INVALID_VALUE;
	if (h.pid == (uint32_t)getpid())
		return CUDA_ERROR_INVALID_CONTEXT;
	mem_lock();
	struct mem_range *r = opened(&h);
	if (r) {
		((struct ipc_import *)r->owner)->opens++;
		*out = r->base;
	} else if (!sim_object_hold((int)h.object, h.serial)) {
		e = CUDA_ERROR_MAP_FAILED;
	} else if ((e = open_new(ctx, &h, out))) {
		sim_object_unhold((int)h.object);
	}
	mem_unlock();
	return e;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
{
	SIM_CALL(cuIpcOpenMemHandle_v2);
	return ipc_open(pdptr, &handle, Flags);
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
{
	SIM_CALL(cuIpcOpenMemHandle);
	return ipc_open(pdptr, &handle, Flags);
}

CUresult ipc_close(struct mem_range *r)
{
	struct ipc_import *i = r->owner;
	munmap((void *)(uintptr_t)i->map, i->map_size);
	sim_object_unhold(i->object);
	free(i);
	mem_range_delete(r);
	return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr dptr)
{
	SIM_CALL_CTX(cuIpcCloseMemHandle, ctx);
	CUresult e = sim_ctx_sync(ctx);
	if (e)
		return e;
	mem_lock();
	struct mem_range *r = mem_find_exact(dptr);
	if (!r || r->kind != MEM_IPC)
		e = CUDA_ERROR_INVALID_VALUE;
	else if (--((struct ipc_import *)r->owner)->opens == 0)
		e = ipc_close(r);
	mem_unlock();
	return e;
}

/* --- external memory: it comes from a graphics driver, so it is new to us and is charged ------------- */

#define EXT_MAGIC 0x4558544du

struct CUextMemory_st {
	uint32_t magic;
	struct mem_block *block;
	uint64_t size;
	int fd;
	struct mem_range *range;
};

CUresult cuImportExternalMemory(CUexternalMemory *extMem_out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *d)
{
	SIM_CALL_CTX(cuImportExternalMemory, ctx);
	if (!extMem_out || !d || !d->size)
		return CUDA_ERROR_INVALID_VALUE;
	if (d->type != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (d->size > sim_ctx_gpu(ctx)->capacity)
		return CUDA_ERROR_OUT_OF_MEMORY;
	struct CUextMemory_st *m = calloc(1, sizeof *m);
	if (!m)
		return CUDA_ERROR_OUT_OF_MEMORY;
	mem_lock();
	m->block = mem_block_new(ctx->gpu, MEM_ROUND(d->size, MEM_BLOCK), false);
	if (m->block)
		m->range = mem_range_new(mem_block_base(m->block), d->size, MEM_EXTERNAL, ctx->gpu, NULL);
	if (m->block && !m->range)
		mem_block_free(m->block);
	mem_unlock();
	if (!m->range) {
		free(m);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	m->magic = EXT_MAGIC;
	m->size = d->size;
	m->fd = d->handle.fd; /* ours from now on */
	*extMem_out = m;
	return CUDA_SUCCESS;
}

static bool external(CUexternalMemory m)
{
	return m && m->magic == EXT_MAGIC;
}

CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *devPtr, CUexternalMemory extMem,
					 const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *d)
{
	SIM_CALL(cuExternalMemoryGetMappedBuffer);
	if (!devPtr || !external(extMem) || !d || d->flags || d->offset > extMem->size ||
	    d->size > extMem->size - d->offset)
		return CUDA_ERROR_INVALID_VALUE;
	*devPtr = extMem->range->base + d->offset;
	return CUDA_SUCCESS;
}

CUresult cuDestroyExternalMemory(CUexternalMemory extMem)
{
	SIM_CALL(cuDestroyExternalMemory);
	if (!external(extMem))
		return CUDA_ERROR_INVALID_HANDLE;
	mem_lock();
	mem_range_delete(extMem->range);
	mem_block_free(extMem->block);
	mem_unlock();
	if (extMem->fd >= 0)
		close(extMem->fd);
	extMem->magic = 0;
	free(extMem);
	return CUDA_SUCCESS;
}
