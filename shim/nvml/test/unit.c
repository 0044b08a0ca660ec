/* unit OUR_LIB TEST_DOUBLE DIR: our library, laid out as a slice in DIR over the test double of the
 * driver's, is asked what it shows. Paths are absolute. The slice has GPU b (8 GiB, first) and GPU
 * a (no memory limit); GPU c is somebody else's. Members: this process, a child, and one that is
 * dead. Prints each failure; exit status 1 if there was one. */
#include "compat.h"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "ledger.h"
#include "nvml_new.h"
#include "test/slice.h"

#define GIB (1ull << 30)
#define MIB (1ull << 20)
enum { DEV_B, DEV_A, GPU_A = 0, GPU_B = 1, GPU_C = 2, FOREIGN = 999999, HOST_PID = 888888 };

static int failures;
#define CHECK(got, want)                                                                           \
	do {                                                                                       \
		long long g = (long long)(got), w = (long long)(want);                             \
		if (g != w) {                                                                      \
			failures++;                                                                \
			printf("%s:%d: %s is %lld, expected %lld\n", __func__, __LINE__, #got, g,  \
			       w);                                                                 \
		}                                                                                  \
	} while (0)

static void *lib;
static struct tr_ledger *ledger;
static pid_t child;
#define CALL(name) ((__typeof__(&name))dlsym(lib, #name))

/* Through the library, as the double is behind it. */
static void (*process)(int gpu, unsigned pid, unsigned long long bytes, int kind, unsigned sm);
static void (*clear)(void);
static void (*old_entries)(int on);
static void (*driver)(const char *version);

/* --- the slice ----------------------------------------------------------------------------- */

static void make_slice(const char *dir)
{
	struct tr_limits *l = new_limits(dir);
	ledger = new_ledger(dir);
	l->n_devices = 2;
	strcpy(l->dev[DEV_B].uuid, "GPU-bbbbbbbb-0000-0000-0000-000000000002");
	l->dev[DEV_B].memory_limit = 8 * GIB;
	l->dev[DEV_B].flags = TR_DEV_MEMORY_LIMITED;
	strcpy(l->dev[DEV_A].uuid, "GPU-aaaaaaaa-0000-0000-0000-000000000001");
}

static void add_members(void)
{
	uint32_t pid;
	uint64_t start, ns;
	tr_self(&pid, &start, &ns);
	add_member(ledger, 1, DEV_B, pid, start, ns, GIB);
	child = fork();
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL); /* should a check crash the test */
		pause();
		_exit(0);
	}
	add_member(ledger, 2, DEV_B, (unsigned)child, 0, ns, 512 * MIB);
	ledger->slot[2].host_pid = HOST_PID;
	pid_t dead = fork();
	if (dead == 0)
		_exit(0);
	waitpid(dead, NULL, 0);
	add_member(ledger, 3, DEV_B, (unsigned)dead, 0, ns, 256 * MIB);
}

static nvmlDevice_t handle(unsigned index)
{
	nvmlDevice_t d = NULL;
	CHECK(CALL(nvmlDeviceGetHandleByIndex_v2)(index, &d), NVML_SUCCESS);
	return d;
}

/* --- the checks ---------------------------------------------------------------------------- */

static void test_before_init(void)
{
	nvmlDevice_t d;
	unsigned n;
	CHECK(CALL(nvmlDeviceGetCount_v2)(&n), NVML_ERROR_UNINITIALIZED);
	CHECK(CALL(nvmlDeviceGetHandleByIndex_v2)(0, &d), NVML_ERROR_UNINITIALIZED);
	/* The oldest entry point first: what PyTorch calls, and what crashed a predecessor. */
	CHECK(CALL(nvmlInit)(), NVML_SUCCESS);
}

static void test_devices(void)
{
	const char *a = "GPU-aaaaaaaa-0000-0000-0000-000000000001";
	const char *c = "GPU-cccccccc-0000-0000-0000-000000000003";
	nvmlDevice_t d, b = handle(0);
	char uuid[96];
	unsigned n = 0;
	CHECK(CALL(nvmlDeviceGetCount)(&n), NVML_SUCCESS);
	CHECK(n, 2);
	CHECK(CALL(nvmlDeviceGetCount_v2)(&n), NVML_SUCCESS);
	CHECK(n, 2);
	CHECK(CALL(nvmlDeviceGetUUID)(b, uuid, sizeof uuid), NVML_SUCCESS);
	CHECK(strncmp(uuid, "GPU-bbbb", 8), 0);
	CHECK(CALL(nvmlDeviceGetHandleByIndex_v2)(2, &d), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceGetHandleByUUID)(a, &d), NVML_SUCCESS);
	CHECK(CALL(nvmlDeviceGetIndex)(d, &n), NVML_SUCCESS);
	CHECK(n, 1);
	d = NULL;
	CHECK(CALL(nvmlDeviceGetHandleByUUID)(c, &d), NVML_ERROR_NOT_FOUND);
	CHECK(CALL(nvmlDeviceGetHandleByUUID)(a, NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceGetHandleByPciBusId_v2)("00000000:03:00.0", &d), NVML_ERROR_NOT_FOUND);
	CHECK(d == NULL, 1);
	CHECK(CALL(nvmlDeviceGetHandleByPciBusId_v2)("00000000:02:00.0", &d), NVML_SUCCESS);
	CHECK(d == b, 1);
	/* An entry point that this driver does not have. */
	CHECK(CALL(nvmlDeviceGetHandleByUUIDV)(NULL, &d), NVML_ERROR_FUNCTION_NOT_FOUND);
	CHECK(CALL(nvmlDeviceSetComputeMode)(b, NVML_COMPUTEMODE_PROHIBITED),
	      NVML_ERROR_NO_PERMISSION);
	CHECK(CALL(nvmlGetExcludedDeviceCount)(&n), NVML_ERROR_FUNCTION_NOT_FOUND);
	/* Not hooked: the driver's own. */
	CHECK(CALL(nvmlDeviceGetName)(b, uuid, sizeof uuid), NVML_SUCCESS);
	CHECK(strcmp(uuid, "Fake 1"), 0);
}

static void test_topology(void)
{
	nvmlDevice_t out[4] = {NULL};
	unsigned n = 0;
	CHECK(CALL(nvmlSystemGetTopologyGpuSet)(0, &n, NULL), NVML_SUCCESS);
	CHECK(n, 2);
	CHECK(CALL(nvmlSystemGetTopologyGpuSet)(0, &n, out), NVML_SUCCESS);
	CHECK(out[0] == handle(DEV_A) && out[1] == handle(DEV_B) && out[2] == NULL, 1);
	n = 1;
	CHECK(CALL(nvmlSystemGetTopologyGpuSet)(0, &n, out), NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(n, 2);
}

static void check_memory(unsigned long long used, unsigned long long free_bytes)
{
	nvmlMemory_v2_t v2 = {.version = nvmlMemory_v2};
	nvmlMemory_t v1;
	CHECK(CALL(nvmlDeviceGetMemoryInfo)(handle(DEV_B), &v1), NVML_SUCCESS);
	CHECK(v1.total, 8 * GIB);
	CHECK(v1.used, used);
	CHECK(v1.free, free_bytes);
	CHECK(CALL(nvmlDeviceGetMemoryInfo_v2)(handle(DEV_B), &v2), NVML_SUCCESS);
	CHECK(v2.total, 8 * GIB);
	CHECK(v2.used, used);
	CHECK(v2.free, free_bytes);
	CHECK(v2.reserved, 0);
}

static void test_memory(void)
{
	nvmlMemory_v2_t bad = {.version = 1};
	nvmlMemory_t v1;
	int64_t *overhead = &ledger->account[DEV_B].overhead;
	unsigned long long members = GIB + (512 + 256) * MIB;
	check_memory(members, 8 * GIB - members);
	*overhead = (int64_t)GIB;
	check_memory(members + GIB, 7 * GIB - members);
	*overhead = -(int64_t)(100 * GIB);
	check_memory(0, 8 * GIB);
	*overhead = (int64_t)(100 * GIB);
	check_memory(8 * GIB, 0);
	*overhead = 0;
	CHECK(CALL(nvmlDeviceGetMemoryInfo_v2)(handle(DEV_B), &bad),
	      NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	CHECK(CALL(nvmlDeviceGetMemoryInfo)(handle(DEV_A), &v1), NVML_SUCCESS);
	CHECK(v1.total, 80 * GIB);
	CHECK(v1.used, 50 * GIB);
}

static unsigned long long bytes_of(const nvmlProcessInfo_t *p, unsigned n, unsigned pid)
{
	for (unsigned i = 0; i < n; i++)
		if (p[i].pid == pid)
			return p[i].usedGpuMemory;
	return 0;
}

/* The driver names a stranger and the child, by its host number; this process it has not listed
 * yet. */
static void test_processes(void)
{
	unsigned me = (unsigned)getpid(), n = 0;
	nvmlProcessInfo_v1_t v1[4];
	nvmlProcessInfo_t v3[4];
	nvmlDevice_t b = handle(DEV_B);
	clear();
	process(GPU_B, FOREIGN, 40 * GIB, 0, 90);
	process(GPU_B, HOST_PID, 3 * GIB, 0, 7);
	process(GPU_A, FOREIGN, 40 * GIB, 0, 0);
	for (int old = 0; old < 2; old++) {
		old_entries(old);
		n = 0;
		CHECK(CALL(nvmlDeviceGetComputeRunningProcesses_v3)(b, &n, NULL),
		      NVML_ERROR_INSUFFICIENT_SIZE);
		CHECK(n, 2);
		n = 1;
		CHECK(CALL(nvmlDeviceGetComputeRunningProcesses_v3)(b, &n, v3),
		      NVML_ERROR_INSUFFICIENT_SIZE);
		CHECK(n, 2);
		n = 4;
		CHECK(CALL(nvmlDeviceGetComputeRunningProcesses_v3)(b, &n, v3), NVML_SUCCESS);
		CHECK(n, 2);
		CHECK(bytes_of(v3, n, (unsigned)child), 512 * MIB);
		CHECK(bytes_of(v3, n, me), GIB);
	}
	old_entries(0);
	n = 2;
	CHECK(CALL(nvmlDeviceGetComputeRunningProcesses)(b, &n, v1), NVML_SUCCESS);
	CHECK(n, 2);
	CHECK(v1[0].pid, child);
	CHECK(v1[1].pid, me);
	CHECK(v1[1].usedGpuMemory, GIB);
	CHECK(CALL(nvmlDeviceGetComputeRunningProcesses_v2)(b, &n, NULL),
	      NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceGetComputeRunningProcesses_v3)(b, NULL, NULL),
	      NVML_ERROR_INVALID_ARGUMENT);
	n = 0;
	CHECK(CALL(nvmlDeviceGetGraphicsRunningProcesses_v3)(b, &n, NULL), NVML_SUCCESS);
	CHECK(n, 0);
	/* Nobody of the slice is on its other GPU. */
	n = 4;
	CHECK(CALL(nvmlDeviceGetComputeRunningProcesses_v3)(handle(DEV_A), &n, v3), NVML_SUCCESS);
	CHECK(n, 0);
	/* A process is in one list, not in two. */
	process(GPU_B, me, GIB, 1, 0);
	n = 4;
	CHECK(CALL(nvmlDeviceGetGraphicsRunningProcesses_v3)(b, &n, v3), NVML_SUCCESS);
	CHECK(n, 1);
	CHECK(v3[0].pid, me);
	n = 4;
	CHECK(CALL(nvmlDeviceGetComputeRunningProcesses_v3)(b, &n, v3), NVML_SUCCESS);
	CHECK(n, 1);
	CHECK(CALL(nvmlDeviceGetComputeRunningProcesses_v3)((nvmlDevice_t)(size_t)48, &n, v3),
	      NVML_ERROR_INVALID_ARGUMENT); /* GPU c */
}

static void test_sessions(void)
{
	nvmlEncoderSessionInfo_t s[4];
	nvmlAccountingStats_t stats;
	unsigned pids[4], n = 0;
	nvmlDevice_t b = handle(DEV_B);
	clear();
	process(GPU_B, FOREIGN, 0, 0, 0);
	process(GPU_B, HOST_PID, 0, 0, 0);
	CHECK(CALL(nvmlDeviceGetEncoderSessions)(b, &n, NULL), NVML_SUCCESS);
	CHECK(n, 1);
	CHECK(CALL(nvmlDeviceGetEncoderSessions)(b, &n, s), NVML_SUCCESS);
	CHECK(s[0].pid, child);
	CHECK(s[0].sessionId, 1);
	n = 0;
	CHECK(CALL(nvmlDeviceGetAccountingPids)(b, &n, NULL), NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(n, 1);
	CHECK(CALL(nvmlDeviceGetAccountingPids)(b, &n, pids), NVML_SUCCESS);
	CHECK(pids[0], child);
	CHECK(CALL(nvmlDeviceGetAccountingStats)(b, (unsigned)child, &stats), NVML_SUCCESS);
	CHECK(stats.startTime, HOST_PID);
	CHECK(CALL(nvmlDeviceGetAccountingStats)(b, FOREIGN, &stats), NVML_ERROR_NOT_FOUND);
	CHECK(CALL(nvmlDeviceGetFBCSessions)(b, &n, NULL), NVML_ERROR_FUNCTION_NOT_FOUND);
}

static void test_samples(void)
{
	nvmlProcessUtilizationSample_t s[4];
	nvmlProcessUtilizationInfo_v1_t i[4];
	nvmlProcessesUtilizationInfo_t info = {.version = nvmlProcessesUtilizationInfo_v1,
					       .processSamplesCount = 4,
					       .procUtilArray = i};
	unsigned n = 4;
	nvmlDevice_t b = handle(DEV_B);
	clear();
	process(GPU_B, FOREIGN, 0, 0, 90);
	CHECK(CALL(nvmlDeviceGetProcessUtilization)(b, s, &n, 0), NVML_ERROR_NOT_FOUND);
	CHECK(n, 0);
	process(GPU_B, HOST_PID, 0, 0, 7);
	n = 4;
	CHECK(CALL(nvmlDeviceGetProcessUtilization)(b, s, &n, 0), NVML_SUCCESS);
	CHECK(n, 1);
	CHECK(s[0].pid, child);
	CHECK(s[0].smUtil, 7);
	n = 0;
	CHECK(CALL(nvmlDeviceGetProcessUtilization)(b, s, &n, 0), NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(CALL(nvmlDeviceGetProcessesUtilizationInfo)(b, &info), NVML_SUCCESS);
	CHECK(info.processSamplesCount, 1);
	CHECK(i[0].pid, child);
	info.version = 0;
	CHECK(CALL(nvmlDeviceGetProcessesUtilizationInfo)(b, &info),
	      NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
}

static void sleep_ms(long ms)
{
	struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
	nanosleep(&t, NULL);
}

static void test_utilization(void)
{
	nvmlUtilization_t u;
	nvmlDevice_t b = handle(DEV_B);
	clear();
	/* Nothing metered: the driver's samples of the slice's processes. */
	process(GPU_B, FOREIGN, 0, 0, 90);
	process(GPU_B, HOST_PID, 0, 0, 7);
	process(GPU_B, (unsigned)getpid(), 0, 0, 4);
	CHECK(CALL(nvmlDeviceGetUtilizationRates)(b, &u), NVML_SUCCESS);
	CHECK(u.gpu, 11);
	CHECK(u.memory, 22); /* 1.75 of 8 GiB */
	/* Metered: 30 % of the time since the last reading. */
	sleep_ms(600);
	CHECK(CALL(nvmlDeviceGetUtilizationRates)(b, &u), NVML_SUCCESS);
	ledger->account[DEV_B].gpu_time_ns = 1;
	sleep_ms(600);
	CALL(nvmlDeviceGetUtilizationRates)(b, &u);
	for (int i = 0; i < 20; i++) {
		struct timespec t0, t1;
		clock_gettime(CLOCK_MONOTONIC, &t0);
		sleep_ms(100);
		clock_gettime(CLOCK_MONOTONIC, &t1);
		ledger->account[DEV_B].gpu_time_ns +=
			(uint64_t)((t1.tv_sec - t0.tv_sec) * 1000000000ll + t1.tv_nsec -
				   t0.tv_nsec) * 3 / 10;
		CHECK(CALL(nvmlDeviceGetUtilizationRates)(b, &u), NVML_SUCCESS);
	}
	CHECK(u.gpu >= 27 && u.gpu <= 31, 1);
	/* Metered more than the time that passed (streams overlap): 100. */
	ledger->account[DEV_B].gpu_time_ns += 1000000000000ull;
	sleep_ms(150);
	CHECK(CALL(nvmlDeviceGetUtilizationRates)(b, &u), NVML_SUCCESS);
	CHECK(u.gpu, 100);
	CHECK(CALL(nvmlDeviceGetUtilizationRates)(handle(DEV_A), &u), NVML_SUCCESS);
	CHECK(u.gpu, 0);
	CHECK(u.memory, 77);
}

/* --- nvidia-smi's table -------------------------------------------------------------------- */

static const unsigned char smi_id[16] = {0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e,
					 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4};

static void *slot(int number)
{
	const void *table = NULL;
	CHECK(CALL(nvmlInternalGetExportTable)(&table, smi_id), NVML_SUCCESS);
	return ((void *const *)table)[number];
}

/* GPU index of the slice by the slot that nvidia-smi uses; the driver's own index is another. */
static void test_smi_devices(void)
{
	nvmlReturn_t (*get)(unsigned, nvmlDevice_t *, unsigned) = (__typeof__(get))slot(81);
	nvmlDevice_t d = NULL;
	CHECK(get(0, &d, 0x22), NVML_SUCCESS);
	CHECK((size_t)d, (GPU_B + 1) * 16);
	CHECK(get(1, &d, 0x22), NVML_SUCCESS);
	CHECK((size_t)d, (GPU_A + 1) * 16);
	CHECK(get(2, &d, 0x22), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(get(0, NULL, 0x22), NVML_ERROR_INVALID_ARGUMENT);
}

static void test_smi_lists(void)
{
	struct {
		nvmlProcessDetail_v1_t detail;
		char name[4096];
	} list[2];
	nvmlReturn_t (*compute)(nvmlDevice_t, unsigned *, void *) = (__typeof__(compute))slot(213);
	unsigned n = 2;
	clear();
	process(GPU_B, FOREIGN, 40 * GIB, 0, 90);
	CHECK(compute(handle(DEV_B), &n, list), NVML_SUCCESS);
	CHECK(n, 2);
	CHECK(list[0].detail.pid, getpid());
	CHECK(strncmp(list[1].name, "process ", 8), 0);
}

struct use {
	unsigned percent, pad, pid;
	char name[68];
};

/* Entries of `kinds` engines each, of the slice and of others in turn. */
static void check_uses(const char *version, unsigned kinds)
{
	nvmlReturn_t (*uses)(nvmlDevice_t, unsigned long long, unsigned *, unsigned *, void *) =
		(__typeof__(uses))slot(145);
	static char out[4 * (8 + 6 * sizeof(struct use)) + 1];
	const size_t size = 8 + kinds * sizeof(struct use);
	unsigned n = 4, type = 0;
	driver(version);
	memset(out, 0x5a, sizeof out);
	CHECK(uses(handle(DEV_B), 1, &type, &n, out), NVML_SUCCESS);
	CHECK(n, 4);
	for (unsigned i = 0; i < 4; i++)
		for (unsigned kind = 0; kind < kinds; kind++) {
			struct use u;
			memcpy(&u, out + i * size + 8 + kind * sizeof u, sizeof u);
			CHECK(u.pid, i == 1 ? (unsigned)child : i == 3 ? (unsigned)getpid() : ~0u);
			CHECK(u.percent, i == 1 ? 7 : i == 3 ? 4 : 0);
			CHECK(u.name[0] != 0, i % 2);
		}
	CHECK(out[4 * size], 0x5a);
}

static void test_smi_uses(void)
{
	clear();
	process(GPU_B, FOREIGN, 0, 0, 90);
	process(GPU_B, HOST_PID, 0, 0, 7); /* the child */
	process(GPU_B, FOREIGN + 1, 0, 0, 1);
	process(GPU_B, (unsigned)getpid(), 0, 0, 4);
	check_uses("535.261.03", 4);
	check_uses("550.163.01", 6);
}

/* With a driver whose entries are not known the lists are empty, and the driver is not asked. */
static void test_smi_unknown_driver(void)
{
	static const char *const versions[] = {"530.30.02", "545.29.06", "580.65.06", "rubbish"};
	for (unsigned v = 0; v < sizeof versions / sizeof *versions; v++) {
		unsigned n = 2, type = 0;
		char out[2];
		nvmlReturn_t (*uses)(nvmlDevice_t, unsigned long long, unsigned *, unsigned *,
				     void *) = (__typeof__(uses))slot(145);
		nvmlReturn_t (*later)(void) = (__typeof__(later))slot(251);
		driver(versions[v]);
		CHECK(uses(handle(DEV_B), 0, &type, &n, out), NVML_ERROR_NOT_FOUND);
		CHECK(later(), NVML_ERROR_NOT_SUPPORTED);
		for (int i = 213; i <= 215; i++) {
			nvmlReturn_t (*list)(nvmlDevice_t, unsigned *, void *) =
				(__typeof__(list))slot(i);
			n = 2;
			CHECK(list(handle(DEV_B), &n, out), NVML_SUCCESS);
			CHECK(n, 0);
		}
	}
	driver("550.0");
}

static void test_smi_table(void)
{
	const void *table = NULL, *again = NULL, *other = NULL;
	CHECK(CALL(nvmlInternalGetExportTable)(&table, smi_id), NVML_SUCCESS);
	CHECK(CALL(nvmlInternalGetExportTable)(&again, smi_id), NVML_SUCCESS);
	CHECK(table == again, 1);
	CHECK(CALL(nvmlInternalGetExportTable)(&other, "another table..."), NVML_SUCCESS);
	CHECK(table != other, 1);
	test_smi_devices();
	test_smi_lists();
	test_smi_uses();
	test_smi_unknown_driver();
}

/* Without its slice nothing works, and nobody crashes. */
static void test_no_slice(const char *dir)
{
	char path[4096], away[4096];
	int status = 0;
	snprintf(path, sizeof path, "%s/%s", dir, TR_FILE_LIMITS);
	snprintf(away, sizeof away, "%s/away", dir);
	rename(path, away);
	pid_t pid = fork();
	if (pid == 0) { /* a child opens the slice anew */
		nvmlMemory_t m;
		unsigned n;
		int null = open("/dev/null", O_WRONLY);
		dup2(null, 2);
		_exit(CALL(nvmlInit_v2)() != NVML_ERROR_NOT_READY ||
		      CALL(nvmlDeviceGetCount_v2)(&n) != NVML_ERROR_NOT_READY ||
		      CALL(nvmlDeviceGetMemoryInfo)((nvmlDevice_t)(size_t)16, &m) !=
			      NVML_ERROR_NOT_READY);
	}
	waitpid(pid, &status, 0);
	CHECK(status, 0);
	rename(away, path);
}

int main(int argc, char **argv)
{
	char path[4096];
	if (argc != 4)
		return 2;
	const char *dir = argv[3];
	lay_out(argv[1], argv[2], dir);
	make_slice(dir);
	add_members();
	snprintf(path, sizeof path, "%s/libnvidia-ml.so.1", dir);
	lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (lib == NULL) {
		printf("%s\n", dlerror());
		return 1;
	}
	process = (__typeof__(process))dlsym(lib, "fake_process");
	clear = (__typeof__(clear))dlsym(lib, "fake_clear");
	driver = (__typeof__(driver))dlsym(lib, "fake_driver");
	old_entries = (__typeof__(old_entries))dlsym(lib, "fake_old_entries");
	test_before_init();
	test_devices();
	test_topology();
	test_memory();
	test_processes();
	test_sessions();
	test_samples();
	test_utilization();
	test_smi_table();
	test_no_slice(dir);
	CHECK(CALL(nvmlShutdown)(), NVML_SUCCESS);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	printf("%s\n", failures == 0 ? "shim/nvml unit: ok" : "shim/nvml unit: FAILED");
	return failures != 0;
}
