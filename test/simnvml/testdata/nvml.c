/* Asks the simulated libnvidia-ml.so.1 what nvidia-smi does not: superseded forms, error codes,
 * events. Prints nothing when all is as it should be; else what is not, and exits with 1. "wait"
 * prints "ready", then each event, until waiting fails. Run on two T4 GPUs. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "nvml_abi.h"

nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *id);

static int bad;
#define WANT(expr, want)                                                                           \
	do {                                                                                       \
		long long got_ = (long long)(expr), want_ = (long long)(want);                     \
		if (got_ != want_)                                                                 \
			bad = 1, printf("line %d: %s is %lld, not %lld\n", __LINE__, #expr, got_,  \
					want_);                                                    \
	} while (0)

static void handles(void)
{
	nvmlDevice_t a, b, c;
	nvmlPciInfo_t pci;
	char uuid[96], serial[30], small[4];
	unsigned n = 0;
	WANT(nvmlDeviceGetCount(&n), NVML_SUCCESS);
	WANT(n, 2);
	WANT(nvmlDeviceGetHandleByIndex(1, &a), NVML_SUCCESS);
	WANT(nvmlDeviceGetHandleByIndex(2, &b), NVML_ERROR_INVALID_ARGUMENT);
	WANT(nvmlDeviceGetUUID(a, small, sizeof(small)), NVML_ERROR_INSUFFICIENT_SIZE);
	WANT(nvmlDeviceGetUUID(a, uuid, sizeof(uuid)), NVML_SUCCESS);
	WANT(nvmlDeviceGetHandleByUUID(uuid, &b), NVML_SUCCESS);
	WANT(a == b, 1);
	WANT(nvmlDeviceGetHandleByUUID("GPU-none", &b), NVML_ERROR_NOT_FOUND);
	WANT(nvmlDeviceGetPciInfo_v3(a, &pci), NVML_SUCCESS);
	WANT(nvmlDeviceGetHandleByPciBusId_v2(pci.busId, &b), NVML_SUCCESS);
	WANT(nvmlDeviceGetHandleByPciBusId_v2(pci.busIdLegacy, &c), NVML_SUCCESS);
	WANT(a == b && a == c, 1);
	WANT(nvmlDeviceGetSerial(a, serial, sizeof(serial)), NVML_SUCCESS);
	WANT(nvmlDeviceGetHandleBySerial(serial, &b), NVML_SUCCESS);
	WANT(a == b, 1);
	WANT(nvmlDeviceGetName((nvmlDevice_t)(void *)&bad, uuid, sizeof(uuid)), NVML_ERROR_INVALID_ARGUMENT);
	/* The first form of the structure ends before pciSubSystemId. */
	memset(&pci, 0x5a, sizeof(pci));
	WANT(nvmlDeviceGetPciInfo(a, &pci), NVML_SUCCESS);
	WANT(pci.pciSubSystemId, 0x5a5a5a5a);
}

static void memory(void)
{
	nvmlDevice_t d;
	nvmlMemory_t m;
	nvmlMemory_v2_t m2 = { .version = 0 };
	WANT(nvmlDeviceGetHandleByIndex_v2(0, &d), NVML_SUCCESS);
	WANT(nvmlDeviceGetMemoryInfo_v2(d, &m2), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	m2.version = nvmlMemory_v2;
	WANT(nvmlDeviceGetMemoryInfo_v2(d, &m2), NVML_SUCCESS);
	WANT(nvmlDeviceGetMemoryInfo(d, &m), NVML_SUCCESS);
	WANT(m.total, 15360ll << 20);
	WANT(m2.total, m.total);
	WANT(m2.used, 0);
	WANT(m.used, m2.reserved);
	WANT(m.used + m.free, m.total);
	WANT(m2.used + m2.reserved + m2.free, m2.total);
}

static void processes(void)
{
	nvmlDevice_t d;
	nvmlProcessInfo_t info[4];
	nvmlProcessUtilizationSample_t use[4];
	unsigned n = 4;
	WANT(nvmlDeviceGetHandleByIndex_v2(0, &d), NVML_SUCCESS);
	WANT(nvmlDeviceGetComputeRunningProcesses_v3(d, &n, info), NVML_SUCCESS);
	WANT(n, 0);
	WANT(nvmlDeviceGetProcessUtilization(d, use, (n = 4, &n), 0), NVML_ERROR_NOT_FOUND);
	WANT(nvmlDeviceGetProcessUtilization(d, NULL, (n = 0, &n), 0), NVML_ERROR_INSUFFICIENT_SIZE);
	WANT(n > 0, 1);
	WANT(nvmlDeviceGetVgpuMetadata(d, NULL, NULL), NVML_ERROR_NOT_SUPPORTED);
}

static int wait_event(void)
{
	nvmlEventSet_t set;
	nvmlEventData_t e;
	nvmlDevice_t d[2];
	unsigned index;
	WANT(nvmlEventSetCreate(&set), NVML_SUCCESS);
	for (unsigned i = 0; i < 2; i++) {
		WANT(nvmlDeviceGetHandleByIndex_v2(i, &d[i]), NVML_SUCCESS);
		WANT(nvmlDeviceRegisterEvents(d[i], nvmlEventTypeXidCriticalError, set), NVML_SUCCESS);
	}
	WANT(nvmlEventSetWait_v2(set, &e, 20), NVML_ERROR_TIMEOUT);
	puts("ready");
	fflush(stdout);
	nvmlReturn_t r;
	while ((r = nvmlEventSetWait_v2(set, &e, 10000)) == NVML_SUCCESS) {
		WANT(nvmlDeviceGetIndex(e.device, &index), NVML_SUCCESS);
		printf("xid %llu on %u\n", e.eventData, index);
		fflush(stdout);
	}
	printf("then %s\n", nvmlErrorString(r));
	return bad;
}

int main(int argc, char **argv)
{
	unsigned n;
	const void *table;
	char id[16] = { 0 };
	WANT(nvmlDeviceGetCount_v2(&n), NVML_ERROR_UNINITIALIZED);
	WANT(nvmlInit_v2(), NVML_SUCCESS);
	WANT(nvmlInit(), NVML_SUCCESS);
	WANT(nvmlShutdown(), NVML_SUCCESS);
	if (argc > 1 && strcmp(argv[1], "wait") == 0)
		return wait_event();
	handles();
	memory();
	processes();
	WANT(nvmlInternalGetExportTable(&table, id), NVML_ERROR_NOT_FOUND);
	WANT(nvmlShutdown(), NVML_SUCCESS);
	WANT(nvmlShutdown(), NVML_ERROR_UNINITIALIZED);
	return bad;
}
