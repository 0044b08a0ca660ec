#include "compat.h"
#include "graphmem.h"
#include <stdlib.h>
#include <string.h>
#include "account.h"
#include "device.h"
#include "slice.h"
#include "trace.h"

#define EXPORT __attribute__((visibility("default")))

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
	bool backed;			/* launched since the last trim */
};
static struct exec_memory *execs;

void tr_graphmem_after_fork(void)
{
	graph_lock.word = 0;
	execs = NULL;
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

static void sum_nodes(CUgraph graph, uint32_t *units, int depth);

static void sum_node(CUgraphNode node, uint32_t *units, int depth)
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
		if (dev >= 0)
			units[dev] += tr_units(tr_round_up(p.bytesize, 32ull << 20));
	} else if (type == CU_GRAPH_NODE_TYPE_GRAPH && depth < DEPTH_MAX) {
		CUgraph child;
		if (REAL(cuGraphChildGraphNodeGetGraph)(node, &child) == CUDA_SUCCESS)
			sum_nodes(child, units, depth + 1);
	}
}

static void sum_nodes(CUgraph graph, uint32_t *units, int depth)
{
	size_t n = 0;
	if (REAL(cuGraphGetNodes)(graph, NULL, &n) != CUDA_SUCCESS || n == 0)
		return;
	CUgraphNode *nodes = calloc(n, sizeof *nodes);
	if (nodes == NULL)
		return;
	if (REAL(cuGraphGetNodes)(graph, nodes, &n) == CUDA_SUCCESS)
		for (size_t i = 0; i < n; i++)
			sum_node(nodes[i], units, depth);
	free(nodes);
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
	sum_nodes(graph, m->units, 0);
	bool any = false;
	for (int d = 0; d < TR_MAX_DEVICES; d++)
		any = any || m->units[d] != 0;
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
	tr_unlock(&graph_lock);
	free(m);
}

/* --- launches ------------------------------------------------------------------------------ */

/* Charges on every device, or on none. Result: a bit per device. */
static bool charge_all(const uint32_t *units, int *mask)
{
	*mask = 0;
	for (int d = 0; d < TR_MAX_DEVICES; d++) {
		if (units[d] == 0)
			continue;
		if (tr_charge(d, units[d])) {
			*mask |= 1 << d;
			continue;
		}
		for (int u = 0; u < d; u++)
			if (*mask & (1 << u))
				tr_uncharge(u, units[u]);
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
	uint32_t units[TR_MAX_DEVICES] = {0};
	tr_lock(&graph_lock);
	struct exec_memory *m = *find(exec);
	if (m != NULL && !m->backed)
		memcpy(units, m->units, sizeof units);
	tr_unlock(&graph_lock);
	if (!charge_all(units, token))
		return CUDA_ERROR_OUT_OF_MEMORY;
	tr_lock(&graph_lock);
	for (int d = 0; d < TR_MAX_DEVICES; d++)
		if (*token & (1 << d)) {
			part[d].in_flight += units[d];
			part[d].charged += units[d];
		}
	tr_unlock(&graph_lock);
	return CUDA_SUCCESS;
}

void tr_graph_mem_after(CUgraphExec exec, int token, CUresult result)
{
	if (token == 0)
		return;
	tr_lock(&graph_lock);
	struct exec_memory *m = *find(exec);
	for (int d = 0; d < TR_MAX_DEVICES; d++) {
		if ((token & (1 << d)) == 0)
			continue;
		/* The graph may have been destroyed meanwhile, by another thread. */
		if (m != NULL)
			part[d].in_flight -= m->units[d];
		else
			part[d].in_flight = 0;
		settle(d, tr_device_handle(d));
	}
	if (m != NULL && result == CUDA_SUCCESS)
		m->backed = true;
	tr_unlock(&graph_lock);
}

static void unback_all(void)
{
	for (struct exec_memory *m = execs; m != NULL; m = m->next)
		m->backed = false;
}

void tr_graphmem_trim(int dev)
{
	if (none_seen())
		return;
	CUdevice handle = tr_device_handle(dev);
	tr_lock(&graph_lock);
	REAL(cuDeviceGraphMemTrim)(handle);
	settle(dev, handle);
	unback_all();
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
	unback_all();
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
