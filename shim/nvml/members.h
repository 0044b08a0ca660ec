/* The slice's processes, from its ledger. */
#ifndef TRANCHE_NVML_MEMBERS_H
#define TRANCHE_NVML_MEMBERS_H
#include <stdbool.h>
#include <stdint.h>
#include "tranche_abi.h"

struct tr_member {
	unsigned pid;	   /* as the caller's PID namespace has it, as far as that is known */
	unsigned host_pid; /* as the supervisor's NVML has it, 0: unknown */
	bool same_ns;	   /* pid is exact: the process is in the caller's PID namespace */
	uint64_t bytes;	   /* what it contributes to the device asked for */
};

/* A snapshot of the living members of the slice. */
struct tr_members {
	int n;
	struct tr_member list[TR_MAX_PROCS];
};

/* NULL when there is no memory for it. The caller frees it. `dev` is an index of the slice. */
struct tr_members *tr_members(int dev);

/* The member that NVML means by this process number, or NULL. NVML counts in the host's PID
 * namespace or, on some systems, in the caller's. */
const struct tr_member *tr_member_find(const struct tr_members *m, unsigned nvml_pid);
/* The member with this number as the tenant sees it, or NULL. */
const struct tr_member *tr_member_by_pid(const struct tr_members *m, unsigned pid);
#endif
