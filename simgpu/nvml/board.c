#include "board.h"
#include <stddef.h>
#include <string.h>

#define MIB (1024ull * 1024)

/* Public figures: data sheets, and what nvidia-smi prints on such boards. */
static const struct board boards[] = {
	{ .model = "t4", .part_number = "900-2G183-0000-001", .vbios = "90.04.38.00.03",
	  .inforom = "G183.0200.00.02", .power_min_mw = 60000, .power_idle_mw = 10000,
	  .clock_idle_mhz = 300, .clock_app_mhz = 585, .clock_video_mhz = 1470, .temp_idle = 34,
	  .temp_busy = 68, .temp_shutdown = 96, .temp_slowdown = 93, .temp_max = 85,
	  .bar1 = 256 * MIB, .cores_per_sm = 64, .engines_enc = 1, .engines_dec = 2, .gsp = true },
	{ .model = "v100-16g", .part_number = "900-2G503-0000-000", .vbios = "88.00.4F.00.09",
	  .inforom = "G503.0201.00.03", .power_min_mw = 150000, .power_idle_mw = 42000,
	  .clock_idle_mhz = 135, .clock_app_mhz = 1312, .clock_video_mhz = 1372, .temp_idle = 33,
	  .temp_busy = 62, .temp_shutdown = 90, .temp_slowdown = 87, .temp_max = 83,
	  .temp_mem_max = 85, .nvlink_version = 2, .nvlink_mbps = 25781, .bar1 = 16384 * MIB,
	  .cores_per_sm = 64, .engines_enc = 3, .engines_dec = 1 },
	{ .model = "v100-32g", .part_number = "900-2G503-0010-000", .vbios = "88.00.43.00.03",
	  .inforom = "G503.0203.00.04", .power_min_mw = 150000, .power_idle_mw = 43000,
	  .clock_idle_mhz = 135, .clock_app_mhz = 1290, .clock_video_mhz = 1372, .temp_idle = 33,
	  .temp_busy = 62, .temp_shutdown = 90, .temp_slowdown = 87, .temp_max = 83,
	  .temp_mem_max = 85, .nvlink_version = 2, .nvlink_mbps = 25781, .bar1 = 32768 * MIB,
	  .cores_per_sm = 64, .engines_enc = 3, .engines_dec = 1 },
	{ .model = "a100-40g", .part_number = "692-2G506-0200-002", .vbios = "92.00.19.00.01",
	  .inforom = "G506.0200.00.04", .power_min_mw = 100000, .power_idle_mw = 52000,
	  .clock_idle_mhz = 210, .clock_app_mhz = 1095, .clock_video_mhz = 1290, .temp_idle = 32,
	  .temp_busy = 63, .temp_shutdown = 92, .temp_slowdown = 89, .temp_max = 85,
	  .temp_mem_max = 95, .nvlink_version = 3, .nvlink_mbps = 25000, .bar1 = 65536 * MIB,
	  .cores_per_sm = 64, .engines_dec = 5, .row_remap = true, .gsp = true },
	{ .model = "a100-80g", .part_number = "692-2G506-0212-002", .vbios = "92.00.45.00.03",
	  .inforom = "G506.0212.00.02", .power_min_mw = 100000, .power_idle_mw = 60000,
	  .clock_idle_mhz = 210, .clock_app_mhz = 1275, .clock_video_mhz = 1290, .temp_idle = 33,
	  .temp_busy = 65, .temp_shutdown = 92, .temp_slowdown = 89, .temp_max = 85,
	  .temp_mem_max = 95, .nvlink_version = 3, .nvlink_mbps = 25000, .bar1 = 131072 * MIB,
	  .cores_per_sm = 64, .engines_dec = 5, .row_remap = true, .gsp = true },
	{ .model = "h100-80g", .part_number = "692-2G520-0200-000", .vbios = "96.00.30.00.01",
	  .inforom = "G520.0200.00.05", .power_min_mw = 200000, .power_idle_mw = 70000,
	  .clock_idle_mhz = 345, .clock_app_mhz = 1980, .clock_video_mhz = 1545, .temp_idle = 31,
	  .temp_busy = 61, .temp_shutdown = 92, .temp_slowdown = 89, .temp_max = 87,
	  .temp_mem_max = 95, .nvlink_version = 4, .nvlink_mbps = 26562, .bar1 = 131072 * MIB,
	  .cores_per_sm = 128, .engines_dec = 7, .row_remap = true, .gsp = true },
	{ .model = "h200-141g", .part_number = "692-2G520-0280-501", .vbios = "96.00.A5.00.01",
	  .inforom = "G520.0280.00.01", .power_min_mw = 200000, .power_idle_mw = 75000,
	  .clock_idle_mhz = 345, .clock_app_mhz = 1980, .clock_video_mhz = 1545, .temp_idle = 30,
	  .temp_busy = 62, .temp_shutdown = 92, .temp_slowdown = 89, .temp_max = 87,
	  .temp_mem_max = 95, .nvlink_version = 4, .nvlink_mbps = 26562, .bar1 = 262144 * MIB,
	  .cores_per_sm = 128, .engines_dec = 7, .row_remap = true, .gsp = true },
};

/* For a model that is not in the table. */
static const struct board plain = {
	.model = "", .part_number = "900-00000-0000-000", .vbios = "00.00.00.00.00",
	.inforom = "0000.0000.00.00", .power_min_mw = 100000, .power_idle_mw = 30000,
	.clock_idle_mhz = 210, .clock_app_mhz = 1500, .clock_video_mhz = 1200, .temp_idle = 32,
	.temp_busy = 60, .temp_shutdown = 95, .temp_slowdown = 90, .temp_max = 85,
	.bar1 = 256 * MIB, .cores_per_sm = 64, .engines_dec = 1,
};

const struct board *board_of(const char *model)
{
	for (size_t i = 0; i < sizeof(boards) / sizeof(boards[0]); i++)
		if (strcmp(boards[i].model, model) == 0)
			return &boards[i];
	return &plain;
}
