/* The execution engine of one simulated GPU: whose kernels run when, as a model in shared memory.
 *
 * Contexts take turns as on the hardware (one time-slice group each, round robin): a context keeps
 * the compute engine for a slice, in the middle of a kernel if need be, and a change of context
 * costs switch_ns in which nothing runs. A context without work is skipped; a slice is renewed
 * only while no other context has work. Inside a context the kernels at the heads of its streams
 * run side by side and share the GPU by occupancy. Copies run on engines of their own.
 *
 * The model is pure. Time is an argument, in nanoseconds of one monotonic clock; nothing here
 * reads a clock, waits, allocates or knows about processes. Whoever wants to know something first
 * advances the engine to now, so no daemon or thread is needed and a queue left alone is worked
 * off at the right times when somebody looks next. Every function needs the caller to hold the
 * GPU's lock, except those said to be lock-free.
 *
 * A process may die at any instant, also inside one of these functions. After that the next owner
 * of the lock calls sim_engine_drop_proc and sim_engine_repair: a torn step costs at most the
 * accounting of that step. All links are indices, and every walk is bounded. */
#ifndef SIM_ENGINE_H
#define SIM_ENGINE_H
#include <stdbool.h>
#include <stdint.h>

#define SIM_ENGINE_CTXS 512	/* contexts on one GPU, over all processes */
#define SIM_ENGINE_PROCS 512	/* processes, by their slot in the machine's process table */
#define SIM_ENGINE_STREAMS 512	/* streams of one context */
#define SIM_ENGINE_OPS 2048	/* queue entries of one context, over all its streams */
#define SIM_ENGINE_DEPTH 1024	/* how many of them may be kernels, unless configured */
#define SIM_ENGINE_CELLS 16384	/* recorded events of one context */
#define SIM_ENGINE_SAMPLES 2048 /* utilisation samples kept, over all processes */
#define SIM_ENGINE_GPU_SAMPLES 128
#define SIM_ENGINE_SAMPLE_NS 166666667ULL /* period of the driver's utilisation sampling */
#define SIM_ENGINE_OCC_FULL 1000000u	  /* a kernel that fills the GPU */
#define SIM_NONE UINT32_MAX
#define SIM_NEVER UINT64_MAX

enum sim_op_kind {
	SIM_OP_FREE = 0,
	SIM_OP_KERNEL, /* busy for dur_ns of modelled time */
	SIM_OP_SPIN,   /* a kernel that ends when its owner releases it */
	SIM_OP_COPY,   /* dur_ns on a copy engine */
	SIM_OP_MARK,   /* an event record: stamps a cell */
	SIM_OP_WAIT,   /* until another stream of this GPU has done everything up to a ticket */
	SIM_OP_HOST,   /* something the owning process does: a host function, a wait for a value */
};

enum sim_copy_engine { SIM_COPY_H2D, SIM_COPY_D2H, SIM_COPY_D2D, SIM_COPY_ENGINES };

/* A point in a stream: everything enqueued up to it. Names its stream for good, by generation. */
struct sim_ticket {
	uint32_t ctx, ctx_gen;
	uint32_t stream, stream_gen;
	uint64_t seq;
};

/* What to enqueue. */
struct sim_op_desc {
	enum sim_op_kind kind;
	uint32_t occ;		/* KERNEL, SPIN: part of the GPU that it fills, of SIM_ENGINE_OCC_FULL */
	uint64_t dur_ns;	/* KERNEL, COPY */
	uint32_t copy_engine;	/* COPY */
	uint32_t cell;		/* MARK */
	uint64_t rec;		/* MARK: number of this record, from sim_engine_next_rec */
	struct sim_ticket wait; /* WAIT */
};

/* One queue entry. Private to the engine but for `id` and `reached_ns` (HOST, SPIN). */
struct sim_op {
	uint32_t next; /* towards the tail of its stream, or the free list */
	uint16_t kind; /* enum sim_op_kind */
	uint16_t copy_engine;
	uint32_t occ;
	uint32_t cell;
	uint64_t id;  /* order of enqueueing in the context; unique in it */
	uint64_t seq; /* order in the stream */
	union {
		uint64_t rem_ns; /* KERNEL, SPIN: left, at full rate */
		uint64_t end_ns; /* COPY: once started */
		uint64_t rec;	 /* MARK */
	};
	uint64_t dur_ns;
	uint64_t reached_ns; /* when it came to the head of its stream and could start; 0: not yet */
	uint32_t released;
	struct sim_ticket wait;
};

struct sim_stream_q {
	uint32_t gen; /* odd while open */
	uint32_t flags;
#define SIM_STREAM_NON_BLOCKING 1u /* takes no part in the barrier of the legacy stream */
#define SIM_STREAM_CLOSING 2u	   /* destroyed by its owner, free once it has run dry */
	uint32_t head, tail;	   /* op indices, SIM_NONE: empty */
	uint32_t next_active;	   /* list of streams with work */
	uint32_t active;
	uint64_t tail_seq; /* last enqueued */
	uint64_t done_seq; /* last completed; readable without the lock */
};

/* Where a recorded event finds its time stamp. Readable without the lock: done before ts. */
struct sim_cell {
	uint64_t done; /* newest record that has completed */
	uint64_t ts_ns;
};

struct sim_ctx_q {
	uint32_t gen; /* odd while open */
	uint32_t proc;
	uint32_t pid;
	uint32_t active; /* first stream with work */
	uint32_t kernels, ops;
	uint32_t dirty;	     /* heads have to be looked at again */
	uint32_t waiting;    /* some head waits for another stream */
	uint32_t runnable;   /* kernels that could run now */
	uint32_t op_free, op_top;
	uint32_t stream_top;
	uint32_t cell_top, cell_free;
	uint64_t run_occ;    /* sum of their occupancies */
	uint64_t copy_end_ns; /* earliest end of a running copy, SIM_NEVER */
	uint64_t next_id;
	uint64_t next_rec;
	struct sim_stream_q stream[SIM_ENGINE_STREAMS]; /* 0 is the legacy default stream */
	struct sim_op op[SIM_ENGINE_OPS];
	struct sim_cell cell[SIM_ENGINE_CELLS];
};

/* The truth about one process on this GPU. */
struct sim_engine_proc {
	uint64_t busy_ns;   /* its kernels had the compute engine */
	uint64_t switch_ns; /* lost in changes towards it */
	uint64_t window_ns; /* busy in the current sampling period */
	uint32_t pid;
	uint32_t contexts;
};

struct sim_sample {
	uint64_t end_ns; /* end of the period that it describes */
	uint32_t proc, pid;
	uint32_t percent;
	uint32_t pad;
};

struct sim_engine_conf {
	uint64_t slice_ns;
	uint64_t switch_ns;
	uint64_t sample_ns; /* 0: SIM_ENGINE_SAMPLE_NS */
	uint32_t depth;	    /* kernels that a context may queue, 0: SIM_ENGINE_DEPTH */
};

struct sim_engine {
	struct sim_engine_conf conf;
	uint64_t t_ns; /* the model has been worked out up to here */
	uint64_t busy_ns, switch_ns;
	uint64_t kernels_done;
	uint64_t window_end_ns, window_busy_ns;
	uint32_t cur;	    /* context that is loaded, SIM_NONE at first */
	uint32_t switch_to; /* while a change is under way, else SIM_NONE */
	uint64_t switch_end_ns;
	uint64_t slice_end_ns;
	uint64_t copy_free_ns[SIM_COPY_ENGINES];
	uint64_t busy_ctx[SIM_ENGINE_CTXS / 64]; /* bit map: contexts with work queued */
	uint32_t ctx_top;
	uint32_t lost; /* nothing runs any more */
	uint64_t liveness_ns; /* for the users: when the processes with work here were last looked at */
	uint64_t sample_count; /* ever written; the newest is at (sample_count - 1) % size */
	uint64_t gpu_sample_count;
	struct sim_engine_proc proc[SIM_ENGINE_PROCS];
	struct sim_sample sample[SIM_ENGINE_SAMPLES];
	struct sim_sample gpu_sample[SIM_ENGINE_GPU_SAMPLES]; /* proc and pid unused */
	struct sim_ctx_q ctx[SIM_ENGINE_CTXS];
};

/* Prepare zeroed memory. */
void sim_engine_init(struct sim_engine *e, const struct sim_engine_conf *conf, uint64_t now_ns);
/* Work out everything that happened until now_ns. Time never runs backwards: an earlier now_ns
 * changes nothing. */
void sim_engine_advance(struct sim_engine *e, uint64_t now_ns);

/* A context of the process in slot `proc`; pid is for the samples. SIM_NONE: no room. */
uint32_t sim_engine_ctx_open(struct sim_engine *e, uint32_t proc, uint32_t pid, uint64_t now_ns);
/* Its queued and running work vanishes at now_ns. */
void sim_engine_ctx_close(struct sim_engine *e, uint32_t ctx, uint64_t now_ns);
/* The process is gone: close all its contexts and forget its figures if `forget`. */
void sim_engine_drop_proc(struct sim_engine *e, uint32_t proc, uint64_t now_ns, bool forget);
/* The GPU fell off the bus: all work of everybody vanishes and no more is accepted. */
void sim_engine_lose(struct sim_engine *e, uint64_t now_ns);
/* Put the links right after a lock owner died. Drops nothing that is whole. */
void sim_engine_repair(struct sim_engine *e);

/* flags: 0 or SIM_STREAM_NON_BLOCKING. SIM_NONE: no room. */
uint32_t sim_engine_stream_open(struct sim_engine *e, uint32_t ctx, uint32_t flags);
/* Its work still completes. */
void sim_engine_stream_close(struct sim_engine *e, uint32_t ctx, uint32_t stream);
/* A place for the time stamp of an event. SIM_NONE: no room. */
uint32_t sim_engine_cell_open(struct sim_engine *e, uint32_t ctx);
void sim_engine_cell_close(struct sim_engine *e, uint32_t ctx, uint32_t cell);
uint64_t sim_engine_next_rec(struct sim_engine *e, uint32_t ctx);

/* Enqueue at now_ns (advances first). Writes the op's index and, through `ticket`, the point in
 * the stream. False: the queue is full, try again later. */
bool sim_engine_push(struct sim_engine *e, uint32_t ctx, uint32_t stream,
		     const struct sim_op_desc *desc, uint64_t now_ns, uint32_t *op,
		     struct sim_ticket *ticket);
/* Whether an entry of that kind fits now. */
bool sim_engine_room(const struct sim_engine *e, uint32_t ctx, enum sim_op_kind kind);
/* End a HOST or SPIN op, named by index and id. */
void sim_engine_release(struct sim_engine *e, uint32_t ctx, uint32_t op, uint64_t id,
			uint64_t now_ns);
/* Whether that op is still queued. */
bool sim_engine_queued(const struct sim_engine *e, uint32_t ctx, uint32_t op, uint64_t id);
/* The op if it is still queued and has come to the head of its stream, else NULL. */
const struct sim_op *sim_engine_reached(const struct sim_engine *e, uint32_t ctx, uint32_t op,
					uint64_t id);

/* The point after everything enqueued so far. */
struct sim_ticket sim_engine_tail(const struct sim_engine *e, uint32_t ctx, uint32_t stream);
/* Whether that point has been passed. True if its stream or context is gone. Lock-free. */
bool sim_engine_passed(const struct sim_engine *e, const struct sim_ticket *t);
/* Whether the context has nothing queued. */
bool sim_engine_ctx_idle(const struct sim_engine *e, uint32_t ctx);
/* Points after everything enqueued in the context, for at most n streams; returns how many. */
uint32_t sim_engine_ctx_tails(const struct sim_engine *e, uint32_t ctx, struct sim_ticket *t,
			      uint32_t n);
/* How long until the point can be passed at the earliest, from e->t_ns; 0: unknown or very soon.
 * Looks at a bounded number of entries. */
uint64_t sim_engine_eta(const struct sim_engine *e, const struct sim_ticket *t);
/* The same for the first thing to complete in the context. */
uint64_t sim_engine_head_eta(const struct sim_engine *e, uint32_t ctx);
#endif
