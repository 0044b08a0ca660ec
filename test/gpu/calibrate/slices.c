/* How the GPU is shared between processes by itself: turns of what length, and what a change costs. */
#include <math.h>
#include <stdlib.h>
#include "../../../gpuload/ptx.h"
#include "calibrate.h"

#define KERNEL_US 100.0
#define BATCH 400 /* kernels in the queue at once, each with an event behind it */
#define STAMP_ROOM 1024

/* --- 1: what two processes that want everything lose ------------------------------------------ */

#define WHOLE (MS) /* a kernel */
#define AHEAD 16

/* Kernels completed from t->at on, for 3 s, as a part of the time. */
static void count(struct together *t, unsigned number)
{
	CUstream s = stream_new();
	CUevent done[AHEAD];
	int64_t now, from = 0, last = 0, end = 0, length = (int64_t)(3000 * MS * config->scale);
	unsigned n = 0;

	for (unsigned i = 0; i < AHEAD; i++)
		done[i] = event_new(false);
	if (number == 0)
		t->at = now_ns() + 300 * MS;
	for (unsigned i = 0; !end || last < end; i++) {
		if (i >= AHEAD) {
			MUST(cuEventSynchronize(done[i % AHEAD]));
			now = now_ns();
			if (!from && t->at && now >= t->at) {
				from = now;
				end = from + length;
			} else if (from) {
				n++;
			}
			last = now;
		}
		spin(s, WHOLE);
		MUST(cuEventRecord(done[i % AHEAD], s));
	}
	t->more[number] = n * (double)WHOLE / (double)(last - from);
}

void item_loss(void)
{
	struct together *t = together_new();
	double alone = NAN, sum = NAN;

	json_open("loss", '{');
	if (run_together(t, 1, count, NULL))
		json_number("alone", alone = t->more[0]);
	if (run_together(t, 2, count, count)) {
		sum = t->more[0] + t->more[1];
		json_open("pair", '[');
		json_number(NULL, t->more[0]);
		json_number(NULL, t->more[1]);
		json_close(']');
	}
	json_number("lost", alone - sum);
	/* Of each turn and the change before it, the change is this part. */
	json_number("switch_of_turn", 1 - sum / alone);
	json_close('}');
}

/* --- 3: turns, from events --------------------------------------------------------------------- */

/* The work between gaps is known to a kernel only, so turns are averaged; gaps are known exactly. */
struct turns {
	double work_us, gap_us[MAX_VALUES];
	unsigned turns, gaps;
};

/* One batch: kernels with an event behind each, and where the time between two events is long. */
static void look_at_batch(CUstream s, CUevent *e, struct turns *out)
{
	double took[BATCH], sorted[BATCH], base, work = 0;
	bool in_turn = false;

	MUST(cuEventRecord(e[0], s));
	for (unsigned i = 0; i < BATCH; i++) {
		spin(s, (uint64_t)(KERNEL_US * 1e3));
		MUST(cuEventRecord(e[i + 1], s));
	}
	MUST(cuStreamSynchronize(s));
	for (unsigned i = 0; i < BATCH; i++)
		sorted[i] = took[i] = elapsed_us(e[i], e[i + 1]);
	base = quantile(sorted, BATCH, 0.5);
	for (unsigned i = 0; i < BATCH; i++) {
		double gap = took[i] - base;
		if (gap < 0.3 * KERNEL_US) {
			work += took[i];
			continue;
		}
		/* The kernel was interrupted somewhere: half of it lies on either side. */
		if (out->gaps < MAX_VALUES)
			out->gap_us[out->gaps++] = gap;
		if (in_turn) {
			out->work_us += work + base / 2;
			out->turns++;
		}
		in_turn = true;
		work = base / 2;
	}
}

static void by_events(struct together *t, unsigned number)
{
	CUstream s = stream_new();
	CUevent e[BATCH + 1];
	static struct turns turns;
	unsigned batches = (unsigned)(40 * config->scale) + 1;

	(void)number;
	for (unsigned i = 0; i <= BATCH; i++)
		e[i] = event_new(true);
	sleep_until_ns(now_ns() + 50 * MS);
	for (unsigned i = 0; i < batches; i++)
		look_at_batch(s, e, &turns);
	t->value[0] = turns.turns ? turns.work_us / turns.turns : NAN;
	t->value[1] = quantile(turns.gap_us, turns.gaps, 0.5);
	t->value[2] = turns.turns;
}

/* --- the same from the global timer, as a kernel sees it ---------------------------------------- */

/* A kernel that has the GPU for 400 ms notes when it had not. */
static void by_stamps(struct together *t, unsigned number)
{
	uint64_t *word, ns = 400 * MS, room = STAMP_ROOM;
	size_t bytes = (STAMP_GAP + 2 * STAMP_ROOM) * sizeof *word;
	CUdeviceptr at;
	unsigned n;

	(void)number;
	if (!kernels_run())
		return;
	word = calloc(1, bytes);
	if (!word)
		die("out of memory");
	MUST(cuMemAlloc_v2(&at, bytes));
	void *args[] = {&ns, &at, &room};
	MUST(cuLaunchKernel(kernel_stamp(), 1, 1, 1, 1, 1, 1, 0, stream_new(), args, NULL));
	MUST(cuCtxSynchronize());
	MUST(cuMemcpyDtoH_v2(word, at, bytes));
	n = (unsigned)(word[STAMP_GAPS] < room ? word[STAMP_GAPS] : room);
	for (unsigned i = 0; i < n && 2 * i + 1 < MAX_VALUES; i++) {
		const uint64_t *gap = word + STAMP_GAP + 2 * i;
		t->value[2 * i] = i ? (double)(gap[0] - gap[-1]) / 1e3 : NAN; /* turn before it */
		t->value[2 * i + 1] = (double)(gap[1] - gap[0]) / 1e3;
	}
	t->n = n;
}

static void print_stamps(struct together *t, struct spec *s)
{
	double turn[STAMP_ROOM], gap[STAMP_ROOM];
	unsigned n = t->n < STAMP_ROOM ? t->n : STAMP_ROOM, turns = 0;

	for (unsigned i = 0; i < n; i++) {
		gap[i] = t->value[2 * i + 1];
		if (i)
			turn[turns++] = t->value[2 * i];
	}
	json_open("by_stamps", '{');
	json_number("gaps", n);
	if (turns > 1) {
		json_number("turn_us_p10", quantile(turn, turns, 0.1));
		json_number("turn_us", s->slice_us = quantile(turn, turns, 0.5));
		json_number("turn_us_p90", quantile(turn, turns, 0.9));
		json_number("away_us_p10", quantile(gap, n, 0.1));
		json_number("away_us", quantile(gap, n, 0.5));
		json_number("away_us_p90", quantile(gap, n, 0.9));
		/* Away: a change, the other's turn, a change back. */
		json_number("switch_us", s->switch_us = (quantile(gap, n, 0.5) - s->slice_us) / 2);
	}
	json_close('}');
}

void item_slices(struct spec *s)
{
	struct together *t = together_new();

	json_open("slices", '{');
	if (run_together(t, 2, by_events, saturate) && t->value[2] > 0) {
		s->slice_us = t->value[0];
		s->switch_us = (t->value[1] - t->value[0]) / 2;
		json_open("by_events", '{');
		json_number("turns", t->value[2]);
		json_number("turn_us", s->slice_us);
		json_number("away_us", t->value[1]);
		json_number("switch_us", s->switch_us);
		json_close('}');
	}
	if (run_together(t, 2, by_stamps, saturate) && t->n)
		print_stamps(t, s);
	json_close('}');
}
