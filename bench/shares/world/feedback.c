/* A control: the limiter of the known kind, from its description, not from anybody's code. A bucket
 * of grid blocks per process and GPU; a launch takes its blocks and sleeps 10 ms while the bucket is
 * below zero. Each 120 ms the bucket gets `share` blocks, which moves by a step towards the limit
 * that the driver's utilisation of the last second, an integer, suggests. Graphs are not counted. */
#define _GNU_SOURCE
#include "inside.h"
#include <stdlib.h>

#define SMS 132
#define THREADS 2048
#define PERIOD_NS (120 * SHARE_MS)
#define NAP_NS (10 * SHARE_MS)
#define WINDOW_NS (1000 * SHARE_MS)

/* What the driver tells of the process: the mean of its samples in the last second, an integer. */
static int utilisation(const struct share_proc *p, int gpu)
{
	struct sim_engine *e = share_engine[gpu];
	sim_engine_advance(e, (uint64_t)share_now);
	uint64_t from = (uint64_t)(share_now - WINDOW_NS);
	unsigned sum = 0, periods = (unsigned)(WINDOW_NS / (int64_t)e->conf.sample_ns);
	for (uint64_t i = e->sample_count; i > 0 && e->sample_count - i < SIM_ENGINE_SAMPLES; i--) {
		const struct sim_sample *s = &e->sample[(i - 1) % SIM_ENGINE_SAMPLES];
		if (s->end_ns <= from)
			break;
		if (s->proc == (uint32_t)p->index)
			sum += s->percent;
	}
	return (int)(sum / periods);
}

static void steer(struct share_feedback *f, int limit, int used)
{
	int64_t diff = abs(limit - used) < 5 ? 5 : abs(limit - used);
	int64_t step = (int64_t)SMS * SMS * THREADS * diff / 2560;
	if (diff > limit / 2)
		step = step * 2 * diff / (limit + 1);
	f->share += used <= limit ? step : -step;
	if (f->share > f->pool)
		f->share = f->pool;
	if (f->share < 0)
		f->share = 0;
	if (f->share == f->pool && f->tokens < 0)
		f->share = f->pool *= 2;
	f->tokens += f->share;
	if (f->tokens > f->pool)
		f->tokens = f->pool;
}

static void watch(void *arg)
{
	struct share_proc *p = arg;
	for (;;) {
		share_sleep(share_now + PERIOD_NS);
		for (int i = 0; i < share_conf.gpus; i++) {
			int limit = (int)share_tenants[p->tenant].limits->dev[i].cores;
			steer(&p->feedback[i], limit, utilisation(p, i));
		}
	}
}

void share_feedback_start(struct share_proc *p)
{
	for (int i = 0; i < share_conf.gpus; i++)
		p->feedback[i] = (struct share_feedback){.pool = (int64_t)SMS * THREADS * 32,
							 .tokens = 0};
	share_spawn(p, watch, p, share_now);
}

void share_feedback_take(struct share_proc *p, int gpu, int64_t blocks)
{
	while (p->feedback[gpu].tokens < 0)
		share_sleep(share_now + NAP_NS);
	p->feedback[gpu].tokens -= blocks;
}
