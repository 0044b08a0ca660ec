#include "compat.h"
#define _GNU_SOURCE
#include "slice.h"
#include "ledger.h"
#include "lock.h"
#include "trace.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Written by whoever lays out the slice (tranche_abi.h). Volatile: what the compiler sees here is
 * not what the running file holds. */
static const volatile char slice_field[TR_SLICE_FIELD] = TR_SLICE_MARK;

static struct {
	const struct tr_limits *limits;
	struct tr_ledger *ledger;
	int fd;		/* the ledger, with our slot's lock; close-on-exec */
	int slot;	/* -1: none */
	bool failed;	/* said why, for good */
} slice = {.fd = -1, .slot = -1};
#define LIMITS_SIZE (TR_LEASES_OFFSET + 4096)
static struct tr_lock opening;
static int64_t clock_offset_ns;

static void slice_dir(char *out, size_t size)
{
	size_t n = 0, at = sizeof TR_SLICE_MARK - 1;
	while (at + n < TR_SLICE_FIELD - 1 && n < size - 1 && slice_field[at + n] != 0) {
		out[n] = slice_field[at + n];
		n++;
	}
	out[n] = 0;
	if (n == 0)
		snprintf(out, size, "%s", TR_SLICE_DIR_DEFAULT);
}

/* Monotonic time of this process's time namespace may be shifted against the machine's. */
static void read_clock_offset(void)
{
	char buf[256];
	int fd = open("/proc/self/timens_offsets", O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	ssize_t n = read(fd, buf, sizeof buf - 1);
	close(fd);
	if (n <= 0)
		return;
	buf[n] = 0;
	char *p = strstr(buf, "monotonic");
	if (p == NULL)
		return;
	int64_t s = strtoll(p + strlen("monotonic"), &p, 10);
	clock_offset_ns = s * 1000000000ll + strtoll(p, NULL, 10);
}

int64_t tr_now_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (int64_t)ts.tv_sec * 1000000000ll + ts.tv_nsec - clock_offset_ns;
}

/* Moves a descriptor out of the range that programs count on. */
static int high_fd(int fd)
{
	int high = fcntl(fd, F_DUPFD_CLOEXEC, 500);
	if (high < 0)
		return fd;
	close(fd);
	return high;
}

/* Who could put files of their own in the place of the slice's could set its limits, so they must be
 * ours or root's. Not asked in a container, where the directory is mounted for us and root may
 * show as somebody else (user namespaces). */
static bool trusted(int fd, const char *dir)
{
	struct stat st;
	if (strcmp(dir, TR_SLICE_DIR_DEFAULT) == 0)
		return true;
	/* fstat() is bound to a new symbol version by new C libraries; the call is the same. */
	return syscall(SYS_fstat, fd, &st) == 0 &&
	       (st.st_uid == 0 || st.st_uid == geteuid() || st.st_uid == getuid());
}

static void *map_file(const char *dir, const char *file, size_t size, bool write, int *keep_fd)
{
	char path[PATH_MAX];
	snprintf(path, sizeof path, "%s/%s", dir, file);
	int fd = open(path, (write ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW);
	if (fd < 0) {
		tr_complain("cannot open %s: %s; no GPU for this process", path, strerror(errno));
		return NULL;
	}
	void *p = NULL;
	off_t have = lseek(fd, 0, SEEK_END);
	if (!trusted(fd, dir)) {
		tr_complain("%s belongs to another user; no GPU for this process", path);
	} else if (have < (off_t)size) {
		tr_complain("%s is damaged: %lld bytes, expected %zu; no GPU for this process",
			    path, (long long)have, size);
	} else {
		p = mmap(NULL, size, PROT_READ | (write ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
		if (p == MAP_FAILED) {
			tr_complain("cannot map %s: %s; no GPU for this process", path,
				    strerror(errno));
			p = NULL;
		}
	}
	if (p != NULL && keep_fd != NULL)
		*keep_fd = high_fd(fd);
	else
		close(fd);
	return p;
}

static bool limits_valid(const struct tr_limits *l, const char *dir)
{
	if (l->magic == TR_LIMITS_MAGIC && l->version == TR_ABI_VERSION &&
	    l->size == sizeof *l && l->n_devices >= 1 && l->n_devices <= TR_MAX_DEVICES)
		return true;
	tr_complain("%s/%s is damaged or of another version (magic %llx, version %u, %u devices); "
		    "no GPU for this process",
		    dir, TR_FILE_LIMITS, (unsigned long long)l->magic, l->version, l->n_devices);
	return false;
}

static bool ledger_valid(const struct tr_ledger *l, const char *dir)
{
	if (l->magic == TR_LEDGER_MAGIC && l->version == TR_ABI_VERSION && l->size == sizeof *l &&
	    l->n_slots == TR_MAX_PROCS)
		return true;
	tr_complain("%s/%s is damaged or of another version; no GPU for this process", dir,
		    TR_FILE_LEDGER);
	return false;
}

/* Fail-open: each process keeps to the limits by itself, without the tenant's other processes. */
static struct tr_ledger *private_ledger(void)
{
	struct tr_ledger *l = mmap(NULL, sizeof *l, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (l == MAP_FAILED)
		return NULL;
	tr_complain("the slice fails open: this process is limited by itself");
	return l;
}

static bool map_slice(void)
{
	char dir[TR_SLICE_FIELD];
	slice_dir(dir, sizeof dir);
	read_clock_offset();
	const struct tr_limits *limits =
		map_file(dir, TR_FILE_LIMITS, LIMITS_SIZE, false, NULL);
	if (limits == NULL || !limits_valid(limits, dir))
		return false;
	int fd = -1;
	struct tr_ledger *ledger = map_file(dir, TR_FILE_LEDGER, sizeof *ledger, true, &fd);
	if (ledger == NULL || !ledger_valid(ledger, dir)) {
		ledger = limits->flags & TR_LIMITS_FAIL_OPEN ? private_ledger() : NULL;
		fd = -1;
	}
	if (ledger == NULL)
		return false;
	slice.limits = limits;
	slice.fd = fd;
	__atomic_store_n(&slice.ledger, ledger, __ATOMIC_RELEASE);
	TR_TRACE("slice \"%.*s\" at %s: %u devices", TR_NAME_LEN, limits->name, dir,
		 limits->n_devices);
	return true;
}

static bool claim_slot(void)
{
	int slot = slice.fd < 0 ? 1 : tr_ledger_claim(slice.ledger, slice.fd);
	if (slot < 0) {
		tr_complain("all %d process slots of the slice are held by living processes; "
			    "no GPU for this process",
			    TR_MAX_PROCS - 1);
		return false;
	}
	TR_TRACE("registered in slot %d", slot);
	__atomic_store_n(&slice.slot, slot, __ATOMIC_RELEASE);
	return true;
}

/* After fork the child is a process of its own: it must not act for its parent's slot. The
 * inherited descriptor stays open on purpose: like the driver's descriptors it keeps what the
 * parent holds from being given back while this child lives. */
static void after_fork_child(void)
{
	opening.word = 0;
	slice.slot = -1;
	if (slice.ledger != NULL) {
		munmap((void *)(uintptr_t)slice.limits, LIMITS_SIZE);
		munmap(slice.ledger, sizeof *slice.ledger);
	}
	slice.limits = NULL;
	slice.ledger = NULL;
	slice.failed = false;
}

bool tr_slice_open(bool want_slot)
{
	if (__atomic_load_n(&slice.ledger, __ATOMIC_ACQUIRE) != NULL &&
	    (!want_slot || __atomic_load_n(&slice.slot, __ATOMIC_ACQUIRE) >= 0))
		return true;
	static bool watching_fork;
	tr_lock(&opening);
	bool ok = !slice.failed;
	if (ok && !watching_fork) {
		watching_fork = true;
		pthread_atfork(NULL, NULL, after_fork_child);
	}
	if (ok && slice.ledger == NULL)
		ok = map_slice();
	if (ok && want_slot && slice.slot < 0)
		ok = claim_slot();
	slice.failed = !ok;
	tr_unlock(&opening);
	return ok;
}

const struct tr_limits *tr_limits(void)
{
	return slice.limits;
}

const struct tr_leases *tr_leases(void)
{
	return (const struct tr_leases *)((const char *)slice.limits + TR_LEASES_OFFSET);
}

struct tr_ledger *tr_ledger(void)
{
	return slice.ledger;
}

bool tr_ledger_shared(void)
{
	return slice.fd >= 0;
}

int tr_ledger_fd(void)
{
	return slice.fd;
}

int tr_slot_index(void)
{
	return slice.slot;
}

int tr_limits_devices(void)
{
	return (int)slice.limits->n_devices;
}

void tr_limits_read_dev(int i, struct tr_limits_dev *out)
{
	const struct tr_limits *l = slice.limits;
	for (int tries = 0; tries < 1000; tries++) {
		uint64_t before = __atomic_load_n(&l->generation, __ATOMIC_ACQUIRE);
		/* Word by word, each load before the next one and all before the second look. */
		const uint64_t *from = (const uint64_t *)&l->dev[i];
		uint64_t *to = (uint64_t *)out;
		for (size_t w = 0; w < sizeof *out / sizeof *to; w++)
			to[w] = __atomic_load_n(&from[w], __ATOMIC_ACQUIRE);
		if ((before & 1) == 0 &&
		    __atomic_load_n(&l->generation, __ATOMIC_ACQUIRE) == before)
			return;
	}
}

int tr_limits_find(const char *uuid)
{
	for (int i = 0; i < tr_limits_devices(); i++)
		if (strncmp(slice.limits->dev[i].uuid, uuid, TR_UUID_LEN) == 0)
			return i;
	return -1;
}
