#include "worker.h"

atomic_bool load_stopping;

/* Launches per event: few enough that the count is never behind by more than a quarter of the
 * depth or 2 ms of work. */
static unsigned mark_every(const struct options *o)
{
	unsigned kernels = o->graph ? o->graph : 1;
	int64_t launch_ns = o->kernel_ns * kernels;
	unsigned by_depth = o->depth ? (o->depth + 3) / 4 : 64;
	int64_t by_time = launch_ns > 0 ? 2000000 / launch_ns : by_depth;

	if (by_time < 1)
		by_time = 1;
	return by_time < by_depth ? (unsigned)by_time : by_depth;
}

void worker_launch(const struct worker *w, CUstream stream)
{
	const struct options *o = w->o;
	uint64_t ns = (uint64_t)o->kernel_ns;
	CUdeviceptr probe = w->probe;
	void *args[] = {&ns, &probe};

	if (w->graph)
		MUST(cuGraphLaunch(w->graph, stream));
	else
		MUST(cuLaunchKernel(w->kernel, o->grid, 1, 1, o->block, 1, 1, 0, stream, args, NULL));
}

static void mark(struct lane *l)
{
	unsigned i = (l->first + l->n) % MARKS;

	if (l->n == MARKS)
		return; /* the next event covers these launches as well */
	MUST(cuEventRecord(l->event[i], l->stream));
	l->covers[i] = l->unmarked;
	l->unmarked = 0;
	l->n++;
}

static void retire(struct worker *w, struct lane *l)
{
	unsigned launches = l->covers[l->first];
	unsigned kernels = w->o->graph ? w->o->graph : 1;

	l->in_flight -= launches;
	l->first = (l->first + 1) % MARKS;
	l->n--;
	atomic_fetch_add_explicit(&w->completed, (unsigned long long)launches * kernels,
				  memory_order_relaxed);
}

/* Retires what is complete; waits while more than `depth` launches are in flight. */
static void reap(struct worker *w, struct lane *l, unsigned depth)
{
	CUresult r;

	while (l->n) {
		r = cu.cuEventQuery(l->event[l->first]);
		if (r == CUDA_ERROR_NOT_READY) {
			if (!depth || l->in_flight < depth)
				return;
			r = cu.cuEventSynchronize(l->event[l->first]);
		}
		driver_must(r, "cuEventSynchronize");
		retire(w, l);
	}
}

static void drain(struct worker *w)
{
	for (unsigned i = 0; i < w->o->streams; i++) {
		struct lane *l = &w->lane[i];
		MUST(cuStreamSynchronize(l->stream));
		l->in_flight -= l->unmarked;
		l->unmarked = 0;
		reap(w, l, 1);
	}
}

void *worker_run(void *arg)
{
	struct worker *w = arg;
	const struct options *o = w->o;
	unsigned every = o->sync_each ? 1 : mark_every(o), turn = 0;

	driver_attach();
	pace_start(&w->pace, o, w->number);
	while (!atomic_load_explicit(&load_stopping, memory_order_relaxed)) {
		struct lane *l = &w->lane[turn++ % o->streams];
		if (pace_is_off(&w->pace)) {
			drain(w);
			pace_off(&w->pace);
			continue;
		}
		pace_next(&w->pace);
		worker_launch(w, l->stream);
		l->in_flight++;
		if (++l->unmarked >= every)
			mark(l);
		reap(w, l, o->sync_each ? 1 : o->depth);
	}
	drain(w);
	return NULL;
}
