/* Windows of device memory, blocks in them, and the tree of ranges. See mem.h. */
#include <fcntl.h>
#include <linux/falloc.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "mem.h"

#define GRANULES (MEM_BLOCK / MEM_GRANULE)
#define LOW_WINDOW (512ull << 20) /* MAP_32BIT has one GiB in all */

/* A window: blocks are found by a bit map, one bit for 2 MiB. */
struct window {
	uint64_t base, offset; /* address, and where it begins in the arena */
	uint64_t blocks;
	uint64_t next; /* where the next search begins */
	uint64_t *taken;
};

struct mem_block {
	int gpu;
	struct window *window;
	uint64_t first, count;
	bool backed;
	int object; /* -1: not shared */
	/* shared by small allocations: */
	bool small;
	uint32_t free_granules;
	uint64_t *used; /* one bit for each granule */
	struct mem_block *next, *prev; /* small blocks of the GPU */
};

struct arena {
	int fd;
	bool made;
	uint64_t end; /* next fresh offset */
	struct window high, low;
	struct mem_block *small[2]; /* high, low */
};

pthread_mutex_t mem_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct arena arenas[SIM_MAX_GPUS];
static struct mem_range *tree;
static uint64_t next_id = 1;

void mem_lock(void)
{
	pthread_mutex_lock(&mem_mutex);
}

void mem_unlock(void)
{
	pthread_mutex_unlock(&mem_mutex);
}

/* --- the tree: a treap by address --------------------------------------------------------------- */

static uint32_t random32(void)
{
	static uint64_t s = 88172645463325252ull;
	s ^= s << 13;
	s ^= s >> 7;
	s ^= s << 17;
	return (uint32_t)s;
}

static void tree_split(struct mem_range *t, uint64_t key, struct mem_range **l, struct mem_range **r)
{
	if (!t) {
		*l = *r = NULL;
	} else if (t->base < key) {
		*l = t;
		tree_split(t->right, key, &t->right, r);
	} else {
		*r = t;
		tree_split(t->left, key, l, &t->left);
	}
}

static struct mem_range *tree_merge(struct mem_range *l, struct mem_range *r)
{
	if (!l || !r)
		return l ? l : r;
	if (l->prio > r->prio) {
		l->right = tree_merge(l->right, r);
		return l;
	}
	r->left = tree_merge(l, r->left);
	return r;
}

struct mem_range *mem_range_new(uint64_t base, uint64_t size, enum mem_kind kind, int gpu,
				struct CUctx_st *ctx)
{
	struct mem_range *r = calloc(1, sizeof *r), *left, *right;
	if (!r)
		return NULL;
	*r = (struct mem_range){ .base = base, .size = size, .kind = kind, .gpu = gpu, .ctx = ctx,
				 .prio = random32(), .id = next_id++ };
	tree_split(tree, base, &left, &right);
	tree = tree_merge(tree_merge(left, r), right);
	return r;
}

void mem_range_delete(struct mem_range *r)
{
	struct mem_range **at = &tree;
	while (*at && *at != r)
		at = r->base < (*at)->base ? &(*at)->left : &(*at)->right;
	if (*at)
		*at = tree_merge(r->left, r->right);
	free(r);
}

struct mem_range *mem_find(uint64_t address)
{
	struct mem_range *best = NULL;
	for (struct mem_range *t = tree; t;) {
		if (t->base <= address) {
			best = t;
			t = t->right;
		} else {
			t = t->left;
		}
	}
	return best && address - best->base < best->size ? best : NULL;
}

struct mem_range *mem_find_exact(uint64_t base)
{
	struct mem_range *r = mem_find(base);
	return r && r->base == base ? r : NULL;
}

struct mem_range *mem_next(uint64_t address)
{
	struct mem_range *best = NULL;
	for (struct mem_range *t = tree; t;) {
		if (t->base >= address) {
			best = t;
			t = t->left;
		} else {
			t = t->right;
		}
	}
	return best;
}

/* --- arena -------------------------------------------------------------------------------------- */

static bool window_map(struct window *w, int fd, uint64_t offset, uint64_t bytes, int flags)
{
	/* Some more than asked, to begin on a block boundary. */
	uint8_t *p = mmap(NULL, bytes + MEM_BLOCK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags,
			  -1, 0);
	if (p == MAP_FAILED)
		return false;
	uint8_t *start = p + (MEM_BLOCK - (uintptr_t)p % MEM_BLOCK) % MEM_BLOCK;
	if (mmap(start, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd,
		 (off_t)offset) == MAP_FAILED)
		return false;
	madvise(start, bytes, MADV_DONTDUMP);
	w->base = (uint64_t)(uintptr_t)start;
	w->offset = offset;
	w->blocks = bytes / MEM_BLOCK;
	w->taken = calloc((w->blocks + 63) / 64, 8);
	return w->taken != NULL;
}

static struct arena *arena_of(int gpu)
{
	struct arena *a = &arenas[gpu];
	if (a->made)
		return a;
	/* Four times what can be in use, so that holes between allocations never matter. */
	uint64_t bytes = MEM_ROUND(sim_shared->gpu[gpu].capacity, MEM_BLOCK) * 4 + (1ull << 30);
	a->fd = sim_memfd("simgpu");
	if (a->fd < 0 || ftruncate(a->fd, (off_t)1 << 46) || !window_map(&a->high, a->fd, 0, bytes, 0)) {
		if (a->fd >= 0)
			close(a->fd);
		return NULL;
	}
	a->end = bytes + LOW_WINDOW;
	a->made = true;
	return a;
}

int mem_arena_fd(int gpu)
{
	struct arena *a = arena_of(gpu);
	return a ? a->fd : -1;
}

uint64_t mem_arena_fresh(int gpu, uint64_t bytes)
{
	struct arena *a = arena_of(gpu);
	uint64_t at = a->end;
	a->end += bytes;
	return at;
}

void mem_punch(int fd, uint64_t offset, uint64_t bytes)
{
	fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes);
}

bool mem_charge(int gpu, uint64_t bytes)
{
	return sim_mem_charge(gpu, bytes) || (pool_trim_all(gpu) && sim_mem_charge(gpu, bytes));
}

/* --- blocks ------------------------------------------------------------------------------------- */

static bool bit(const uint64_t *map, uint64_t i)
{
	return map[i / 64] >> (i % 64) & 1;
}

static void set_bits(uint64_t *map, uint64_t first, uint64_t count, bool on)
{
	for (uint64_t i = first; i < first + count; i++) {
		if (i % 64 == 0 && i + 64 <= first + count) {
			map[i / 64] = on ? UINT64_MAX : 0;
			i += 63;
		} else if (on) {
			map[i / 64] |= 1ull << (i % 64);
		} else {
			map[i / 64] &= ~(1ull << (i % 64));
		}
	}
}

/* First run of count clear bits in [from, to); to if there is none. */
static uint64_t find_run(const uint64_t *map, uint64_t from, uint64_t to, uint64_t count)
{
	uint64_t run = 0;
	for (uint64_t i = from; i < to;) {
		if (i % 64 == 0 && map[i / 64] == UINT64_MAX) {
			run = 0;
			i += 64;
			continue;
		}
		if (i % 64 == 0 && !map[i / 64] && run + 64 <= count && i + 64 <= to) {
			run += 64;
			i += 64;
		} else {
			run = bit(map, i) ? 0 : run + 1;
			i++;
		}
		if (run == count)
			return i - count;
	}
	return to;
}

static struct mem_block *block_take(int gpu, uint64_t bytes, bool low)
{
	struct arena *a = arena_of(gpu);
	if (!a)
		return NULL;
	struct window *w = low ? &a->low : &a->high;
	if (low && !w->base && !window_map(w, a->fd, a->high.blocks * MEM_BLOCK, LOW_WINDOW, MAP_32BIT))
		return NULL;
	uint64_t n = bytes / MEM_BLOCK;
	uint64_t at = n <= w->blocks ? find_run(w->taken, w->next, w->blocks, n) : w->blocks;
	if (at == w->blocks && n <= w->blocks)
		at = find_run(w->taken, 0, w->blocks, n);
	struct mem_block *b = at < w->blocks ? calloc(1, sizeof *b) : NULL;
	if (!b)
		return NULL;
	*b = (struct mem_block){ .gpu = gpu, .window = w, .first = at, .count = n, .object = -1 };
	set_bits(w->taken, at, n, true);
	w->next = at + n < w->blocks ? at + n : 0;
	return b;
}

static uint64_t block_offset(const struct mem_block *b)
{
	return b->window->offset + b->first * MEM_BLOCK;
}

uint64_t mem_block_base(const struct mem_block *b)
{
	return b->window->base + b->first * MEM_BLOCK;
}

uint64_t mem_block_bytes(const struct mem_block *b)
{
	return b->count * MEM_BLOCK;
}

struct mem_block *mem_block_address(int gpu, uint64_t bytes)
{
	return block_take(gpu, bytes, false);
}

bool mem_block_back(struct mem_block *b)
{
	if (!b->backed)
		b->backed = mem_charge(b->gpu, mem_block_bytes(b));
	return b->backed;
}

/* What others hold stays, addresses included: they name it by its place. */
static bool block_let_go(struct mem_block *b)
{
	if (!b->backed)
		return true;
	bool held = b->object >= 0 && sim_object_drop(b->object);
	if (b->object < 0)
		sim_mem_uncharge(b->gpu, mem_block_bytes(b));
	b->backed = false;
	b->object = -1;
	if (!held)
		mem_punch(arenas[b->gpu].fd, block_offset(b), mem_block_bytes(b));
	return !held;
}

void mem_block_punch(struct mem_block *b)
{
	mem_punch(arenas[b->gpu].fd, block_offset(b), mem_block_bytes(b));
}

void mem_block_unback(struct mem_block *b)
{
	block_let_go(b);
}

struct mem_block *mem_block_new(int gpu, uint64_t bytes, bool low)
{
	struct mem_block *b = block_take(gpu, bytes, low);
	if (b && !mem_block_back(b)) {
		mem_block_free(b);
		return NULL;
	}
	return b;
}

void mem_block_free(struct mem_block *b)
{
	if (block_let_go(b))
		set_bits(b->window->taken, b->first, b->count, false);
	free(b->used);
	free(b);
}

int mem_block_object(struct mem_block *b)
{
	if (b->object < 0)
		b->object = sim_object_new(MEM_PLAIN, b->gpu, arenas[b->gpu].fd, block_offset(b),
					   mem_block_bytes(b));
	return b->object;
}

/* --- small allocations -------------------------------------------------------------------------- */

static struct mem_block *small_block(int gpu, bool low)
{
	struct mem_block *b = mem_block_new(gpu, MEM_BLOCK, low);
	if (!b)
		return NULL;
	b->used = calloc(GRANULES / 64, 8);
	if (!b->used) {
		mem_block_free(b);
		return NULL;
	}
	b->small = true;
	b->free_granules = GRANULES;
	struct mem_block **head = &arenas[gpu].small[low];
	b->next = *head;
	if (*head)
		(*head)->prev = b;
	*head = b;
	return b;
}

static struct mem_block *small_take(int gpu, uint64_t granules, bool low, uint64_t *at)
{
	for (struct mem_block *b = arenas[gpu].small[low]; b; b = b->next) {
		if (b->free_granules < granules)
			continue;
		*at = find_run(b->used, 0, GRANULES, granules);
		if (*at < GRANULES)
			return b;
	}
	*at = 0;
	return small_block(gpu, low);
}

static void small_give(struct mem_block *b, uint64_t at, uint64_t granules)
{
	set_bits(b->used, at, granules, false);
	b->free_granules += (uint32_t)granules;
	if (b->free_granules < GRANULES)
		return;
	struct arena *a = &arenas[b->gpu];
	if (b->prev)
		b->prev->next = b->next;
	else
		a->small[b->window == &a->low] = b->next;
	if (b->next)
		b->next->prev = b->prev;
	mem_block_free(b);
}

CUresult mem_alloc(struct CUctx_st *ctx, enum mem_kind kind, uint64_t bytes, bool low,
		   struct mem_range **out)
{
	struct mem_block *b;
	uint64_t base, at = 0, granules = MEM_ROUND(bytes, MEM_GRANULE) / MEM_GRANULE;
	bool small = bytes <= MEM_SMALL;
	if (bytes > sim_ctx_gpu(ctx)->capacity || !arena_of(ctx->gpu))
		return CUDA_ERROR_OUT_OF_MEMORY;
	b = small ? small_take(ctx->gpu, granules, low, &at) :
		    mem_block_new(ctx->gpu, MEM_ROUND(bytes, MEM_BLOCK), low);
	if (!b)
		return CUDA_ERROR_OUT_OF_MEMORY;
	base = mem_block_base(b) + at * MEM_GRANULE;
	struct mem_range *r = mem_range_new(base, bytes, kind, ctx->gpu, ctx);
	if (small) {
		set_bits(b->used, at, granules, true);
		b->free_granules -= (uint32_t)granules;
	}
	if (!r) {
		if (small)
			small_give(b, at, granules);
		else
			mem_block_free(b);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	r->block = b;
	*out = r;
	return CUDA_SUCCESS;
}

void mem_free(struct mem_range *r)
{
	struct mem_block *b = r->block;
	uint64_t at = (r->base - mem_block_base(b)) / MEM_GRANULE;
	uint64_t granules = MEM_ROUND(r->size, MEM_GRANULE) / MEM_GRANULE;
	mem_range_delete(r);
	if (b->small)
		small_give(b, at, granules);
	else
		mem_block_free(b);
}
