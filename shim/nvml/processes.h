/* The list of running processes as the tenant sees it. */
#ifndef TRANCHE_NVML_PROCESSES_H
#define TRANCHE_NVML_PROCESSES_H
#include "nvml_new.h"

/* The numbers are the modes of nvmlDeviceGetRunningProcessDetailList. */
enum kind { COMPUTE, GRAPHICS, MPS };

/* One process in a form that every version of the lists can be written from. */
struct entry {
	unsigned pid;
	unsigned gpu_instance, compute_instance; /* NO_INSTANCE: not known, or no MIG */
	unsigned long long bytes;
};
#define NO_INSTANCE 0xffffffffu

struct entries {
	unsigned n;
	struct entry *list;
};

/* The list of one kind. e->list is the caller's to free, whatever is returned. */
nvmlReturn_t tr_slice_list(enum kind kind, nvmlDevice_t device, struct entries *e);

/* Is there room for n entries? *count says how much there is, and then how much is needed. */
nvmlReturn_t tr_room_for(unsigned n, unsigned *count, const void *infos);
#endif
