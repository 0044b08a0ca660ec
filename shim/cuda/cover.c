/* Which time has been charged: the union of the busy intervals of all streams and all processes
 * of the tenant, whatever the order in which they are measured. Nobody can die holding anything.
 *
 * Ends are rounded to whole bits the same way, so adjoining intervals never share a bit, and the
 * error of an overlap is that of its two ends, without bias. A lone stream is charged to the ns. */
#include "compat.h"
#include "meter.h"

#define WORD_NS (TR_COVER_NS * TR_COVER_BITS)
#define LAP_SHIFT TR_COVER_BITS

/* Sets bits in the word of stretch w; how many were set before. */
static int set_bits(struct tr_coverage *c, int64_t w, uint64_t bits)
{
	uint64_t *word = &c->word[w % TR_COVER_WORDS];
	uint64_t lap = (uint64_t)(w / TR_COVER_WORDS) & 0xffff;
	uint64_t old = __atomic_load_n(word, __ATOMIC_RELAXED);
	for (;;) {
		int16_t ahead = (int16_t)(uint16_t)((old >> LAP_SHIFT) - lap);
		if (ahead > 0)
			return 0; /* too late: what is known there is of newer time */
		uint64_t have = ahead == 0 ? old & ((1ull << LAP_SHIFT) - 1) : 0;
		uint64_t new = lap << LAP_SHIFT | have | bits;
		if (new == old || __atomic_compare_exchange_n(word, &old, new, true,
							      __ATOMIC_RELAXED, __ATOMIC_RELAXED))
			return __builtin_popcountll(have & bits);
	}
}

int64_t tr_cover(struct tr_coverage *c, int64_t from, int64_t to)
{
	if (to <= from || from < 0)
		return 0;
	int64_t bit = from / TR_COVER_NS, end = to / TR_COVER_NS, twice = 0;
	/* Of an interval longer than the record only the newest part can be compared. */
	if (end - bit > (TR_COVER_WORDS - 1) * TR_COVER_BITS)
		bit = end - (TR_COVER_WORDS - 1) * TR_COVER_BITS;
	while (bit < end) {
		int64_t w = bit / TR_COVER_BITS, next = (w + 1) * TR_COVER_BITS;
		int lo = (int)(bit % TR_COVER_BITS);
		int n = (int)((end < next ? end : next) - bit);
		twice += set_bits(c, w, ((1ull << n) - 1) << lo);
		bit += n;
	}
	int64_t left = to - from - twice * TR_COVER_NS;
	return left < 0 ? 0 : left;
}
