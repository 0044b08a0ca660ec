#include "compat.h"
#include "graphmem.h"
#include <stdlib.h>
#include <string.h>
#include "account.h"
#include "device.h"
#include "slice.h"
#include "trace.h"

static bool seen;

/* Guards all below, and keeps "ask the driver, then adjust" whole. */
static struct tr_lock graph_lock;
static struct {
	uint32_t charged;   /* units: reserved by the driver + in_flight */
	uint32_t in_flight;
} part[TR_MAX_DEVICES];

struct exec_memory {
	CUgraphExec exec;
	struct exec_memory *next;
	uint32_t units[TR_MAX_DEVICES]; /* worst case of its allocation nodes */
};
static struct exec_memory *execs;

/* The last launched since the last trim: the pool holds what it needs, as nobody else has taken
 * from the pool meanwhile. Any other may find the pool's memory in use. */
static CUgraphExec backed;

/* A launch under way; it outlives its executable graph. */
struct flight {
	struct flight *next;
	int token;
	uint32_t units[TR_MAX_DEVICES];
};
static struct flight *flights;

void tr_graphmem_after_fork(void)
{
	graph_lock.word = 0;
	execs = NULL;
	flights = NULL;
	backed = NULL;
	memset(part, 0, sizeof part);
}

void tr_graphmem_seen(void)
{
	__atomic_store_n(&seen, true, __ATOMIC_RELEASE);
}

static bool none_seen(void)
{
	return !__atomic_load_n(&seen, __ATOMIC_ACQUIRE);
}

/* The caller holds graph_lock. */
static void settle(int dev, CUdevice handle)
{
	cuuint64_t reserved = 0;
	if (REAL(cuDeviceGetGraphMemAttribute)(handle, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT,
					       &reserved) != CUDA_SUCCESS)
		return;
	uint32_t target = tr_units(reserved) + part[dev].in_flight;
	if (target > part[dev].charged)
		tr_charge_taken(dev, target - part[dev].charged);
	else
		tr_uncharge(dev, part[dev].charged - target);
	part[dev].charged = target;
}

/* --- what a graph will take ---------------------------------------------------------------- */

#define DEPTH_MAX 16 /* of child graphs */
#define CHUNK (32ull << 20) /* by which the pool grows (observed) */

/* Bytes per device: of nodes that take chunks of their own, and of those that share chunks. */
struct sum {
	uint64_t large[TR_MAX_DEVICES], small[TR_MAX_DEVICES];
};

static void sum_nodes(CUgraph graph, struct sum *sum, int depth);

static void sum_node(CUgraphNode node, struct sum *sum, int depth)
{
	CUgraphNodeType type;
	if (REAL(cuGraphNodeGetType)(node, &type) != CUDA_SUCCESS)
		return;
	if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
		CUDA_MEM_ALLOC_NODE_PARAMS p;
		if (REAL(cuGraphMemAllocNodeGetParams)(node, &p) != CUDA_SUCCESS)
			return;
		int dev = p.poolProps.location.type == CU_MEM_LOCATION_TYPE_DEVICE
				  ? tr_device_index(p.poolProps.location.id)
				  : -1;
		if (dev >= 0 && p.bytesize > CHUNK / 2)
			sum->large[dev] += tr_round_up(p.bytesize, CHUNK);
		else if (dev >= 0)
			sum->small[dev] += tr_round_up(p.bytesize, TR_BLOCK);
	} else if (type == CU_GRAPH_NODE_TYPE_GRAPH && depth < DEPTH_MAX) {
		CUgraph child;
		if (REAL(cuGraphChildGraphNodeGetGraph)(node, &child) == CUDA_SUCCESS)
			sum_nodes(child, sum, depth + 1);
	}
}

static void sum_nodes(CUgraph graph, struct sum *sum, int depth)
{
	size_t n = 0;
	if (REAL(cuGraphGetNodes)(graph, NULL, &n) != CUDA_SUCCESS || n == 0)
		return;
	CUgraphNode *nodes = calloc(n, sizeof *nodes);
	if (nodes == NULL)
		return;
	if (REAL(cuGraphGetNodes)(graph, nodes, &n) == CUDA_SUCCESS)
		for (size_t i = 0; i < n; i++)
			sum_node(nodes[i], sum, depth);
	free(nodes);
}

/* However the small ones are packed, all chunks but one are more than half full. */
static uint32_t worst_case(uint64_t large, uint64_t small)
{
	uint64_t packed = tr_round_up(small, CHUNK), twice = tr_round_up(2 * small, CHUNK);
	return tr_units(large + (small <= CHUNK ? packed : twice));
}

static struct exec_memory **find(CUgraphExec exec)
{
	struct exec_memory **at = &execs;
	while (*at != NULL && (*at)->exec != exec)
		at = &(*at)->next;
	return at;
}

void tr_graphmem_instantiated(CUgraphExec exec, CUgraph graph)
{
	if (none_seen())
		return;
	struct exec_memory *m = calloc(1, sizeof *m);
	if (m == NULL)
		return;
	m->exec = exec;
	struct sum sum = {{0}, {0}};
	sum_nodes(graph, &sum, 0);
	bool any = false;
	for (int d = 0; d < TR_MAX_DEVICES; d++) {
		m->units[d] = worst_case(sum.large[d], sum.small[d]);
		any = any || m->units[d] != 0;
	}
	if (!any) {
		free(m);
		return;
	}
	tr_lock(&graph_lock);
	m->next = execs;
	execs = m;
	tr_unlock(&graph_lock);
}

void tr_graphmem_destroyed(CUgraphExec exec)
{
	if (none_seen())
		return;
	tr_lock(&graph_lock);
	struct exec_memory **at = find(exec), *m = *at;
	if (m != NULL)
		*at = m->next;
	if (backed == exec)
		backed = NULL;
	tr_unlock(&graph_lock);
	free(m);
}

/* --- launches ------------------------------------------------------------------------------ */

/* Charges on every device, or on none. */
static bool charge_all(const uint32_t *units)
{
	for (int d = 0; d < TR_MAX_DEVICES; d++) {
		if (tr_charge(d, units[d]))
			continue;
		while (d-- > 0)
			tr_uncharge(d, units[d]);
		return false;
	}
	return true;
}

CUresult tr_graph_mem_before(CUgraphExec exec, CUstream stream, bool ptsz, int *token)
{
	(void)stream;
	(void)ptsz;
	*token = 0;
	if (none_seen())
		return CUDA_SUCCESS;
	CUresult r = tr_enter();
	if (r != CUDA_SUCCESS)
		return r;
	static int next_token;
	tr_lock(&graph_lock);
	struct exec_memory *m = backed == exec ? NULL : *find(exec);
	struct flight *f = m == NULL ? NULL : calloc(1, sizeof *f);
	if (f != NULL)
		memcpy(f->units, m->units, sizeof f->units);
	tr_unlock(&graph_lock);
	if (m == NULL)
		return CUDA_SUCCESS;
	if (f == NULL || !charge_all(f->units)) {
		free(f);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	tr_lock(&graph_lock);
	next_token = next_token == INT32_MAX ? 1 : next_token + 1;
	*token = f->token = next_token;
	f->next = flights;
	flights = f;
	for (int d = 0; d < TR_MAX_DEVICES; d++) {
		part[d].in_flight += f->units[d];
		part[d].charged += f->units[d];
	}
	tr_unlock(&graph_lock);
	return CUDA_SUCCESS;
}

void tr_graph_mem_after(CUgraphExec exec, int token, CUresult result)
{
	if (token == 0)
		return;
	tr_lock(&graph_lock);
	struct flight **at = &flights;
	while (*at != NULL && (*at)->token != token)
		at = &(*at)->next;
	struct flight *f = *at;
	if (f != NULL)
		*at = f->next;
	for (int d = 0; f != NULL && d < TR_MAX_DEVICES; d++)
		if (f->units[d] != 0) {
			part[d].in_flight -= f->units[d];
			settle(d, tr_device_handle(d));
		}
	/* With another launch under way it is not known who took what. */
	backed = result == CUDA_SUCCESS && flights == NULL && *find(exec) != NULL ? exec : NULL;
	tr_unlock(&graph_lock);
	free(f);
}

void tr_graphmem_trim(int dev)
{
	if (none_seen())
		return;
	CUdevice handle = tr_device_handle(dev);
	tr_lock(&graph_lock);
	REAL(cuDeviceGraphMemTrim)(handle);
	settle(dev, handle);
	backed = NULL;
	tr_unlock(&graph_lock);
}

CUresult EXPORT cuDeviceGraphMemTrim(CUdevice device)
{
	CUresult r = REAL(cuDeviceGraphMemTrim)(device);
	int dev = none_seen() || tr_enter() != CUDA_SUCCESS ? -1 : tr_device_index(device);
	if (dev < 0)
		return r;
	tr_lock(&graph_lock);
	settle(dev, device);
	backed = NULL;
	tr_unlock(&graph_lock);
	return r;
}

typedef CUresult (*upload_fn)(CUgraphExec, CUstream);

static CUresult upload(upload_fn real, bool ptsz, CUgraphExec exec, CUstream s)
{
	int token;
	CUresult r = tr_graph_mem_before(exec, s, ptsz, &token);
	if (r != CUDA_SUCCESS)
		return r;
	r = real(exec, s);
	tr_graph_mem_after(exec, token, r);
	return r;
}

CUresult EXPORT cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream)
{
	return upload(REAL(cuGraphUpload), false, hGraphExec, hStream);
}

CUresult EXPORT cuGraphUpload_ptsz(CUgraphExec hGraphExec, CUstream hStream)
{
	return upload(REAL(cuGraphUpload_ptsz), true, hGraphExec, hStream);
}
