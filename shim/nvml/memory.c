/* Memory as the slice has it: its limit is the total, its use is what its ledger says. */
#include "compat.h"
#define _GNU_SOURCE
#include "real.h"
#include "ledger.h"
#include "trace.h"

/* The slice's figures; false where its memory is not limited and the driver's figures hold.
 * used is within 0..total. */
static bool slice_memory(int dev, unsigned long long card, unsigned long long *total,
			 unsigned long long *used)
{
	struct tr_limits_dev d;
	tr_limits_read_dev(dev, &d);
	if ((d.flags & TR_DEV_MEMORY_LIMITED) == 0)
		return false;
	*total = d.memory_limit < card ? d.memory_limit : card;
	*used = tr_account_bytes(tr_ledger(), dev);
	if (*used > *total)
		*used = *total;
	return true;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
	unsigned long long total, used;
	int dev;
	TR_ENTER(nvmlDeviceGetMemoryInfo, device, memory);
	nvmlReturn_t r = REAL(nvmlDeviceGetMemoryInfo)(device, memory);
	if (r == NVML_SUCCESS)
		r = tr_device_index(device, &dev);
	if (r == NVML_SUCCESS && slice_memory(dev, memory->total, &total, &used))
		*memory = (nvmlMemory_t){.total = total, .used = used, .free = total - used};
	return r;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	unsigned long long total, used;
	int dev;
	TR_ENTER(nvmlDeviceGetMemoryInfo_v2, device, memory);
	/* The driver checks the version. One that it knows and we do not would stay unfiltered. */
	nvmlReturn_t r = REAL(nvmlDeviceGetMemoryInfo_v2)(device, memory);
	if (r == NVML_SUCCESS && memory->version != nvmlMemory_v2)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (r == NVML_SUCCESS)
		r = tr_device_index(device, &dev);
	if (r == NVML_SUCCESS && slice_memory(dev, memory->total, &total, &used)) {
		memory->total = total;
		memory->used = used;
		memory->free = total - used;
		memory->reserved = 0; /* the slice is after what the driver keeps */
	}
	return r;
}
