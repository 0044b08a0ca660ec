/* 2: events around a kernel also count the time in which others had the GPU. */
#include "calibrate.h"

static double kernel_us;

static void around(struct together *t, unsigned number)
{
	CUstream s = stream_new();
	CUevent a = event_new(true), b = event_new(true);
	unsigned n = (unsigned)(200 * config->scale) + 10;

	(void)number;
	sleep_until_ns(now_ns() + 20 * MS);
	for (unsigned i = 0; i < n; i++) {
		MUST(cuEventRecord(a, s));
		spin(s, (uint64_t)(kernel_us * 1e3));
		MUST(cuEventRecord(b, s));
		MUST(cuStreamSynchronize(s));
		t->value[t->n++] = elapsed_us(a, b) / kernel_us;
	}
}

static void one_kernel(struct together *t, double us)
{
	kernel_us = us;
	for (unsigned contexts = 1; contexts <= 3; contexts++) {
		if (!run_together(t, contexts, around, saturate))
			continue;
		json_open(NULL, '{');
		json_number("kernel_us", us);
		json_number("contexts", contexts);
		json_number("mean", mean(t->value, t->n));
		json_number("median", quantile(t->value, t->n, 0.5));
		json_number("p90", quantile(t->value, t->n, 0.9));
		json_close('}');
	}
}

void item_inflation(void)
{
	struct together *t = together_new();

	json_open("inflation", '[');
	one_kernel(t, 200);
	one_kernel(t, 8000);
	json_close(']');
}
