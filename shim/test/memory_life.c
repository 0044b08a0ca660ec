/* Processes: fork, exec, threads, kill -9; and contexts, with what is in them. */
#define _GNU_SOURCE
#include "suite.h"
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "ledger.h"

static const CUmemPoolProps pool_props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
					  .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
static const CUmemAllocationProp vmm_prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
					     .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};

static int slots_used(void)
{
	int n = 0;
	charged(0);
	for (int i = 1; i < TR_MAX_PROCS; i++)
		n += __atomic_load_n(&suite_ledger->slot[i].state, __ATOMIC_ACQUIRE) ==
		     TR_SLOT_USED;
	return n;
}

/* --- fork and exec ------------------------------------------------------------------------- */

/* The child ends at once without a look at CUDA: nothing of the parent's is given back. */
static void fork_of_nothing(void)
{
	CUdeviceptr p;
	start();
	OK(cuMemAlloc_v2(&p, 64 * MIB));
	for (int i = 0; i < 10; i++) {
		pid_t pid = fork();
		if (pid == 0)
			_exit(0);
		reap(pid);
		both(0, CONTEXT + 64 * MIB);
	}
	OK(cuMemFree_v2(p));
	both(0, CONTEXT);
	EQUAL(slots_used(), 1);
}

static void forks_on(int sock)
{
	CUdeviceptr p;
	start();
	OK(cuMemAlloc_v2(&p, 64 * MIB));
	pid_t pid = fork();
	if (pid == 0) {
		/* The driver refuses a fork of a process that used it; ours must not break. */
		CHECK(cuMemAlloc_v2(&p, MIB) != CUDA_SUCCESS);
		CHECK(cuMemFree_v2(p) != CUDA_SUCCESS);
		CHECK(cuInit(0) != CUDA_SUCCESS);
		hear(sock);
		_exit(0);
	}
	give(sock, &pid, sizeof pid);
	for (;;)
		pause();
}

static void fork_outlives_parent(void)
{
	int sock;
	pid_t parent = actor(forks_on, &sock), child;
	take(sock, &child, sizeof child);
	both(0, CONTEXT + 64 * MIB);
	end(parent);
	for (int i = 0; i < 20; i++) {
		both(0, CONTEXT + 64 * MIB);
		nap_ms(10);
	}
	say(sock);
	wait_both(0, 0);
}

static void forks_before(int sock)
{
	CUdeviceptr p;
	pid_t pid = fork();
	start();
	OK(cuMemAlloc_v2(&p, 16 * MIB));
	if (pid == 0)
		_exit(0);
	int status;
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	both(0, CONTEXT + 16 * MIB);
	say(sock);
	hear(sock);
}

static void fork_before_init(void)
{
	int sock;
	pid_t pid = actor(forks_before, &sock);
	hear(sock);
	both(0, CONTEXT + 16 * MIB);
	say(sock);
	reap(pid);
	wait_both(0, 0);
}

static void execs(int sock)
{
	CUdeviceptr p;
	start();
	OK(cuMemAlloc_v2(&p, 64 * MIB));
	dup2(sock, 100);
	execl("/proc/self/exe", "suite", "--test", "exec_second", (char *)NULL);
	_exit(127);
}

/* The same process after exec: what it held before is the driver's again. */
static void exec_second(void)
{
	CUdeviceptr p;
	start();
	OK(cuMemAlloc_v2(&p, 8 * MIB));
	say(100);
	hear(100);
}

static void exec_in_a_process(void)
{
	int sock;
	pid_t pid = actor(execs, &sock);
	hear(sock);
	wait_both(0, CONTEXT + 8 * MIB);
	EQUAL(slots_used(), 1);
	say(sock);
	reap(pid);
	wait_both(0, 0);
}

static void spawns(int sock)
{
	CUdeviceptr p;
	start();
	OK(cuMemAlloc_v2(&p, 64 * MIB));
	pid_t pid = fork();
	if (pid == 0) {
		dup2(sock, 0);
		execl("/bin/sh", "sh", "-c", "read x", (char *)NULL);
		_exit(127);
	}
	nap_ms(50);
	give(sock, &pid, sizeof pid);
	for (;;)
		pause();
}

/* A program started by one that used CUDA and killed: exec dropped the driver's descriptors. */
static void child_that_execs(void)
{
	int sock;
	pid_t pid = actor(spawns, &sock), child;
	take(sock, &child, sizeof child);
	end(pid);
	wait_both(0, 0);
	say(sock);
}

/* --- threads ------------------------------------------------------------------------------- */

#define THREADS 16
static pthread_barrier_t together;

/* Anything, at random, and all given back. Whatever is refused is refused for want of memory. */
static void *churn_thread(void *arg)
{
	CUcontext ctx = arg;
	unsigned seed = (unsigned)(uintptr_t)&seed;
	CUdeviceptr plain[4] = {0}, pooled[2] = {0};
	CUmemGenericAllocationHandle h[2] = {0};
	CUarray array[2] = {NULL};
	OK(cuCtxSetCurrent(ctx));
	pthread_barrier_wait(&together);
	for (int round = 0; round < 400; round++) {
		int i = rand_r(&seed) % 4, j = i % 2;
		CUresult r = CUDA_SUCCESS;
		size_t size = 1 + (size_t)rand_r(&seed) % (16 * MIB);
		CUDA_ARRAY_DESCRIPTOR d = {.Width = 1 + size % 1000,
					   .Height = 1 + size % 500,
					   .Format = CU_AD_FORMAT_FLOAT,
					   .NumChannels = 2};
		switch (rand_r(&seed) % 4) {
		case 0:
			if (plain[i] != 0)
				OK(cuMemFree_v2(plain[i]));
			plain[i] = 0;
			r = cuMemAlloc_v2(&plain[i], rand_r(&seed) % 2 ? size : size % 5000 + 1);
			break;
		case 1:
			if (pooled[j] != 0)
				OK(cuMemFreeAsync(pooled[j], NULL));
			pooled[j] = 0;
			r = cuMemAllocAsync(&pooled[j], size, NULL);
			break;
		case 2:
			if (h[j] != 0)
				OK(cuMemRelease(h[j]));
			h[j] = 0;
			r = cuMemCreate(&h[j], 2 * MIB, &vmm_prop, 0);
			break;
		default:
			if (array[j] != NULL)
				OK(cuArrayDestroy(array[j]));
			array[j] = NULL;
			r = cuArrayCreate_v2(&array[j], &d);
		}
		CHECK(r == CUDA_SUCCESS || r == OOM);
		if (round % 64 == 0)
			OK(cuStreamSynchronize(NULL));
	}
	for (int i = 0; i < 4; i++)
		if (plain[i] != 0)
			OK(cuMemFree_v2(plain[i]));
	for (int j = 0; j < 2; j++) {
		if (pooled[j] != 0)
			OK(cuMemFreeAsync(pooled[j], NULL));
		if (h[j] != 0)
			OK(cuMemRelease(h[j]));
		if (array[j] != NULL)
			OK(cuArrayDestroy(array[j]));
	}
	return NULL;
}

static void threads(void)
{
	pthread_t t[THREADS];
	CUcontext ctx = start();
	CHECK(pthread_barrier_init(&together, NULL, THREADS) == 0);
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_create(&t[i], NULL, churn_thread, ctx) == 0);
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
	OK(cuStreamSynchronize(NULL));
	CUmemoryPool pool;
	OK(cuDeviceGetDefaultMemPool(&pool, 0));
	OK(cuMemPoolTrimTo(pool, 0));
	both(0, CONTEXT);
	CHECK(sim_peak(0) > LIMIT / 4); /* it was worth it */
}

/* Launches of eight threads, each on a stream of its own and with memory besides, under a compute
 * limit: all are counted, and nothing of it disturbs the books. */
#define LAUNCHERS 8
#define LAUNCHES 200

static CUfunction spin;

static void *launch_thread(void *arg)
{
	CUstream s;
	CUdeviceptr p;
	uint64_t ns = 100000;
	void *args[] = {&ns};
	OK(cuCtxSetCurrent(arg));
	OK(cuStreamCreate(&s, 0));
	for (int i = 0; i < LAUNCHES; i++) {
		OK(cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 0, s, args, NULL));
		if (i % 10 == 0) {
			OK(cuMemAllocAsync(&p, MIB, s));
			OK(cuMemFreeAsync(p, s));
			OK(cuStreamSynchronize(s));
		}
	}
	OK(cuStreamSynchronize(s));
	OK(cuStreamDestroy_v2(s));
	return NULL;
}

static void metered_threads(void)
{
	pthread_t t[LAUNCHERS];
	CUmodule m;
	CUcontext ctx = start();
	OK(cuModuleLoadData(&m, ".version 7.0\n.visible .entry tranche_spin(.param .u64 ns) {}"));
	OK(cuModuleGetFunction(&spin, m, "tranche_spin"));
	for (int i = 0; i < LAUNCHERS; i++)
		CHECK(pthread_create(&t[i], NULL, launch_thread, ctx) == 0);
	for (int i = 0; i < 5; i++) { /* forks while others launch */
		pid_t pid = fork();
		if (pid == 0)
			_exit(0);
		reap(pid);
		nap_ms(5);
	}
	for (int i = 0; i < LAUNCHERS; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
	OK(cuCtxDestroy_v2(ctx));
	both(0, 0);
	EQUAL(suite_ledger->account[0].launches, LAUNCHERS * LAUNCHES);
	CHECK(suite_ledger->account[0].gpu_time_ns > 0);
}

/* --- kill -9 ------------------------------------------------------------------------------- */

static void churn(int sock)
{
	CUcontext ctx = NULL, extra;
	CUdeviceptr p[8] = {0}, a = 0;
	CUarray array = NULL;
	CUmemGenericAllocationHandle h = 0;
	size_t pitch;
	unsigned seed = (unsigned)getpid();
	say(sock);
	if (cuInit(0) != CUDA_SUCCESS || cuCtxCreate_v2(&ctx, 0, 0) != CUDA_SUCCESS)
		pause(); /* the limit holds for contexts too */
	if (seed % 3 == 0 && fork() == 0) {
		nap_ms((int)(seed % 50)); /* lives a little longer than its parent, or not */
		_exit(0);
	}
	for (;;) {
		int i = rand_r(&seed) % 8;
		size_t size = 1 + (size_t)rand_r(&seed) % (8 * MIB);
		if (p[i] != 0) {
			OK(cuMemFree_v2(p[i]));
			p[i] = 0;
		} else if ((i < 4   ? cuMemAlloc_v2(&p[i], size)
			    : i < 6 ? cuMemAllocManaged(&p[i], size, CU_MEM_ATTACH_GLOBAL)
				    : cuMemAllocPitch_v2(&p[i], &pitch, 700, 1 + size / 700, 4)) !=
			   CUDA_SUCCESS) {
			p[i] = 0;
		}
		switch (rand_r(&seed) % 6) {
		case 0:
			if (a != 0)
				OK(cuMemFreeAsync(a, NULL));
			if (cuMemAllocAsync(&a, size, NULL) != CUDA_SUCCESS)
				a = 0;
			break;
		case 1:
			if (h != 0)
				OK(cuMemRelease(h));
			if (cuMemCreate(&h, 4 * MIB, &vmm_prop, 0) != CUDA_SUCCESS)
				h = 0;
			break;
		case 2: {
			CUDA_ARRAY_DESCRIPTOR d = {.Width = 512,
						   .Height = 256,
						   .Format = CU_AD_FORMAT_HALF,
						   .NumChannels = 4};
			if (array != NULL)
				OK(cuArrayDestroy(array));
			if (cuArrayCreate_v2(&array, &d) != CUDA_SUCCESS)
				array = NULL;
			break;
		}
		case 3:
			if (cuCtxCreate_v2(&extra, 0, 0) == CUDA_SUCCESS)
				OK(cuCtxDestroy_v2(extra));
			break;
		default:
			break;
		}
	}
}

#define CHURNERS 5
#define KILLS 50

static void killed_at_random(void)
{
	pid_t pid[CHURNERS];
	int sock[CHURNERS];
	unsigned seed = (unsigned)getpid();
	for (int k = 0; k < KILLS + CHURNERS; k++) {
		int i = k % CHURNERS;
		if (k >= CHURNERS) {
			end(pid[i]);
			close(sock[i]);
		}
		if (k < KILLS) {
			pid[i] = actor(churn, &sock[i]);
			hear(sock[i]);
		}
		nap_ms(1 + rand_r(&seed) % 25);
		CHECK(sim_used(0) <= LIMIT);
	}
	wait_both(0, 0);
	EQUAL(slots_used(), 0);
	printf("  %d killed, peak %llu of %llu\n", KILLS, (unsigned long long)sim_peak(0),
	       (unsigned long long)LIMIT);
	CHECK(sim_peak(0) > LIMIT / 4);
}

/* --- contexts ------------------------------------------------------------------------------ */

static void primary(void)
{
	CUcontext c, again;
	CUdeviceptr p;
	OK(cuInit(0));
	both(0, 0);
	OK(cuDevicePrimaryCtxRetain(&c, 0));
	OK(cuDevicePrimaryCtxRetain(&again, 0));
	OK(cuDevicePrimaryCtxRetain(&again, 0));
	CHECK(c == again);
	both(0, CONTEXT);
	OK(cuCtxSetCurrent(c));
	OK(cuMemAlloc_v2(&p, 20 * MIB));
	OK(cuMemAlloc_v2(&p, 1000));
	OK(cuDevicePrimaryCtxRelease_v2(0));
	OK(cuDevicePrimaryCtxRelease_v2(0));
	both(0, CONTEXT + 22 * MIB);
	OK(cuDevicePrimaryCtxRelease_v2(0));
	both(0, 0);
	OK(cuDevicePrimaryCtxRetain(&c, 0));
	OK(cuCtxSetCurrent(c));
	OK(cuMemAlloc_v2(&p, 20 * MIB));
	both(0, CONTEXT + 20 * MIB);
	OK(cuDevicePrimaryCtxReset_v2(0));
	both(0, sim_used(0));
	cuDevicePrimaryCtxRelease_v2(0);
	both(0, 0);
}

static void context_frees_its_memory(void)
{
	CUcontext a = start(), b;
	CUdeviceptr p;
	size_t pitch;
	CUarray array;
	CUmipmappedArray mip;
	CUDA_ARRAY3D_DESCRIPTOR d = {
		.Width = 256, .Height = 256, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
	OK(cuMemAlloc_v2(&p, 6 * MIB));
	OK(cuCtxCreate_v2(&b, 0, 0));
	both(0, 2 * CONTEXT + 6 * MIB);
	OK(cuMemAlloc_v2(&p, 10 * MIB));
	OK(cuMemAlloc_v2(&p, 700));
	OK(cuMemAllocManaged(&p, 4 * MIB, CU_MEM_ATTACH_GLOBAL));
	OK(cuMemAllocPitch_v2(&p, &pitch, 1000, 2048, 4));
	OK(cuArray3DCreate_v2(&array, &d));
	OK(cuMipmappedArrayCreate(&mip, &d, 4));
	OK(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 40 * MIB));
	EQUAL(charged(0), sim_used(0) + 32 * MIB); /* the simulator's heap takes no memory */
	OK(cuCtxDestroy_v2(b));
	both(0, CONTEXT + 6 * MIB);
	OK(cuCtxDestroy_v2(a));
	both(0, 0);
}

/* Memory freed behind a kernel that runs yet, in a context that ends. */
static void context_ends_before_its_frees(void)
{
	CUdeviceptr p;
	CUmodule m;
	CUfunction f;
	CUcontext keep = start(), c;
	uint64_t ns = 50000000;
	void *args[] = {&ns};
	for (int primary = 0; primary < 2; primary++) {
		if (primary)
			OK(cuDevicePrimaryCtxRetain(&c, 0));
		else
			OK(cuCtxCreate_v2(&c, 0, 0));
		OK(cuCtxSetCurrent(c));
		OK(cuModuleLoadData(&m,
				    ".version 7.0\n.visible .entry tranche_spin(.param .u64 ns) {}"));
		OK(cuModuleGetFunction(&f, m, "tranche_spin"));
		OK(cuMemAlloc_v2(&p, 100 * MIB));
		OK(cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, NULL, args, NULL));
		OK(cuMemFreeAsync(p, NULL));
		OK(primary ? cuDevicePrimaryCtxRelease_v2(0) : cuCtxDestroy_v2(c));
		both(0, CONTEXT);
		OK(cuCtxSetCurrent(keep));
		OK(cuMemAlloc_v2(&p, 200 * MIB));
		OK(cuMemFree_v2(p));
	}
}

static void context_refused(void)
{
	CUcontext c;
	CUdeviceptr p;
	start();
	OK(cuMemAlloc_v2(&p, LIMIT - CONTEXT - CONTEXT / 2));
	IS(cuCtxCreate_v2(&c, 0, 0), OOM);
	IS(cuDevicePrimaryCtxRetain(&c, 0), OOM);
	both(0, LIMIT - CONTEXT / 2);
	EQUAL(suite_ledger->slot[1].dev[0].context, CONTEXT);
	OK(cuMemFree_v2(p));
	OK(cuDevicePrimaryCtxRetain(&c, 0));
	both(0, 2 * CONTEXT);
}

/* Threads that retain and release the primary context against each other. */
static void *retain_release(void *arg)
{
	(void)arg;
	for (int i = 0; i < 300; i++) {
		CUcontext c;
		OK(cuDevicePrimaryCtxRetain(&c, 0));
		OK(cuDevicePrimaryCtxRelease_v2(0));
	}
	return NULL;
}

static void primary_in_threads(void)
{
	pthread_t t[4];
	OK(cuInit(0));
	for (int i = 0; i < 4; i++)
		CHECK(pthread_create(&t[i], NULL, retain_release, NULL) == 0);
	for (int i = 0; i < 4; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
	both(0, 0);
	CUcontext c;
	OK(cuDevicePrimaryCtxRetain(&c, 0));
	both(0, CONTEXT);
	OK(cuDevicePrimaryCtxRelease_v2(0));
	both(0, 0);
}

static void *pool_thread(void *arg)
{
	OK(cuCtxSetCurrent(arg));
	for (int i = 0; i < 50; i++) {
		CUmemoryPool pool;
		CUdeviceptr p;
		OK(cuMemPoolCreate(&pool, &pool_props));
		CUresult r = cuMemAllocFromPoolAsync(&p, 3 * MIB, pool, NULL);
		CHECK(r == CUDA_SUCCESS || r == OOM);
		OK(cuMemPoolDestroy(pool));
		if (r == CUDA_SUCCESS)
			OK(cuMemFreeAsync(p, NULL));
	}
	return NULL;
}

static void pools_in_threads(void)
{
	pthread_t t[8];
	CUcontext ctx = start();
	for (int i = 0; i < 8; i++)
		CHECK(pthread_create(&t[i], NULL, pool_thread, ctx) == 0);
	for (int i = 0; i < 8; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
	both(0, CONTEXT);
}

#define T(f) {.name = #f, .run = f}
const struct suite_test life_tests[] = {
	T(fork_of_nothing),   T(fork_outlives_parent),
	T(fork_before_init),  T(exec_in_a_process),
	T(child_that_execs),  T(threads),
	{.name = "metered_threads", .run = metered_threads, .cores = 60},
	T(killed_at_random),  T(primary),
	T(primary_in_threads), T(pools_in_threads),
	T(context_ends_before_its_frees), T(context_refused),   T(context_frees_its_memory),
	{.name = "exec_second", .run = exec_second, .inner = true},
	{.name = NULL}};
