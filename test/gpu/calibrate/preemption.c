/* 6: does a long kernel let another process in before it ends? */
#include "calibrate.h"

#define LONG_MS 50

static void long_kernel(struct together *t, unsigned number)
{
	CUstream s = stream_new();
	unsigned n = (unsigned)(20 * config->scale) + 3;

	(void)number;
	for (unsigned i = 0; i < n; i++) {
		spin(s, LONG_MS * MS);
		sleep_until_ns(now_ns() + 3 * MS);
		__atomic_store_n(&t->futex, i + 1, __ATOMIC_RELEASE);
		MUST(cuStreamSynchronize(s));
		sleep_until_ns(now_ns() + 20 * MS);
	}
}

static void short_kernel(struct together *t, unsigned number)
{
	CUstream s = stream_new();
	CUevent done = event_new(false);
	uint32_t seen = 0;

	(void)number;
	while (!atomic_load(&t->stop)) {
		uint32_t now = __atomic_load_n(&t->futex, __ATOMIC_ACQUIRE);
		int64_t t0;
		if (now == seen) {
			sleep_until_ns(now_ns() + 100 * US);
			continue;
		}
		seen = now;
		t0 = now_ns();
		spin(s, 100 * US);
		MUST(cuEventRecord(done, s));
		MUST(cuEventSynchronize(done));
		t->value[t->n++] = (double)(now_ns() - t0) / 1e6;
	}
}

void item_preemption(void)
{
	struct together *t = together_new();
	double wait;

	json_open("preemption", '{');
	if (run_together(t, 2, long_kernel, short_kernel) && t->n) {
		wait = quantile(t->value, t->n, 0.5);
		json_number("long_kernel_ms", LONG_MS);
		json_number("short_kernel_took_ms", wait);
		json_number("longest_ms", quantile(t->value, t->n, 1));
		json_bool("preempted", wait < LONG_MS / 2.0);
	}
	json_close('}');
}
