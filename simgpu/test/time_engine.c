/* The engine in virtual time: how contexts share it, what events see, what is left after deaths. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "engine.h"

#define US 1000ull
#define MS 1000000ull
#define SEC 1000000000ull

static int failures;
#define CHECK(cond, ...)                                                                           \
	do {                                                                                       \
		if (!(cond)) {                                                                     \
			printf("%s:%d: %s: ", __FILE__, __LINE__, #cond);                          \
			printf(__VA_ARGS__);                                                       \
			printf("\n");                                                              \
			failures++;                                                                \
		}                                                                                  \
	} while (0)

static struct sim_engine *e;
static uint64_t now;

static void fresh(uint64_t slice_ns, uint64_t switch_ns)
{
	static struct sim_engine *old;
	struct sim_engine_conf conf = { .slice_ns = slice_ns, .switch_ns = switch_ns };
	if (old)
		munmap(old, sizeof *old);
	old = e = mmap(NULL, sizeof *e, PROT_READ | PROT_WRITE,
		       MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	now = 1000 * SEC;
	sim_engine_init(e, &conf, now);
}

static uint32_t ctx(uint32_t proc)
{
	return sim_engine_ctx_open(e, proc, 1000 + proc, now);
}

static bool kernel(uint32_t c, uint32_t s, uint64_t ns, uint32_t occ, struct sim_ticket *t)
{
	struct sim_op_desc d = { .kind = SIM_OP_KERNEL, .dur_ns = ns, .occ = occ };
	return sim_engine_push(e, c, s, &d, now, NULL, t);
}

static uint32_t mark(uint32_t c, uint32_t s)
{
	uint32_t cell = sim_engine_cell_open(e, c);
	struct sim_op_desc d = { .kind = SIM_OP_MARK, .cell = cell, .rec = sim_engine_next_rec(e, c) };
	CHECK(sim_engine_push(e, c, s, &d, now, NULL, NULL), "no room for a mark");
	return cell;
}

static uint64_t stamp(uint32_t c, uint32_t cell)
{
	return e->ctx[c].cell[cell].done ? e->ctx[c].cell[cell].ts_ns : 0;
}

/* Keeps n contexts busy with kernels of dur[i] until `end`. */
static void feed(const uint32_t *c, const uint64_t *dur, int n, uint64_t end)
{
	while (now < end) {
		for (int i = 0; i < n; i++)
			while (e->ctx[c[i]].kernels < 64)
				kernel(c[i], 0, dur[i], SIM_ENGINE_OCC_FULL, NULL);
		uint64_t least = dur[0];
		for (int i = 1; i < n; i++)
			least = dur[i] < least ? dur[i] : least;
		now += 30 * least < end - now ? 30 * least : end - now;
		sim_engine_advance(e, now);
	}
}

static double share(uint32_t proc, uint64_t ns)
{
	return 100.0 * (double)e->proc[proc].busy_ns / (double)ns;
}

/* Two that want everything: 1024 of each 1104 us, in halves; the rest goes to switches. */
static void test_pair(uint64_t a, uint64_t b)
{
	fresh(1024 * US, 80 * US);
	uint32_t c[] = { ctx(1), ctx(2) };
	uint64_t dur[] = { a, b }, start = now;
	feed(c, dur, 2, start + 10 * SEC);
	double s1 = share(1, now - start), s2 = share(2, now - start);
	double lost = 100.0 * (double)e->switch_ns / (double)(now - start);
	printf("pair of %6llu and %6llu us: %.1f / %.1f %%, lost %.1f %%\n", (unsigned long long)(a / US),
	       (unsigned long long)(b / US), s1, s2, lost);
	CHECK(s1 > 46 && s1 < 46.8 && s2 > 46 && s2 < 46.8, "%f %f", s1, s2);
	CHECK(lost > 7 && lost < 8, "%f", lost);
	CHECK(e->busy_ns == e->proc[1].busy_ns + e->proc[2].busy_ns, "parts make the whole");
}

static void test_alone(void)
{
	fresh(1024 * US, 80 * US);
	uint32_t c = ctx(1);
	uint64_t dur = 300 * US, start = now;
	feed(&c, &dur, 1, start + SEC);
	CHECK(share(1, now - start) > 99.99 && e->switch_ns == 0, "alone: no switches");
}

/* An event pair around a kernel spans what others ran in between. */
static void test_inflation(void)
{
	fresh(1024 * US, 80 * US);
	uint32_t c[] = { ctx(1), ctx(2) };
	uint32_t a = mark(c[0], 0);
	struct sim_ticket t;
	kernel(c[0], 0, 8 * MS, SIM_ENGINE_OCC_FULL, &t);
	uint32_t b = mark(c[0], 0);
	kernel(c[1], 0, 100 * MS, SIM_ENGINE_OCC_FULL, NULL);
	now += 40 * MS;
	sim_engine_advance(e, now);
	uint64_t wall = stamp(c[0], b) - stamp(c[0], a);
	CHECK(sim_engine_passed(e, &t), "done");
	CHECK(e->proc[1].busy_ns == 8 * MS, "exactly its own time");
	/* 8 ms are 7.8 slices: seven times the other has a slice, with two switches each */
	CHECK(wall == 8 * MS + 7 * (1024 + 160) * US, "%llu", (unsigned long long)wall);
}

/* One context idle: skipped; one that comes back waits for the end of the running slice only. */
static void test_turns(void)
{
	fresh(1000 * US, 100 * US);
	uint32_t c[] = { ctx(1), ctx(2), ctx(3) };
	kernel(c[0], 0, 10 * MS, SIM_ENGINE_OCC_FULL, NULL);
	now += 2500 * US; /* in the middle of its third slice */
	kernel(c[2], 0, 100 * US, SIM_ENGINE_OCC_FULL, NULL);
	uint32_t m = mark(c[2], 0);
	now += 1000 * US;
	sim_engine_advance(e, now);
	CHECK(stamp(c[2], m) == 1000 * SEC + 3000 * US + 100 * US + 100 * US, "%llu",
	      (unsigned long long)(stamp(c[2], m) - 1000 * SEC));
	now += 20 * MS;
	sim_engine_advance(e, now);
	CHECK(e->switch_ns == 200 * US, "there and back: %llu", (unsigned long long)e->switch_ns);
	CHECK(e->proc[2].busy_ns == 0 && e->proc[3].busy_ns == 100 * US, "skipped");
}

static uint64_t makespan(uint32_t occ1, uint32_t occ2)
{
	fresh(1024 * US, 80 * US);
	uint32_t c = ctx(1);
	uint32_t s1 = sim_engine_stream_open(e, c, SIM_STREAM_NON_BLOCKING);
	uint32_t s2 = sim_engine_stream_open(e, c, SIM_STREAM_NON_BLOCKING);
	uint64_t start = now;
	kernel(c, s1, 10 * MS, occ1, NULL);
	kernel(c, s2, 10 * MS, occ2, NULL);
	uint32_t m1 = mark(c, s1), m2 = mark(c, s2);
	now += SEC;
	sim_engine_advance(e, now);
	uint64_t end = stamp(c, m1) > stamp(c, m2) ? stamp(c, m1) : stamp(c, m2);
	CHECK(e->proc[1].busy_ns == end - start, "busy is the union of the streams");
	return end - start;
}

static void test_occupancy(void)
{
	uint64_t half = makespan(500000, 500000), full = makespan(1000000, 1000000);
	uint64_t mixed = makespan(500000, 1000000);
	CHECK(half == 10 * MS, "two halves fit: %llu", (unsigned long long)half);
	CHECK(full >= 20 * MS && full < 20 * MS + 10, "two whole ones share: %llu", (unsigned long long)full);
	CHECK(mixed >= 15 * MS && mixed < 15 * MS + 10, "%llu", (unsigned long long)mixed);
}

/* The legacy stream waits for blocking streams and they for it; a non-blocking one for nobody. */
static void test_legacy(void)
{
	fresh(1024 * US, 80 * US);
	uint32_t c = ctx(1), b = sim_engine_stream_open(e, c, 0);
	uint32_t n = sim_engine_stream_open(e, c, SIM_STREAM_NON_BLOCKING);
	uint64_t t0 = now;
	kernel(c, b, MS, 1000, NULL);
	kernel(c, 0, MS, 1000, NULL);
	kernel(c, b, MS, 1000, NULL);
	kernel(c, n, MS, 1000, NULL);
	uint32_t m0 = mark(c, 0), mb = mark(c, b), mn = mark(c, n);
	now += 100 * MS;
	sim_engine_advance(e, now);
	CHECK(stamp(c, mn) == t0 + MS, "%llu", (unsigned long long)(stamp(c, mn) - t0));
	CHECK(stamp(c, mb) == t0 + 3 * MS, "%llu", (unsigned long long)(stamp(c, mb) - t0));
	/* the mark on the legacy stream came after the second kernel on b */
	CHECK(stamp(c, m0) == t0 + 3 * MS, "%llu", (unsigned long long)(stamp(c, m0) - t0));
}

static void test_wait(void)
{
	fresh(1024 * US, 80 * US);
	uint32_t c1 = ctx(1), c2 = ctx(1);
	struct sim_ticket t;
	kernel(c1, 0, 5 * MS, SIM_ENGINE_OCC_FULL, &t);
	struct sim_op_desc w = { .kind = SIM_OP_WAIT, .wait = t };
	sim_engine_push(e, c2, 0, &w, now, NULL, NULL);
	kernel(c2, 0, MS, SIM_ENGINE_OCC_FULL, NULL);
	uint32_t m = mark(c2, 0);
	uint64_t t0 = now;
	now += 100 * MS;
	sim_engine_advance(e, now);
	CHECK(stamp(c2, m) == t0 + 6 * MS + 80 * US, "%llu", (unsigned long long)(stamp(c2, m) - t0));
}

static void test_copy(void)
{
	fresh(1024 * US, 80 * US);
	uint32_t c = ctx(1), s1 = sim_engine_stream_open(e, c, SIM_STREAM_NON_BLOCKING);
	uint32_t s2 = sim_engine_stream_open(e, c, SIM_STREAM_NON_BLOCKING);
	struct sim_op_desc d = { .kind = SIM_OP_COPY, .dur_ns = MS, .copy_engine = SIM_COPY_H2D };
	uint64_t t0 = now;
	sim_engine_push(e, c, s1, &d, now, NULL, NULL);
	sim_engine_push(e, c, s2, &d, now, NULL, NULL);
	kernel(c, s1, MS, 1000, NULL);
	uint32_t m1 = mark(c, s1), m2 = mark(c, s2);
	now += 10 * MS;
	sim_engine_advance(e, now);
	CHECK(stamp(c, m1) == t0 + 2 * MS && stamp(c, m2) == t0 + 2 * MS, "one engine, one copy at a time");
	CHECK(e->proc[1].busy_ns == MS, "copies are not compute");
}

static void test_depth(void)
{
	fresh(1024 * US, 80 * US);
	uint32_t c = ctx(1);
	int n = 0;
	while (n < 5000 && kernel(c, 0, MS, 1000, NULL))
		n++;
	CHECK(n == SIM_ENGINE_DEPTH, "%d", n);
	now += MS;
	CHECK(kernel(c, 0, MS, 1000, NULL) && !kernel(c, 0, MS, 1000, NULL), "one done, one more fits");
}

static void test_release(void)
{
	fresh(1024 * US, 80 * US);
	uint32_t c = ctx(1), op;
	struct sim_op_desc d = { .kind = SIM_OP_SPIN, .occ = 1000 };
	struct sim_ticket t;
	kernel(c, 0, MS, 1000, NULL);
	sim_engine_push(e, c, 0, &d, now, &op, &t);
	uint64_t id = e->ctx[c].op[op].id;
	CHECK(!sim_engine_reached(e, c, op, id), "behind a kernel");
	now += 10 * MS;
	sim_engine_advance(e, now);
	CHECK(sim_engine_reached(e, c, op, id) && !sim_engine_passed(e, &t), "spins");
	sim_engine_release(e, c, op, id, now);
	now += MS;
	sim_engine_advance(e, now);
	CHECK(sim_engine_passed(e, &t) && e->proc[1].busy_ns == 10 * MS + 1, "%llu",
	      (unsigned long long)e->proc[1].busy_ns);
}

static void test_drop(void)
{
	fresh(1024 * US, 80 * US);
	uint32_t c1 = ctx(1), c2 = ctx(2);
	for (int i = 0; i < 500; i++)
		kernel(c1, 0, 10 * MS, SIM_ENGINE_OCC_FULL, NULL);
	struct sim_ticket t;
	kernel(c2, 0, 10 * MS, SIM_ENGINE_OCC_FULL, &t);
	now += 5 * MS;
	sim_engine_drop_proc(e, 1, now, false);
	uint64_t had = e->proc[2].busy_ns;
	now += 10 * MS - had + 80 * US; /* whoever was loaded, one switch at most */
	sim_engine_advance(e, now);
	CHECK(sim_engine_passed(e, &t), "the other has the engine to itself");
	CHECK(e->proc[1].busy_ns > 0 && e->proc[1].contexts == 0, "its past is kept");
	CHECK(sim_engine_ctx_idle(e, c1) && sim_engine_ctx_idle(e, c2), "nothing is left");
}

static void test_samples(void)
{
	fresh(1024 * US, 80 * US);
	uint32_t c = ctx(7);
	for (int i = 0; i < 100; i++) { /* 3 ms of each 10 */
		kernel(c, 0, 3 * MS, SIM_ENGINE_OCC_FULL, NULL);
		now += 10 * MS;
		sim_engine_advance(e, now);
	}
	CHECK(e->sample_count >= 5 && e->sample_count <= 6, "%llu", (unsigned long long)e->sample_count);
	for (uint64_t i = 0; i < e->sample_count; i++)
		CHECK(e->sample[i].proc == 7 && e->sample[i].pid == 1007 && e->sample[i].percent >= 28 &&
		      e->sample[i].percent <= 32, "%u", e->sample[i].percent);
	uint64_t n = e->sample_count;
	now += 24 * 3600 * SEC; /* a day in which nobody looked */
	sim_engine_advance(e, now);
	CHECK(e->sample_count <= n + 1, "idle: no samples of the process");
	CHECK(e->gpu_sample[(e->gpu_sample_count - 1) % SIM_ENGINE_GPU_SAMPLES].percent == 0 &&
	      now - e->gpu_sample[(e->gpu_sample_count - 1) % SIM_ENGINE_GPU_SAMPLES].end_ns <=
		      SIM_ENGINE_SAMPLE_NS, "the GPU's samples go on");
}

static void test_many(void)
{
	fresh(1024 * US, 80 * US);
	uint32_t c[16];
	uint64_t dur[16], start = now;
	for (uint32_t i = 0; i < 16; i++) {
		c[i] = ctx(i);
		dur[i] = (50 + 37 * i) * US;
	}
	feed(c, dur, 16, start + 5 * SEC);
	for (uint32_t i = 0; i < 16; i++)
		CHECK(share(i, now - start) > 5.6 && share(i, now - start) < 6.0, "%u: %f", i,
		      share(i, now - start));
}

/* --- deaths at any instruction -------------------------------------------------------------------- */

static pthread_mutex_t *gate;

static void gate_lock(void)
{
	if (pthread_mutex_lock(gate) == EOWNERDEAD) {
		sim_engine_repair(e);
		pthread_mutex_consistent(gate);
	}
}

/* Random use until killed. */
static void wild(uint32_t proc, unsigned seed)
{
	gate_lock();
	uint32_t c = sim_engine_ctx_open(e, proc, (uint32_t)getpid(), now);
	uint32_t s[4] = { 0 };
	for (int i = 1; i < 4; i++)
		s[i] = sim_engine_stream_open(e, c, i & 1);
	pthread_mutex_unlock(gate);
	for (uint64_t t = now;; t += 20 * US) {
		gate_lock();
		uint64_t at = e->t_ns > t ? e->t_ns + 10 * US : t;
		struct sim_op_desc d = { .kind = SIM_OP_KERNEL, .dur_ns = (uint64_t)(rand_r(&seed) % 50) * US,
					 .occ = (uint32_t)rand_r(&seed) % 1000000 };
		if (rand_r(&seed) % 3 == 0)
			d.kind = SIM_OP_COPY;
		sim_engine_push(e, c, s[rand_r(&seed) % 4], &d, at, NULL, NULL);
		pthread_mutex_unlock(gate);
	}
}

static void check_links(uint32_t c)
{
	const struct sim_ctx_q *q = &e->ctx[c];
	uint32_t queued = 0, kernels = 0, unused = 0;
	for (uint32_t s = 0; s < q->stream_top; s++)
		for (uint32_t i = q->stream[s].head; i < SIM_ENGINE_OPS; i = q->op[i].next) {
			queued++;
			kernels += q->op[i].kind == SIM_OP_KERNEL || q->op[i].kind == SIM_OP_SPIN;
			if (queued > SIM_ENGINE_OPS)
				break;
		}
	for (uint32_t i = q->op_free; i < SIM_ENGINE_OPS && unused <= SIM_ENGINE_OPS; i = q->op[i].next)
		unused++;
	CHECK(queued == q->ops && kernels == q->kernels, "%u %u, %u %u", queued, q->ops, kernels, q->kernels);
	CHECK(queued + unused == q->op_top, "%u + %u, %u", queued, unused, q->op_top);
}

static void test_deaths(void)
{
	pthread_mutexattr_t a;
	int torn = 0;
	fresh(100 * US, 8 * US);
	gate = mmap(NULL, sizeof *gate, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pthread_mutexattr_init(&a);
	pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
	pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
	pthread_mutex_init(gate, &a);
	uint32_t mine = ctx(0), stream = sim_engine_stream_open(e, mine, 0);
	uint64_t pushed = 0;
	for (int round = 0; round < 60; round++) {
		pid_t kid[2];
		for (uint32_t i = 0; i < 2; i++) {
			kid[i] = fork();
			if (!kid[i])
				wild(1 + i, (unsigned)(round * 2 + (int)i));
		}
		for (int i = 0; i < 20; i++) {
			usleep(100);
			gate_lock();
			now = e->t_ns;
			pushed += kernel(mine, stream, 5 * US, SIM_ENGINE_OCC_FULL, NULL);
			pthread_mutex_unlock(gate);
		}
		for (int i = 0; i < 2; i++) {
			kill(kid[i], SIGKILL);
			waitpid(kid[i], NULL, 0);
		}
		int r = pthread_mutex_lock(gate);
		if (r == EOWNERDEAD) {
			torn++;
			sim_engine_repair(e);
			pthread_mutex_consistent(gate);
		}
		check_links(mine);
		sim_engine_drop_proc(e, 1, e->t_ns, true);
		sim_engine_drop_proc(e, 2, e->t_ns, true);
		pthread_mutex_unlock(gate);
	}
	now = e->t_ns + SEC;
	sim_engine_advance(e, now);
	CHECK(sim_engine_ctx_idle(e, mine), "the survivor's queue runs dry");
	CHECK(e->ctx[mine].stream[stream].done_seq == pushed, "%llu of %llu",
	      (unsigned long long)e->ctx[mine].stream[stream].done_seq, (unsigned long long)pushed);
	printf("60 rounds of kill -9: lock left held in %d, survivor's %llu kernels all done\n", torn,
	       (unsigned long long)pushed);
}

int main(void)
{
	test_pair(200 * US, 200 * US);
	test_pair(20 * US, 5 * MS);
	test_pair(60 * MS, 100 * US);
	test_alone();
	test_inflation();
	test_turns();
	test_occupancy();
	test_legacy();
	test_wait();
	test_copy();
	test_depth();
	test_release();
	test_drop();
	test_samples();
	test_many();
	test_deaths();
	printf(failures ? "FAIL: %d\n" : "ok engine\n", failures);
	return failures != 0;
}
