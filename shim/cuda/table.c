#include "compat.h"
#include "table.h"
#include <stdlib.h>

#define FIRST_SIZE 256

/* Eight neighbouring blocks of memory get neighbouring slots, so that programs which allocate and
 * free near to where they did before stay in the cache however many allocations are alive; the
 * groups of eight are spread by a multiplication (Fibonacci hashing), so that no long run of full
 * slots builds up. Within a block (and for handles, which are small addresses apart) the low bits
 * are spread too. */
#define NEAR_BITS 21
#define SPREAD 0x9e3779b97f4a7c15ull
static size_t home(const struct tr_table *t, uint64_t key)
{
	uint64_t low = key & ((1ull << NEAR_BITS) - 1), block = key >> NEAR_BITS;
	uint64_t group = (block >> 3) * SPREAD >> 32;
	return (size_t)((group << 3) + (block & 7) + (low * SPREAD >> 32)) & t->mask;
}

static size_t find(const struct tr_table *t, uint64_t key)
{
	size_t i = home(t, key);
	while (t->slots[i].key != 0 && t->slots[i].key != key)
		i = (i + 1) & t->mask;
	return i;
}

static bool grow(struct tr_table *t)
{
	size_t size = t->mask == 0 ? FIRST_SIZE : (t->mask + 1) * 2;
	struct tr_table next = {.slots = calloc(size, sizeof *next.slots), .mask = size - 1};
	if (next.slots == NULL)
		return false;
	for (size_t i = 0; t->mask != 0 && i <= t->mask; i++)
		if (t->slots[i].key != 0)
			next.slots[find(&next, t->slots[i].key)] = t->slots[i];
	next.used = t->used;
	free(t->slots);
	*t = next;
	return true;
}

bool tr_table_put(struct tr_table *t, const struct tr_entry *e)
{
	if (t->used * 2 >= t->mask && !grow(t))
		return false;
	size_t i = find(t, e->key);
	t->used += t->slots[i].key == 0;
	t->slots[i] = *e;
	return true;
}

struct tr_entry *tr_table_get(const struct tr_table *t, uint64_t key)
{
	if (t->used == 0 || key == 0)
		return NULL;
	size_t i = find(t, key);
	return t->slots[i].key == 0 ? NULL : &t->slots[i];
}

bool tr_table_take(struct tr_table *t, uint64_t key, struct tr_entry *out)
{
	struct tr_entry *e = tr_table_get(t, key);
	if (e == NULL)
		return false;
	*out = *e;
	size_t hole = (size_t)(e - t->slots);
	for (size_t i = (hole + 1) & t->mask; t->slots[i].key != 0; i = (i + 1) & t->mask) {
		size_t h = home(t, t->slots[i].key);
		if (((i - h) & t->mask) < ((i - hole) & t->mask))
			continue; /* lies between its home and here: must stay */
		t->slots[hole] = t->slots[i];
		hole = i;
	}
	t->slots[hole].key = 0;
	t->used--;
	return true;
}

/* What a removal shifts comes from behind the place it goes to, so nothing gets past *at unseen. */
bool tr_table_take_owner(struct tr_table *t, uint64_t owner, size_t *at, struct tr_entry *out)
{
	for (; t->mask != 0 && *at <= t->mask; ++*at)
		if (t->slots[*at].key != 0 && t->slots[*at].owner == owner)
			return tr_table_take(t, t->slots[*at].key, out);
	return false;
}
