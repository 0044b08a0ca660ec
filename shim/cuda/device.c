#include "compat.h"
#define _GNU_SOURCE
#include "device.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "ledger.h"
#include "slice.h"
#include "trace.h"

/* What the tenant sees, by its ordinal. */
static struct {
	CUdevice handle;
	int index; /* in the slice */
} visible[TR_MAX_DEVICES];
int tr_visible_devices;

/* --- selection ----------------------------------------------------------------------------- */

static int select_by_prefix(const char *word, size_t len)
{
	int found = -1;
	for (int i = 0; i < tr_limits_devices(); i++)
		if (strncmp(tr_limits()->dev[i].uuid, word, len) == 0) {
			if (found >= 0)
				return -1; /* ambiguous */
			found = i;
		}
	return found;
}

static int select_one(const char *word, size_t len)
{
	char *end;
	if (len > 4 && strncmp(word, "GPU-", 4) == 0)
		return select_by_prefix(word, len);
	long i = strtol(word, &end, 10);
	return end == word + len && len > 0 && i >= 0 && i < tr_limits_devices() ? (int)i : -1;
}

void tr_visible_uuids(const char *user, char *out, size_t size)
{
	size_t at = 0;
	*out = 0;
	int n = tr_limits_devices();
	bool taken[TR_MAX_DEVICES] = {false};
	for (int i = 0; user == NULL ? i < n : *user != 0; i++) {
		int chosen = i;
		if (user != NULL) {
			user += strspn(user, " ");
			size_t len = strcspn(user, ", ");
			chosen = select_one(user, len);
			user += len;
			user += strspn(user, " ");
			user += *user == ',';
		}
		if (chosen < 0 || taken[chosen])
			return;
		taken[chosen] = true;
		at += (size_t)snprintf(out + at, size - at, "%s%.*s", at == 0 ? "" : ",",
				       TR_UUID_LEN, tr_limits()->dev[chosen].uuid);
		if (at >= size)
			return;
	}
}

static void format_uuid(const CUuuid *u, char *out)
{
	const unsigned char *b = (const unsigned char *)u->bytes;
	snprintf(out, TR_UUID_LEN,
		 "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
		 b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13],
		 b[14], b[15]);
}

void tr_devices_init(void)
{
	int n = 0, count = 0;
	if (REAL(cuDeviceGetCount)(&count) != CUDA_SUCCESS)
		return;
	for (int i = 0; i < count && n < TR_MAX_DEVICES; i++) {
		CUdevice dev;
		CUuuid uuid;
		char text[TR_UUID_LEN];
		if (REAL(cuDeviceGet)(&dev, i) != CUDA_SUCCESS ||
		    REAL(cuDeviceGetUuid)(&uuid, dev) != CUDA_SUCCESS)
			continue;
		format_uuid(&uuid, text);
		int index = tr_limits_find(text);
		if (index < 0) {
			TR_TRACE("device %d (%s) is not in the slice: hidden", i, text);
			continue;
		}
		visible[n].handle = dev;
		visible[n].index = index;
		n++;
	}
	__atomic_store_n(&tr_visible_devices, n, __ATOMIC_RELEASE);
}

int tr_device_index(CUdevice dev)
{
	for (int i = 0; i < tr_visible_devices; i++)
		if (visible[i].handle == dev)
			return visible[i].index;
	return -1;
}

CUdevice tr_device_handle(int index)
{
	for (int i = 0; i < tr_visible_devices; i++)
		if (visible[i].index == index)
			return visible[i].handle;
	return -1;
}

CUdevice tr_visible_handle(int ordinal)
{
	return visible[ordinal].handle;
}

int tr_current_device(void)
{
	CUdevice dev;
	if (tr_visible_devices == 1)
		return visible[0].index;
	if (REAL(cuCtxGetDevice)(&dev) != CUDA_SUCCESS)
		return -1;
	return tr_device_index(dev);
}

uint64_t tr_memory_limit(int i)
{
	const struct tr_limits_dev *d = &tr_limits()->dev[i];
	if ((__atomic_load_n(&d->flags, __ATOMIC_RELAXED) & TR_DEV_MEMORY_LIMITED) == 0)
		return UINT64_MAX;
	return __atomic_load_n(&d->memory_limit, __ATOMIC_RELAXED);
}

/* --- hooks --------------------------------------------------------------------------------- */

CUresult EXPORT cuDeviceGetCount(int *count)
{
	CUresult r = REAL(cuDeviceGetCount)(count);
	if (r == CUDA_SUCCESS && count != NULL && *count > tr_visible_devices)
		*count = tr_visible_devices;
	return r;
}

CUresult EXPORT cuDeviceGet(CUdevice *device, int ordinal)
{
	if (device == NULL || ordinal < 0 || ordinal >= tr_visible_devices)
		return tr_visible_devices == 0 ? REAL(cuDeviceGet)(device, ordinal)
					       : CUDA_ERROR_INVALID_DEVICE;
	*device = visible[ordinal].handle;
	return CUDA_SUCCESS;
}

CUresult EXPORT cuDeviceGetByPCIBusId(CUdevice *dev, const char *pciBusId)
{
	CUresult r = REAL(cuDeviceGetByPCIBusId)(dev, pciBusId);
	if (r == CUDA_SUCCESS && tr_device_index(*dev) < 0)
		return CUDA_ERROR_INVALID_DEVICE;
	return r;
}

static uint64_t shown_total(CUdevice dev, uint64_t physical)
{
	int i = tr_device_index(dev);
	uint64_t limit = i < 0 ? UINT64_MAX : tr_memory_limit(i);
	return limit < physical ? limit : physical;
}

CUresult EXPORT cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
	CUresult r = REAL(cuDeviceTotalMem_v2)(bytes, dev);
	if (r == CUDA_SUCCESS)
		*bytes = shown_total(dev, *bytes);
	return r;
}

CUresult EXPORT cuDeviceTotalMem(unsigned int *bytes, CUdevice dev)
{
	CUresult r = REAL(cuDeviceTotalMem)(bytes, dev);
	if (r == CUDA_SUCCESS)
		*bytes = (unsigned int)shown_total(dev, *bytes);
	return r;
}
