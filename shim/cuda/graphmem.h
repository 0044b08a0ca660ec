/* Memory that graphs take: allocation nodes, backed by a pool per device when the graph is
 * launched or uploaded. Charged as the driver's own figure of that pool. */
#ifndef TRANCHE_GRAPHMEM_H
#define TRANCHE_GRAPHMEM_H
#include <stdbool.h>
#include "cuda_abi.h"

/* Somewhere in this process an allocation node came into a graph. Until then all below is free. */
void tr_graphmem_seen(void);

/* An executable graph was made from a graph, or is gone. */
void tr_graphmem_instantiated(CUgraphExec exec, CUgraph graph);
void tr_graphmem_destroyed(CUgraphExec exec);

/* Around a launch or upload: charges the worst growth before, settles after. An error other than
 * CUDA_SUCCESS means that the limit is in the way: the launch must not happen, and `after` not be
 * called. */
CUresult tr_graph_mem_before(CUgraphExec exec, CUstream stream, bool ptsz, int *token);
void tr_graph_mem_after(CUgraphExec exec, int token, CUresult result);

/* Gives back what the device's graph pool holds unused. */
void tr_graphmem_trim(int dev);
void tr_graphmem_after_fork(void);
#endif
