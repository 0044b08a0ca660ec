/* Virtual memory management: pieces of physical memory, reserved addresses, mappings of the one in the
 * other, and multicast objects. A piece lives until its last handle, its last mapping and everything
 * exported of it are gone. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "mem.h"

#define PIECE_MAGIC 0x564d4d50u

struct piece {
	uint32_t magic;
	int gpu; /* -1: host memory, never charged */
	int fd;
	bool own_fd;
	uint64_t offset, size;
	uint64_t handles, mappings;
	int object;    /* exported or imported, -1: neither */
	bool imported;
	bool multicast;
	CUmemAllocationProp prop;
	struct piece *next;
};

struct reservation {
	uint64_t base, size, raw, raw_size;
	struct reservation *next;
};

static struct piece *pieces;
static struct reservation *reservations;

static struct piece *piece_of(CUmemGenericAllocationHandle h)
{
	struct piece *p = pieces;
	while (p && (uint64_t)(uintptr_t)p != h)
		p = p->next;
	return p && p->handles ? p : NULL;
}

static struct piece *piece_new(int gpu, uint64_t size, const CUmemAllocationProp *prop)
{
	struct piece *p = calloc(1, sizeof *p);
	if (!p)
		return NULL;
	*p = (struct piece){ .magic = PIECE_MAGIC, .gpu = gpu, .fd = -1, .size = size, .handles = 1,
			     .object = -1, .next = pieces };
	if (prop)
		p->prop = *prop;
	pieces = p;
	return p;
}

static void piece_end(struct piece *p)
{
	bool held = false;
	if (p->handles || p->mappings)
		return;
	if (p->imported)
		sim_object_unhold(p->object);
	else if (p->object >= 0)
		held = sim_object_drop(p->object);
	else if (p->gpu >= 0 && !p->multicast)
		sim_mem_uncharge(p->gpu, p->size);
	if (p->own_fd && p->fd >= 0)
		close(p->fd);
	else if (p->fd >= 0 && !held)
		mem_punch(p->fd, p->offset, p->size);
	for (struct piece **at = &pieces; *at; at = &(*at)->next)
		if (*at == p) {
			*at = p->next;
			break;
		}
	free(p);
}

static CUresult location_gpu(const CUmemLocation *l, int *gpu)
{
	*gpu = -1;
	if (l->type == CU_MEM_LOCATION_TYPE_DEVICE) {
		*gpu = sim_dev_gpu(l->id);
		return *gpu < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
	}
	return l->type >= 2 && l->type <= 4 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; /* HOST, HOST_NUMA.. */
}

static CUresult check_prop(const CUmemAllocationProp *prop, int *gpu)
{
	if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
	    prop->requestedHandleTypes & ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_INVALID_VALUE;
	return location_gpu(&prop->location, gpu);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
		     unsigned long long flags)
{
	SIM_CALL(cuMemCreate);
	int gpu;
	if (!handle || !size || size % MEM_BLOCK || flags)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult e = check_prop(prop, &gpu);
	if (e)
		return e;
	if (gpu >= 0 && sim_shared->gpu[gpu].lost)
		return CUDA_ERROR_UNKNOWN;
	mem_lock();
	struct piece *p = NULL;
	int fd = gpu >= 0 ? mem_arena_fd(gpu) : sim_memfd("simgpu-host");
	if (fd >= 0 && (gpu < 0 || mem_charge(gpu, size))) {
		p = piece_new(gpu, size, prop);
		if (!p && gpu >= 0)
			sim_mem_uncharge(gpu, size);
	}
	if (p) {
		p->fd = fd;
		p->own_fd = gpu < 0;
		p->offset = gpu >= 0 ? mem_arena_fresh(gpu, size) : 0;
		if (gpu < 0 && ftruncate(fd, (off_t)size))
			SIM_TRACE("cuMemCreate: host memory of %zu bytes failed", size);
		*handle = (uint64_t)(uintptr_t)p;
	} else if (gpu < 0 && fd >= 0) {
		close(fd);
	}
	mem_unlock();
	return p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
	SIM_CALL(cuMemRelease);
	mem_lock();
	struct piece *p = piece_of(handle);
	if (p) {
		p->handles--;
		piece_end(p);
	}
	mem_unlock();
	return p ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
	SIM_CALL(cuMemRetainAllocationHandle);
	mem_lock();
	struct mem_range *r = mem_find((uint64_t)(uintptr_t)addr);
	struct piece *p = handle && r && r->kind == MEM_VMM ? r->owner : NULL;
	if (p) {
		p->handles++;
		*handle = (uint64_t)(uintptr_t)p;
	}
	mem_unlock();
	return p ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
				       CUmemAllocationGranularity_flags option)
{
	SIM_CALL(cuMemGetAllocationGranularity);
	int gpu;
	if (!granularity || (unsigned)option > 1)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult e = check_prop(prop, &gpu);
	if (!e)
		*granularity = MEM_BLOCK;
	return e;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
	SIM_CALL(cuMemGetAllocationPropertiesFromHandle);
	mem_lock();
	struct piece *p = piece_of(handle);
	if (p && prop)
		*prop = p->prop;
	mem_unlock();
	return p && prop ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* --- addresses ------------------------------------------------------------------------------------- */

static void *none(uint64_t at, uint64_t size, int flags)
{
	return mmap((void *)(uintptr_t)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
			     unsigned long long flags)
{
	SIM_CALL(cuMemAddressReserve);
	if (!ptr || !size || size % MEM_BLOCK || flags || (alignment & (alignment - 1)))
		return CUDA_ERROR_INVALID_VALUE;
	uint64_t align = alignment > MEM_BLOCK ? alignment : MEM_BLOCK;
	struct reservation *v = calloc(1, sizeof *v);
	void *raw = v ? none(addr, size + align, 0) : MAP_FAILED;
	if (raw == MAP_FAILED) {
		free(v);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	v->raw = (uint64_t)(uintptr_t)raw;
	v->raw_size = size + align;
	v->base = MEM_ROUND(v->raw, align);
	v->size = size;
	mem_lock();
	v->next = reservations;
	reservations = v;
	mem_unlock();
	*ptr = v->base;
	return CUDA_SUCCESS;
}

/* The first range that overlaps [p, p + n). */
static struct mem_range *overlap(uint64_t p, uint64_t n)
{
	struct mem_range *r = mem_find(p);
	if (!r)
		r = mem_next(p);
	return r && r->base < p + n ? r : NULL;
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
	SIM_CALL(cuMemAddressFree);
	CUresult e = CUDA_ERROR_INVALID_VALUE;
	mem_lock();
	for (struct reservation **at = &reservations; *at; at = &(*at)->next) {
		struct reservation *v = *at;
		if (v->base != ptr || v->size != size || overlap(ptr, size))
			continue;
		*at = v->next;
		munmap((void *)(uintptr_t)v->raw, v->raw_size);
		free(v);
		e = CUDA_SUCCESS;
		break;
	}
	mem_unlock();
	return e;
}

static bool reserved(uint64_t p, uint64_t n)
{
	for (struct reservation *v = reservations; v; v = v->next)
		if (p >= v->base && n <= v->size && p - v->base <= v->size - n)
			return true;
	return false;
}

/* --- mappings -------------------------------------------------------------------------------------- */

CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
		  unsigned long long flags)
{
	SIM_CALL(cuMemMap);
	CUresult e = CUDA_ERROR_INVALID_VALUE;
	mem_lock();
	struct piece *p = piece_of(handle);
	if (p && size && !flags && size % MEM_BLOCK == 0 && offset % MEM_BLOCK == 0 && ptr % MEM_BLOCK == 0 &&
	    offset <= p->size && size <= p->size - offset && reserved(ptr, size) && !overlap(ptr, size)) {
		void *at = p->fd < 0 ? (void *)(uintptr_t)ptr :
			mmap((void *)(uintptr_t)ptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, p->fd,
			     (off_t)(p->offset + offset));
		struct mem_range *r = at == MAP_FAILED ? NULL : mem_range_new(ptr, size, MEM_VMM, p->gpu, NULL);
		e = r ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
		if (r) {
			r->owner = p;
			r->offset = offset;
			p->mappings++;
		}
	}
	mem_unlock();
	return e;
}

void vmm_unmapped(struct mem_range *r)
{
	struct piece *p = r->owner;
	none(r->base, r->size, MAP_FIXED);
	mem_range_delete(r);
	p->mappings--;
	piece_end(p);
}

/* [ptr, ptr + size) is whole mappings without a gap. */
static bool whole(uint64_t ptr, uint64_t size)
{
	uint64_t at = ptr;
	while (at < ptr + size) {
		struct mem_range *r = mem_find_exact(at);
		if (!r || r->kind != MEM_VMM)
			return false;
		at += r->size;
	}
	return size && at == ptr + size;
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t size)
{
	SIM_CALL(cuMemUnmap);
	struct CUctx_st *ctx = sim_ctx_current();
	if (ctx && !ctx->dead)
		sim_ctx_sync(ctx);
	mem_lock();
	bool ok = whole(ptr, size);
	for (uint64_t at = ptr; ok && at < ptr + size;) {
		struct mem_range *r = mem_find_exact(at);
		at += r->size;
		vmm_unmapped(r);
	}
	mem_unlock();
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
	SIM_CALL(cuMemSetAccess);
	if (!desc || !count)
		return CUDA_ERROR_INVALID_VALUE;
	mem_lock();
	bool ok = whole(ptr, size);
	for (uint64_t at = ptr; ok && at < ptr + size;) {
		struct mem_range *r = mem_find_exact(at);
		r->flags = desc[count - 1].flags;
		at += r->size;
	}
	mem_unlock();
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr)
{
	SIM_CALL(cuMemGetAccess);
	mem_lock();
	struct mem_range *r = mem_find(ptr);
	bool ok = flags && location && r && r->kind == MEM_VMM;
	if (ok)
		*flags = r->flags;
	mem_unlock();
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* --- between processes ----------------------------------------------------------------------------- */

CUresult cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
				      CUmemAllocationHandleType handleType, unsigned long long flags)
{
	SIM_CALL(cuMemExportToShareableHandle);
	int fd = -1;
	if (!shareableHandle || flags || handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_INVALID_VALUE;
	mem_lock();
	struct piece *p = piece_of(handle);
	bool ok = p && p->gpu >= 0 && !p->multicast && p->prop.requestedHandleTypes & (unsigned)handleType;
	if (ok) {
		if (p->object < 0)
			p->object = sim_object_new(MEM_VMM, p->gpu, p->fd, p->offset, p->size);
		if (p->imported) /* who made it may be gone by the time that it is imported */
			sim_object_serve(p->object, p->fd);
		fd = p->object >= 0 ? sim_object_export(p->object) : -1;
	}
	mem_unlock();
	if (fd < 0)
		return ok ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_ERROR_INVALID_VALUE;
	*(int *)shareableHandle = fd;
	return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
					CUmemAllocationHandleType shHandleType)
{
	SIM_CALL(cuMemImportFromShareableHandle);
	if (!handle || shHandleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_INVALID_VALUE;
	int k = sim_object_of_fd((int)(intptr_t)osHandle);
	if (k < 0 || sim_shared->object[k].kind != MEM_VMM || !sim_object_hold(k, 0))
		return CUDA_ERROR_INVALID_VALUE;
	struct sim_object *o = &sim_shared->object[k];
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
				     .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
				     .location = { CU_MEM_LOCATION_TYPE_DEVICE, sim_gpu_dev((int)o->gpu) } };
	int fd = sim_object_open(k);
	mem_lock();
	struct piece *p = NULL;
	if (fd >= 0)
		p = piece_new((int)o->gpu, o->size, &prop);
	if (p) {
		p->fd = fd;
		p->own_fd = p->imported = true;
		p->object = k;
		p->offset = o->offset;
		*handle = (uint64_t)(uintptr_t)p;
	}
	mem_unlock();
	if (!p) {
		SIM_TRACE("cuMemImportFromShareableHandle: the exporter is gone and nobody offers its bytes");
		if (fd >= 0)
			close(fd);
		sim_object_unhold(k);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	return CUDA_SUCCESS;
}

/* --- multicast: bookkeeping only --------------------------------------------------------------------- */

static bool hopper(CUdevice dev)
{
	int v = 0;
	return !cuDeviceGetAttribute(&v, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, dev) && v;
}

CUresult cuMulticastGetGranularity(size_t *granularity, const CUmulticastObjectProp *prop,
				   CUmulticastGranularity_flags option)
{
	SIM_CALL(cuMulticastGetGranularity);
	(void)option;
	if (!granularity || !prop)
		return CUDA_ERROR_INVALID_VALUE;
	*granularity = MEM_BLOCK;
	return CUDA_SUCCESS;
}

CUresult cuMulticastCreate(CUmemGenericAllocationHandle *mcHandle, const CUmulticastObjectProp *prop)
{
	SIM_CALL(cuMulticastCreate);
	if (!mcHandle || !prop || !prop->size || prop->size % MEM_BLOCK || !prop->numDevices || prop->flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (!hopper(0))
		return CUDA_ERROR_NOT_SUPPORTED;
	mem_lock();
	struct piece *p = piece_new(-1, prop->size, NULL);
	if (p) {
		p->multicast = true;
		*mcHandle = (uint64_t)(uintptr_t)p;
	}
	mem_unlock();
	return p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult multicast(CUmemGenericAllocationHandle h, uint64_t offset, uint64_t size)
{
	mem_lock();
	struct piece *p = piece_of(h);
	bool ok = p && p->multicast && offset <= p->size && size <= p->size - offset;
	mem_unlock();
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle mcHandle, CUdevice dev)
{
	SIM_CALL(cuMulticastAddDevice);
	return sim_dev_gpu(dev) < 0 ? CUDA_ERROR_INVALID_DEVICE : multicast(mcHandle, 0, 0);
}

CUresult cuMulticastBindMem(CUmemGenericAllocationHandle mcHandle, size_t mcOffset,
			    CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size,
			    unsigned long long flags)
{
	SIM_CALL(cuMulticastBindMem);
	mem_lock();
	struct piece *p = piece_of(memHandle);
	bool ok = p && p->gpu >= 0 && !flags && memOffset <= p->size && size <= p->size - memOffset;
	struct piece *mc = piece_of(mcHandle);
	if (ok && mc && mc->multicast && mc->fd < 0) {
		/* All devices see one copy here. */
		mc->fd = dup(p->fd);
		mc->own_fd = true;
		mc->offset = p->offset + memOffset - mcOffset;
	}
	mem_unlock();
	return ok ? multicast(mcHandle, mcOffset, size) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUdeviceptr memptr, size_t size,
			     unsigned long long flags)
{
	SIM_CALL(cuMulticastBindAddr);
	if (flags || !sim_mem_is_device(memptr, size, NULL))
		return CUDA_ERROR_INVALID_VALUE;
	return multicast(mcHandle, mcOffset, size);
}

CUresult cuMulticastUnbind(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, size_t size)
{
	SIM_CALL(cuMulticastUnbind);
	(void)dev;
	return multicast(mcHandle, mcOffset, size);
}
