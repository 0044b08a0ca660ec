/* Memory of a GPU and of the processes on it. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "internal.h"

void nvml_memory(const struct gpu *g, struct nvml_memory *out)
{
	sim_reap();
	uint64_t total = g->m->memory_nvml, capacity = g->s->capacity;
	uint64_t used = __atomic_load_n(&g->s->used, __ATOMIC_RELAXED);
	if (total < capacity)
		total = capacity;
	if (used > capacity)
		used = capacity;
	*out = (struct nvml_memory){ .total = total, .reserved = total - capacity, .used = used,
				     .free = capacity - used };
}

/* The first form knows no reserved part: it counts as used. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
	ENTER_GPU(device, g);
	NEED(memory);
	struct nvml_memory m;
	nvml_memory(&g, &m);
	memory->total = m.total;
	memory->used = m.used + m.reserved;
	memory->free = m.free;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	ENTER_GPU(device, g);
	NEED(memory);
	if (memory->version != nvmlMemory_v2)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	struct nvml_memory m;
	nvml_memory(&g, &m);
	memory->total = m.total;
	memory->reserved = m.reserved;
	memory->used = m.used;
	memory->free = m.free;
	return NVML_SUCCESS;
}

/* The window through which the CPU reaches device memory: a little for the driver, then 2 MiB for
 * each process. */
nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *bar1Memory)
{
	ENTER_GPU(device, g);
	NEED(bar1Memory);
	uint64_t used = (1 + 2ull * nvml_processes(&g, NULL, 0)) << 20;
	if (used > g.b->bar1)
		used = g.b->bar1;
	bar1Memory->bar1Total = g.b->bar1;
	bar1Memory->bar1Used = used;
	bar1Memory->bar1Free = g.b->bar1 - used;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryBusWidth(nvmlDevice_t device, unsigned int *busWidth)
{
	ENTER_GPU(device, g);
	NEED(busWidth);
	*busWidth = g.m->bus_bits;
	return NVML_SUCCESS;
}

unsigned nvml_processes(const struct gpu *g, struct nvml_process *out, unsigned max)
{
	unsigned n = 0;
	sim_reap();
	sim_lock();
	for (unsigned i = 0; i < SIM_MAX_PROCS; i++) {
		const struct sim_proc *p = &sim_shared->proc[i];
		const struct sim_proc_gpu *pg = &p->gpu[g->index];
		if (p->state != SIM_PROC_USED || pg->n_contexts == 0)
			continue;
		if (n < max)
			out[n] = (struct nvml_process){ .pid = sim_proc_pid_here((int)i), .slot = i,
							.memory = pg->memory, .peak = pg->peak,
							.start_us = pg->start_us };
		n++;
	}
	sim_unlock();
	return n;
}

/* The process lists of NVML: *count is the room on entry and the number on return. */
static nvmlReturn_t list(const struct gpu *g, unsigned *count, void *infos, size_t entry)
{
	struct nvml_process procs[SIM_MAX_PROCS];
	if (!count || (*count && !infos))
		return NVML_ERROR_INVALID_ARGUMENT;
	if (g->s->hide_processes)
		return NVML_ERROR_NOT_SUPPORTED;
	unsigned room = *count, n = nvml_processes(g, procs, SIM_MAX_PROCS);
	*count = n;
	if (n > room)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	for (unsigned i = 0; i < n; i++) {
		nvmlProcessInfo_v2_t info = { .pid = procs[i].pid,
					      .usedGpuMemory = procs[i].memory,
					      .gpuInstanceId = 0xFFFFFFFF,
					      .computeInstanceId = 0xFFFFFFFF };
		memcpy((char *)infos + i * entry, &info, entry);
	}
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *infoCount,
						     nvmlProcessInfo_t *infos)
{
	ENTER_GPU(device, g);
	return list(&g, infoCount, infos, sizeof(*infos));
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *infoCount,
						     nvmlProcessInfo_v2_t *infos)
{
	ENTER_GPU(device, g);
	return list(&g, infoCount, infos, sizeof(*infos));
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *infoCount,
						  nvmlProcessInfo_v1_t *infos)
{
	ENTER_GPU(device, g);
	return list(&g, infoCount, infos, sizeof(*infos));
}

/* There are no graphics processes and no MPS server here: their lists are empty. */
static nvmlReturn_t empty_list(const struct gpu *g, unsigned *count)
{
	if (!count)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (g->s->hide_processes)
		return NVML_ERROR_NOT_SUPPORTED;
	*count = 0;
	return NVML_SUCCESS;
}

#define EMPTY_LIST(name, type)                                                                     \
	nvmlReturn_t name(nvmlDevice_t device, unsigned int *infoCount, type *infos)               \
	{                                                                                          \
		ENTER_GPU(device, g);                                                              \
		(void)infos;                                                                       \
		return empty_list(&g, infoCount);                                                  \
	}
EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t)
EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)
EMPTY_LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
EMPTY_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
EMPTY_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t)

void nvml_process_name(uint32_t pid, char *name, size_t len)
{
	char path[40];
	snprintf(path, sizeof(path), "/proc/%u/cmdline", pid);
	name[0] = '\0';
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	ssize_t n = read(fd, name, len - 1);
	close(fd);
	name[n > 0 ? n : 0] = '\0'; /* the first argument ends itself */
}

nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
	ENTER();
	NEED(name && length);
	char full[4096];
	nvml_process_name(pid, full, sizeof(full));
	if (!full[0])
		return NVML_ERROR_NOT_FOUND;
	snprintf(name, length, "%s", full);
	return NVML_SUCCESS;
}

/* Accounting is never on. */
nvmlReturn_t nvmlDeviceGetAccountingMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
	ENTER_GPU(device, g);
	NEED(mode);
	*mode = NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAccountingBufferSize(nvmlDevice_t device, unsigned int *bufferSize)
{
	ENTER_GPU(device, g);
	NEED(bufferSize);
	*bufferSize = 4000;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned int *count,
					 unsigned int *pids)
{
	ENTER_GPU(device, g);
	(void)pids;
	NEED(count);
	*count = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned int pid,
					  nvmlAccountingStats_t *stats)
{
	ENTER_GPU(device, g);
	(void)pid;
	NEED(stats);
	return NVML_ERROR_NOT_FOUND;
}
