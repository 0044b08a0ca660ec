/* Between the virtual machine and one process's copy of the shipped meter. */
#ifndef SHARE_PROCESS_H
#define SHARE_PROCESS_H
#include <stdbool.h>
#include <stdint.h>
#include "real.h"
#include "tranche_abi.h"

/* What the copy is given. */
struct share_host {
	const int64_t *now;
	const struct tr_limits *limits;
	const struct tr_leases *leases;
	struct tr_ledger *ledger;
	int slot, devices;
	int (*current_device)(void);
	void (*sleep_until)(int64_t at);
	/* futex(2): wait returns false at the deadline or when the word has another value. */
	bool (*wait)(const uint32_t *word, uint32_t value, int64_t deadline, bool *changed);
	int (*wake)(const uint32_t *word, int n);
	int (*thread)(void *(*body)(void *), void *arg);
};

/* What it gives: its hooks, and where the meter keeps the calling thread. */
struct share_entry {
	struct tr_real *real;
	void **self;
	void (*arm)(void);
	void (*rearm)(void);
	__typeof__(&cuLaunchKernel) launch;
	__typeof__(&cuGraphLaunch) graph;
	__typeof__(&cuStreamSynchronize) sync;
	__typeof__(&cuStreamBeginCapture_v2) begin;
	__typeof__(&cuStreamEndCapture) end;
	__typeof__(&cuGraphExecDestroy) forget;
};

#define SHARE_PROCESS_SYMBOL "share_process"
typedef void share_process_fn(const struct share_host *host, struct share_entry *out);
#endif
