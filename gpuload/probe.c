#include <stdio.h>
#include "probe.h"

CUdeviceptr probe_start(void)
{
	CUdeviceptr at;

	if (!cu.cuMemsetD8_v2 || !cu.cuMemcpyDtoH_v2)
		die("the driver copies no memory");
	MUST(cuMemAlloc_v2(&at, sizeof(struct probe)));
	MUST(cuMemsetD8_v2(at, 0, sizeof(struct probe)));
	MUST(cuCtxSynchronize());
	return at;
}

void probe_read(CUdeviceptr at, struct probe *out)
{
	MUST(cuMemcpyDtoH_v2(out, at, sizeof *out));
}

void probe_add(struct probe *p, const struct probe *other)
{
	uint64_t last = p->word[PROBE_LAST_NS];

	for (unsigned i = 0; i < PROBE_WORDS; i++)
		p->word[i] += other->word[i];
	if (last < other->word[PROBE_LAST_NS])
		last = other->word[PROBE_LAST_NS];
	p->word[PROBE_LAST_NS] = last;
}

/* Buckets from the first that is not empty to the last; they are a ring that ends where the last
 * kernel ended. Their number is that of the global timer. */
void probe_print(const struct probe *p)
{
	const uint64_t *w = p->word;
	uint64_t last = w[PROBE_LAST_NS] >> PROBE_BUCKET_BITS, first = last;

	if (!w[PROBE_KERNELS]) {
		fputs("null", stdout);
		return;
	}
	for (unsigned i = 0; i < PROBE_BUCKET_COUNT && i <= last; i++)
		if (w[PROBE_BUCKETS + (last - i) % PROBE_BUCKET_COUNT])
			first = last - i;
	printf("{\"kernels\":%llu,\"run_ns\":%llu,\"gaps\":%llu,\"gap_ns\":%llu,\"bucket_ns\":%llu,"
	       "\"first\":%llu,\"busy_ns\":[",
	       (unsigned long long)w[PROBE_KERNELS], (unsigned long long)w[PROBE_RUN_NS],
	       (unsigned long long)w[PROBE_GAPS], (unsigned long long)w[PROBE_GAP_NS],
	       1ull << PROBE_BUCKET_BITS, (unsigned long long)first);
	for (uint64_t b = first; b <= last; b++)
		printf("%s%llu", b > first ? "," : "",
		       (unsigned long long)w[PROBE_BUCKETS + b % PROBE_BUCKET_COUNT]);
	fputs("]}", stdout);
}
