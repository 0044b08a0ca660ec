/* The simulated libcuda.so.1: what its two halves share.
 *
 *   memory half: state, contexts, devices, memory, arrays, pools, VMM, modules
 *   time half:   engine, streams, events, launches, graphs, capture
 *
 * Every exported entry point is defined in exactly one file, with the prototype of cuda_abi.h, and
 * begins with SIM_CALL(name) or SIM_CALL_CTX(name, ctx). What nobody defines is a weak stub made
 * from exports.txt: it returns CUDA_ERROR_NOT_SUPPORTED and traces its name. An entry point with a
 * _ptsz or _ptds twin calls a common static function with sim_pt(stream). */
#ifndef SIMGPU_SIM_H
#define SIMGPU_SIM_H
#pragma GCC visibility push(default)
#include "cuda_abi.h"
#include "cuda_new.h"
#pragma GCC visibility pop
#include "state.h"

/* --- entry ------------------------------------------------------------------------------------ */

struct sim_call { /* one per entry point, static */
	const char *name;
	uint32_t checked; /* generation of the fault switch that `fault` was looked up for */
	struct sim_fault *fault;
};
/* Driver not initialised or forked: CUDA_ERROR_NOT_INITIALIZED; a fault asked for by
 * $TRANCHE_SIM_FAIL ("cuMemAlloc_v2:3:2[,...]"): that error; else CUDA_SUCCESS. */
CUresult sim_enter(struct sim_call *c);
CUresult sim_enter_uninit(struct sim_call *c); /* the same without the initialisation check */

#define SIM_CALL_WITH(enter, fn)                                                                   \
	do {                                                                                       \
		static struct sim_call sim_call_ = {.name = #fn};                                  \
		CUresult sim_r_ = enter(&sim_call_);                                               \
		if (__builtin_expect(sim_r_ != CUDA_SUCCESS, 0))                                   \
			return sim_r_;                                                             \
	} while (0)
#define SIM_CALL(fn) SIM_CALL_WITH(sim_enter, fn)
#define SIM_CALL_UNINIT(fn) SIM_CALL_WITH(sim_enter_uninit, fn)
/* And needs a current context: CUDA_ERROR_INVALID_CONTEXT without one, CUDA_ERROR_CONTEXT_IS_DESTROYED
 * for a destroyed one, CUDA_ERROR_UNKNOWN once its GPU is lost, the sticky error once it has one. */
#define SIM_CALL_CTX(fn, ctx)                                                                      \
	struct CUctx_st *ctx;                                                                      \
	SIM_CALL(fn);                                                                              \
	do {                                                                                       \
		CUresult sim_r_ = sim_ctx_need(&ctx);                                              \
		if (__builtin_expect(sim_r_ != CUDA_SUCCESS, 0))                                   \
			return sim_r_;                                                             \
	} while (0)

/* Stream argument of a per-thread-default-stream entry point. */
static inline CUstream sim_pt(CUstream s)
{
	return s ? s : CU_STREAM_PER_THREAD_HANDLE;
}

/* --- contexts and devices (context.c, device.c) ------------------------------------------------ */

#define SIM_CTX_MAGIC 0x43545853u
struct sim_time_ctx;  /* of the time half: default streams, list of streams, engine context */
struct sim_mem_ctx;   /* memory half's */
struct CUctx_st {
	uint32_t magic;
	int dev;          /* CUdevice ordinal, after CUDA_VISIBLE_DEVICES */
	int gpu;          /* index into sim_shared->gpu */
	unsigned flags;   /* CU_CTX_* */
	uint32_t id;      /* unique in the process: cuCtxGetId */
	bool primary;
	bool dead;        /* destroyed; the struct stays, so that stale handles are recognised */
	int refs;         /* primary: retain count */
	int users;        /* threads' stacks that hold it */
	_Atomic int sticky;  /* CUresult that poisons it (launch failure), 0: none. Either half may set it. */
	struct sim_time_ctx *time;
	struct sim_mem_ctx *mem;
	struct CUctx_st *next;
	unsigned api_version;
	size_t limit[16];
	int cache_config, shared_config;
	uint64_t peers;   /* bit per device ordinal: peer access enabled */
};
/* Top of this thread's stack; NULL: none. May be a dead context. */
struct CUctx_st *sim_ctx_current(void);
CUresult sim_ctx_need(struct CUctx_st **ctx);
/* Context named by a handle; NULL if it is none or dead. */
struct CUctx_st *sim_ctx_of(CUcontext h);
static inline struct sim_gpu *sim_ctx_gpu(const struct CUctx_st *c)
{
	return &sim_shared->gpu[c->gpu];
}
/* State index of a device ordinal; -1: no such device. Number of visible devices. */
int sim_dev_gpu(CUdevice dev);
int sim_dev_count(void);
CUdevice sim_gpu_dev(int gpu); /* -1: not visible */

/* --- modules (module.c) ------------------------------------------------------------------------ */

#define SIM_FUNC_MAGIC 0x46554e43u
/* CUfunction and CUkernel are the same struct, so either handle may be launched. Function handles of
 * one (module, name) are unique. Never freed before the process ends; `dead` once unloaded. */
struct CUfunc_st {
	uint32_t magic;
	bool dead;
	bool kernel;           /* from cuLibraryGetKernel */
	char *name;
	struct CUmod_st *module;  /* NULL for a library's kernel */
	struct CUlib_st *library; /* NULL for a module's function */
	struct CUctx_st *ctx;     /* NULL for a kernel */
	int regs, shared_static, local_bytes, max_threads; /* per thread, per block, per thread */
	int max_dynamic_shared, carveout, cluster_w, cluster_h, cluster_d, nonportable;
	/* cuParamSet*, cuFuncSetBlockShape, cuFuncSetSharedSize (legacy launches) */
	int block_x, block_y, block_z;
	unsigned shared_dynamic;
	unsigned param_size;
	uint8_t param[4096];
	void *time; /* of the time half, NULL at first */
	struct CUfunc_st *next;
};
/* The function behind a CUfunction or CUkernel handle, NULL if it is none. */
struct CUfunc_st *sim_func_of(const void *h);

/* --- memory operations: the memory half does the work, the time half says when ------------------ */

enum sim_memop_kind { SIM_MEMOP_COPY, SIM_MEMOP_MEMSET };
/* One copy or memset in its general form. Memset: width in elements, pitch in bytes; elementSize 1, 2
 * or 4; height >= 1. Copies of plain pointers have Height = Depth = 1. */
struct sim_memop {
	enum sim_memop_kind kind;
	CUDA_MEMCPY3D_PEER copy;
	CUDA_MEMSET_NODE_PARAMS set;
};
/* memory half: does it now, on the calling thread. Errors: CUDA_ERROR_INVALID_VALUE for what is not
 * mapped or out of bounds. No side effect on error. */
CUresult sim_memop_run(const struct sim_memop *op);
/* memory half: the checks of sim_memop_run without the effect (graph node creation). */
CUresult sim_memop_check(const struct sim_memop *op);
/* memory half: bytes that it moves, and which way: 0 host-host, 1 host to device, 2 device to host, 3
 * inside a device, 4 between devices. */
uint64_t sim_memop_bytes(const struct sim_memop *op, int *direction);
/* memory half: fills the descriptor of a plain copy / of a graph node's CUDA_MEMCPY3D. */
void sim_memop_linear(struct sim_memop *op, uint64_t dst, uint64_t src, size_t bytes);
void sim_memop_3d(struct sim_memop *op, const CUDA_MEMCPY3D *c);

/* time half (stream.c): the memory half calls this for each copy and memset with the raw handle that
 * the caller gave (NULL: legacy default stream; sim_pt() was applied).
 *   sync false: if the stream captures, adds a node with a copy of *op and returns; else runs
 *               sim_memop_run(op) at once and queues its modelled time on the stream.
 *   sync true:  capture rules of synchronous calls; runs it after what it must wait for, and returns
 *               when its modelled time is over. */
CUresult sim_submit_memop(struct CUctx_st *ctx, CUstream stream, const struct sim_memop *op, bool sync);

/* --- time half, called by the memory half ------------------------------------------------------- */

/* A context is made / ends. Create is called before the context is visible, with its gpu set; an
 * error makes the creation fail. Destroy waits for nothing: it drops queued work, then frees
 * everything of the time half. */
CUresult sim_time_ctx_create(struct CUctx_st *ctx);
void sim_time_ctx_destroy(struct CUctx_st *ctx);
/* Waits for all work of the context (what cuCtxSynchronize does); cuMemFree and others call it. Cheap
 * when nothing is queued. During a capture that forbids it: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED. */
CUresult sim_ctx_sync(struct CUctx_st *ctx);
/* For calls that a capture in the calling thread's mode forbids (cuMemAlloc, cuMemFree, cuModuleLoad..):
 * CUDA_SUCCESS, or CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and the captures are invalidated. */
CUresult sim_capture_guard(struct CUctx_st *ctx);
/* CUDA_SUCCESS and *capturing; CUDA_ERROR_INVALID_HANDLE for a bad stream; _INVALIDATED, _IMPLICIT
 * as cuStreamIsCapturing. */
CUresult sim_stream_capturing(struct CUctx_st *ctx, CUstream stream, bool *capturing);
/* cuMemAllocAsync / cuMemFreeAsync on a capturing stream become memory nodes. */
CUresult sim_capture_mem_alloc(struct CUctx_st *ctx, CUstream stream, const CUmemPoolProps *props,
			       size_t bytes, CUdeviceptr *dptr);
CUresult sim_capture_mem_free(struct CUctx_st *ctx, CUstream stream, CUdeviceptr dptr);

/* --- memory half, called by the time half ------------------------------------------------------- */

/* Call whenever the host has waited for a stream, an event or a context: pools give back what exceeds
 * their release threshold. Cheap when no pool has anything to give. */
void sim_mem_on_sync(struct CUctx_st *ctx);

/* Graph memory nodes. Addresses are reserved when the node is added, memory is taken from the
 * device's graph pool at launch and given back to it (not to the GPU: cuDeviceGraphMemTrim does that)
 * by the free node, or by sim_graphmem_unmap at the next launch or at destruction of the exec. The
 * attributes USED/RESERVED and their highs follow. */
CUresult sim_graphmem_address(struct CUctx_st *ctx, size_t bytes, CUdeviceptr *dptr);
CUresult sim_graphmem_map(struct CUctx_st *ctx, CUdeviceptr dptr); /* OUT_OF_MEMORY; no-op if mapped */
CUresult sim_graphmem_unmap(CUdeviceptr dptr);                     /* no-op if not mapped */
void sim_graphmem_forget(CUdeviceptr dptr);                        /* unmaps, address is gone */
bool sim_graphmem_is(CUdeviceptr dptr);                            /* allocated by a graph node */

/* Valid device address range [p, p + n)? gpu: where it lives, may be NULL. (Host memory that CUDA
 * knows counts as no.) */
bool sim_mem_is_device(CUdeviceptr p, size_t n, int *gpu);
#endif
