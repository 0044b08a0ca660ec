/* cuMemAlloc and cuMemFree, in blocks of 1,000 pairs: with many allocations alive, and with many
 * processes in the tenant. */
#include <stdlib.h>
#include "bench.h"

#define BLOCK 1000
#define LARGE (2u << 20) /* one block of the driver's: the ledger is charged for each */
#define SMALL 4096u	 /* many share a block */

static double block_ns(const struct api *a, size_t size)
{
	uint64_t start = ticks();
	CUdeviceptr p;

	for (unsigned i = 0; i < BLOCK; i++)
		if (a->cuMemAlloc_v2(&p, size) || a->cuMemFree_v2(p))
			die("cuMemAlloc or cuMemFree failed");
	return (double)(ticks() - start) * ns_per_tick() / BLOCK;
}

static void compare(const struct pair *p, const struct setting *s, const char *name, size_t size)
{
	unsigned n = s->quick ? 60 : 500;
	double *d = malloc(n * sizeof *d), *o = malloc(n * sizeof *o);

	if (!d || !o)
		die("out of memory");
	for (unsigned i = 0; i < 5; i++) {
		block_ns(&p->direct, size);
		block_ns(&p->ours, size);
	}
	for (unsigned i = 0; i < n; i++) {
		d[i] = block_ns(&p->direct, size);
		o[i] = block_ns(&p->ours, size);
	}
	report_added(name, "ns", stats_of(d, n), stats_of(o, n), 150);
	free(d);
	free(o);
}

static void both_sizes(const struct pair *p, const struct setting *s, const char *what)
{
	char name[64];

	snprintf(name, sizeof name, "%s, 2 MiB", what);
	compare(p, s, name, LARGE);
	snprintf(name, sizeof name, "%s, 4 KiB", what);
	compare(p, s, name, SMALL);
}

/* Live allocations are of both sizes, half and half, and come through our library. */
static void live_to(const struct pair *p, unsigned from, unsigned to)
{
	CUdeviceptr ptr;

	for (unsigned i = from; i < to; i++)
		if (p->ours.cuMemAlloc_v2(&ptr, i % 2 ? LARGE : SMALL))
			die("allocation %u of %u refused", i, to);
}

void case_memory(const struct setting *s)
{
	static const struct {
		unsigned n;
		const char *name;
	} live[] = {{0, "0 live"}, {1000, "1,000 live"}, {10000, "10,000 live"},
		    {100000, "100,000 live"}};
	struct pair p;

	report_group("cuMemAlloc+cuMemFree");
	pair_open(&p, s, 0);
	report_head("cuMemAlloc + cuMemFree, one process", "ns per pair");
	for (unsigned i = 0; i < sizeof live / sizeof *live; i++) {
		live_to(&p, i ? live[i - 1].n : 0, live[i].n);
		both_sizes(&p, s, live[i].name);
	}
	pair_close(&p);
}

void case_memory_processes(const struct setting *s)
{
	struct crowd others;
	char library[4096];
	struct pair p;

	report_group("cuMemAlloc+cuMemFree");
	slice_for(s, 0, p.dir, sizeof p.dir, library, sizeof library);
	crowd_start(&others, library, 255);
	pair_open_in(&p, s, library);
	report_head("cuMemAlloc + cuMemFree, 256 processes in the tenant", "ns per pair");
	both_sizes(&p, s, "256 processes, 0 live");
	live_to(&p, 0, 1000);
	both_sizes(&p, s, "256 processes, 1,000 live");
	crowd_end(&others);
	pair_close(&p);
}
