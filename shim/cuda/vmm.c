#include "compat.h"
#include "vmm.h"
#include <stdlib.h>
#include <string.h>
#include "account.h"
#include "device.h"
#include "slice.h"
#include "trace.h"

/* One physical allocation that this process holds. */
struct memory {
	uint64_t handle;
	uint32_t handles; /* references through handles */
	uint32_t uses;	  /* mappings, multicast bindings, arrays */
	uint32_t units;	  /* charged; for an import: held, as far as mappings showed */
	uint64_t guess;	  /* import not mapped yet, of unknown size: bytes that it may be */
	int dev;	  /* -1: not device memory of the slice */
	bool imported;	  /* somebody else's: charged only when no process of the tenant exports */
	bool charged;
	bool exported;
	bool multicast; /* a multicast object: no memory of its own, holds what is bound to it */
};

/* What keeps memory alive besides handles: a mapping (by address) or a binding to a multicast
 * object or an array (by holder). */
struct use {
	struct memory *memory;
	struct use *next;
	uint64_t holder, offset;
	CUdevice dev;
};

/* Guards all below. Held across driver calls that end something: the driver could hand the same
 * handle or address to another thread before the books are closed. */
static struct tr_lock vmm_lock;
static struct tr_table handles;	 /* handle -> memory; units: references by this handle */
static struct tr_table mappings; /* address -> memory; units: size */
static struct use *uses;

void tr_vmm_after_fork(void)
{
	vmm_lock.word = 0;
	memset(&handles, 0, sizeof handles);
	memset(&mappings, 0, sizeof mappings);
	uses = NULL;
}

static struct memory *of_handle(uint64_t handle)
{
	struct tr_entry *e = tr_table_get(&handles, handle);
	return e == NULL ? NULL : (struct memory *)(uintptr_t)e->aux;
}

/* One reference more by this handle. */
static bool keep(struct memory *m, uint64_t handle)
{
	struct tr_entry *had = tr_table_get(&handles, handle);
	struct tr_entry e = {.key = handle, .aux = (uint64_t)(uintptr_t)m, .units = 1};
	if (had != NULL && had->aux == e.aux)
		had->units++;
	else if (!tr_table_put(&handles, &e))
		return false;
	m->handles++;
	return true;
}

static void drop_uses(uint64_t holder);

/* Nothing holds it any more in this process. */
static void end_if_unused(struct memory *m)
{
	if (m->handles > 0 || m->uses > 0)
		return;
	uint64_t handle = m->handle;
	bool multicast = m->multicast;
	if (m->charged && m->exported)
		tr_uncharge_exported(m->dev, m->units);
	else if (m->charged)
		tr_uncharge(m->dev, m->units);
	else if (m->imported && m->units > 0)
		tr_imported(m->dev, -(int64_t)(m->units * TR_UNIT));
	tr_import_end(m->dev, m->guess);
	free(m);
	if (multicast)
		drop_uses(handle);
}

static void use_add(struct memory *m, uint64_t holder, uint64_t offset, CUdevice dev)
{
	struct use *u = calloc(1, sizeof *u);
	m->uses++; /* without a record it stays charged for good: the safe side */
	if (u == NULL)
		return;
	*u = (struct use){
		.memory = m, .next = uses, .holder = holder, .offset = offset, .dev = dev};
	uses = u;
}

static void drop_uses(uint64_t holder)
{
	for (struct use **at = &uses; *at != NULL;) {
		struct use *u = *at;
		if (u->holder != holder) {
			at = &u->next;
			continue;
		}
		*at = u->next;
		struct memory *m = u->memory;
		free(u);
		m->uses--;
		end_if_unused(m);
		at = &uses; /* ending one may have dropped others */
	}
}

/* --- create and release -------------------------------------------------------------------- */

CUresult EXPORT cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
			    const CUmemAllocationProp *prop, unsigned long long flags)
{
	CUresult r = tr_enter();
	if (r != CUDA_SUCCESS)
		return r;
	/* Memory located on the host is never charged. */
	bool on_device = prop != NULL && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
	int dev = on_device ? tr_device_index(prop->location.id) : -1;
	if (on_device && dev < 0 && tr_visible_devices > 0)
		return CUDA_ERROR_INVALID_DEVICE;
	if (dev < 0)
		return REAL(cuMemCreate)(handle, size, prop, flags);
	struct memory *m = calloc(1, sizeof *m);
	if (m == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*m = (struct memory){.units = tr_units(size), .dev = dev, .charged = true};
	if (!tr_charge(dev, m->units)) {
		free(m);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	r = REAL(cuMemCreate)(handle, size, prop, flags);
	if (r != CUDA_SUCCESS) {
		tr_uncharge(dev, m->units);
		free(m);
		return r;
	}
	m->handle = *handle;
	tr_lock(&vmm_lock);
	bool kept = keep(m, *handle);
	tr_unlock(&vmm_lock);
	if (kept)
		return r;
	REAL(cuMemRelease)(*handle);
	tr_uncharge(dev, m->units);
	free(m);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

/* One reference less by this handle. */
static void let_go(uint64_t handle)
{
	struct tr_entry *e = tr_table_get(&handles, handle), out;
	if (e == NULL)
		return;
	struct memory *m = (struct memory *)(uintptr_t)e->aux;
	if (--e->units == 0)
		tr_table_take(&handles, handle, &out);
	m->handles--;
	end_if_unused(m);
}

CUresult EXPORT cuMemRelease(CUmemGenericAllocationHandle handle)
{
	tr_lock(&vmm_lock);
	CUresult r = REAL(cuMemRelease)(handle);
	if (r == CUDA_SUCCESS)
		let_go(handle);
	tr_unlock(&vmm_lock);
	return r;
}

/* --- mappings ------------------------------------------------------------------------------ */

/* An import shows its size when it is mapped. It is free inside the tenant; when no process of the
 * tenant exports anything on the device, it came from elsewhere and is charged here. */
static bool hold_import(struct memory *m, size_t size)
{
	uint32_t units = tr_units(size);
	CUmemAllocationProp prop;
	if (!m->imported || units <= m->units)
		return true;
	memset(&prop, 0, sizeof prop);
	if (m->dev < 0 && REAL(cuMemGetAllocationPropertiesFromHandle)(&prop, m->handle) ==
				  CUDA_SUCCESS &&
	    prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE)
		m->dev = tr_device_index(prop.location.id);
	if (m->dev < 0)
		return true;
	if (!m->charged && m->units == 0 && !tr_tenant_exports(m->dev)) {
		TR_TRACE("import that no process of the slice exports: charged");
		m->charged = true;
	}
	if (m->charged && !tr_charge(m->dev, units - m->units))
		return false;
	if (!m->charged)
		tr_imported(m->dev, (int64_t)((units - m->units) * TR_UNIT));
	m->units = units;
	tr_import_end(m->dev, m->guess);
	m->guess = 0;
	return true;
}

CUresult EXPORT cuMemMap(CUdeviceptr ptr, size_t size, size_t offset,
			 CUmemGenericAllocationHandle handle, unsigned long long flags)
{
	CUresult r = CUDA_SUCCESS;
	tr_lock(&vmm_lock);
	struct memory *m = of_handle(handle);
	if (m != NULL && !hold_import(m, offset + size))
		r = CUDA_ERROR_OUT_OF_MEMORY;
	if (r == CUDA_SUCCESS)
		r = REAL(cuMemMap)(ptr, size, offset, handle, flags);
	if (r == CUDA_SUCCESS && m != NULL) {
		struct tr_entry e = {.key = ptr,
				     .aux = (uint64_t)(uintptr_t)m,
				     .units = tr_units(size)};
		m->uses++;
		if (!tr_table_put(&mappings, &e))
			tr_complain("out of host memory for the ledger of mappings");
	}
	tr_unlock(&vmm_lock);
	return r;
}

/* A range holds whole mappings, one after the other. */
CUresult EXPORT cuMemUnmap(CUdeviceptr ptr, size_t size)
{
	tr_lock(&vmm_lock);
	CUresult r = REAL(cuMemUnmap)(ptr, size);
	for (CUdeviceptr at = ptr; r == CUDA_SUCCESS && at < ptr + size;) {
		struct tr_entry e;
		if (!tr_table_take(&mappings, at, &e)) {
			at += TR_UNIT * 16; /* not ours (a multicast object): next possible start */
			continue;
		}
		struct memory *m = (struct memory *)(uintptr_t)e.aux;
		at += e.units * TR_UNIT;
		m->uses--;
		end_if_unused(m);
	}
	tr_unlock(&vmm_lock);
	return r;
}

static struct memory *of_address(CUdeviceptr addr)
{
	for (size_t i = 0; mappings.mask != 0 && i <= mappings.mask; i++) {
		const struct tr_entry *e = &mappings.slots[i];
		if (e->key != 0 && addr >= e->key && addr - e->key < e->units * TR_UNIT)
			return (struct memory *)(uintptr_t)e->aux;
	}
	return NULL;
}

CUresult EXPORT cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
	tr_lock(&vmm_lock);
	CUresult r = REAL(cuMemRetainAllocationHandle)(handle, addr);
	struct memory *m = r == CUDA_SUCCESS ? of_handle(*handle) : NULL;
	if (r == CUDA_SUCCESS && m == NULL) /* the driver may name it by another handle than before */
		m = of_address((CUdeviceptr)(uintptr_t)addr);
	if (m != NULL && !keep(m, *handle))
		m->uses++; /* never ends: the safe side */
	tr_unlock(&vmm_lock);
	return r;
}

/* --- export and import --------------------------------------------------------------------- */

CUresult EXPORT cuMemExportToShareableHandle(void *shareableHandle,
					     CUmemGenericAllocationHandle handle,
					     CUmemAllocationHandleType handleType,
					     unsigned long long flags)
{
	CUresult r = REAL(cuMemExportToShareableHandle)(shareableHandle, handle, handleType, flags);
	if (r != CUDA_SUCCESS)
		return r;
	tr_lock(&vmm_lock);
	struct memory *m = of_handle(handle);
	if (m != NULL && m->charged && !m->exported) {
		m->exported = true;
		tr_exported(m->dev, (int64_t)(m->units * TR_UNIT));
	}
	tr_unlock(&vmm_lock);
	return r;
}

/* Takes over the guess of the memory's device: what it may be until a mapping shows how much it is. */
static void imported(uint64_t handle, uint64_t *guess)
{
	CUmemAllocationProp prop;
	tr_lock(&vmm_lock);
	struct memory *m = of_handle(handle); /* our own export may come back under its handle */
	struct memory *fresh = m == NULL ? calloc(1, sizeof *m) : NULL;
	if (fresh != NULL) {
		*fresh = (struct memory){.handle = handle, .dev = -1, .imported = true};
		memset(&prop, 0, sizeof prop);
		if (REAL(cuMemGetAllocationPropertiesFromHandle)(&prop, handle) == CUDA_SUCCESS &&
		    prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE)
			fresh->dev = tr_device_index(prop.location.id);
		if (fresh->dev >= 0) {
			fresh->guess = guess[fresh->dev];
			guess[fresh->dev] = 0;
		}
		m = fresh;
	}
	if (m != NULL && !keep(m, handle) && m == fresh) {
		tr_import_end(m->dev, m->guess);
		free(m);
	}
	tr_unlock(&vmm_lock);
}

CUresult EXPORT cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle,
					       void *osHandle,
					       CUmemAllocationHandleType shHandleType)
{
	CUresult r = tr_enter();
	if (r != CUDA_SUCCESS)
		return r;
	/* Which device it is on is known afterwards only. */
	uint64_t guess[TR_MAX_DEVICES];
	for (int d = 0; d < tr_limits_devices(); d++)
		guess[d] = tr_import_begin(d);
	r = REAL(cuMemImportFromShareableHandle)(handle, osHandle, shHandleType);
	if (r == CUDA_SUCCESS)
		imported(*handle, guess);
	for (int d = 0; d < tr_limits_devices(); d++)
		tr_import_end(d, guess[d]);
	return r;
}

/* --- bindings ------------------------------------------------------------------------------ */

CUresult EXPORT cuMulticastCreate(CUmemGenericAllocationHandle *mcHandle,
				  const CUmulticastObjectProp *prop)
{
	CUresult r = REAL(cuMulticastCreate)(mcHandle, prop);
	if (r != CUDA_SUCCESS)
		return r;
	struct memory *m = calloc(1, sizeof *m);
	if (m == NULL)
		return r;
	*m = (struct memory){.handle = *mcHandle, .dev = -1, .multicast = true};
	tr_lock(&vmm_lock);
	if (!keep(m, *mcHandle))
		free(m);
	tr_unlock(&vmm_lock);
	return r;
}

static CUresult bound(CUresult r, struct memory *m, uint64_t mc, size_t offset)
{
	if (r == CUDA_SUCCESS && m != NULL)
		use_add(m, mc, offset, m->dev < 0 ? -1 : tr_device_handle(m->dev));
	tr_unlock(&vmm_lock);
	return r;
}

CUresult EXPORT cuMulticastBindMem(CUmemGenericAllocationHandle mcHandle, size_t mcOffset,
				   CUmemGenericAllocationHandle memHandle, size_t memOffset,
				   size_t size, unsigned long long flags)
{
	tr_lock(&vmm_lock);
	struct memory *m = of_handle(memHandle);
	return bound(REAL(cuMulticastBindMem)(mcHandle, mcOffset, memHandle, memOffset, size,
					      flags),
		     m, mcHandle, mcOffset);
}

CUresult EXPORT cuMulticastBindAddr(CUmemGenericAllocationHandle mcHandle, size_t mcOffset,
				    CUdeviceptr memptr, size_t size, unsigned long long flags)
{
	tr_lock(&vmm_lock);
	struct memory *m = of_address(memptr);
	return bound(REAL(cuMulticastBindAddr)(mcHandle, mcOffset, memptr, size, flags), m,
		     mcHandle, mcOffset);
}

CUresult EXPORT cuMulticastBindMem_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev,
				      size_t mcOffset, CUmemGenericAllocationHandle memHandle,
				      size_t memOffset, size_t size, unsigned long long flags)
{
	if (REAL(cuMulticastBindMem_v2) == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	tr_lock(&vmm_lock);
	struct memory *m = of_handle(memHandle);
	return bound(REAL(cuMulticastBindMem_v2)(mcHandle, dev, mcOffset, memHandle, memOffset, size,
						 flags),
		     m, mcHandle, mcOffset);
}

CUresult EXPORT cuMulticastBindAddr_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev,
				       size_t mcOffset, CUdeviceptr memptr, size_t size,
				       unsigned long long flags)
{
	if (REAL(cuMulticastBindAddr_v2) == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	tr_lock(&vmm_lock);
	struct memory *m = of_address(memptr);
	return bound(REAL(cuMulticastBindAddr_v2)(mcHandle, dev, mcOffset, memptr, size, flags), m,
		     mcHandle, mcOffset);
}

CUresult EXPORT cuMulticastUnbind(CUmemGenericAllocationHandle mcHandle, CUdevice dev,
				  size_t mcOffset, size_t size)
{
	tr_lock(&vmm_lock);
	CUresult r = REAL(cuMulticastUnbind)(mcHandle, dev, mcOffset, size);
	for (struct use **at = &uses; r == CUDA_SUCCESS && *at != NULL;) {
		struct use *u = *at;
		if (u->holder != mcHandle || u->dev != dev || u->offset < mcOffset ||
		    u->offset - mcOffset >= size) {
			at = &u->next;
			continue;
		}
		*at = u->next;
		struct memory *m = u->memory;
		free(u);
		m->uses--;
		end_if_unused(m);
		at = &uses; /* ending one may have dropped others */
	}
	tr_unlock(&vmm_lock);
	return r;
}

/* Memory mapped into sparse arrays stays charged until the process ends or releases the array's
 * memory by other means: the driver tells no address by which an unmapping could be matched. */
typedef CUresult (*map_array_fn)(CUarrayMapInfo *, unsigned int, CUstream);

static CUresult map_array(map_array_fn real, CUarrayMapInfo *info, unsigned int count, CUstream s)
{
	tr_lock(&vmm_lock);
	CUresult r = real(info, count, s);
	for (unsigned i = 0; r == CUDA_SUCCESS && info != NULL && i < count; i++) {
		if (info[i].memOperationType != CU_MEM_OPERATION_TYPE_MAP)
			continue;
		struct memory *m = of_handle(info[i].memHandle.memHandle);
		if (m != NULL)
			m->uses++;
	}
	tr_unlock(&vmm_lock);
	return r;
}

CUresult EXPORT cuMemMapArrayAsync(CUarrayMapInfo *mapInfoList, unsigned int count,
				   CUstream hStream)
{
	return map_array(REAL(cuMemMapArrayAsync), mapInfoList, count, hStream);
}

CUresult EXPORT cuMemMapArrayAsync_ptsz(CUarrayMapInfo *mapInfoList, unsigned int count,
					CUstream hStream)
{
	return map_array(REAL(cuMemMapArrayAsync_ptsz), mapInfoList, count, hStream);
}
