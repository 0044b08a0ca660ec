/* 5: from a wake-up in one process to the first kernel of another one: what a change of the lease
 * costs, apart from the arbiter. */
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "calibrate.h"

enum { WOKEN, LAUNCHED, DONE, STEPS };
static const char *const step_name[STEPS] = {"woken", "launched", "kernel_done"};
static bool holder_works; /* the GPU belongs to the other process until just before */

static void wake(struct together *t)
{
	t->at = now_ns();
	__atomic_fetch_add(&t->futex, 1, __ATOMIC_RELEASE);
	syscall(SYS_futex, &t->futex, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void holder(struct together *t, unsigned number)
{
	CUstream s = stream_new();
	CUevent done = event_new(false);
	unsigned n = (unsigned)(300 * config->scale) + 20;

	(void)number;
	for (unsigned i = 0; i < n; i++) {
		if (holder_works) {
			spin(s, 500 * US);
			MUST(cuEventRecord(done, s));
			poll_event(done);
		}
		wake(t);
		sleep_until_ns(now_ns() + 2 * MS);
	}
	atomic_store(&t->stop, 1);
	wake(t);
}

static void next_holder(struct together *t, unsigned number)
{
	CUstream s = stream_new();
	CUevent done = event_new(false);
	uint32_t seen = 0;

	(void)number;
	for (;;) {
		int64_t at[STEPS], from;
		uint32_t now = __atomic_load_n(&t->futex, __ATOMIC_ACQUIRE);
		if (now == seen) {
			syscall(SYS_futex, &t->futex, FUTEX_WAIT, seen, NULL, NULL, 0);
			continue;
		}
		at[WOKEN] = now_ns();
		seen = now;
		from = t->at;
		if (atomic_load(&t->stop))
			return;
		spin(s, 1000);
		MUST(cuEventRecord(done, s));
		at[LAUNCHED] = now_ns();
		poll_event(done);
		at[DONE] = now_ns();
		for (unsigned k = 0; k < STEPS && t->n + STEPS <= MAX_VALUES; k++)
			t->value[t->n + k] = (double)(at[k] - from) / 1e3;
		t->n += STEPS;
	}
}

static void print(struct together *t, const char *name)
{
	double v[MAX_VALUES];
	unsigned n = (t->n < MAX_VALUES ? t->n : MAX_VALUES) / STEPS;

	json_open(name, '{');
	for (unsigned k = 0; k < STEPS; k++) {
		for (unsigned i = 0; i < n; i++)
			v[i] = t->value[i * STEPS + k];
		json_open(step_name[k], '{');
		json_number("median_us", quantile(v, n, 0.5));
		json_number("p99_us", quantile(v, n, 0.99));
		json_close('}');
	}
	json_close('}');
}

void item_handover(void)
{
	struct together *t = together_new();

	json_open("handover", '{');
	holder_works = false;
	if (run_together(t, 2, holder, next_holder))
		print(t, "gpu_idle");
	holder_works = true;
	if (run_together(t, 2, holder, next_holder))
		print(t, "gpu_of_the_other");
	json_close('}');
}
