/* nvidia-smi does not ask for GPUs and processes by the public names but through a private table,
 * nvmlInternalGetExportTable. Ours is the driver's, except for the slots below.
 *
 * Layout: the table's size in bytes, then function pointers, one a word. It grows at its end and
 * slots keep their number (drivers 470, 535 and 550: 213, 245 and 251 words). What an entry of a
 * process list looks like is known for 535 and 550 only. With any other driver these lists are empty,
 * and a slot that came after 550 is not supported: it may list processes as well. nvidia-smi bears
 * that, but it does not run without the table. */
#include "compat.h"
#define _GNU_SOURCE
#include "real.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "members.h"
#include "processes.h"
#include "trace.h"

enum {
	DEVICE_SLOT = 81, /* fn(index, device, flags): how nvidia-smi gets every handle */
	USE_SLOT = 145,	  /* what pmon shows */
	COMPUTE_SLOT = 213,
	GRAPHICS_SLOT = 214,
	MPS_SLOT = 215,
	KNOWN_SLOTS = 251,
	MAX_SLOTS = 1024
};
/* Slot 23, the nearest common bridge of two GPUs that nvidia-smi names by bus address, stays: it
 * hands out no handle. */

static const unsigned char smi_table[16] = {0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e,
					    0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4};

/* An entry of these lists: nvmlProcessDetail_v1_t and the name. */
struct smi_process {
	nvmlProcessDetail_v1_t detail;
	char name[4096];
};
_Static_assert(sizeof(struct smi_process) == 4128, "stride of nvidia-smi");

/* An entry of what pmon reads: a time, then for each kind of engine who used it how much.
 * nvidia-smi adds up a process's percents and divides by the number of entries, so an entry of
 * somebody else stays, as one in which nobody used anything. */
struct smi_use {
	uint32_t percent, pad;
	uint32_t pid; /* NOBODY: none */
	char name[64];
	uint32_t pad2;
};
#define NOBODY 0xffffffffu
_Static_assert(sizeof(struct smi_use) == 80, "stride of nvidia-smi");

/* Takes whatever arguments there are, and touches none. */
static nvmlReturn_t not_supported(void)
{
	TR_TRACE("nvidia-smi's table: a slot not known for this driver");
	return NVML_ERROR_NOT_SUPPORTED;
}

typedef nvmlReturn_t (*device_fn)(unsigned, nvmlDevice_t *, unsigned);
typedef nvmlReturn_t (*use_fn)(nvmlDevice_t, uint64_t, unsigned *, unsigned *, unsigned char *);

/* What is in the driver's own table. It had a table when it was asked for ours. */
static uintptr_t driver_slot(int slot)
{
	const void *table = NULL;
	return REAL(nvmlInternalGetExportTable)(&table, smi_table) == NVML_SUCCESS ?
		       ((const uintptr_t *)table)[slot] :
		       (uintptr_t)not_supported;
}

/* How many kinds of engines an entry of USE_SLOT has with this driver; 0: its entries and those of
 * the process lists are not known. Asked at each call: NVML may not tell before nvmlInit. */
static unsigned known_kinds(void)
{
	char version[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE] = "";
	if (REAL(nvmlSystemGetDriverVersion) == NULL ||
	    REAL(nvmlSystemGetDriverVersion)(version, sizeof version) != NVML_SUCCESS)
		return 0;
	long major = strtol(version, NULL, 10);
	return major == 535 ? 4 : major == 550 ? 6 : 0;
}

/* --- the slots ----------------------------------------------------------------------------- */

/* The flags are not known, so the driver is asked for the same GPU by its own number. */
static nvmlReturn_t device_by_index(unsigned index, nvmlDevice_t *device, unsigned flags)
{
	unsigned own;
	int in_slice;
	if (!tr_slice_open(false))
		return NVML_ERROR_NOT_READY;
	nvmlReturn_t r = tr_initialized();
	if (r != NVML_SUCCESS)
		return r;
	if (index >= (unsigned)tr_limits_devices() || device == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	r = tr_device_handle((int)index, device);
	if (r == NVML_SUCCESS)
		r = REAL(nvmlDeviceGetIndex)(*device, &own);
	if (r == NVML_SUCCESS)
		r = ((device_fn)driver_slot(DEVICE_SLOT))(own, device, flags);
	return r == NVML_SUCCESS ? tr_device_index(*device, &in_slice) : r;
}

static void keep_uses(unsigned char *at, unsigned n, unsigned kinds, const struct tr_members *m)
{
	for (; n > 0; n--) {
		at += sizeof(uint64_t);
		for (unsigned kind = 0; kind < kinds; kind++, at += sizeof(struct smi_use)) {
			struct smi_use use;
			memcpy(&use, at, sizeof use);
			const struct tr_member *found = tr_member_find(m, use.pid);
			if (found == NULL)
				use = (struct smi_use){.pid = NOBODY};
			else
				use.pid = found->pid;
			memcpy(at, &use, sizeof use);
		}
	}
}

static nvmlReturn_t process_use(nvmlDevice_t device, uint64_t since_us, unsigned *type,
				unsigned *count, unsigned char *entries)
{
	int dev;
	unsigned kinds = known_kinds();
	if (!tr_slice_open(false))
		return NVML_ERROR_NOT_READY;
	if (kinds == 0)
		return NVML_ERROR_NOT_FOUND;
	nvmlReturn_t r = tr_device_index(device, &dev);
	if (r != NVML_SUCCESS || count == NULL || entries == NULL)
		return r != NVML_SUCCESS ? r : NVML_ERROR_INVALID_ARGUMENT;
	unsigned room = *count;
	struct tr_members *m = tr_members(dev);
	if (m == NULL)
		return NVML_ERROR_MEMORY;
	r = ((use_fn)driver_slot(USE_SLOT))(device, since_us, type, count, entries);
	if (r == NVML_SUCCESS)
		keep_uses(entries, *count < room ? *count : room, kinds, m);
	free(m);
	return r;
}

static nvmlReturn_t list(enum kind kind, nvmlDevice_t device, unsigned *count,
			 struct smi_process *infos)
{
	struct entries e = {0};
	if (count == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!tr_slice_open(false))
		return NVML_ERROR_NOT_READY;
	if (known_kinds() == 0) { /* empty: pmon waits for ever where it is not supported */
		*count = 0;
		return NVML_SUCCESS;
	}
	nvmlReturn_t r = tr_slice_list(kind, device, &e);
	if (r == NVML_SUCCESS)
		r = tr_room_for(e.n, count, infos);
	for (unsigned i = 0; r == NVML_SUCCESS && i < e.n; i++) {
		infos[i].detail = (nvmlProcessDetail_v1_t){
			.pid = e.list[i].pid,
			.usedGpuMemory = e.list[i].bytes,
			.gpuInstanceId = e.list[i].gpu_instance,
			.computeInstanceId = e.list[i].compute_instance};
		if (REAL(nvmlSystemGetProcessName) == NULL ||
		    REAL(nvmlSystemGetProcessName)(e.list[i].pid, infos[i].name,
						   sizeof infos[i].name) != NVML_SUCCESS)
			infos[i].name[0] = 0;
	}
	free(e.list);
	return r;
}

static nvmlReturn_t compute_list(nvmlDevice_t device, unsigned *count, struct smi_process *infos)
{
	return list(COMPUTE, device, count, infos);
}

static nvmlReturn_t graphics_list(nvmlDevice_t device, unsigned *count, struct smi_process *infos)
{
	return list(GRAPHICS, device, count, infos);
}

static nvmlReturn_t mps_list(nvmlDevice_t device, unsigned *count, struct smi_process *infos)
{
	return list(MPS, device, count, infos);
}

/* --- the table ----------------------------------------------------------------------------- */

static void replace_slots(uintptr_t *table, size_t slots)
{
	for (size_t i = KNOWN_SLOTS; i < slots; i++)
		table[i] = (uintptr_t)not_supported;
	table[DEVICE_SLOT] = (uintptr_t)device_by_index;
	table[USE_SLOT] = (uintptr_t)process_use;
	if (slots <= MPS_SLOT) /* such drivers' nvidia-smi asks for the lists by their names */
		return;
	table[COMPUTE_SLOT] = (uintptr_t)compute_list;
	table[GRAPHICS_SLOT] = (uintptr_t)graphics_list;
	table[MPS_SLOT] = (uintptr_t)mps_list;
}

/* The driver's table with our slots; NULL when there is no memory. Made once. */
static const uintptr_t *our_table(const uintptr_t *table)
{
	static uintptr_t *made;
	uintptr_t *known = __atomic_load_n(&made, __ATOMIC_ACQUIRE);
	if (known != NULL)
		return known;
	uintptr_t *copy = malloc(table[0]);
	if (copy == NULL)
		return NULL;
	memcpy(copy, table, table[0]);
	replace_slots(copy, table[0] / sizeof *table);
	if (__atomic_compare_exchange_n(&made, &known, copy, false, __ATOMIC_ACQ_REL,
					__ATOMIC_ACQUIRE))
		return copy;
	free(copy);
	return known;
}

EXPORT nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *id)
{
	TR_ENTER(nvmlInternalGetExportTable, table, id);
	nvmlReturn_t r = REAL(nvmlInternalGetExportTable)(table, id);
	if (r != NVML_SUCCESS || memcmp(id, smi_table, sizeof smi_table) != 0)
		return r;
	const uintptr_t *theirs = *table;
	size_t slots = theirs[0] / sizeof *theirs;
	*table = NULL;
	if (slots <= USE_SLOT || slots > MAX_SLOTS)
		return NVML_ERROR_NOT_FOUND;
	*table = our_table(theirs);
	return *table == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}
