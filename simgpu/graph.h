/* Graphs, as capture.c builds them and graph*.c edit, instantiate and launch them. As with the real
 * driver, a graph is not for concurrent use by several threads. */
#ifndef SIMGPU_GRAPH_H
#define SIMGPU_GRAPH_H
#include "work.h"

#define SIM_GRAPH_MAGIC 0x47525048u
#define SIM_NODE_MAGIC 0x4e4f4445u
#define SIM_EXEC_MAGIC 0x45584543u

/* An address that a graph reserved; forgotten when no node, in graphs and their executable copies,
 * names it any more. */
struct sim_graph_mem {
	CUdeviceptr dptr;
	struct CUctx_st *ctx;
	_Atomic int refs;
	_Atomic int execs; /* executable graphs alive that allocate it: one at most */
};

/* What a node does. */
struct sim_node {
	CUgraphNodeType type;
	struct CUctx_st *ctx; /* whose GPU it works on */
	union {
		struct {
			struct sim_launch launch; /* its arguments are args' */
			struct sim_args args;
			CUkernelNodeAttrValue attr[16];
			uint32_t attr_set;
		} kernel;
		struct {
			struct sim_memop op;
			CUDA_MEMCPY3D copy; /* as given, for GetParams */
		} memop; /* MEMCPY, MEMSET */
		CUDA_HOST_NODE_PARAMS host;
		CUgraph child; /* owned */
		CUevent event;
		struct {
			struct sim_graph_mem *mem;
			CUmemPoolProps props;
			size_t bytes;
			CUdeviceptr dptr;
		} mem; /* MEM_ALLOC, MEM_FREE (dptr only) */
		struct {
			CUstreamBatchMemOpParams *op; /* owned */
			unsigned count, flags;
		} batch;
	};
};

struct CUgraphNode_st {
	uint32_t magic;
	bool disabled; /* in an executable graph */
	CUgraph graph;
	CUgraphNode *dep; /* what it waits for */
	size_t deps;
	CUgraphNode original; /* of which it is a clone; may be gone */
	size_t mark;	      /* scratch of a walk */
	struct sim_node body;
};

struct sim_user_ref {
	CUuserObject object;
	unsigned count;
};

struct CUgraph_st {
	uint32_t magic;
	bool owned; /* by a child node or an executable graph: not to be destroyed by hand */
	CUgraphNode *node;
	size_t nodes;
	struct sim_user_ref *user;
	size_t users;
	CUgraph original;
};

/* Adds a node with a deep copy of *body. CUDA_ERROR_INVALID_VALUE for bad dependencies. */
CUresult sim_graph_add(CUgraph g, const CUgraphNode *dep, size_t deps, const struct sim_node *body,
		       CUgraphNode *out);
CUresult sim_graph_new(CUgraph *out);
void sim_graph_free(CUgraph g);
CUresult sim_graph_clone(CUgraph g, CUgraph *out);
CUgraph sim_graph_of(CUgraph g);	 /* NULL if it is none */
CUgraphNode sim_node_of(CUgraphNode n);
CUgraphNode sim_graph_find_clone(CUgraph clone, CUgraphNode original);
/* Replaces what a node does by a deep copy of *body. */
CUresult sim_node_set(CUgraphNode n, const struct sim_node *body);
/* The same for the copy of `original` in an executable graph; the kind of node can't change. */
CUresult sim_exec_node_set(CUgraphExec e, CUgraphNode original, const struct sim_node *body);
/* Nodes in an order in which each comes after its dependencies (caller frees). NULL: a cycle, or no
 * memory. */
CUgraphNode *sim_graph_order(CUgraph g);
/* Whether `ancestor` has to be done before one of n[0..count) can be, or is one of them. */
bool sim_graph_precedes(CUgraphNode ancestor, const CUgraphNode *n, size_t count);
bool sim_list_add(CUgraphNode **list, size_t *n, CUgraphNode node); /* once; false: no memory */

/* Bodies from what callers give; errors are the driver's. graphnode.c */
CUresult sim_body_kernel(struct sim_node *b, struct CUctx_st *ctx, const struct sim_launch *l);
CUresult sim_body_params(struct sim_node *b, struct CUctx_st *ctx, const CUgraphNodeParams *p);
CUresult sim_body_memcpy(struct sim_node *b, struct CUctx_st *ctx, const CUDA_MEMCPY3D *c);
CUresult sim_body_memset(struct sim_node *b, struct CUctx_st *ctx, const CUDA_MEMSET_NODE_PARAMS *p);
CUresult sim_body_alloc(struct sim_node *b, struct CUctx_st *ctx, const CUmemPoolProps *props,
			size_t bytes);
/* Drops the caller's reference to what sim_body_alloc reserved. */
void sim_body_release(struct sim_node *b);
#endif
