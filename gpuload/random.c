#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include "alloc.h"
#include "random.h"

#define LIVE_MAX 256

struct random {
	uint64_t state;
	struct allocation live[LIVE_MAX];
	unsigned n;
	uint64_t bytes;
	unsigned long long done[FAMILY_COUNT], refused;
	bool missing[FAMILY_COUNT];
};

/* xorshift64*: enough for a load, the same on every box for the same seed. */
static uint64_t next(struct random *r)
{
	r->state ^= r->state >> 12;
	r->state ^= r->state << 25;
	r->state ^= r->state >> 27;
	return r->state * 2685821657736338717ull;
}

static void free_one(struct random *r)
{
	unsigned i = (unsigned)(next(r) % r->n);

	r->bytes -= r->live[i].bytes;
	alloc_free(&r->live[i]);
	r->live[i] = r->live[--r->n];
}

/* Sizes from 4 KiB to a quarter of `max`, each power of two as likely as the next. */
static uint64_t random_size(struct random *r, uint64_t max)
{
	unsigned span = 1;
	uint64_t base;

	while (span < 40 && (4096ull << span) < max / 4)
		span++;
	base = 4096ull << (next(r) % span);
	return base + next(r) % base;
}

static void alloc_some(struct random *r, uint64_t max)
{
	enum family f = (enum family)(next(r) % FAMILY_COUNT);
	uint64_t size = random_size(r, max);
	struct allocation a;
	const char *what = "";
	CUresult result;

	if (r->missing[f] || r->bytes + size > max)
		return;
	result = alloc_one(f, size, &a, &what);
	if (result == CUDA_SUCCESS) {
		r->live[r->n++] = a;
		r->bytes += a.bytes;
		r->done[f]++;
	} else if (result == CUDA_ERROR_NOT_SUPPORTED) {
		r->missing[f] = true;
	} else if (result == CUDA_ERROR_OUT_OF_MEMORY) {
		r->refused++;
		if (r->n)
			free_one(r);
	} else {
		die("%s of %llu bytes: %s", what, (unsigned long long)size, driver_error(result));
	}
}

/* A child that uses no CUDA, like a data loader, and may outlive its parent. */
static void fork_idle(struct random *r)
{
	unsigned ms = 100 + (unsigned)(next(r) % 2000);
	pid_t pid = fork();

	if (pid < 0)
		die("fork failed");
	if (pid == 0) {
		sleep_until_ns(now_ns() + ms * 1000000ll);
		_exit(0);
	}
}

static void report(const struct random *r, unsigned proc)
{
	printf("{\"random\":%u,\"refused\":%llu", proc, r->refused);
	for (enum family f = 0; f < FAMILY_COUNT; f++)
		printf(",\"%s\":%lld", family_name[f], r->missing[f] ? -1ll : (long long)r->done[f]);
	puts("}");
	fflush(stdout);
}

void random_run(const struct options *o, unsigned proc)
{
	static struct random r;
	int64_t start = now_ns(), end = start + (int64_t)(o->random_s * 1e9);
	unsigned forks = 0;

	r.state = 0x9e3779b97f4a7c15ull * (o->seed + 1) + proc * 7919u + 1;
	for (int64_t t = start; t < end; t = now_ns()) {
		if (forks < o->random_forks &&
		    (double)(t - start) > (double)(end - start) * forks / o->random_forks) {
			fork_idle(&r);
			forks++;
		}
		if (r.n == LIVE_MAX || (r.n && next(&r) % 5 < 2))
			free_one(&r);
		else
			alloc_some(&r, o->random_max);
		sleep_until_ns(t + (int64_t)(next(&r) % 4000000));
	}
	while (r.n)
		free_one(&r);
	MUST(cuCtxSynchronize());
	report(&r, proc);
}
