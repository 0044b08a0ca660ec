/* What the files of nvmlprobe share: NVML's functions, the line being written, waiting. */
#ifndef TRANCHE_PROBE_H
#define TRANCHE_PROBE_H
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include "nvml_abi.h"

#define FUNCTIONS(X)                                                                               \
	X(nvmlInit_v2)                                                                             \
	X(nvmlErrorString)                                                                         \
	X(nvmlSystemGetDriverVersion)                                                              \
	X(nvmlSystemGetCudaDriverVersion)                                                          \
	X(nvmlDeviceGetCount_v2)                                                                   \
	X(nvmlDeviceGetHandleByIndex_v2)                                                           \
	X(nvmlDeviceGetUUID)                                                                       \
	X(nvmlDeviceGetName)                                                                       \
	X(nvmlDeviceGetMinorNumber)                                                                \
	X(nvmlDeviceGetPciInfo_v3)                                                                 \
	X(nvmlDeviceGetMemoryInfo)                                                                 \
	X(nvmlDeviceGetMemoryInfo_v2)                                                              \
	X(nvmlDeviceGetUtilizationRates)                                                           \
	X(nvmlDeviceGetMigMode)                                                                    \
	X(nvmlDeviceGetComputeRunningProcesses)                                                    \
	X(nvmlDeviceGetComputeRunningProcesses_v2)                                                 \
	X(nvmlDeviceGetComputeRunningProcesses_v3)                                                 \
	X(nvmlDeviceGetGraphicsRunningProcesses)                                                   \
	X(nvmlDeviceGetGraphicsRunningProcesses_v2)                                                \
	X(nvmlDeviceGetGraphicsRunningProcesses_v3)                                                \
	X(nvmlDeviceGetMPSComputeRunningProcesses)                                                 \
	X(nvmlDeviceGetMPSComputeRunningProcesses_v2)                                              \
	X(nvmlDeviceGetMPSComputeRunningProcesses_v3)                                              \
	X(nvmlDeviceGetProcessUtilization)                                                         \
	X(nvmlDeviceGetMemoryAffinity)                                                             \
	X(nvmlDeviceGetComputeMode)                                                                \
	X(nvmlDeviceGetTopologyCommonAncestor)                                                     \
	X(nvmlDeviceGetNvLinkState)                                                                \
	X(nvmlDeviceGetNvLinkRemoteDeviceType)                                                     \
	X(nvmlDeviceGetNvLinkRemotePciInfo_v2)                                                     \
	X(nvmlDeviceGetMaxPcieLinkGeneration)                                                      \
	X(nvmlDeviceGetMaxPcieLinkWidth)                                                           \
	X(nvmlDeviceGetFieldValues)                                                                \
	X(nvmlDeviceGetTotalEnergyConsumption)                                                     \
	X(nvmlDeviceGetPerformanceState)                                                           \
	X(nvmlDeviceRegisterEvents)                                                                \
	X(nvmlEventSetCreate)                                                                      \
	X(nvmlEventSetFree)                                                                        \
	X(nvmlEventSetWait_v2)

/* NULL where the library lacks the function. */
struct nvml {
#define X(name) __typeof__(&name) name;
	FUNCTIONS(X)
#undef X
};
extern struct nvml nvml;

/* --- the line (nvmlprobe.c) -------------------------------------------------------------------- */

__attribute__((format(printf, 1, 2))) void put(const char *fmt, ...);
/* A JSON string. What is not UTF-8 becomes U+FFFD. */
void put_string(const char *text);
/* ,"key":value or ,"key":null */
void put_number(const char *key, bool known, unsigned long long value);
/* "error":"...","code":N */
void put_error(const char *what, int code);
/* Writes the line and starts the next one. False: nobody reads any more. */
bool flush_line(void);
/* Gives up: an error instead of the line. Returns 1. */
int fail(const char *what, int code);
const char *error_text(nvmlReturn_t r);

int64_t now_ms(void);
/* Sleeps until the deadline. False: standard input ended or the parent is gone. */
bool wait_until(int64_t deadline, pid_t parent);

/* --- inventory.c: what does not change, or only when an admin changes it ----------------------- */

void put_inventory(nvmlDevice_t dev, unsigned count);

/* --- health.c ---------------------------------------------------------------------------------- */

/* ,"recovery":N,"energy":N */
void put_reading(nvmlDevice_t dev);
int health(int interval_ms);
#endif
