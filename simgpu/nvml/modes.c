/* Modes of a GPU, its PCIe link, its memory errors: mostly what a healthy server board says.
 * Setting a mode to what it is succeeds; anything else is not supported. */
#include <string.h>
#include "internal.h"

#define GET(name, type, expr)                                                                      \
	nvmlReturn_t name(nvmlDevice_t device, type *out)                                          \
	{                                                                                          \
		ENTER_GPU(device, g);                                                              \
		NEED(out);                                                                         \
		*out = (expr);                                                                     \
		return NVML_SUCCESS;                                                               \
	}
GET(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, NVML_FEATURE_ENABLED)
GET(nvmlDeviceGetDisplayMode, nvmlEnableState_t, NVML_FEATURE_DISABLED)
GET(nvmlDeviceGetDisplayActive, nvmlEnableState_t, NVML_FEATURE_DISABLED)
GET(nvmlDeviceGetComputeMode, nvmlComputeMode_t, NVML_COMPUTEMODE_DEFAULT)
GET(nvmlDeviceGetVirtualizationMode, nvmlGpuVirtualizationMode_t, NVML_GPU_VIRTUALIZATION_MODE_NONE)
GET(nvmlDeviceGetDefaultEccMode, nvmlEnableState_t, g.m->ecc ? 1 : 0)
GET(nvmlDeviceIsMigDeviceHandle, unsigned int, 0)
GET(nvmlDeviceGetMaxMigDeviceCount, unsigned int, 0)
GET(nvmlDeviceGetMaxPcieLinkGeneration, unsigned int, g.m->pcie_gen)
GET(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned int, g.m->pcie_gen)
GET(nvmlDeviceGetCurrPcieLinkGeneration, unsigned int, g.m->pcie_gen)
GET(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, g.m->pcie_width)
GET(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, g.m->pcie_width)
GET(nvmlDeviceGetPcieReplayCounter, unsigned int, 0)
GET(nvmlDeviceGetPcieLinkMaxSpeed, unsigned int, g.m->pcie_gen)
GET(nvmlDeviceGetPcieSpeed, unsigned int, 1250u << g.m->pcie_gen)

nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t counter,
					 unsigned int *value)
{
	ENTER_GPU(device, g);
	NEED(value && (unsigned)counter < NVML_PCIE_UTIL_COUNT);
	*value = 0; /* not modelled */
	return NVML_SUCCESS;
}

static nvmlReturn_t keep(bool same)
{
	return same ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
	ENTER_GPU(device, g);
	return keep(mode == NVML_FEATURE_ENABLED);
}

nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, nvmlComputeMode_t mode)
{
	ENTER_GPU(device, g);
	return keep(mode == NVML_COMPUTEMODE_DEFAULT);
}

nvmlReturn_t nvmlDeviceSetEccMode(nvmlDevice_t device, nvmlEnableState_t ecc)
{
	ENTER_GPU(device, g);
	return keep((ecc == NVML_FEATURE_ENABLED) == (g.m->ecc != 0));
}

nvmlReturn_t nvmlDeviceSetAccountingMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
	ENTER_GPU(device, g);
	return keep(mode == NVML_FEATURE_DISABLED);
}

/* There are no errors to clear. */
nvmlReturn_t nvmlDeviceClearEccErrorCounts(nvmlDevice_t device, nvmlEccCounterType_t counterType)
{
	ENTER_GPU(device, g);
	NEED((unsigned)counterType < NVML_ECC_COUNTER_TYPE_COUNT);
	return keep(g.m->ecc);
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current,
				  nvmlEnableState_t *pending)
{
	ENTER_GPU(device, g);
	NEED(current && pending);
	*current = *pending = g.m->ecc ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t errorType,
					 nvmlEccCounterType_t counterType,
					 unsigned long long *eccCounts)
{
	ENTER_GPU(device, g);
	NEED(eccCounts && (unsigned)errorType < NVML_MEMORY_ERROR_TYPE_COUNT &&
	     (unsigned)counterType < NVML_ECC_COUNTER_TYPE_COUNT);
	*eccCounts = 0;
	return keep(g.m->ecc);
}

nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t errorType,
					     nvmlEccCounterType_t counterType,
					     nvmlMemoryLocation_t locationType,
					     unsigned long long *count)
{
	ENTER_GPU(device, g);
	NEED(count && (unsigned)errorType < NVML_MEMORY_ERROR_TYPE_COUNT &&
	     (unsigned)counterType < NVML_ECC_COUNTER_TYPE_COUNT);
	*count = 0;
	return keep(g.m->ecc && (locationType == NVML_MEMORY_LOCATION_DRAM ||
				 locationType == NVML_MEMORY_LOCATION_SRAM));
}

nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, nvmlPageRetirementCause_t cause,
				       unsigned int *pageCount, unsigned long long *addresses)
{
	ENTER_GPU(device, g);
	(void)addresses;
	NEED(pageCount && (unsigned)cause < NVML_PAGE_RETIREMENT_CAUSE_COUNT);
	*pageCount = 0;
	return keep(!g.b->row_remap);
}

nvmlReturn_t nvmlDeviceGetRetiredPages_v2(nvmlDevice_t device, nvmlPageRetirementCause_t cause,
					  unsigned int *pageCount, unsigned long long *addresses,
					  unsigned long long *timestamps)
{
	(void)timestamps;
	return nvmlDeviceGetRetiredPages(device, cause, pageCount, addresses);
}

nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device,
						    nvmlEnableState_t *isPending)
{
	ENTER_GPU(device, g);
	NEED(isPending);
	*isPending = NVML_FEATURE_DISABLED;
	return keep(!g.b->row_remap);
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrRows,
				       unsigned int *uncRows, unsigned int *isPending,
				       unsigned int *failureOccurred)
{
	ENTER_GPU(device, g);
	NEED(corrRows && uncRows && isPending && failureOccurred);
	*corrRows = *uncRows = *isPending = *failureOccurred = 0;
	return keep(g.b->row_remap);
}

/* Every bank of memory still has all its spare rows; 640 banks on boards that have any. */
nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device,
					       nvmlRowRemapperHistogramValues_t *values)
{
	ENTER_GPU(device, g);
	NEED(values);
	*values = (nvmlRowRemapperHistogramValues_t){ .max = 640 };
	return keep(g.b->row_remap);
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *currentMode,
				  unsigned int *pendingMode)
{
	ENTER_GPU(device, g);
	NEED(currentMode && pendingMode);
	*currentMode = *pendingMode = g.s->mig ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
	return keep(g.m->mig_capable);
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index,
						 nvmlDevice_t *migDevice)
{
	ENTER_GPU(device, g);
	(void)index;
	NEED(migDevice);
	return g.m->mig_capable ? NVML_ERROR_NOT_FOUND : NVML_ERROR_NOT_SUPPORTED;
}
