/* 7: what a look at an event from a helper thread does to a capture in another thread. */
#include <pthread.h>
#include <stdio.h>
#include "calibrate.h"

static const char *const mode_name[] = {"global", "thread_local", "relaxed"};
enum { MODES = 3 };

struct look {
	CUevent event;
	bool relaxed;
	CUresult result;
};

static void *look(void *arg)
{
	struct look *l = arg;
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;

	driver_attach();
	if (l->relaxed)
		MUST(cuThreadExchangeStreamCaptureMode(&mode));
	l->result = cu.cuEventQuery(l->event);
	return NULL;
}

/* One capture with one look in its middle: what the look said, and the end of the capture. */
static void one(struct together *t, unsigned mode, bool relaxed)
{
	CUstream s = stream_new(), other = stream_new();
	struct look l = {event_new(false), relaxed, CUDA_SUCCESS};
	unsigned row = 2 * mode + relaxed;
	pthread_t helper;
	CUresult end;
	CUgraph g = NULL;

	spin(other, 1000);
	MUST(cuEventRecord(l.event, other));
	MUST(cuStreamSynchronize(other));
	MUST(cuStreamBeginCapture_v2(s, (CUstreamCaptureMode)mode));
	spin(s, 1000);
	if (pthread_create(&helper, NULL, look, &l))
		die("no thread");
	pthread_join(helper, NULL);
	end = cu.cuStreamEndCapture(s, &g);
	snprintf(t->text[row], sizeof *t->text, "%s", l.result ? driver_error(l.result) : "ok");
	snprintf(t->text[8 + row], sizeof *t->text, "%s", end ? driver_error(end) : "ok");
	if (end == CUDA_SUCCESS && g)
		MUST(cuGraphDestroy(g));
}

static void all(struct together *t, unsigned number)
{
	(void)number;
	if (!cu.cuStreamBeginCapture_v2 || !cu.cuThreadExchangeStreamCaptureMode)
		die("the driver has no stream capture");
	for (unsigned mode = 0; mode < MODES; mode++)
		for (unsigned relaxed = 0; relaxed < 2; relaxed++)
			one(t, mode, relaxed);
}

void item_capture(void)
{
	struct together *t = together_new();

	json_open("capture", '[');
	if (run_together(t, 1, all, NULL))
		for (unsigned row = 0; row < 2 * MODES; row++) {
			json_open(NULL, '{');
			json_text("capture_mode", mode_name[row / 2]);
			json_bool("helper_relaxed", row % 2);
			json_text("event_query", t->text[row]);
			json_text("capture", t->text[8 + row]);
			json_close('}');
		}
	json_close(']');
}
