/* What NVML reports of a board and CUDA does not, so that struct sim_model lacks it: identity,
 * power, clocks, temperatures, kind of NVLink. */
#ifndef TRANCHE_SIM_NVML_BOARD_H
#define TRANCHE_SIM_NVML_BOARD_H
#include <stdbool.h>
#include <stdint.h>

struct board {
	const char *model; /* key of the spec: "a100-80g" */
	const char *part_number, *vbios, *inforom;
	unsigned power_min_mw, power_idle_mw;
	unsigned clock_idle_mhz, clock_app_mhz, clock_video_mhz;
	unsigned temp_idle, temp_busy, temp_shutdown, temp_slowdown, temp_max; /* degrees C */
	unsigned temp_mem_max;						       /* 0: no sensor */
	unsigned nvlink_version, nvlink_mbps; /* MB/s of one link */
	uint64_t bar1;			      /* bytes */
	unsigned cores_per_sm;
	unsigned engines_enc, engines_dec;
	bool row_remap; /* remaps rows of faulty memory; older boards retire pages */
	bool gsp;	/* runs the GSP firmware */
};

/* The board of a model, or a plain one for a model that this table lacks. */
const struct board *board_of(const char *model);
#endif
