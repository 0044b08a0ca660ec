/* The usage ledger's protocol: recoverable counters without locks between processes.
 * Layout and invariants: tranche_abi.h. */
#ifndef TRANCHE_LEDGER_H
#define TRANCHE_LEDGER_H
#include <stdbool.h>
#include <stdint.h>
#include "tranche_abi.h"

/* Bytes charged to the tenant on this device, with the measured overhead; never negative. */
uint64_t tr_account_bytes(const struct tr_ledger *l, int dev);
/* Bytes that the slot's process contributes to it. */
uint64_t tr_slot_bytes(const struct tr_ledger *l, int slot, int dev);

/* Adds `units` (of TR_UNIT; negative: gives back) to the device's account on behalf of `slot`,
 * atomically and recoverably. When units > 0 and the sum with the overhead would pass
 * limit_bytes, nothing changes and the result is false. limit_bytes UINT64_MAX: no limit.
 * The caller is the only one that acts for this slot: it holds the process's lock, or the slot's
 * file lock for a process that is gone. */
bool tr_ledger_add(struct tr_ledger *l, int slot, int dev, int64_t units, uint64_t limit_bytes);

/* Takes a slot for the calling process: lock on the slot's byte through ledger_fd (a descriptor
 * of its own open file description), whatever a dead predecessor left is given back first.
 * Returns the slot, or -1 when all are held by living processes. */
int tr_ledger_claim(struct tr_ledger *l, int ledger_fd);

/* Gives back what processes held that are gone (zombie or no more, and nobody holds their file
 * lock). Only processes of the caller's PID namespace can be judged. Returns the number of slots
 * freed. `self` is the caller's own slot, or -1. */
int tr_ledger_reclaim(struct tr_ledger *l, int ledger_fd, int self);

/* Lowers the orphans (slot 0) to what living processes still hold through imports. */
void tr_ledger_settle_orphans(struct tr_ledger *l, int ledger_fd);

/* Moves bytes that outlive their creator from `slot` to the orphans, as far as living processes
 * hold imports on the device. The rest is given back. False: nothing was done, another process
 * stands still while it changes the orphans. */
bool tr_ledger_orphan(struct tr_ledger *l, int ledger_fd, int slot, int dev, uint64_t bytes);

/* Certain that the slot's process is a zombie or no more; in doubt, and for a process of another
 * PID namespace than own_pidns (the caller's, by tr_self), false. */
bool tr_slot_gone(const struct tr_ledger *l, int slot, uint64_t own_pidns);

/* Identity of the calling process as slots record it. */
void tr_self(uint32_t *pid, uint64_t *starttime, uint64_t *pidns);
#endif
