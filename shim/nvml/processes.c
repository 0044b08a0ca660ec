/* The lists of running processes: the slice's processes only, by the numbers that the tenant
 * knows, with the memory that the ledger has for them. */
#include "compat.h"
#define _GNU_SOURCE
#include "real.h"
#include <stdlib.h>
#include <string.h>
#include "members.h"
#include "processes.h"
#include "trace.h"

/* --- what the driver lists ----------------------------------------------------------------- */

/* An entry of versions 2 and 3 is 24 bytes; drivers 530 and early 535 had a fifth field in
 * version 3. The buffer has room for that, and how far the driver wrote tells which it is. */
#define ENTRY_MAX 32
#define UNTOUCHED 0xa5
typedef nvmlReturn_t (*list_fn)(nvmlDevice_t, unsigned *, void *);

static size_t entry_size(const unsigned char *buf, unsigned n, size_t documented)
{
	for (size_t i = n * documented; i < (size_t)n * ENTRY_MAX; i++)
		if (buf[i] != UNTOUCHED)
			return ENTRY_MAX;
	return documented;
}

static nvmlReturn_t add_all(struct entries *e, const unsigned char *buf, unsigned n, size_t size)
{
	bool mig = size > sizeof(nvmlProcessInfo_v1_t);
	e->list = calloc(n + 1, sizeof *e->list);
	if (e->list == NULL)
		return NVML_ERROR_MEMORY;
	for (unsigned i = 0; i < n; i++) {
		nvmlProcessInfo_v2_t p = {.gpuInstanceId = NO_INSTANCE,
					  .computeInstanceId = NO_INSTANCE};
		memcpy(&p, buf + i * size, mig ? sizeof p : sizeof(nvmlProcessInfo_v1_t));
		e->list[e->n++] = (struct entry){.pid = p.pid,
						 .gpu_instance = p.gpuInstanceId,
						 .compute_instance = p.computeInstanceId,
						 .bytes = p.usedGpuMemory};
	}
	return NVML_SUCCESS;
}

static nvmlReturn_t list_with(list_fn fn, nvmlDevice_t device, size_t documented,
			      struct entries *e)
{
	nvmlReturn_t r = NVML_ERROR_UNKNOWN;
	for (unsigned room = 64, tries = 0; tries < 8; room *= 4, tries++) {
		unsigned n = room;
		unsigned char *buf = malloc((size_t)room * ENTRY_MAX);
		if (buf == NULL)
			return NVML_ERROR_MEMORY;
		memset(buf, UNTOUCHED, (size_t)room * ENTRY_MAX);
		r = fn(device, &n, buf);
		if (r == NVML_SUCCESS && n <= room)
			r = add_all(e, buf, n, entry_size(buf, n, documented));
		free(buf);
		if (r != NVML_ERROR_INSUFFICIENT_SIZE)
			return r;
	}
	return r;
}

/* The newest version that the driver has; ours are all answered from it. */
static nvmlReturn_t driver_list(enum kind kind, nvmlDevice_t device, struct entries *e)
{
#define FN(k, v) (list_fn)(void *)REAL(nvmlDeviceGet##k##RunningProcesses##v)
	const list_fn fn[3][3] = {
		[COMPUTE] = {FN(Compute, _v3), FN(Compute, _v2), FN(Compute, )},
		[GRAPHICS] = {FN(Graphics, _v3), FN(Graphics, _v2), FN(Graphics, )},
		[MPS] = {FN(MPSCompute, _v3), FN(MPSCompute, _v2), FN(MPSCompute, )},
	};
	for (int v = 0; v < 3; v++)
		if (fn[kind][v] != NULL)
			return list_with(fn[kind][v], device,
					 v < 2 ? sizeof(nvmlProcessInfo_v2_t) :
						 sizeof(nvmlProcessInfo_v1_t),
					 e);
	return NVML_ERROR_FUNCTION_NOT_FOUND;
}

/* --- what the tenant sees ------------------------------------------------------------------ */

/* Keeps the slice's processes, in place. What is not in the ledger is somebody else's. */
static void keep_members(struct entries *e, const struct tr_members *m)
{
	unsigned kept = 0;
	for (unsigned i = 0; i < e->n; i++) {
		const struct tr_member *found = tr_member_find(m, e->list[i].pid);
		if (found == NULL)
			continue;
		e->list[kept] = e->list[i];
		e->list[kept].pid = found->pid;
		e->list[kept++].bytes = found->bytes;
	}
	e->n = kept;
}

static bool lists(const struct entries *e, unsigned pid)
{
	for (unsigned i = 0; i < e->n; i++)
		if (e->list[i].pid == pid)
			return true;
	return false;
}

/* Members that hold memory here and that no list of the driver names: it lists late, and on some
 * systems (containers, WSL) it lists nobody. */
static nvmlReturn_t add_missing(struct entries *e, const struct entries *graphics,
				const struct entries *mps, const struct tr_members *m)
{
	struct entry *list = realloc(e->list, (e->n + (size_t)m->n + 1) * sizeof *list);
	if (list == NULL)
		return NVML_ERROR_MEMORY;
	e->list = list;
	for (int i = 0; i < m->n; i++) {
		unsigned pid = m->list[i].pid;
		if (m->list[i].bytes == 0 || lists(e, pid) || lists(graphics, pid) ||
		    lists(mps, pid))
			continue;
		e->list[e->n++] = (struct entry){.pid = pid,
						 .gpu_instance = NO_INSTANCE,
						 .compute_instance = NO_INSTANCE,
						 .bytes = m->list[i].bytes};
	}
	return NVML_SUCCESS;
}

static nvmlReturn_t complete(struct entries *e, nvmlDevice_t device, const struct tr_members *m)
{
	struct entries graphics = {0}, mps = {0};
	driver_list(GRAPHICS, device, &graphics);
	driver_list(MPS, device, &mps);
	keep_members(&graphics, m);
	keep_members(&mps, m);
	nvmlReturn_t r = add_missing(e, &graphics, &mps, m);
	free(graphics.list);
	free(mps.list);
	return r;
}

nvmlReturn_t tr_slice_list(enum kind kind, nvmlDevice_t device, struct entries *e)
{
	int dev;
	nvmlReturn_t r = tr_device_index(device, &dev);
	if (r == NVML_SUCCESS)
		r = driver_list(kind, device, e);
	if (r != NVML_SUCCESS)
		return r;
	struct tr_members *m = tr_members(dev);
	if (m == NULL)
		return NVML_ERROR_MEMORY;
	unsigned listed = e->n;
	keep_members(e, m);
	if (kind == COMPUTE)
		r = complete(e, device, m);
	TR_TRACE("processes of device %d, kind %d: the driver has %u, the slice %u", dev, kind,
		 listed, e->n);
	free(m);
	return r;
}

/* --- the entry points ---------------------------------------------------------------------- */

nvmlReturn_t tr_room_for(unsigned n, unsigned *count, const void *infos)
{
	unsigned room = *count;
	if (room != 0 && infos == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*count = n;
	return n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static nvmlReturn_t list_v1(enum kind kind, nvmlDevice_t device, unsigned *count,
			    nvmlProcessInfo_v1_t *infos)
{
	struct entries e = {0};
	if (count == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t r = tr_slice_list(kind, device, &e);
	if (r == NVML_SUCCESS)
		r = tr_room_for(e.n, count, infos);
	for (unsigned i = 0; r == NVML_SUCCESS && i < e.n; i++)
		infos[i] = (nvmlProcessInfo_v1_t){.pid = e.list[i].pid,
						  .usedGpuMemory = e.list[i].bytes};
	free(e.list);
	return r;
}

static nvmlReturn_t list_v2(enum kind kind, nvmlDevice_t device, unsigned *count,
			    nvmlProcessInfo_v2_t *infos)
{
	struct entries e = {0};
	if (count == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t r = tr_slice_list(kind, device, &e);
	if (r == NVML_SUCCESS)
		r = tr_room_for(e.n, count, infos);
	for (unsigned i = 0; r == NVML_SUCCESS && i < e.n; i++)
		infos[i] = (nvmlProcessInfo_v2_t){.pid = e.list[i].pid,
						  .usedGpuMemory = e.list[i].bytes,
						  .gpuInstanceId = e.list[i].gpu_instance,
						  .computeInstanceId = e.list[i].compute_instance};
	free(e.list);
	return r;
}

/* A version that the driver lacks is there all the same: the answer comes from one it has. */
#define LIST(name, kind, version, type)                                                            \
	EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned int *infoCount, type *infos)        \
	{                                                                                          \
		if (REAL(name) != NULL && tr_inside(__builtin_return_address(0)))                  \
			return REAL(name)(device, infoCount, infos);                               \
		if (!tr_slice_open(false))                                                         \
			return NVML_ERROR_NOT_READY;                                               \
		return list_##version(kind, device, infoCount, infos);                             \
	}
LIST(nvmlDeviceGetComputeRunningProcesses, COMPUTE, v1, nvmlProcessInfo_v1_t)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, COMPUTE, v2, nvmlProcessInfo_v2_t)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, COMPUTE, v2, nvmlProcessInfo_t)
LIST(nvmlDeviceGetGraphicsRunningProcesses, GRAPHICS, v1, nvmlProcessInfo_v1_t)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, GRAPHICS, v2, nvmlProcessInfo_v2_t)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, GRAPHICS, v2, nvmlProcessInfo_t)
LIST(nvmlDeviceGetMPSComputeRunningProcesses, MPS, v1, nvmlProcessInfo_v1_t)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, MPS, v2, nvmlProcessInfo_v2_t)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, MPS, v2, nvmlProcessInfo_t)

/* Version and mode are the driver's to judge, which it does before it looks at the room. */
EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device,
							  nvmlProcessDetailList_t *plist)
{
	struct entries e = {0};
	TR_ENTER(nvmlDeviceGetRunningProcessDetailList, device, plist);
	if (plist == NULL)
		return REAL(nvmlDeviceGetRunningProcessDetailList)(device, NULL);
	nvmlProcessDetailList_t ask = {.version = plist->version, .mode = plist->mode};
	nvmlReturn_t r = REAL(nvmlDeviceGetRunningProcessDetailList)(device, &ask);
	if (r != NVML_SUCCESS && r != NVML_ERROR_INSUFFICIENT_SIZE)
		return r;
	if (plist->version != nvmlProcessDetailList_v1 || plist->mode > MPS)
		return NVML_ERROR_INVALID_ARGUMENT;
	r = tr_slice_list((enum kind)plist->mode, device, &e);
	if (r == NVML_SUCCESS)
		r = tr_room_for(e.n, &plist->numProcArrayEntries, plist->procArray);
	for (unsigned i = 0; r == NVML_SUCCESS && i < e.n; i++)
		plist->procArray[i] = (nvmlProcessDetail_v1_t){
			.pid = e.list[i].pid,
			.usedGpuMemory = e.list[i].bytes,
			.gpuInstanceId = e.list[i].gpu_instance,
			.computeInstanceId = e.list[i].compute_instance};
	free(e.list);
	return r;
}
