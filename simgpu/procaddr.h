/* The table behind cuGetProcAddress, made from procaddress.tsv (its head says how to read it). */
#ifndef SIMGPU_PROCADDR_H
#define SIMGPU_PROCADDR_H

struct sim_proc_row {
	const char *name;     /* rows are sorted by name */
	unsigned min_version; /* CUDA version, 12040 */
	int flags;	      /* -1: any, 0: default or legacy, 2: per-thread default stream */
	void (*symbol)(void);
};
extern const struct sim_proc_row sim_proc_rows[];

enum sim_proc_status { SIM_PROC_FOUND, SIM_PROC_NO_SYMBOL, SIM_PROC_NO_VERSION };
/* Also in the null driver. */
void (*sim_proc_find(const char *name, unsigned version, unsigned flags,
		     enum sim_proc_status *status))(void);
#endif
