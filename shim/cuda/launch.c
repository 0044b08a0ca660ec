/* The launches. Without a compute limit: one test of a flag, then the driver. With one: a launch
 * of known cost joins the thread's open batch, without a clock, a system call, a lock or a call of
 * the driver; everything else goes by meter.c. */
#include "compat.h"
#include "graphmem.h"
#include "meter.h"
#include "real.h"

#define LIKELY(x) __builtin_expect((x), 1)

/* Grid and block, the second half of a launch's key: a hash in place of the product, whose five
 * multiplications would wait for each other. */
static inline uint64_t size_of(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
			       unsigned bz)
{
	return ((uint64_t)gx | (uint64_t)gy << 32) * 0xbf58476d1ce4e5b9ull ^
	       ((uint64_t)bx | (uint64_t)gz << 32) * 0x94d049bb133111ebull ^
	       ((uint64_t)by | (uint64_t)bz << 32) * 0xd6e8feb86659fd93ull;
}

static inline bool same_ctx(const struct tr_thread *t)
{
	CUcontext now;
	return LIKELY(!t->ask_ctx) || (REAL(cuCtxGetCurrent)(&now) == CUDA_SUCCESS && now == t->ctx);
}

/* Adds the launch to the thread's open batch. False: it needs the slow path.
 *
 * in_use and frozen: the helper sets frozen, makes all threads' stores visible (membarrier), and
 * takes the batch only if in_use is clear; so here compiler barriers are enough. */
static inline __attribute__((always_inline)) bool join(uint64_t tag, CUstream stream, bool ptsz)
{
	struct tr_thread *t = tr_thread_self;
	bool ok = false;
	if (t == NULL)
		return false;
	__atomic_store_n(&t->in_use, 1, __ATOMIC_RELAXED);
	__atomic_signal_fence(__ATOMIC_SEQ_CST);
	if (LIKELY(__atomic_load_n(&t->frozen, __ATOMIC_ACQUIRE) == 0 && t->room > 0 &&
		   t->stream == stream && t->ptsz == ptsz &&
		   __atomic_load_n(&tr_meter_mode, __ATOMIC_RELAXED) == TR_METER_ON) &&
	    same_ctx(t)) {
		int64_t est;
		struct tr_cost *c = tr_cost_known(tag, &est);
		if (LIKELY(c != NULL && est <= t->budget)) {
			uint32_t n = t->n;
			t->budget -= est;
			t->cost[n] = c;
			t->tag[n] = tag;
			__atomic_store_n(&t->part[n], est, __ATOMIC_RELAXED);
			__atomic_store_n(&t->n, n + 1, __ATOMIC_RELAXED);
			t->room--;
			ok = true;
		}
	}
	__atomic_store_n(&t->in_use, 0, __ATOMIC_RELEASE);
	return ok;
}

/* A launch by the slow path: `call` is the driver's. */
#define METERED(tag_, stream_, ptsz_, call)                                                        \
	do {                                                                                       \
		struct tr_launch l = {.tag = (tag_), .stream = (stream_), .ptsz = (ptsz_)};        \
		tr_meter_begin(&l);                                                                \
		CUresult r = (call);                                                               \
		tr_meter_end(&l, r);                                                               \
		return r;                                                                          \
	} while (0)

#define KERNEL_PARAMS                                                                              \
	CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,         \
		unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,            \
		unsigned int sharedMemBytes, CUstream hStream, void **kernelParams
#define KERNEL_ARGS                                                                                \
	f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream, \
		kernelParams
#define KERNEL_TAG                                                                                 \
	tr_cost_tag(f, size_of(gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ))

/* Each step is a function of its own that ends in a jump with the arguments where they are, so
 * that a launch without a limit needs no stack frame. */
#define DEFINE_LAUNCH(name, ptsz, PARAMS, ARGS, TAG, STREAM)                                       \
	static CUresult __attribute__((noinline)) name##_metered PARAMS                            \
	{                                                                                          \
		METERED(TAG, STREAM, ptsz, REAL(name) ARGS);                                       \
	}                                                                                          \
	static CUresult __attribute__((noinline)) name##_limited PARAMS                            \
	{                                                                                          \
		__typeof__(&name) next = REAL(name);                                               \
		if (!join(TAG, STREAM, ptsz))                                                      \
			next = name##_metered;                                                     \
		return next ARGS;                                                                  \
	}                                                                                          \
	CUresult EXPORT name PARAMS                                                                \
	{                                                                                          \
		__typeof__(&name) next = REAL(name);                                               \
		if (tr_meter_on())                                                                 \
			next = name##_limited;                                                     \
		return next ARGS;                                                                  \
	}

DEFINE_LAUNCH(cuLaunchKernel, false, (KERNEL_PARAMS, void **extra), (KERNEL_ARGS, extra),
	      KERNEL_TAG, hStream)
DEFINE_LAUNCH(cuLaunchKernel_ptsz, true, (KERNEL_PARAMS, void **extra), (KERNEL_ARGS, extra),
	      KERNEL_TAG, hStream)
DEFINE_LAUNCH(cuLaunchCooperativeKernel, false, (KERNEL_PARAMS), (KERNEL_ARGS), KERNEL_TAG, hStream)
DEFINE_LAUNCH(cuLaunchCooperativeKernel_ptsz, true, (KERNEL_PARAMS), (KERNEL_ARGS), KERNEL_TAG,
	      hStream)

/* The driver refuses config == NULL; it is not for us to crash on it. */
static inline uint64_t config_tag(const CUlaunchConfig *c, CUfunction f)
{
	return c == NULL ? 1
			 : tr_cost_tag(f, size_of(c->gridDimX, c->gridDimY, c->gridDimZ,
						  c->blockDimX, c->blockDimY, c->blockDimZ));
}
#define EX_PARAMS (const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)
#define EX_ARGS (config, f, kernelParams, extra)
#define EX_STREAM (config == NULL ? NULL : config->hStream)
DEFINE_LAUNCH(cuLaunchKernelEx, false, EX_PARAMS, EX_ARGS, config_tag(config, f), EX_STREAM)
DEFINE_LAUNCH(cuLaunchKernelEx_ptsz, true, EX_PARAMS, EX_ARGS, config_tag(config, f), EX_STREAM)

/* Launches of the first CUDA versions; the block's shape is the function's. */
DEFINE_LAUNCH(cuLaunch, false, (CUfunction f), (f), tr_cost_tag(f, 1), NULL)
DEFINE_LAUNCH(cuLaunchGrid, false, (CUfunction f, int grid_width, int grid_height),
	      (f, grid_width, grid_height),
	      tr_cost_tag(f, (uint64_t)grid_width * (uint64_t)grid_height), NULL)
DEFINE_LAUNCH(cuLaunchGridAsync, false,
	      (CUfunction f, int grid_width, int grid_height, CUstream hStream),
	      (f, grid_width, grid_height, hStream),
	      tr_cost_tag(f, (uint64_t)grid_width * (uint64_t)grid_height), hStream)

/* Several devices at once: a wait for one could hold up the others for ever, so they are charged
 * and never delayed. */
CUresult EXPORT cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int n,
						     unsigned int flags)
{
	if (!tr_meter_on() || list == NULL || n > TR_MAX_DEVICES)
		return REAL(cuLaunchCooperativeKernelMultiDevice)(list, n, flags);
	struct tr_launch l[TR_MAX_DEVICES];
	for (unsigned i = 0; i < n; i++) {
		const CUDA_LAUNCH_PARAMS *p = &list[i];
		l[i] = (struct tr_launch){
			.tag = tr_cost_tag(p->function,
					   size_of(p->gridDimX, p->gridDimY, p->gridDimZ,
						   p->blockDimX, p->blockDimY, p->blockDimZ)),
			.stream = p->hStream,
			.alone = true,
			.no_block = true,
		};
		tr_meter_begin(&l[i]);
	}
	CUresult r = REAL(cuLaunchCooperativeKernelMultiDevice)(list, n, flags);
	for (unsigned i = 0; i < n; i++)
		tr_meter_end(&l[i], r);
	return r;
}

/* --- graphs: one launch is one unit ---------------------------------------------------------- */

static CUresult launch_graph(CUgraphExec exec, CUstream stream, bool ptsz)
{
	int token;
	CUresult r = tr_graph_mem_before(exec, stream, ptsz, &token);
	if (r != CUDA_SUCCESS)
		return r;
	struct tr_launch l = {.stream = stream, .ptsz = ptsz, .alone = true};
	bool metered = tr_meter_on();
	if (metered) {
		l.tag = tr_graphcost_tag(exec);
		tr_meter_begin(&l);
	}
	r = ptsz ? REAL(cuGraphLaunch_ptsz)(exec, stream) : REAL(cuGraphLaunch)(exec, stream);
	if (metered)
		tr_meter_end(&l, r);
	tr_graph_mem_after(exec, token, r);
	return r;
}

CUresult EXPORT cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream)
{
	return launch_graph(hGraphExec, hStream, false);
}

CUresult EXPORT cuGraphLaunch_ptsz(CUgraphExec hGraphExec, CUstream hStream)
{
	return launch_graph(hGraphExec, hStream, true);
}
