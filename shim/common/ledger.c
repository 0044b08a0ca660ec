#include "compat.h"
#define _GNU_SOURCE
#include "ledger.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef F_OFD_GETLK
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif

#define AMOUNT_MASK ((1ull << TR_WORD_AMOUNT_BITS) - 1)
#define SLOT_MASK ((1ull << TR_WORD_SLOT_BITS) - 1)
#define OP_MASK ((1ull << TR_WORD_OP_BITS) - 1)

#define LOAD(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define STORE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)

/* --- the word ------------------------------------------------------------------------------ */

static inline uint64_t word_amount(uint64_t w)
{
	return w & AMOUNT_MASK;
}

static inline int word_slot(uint64_t w) /* -1: none */
{
	return (int)((w >> TR_WORD_AMOUNT_BITS) & SLOT_MASK) - 1;
}

static inline uint64_t word_op(uint64_t w)
{
	return w >> (TR_WORD_AMOUNT_BITS + TR_WORD_SLOT_BITS);
}

static inline uint64_t word_make(uint64_t amount, int slot, uint64_t op)
{
	return amount | ((uint64_t)(slot + 1) << TR_WORD_AMOUNT_BITS) |
	       ((op & OP_MASK) << (TR_WORD_AMOUNT_BITS + TR_WORD_SLOT_BITS));
}

/* Makes the slot named in word `w` know that the operation named there took effect; false if the
 * account's word is another one by now.
 *
 * The word holds the low bits of the number only. The slot's `op` has all of them and is at most
 * one ahead as long as the word is `w`: it is read before the word is looked at again. So however
 * long this thread slept anywhere in here, what it writes is true, and ack never falls. */
static bool acknowledge(struct tr_ledger *l, int dev, uint64_t w)
{
	struct tr_slot_dev *sd = &l->slot[word_slot(w)].dev[dev];
	for (;;) {
		uint64_t begun = LOAD(&sd->op), known = LOAD(&sd->ack);
		if (LOAD(&l->account[dev].word) != w)
			return false;
		uint64_t op = begun - ((begun - word_op(w)) & OP_MASK);
		if (op <= known || op > begun ||
		    __atomic_compare_exchange_n(&sd->ack, &known, op, false, __ATOMIC_ACQ_REL,
						__ATOMIC_ACQUIRE))
			return true;
	}
}

/* Did the slot's last operation take effect? The word is read before ack: whoever replaced the
 * word wrote ack first. */
static bool last_op_applied(const struct tr_ledger *l, int slot, int dev, uint64_t op)
{
	uint64_t w = LOAD(&l->account[dev].word);
	if (word_slot(w) == slot && word_op(w) == (op & OP_MASK))
		return true;
	return LOAD(&l->slot[slot].dev[dev].ack) >= op;
}

/* --- reading ------------------------------------------------------------------------------- */

static uint64_t with_overhead(uint64_t bytes, int64_t overhead)
{
	if (overhead < 0 && (uint64_t)-overhead > bytes)
		return 0;
	return bytes + (uint64_t)overhead;
}

uint64_t tr_account_bytes(const struct tr_ledger *l, int dev)
{
	const struct tr_account *a = &l->account[dev];
	return with_overhead(word_amount(LOAD(&a->word)) * TR_UNIT, LOAD(&a->overhead));
}

static uint64_t slot_units(const struct tr_ledger *l, int slot, int dev)
{
	const struct tr_slot_dev *sd = &l->slot[slot].dev[dev];
	uint64_t op = LOAD(&sd->op);
	if (op == 0)
		return 0;
	bool applied = last_op_applied(l, slot, dev, op);
	return LOAD(&sd->value[(applied ? op : op - 1) & 1]);
}

uint64_t tr_slot_bytes(const struct tr_ledger *l, int slot, int dev)
{
	return slot_units(l, slot, dev) * TR_UNIT;
}

/* --- the operation ------------------------------------------------------------------------- */

bool tr_ledger_add(struct tr_ledger *l, int slot, int dev, int64_t units, uint64_t limit_bytes)
{
	struct tr_account *a = &l->account[dev];
	struct tr_slot_dev *sd = &l->slot[slot].dev[dev];

	/* The last operation of this slot is finished, as the only actor is here: its outcome is
	 * known without looking at the word unless it was refused or its process died in it. */
	uint64_t op = sd->op;
	uint64_t now = op == 0 ? 0 : sd->value[op & 1];
	if (op != 0 && !last_op_applied(l, slot, dev, op))
		now = sd->value[(op - 1) & 1]; /* redo the same number */
	else
		op++;
	uint64_t next = now + (uint64_t)units;
	if (units < 0 && (uint64_t)-units > now)
		next = 0, units = -(int64_t)now;
	__atomic_store_n(&sd->value[op & 1], next, __ATOMIC_RELAXED);
	STORE(&sd->op, op);

	uint64_t w = LOAD(&a->word);
	for (;;) {
		uint64_t amount = word_amount(w);
		if (units > 0 && limit_bytes != UINT64_MAX &&
		    with_overhead((amount + (uint64_t)units) * TR_UNIT, LOAD(&a->overhead)) >
			    limit_bytes)
			return false;
		if (units > 0 && amount + (uint64_t)units > AMOUNT_MASK)
			return false;
		if (units < 0 && (uint64_t)-units > amount)
			amount = (uint64_t)-units; /* a damaged ledger never wraps */
		int by = word_slot(w);
		if (by >= 0 && by != slot && by < TR_MAX_PROCS && !acknowledge(l, dev, w)) {
			w = LOAD(&a->word);
			continue;
		}
		if (__atomic_compare_exchange_n(&a->word, &w,
						word_make(amount + (uint64_t)units, slot, op),
						false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
			return true;
	}
}

/* --- processes ----------------------------------------------------------------------------- */

/* Reads a small file of /proc. No stdio: this runs in a user's process, after fork too. */
static bool read_proc(const char *path, char *buf, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	ssize_t n = read(fd, buf, size - 1);
	int keep = errno;
	close(fd);
	errno = keep;
	if (n <= 0)
		return false;
	buf[n] = 0;
	return true;
}

static void pid_path(char *out, uint32_t pid, const char *file)
{
	char digits[12];
	int n = 0;
	do
		digits[n++] = (char)('0' + pid % 10);
	while ((pid /= 10) != 0);
	memcpy(out, "/proc/", 6);
	out += 6;
	while (n > 0)
		*out++ = digits[--n];
	*out++ = '/';
	strcpy(out, file);
}

/* Field `want` (1-based, 3 and up) of a /proc stat line; the command may hold any character. */
static const char *stat_field(const char *stat, int want)
{
	const char *p = strrchr(stat, ')');
	if (p == NULL)
		return NULL;
	p++;
	for (int field = 3; *p == ' '; field++) {
		p++;
		if (field == want)
			return p;
		p += strcspn(p, " ");
	}
	return NULL;
}

/* Start times are shown relative to the reader's time namespace: offset of ours, in ticks. */
static int64_t boottime_offset_ticks(void)
{
	char buf[256];
	if (!read_proc("/proc/self/timens_offsets", buf, sizeof buf))
		return 0;
	const char *p = strstr(buf, "boottime");
	return p == NULL ? 0 : strtoll(p + strlen("boottime"), NULL, 10) * sysconf(_SC_CLK_TCK);
}

static bool stat_of(const char *path, char *state, uint64_t *starttime, long *threads)
{
	char buf[1024];
	if (!read_proc(path, buf, sizeof buf))
		return false;
	const char *s = stat_field(buf, 3), *t = stat_field(buf, 22), *n = stat_field(buf, 20);
	if (s == NULL || t == NULL || n == NULL)
		return false;
	*state = *s;
	*threads = strtol(n, NULL, 10);
	*starttime = (uint64_t)((int64_t)strtoull(t, NULL, 10) - boottime_offset_ticks());
	return true;
}

static uint64_t own_pidns(void)
{
	char buf[64];
	ssize_t n = readlink("/proc/self/ns/pid", buf, sizeof buf - 1);
	if (n <= 0)
		return 0;
	buf[n] = 0;
	const char *p = strchr(buf, '[');
	return p == NULL ? 0 : strtoull(p + 1, NULL, 10);
}

void tr_self(uint32_t *pid, uint64_t *starttime, uint64_t *pidns)
{
	char state;
	long threads;
	*pid = (uint32_t)getpid();
	if (!stat_of("/proc/self/stat", &state, starttime, &threads))
		*starttime = 0;
	*pidns = own_pidns();
}

/* Certain that the process is a zombie or no more. In doubt: false. */
static bool process_gone(uint32_t pid, uint64_t starttime)
{
	char path[32], state;
	uint64_t started;
	long threads;
	pid_path(path, pid, "stat");
	if (!stat_of(path, &state, &started, &threads))
		return (errno == ENOENT || errno == ESRCH) && kill((pid_t)pid, 0) != 0 &&
		       errno == ESRCH;
	if (starttime != 0 && started != starttime && started != starttime + 1 &&
	    started + 1 != starttime)
		return true; /* another process with the same number */
	return (state == 'Z' || state == 'X') && threads <= 1;
}

/* --- slots --------------------------------------------------------------------------------- */

static bool slot_lock(int fd, int slot, short type, int cmd, short *held)
{
	struct flock fl = {.l_type = type,
			   .l_whence = SEEK_SET,
			   .l_start = TR_LOCK_BASE + slot,
			   .l_len = 1};
	if (fcntl(fd, cmd, &fl) != 0)
		return false;
	if (held != NULL)
		*held = fl.l_type;
	return true;
}

static bool slot_trylock(int fd, int slot)
{
	return slot_lock(fd, slot, F_WRLCK, F_OFD_SETLK, NULL);
}

static void slot_unlock(int fd, int slot)
{
	slot_lock(fd, slot, F_UNLCK, F_OFD_SETLK, NULL);
}

static bool slot_held(int fd, int slot)
{
	short held = F_WRLCK;
	return !slot_lock(fd, slot, F_WRLCK, F_OFD_GETLK, &held) || held != F_UNLCK;
}

static uint64_t imports_on(const struct tr_ledger *l, int fd, int dev)
{
	uint64_t sum = 0;
	for (int i = 1; i < TR_MAX_PROCS; i++) {
		const struct tr_slot *s = &l->slot[i];
		if (LOAD(&s->state) != TR_SLOT_USED)
			continue;
		uint64_t n = LOAD(&s->dev[dev].imported);
		if (n != 0 && (slot_held(fd, i) || !process_gone(s->pid, s->starttime)))
			sum += n;
	}
	return sum;
}

/* The orphans' lock is held for microseconds, by a living process or not at all. */
static bool orphans_lock(int fd)
{
	for (int tries = 0; tries < 1000; tries++) {
		if (slot_trylock(fd, 0))
			return true;
		nanosleep(&(struct timespec){0, 50000}, NULL);
	}
	return false;
}

bool tr_ledger_orphan(struct tr_ledger *l, int ledger_fd, int slot, int dev, uint64_t bytes)
{
	if (imports_on(l, ledger_fd, dev) > 0) {
		if (!orphans_lock(ledger_fd))
			return false;
		/* All orphans together are at most what importers hold. */
		uint64_t imports = imports_on(l, ledger_fd, dev);
		uint64_t have = slot_units(l, 0, dev) * TR_UNIT;
		uint64_t room = imports > have ? imports - have : 0;
		uint64_t left = bytes < room ? bytes : room;
		if (left > 0)
			tr_ledger_add(l, 0, dev, (int64_t)(left / TR_UNIT), UINT64_MAX);
		slot_unlock(ledger_fd, 0);
	}
	tr_ledger_add(l, slot, dev, -(int64_t)(bytes / TR_UNIT), UINT64_MAX);
	return true;
}

void tr_ledger_settle_orphans(struct tr_ledger *l, int ledger_fd)
{
	bool any = false;
	for (int d = 0; d < TR_MAX_DEVICES; d++)
		any = any || slot_units(l, 0, d) != 0;
	if (!any || !slot_trylock(ledger_fd, 0))
		return;
	for (int d = 0; d < TR_MAX_DEVICES; d++) {
		uint64_t have = slot_units(l, 0, d) * TR_UNIT;
		uint64_t imports = have == 0 ? 0 : imports_on(l, ledger_fd, d);
		if (imports < have)
			tr_ledger_add(l, 0, d, -(int64_t)((have - imports) / TR_UNIT), UINT64_MAX);
	}
	slot_unlock(ledger_fd, 0);
}

/* Gives back all that a dead process held. The caller holds the slot's file lock. False: not now,
 * what it exported could not be left to its importers. */
static bool slot_clear(struct tr_ledger *l, int fd, int slot)
{
	struct tr_slot *s = &l->slot[slot];
	for (int d = 0; d < TR_MAX_DEVICES; d++) {
		struct tr_slot_dev *sd = &s->dev[d];
		STORE(&sd->imported, 0);
		uint64_t units = slot_units(l, slot, d);
		if (units > 0) {
			uint64_t exported = LOAD(&sd->exported), all = units * TR_UNIT;
			if (exported > 0 && !tr_ledger_orphan(l, fd, slot, d,
							      exported < all ? exported : all))
				return false;
			STORE(&sd->exported, 0);
			units = slot_units(l, slot, d);
			if (units > 0)
				tr_ledger_add(l, slot, d, -(int64_t)units, UINT64_MAX);
		}
		STORE(&sd->exported, 0);
		STORE(&sd->context, 0);
		STORE(&sd->gpu_time_ns, 0);
		STORE(&sd->in_flight, 0);
		STORE(&sd->waiting, 0);
		STORE(&sd->waiting_since, 0);
		STORE(&sd->pending_ns, 0);
		STORE(&sd->work_end_ns, 0);
		STORE(&sd->longest_ns, 0);
		STORE(&sd->closed_seq, 0);
	}
	__atomic_fetch_and(&l->clients[slot / 64], ~(1ull << (slot % 64)), __ATOMIC_RELAXED);
	/* Free first: a reclaimer that dies here leaves a free slot, not one of nobody. */
	STORE(&s->state, TR_SLOT_FREE);
	s->pid = 0;
	s->host_pid = 0;
	s->starttime = 0;
	memset(s->reserved, 0, sizeof s->reserved);
	return true;
}

static bool slot_dead(const struct tr_slot *s, uint64_t pidns)
{
	return s->pidns == pidns && process_gone(s->pid, s->starttime);
}

bool tr_slot_gone(const struct tr_ledger *l, int slot, uint64_t own_pidns)
{
	return slot_dead(&l->slot[slot], own_pidns);
}

int tr_ledger_reclaim(struct tr_ledger *l, int ledger_fd, int self)
{
	int freed = 0;
	uint64_t pidns = own_pidns();
	for (int i = 1; i < TR_MAX_PROCS; i++) {
		struct tr_slot *s = &l->slot[i];
		if (i == self || LOAD(&s->state) != TR_SLOT_USED || slot_held(ledger_fd, i))
			continue;
		if (!slot_dead(s, pidns) || !slot_trylock(ledger_fd, i))
			continue;
		if (LOAD(&s->state) == TR_SLOT_USED && slot_dead(s, pidns))
			freed += slot_clear(l, ledger_fd, i);
		slot_unlock(ledger_fd, i);
	}
	if (freed > 0)
		tr_ledger_settle_orphans(l, ledger_fd);
	return freed;
}

/* What this process held before an exec: the driver took it back with its descriptors. */
static void clear_former_self(struct tr_ledger *l, int fd, uint32_t pid, uint64_t starttime,
			      uint64_t pidns)
{
	for (int i = 1; i < TR_MAX_PROCS; i++) {
		struct tr_slot *s = &l->slot[i];
		if (LOAD(&s->state) != TR_SLOT_USED || s->pid != pid ||
		    s->starttime != starttime || s->pidns != pidns || !slot_trylock(fd, i))
			continue;
		slot_clear(l, fd, i);
		slot_unlock(fd, i);
	}
}

int tr_ledger_claim(struct tr_ledger *l, int ledger_fd)
{
	uint32_t pid, start = __atomic_fetch_add(&l->next_slot, 1, __ATOMIC_RELAXED);
	uint64_t starttime, pidns;
	tr_self(&pid, &starttime, &pidns);
	clear_former_self(l, ledger_fd, pid, starttime, pidns);
	for (uint32_t k = 0; k < TR_MAX_PROCS - 1; k++) {
		int i = 1 + (int)((start + k) % (TR_MAX_PROCS - 1));
		struct tr_slot *s = &l->slot[i];
		bool used = LOAD(&s->state) == TR_SLOT_USED;
		if (used && (slot_held(ledger_fd, i) || !slot_dead(s, pidns)))
			continue;
		if (!slot_trylock(ledger_fd, i))
			continue;
		if (LOAD(&s->state) == TR_SLOT_USED) {
			if (!slot_dead(s, pidns) || !slot_clear(l, ledger_fd, i)) {
				slot_unlock(ledger_fd, i);
				continue;
			}
		}
		struct timespec ts;
		clock_gettime(CLOCK_MONOTONIC, &ts);
		s->pid = pid;
		s->starttime = starttime;
		s->pidns = pidns;
		s->abi = TR_ABI_VERSION;
		s->claimed_ns = (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
		STORE(&s->state, TR_SLOT_USED);
		return i;
	}
	return -1;
}
