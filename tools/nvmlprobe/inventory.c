/* Where a GPU sits: NUMA node, PCIe, NVLink. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include "probe.h"

/* NUMA node as the kernel tells it, for drivers that do not; -1: unknown. */
static int sysfs_node(const char *bus)
{
	char path[96] = "/sys/bus/pci/devices/";
	size_t n = strlen(path), digits = strcspn(bus, ":");
	int node = -1;
	FILE *f;

	/* "00000000:17:00.0": sysfs has four digits of domain. */
	if (digits > 4 && strspn(bus, "0") >= digits - 4)
		bus += digits - 4;
	for (; *bus && n < sizeof(path) - 16; bus++)
		path[n++] = (char)tolower((unsigned char)*bus);
	strcpy(path + n, "/numa_node");
	f = fopen(path, "r");
	if (!f)
		return -1;
	if (fscanf(f, "%d", &node) != 1)
		node = -1;
	fclose(f);
	return node;
}

static int numa_node(nvmlDevice_t dev, const char *bus)
{
	enum { WORDS = 16, BITS = 8 * sizeof(unsigned long) };
	unsigned long set[WORDS] = { 0 };
	int node = sysfs_node(bus);

	if (node >= 0 || !nvml.nvmlDeviceGetMemoryAffinity ||
	    nvml.nvmlDeviceGetMemoryAffinity(dev, WORDS, set, NVML_AFFINITY_SCOPE_NODE) != NVML_SUCCESS)
		return node;
	for (int i = 0; i < WORDS * BITS; i++)
		if (set[i / BITS] >> i % BITS & 1)
			return i;
	return -1;
}

/* MB/s in one direction, after the encoding. */
static unsigned pcie_mbps(nvmlDevice_t dev)
{
	static const unsigned lane[] = { 0, 250, 500, 985, 1969, 3938, 7563 };
	unsigned gen = 0, width = 0;

	if (!nvml.nvmlDeviceGetMaxPcieLinkGeneration || !nvml.nvmlDeviceGetMaxPcieLinkWidth ||
	    nvml.nvmlDeviceGetMaxPcieLinkGeneration(dev, &gen) != NVML_SUCCESS ||
	    nvml.nvmlDeviceGetMaxPcieLinkWidth(dev, &width) != NVML_SUCCESS ||
	    gen >= sizeof(lane) / sizeof(lane[0]) || width > 32)
		return 0;
	return lane[gen] * width;
}

static unsigned field(nvmlDevice_t dev, unsigned id, unsigned scope)
{
	nvmlFieldValue_t f = { .fieldId = id, .scopeId = scope };

	if (!nvml.nvmlDeviceGetFieldValues ||
	    nvml.nvmlDeviceGetFieldValues(dev, 1, &f) != NVML_SUCCESS || f.nvmlReturn != NVML_SUCCESS)
		return 0;
	return f.value.uiVal;
}

/* Nearest common ancestor with the GPU of each index. */
static void put_ancestors(nvmlDevice_t dev, unsigned count)
{
	put(",\"ancestors\":[");
	for (unsigned i = 0; i < count; i++) {
		nvmlGpuTopologyLevel_t level = 0;
		nvmlDevice_t other;
		bool ok = nvml.nvmlDeviceGetTopologyCommonAncestor &&
			  nvml.nvmlDeviceGetHandleByIndex_v2(i, &other) == NVML_SUCCESS && other != dev &&
			  nvml.nvmlDeviceGetTopologyCommonAncestor(dev, other, &level) == NVML_SUCCESS;

		put("%s%d", i ? "," : "", ok ? (int)level : -1);
	}
	put("]");
}

static void put_link(nvmlDevice_t dev, unsigned link, bool first)
{
	nvmlIntNvLinkDeviceType_t type = NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
	nvmlPciInfo_t pci = { 0 };
	const char *name;

	if (!nvml.nvmlDeviceGetNvLinkRemoteDeviceType ||
	    nvml.nvmlDeviceGetNvLinkRemoteDeviceType(dev, link, &type) != NVML_SUCCESS)
		type = NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
	if (nvml.nvmlDeviceGetNvLinkRemotePciInfo_v2)
		nvml.nvmlDeviceGetNvLinkRemotePciInfo_v2(dev, link, &pci);
	pci.busId[sizeof(pci.busId) - 1] = 0;
	name = type == NVML_NVLINK_DEVICE_TYPE_GPU ? "gpu" : type == NVML_NVLINK_DEVICE_TYPE_SWITCH ? "switch" :
	       type == NVML_NVLINK_DEVICE_TYPE_UNKNOWN && pci.busId[0] ? "gpu" : /* before driver 460 */
									  "other";
	put("%s{\"type\":\"%s\",\"pci\":", first ? "" : ",", name);
	put_string(pci.busId);
	put("}");
}

static void put_links(nvmlDevice_t dev)
{
	enum { LINKS = 64 }; /* more than any chip has */
	unsigned mbps = 0, shown = 0;

	put(",\"nvlinks\":[");
	for (unsigned link = 0; nvml.nvmlDeviceGetNvLinkState && link < LINKS; link++) {
		nvmlEnableState_t up = NVML_FEATURE_DISABLED;
		nvmlReturn_t r = nvml.nvmlDeviceGetNvLinkState(dev, link, &up);

		if (r == NVML_ERROR_INVALID_ARGUMENT || r == NVML_ERROR_GPU_IS_LOST)
			break;
		if (r != NVML_SUCCESS || up != NVML_FEATURE_ENABLED)
			continue;
		if (!mbps)
			mbps = field(dev, NVML_FI_DEV_NVLINK_GET_SPEED, link);
		put_link(dev, link, shown++ == 0);
	}
	put("]");
	if (shown && !mbps)
		mbps = field(dev, NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, 0);
	put_number("nvlink_mbps", mbps > 0, mbps);
}

void put_inventory(nvmlDevice_t dev, unsigned count)
{
	nvmlComputeMode_t mode = NVML_COMPUTEMODE_DEFAULT;
	nvmlPciInfo_t pci = { 0 };
	unsigned pcie = pcie_mbps(dev);
	bool ok;
	int node;

	if (nvml.nvmlDeviceGetPciInfo_v3)
		nvml.nvmlDeviceGetPciInfo_v3(dev, &pci);
	pci.busId[sizeof(pci.busId) - 1] = 0;
	node = numa_node(dev, pci.busId);
	put_number("numa", node >= 0, (unsigned)node);
	ok = nvml.nvmlDeviceGetComputeMode && nvml.nvmlDeviceGetComputeMode(dev, &mode) == NVML_SUCCESS;
	put_number("compute_mode", ok, (unsigned)mode);
	put_number("pcie_mbps", pcie > 0, pcie);
	put_ancestors(dev, count);
	put_links(dev);
}
