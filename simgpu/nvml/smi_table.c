/* The private functions that NVIDIA's nvidia-smi asks for with nvmlInternalGetExportTable.
 *
 * The table holds its own size in bytes and then function pointers. Its slots keep their number
 * from driver to driver, seen with nvidia-smi 535 and 550; what a slot does was found by watching
 * which one each view of nvidia-smi calls, between which public functions and with what arguments.
 * Every other slot names itself in the trace and says NVML_ERROR_NOT_SUPPORTED. */
#include <stdlib.h>
#include <string.h>
#include "internal.h"

enum { SLOTS = 256, ROWS = 16 };
typedef uintptr_t word;

/* An entry of the process lists: nvmlProcessDetail_v1_t, then the name. */
struct smi_process {
	uint32_t pid, pad;
	uint64_t memory;
	uint32_t gpu_instance, compute_instance;
	uint64_t protected_memory;
	char name[4096];
};
_Static_assert(sizeof(struct smi_process) == 4128, "stride that nvidia-smi expects");

/* fn(device, unsigned *count, struct smi_process *list): *count is the room on entry. */
static int process_list(nvmlDevice_t device, unsigned *count, struct smi_process *list)
{
	ENTER_GPU(device, g);
	NEED(count);
	if (g.s->hide_processes)
		return NVML_ERROR_NOT_SUPPORTED;
	struct nvml_process p[SIM_MAX_PROCS];
	unsigned room = *count, n = nvml_processes(&g, p, SIM_MAX_PROCS);
	*count = n;
	if (n > room || (n && !list))
		return NVML_ERROR_INSUFFICIENT_SIZE;
	for (unsigned i = 0; i < n; i++) {
		memset(&list[i], 0, offsetof(struct smi_process, name));
		list[i].pid = p[i].pid;
		list[i].memory = p[i].memory;
		list[i].gpu_instance = list[i].compute_instance = 0xFFFFFFFF;
		nvml_process_name(p[i].pid, list[i].name, sizeof(list[i].name));
	}
	return NVML_SUCCESS;
}

static int empty_process_list(nvmlDevice_t device, unsigned *count)
{
	ENTER_GPU(device, g);
	NEED(count);
	*count = 0;
	return g.s->hide_processes ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

/* fn(bus id, bus id, unsigned *out): the common ancestor of two GPUs named by bus, counted 0 for a
 * single switch (PIX), 1 for several (PXB), 2 host bridge, 3 NUMA node, 4 system. */
static int ancestor(const char *bus_a, const char *bus_b, unsigned *out)
{
	nvmlDevice_t a, b;
	nvmlGpuTopologyLevel_t level;
	nvmlReturn_t r = nvmlDeviceGetHandleByPciBusId_v2(bus_a, &a);
	if (r == NVML_SUCCESS)
		r = nvmlDeviceGetHandleByPciBusId_v2(bus_b, &b);
	if (r == NVML_SUCCESS)
		r = nvmlDeviceGetTopologyCommonAncestor(a, b, &level);
	if (r == NVML_SUCCESS)
		*out = level <= NVML_TOPOLOGY_SINGLE ? 0 : (unsigned)level / 10 - 1;
	return r;
}

/* fn(device, unsigned *yes): whether pmon and dmon may watch this kind of GPU. */
static int can_monitor(nvmlDevice_t device, unsigned *yes)
{
	ENTER_GPU(device, g);
	NEED(yes);
	*yes = 1;
	return NVML_SUCCESS;
}

/* An entry of what pmon reads: a time in microseconds, then for each kind of engine, in this order,
 * who used it how much. Drivers before 545 knew the first four kinds only. nvidia-smi must be of
 * the machine's driver version for this view, as it must on a real machine. */
enum { USE_SM, USE_MEMORY, USE_ENCODER, USE_DECODER, USE_JPEG, USE_OFA };
struct smi_use {
	uint32_t percent, pad;
	uint32_t pid; /* ~0: nobody */
	char name[64];
	uint32_t pad2;
};
_Static_assert(sizeof(struct smi_use) == 80, "stride that nvidia-smi expects");

/* fn(device, since_us, *type, *count, entries). nvidia-smi takes the entries for slices of time,
 * one process in each: it adds up a process's percents and divides by the number of entries. We
 * give one entry a process, so its figure is multiplied by that number. */
static int process_use(nvmlDevice_t device, uint64_t since_us, unsigned *type, unsigned *count,
		       char *out)
{
	ENTER_GPU(device, g);
	NEED(count && out);
	if (g.s->hide_processes)
		return NVML_ERROR_NOT_SUPPORTED;
	struct nvml_sample s[SIM_MAX_PROCS];
	unsigned kinds = atoi(sim_shared->driver_version) < 545 ? USE_DECODER + 1 : USE_OFA + 1;
	unsigned room = *count, n = nvml_process_samples(&g, since_us, s);
	if (n > room)
		n = room;
	*count = n;
	if (type)
		*type = NVML_VALUE_TYPE_UNSIGNED_INT;
	for (unsigned i = 0; i < n; i++) {
		memcpy(out, &s[i].time_us, sizeof(s[i].time_us));
		out += sizeof(s[i].time_us);
		for (unsigned kind = 0; kind < kinds; kind++, out += sizeof(struct smi_use)) {
			struct smi_use use = { .pid = UINT32_MAX };
			if (kind == USE_SM)
				use = (struct smi_use){ .pid = s[i].pid,
							.percent = s[i].percent * n };
			memcpy(out, &use, sizeof(use));
		}
	}
	return n ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

/* Slot numbers. */
enum {
	TOPOLOGY_ANCESTOR = 23,
	LOG_WRITE = 26, /* printf arguments for the library's log */
	CAN_MONITOR = 72,
	HANDLE_BY_INDEX = 81, /* fn(index, device *out, flags) */
	PROCESS_USE = 145,
	COMPUTE_PROCESSES = 213,
	GRAPHICS_PROCESSES = 214,
	MPS_PROCESSES = 215,
	HOST_MAX_PCIE_GEN = 230,
};

static int call(unsigned slot, word a, word b, word c, word d, word e)
{
	switch (slot) {
	case TOPOLOGY_ANCESTOR:
		return ancestor((const char *)a, (const char *)b, (unsigned *)c);
	case LOG_WRITE: return NVML_SUCCESS;
	case CAN_MONITOR: return can_monitor((nvmlDevice_t)a, (unsigned *)b);
	case HANDLE_BY_INDEX:
		return nvmlDeviceGetHandleByIndex_v2((unsigned)a, (nvmlDevice_t *)b);
	case PROCESS_USE:
		return process_use((nvmlDevice_t)a, b, (unsigned *)c, (unsigned *)d,
				   (char *)e);
	case COMPUTE_PROCESSES:
		return process_list((nvmlDevice_t)a, (unsigned *)b, (struct smi_process *)c);
	case GRAPHICS_PROCESSES:
	case MPS_PROCESSES: return empty_process_list((nvmlDevice_t)a, (unsigned *)b);
	case HOST_MAX_PCIE_GEN:
		return nvmlDeviceGetMaxPcieLinkGeneration((nvmlDevice_t)a, (unsigned *)b);
	}
	SIM_TRACE("nvidia-smi slot %u(%#zx, %#zx, %#zx, %#zx): not implemented", slot, (size_t)a,
		  (size_t)b, (size_t)c, (size_t)d);
	return NVML_ERROR_NOT_SUPPORTED;
}

/* A function for each slot, so that a call can be told from another. */
#define SLOT(hi, lo)                                                                               \
	static int slot_##hi##_##lo(word a, word b, word c, word d, word e)                                \
	{                                                                                          \
		return call((hi) * ROWS + (lo), a, b, c, d, e);                                       \
	}
#define NAME(hi, lo) slot_##hi##_##lo,
#define ROW(X, hi)                                                                                 \
	X(hi, 0) X(hi, 1) X(hi, 2) X(hi, 3) X(hi, 4) X(hi, 5) X(hi, 6) X(hi, 7)                    \
	X(hi, 8) X(hi, 9) X(hi, 10) X(hi, 11) X(hi, 12) X(hi, 13) X(hi, 14) X(hi, 15)
#define ALL(X)                                                                                     \
	ROW(X, 0) ROW(X, 1) ROW(X, 2) ROW(X, 3) ROW(X, 4) ROW(X, 5) ROW(X, 6) ROW(X, 7)            \
	ROW(X, 8) ROW(X, 9) ROW(X, 10) ROW(X, 11) ROW(X, 12) ROW(X, 13) ROW(X, 14) ROW(X, 15)
ALL(SLOT)

static int (*const functions[SLOTS])(word, word, word, word, word) = { ALL(NAME) };

nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *id)
{
	static const unsigned char smi_id[16] = { 0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e,
						  0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4 };
	static struct {
		size_t size;
		int (*fn[SLOTS - 1])(word, word, word, word, word);
	} smi;
	NEED(table && id);
	if (memcmp(id, smi_id, sizeof(smi_id)) != 0) {
		SIM_TRACE("nvmlInternalGetExportTable: unknown table");
		return NVML_ERROR_NOT_FOUND;
	}
	memcpy(smi.fn, &functions[1], sizeof(smi.fn)); /* the same bytes each time */
	smi.size = sizeof(smi);
	*table = &smi;
	return NVML_SUCCESS;
}
