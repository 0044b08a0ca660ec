/* What graph nodes do: adding them, reading and changing their parameters. */
#include <stdlib.h>
#include <string.h>
#include "graph.h"

/* --- bodies from the callers' structures ------------------------------------------------------------- */

CUresult sim_body_kernel(struct sim_node *b, struct CUctx_st *ctx, const struct sim_launch *l)
{
	struct sim_cost cost;
	memset(b, 0, sizeof *b);
	b->type = CU_GRAPH_NODE_TYPE_KERNEL;
	b->ctx = ctx;
	b->kernel.launch = *l;
	return sim_kernel_cost(ctx, l, &cost);
}

/* Versions 1, 2 and 3 of the structure share their beginning. */
static CUresult body_kernel(struct sim_node *b, struct CUctx_st *ctx, const CUDA_KERNEL_NODE_PARAMS_v1 *p,
			    CUkernel kern, CUcontext in)
{
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	struct sim_launch l = { .f = p->func ? p->func : (CUfunction)(void *)kern,
				.grid = { p->gridDimX, p->gridDimY, p->gridDimZ },
				.block = { p->blockDimX, p->blockDimY, p->blockDimZ },
				.shared = p->sharedMemBytes, .params = p->kernelParams, .extra = p->extra };
	struct CUctx_st *c = in ? sim_ctx_of(in) : ctx;
	return c ? sim_body_kernel(b, c, &l) : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult body_kernel_v2(struct sim_node *b, struct CUctx_st *ctx, const CUDA_KERNEL_NODE_PARAMS *p)
{
	CUDA_KERNEL_NODE_PARAMS_v1 v1;
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(&v1, p, sizeof v1);
	return body_kernel(b, ctx, &v1, p->kern, p->ctx);
}

static CUresult node_ctx(struct sim_node *b, struct CUctx_st *ctx, CUcontext in)
{
	b->ctx = in ? sim_ctx_of(in) : ctx;
	return b->ctx ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult sim_body_memcpy(struct sim_node *b, struct CUctx_st *ctx, const CUDA_MEMCPY3D *c)
{
	if (!c)
		return CUDA_ERROR_INVALID_VALUE;
	memset(b, 0, sizeof *b);
	b->type = CU_GRAPH_NODE_TYPE_MEMCPY;
	b->ctx = ctx;
	b->memop.copy = *c;
	sim_memop_3d(&b->memop.op, c);
	return sim_memop_check(&b->memop.op);
}

CUresult sim_body_memset(struct sim_node *b, struct CUctx_st *ctx, const CUDA_MEMSET_NODE_PARAMS *p)
{
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	memset(b, 0, sizeof *b);
	b->type = CU_GRAPH_NODE_TYPE_MEMSET;
	b->ctx = ctx;
	b->memop.op.kind = SIM_MEMOP_MEMSET;
	b->memop.op.set = *p;
	return sim_memop_check(&b->memop.op);
}

static CUresult body_host(struct sim_node *b, struct CUctx_st *ctx, CUhostFn fn, void *arg)
{
	memset(b, 0, sizeof *b);
	b->type = CU_GRAPH_NODE_TYPE_HOST;
	b->ctx = ctx;
	b->host.fn = fn;
	b->host.userData = arg;
	return fn ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult body_event(struct sim_node *b, struct CUctx_st *ctx, CUgraphNodeType type, CUevent e)
{
	memset(b, 0, sizeof *b);
	b->type = type;
	b->ctx = ctx;
	b->event = e;
	return sim_event_of(e) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult body_child(struct sim_node *b, struct CUctx_st *ctx, CUgraph child)
{
	memset(b, 0, sizeof *b);
	b->type = CU_GRAPH_NODE_TYPE_GRAPH;
	b->ctx = ctx;
	b->child = child;
	return sim_graph_of(child) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult body_batch(struct sim_node *b, struct CUctx_st *ctx, CUcontext in,
			   const CUstreamBatchMemOpParams *op, unsigned count, unsigned flags)
{
	memset(b, 0, sizeof *b);
	b->type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
	b->batch.op = malloc((count + 1) * sizeof *op); /* dropped by the caller; the node has a copy */
	b->batch.count = count;
	b->batch.flags = flags;
	if (!op || !count || count > 256 || !b->batch.op)
		return free(b->batch.op), CUDA_ERROR_INVALID_VALUE;
	memcpy(b->batch.op, op, count * sizeof *op);
	CUresult r = node_ctx(b, ctx, in);
	if (r)
		free(b->batch.op);
	return r;
}

CUresult sim_body_alloc(struct sim_node *b, struct CUctx_st *ctx, const CUmemPoolProps *props, size_t bytes)
{
	memset(b, 0, sizeof *b);
	b->type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
	b->ctx = ctx;
	if (!bytes || props->handleTypes != CU_MEM_HANDLE_TYPE_NONE)
		return CUDA_ERROR_INVALID_VALUE;
	b->mem.mem = calloc(1, sizeof *b->mem.mem);
	if (!b->mem.mem)
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult r = sim_graphmem_address(ctx, bytes, &b->mem.dptr);
	if (r) {
		free(b->mem.mem);
		return r;
	}
	b->mem.mem->dptr = b->mem.dptr;
	b->mem.mem->ctx = ctx;
	b->mem.mem->refs = 1;
	b->mem.props = *props;
	b->mem.bytes = bytes;
	return CUDA_SUCCESS;
}

static CUresult body_free(struct sim_node *b, struct CUctx_st *ctx, CUdeviceptr dptr)
{
	memset(b, 0, sizeof *b);
	b->type = CU_GRAPH_NODE_TYPE_MEM_FREE;
	b->ctx = ctx;
	b->mem.dptr = dptr;
	return sim_graphmem_is(dptr) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult sim_body_params(struct sim_node *b, struct CUctx_st *ctx, const CUgraphNodeParams *p)
{
	CUDA_KERNEL_NODE_PARAMS_v1 kernel;
	CUDA_MEMSET_NODE_PARAMS set;
	CUresult r;
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	switch (p->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		memcpy(&kernel, &p->kernel, sizeof kernel);
		return body_kernel(b, ctx, &kernel, p->kernel.kern, p->kernel.ctx);
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		r = sim_body_memcpy(b, ctx, &p->memcpy.copyParams);
		return r ? r : node_ctx(b, ctx, p->memcpy.copyCtx);
	case CU_GRAPH_NODE_TYPE_MEMSET:
		memcpy(&set, &p->memset, sizeof set);
		r = sim_body_memset(b, ctx, &set);
		return r ? r : node_ctx(b, ctx, p->memset.ctx);
	case CU_GRAPH_NODE_TYPE_HOST:
		return body_host(b, ctx, p->host.fn, p->host.userData);
	case CU_GRAPH_NODE_TYPE_GRAPH:
		return body_child(b, ctx, p->graph.graph);
	case CU_GRAPH_NODE_TYPE_EMPTY:
		memset(b, 0, sizeof *b);
		b->type = CU_GRAPH_NODE_TYPE_EMPTY;
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
		return body_event(b, ctx, p->type, p->eventWait.event);
	case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
		return body_event(b, ctx, p->type, p->eventRecord.event);
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
		return sim_body_alloc(b, ctx, &p->alloc.poolProps, p->alloc.bytesize);
	case CU_GRAPH_NODE_TYPE_MEM_FREE:
		return body_free(b, ctx, p->free.dptr);
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
		return body_batch(b, ctx, p->memOp.ctx, p->memOp.paramArray, p->memOp.count, p->memOp.flags);
	default: /* external semaphores, conditionals */
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}

/* --- adding ---------------------------------------------------------------------------------------------- */

/* Gives up what the body holds besides the node's copy. */
static void done_with(struct sim_node *b)
{
	if (b->type == CU_GRAPH_NODE_TYPE_BATCH_MEM_OP)
		free(b->batch.op);
	else if (b->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
		sim_body_release(b);
}

/* `made` is what making the body gave. */
static CUresult add(CUgraphNode *out, CUgraph g, const CUgraphNode *dep, size_t deps, struct sim_node *b,
		    CUresult made)
{
	if (made)
		return made;
	CUresult r = !out || !sim_graph_of(g) ? CUDA_ERROR_INVALID_VALUE : sim_graph_add(g, dep, deps, b, out);
	done_with(b);
	return r;
}

CUresult cuGraphAddKernelNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
			      size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
	SIM_CALL_CTX(cuGraphAddKernelNode, ctx);
	struct sim_node b;
	CUresult r = body_kernel(&b, ctx, nodeParams, NULL, NULL);
	return add(phGraphNode, hGraph, dependencies, numDependencies, &b, r);
}

CUresult cuGraphAddKernelNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				 size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
	SIM_CALL_CTX(cuGraphAddKernelNode_v2, ctx);
	struct sim_node b;
	CUresult r = body_kernel_v2(&b, ctx, nodeParams);
	return add(phGraphNode, hGraph, dependencies, numDependencies, &b, r);
}

CUresult cuGraphAddMemcpyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
			      size_t numDependencies, const CUDA_MEMCPY3D *copyParams, CUcontext ctx)
{
	SIM_CALL_CTX(cuGraphAddMemcpyNode, now);
	struct sim_node b;
	CUresult r = sim_body_memcpy(&b, now, copyParams);
	if (!r)
		r = node_ctx(&b, now, ctx);
	return add(phGraphNode, hGraph, dependencies, numDependencies, &b, r);
}

CUresult cuGraphAddMemsetNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
			      size_t numDependencies, const CUDA_MEMSET_NODE_PARAMS *memsetParams,
			      CUcontext ctx)
{
	SIM_CALL_CTX(cuGraphAddMemsetNode, now);
	struct sim_node b;
	CUresult r = sim_body_memset(&b, now, memsetParams);
	if (!r)
		r = node_ctx(&b, now, ctx);
	return add(phGraphNode, hGraph, dependencies, numDependencies, &b, r);
}

CUresult cuGraphAddHostNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
			    size_t numDependencies, const CUDA_HOST_NODE_PARAMS *nodeParams)
{
	SIM_CALL_CTX(cuGraphAddHostNode, ctx);
	struct sim_node b;
	CUresult r = nodeParams ? body_host(&b, ctx, nodeParams->fn, nodeParams->userData) :
				  CUDA_ERROR_INVALID_VALUE;
	return add(phGraphNode, hGraph, dependencies, numDependencies, &b, r);
}

CUresult cuGraphAddChildGraphNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				  size_t numDependencies, CUgraph childGraph)
{
	SIM_CALL_CTX(cuGraphAddChildGraphNode, ctx);
	struct sim_node b;
	CUresult r = body_child(&b, ctx, childGraph);
	return add(phGraphNode, hGraph, dependencies, numDependencies, &b, r);
}

CUresult cuGraphAddEmptyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
			     size_t numDependencies)
{
	SIM_CALL(cuGraphAddEmptyNode);
	struct sim_node b = { .type = CU_GRAPH_NODE_TYPE_EMPTY };
	return add(phGraphNode, hGraph, dependencies, numDependencies, &b, CUDA_SUCCESS);
}

CUresult cuGraphAddEventRecordNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				   size_t numDependencies, CUevent event)
{
	SIM_CALL_CTX(cuGraphAddEventRecordNode, ctx);
	struct sim_node b;
	CUresult r = body_event(&b, ctx, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event);
	return add(phGraphNode, hGraph, dependencies, numDependencies, &b, r);
}

CUresult cuGraphAddEventWaitNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				 size_t numDependencies, CUevent event)
{
	SIM_CALL_CTX(cuGraphAddEventWaitNode, ctx);
	struct sim_node b;
	CUresult r = body_event(&b, ctx, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event);
	return add(phGraphNode, hGraph, dependencies, numDependencies, &b, r);
}

CUresult cuGraphAddMemAllocNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				size_t numDependencies, CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams)
{
	SIM_CALL_CTX(cuGraphAddMemAllocNode, ctx);
	struct sim_node b;
	if (!nodeParams)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = sim_body_alloc(&b, ctx, &nodeParams->poolProps, nodeParams->bytesize);
	CUdeviceptr dptr = r ? 0 : b.mem.dptr;
	r = add(phGraphNode, hGraph, dependencies, numDependencies, &b, r);
	if (!r)
		nodeParams->dptr = dptr;
	return r;
}

CUresult cuGraphAddMemFreeNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
			       size_t numDependencies, CUdeviceptr dptr)
{
	SIM_CALL_CTX(cuGraphAddMemFreeNode, ctx);
	struct sim_node b;
	CUresult r = body_free(&b, ctx, dptr);
	return add(phGraphNode, hGraph, dependencies, numDependencies, &b, r);
}

CUresult cuGraphAddBatchMemOpNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				  size_t numDependencies, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)
{
	SIM_CALL_CTX(cuGraphAddBatchMemOpNode, ctx);
	struct sim_node b;
	if (!nodeParams)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = body_batch(&b, ctx, nodeParams->ctx, nodeParams->paramArray, nodeParams->count,
				nodeParams->flags);
	return add(phGraphNode, hGraph, dependencies, numDependencies, &b, r);
}

static CUresult add_any(CUgraphNode *out, CUgraph g, const CUgraphNode *dep, size_t deps,
			struct CUctx_st *ctx, CUgraphNodeParams *p)
{
	struct sim_node b;
	CUresult r = sim_body_params(&b, ctx, p);
	CUdeviceptr dptr = !r && b.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC ? b.mem.dptr : 0;
	r = add(out, g, dep, deps, &b, r);
	if (!r && dptr)
		p->alloc.dptr = dptr;
	if (!r && p->type == CU_GRAPH_NODE_TYPE_GRAPH)
		p->graph.graph = (*out)->body.child;
	return r;
}

CUresult cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
			size_t numDependencies, CUgraphNodeParams *nodeParams)
{
	SIM_CALL_CTX(cuGraphAddNode, ctx);
	return add_any(phGraphNode, hGraph, dependencies, numDependencies, ctx, nodeParams);
}

CUresult cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
			   const CUgraphEdgeData *dependencyData, size_t numDependencies,
			   CUgraphNodeParams *nodeParams)
{
	SIM_CALL_CTX(cuGraphAddNode_v2, ctx);
	(void)dependencyData; /* every edge is a full dependency here */
	return add_any(phGraphNode, hGraph, dependencies, numDependencies, ctx, nodeParams);
}

/* --- reading ----------------------------------------------------------------------------------------------- */

static CUgraphNode typed(CUgraphNode n, CUgraphNodeType type)
{
	return sim_node_of(n) && n->body.type == type ? n : NULL;
}

static void get_kernel(CUgraphNode n, CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
	const struct sim_launch *l = &n->body.kernel.launch;
	*p = (CUDA_KERNEL_NODE_PARAMS_v1){
		.func = l->f, .gridDimX = l->grid[0], .gridDimY = l->grid[1], .gridDimZ = l->grid[2],
		.blockDimX = l->block[0], .blockDimY = l->block[1], .blockDimZ = l->block[2],
		.sharedMemBytes = l->shared, .kernelParams = l->params, .extra = l->extra };
}

CUresult cuGraphKernelNodeGetParams(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
	SIM_CALL(cuGraphKernelNodeGetParams);
	if (!typed(hNode, CU_GRAPH_NODE_TYPE_KERNEL) || !nodeParams)
		return CUDA_ERROR_INVALID_VALUE;
	get_kernel(hNode, nodeParams);
	return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
	SIM_CALL(cuGraphKernelNodeGetParams_v2);
	CUDA_KERNEL_NODE_PARAMS_v1 v1;
	if (!typed(hNode, CU_GRAPH_NODE_TYPE_KERNEL) || !nodeParams)
		return CUDA_ERROR_INVALID_VALUE;
	get_kernel(hNode, &v1);
	memset(nodeParams, 0, sizeof *nodeParams);
	memcpy(nodeParams, &v1, sizeof v1);
	nodeParams->ctx = hNode->body.ctx;
	return CUDA_SUCCESS;
}

CUresult cuGraphMemcpyNodeGetParams(CUgraphNode hNode, CUDA_MEMCPY3D *nodeParams)
{
	SIM_CALL(cuGraphMemcpyNodeGetParams);
	if (!typed(hNode, CU_GRAPH_NODE_TYPE_MEMCPY) || !nodeParams)
		return CUDA_ERROR_INVALID_VALUE;
	/* captured copies have the peer form only, which differs in the reserved fields' names */
	if (hNode->body.memop.copy.WidthInBytes)
		*nodeParams = hNode->body.memop.copy;
	else
		memcpy(nodeParams, &hNode->body.memop.op.copy, sizeof *nodeParams);
	return CUDA_SUCCESS;
}

CUresult cuGraphMemsetNodeGetParams(CUgraphNode hNode, CUDA_MEMSET_NODE_PARAMS *nodeParams)
{
	SIM_CALL(cuGraphMemsetNodeGetParams);
	if (!typed(hNode, CU_GRAPH_NODE_TYPE_MEMSET) || !nodeParams)
		return CUDA_ERROR_INVALID_VALUE;
	*nodeParams = hNode->body.memop.op.set;
	return CUDA_SUCCESS;
}

CUresult cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams)
{
	SIM_CALL(cuGraphHostNodeGetParams);
	if (!typed(hNode, CU_GRAPH_NODE_TYPE_HOST) || !nodeParams)
		return CUDA_ERROR_INVALID_VALUE;
	*nodeParams = hNode->body.host;
	return CUDA_SUCCESS;
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode hNode, CUgraph *phGraph)
{
	SIM_CALL(cuGraphChildGraphNodeGetGraph);
	if (!typed(hNode, CU_GRAPH_NODE_TYPE_GRAPH) || !phGraph)
		return CUDA_ERROR_INVALID_VALUE;
	*phGraph = hNode->body.child;
	return CUDA_SUCCESS;
}

CUresult cuGraphMemAllocNodeGetParams(CUgraphNode hNode, CUDA_MEM_ALLOC_NODE_PARAMS *params_out)
{
	SIM_CALL(cuGraphMemAllocNodeGetParams);
	if (!typed(hNode, CU_GRAPH_NODE_TYPE_MEM_ALLOC) || !params_out)
		return CUDA_ERROR_INVALID_VALUE;
	*params_out = (CUDA_MEM_ALLOC_NODE_PARAMS){ .poolProps = hNode->body.mem.props,
						    .bytesize = hNode->body.mem.bytes,
						    .dptr = hNode->body.mem.dptr };
	return CUDA_SUCCESS;
}

CUresult cuGraphMemFreeNodeGetParams(CUgraphNode hNode, CUdeviceptr *dptr_out)
{
	SIM_CALL(cuGraphMemFreeNodeGetParams);
	if (!typed(hNode, CU_GRAPH_NODE_TYPE_MEM_FREE) || !dptr_out)
		return CUDA_ERROR_INVALID_VALUE;
	*dptr_out = hNode->body.mem.dptr;
	return CUDA_SUCCESS;
}

static CUresult get_event(CUgraphNode n, CUgraphNodeType type, CUevent *out)
{
	if (!typed(n, type) || !out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = n->body.event;
	return CUDA_SUCCESS;
}

CUresult cuGraphEventRecordNodeGetEvent(CUgraphNode hNode, CUevent *event_out)
{
	SIM_CALL(cuGraphEventRecordNodeGetEvent);
	return get_event(hNode, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event_out);
}

CUresult cuGraphEventWaitNodeGetEvent(CUgraphNode hNode, CUevent *event_out)
{
	SIM_CALL(cuGraphEventWaitNodeGetEvent);
	return get_event(hNode, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event_out);
}

CUresult cuGraphBatchMemOpNodeGetParams(CUgraphNode hNode, CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams_out)
{
	SIM_CALL(cuGraphBatchMemOpNodeGetParams);
	if (!typed(hNode, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP) || !nodeParams_out)
		return CUDA_ERROR_INVALID_VALUE;
	*nodeParams_out = (CUDA_BATCH_MEM_OP_NODE_PARAMS){ .ctx = hNode->body.ctx,
							   .count = hNode->body.batch.count,
							   .paramArray = hNode->body.batch.op,
							   .flags = hNode->body.batch.flags };
	return CUDA_SUCCESS;
}

/* --- changing: of a node (exec NULL), or of its copy in an executable graph ------------------------------------ */

static CUresult set(CUgraphExec exec, bool in_exec, CUgraphNode n, struct sim_node *b, CUresult made)
{
	if (made)
		return made;
	CUresult r;
	if (in_exec)
		r = sim_exec_node_set(exec, n, b);
	else
		r = typed(n, b->type) ? sim_node_set(n, b) : CUDA_ERROR_INVALID_VALUE;
	done_with(b);
	return r;
}

static struct CUctx_st *ctx_of_node(CUgraphNode n, struct CUctx_st *ctx)
{
	return sim_node_of(n) && n->body.ctx && !n->body.ctx->dead ? n->body.ctx : ctx;
}

static CUresult set_kernel(CUgraphExec e, bool in_exec, CUgraphNode n, struct CUctx_st *ctx,
			   const CUDA_KERNEL_NODE_PARAMS_v1 *p, CUkernel kern, CUcontext in)
{
	struct sim_node b;
	CUresult r = body_kernel(&b, ctx_of_node(n, ctx), p, kern, in);
	return set(e, in_exec, n, &b, r);
}

static CUresult set_kernel_v2(CUgraphExec e, bool in_exec, CUgraphNode n, struct CUctx_st *ctx,
			      const CUDA_KERNEL_NODE_PARAMS *p)
{
	CUDA_KERNEL_NODE_PARAMS_v1 v1;
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(&v1, p, sizeof v1);
	return set_kernel(e, in_exec, n, ctx, &v1, p->kern, p->ctx);
}

CUresult cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
	SIM_CALL_CTX(cuGraphKernelNodeSetParams, ctx);
	return set_kernel(NULL, false, hNode, ctx, nodeParams, NULL, NULL);
}

CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
	SIM_CALL_CTX(cuGraphKernelNodeSetParams_v2, ctx);
	return set_kernel_v2(NULL, false, hNode, ctx, nodeParams);
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
					const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
	SIM_CALL_CTX(cuGraphExecKernelNodeSetParams, ctx);
	return set_kernel(hGraphExec, true, hNode, ctx, nodeParams, NULL, NULL);
}

CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec hGraphExec, CUgraphNode hNode,
					   const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
	SIM_CALL_CTX(cuGraphExecKernelNodeSetParams_v2, ctx);
	return set_kernel_v2(hGraphExec, true, hNode, ctx, nodeParams);
}

CUresult cuGraphMemcpyNodeSetParams(CUgraphNode hNode, const CUDA_MEMCPY3D *nodeParams)
{
	SIM_CALL_CTX(cuGraphMemcpyNodeSetParams, ctx);
	struct sim_node b;
	CUresult r = sim_body_memcpy(&b, ctx_of_node(hNode, ctx), nodeParams);
	return set(NULL, false, hNode, &b, r);
}

CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
					const CUDA_MEMCPY3D *copyParams, CUcontext ctx)
{
	SIM_CALL_CTX(cuGraphExecMemcpyNodeSetParams, now);
	struct sim_node b;
	CUresult r = sim_body_memcpy(&b, now, copyParams);
	if (!r)
		r = node_ctx(&b, now, ctx);
	return set(hGraphExec, true, hNode, &b, r);
}

CUresult cuGraphMemsetNodeSetParams(CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS *nodeParams)
{
	SIM_CALL_CTX(cuGraphMemsetNodeSetParams, ctx);
	struct sim_node b;
	CUresult r = sim_body_memset(&b, ctx_of_node(hNode, ctx), nodeParams);
	return set(NULL, false, hNode, &b, r);
}

CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
					const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx)
{
	SIM_CALL_CTX(cuGraphExecMemsetNodeSetParams, now);
	struct sim_node b;
	CUresult r = sim_body_memset(&b, now, memsetParams);
	if (!r)
		r = node_ctx(&b, now, ctx);
	return set(hGraphExec, true, hNode, &b, r);
}

static CUresult set_host(CUgraphExec e, bool in_exec, CUgraphNode n, struct CUctx_st *ctx,
			 const CUDA_HOST_NODE_PARAMS *p)
{
	struct sim_node b;
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = body_host(&b, ctx, p->fn, p->userData);
	return set(e, in_exec, n, &b, r);
}

CUresult cuGraphHostNodeSetParams(CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams)
{
	SIM_CALL_CTX(cuGraphHostNodeSetParams, ctx);
	return set_host(NULL, false, hNode, ctx, nodeParams);
}

CUresult cuGraphExecHostNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
				      const CUDA_HOST_NODE_PARAMS *nodeParams)
{
	SIM_CALL_CTX(cuGraphExecHostNodeSetParams, ctx);
	return set_host(hGraphExec, true, hNode, ctx, nodeParams);
}

static CUresult set_event(CUgraphExec e, bool in_exec, CUgraphNode n, struct CUctx_st *ctx,
			  CUgraphNodeType type, CUevent event)
{
	struct sim_node b;
	CUresult r = body_event(&b, ctx, type, event);
	return set(e, in_exec, n, &b, r);
}

CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode hNode, CUevent event)
{
	SIM_CALL_CTX(cuGraphEventRecordNodeSetEvent, ctx);
	return set_event(NULL, false, hNode, ctx, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event);
}

CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode hNode, CUevent event)
{
	SIM_CALL_CTX(cuGraphEventWaitNodeSetEvent, ctx);
	return set_event(NULL, false, hNode, ctx, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event);
}

CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event)
{
	SIM_CALL_CTX(cuGraphExecEventRecordNodeSetEvent, ctx);
	return set_event(hGraphExec, true, hNode, ctx, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event);
}

CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event)
{
	SIM_CALL_CTX(cuGraphExecEventWaitNodeSetEvent, ctx);
	return set_event(hGraphExec, true, hNode, ctx, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event);
}

CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph)
{
	SIM_CALL_CTX(cuGraphExecChildGraphNodeSetParams, ctx);
	struct sim_node b;
	CUresult r = body_child(&b, ctx, childGraph);
	return set(hGraphExec, true, hNode, &b, r);
}

static CUresult set_batch(CUgraphExec e, bool in_exec, CUgraphNode n, struct CUctx_st *ctx,
			  const CUDA_BATCH_MEM_OP_NODE_PARAMS *p)
{
	struct sim_node b;
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = body_batch(&b, ctx, p->ctx, p->paramArray, p->count, p->flags);
	return set(e, in_exec, n, &b, r);
}

CUresult cuGraphBatchMemOpNodeSetParams(CUgraphNode hNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)
{
	SIM_CALL_CTX(cuGraphBatchMemOpNodeSetParams, ctx);
	return set_batch(NULL, false, hNode, ctx, nodeParams);
}

CUresult cuGraphExecBatchMemOpNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
					    const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)
{
	SIM_CALL_CTX(cuGraphExecBatchMemOpNodeSetParams, ctx);
	return set_batch(hGraphExec, true, hNode, ctx, nodeParams);
}

static CUresult set_any(CUgraphExec e, bool in_exec, CUgraphNode n, struct CUctx_st *ctx,
			const CUgraphNodeParams *p)
{
	struct sim_node b;
	if (p && (p->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || p->type == CU_GRAPH_NODE_TYPE_MEM_FREE))
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult r = sim_body_params(&b, ctx_of_node(n, ctx), p);
	return set(e, in_exec, n, &b, r);
}

CUresult cuGraphNodeSetParams(CUgraphNode hNode, CUgraphNodeParams *nodeParams)
{
	SIM_CALL_CTX(cuGraphNodeSetParams, ctx);
	return set_any(NULL, false, hNode, ctx, nodeParams);
}

CUresult cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams *nodeParams)
{
	SIM_CALL_CTX(cuGraphExecNodeSetParams, ctx);
	return set_any(hGraphExec, true, hNode, ctx, nodeParams);
}

/* --- attributes of kernel nodes: kept, without effect ------------------------------------------------------------ */

CUresult cuGraphKernelNodeSetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr,
				       const CUkernelNodeAttrValue *value)
{
	SIM_CALL(cuGraphKernelNodeSetAttribute);
	if (!typed(hNode, CU_GRAPH_NODE_TYPE_KERNEL) || !value || (unsigned)attr >= 16)
		return CUDA_ERROR_INVALID_VALUE;
	hNode->body.kernel.attr[attr] = *value;
	hNode->body.kernel.attr_set |= 1u << attr;
	if (attr == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
		hNode->body.kernel.launch.cooperative = value->cooperative != 0;
	return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeGetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr,
				       CUkernelNodeAttrValue *value_out)
{
	SIM_CALL(cuGraphKernelNodeGetAttribute);
	if (!typed(hNode, CU_GRAPH_NODE_TYPE_KERNEL) || !value_out || (unsigned)attr >= 16)
		return CUDA_ERROR_INVALID_VALUE;
	*value_out = hNode->body.kernel.attr[attr];
	if (attr == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
		value_out->cooperative = hNode->body.kernel.launch.cooperative;
	return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeCopyAttributes(CUgraphNode dst, CUgraphNode src)
{
	SIM_CALL(cuGraphKernelNodeCopyAttributes);
	if (!typed(dst, CU_GRAPH_NODE_TYPE_KERNEL) || !typed(src, CU_GRAPH_NODE_TYPE_KERNEL))
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(dst->body.kernel.attr, src->body.kernel.attr, sizeof dst->body.kernel.attr);
	dst->body.kernel.attr_set = src->body.kernel.attr_set;
	return CUDA_SUCCESS;
}
