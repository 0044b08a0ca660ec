/* The ABI between a slice's supervisor (tranche run, tranche node), the arbiter and the libraries
 * inside the tenant's processes: two files in the slice directory, both mapped shared.
 *
 *   limits   the limits pages, read by every process of the tenant. The first page is written by
 *            the slice's supervisor only, the second (leases) by the arbiter only.
 *   ledger   the usage ledger. Written by the tenant's processes and by the supervisor, read by
 *            the arbiter. No other tenant sees it.
 *
 * Layouts are little endian, fixed size, free of pointers, and mirrored by internal/tenant/abi.go
 * (a test compares every offset). Amounts are bytes unless a name says otherwise; times are
 * nanoseconds of CLOCK_MONOTONIC of the initial time namespace.
 *
 * Invariants
 *   I1  account.word holds at least what the driver has given to the tenant's processes: it is
 *       raised before the driver call and lowered after the driver took the memory back.
 *   I2  account.word's amount is the sum over slots of their contribution (see tr_slot_dev).
 *   I3  no process waits for another one that may be dead. */
#ifndef TRANCHE_ABI_H
#define TRANCHE_ABI_H
#include <stdint.h>

#define TR_ABI_VERSION 2u
#define TR_LEASES_MAGIC 0x53455341454c5254ull
#define TR_LIMITS_MAGIC 0x5354494d494c5254ull /* "TRLIMITS" */
#define TR_LEDGER_MAGIC 0x524547444c5254ull   /* "TRLDGER" */
#define TR_MAX_DEVICES 16
#define TR_MAX_PROCS 1024
#define TR_UUID_LEN 48 /* "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", NUL padded */
#define TR_NAME_LEN 64
#define TR_CORES_WHOLE 100 /* cores are hundredths of one GPU */

/* Files below the slice directory. */
#define TR_FILE_LIMITS "limits"
#define TR_FILE_LEDGER "ledger"

/* Where a library looks for its slice directory when it was not written into the library file
 * (containers, where the directory is mounted). */
#define TR_SLICE_DIR_DEFAULT "/etc/tranche/slice"

/* tr_limits.flags */
#define TR_LIMITS_FAIL_OPEN 1u /* without a usable ledger a process limits itself, instead of
				  having no GPU */

/* tr_limits_dev.flags */
#define TR_DEV_MEMORY_LIMITED 1u /* memory_limit holds; without it memory is only counted */
#define TR_DEV_CORES_LIMITED 2u  /* cores holds; without it launches are not metered */
#define TR_DEV_BURST 4u          /* cores_ceiling > cores may be used while the GPU is idle */
#define TR_DEV_LATENCY 8u        /* latency class: goes before others, within its limit */

struct tr_limits_dev {
	char uuid[TR_UUID_LEN];
	uint64_t memory_limit;  /* bytes */
	uint64_t context_bytes; /* charged for a process's context until it has been measured */
	uint32_t cores;         /* 1..100 */
	uint32_t cores_ceiling; /* cores..100 */
	uint32_t flags;
	uint32_t weight; /* 1..1000, share of time that nobody is guaranteed; 0: as cores */
	uint64_t reserved[6];
}; /* 128 bytes */

struct tr_limits {
	uint64_t magic;
	uint32_t version;
	uint32_t size; /* of this struct */
	/* Odd while the supervisor writes, so a reader takes the fields again. Starts at 2. */
	uint64_t generation;
	uint32_t n_devices; /* 1..TR_MAX_DEVICES */
	uint32_t flags;
	uint64_t heartbeat_ns; /* last sign of life of the supervisor, 0 if it gives none */
	char name[TR_NAME_LEN];
	uint64_t reserved[19];
	struct tr_limits_dev dev[TR_MAX_DEVICES];
}; /* 256 + 16 * 128 = 2304 bytes, in a page of 4096 */
#define TR_LEASES_OFFSET 4096 /* of struct tr_leases in the limits file of 8192 bytes */

/* A turn on one GPU: one process of the tenant may have work there from start_ns to end_ns. It
 * plans its launches so that they are done by end_ns; what is longer is finished first. Grant
 * number seq of a device lies in grant[seq & 1], so the turn of another process of the tenant can
 * be named while this one's lasts. seq grows by one with each grant of the tenant on the device. */
struct tr_grant {
	uint64_t seq;  /* 0: none */
	uint32_t slot; /* the process, by its ledger slot */
	uint32_t flags;
#define TR_GRANT_LOCAL 1u /* nobody else is there: end_ns is not set, the tenant's own account holds
			     the limit, as without an arbiter */
#define TR_GRANT_CONTINUES 2u /* the process had the turn before: nobody was on the GPU in between */
#define TR_GRANT_COUPLED 4u /* the tenant's kernels were seen to wait for each other across GPUs: what they took
			       before does not tell what they take */
	int64_t start_ns; /* may lie in the future: the turn is named in advance */
	int64_t end_ns;   /* moved to now or before when the turn is taken away */
	int64_t since_ns; /* the GPU was the process's alone from then on; 0: not known yet */
	int64_t in_flight_ns; /* estimated work that it may have on the GPU at once, 0: the default */
}; /* 48 bytes */

/* For how long, since the slice began, another process's work was on the GPU beside that of a grant's process:
 * the turn before was overdue, or its own. */
struct tr_beside {
	int64_t total_ns;
	int64_t since_ns; /* and from then on it is now; 0: it is not */
}; /* 16 bytes */

/* What the arbiter says to the tenant about one device. */
struct tr_lease {
	/* Odd while the arbiter writes; a futex on which waiting launches sleep. */
	uint32_t word;
	uint32_t flags;
#define TR_LEASE_REQUIRED 1u /* launches need a grant; without the flag the tenant's own account
				alone holds the limit */
	struct tr_grant grant[2];
	/* From then on the tenant's debt does not keep it from a turn. */
	int64_t eligible_ns;
	/* The arbiter's books, for the next arbiter. */
	int64_t tat;
	uint64_t gpu_time_ns; /* charged up to this value of the ledger */
	/* For people: hundredths of a hundredth of the GPU, over the last second. */
	uint32_t share_wanted, share_got;
	uint64_t grants;
	struct tr_beside beside[2]; /* of grant[0] and grant[1] */
	uint64_t reserved[8];
}; /* 240 bytes */

struct tr_leases {
	uint64_t magic;
	/* The arbiter's last sign of life, 0: there is none. Older than TR_BEAT_STALE_NS: dead. */
	int64_t beat_ns;
	uint32_t arbiter_pid;
	/* Not 0 while a device has a compute limit or needs grants: read by every launch of a process
	 * that is not metered yet. */
	uint32_t metered;
	uint64_t reserved[5];
	struct tr_lease lease[TR_MAX_DEVICES];
};
#define TR_BEAT_NS 20000000ll
#define TR_BEAT_STALE_NS 200000000ll

/* A recoverable counter. `word` packs
 *     bits  0..33  amount, in units of TR_UNIT bytes
 *     bits 34..45  index of the slot whose operation stored this word, plus one; 0: none
 *     bits 46..63  low bits of that operation's number
 * An operation of slot S with number q first writes the slot's next value and q, then swaps the
 * word. Whoever replaces a word first copies its number into that slot's `ack`. So for every
 * slot of a dead process it is known whether its last operation took effect: the word still
 * carries it, or ack has reached it. */
#define TR_UNIT 4096ull
#define TR_WORD_AMOUNT_BITS 34
#define TR_WORD_SLOT_BITS 12
#define TR_WORD_OP_BITS 18

struct tr_account {
	uint64_t word;
	/* Bytes that the driver took for the tenant beyond what the processes charged (contexts,
	 * modules), as measured by the supervisor. May be negative: a context was charged too high. */
	int64_t overhead;
	/* Compute. tat: theoretical arrival time of the generic cell rate algorithm, in ns; a launch
	 * may start when tat <= now. Bytes lower case because it is the term of the field. */
	int64_t tat;
	uint64_t gpu_time_ns;     /* GPU time measured, all processes, ever */
	uint64_t throttled_ns;    /* time that launches waited */
	uint64_t launches;        /* metered launches, counted per batch */
	uint64_t allocs_refused;
	uint64_t demand_since;    /* start of the current stretch of demand for compute, 0: none */
	uint64_t active_until;    /* demand is known to last until then */
	uint64_t reserved[7];
}; /* 128 bytes */

/* One process's part of one device's account.
 * Contribution: value[op & 1] if operation `op` took effect, else value[(op - 1) & 1]. */
struct tr_slot_dev {
	uint64_t op;       /* number of the last operation begun */
	uint64_t value[2]; /* units of TR_UNIT */
	uint64_t ack;      /* highest operation known to have taken effect */
	uint64_t exported; /* bytes in value that other processes may hold (VMM export, IPC, pools) */
	uint64_t imported; /* bytes held through imports, not charged here */
	uint64_t context;  /* bytes in value that were charged for contexts */
	uint64_t gpu_time_ns;
	/* Compute, for the arbiter. in_flight is raised before the grant is looked at, so that who
	 * first takes a grant away and then reads 0 knows that nothing will follow. */
	uint32_t in_flight; /* units and open batches on the device, launches under way included */
	uint32_t waiting;   /* launches that wait for a grant */
	int64_t waiting_since;
	int64_t pending_ns;  /* estimated GPU time of what is in flight */
	int64_t work_end_ns; /* when it is expected to be done */
	int64_t last_end_ns; /* when the last work that is done ended */
	int64_t longest_ns;  /* estimate of the longest unit in flight, or of the one that waits */
	uint64_t closed_seq; /* grant in which this process will launch nothing more */
	int64_t first_ns;    /* when the first work of the newest grant began to run, once known */
}; /* 128 bytes */

enum tr_slot_state {
	TR_SLOT_FREE = 0,
	TR_SLOT_USED = 1,
	TR_SLOT_ORPHANS = 2, /* slot 0: memory that outlives its creator through an import */
};

/* A process holds its slot by an open-file-description write lock on byte (TR_LOCK_BASE + index)
 * of the ledger, on a descriptor with close-on-exec: like the driver's own descriptors it is
 * inherited by fork, dropped by exec, and released by the kernel. The slot may be reclaimed when
 * the lock is free AND the process is a zombie or gone. Who claims or reclaims takes the lock. */
#define TR_LOCK_BASE (1ll << 40)

struct tr_slot {
	uint32_t state;
	uint32_t pid;       /* in the process's own PID namespace */
	uint64_t starttime; /* field 22 of /proc/PID/stat */
	uint64_t pidns;     /* inode of /proc/self/ns/pid */
	uint32_t host_pid;  /* as NVML shows it; written by the supervisor, 0: unknown */
	uint32_t abi;       /* TR_ABI_VERSION of the library */
	uint64_t claimed_ns;
	uint64_t reserved[11];
	struct tr_slot_dev dev[TR_MAX_DEVICES];
}; /* 128 + 16 * 128 = 2176 bytes */

/* Which stretches of a device's recent past have been charged already, so that time in which
 * several streams or processes of the tenant were busy at once is charged once. A bit stands for
 * TR_COVER_NS of CLOCK_MONOTONIC; stretch number w (48 bits) lives in word w % TR_COVER_WORDS under
 * the low 16 bits of w / TR_COVER_WORDS, so a word of an older lap reads as not charged. */
#define TR_COVER_NS 4096ll
#define TR_COVER_BITS 48
#define TR_COVER_WORDS 2048 /* 0.4 s */
struct tr_coverage {
	uint64_t word[TR_COVER_WORDS]; /* bits 0..47 charged, bits 48..63 lap */
}; /* 16 KiB */

struct tr_ledger {
	uint64_t magic;
	uint32_t version;
	uint32_t size;
	uint32_t n_slots; /* TR_MAX_PROCS */
	uint32_t next_slot; /* where the next claim starts to look */
	/* Raised whenever something happened that the arbiter may act on; it sleeps on this futex. */
	uint32_t bell;
	uint32_t reserved0;
	/* Slots whose process has asked for a grant, a bit each; cleared when a slot is reclaimed. */
	uint64_t clients[TR_MAX_PROCS / 64];
	uint64_t reserved[28];
	struct tr_account account[TR_MAX_DEVICES];
	struct tr_slot slot[TR_MAX_PROCS];
	struct tr_coverage coverage[TR_MAX_DEVICES];
};

/* The libraries carry two strings that `tranche run` writes when it lays out a slice, so that no
 * environment variable is needed: the slice directory behind this marker, and the directory with
 * libcuda-driver.so.1 and libnvidia-ml-driver.so.1 as DT_RPATH (TR_RPATH_MARK, padded with '/'). */
#define TR_SLICE_MARK "@@TRANCHE_SLICE@@"
#define TR_SLICE_FIELD 256 /* marker, then the path, NUL padded */
#define TR_RPATH_MARK "/@@TRANCHE_DRIVER@@"
#define TR_RPATH_FIELD 256

_Static_assert(sizeof(struct tr_limits_dev) == 128, "abi");
_Static_assert(sizeof(struct tr_limits) == 2304, "abi");
_Static_assert(sizeof(struct tr_account) == 128, "abi");
_Static_assert(sizeof(struct tr_grant) == 48, "abi");
_Static_assert(sizeof(struct tr_beside) == 16, "abi");
_Static_assert(sizeof(struct tr_lease) == 240, "abi");
_Static_assert(sizeof(struct tr_leases) == 64 + 16 * 240 && sizeof(struct tr_leases) <= 4096, "abi");
_Static_assert(sizeof(struct tr_slot_dev) == 128, "abi");
_Static_assert(sizeof(struct tr_slot) == 2176, "abi");
_Static_assert(sizeof(struct tr_ledger) == 384 + 16 * 128 + 1024 * 2176 + 16 * 16384, "abi");
#endif
