/* The slice that this process lives in: its limits page and its ledger, mapped once.
 *
 * Opened by the first call that needs it, at most once in a process, and again in a forked child
 * that goes on to use CUDA. Never waits for another process. Safe for concurrent use. */
#ifndef TRANCHE_SLICE_H
#define TRANCHE_SLICE_H
#include <stdbool.h>
#include <stdint.h>
#include "tranche_abi.h"

/* Opens the slice. Returns true when limits and ledger are mapped and this process holds a slot
 * (want_slot) or does not need one; false, with one line on stderr the first time, when a file is
 * missing or damaged: the caller then fails closed. Cheap when already open. */
bool tr_slice_open(bool want_slot);

/* Valid after tr_slice_open returned true. */
const struct tr_limits *tr_limits(void);
const struct tr_leases *tr_leases(void);
struct tr_ledger *tr_ledger(void);
int tr_slot_index(void); /* -1: no slot */
bool tr_ledger_shared(void); /* false: a private one, of a slice that fails open */
int tr_ledger_fd(void);	 /* the descriptor with our slot's file lock */

/* A consistent copy of one device's limits (seqlock on generation; bounded retries, then the last
 * copy read). */
void tr_limits_read_dev(int i, struct tr_limits_dev *out);
int tr_limits_devices(void);
/* Index of the device with this UUID ("GPU-..."), -1 if the slice does not have it. */
int tr_limits_find(const char *uuid);

/* CLOCK_MONOTONIC of the initial time namespace, ns. */
int64_t tr_now_ns(void);
#endif
