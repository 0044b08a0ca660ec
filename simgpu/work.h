/* The time half of the simulated libcuda: what its files share. Work goes to the engine of the
 * context's GPU (engine.h); handles, graphs and captures are private to the process.
 *
 * Locks, in this order: the capture lock (capture.c), a worker's list (worker.c), a context's list
 * of streams (stream.c), a GPU's lock. None is held while waiting or while user code runs. */
#ifndef SIMGPU_WORK_H
#define SIMGPU_WORK_H
#include <pthread.h>
#include "sim.h"

struct sim_capture;

/* --- handles ----------------------------------------------------------------------------------- */

#define SIM_STREAM_MAGIC 0x5354524du
#define SIM_EVENT_MAGIC 0x45564e54u

/* Memory of streams and events is reused for streams and events only, never returned, so that a
 * stale handle is recognised by its magic. */
struct CUstream_st {
	uint32_t magic;
	uint32_t queue; /* in the engine's context */
	struct CUctx_st *ctx;
	unsigned flags; /* CU_STREAM_* */
	int priority;
	uint64_t id;
	bool legacy;
	uint64_t thread; /* per-thread default stream: whose; 0: none */
	struct CUstream_st *next; /* of the context, or free */
	CUstreamAttrValue attr[8];
	/* under the capture lock */
	struct sim_capture *capture;
	CUgraphNode *dep; /* what the next captured operation depends on */
	size_t deps;
	struct CUstream_st *capture_next;
};

struct CUevent_st {
	uint32_t magic;
	unsigned flags; /* CU_EVENT_* */
	struct CUctx_st *ctx;
	uint32_t cell; /* SIM_NONE: never recorded */
	uint64_t rec;  /* 0: never recorded */
	struct sim_ticket ticket; /* the record's place; under the GPU's lock */
	struct CUevent_st *next;
	/* recorded in a capture: id of that capture, and what it stands for; under the capture lock */
	uint64_t capture_id;
	CUgraphNode *dep;
	size_t deps;
};

struct sim_time_ctx {
	uint32_t queue; /* the engine's context, and its generation */
	uint32_t queue_gen;
	pthread_mutex_t lock;
	struct CUstream_st *streams; /* all but the legacy one */
	struct CUstream_st *legacy;
	_Atomic int actions; /* things that a worker has yet to do for this context */
	struct CUctx_st *owner;
	struct sim_time_ctx *next;
};

/* The stream behind a handle in the current context `ctx`. CUDA_ERROR_INVALID_HANDLE,
 * CUDA_ERROR_CONTEXT_IS_DESTROYED; CUDA_ERROR_OUT_OF_MEMORY when a per-thread stream can't be made. */
CUresult sim_stream_of(struct CUctx_st *ctx, CUstream h, struct CUstream_st **s);
/* The live event behind a handle, else NULL. */
struct CUevent_st *sim_event_of(CUevent h);

/* --- enqueueing and waiting (wait.c) ------------------------------------------------------------ */

struct sim_action;
/* Enqueue on the stream, waiting while its context's queue is full. `action`, if any, is handed to
 * its worker. CUDA_ERROR_UNKNOWN when the GPU is lost. */
CUresult sim_enqueue(struct CUstream_st *s, const struct sim_op_desc *desc, struct sim_ticket *ticket,
		     struct sim_action *action);
/* What this thread enqueues from here to sim_batch_end arrives at one instant, as the parts of one
 * submission do. */
void sim_batch_begin(void);
void sim_batch_end(void);
/* Take the GPU's lock, with the engine worked out up to now. */
uint64_t sim_engine_enter(struct sim_gpu *g);
/* Sleep until the point has been passed. CUDA_ERROR_UNKNOWN when the GPU is lost. */
CUresult sim_wait(struct sim_gpu *g, const struct sim_ticket *ticket);
/* The same for everything now enqueued in the context. */
CUresult sim_wait_ctx(struct CUctx_st *ctx);
/* Sleep a part of eta_ns such that the end is not missed by much; eta 0: unknown, `round` counts how
 * often that was so. */
void sim_nap(uint64_t eta_ns, unsigned round);
/* Processes with work on this GPU that are gone lose it. Does something every 10 ms at most. */
void sim_look_for_dead(struct sim_gpu *g);

/* --- what the host does in the course of a stream (worker.c) ------------------------------------ */

enum sim_action_kind {
	SIM_ACT_CALL,	  /* call fn(arg) */
	SIM_ACT_CALLBACK, /* call callback(stream, CUDA_SUCCESS, arg) */
	SIM_ACT_MEMOP,	  /* a copy that had to wait for something that the host does */
	SIM_ACT_WAIT,	  /* until the value at addr compares well */
	SIM_ACT_WRITE,	  /* value to addr */
	SIM_ACT_FLAG,	  /* a spinning kernel: until the word at addr is not zero */
	SIM_ACT_UNMAP,	  /* memory of a graph goes, after copies that had to wait */
	SIM_ACT_OTHER_GPU /* until a point on another GPU has been passed */
};

/* One SIM_OP_HOST or SIM_OP_SPIN that is queued, and what ends it. */
struct sim_action {
	enum sim_action_kind kind;
	struct sim_action *next;
	struct CUctx_st *ctx;
	struct sim_time_ctx *time; /* stays valid while the context's queue_gen is current */
	struct sim_gpu *gpu;
	uint32_t op;
	uint64_t op_id;
	struct sim_ticket ticket; /* its own place */
	CUhostFn fn;
	CUstreamCallback callback;
	CUstream stream;
	void *arg;
	struct sim_memop *memop; /* owned */
	CUdeviceptr addr;
	uint64_t value;
	unsigned flags; /* CU_STREAM_WAIT_VALUE_* */
	bool wide;	/* 64 bits */
	struct sim_gpu *other;
	struct sim_ticket until;
};
struct sim_action *sim_action_new(enum sim_action_kind kind, struct CUctx_st *ctx);
void sim_action_free(struct sim_action *a);
/* From now on the worker sees to it. */
void sim_action_post(struct sim_action *a);
/* A SIM_OP_HOST on the stream that is ended by `a` (consumed, also on error). */
CUresult sim_enqueue_action(struct CUstream_st *s, struct sim_action *a);

/* --- single operations, after the question of capture -------------------------------------------- */

CUresult sim_do_memop(struct CUstream_st *s, const struct sim_memop *op);
CUresult sim_do_record(struct CUstream_st *s, struct CUevent_st *e);
CUresult sim_do_wait_event(struct CUstream_st *s, struct CUevent_st *e);
CUresult sim_do_batch(struct CUstream_st *s, unsigned n, const CUstreamBatchMemOpParams *op);
/* Wait on `s` for a point of a stream of `ctx`, whatever GPU that is on. */
CUresult sim_do_wait_ticket(struct CUstream_st *s, struct CUctx_st *ctx, const struct sim_ticket *t);

/* --- kernels (kernel.c) ------------------------------------------------------------------------- */

/* What a launch asks for. The arguments are the caller's memory. */
struct sim_launch {
	CUfunction f; /* CUfunction or CUkernel */
	unsigned grid[3], block[3], shared;
	void **params, **extra;
	bool cooperative;
};
/* What it costs. */
struct sim_cost {
	bool spins;	  /* until *flag is not zero */
	CUdeviceptr flag;
	uint64_t dur_ns;
	uint32_t occ;
};
/* Checks the launch as the driver does and works out its cost on the GPU of ctx. */
CUresult sim_kernel_cost(const struct CUctx_st *ctx, const struct sim_launch *l, struct sim_cost *c);
/* Log-normal jitter of the machine, if it has any. */
uint64_t sim_kernel_jitter(uint64_t dur_ns);
CUresult sim_do_kernel(struct CUstream_st *s, const struct sim_cost *c);
/* A deep copy of a launch's arguments. */
struct sim_args {
	void **params; /* NULL: none, or given through extra, or of unknown size: then the caller's */
	void **extra;
	void *block; /* one allocation behind both */
};
void sim_args_copy(struct sim_args *a, const struct sim_launch *l);
void sim_args_free(struct sim_args *a);

/* --- capture (capture.c) ------------------------------------------------------------------------ */

struct sim_node; /* graph.h: body of a node */
extern _Atomic int sim_captures; /* that are going on in this process */

/* First step of every operation on a stream: finds the stream and asks whether it captures. If so,
 * *capture is set and the capture lock is held: the caller ends with sim_capture_add. Errors of the
 * capture rules are returned, with whatever they invalidate invalidated. */
CUresult sim_begin_op(struct CUctx_st *ctx, CUstream h, struct CUstream_st **s,
		      struct sim_capture **capture);
/* Adds a node with a copy of *body behind the stream's dependencies and releases the capture lock. */
CUresult sim_capture_add(struct CUstream_st *s, const struct sim_node *body, CUgraphNode *node);
void sim_capture_lock(void);
void sim_capture_unlock(void);
/* An event record or wait on a capturing stream (capture lock held, released). */
CUresult sim_capture_record(struct CUstream_st *s, struct CUevent_st *e, unsigned flags);
CUresult sim_capture_wait(struct CUstream_st *s, struct CUevent_st *e, unsigned flags);
/* cuStreamWaitEvent where only the event may be captured: true if it was dealt with. */
bool sim_capture_join(struct CUstream_st *s, struct CUevent_st *e, CUresult *r);
/* Host asks about the event or stream: error if it is part of a capture, or if the calling thread
 * may not ask. */
CUresult sim_capture_host_event(struct CUevent_st *e);
CUresult sim_capture_host_stream(struct CUstream_st *s);
CUresult sim_capture_host_ctx(struct CUctx_st *ctx);
/* The event was recorded anew outside of captures, or dies. */
void sim_capture_forget_event(struct CUevent_st *e);
/* Something that a capture can't take was asked of the stream: its capture, if any, is invalid. */
void sim_capture_invalidate(struct CUstream_st *s);
/* The stream is destroyed: its capture is invalid and knows it no more. */
void sim_capture_drop_stream(struct CUstream_st *s);

/* Where an entry point and its _ptsz twin differ only in what NULL means. */
#define TWINS(name, impl, decl, ...)                                                               \
	CUresult name decl                                                                         \
	{                                                                                          \
		SIM_CALL_CTX(name, ctx);                                                           \
		return impl(ctx, hStream, ##__VA_ARGS__);                                          \
	}                                                                                          \
	CUresult name##_ptsz decl                                                                  \
	{                                                                                          \
		SIM_CALL_CTX(name##_ptsz, ctx);                                                    \
		return impl(ctx, sim_pt(hStream), ##__VA_ARGS__);                                  \
	}
#endif
