/* A test double for the driver's NVML: three GPUs of 80 GiB with processes that the test puts
 * there through fake_process. Enough behaviour to see what the filters do with it. Like the real
 * library it calls its own public functions where the loader binds them, which is in ours. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include "nvml_new.h"

#define GIB (1ull << 30)
#define EXPORT __attribute__((visibility("default")))
enum { GPUS = 3, PROCS = 8 };

static const char *const uuid[GPUS] = {"GPU-aaaaaaaa-0000-0000-0000-000000000001",
				       "GPU-bbbbbbbb-0000-0000-0000-000000000002",
				       "GPU-cccccccc-0000-0000-0000-000000000003"};
static const char *const bus[GPUS] = {"00000000:01:00.0", "00000000:02:00.0", "00000000:03:00.0"};
static struct process {
	unsigned pid, sm;
	unsigned long long bytes;
	int kind; /* 0 compute, 1 graphics, 2 MPS */
} procs[GPUS][PROCS];
static unsigned n_procs[GPUS];
static int initialized, old_entries;
static const char *driver_version = "550.0";

void fake_process(int gpu, unsigned pid, unsigned long long bytes, int kind, unsigned sm);
void fake_clear(void);
void fake_old_entries(int on);
void fake_driver(const char *version);

/* What the test calls through the library under test, which does not know these names. */
EXPORT void fake_process(int gpu, unsigned pid, unsigned long long bytes, int kind, unsigned sm)
{
	procs[gpu][n_procs[gpu]++] = (struct process){pid, sm, bytes, kind};
}

EXPORT void fake_clear(void)
{
	memset(n_procs, 0, sizeof n_procs);
}

/* As drivers 530 and early 535: version 3 with a fifth field. */
EXPORT void fake_old_entries(int on)
{
	old_entries = on;
}

EXPORT void fake_driver(const char *version)
{
	driver_version = version;
}

#define UP                                                                                         \
	if (!initialized)                                                                          \
	return NVML_ERROR_UNINITIALIZED

static int gpu_of(nvmlDevice_t d)
{
	size_t i = (size_t)d / 16;
	return i >= 1 && i <= GPUS ? (int)i - 1 : -1;
}

static nvmlReturn_t give(int gpu, nvmlDevice_t *d)
{
	if (gpu < 0)
		return NVML_ERROR_NOT_FOUND;
	*d = (nvmlDevice_t)(size_t)((gpu + 1) * 16);
	return NVML_SUCCESS;
}

#define GPU(d)                                                                                     \
	UP;                                                                                        \
	int gpu = gpu_of(d);                                                                       \
	if (gpu < 0)                                                                               \
	return NVML_ERROR_INVALID_ARGUMENT

EXPORT nvmlReturn_t nvmlInit(void)
{
	initialized++;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlInit_v2(void)
{
	return nvmlInit();
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
	(void)flags;
	return nvmlInit();
}

EXPORT nvmlReturn_t nvmlShutdown(void)
{
	UP;
	initialized--;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *n)
{
	UP;
	if (n == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*n = GPUS;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned *n)
{
	nvmlDevice_t d;
	nvmlReturn_t r = nvmlDeviceGetCount_v2(n);
	for (unsigned i = 0; r == NVML_SUCCESS && i < GPUS; i++)
		r = nvmlDeviceGetHandleByIndex_v2(i, &d);
	return r;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned i, nvmlDevice_t *d)
{
	UP;
	return i < GPUS ? give((int)i, d) : NVML_ERROR_INVALID_ARGUMENT;
}

static int search(const char *const *names, const char *name)
{
	for (int i = 0; i < GPUS; i++)
		if (strcasecmp(names[i], name) == 0)
			return i;
	return -1;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *u, nvmlDevice_t *d)
{
	unsigned n = 0;
	char name[96];
	UP;
	if (u == NULL || d == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t r = nvmlDeviceGetCount_v2(&n);
	for (unsigned i = 0; r == NVML_SUCCESS && i < n; i++) {
		r = nvmlDeviceGetHandleByIndex_v2(i, d);
		if (r == NVML_SUCCESS)
			r = nvmlDeviceGetUUID(*d, name, sizeof name);
		if (r == NVML_SUCCESS && strcasecmp(name, u) == 0)
			return r;
	}
	return r == NVML_SUCCESS ? NVML_ERROR_NOT_FOUND : r;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *b, nvmlDevice_t *d)
{
	UP;
	return give(search(bus, b), d);
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t d, unsigned *i)
{
	GPU(d);
	*i = (unsigned)gpu;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t d, char *out, unsigned n)
{
	GPU(d);
	snprintf(out, n, "%s", uuid[gpu]);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t d, char *out, unsigned n)
{
	GPU(d);
	snprintf(out, n, "Fake %d", gpu);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned n)
{
	UP;
	snprintf(out, n, "%s", driver_version);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *out, unsigned n)
{
	snprintf(out, n, "process %u", pid);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *m)
{
	GPU(d);
	*m = (nvmlMemory_t){.total = 80 * GIB, .used = 50 * GIB, .free = 30 * GIB};
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t d, nvmlMemory_v2_t *m)
{
	GPU(d);
	if (m->version != nvmlMemory_v2)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	m->total = 80 * GIB;
	m->reserved = GIB;
	m->used = 49 * GIB;
	m->free = 30 * GIB;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t d, nvmlUtilization_t *u)
{
	GPU(d);
	*u = (nvmlUtilization_t){.gpu = 99, .memory = 77};
	return NVML_SUCCESS;
}

static nvmlReturn_t list(nvmlDevice_t d, unsigned *count, void *infos, int kind, size_t size)
{
	GPU(d);
	unsigned room = *count, n = 0;
	for (unsigned i = 0; i < n_procs[gpu]; i++)
		n += procs[gpu][i].kind == kind;
	*count = n;
	if (n > room)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	char *at = infos;
	for (unsigned i = 0; i < n_procs[gpu]; i++) {
		const struct process *p = &procs[gpu][i];
		nvmlProcessDetail_v1_t e = {.pid = p->pid,
					    .usedGpuMemory = p->bytes,
					    .gpuInstanceId = 0xffffffff,
					    .computeInstanceId = 0xffffffff};
		if (p->kind != kind)
			continue;
		memcpy(at, &e, size);
		at += size;
	}
	return NVML_SUCCESS;
}

#define LISTS(name, kind)                                                                          \
	EXPORT nvmlReturn_t name(nvmlDevice_t d, unsigned *count, nvmlProcessInfo_v1_t *p)         \
	{                                                                                          \
		return list(d, count, p, kind, sizeof *p);                                         \
	}                                                                                          \
	EXPORT nvmlReturn_t name##_v2(nvmlDevice_t d, unsigned *count, nvmlProcessInfo_v2_t *p)    \
	{                                                                                          \
		return list(d, count, p, kind, sizeof *p);                                         \
	}                                                                                          \
	EXPORT nvmlReturn_t name##_v3(nvmlDevice_t d, unsigned *count, nvmlProcessInfo_t *p)       \
	{                                                                                          \
		return list(d, count, p, kind, old_entries ? 32 : sizeof *p);                      \
	}
LISTS(nvmlDeviceGetComputeRunningProcesses, 0)
LISTS(nvmlDeviceGetGraphicsRunningProcesses, 1)
LISTS(nvmlDeviceGetMPSComputeRunningProcesses, 2)

EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t d,
						    nvmlProcessUtilizationSample_t *s,
						    unsigned *count, unsigned long long since)
{
	GPU(d);
	(void)since;
	unsigned room = *count, n = 0;
	*count = n_procs[gpu];
	if (s == NULL || room < n_procs[gpu])
		return NVML_ERROR_INSUFFICIENT_SIZE;
	for (unsigned i = 0; i < n_procs[gpu]; i++)
		if (procs[gpu][i].sm != 0)
			s[n++] = (nvmlProcessUtilizationSample_t){.pid = procs[gpu][i].pid,
								  .smUtil = procs[gpu][i].sm};
	*count = n;
	return n == 0 ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t d,
							  nvmlProcessesUtilizationInfo_t *u)
{
	GPU(d);
	if (u->version != nvmlProcessesUtilizationInfo_v1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	unsigned room = u->processSamplesCount, n = 0;
	u->processSamplesCount = n_procs[gpu];
	if (u->procUtilArray == NULL || room < n_procs[gpu])
		return NVML_ERROR_INSUFFICIENT_SIZE;
	for (; n < n_procs[gpu]; n++)
		u->procUtilArray[n] = (nvmlProcessUtilizationInfo_v1_t){
			.pid = procs[gpu][n].pid, .smUtil = procs[gpu][n].sm};
	return n == 0 ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetEncoderSessions(nvmlDevice_t d, unsigned *count,
						 nvmlEncoderSessionInfo_t *s)
{
	GPU(d);
	unsigned room = *count;
	*count = n_procs[gpu];
	if (room == 0)
		return NVML_SUCCESS;
	if (room < n_procs[gpu])
		return NVML_ERROR_INSUFFICIENT_SIZE;
	for (unsigned i = 0; i < n_procs[gpu]; i++)
		s[i] = (nvmlEncoderSessionInfo_t){.pid = procs[gpu][i].pid, .sessionId = i};
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t d, unsigned *count, unsigned *pids)
{
	GPU(d);
	unsigned room = *count;
	*count = n_procs[gpu];
	if (room < n_procs[gpu])
		return NVML_ERROR_INSUFFICIENT_SIZE;
	for (unsigned i = 0; i < n_procs[gpu]; i++)
		pids[i] = procs[gpu][i].pid;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t d, unsigned pid,
						 nvmlAccountingStats_t *s)
{
	GPU(d);
	s->startTime = pid; /* shows which process was asked for */
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetTopologyGpuSet(unsigned cpu, unsigned *count, nvmlDevice_t *out)
{
	UP;
	(void)cpu;
	if (count == NULL || (*count != 0 && out == NULL))
		return NVML_ERROR_INVALID_ARGUMENT;
	for (unsigned i = 0; i < *count && i < GPUS; i++)
		give((int)i, &out[i]);
	*count = GPUS;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t d, nvmlComputeMode_t mode)
{
	(void)d;
	(void)mode;
	abort(); /* never reached through the library */
}

/* --- nvidia-smi's table: words of it, as drivers have them; the last word came after 550 ------ */

static nvmlReturn_t table_device(unsigned i, nvmlDevice_t *d, unsigned flags)
{
	if (flags != 0x22)
		abort();
	return nvmlDeviceGetHandleByIndex_v2(i, d);
}

/* One entry a process: a time, then what each kind of engine did for whom. */
static nvmlReturn_t table_use(nvmlDevice_t d, unsigned long long since, unsigned *type,
			      unsigned *count, char *out)
{
	struct {
		unsigned percent, pad, pid;
		char name[68];
	} use;
	unsigned kinds = atoi(driver_version) < 545 ? 4 : 6;
	GPU(d);
	if (*count < n_procs[gpu])
		return NVML_ERROR_INSUFFICIENT_SIZE;
	*type = 1;
	*count = n_procs[gpu];
	for (unsigned i = 0; i < *count; i++) {
		memcpy(out, &since, sizeof since);
		out += sizeof since;
		for (unsigned kind = 0; kind < kinds; kind++, out += sizeof use) {
			memset(&use, 0, sizeof use);
			use.percent = procs[gpu][i].sm;
			use.pid = procs[gpu][i].pid;
			snprintf(use.name, sizeof use.name, "process %u", use.pid);
			memcpy(out, &use, sizeof use);
		}
	}
	return NVML_SUCCESS;
}

static nvmlReturn_t table_forbidden(void)
{
	abort(); /* never reached through the library */
}

EXPORT nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *id)
{
	static const void *words[252] = {(const void *)sizeof words,
					 [81] = (const void *)table_device,
					 [145] = (const void *)table_use,
					 [213] = (const void *)table_forbidden,
					 [214] = (const void *)table_forbidden,
					 [215] = (const void *)table_forbidden,
					 [251] = (const void *)table_forbidden};
	(void)id;
	*table = words;
	return NVML_SUCCESS;
}
