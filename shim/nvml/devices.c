/* Only the slice's GPUs exist, matched by UUID, in the order of the limits page. */
#include "compat.h"
#define _GNU_SOURCE
#include "real.h"
#include <stdlib.h>
#include <string.h>
#include "trace.h"

nvmlReturn_t tr_initialized(void)
{
	unsigned n;
	return REAL(nvmlDeviceGetCount_v2) == NULL ? NVML_ERROR_FUNCTION_NOT_FOUND :
						     REAL(nvmlDeviceGetCount_v2)(&n);
}

nvmlReturn_t tr_device_index(nvmlDevice_t device, int *index)
{
	char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
	nvmlReturn_t r = REAL(nvmlDeviceGetUUID)(device, uuid, sizeof uuid);
	if (r != NVML_SUCCESS)
		return r;
	*index = tr_limits_find(uuid);
	if (*index < 0 && strncmp(uuid, "MIG", 3) == 0 &&
	    REAL(nvmlDeviceGetDeviceHandleFromMigDeviceHandle) != NULL) {
		nvmlDevice_t gpu;
		r = REAL(nvmlDeviceGetDeviceHandleFromMigDeviceHandle)(device, &gpu);
		if (r == NVML_SUCCESS)
			r = REAL(nvmlDeviceGetUUID)(gpu, uuid, sizeof uuid);
		if (r != NVML_SUCCESS)
			return r;
		*index = tr_limits_find(uuid);
	}
	return *index < 0 ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
}

nvmlReturn_t tr_device_handle(int index, nvmlDevice_t *device)
{
	struct tr_limits_dev d;
	char uuid[TR_UUID_LEN + 1];
	tr_limits_read_dev(index, &d);
	memcpy(uuid, d.uuid, TR_UUID_LEN);
	uuid[TR_UUID_LEN] = 0;
	nvmlReturn_t r = REAL(nvmlDeviceGetHandleByUUID)(uuid, device);
	/* It was there when the slice was made. */
	return r == NVML_ERROR_NOT_FOUND ? NVML_ERROR_GPU_IS_LOST : r;
}

/* --- by number ----------------------------------------------------------------------------- */

static nvmlReturn_t get_count(nvmlReturn_t r, unsigned *count)
{
	if (r == NVML_SUCCESS)
		*count = (unsigned)tr_limits_devices();
	return r;
}

EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned int *deviceCount)
{
	TR_ENTER(nvmlDeviceGetCount, deviceCount);
	return get_count(REAL(nvmlDeviceGetCount)(deviceCount), deviceCount);
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *deviceCount)
{
	TR_ENTER(nvmlDeviceGetCount_v2, deviceCount);
	return get_count(REAL(nvmlDeviceGetCount_v2)(deviceCount), deviceCount);
}

static nvmlReturn_t by_index(unsigned index, nvmlDevice_t *device)
{
	nvmlReturn_t r = tr_initialized();
	if (r != NVML_SUCCESS)
		return r;
	if (index >= (unsigned)tr_limits_devices() || device == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	return tr_device_handle((int)index, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
	TR_ENTER(nvmlDeviceGetHandleByIndex, index, device);
	return by_index(index, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
	TR_ENTER(nvmlDeviceGetHandleByIndex_v2, index, device);
	return by_index(index, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
	char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
	int i;
	TR_ENTER(nvmlDeviceGetIndex, device, index);
	nvmlReturn_t r = tr_device_index(device, &i);
	if (r == NVML_SUCCESS)
		r = REAL(nvmlDeviceGetIndex)(device, index);
	if (r != NVML_SUCCESS)
		return r;
	/* A MIG device's index counts within its GPU. */
	if (REAL(nvmlDeviceGetUUID)(device, uuid, sizeof uuid) == NVML_SUCCESS &&
	    tr_limits_find(uuid) == i)
		*index = (unsigned)i;
	return NVML_SUCCESS;
}

/* --- by name ------------------------------------------------------------------------------- */

/* Hands a handle out if the driver found one and it is the slice's. */
static nvmlReturn_t keep_own(nvmlReturn_t r, nvmlDevice_t found, nvmlDevice_t *device)
{
	int index;
	if (r != NVML_SUCCESS)
		return r;
	r = tr_device_index(found, &index);
	if (r == NVML_ERROR_INVALID_ARGUMENT)
		return NVML_ERROR_NOT_FOUND;
	if (r == NVML_SUCCESS)
		*device = found;
	return r;
}

/* The driver judges a NULL argument itself: it may be uninitialised before it is invalid. */
#define FIND(name, key)                                                                            \
	nvmlDevice_t found = NULL;                                                                 \
	TR_ENTER(name, key, device);                                                               \
	if (device == NULL)                                                                        \
		return REAL(name)(key, NULL);                                                      \
	nvmlReturn_t r = REAL(name)(key, &found);                                                  \
	return keep_own(r, found, device)

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
	FIND(nvmlDeviceGetHandleByUUID, uuid);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device)
{
	FIND(nvmlDeviceGetHandleByUUIDV, uuid);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
	FIND(nvmlDeviceGetHandleBySerial, serial);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *pciBusId, nvmlDevice_t *device)
{
	FIND(nvmlDeviceGetHandleByPciBusId, pciBusId);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *pciBusId, nvmlDevice_t *device)
{
	FIND(nvmlDeviceGetHandleByPciBusId_v2, pciBusId);
}

/* --- lists --------------------------------------------------------------------------------- */

/* Keeps the slice's handles, in place. Returns how many. */
static unsigned own_devices(nvmlDevice_t *list, unsigned n)
{
	unsigned kept = 0;
	int index;
	for (unsigned i = 0; i < n; i++)
		if (tr_device_index(list[i], &index) == NVML_SUCCESS)
			list[kept++] = list[i];
	return kept;
}

/* Answers a topology question from the driver's full answer: *count zero asks for the number,
 * otherwise it is the room in `out`. */
static nvmlReturn_t give_topology(nvmlDevice_t *all, unsigned n, unsigned *count, nvmlDevice_t *out)
{
	unsigned room = *count;
	n = own_devices(all, n);
	*count = n;
	if (room == 0)
		return NVML_SUCCESS;
	if (room < n)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	memcpy(out, all, n * sizeof *all);
	return NVML_SUCCESS;
}

#define TOPOLOGY(...)                                                                              \
	unsigned n = 0;                                                                            \
	if (count == NULL || (*count != 0 && deviceArray == NULL))                                 \
		return REAL_FN(__VA_ARGS__, count, NULL);                                          \
	nvmlReturn_t r = REAL_FN(__VA_ARGS__, &n, NULL);                                           \
	if (r != NVML_SUCCESS)                                                                     \
		return r;                                                                          \
	nvmlDevice_t *all = calloc(n + 1, sizeof *all);                                            \
	if (all == NULL)                                                                           \
		return NVML_ERROR_MEMORY;                                                          \
	if (n != 0)                                                                                \
		r = REAL_FN(__VA_ARGS__, &n, all);                                                 \
	if (r == NVML_SUCCESS)                                                                     \
		r = give_topology(all, n, count, deviceArray);                                     \
	free(all);                                                                                 \
	return r

EXPORT nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device,
						     nvmlGpuTopologyLevel_t level,
						     unsigned int *count,
						     nvmlDevice_t *deviceArray)
{
	TR_ENTER(nvmlDeviceGetTopologyNearestGpus, device, level, count, deviceArray);
#define REAL_FN REAL(nvmlDeviceGetTopologyNearestGpus)
	TOPOLOGY(device, level);
#undef REAL_FN
}

EXPORT nvmlReturn_t nvmlSystemGetTopologyGpuSet(unsigned int cpuNumber, unsigned int *count,
						nvmlDevice_t *deviceArray)
{
	TR_ENTER(nvmlSystemGetTopologyGpuSet, cpuNumber, count, deviceArray);
#define REAL_FN REAL(nvmlSystemGetTopologyGpuSet)
	TOPOLOGY(cpuNumber);
#undef REAL_FN
}

/* The room that a chassis needs is at most that of its GPUs, so the driver's own
 * INSUFFICIENT_SIZE asks for enough. */
EXPORT nvmlReturn_t nvmlUnitGetDevices(nvmlUnit_t unit, unsigned int *deviceCount,
				       nvmlDevice_t *devices)
{
	TR_ENTER(nvmlUnitGetDevices, unit, deviceCount, devices);
	nvmlReturn_t r = REAL(nvmlUnitGetDevices)(unit, deviceCount, devices);
	if (r == NVML_SUCCESS)
		*deviceCount = own_devices(devices, *deviceCount);
	return r;
}

/* GPUs that the operator took out of use are nobody's. */
static nvmlReturn_t no_excluded(unsigned *count)
{
	if (count == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*count = 0;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlGetExcludedDeviceCount(unsigned int *deviceCount)
{
	TR_ENTER(nvmlGetExcludedDeviceCount, deviceCount);
	return no_excluded(deviceCount);
}

EXPORT nvmlReturn_t nvmlGetBlacklistDeviceCount(unsigned int *deviceCount)
{
	TR_ENTER(nvmlGetBlacklistDeviceCount, deviceCount);
	return no_excluded(deviceCount);
}

EXPORT nvmlReturn_t nvmlGetExcludedDeviceInfoByIndex(unsigned int index,
						     nvmlExcludedDeviceInfo_t *info)
{
	TR_ENTER(nvmlGetExcludedDeviceInfoByIndex, index, info);
	(void)index;
	(void)info;
	return NVML_ERROR_INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlGetBlacklistDeviceInfoByIndex(unsigned int index,
						      nvmlExcludedDeviceInfo_t *info)
{
	TR_ENTER(nvmlGetBlacklistDeviceInfoByIndex, index, info);
	(void)index;
	(void)info;
	return NVML_ERROR_INVALID_ARGUMENT;
}
