/* Streams and the units in flight on them: markers, and what they tell. Everything here is under
 * the meter's lock. */
#include "compat.h"
#include <stdlib.h>
#include "meter.h"
#include "slice.h"
#include "trace.h"

/* An event recorded on an idle stream happens this soon after the call began, or as it ends. */
#define RECORD_NS 1500ll
/* A unit is reported on while it runs once it has run this long and twice its estimate. */
#define LONG_NS (2 * TR_MS)
#define HANDOVER_MAX_NS 500000ll
/* Beside another process's work a unit may have had so much less than half of the GPU. */
#define OTHERS_SLICE_NS TR_MS

static int64_t max64(int64_t a, int64_t b)
{
	return a > b ? a : b;
}

static int64_t min64(int64_t a, int64_t b)
{
	return a < b ? a : b;
}

/* --- contexts and streams -------------------------------------------------------------------- */

enum tr_entered tr_ctx_enter(CUcontext ctx)
{
	CUcontext now = NULL;
	if (REAL(cuCtxGetCurrent)(&now) == CUDA_SUCCESS && now == ctx)
		return TR_ENTERED_ALREADY;
	if (REAL(cuCtxPushCurrent_v2)(ctx) == CUDA_SUCCESS)
		return TR_ENTERED_PUSHED;
	return TR_ENTERED_NOT;
}

void tr_ctx_leave(enum tr_entered e)
{
	CUcontext ignored;
	if (e == TR_ENTERED_PUSHED)
		REAL(cuCtxPopCurrent_v2)(&ignored);
}

static struct tr_ctx *ctx_find(CUcontext handle)
{
	for (struct tr_ctx *c = tr_meter.ctxs; c != NULL; c = c->next)
		if (c->handle == handle)
			return c;
	enum tr_entered e = tr_ctx_enter(handle);
	int dev = e == TR_ENTERED_NOT ? -1 : tr_current_device();
	tr_ctx_leave(e);
	struct tr_ctx *c = dev < 0 ? NULL : calloc(1, sizeof *c);
	if (c == NULL)
		return NULL;
	c->handle = handle;
	c->dev = dev;
	c->next = tr_meter.ctxs;
	tr_meter.ctxs = c;
	return c;
}

static bool is_per_thread(CUstream h, bool ptsz)
{
	return h == CU_STREAM_PER_THREAD_HANDLE || (h == NULL && ptsz);
}

static bool is_legacy(CUstream h, bool ptsz)
{
	return h == CU_STREAM_LEGACY_HANDLE || (h == NULL && !ptsz);
}

static bool is_special(CUstream h)
{
	return h == NULL || h == CU_STREAM_LEGACY_HANDLE || h == CU_STREAM_PER_THREAD_HANDLE;
}

struct tr_stream *tr_stream_find(CUstream h, bool ptsz)
{
	struct tr_thread *owner = is_per_thread(h, ptsz) ? tr_thread_self : NULL;
	CUcontext ctx = NULL;
	if (is_special(h) && (REAL(cuCtxGetCurrent)(&ctx) != CUDA_SUCCESS || ctx == NULL))
		return NULL;
	for (struct tr_stream *s = tr_meter.streams; s != NULL; s = s->next)
		if (s->handle == h && !s->gone &&
		    (!is_special(h) ||
		     (s->ptsz == ptsz && s->ctx->handle == ctx && s->owner == owner)))
			return s;
	if (!is_special(h) && (REAL(cuStreamGetCtx) == NULL ||
			       REAL(cuStreamGetCtx)(h, &ctx) != CUDA_SUCCESS)) {
		ctx = NULL;
		REAL(cuCtxGetCurrent)(&ctx);
	}
	struct tr_ctx *c = ctx == NULL ? NULL : ctx_find(ctx);
	struct tr_stream *s = c == NULL ? NULL : calloc(1, sizeof *s);
	if (s == NULL)
		return NULL;
	s->handle = h;
	s->ptsz = ptsz;
	s->owner = owner;
	s->ctx = c;
	s->next = tr_meter.streams;
	tr_meter.streams = s;
	c->streams++;
	return s;
}

static void stream_free(struct tr_stream *s)
{
	struct tr_stream **p = &tr_meter.streams;
	while (*p != s)
		p = &(*p)->next;
	*p = s->next;
	s->ctx->streams--;
	free(s);
}

bool tr_stream_usable(struct tr_stream *s)
{
	if (s->gone || (s->owner != NULL && s->owner != tr_thread_self))
		return false;
	if (tr_meter.captures == 0)
		return true;
	/* Any error (906: another stream's capture forbids work on the legacy stream) reads as
	 * capturing too. */
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	CUresult r = s->ptsz ? REAL(cuStreamIsCapturing_ptsz)(s->handle, &status)
			     : REAL(cuStreamIsCapturing)(s->handle, &status);
	return r == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_NONE;
}

/* The event must come from the stream's context, and special handles mean the current one's. */
static bool record(struct tr_stream *s, struct tr_event **e)
{
	enum tr_entered in = tr_ctx_enter(s->ctx->handle);
	bool ok = in != TR_ENTERED_NOT && tr_stream_usable(s);
	if (ok) {
		*e = tr_event_get(&s->ctx->time);
		ok = *e != NULL &&
		     (s->ptsz ? REAL(cuEventRecord_ptsz)((*e)->handle, s->handle)
			      : REAL(cuEventRecord)((*e)->handle, s->handle)) == CUDA_SUCCESS;
		if (!ok)
			tr_event_put(&s->ctx->time, *e);
	}
	tr_ctx_leave(in);
	if (!ok)
		*e = NULL;
	return ok;
}

struct tr_event *tr_stream_mark_start(struct tr_stream *s, int64_t *recorded_ns)
{
	struct tr_event *e = NULL;
	int64_t before = tr_now_ns();
	record(s, &e);
	*recorded_ns = min64(tr_now_ns(), before + RECORD_NS);
	return e;
}

/* --- units ----------------------------------------------------------------------------------- */

static void unit_unlink(struct tr_unit *u)
{
	struct tr_dev *d = &tr_meter.dev[u->stream->ctx->dev];
	*(u->older != NULL ? &u->older->newer : &d->oldest) = u->newer;
	*(u->newer != NULL ? &u->newer->older : &d->newest) = u->older;
	d->units--;
	d->unknown -= u->unknown;
	d->est -= u->est;
	tr_lease_taken(u->stream->ctx->dev, -u->est);
	u->stream->ctx->in_flight--;
	tr_meter.units--;
}

static void unit_link(struct tr_unit *u)
{
	struct tr_stream *s = u->stream;
	struct tr_dev *d = &tr_meter.dev[s->ctx->dev];
	*(s->tail != NULL ? &s->tail->next : &s->head) = u;
	s->tail = u;
	u->older = d->newest;
	*(u->older != NULL ? &u->older->newer : &d->oldest) = u;
	d->newest = u;
	d->units++;
	d->unknown += u->unknown;
	d->est += u->est;
	s->ctx->in_flight++;
	tr_meter.units++;
}

static void unit_free(struct tr_unit *u)
{
	tr_event_put(&u->stream->ctx->time, u->start);
	tr_event_put(&u->stream->ctx->time, u->end);
	free(u);
}

static void unit_pop(struct tr_stream *s)
{
	struct tr_unit *u = s->head;
	s->head = u->next;
	if (s->head == NULL)
		s->tail = NULL;
	unit_unlink(u);
	unit_free(u);
}

void tr_unit_discard(struct tr_unit *u)
{
	int dev = u->stream->ctx->dev;
	tr_credit_settle(dev, -u->est);
	tr_lease_taken(dev, -u->est);
	tr_meter.dev[dev].open--;
	unit_free(u);
}

void tr_unit_close(struct tr_unit *u, bool late)
{
	struct tr_stream *s = u->stream;
	struct tr_account *a = &tr_ledger()->account[s->ctx->dev];
	__atomic_fetch_add(&a->launches, (uint64_t)u->n, __ATOMIC_RELAXED);
	s->was_single = u->single;
	s->foreign = false;
	/* A marker of ours on the legacy stream would hold up the context's other streams. */
	bool harm = late && is_legacy(s->handle, s->ptsz) && s->ctx->streams > 1;
	u->closed_ns = tr_now_ns();
	tr_meter.dev[s->ctx->dev].open--;
	if (!harm && record(s, &u->end)) {
		unit_link(u);
		if (late)
			TR_TRACE("meter: device %d: batch of %d launches closed late, %lld us after "
				 "its first",
				 s->ctx->dev, u->n, (long long)(u->closed_ns - u->first_ns) / 1000);
		return;
	}
	TR_TRACE("meter: device %d: %d launches without a marker, charged as estimated: %lld us",
		 s->ctx->dev, u->n, (long long)u->est / 1000);
	tr_credit_report(s->ctx->dev, u->est, 0);
	tr_lease_taken(s->ctx->dev, -u->est);
	unit_free(u);
}

/* When the unit began, for the first time it is asked; false: unknown yet. */
static bool unit_started(struct tr_unit *u)
{
	struct tr_stream *s = u->stream;
	int64_t at;
	if (u->started_ns != 0)
		return true;
	if (u->start == NULL) {
		u->started_ns = s->last_end != 0 ? s->last_end : u->closed_ns;
		return true;
	}
	if (!tr_timeline_start(&s->ctx->time, &u->start, u->start_recorded_ns, &at))
		return false;
	u->start_ns = at;
	/* The host may have dawdled between the start event and the launch. */
	u->started_ns = max64(max64(at, u->first_ns), s->last_end);
	return true;
}

static void learn(struct tr_unit *u, int64_t busy)
{
	if (u->spun && !u->unknown)
		return;
	if (u->n == 1) {
		if (u->unknown)
			TR_TRACE("meter: device %d: first estimate of %llx: %lld us",
				 u->stream->ctx->dev, (unsigned long long)u->tag[0],
				 (long long)busy / 1000);
		tr_cost_learn(u->cost[0], u->tag[0], busy);
		return;
	}
	int64_t ratio = busy * 1024 / max64(u->est, 1);
	for (int i = 0; i < u->n; i++)
		tr_cost_scale(u->cost[i], u->tag[i], u->part[i], ratio);
}

/* How long the stream had nothing to do between `from` and the close of the batch, if its launches
 * came evenly and took what was estimated. */
static int64_t guess_gaps(const struct tr_unit *u, int64_t from)
{
	int64_t at = from, gaps = 0, step = u->n < 2 ? 0 : (u->closed_ns - u->first_ns) / (u->n - 1);
	for (int i = 0; i < u->n; i++) {
		int64_t launched = u->first_ns + i * step;
		if (launched > at) {
			gaps += launched - at;
			at = launched;
		}
		at += u->part[i];
	}
	return gaps + max64(u->closed_ns - at, 0);
}

/* Whether a turn has more units like it, of which its estimate is learned. */
static bool one_of_several(const struct tr_unit *u)
{
	return 2 * u->est <= tr_meter.dev[u->stream->ctx->dev].turn_ns;
}

static int64_t handover(const struct tr_dev *d)
{
	return TR_HANDOVER_NS + d->handover_ns;
}

/* In the first unit of a turn lies what the GPU took to change over to this process (and, where the turn
 * was named in advance, the rest of the other's work): not the tenant's time. It is learned from
 * short units of known cost, as the mean of what the first ones took longer than expected; not where
 * several streams share the GPU, which makes units longer that are not alone. */
static int64_t without_handover(struct tr_unit *u, int64_t busy)
{
	struct tr_dev *d = &tr_meter.dev[u->stream->ctx->dev];
	if (!u->first || u->unknown)
		return busy;
	int64_t over = busy - u->est, most = HANDOVER_MAX_NS;
	if (u->est < most && over > most)
		return u->est; /* others' work was in between */
	if (one_of_several(u) && u->stream->ctx->streams == 1)
		d->handover_ns += (max64(min64(over, most), -most) - handover(d)) / 32;
	return max64(busy - handover(d), 0);
}

/* Whether what is known of the unit's cost says more than the time that it took beside other work, of which
 * that work may have had all. A kernel that waits for something has no cost to know. */
static bool telling(const struct tr_unit *u, int64_t busy)
{
	const struct tr_dev *d = &tr_meter.dev[u->stream->ctx->dev];
	return !u->unknown && u->counted_to == 0 && (d->grant.flags & TR_GRANT_COUPLED) == 0 &&
	       busy <= 4 * u->est + 5 * LONG_NS;
}

/* Of `busy`, another process's work was on the GPU for `beside`: its time slices lie in ours. */
static int64_t without_others(const struct tr_unit *u, int64_t busy, int64_t beside)
{
	beside = min64(beside, busy);
	if (!telling(u, busy))
		return busy - beside / 2;
	/* Of what both were on the GPU for, each had half, but for a time slice: a kernel that is longer than its
	 * like were before does not pass for one of them. */
	int64_t least = max64(busy - beside, busy - beside / 2 - OTHERS_SLICE_NS);
	return min64(max64(u->est, least), busy);
}

/* For how long another process's work was on the GPU since the unit began, or was reported of. */
static int64_t others(const struct tr_unit *u, int64_t at)
{
	const struct tr_stream *s = u->stream;
	if (u->seq == 0)
		return 0;
	/* Never longer than that: what was read of a page without our grant is 0. */
	int64_t most = max64(at - max64(max64(u->first_ns, s->last_end), u->counted_to), 0);
	return min64(max64(tr_lease_beside(s->ctx->dev, at) - max64(u->beside, s->beside), 0), most);
}

/* The unit is done, seen at `seen`: what it took against what was charged.
 *
 * After it was closed everything was queued, so from then on the stream had no gaps. Before that
 * the host may have left some between the launches, if the stream had run dry: those are guessed,
 * and never more than the time in which they can have been. */
static void unit_account(struct tr_unit *u, int64_t seen)
{
	struct tr_stream *s = u->stream;
	int dev = s->ctx->dev;
	struct tr_dev *d = &tr_meter.dev[dev];
	int64_t end, lead = max64(u->est, u->counted);
	if (!unit_started(u) ||
	    !tr_timeline_end(&s->ctx->time, u->start, u->start_ns, &u->end, seen, &end)) {
		tr_credit_report(dev, max64(u->est - u->counted, 0), 0);
		return;
	}
	int64_t from = max64(max64(u->started_ns, s->last_end), u->counted_to);
	if (u->first)
		from = max64(from, min64(tr_lease_since(dev, u->seq), end));
	else if (u->seq != 0 && u->seq == d->turn_seq)
		from = max64(from, min64(d->turn_from, end));
	int64_t span = max64(end - from, 0), unsure = 0, busy = span;
	if (!u->single && u->closed_ns > from)
		unsure = min64(u->closed_ns - from, span);
	if (unsure > 0)
		busy -= min64(guess_gaps(u, from), unsure);
	int64_t beside = others(u, end);
	busy = beside > 0 ? without_others(u, busy, beside) : without_handover(u, busy);
	int64_t fresh = tr_cover(&tr_ledger()->coverage[dev], end - busy, end);
	tr_credit_report(dev, fresh, u->counted + fresh - lead);
	tr_lease_ended(dev, end);
	if (u->first)
		d->first_ns = d->turn_from = end - busy;
	/* Where gaps were guessed from the estimate, that must not confirm itself; nor where others' work was
	 * beside it: then only what cannot be right is learned from. */
	if (beside > 0) {
		int64_t took = u->counted + busy;
		if (u->unknown || took > u->est + u->est / 4 || took < u->est - u->est / 4)
			learn(u, took);
	} else if (u->first && !u->unknown && one_of_several(u))
		; /* what the handover took of it is a guess as well */
	else if (u->counted_to != 0)
		learn(u, end - u->started_ns);
	else if (unsure == 0 || span < u->est)
		learn(u, span);
	else if (span - unsure > u->est)
		learn(u, span - unsure);
	s->last_end = max64(s->last_end, end);
	s->beside = u->seq == 0 ? 0 : tr_lease_beside(dev, end);
}

/* A long unit that still ran at `now`: what it has taken so far is charged now, so that others do
 * not go on meanwhile, and stays charged if the process dies. */
static void unit_progress(struct tr_unit *u, int64_t now)
{
	struct tr_stream *s = u->stream;
	int dev = s->ctx->dev;
	int64_t beside = others(u, now);
	if (now - max64(u->closed_ns, s->last_end) - beside / 2 < max64(LONG_NS, 2 * u->est))
		return;
	if (u->start != NULL && u->started_ns == 0 &&
	    REAL(cuEventQuery)(u->start->handle) != CUDA_SUCCESS)
		return;
	if (!unit_started(u))
		return;
	int64_t from = max64(u->started_ns, max64(s->last_end, u->counted_to));
	if (u->start == NULL)
		from = max64(from, u->closed_ns);
	if (now - from < TR_MS)
		return;
	int64_t before = max64(u->est, u->counted);
	from += min64(beside, now - from) / 2;
	u->beside = max64(u->beside, s->beside) + beside;
	int64_t fresh = tr_cover(&tr_ledger()->coverage[dev], from, now);
	u->counted += fresh;
	u->counted_to = now;
	tr_credit_report(dev, fresh, max64(u->est, u->counted) - before);
}

bool tr_stream_look(struct tr_stream *s)
{
	while (s->head != NULL) {
		int64_t now = tr_now_ns();
		CUresult r = REAL(cuEventQuery)(s->head->end->handle);
		if (r == CUDA_SUCCESS) {
			unit_account(s->head, tr_now_ns());
			unit_pop(s);
		} else if (r == CUDA_ERROR_NOT_READY) {
			unit_progress(s->head, now);
			return true;
		} else if (r >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED &&
			   r <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD) {
			return true; /* somebody captures: later */
		} else {
			TR_TRACE("meter: device %d: markers of a context lost, error %d",
				 s->ctx->dev, (int)r);
			tr_ctx_abandon(s->ctx);
			return r != CUDA_ERROR_DEINITIALIZED;
		}
	}
	return true;
}

bool tr_ctx_look(struct tr_ctx *ctx)
{
	struct tr_stream *next;
	for (struct tr_stream *s = tr_meter.streams; s != NULL; s = next) {
		next = s->next;
		if (s->ctx != ctx)
			continue;
		if (s->head != NULL && !tr_stream_look(s))
			return false;
		if (s->gone && s->head == NULL)
			stream_free(s);
	}
	return true;
}

/* --- batches --------------------------------------------------------------------------------- */

static void batch_clear(struct tr_thread *t)
{
	/* The owner glances at open and credit without the lock (tr_meter_pause). */
	__atomic_store_n(&t->open, NULL, __ATOMIC_RELAXED);
	__atomic_store_n(&t->credit, t->credit + t->budget, __ATOMIC_RELAXED);
	t->start = NULL;
	t->n = 0;
	t->room = 0;
	t->budget = 0;
}

int64_t tr_batch_est(const struct tr_thread *t)
{
	int64_t est = 0;
	uint32_t n = __atomic_load_n(&t->n, __ATOMIC_RELAXED);
	for (uint32_t i = 0; i < n && i < TR_BATCH_MAX; i++)
		est += __atomic_load_n(&t->part[i], __ATOMIC_RELAXED);
	return est;
}

void tr_batch_drop(struct tr_thread *t)
{
	if (t->open == NULL)
		return;
	int dev = t->open->ctx->dev;
	tr_event_put(&t->open->ctx->time, t->start);
	tr_credit_report(dev, tr_batch_est(t), 0);
	tr_lease_taken(dev, -tr_batch_est(t));
	tr_meter.dev[dev].open--;
	batch_clear(t);
}

void tr_batch_close(struct tr_thread *t, bool late)
{
	if (t->open == NULL)
		return;
	struct tr_unit *u = t->n == 0 ? NULL : calloc(1, sizeof *u);
	if (u == NULL) {
		tr_batch_drop(t);
		return;
	}
	u->stream = t->open;
	u->start = t->start;
	u->start_recorded_ns = t->start_recorded_ns;
	u->first_ns = t->first_ns;
	u->first = t->first;
	u->seq = t->seq;
	u->beside = t->beside;
	u->n = (int)t->n;
	for (int i = 0; i < u->n; i++) {
		u->cost[i] = t->cost[i];
		u->tag[i] = t->tag[i];
		u->part[i] = t->part[i];
		u->est += t->part[i];
	}
	batch_clear(t);
	tr_unit_close(u, late);
}

/* --- ends ------------------------------------------------------------------------------------ */

/* The owner takes the slow path next, and finds nothing open. */
static void drop_batches(const struct tr_ctx *ctx, const struct tr_stream *s)
{
	for (struct tr_thread *t = tr_meter.threads; t != NULL; t = t->next)
		if (t->open != NULL && (t->open == s || t->open->ctx == ctx)) {
			__atomic_store_n(&t->frozen, 1, __ATOMIC_RELAXED);
			if (t != tr_thread_self)
				tr_barrier_all();
			tr_batch_drop(t);
		}
}

void tr_ctx_abandon(struct tr_ctx *ctx)
{
	for (struct tr_stream *s = tr_meter.streams; s != NULL; s = s->next)
		while (s->ctx == ctx && s->head != NULL) {
			struct tr_unit *u = s->head;
			tr_credit_report(ctx->dev, max64(u->est - u->counted, 0), 0);
			unit_pop(s);
		}
}

static void free_events(struct tr_timeline *tl)
{
	tr_event_put(tl, tl->anchor);
	for (struct tr_event *e = tl->pool, *next; e != NULL; e = next) {
		next = e->next;
		free(e);
	}
}

void tr_ctx_forget(CUcontext handle)
{
	struct tr_ctx **p = &tr_meter.ctxs, *c;
	while (*p != NULL && (*p)->handle != handle)
		p = &(*p)->next;
	if ((c = *p) == NULL)
		return;
	drop_batches(c, NULL);
	tr_ctx_abandon(c);
	for (struct tr_stream *s = tr_meter.streams, *next; s != NULL; s = next) {
		next = s->next;
		if (s->ctx == c)
			stream_free(s);
	}
	*p = c->next;
	free_events(&c->time); /* the handles die with the context */
	free(c);
}

void tr_stream_forget(CUstream handle)
{
	for (struct tr_stream *s = tr_meter.streams; s != NULL; s = s->next)
		if (s->handle == handle && !s->gone && !is_special(handle)) {
			if (tr_thread_self != NULL && tr_thread_self->open == s)
				tr_batch_close(tr_thread_self, false);
			drop_batches(NULL, s);
			s->gone = true; /* freed by the next look, with its last unit */
			return;
		}
}
