/* How the GPUs and the processors are connected. */
#include <string.h>
#include <unistd.h>
#include "internal.h"

static nvmlGpuTopologyLevel_t level_between(unsigned a, unsigned b)
{
	if (a == b)
		return NVML_TOPOLOGY_INTERNAL;
	switch (sim_shared->link[a][b].pcie) {
	case SIM_LINK_PIX: return NVML_TOPOLOGY_SINGLE;
	case SIM_LINK_PXB: return NVML_TOPOLOGY_MULTIPLE;
	case SIM_LINK_PHB: return NVML_TOPOLOGY_HOSTBRIDGE;
	case SIM_LINK_NODE: return NVML_TOPOLOGY_NODE;
	default: return NVML_TOPOLOGY_SYSTEM;
	}
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t device1, nvmlDevice_t device2,
						 nvmlGpuTopologyLevel_t *pathInfo)
{
	ENTER_GPU(device1, a);
	ENTER_GPU(device2, b);
	NEED(pathInfo);
	*pathInfo = level_between(a.index, b.index);
	return NVML_SUCCESS;
}

/* Those at exactly this level. *count is the room on entry (0: ask for the number). */
nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, nvmlGpuTopologyLevel_t level,
					      unsigned int *count, nvmlDevice_t *deviceArray)
{
	ENTER_GPU(device, g);
	NEED(count && (*count == 0 || deviceArray));
	unsigned room = *count, n = 0;
	for (unsigned i = 0; i < sim_shared->n_gpus; i++) {
		if (i == g.index || level_between(g.index, i) != level)
			continue;
		if (n < room)
			deviceArray[n] = nvml_handle(i);
		n++;
	}
	*count = room && room < n ? room : n;
	return NVML_SUCCESS;
}

/* --- NUMA: the processors are dealt to the nodes in equal, consecutive parts ------------------- */

static unsigned cpus(void)
{
	long n = sysconf(_SC_NPROCESSORS_CONF);
	return n > 0 ? (unsigned)n : 1;
}

static unsigned cpu_node(unsigned cpu)
{
	unsigned nodes = sim_shared->numa_nodes ? sim_shared->numa_nodes : 1;
	return (unsigned)((unsigned long long)cpu * nodes / cpus());
}

static void set_bit(unsigned long *set, unsigned words, unsigned bit)
{
	enum { BITS = 8 * sizeof(unsigned long) };
	if (bit / BITS < words)
		set[bit / BITS] |= 1ul << bit % BITS;
}

nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int cpuSetSize,
				      unsigned long *cpuSet)
{
	ENTER_GPU(device, g);
	NEED(cpuSet && cpuSetSize);
	memset(cpuSet, 0, cpuSetSize * sizeof(*cpuSet));
	for (unsigned c = 0, n = cpus(); c < n; c++)
		if (cpu_node(c) == g.s->numa_node)
			set_bit(cpuSet, cpuSetSize, c);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned int cpuSetSize,
						 unsigned long *cpuSet, nvmlAffinityScope_t scope)
{
	(void)scope;
	return nvmlDeviceGetCpuAffinity(device, cpuSetSize, cpuSet);
}

nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int nodeSetSize,
					 unsigned long *nodeSet, nvmlAffinityScope_t scope)
{
	ENTER_GPU(device, g);
	(void)scope;
	NEED(nodeSet && nodeSetSize);
	memset(nodeSet, 0, nodeSetSize * sizeof(*nodeSet));
	set_bit(nodeSet, nodeSetSize, g.s->numa_node);
	return NVML_SUCCESS;
}

/* Of GPUs whose memory is a NUMA node of the system; these are not. */
nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned int *node)
{
	ENTER_GPU(device, g);
	NEED(node);
	return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlSystemGetTopologyGpuSet(unsigned int cpuNumber, unsigned int *count,
					 nvmlDevice_t *deviceArray)
{
	ENTER();
	NEED(count && cpuNumber < cpus());
	unsigned room = *count, n = 0;
	for (unsigned i = 0; i < sim_shared->n_gpus; i++) {
		if (sim_shared->gpu[i].numa_node != cpu_node(cpuNumber))
			continue;
		if (n < room && deviceArray)
			deviceArray[n] = nvml_handle(i);
		n++;
	}
	*count = n;
	return NVML_SUCCESS;
}

/* --- NVLink ------------------------------------------------------------------------------------
 * A GPU's links are dealt to its peers in order of index. Where the pairs ask for more links than
 * the board has, they are not wired pair by pair: every link goes to a switch. */

static unsigned links_asked(const struct gpu *g)
{
	unsigned n = 0;
	for (unsigned i = 0; i < sim_shared->n_gpus; i++)
		n += i == g->index ? 0 : sim_shared->link[g->index][i].nvlink;
	return n;
}

static bool switched(const struct gpu *g)
{
	return links_asked(g) > g->m->nvlinks;
}

unsigned nvml_links_up(const struct gpu *g)
{
	return switched(g) ? g->m->nvlinks : links_asked(g);
}

enum nvml_peer nvml_link_peer(const struct gpu *g, unsigned link, unsigned *peer)
{
	enum { SWITCHES = 4 };
	if (link >= nvml_links_up(g))
		return NVML_PEER_NONE;
	if (switched(g)) {
		*peer = link % SWITCHES;
		return NVML_PEER_SWITCH;
	}
	for (unsigned i = 0; i < sim_shared->n_gpus; i++) {
		unsigned n = i == g->index ? 0 : sim_shared->link[g->index][i].nvlink;
		if (link < n) {
			*peer = i;
			return NVML_PEER_GPU;
		}
		link -= n;
	}
	return NVML_PEER_NONE;
}

/* Common checks of the calls about one link. */
static nvmlReturn_t link_check(const struct gpu *g, unsigned link)
{
	if (link >= NVML_NVLINK_MAX_LINKS)
		return NVML_ERROR_INVALID_ARGUMENT;
	return link < g->m->nvlinks ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

#define ENTER_LINK(device, g, link, out)                                                           \
	ENTER_GPU(device, g);                                                                      \
	do {                                                                                       \
		NEED(out);                                                                         \
		nvmlReturn_t link_ = link_check(&g, link);                                         \
		if (link_ != NVML_SUCCESS)                                                         \
			return link_;                                                              \
	} while (0)

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link,
				      nvmlEnableState_t *isActive)
{
	ENTER_LINK(device, g, link, isActive);
	*isActive = link < nvml_links_up(&g) ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned int link,
					unsigned int *version)
{
	ENTER_LINK(device, g, link, version);
	*version = g.b->nvlink_version;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned int link,
					   nvmlNvLinkCapability_t capability,
					   unsigned int *capResult)
{
	ENTER_LINK(device, g, link, capResult);
	NEED((unsigned)capability < NVML_NVLINK_CAP_COUNT);
	*capResult = link < nvml_links_up(&g) && capability != NVML_NVLINK_CAP_SLI_BRIDGE;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link,
						 nvmlIntNvLinkDeviceType_t *type)
{
	ENTER_LINK(device, g, link, type);
	unsigned peer;
	switch (nvml_link_peer(&g, link, &peer)) {
	case NVML_PEER_GPU: *type = NVML_NVLINK_DEVICE_TYPE_GPU; return NVML_SUCCESS;
	case NVML_PEER_SWITCH: *type = NVML_NVLINK_DEVICE_TYPE_SWITCH; return NVML_SUCCESS;
	case NVML_PEER_NONE: break;
	}
	*type = NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
	return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link,
						 nvmlPciInfo_t *pci)
{
	ENTER_LINK(device, g, link, pci);
	enum { SWITCH_BUS = 0xC4, SWITCH_ID = 0x22A310DE };
	unsigned peer;
	struct gpu p = { 0 };
	switch (nvml_link_peer(&g, link, &peer)) {
	case NVML_PEER_GPU:
		nvml_gpu(peer, &p);
		nvml_fill_pci(&p, pci);
		return NVML_SUCCESS;
	case NVML_PEER_SWITCH:
		nvml_fill_pci(&g, pci);
		pci->domain = pci->device = 0;
		pci->bus = SWITCH_BUS + peer;
		pci->pciDeviceId = SWITCH_ID;
		pci->pciSubSystemId = 0;
		memcpy(pci->busIdLegacy, "0000:C4:00.0", 13);
		memcpy(pci->busId, "00000000:C4:00.0", 17);
		pci->busIdLegacy[6] = pci->busId[10] = (char)('4' + peer);
		return NVML_SUCCESS;
	case NVML_PEER_NONE: break;
	}
	return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned int link,
					      nvmlPciInfo_t *pci)
{
	return nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, pci);
}

nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned int link,
					     nvmlNvLinkErrorCounter_t counter,
					     unsigned long long *counterValue)
{
	ENTER_LINK(device, g, link, counterValue);
	NEED((unsigned)counter < NVML_NVLINK_ERROR_COUNT);
	*counterValue = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device1, nvmlDevice_t device2,
				    nvmlGpuP2PCapsIndex_t p2pIndex, nvmlGpuP2PStatus_t *p2pStatus)
{
	ENTER_GPU(device1, a);
	ENTER_GPU(device2, b);
	NEED(p2pStatus && a.index != b.index && (unsigned)p2pIndex < NVML_P2P_CAPS_INDEX_UNKNOWN);
	bool nvlink = sim_shared->link[a.index][b.index].nvlink > 0;
	bool pcie = level_between(a.index, b.index) <= NVML_TOPOLOGY_NODE;
	switch (p2pIndex) {
	case NVML_P2P_CAPS_INDEX_NVLINK:
	case NVML_P2P_CAPS_INDEX_ATOMICS:
		*p2pStatus = nvlink ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED;
		break;
	default:
		*p2pStatus = nvlink || pcie ? NVML_P2P_STATUS_OK :
					      NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED;
		break;
	}
	return NVML_SUCCESS;
}
