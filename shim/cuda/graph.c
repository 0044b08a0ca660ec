/* Executable graphs: what each one holds and costs is kept by its handle. */
#include "compat.h"
#include "graphmem.h"
#include "meter.h"
#include "real.h"

static CUresult made(CUresult r, const CUgraphExec *exec, CUgraph graph)
{
	if (r != CUDA_SUCCESS)
		return r;
	tr_graphcost_forget(*exec); /* the handle may have been another graph's */
	tr_graphmem_instantiated(*exec, graph);
	return r;
}

CUresult EXPORT cuGraphInstantiate(CUgraphExec *phGraphExec, CUgraph hGraph,
				   CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize)
{
	return made(REAL(cuGraphInstantiate)(phGraphExec, hGraph, phErrorNode, logBuffer,
					     bufferSize),
		    phGraphExec, hGraph);
}

CUresult EXPORT cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph,
				      CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize)
{
	return made(REAL(cuGraphInstantiate_v2)(phGraphExec, hGraph, phErrorNode, logBuffer,
						bufferSize),
		    phGraphExec, hGraph);
}

CUresult EXPORT cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph,
					    unsigned long long flags)
{
	return made(REAL(cuGraphInstantiateWithFlags)(phGraphExec, hGraph, flags), phGraphExec,
		    hGraph);
}

CUresult EXPORT cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph,
					     CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams)
{
	return made(REAL(cuGraphInstantiateWithParams)(phGraphExec, hGraph, instantiateParams),
		    phGraphExec, hGraph);
}

CUresult EXPORT cuGraphInstantiateWithParams_ptsz(CUgraphExec *phGraphExec, CUgraph hGraph,
						  CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams)
{
	return made(REAL(cuGraphInstantiateWithParams_ptsz)(phGraphExec, hGraph,
							    instantiateParams),
		    phGraphExec, hGraph);
}

CUresult EXPORT cuGraphExecDestroy(CUgraphExec hGraphExec)
{
	tr_graphcost_forget(hGraphExec);
	tr_graphmem_destroyed(hGraphExec);
	return REAL(cuGraphExecDestroy)(hGraphExec);
}

/* An update may change every kernel, and may not add allocation nodes. */
CUresult EXPORT cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph,
				  CUgraphNode *hErrorNode_out,
				  CUgraphExecUpdateResult *updateResult_out)
{
	tr_graphcost_forget(hGraphExec);
	return REAL(cuGraphExecUpdate)(hGraphExec, hGraph, hErrorNode_out, updateResult_out);
}

CUresult EXPORT cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph,
				     CUgraphExecUpdateResultInfo *resultInfo)
{
	tr_graphcost_forget(hGraphExec);
	return REAL(cuGraphExecUpdate_v2)(hGraphExec, hGraph, resultInfo);
}

CUresult EXPORT cuGraphAddMemAllocNode(CUgraphNode *phGraphNode, CUgraph hGraph,
				       const CUgraphNode *dependencies, size_t numDependencies,
				       CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams)
{
	tr_graphmem_seen();
	return REAL(cuGraphAddMemAllocNode)(phGraphNode, hGraph, dependencies, numDependencies,
					    nodeParams);
}

static void note_node(const CUgraphNodeParams *p)
{
	if (p != NULL && p->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
		tr_graphmem_seen();
}

CUresult EXPORT cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph,
			       const CUgraphNode *dependencies, size_t numDependencies,
			       CUgraphNodeParams *nodeParams)
{
	note_node(nodeParams);
	return REAL(cuGraphAddNode)(phGraphNode, hGraph, dependencies, numDependencies, nodeParams);
}

CUresult EXPORT cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph,
				  const CUgraphNode *dependencies,
				  const CUgraphEdgeData *dependencyData, size_t numDependencies,
				  CUgraphNodeParams *nodeParams)
{
	note_node(nodeParams);
	return REAL(cuGraphAddNode_v2)(phGraphNode, hGraph, dependencies, dependencyData,
				       numDependencies, nodeParams);
}
