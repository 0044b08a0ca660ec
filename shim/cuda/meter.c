/* The way of a launch that does not simply join the open batch: credit, bounded waits, batches. */
#include "compat.h"
#include <pthread.h>
#include <stdlib.h>
#include "meter.h"
#include "slice.h"
#include "trace.h"

#define RECHECK_NS (10 * TR_MS)	 /* corrections and new limits shorten a wait for credit */
#define LOOK_NS 100000ll	 /* while waiting for a marker */
#define PAUSE_NS 200000ll	 /* a stream idle for longer starts with a launch by itself */
/* A kernel launched on an idle stream starts this soon after the call began, or as it ends; a
 * thread that loses its processor in between does not count. */
#define LAUNCH_NS 5000ll
#define ROUND_MIN_NS 200000ll
#define ROUND_MAX_NS (2 * TR_MS)

int tr_meter_mode;
struct tr_meter tr_meter;
__thread struct tr_thread *tr_thread_self __attribute__((tls_model("initial-exec")));
static pthread_key_t thread_key;
static bool have_key;
static uint64_t seen_generation;

/* --- on and off ------------------------------------------------------------------------------ */

static void set_mode(void)
{
	__atomic_store_n(&tr_meter_mode,
			 !tr_meter.armed	  ? TR_METER_OFF
			 : tr_meter.captures != 0 ? TR_METER_CAREFUL
						  : TR_METER_ON,
			 __ATOMIC_SEQ_CST);
}

static void thread_end(void *arg)
{
	struct tr_thread *t = arg, **p = &tr_meter.threads;
	tr_thread_self = NULL;
	tr_lock(&tr_meter.lock);
	tr_batch_drop(t);
	if (t->dev >= 0)
		tr_credit_settle(t->dev, -t->credit);
	while (*p != NULL && *p != t)
		p = &(*p)->next;
	if (*p != NULL)
		*p = t->next;
	/* A per-thread default stream ends with its thread; its units are still looked at. */
	for (struct tr_stream *s = tr_meter.streams; s != NULL; s = s->next)
		if (s->owner == t) {
			s->gone = true;
			s->owner = NULL;
		}
	tr_unlock(&tr_meter.lock);
	free(t);
}

void tr_meter_arm(void)
{
	static bool once;
	tr_lock(&tr_meter.lock);
	if (!once) {
		once = true;
		have_key = pthread_key_create(&thread_key, thread_end) == 0;
		tr_barrier_init();
	}
	seen_generation = __atomic_load_n(&tr_limits()->generation, __ATOMIC_RELAXED);
	bool armed = false;
	for (int i = 0; i < tr_limits_devices(); i++)
		if (tr_credit_limited(i)) {
			armed = true;
			if (!tr_meter.armed)
				TR_TRACE("meter: device %d is limited to %u of %d cores", i,
					 tr_limits()->dev[i].cores, TR_CORES_WHOLE);
		}
	tr_meter.armed = armed;
	set_mode();
	tr_unlock(&tr_meter.lock);
}

void tr_meter_rearm(void)
{
	const struct tr_limits *l = tr_limits();
	if (l != NULL && __atomic_load_n(&l->generation, __ATOMIC_RELAXED) !=
				 __atomic_load_n(&seen_generation, __ATOMIC_RELAXED))
		tr_meter_arm();
}

void tr_meter_capture(int by)
{
	tr_lock(&tr_meter.lock);
	if (by > 0 && tr_thread_self != NULL)
		tr_batch_close(tr_thread_self, false);
	tr_meter.captures += by;
	if (tr_meter.captures < 0)
		tr_meter.captures = 0;
	set_mode();
	tr_unlock(&tr_meter.lock);
}

/* The child has a driver that cannot be used, and none of the parent's threads. */
void tr_meter_after_fork_child(void)
{
	tr_meter = (struct tr_meter){0};
	tr_thread_self = NULL;
	if (have_key)
		pthread_setspecific(thread_key, NULL);
	tr_helper_after_fork_child();
	set_mode();
}

/* --- locking, with our driver calls safe from captures --------------------------------------- */

static bool enter(CUstreamCaptureMode *mode)
{
	tr_lock(&tr_meter.lock);
	*mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	return tr_meter.captures > 0 && REAL(cuThreadExchangeStreamCaptureMode) != NULL &&
	       REAL(cuThreadExchangeStreamCaptureMode)(mode) == CUDA_SUCCESS;
}

static void leave(bool exchanged, CUstreamCaptureMode *mode)
{
	if (exchanged)
		REAL(cuThreadExchangeStreamCaptureMode)(mode);
	tr_unlock(&tr_meter.lock);
}

/* --- threads --------------------------------------------------------------------------------- */

static struct tr_thread *thread_self(void)
{
	struct tr_thread *t = tr_thread_self;
	if (t != NULL)
		return t;
	t = calloc(1, sizeof *t);
	if (t == NULL)
		return NULL;
	t->dev = -1;
	t->seed = (uint32_t)(uintptr_t)t | 1;
	tr_lock(&tr_meter.lock);
	t->next = tr_meter.threads;
	tr_meter.threads = t;
	tr_unlock(&tr_meter.lock);
	tr_thread_self = t;
	if (have_key)
		pthread_setspecific(thread_key, t);
	return t;
}

static void give_back(struct tr_thread *t)
{
	if (t->dev >= 0)
		tr_credit_settle(t->dev, -t->credit);
	t->credit = 0;
}

/* --- waiting --------------------------------------------------------------------------------- */

/* A unit that runs far longer than expected may wait for something that only a later launch
 * brings: a flag in host memory, a partner. Launches are charged then, not delayed; but only a
 * few, for it may as well be a long kernel, and thousands behind it would be out of control. */
static bool spinning(int dev, int64_t now)
{
	const struct tr_dev *d = &tr_meter.dev[dev];
	const struct tr_unit *u = d->oldest;
	if (u == NULL || d->units >= TR_SPIN_UNITS)
		return false;
	int64_t limit = u->unknown ? TR_BLOCK_MAX_NS : TR_SPIN_AGE_NS;
	int64_t since = u->stream->last_end > u->closed_ns ? u->stream->last_end : u->closed_ns;
	return now - since > (limit > 10 * u->est ? limit : 10 * u->est);
}

/* The same with no room left for exceptions: the launch is admitted after a bounded wait. */
static bool stuck(int dev, int64_t now, int64_t waiting_since)
{
	const struct tr_dev *d = &tr_meter.dev[dev];
	const struct tr_unit *u = d->oldest;
	return u != NULL && d->units >= TR_SPIN_UNITS && waiting_since != 0 &&
	       now - waiting_since > TR_BLOCK_MAX_NS && now - u->closed_ns > TR_BLOCK_MAX_NS &&
	       now - u->stream->last_end > TR_BLOCK_MAX_NS;
}

static void nap(struct tr_ctx *ctx, CUcontext handle, int64_t until)
{
	CUstreamCaptureMode mode;
	tr_sleep_until(until);
	if (!tr_helper_running()) {
		tr_meter_round();
		return;
	}
	bool x = enter(&mode);
	/* The context may be gone by now. */
	for (struct tr_ctx *c = tr_meter.ctxs; c != NULL; c = c->next)
		if (c == ctx && c->handle == handle) {
			enum tr_entered e = tr_ctx_enter(handle);
			if (e != TR_ENTERED_NOT)
				tr_ctx_look(c);
			tr_ctx_leave(e);
			break;
		}
	leave(x, &mode);
}

/* Whether the queue on the device is long enough, or holds something unmeasured that this launch
 * must not join by the thousand. */
static bool crowded(int dev, const struct tr_launch *l)
{
	const struct tr_dev *d = &tr_meter.dev[dev];
	if (l->cost == NULL && d->unknown > 0)
		return true;
	return d->units >= 2 && d->est + l->est > TR_IN_FLIGHT_NS;
}

/* Waits until markers make room, for a bounded time. */
static void wait_for_room(struct tr_ctx *ctx, CUcontext handle, int dev, const struct tr_launch *l)
{
	int64_t start = tr_now_ns(), now = start;
	for (;;) {
		tr_lock(&tr_meter.lock);
		bool wait = crowded(dev, l) && !spinning(dev, now);
		if (wait && tr_thread_self->open != NULL)
			tr_batch_close(tr_thread_self, false);
		tr_unlock(&tr_meter.lock);
		if (!wait)
			return;
		if (now - start >= TR_BLOCK_MAX_NS) {
			TR_TRACE("meter: device %d: a marker is overdue, launching into debt", dev);
			return;
		}
		nap(ctx, handle, now + LOOK_NS);
		now = tr_now_ns();
	}
}

/* Takes `want` ns of credit; waits for it unless the launch must not be delayed. */
static void wait_for_credit(struct tr_ctx *ctx, CUcontext handle, int dev, int64_t want,
			    bool no_block)
{
	int64_t start = 0, retry, now;
	while (!tr_credit_take(dev, want, start != 0, &retry)) {
		now = tr_now_ns();
		tr_lock(&tr_meter.lock);
		if (start == 0)
			tr_batch_close(tr_thread_self, false);
		bool force = no_block || spinning(dev, now) || stuck(dev, now, start);
		tr_unlock(&tr_meter.lock);
		if (force) {
			tr_credit_force(dev, want);
			break;
		}
		if (start == 0) {
			start = now;
			TR_TRACE("meter: device %d: no credit, waiting about %lld us", dev,
				 (long long)(retry - now) / 1000);
		}
		nap(ctx, handle, retry < now + RECHECK_NS ? retry : now + RECHECK_NS);
	}
	if (start == 0)
		return;
	now = tr_now_ns();
	__atomic_fetch_add(&tr_ledger()->account[dev].throttled_ns, (uint64_t)(now - start),
			   __ATOMIC_RELAXED);
	TR_TRACE("meter: device %d: waited %lld us for credit", dev, (long long)(now - start) / 1000);
}

/* --- a launch -------------------------------------------------------------------------------- */

static bool fits(const struct tr_thread *t, const struct tr_stream *s, int64_t est)
{
	int64_t sum = est;
	for (uint32_t i = 0; i < t->n; i++)
		sum += t->part[i];
	return t->open == s && t->n < TR_BATCH_MAX && sum <= TR_BATCH_NS;
}

/* Decides whether the launch is a unit of its own, joins the open batch or opens one. */
static void place(struct tr_launch *l, struct tr_thread *t, struct tr_stream *s)
{
	if (t->open != NULL && t->open != s)
		tr_batch_close(t, false);
	bool known = l->cost != NULL;
	bool alone = l->alone || !known || l->est >= TR_BATCH_NS;
	if (!known)
		l->cost = tr_cost_get(l->tag);
	if (!alone && !s->foreign && fits(t, s, l->est))
		return;
	tr_batch_close(t, false);
	tr_stream_look(s);
	struct tr_event *start = NULL;
	int64_t recorded = 0;
	bool idle = s->head == NULL;
	if (idle || s->foreign)
		start = tr_stream_mark_start(s, &recorded);
	s->foreign = false;
	alone = alone ||
		(idle && (!s->was_single || recorded - s->last_end > PAUSE_NS) && start != NULL);
	struct tr_unit *u = alone ? calloc(1, sizeof *u) : NULL;
	if (u == NULL) {
		t->open = s;
		t->start = start;
		t->start_recorded_ns = recorded;
		t->n = 0;
		t->opened_ns = t->first_ns = tr_now_ns();
		return;
	}
	u->stream = s;
	u->start = start;
	u->start_recorded_ns = recorded;
	u->single = start != NULL;
	u->unknown = !known;
	u->est = l->est;
	u->n = 1;
	u->cost[0] = l->cost;
	u->tag[0] = l->tag;
	u->part[0] = l->est;
	u->first_ns = tr_now_ns();
	l->unit = u;
}

static struct tr_stream *metered_stream(const struct tr_launch *l)
{
	struct tr_stream *s = tr_stream_find(l->stream, l->ptsz);
	return s == NULL || !tr_credit_limited(s->ctx->dev) || !tr_stream_usable(s) ? NULL : s;
}

void tr_meter_begin(struct tr_launch *l)
{
	CUstreamCaptureMode mode;
	struct tr_thread *t = thread_self();
	l->thread = NULL;
	l->unit = NULL;
	if (t == NULL)
		return;
	__atomic_store_n(&t->in_use, 1, __ATOMIC_RELAXED);
	__atomic_signal_fence(__ATOMIC_SEQ_CST);

	bool x = enter(&mode);
	__atomic_store_n(&t->frozen, 0, __ATOMIC_RELAXED);
	if (t->open == NULL)
		t->room = 0;
	struct tr_stream *s = metered_stream(l);
	struct tr_ctx *ctx = s == NULL ? NULL : s->ctx;
	CUcontext handle = ctx == NULL ? NULL : ctx->handle;
	int dev = ctx == NULL ? -1 : ctx->dev;
	l->cost = tr_cost_known(l->tag, &l->est);
	if (l->cost == NULL)
		l->est = TR_UNKNOWN_NS;
	if (ctx != NULL && t->dev != dev) {
		tr_batch_close(t, false);
		give_back(t);
		t->dev = dev;
	}
	bool crowd = ctx != NULL && crowded(dev, l);
	int64_t lack = ctx == NULL ? 0 : l->est - t->credit - t->budget;
	leave(x, &mode);
	if (ctx == NULL)
		goto out;
	if (crowd && !l->no_block)
		wait_for_room(ctx, handle, dev, l);
	if (lack > 0) {
		int64_t want = lack > TR_QUANTUM_NS ? lack : TR_QUANTUM_NS;
		wait_for_credit(ctx, handle, dev, want, l->no_block);
		t->credit += want;
	}
	/* Waiting took time, in which the stream, its context or a capture may have come or gone. */
	x = enter(&mode);
	s = metered_stream(l);
	if (s != NULL && s->ctx->dev == dev) {
		t->credit += t->budget - l->est;
		t->budget = 0;
		place(l, t, s);
		l->thread = t;
	}
	leave(x, &mode);
out:
	if (l->thread == NULL)
		__atomic_store_n(&t->in_use, 0, __ATOMIC_RELEASE);
}

/* How far the fast path may go on with the open batch. */
static void set_room(struct tr_thread *t, const struct tr_launch *l)
{
	/* Batches of changing length, so that the launch that is measured alone after each is not
	 * always the same one of a loop. */
	t->seed = t->seed * 1664525 + 1013904223;
	uint32_t most = TR_BATCH_MAX - (t->n == 1 ? t->seed >> 30 : 0);
	int64_t left = TR_BATCH_NS;
	for (uint32_t i = 0; i < t->n; i++)
		left -= t->part[i];
	t->room = most > t->n + 1 ? most - t->n - 1 : 0;
	t->budget = left < t->credit ? left : t->credit;
	if (t->budget < 0)
		t->budget = 0;
	t->credit -= t->budget;
	t->stream = l->stream;
	t->ptsz = l->ptsz;
	t->ctx = t->open->ctx->handle;
	t->ask_ctx = tr_visible_devices > 1 &&
		     (uintptr_t)l->stream <= (uintptr_t)CU_STREAM_PER_THREAD_HANDLE;
}

static void joined(struct tr_thread *t, const struct tr_launch *l)
{
	t->cost[t->n] = l->cost;
	t->tag[t->n] = l->tag;
	t->part[t->n] = l->est;
	__atomic_store_n(&t->n, t->n + 1, __ATOMIC_RELAXED);
	if (t->room == 0 && t->n > 1) {
		tr_batch_close(t, false);
		return;
	}
	set_room(t, l);
	if (t->room == 0)
		tr_batch_close(t, false);
}

static int64_t started(int64_t called, int64_t returned)
{
	return returned < called + LAUNCH_NS ? returned : called + LAUNCH_NS;
}

void tr_meter_end(struct tr_launch *l, CUresult r)
{
	CUstreamCaptureMode mode;
	struct tr_thread *t = l->thread;
	if (t == NULL)
		return;
	int64_t now = tr_now_ns();
	bool x = enter(&mode);
	if (l->unit != NULL)
		l->unit->first_ns = started(l->unit->first_ns, now);
	else if (t->n == 0)
		t->first_ns = started(t->first_ns, now);
	if (r != CUDA_SUCCESS && l->unit != NULL) {
		tr_unit_discard(l->unit);
	} else if (r != CUDA_SUCCESS) {
		t->credit += l->est;
		if (t->n == 0)
			tr_batch_drop(t);
	} else if (l->unit != NULL) {
		tr_unit_close(l->unit, false);
	} else if (t->open != NULL) {
		joined(t, l);
	} else {
		/* Its stream or context went away meanwhile. */
		tr_credit_report(t->dev, l->est, 0);
	}
	leave(x, &mode);
	__atomic_store_n(&t->in_use, 0, __ATOMIC_RELEASE);
	tr_helper_wake();
}

/* --- calls that are not launches ------------------------------------------------------------- */

void tr_meter_pause(void)
{
	CUstreamCaptureMode mode;
	struct tr_thread *t = tr_thread_self;
	/* A glance: only this thread opens a batch and takes credit, so nothing is missed that is not
	 * being closed by somebody else right now. */
	if (t == NULL || (__atomic_load_n(&t->open, __ATOMIC_RELAXED) == NULL &&
			  __atomic_load_n(&t->credit, __ATOMIC_RELAXED) == 0))
		return;
	bool x = enter(&mode);
	__atomic_store_n(&t->in_use, 1, __ATOMIC_RELAXED);
	tr_batch_close(t, false);
	give_back(t);
	__atomic_store_n(&t->in_use, 0, __ATOMIC_RELEASE);
	leave(x, &mode);
	tr_helper_wake();
}

void tr_meter_foreign(CUstream h, bool ptsz)
{
	CUstreamCaptureMode mode;
	struct tr_thread *t = tr_thread_self;
	if (t == NULL)
		return;
	bool x = enter(&mode);
	__atomic_store_n(&t->in_use, 1, __ATOMIC_RELAXED);
	struct tr_stream *s = tr_stream_find(h, ptsz);
	if (s != NULL) {
		if (t->open == s)
			tr_batch_close(t, false);
		s->foreign = true;
	}
	__atomic_store_n(&t->in_use, 0, __ATOMIC_RELEASE);
	leave(x, &mode);
}

void tr_meter_stream_gone(CUstream h)
{
	CUstreamCaptureMode mode;
	bool x = enter(&mode);
	tr_stream_forget(h);
	leave(x, &mode);
}

void tr_meter_context_gone(CUcontext handle)
{
	tr_lock(&tr_meter.lock);
	tr_ctx_forget(handle);
	tr_unlock(&tr_meter.lock);
}

/* --- looking after what is in flight --------------------------------------------------------- */

/* Batches left open, of threads that do not launch now. */
static void close_late(const struct tr_ctx *ctx, int64_t now)
{
	for (struct tr_thread *t = tr_meter.threads; t != NULL; t = t->next) {
		if (t->open == NULL || t->open->ctx != ctx || now - t->opened_ns < TR_BATCH_AGE_NS ||
		    __atomic_load_n(&t->n, __ATOMIC_RELAXED) == 0)
			continue;
		bool mine = t == tr_thread_self;
		__atomic_store_n(&t->frozen, 1, __ATOMIC_RELAXED);
		if (mine || (tr_barrier_all() && __atomic_load_n(&t->in_use, __ATOMIC_ACQUIRE) == 0))
			tr_batch_close(t, true);
		else
			__atomic_store_n(&t->frozen, 0, __ATOMIC_RELAXED);
	}
}

static bool any_open(const struct tr_ctx *ctx)
{
	for (const struct tr_thread *t = tr_meter.threads; t != NULL; t = t->next)
		if (t->open != NULL && (ctx == NULL || t->open->ctx == ctx))
			return true;
	return false;
}

int64_t tr_meter_round(void)
{
	static int64_t pause = ROUND_MIN_NS;
	CUstreamCaptureMode mode;
	bool alive = true, x = enter(&mode);
	int before = tr_meter.units;
	for (struct tr_ctx *c = tr_meter.ctxs; c != NULL && alive; c = c->next) {
		if (c->in_flight == 0 && !any_open(c))
			continue;
		enum tr_entered e = tr_ctx_enter(c->handle);
		if (e == TR_ENTERED_NOT) {
			tr_ctx_abandon(c);
			continue;
		}
		close_late(c, tr_now_ns());
		alive = tr_ctx_look(c);
		tr_ctx_leave(e);
	}
	if (tr_meter.units != before || pause > ROUND_MAX_NS)
		pause = ROUND_MIN_NS;
	else if (pause < ROUND_MAX_NS)
		pause += pause / 4;
	int64_t again = tr_meter.units > 0 ? pause : any_open(NULL) ? TR_BATCH_AGE_NS / 2 : 0;
	leave(x, &mode);
	return alive ? again : -1;
}
