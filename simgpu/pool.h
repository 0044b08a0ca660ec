/* Memory pools: chunks of 32 MiB of device memory, cut into pieces. Also behind graph memory.
 * Callers hold mem_mutex. */
#ifndef SIMGPU_POOL_H
#define SIMGPU_POOL_H
#include "mem.h"

#define POOL_MAGIC 0x504f4f4cu

struct pool_chunk {
	struct mem_block *block; /* NULL: imported */
	uint64_t base, size, used;
	struct pool_piece *pieces; /* by address, without gaps */
	struct pool_chunk *next;
	struct CUmemPoolHandle_st *pool;
};

struct pool_piece {
	uint64_t offset, size;
	bool taken;
	struct pool_chunk *chunk;
	struct pool_piece *next, *prev;
};

struct CUmemPoolHandle_st {
	uint32_t magic;
	int gpu;          /* -1: host memory */
	bool is_default, destroyed, imported;
	int object;       /* that its exported handle names, -1 */
	unsigned handle_types;
	uint64_t max_size, threshold;
	uint64_t reserved, reserved_high, used, used_high;
	int reuse[3];
	uint64_t live;    /* allocations outstanding */
	struct pool_chunk *chunks;
	struct CUmemPoolHandle_st *next;
};

/* A piece of at least bytes; grows the pool. NULL: out of memory. */
struct pool_piece *pool_take(struct CUmemPoolHandle_st *p, uint64_t bytes);
void pool_give(struct pool_piece *piece);
/* Releases whole unused chunks while more than keep bytes are reserved; true if any. */
bool pool_trim(struct CUmemPoolHandle_st *p, uint64_t keep);
struct CUmemPoolHandle_st *pool_new(int gpu);
uint64_t pool_piece_base(const struct pool_piece *piece);
#endif
