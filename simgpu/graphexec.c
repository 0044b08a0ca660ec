/* Executable graphs: instantiating, updating and launching. A launch puts the nodes on the stream one
 * after the other, in an order that respects the edges; kernels that follow each other are one entry
 * of the launch queue with the sum of their times, as a real graph is one submission. */
#include <stdlib.h>
#include <string.h>
#include "graph.h"

struct CUgraphExec_st {
	uint32_t magic;
	CUgraph graph; /* a copy */
	CUgraphNode *order;
	cuuint64_t flags;
	pthread_mutex_t lock; /* launches of one executable graph follow each other */
	struct CUctx_st *last_ctx;
	struct sim_ticket last;
	bool launched;
};

static CUgraphExec exec_of(CUgraphExec e)
{
	return e && e->magic == SIM_EXEC_MAGIC ? e : NULL;
}

/* Counts the exec in (+1) or out (-1) at each allocation of the graph. */
static void count_memory(CUgraph g, int by)
{
	for (size_t i = 0; i < g->nodes; i++) {
		struct sim_node *b = &g->node[i]->body;
		if (b->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && b->mem.mem)
			b->mem.mem->execs += by;
		else if (b->type == CU_GRAPH_NODE_TYPE_GRAPH)
			count_memory(b->child, by);
	}
}

/* An allocation's address can be in one executable graph at a time only. */
static bool memory_taken(CUgraph g)
{
	for (size_t i = 0; i < g->nodes; i++) {
		struct sim_node *b = &g->node[i]->body;
		if ((b->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && b->mem.mem && b->mem.mem->execs) ||
		    (b->type == CU_GRAPH_NODE_TYPE_GRAPH && memory_taken(b->child)))
			return true;
	}
	return false;
}

static CUresult instantiate(CUgraphExec *out, CUgraph g, cuuint64_t flags)
{
	if (!out || !sim_graph_of(g) || (flags & ~15ull))
		return CUDA_ERROR_INVALID_VALUE;
	if (memory_taken(g))
		return CUDA_ERROR_NOT_SUPPORTED;
	CUgraphExec e = calloc(1, sizeof *e);
	if (!e)
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult r = sim_graph_clone(g, &e->graph);
	if (!r && !(e->order = sim_graph_order(e->graph)))
		r = CUDA_ERROR_INVALID_VALUE;
	if (r) {
		sim_graph_free(e->graph);
		free(e);
		return r;
	}
	e->graph->owned = true;
	e->flags = flags;
	pthread_mutex_init(&e->lock, NULL);
	count_memory(e->graph, 1);
	e->magic = SIM_EXEC_MAGIC;
	*out = e;
	return CUDA_SUCCESS;
}

CUresult cuGraphInstantiate(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode,
			    char *logBuffer, size_t bufferSize)
{
	SIM_CALL_CTX(cuGraphInstantiate, ctx);
	(void)ctx, (void)phErrorNode;
	if (logBuffer && bufferSize)
		*logBuffer = 0;
	return instantiate(phGraphExec, hGraph, 0);
}

CUresult cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode,
			       char *logBuffer, size_t bufferSize)
{
	SIM_CALL_CTX(cuGraphInstantiate_v2, ctx);
	(void)ctx, (void)phErrorNode;
	if (logBuffer && bufferSize)
		*logBuffer = 0;
	return instantiate(phGraphExec, hGraph, 0);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags)
{
	SIM_CALL_CTX(cuGraphInstantiateWithFlags, ctx);
	(void)ctx;
	return instantiate(phGraphExec, hGraph, flags);
}

static CUresult with_params(CUgraphExec *out, CUgraph g, CUDA_GRAPH_INSTANTIATE_PARAMS *p)
{
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = instantiate(out, g, p->flags);
	p->hErrNode_out = NULL;
	p->result_out = !r ? CUDA_GRAPH_INSTANTIATE_SUCCESS :
			r == CUDA_ERROR_INVALID_VALUE ? CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE :
							CUDA_GRAPH_INSTANTIATE_ERROR;
	return r;
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph,
				      CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams)
{
	SIM_CALL_CTX(cuGraphInstantiateWithParams, ctx);
	(void)ctx;
	return with_params(phGraphExec, hGraph, instantiateParams);
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *phGraphExec, CUgraph hGraph,
					   CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams)
{
	SIM_CALL_CTX(cuGraphInstantiateWithParams_ptsz, ctx);
	(void)ctx;
	return with_params(phGraphExec, hGraph, instantiateParams);
}

CUresult cuGraphExecGetFlags(CUgraphExec hGraphExec, cuuint64_t *flags)
{
	SIM_CALL(cuGraphExecGetFlags);
	if (!exec_of(hGraphExec) || !flags)
		return CUDA_ERROR_INVALID_VALUE;
	*flags = hGraphExec->flags;
	return CUDA_SUCCESS;
}

static void unmap_all(CUgraph g)
{
	for (size_t i = 0; i < g->nodes; i++) {
		struct sim_node *b = &g->node[i]->body;
		if (b->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
			sim_graphmem_unmap(b->mem.dptr);
		else if (b->type == CU_GRAPH_NODE_TYPE_GRAPH)
			unmap_all(b->child);
	}
}

CUresult cuGraphExecDestroy(CUgraphExec hGraphExec)
{
	SIM_CALL(cuGraphExecDestroy);
	if (!exec_of(hGraphExec))
		return CUDA_ERROR_INVALID_VALUE;
	hGraphExec->magic = 0;
	count_memory(hGraphExec->graph, -1);
	sim_graph_free(hGraphExec->graph);
	free(hGraphExec->order);
	free(hGraphExec);
	return CUDA_SUCCESS;
}

/* --- launch ----------------------------------------------------------------------------------------------- */

/* Kernels that were met and not yet put on the stream. */
struct run {
	struct CUstream_st *s;
	struct sim_cost sum;
};

static CUresult flush(struct run *run)
{
	struct sim_cost c = run->sum;
	run->sum = (struct sim_cost){ 0 };
	return c.dur_ns ? sim_do_kernel(run->s, &c) : CUDA_SUCCESS;
}

static CUresult run_kernel(struct run *run, const struct sim_node *b)
{
	struct sim_cost c;
	CUresult r = sim_kernel_cost(run->s->ctx, &b->kernel.launch, &c);
	if (r)
		return r;
	if (c.spins) {
		r = flush(run);
		return r ? r : sim_do_kernel(run->s, &c);
	}
	run->sum.dur_ns += c.dur_ns;
	if (c.occ > run->sum.occ)
		run->sum.occ = c.occ;
	return CUDA_SUCCESS;
}

static CUresult run_host(struct run *run, const struct sim_node *b)
{
	struct sim_action *a = sim_action_new(SIM_ACT_CALL, run->s->ctx);
	if (a) {
		a->fn = b->host.fn;
		a->arg = b->host.userData;
	}
	return sim_enqueue_action(run->s, a);
}

/* After what the host still has to do on the stream, if anything. */
static CUresult run_free(struct run *run, const struct sim_node *b)
{
	if (!run->s->ctx->time->actions)
		return sim_graphmem_unmap(b->mem.dptr);
	struct sim_action *a = sim_action_new(SIM_ACT_UNMAP, run->s->ctx);
	if (a)
		a->addr = b->mem.dptr;
	return sim_enqueue_action(run->s, a);
}

static CUresult run_event(struct run *run, const struct sim_node *b)
{
	struct CUevent_st *e = sim_event_of(b->event);
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	return b->type == CU_GRAPH_NODE_TYPE_EVENT_RECORD ? sim_do_record(run->s, e) :
							    sim_do_wait_event(run->s, e);
}

static CUresult run_graph(struct run *run, CUgraphNode *order, size_t n);

static CUresult run_child(struct run *run, CUgraph g)
{
	CUgraphNode *order = sim_graph_order(g);
	if (!order)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = run_graph(run, order, g->nodes);
	free(order);
	return r;
}

static CUresult run_node(struct run *run, const struct sim_node *b)
{
	if (b->type == CU_GRAPH_NODE_TYPE_KERNEL)
		return run_kernel(run, b);
	if (b->type == CU_GRAPH_NODE_TYPE_GRAPH)
		return run_child(run, b->child);
	if (b->type == CU_GRAPH_NODE_TYPE_EMPTY)
		return CUDA_SUCCESS;
	CUresult r = flush(run);
	if (r)
		return r;
	switch (b->type) {
	case CU_GRAPH_NODE_TYPE_MEMCPY:
	case CU_GRAPH_NODE_TYPE_MEMSET:
		return sim_do_memop(run->s, &b->memop.op);
	case CU_GRAPH_NODE_TYPE_HOST:
		return run_host(run, b);
	case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
	case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
		return run_event(run, b);
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
		return sim_graphmem_map(b->ctx, b->mem.dptr);
	case CU_GRAPH_NODE_TYPE_MEM_FREE:
		return run_free(run, b);
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
		return sim_do_batch(run->s, b->batch.count, b->batch.op);
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}

static CUresult run_graph(struct run *run, CUgraphNode *order, size_t n)
{
	CUresult r = CUDA_SUCCESS;
	for (size_t i = 0; i < n && !r; i++)
		if (!order[i]->disabled)
			r = run_node(run, &order[i]->body);
	return r;
}

static CUresult launch_on(CUgraphExec e, struct CUstream_st *s)
{
	struct run run = { .s = s };
	struct sim_gpu *g = sim_ctx_gpu(s->ctx);
	CUresult r = CUDA_SUCCESS;
	if (e->launched && !e->last_ctx->dead)
		r = sim_do_wait_ticket(s, e->last_ctx, &e->last);
	if (e->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
		unmap_all(e->graph);
	sim_batch_begin();
	if (!r)
		r = run_graph(&run, e->order, e->graph->nodes);
	if (!r)
		r = flush(&run);
	sim_batch_end();
	sim_gpu_lock(g);
	e->last = sim_engine_tail(&g->engine, s->ctx->time->queue, s->queue);
	sim_gpu_unlock(g);
	e->last_ctx = s->ctx;
	e->launched = true;
	return r;
}

static CUresult launch(struct CUctx_st *ctx, CUgraphExec e, CUstream stream)
{
	struct CUstream_st *s;
	struct sim_capture *capture;
	if (!exec_of(e))
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = sim_begin_op(ctx, stream, &s, &capture);
	if (r)
		return r;
	if (capture) {
		struct sim_node body = { .type = CU_GRAPH_NODE_TYPE_GRAPH, .ctx = s->ctx, .child = e->graph };
		return sim_capture_add(s, &body, NULL);
	}
	pthread_mutex_lock(&e->lock);
	r = launch_on(e, s);
	pthread_mutex_unlock(&e->lock);
	return r;
}

CUresult cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream)
{
	SIM_CALL_CTX(cuGraphLaunch, ctx);
	return launch(ctx, hGraphExec, hStream);
}

CUresult cuGraphLaunch_ptsz(CUgraphExec hGraphExec, CUstream hStream)
{
	SIM_CALL_CTX(cuGraphLaunch_ptsz, ctx);
	return launch(ctx, hGraphExec, sim_pt(hStream));
}

static CUresult upload(struct CUctx_st *ctx, CUgraphExec e, CUstream stream)
{
	struct CUstream_st *s;
	return exec_of(e) ? sim_stream_of(ctx, stream, &s) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream)
{
	SIM_CALL_CTX(cuGraphUpload, ctx);
	return upload(ctx, hGraphExec, hStream);
}

CUresult cuGraphUpload_ptsz(CUgraphExec hGraphExec, CUstream hStream)
{
	SIM_CALL_CTX(cuGraphUpload_ptsz, ctx);
	return upload(ctx, hGraphExec, sim_pt(hStream));
}

/* --- updating the whole ------------------------------------------------------------------------------------- */

static size_t index_of(CUgraph g, CUgraphNode n)
{
	size_t i = 0;
	while (i < g->nodes && g->node[i] != n)
		i++;
	return i;
}

/* Both have the same nodes in the same order with the same edges? */
static CUgraphExecUpdateResult compare(CUgraph have, CUgraph want, CUgraphNode *bad)
{
	*bad = NULL;
	if (have->nodes != want->nodes)
		return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
	for (size_t i = 0; i < want->nodes; i++) {
		CUgraphNode a = have->node[i], b = want->node[i];
		*bad = b;
		if (a->body.type != b->body.type)
			return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
		if (a->deps != b->deps)
			return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
		for (size_t k = 0; k < a->deps; k++)
			if (index_of(have, a->dep[k]) != index_of(want, b->dep[k]))
				return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
		if (a->body.type == CU_GRAPH_NODE_TYPE_GRAPH) {
			CUgraphExecUpdateResult r = compare(a->body.child, b->body.child, bad);
			if (r)
				return r;
		}
		if (a->body.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && a->body.mem.dptr != b->body.mem.dptr)
			return CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED;
	}
	*bad = NULL;
	return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

static CUresult take_over(CUgraph have, CUgraph want)
{
	CUresult r = CUDA_SUCCESS;
	for (size_t i = 0; i < want->nodes && !r; i++) {
		struct sim_node *to = &have->node[i]->body;
		const struct sim_node *from = &want->node[i]->body;
		if (to->type == CU_GRAPH_NODE_TYPE_GRAPH)
			r = take_over(to->child, from->child);
		else if (to->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC)
			r = sim_node_set(have->node[i], from);
	}
	return r;
}

static CUresult update(CUgraphExec e, CUgraph g, CUgraphExecUpdateResultInfo *info)
{
	if (!exec_of(e) || !sim_graph_of(g) || !info)
		return CUDA_ERROR_INVALID_VALUE;
	memset(info, 0, sizeof *info);
	info->result = compare(e->graph, g, &info->errorNode);
	if (info->result != CU_GRAPH_EXEC_UPDATE_SUCCESS)
		return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
	pthread_mutex_lock(&e->lock);
	CUresult r = take_over(e->graph, g);
	pthread_mutex_unlock(&e->lock);
	return r;
}

CUresult cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo)
{
	SIM_CALL(cuGraphExecUpdate_v2);
	return update(hGraphExec, hGraph, resultInfo);
}

CUresult cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out,
			   CUgraphExecUpdateResult *updateResult_out)
{
	SIM_CALL(cuGraphExecUpdate);
	CUgraphExecUpdateResultInfo info;
	CUresult r = update(hGraphExec, hGraph, &info);
	if (r && r != CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
		return r;
	if (hErrorNode_out)
		*hErrorNode_out = info.errorNode;
	if (updateResult_out)
		*updateResult_out = info.result;
	return r;
}

/* --- updating a node ------------------------------------------------------------------------------------------- */

CUresult cuGraphNodeSetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled)
{
	SIM_CALL(cuGraphNodeSetEnabled);
	CUgraphNode n = exec_of(hGraphExec) && sim_node_of(hNode) ?
				sim_graph_find_clone(hGraphExec->graph, hNode) : NULL;
	if (!n || (n->body.type != CU_GRAPH_NODE_TYPE_KERNEL && n->body.type != CU_GRAPH_NODE_TYPE_MEMCPY &&
		   n->body.type != CU_GRAPH_NODE_TYPE_MEMSET))
		return CUDA_ERROR_INVALID_VALUE;
	n->disabled = !isEnabled;
	return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int *isEnabled)
{
	SIM_CALL(cuGraphNodeGetEnabled);
	CUgraphNode n = exec_of(hGraphExec) && sim_node_of(hNode) ?
				sim_graph_find_clone(hGraphExec->graph, hNode) : NULL;
	if (!n || !isEnabled)
		return CUDA_ERROR_INVALID_VALUE;
	*isEnabled = !n->disabled;
	return CUDA_SUCCESS;
}

CUresult sim_exec_node_set(CUgraphExec e, CUgraphNode original, const struct sim_node *body)
{
	CUgraphNode n = exec_of(e) ? sim_graph_find_clone(e->graph, original) : NULL;
	if (!n || n->body.type != body->type)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&e->lock);
	CUresult r;
	CUgraphNode bad;
	if (body->type == CU_GRAPH_NODE_TYPE_GRAPH)
		r = compare(n->body.child, body->child, &bad) ? CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE :
								take_over(n->body.child, body->child);
	else
		r = sim_node_set(n, body);
	pthread_mutex_unlock(&e->lock);
	return r;
}
