/* What the kernels record on the GPU themselves. */
#ifndef GPULOAD_PROBE_H
#define GPULOAD_PROBE_H
#include <stdbool.h>
#include "driver.h"
#include "ptx.h"

struct probe {
	uint64_t word[PROBE_WORDS];
};

/* Zeroed device memory for tranche_probe. */
CUdeviceptr probe_start(void);
/* What is recorded there. All zero where the driver runs no kernels (the simulated one). */
void probe_read(CUdeviceptr at, struct probe *out);
/* Adds another process's. */
void probe_add(struct probe *p, const struct probe *other);
void probe_print(const struct probe *p);
#endif
