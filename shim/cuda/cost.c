/* Estimates: GPU time of one launch, by tag. Readers take no lock; writers hold the meter's. */
#include "compat.h"
#include "meter.h"

struct tr_cost tr_costs[TR_COST_BUCKETS][TR_COST_WAYS] __attribute__((aligned(64)));

struct tr_cost *tr_cost_get(uint64_t tag)
{
	static unsigned next;
	struct tr_cost *b = tr_costs[tag >> 54], *c = NULL;
	for (int i = 0; i < TR_COST_WAYS; i++) {
		if (b[i].tag == tag)
			return &b[i];
		if (c == NULL && b[i].tag == 0)
			c = &b[i];
	}
	if (c == NULL)
		c = &b[next++ % TR_COST_WAYS];
	/* A reader that still sees the old tag may pair it with the new est, 0: unknown. */
	__atomic_store_n(&c->est, 0, __ATOMIC_RELAXED);
	__atomic_store_n(&c->tag, tag, __ATOMIC_RELEASE);
	return c;
}

static void set(struct tr_cost *c, int64_t est)
{
	__atomic_store_n(&c->est, est < 1 ? 1 : est, __ATOMIC_RELAXED);
}

/* Exponentially weighted means. A quarter for one launch measured by itself; less for one of
 * many in a batch, whose sum is known and whose parts are guessed. */
void tr_cost_learn(struct tr_cost *c, uint64_t tag, int64_t measured_ns)
{
	if (c->tag != tag)
		return;
	set(c, c->est == 0 ? measured_ns : c->est + (measured_ns - c->est) / 4);
}

void tr_cost_scale(struct tr_cost *c, uint64_t tag, int64_t est, int64_t ratio)
{
	if (c->tag != tag || c->est == 0)
		return;
	if (ratio > 8 * 1024)
		ratio = 8 * 1024;
	/* The sum of steps of an eighth can miss the last few ns by rounding; that does not matter. */
	set(c, c->est + (est * ratio / 1024 - c->est) / 8);
}

void tr_cost_forget(uint64_t tag)
{
	struct tr_cost *b = tr_costs[tag >> 54];
	for (int i = 0; i < TR_COST_WAYS; i++)
		if (b[i].tag == tag)
			__atomic_store_n(&b[i].est, 0, __ATOMIC_RELAXED);
}
