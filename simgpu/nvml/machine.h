/* What the simulated NVML knows about the simulated machine: a read-only view of its state file,
 * in NVML's terms. The only file here that knows the layout of the state is machine.c.
 *
 * Everything is read anew at each call and without waiting for another process; figures of one
 * call may therefore be some microseconds apart, as they are with the real driver. */
#ifndef TRANCHE_SIM_NVML_MACHINE_H
#define TRANCHE_SIM_NVML_MACHINE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "board.h"

enum { MACHINE_GPUS = 32, MACHINE_PROCS = 1024 };

/* One GPU now. */
struct gpu {
	unsigned index;
	const struct board *board;
	char name[96];
	char uuid[48]; /* "GPU-..." */
	unsigned domain, bus, device;
	unsigned sm_count;
	unsigned cc_major, cc_minor;
	unsigned numa_node;
	uint64_t memory_total;	  /* what CUDA can allocate and what the driver keeps, bytes */
	uint64_t memory_reserved; /* the driver's own part of it */
	uint64_t memory_used;	  /* held by processes, contexts included */
	bool lost;
	bool hide_processes; /* spec: no per-process figures, as under MIG and vGPU */
};

/* One process with a context on a GPU. */
struct gpu_process {
	uint32_t pid;
	uint64_t memory;	/* bytes on this GPU, contexts included */
	uint64_t start_ns;	/* first context, CLOCK_REALTIME */
	uint64_t busy_ns;	/* GPU time so far */
	uint64_t max_memory;	/* highest so far */
};

/* One sample of how busy a GPU, or a process on it, was in the period that ends at time_us. */
struct gpu_sample {
	uint64_t time_us; /* CLOCK_REALTIME */
	uint32_t pid;	  /* 0: the GPU as a whole */
	unsigned percent; /* of the sampling period */
};

/* Opens the machine; repeated calls are free. False when there is none. */
bool machine_open(void);
const char *machine_driver_version(void);
int machine_cuda_version(void); /* 12040 for 12.4 */
unsigned machine_gpus(void);
/* False when the index is out of range. */
bool machine_gpu(unsigned index, struct gpu *out);
/* Fills at most max entries, returns how many processes there are. */
unsigned machine_processes(unsigned index, struct gpu_process *out, unsigned max);

/* Samples of the GPU (or, with by_process, of each process that was busy) newer than since_us,
 * oldest first. Sampling lags: a sample is there one period (machine_sample_period_us) after the
 * work it counts began. Fills at most max, returns how many there are. */
unsigned machine_samples(unsigned index, bool by_process, uint64_t since_us,
			 struct gpu_sample *out, unsigned max);
unsigned machine_sample_period_us(void);

/* How two GPUs are connected: the number of NVLink links between them, and the nvmlGpuTopologyLevel
 * of their common PCIe ancestor. */
void machine_link(unsigned a, unsigned b, unsigned *nvlinks, unsigned *level);

/* XID errors of a GPU so far, and the code of the n-th (from 0). */
uint64_t machine_xid_count(unsigned index);
uint64_t machine_xid(unsigned index, uint64_t n);
#endif
