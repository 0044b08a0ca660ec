/* What NVML reports of a model that CUDA does not: identity of the board, power, clocks, links. */
#ifndef TRANCHE_SIM_NVML_BOARD_H
#define TRANCHE_SIM_NVML_BOARD_H
#include <stdbool.h>
#include <stdint.h>

struct board {
	const char *model; /* key of the spec: "a100-80g" */
	unsigned brand;	   /* nvmlBrandType_t */
	unsigned arch;	   /* NVML_DEVICE_ARCH_* */
	unsigned pci_device, pci_subsystem;
	const char *part_number, *vbios, *inforom;
	unsigned power_min_mw, power_max_mw, power_default_mw, power_idle_mw;
	unsigned clock_idle_mhz, clock_max_mhz, clock_app_mhz, clock_video_mhz, clock_mem_mhz;
	unsigned temp_idle, temp_busy, temp_shutdown, temp_slowdown, temp_max; /* degrees C */
	unsigned temp_mem_max;						       /* 0: no sensor */
	unsigned pcie_gen, pcie_width;
	unsigned nvlinks, nvlink_version, nvlink_mbps; /* links of the board; MB/s of one */
	uint64_t bar1;				       /* bytes */
	unsigned bus_width;			       /* of memory, bits */
	unsigned cores_per_sm;
	unsigned engines_enc, engines_dec;
	bool mig, row_remap, gsp;
};

/* The board of a model, or a plain one for a model that this table lacks. */
const struct board *board_of(const char *model);
#endif
