#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include "driver.h"
#include "load.h"
#include "ptx.h"

#define HOST_MAPPED 2u /* CU_MEMHOSTALLOC_DEVICEMAP */
#define MARKS 512 /* events in a stream's ring */

/* A stream and the launches in flight on it. An event follows every few launches; what lies
 * before a completed event is complete. */
struct lane {
	CUstream stream;
	CUevent event[MARKS];
	unsigned covers[MARKS]; /* launches that the event completes */
	unsigned first, n;	/* ring of recorded events */
	unsigned unmarked;	/* launches after the last event */
	unsigned in_flight;	/* launches not known to be complete */
};

struct worker {
	pthread_t thread;
	const struct options *o;
	CUfunction spin;
	CUgraphExec graph;
	struct lane *lane;
	atomic_ullong completed; /* kernels */
};

static atomic_bool stopping;

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

static void launch(const struct worker *w, CUstream stream)
{
	const struct options *o = w->o;
	uint64_t ns = (uint64_t)o->kernel_ns;
	void *args[] = {&ns};

	if (w->graph)
		MUST(cuGraphLaunch(w->graph, stream));
	else
		MUST(cuLaunchKernel(w->spin, o->grid, 1, 1, o->block, 1, 1, 0, stream, args, NULL));
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

static void *work(void *arg)
{
	struct worker *w = arg;
	const struct options *o = w->o;
	unsigned every = o->sync_each ? 1 : mark_every(o), turn = 0;
	int64_t period = o->rate > 0 ? (int64_t)(1e9 * o->threads / o->rate) : 0;
	int64_t due = now_ns();

	driver_attach();
	while (!atomic_load_explicit(&stopping, memory_order_relaxed)) {
		struct lane *l = &w->lane[turn++ % o->streams];
		if (period) {
			sleep_until_ns(due);
			due += period;
		}
		launch(w, l->stream);
		l->in_flight++;
		if (++l->unmarked >= every)
			mark(l);
		reap(w, l, o->sync_each ? 1 : o->depth);
	}
	drain(w);
	return NULL;
}

static CUfunction kernel(const char *name)
{
	CUmodule module;
	CUfunction f;

	MUST(cuModuleLoadData(&module, spin_ptx));
	MUST(cuModuleGetFunction(&f, module, name));
	return f;
}

static CUgraph capture_graph(const struct worker *w)
{
	CUstream s = w->lane[0].stream;
	const struct options *o = w->o;
	uint64_t ns = (uint64_t)o->kernel_ns;
	void *args[] = {&ns};
	CUgraph g;

	if (!cu.cuStreamBeginCapture_v2 || !cu.cuStreamEndCapture)
		die("the driver has no stream capture");
	MUST(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	for (unsigned i = 0; i < o->graph; i++)
		MUST(cuLaunchKernel(w->spin, o->grid, 1, 1, o->block, 1, 1, 0, s, args, NULL));
	MUST(cuStreamEndCapture(s, &g));
	return g;
}

/* A chain: each kernel depends on the one before. */
static CUgraph build_graph(const struct worker *w)
{
	const struct options *o = w->o;
	uint64_t ns = (uint64_t)o->kernel_ns;
	void *args[] = {&ns};
	CUDA_KERNEL_NODE_PARAMS_v1 p = {
		.func = w->spin, .gridDimX = o->grid, .gridDimY = 1, .gridDimZ = 1,
		.blockDimX = o->block, .blockDimY = 1, .blockDimZ = 1, .kernelParams = args,
	};
	CUgraphNode node, last = NULL;
	CUgraph g;

	if (!cu.cuGraphCreate || !cu.cuGraphAddKernelNode)
		die("the driver has no graphs");
	MUST(cuGraphCreate(&g, 0));
	for (unsigned i = 0; i < o->graph; i++) {
		MUST(cuGraphAddKernelNode(&node, g, last ? &last : NULL, last ? 1 : 0, &p));
		last = node;
	}
	return g;
}

static void set_up(struct worker *w, const struct options *o, CUfunction spin)
{
	w->o = o;
	w->spin = spin;
	w->lane = calloc(o->streams, sizeof *w->lane);
	if (!w->lane)
		die("out of memory");
	for (unsigned i = 0; i < o->streams; i++) {
		MUST(cuStreamCreate(&w->lane[i].stream, CU_STREAM_NON_BLOCKING));
		for (unsigned k = 0; k < MARKS; k++)
			MUST(cuEventCreate(&w->lane[i].event[k],
					   CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING));
	}
	if (o->graph) {
		CUgraph g = o->capture ? capture_graph(w) : build_graph(w);
		if (!cu.cuGraphInstantiateWithFlags || !cu.cuGraphLaunch)
			die("the driver has no graphs");
		MUST(cuGraphInstantiateWithFlags(&w->graph, g, 0));
		MUST(cuGraphDestroy(g));
	}
}

static uint64_t completed(struct worker *w, unsigned n)
{
	uint64_t sum = 0;

	for (unsigned i = 0; i < n; i++)
		sum += atomic_load_explicit(&w[i].completed, memory_order_relaxed);
	return sum;
}

struct point {
	int64_t t;
	uint64_t kernels;
};

static double share(const struct options *o, struct point a, struct point b)
{
	if (b.t <= a.t)
		return 0;
	return (double)(b.kernels - a.kernels) * (double)o->kernel_ns / (double)(b.t - a.t);
}

static struct point look(struct worker *w, unsigned n, int64_t at)
{
	sleep_until_ns(at);
	return (struct point){now_ns(), completed(w, n)};
}

/* Looks once a second and at the end. */
static void measure(const struct options *o, struct worker *w, struct load_result *out)
{
	int64_t start = now_ns(), end = start + (int64_t)(o->time_s * 1e9);
	struct point zero = {start, completed(w, o->threads)}, last = zero, two = zero;

	out->share_after_2s = -1;
	while (last.t < end) {
		int64_t next = start + (int64_t)(out->n_intervals + 1) * 1000000000ll;
		struct point p = look(w, o->threads, next < end ? next : end);
		if (out->n_intervals == 0)
			out->share_first_s = share(o, zero, p);
		if (out->n_intervals < LOAD_INTERVALS)
			out->interval[out->n_intervals] = (float)share(o, last, p);
		out->n_intervals++;
		if (out->n_intervals == 2)
			two = p;
		last = p;
	}
	out->kernels = last.kernels - zero.kernels;
	out->wall_s = (double)(last.t - zero.t) / 1e9;
	out->share = share(o, zero, last);
	if (two.t > zero.t && last.t > two.t)
		out->share_after_2s = share(o, two, last);
}

void load_run(const struct options *o, void (*start)(void), struct load_result *out)
{
	struct worker *w = calloc(o->threads, sizeof *w);
	CUfunction spin = kernel("tranche_spin");

	if (!w)
		die("out of memory");
	for (unsigned i = 0; i < o->threads; i++)
		set_up(&w[i], o, spin);
	start();
	for (unsigned i = 0; i < o->threads; i++)
		if (pthread_create(&w[i].thread, NULL, work, &w[i]))
			die("no thread %u of %u", i + 1, o->threads);
	sleep_until_ns(now_ns() + (int64_t)(o->warmup_s * 1e9));
	measure(o, w, out);
	atomic_store(&stopping, true);
	for (unsigned i = 0; i < o->threads; i++)
		pthread_join(w[i].thread, NULL);
}

void load_flag(const struct options *o)
{
	CUfunction spin = kernel("tranche_spin_flag");
	volatile uint32_t *flag;
	void *host, *args[1];
	CUdeviceptr dev;

	if (!cu.cuMemHostAlloc || !cu.cuMemHostGetDevicePointer_v2)
		die("the driver cannot map host memory");
	MUST(cuMemHostAlloc(&host, 4096, HOST_MAPPED));
	flag = host;
	*flag = 0;
	MUST(cuMemHostGetDevicePointer_v2(&dev, host, 0));
	args[0] = &dev;
	MUST(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, NULL, args, NULL));
	sleep_until_ns(now_ns() + (int64_t)(o->flag_s * 1e9));
	*flag = 1;
	MUST(cuCtxSynchronize());
}

static void sum(const struct load_result *r, unsigned n, struct load_result *out)
{
	for (unsigned i = 0; i < n; i++) {
		if (!r[i].n_intervals)
			continue; /* it failed, and said so */
		out->kernels += r[i].kernels;
		out->share += r[i].share;
		out->share_first_s += r[i].share_first_s;
		out->share_after_2s += r[i].share_after_2s;
		if (r[i].wall_s > out->wall_s)
			out->wall_s = r[i].wall_s;
		if (!out->n_intervals || r[i].n_intervals < out->n_intervals)
			out->n_intervals = r[i].n_intervals;
		for (unsigned k = 0; k < LOAD_INTERVALS && k < r[i].n_intervals; k++)
			out->interval[k] += r[i].interval[k];
	}
	if (out->n_intervals > LOAD_INTERVALS)
		out->n_intervals = LOAD_INTERVALS;
}

static double per_second(const struct load_result *s)
{
	return s->wall_s > 0 ? (double)s->kernels / s->wall_s : 0;
}

static void report_json(const struct options *o, const struct load_result *s, unsigned n)
{
	printf("{\"kernel_ns\":%lld,\"grid\":%u,\"graph\":%u,\"procs\":%u,\"threads\":%u,"
	       "\"kernels\":%llu,\"wall_s\":%.4f,\"kernels_per_s\":%.2f,\"share\":%.5f,"
	       "\"share_first_s\":%.5f,\"share_after_2s\":",
	       (long long)o->kernel_ns, o->grid, o->graph, n, o->threads,
	       (unsigned long long)s->kernels, s->wall_s, per_second(s), s->share,
	       s->share_first_s);
	if (s->share_after_2s < 0)
		fputs("null", stdout);
	else
		printf("%.5f", s->share_after_2s);
	fputs(",\"intervals\":[", stdout);
	for (unsigned i = 0; i < s->n_intervals; i++)
		printf("%s%.5f", i ? "," : "", (double)s->interval[i]);
	puts("]}");
}

static void report_text(const struct options *o, const struct load_result *s, unsigned n)
{
	printf("kernels: %llu of %.3f ms x %u blocks", (unsigned long long)s->kernels,
	       (double)o->kernel_ns / 1e6, o->grid);
	if (o->graph)
		printf(", %u a graph", o->graph);
	if (n > 1)
		printf(", %u processes", n);
	printf(", in %.2f s (%.1f a second)\n", s->wall_s, per_second(s));
	fputs("GPU time by second:", stdout);
	for (unsigned i = 0; i < s->n_intervals; i++)
		printf(" %.1f", 100 * (double)s->interval[i]);
	printf(" %%\nGPU time: first second %.1f %%", 100 * s->share_first_s);
	if (s->share_after_2s >= 0)
		printf(", after 2 s %.1f %%", 100 * s->share_after_2s);
	printf(", all %.1f %%\n", 100 * s->share);
}

void load_report(const struct options *o, const struct load_result *r, unsigned n)
{
	static struct load_result s;

	sum(r, n, &s);
	if (o->json)
		report_json(o, &s, n);
	else
		report_text(o, &s, n);
	fflush(stdout);
}
