/* Inside the memory half: where device memory is and who owns it.
 *
 * Each process has, per GPU it uses, one memfd (the arena) that backs all physical memory it creates
 * there. Its first part is mapped once as a window: plain allocations and pools are pieces of the window
 * and their device address is the host address. VMM memory comes from behind the window, each piece
 * once only, and is mapped where the application says. Untouched memory costs nothing, freed memory is
 * punched out.
 *
 * mem_mutex guards everything below in this process; it is taken before sim_lock. */
#ifndef SIMGPU_MEM_H
#define SIMGPU_MEM_H
#include "sim.h"

#define MEM_BLOCK (2ull << 20)
#define MEM_GRANULE 512ull
#define MEM_SMALL (1ull << 20)       /* up to here allocations share blocks */
#define MEM_POOL_CHUNK (32ull << 20) /* pools grow by this */

#define MEM_ROUND(n, to) (((uint64_t)(n) + (to) - 1) / (to) * (to))

enum mem_kind {
	MEM_PLAIN, MEM_MANAGED, MEM_POOL, MEM_GRAPH, MEM_VMM, MEM_IPC, MEM_EXTERNAL, MEM_POOL_IMPORT,
	MEM_HOST, MEM_REGISTERED, MEM_RESERVED,
};

struct mem_block; /* heap.c: a run of 2 MiB blocks of a window */

/* A range of addresses that the application knows. In the process's tree, by address. */
struct mem_range {
	uint64_t base, size;
	struct mem_range *left, *right;
	uint32_t prio;
	enum mem_kind kind;
	int gpu;  /* -1: host */
	struct CUctx_st *ctx;
	uint64_t id; /* CU_POINTER_ATTRIBUTE_BUFFER_ID */
	unsigned flags;
	bool sync_memops;
	struct mem_block *block; /* PLAIN, MANAGED */
	void *owner;             /* pool segment, VMM piece, IPC import, ... by kind */
	uint64_t offset;         /* VMM: of the mapping in the piece */
};

extern pthread_mutex_t mem_mutex;
void mem_lock(void);
void mem_unlock(void);

/* --- heap.c: windows, blocks and the tree. Callers hold mem_mutex. ------------------------------ */

/* The arena of a GPU, made at first use. -1: the system gave no memory. */
int mem_arena_fd(int gpu);
/* A piece of the arena behind the window that nobody had before. */
uint64_t mem_arena_fresh(int gpu, uint64_t bytes);
void mem_punch(int fd, uint64_t offset, uint64_t bytes);

/* Takes bytes (a multiple of MEM_BLOCK) of the window, charged; low: below 4 GiB, for the first
 * generation of the API. NULL: out of memory. */
struct mem_block *mem_block_new(int gpu, uint64_t bytes, bool low);
/* Addresses only: nothing is charged and nobody may touch it until mem_block_back. */
struct mem_block *mem_block_address(int gpu, uint64_t bytes);
bool mem_block_back(struct mem_block *b);   /* charges it; false: out of memory */
void mem_block_unback(struct mem_block *b); /* contents and charge go */
void mem_block_free(struct mem_block *b);
void mem_block_punch(struct mem_block *b); /* contents go, untouched again */
uint64_t mem_block_base(const struct mem_block *b);
uint64_t mem_block_bytes(const struct mem_block *b);
/* The block as an object that others can open; -1: table full. */
int mem_block_object(struct mem_block *b);

/* Plain memory of either size class; enters the tree. */
CUresult mem_alloc(struct CUctx_st *ctx, enum mem_kind kind, uint64_t bytes, bool low,
		   struct mem_range **out);
void mem_free(struct mem_range *r);

struct mem_range *mem_range_new(uint64_t base, uint64_t size, enum mem_kind kind, int gpu,
				struct CUctx_st *ctx); /* NULL: out of host memory */
void mem_range_delete(struct mem_range *r);            /* leaves the tree and is freed */
struct mem_range *mem_find(uint64_t address);          /* the range that holds it */
struct mem_range *mem_find_exact(uint64_t base);
struct mem_range *mem_next(uint64_t address);          /* first range at or after */
/* Charge that lets go of unused pool memory before it gives up. */
bool mem_charge(int gpu, uint64_t bytes);

/* --- across files ------------------------------------------------------------------------------- */
void mem_ctx_end(struct CUctx_st *ctx);      /* memory.c: frees what the context owns */
void array_ctx_end(struct CUctx_st *ctx);    /* array.c */
void module_ctx_end(struct CUctx_st *ctx);   /* module.c */
bool pool_trim_all(int gpu);                 /* pool.c: releases unused chunks; true if any */
CUresult pool_free(struct mem_range *r);     /* pool.c */
void vmm_unmapped(struct mem_range *r);      /* vmm.c */
CUresult ipc_close(struct mem_range *r);     /* ipc.c */
CUresult host_free(struct mem_range *r);     /* host.c */
/* array.c: address of a row of an array and how much of it there is; NULL: outside. */
uint8_t *array_row(CUarray a, size_t x, size_t y, size_t z, size_t width);
int array_gpu(CUarray a); /* -1: not an array */
#endif
