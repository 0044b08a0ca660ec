/* NVML types and prototypes that are newer than the header behind nvml_abi.h, and old names that
 * drivers still export and that header no longer declares. Public interface facts. */
#ifndef TRANCHE_NVML_NEW_H
#define TRANCHE_NVML_NEW_H
#include "nvml_abi.h"

/* 12.9 */
typedef struct {
	unsigned int version;
	unsigned int type; /* 1: str, 2: bytes */
	union {
		char str[41];
		unsigned char bytes[16];
	} value;
} nvmlUUID_v1_t;
typedef nvmlUUID_v1_t nvmlUUID_t;
nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device);

/* 13: the first field, which is the caller's; the rest is the driver's to fill */
typedef struct {
	unsigned int pid;
} nvmlAccountingStats_v2_t;
nvmlReturn_t nvmlDeviceGetAccountingStats_v2(nvmlDevice_t device, nvmlAccountingStats_v2_t *stats);

/* before 11.0, still exported */
nvmlReturn_t nvmlGetBlacklistDeviceCount(unsigned int *deviceCount);
nvmlReturn_t nvmlGetBlacklistDeviceInfoByIndex(unsigned int index, nvmlExcludedDeviceInfo_t *info);

/* never declared */
nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *id);
#endif
