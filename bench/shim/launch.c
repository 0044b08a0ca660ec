/* cuLaunchKernel: blocks of 1,000 launches; with a compute limit also short runs of launches, since
 * in each block some launches close a batch and pay for an event. */
#include <pthread.h>
#include <stdlib.h>
#include "bench.h"

#define BLOCK 1000

static inline CUresult launch(const struct api *a, const struct pair *p)
{
	uint64_t ns = 0;
	void *args[] = {&ns};

	return a->cuLaunchKernel(p->kernel, 1, 1, 1, 128, 1, 1, 0, NULL, args, NULL);
}

static double *doubles(unsigned n)
{
	double *x = malloc(n * sizeof *x);

	if (!x)
		die("out of memory");
	return x;
}

/* ns per launch over one block. */
static double block_ns(const struct api *a, const struct pair *p)
{
	uint64_t start = ticks();

	for (unsigned i = 0; i < BLOCK; i++)
		if (launch(a, p))
			die("cuLaunchKernel failed");
	return (double)(ticks() - start) * ns_per_tick() / BLOCK;
}

static void blocks(const struct pair *p, unsigned n, double *direct, double *ours)
{
	for (unsigned i = 0; i < 20; i++) {
		block_ns(&p->direct, p);
		block_ns(&p->ours, p);
	}
	for (unsigned i = 0; i < n; i++) {
		direct[i] = block_ns(&p->direct, p);
		ours[i] = block_ns(&p->ours, p);
	}
}

#define RUN 4 /* launches timed together: the counter of some machines has steps of 10 ns */

/* ns per launch over a few launches. False when the library called more of the driver than the
 * launches: these closed a batch. */
static bool run_ns(const struct api *a, const struct pair *p, double overhead, double *ns)
{
	unsigned long before = *p->calls;
	uint64_t start = ticks();

	for (unsigned i = 0; i < RUN; i++)
		launch(a, p);
	*ns = ((double)(ticks() - start) - overhead) * ns_per_tick() / RUN;
	return *p->calls - before == RUN;
}

/* Fills both with runs that close no batch; blocks of 1,000 launches alternate. Returns the part
 * of our runs that were such. */
static double quiet_runs(const struct pair *p, unsigned n, double *direct, double *ours)
{
	double overhead = (double)ticks_overhead(), all = 0;
	unsigned d = 0, o = 0;

	while (d < n || o < n) {
		for (unsigned k = 0; k < BLOCK / RUN && d < n; k++)
			d += run_ns(&p->direct, p, overhead, &direct[d]);
		for (unsigned k = 0; k < BLOCK / RUN && o < n; k++, all++)
			o += run_ns(&p->ours, p, overhead, &ours[o]);
		if (all > 100.0 * n)
			die("nearly every launch closes a batch");
	}
	return n / all;
}

/* Driver calls for each launch through ours: 1 is the launch itself. */
static double calls_per_launch(const struct pair *p)
{
	unsigned long before = *p->calls;
	unsigned n = 100 * BLOCK;

	for (unsigned i = 0; i < n; i++)
		launch(&p->ours, p);
	return (double)(*p->calls - before) / n;
}

void case_launch(const struct setting *s)
{
	unsigned n = s->quick ? 400 : 2000;
	double *d = doubles(n), *o = doubles(n);
	struct pair p;

	report_group("cuLaunchKernel");
	report_head("cuLaunchKernel, blocks of 1,000", "ns per call");
	pair_open(&p, s, 0);
	blocks(&p, n, d, o);
	report_added("no compute limit", "ns", stats_of(d, n), stats_of(o, n), 10);
	report_value("no compute limit", "driver calls per launch", "calls", calls_per_launch(&p));
	pair_close(&p);
	free(d);
	free(o);
}

void case_launch_limited(const struct setting *s)
{
	unsigned n_blocks = s->quick ? 400 : 2000, n = s->quick ? 20000 : 200000;
	double *d = doubles(n), *o = doubles(n);
	struct stats direct, ours;
	double quiet;
	struct pair p;

	report_group("cuLaunchKernel");
	pair_open(&p, s, 90);
	blocks(&p, n_blocks, d, o);
	direct = stats_of(d, n_blocks);
	ours = stats_of(o, n_blocks);
	quiet = quiet_runs(&p, n, d, o);
	report_added("limit not reached, no batch closed", "ns", stats_of(d, n), stats_of(o, n), 15);
	report_added("limit not reached, blocks with events", "ns", direct, ours, NO_TARGET);
	report_value("limit not reached, no batch closed", "part of all runs of 4", "", quiet);
	report_value("limit not reached, blocks with events", "added in the mean", "ns",
		     ours.mean - direct.mean);
	report_value("limit not reached, blocks with events", "driver calls per launch", "calls",
		     calls_per_launch(&p));
	pair_close(&p);
	free(d);
	free(o);
}

/* --- threads ---------------------------------------------------------------------------------- */

struct thread_job {
	const struct pair *p;
	pthread_barrier_t *start;
	unsigned rounds;
	double *direct, *ours;
};

#define ROUND 20 /* blocks between two barriers */

static void *thread_work(void *arg)
{
	struct thread_job *j = arg;

	j->p->ours.cuCtxSetCurrent(j->p->context);
	for (unsigned r = 0; r < j->rounds; r++) {
		pthread_barrier_wait(j->start);
		for (unsigned i = 0; i < ROUND; i++)
			j->direct[r * ROUND + i] = block_ns(&j->p->direct, j->p);
		pthread_barrier_wait(j->start);
		for (unsigned i = 0; i < ROUND; i++)
			j->ours[r * ROUND + i] = block_ns(&j->p->ours, j->p);
	}
	return NULL;
}

static void threads(const struct pair *p, const char *name, unsigned n, unsigned rounds)
{
	unsigned each = rounds * ROUND;
	double *d = malloc(n * each * sizeof *d), *o = malloc(n * each * sizeof *o);
	struct thread_job *job = calloc(n, sizeof *job);
	pthread_t *id = calloc(n, sizeof *id);
	pthread_barrier_t start;

	if (!d || !o || !job || !id)
		die("out of memory");
	pthread_barrier_init(&start, NULL, n);
	for (unsigned i = 0; i < n; i++) {
		job[i] = (struct thread_job){p, &start, rounds, d + i * each, o + i * each};
		if (pthread_create(&id[i], NULL, thread_work, &job[i]))
			die("no thread %u", i);
	}
	for (unsigned i = 0; i < n; i++)
		pthread_join(id[i], NULL);
	report_added(name, "ns", stats_of(d, n * each), stats_of(o, n * each), NO_TARGET);
	free(d);
	free(o);
	free(job);
	free(id);
}

void case_threads(const struct setting *s)
{
	struct pair p;
	unsigned rounds = s->quick ? 5 : 25;

	report_group("cuLaunchKernel");
	report_head("cuLaunchKernel from several threads at once, all CPUs", "ns per call");
	pair_open(&p, s, 0);
	threads(&p, "4 threads, no compute limit", 4, rounds);
	threads(&p, "16 threads, no compute limit", 16, rounds);
	pair_close(&p);
}

void case_threads_limited(const struct setting *s)
{
	struct pair p;
	unsigned rounds = s->quick ? 5 : 25;

	report_group("cuLaunchKernel");
	pair_open(&p, s, 90);
	threads(&p, "4 threads, limit not reached", 4, rounds);
	threads(&p, "16 threads, limit not reached", 16, rounds);
	pair_close(&p);
}
