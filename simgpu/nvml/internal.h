/* What the files of the simulated NVML share.
 *
 * Every exported function begins with one of the ENTER macros: it traces the call, checks that NVML
 * is initialised and that the handle is one of ours, and finds the GPU. Figures are read anew from
 * the machine's state at each call. All functions are safe for concurrent use. */
#ifndef TRANCHE_SIM_NVML_INTERNAL_H
#define TRANCHE_SIM_NVML_INTERNAL_H
#pragma GCC visibility push(default)
#include "nvml_abi.h"
nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *id);
nvmlReturn_t nvmlGetBlacklistDeviceCount(unsigned int *deviceCount);
nvmlReturn_t nvmlGetBlacklistDeviceInfoByIndex(unsigned int index, nvmlExcludedDeviceInfo_t *info);
#pragma GCC visibility pop
#include "../state.h"
#include "board.h"

struct gpu {
	unsigned index;
	struct sim_gpu *s;
	const struct sim_model *m;
	const struct board *b;
};

/* --- init.c ----------------------------------------------------------------------------------- */

/* The GPU of an index; false when there is none. Needs the machine to be open. */
bool nvml_gpu(unsigned index, struct gpu *g);
/* Handles: one static object a GPU, so that a handle stays good for the life of the process. */
nvmlDevice_t nvml_handle(unsigned index);
/* NVML_SUCCESS between nvmlInit and the matching nvmlShutdown, else NVML_ERROR_UNINITIALIZED. */
nvmlReturn_t nvml_enter(const char *func);
/* The same for a call about one GPU. A lost GPU gives NVML_ERROR_GPU_IS_LOST unless identity is
 * set: what NVML learned when it attached (name, UUID, bus, index) it can still tell. */
nvmlReturn_t nvml_enter_gpu(const char *func, nvmlDevice_t dev, bool identity, struct gpu *g);

#define ENTER()                                                                                    \
	do {                                                                                       \
		nvmlReturn_t enter_ = nvml_enter(__func__);                                        \
		if (enter_ != NVML_SUCCESS)                                                        \
			return enter_;                                                             \
	} while (0)
#define ENTER_AS(dev, g, identity)                                                                 \
	struct gpu g;                                                                              \
	do {                                                                                       \
		nvmlReturn_t enter_ = nvml_enter_gpu(__func__, dev, identity, &g);                 \
		if (enter_ != NVML_SUCCESS)                                                        \
			return enter_;                                                             \
	} while (0)
#define ENTER_GPU(dev, g) ENTER_AS(dev, g, false)
#define ENTER_IDENTITY(dev, g) ENTER_AS(dev, g, true)
/* What the caller must have got right. */
#define NEED(cond)                                                                                 \
	do {                                                                                       \
		if (!(cond))                                                                       \
			return NVML_ERROR_INVALID_ARGUMENT;                                        \
	} while (0)

/* Copies s with its NUL into a caller's buffer, INSUFFICIENT_SIZE when it does not fit. */
nvmlReturn_t nvml_put_string(char *buf, unsigned len, const char *s);

/* --- memory.c --------------------------------------------------------------------------------- */

struct nvml_memory {
	uint64_t total, reserved, used, free; /* used: by processes, reserved: by the driver */
};
void nvml_memory(const struct gpu *g, struct nvml_memory *out);

/* One process with a context on a GPU. */
struct nvml_process {
	uint32_t pid, slot;
	uint64_t memory, peak; /* bytes on this GPU, contexts included */
	uint64_t start_us;     /* first context, CLOCK_REALTIME */
};
/* Fills at most max entries, returns how many there are. Dead processes are reaped first. */
unsigned nvml_processes(const struct gpu *g, struct nvml_process *out, unsigned max);
/* The program of a process as it was called; empty when it is gone or not ours to see. */
void nvml_process_name(uint32_t pid, char *name, size_t len);

/* --- utilisation.c ---------------------------------------------------------------------------- */

/* Percent of the last sampling period that the GPU was busy. */
unsigned nvml_busy_percent(const struct gpu *g);

struct nvml_sample {
	uint64_t time_us; /* end of the period, CLOCK_REALTIME */
	uint32_t pid, percent;
};
/* The newest sample of each process since a time, into out[SIM_MAX_PROCS]; how many there are. A
 * process that did nothing has none. */
unsigned nvml_process_samples(const struct gpu *g, uint64_t since_us, struct nvml_sample *out);

/* --- power.c ---------------------------------------------------------------------------------- */

/* mW, between idle and the limit in proportion to use. */
unsigned nvml_power_mw(const struct gpu *g);
unsigned nvml_temperature(const struct gpu *g); /* degrees C */
/* True when some process has a context: clocks and performance state are up. */
bool nvml_in_use(const struct gpu *g);
unsigned nvml_clock_max_mhz(const struct gpu *g, nvmlClockType_t type); /* 0: no such clock */

/* --- topology.c ------------------------------------------------------------------------------- */

enum nvml_peer { NVML_PEER_NONE, NVML_PEER_GPU, NVML_PEER_SWITCH };
/* What is at the other end of a GPU's NVLink `link`: *peer is the GPU's or the switch's number. */
enum nvml_peer nvml_link_peer(const struct gpu *g, unsigned link, unsigned *peer);
unsigned nvml_links_up(const struct gpu *g);

/* --- device.c --------------------------------------------------------------------------------- */

void nvml_fill_pci(const struct gpu *g, nvmlPciInfo_t *pci);
#endif
