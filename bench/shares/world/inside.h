/* Between the files of the virtual machine. co.c: coroutines, time, futexes; driver.c: the driver
 * on the engines; program.c: what tenants run; feedback.c: the control's limiter; world.c: the rest. */
#ifndef SHARE_INSIDE_H
#define SHARE_INSIDE_H
#include <setjmp.h>
#include "../world.h"
#include "cuda_abi.h"
#include "engine.h"
#include "process.h"
#include "tranche_abi.h"

#define SHARE_US 1000ll
#define SHARE_MS 1000000ll

struct share_proc;

/* --- co.c -------------------------------------------------------------------------------------- */

struct share_co {
	jmp_buf regs;
	void *boot; /* ucontext_t of the first entry, NULL once entered */
	void *stack;
	void (*body)(void *arg);
	void *arg;
	int64_t at;	    /* when it runs next */
	uint64_t order;	    /* among equal times */
	int heap;	    /* index, -1: not in the heap */
	const void *futex;  /* waits there */
	bool dead;
	int64_t stall_at; /* when it loses the processor next */
	uint64_t random;
	struct share_proc *proc; /* NULL: nobody's */
	void *self;	    /* its tr_thread_self while others run */
	/* the driver's state of the thread */
	CUcontext stack_ctx[8];
	int depth;
	CUstreamCaptureMode mode;
	struct share_co *next;
};

extern int64_t share_now;
extern struct share_co *share_self; /* NULL: the caller of run */

void share_co_start(uint64_t seed);
struct share_co *share_spawn(struct share_proc *proc, void (*body)(void *), void *arg, int64_t at);
/* Runs everybody up to `until`, or to share_stop if that is lowered meanwhile. */
int64_t share_run(int64_t until);
void share_stop_at(int64_t at);
/* The thread computes for that long; others run meanwhile. */
void share_host(int64_t ns);
/* The same without using the CPU: is back at `at` exactly. */
void share_until(int64_t at);
/* Sleeps until `at` and wakes up a little late. */
void share_sleep(int64_t at);
/* The threads of a process never run again. */
void share_co_kill(struct share_proc *proc);
/* futex(2). False: the deadline passed, or the word had another value (*changed). */
bool share_wait(const uint32_t *word, uint32_t value, int64_t deadline, bool *changed);
int share_wake(const uint32_t *word, int n);
int64_t share_late(void); /* how late a sleeper wakes up */
uint64_t share_random(void);
double share_uniform(void);	/* [0, 1) */
double share_exponential(double mean);
double share_normal(void);

/* --- driver.c ---------------------------------------------------------------------------------- */

struct share_kernel {
	int64_t dur_ns; /* < 0: spins until released */
	uint32_t occ;
	uint32_t op; /* out */
	uint64_t id; /* out */
	int64_t then_ns; /* more of it after the spinning */
};

void share_driver_start(void);
void share_driver_fill(struct tr_real *real);
extern struct sim_engine *share_engine[SHARE_GPUS];
CUcontext share_ctx_make(struct share_proc *p, int gpu);
uint32_t share_ctx_queue(CUcontext ctx);
CUstream share_stream_make(CUcontext ctx);
CUgraphExec share_graph_make(int64_t dur_ns, uint32_t occ);
/* Time of a graph that is launched next, which changes from launch to launch. */
void share_graph_set(CUgraphExec exec, int64_t dur_ns);
void share_driver_drop(struct share_proc *p);
extern int64_t share_breaches;
CUresult share_driver_launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
			     unsigned by, unsigned bz, unsigned shared, CUstream s, void **params,
			     void **extra);
CUresult share_driver_graph(CUgraphExec e, CUstream s);
CUresult share_driver_sync(CUstream s);
CUresult share_driver_begin(CUstream s, CUstreamCaptureMode mode);
CUresult share_driver_end(CUstream s, CUgraph *g);

/* --- feedback.c -------------------------------------------------------------------------------- */

struct share_feedback {
	int64_t pool, tokens, share;
};
void share_feedback_start(struct share_proc *p);
/* Takes tokens for a launch; sleeps while there are none. */
void share_feedback_take(struct share_proc *p, int gpu, int64_t blocks);

/* --- world.c ----------------------------------------------------------------------------------- */

struct share_tenant {
	struct tr_limits *limits;
	struct tr_leases *leases;
	struct tr_ledger *ledger;
	int procs;
	int64_t due; /* when the arbiter hears its bell, SHARE_NEVER: it was not rung */
};

struct share_proc {
	int tenant, slot, index;
	enum share_limiter limiter;
	bool dead;
	struct share_entry lib; /* of its copy */
	void **self;
	CUcontext ctx[SHARE_GPUS];
	uint32_t captures; /* going on in modes that forbid calls of others */
	struct share_feedback feedback[SHARE_GPUS];
};

extern struct share_conf share_conf;
extern struct share_tenant share_tenants[SHARE_TENANTS];
extern struct share_proc share_procs[SHARE_PROCS];
extern int share_n_tenants, share_n_procs;
/* The tenant's bell was rung. */
void share_ring(struct share_tenant *t);
/* Factor on the time of all kernels now. */
double share_clock(int gpu);
void share_die(const char *where) __attribute__((noreturn));
void share_say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* --- program.c --------------------------------------------------------------------------------- */

int share_program_start(struct share_proc *p, const struct share_program *what);
void share_program_stats(int program, struct share_stats *out);
void share_program_reset(void);
#endif
