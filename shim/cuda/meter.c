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
#define DRAIN_LOOK_NS 30000ll  /* between looks at work whose end others wait for */
#define IDLE_SAY_NS 300000ll   /* a holder that is idle for longer says so */
#define IDLE_SAY_LATENCY_NS 60000ll /* the same of the latency class, which gets its turn back at once */

int tr_meter_mode;
static const uint32_t off = 0, on = 1;
const uint32_t *tr_meter_watch = &off;
struct tr_meter tr_meter;
__thread struct tr_thread *tr_thread_self __attribute__((tls_model("initial-exec")));
static pthread_key_t thread_key;
static bool have_key;
static uint64_t seen_generation;

static int64_t clamp(int64_t x, int64_t lo, int64_t hi)
{
	return x < lo ? lo : x > hi ? hi : x;
}

/* --- on and off ------------------------------------------------------------------------------ */

static void set_mode(void)
{
	__atomic_store_n(&tr_meter_mode,
			 !tr_meter.armed	  ? TR_METER_OFF
			 : tr_meter.captures != 0 ? TR_METER_CAREFUL
						  : TR_METER_ON,
			 __ATOMIC_SEQ_CST);
}

static void watch(const uint32_t *word)
{
	__atomic_store_n(&tr_meter_watch, word, __ATOMIC_SEQ_CST);
}

void tr_meter_end_all(void)
{
	watch(&off);
	__atomic_store_n(&tr_meter_mode, TR_METER_OFF, __ATOMIC_RELAXED);
}

static void thread_end(void *arg)
{
	struct tr_thread *t = arg, **p = &tr_meter.threads;
	tr_thread_self = NULL;
	tr_lock(&tr_meter.lock);
	tr_batch_drop(t);
	tr_thread_give_back(t);
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
	tr_lease_flush();
	tr_unlock(&tr_meter.lock);
	free(t);
}

/* Changes when limits do, or when grants come to be needed. */
static uint64_t generation(void)
{
	uint64_t g = __atomic_load_n(&tr_limits()->generation, __ATOMIC_RELAXED);
	for (int i = 0; i < tr_limits_devices(); i++)
		g += tr_lease_flagged(i);
	return g;
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
	seen_generation = generation();
	bool armed = false;
	for (int i = 0; i < tr_limits_devices(); i++)
		if (tr_lease_flagged(i)) {
			armed = true;
		} else if (tr_credit_limited(i)) {
			armed = true;
			if (!tr_meter.armed)
				TR_TRACE("meter: device %d is limited to %u of %d cores", i,
					 tr_limits()->dev[i].cores, TR_CORES_WHOLE);
		}
	tr_meter.armed = armed;
	watch(armed ? &on : &tr_leases()->metered);
	set_mode();
	tr_unlock(&tr_meter.lock);
}

void tr_meter_rearm(void)
{
	if (tr_limits() != NULL &&
	    generation() != __atomic_load_n(&seen_generation, __ATOMIC_RELAXED))
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
	tr_meter_end_all();
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
	tr_lease_flush();
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

void tr_thread_give_back(struct tr_thread *t)
{
	if (t->dev >= 0 && t->credit != 0) {
		tr_credit_settle(t->dev, -t->credit);
		tr_lease_taken(t->dev, -t->credit);
	}
	__atomic_store_n(&t->credit, 0, __ATOMIC_RELAXED);
}

/* --- waiting --------------------------------------------------------------------------------- */

/* How long the oldest work in flight has been running, or could have been. */
static int64_t age(int dev, int64_t now)
{
	const struct tr_unit *u = tr_meter.dev[dev].oldest;
	int64_t since = u == NULL ? now : u->closed_ns;
	if (u != NULL && u->stream->last_end > since)
		since = u->stream->last_end;
	return now - since;
}

/* A unit that runs far longer than expected may wait for something that only a later launch
 * brings: a flag in host memory, a partner. Launches are charged then, not delayed; but only a
 * few, for it may as well be a long kernel, and thousands behind it would be out of control. */
static bool spinning(int dev, int64_t now)
{
	const struct tr_dev *d = &tr_meter.dev[dev];
	struct tr_unit *u = d->oldest;
	if (u == NULL || d->units >= TR_SPIN_UNITS)
		return false;
	int64_t limit = u->unknown ? TR_BLOCK_MAX_NS
				   : clamp(2 * u->est, TR_SPIN_MIN_NS, TR_SPIN_MAX_NS);
	if (age(dev, now) <= limit)
		return false;
	u->spun = true;
	return true;
}

/* Whether a launch has waited for the work in flight as long as it must: a while, and half as long as that has
 * been running. So launches go past what nobody has measured one by one, each after twice the time: a program that
 * asks for hundreds does not get them. */
static bool waited_enough(int dev, int64_t now, int64_t since)
{
	return since != 0 && now - since >= TR_BLOCK_MAX_NS && now - since >= age(dev, now) / 2;
}

/* As spinning, with no room left for exceptions: the launch is admitted after a bounded wait. */
static bool stuck(int dev, int64_t now, int64_t waiting_since)
{
	return tr_meter.dev[dev].units >= TR_SPIN_UNITS && age(dev, now) > TR_BLOCK_MAX_NS &&
	       waited_enough(dev, now, waiting_since);
}

/* Sleeps until a time, or for a turn until the arbiter writes; then looks at what is in flight. */
static void nap(const struct tr_launch *l, bool turn, int64_t until)
{
	CUstreamCaptureMode mode;
	if (turn)
		tr_lease_sleep(l->dev, l->word, until);
	else
		tr_sleep_until(until);
	if (!tr_helper_running()) {
		tr_meter_round();
		return;
	}
	if (turn)
		return;
	bool x = enter(&mode);
	/* The context may be gone by now. */
	for (struct tr_ctx *c = tr_meter.ctxs; c != NULL; c = c->next)
		if (c == l->ctx && c->handle == l->ctx_handle) {
			enum tr_entered e = tr_ctx_enter(c->handle);
			if (e != TR_ENTERED_NOT)
				tr_ctx_look(c);
			tr_ctx_leave(e);
			break;
		}
	leave(x, &mode);
}

/* Whether the queue on the device is long enough, or holds something unmeasured that this launch
 * must not join by the thousand. */
static bool crowded(int dev, const struct tr_launch *l, int64_t now)
{
	const struct tr_dev *d = &tr_meter.dev[dev];
	int64_t most = TR_IN_FLIGHT_NS;
	if (l->cost == NULL && d->unknown > 0)
		return true;
	if (d->turn == TR_TURN_HELD && d->grant.in_flight_ns > 0) {
		/* Who goes first waits for what is in flight. */
		most = d->grant.in_flight_ns;
		if (d->units > 0 && l->est > most && tr_lease_work_end(dev, now) - now > most)
			return true;
	} else if (d->turn == TR_TURN_HELD) {
		most = TR_TURN_FLIGHT_NS;
	}
	return d->units >= 2 && d->est + l->est > most;
}

/* How long a launch has waited, and for what. */
struct wait {
	int dev;	  /* -1: it did not wait yet */
	int64_t since;
	int64_t room_since;
	int64_t most; /* until when it waits at most, 0: not known yet */
	bool turn; /* the arbiter knows that it waits */
};

enum gate { GO, ROOM, CREDIT, TURN };

/* Beyond what the tenant's own debt needs, a launch waits for others so long and no longer: they may
 * wait for it, on another GPU say. */
static bool overdue(int dev, int64_t now, struct wait *w, int64_t *until)
{
	int64_t since = w->room_since != 0 ? w->room_since : w->since;
	int64_t from = tr_lease_eligible(dev);
	if (since == 0)
		return false;
	/* Debt that a unit of ours runs up while it waits for this launch does not count. */
	int64_t most = (from > since ? from : since) + TR_WAIT_MAX_NS;
	if (since + age(dev, now) / 2 > most)
		most = since + age(dev, now) / 2;
	if (w->most == 0 || most < w->most || tr_meter.dev[dev].units == 0)
		w->most = most;
	if (w->most < *until)
		*until = w->most;
	return now >= w->most;
}

/* Credit that was taken in another turn is void. */
static void enter_turn(struct tr_thread *t, struct tr_dev *d)
{
	uint64_t seq = d->turn == TR_TURN_FREE ? 0 : d->grant.seq;
	if (t->seq == seq)
		return;
	if ((d->grant.flags & TR_GRANT_CONTINUES) == 0 || t->seq != seq - 1) {
		tr_batch_close(t, false);
		tr_thread_give_back(t);
	}
	t->seq = seq;
}

/* Nothing more in this turn: what is open is closed, and the arbiter may name the next. */
static void close_turn(struct tr_thread *t, int dev)
{
	tr_batch_close(t, false);
	tr_thread_give_back(t);
	tr_lease_close(dev);
}

/* Whether the launch may go; else for what it waits, and until when at most. */
static enum gate gate(struct tr_thread *t, const struct tr_launch *l, int dev, struct wait *w,
		      int64_t *until)
{
	struct tr_dev *d = &tr_meter.dev[dev];
	int64_t now = tr_now_ns(), want = TR_QUANTUM_NS;
	bool force = l->no_block || spinning(dev, now) || stuck(dev, now, w->since);
	enum tr_turn turn = tr_lease_look(dev, now);
	*until = now + RECHECK_NS;
	if (!force && (turn == TR_TURN_WAIT || turn == TR_TURN_SOON)) {
		if (turn == TR_TURN_WAIT)
			close_turn(t, dev);
		else if (d->grant.start_ns < *until)
			*until = d->grant.start_ns;
		if (!overdue(dev, now, w, until))
			return TURN;
		TR_TRACE("meter: device %d: no turn for %lld ms, launching into debt", dev,
			 (long long)(now - w->since) / TR_MS);
		force = true;
	}
	enter_turn(t, d);
	if (waited_enough(dev, now, w->room_since))
		TR_TRACE("meter: device %d: a marker is overdue, launching into debt", dev);
	else if (!force && crowded(dev, l, now)) {
		*until = now + LOOK_NS;
		return ROOM;
	}
	int64_t lack = l->est - t->credit - t->budget;
	if (lack <= 0)
		return GO;
	if (turn == TR_TURN_HELD && !force) {
		int64_t left = d->grant.end_ns - tr_lease_work_end(dev, now);
		if (left <= 0) {
			close_turn(t, dev);
			return TURN;
		}
		if (left < want)
			want = left;
	}
	if (want < lack)
		want = lack;
	int64_t retry;
	if (force && turn <= TR_TURN_LOCAL) {
		tr_credit_force(dev, want);
	} else if (turn <= TR_TURN_LOCAL && !tr_credit_take(dev, want, w->dev >= 0, &retry)) {
		if (retry < *until)
			*until = retry;
		return CREDIT;
	}
	t->credit += want;
	tr_lease_taken(dev, want);
	return GO;
}

static void wait_begin(struct wait *w, const struct tr_launch *l, int dev, enum gate g)
{
	int64_t now = tr_now_ns();
	if (g == ROOM && w->room_since == 0)
		w->room_since = now;
	if (g != ROOM && w->dev < 0) {
		w->dev = dev;
		w->since = now;
		TR_TRACE("meter: device %d: no %s, waiting", dev, g == TURN ? "turn" : "credit");
	}
	if (g == TURN && !w->turn) {
		w->turn = true;
		tr_lease_wait_begin(dev, l->est, now);
	}
}

static void wait_end(struct wait *w)
{
	if (w->turn)
		tr_lease_wait_end(w->dev);
	w->turn = false;
	if (w->dev < 0)
		return;
	int64_t ns = tr_now_ns() - w->since;
	__atomic_fetch_add(&tr_ledger()->account[w->dev].throttled_ns, (uint64_t)ns,
			   __ATOMIC_RELAXED);
	TR_TRACE("meter: device %d: waited %lld us", w->dev, (long long)ns / 1000);
	*w = (struct wait){.dev = -1};
}

/* --- a launch -------------------------------------------------------------------------------- */

static bool fits(const struct tr_thread *t, const struct tr_stream *s, int64_t est)
{
	int64_t sum = est;
	for (uint32_t i = 0; i < t->n; i++)
		sum += t->part[i];
	return t->open == s && t->n < TR_BATCH_MAX && sum <= TR_BATCH_NS;
}

/* True once in each turn that did not follow on another of ours: what the handover costs shows in the
 * first unit. */
static bool begins_turn(int dev)
{
	struct tr_dev *d = &tr_meter.dev[dev];
	if (d->turn != TR_TURN_HELD || d->begun_seq == d->grant.seq)
		return false;
	d->begun_seq = d->grant.seq;
	d->turn_ns = d->grant.end_ns - d->grant.start_ns;
	d->turn_seq = d->grant.seq;
	d->turn_from = tr_now_ns() + TR_HANDOVER_NS + d->handover_ns;
	if (d->turn_from > d->run_from)
		d->run_from = d->turn_from;
	return true;
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
	bool first = begins_turn(s->ctx->dev);
	int64_t beside = t->seq == 0 ? 0 : tr_lease_beside(s->ctx->dev, tr_now_ns());
	tr_meter.dev[s->ctx->dev].open++;
	if (u == NULL) {
		t->open = s;
		t->first = first;
		t->start = start;
		t->start_recorded_ns = recorded;
		t->n = 0;
		t->beside = beside;
		t->opened_ns = t->first_ns = tr_now_ns();
		return;
	}
	u->stream = s;
	u->start = start;
	u->start_recorded_ns = recorded;
	u->single = start != NULL;
	u->unknown = !known;
	u->first = first;
	u->seq = t->seq;
	u->beside = beside;
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
	return s == NULL || !tr_stream_usable(s) ||
			       (!tr_credit_limited(s->ctx->dev) && !tr_lease_flagged(s->ctx->dev))
		       ? NULL
		       : s;
}

/* One try, under the lock. True: done with, the launch goes on, metered if l->thread is set. */
static bool try_begin(struct tr_launch *l, struct tr_thread *t, struct wait *w, enum gate *g,
		      int64_t *until)
{
	__atomic_store_n(&t->frozen, 0, __ATOMIC_RELAXED);
	if (t->open == NULL)
		t->room = 0;
	struct tr_stream *s = metered_stream(l);
	if (s == NULL) {
		wait_end(w);
		return true;
	}
	int dev = l->dev = s->ctx->dev;
	l->ctx = s->ctx;
	l->ctx_handle = s->ctx->handle;
	l->cost = tr_cost_known(l->tag, &l->est);
	if (l->cost == NULL)
		l->est = TR_UNKNOWN_NS;
	if (t->dev != dev) {
		tr_batch_close(t, false);
		tr_thread_give_back(t);
		t->dev = dev;
		t->seq = 0;
	}
	if (w->dev >= 0 && w->dev != dev)
		wait_end(w);
	l->word = tr_lease_word(dev);
	tr_lease_enter(dev);
	*g = gate(t, l, dev, w, until);
	if (*g != GO) {
		tr_batch_close(t, false);
		wait_begin(w, l, dev, *g);
		tr_lease_leave(dev);
		return false;
	}
	wait_end(w);
	t->credit += t->budget - l->est;
	t->budget = 0;
	place(l, t, s);
	l->thread = t;
	return true;
}

void tr_meter_begin(struct tr_launch *l)
{
	CUstreamCaptureMode mode;
	struct tr_thread *t = thread_self();
	struct wait w = {.dev = -1};
	l->thread = NULL;
	l->unit = NULL;
	if (t == NULL)
		return;
	if (__atomic_load_n(&tr_meter_mode, __ATOMIC_RELAXED) == TR_METER_OFF)
		tr_meter_rearm();
	__atomic_store_n(&t->in_use, 1, __ATOMIC_RELAXED);
	__atomic_signal_fence(__ATOMIC_SEQ_CST);
	for (;;) {
		enum gate g = GO;
		int64_t until = 0;
		bool x = enter(&mode);
		bool done = try_begin(l, t, &w, &g, &until);
		leave(x, &mode);
		if (done)
			break;
		/* Waiting takes time, in which the stream, its context or a capture may come or go. */
		nap(l, g == TURN, until);
	}
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
		tr_lease_taken(t->dev, -l->est);
	}
	tr_lease_leave(l->dev);
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
	tr_thread_give_back(t);
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

/* Stops another thread's fast path, so that its batch and credit can be taken. False: it is launching at this
 * instant, and goes on. */
static bool freeze(struct tr_thread *t)
{
	__atomic_store_n(&t->frozen, 1, __ATOMIC_RELAXED);
	if (t == tr_thread_self ||
	    (tr_barrier_all() && __atomic_load_n(&t->in_use, __ATOMIC_ACQUIRE) == 0))
		return true;
	__atomic_store_n(&t->frozen, 0, __ATOMIC_RELAXED);
	return false;
}

/* When what has been launched is expected to be done; credit that threads hold does not count. */
static int64_t launched_end(int dev)
{
	const struct tr_dev *d = &tr_meter.dev[dev];
	int64_t end = d->run_from + d->est;
	for (const struct tr_thread *t = tr_meter.threads; t != NULL; t = t->next)
		if (t->open != NULL && t->open->ctx->dev == dev)
			end += tr_batch_est(t);
	return end;
}

/* In a turn a batch is closed as soon as its work should be done: others wait to know. */
static bool overripe(const struct tr_thread *t, int64_t now)
{
	int dev = t->open->ctx->dev;
	if (now - t->opened_ns >= TR_BATCH_AGE_NS)
		return true;
	return tr_meter.dev[dev].turn == TR_TURN_HELD && now >= launched_end(dev);
}

/* Batches left open, of threads that do not launch now. */
static void close_late(const struct tr_ctx *ctx, int64_t now)
{
	for (struct tr_thread *t = tr_meter.threads; t != NULL; t = t->next) {
		if (t->open == NULL || t->open->ctx != ctx || !overripe(t, now) ||
		    __atomic_load_n(&t->n, __ATOMIC_RELAXED) == 0)
			continue;
		if (freeze(t))
			tr_batch_close(t, true);
	}
}

static bool any_open(const struct tr_ctx *ctx)
{
	for (const struct tr_thread *t = tr_meter.threads; t != NULL; t = t->next)
		if (t->open != NULL && (ctx == NULL || t->open->ctx == ctx))
			return true;
	return false;
}

/* The end of a turn while no thread launches: their open batches and credit are taken from them. False: one
 * of them is launching at this instant and will see for itself. */
static bool retire(int dev)
{
	bool all = true;
	for (struct tr_thread *t = tr_meter.threads; t != NULL; t = t->next) {
		if (t->dev != dev || (t->open == NULL && t->credit == 0))
			continue;
		if (!freeze(t)) {
			all = false;
			continue;
		}
		tr_batch_close(t, true);
		tr_thread_give_back(t);
	}
	return all;
}

static int64_t sooner(int64_t a, int64_t b)
{
	return a == 0 || (b != 0 && b < a) ? b : a;
}

static int64_t idle_say(int dev)
{
	uint32_t flags = __atomic_load_n(&tr_limits()->dev[dev].flags, __ATOMIC_RELAXED);
	return flags & TR_DEV_LATENCY ? IDLE_SAY_LATENCY_NS : IDLE_SAY_NS;
}

/* A device's turn seen by the helper: ns until it has to look again, 0: not for its sake. */
static int64_t turn_round(int dev, int64_t now)
{
	struct tr_dev *d = &tr_meter.dev[dev];
	if (!d->client || d->grant.seq == 0)
		return 0;
	tr_lease_look(dev, now);
	bool busy = d->units + d->open + d->entering > 0;
	if (d->closed_seq < d->grant.seq && now >= d->grant.end_ns && retire(dev))
		tr_lease_close(dev);
	if (d->closed_seq >= d->grant.seq)
		return !busy ? 0 : clamp(tr_lease_work_end(dev, now) - now, DRAIN_LOOK_NS, ROUND_MAX_NS);
	if (d->turn != TR_TURN_HELD)
		return 0;
	int64_t left = d->grant.end_ns - now, say = idle_say(dev);
	if (busy)
		return sooner(left, clamp(launched_end(dev) - now, DRAIN_LOOK_NS, left));
	if (d->idle_said == d->grant.seq)
		return left < ROUND_MAX_NS ? left : ROUND_MAX_NS;
	int64_t from = d->last_end > d->grant.start_ns ? d->last_end : d->grant.start_ns;
	if (now - from < say)
		return sooner(left, from + say - now);
	d->idle_said = d->grant.seq;
	tr_lease_publish(dev); /* before the bell: who hears it looks at once */
	tr_lease_ring();
	return left;
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
	int64_t now = tr_now_ns();
	for (int i = 0; alive && i < tr_limits_devices(); i++)
		again = sooner(again, turn_round(i, now));
	leave(x, &mode);
	return alive ? again : -1;
}
