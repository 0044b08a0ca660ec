/* Stream-ordered memory: a pool is charged what it has reserved from the device. Growth is
 * reserved at its worst before the driver call and settled after it to the pool's own figure. */
#ifndef TRANCHE_POOL_H
#define TRANCHE_POOL_H
#include "cuda_abi.h"
#include "table.h"

/* Gives back what this process's pools on the device hold unused. */
void tr_pools_trim(int dev);
/* Brings the charges of this process's pools to what they have reserved now. */
void tr_pools_settle(int dev);
/* A stream-ordered allocation was freed by cuMemFree. */
void tr_pool_freed(const struct tr_entry *e);
/* Streams have been synchronised: pools may have returned memory. Cheap when nothing was freed. */
void tr_pools_after_sync(void);
/* Before a context may end, and with it its events: waits for the frees in stream order that are
 * under way in it. */
void tr_pools_context_ending(CUcontext ctx);
/* Child of fork: forget everything. */
void tr_pools_after_fork(void);
#endif
