/* This process's part in the memory ledger: charge before the driver call, give back after.
 *
 * Amounts are in units of TR_UNIT (4 KiB), devices are indices in the slice. Safe for concurrent
 * use. What the driver hands out is remembered by address or handle, so that giving back costs the
 * same whatever else is alive. */
#ifndef TRANCHE_ACCOUNT_H
#define TRANCHE_ACCOUNT_H
#include <stdbool.h>
#include <stdint.h>
#include "lock.h"
#include "real.h"
#include "table.h"
#include "tranche_abi.h"

/* The driver backs plain memory with physical pages of this size; small allocations share one. */
#define TR_BLOCK (2ull << 20)

enum tr_kind {
	TR_PLAIN,    /* owns its blocks */
	TR_SHARED,   /* plain memory in blocks that others use too; charged through the blocks */
	TR_ARRAY,
	TR_MIPMAP,
	TR_POOLED,   /* stream-ordered: charged through its pool (aux) */
	TR_IPC,	     /* opened from another process: not charged; units: times that it was opened */
	TR_EXTERNAL,
};

#define TR_ENTRY_EXPORTED 1u

/* Guards the table of allocations and all operations of this process's slot. Never held across a
 * driver call. */
extern struct tr_lock tr_account_lock;

uint32_t tr_units(uint64_t bytes);	 /* rounded up to TR_UNIT */
uint64_t tr_round_up(uint64_t n, uint64_t to);

/* Charges, or explains and returns false: before it refuses it gives back what pools and graph
 * memory hold unused and what dead processes of the tenant left. Takes the lock. */
bool tr_charge(int dev, uint32_t units);
void tr_uncharge(int dev, uint32_t units);
/* Charges past the limit if need be: the driver has already taken it. */
void tr_charge_taken(int dev, uint32_t units);

/* Gives back what dead processes of the tenant left. */
void tr_reclaim(void);

/* Remembers an allocation. False (and nothing kept) when the table cannot grow. Takes the lock. */
bool tr_remember(const struct tr_entry *e);
/* Forgets it, before the driver call that frees it; tr_remember puts it back if that fails. */
bool tr_forget(uint64_t key, struct tr_entry *out);

/* Plain memory that the driver returned for `bytes`, with `charged` units reserved for it: settles
 * the charge to the blocks that it touches and remembers it. */
bool tr_plain_got(CUdeviceptr ptr, uint64_t bytes, int dev, uint32_t charged);
/* Gives a forgotten entry's charge back after the driver freed it. */
void tr_entry_freed(const struct tr_entry *e);
/* The end of a hook that frees: forget first, free, then give back, because between the driver's free
 * and ours another thread may be handed the same address. `r` is what the driver said, `known`
 * what tr_forget said: an entry that was not freed is remembered again. Returns r. */
CUresult tr_freed(CUresult r, bool known, const struct tr_entry *e);

/* Everything that belongs to a context that the driver has destroyed. */
void tr_context_freed(CUcontext ctx);

/* Marks a plain allocation as held by other processes too (IPC). */
void tr_entry_exported(uint64_t key);
/* Bytes that this process holds through imports, on a device: + or -. */
void tr_imported(int dev, int64_t bytes);
/* Bytes of this process's charge that others may hold: + or -. */
void tr_exported(int dev, int64_t bytes);
/* Bytes that processes of the tenant have exported on the device or left to importers. */
uint64_t tr_tenant_exports(int dev);

/* Around an import whose size is not known before: as long as it is under way it counts for all
 * that it could be, so that the memory stays charged if its creator dies meanwhile. */
uint64_t tr_import_begin(int dev);
void tr_import_end(int dev, uint64_t guess);
/* Memory of another process opened at an address, for the current context; the driver gives the
 * same address each time. */
void tr_import_opened(CUdeviceptr ptr, uint64_t bytes, int dev);
/* One opening less; true with the entry when it was the last. Before the driver call. */
bool tr_import_close(CUdeviceptr ptr, struct tr_entry *out);
/* As tr_uncharge, for memory that was exported: stays with the tenant while importers hold it. */
void tr_uncharge_exported(int dev, uint32_t units);

void tr_account_after_fork(void);

/* The device of the current context if this is a slice device, -1 otherwise (the hook then lets
 * the driver answer, which without a context is an error). Opens the slice. */
int tr_enter_current(CUresult *error);
#endif
