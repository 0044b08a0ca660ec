/* Stream capture: operations become nodes of a graph instead of work. One lock for all captures of
 * the process; without a capture it costs one load of a counter. */
#include <stdlib.h>
#include "graph.h"

struct sim_capture {
	uint64_t id;
	CUstreamCaptureMode mode;
	bool invalid; /* stays so until it is ended */
	bool to_graph; /* into a graph of the caller's */
	CUgraph graph;
	struct CUstream_st *origin;  /* where it began and has to end; NULL: destroyed */
	struct CUstream_st *streams; /* that capture into it, origin included */
	const void *thread; /* that began it */
	struct sim_capture *next;
};

_Atomic int sim_captures;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sim_capture *captures;
static uint64_t last_id;
static __thread CUstreamCaptureMode thread_mode; /* 0 is GLOBAL */
static __thread char thread_mark;

void sim_capture_lock(void)
{
	pthread_mutex_lock(&lock);
}

void sim_capture_unlock(void)
{
	pthread_mutex_unlock(&lock);
}

static struct sim_capture *find(uint64_t id)
{
	struct sim_capture *c = captures;
	while (c && c->id != id)
		c = c->next;
	return c;
}

/* --- a stream's and an event's part -------------------------------------------------------------------- */

static void leave(struct CUstream_st *s)
{
	free(s->dep);
	s->dep = NULL;
	s->deps = 0;
	s->capture = NULL;
	s->capture_next = NULL;
}

static void enter(struct CUstream_st *s, struct sim_capture *c)
{
	s->capture = c;
	s->capture_next = c->streams;
	c->streams = s;
}

static CUresult set_deps(CUgraphNode **list, size_t *n, const CUgraphNode *from, size_t count)
{
	CUgraphNode *copy = NULL;
	size_t copied = 0;
	for (size_t i = 0; i < count; i++)
		if (!sim_list_add(&copy, &copied, from[i]))
			return free(copy), CUDA_ERROR_OUT_OF_MEMORY;
	free(*list);
	*list = copy;
	*n = copied;
	return CUDA_SUCCESS;
}

static CUresult add_deps(struct CUstream_st *s, const CUgraphNode *from, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (!sim_list_add(&s->dep, &s->deps, from[i]))
			return CUDA_ERROR_OUT_OF_MEMORY;
	return CUDA_SUCCESS;
}

/* The capture is over; what it captured is the caller's. */
static void finish(struct sim_capture *c)
{
	struct sim_capture **link = &captures;
	for (struct CUstream_st *s = c->streams, *next; s; s = next) {
		next = s->capture_next;
		leave(s);
	}
	while (*link != c)
		link = &(*link)->next;
	*link = c->next;
	sim_captures--;
	free(c);
}

/* --- rules ------------------------------------------------------------------------------------------------ */

/* A capture on a blocking stream of the context: work on the legacy stream would have to order itself
 * against it. */
static struct sim_capture *blocking_capture(const struct CUctx_st *ctx, bool invalidate)
{
	struct sim_capture *found = NULL;
	for (struct sim_capture *c = captures; c; c = c->next)
		for (struct CUstream_st *s = c->streams; s; s = s->capture_next) {
			if (s->ctx != ctx || (s->flags & CU_STREAM_NON_BLOCKING))
				continue;
			found = c;
			c->invalid |= invalidate;
		}
	return found;
}

CUresult sim_begin_op(struct CUctx_st *ctx, CUstream h, struct CUstream_st **s,
		      struct sim_capture **capture)
{
	*capture = NULL;
	CUresult r = sim_stream_of(ctx, h, s);
	if (r || !sim_captures)
		return r;
	sim_capture_lock();
	struct sim_capture *c = (*s)->capture;
	if (c && !c->invalid) {
		*capture = c;
		return CUDA_SUCCESS; /* locked */
	}
	if (c)
		r = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	else if ((*s)->legacy && blocking_capture((*s)->ctx, true))
		r = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
	sim_capture_unlock();
	return r;
}

/* cuThreadExchangeStreamCaptureMode's rules for calls that are unsafe during a capture. */
static bool forbids(const struct sim_capture *c)
{
	if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
		return false;
	if (c->thread == &thread_mark)
		return c->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
	return thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

static CUresult guard_locked(void)
{
	CUresult r = CUDA_SUCCESS;
	for (struct sim_capture *c = captures; c; c = c->next) {
		if (!forbids(c))
			continue;
		c->invalid = true;
		r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	return r;
}

CUresult sim_capture_guard(struct CUctx_st *ctx)
{
	(void)ctx; /* the rules are about threads */
	if (!sim_captures)
		return CUDA_SUCCESS;
	sim_capture_lock();
	CUresult r = guard_locked();
	sim_capture_unlock();
	return r;
}

CUresult sim_capture_host_event(struct CUevent_st *e)
{
	CUresult r;
	if (!sim_captures && !__atomic_load_n(&e->capture_id, __ATOMIC_RELAXED))
		return CUDA_SUCCESS;
	sim_capture_lock();
	if (e->capture_id) {
		struct sim_capture *c = find(e->capture_id);
		if (c)
			c->invalid = true;
		r = CUDA_ERROR_CAPTURED_EVENT;
	} else {
		r = guard_locked();
	}
	sim_capture_unlock();
	return r;
}

CUresult sim_capture_host_stream(struct CUstream_st *s)
{
	CUresult r;
	if (!sim_captures)
		return CUDA_SUCCESS;
	sim_capture_lock();
	if (s->capture) {
		s->capture->invalid = true;
		r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	} else if (s->legacy && blocking_capture(s->ctx, true)) {
		r = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
	} else {
		r = guard_locked();
	}
	sim_capture_unlock();
	return r;
}

CUresult sim_capture_host_ctx(struct CUctx_st *ctx)
{
	if (!sim_captures)
		return CUDA_SUCCESS;
	sim_capture_lock();
	CUresult r = guard_locked();
	for (struct sim_capture *c = captures; c; c = c->next)
		for (struct CUstream_st *s = c->streams; s; s = s->capture_next)
			if (s->ctx == ctx) {
				c->invalid = true;
				r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
			}
	sim_capture_unlock();
	return r;
}

void sim_capture_invalidate(struct CUstream_st *s)
{
	sim_capture_lock();
	if (s->capture)
		s->capture->invalid = true;
	sim_capture_unlock();
}

void sim_capture_drop_stream(struct CUstream_st *s)
{
	sim_capture_lock();
	struct sim_capture *c = s->capture;
	if (c) {
		struct CUstream_st **link = &c->streams;
		while (*link != s)
			link = &(*link)->capture_next;
		*link = s->capture_next;
		c->invalid = true;
		if (c->origin == s) { /* nobody can end it now */
			if (!c->to_graph)
				sim_graph_free(c->graph);
			finish(c);
		}
		leave(s);
	}
	sim_capture_unlock();
}

/* --- capturing ---------------------------------------------------------------------------------------------- */

static CUresult add_locked(struct CUstream_st *s, const struct sim_node *body, CUgraphNode *node)
{
	CUgraphNode n;
	CUresult r = sim_graph_add(s->capture->graph, s->dep, s->deps, body, &n);
	if (!r)
		r = set_deps(&s->dep, &s->deps, &n, 1);
	if (!r && node)
		*node = n;
	return r;
}

CUresult sim_capture_add(struct CUstream_st *s, const struct sim_node *body, CUgraphNode *node)
{
	CUresult r = add_locked(s, body, node);
	sim_capture_unlock();
	return r;
}

CUresult sim_capture_record(struct CUstream_st *s, struct CUevent_st *e, unsigned flags)
{
	CUresult r;
	if (flags & CU_EVENT_RECORD_EXTERNAL) {
		struct sim_node body = { .type = CU_GRAPH_NODE_TYPE_EVENT_RECORD, .ctx = s->ctx, .event = e };
		return sim_capture_add(s, &body, NULL);
	}
	r = set_deps(&e->dep, &e->deps, s->dep, s->deps);
	e->capture_id = s->capture->id;
	sim_capture_unlock();
	return r;
}

CUresult sim_capture_wait(struct CUstream_st *s, struct CUevent_st *e, unsigned flags)
{
	if (flags & CU_EVENT_WAIT_EXTERNAL) {
		struct sim_node body = { .type = CU_GRAPH_NODE_TYPE_WAIT_EVENT, .ctx = s->ctx, .event = e };
		return sim_capture_add(s, &body, NULL);
	}
	CUresult r = CUDA_SUCCESS;
	if (e->rec) { /* would depend on work outside of the capture */
		s->capture->invalid = true;
		r = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
	}
	sim_capture_unlock();
	return r;
}

/* Capture lock held; the event was recorded in capture c. */
static CUresult join(struct CUstream_st *s, struct CUevent_st *e, struct sim_capture *c)
{
	if (!c)
		return CUDA_ERROR_CAPTURED_EVENT;
	if (c->invalid)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	if (s->capture && s->capture != c) {
		c->invalid = s->capture->invalid = true;
		return CUDA_ERROR_STREAM_CAPTURE_MERGE;
	}
	if (s->legacy) {
		c->invalid = true;
		return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
	}
	if (!s->capture)
		enter(s, c);
	return add_deps(s, e->dep, e->deps);
}

bool sim_capture_join(struct CUstream_st *s, struct CUevent_st *e, CUresult *r)
{
	sim_capture_lock();
	bool captured = e->capture_id != 0;
	if (captured)
		*r = join(s, e, find(e->capture_id));
	sim_capture_unlock();
	return captured;
}

void sim_capture_forget_event(struct CUevent_st *e)
{
	sim_capture_lock();
	free(e->dep);
	e->dep = NULL;
	e->deps = 0;
	e->capture_id = 0;
	sim_capture_unlock();
}

CUresult sim_capture_mem_alloc(struct CUctx_st *ctx, CUstream stream, const CUmemPoolProps *props,
			       size_t bytes, CUdeviceptr *dptr)
{
	struct CUstream_st *s;
	struct sim_capture *capture;
	struct sim_node body;
	CUresult r = sim_begin_op(ctx, stream, &s, &capture);
	if (r)
		return r;
	if (!capture)
		return CUDA_ERROR_ILLEGAL_STATE;
	r = sim_body_alloc(&body, s->ctx, props, bytes);
	if (!r) {
		r = add_locked(s, &body, NULL);
		*dptr = body.mem.dptr;
		sim_body_release(&body);
	}
	sim_capture_unlock();
	return r;
}

CUresult sim_capture_mem_free(struct CUctx_st *ctx, CUstream stream, CUdeviceptr dptr)
{
	struct CUstream_st *s;
	struct sim_capture *capture;
	CUresult r = sim_begin_op(ctx, stream, &s, &capture);
	if (r)
		return r;
	if (!capture)
		return CUDA_ERROR_ILLEGAL_STATE;
	struct sim_node body = { .type = CU_GRAPH_NODE_TYPE_MEM_FREE, .ctx = s->ctx, .mem = { .dptr = dptr } };
	return sim_capture_add(s, &body, NULL);
}

/* --- begin and end -------------------------------------------------------------------------------------------- */

static CUresult begin_locked(struct CUstream_st *s, CUstreamCaptureMode mode, CUgraph graph,
			     const CUgraphNode *dep, size_t deps)
{
	if (s->capture)
		return CUDA_ERROR_ILLEGAL_STATE;
	for (size_t i = 0; i < deps; i++)
		if (!sim_node_of(dep[i]) || dep[i]->graph != graph)
			return CUDA_ERROR_INVALID_VALUE;
	struct sim_capture *c = calloc(1, sizeof *c);
	if (!c)
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult r = set_deps(&s->dep, &s->deps, dep, deps);
	if (!r && !graph)
		r = sim_graph_new(&c->graph);
	if (r) {
		free(c);
		return r;
	}
	if (graph) {
		c->graph = graph;
		c->to_graph = true;
	}
	c->id = ++last_id;
	c->mode = mode;
	c->origin = s;
	c->thread = &thread_mark;
	c->next = captures;
	captures = c;
	enter(s, c);
	sim_captures++;
	return CUDA_SUCCESS;
}

static CUresult begin(struct CUctx_st *ctx, CUstream h, CUstreamCaptureMode mode, CUgraph graph,
		      const CUgraphNode *dep, size_t deps)
{
	struct CUstream_st *s;
	CUresult r = sim_stream_of(ctx, h, &s);
	if (r)
		return r;
	if (mode > CU_STREAM_CAPTURE_MODE_RELAXED || (deps && !dep))
		return CUDA_ERROR_INVALID_VALUE;
	if (s->legacy)
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	sim_capture_lock();
	r = begin_locked(s, mode, graph, dep, deps);
	sim_capture_unlock();
	return r;
}

/* Work of a forked stream that the origin does not wait for. */
static bool unjoined(const struct sim_capture *c)
{
	for (struct CUstream_st *s = c->streams; s; s = s->capture_next)
		for (size_t i = 0; s != c->origin && i < s->deps; i++)
			if (!sim_graph_precedes(s->dep[i], c->origin->dep, c->origin->deps))
				return true;
	return false;
}

static CUresult end_locked(struct CUstream_st *s, CUgraph *graph)
{
	struct sim_capture *c = s->capture;
	CUresult r = CUDA_SUCCESS;
	*graph = NULL;
	if (!c)
		return CUDA_ERROR_ILLEGAL_STATE;
	if (c->origin != s) {
		c->invalid = true;
		return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
	}
	if (c->mode != CU_STREAM_CAPTURE_MODE_RELAXED && c->thread != &thread_mark)
		return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
	if (c->invalid)
		r = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	else if (unjoined(c))
		r = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
	else
		*graph = c->graph;
	if (r && !c->to_graph)
		sim_graph_free(c->graph);
	finish(c);
	return r;
}

static CUresult end(struct CUctx_st *ctx, CUstream h, CUgraph *graph)
{
	struct CUstream_st *s;
	CUresult r = sim_stream_of(ctx, h, &s);
	if (r)
		return r;
	if (!graph)
		return CUDA_ERROR_INVALID_VALUE;
	sim_capture_lock();
	r = end_locked(s, graph);
	sim_capture_unlock();
	return r;
}

/* --- asking --------------------------------------------------------------------------------------------------- */

struct answer {
	CUstreamCaptureStatus status;
	cuuint64_t id;
	CUgraph graph;
	const CUgraphNode *dep;
	size_t deps;
};

/* On the legacy stream the answer is unknown while a blocking stream captures. */
static CUresult ask(struct CUctx_st *ctx, CUstream h, struct answer *a)
{
	struct CUstream_st *s;
	*a = (struct answer){ .status = CU_STREAM_CAPTURE_STATUS_NONE };
	CUresult r = sim_stream_of(ctx, h, &s);
	if (r || !sim_captures)
		return r;
	sim_capture_lock();
	struct sim_capture *c = s->capture;
	if (c) {
		a->status = c->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED :
					 CU_STREAM_CAPTURE_STATUS_ACTIVE;
		a->id = c->id;
		if (!c->invalid) {
			a->graph = c->graph;
			a->dep = s->dep;
			a->deps = s->deps;
		}
	} else if (s->legacy && blocking_capture(s->ctx, false)) {
		r = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
	}
	sim_capture_unlock();
	return r;
}

CUresult sim_stream_capturing(struct CUctx_st *ctx, CUstream stream, bool *capturing)
{
	struct answer a;
	CUresult r = ask(ctx, stream, &a);
	*capturing = a.status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
	return !r && a.status == CU_STREAM_CAPTURE_STATUS_INVALIDATED ?
		       CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : r;
}

static CUresult is_capturing(struct CUctx_st *ctx, CUstream h, CUstreamCaptureStatus *status)
{
	struct answer a;
	if (!status)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = ask(ctx, h, &a);
	if (!r)
		*status = a.status;
	return r;
}

static CUresult info(struct CUctx_st *ctx, CUstream h, CUstreamCaptureStatus *status, cuuint64_t *id,
		     CUgraph *graph, const CUgraphNode **dep, const CUgraphEdgeData **edge, size_t *deps)
{
	struct answer a;
	if (!status)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = ask(ctx, h, &a);
	if (r)
		return r;
	*status = a.status;
	if (id)
		*id = a.id;
	if (graph)
		*graph = a.graph;
	if (dep)
		*dep = a.dep;
	if (edge)
		*edge = NULL;
	if (deps)
		*deps = a.deps;
	return CUDA_SUCCESS;
}

static CUresult update(struct CUctx_st *ctx, CUstream h, CUgraphNode *dep, size_t deps, unsigned flags)
{
	struct CUstream_st *s;
	CUresult r = sim_stream_of(ctx, h, &s);
	if (r)
		return r;
	if (flags > CU_STREAM_SET_CAPTURE_DEPENDENCIES || (deps && !dep))
		return CUDA_ERROR_INVALID_VALUE;
	sim_capture_lock();
	if (!s->capture)
		r = CUDA_ERROR_ILLEGAL_STATE;
	else if (s->capture->invalid)
		r = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	for (size_t i = 0; i < deps && !r; i++)
		if (!sim_node_of(dep[i]) || dep[i]->graph != s->capture->graph)
			r = CUDA_ERROR_INVALID_VALUE;
	if (!r)
		r = flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES ? set_deps(&s->dep, &s->deps, dep, deps) :
								  add_deps(s, dep, deps);
	sim_capture_unlock();
	return r;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
	SIM_CALL(cuThreadExchangeStreamCaptureMode);
	if (!mode || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
		return CUDA_ERROR_INVALID_VALUE;
	CUstreamCaptureMode old = thread_mode;
	thread_mode = *mode;
	*mode = old;
	return CUDA_SUCCESS;
}

/* --- entry points ------------------------------------------------------------------------------------------------ */

TWINS(cuStreamBeginCapture, begin, (CUstream hStream), CU_STREAM_CAPTURE_MODE_GLOBAL, NULL, NULL, 0)
TWINS(cuStreamBeginCapture_v2, begin, (CUstream hStream, CUstreamCaptureMode mode), mode, NULL, NULL, 0)
TWINS(cuStreamEndCapture, end, (CUstream hStream, CUgraph *phGraph), phGraph)
TWINS(cuStreamIsCapturing, is_capturing, (CUstream hStream, CUstreamCaptureStatus *captureStatus),
      captureStatus)
TWINS(cuStreamGetCaptureInfo, info,
      (CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out), captureStatus_out,
      id_out, NULL, NULL, NULL, NULL)
TWINS(cuStreamGetCaptureInfo_v2, info,
      (CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out, CUgraph *graph_out,
       const CUgraphNode **dependencies_out, size_t *numDependencies_out),
      captureStatus_out, id_out, graph_out, dependencies_out, NULL, numDependencies_out)
TWINS(cuStreamGetCaptureInfo_v3, info,
      (CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out, CUgraph *graph_out,
       const CUgraphNode **dependencies_out, const CUgraphEdgeData **edgeData_out,
       size_t *numDependencies_out),
      captureStatus_out, id_out, graph_out, dependencies_out, edgeData_out, numDependencies_out)
TWINS(cuStreamUpdateCaptureDependencies, update,
      (CUstream hStream, CUgraphNode *dependencies, size_t numDependencies, unsigned int flags),
      dependencies, numDependencies, flags)

static CUresult update_v2(struct CUctx_st *ctx, CUstream h, CUgraphNode *dep, const CUgraphEdgeData *edge,
			  size_t deps, unsigned flags)
{
	(void)edge; /* every edge is a full dependency here */
	return update(ctx, h, dep, deps, flags);
}
TWINS(cuStreamUpdateCaptureDependencies_v2, update_v2,
      (CUstream hStream, CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData,
       size_t numDependencies, unsigned int flags),
      dependencies, dependencyData, numDependencies, flags)

static CUresult begin_to(struct CUctx_st *ctx, CUstream h, CUgraph graph, const CUgraphNode *dep,
			 size_t deps, CUstreamCaptureMode mode)
{
	return sim_graph_of(graph) ? begin(ctx, h, mode, graph, dep, deps) : CUDA_ERROR_INVALID_VALUE;
}
TWINS(cuStreamBeginCaptureToGraph, begin_to,
      (CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
       const CUgraphEdgeData *dependencyData, size_t numDependencies, CUstreamCaptureMode mode),
      hGraph, dependencies, ((void)dependencyData, numDependencies), mode)
