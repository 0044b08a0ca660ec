#include <sched.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include "bench.h"

double now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec * 1e9 + (double)ts.tv_nsec;
}

uint64_t ticks(void)
{
#ifdef __x86_64__
	uint32_t lo, hi;

	__asm__ volatile("lfence\n\trdtsc\n\tlfence" : "=a"(lo), "=d"(hi)::"memory");
	return (uint64_t)hi << 32 | lo;
#else
	return (uint64_t)now_ns();
#endif
}

double ns_per_tick(void)
{
	static double factor;

	if (factor == 0) {
		double t = now_ns();
		uint64_t k = ticks();
		usleep(50000);
		factor = (now_ns() - t) / (double)(ticks() - k);
	}
	return factor;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

struct stats stats_of(double *x, unsigned n)
{
	struct stats s = {0};
	double sum = 0;

	qsort(x, n, sizeof *x, by_value);
	for (unsigned i = 0; i < n; i++)
		sum += x[i];
	s.min = x[0];
	s.p25 = x[n / 4];
	s.median = x[n / 2];
	s.p75 = x[n / 4 * 3];
	s.p99 = x[(unsigned)((double)(n - 1) * 0.99)];
	s.mean = sum / n;
	return s;
}

uint64_t ticks_overhead(void)
{
	enum { N = 10001 };
	static double x[N];

	for (unsigned i = 0; i < N; i++) {
		uint64_t a = ticks(), b = ticks();
		x[i] = (double)(b - a);
	}
	return (uint64_t)stats_of(x, N).median;
}

/* The last CPU that we may use: the first ones take the interrupts. */
void pin_to_cpu(void)
{
	cpu_set_t set;
	int last = -1;

	if (sched_getaffinity(0, sizeof set, &set))
		return;
	for (int i = 0; i < CPU_SETSIZE; i++)
		if (CPU_ISSET(i, &set))
			last = i;
	CPU_ZERO(&set);
	if (last >= 0) {
		CPU_SET(last, &set);
		sched_setaffinity(0, sizeof set, &set);
	}
}
