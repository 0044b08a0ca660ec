/* Devices and their attributes. */
#include <stdio.h>
#include <string.h>
#include "sim.h"

static struct sim_gpu *gpu_of(CUdevice dev)
{
	int g = sim_dev_gpu(dev);
	return g < 0 ? NULL : &sim_shared->gpu[g];
}

/* SIM_DEVICE(name, g, dev): entry of a call on a device. */
#define SIM_DEVICE(fn, g, dev, out)                                                                \
	SIM_CALL(fn);                                                                              \
	struct sim_gpu *g = gpu_of(dev);                                                           \
	if (!(out))                                                                                \
		return CUDA_ERROR_INVALID_VALUE;                                                   \
	if (!g)                                                                                    \
		return CUDA_ERROR_INVALID_DEVICE

CUresult cuDeviceGetCount(int *count)
{
	SIM_CALL(cuDeviceGetCount);
	if (!count)
		return CUDA_ERROR_INVALID_VALUE;
	*count = sim_dev_count();
	return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
	SIM_DEVICE(cuDeviceGet, g, ordinal, device);
	*device = ordinal;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int len, CUdevice dev)
{
	SIM_DEVICE(cuDeviceGetName, g, dev, name && len > 0);
	snprintf(name, (size_t)len, "%s", g->model.name);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice dev)
{
	SIM_DEVICE(cuDeviceGetUuid, g, dev, uuid);
	memcpy(uuid->bytes, g->uuid_bytes, 16);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev)
{
	SIM_DEVICE(cuDeviceGetUuid_v2, g, dev, uuid);
	memcpy(uuid->bytes, g->uuid_bytes, 16);
	return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
	SIM_DEVICE(cuDeviceTotalMem_v2, g, dev, bytes);
	*bytes = g->model.memory;
	return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice dev)
{
	SIM_DEVICE(cuDeviceTotalMem, g, dev, bytes);
	*bytes = g->model.memory > UINT32_MAX ? UINT32_MAX : (unsigned)g->model.memory;
	return CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice dev)
{
	SIM_DEVICE(cuDeviceComputeCapability, g, dev, major && minor);
	*major = (int)g->model.cc_major;
	*minor = (int)g->model.cc_minor;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetProperties(CUdevprop *p, CUdevice dev)
{
	SIM_DEVICE(cuDeviceGetProperties, g, dev, p);
	*p = (CUdevprop){ .maxThreadsPerBlock = 1024, .maxThreadsDim = { 1024, 1024, 64 },
			  .maxGridSize = { 2147483647, 65535, 65535 }, .sharedMemPerBlock = 49152,
			  .totalConstantMemory = 65536, .SIMDWidth = 32, .memPitch = 2147483647,
			  .regsPerBlock = 65536, .clockRate = (int)g->model.clock_khz, .textureAlign = 512 };
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *pciBusId, int len, CUdevice dev)
{
	SIM_DEVICE(cuDeviceGetPCIBusId, g, dev, pciBusId && len > 0);
	char text[32];
	snprintf(text, sizeof text, "%04X:%02X:%02X.0", g->pci_domain & 0xffff, g->pci_bus, g->pci_dev);
	if (strlen(text) >= (size_t)len)
		return CUDA_ERROR_INVALID_VALUE;
	strcpy(pciBusId, text);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *dev, const char *pciBusId)
{
	SIM_CALL(cuDeviceGetByPCIBusId);
	unsigned domain = 0, bus, device;
	if (!dev || !pciBusId)
		return CUDA_ERROR_INVALID_VALUE;
	if (sscanf(pciBusId, "%x:%x:%x", &domain, &bus, &device) != 3) {
		domain = 0;
		if (sscanf(pciBusId, "%x:%x", &bus, &device) != 2)
			return CUDA_ERROR_INVALID_VALUE;
	}
	for (int i = 0; i < sim_dev_count(); i++) {
		struct sim_gpu *g = gpu_of(i);
		if (g->pci_domain == domain && g->pci_bus == bus && g->pci_dev == device) {
			*dev = i;
			return CUDA_SUCCESS;
		}
	}
	return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetExecAffinitySupport(int *pi, CUexecAffinityType type, CUdevice dev)
{
	SIM_DEVICE(cuDeviceGetExecAffinitySupport, g, dev, pi);
	if (type != CU_EXEC_AFFINITY_TYPE_SM_COUNT)
		return CUDA_ERROR_INVALID_VALUE;
	*pi = 0;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetTexture1DLinearMaxWidth(size_t *maxWidthInElements, CUarray_format format,
					    unsigned numChannels, CUdevice dev)
{
	SIM_DEVICE(cuDeviceGetTexture1DLinearMaxWidth, g, dev, maxWidthInElements);
	(void)format;
	(void)numChannels;
	*maxWidthInElements = 268435456;
	return CUDA_SUCCESS;
}

/* Attributes that are the same on every model here. What the simulator cannot do (external
 * semaphores, IPC events, mapping of sparse arrays, tensor maps) is said to be absent. */
static const struct { int attribute, value; } constant[] = {
	{ CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024 }, { CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024 },
	{ CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024 }, { CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64 },
	{ CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647 }, { CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535 },
	{ CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535 }, { CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152 },
	{ CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536 }, { CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32 },
	{ CU_DEVICE_ATTRIBUTE_MAX_PITCH, 2147483647 }, { CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536 },
	{ CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512 }, { CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1 },
	{ CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1 }, { CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT, 512 },
	{ 21, 131072 }, { 22, 131072 }, { 23, 65536 }, { 24, 16384 }, { 25, 16384 }, { 26, 16384 },
	{ 27, 32768 }, { 28, 32768 }, { 29, 2048 }, { CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1 },
	{ CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1 }, { 42, 32768 }, { 43, 2048 }, { 44, 1 }, { 45, 32768 },
	{ 46, 32768 }, { 47, 8192 }, { 48, 8192 }, { 49, 32768 }, { 51, 32 }, { 52, 32768 }, { 53, 32768 },
	{ 54, 2046 }, { 55, 32768 }, { 56, 131072 }, { 57, 65536 }, { 58, 16384 }, { 59, 16384 },
	{ 60, 16384 }, { 61, 32768 }, { 62, 2048 }, { 63, 32768 }, { 64, 32768 }, { 65, 2048 },
	{ 66, 32768 }, { 67, 32768 }, { 68, 2046 }, { 69, 268435456 }, { 70, 131072 }, { 71, 65000 },
	{ 72, 2097120 }, { 73, 32768 }, { 74, 32768 }, { 77, 32768 },
	{ CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1 }, { CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED, 1 },
	{ CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED, 1 }, { CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1 },
	{ CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO, 2 },
	{ CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1 },
	{ CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1 },
	{ CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1 }, { 92, 1 }, { 93, 1 }, { 94, 1 },
	{ CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1 }, { CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH, 1 },
	{ CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, 0 }, { CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1 },
	{ CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1 },
	{ CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1 },
	{ CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024 },
	{ CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED, 0 },
	{ CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, 1 },
	{ CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED, 0 },
	{ CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1 }, { CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, 1 },
	{ CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED, 0 }, { 122, 1 }, { 123, 1 },
	{ CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 0 }, { CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS, 1 },
	{ CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE, 134213632 },
};

static bool model_attribute(int a, const struct sim_gpu *g, CUdevice dev, int *v)
{
	const struct sim_model *m = &g->model;
	bool hopper = m->cc_major >= 9;
	const struct { int attribute; int64_t value; } table[] = {
		{ CU_DEVICE_ATTRIBUTE_CLOCK_RATE, m->clock_khz },
		{ CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, m->sms },
		{ CU_DEVICE_ATTRIBUTE_ECC_ENABLED, m->ecc },
		{ CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, g->pci_bus },
		{ CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, g->pci_dev },
		{ CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, g->pci_domain },
		{ CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, m->mem_clock_khz },
		{ CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, m->bus_bits },
		{ CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, m->l2_bytes },
		{ CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, m->max_threads_per_sm },
		{ CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, m->async_engines },
		{ CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, m->cc_major },
		{ CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, m->cc_minor },
		{ CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, m->smem_per_sm },
		{ CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, m->regs_per_sm },
		{ CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, m->smem_per_block_optin },
		{ CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, m->max_blocks_per_sm },
		{ CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE, m->cc_major >= 8 ? m->l2_bytes / 4 * 3 : 0 },
		{ CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID, dev },
		{ CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, hopper },
		{ CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, hopper && m->nvlinks },
		{ CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT, hopper ? 4 : 1 },
		{ CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, g->numa_node },
		{ CU_DEVICE_ATTRIBUTE_NUMA_ID, -1 },
	};
	for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
		if (table[i].attribute == a) {
			*v = (int)table[i].value;
			return true;
		}
	return false;
}

CUresult cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)
{
	SIM_DEVICE(cuDeviceGetAttribute, g, dev, pi);
	if (attrib <= 0 || attrib >= CU_DEVICE_ATTRIBUTE_MAX)
		return CUDA_ERROR_INVALID_VALUE;
	if (model_attribute((int)attrib, g, dev, pi))
		return CUDA_SUCCESS;
	*pi = 0;
	for (size_t i = 0; i < sizeof constant / sizeof constant[0]; i++)
		if (constant[i].attribute == (int)attrib)
			*pi = constant[i].value;
	return CUDA_SUCCESS;
}

/* --- peers --------------------------------------------------------------------------------------- */

CUresult cuDeviceCanAccessPeer(int *canAccessPeer, CUdevice dev, CUdevice peerDev)
{
	SIM_DEVICE(cuDeviceCanAccessPeer, g, dev, canAccessPeer);
	if (sim_dev_gpu(peerDev) < 0)
		return CUDA_ERROR_INVALID_DEVICE;
	*canAccessPeer = dev != peerDev;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attrib, CUdevice srcDevice, CUdevice dstDevice)
{
	SIM_DEVICE(cuDeviceGetP2PAttribute, g, srcDevice, value);
	int other = sim_dev_gpu(dstDevice);
	if (other < 0 || srcDevice == dstDevice)
		return CUDA_ERROR_INVALID_DEVICE;
	const struct sim_link *l = &sim_shared->link[g - sim_shared->gpu][other];
	switch (attrib) {
	case CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK:
		*value = l->nvlink ? 0 : 1;
		return CUDA_SUCCESS;
	case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED:
	case CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED:
		*value = 1;
		return CUDA_SUCCESS;
	case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED:
		*value = l->nvlink != 0;
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
}
