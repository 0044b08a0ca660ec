/* The compute limit: GPU time, charged by estimate at the launch and corrected from events.
 *
 *   launch.c     the hooks and the fast path: one flag test, or a launch that joins the thread's
 *                open batch
 *   meter.c      the slow path: streams, batches, units in flight, bounded waits
 *   credit.c     the law: may this thread take credit now, what was measured
 *   cover.c      time in which several streams or processes were busy is charged once
 *   cost.c       estimates by (function, grid x block); graphcost.c the same by executable graph
 *   timeline.c   events, and device time as host time
 *   helper.c     the thread that looks at markers
 *   capture.c, stream.c   hooks on capture, on synchronising calls and on the end of a stream
 *
 * Terms. A unit is what lies between two looks at the device's clock: a batch of launches of one
 * thread on one stream, or a single launch. Its marker is the event recorded behind it. Busy time
 * is wall time of the device between the start of a unit, or the marker before it if that is
 * later, and its marker.
 *
 * Locking: everything but the fields of struct tr_thread that say so is guarded by one lock,
 * tr_meter.lock, never held while waiting. Where a call could wait it is released first.
 * Times are tr_now_ns() unless a name says otherwise. */
#ifndef TRANCHE_METER_H
#define TRANCHE_METER_H
#include <stdbool.h>
#include <stdint.h>
#include "lock.h"
#include "real.h"
#include "tranche_abi.h"

#define TR_MS 1000000ll
#define TR_BATCH_MAX 16
#define TR_BATCH_NS TR_MS	      /* a batch closes at this much estimated work */
#define TR_BATCH_AGE_NS TR_MS	      /* and is closed by the helper when open for longer */
#define TR_QUANTUM_NS (TR_MS / 2)     /* credit that a thread takes at once */
#define TR_IN_FLIGHT_NS (4 * TR_MS)   /* estimated work of one process on the device */
#define TR_TURN_FLIGHT_NS (2 * TR_MS) /* the same in a turn, so that its end can be planned */
#define TR_BLOCK_MAX_NS (200 * TR_MS) /* longest wait for a marker */
/* Longest wait beyond the tenant's own debt: that, and the longest that the arbiter lets work drain,
 * less what it takes to wake up. */
#define TR_WAIT_MAX_NS (TR_BLOCK_MAX_NS + 90 * TR_MS)
/* A unit that runs longer than twice its estimate may spin, within these bounds: a kernel that has spun
 * before has an estimate that says nothing. */
#define TR_SPIN_MIN_NS (100 * TR_MS)
#define TR_SPIN_MAX_NS (300 * TR_MS)
#define TR_SPIN_UNITS 4		      /* in flight at most for launches to pass it undelayed */
#define TR_HANDOVER_NS 80000ll	      /* the GPU takes to change over, until it has been learned */
#define TR_UNKNOWN_NS 50000ll	      /* charged for a launch of unknown cost */

/* --- cost.c ---------------------------------------------------------------------------------- */

struct tr_cost {
	uint64_t tag; /* what it is the cost of, 0: nothing */
	int64_t est;  /* ns, 0: not measured yet */
};
#define TR_COST_WAYS 4 /* one cache line */
#define TR_COST_BUCKETS 1024
extern struct tr_cost tr_costs[TR_COST_BUCKETS][TR_COST_WAYS];

/* Two keys with one tag would share an estimate; of 64 bits that does not happen in practice, and
 * only the estimate would suffer. */
static inline uint64_t tr_cost_tag(const void *what, uint64_t size)
{
	uint64_t x = ((uint64_t)(uintptr_t)what ^ (size << 40 | size >> 24)) * 0x9e3779b97f4a7c15ull;
	return (x ^ x >> 29) | 1;
}

/* The entry of a tag that has been measured, else NULL. Lock-free. */
static inline struct tr_cost *tr_cost_known(uint64_t tag, int64_t *est)
{
	struct tr_cost *c = tr_costs[tag >> 54];
	for (int i = 0; i < TR_COST_WAYS; i++, c++)
		if (__atomic_load_n(&c->tag, __ATOMIC_RELAXED) == tag) {
			*est = __atomic_load_n(&c->est, __ATOMIC_RELAXED);
			return *est > 0 ? c : NULL;
		}
	return NULL;
}

/* The entry of a tag, made if need be in place of another one. Under the lock. */
struct tr_cost *tr_cost_get(uint64_t tag);
/* A single launch took that long. Ignored if the entry is another's by now. */
void tr_cost_learn(struct tr_cost *c, uint64_t tag, int64_t measured_ns);
/* A batch, in which this launch was estimated at est, took ratio (in 1/1024) of its estimate. */
void tr_cost_scale(struct tr_cost *c, uint64_t tag, int64_t est, int64_t ratio);
void tr_cost_forget(uint64_t tag);

/* --- graphcost.c ----------------------------------------------------------------------------- */

uint64_t tr_graphcost_tag(CUgraphExec exec);
/* The executable graph was destroyed or changed: its cost is unknown again. */
void tr_graphcost_forget(CUgraphExec exec);

/* --- credit.c -------------------------------------------------------------------------------- */

/* May this thread take `want` ns of GPU time now? True: it is taken. False: *retry_at is when to
 * ask again. `waiting`: the caller was refused before and has been waiting since. */
bool tr_credit_take(int dev, int64_t want, bool waiting, int64_t *retry_at);
/* The same without asking: what must not block goes into debt. */
void tr_credit_force(int dev, int64_t want);
/* Corrects what was taken: positive charges, negative gives back. */
void tr_credit_settle(int dev, int64_t ns);
/* Measured: busy_ns of new busy time, where credit of settle_ns more (or less) was due. */
void tr_credit_report(int dev, int64_t busy_ns, int64_t settle_ns);
/* The account takes over from the arbiter's. */
void tr_credit_follow(int dev, int64_t tat);
/* Whether the device has a compute limit now. */
bool tr_credit_limited(int dev);

/* --- lease.c: turns between the processes that want one GPU ------------------------------------ */

/* Looks at our grant; dev[].turn and dev[].grant say what it is. */
enum tr_turn tr_lease_look(int dev, int64_t now);
/* Whether an arbiter asks for grants at all. Lock-free. */
bool tr_lease_flagged(int dev);
/* From when the GPU was ours alone in that turn, 0: not known. */
int64_t tr_lease_since(int dev, uint64_t seq);
/* How long, ever until then, another process's work was on the device beside ours. */
int64_t tr_lease_beside(int dev, int64_t at);
/* From when the tenant's debt does not keep it from a turn. */
int64_t tr_lease_eligible(int dev);
/* A launch begins, before it looks at the grant; and is done with, or waits. */
void tr_lease_enter(int dev);
void tr_lease_leave(int dev);
/* We launch nothing more under this grant. */
void tr_lease_close(int dev);
void tr_lease_wait_begin(int dev, int64_t est, int64_t now);
void tr_lease_wait_end(int dev);
void tr_lease_publish(int dev);
/* Publishes what has changed, before the lock is released. */
void tr_lease_flush(void);
/* The arbiter may want to act. */
void tr_lease_ring(void);
void tr_lease_taken(int dev, int64_t ns);
void tr_lease_ended(int dev, int64_t end);
int64_t tr_lease_work_end(int dev, int64_t now);
/* Sleeps while the lease's word is `word`, until a time at most. Without the lock. */
uint32_t tr_lease_word(int dev);
void tr_lease_sleep(int dev, uint32_t word, int64_t until);
/* The two halves of a futex, shared between processes. Replaced in tests. */
extern bool (*tr_wait_word)(const uint32_t *word, uint32_t value, int64_t until);
extern void (*tr_wake_word)(uint32_t *word);

/* --- cover.c --------------------------------------------------------------------------------- */

/* Marks [from, to) as charged; the part of it that was not, in ns. Lock-free, and between
 * processes too. */
int64_t tr_cover(struct tr_coverage *c, int64_t from, int64_t to);

/* --- timeline.c ------------------------------------------------------------------------------ */

struct tr_event {
	CUevent handle;
	struct tr_event *next;
};

/* A context's events, and how its device's clock reads as ours. */
struct tr_timeline {
	struct tr_event *pool;
	struct tr_event *anchor;
	int64_t anchor_ns; /* when the anchor happened */
};

struct tr_event *tr_event_get(struct tr_timeline *tl);
void tr_event_put(struct tr_timeline *tl, struct tr_event *e);
/* When an event happened that was recorded, on a stream with nothing before it, at recorded_ns
 * or little later. Takes the reference on which later answers rest. False: not to be had. */
bool tr_timeline_start(struct tr_timeline *tl, struct tr_event **e, int64_t recorded_ns,
		       int64_t *at);
/* When `e` happened, counted from `from` at from_ns if there is one; it was seen complete at
 * seen_ns. May keep `e`, and then sets it to NULL. */
bool tr_timeline_end(struct tr_timeline *tl, struct tr_event *from, int64_t from_ns,
		     struct tr_event **e, int64_t seen_ns, int64_t *at);

/* --- meter.c --------------------------------------------------------------------------------- */

enum { TR_METER_OFF, TR_METER_ON, TR_METER_CAREFUL /* a capture is going on */ };
/* Read by every launch. */
extern int tr_meter_mode;
/* Where every launch reads whether to look at all: a constant, or the leases page's `metered`. */
extern const uint32_t *tr_meter_watch;

struct tr_ctx {
	CUcontext handle;
	int dev;
	int in_flight; /* units */
	int streams;
	struct tr_timeline time;
	struct tr_ctx *next;
};

struct tr_stream {
	CUstream handle;
	bool ptsz;		 /* which variant of the API its handle belongs to */
	bool gone;		 /* destroyed by the user; freed with its last unit */
	bool was_single;	 /* the last unit was one launch, taken alone after a pause */
	bool foreign;		 /* something else than launches may have been enqueued since */
	struct tr_thread *owner; /* of a per-thread default stream, else NULL */
	struct tr_ctx *ctx;
	struct tr_unit *head, *tail; /* in flight */
	int64_t last_end;	     /* of the last unit that is done, 0: none */
	int64_t beside;		     /* tr_lease_beside then */
	struct tr_stream *next;
};

struct tr_unit {
	struct tr_stream *stream;
	struct tr_event *start, *end; /* start: NULL when the stream was not idle */
	int64_t start_recorded_ns, closed_ns;
	int64_t first_ns; /* when the first launch can have started */
	int64_t start_ns;    /* of the start event, once known */
	int64_t started_ns;  /* of the work, once known, else 0 */
	int64_t est;	     /* charged when launched */
	int64_t counted;     /* busy time reported while it was still running */
	int64_t counted_to;  /* up to when */
	bool single;	     /* one launch, closed at once */
	bool unknown;	     /* of a cost not measured before */
	bool spun;	     /* launches went past it: it may have waited for one of them */
	bool first;	     /* in a turn */
	uint64_t seq;	     /* the turn */
	int64_t beside;	     /* tr_lease_beside when it was opened */
	int n;
	struct tr_cost *cost[TR_BATCH_MAX];
	uint64_t tag[TR_BATCH_MAX];
	int64_t part[TR_BATCH_MAX]; /* est of each launch */
	struct tr_unit *next;	    /* in the stream */
	struct tr_unit *older, *newer; /* on the device */
};

/* A thread that launches. Owner: the thread. */
struct tr_thread {
	/* Fast path: written by the owner alone while in_use; by others under the lock after they
	 * set frozen and saw in_use clear (tr_thread_freeze). */
	uint32_t in_use;
	uint32_t frozen;
	uint32_t room; /* launches that may still join the open batch before one closes it */
	uint32_t ptsz;
	CUstream stream;
	int64_t budget; /* ns of GPU time that may still join, part of the thread's credit */
	uint32_t n;	/* launches in the open batch */
	bool ask_ctx;	/* the stream's handle does not tell the context */
	CUcontext ctx;
	struct tr_cost *cost[TR_BATCH_MAX];
	uint64_t tag[TR_BATCH_MAX];
	int64_t part[TR_BATCH_MAX];
	/* Slow path, under the lock. */
	int64_t credit; /* ns beyond budget */
	int dev;	/* that credit and budget are of */
	uint64_t seq;	/* and the grant, 0: none was needed */
	bool first;	/* the open batch is the first work of a turn */
	struct tr_stream *open; /* NULL: no batch is open */
	struct tr_event *start;
	int64_t start_recorded_ns, first_ns, opened_ns;
	int64_t beside; /* tr_lease_beside when it was opened */
	uint32_t seed;
	struct tr_thread *next;
};
/* One pointer of static TLS; the rest is on the heap. */
extern __thread struct tr_thread *tr_thread_self __attribute__((tls_model("initial-exec")));

enum tr_turn {
	TR_TURN_FREE,  /* no grant is needed: the tenant's own account holds the limit */
	TR_TURN_LOCAL, /* the same, by a grant for who is alone on the GPU */
	TR_TURN_HELD,
	TR_TURN_SOON, /* named in advance: from grant.start_ns on */
	TR_TURN_WAIT,
};

struct tr_dev {
	struct tr_unit *oldest, *newest; /* in flight, by the time they were closed */
	int units;
	int unknown;
	int64_t est; /* of the units in flight */
	/* lease.c */
	bool client;  /* the arbiter knows of us */
	int open;     /* open batches, and units not closed yet */
	int entering; /* launches on the slow path */
	int waiting;  /* of them, for a grant */
	int64_t waiting_since, wanted_ns;
	enum tr_turn turn; /* as last looked at */
	struct tr_grant grant;
	uint64_t closed_seq;
	uint64_t begun_seq;  /* the first work of this grant has been launched */
	int64_t turn_ns;     /* how long it was to be then */
	uint64_t turn_seq;   /* grant with which our turn began */
	int64_t turn_from;   /* and when the GPU had changed over to us, as far as known */
	int64_t taken;	     /* credit of threads and units: estimated work to come */
	int64_t run_from;    /* from when what is in flight has been running */
	int64_t last_end;
	int64_t first_ns;    /* when the first work of the newest grant began */
	int64_t handover_ns; /* learned: what the first unit of a turn takes longer than others, beyond
				TR_HANDOVER_NS */
	uint64_t idle_said;  /* grant in which the arbiter was told that we are idle */
	uint64_t drained_said;
};

extern struct tr_meter {
	struct tr_lock lock;
	struct tr_ctx *ctxs;
	struct tr_stream *streams;
	struct tr_thread *threads;
	struct tr_dev dev[TR_MAX_DEVICES];
	int units;    /* in flight, all devices */
	int captures; /* begun and not ended */
	bool armed;
} tr_meter;

/* One launch on its way through the slow path. */
struct tr_launch {
	uint64_t tag;
	CUstream stream;
	bool ptsz;
	bool alone;    /* a unit of its own: graphs */
	bool no_block; /* charged, never delayed */
	/* out */
	struct tr_thread *thread; /* NULL: not metered */
	struct tr_unit *unit;	  /* NULL: joins the open batch */
	struct tr_cost *cost;
	int64_t est;
	int dev;
	struct tr_ctx *ctx; /* may be gone */
	CUcontext ctx_handle;
	uint32_t word; /* of the lease, before the grant was looked at */
};
/* Around the driver's launch. May wait for credit. */
void tr_meter_begin(struct tr_launch *l);
void tr_meter_end(struct tr_launch *l, CUresult r);

/* Gives a thread's unused credit back. Under the lock. */
void tr_thread_give_back(struct tr_thread *t);
/* Looks whether a compute limit is set, after cuInit and whenever the limits may have changed. */
void tr_meter_arm(void);
void tr_meter_rearm(void);
/* The process ends: no launch looks any more. */
void tr_meter_end_all(void);
static inline bool tr_meter_on(void)
{
	const uint32_t *watch = __atomic_load_n(&tr_meter_watch, __ATOMIC_RELAXED);
	return __builtin_expect(__atomic_load_n(watch, __ATOMIC_RELAXED) != 0, 0);
}
/* The calling thread is about to wait, or enqueues something that is not a launch (then with its
 * stream): closes its open batch; gives unused credit back if it waits. */
void tr_meter_pause(void);
void tr_meter_foreign(CUstream s, bool ptsz);
/* Captures begun (+1) and ended (-1). */
void tr_meter_capture(int by);
/* A stream, a context is about to be destroyed. Driver handles are not touched afterwards. */
void tr_meter_stream_gone(CUstream s);
void tr_meter_context_gone(CUcontext ctx);
void tr_meter_after_fork_child(void);

/* One round of looking after everything in flight: ns to wait before the next, 0: nothing left to
 * look after, -1: the driver has shut down. */
int64_t tr_meter_round(void);

/* --- unit.c: all under the lock -------------------------------------------------------------- */

/* Makes a context current if it is not: whether tr_ctx_leave has to undo it. */
enum tr_entered { TR_ENTERED_NOT, TR_ENTERED_ALREADY, TR_ENTERED_PUSHED };
enum tr_entered tr_ctx_enter(CUcontext ctx);
void tr_ctx_leave(enum tr_entered e);

/* The stream's record, made at first sight; of the calling thread's current context where the
 * handle does not tell. NULL: no context, or a device that is not of the slice. */
struct tr_stream *tr_stream_find(CUstream handle, bool ptsz);
/* Whether an event may be recorded on it now, as far as captures go. */
bool tr_stream_usable(struct tr_stream *s);
/* Records the start of what comes next on an idle stream. NULL: not possible. */
struct tr_event *tr_stream_mark_start(struct tr_stream *s, int64_t *recorded_ns);
/* Looks at the stream's markers. False: the driver has shut down. */
bool tr_stream_look(struct tr_stream *s);
/* The same for all streams of a context, which is current. */
bool tr_ctx_look(struct tr_ctx *ctx);
/* Records the unit's marker and takes it over. Where that is impossible the estimate stands. */
void tr_unit_close(struct tr_unit *u, bool late);
/* The launch failed. */
void tr_unit_discard(struct tr_unit *u);
/* Forgets what is in flight in a context, which stays charged as estimated. */
void tr_ctx_abandon(struct tr_ctx *ctx);
void tr_ctx_forget(CUcontext handle);
void tr_stream_forget(CUstream handle);
/* Closes the thread's open batch, if there is one. late: by another thread. */
void tr_batch_close(struct tr_thread *t, bool late);
/* The same without a marker. */
void tr_batch_drop(struct tr_thread *t);
/* What its launches are estimated at; roughly while its owner launches. */
int64_t tr_batch_est(const struct tr_thread *t);

/* --- helper.c -------------------------------------------------------------------------------- */

/* Starts the helper at its first call and wakes it when it has nothing to do. */
void tr_helper_wake(void);
bool tr_helper_running(void);
void tr_helper_after_fork_child(void);
/* Orders this thread's stores and loads with those of all threads of the process, which use none
 * but compiler barriers. False: the kernel does not have it. */
bool tr_barrier_all(void);
void tr_barrier_init(void);
/* Sleeps until a time of tr_now_ns. Replaced in tests. */
extern void (*tr_sleep_until)(int64_t at);
extern bool tr_helper_wanted; /* cleared in tests: rounds are made by who waits */
#endif
