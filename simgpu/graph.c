/* Graphs: nodes and edges, and walking them. What nodes do: graphnode.c. Running: graphexec.c. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "graph.h"

CUgraph sim_graph_of(CUgraph g)
{
	return g && g->magic == SIM_GRAPH_MAGIC ? g : NULL;
}

CUgraphNode sim_node_of(CUgraphNode n)
{
	return n && n->magic == SIM_NODE_MAGIC ? n : NULL;
}

bool sim_list_add(CUgraphNode **list, size_t *n, CUgraphNode node)
{
	for (size_t i = 0; i < *n; i++)
		if ((*list)[i] == node)
			return true;
	if ((*n & (*n - 1)) == 0) { /* grows in powers of two */
		CUgraphNode *more = realloc(*list, (*n ? *n * 2 : 1) * sizeof *more);
		if (!more)
			return false;
		*list = more;
	}
	(*list)[(*n)++] = node;
	return true;
}

/* --- bodies ------------------------------------------------------------------------------------------ */

static void body_drop(struct sim_node *b)
{
	switch (b->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		sim_args_free(&b->kernel.args);
		break;
	case CU_GRAPH_NODE_TYPE_GRAPH:
		sim_graph_free(b->child);
		break;
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
		free(b->batch.op);
		break;
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
		sim_body_release(b);
		break;
	default:
		break;
	}
}

void sim_body_release(struct sim_node *b)
{
	struct sim_graph_mem *m = b->mem.mem;
	b->mem.mem = NULL;
	if (m && --m->refs == 0) {
		sim_graphmem_forget(m->dptr);
		free(m);
	}
}

static CUresult body_copy(struct sim_node *to, const struct sim_node *from)
{
	*to = *from;
	switch (from->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		sim_args_copy(&to->kernel.args, &from->kernel.launch);
		to->kernel.launch.params = to->kernel.args.params;
		to->kernel.launch.extra = to->kernel.args.extra;
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_GRAPH: {
		CUresult r = sim_graph_clone(from->child, &to->child);
		if (!r)
			to->child->owned = true;
		return r;
	}
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
		to->batch.op = malloc(from->batch.count * sizeof *to->batch.op + 1);
		if (!to->batch.op)
			return CUDA_ERROR_OUT_OF_MEMORY;
		memcpy(to->batch.op, from->batch.op, from->batch.count * sizeof *to->batch.op);
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
		to->mem.mem->refs++;
		return CUDA_SUCCESS;
	default:
		return CUDA_SUCCESS;
	}
}

CUresult sim_node_set(CUgraphNode n, const struct sim_node *body)
{
	struct sim_node b;
	CUresult r = body_copy(&b, body);
	if (r)
		return r;
	body_drop(&n->body);
	n->body = b;
	return CUDA_SUCCESS;
}

/* --- making and ending ---------------------------------------------------------------------------------- */

CUresult sim_graph_new(CUgraph *out)
{
	CUgraph g = calloc(1, sizeof *g);
	if (!g)
		return CUDA_ERROR_OUT_OF_MEMORY;
	g->magic = SIM_GRAPH_MAGIC;
	*out = g;
	return CUDA_SUCCESS;
}

static void node_free(CUgraphNode n)
{
	body_drop(&n->body);
	free(n->dep);
	n->magic = 0;
	free(n);
}

void sim_graph_free(CUgraph g)
{
	if (!g)
		return;
	for (size_t i = 0; i < g->nodes; i++)
		node_free(g->node[i]);
	for (size_t i = 0; i < g->users; i++)
		cuUserObjectRelease(g->user[i].object, g->user[i].count);
	free(g->node);
	free(g->user);
	g->magic = 0;
	free(g);
}

CUresult sim_graph_add(CUgraph g, const CUgraphNode *dep, size_t deps, const struct sim_node *body,
		       CUgraphNode *out)
{
	if (deps && !dep)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < deps; i++)
		if (!sim_node_of(dep[i]) || dep[i]->graph != g)
			return CUDA_ERROR_INVALID_VALUE;
	CUgraphNode n = calloc(1, sizeof *n);
	if (!n)
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult r = body_copy(&n->body, body);
	if (r) {
		free(n);
		return r;
	}
	n->magic = SIM_NODE_MAGIC;
	n->graph = g;
	bool ok = sim_list_add(&g->node, &g->nodes, n);
	for (size_t i = 0; i < deps && ok; i++)
		ok = sim_list_add(&n->dep, &n->deps, dep[i]);
	if (!ok) {
		if (g->nodes && g->node[g->nodes - 1] == n)
			g->nodes--;
		node_free(n);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (out)
		*out = n;
	return CUDA_SUCCESS;
}

CUgraphNode sim_graph_find_clone(CUgraph clone, CUgraphNode original)
{
	for (size_t i = 0; i < clone->nodes; i++) {
		CUgraphNode n = clone->node[i];
		if (n->original == original)
			return n;
		if (n->body.type == CU_GRAPH_NODE_TYPE_GRAPH) {
			n = sim_graph_find_clone(n->body.child, original);
			if (n)
				return n;
		}
	}
	return NULL;
}

static CUresult clone_users(CUgraph g, CUgraph c)
{
	if (!g->users)
		return CUDA_SUCCESS;
	c->user = malloc(g->users * sizeof *c->user);
	if (!c->user)
		return CUDA_ERROR_OUT_OF_MEMORY;
	memcpy(c->user, g->user, g->users * sizeof *c->user);
	c->users = g->users;
	for (size_t i = 0; i < c->users; i++)
		cuUserObjectRetain(c->user[i].object, c->user[i].count);
	return CUDA_SUCCESS;
}

CUresult sim_graph_clone(CUgraph g, CUgraph *out)
{
	CUgraph c = NULL;
	CUresult r = sim_graph_new(&c);
	for (size_t i = 0; !r && i < g->nodes; i++) {
		r = sim_graph_add(c, NULL, 0, &g->node[i]->body, NULL);
		g->node[i]->mark = i;
	}
	for (size_t i = 0; !r && i < g->nodes; i++) {
		c->node[i]->original = g->node[i];
		for (size_t k = 0; k < g->node[i]->deps && !r; k++)
			if (!sim_list_add(&c->node[i]->dep, &c->node[i]->deps,
					  c->node[g->node[i]->dep[k]->mark]))
				r = CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (!r)
		r = clone_users(g, c);
	if (r) {
		sim_graph_free(c);
		return r;
	}
	c->original = g;
	*out = c;
	return CUDA_SUCCESS;
}

/* --- walking -------------------------------------------------------------------------------------------- */

CUgraphNode *sim_graph_order(CUgraph g)
{
	CUgraphNode *order = malloc((g->nodes + 1) * sizeof *order);
	size_t n = 0, before;
	if (!order)
		return NULL;
	for (size_t i = 0; i < g->nodes; i++)
		g->node[i]->mark = 0;
	do { /* graphs are usually built in order, so one pass does it */
		before = n;
		for (size_t i = 0; i < g->nodes; i++) {
			CUgraphNode v = g->node[i];
			bool ready = !v->mark;
			for (size_t k = 0; k < v->deps && ready; k++)
				ready = v->dep[k]->mark != 0;
			if (ready) {
				v->mark = 1;
				order[n++] = v;
			}
		}
	} while (n < g->nodes && n > before);
	if (n < g->nodes) {
		free(order);
		return NULL;
	}
	return order;
}

/* Marks everything that has to be done before the n nodes, and them. */
static void mark_before(const CUgraphNode *list, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		if (list[i]->mark)
			continue;
		list[i]->mark = 1;
		mark_before(list[i]->dep, list[i]->deps);
	}
}

bool sim_graph_precedes(CUgraphNode ancestor, const CUgraphNode *n, size_t count)
{
	CUgraph g = ancestor->graph;
	for (size_t i = 0; i < g->nodes; i++)
		g->node[i]->mark = 0;
	mark_before(n, count);
	return ancestor->mark != 0;
}

/* --- entry points: whole graphs -------------------------------------------------------------------------- */

CUresult cuGraphCreate(CUgraph *phGraph, unsigned int flags)
{
	SIM_CALL(cuGraphCreate);
	if (!phGraph || flags)
		return CUDA_ERROR_INVALID_VALUE;
	return sim_graph_new(phGraph);
}

CUresult cuGraphDestroy(CUgraph hGraph)
{
	SIM_CALL(cuGraphDestroy);
	if (!sim_graph_of(hGraph) || hGraph->owned)
		return CUDA_ERROR_INVALID_VALUE;
	sim_graph_free(hGraph);
	return CUDA_SUCCESS;
}

static bool has_memory(CUgraph g)
{
	for (size_t i = 0; i < g->nodes; i++) {
		const struct sim_node *b = &g->node[i]->body;
		if (b->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || b->type == CU_GRAPH_NODE_TYPE_MEM_FREE ||
		    (b->type == CU_GRAPH_NODE_TYPE_GRAPH && has_memory(b->child)))
			return true;
	}
	return false;
}

CUresult cuGraphClone(CUgraph *phGraphClone, CUgraph originalGraph)
{
	SIM_CALL(cuGraphClone);
	if (!phGraphClone || !sim_graph_of(originalGraph))
		return CUDA_ERROR_INVALID_VALUE;
	if (has_memory(originalGraph))
		return CUDA_ERROR_NOT_SUPPORTED;
	return sim_graph_clone(originalGraph, phGraphClone);
}

CUresult cuGraphNodeFindInClone(CUgraphNode *phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph)
{
	SIM_CALL(cuGraphNodeFindInClone);
	if (!phNode || !sim_node_of(hOriginalNode) || !sim_graph_of(hClonedGraph))
		return CUDA_ERROR_INVALID_VALUE;
	*phNode = sim_graph_find_clone(hClonedGraph, hOriginalNode);
	return *phNode ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The driver's way of handing out lists: without a buffer the count; with one, as much as fits, the
 * rest filled with NULL and the true count (at most the room) written back. */
static CUresult give(CUgraphNode *out, size_t *n, const CUgraphNode *list, size_t count)
{
	if (!n)
		return CUDA_ERROR_INVALID_VALUE;
	if (!out) {
		*n = count;
		return CUDA_SUCCESS;
	}
	for (size_t i = 0; i < *n; i++)
		out[i] = i < count ? list[i] : NULL;
	if (*n > count)
		*n = count;
	return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes)
{
	SIM_CALL(cuGraphGetNodes);
	if (!sim_graph_of(hGraph))
		return CUDA_ERROR_INVALID_VALUE;
	return give(nodes, numNodes, hGraph->node, hGraph->nodes);
}

CUresult cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode *rootNodes, size_t *numRootNodes)
{
	SIM_CALL(cuGraphGetRootNodes);
	CUgraphNode *list = NULL;
	size_t n = 0;
	if (!sim_graph_of(hGraph))
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < hGraph->nodes; i++)
		if (!hGraph->node[i]->deps && !sim_list_add(&list, &n, hGraph->node[i]))
			return free(list), CUDA_ERROR_OUT_OF_MEMORY;
	CUresult r = give(rootNodes, numRootNodes, list, n);
	free(list);
	return r;
}

static void plain_edges(CUgraphEdgeData *edge, const size_t *n)
{
	if (edge && n)
		memset(edge, 0, *n * sizeof *edge);
}

static CUresult get_edges(CUgraph g, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edge, size_t *num)
{
	size_t n = 0, room = num && from ? *num : 0;
	if (!sim_graph_of(g) || !num || !from != !to)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < g->nodes; i++)
		for (size_t k = 0; k < g->node[i]->deps; k++, n++)
			if (n < room) {
				from[n] = g->node[i]->dep[k];
				to[n] = g->node[i];
			}
	*num = from && n > room ? room : n;
	plain_edges(edge, num);
	return CUDA_SUCCESS;
}

CUresult cuGraphGetEdges(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, size_t *numEdges)
{
	SIM_CALL(cuGraphGetEdges);
	return get_edges(hGraph, from, to, NULL, numEdges);
}

CUresult cuGraphGetEdges_v2(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edgeData,
			    size_t *numEdges)
{
	SIM_CALL(cuGraphGetEdges_v2);
	return get_edges(hGraph, from, to, from ? edgeData : NULL, numEdges);
}

static CUresult add_edges(CUgraph g, const CUgraphNode *from, const CUgraphNode *to, size_t n)
{
	if (!sim_graph_of(g) || (n && (!from || !to)))
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < n; i++)
		if (!sim_node_of(from[i]) || !sim_node_of(to[i]) || from[i]->graph != g ||
		    to[i]->graph != g || from[i] == to[i])
			return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < n; i++)
		if (!sim_list_add(&to[i]->dep, &to[i]->deps, from[i]))
			return CUDA_ERROR_OUT_OF_MEMORY;
	return CUDA_SUCCESS;
}

CUresult cuGraphAddDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
				size_t numDependencies)
{
	SIM_CALL(cuGraphAddDependencies);
	return add_edges(hGraph, from, to, numDependencies);
}

CUresult cuGraphAddDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
				   const CUgraphEdgeData *edgeData, size_t numDependencies)
{
	SIM_CALL(cuGraphAddDependencies_v2);
	(void)edgeData; /* every edge is a full dependency here */
	return add_edges(hGraph, from, to, numDependencies);
}

/* Takes `dep` off n's list; the room stays, so the list's length has to stay a valid size for
 * sim_list_add, which only ever grows it at powers of two: rebuild it. */
static bool remove_dep(CUgraphNode n, CUgraphNode dep)
{
	CUgraphNode *list = NULL;
	size_t count = 0;
	bool found = false;
	for (size_t i = 0; i < n->deps; i++) {
		if (n->dep[i] == dep)
			found = true;
		else if (!sim_list_add(&list, &count, n->dep[i]))
			return free(list), false;
	}
	free(n->dep);
	n->dep = list;
	n->deps = count;
	return found;
}

static CUresult remove_edges(CUgraph g, const CUgraphNode *from, const CUgraphNode *to, size_t n)
{
	if (!sim_graph_of(g) || (n && (!from || !to)))
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < n; i++)
		if (!sim_node_of(from[i]) || !sim_node_of(to[i]) || !remove_dep(to[i], from[i]))
			return CUDA_ERROR_INVALID_VALUE;
	return CUDA_SUCCESS;
}

CUresult cuGraphRemoveDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
				   size_t numDependencies)
{
	SIM_CALL(cuGraphRemoveDependencies);
	return remove_edges(hGraph, from, to, numDependencies);
}

CUresult cuGraphRemoveDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
				      const CUgraphEdgeData *edgeData, size_t numDependencies)
{
	SIM_CALL(cuGraphRemoveDependencies_v2);
	(void)edgeData;
	return remove_edges(hGraph, from, to, numDependencies);
}

/* --- entry points: nodes ------------------------------------------------------------------------------------ */

CUresult cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType *type)
{
	SIM_CALL(cuGraphNodeGetType);
	if (!sim_node_of(hNode) || !type)
		return CUDA_ERROR_INVALID_VALUE;
	*type = hNode->body.type;
	return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode *dependencies, size_t *numDependencies)
{
	SIM_CALL(cuGraphNodeGetDependencies);
	if (!sim_node_of(hNode))
		return CUDA_ERROR_INVALID_VALUE;
	return give(dependencies, numDependencies, hNode->dep, hNode->deps);
}

CUresult cuGraphNodeGetDependencies_v2(CUgraphNode hNode, CUgraphNode *dependencies,
				       CUgraphEdgeData *edgeData, size_t *numDependencies)
{
	SIM_CALL(cuGraphNodeGetDependencies_v2);
	if (!sim_node_of(hNode))
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = give(dependencies, numDependencies, hNode->dep, hNode->deps);
	if (!r && dependencies)
		plain_edges(edgeData, numDependencies);
	return r;
}

static CUresult dependents(CUgraphNode n, CUgraphNode *out, CUgraphEdgeData *edge, size_t *num)
{
	CUgraphNode *list = NULL;
	size_t count = 0;
	if (!sim_node_of(n))
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < n->graph->nodes; i++)
		for (size_t k = 0; k < n->graph->node[i]->deps; k++)
			if (n->graph->node[i]->dep[k] == n && !sim_list_add(&list, &count, n->graph->node[i]))
				return free(list), CUDA_ERROR_OUT_OF_MEMORY;
	CUresult r = give(out, num, list, count);
	free(list);
	if (!r && out)
		plain_edges(edge, num);
	return r;
}

CUresult cuGraphNodeGetDependentNodes(CUgraphNode hNode, CUgraphNode *dependentNodes,
				      size_t *numDependentNodes)
{
	SIM_CALL(cuGraphNodeGetDependentNodes);
	return dependents(hNode, dependentNodes, NULL, numDependentNodes);
}

CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode hNode, CUgraphNode *dependentNodes,
					 CUgraphEdgeData *edgeData, size_t *numDependentNodes)
{
	SIM_CALL(cuGraphNodeGetDependentNodes_v2);
	return dependents(hNode, dependentNodes, edgeData, numDependentNodes);
}

CUresult cuGraphDestroyNode(CUgraphNode hNode)
{
	SIM_CALL(cuGraphDestroyNode);
	if (!sim_node_of(hNode))
		return CUDA_ERROR_INVALID_VALUE;
	if (hNode->body.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || hNode->body.type == CU_GRAPH_NODE_TYPE_MEM_FREE)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUgraph g = hNode->graph;
	CUgraphNode *list = NULL;
	size_t n = 0;
	for (size_t i = 0; i < g->nodes; i++) {
		if (g->node[i] == hNode)
			continue;
		remove_dep(g->node[i], hNode);
		if (!sim_list_add(&list, &n, g->node[i]))
			return free(list), CUDA_ERROR_OUT_OF_MEMORY;
	}
	free(g->node);
	g->node = list;
	g->nodes = n;
	node_free(hNode);
	return CUDA_SUCCESS;
}

static const char *type_name(CUgraphNodeType t)
{
	static const char *const name[] = { "kernel", "memcpy", "memset", "host", "graph", "empty",
					    "wait event", "event record", "signal", "wait", "mem alloc",
					    "mem free", "batch mem op", "conditional" };
	return (unsigned)t < sizeof name / sizeof name[0] ? name[t] : "?";
}

CUresult cuGraphDebugDotPrint(CUgraph hGraph, const char *path, unsigned int flags)
{
	SIM_CALL(cuGraphDebugDotPrint);
	(void)flags;
	if (!sim_graph_of(hGraph) || !path)
		return CUDA_ERROR_INVALID_VALUE;
	FILE *f = fopen(path, "we");
	if (!f)
		return CUDA_ERROR_OPERATING_SYSTEM;
	fprintf(f, "digraph dot {\n");
	for (size_t i = 0; i < hGraph->nodes; i++) {
		CUgraphNode n = hGraph->node[i];
		struct CUfunc_st *fn = n->body.type == CU_GRAPH_NODE_TYPE_KERNEL ?
					       sim_func_of(n->body.kernel.launch.f) : NULL;
		fprintf(f, "\t\"%p\" [label=\"%s%s%s\"];\n", (void *)n, type_name(n->body.type),
			fn && fn->name ? " " : "", fn && fn->name ? fn->name : "");
		for (size_t k = 0; k < n->deps; k++)
			fprintf(f, "\t\"%p\" -> \"%p\";\n", (void *)n->dep[k], (void *)n);
	}
	fprintf(f, "}\n");
	fclose(f);
	return CUDA_SUCCESS;
}

/* --- user objects: counted references with a destructor ---------------------------------------------------- */

struct CUuserObject_st {
	_Atomic unsigned refs;
	CUhostFn destroy;
	void *arg;
};

CUresult cuUserObjectCreate(CUuserObject *object_out, void *ptr, CUhostFn destroy,
			    unsigned int initialRefcount, unsigned int flags)
{
	SIM_CALL(cuUserObjectCreate);
	if (!object_out || !destroy || !initialRefcount || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
		return CUDA_ERROR_INVALID_VALUE;
	struct CUuserObject_st *o = calloc(1, sizeof *o);
	if (!o)
		return CUDA_ERROR_OUT_OF_MEMORY;
	o->refs = initialRefcount;
	o->destroy = destroy;
	o->arg = ptr;
	*object_out = o;
	return CUDA_SUCCESS;
}

CUresult cuUserObjectRetain(CUuserObject object, unsigned int count)
{
	SIM_CALL(cuUserObjectRetain);
	if (!object || !count)
		return CUDA_ERROR_INVALID_VALUE;
	object->refs += count;
	return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject object, unsigned int count)
{
	SIM_CALL(cuUserObjectRelease);
	if (!object || !count || object->refs < count)
		return CUDA_ERROR_INVALID_VALUE;
	if ((object->refs -= count) == 0) {
		object->destroy(object->arg);
		free(object);
	}
	return CUDA_SUCCESS;
}

CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags)
{
	SIM_CALL(cuGraphRetainUserObject);
	if (!sim_graph_of(graph) || !object || !count || (flags & ~(unsigned)CU_GRAPH_USER_OBJECT_MOVE))
		return CUDA_ERROR_INVALID_VALUE;
	struct sim_user_ref *more = realloc(graph->user, (graph->users + 1) * sizeof *more);
	if (!more)
		return CUDA_ERROR_OUT_OF_MEMORY;
	graph->user = more;
	if (!(flags & CU_GRAPH_USER_OBJECT_MOVE))
		object->refs += count;
	graph->user[graph->users++] = (struct sim_user_ref){ .object = object, .count = count };
	return CUDA_SUCCESS;
}

CUresult cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned int count)
{
	SIM_CALL(cuGraphReleaseUserObject);
	if (!sim_graph_of(graph) || !object || !count)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < graph->users && count; i++) {
		struct sim_user_ref *u = &graph->user[i];
		if (u->object != object)
			continue;
		unsigned n = u->count < count ? u->count : count;
		u->count -= n;
		count -= n;
		if (!u->count)
			graph->user[i--] = graph->user[--graph->users];
		cuUserObjectRelease(object, n);
	}
	return count ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
