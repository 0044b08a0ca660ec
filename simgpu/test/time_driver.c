/* Streams, events, launches and several processes on one GPU. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include "time_test.h"

#define MS 1000000ull

int failures;
CUcontext ctx0;
CUfunction spin, spin_flag, other;
static char dir[64];

static const char ptx[] = ".version 6.0\n.target sm_50\n.address_size 64\n"
			  ".visible .entry tranche_spin(.param .u64 ns) { ret; }\n"
			  ".visible .entry tranche_spin_flag(.param .u64 flag) { ret; }\n"
			  ".visible .entry other(.param .u32 a, .param .u64 b) { ret; }\n";

void setup(void)
{
	CUmodule m;
	CUdevice d;
	OK(cuInit(0));
	OK(cuDeviceGet(&d, 0));
	OK(cuCtxCreate_v2(&ctx0, 0, d));
	OK(cuModuleLoadData(&m, ptx));
	OK(cuModuleGetFunction(&spin, m, "tranche_spin"));
	OK(cuModuleGetFunction(&spin_flag, m, "tranche_spin_flag"));
	OK(cuModuleGetFunction(&other, m, "other"));
}

static void launch(CUstream s, uint64_t ns, unsigned blocks)
{
	void *params[] = { &ns };
	OK(cuLaunchKernel(spin, blocks, 1, 1, 128, 1, 1, 0, s, params, NULL));
}

void launch_spin(CUstream s, uint64_t ns)
{
	launch(s, ns, 1);
}

void launch_full(CUstream s, uint64_t ns)
{
	launch(s, ns, 100000);
}

uint64_t busy_ns(int gpu, pid_t pid)
{
	struct sim_gpu *g = &sim_shared->gpu[gpu];
	uint64_t ns = 0;
	sim_gpu_lock(g);
	sim_engine_advance(&g->engine, sim_now_ns());
	for (int i = 0; i < SIM_ENGINE_PROCS; i++)
		if (g->engine.proc[i].pid == (uint32_t)pid)
			ns += g->engine.proc[i].busy_ns;
	sim_gpu_unlock(g);
	return ns;
}

float elapsed_ms(CUevent a, CUevent b)
{
	float ms = -1;
	OK(cuEventElapsedTime(&ms, a, b));
	return ms;
}

CUevent event(void)
{
	CUevent e = NULL;
	OK(cuEventCreate(&e, CU_EVENT_DEFAULT));
	return e;
}

CUstream stream(void)
{
	CUstream s = NULL;
	OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	return s;
}

/* A forked process that runs fn and then waits to be killed. */
static pid_t helper(void (*fn)(void))
{
	int p[2];
	char c;
	if (pipe(p))
		return -1;
	pid_t pid = fork();
	if (!pid) {
		setup();
		fn();
		if (write(p[1], "x", 1) != 1)
			_exit(1);
		for (;;)
			pause();
	}
	close(p[1]);
	CHECK(read(p[0], &c, 1) == 1, "helper failed");
	close(p[0]);
	return pid;
}

static void end(pid_t pid)
{
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
}

/* --- events ------------------------------------------------------------------------------------------- */

static void test_events(void)
{
	setup();
	CUstream s = stream();
	CUevent a = event(), b = event(), never = event(), plain;
	float ms;
	OK(cuEventCreate(&plain, CU_EVENT_DISABLE_TIMING));
	OK(cuEventQuery(a)); /* never recorded: done */
	WANT(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&ms, a, b));
	launch_spin(s, MS);
	OK(cuEventRecord(a, s));
	launch_spin(s, 300 * MS);
	OK(cuEventRecord(b, s));
	OK(cuEventRecord(plain, s));
	WANT(CUDA_ERROR_NOT_READY, cuEventQuery(b));
	WANT(CUDA_ERROR_NOT_READY, cuStreamQuery(s));
	OK(cuEventSynchronize(a));
	WANT(CUDA_ERROR_NOT_READY, cuEventElapsedTime(&ms, a, b));
	OK(cuEventSynchronize(b));
	OK(cuEventQuery(b));
	ms = elapsed_ms(a, b);
	CHECK(ms > 299.999 && ms < 300.001, "%f", ms);
	WANT(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&ms, a, plain));
	WANT(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&ms, a, never));
	OK(cuStreamSynchronize(s));
	OK(cuStreamQuery(s));
	CHECK(busy_ns(0, getpid()) == 301 * MS, "%llu", (unsigned long long)busy_ns(0, getpid()));
	/* recorded again: not ready again */
	launch_spin(s, 200 * MS);
	OK(cuEventRecord(b, s));
	WANT(CUDA_ERROR_NOT_READY, cuEventQuery(b));
	OK(cuCtxSynchronize());
	OK(cuEventDestroy_v2(a));
	WANT(CUDA_ERROR_INVALID_HANDLE, cuEventQuery(a));
	OK(cuStreamDestroy_v2(s));
	WANT(CUDA_ERROR_INVALID_HANDLE, cuStreamQuery(s));
}

static void queue_20s(void)
{
	for (int i = 0; i < 1000; i++)
		launch_full(0, 20 * MS);
}

/* Two processes that want everything: events see the other's slices, and 7 % are lost. */
static void test_two_processes(void)
{
	pid_t b = helper(queue_20s);
	setup();
	CUstream s = stream();
	CUevent e1 = event(), e2 = event();
	launch_full(s, 10 * MS);
	OK(cuEventRecord(e1, s));
	launch_full(s, 200 * MS);
	OK(cuEventRecord(e2, s));
	OK(cuStreamSynchronize(s));
	float ms = elapsed_ms(e1, e2);
	printf("  200 ms of work beside a busy process: %.1f ms between its events\n", ms);
	CHECK(ms > 425 && ms < 436, "%f", ms); /* 200 * 2 * 1104 / 1024 = 431 */
	CHECK(busy_ns(0, getpid()) == 210 * MS, "%llu", (unsigned long long)busy_ns(0, getpid()));

	queue_20s();
	struct sim_engine *e = &sim_shared->gpu[0].engine;
	uint64_t a0 = busy_ns(0, getpid()), b0 = busy_ns(0, b), l0 = e->switch_ns, t0 = e->t_ns;
	usleep(500000);
	uint64_t a1 = busy_ns(0, getpid()), b1 = busy_ns(0, b), l1 = e->switch_ns, t1 = e->t_ns;
	double t = (double)(t1 - t0) / 100;
	double pa = (double)(a1 - a0) / t, pb = (double)(b1 - b0) / t, lost = (double)(l1 - l0) / t;
	printf("  two busy processes: %.1f / %.1f %%, lost %.1f %%\n", pa, pb, lost);
	CHECK(pa > 45.5 && pa < 47.5 && pb > 45.5 && pb < 47.5, "%f %f", pa, pb);
	CHECK(lost > 6.5 && lost < 8, "%f", lost);

	/* killed: what is left of its 20 s vanishes, and mine no longer waits for it */
	end(b);
	CUstream s2 = stream();
	OK(cuEventRecord(e1, s2));
	OK(cuEventSynchronize(e1));
	usleep(50000);
	launch_spin(s2, MS);
	OK(cuStreamSynchronize(s2)); /* whoever waits looks for the dead */
	usleep(20000);
	launch_spin(s2, MS);
	OK(cuStreamSynchronize(s2));
	b0 = busy_ns(0, b), a0 = busy_ns(0, getpid()), t0 = e->t_ns;
	usleep(200000);
	b1 = busy_ns(0, b), a1 = busy_ns(0, getpid()), t1 = e->t_ns;
	CHECK(b1 == b0, "the dead still run: %llu", (unsigned long long)(b1 - b0));
	CHECK(a1 - a0 > (t1 - t0) * 99 / 100, "alone: %llu of %llu", (unsigned long long)(a1 - a0),
	      (unsigned long long)(t1 - t0));
}

static void test_depth(void)
{
	setup();
	uint64_t done0 = sim_shared->gpu[0].engine.kernels_done;
	CUstream s = stream();
	for (int i = 0; i < 1024; i++)
		launch_spin(s, 20 * MS);
	CHECK(sim_shared->gpu[0].engine.kernels_done - done0 < 1024, "nobody waited");
	for (int i = 0; i < 8; i++)
		launch_spin(s, MS);
	CHECK(sim_shared->gpu[0].engine.kernels_done - done0 >= 8, "the launches waited for room");
}

/* --- order ------------------------------------------------------------------------------------------------ */

static void test_order(void)
{
	setup();
	CUstream s1 = stream(), s2 = stream();
	CUevent e1 = event(), e2 = event(), e3 = event();
	CUcontext other_gpu;
	launch_spin(s1, 50 * MS);
	OK(cuEventRecord(e1, s1));
	OK(cuStreamWaitEvent(s2, e1, 0));
	launch_spin(s2, 20 * MS);
	OK(cuEventRecord(e2, s2));
	/* and on another GPU, with another context */
	OK(cuCtxCreate_v2(&other_gpu, 0, 1));
	CUstream s3 = stream();
	CUevent e4 = event();
	OK(cuStreamWaitEvent(s3, e2, 0));
	OK(cuEventRecord(e4, s3));
	WANT(CUDA_ERROR_NOT_READY, cuEventQuery(e4));
	OK(cuEventSynchronize(e4));
	OK(cuEventQuery(e2));
	float ms = elapsed_ms(e1, e2);
	CHECK(ms > 19.99 && ms < 20.01, "%f", ms);
	WANT(CUDA_ERROR_INVALID_HANDLE, cuEventRecord(e3, s3)); /* other context's event */
	WANT(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&ms, e1, e4));
	OK(cuCtxDestroy_v2(other_gpu));
}

static void test_legacy(void)
{
	setup();
	CUstream b;
	CUevent e1 = event(), e2 = event(), e3 = event();
	OK(cuStreamCreate(&b, CU_STREAM_DEFAULT));
	launch_spin(b, 20 * MS);
	OK(cuEventRecord(e1, b));
	launch_spin(NULL, 20 * MS);
	OK(cuEventRecord(e2, NULL));
	launch_spin(b, 20 * MS);
	OK(cuEventRecord(e3, b));
	WANT(CUDA_ERROR_NOT_READY, cuStreamQuery(NULL));
	OK(cuCtxSynchronize());
	float a = elapsed_ms(e1, e2), c = elapsed_ms(e2, e3);
	CHECK(a > 19.99 && a < 20.01 && c > 19.99 && c < 20.01, "%f %f", a, c);
	/* the thread's own default stream is another one, and blocking */
	unsigned long long id1, id2;
	OK(cuStreamGetId(NULL, &id1));
	OK(cuStreamGetId_ptsz(NULL, &id2));
	CHECK(id1 != id2, "");
	launch_spin(NULL, 30 * MS);
	uint64_t ns = MS;
	void *params[] = { &ns };
	OK(cuLaunchKernel_ptsz(spin, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
	OK(cuStreamSynchronize_ptsz(NULL));
	OK(cuStreamQuery(NULL));
}

static char trail[16];
static void add_to_trail(char c)
{
	size_t n = strlen(trail);
	if (n + 1 < sizeof trail)
		trail[n] = c;
}

static void note(void *c)
{
	add_to_trail(*(const char *)c);
}

static void note_stream(CUstream s, CUresult r, void *c)
{
	(void)s;
	add_to_trail(r == CUDA_SUCCESS ? *(const char *)c : '!');
}

static void write_42(void *p)
{
	*(volatile uint32_t *)p = 42;
}

static void test_host(void)
{
	setup();
	CUstream s = stream();
	CUdeviceptr d;
	uint32_t *h, out = 0;
	OK(cuMemHostAlloc((void **)&h, 4096, 0));
	OK(cuMemAlloc_v2(&d, 4096));
	*h = 7;
	launch_spin(s, 20 * MS);
	OK(cuLaunchHostFunc(s, note, (void *)(uintptr_t)(const void *)"a"));
	OK(cuStreamAddCallback(s, note_stream, (void *)(uintptr_t)(const void *)"b", 0));
	OK(cuLaunchHostFunc(s, write_42, h));
	OK(cuMemcpyHtoDAsync_v2(d, h, 4, s)); /* after the function, so it sees 42 */
	OK(cuMemcpyDtoHAsync_v2(&out, d, 4, s));
	CHECK(trail[0] == 0 && out == 0, "too early: %s %u", trail, out);
	OK(cuLaunchHostFunc(s, note, (void *)(uintptr_t)(const void *)"c"));
	OK(cuStreamSynchronize(s));
	CHECK(!strcmp(trail, "abc"), "%s", trail);
	CHECK(out == 42, "%u", out);

	/* a stream that waits for a value which another writes */
	CUstream s2 = stream();
	OK(cuMemsetD32_v2(d, 0, 1));
	OK(cuStreamWaitValue32(s, d, 5, CU_STREAM_WAIT_VALUE_GEQ));
	CUevent e = event();
	OK(cuEventRecord(e, s));
	usleep(5000);
	WANT(CUDA_ERROR_NOT_READY, cuEventQuery(e));
	OK(cuStreamWriteValue32(s2, d, 6, 0));
	OK(cuEventSynchronize(e));

	/* a kernel that spins on a flag in host memory */
	CUdeviceptr flag;
	OK(cuMemHostGetDevicePointer_v2(&flag, h, 0));
	*h = 0;
	void *params[] = { &flag };
	OK(cuLaunchKernel(spin_flag, 1, 1, 1, 1, 1, 1, 0, s, params, NULL));
	OK(cuEventRecord(e, s));
	usleep(20000);
	WANT(CUDA_ERROR_NOT_READY, cuEventQuery(e));
	*(volatile uint32_t *)h = 1;
	OK(cuEventSynchronize(e));
	CHECK(busy_ns(0, getpid()) > 30 * MS, "spinning is busy");
}

static void test_launch_family(void)
{
	setup();
	uint64_t ns = 3 * MS;
	size_t size = sizeof ns;
	void *params[] = { &ns }, *extra[] = { (void *)1, &ns, (void *)2, &size, NULL };
	CUstream s = stream();
	CUlaunchConfig config = { .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1,
				  .blockDimY = 1, .blockDimZ = 1, .hStream = s };
	OK(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, s, NULL, extra));
	OK(cuLaunchKernelEx(&config, spin, params, NULL));
	OK(cuLaunchKernelEx_ptsz(&config, spin, params, NULL));
	OK(cuLaunchCooperativeKernel(spin, 1, 1, 1, 1, 1, 1, 0, s, params));
	CUDA_LAUNCH_PARAMS multi = { .function = spin, .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1,
				     .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1, .hStream = s,
				     .kernelParams = params };
	OK(cuLaunchCooperativeKernelMultiDevice(&multi, 1, 0));
	OK(cuFuncSetBlockShape(spin, 32, 1, 1));
	OK(cuParamSetSize(spin, 8));
	OK(cuParamSetv(spin, 0, &ns, 8));
	OK(cuLaunchGrid(spin, 2, 2));
	OK(cuLaunch(spin));
	OK(cuLaunchGridAsync(spin, 1, 1, s));
	OK(cuCtxSynchronize());
	/* the two on the legacy stream may have run beside the others */
	uint64_t busy = busy_ns(0, getpid());
	CHECK(busy >= 18 * MS && busy <= 24 * MS, "%llu", (unsigned long long)busy);
	WANT(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(spin, 0, 1, 1, 1, 1, 1, 0, s, params, NULL));
	WANT(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(spin, 1, 1, 1, 2048, 1, 1, 0, s, params, NULL));
	WANT(CUDA_ERROR_INVALID_HANDLE, cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, s, params, NULL));
	WANT(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
	     cuLaunchCooperativeKernel(spin, 100000, 1, 1, 1024, 1, 1, 0, s, params));
}

/* --- threads ----------------------------------------------------------------------------------------------- */

static void *measure(void *arg)
{
	struct timespec t0, t1;
	CUstream s = arg;
	CUevent a[64], b[64];
	OK(cuCtxSetCurrent(ctx0));
	for (int i = 0; i < 64; i++) {
		a[i] = event();
		b[i] = event();
	}
	clock_gettime(CLOCK_MONOTONIC, &t0);
	int calls = 0;
	for (int round = 0; round < 50; round++) {
		for (int i = 0; i < 64; i++) {
			cuEventRecord(a[i], s);
			cuEventRecord(b[i], s);
		}
		for (int i = 0; i < 64; i++) {
			float ms;
			while (cuEventQuery(b[i]) == CUDA_ERROR_NOT_READY)
				calls++;
			CHECK(cuEventElapsedTime(&ms, a[i], b[i]) == CUDA_SUCCESS && ms >= 0, "");
		}
		calls += 64 * 4;
	}
	clock_gettime(CLOCK_MONOTONIC, &t1);
	double ns = ((double)(t1.tv_sec - t0.tv_sec) * 1e9 + (double)(t1.tv_nsec - t0.tv_nsec)) / calls;
	printf("  event calls from another thread: %.0f ns each\n", ns);
	CHECK(ns < 20000, "%f", ns);
	return NULL;
}

static void test_threads(void)
{
	setup();
	pthread_t t[2];
	CUstream s[2] = { stream(), stream() };
	OK(cuCtxSetCurrent(ctx0));
	for (int i = 0; i < 2; i++)
		pthread_create(&t[i], NULL, measure, s[i]);
	for (int i = 0; i < 2000; i++)
		launch_spin(NULL, 1000);
	for (int i = 0; i < 2; i++)
		pthread_join(t[i], NULL);
	OK(cuCtxSynchronize());
	CHECK(busy_ns(0, getpid()) == 2000 * 1000, "%llu", (unsigned long long)busy_ns(0, getpid()));
}

/* --- deaths ------------------------------------------------------------------------------------------------ */

/* Everything at once, for ever. */
static void wild(unsigned seed)
{
	CUstream s[3] = { NULL, stream(), stream() };
	CUevent e[4] = { event(), event(), event(), event() };
	static uint32_t word;
	for (;;) {
		CUstream a = s[rand_r(&seed) % 3], b = s[rand_r(&seed) % 3];
		CUevent v = e[rand_r(&seed) % 4];
		float ms;
		switch (rand_r(&seed) % 8) {
		case 0: cuEventRecord(v, a); break;
		case 1: cuStreamWaitEvent(b, v, 0); break;
		case 2: cuLaunchHostFunc(a, write_42, &word); break;
		case 3: cuEventElapsedTime(&ms, v, e[0]); break;
		case 4: cuEventQuery(v); break;
		case 5: if (rand_r(&seed) % 50 == 0) cuStreamSynchronize(a); break;
		default: launch(a, (uint64_t)(rand_r(&seed) % 200) * 1000, 1u + (unsigned)rand_r(&seed) % 200);
		}
	}
}

/* Processes that are killed at any instant leave nothing behind that stops others. */
static void test_storm(void)
{
	pid_t kid[4] = { 0 };
	unsigned seed = 1;
	uint64_t mine = 0;
	pid_t me = fork();
	if (!me) { /* the survivor: its own process, so that the forking one never uses CUDA */
		setup();
		for (int i = 0; i < 1500; i++, mine += 100000) {
			launch_spin(NULL, 100000);
			if (i % 8 == 0)
				OK(cuCtxSynchronize());
		}
		OK(cuCtxSynchronize());
		CHECK(busy_ns(0, getpid()) == mine, "%llu, not %llu",
		      (unsigned long long)busy_ns(0, getpid()), (unsigned long long)mine);
		_exit(failures != 0);
	}
	for (int round = 0; round < 40; round++) {
		int i = round % 4;
		if (kid[i])
			end(kid[i]);
		kid[i] = fork();
		if (!kid[i]) {
			setup();
			wild((unsigned)round + 1);
		}
		usleep(5000 + (unsigned)rand_r(&seed) % 20000);
	}
	for (int i = 0; i < 4; i++)
		end(kid[i]);
	int status;
	waitpid(me, &status, 0);
	CHECK(status == 0, "%d", status);
	sim_reap();
	struct sim_engine *e = &sim_shared->gpu[0].engine;
	for (uint32_t i = 0; i < SIM_ENGINE_CTXS; i++)
		CHECK(!(e->ctx[i].gen & 1), "context %u is left", i);
	for (uint32_t i = 0; i < SIM_ENGINE_CTXS / 64; i++)
		CHECK(!e->busy_ctx[i], "work is left");
}

/* A lost GPU: waiting calls return, new ones fail, nothing hangs. Last: it stays lost. */
static void test_lost(void)
{
	pid_t pid = fork();
	if (!pid) {
		setup();
		launch_full(NULL, 1000000 * MS);
		CUresult r = cuCtxSynchronize();
		CHECK(r != CUDA_SUCCESS && r != CUDA_ERROR_NOT_READY, "%d", (int)r);
		uint64_t ns = MS;
		void *params[] = { &ns };
		CHECK(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL) != CUDA_SUCCESS, "");
		_exit(failures != 0);
	}
	while (busy_ns(0, pid) == 0)
		usleep(1000);
	struct sim_gpu *g = &sim_shared->gpu[0];
	sim_gpu_lock(g);
	g->lost = 1;
	sim_engine_lose(&g->engine, sim_now_ns());
	sim_gpu_unlock(g);
	int status;
	waitpid(pid, &status, 0);
	CHECK(status == 0, "%d", status);
}

static const struct test tests[] = {
	{ "events", test_events }, { "two processes", test_two_processes }, { "queue depth", test_depth },
	{ "order", test_order }, { "legacy stream", test_legacy }, { "host", test_host },
	{ "launch family", test_launch_family }, { "threads", test_threads },
	{ "deaths", test_storm }, { NULL, NULL } };
static const struct test last_tests[] = { { "lost GPU", test_lost }, { NULL, NULL } };

static void make_machine(void)
{
	char path[128];
	const char *why;
	snprintf(dir, sizeof dir, "/dev/shm/tranche-simtime-%d", (int)getpid());
	mkdir(dir, 0700);
	snprintf(path, sizeof path, "%s/spec", dir);
	FILE *f = fopen(path, "w");
	fprintf(f, "gpu model=a100-80g count=2\n");
	fclose(f);
	setenv("TRANCHE_SIM_DIR", dir, 1);
	if (!sim_state_open(dir, &why)) {
		printf("%s\n", why);
		exit(1);
	}
}

static int run(const struct test *t, const char *only)
{
	int bad = 0, status;
	for (; t->name; t++) {
		if (only && !strstr(t->name, only))
			continue;
		fflush(stdout);
		pid_t pid = fork();
		if (!pid) {
			alarm(60);
			t->fn();
			fflush(stdout);
			_exit(failures != 0);
		}
		waitpid(pid, &status, 0);
		sim_reap();
		printf("%s %s\n", status ? "FAIL" : "ok  ", t->name);
		bad += status != 0;
	}
	return bad;
}

int main(int argc, char **argv)
{
	const char *only = argc > 1 ? argv[1] : NULL;
	char path[128];
	make_machine();
	int bad = run(tests, only) + run(capture_tests, only) + run(graph_tests, only) + run(last_tests, only);
	snprintf(path, sizeof path, "%s/state", dir);
	unlink(path);
	snprintf(path, sizeof path, "%s/spec", dir);
	unlink(path);
	rmdir(dir);
	return bad != 0;
}
