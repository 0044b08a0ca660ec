#include "compat.h"
#define _GNU_SOURCE
#include "account.h"
#include <string.h>
#include "device.h"
#include "graphmem.h"
#include "ledger.h"
#include "pool.h"
#include "slice.h"
#include "trace.h"

struct tr_lock tr_account_lock;
static struct tr_table allocations;
static struct tr_table blocks;	    /* key: block_of(), aux: allocations in it */
static struct tr_lock reclaim_lock; /* file locks do not tell threads apart */

uint64_t tr_round_up(uint64_t n, uint64_t to)
{
	return n > UINT64_MAX - to ? UINT64_MAX - to + 1 : (n + to - 1) / to * to;
}

uint32_t tr_units(uint64_t bytes)
{
	uint64_t u = tr_round_up(bytes, TR_UNIT) / TR_UNIT;
	return u > UINT32_MAX ? UINT32_MAX : (uint32_t)u;
}

/* The caller holds tr_account_lock. */
static bool add(int dev, int64_t units, uint64_t limit)
{
	return tr_ledger_add(tr_ledger(), tr_slot_index(), dev, units, limit);
}

static bool try_charge(int dev, uint32_t units)
{
	tr_lock(&tr_account_lock);
	bool ok = add(dev, units, tr_memory_limit(dev));
	tr_unlock(&tr_account_lock);
	return ok;
}

void tr_reclaim(void)
{
	tr_lock(&reclaim_lock);
	int freed = tr_ledger_reclaim(tr_ledger(), tr_ledger_fd(), tr_slot_index());
	tr_ledger_settle_orphans(tr_ledger(), tr_ledger_fd());
	tr_unlock(&reclaim_lock);
	if (freed > 0)
		TR_TRACE("gave back what %d dead processes held", freed);
}

static void refuse(int dev, uint32_t units)
{
	static bool said;
	struct tr_account *a = &tr_ledger()->account[dev];
	__atomic_fetch_add(&a->allocs_refused, 1, __ATOMIC_RELAXED);
	unsigned long long limit = tr_memory_limit(dev) >> 20,
			   used = tr_account_bytes(tr_ledger(), dev) >> 20,
			   asked = (units * TR_UNIT + (1 << 20) - 1) >> 20;
	TR_TRACE("refused %llu MiB on device %d: %llu of %llu MiB used", asked, dev, used, limit);
	if (__atomic_exchange_n(&said, true, __ATOMIC_RELAXED))
		return;
	tr_complain("memory limit reached: %llu MiB asked, %llu of %llu MiB in use by this slice "
		    "(said once per process)",
		    asked, used, limit);
}

bool tr_charge(int dev, uint32_t units)
{
	if (units == 0 || try_charge(dev, units))
		return true;
	tr_pools_trim(dev);
	tr_graphmem_trim(dev);
	if (try_charge(dev, units))
		return true;
	tr_reclaim();
	if (try_charge(dev, units))
		return true;
	refuse(dev, units);
	return false;
}

void tr_uncharge(int dev, uint32_t units)
{
	if (units == 0)
		return;
	tr_lock(&tr_account_lock);
	add(dev, -(int64_t)units, UINT64_MAX);
	tr_unlock(&tr_account_lock);
}

void tr_charge_taken(int dev, uint32_t units)
{
	if (units == 0)
		return;
	tr_lock(&tr_account_lock);
	add(dev, units, UINT64_MAX);
	tr_unlock(&tr_account_lock);
}

bool tr_remember(const struct tr_entry *e)
{
	tr_lock(&tr_account_lock);
	bool ok = tr_table_put(&allocations, e);
	tr_unlock(&tr_account_lock);
	return ok;
}

bool tr_forget(uint64_t key, struct tr_entry *out)
{
	tr_lock(&tr_account_lock);
	bool ok = tr_table_take(&allocations, key, out);
	tr_unlock(&tr_account_lock);
	return ok;
}

/* --- plain memory, by the blocks that it touches ------------------------------------------- */

static uint64_t block_of(uint64_t addr)
{
	return (addr & ~(TR_BLOCK - 1)) | 1; /* keys are never 0 */
}

/* One more allocation in a block; true if the block is new. */
static bool block_enter(uint64_t block, bool *failed)
{
	struct tr_entry *b = tr_table_get(&blocks, block);
	if (b != NULL) {
		b->aux++;
		return false;
	}
	struct tr_entry fresh = {.key = block, .aux = 1};
	*failed = !tr_table_put(&blocks, &fresh) || *failed;
	return true;
}

/* One less; true if it was the last. */
static bool block_leave(uint64_t block, bool *exported)
{
	struct tr_entry *b = tr_table_get(&blocks, block), out;
	if (b == NULL || --b->aux > 0)
		return false;
	*exported = (b->flags & TR_ENTRY_EXPORTED) != 0;
	return tr_table_take(&blocks, block, &out);
}

bool tr_plain_got(CUdeviceptr ptr, uint64_t bytes, int dev, uint32_t charged)
{
	CUcontext ctx = NULL;
	REAL(cuCtxGetCurrent)(&ctx);
	struct tr_entry e = {.key = ptr,
			     .aux = bytes,
			     .owner = (uint64_t)(uintptr_t)ctx,
			     .units = charged,
			     .dev = (uint8_t)dev};
	bool failed = false;
	tr_lock(&tr_account_lock);
	if (ptr % TR_BLOCK == 0 && bytes > TR_BLOCK / 2) {
		e.kind = TR_PLAIN;
	} else {
		uint64_t first = block_of(ptr), last = block_of(ptr + bytes - 1);
		uint32_t fresh = 0;
		for (uint64_t b = first; b <= last; b += TR_BLOCK)
			fresh += block_enter(b, &failed);
		e.kind = TR_SHARED;
		e.units = 0;
		int64_t settle = (int64_t)fresh * (int64_t)(TR_BLOCK / TR_UNIT) - charged;
		if (settle != 0)
			add(dev, settle, UINT64_MAX);
	}
	failed = !tr_table_put(&allocations, &e) || failed;
	tr_unlock(&tr_account_lock);
	return !failed;
}

/* Units of the blocks that nothing is in any more; *exported: of those that others may hold. */
static uint32_t shared_leave(const struct tr_entry *e, uint32_t *exported)
{
	uint64_t first = block_of(e->key), last = block_of(e->key + e->aux - 1);
	uint32_t gone = 0;
	for (uint64_t b = first; b <= last; b += TR_BLOCK) {
		bool others = false;
		if (block_leave(b, &others))
			*(others ? exported : &gone) += (uint32_t)(TR_BLOCK / TR_UNIT);
	}
	return gone;
}

void tr_entry_freed(const struct tr_entry *e)
{
	uint32_t units = e->units, exported = 0;
	if (e->kind == TR_IPC) {
		tr_imported(e->dev, -(int64_t)e->aux);
		return;
	}
	if (e->kind == TR_POOLED)
		return;
	tr_lock(&tr_account_lock);
	if (e->kind == TR_SHARED) {
		units = shared_leave(e, &exported);
	} else if (e->flags & TR_ENTRY_EXPORTED) {
		exported = units;
		units = 0;
	}
	if (units > 0)
		add(e->dev, -(int64_t)units, UINT64_MAX);
	tr_unlock(&tr_account_lock);
	if (exported > 0)
		tr_uncharge_exported(e->dev, exported);
}

void tr_context_freed(CUcontext ctx)
{
	size_t at = 0, mask = 0;
	for (;;) {
		struct tr_entry e;
		tr_lock(&tr_account_lock);
		if (allocations.mask != mask) { /* another thread made it grow: from the start */
			mask = allocations.mask;
			at = 0;
		}
		bool more = tr_table_take_owner(&allocations, (uint64_t)(uintptr_t)ctx, &at, &e);
		tr_unlock(&tr_account_lock);
		if (!more)
			return;
		tr_entry_freed(&e);
	}
}

CUresult tr_freed(CUresult r, bool known, const struct tr_entry *e)
{
	if (!known)
		return r;
	if (r != CUDA_SUCCESS)
		tr_remember(e);
	else if (e->kind == TR_POOLED)
		tr_pool_freed(e);
	else
		tr_entry_freed(e);
	return r;
}

/* --- memory that other processes hold too -------------------------------------------------- */

static struct tr_slot_dev *own_part(int dev)
{
	return &tr_ledger()->slot[tr_slot_index()].dev[dev];
}

static void move(uint64_t *counter, int64_t bytes)
{
	if (bytes >= 0)
		__atomic_fetch_add(counter, (uint64_t)bytes, __ATOMIC_ACQ_REL);
	else
		__atomic_fetch_sub(counter, (uint64_t)-bytes, __ATOMIC_ACQ_REL);
}

void tr_exported(int dev, int64_t bytes)
{
	move(&own_part(dev)->exported, bytes);
}

void tr_imported(int dev, int64_t bytes)
{
	move(&own_part(dev)->imported, bytes);
	if (bytes >= 0)
		return;
	tr_lock(&reclaim_lock); /* orphans live only as long as somebody holds them */
	tr_ledger_settle_orphans(tr_ledger(), tr_ledger_fd());
	tr_unlock(&reclaim_lock);
}

/* Who holds a small allocation of another process holds the blocks that it lies in. */
static uint64_t export_blocks(const struct tr_entry *e)
{
	uint64_t first = block_of(e->key), last = block_of(e->key + e->aux - 1), bytes = 0;
	for (uint64_t at = first; at <= last; at += TR_BLOCK) {
		struct tr_entry *b = tr_table_get(&blocks, at);
		if (b == NULL || b->flags & TR_ENTRY_EXPORTED)
			continue;
		b->flags |= TR_ENTRY_EXPORTED;
		bytes += TR_BLOCK;
	}
	return bytes;
}

void tr_entry_exported(uint64_t key)
{
	uint64_t bytes = 0;
	int dev = 0;
	tr_lock(&tr_account_lock);
	struct tr_entry *e = tr_table_get(&allocations, key);
	if (e != NULL && (e->kind == TR_PLAIN || e->kind == TR_SHARED) &&
	    (e->flags & TR_ENTRY_EXPORTED) == 0) {
		e->flags |= TR_ENTRY_EXPORTED;
		bytes = e->kind == TR_SHARED ? export_blocks(e) : e->units * TR_UNIT;
		dev = e->dev;
	}
	tr_unlock(&tr_account_lock);
	if (bytes > 0)
		tr_exported(dev, (int64_t)bytes);
}

uint64_t tr_tenant_exports(int dev)
{
	struct tr_ledger *l = tr_ledger();
	uint64_t sum = tr_slot_bytes(l, 0, dev);
	for (int i = 1; i < TR_MAX_PROCS; i++)
		if (__atomic_load_n(&l->slot[i].state, __ATOMIC_ACQUIRE) == TR_SLOT_USED)
			sum += __atomic_load_n(&l->slot[i].dev[dev].exported, __ATOMIC_ACQUIRE);
	return sum;
}

uint64_t tr_import_begin(int dev)
{
	uint64_t guess = dev < 0 ? 0 : tr_tenant_exports(dev);
	if (guess > 0)
		tr_imported(dev, (int64_t)guess);
	return guess;
}

void tr_import_end(int dev, uint64_t guess)
{
	if (guess > 0)
		tr_imported(dev, -(int64_t)guess);
}

void tr_import_opened(CUdeviceptr ptr, uint64_t bytes, int dev)
{
	CUcontext ctx = NULL;
	REAL(cuCtxGetCurrent)(&ctx);
	struct tr_entry e = {.key = ptr,
			     .aux = bytes,
			     .owner = (uint64_t)(uintptr_t)ctx,
			     .units = 1,
			     .dev = (uint8_t)dev,
			     .kind = TR_IPC};
	tr_lock(&tr_account_lock);
	struct tr_entry *had = tr_table_get(&allocations, ptr);
	bool again = had != NULL && had->kind == TR_IPC;
	if (again)
		had->units++;
	bool fresh = !again && tr_table_put(&allocations, &e);
	tr_unlock(&tr_account_lock);
	if (fresh)
		tr_imported(dev, (int64_t)bytes);
}

bool tr_import_close(CUdeviceptr ptr, struct tr_entry *out)
{
	tr_lock(&tr_account_lock);
	struct tr_entry *e = tr_table_get(&allocations, ptr);
	bool last = e != NULL && e->kind == TR_IPC && --e->units == 0 &&
		    tr_table_take(&allocations, ptr, out);
	tr_unlock(&tr_account_lock);
	return last;
}

void tr_uncharge_exported(int dev, uint32_t units)
{
	tr_exported(dev, -(int64_t)(units * TR_UNIT));
	tr_lock(&reclaim_lock);
	tr_lock(&tr_account_lock);
	tr_ledger_orphan(tr_ledger(), tr_ledger_fd(), tr_slot_index(), dev, units * TR_UNIT);
	tr_unlock(&tr_account_lock);
	tr_unlock(&reclaim_lock);
}

void tr_account_after_fork(void)
{
	tr_account_lock.word = 0;
	reclaim_lock.word = 0;
	memset(&allocations, 0, sizeof allocations);
	memset(&blocks, 0, sizeof blocks);
}

int tr_enter_current(CUresult *error)
{
	*error = tr_enter();
	if (*error != CUDA_SUCCESS)
		return -1;
	return tr_current_device();
}
