/* Device time as host time, without a driver call of its own.
 *
 * The driver tells only the time between two events, as a float of milliseconds, which is exact
 * to a few ns over short spans and useless over hours. So times are counted from an anchor, an
 * event of the last quarter second whose host time is known, and the anchor moves on.
 * Where the anchor lies in host time follows from two facts: an event is not older than the call
 * that recorded it (nearly equal when its stream is idle), and not newer than the moment in which
 * it was seen complete. Right to some microseconds; only the comparison of processes and of the
 * launches' host times rests on it, lengths do not. */
#include "compat.h"
#include <stdlib.h>
#include "meter.h"

#define MOVE_NS (250 * TR_MS)
#define STALE_NS (2000 * TR_MS)
#define DRIFT 50000 /* one part of so many, between the two clocks */

struct tr_event *tr_event_get(struct tr_timeline *tl)
{
	struct tr_event *e = tl->pool;
	if (e != NULL) {
		tl->pool = e->next;
		return e;
	}
	e = malloc(sizeof *e);
	if (e != NULL && REAL(cuEventCreate)(&e->handle, CU_EVENT_DEFAULT) != CUDA_SUCCESS) {
		free(e);
		e = NULL;
	}
	return e;
}

void tr_event_put(struct tr_timeline *tl, struct tr_event *e)
{
	if (e == NULL)
		return;
	e->next = tl->pool;
	tl->pool = e;
}

static bool between(struct tr_event *a, struct tr_event *b, int64_t *ns)
{
	float ms;
	if (REAL(cuEventElapsedTime)(&ms, a->handle, b->handle) != CUDA_SUCCESS)
		return false;
	*ns = (int64_t)((double)ms * 1e6 + (ms < 0 ? -0.5 : 0.5));
	return true;
}

static void set_anchor(struct tr_timeline *tl, struct tr_event **e, int64_t at)
{
	tr_event_put(tl, tl->anchor);
	tl->anchor = *e;
	tl->anchor_ns = at;
	*e = NULL;
}

bool tr_timeline_start(struct tr_timeline *tl, struct tr_event **e, int64_t recorded_ns,
		       int64_t *at)
{
	int64_t d;
	if (tl->anchor == NULL || recorded_ns - tl->anchor_ns > STALE_NS) {
		*at = recorded_ns;
		return true; /* its end will be counted from it, and become the anchor */
	}
	if (!between(tl->anchor, *e, &d))
		return false;
	*at = tl->anchor_ns + d;
	if (*at < recorded_ns) {
		tl->anchor_ns += recorded_ns - *at;
		*at = recorded_ns;
	}
	return true;
}

bool tr_timeline_end(struct tr_timeline *tl, struct tr_event *from, int64_t from_ns,
		     struct tr_event **e, int64_t seen_ns, int64_t *at)
{
	int64_t d;
	if (from == NULL) {
		from = tl->anchor;
		from_ns = tl->anchor_ns;
	}
	if (from == NULL || !between(from, *e, &d))
		return false;
	*at = from_ns + d;
	if (*at > seen_ns) {
		tl->anchor_ns -= *at - seen_ns;
		*at = seen_ns;
	}
	if (tl->anchor == NULL || *at - tl->anchor_ns > MOVE_NS)
		set_anchor(tl, e, *at - (tl->anchor == NULL ? 0 : (*at - tl->anchor_ns) / DRIFT));
	return true;
}
