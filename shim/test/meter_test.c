/* The compute limit in virtual time: how exactly each load gets its share, and what must never
 * happen. Prints a table; any line that breaks its bound fails the test. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "meter.h"
#include "meter_world.h"

#define US 1000ll
#define S (1000 * TR_MS)
static int failures;

static void check(bool ok, const char *what)
{
	if (!ok) {
		printf("FAIL: %s\n", what);
		failures++;
	}
}

/* --- shares ----------------------------------------------------------------------------------- */

enum how { FLOOD, SYNC, BURSTS, TWO_STREAMS, GRAPHS, MIXED, RANDOM, SYNC_GAP };
static const char *const how_name[] = {"one after the other", "synchronised each", "bursts of 200",
				       "two streams at once", "graphs",	"two functions mixed",
				       "random durations", "host work between"};

static uint64_t seed = 42;
static uint64_t rnd(void)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	return seed ^= seed << 17;
}

static void one(enum how how, int64_t dur, long i)
{
	CUstream s = world_stream(0);
	switch (how) {
	case FLOOD:
		world_launch(1, dur, 108, s);
		break;
	case SYNC:
		world_launch(1, dur, 108, s);
		world_sync(s);
		break;
	case BURSTS:
		world_launch(1, dur, 108, s);
		if (i % 200 == 199)
			world_sync(s);
		break;
	case TWO_STREAMS:
		world_launch(1, dur, 108, world_stream((int)(i & 1)));
		break;
	case GRAPHS:
		world_launch_graph(1, dur, s);
		break;
	case MIXED:
		world_launch(1 + i % 2, i % 2 ? dur : dur / 8, 108, s);
		break;
	case RANDOM:
		world_launch(1, dur / 8 + (int64_t)(rnd() % (uint64_t)(2 * dur)), 108, s);
		break;
	case SYNC_GAP:
		world_launch(1, dur, 108, s);
		world_sync(s);
		world_compute(dur / 16);
		break;
	}
}

/* Share of the GPU in hundredths, by the truth, from 2 s on. */
static double share(enum how how, int64_t dur, int cores, int64_t seconds)
{
	world.parallel = how == TWO_STREAMS;
	world_start(cores);
	int64_t from = world_now + 2 * S, to = from + seconds * S;
	for (long i = 0; world_now < to; i++)
		one(how, dur, i);
	return 100.0 * (double)world_busy(from, to) / (double)(to - from);
}

static void table(const char *title, double bound)
{
	static const int64_t durs[] = {20 * US, 100 * US, TR_MS, 10 * TR_MS, 60 * TR_MS};
	static const int limits[] = {10, 30, 50, 80};
	printf("%-22s %9s %7s %7s %7s %7s\n", title, "kernel", "10", "30", "50", "80");
	for (int how = FLOOD; how <= SYNC_GAP; how++)
		for (unsigned d = 0; d < 5; d++) {
			printf("%-22s %6lld us", how_name[how], (long long)durs[d] / US);
			/* Sixty random units of up to 130 ms say little to a point. */
			int64_t seconds = how == RANDOM && durs[d] > 10 * TR_MS ? 300
					  : durs[d] > TR_MS			? 40
										: 6;
			for (unsigned l = 0; l < 4; l++) {
				double got = share(how, durs[d], limits[l], seconds);
				/* A program that waits for each kernel cannot use more than it asks for. */
				double most = how == SYNC     ? 100.0 * (double)durs[d] / (double)(durs[d] + 30 * US)
					      : how == SYNC_GAP ? 100.0 * (double)durs[d] / (double)(durs[d] * 17 / 16 + 30 * US)
								: 100;
				bool ok = most < limits[l] + 1 ? got > most - 6 && got < limits[l] + bound
							       : fabs(got - limits[l]) <= bound;
				printf(" %7.2f%s", got, ok ? "" : "!");
				failures += !ok;
			}
			printf("\n");
		}
}

/* --- single facts ----------------------------------------------------------------------------- */

/* The check above must fail without the gate, or it shows nothing. */
static void test_negative_control(void)
{
	double got = share(FLOOD, 100 * US, 0, 3);
	printf("no limit set: share %.1f\n", got);
	check(got > 95, "without a limit a flood fills the GPU");
	check(world_calls.records == 0 && world_calls.queries == 0,
	      "without a limit no call of the driver is added");
}

/* Limits above the demand delay nothing and what is measured is the truth. */
static void test_not_reached(void)
{
	world.parallel = false;
	world_start(50);
	for (int i = 0; i < 20000; i++) {
		world_launch(1, 20 * US, 108, world_stream(0));
		world_compute(76 * US);
	}
	world_compute(20 * TR_MS);
	double truth = (double)world_busy(0, INT64_MAX / 8);
	double told = (double)world_account()->gpu_time_ns;
	printf("sparse launches, limit not reached: measured %.1f %% of the truth, waited %lld us\n",
	       100 * told / truth, (long long)world_account()->throttled_ns / US);
	check(fabs(told / truth - 1) < 0.1, "sparse launches are not charged for the gaps");
	check(world_account()->throttled_ns == 0, "a limit that is not reached delays nothing");
	printf("added driver calls per launch: %.3f records, %.3f queries\n",
	       (double)world_calls.records / (double)world_calls.launches,
	       (double)world_calls.queries / (double)world_calls.launches);
}

/* A thousand launches of something never measured must not all be in the queue at once. */
static void test_unknown_flood(void)
{
	world_start(30);
	int64_t most = 0;
	for (int i = 0; i < 300; i++) {
		world_launch(1, 10 * TR_MS, 108, world_stream(0));
		int64_t q = world_queued();
		most = q > most ? q : most;
	}
	printf("flood of unknown 10 ms kernels: at most %lld us queued\n", (long long)most / US);
	check(most <= 21 * TR_MS, "unknown cost: at most two in the queue");
	world_start(30);
	most = 0;
	for (int i = 0; i < 300; i++) { /* each a function of its own */
		world_launch(i, 10 * TR_MS, 108, world_stream(0));
		int64_t q = world_queued();
		most = q > most ? q : most;
	}
	check(most <= 21 * TR_MS, "unknown cost, many functions: at most two in the queue");
}

/* A kernel that waits for a flag that only a later launch sets: the later launch must come. */
static void test_spin(void)
{
	world.parallel = true;
	for (int known = 0; known < 2; known++) {
		world_start(10);
		for (int i = 0; known && i < 50; i++) {
			world_launch(1, 50 * US, 108, world_stream(0));
			world_sync(world_stream(0));
		}
		int64_t t = world_now;
		world_launch(1, -1, 108, world_stream(0));
		world_launch(2, 50 * US, 108, world_stream(1));
		int64_t waited = world_now - t;
		printf("spinning kernel (%s): the launch that frees it waited %lld ms\n",
		       known ? "known" : "unknown", (long long)(waited / TR_MS));
		check(waited < 450 * TR_MS, "a spinning kernel must not block launches for long");
		world_release();
		world_sync(world_stream(1));
		/* And it is paid for. */
		world_compute(10 * TR_MS);
		int64_t spun = world_busy(0, INT64_MAX / 8);
		check((int64_t)world_account()->gpu_time_ns > spun * 9 / 10, "spinning is GPU time");
	}
	world.parallel = false;
}

/* The other side of that: an ordinary long kernel must not open the gate for what comes after. */
static void test_long_is_no_spin(void)
{
	world_start(50);
	int64_t most = 0, t = world_now;
	while (world_now < t + 20 * S) {
		world_launch(1, 300 * TR_MS, 108, world_stream(0));
		int64_t q = world_queued();
		most = q > most ? q : most;
	}
	double got = 100.0 * (double)world_busy(t + 5 * S, t + 20 * S) / (15.0 * (double)S);
	printf("300 ms kernels, limit 50: share %.1f, at most %lld ms queued\n", got,
	       (long long)(most / TR_MS));
	check(most < 1500 * TR_MS, "long kernels: a bounded queue");
	check(fabs(got - 50) < 2, "long kernels: the share holds in the long run");
}

static void test_capture(void)
{
	world_start(10);
	CUstream a = world_stream(0), b = world_stream(1);
	for (int i = 0; i < 20; i++) {
		world_launch(1, TR_MS, 108, a);
		world_sync(a);
	}
	world_compute(2 * S);
	uint64_t launches = world_account()->launches;
	int64_t tat = world_account()->tat, t = world_now;
	long records = world_calls.records;
	cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_GLOBAL);
	for (int i = 0; i < 1000; i++)
		world_launch(1, TR_MS, 108, a);
	check(world_now - t < 1000 * (world.launch_ns + 100), "captured launches are not delayed");
	check(world_account()->launches == launches && world_account()->tat == tat,
	      "captured launches are not charged");
	check(world_calls.records == records, "nothing is recorded for captured launches");
	world_launch(2, TR_MS, 108, b);
	check(world_account()->launches == launches + 1, "other streams are metered meanwhile");
	world_compute(5 * TR_MS);
	CUgraph g;
	cuStreamEndCapture(a, &g);
	check(world_calls.on_capturing == 0, "no call of ours touches a capturing stream");
	check(tr_meter_mode == TR_METER_ON, "the end of the capture is noticed");
	/* A batch left open on a stream that then captures, begun by an event and not by Begin. */
	for (int i = 0; i < 40; i++)
		world_launch(2, 10 * US, 108, a);
	cuStreamBeginCapture_v2(b, CU_STREAM_CAPTURE_MODE_RELAXED);
	world_capturing[0] = true;
	world_compute(5 * TR_MS);
	world_sync(a);
	check(world_calls.on_capturing == 0, "nor one that joined a capture");
	world_capturing[0] = false;
	cuStreamEndCapture(b, &g);
}

/* Idle time earns a little, not a burst. */
static void test_idle(void)
{
	world_start(30);
	for (int i = 0; i < 5000; i++)
		world_launch(1, 100 * US, 108, world_stream(0));
	world_compute(3 * S);
	int64_t t = world_now;
	while (world_now < t + 100 * TR_MS)
		world_launch(1, 100 * US, 108, world_stream(0));
	double got = (double)world_busy(t, t + 100 * TR_MS) / 1e6;
	printf("first 100 ms after 3 s of idling, limit 30: %.1f ms of GPU time\n", got);
	check(got < 34, "idling earns at most a burst of 5 ms of the share and what is in flight");
}

static void test_live_change(void)
{
	world_start(20);
	int64_t t = world_now;
	while (world_now < t + 2 * S)
		world_launch(1, 100 * US, 108, world_stream(0));
	world_set_cores(60);
	t = world_now;
	while (world_now < t + S)
		world_launch(1, 100 * US, 108, world_stream(0));
	double got = 100.0 * (double)world_busy(t, t + S) / (double)S;
	printf("limit raised from 20 to 60: %.1f in the next second\n", got);
	check(fabs(got - 60) < 1, "a new limit holds at once");
}

static void test_repair(void)
{
	world_start(30);
	world_launch(1, 100 * US, 108, world_stream(0));
	world_account()->tat = world_now + 100000 * S;
	int64_t t = world_now;
	for (int i = 0; i < 100; i++)
		world_launch(1, 100 * US, 108, world_stream(0));
	check(world_now - t < S, "a damaged account does not stop the tenant for ever");
}

/* Against the plain union of intervals, in any order, and by several processes. */
static void test_cover(void)
{
	static struct tr_coverage c;
	enum { N = 400, SPAN = 200000 }; /* in us */
	static bool us[SPAN];
	memset(&c, 0, sizeof c);
	int64_t base = 5000 * S, sum = 0, truth = 0;
	for (int i = 0; i < N; i++) {
		int64_t a = (int64_t)(rnd() % (SPAN - 3000)), len = (int64_t)(rnd() % 3000);
		sum += tr_cover(&c, base + a * US, base + (a + len) * US);
		for (int64_t j = a; j < a + len; j++) {
			truth += !us[j];
			us[j] = true;
		}
	}
	printf("union of %d overlapping intervals: %.2f %% of the truth\n", N,
	       100.0 * (double)sum / (double)(truth * US));
	check(fabs((double)sum / (double)(truth * US) - 1) < 0.02, "overlap is charged once");
	check(tr_cover(&c, base, base + SPAN * US) <= (SPAN * US - truth * US) * 11 / 10 + 40 * US,
	      "the rest is charged once");
	check(tr_cover(&c, base + 10 * S, base + 10 * S + 777) == 777, "an old lap does not count");
	check(tr_cover(&c, base + 20 * S, base + 25 * S) == 5 * S, "longer than the record");
}

int main(void)
{
	world = (struct world_conf){.launch_ns = 4 * US, .late_ns = 100 * US};
	test_cover();
	test_negative_control();
	test_not_reached();
	test_unknown_flood();
	test_spin();
	test_long_is_no_spin();
	test_capture();
	test_idle();
	test_live_change();
	test_repair();
	table("share, by limit:", 1.0);
	/* A busy machine: sleepers wake up to 8 ms late, and the host stalls for 15 ms now and then. */
	world.late_ns = 8 * TR_MS;
	world.stall_every_ns = 300 * TR_MS;
	world.stall_ns = 15 * TR_MS;
	printf("on a host that wakes late:\n");
	for (int l = 10; l <= 50; l += 20) {
		double a = share(FLOOD, 100 * US, l, 10), b = share(FLOOD, 10 * TR_MS, l, 20);
		printf("  limit %d: %.2f with 100 us kernels, %.2f with 10 ms\n", l, a, b);
		check(fabs(a - l) < 1.5 && fabs(b - l) < 1.5, "late wake-ups do not cost share");
	}
	printf(failures ? "%d FAILED\n" : "ok\n", failures);
	return failures != 0;
}
