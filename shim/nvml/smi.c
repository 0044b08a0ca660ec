/* nvidia-smi does not ask for the process lists by their public names but through a private
 * table, nvmlInternalGetExportTable. The table is the driver's own except for those three slots.
 *
 * Layout, seen with drivers 535 and 550: the table's size in bytes, then function pointers, one a
 * word; it grows at its end, and slots keep their number. Of a driver outside that range nothing
 * is known, and its table is left alone: its nvidia-smi then lists other tenants' processes. */
#include "compat.h"
#define _GNU_SOURCE
#include "real.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "processes.h"
#include "trace.h"

enum { OLDEST_DRIVER = 535, NEWEST_DRIVER = 550 };
enum { COMPUTE_SLOT = 213, GRAPHICS_SLOT = 214, MPS_SLOT = 215, MAX_SLOTS = 1024 };

static const unsigned char smi_table[16] = {0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e,
					    0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4};

/* An entry of these lists: nvmlProcessDetail_v1_t and the name. */
struct smi_process {
	nvmlProcessDetail_v1_t detail;
	char name[4096];
};
_Static_assert(sizeof(struct smi_process) == 4128, "stride of nvidia-smi");

static nvmlReturn_t list(enum kind kind, nvmlDevice_t device, unsigned *count,
			 struct smi_process *infos)
{
	struct entries e = {0};
	if (count == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!tr_slice_open(false))
		return NVML_ERROR_NOT_READY;
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

static bool layout_known(const uintptr_t *table)
{
	char version[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE] = "";
	uintptr_t slots = table[0] / sizeof *table;
	if (REAL(nvmlSystemGetDriverVersion) == NULL || slots <= MPS_SLOT || slots > MAX_SLOTS ||
	    REAL(nvmlSystemGetDriverVersion)(version, sizeof version) != NVML_SUCCESS)
		return false;
	long major = strtol(version, NULL, 10);
	return major >= OLDEST_DRIVER && major <= NEWEST_DRIVER;
}

/* The driver's table with our three slots. Made once; NULL when there is no memory. */
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
	copy[COMPUTE_SLOT] = (uintptr_t)compute_list;
	copy[GRAPHICS_SLOT] = (uintptr_t)graphics_list;
	copy[MPS_SLOT] = (uintptr_t)mps_list;
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
	if (!layout_known(*table)) {
		TR_TRACE("nvidia-smi's table: unknown driver, left alone");
		return r;
	}
	const uintptr_t *ours = our_table(*table);
	if (ours == NULL)
		return NVML_ERROR_MEMORY;
	*table = ours;
	return r;
}
