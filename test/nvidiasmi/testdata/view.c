/* Prints what NVML shows: of the machine "count N", and of its first GPU, a line each,
 *   memory V TOTAL USED FREE       for each version V of the call
 *   KIND_V PID BYTES               the process lists: compute, graphics and mps, versions 1 to 3
 *   rates GPU MEMORY               utilisation in percent
 *   sample PID SM, info PID SM     the two forms of utilisation per process, of the last second
 * Exit status 1 when a call fails in a way that is not "none". */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include "nvml_abi.h"

enum { ROOM = 64 };
static void *nvml;
static int failed;
#define CALL(name) (*(__typeof__(&name) *)(void *[]){ find(#name) })

static void *find(const char *name)
{
	void *p = dlsym(nvml, name);

	if (!p) {
		printf("%s is not there\n", name);
		exit(1);
	}
	return p;
}

static int ok(const char *what, nvmlReturn_t r)
{
	if (r != NVML_SUCCESS && r != NVML_ERROR_NOT_FOUND) {
		printf("%s: error %d\n", what, (int)r);
		failed = 1;
	}
	return r == NVML_SUCCESS;
}

#define LIST(kind, name, version, type)                                                    \
	do {                                                                               \
		type p[ROOM];                                                              \
		unsigned n = ROOM;                                                         \
		if (ok(#name, CALL(name)(gpu, &n, p)))                                     \
			for (unsigned i = 0; i < n; i++)                                   \
				printf(kind "_" version " %u %llu\n", p[i].pid,            \
				       (unsigned long long)p[i].usedGpuMemory);            \
	} while (0)
#define LISTS(kind, name)                                                                  \
	do {                                                                               \
		LIST(kind, name, "v1", nvmlProcessInfo_v1_t);                              \
		LIST(kind, name##_v2, "v2", nvmlProcessInfo_v2_t);                         \
		LIST(kind, name##_v3, "v3", nvmlProcessInfo_t);                            \
	} while (0)

static void memory(nvmlDevice_t gpu)
{
	nvmlMemory_t v1;
	nvmlMemory_v2_t v2 = { .version = nvmlMemory_v2 };

	if (ok("memory", CALL(nvmlDeviceGetMemoryInfo)(gpu, &v1)))
		printf("memory v1 %llu %llu %llu\n", v1.total, v1.used, v1.free);
	if (ok("memory v2", CALL(nvmlDeviceGetMemoryInfo_v2)(gpu, &v2)))
		printf("memory v2 %llu %llu %llu\n", v2.total, v2.used, v2.free);
}

static void utilisation(nvmlDevice_t gpu)
{
	nvmlUtilization_t rates;
	nvmlProcessUtilizationSample_t s[ROOM];
	nvmlProcessUtilizationInfo_v1_t info[ROOM];
	struct timeval now;
	unsigned n = ROOM;

	gettimeofday(&now, NULL);
	unsigned long long since = (unsigned long long)(now.tv_sec - 1) * 1000000 + now.tv_usec;
	if (ok("rates", CALL(nvmlDeviceGetUtilizationRates)(gpu, &rates)))
		printf("rates %u %u\n", rates.gpu, rates.memory);
	if (ok("samples", CALL(nvmlDeviceGetProcessUtilization)(gpu, s, &n, since)))
		for (unsigned i = 0; i < n; i++)
			printf("sample %u %u\n", s[i].pid, s[i].smUtil);
	nvmlProcessesUtilizationInfo_t all = { .version = nvmlProcessesUtilizationInfo_v1,
					       .processSamplesCount = ROOM,
					       .lastSeenTimeStamp = since,
					       .procUtilArray = info };
	if (ok("infos", CALL(nvmlDeviceGetProcessesUtilizationInfo)(gpu, &all)))
		for (unsigned i = 0; i < all.processSamplesCount; i++)
			printf("info %u %u\n", info[i].pid, info[i].smUtil);
}

int main(void)
{
	nvmlDevice_t gpu;
	unsigned n = 0;

	nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	if (!nvml) {
		printf("%s\n", dlerror());
		return 1;
	}
	if (!ok("init", CALL(nvmlInit_v2)()) || !ok("count", CALL(nvmlDeviceGetCount_v2)(&n)) ||
	    !ok("handle", CALL(nvmlDeviceGetHandleByIndex_v2)(0, &gpu)))
		return 1;
	printf("count %u\n", n);
	memory(gpu);
	LISTS("compute", nvmlDeviceGetComputeRunningProcesses);
	LISTS("graphics", nvmlDeviceGetGraphicsRunningProcesses);
	LISTS("mps", nvmlDeviceGetMPSComputeRunningProcesses);
	utilisation(gpu);
	return failed;
}
