/* The system, and which GPU is which: versions, handles, names, buses. */
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include "internal.h"

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
	ENTER();
	return nvml_put_string(version, length, sim_shared->driver_version);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
	ENTER();
	char s[96];
	snprintf(s, sizeof(s), "%u.%s", sim_shared->cuda_version / 1000, sim_shared->driver_version);
	return nvml_put_string(version, length, s);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *cudaDriverVersion)
{
	ENTER();
	NEED(cudaDriverVersion);
	*cudaDriverVersion = (int)sim_shared->cuda_version;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *cudaDriverVersion)
{
	return nvmlSystemGetCudaDriverVersion(cudaDriverVersion);
}

nvmlReturn_t nvmlSystemGetHicVersion(unsigned int *hwbcCount, nvmlHwbcEntry_t *hwbcEntries)
{
	ENTER();
	(void)hwbcEntries;
	NEED(hwbcCount);
	*hwbcCount = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlUnitGetCount(unsigned int *unitCount)
{
	ENTER();
	NEED(unitCount);
	*unitCount = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGetExcludedDeviceCount(unsigned int *deviceCount)
{
	NEED(deviceCount);
	*deviceCount = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGetExcludedDeviceInfoByIndex(unsigned int index, nvmlExcludedDeviceInfo_t *info)
{
	(void)index, (void)info;
	return NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlGetBlacklistDeviceCount(unsigned int *deviceCount)
{
	return nvmlGetExcludedDeviceCount(deviceCount);
}

nvmlReturn_t nvmlGetBlacklistDeviceInfoByIndex(unsigned int index, nvmlExcludedDeviceInfo_t *info)
{
	return nvmlGetExcludedDeviceInfoByIndex(index, info);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *deviceCount)
{
	ENTER();
	NEED(deviceCount);
	*deviceCount = sim_shared->n_gpus;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *deviceCount)
{
	return nvmlDeviceGetCount_v2(deviceCount);
}

/* The handle of a GPU that has been found; a lost one cannot be attached any more. */
static nvmlReturn_t attach(const struct gpu *g, nvmlDevice_t *device)
{
	if (__atomic_load_n(&g->s->lost, __ATOMIC_ACQUIRE))
		return NVML_ERROR_GPU_IS_LOST;
	*device = nvml_handle(g->index);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
	ENTER();
	struct gpu g;
	NEED(device && nvml_gpu(index, &g));
	return attach(&g, device);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
	return nvmlDeviceGetHandleByIndex_v2(index, device);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
	ENTER();
	NEED(uuid && device);
	struct gpu g;
	for (unsigned i = 0; nvml_gpu(i, &g); i++)
		if (strcasecmp(g.s->uuid, uuid) == 0)
			return attach(&g, device);
	return NVML_ERROR_NOT_FOUND;
}

/* "domain:bus:device.function", domain in 4 or 8 digits or absent, function optional. */
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *pciBusId, nvmlDevice_t *device)
{
	ENTER();
	NEED(pciBusId && device);
	unsigned domain = 0, bus, dev, function = 0;
	if (sscanf(pciBusId, "%x:%x:%x.%x", &domain, &bus, &dev, &function) < 3) {
		domain = 0;
		if (sscanf(pciBusId, "%x:%x.%x", &bus, &dev, &function) < 2)
			return NVML_ERROR_INVALID_ARGUMENT;
	}
	struct gpu g;
	for (unsigned i = 0; nvml_gpu(i, &g); i++)
		if (g.s->pci_domain == domain && g.s->pci_bus == bus && g.s->pci_dev == dev && function == 0)
			return attach(&g, device);
	return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *pciBusId, nvmlDevice_t *device)
{
	return nvmlDeviceGetHandleByPciBusId_v2(pciBusId, device);
}

nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
	ENTER();
	NEED(serial && device);
	struct gpu g;
	for (unsigned i = 0; nvml_gpu(i, &g); i++)
		if (strcmp(g.s->serial, serial) == 0)
			return attach(&g, device);
	return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
	ENTER_IDENTITY(device, g);
	return nvml_put_string(serial, length, g.s->serial);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
	ENTER_IDENTITY(device, g);
	return nvml_put_string(name, length, g.m->name);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
	ENTER_IDENTITY(device, g);
	return nvml_put_string(uuid, length, g.s->uuid);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
	ENTER_IDENTITY(device, g);
	NEED(index);
	*index = g.index;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minorNumber)
{
	ENTER_IDENTITY(device, g);
	NEED(minorNumber);
	*minorNumber = g.s->minor;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetModuleId(nvmlDevice_t device, unsigned int *moduleId)
{
	ENTER_GPU(device, g);
	NEED(moduleId);
	*moduleId = g.index + 1;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetBoardId(nvmlDevice_t device, unsigned int *boardId)
{
	ENTER_GPU(device, g);
	NEED(boardId);
	*boardId = g.s->pci_domain << 16 | g.s->pci_bus << 8;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMultiGpuBoard(nvmlDevice_t device, unsigned int *multiGpuBool)
{
	ENTER_GPU(device, g);
	NEED(multiGpuBool);
	*multiGpuBool = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t device1, nvmlDevice_t device2, int *onSameBoard)
{
	ENTER_GPU(device1, a);
	ENTER_GPU(device2, b);
	NEED(onSameBoard);
	*onSameBoard = a.index == b.index;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, nvmlBrandType_t *type)
{
	ENTER_GPU(device, g);
	NEED(type);
	*type = strcmp(g.m->brand, "Tesla") == 0 ? NVML_BRAND_TESLA : NVML_BRAND_NVIDIA;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, nvmlDeviceArchitecture_t *arch)
{
	ENTER_GPU(device, g);
	NEED(arch);
	unsigned cc = g.m->cc_major * 10 + g.m->cc_minor;
	*arch = cc >= 90 ? NVML_DEVICE_ARCH_HOPPER :
		cc == 89 ? NVML_DEVICE_ARCH_ADA :
		cc >= 80 ? NVML_DEVICE_ARCH_AMPERE :
		cc == 75 ? NVML_DEVICE_ARCH_TURING :
		cc >= 70 ? NVML_DEVICE_ARCH_VOLTA :
			   NVML_DEVICE_ARCH_UNKNOWN;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
	ENTER_GPU(device, g);
	NEED(major && minor);
	*major = (int)g.m->cc_major;
	*minor = (int)g.m->cc_minor;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNumGpuCores(nvmlDevice_t device, unsigned int *numCores)
{
	ENTER_GPU(device, g);
	NEED(numCores);
	*numCores = g.m->sms * g.b->cores_per_sm;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
	/* Of MIG devices only. */
	ENTER_GPU(device, g);
	NEED(attributes);
	return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetBoardPartNumber(nvmlDevice_t device, char *partNumber,
					  unsigned int length)
{
	ENTER_GPU(device, g);
	return nvml_put_string(partNumber, length, g.b->part_number);
}

nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version, unsigned int length)
{
	ENTER_GPU(device, g);
	return nvml_put_string(version, length, g.b->vbios);
}

nvmlReturn_t nvmlDeviceGetInforomImageVersion(nvmlDevice_t device, char *version,
					      unsigned int length)
{
	ENTER_GPU(device, g);
	return nvml_put_string(version, length, g.b->inforom);
}

nvmlReturn_t nvmlDeviceGetInforomVersion(nvmlDevice_t device, nvmlInforomObject_t object,
					 char *version, unsigned int length)
{
	ENTER_GPU(device, g);
	static const char *const versions[] = { "2.0", "6.16", "N/A" };
	NEED((unsigned)object < NVML_INFOROM_COUNT);
	if (object == NVML_INFOROM_POWER)
		return NVML_ERROR_NOT_SUPPORTED;
	return nvml_put_string(version, length, versions[object]);
}

nvmlReturn_t nvmlDeviceValidateInforom(nvmlDevice_t device)
{
	ENTER_GPU(device, g);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *version)
{
	ENTER_GPU(device, g);
	NEED(version);
	if (!g.b->gsp)
		return NVML_ERROR_NOT_SUPPORTED;
	return nvml_put_string(version, NVML_GSP_FIRMWARE_VERSION_BUF_SIZE,
			       sim_shared->driver_version);
}

nvmlReturn_t nvmlDeviceGetGspFirmwareMode(nvmlDevice_t device, unsigned int *isEnabled,
					  unsigned int *defaultMode)
{
	ENTER_GPU(device, g);
	NEED(isEnabled && defaultMode);
	*isEnabled = *defaultMode = g.b->gsp;
	return NVML_SUCCESS;
}

void nvml_fill_pci(const struct gpu *g, nvmlPciInfo_t *pci)
{
	*pci = (nvmlPciInfo_t){ .domain = g->s->pci_domain, .bus = g->s->pci_bus, .device = g->s->pci_dev,
				.pciDeviceId = g->m->pci_device_id,
				.pciSubSystemId = g->m->pci_subsystem_id };
	snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), "%04X:%02X:%02X.0",
		 g->s->pci_domain & 0xffff, g->s->pci_bus & 0xff, g->s->pci_dev & 0x1f);
	snprintf(pci->busId, sizeof(pci->busId), "%08X:%02X:%02X.0", g->s->pci_domain, g->s->pci_bus & 0xff,
		 g->s->pci_dev & 0x1f);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	ENTER_IDENTITY(device, g);
	NEED(pci);
	nvml_fill_pci(&g, pci);
	return NVML_SUCCESS;
}

/* The two superseded forms end where the wide busId begins (v2) or one word later (v1, whose
 * four reserved words lay there). */
static nvmlReturn_t pci_short(const struct gpu *g, nvmlPciInfo_t *pci, size_t len)
{
	nvmlPciInfo_t full;
	nvml_fill_pci(g, &full);
	memset(full.busId, 0, sizeof(full.busId));
	memcpy((void *)pci, &full, len);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	ENTER_IDENTITY(device, g);
	NEED(pci);
	return pci_short(&g, pci, offsetof(nvmlPciInfo_t, busId) + 4 * sizeof(unsigned));
}

nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	ENTER_IDENTITY(device, g);
	NEED(pci);
	return pci_short(&g, pci, offsetof(nvmlPciInfo_t, pciSubSystemId));
}

nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *pci)
{
	ENTER_IDENTITY(device, g);
	NEED(pci);
	if (pci->version != nvmlPciInfoExt_v1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	nvmlPciInfo_t full;
	nvml_fill_pci(&g, &full);
	enum { DISPLAY_CONTROLLER = 3, CONTROLLER_3D = 2 };
	*pci = (nvmlPciInfoExt_t){ .version = nvmlPciInfoExt_v1, .domain = full.domain,
				   .bus = full.bus, .device = full.device,
				   .pciDeviceId = full.pciDeviceId,
				   .pciSubSystemId = full.pciSubSystemId,
				   .baseClass = DISPLAY_CONTROLLER, .subClass = CONTROLLER_3D };
	memcpy(pci->busId, full.busId, sizeof(pci->busId));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetBusType(nvmlDevice_t device, nvmlBusType_t *type)
{
	ENTER_GPU(device, g);
	NEED(type);
	*type = NVML_BUS_TYPE_PCIE;
	return NVML_SUCCESS;
}
