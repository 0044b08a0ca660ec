/* The GPU models that a simulated machine can have, and their figures from public data sheets. */
#include <string.h>
#include "state.h"

#define MIB (1ull << 20)

static const struct sim_model models[] = {
	{ .key = "t4", .name = "Tesla T4", .brand = "Tesla",
	  .memory = 14910 * MIB, .memory_nvml = 15360 * MIB, .context_bytes = 105 * MIB,
	  .cc_major = 7, .cc_minor = 5, .sms = 40, .max_threads_per_sm = 1024,
	  .max_blocks_per_sm = 16, .regs_per_sm = 65536, .smem_per_sm = 65536,
	  .smem_per_block_optin = 65536, .l2_bytes = 4 * MIB, .clock_khz = 1590000,
	  .mem_clock_khz = 5001000, .bus_bits = 256, .mem_mbps = 320000, .pcie_mbps = 12000,
	  .pcie_gen = 3, .pcie_width = 16, .pci_device_id = 0x1eb810de,
	  .pci_subsystem_id = 0x12a210de, .power_limit_mw = 70000, .async_engines = 3, .ecc = 1 },
	{ .key = "v100-16g", .name = "Tesla V100-SXM2-16GB", .brand = "Tesla",
	  .memory = 16150 * MIB, .memory_nvml = 16384 * MIB, .context_bytes = 305 * MIB,
	  .cc_major = 7, .cc_minor = 0, .sms = 80, .max_threads_per_sm = 2048,
	  .max_blocks_per_sm = 32, .regs_per_sm = 65536, .smem_per_sm = 98304,
	  .smem_per_block_optin = 98304, .l2_bytes = 6 * MIB, .clock_khz = 1530000,
	  .mem_clock_khz = 877000, .bus_bits = 4096, .mem_mbps = 900000, .pcie_mbps = 12000,
	  .pcie_gen = 3, .pcie_width = 16, .pci_device_id = 0x1db110de,
	  .pci_subsystem_id = 0x121210de, .power_limit_mw = 300000, .nvlinks = 6,
	  .async_engines = 6, .ecc = 1 },
	{ .key = "v100-32g", .name = "Tesla V100-SXM2-32GB", .brand = "Tesla",
	  .memory = 32500 * MIB, .memory_nvml = 32768 * MIB, .context_bytes = 305 * MIB,
	  .cc_major = 7, .cc_minor = 0, .sms = 80, .max_threads_per_sm = 2048,
	  .max_blocks_per_sm = 32, .regs_per_sm = 65536, .smem_per_sm = 98304,
	  .smem_per_block_optin = 98304, .l2_bytes = 6 * MIB, .clock_khz = 1530000,
	  .mem_clock_khz = 877000, .bus_bits = 4096, .mem_mbps = 900000, .pcie_mbps = 12000,
	  .pcie_gen = 3, .pcie_width = 16, .pci_device_id = 0x1db510de,
	  .pci_subsystem_id = 0x124910de, .power_limit_mw = 300000, .nvlinks = 6,
	  .async_engines = 6, .ecc = 1 },
	{ .key = "a100-40g", .name = "NVIDIA A100-SXM4-40GB", .brand = "NVIDIA",
	  .memory = 40338 * MIB, .memory_nvml = 40960 * MIB, .context_bytes = 415 * MIB,
	  .cc_major = 8, .cc_minor = 0, .sms = 108, .max_threads_per_sm = 2048,
	  .max_blocks_per_sm = 32, .regs_per_sm = 65536, .smem_per_sm = 167936,
	  .smem_per_block_optin = 166912, .l2_bytes = 40 * MIB, .clock_khz = 1410000,
	  .mem_clock_khz = 1215000, .bus_bits = 5120, .mem_mbps = 1555000, .pcie_mbps = 25000,
	  .pcie_gen = 4, .pcie_width = 16, .pci_device_id = 0x20b010de,
	  .pci_subsystem_id = 0x134f10de, .power_limit_mw = 400000, .nvlinks = 12,
	  .mig_capable = 1, .async_engines = 3, .ecc = 1 },
	{ .key = "a100-80g", .name = "NVIDIA A100-SXM4-80GB", .brand = "NVIDIA",
	  .memory = 81050 * MIB, .memory_nvml = 81920 * MIB, .context_bytes = 415 * MIB,
	  .cc_major = 8, .cc_minor = 0, .sms = 108, .max_threads_per_sm = 2048,
	  .max_blocks_per_sm = 32, .regs_per_sm = 65536, .smem_per_sm = 167936,
	  .smem_per_block_optin = 166912, .l2_bytes = 40 * MIB, .clock_khz = 1410000,
	  .mem_clock_khz = 1593000, .bus_bits = 5120, .mem_mbps = 2039000, .pcie_mbps = 25000,
	  .pcie_gen = 4, .pcie_width = 16, .pci_device_id = 0x20b210de,
	  .pci_subsystem_id = 0x146310de, .power_limit_mw = 400000, .nvlinks = 12,
	  .mig_capable = 1, .async_engines = 3, .ecc = 1 },
	{ .key = "h100-80g", .name = "NVIDIA H100 80GB HBM3", .brand = "NVIDIA",
	  .memory = 81004 * MIB, .memory_nvml = 81559 * MIB, .context_bytes = 505 * MIB,
	  .cc_major = 9, .cc_minor = 0, .sms = 132, .max_threads_per_sm = 2048,
	  .max_blocks_per_sm = 32, .regs_per_sm = 65536, .smem_per_sm = 233472,
	  .smem_per_block_optin = 232448, .l2_bytes = 50 * MIB, .clock_khz = 1980000,
	  .mem_clock_khz = 2619000, .bus_bits = 5120, .mem_mbps = 3352000, .pcie_mbps = 50000,
	  .pcie_gen = 5, .pcie_width = 16, .pci_device_id = 0x233010de,
	  .pci_subsystem_id = 0x16c110de, .power_limit_mw = 700000, .nvlinks = 18,
	  .mig_capable = 1, .async_engines = 3, .ecc = 1 },
	{ .key = "h200-141g", .name = "NVIDIA H200", .brand = "NVIDIA",
	  .memory = 143164 * MIB, .memory_nvml = 143771 * MIB, .context_bytes = 520 * MIB,
	  .cc_major = 9, .cc_minor = 0, .sms = 132, .max_threads_per_sm = 2048,
	  .max_blocks_per_sm = 32, .regs_per_sm = 65536, .smem_per_sm = 233472,
	  .smem_per_block_optin = 232448, .l2_bytes = 60 * MIB, .clock_khz = 1980000,
	  .mem_clock_khz = 3201000, .bus_bits = 6144, .mem_mbps = 4800000, .pcie_mbps = 50000,
	  .pcie_gen = 5, .pcie_width = 16, .pci_device_id = 0x233510de,
	  .pci_subsystem_id = 0x18be10de, .power_limit_mw = 700000, .nvlinks = 18,
	  .mig_capable = 1, .async_engines = 3, .ecc = 1 },
};

const struct sim_model *sim_model_at(int i)
{
	return i >= 0 && i < (int)(sizeof(models) / sizeof(models[0])) ? &models[i] : NULL;
}

const struct sim_model *sim_model_find(const char *key)
{
	const struct sim_model *m;
	for (int i = 0; (m = sim_model_at(i)); i++)
		if (!strcmp(m->key, key))
			return m;
	return NULL;
}
