#include <stdlib.h>
#include <string.h>
#include "worker.h"

#define HOST_MAPPED 2u /* CU_MEMHOSTALLOC_DEVICEMAP */

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
	CUdeviceptr probe = w->probe;
	void *args[] = {&ns, &probe};
	CUgraph g;

	if (!cu.cuStreamBeginCapture_v2 || !cu.cuStreamEndCapture)
		die("the driver has no stream capture");
	MUST(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	for (unsigned i = 0; i < o->graph; i++)
		MUST(cuLaunchKernel(w->kernel, o->grid, 1, 1, o->block, 1, 1, 0, s, args, NULL));
	MUST(cuStreamEndCapture(s, &g));
	return g;
}

/* A chain: each kernel depends on the one before. */
static CUgraph build_graph(const struct worker *w)
{
	const struct options *o = w->o;
	uint64_t ns = (uint64_t)o->kernel_ns;
	CUdeviceptr probe = w->probe;
	void *args[] = {&ns, &probe};
	CUDA_KERNEL_NODE_PARAMS_v1 p = {
		.func = w->kernel, .gridDimX = o->grid, .gridDimY = 1, .gridDimZ = 1,
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

static void set_up(struct worker *w)
{
	const struct options *o = w->o;

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

static void launch_all(const struct options *o, struct worker *w, struct load_result *out)
{
	void *(*run)(void *) = o->latency ? latency_run : worker_run;
	int64_t from;

	for (unsigned i = 0; i < o->threads; i++)
		if (pthread_create(&w[i].thread, NULL, run, &w[i]))
			die("no thread %u of %u", i + 1, o->threads);
	sleep_until_ns(now_ns() + (int64_t)(o->warmup_s * 1e9));
	from = now_ns();
	measure(o, w, out);
	atomic_store(&load_stopping, true);
	for (unsigned i = 0; i < o->threads; i++)
		pthread_join(w[i].thread, NULL);
	if (o->latency)
		latency_result(from, &out->latency);
}

void load_run(const struct options *o, void (*start)(void), struct load_result *out)
{
	struct worker *w = calloc(o->threads, sizeof *w);
	CUfunction f = kernel(o->probe ? "tranche_probe" : "tranche_spin");
	CUdeviceptr probe = o->probe ? probe_start() : 0;

	if (!w)
		die("out of memory");
	for (unsigned i = 0; i < o->threads; i++) {
		w[i].number = i;
		w[i].o = o;
		w[i].kernel = f;
		w[i].probe = probe;
		set_up(&w[i]);
	}
	start();
	sleep_until_ns(now_ns() + (int64_t)(o->delay_s * 1e9));
	launch_all(o, w, out);
	memcpy(out->wake, w[0].pace.wake, sizeof out->wake);
	out->wakes = w[0].pace.wakes;
	if (probe)
		probe_read(probe, &out->probe);
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
