/* The driver of the virtual machine: what the meter and the programs call, on the simulator's
 * engines. Calls cost host time; event stamps are device wall time in steps of half a us. */
#define _GNU_SOURCE
#include "inside.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define RECORD_NS 700
#define QUERY_NS 200
#define STAMP_NS 500
#define DRIFT 15e-6 /* the device's clock is that much faster than the host's */
#define CALL_NS 100 /* of calls that only look something up */
#define SYNC_MIN_NS 20000
#define SYNC_MAX_NS 60000

struct vctx {
	struct share_proc *proc;
	int gpu;
	uint32_t queue;
	uint32_t gen;
};

struct vstream {
	struct vctx *ctx;
	uint32_t queue;
	bool capturing, spoilt;
	CUstreamCaptureMode mode;
	int captured;
	struct share_co *by;
	struct vstream *next;
};

struct vevent {
	struct vctx *ctx;
	uint32_t cell;
	uint64_t rec;
};

struct vgraph {
	int64_t dur_ns;
	uint32_t occ;
};

struct sim_engine *share_engine[SHARE_GPUS];
int64_t share_breaches;
static struct vstream *streams;

static struct vctx *current(void)
{
	return share_self->depth > 0 ? (struct vctx *)share_self->stack_ctx[share_self->depth - 1] : NULL;
}

static struct sim_engine *engine(const struct vctx *c)
{
	sim_engine_advance(share_engine[c->gpu], (uint64_t)share_now);
	return share_engine[c->gpu];
}

/* Stream 0 of an engine's context is the legacy one. */
static struct vstream legacy_of(struct vctx *c)
{
	return (struct vstream){.ctx = c, .queue = 0};
}

#define STREAM(s, h)                                                                               \
	struct vstream s##_legacy = legacy_of(current());                                          \
	struct vstream *s = (uintptr_t)(h) < 16 ? &s##_legacy : (struct vstream *)(h)

void share_driver_start(void)
{
	struct sim_engine_conf conf = {.slice_ns = (uint64_t)share_conf.slice_ns,
				       .switch_ns = (uint64_t)share_conf.switch_ns};
	for (int i = 0; i < share_conf.gpus; i++) {
		share_engine[i] = mmap(NULL, sizeof(struct sim_engine), PROT_READ | PROT_WRITE,
				       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (share_engine[i] == MAP_FAILED)
			share_die(__func__);
		sim_engine_init(share_engine[i], &conf, (uint64_t)share_now);
	}
}

/* --- contexts and streams ----------------------------------------------------------------------- */

CUcontext share_ctx_make(struct share_proc *p, int gpu)
{
	struct vctx *c = calloc(1, sizeof *c);
	*c = (struct vctx){.proc = p, .gpu = gpu};
	struct sim_engine *e = engine(c);
	c->queue = sim_engine_ctx_open(e, (uint32_t)p->index, (uint32_t)p->index + 1,
				       (uint64_t)share_now);
	if (c->queue == SIM_NONE)
		share_die(__func__);
	c->gen = e->ctx[c->queue].gen;
	return (CUcontext)c;
}

uint32_t share_ctx_queue(CUcontext ctx)
{
	return ((struct vctx *)ctx)->queue;
}

CUstream share_stream_make(CUcontext ctx)
{
	struct vstream *s = calloc(1, sizeof *s);
	struct vctx *c = (struct vctx *)ctx;
	*s = (struct vstream){.ctx = c, .next = streams,
			      .queue = sim_engine_stream_open(engine(c), c->queue,
							      SIM_STREAM_NON_BLOCKING)};
	if (s->queue == SIM_NONE)
		share_die(__func__);
	streams = s;
	return (CUstream)s;
}

CUgraphExec share_graph_make(int64_t dur_ns, uint32_t occ)
{
	struct vgraph *g = calloc(1, sizeof *g);
	*g = (struct vgraph){.dur_ns = dur_ns, .occ = occ};
	return (CUgraphExec)g;
}

void share_graph_set(CUgraphExec exec, int64_t dur_ns)
{
	((struct vgraph *)exec)->dur_ns = dur_ns;
}

void share_driver_drop(struct share_proc *p)
{
	for (int i = 0; i < share_conf.gpus; i++)
		sim_engine_drop_proc(share_engine[i], (uint32_t)p->index, (uint64_t)share_now, false);
}

static CUresult ctx_get(CUcontext *ctx)
{
	*ctx = (CUcontext)current();
	return CUDA_SUCCESS;
}

static CUresult ctx_push(CUcontext ctx)
{
	if (share_self->depth == 8)
		return CUDA_ERROR_INVALID_CONTEXT;
	share_self->stack_ctx[share_self->depth++] = ctx;
	return CUDA_SUCCESS;
}

static CUresult ctx_pop(CUcontext *ctx)
{
	if (share_self->depth == 0)
		return CUDA_ERROR_INVALID_CONTEXT;
	*ctx = share_self->stack_ctx[--share_self->depth];
	return CUDA_SUCCESS;
}

static CUresult stream_ctx(CUstream h, CUcontext *ctx)
{
	STREAM(s, h);
	*ctx = (CUcontext)s->ctx;
	return CUDA_SUCCESS;
}

/* --- capture ----------------------------------------------------------------------------------- */

/* A call that a capture forbids: to the thread itself, or with a global capture to every thread
 * that has not said that it knows better. It spoils the capture. */
static bool forbidden(void)
{
	bool hit = false;
	if (share_self->mode == CU_STREAM_CAPTURE_MODE_RELAXED || share_self->proc->captures == 0)
		return false;
	for (struct vstream *s = streams; s != NULL; s = s->next)
		if (s->capturing && s->ctx->proc == share_self->proc &&
		    (s->mode == CU_STREAM_CAPTURE_MODE_GLOBAL ||
		     (s->mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL && s->by == share_self))) {
			s->spoilt = true;
			share_breaches++;
			hit = true;
		}
	return hit;
}

static CUresult exchange(CUstreamCaptureMode *mode)
{
	CUstreamCaptureMode old = share_self->mode;
	share_self->mode = *mode;
	*mode = old;
	return CUDA_SUCCESS;
}

CUresult share_driver_begin(CUstream h, CUstreamCaptureMode mode)
{
	STREAM(s, h);
	share_host(CALL_NS);
	if ((uintptr_t)h < 16)
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	s->capturing = true;
	s->spoilt = false;
	s->mode = mode;
	s->by = share_self;
	s->captured = 0;
	s->ctx->proc->captures++;
	return CUDA_SUCCESS;
}

CUresult share_driver_end(CUstream h, CUgraph *g)
{
	STREAM(s, h);
	share_host(CALL_NS);
	if (!s->capturing)
		return CUDA_ERROR_ILLEGAL_STATE;
	s->capturing = false;
	s->ctx->proc->captures--;
	*g = (CUgraph)(uintptr_t)(0x100 + s->captured);
	return s->spoilt ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

static CUresult capturing(CUstream h, CUstreamCaptureStatus *status)
{
	STREAM(s, h);
	share_host(CALL_NS);
	*status = s->capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
	return CUDA_SUCCESS;
}

/* --- events ------------------------------------------------------------------------------------ */

static CUresult event_create(CUevent *out, unsigned flags)
{
	(void)flags;
	struct vevent *e = calloc(1, sizeof *e);
	*e = (struct vevent){.ctx = current(), .cell = SIM_NONE};
	*out = (CUevent)e;
	share_host(CALL_NS);
	return CUDA_SUCCESS;
}

static CUresult event_destroy(CUevent h)
{
	free((struct vevent *)h);
	return CUDA_SUCCESS;
}

/* Waits until the entry fits; the driver spins meanwhile. */
static bool push(struct vstream *s, const struct sim_op_desc *d, uint32_t *op, struct sim_ticket *t)
{
	struct sim_engine *e = engine(s->ctx);
	while (!sim_engine_push(e, s->ctx->queue, s->queue, d, (uint64_t)share_now, op, t)) {
		if (e->ctx[s->ctx->queue].gen != s->ctx->gen)
			return false;
		uint64_t eta = sim_engine_head_eta(e, s->ctx->queue);
		share_host(eta < 500 ? 500 : eta > SHARE_MS ? SHARE_MS : (int64_t)eta);
	}
	return true;
}

static CUresult event_record(CUevent h, CUstream sh)
{
	STREAM(s, sh);
	struct vevent *e = (struct vevent *)h;
	share_host(RECORD_NS);
	if (s->capturing) {
		share_breaches++;
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	if (e->ctx != s->ctx)
		return CUDA_ERROR_INVALID_HANDLE;
	struct sim_engine *g = engine(e->ctx);
	if (e->cell == SIM_NONE)
		e->cell = sim_engine_cell_open(g, e->ctx->queue);
	if (e->cell == SIM_NONE)
		return CUDA_ERROR_OUT_OF_MEMORY;
	e->rec = sim_engine_next_rec(g, e->ctx->queue);
	struct sim_op_desc d = {.kind = SIM_OP_MARK, .cell = e->cell, .rec = e->rec};
	return push(s, &d, NULL, NULL) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

static const struct sim_cell *cell(const struct vevent *e)
{
	return &share_engine[e->ctx->gpu]->ctx[e->ctx->queue].cell[e->cell];
}

static CUresult event_state(const struct vevent *e)
{
	if (e->rec == 0 || cell(e)->done >= e->rec)
		return CUDA_SUCCESS;
	engine(e->ctx);
	return cell(e)->done >= e->rec ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult event_query(CUevent h)
{
	share_host(QUERY_NS);
	if (forbidden())
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	return event_state((struct vevent *)h);
}

static int64_t stamp(const struct vevent *e)
{
	return (int64_t)((double)cell(e)->ts_ns * (1 + DRIFT)) / STAMP_NS;
}

static CUresult event_elapsed(float *ms, CUevent ha, CUevent hb)
{
	const struct vevent *a = (struct vevent *)ha, *b = (struct vevent *)hb;
	if (a->rec == 0 || b->rec == 0)
		return CUDA_ERROR_INVALID_HANDLE;
	if (event_state(a) != CUDA_SUCCESS || event_state(b) != CUDA_SUCCESS)
		return CUDA_ERROR_NOT_READY;
	*ms = (float)((double)((stamp(b) - stamp(a)) * STAMP_NS) / 1e6);
	return CUDA_SUCCESS;
}

/* --- launches ---------------------------------------------------------------------------------- */

static CUresult launch(struct vstream *s, struct share_kernel *k)
{
	share_host(share_conf.launch_ns);
	if (s->capturing) {
		s->captured++;
		return CUDA_SUCCESS;
	}
	struct sim_op_desc d = {.kind = k->dur_ns < 0 ? SIM_OP_SPIN : SIM_OP_KERNEL, .occ = k->occ,
				.dur_ns = k->dur_ns < 0 ? 0 : (uint64_t)k->dur_ns};
	if (!push(s, &d, &k->op, NULL))
		return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	k->id = share_engine[s->ctx->gpu]->ctx[s->ctx->queue].op[k->op].id;
	if (k->then_ns == 0)
		return CUDA_SUCCESS;
	d = (struct sim_op_desc){.kind = SIM_OP_KERNEL, .occ = k->occ, .dur_ns = (uint64_t)k->then_ns};
	return push(s, &d, NULL, NULL) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult share_driver_launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
			     unsigned by, unsigned bz, unsigned shared, CUstream h, void **params,
			     void **extra)
{
	(void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)extra;
	STREAM(s, h);
	return launch(s, (struct share_kernel *)params);
}

CUresult share_driver_graph(CUgraphExec e, CUstream h)
{
	STREAM(s, h);
	const struct vgraph *g = (struct vgraph *)e;
	struct share_kernel k = {.dur_ns = g->dur_ns, .occ = g->occ};
	return launch(s, &k);
}

/* --- waiting ----------------------------------------------------------------------------------- */

CUresult share_driver_sync(CUstream h)
{
	STREAM(s, h);
	struct sim_engine *e = engine(s->ctx);
	struct sim_ticket t = sim_engine_tail(e, s->ctx->queue, s->queue);
	int64_t nap = 500;
	if (forbidden())
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	if (sim_engine_passed(e, &t)) {
		share_host(1000);
		return CUDA_SUCCESS;
	}
	while (!sim_engine_passed(engine(s->ctx), &t)) {
		int64_t eta = (int64_t)sim_engine_eta(e, &t);
		nap = eta > 0 ? 500 : nap < 64000 ? nap * 2 : nap;
		share_until(share_now + (eta > nap ? eta : nap));
	}
	share_until(share_now + SYNC_MIN_NS +
		    (int64_t)(share_uniform() * (SYNC_MAX_NS - SYNC_MIN_NS)));
	return CUDA_SUCCESS;
}

void share_driver_fill(struct tr_real *real)
{
	real->cuCtxGetCurrent = ctx_get;
	real->cuCtxPushCurrent_v2 = ctx_push;
	real->cuCtxPopCurrent_v2 = ctx_pop;
	real->cuStreamGetCtx = stream_ctx;
	real->cuStreamIsCapturing = capturing;
	real->cuStreamIsCapturing_ptsz = capturing;
	real->cuThreadExchangeStreamCaptureMode = exchange;
	real->cuEventCreate = event_create;
	real->cuEventDestroy_v2 = event_destroy;
	real->cuEventRecord = event_record;
	real->cuEventRecord_ptsz = event_record;
	real->cuEventQuery = event_query;
	real->cuEventElapsedTime = event_elapsed;
	real->cuLaunchKernel = share_driver_launch;
	real->cuGraphLaunch = share_driver_graph;
	real->cuStreamSynchronize = share_driver_sync;
	real->cuStreamBeginCapture_v2 = share_driver_begin;
	real->cuStreamEndCapture = share_driver_end;
}
