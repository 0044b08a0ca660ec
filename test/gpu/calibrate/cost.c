/* 4: what calls cost the caller, and what events add to launches. */
#include <math.h>
#include "calibrate.h"

#define BURST 128

enum { LAUNCH, LAUNCH_RECORD, QUERY_DONE, QUERY_PENDING, ROUND_POLL, ROUND_SYNC, ROUND_EVENT,
       TINY, TINY_EVENTS, DEPTH, COSTS };
static const char *const cost_name[COSTS] = {
	"launch_ns", "launch_and_record_ns", "query_done_ns", "query_pending_ns",
	"round_trip_poll_ns", "round_trip_sync_ns", "round_trip_start_event_ns",
	"tiny_kernel_ns", "tiny_kernel_with_event_ns", "queue_depth",
};

static CUstream s;
static CUevent event[BURST];

/* Calls while the GPU is busy, so that nothing but the calls is measured. */
static double launches(bool record)
{
	double v[64];
	unsigned rounds = (unsigned)(40 * config->scale) + 5;

	for (unsigned k = 0; k < rounds; k++) {
		int64_t t0;
		spin(s, 5 * MS);
		t0 = now_ns();
		for (unsigned i = 0; i < BURST; i++) {
			spin(s, 1000);
			if (record)
				MUST(cuEventRecord(event[i], s));
		}
		v[k] = (double)(now_ns() - t0) / BURST;
		MUST(cuStreamSynchronize(s));
	}
	return quantile(v, rounds, 0.25); /* what else the machine does only adds to it */
}

static double queries(bool pending)
{
	double v[64];
	unsigned rounds = (unsigned)(40 * config->scale) + 5;

	for (unsigned k = 0; k < rounds; k++) {
		int64_t t0;
		if (pending)
			spin(s, 20 * MS);
		MUST(cuEventRecord(event[0], s));
		if (!pending)
			MUST(cuStreamSynchronize(s));
		t0 = now_ns();
		for (unsigned i = 0; i < BURST; i++)
			(void)cu.cuEventQuery(event[0]);
		v[k] = (double)(now_ns() - t0) / BURST;
		MUST(cuStreamSynchronize(s));
	}
	return quantile(v, rounds, 0.5);
}

/* From an idle GPU: a launch until it is known to be done. */
static double round_trip(bool sync, bool start_event)
{
	double v[1024];
	unsigned rounds = (unsigned)(500 * config->scale) + 20;

	for (unsigned k = 0; k < rounds; k++) {
		int64_t t0 = now_ns();
		if (start_event)
			MUST(cuEventRecord(event[1], s));
		spin(s, 20 * US);
		MUST(cuEventRecord(event[0], s));
		if (sync)
			MUST(cuStreamSynchronize(s));
		else
			poll_event(event[0]);
		v[k] = (double)(now_ns() - t0) - 20e3;
		sleep_until_ns(now_ns() + 300 * US);
	}
	return quantile(v, rounds, 0.5);
}

/* Time of the device for each of many kernels of 2 us, as the GPU works off its queue. */
static double tiny(bool events)
{
	double v[64];
	unsigned rounds = (unsigned)(20 * config->scale) + 5;
	CUevent a = event_new(true), b = event_new(true);

	for (unsigned k = 0; k < rounds; k++) {
		spin(s, 2 * MS); /* so that all are queued when they begin */
		MUST(cuEventRecord(a, s));
		for (unsigned i = 0; i < BURST; i++) {
			spin(s, 2000);
			if (events)
				MUST(cuEventRecord(event[i], s));
		}
		MUST(cuEventRecord(b, s));
		MUST(cuStreamSynchronize(s));
		v[k] = elapsed_us(a, b) * 1e3 / BURST;
	}
	return quantile(v, rounds, 0.5);
}

/* Launches that are taken at once behind a long kernel. */
static double queue_depth(void)
{
	unsigned n;

	spin(s, 400 * MS);
	for (n = 0; n < 8192; n++) {
		int64_t t0 = now_ns();
		spin(s, 1000);
		if (now_ns() - t0 > 50 * MS)
			break;
	}
	MUST(cuStreamSynchronize(s));
	return n < 8192 ? n + 1 : NAN; /* the long kernel was one */
}

static void measure(struct together *t, unsigned number)
{
	(void)number;
	s = stream_new();
	for (unsigned i = 0; i < BURST; i++)
		event[i] = event_new(true);
	t->value[LAUNCH] = launches(false);
	t->value[LAUNCH_RECORD] = launches(true);
	t->value[QUERY_DONE] = queries(false);
	t->value[QUERY_PENDING] = queries(true);
	t->value[ROUND_POLL] = round_trip(false, false);
	t->value[ROUND_SYNC] = round_trip(true, false);
	t->value[ROUND_EVENT] = round_trip(false, true);
	t->value[TINY] = tiny(false);
	t->value[TINY_EVENTS] = tiny(true);
	t->value[DEPTH] = queue_depth();
}

void item_cost(struct spec *out)
{
	struct together *t = together_new();

	json_open("cost", '{');
	if (run_together(t, 1, measure, NULL)) {
		for (unsigned i = 0; i < COSTS; i++)
			json_number(cost_name[i], t->value[i]);
		json_number("record_ns", t->value[LAUNCH_RECORD] - t->value[LAUNCH]);
		json_number("sync_wake_ns", t->value[ROUND_SYNC] - t->value[ROUND_POLL]);
		json_number("event_adds_ns", t->value[TINY_EVENTS] - t->value[TINY]);
		out->launch_ns = t->value[LAUNCH];
		out->sync_ns = fmax(0, t->value[ROUND_SYNC] - t->value[ROUND_POLL]);
		out->queue_depth = t->value[DEPTH];
	}
	json_close('}');
}
