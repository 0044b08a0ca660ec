/* What the tenant sees of its slice: devices, figures; what happens when the slice's files are broken;
 * and what the library leaves alone. */
#define _GNU_SOURCE
#include "suite.h"
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

/* --- devices --------------------------------------------------------------------------------- */

static void device_uuid(CUdevice dev, char *out)
{
	CUuuid u;
	OK(cuDeviceGetUuid(&u, dev));
	const unsigned char *b = (const unsigned char *)u.bytes;
	int n = snprintf(out, TR_UUID_LEN, "GPU-");
	for (int i = 0; i < 16; i++)
		n += snprintf(out + n, TR_UUID_LEN - (size_t)n, "%s%02x",
			      i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", b[i]);
}

/* With this CUDA_VISIBLE_DEVICES (NULL: unset) the devices are those of the slice, in this order. */
static void sees(const char *list, int n, int first, int second)
{
	fflush(stdout);
	pid_t pid = fork();
	if (pid != 0) {
		int status;
		CHECK(waitpid(pid, &status, 0) == pid);
		if (status != 0)
			printf("  with CUDA_VISIBLE_DEVICES=%s\n", list == NULL ? "(unset)" : list);
		EQUAL(status, 0);
		return;
	}
	char entry[256] = "CUDA_VISIBLE_DEVICES=", copy[256], uuid[TR_UUID_LEN];
	int count = 0, want[2] = {first, second};
	CUdevice dev;
	CUcontext c;
	unsetenv("CUDA_VISIBLE_DEVICES");
	if (list != NULL) {
		strcat(entry, list);
		putenv(entry);
	}
	strcpy(copy, entry);
	char **table = environ;
	const char *value = getenv("CUDA_VISIBLE_DEVICES");
	size_t entries = 0;
	while (environ[entries] != NULL)
		entries++;
	CUresult r = cuInit(0);
	CHECK(environ == table && environ[entries] == NULL);
	CHECK(getenv("CUDA_VISIBLE_DEVICES") == value && strcmp(copy, entry) == 0);
	EQUAL(r, n == 0 ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS);
	if (n == 0) {
		CHECK(cuDeviceGetCount(&count) != CUDA_SUCCESS || count == 0);
		CHECK(cuDeviceGet(&dev, 0) != CUDA_SUCCESS);
		CHECK(cuCtxCreate_v2(&c, 0, 0) != CUDA_SUCCESS);
		_exit(0);
	}
	OK(cuDeviceGetCount(&count));
	EQUAL(count, n);
	for (int i = 0; i < n; i++) {
		size_t total;
		OK(cuDeviceGet(&dev, i));
		device_uuid(dev, uuid);
		CHECK(strcmp(uuid, suite_limits->dev[want[i]].uuid) == 0);
		OK(cuDeviceTotalMem_v2(&total, dev));
		EQUAL(total, LIMIT);
		OK(cuCtxCreate_v2(&c, 0, dev));
		EQUAL(charged(want[i]), CONTEXT);
	}
	CUmemGenericAllocationHandle h;
	CUmemAllocationProp p = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
	for (int bad = n; bad < 5; bad++) {
		p.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, bad};
		IS(cuDeviceGet(&dev, bad), CUDA_ERROR_INVALID_DEVICE);
		IS(cuCtxCreate_v2(&c, 0, bad), CUDA_ERROR_INVALID_DEVICE);
		IS(cuDevicePrimaryCtxRetain(&c, bad), CUDA_ERROR_INVALID_DEVICE);
		IS(cuMemCreate(&h, 2 * MIB, &p, 0), CUDA_ERROR_INVALID_DEVICE);
	}
	_exit(0);
}

static void visible_devices(void)
{
	char both_uuids[128], prefix[32], mixed[160];
	snprintf(both_uuids, sizeof both_uuids, "%s,%s", sim_uuid(0), sim_uuid(2));
	snprintf(prefix, sizeof prefix, "%.20s", sim_uuid(0));
	snprintf(mixed, sizeof mixed, "%s, 0", prefix);
	sees(NULL, 2, 0, 1);
	sees("", 0, 0, 0);
	sees("-1", 0, 0, 0);
	sees("0", 1, 0, 0);
	sees("1,0", 2, 1, 0);
	sees("1", 1, 1, 0);
	sees("2", 0, 0, 0); /* the machine has it, the slice has not */
	sees("0,2", 1, 0, 0);
	sees("0,junk,1", 1, 0, 0);
	sees("junk", 0, 0, 0);
	sees(sim_uuid(2), 1, 0, 0);
	sees(both_uuids, 2, 1, 0);
	sees(sim_uuid(1), 0, 0, 0); /* hidden */
	sees(prefix, 1, 1, 0);
	sees(mixed, 2, 1, 0);
	sees("GPU-zzzzzzzz", 0, 0, 0);
}

static void hidden_by_bus(void)
{
	CUdevice dev;
	OK(cuInit(0));
	OK(cuDeviceGetByPCIBusId(&dev, sim_pci(0)));
	EQUAL(dev, 1);
	CHECK(cuDeviceGetByPCIBusId(&dev, sim_pci(1)) != CUDA_SUCCESS);
}

static void two_accounts(void)
{
	CUcontext a, b;
	CUdeviceptr p, q, r;
	CUmemoryPool other;
	OK(cuInit(0));
	OK(cuCtxCreate_v2(&a, 0, 0));
	OK(cuMemAlloc_v2(&p, 100 * MIB));
	both(0, CONTEXT + 100 * MIB);
	both(1, 0);
	OK(cuCtxCreate_v2(&b, 0, 1));
	OK(cuMemAlloc_v2(&q, 200 * MIB));
	both(1, CONTEXT + 200 * MIB);
	IS(cuMemAlloc_v2(&r, 100 * MIB), OOM);
	OK(cuCtxSetCurrent(a));
	OK(cuMemAlloc_v2(&r, 100 * MIB));
	both(0, CONTEXT + 200 * MIB);
	OK(cuMemFree_v2(r));
	OK(cuMemFree_v2(q)); /* in the other's context */
	both(1, CONTEXT);
	both(0, CONTEXT + 100 * MIB);
	/* The default pool of one device, by a stream of the other. */
	OK(cuDeviceGetDefaultMemPool(&other, 1));
	OK(cuMemAllocFromPoolAsync(&q, 3 * MIB, other, NULL));
	both(0, CONTEXT + 100 * MIB);
	both(1, CONTEXT + 32 * MIB);
	OK(cuMemFreeAsync(q, NULL));
	OK(cuCtxSetCurrent(b));
	OK(cuStreamSynchronize(NULL));
	both(1, CONTEXT);
	OK(cuCtxDestroy_v2(a));
	both(0, 0);
	OK(cuCtxDestroy_v2(b));
	both(1, 0);
}

/* --- figures ------------------------------------------------------------------------------- */

static void shows(uint64_t want)
{
	size_t f, t;
	OK(cuMemGetInfo_v2(&f, &t));
	EQUAL(t, LIMIT);
	EQUAL(f, want);
}

static void overhead_is(int64_t bytes)
{
	__atomic_store_n(&suite_ledger->account[0].overhead, bytes, __ATOMIC_RELEASE);
}

static void free_and_total(void)
{
	CUdeviceptr p, q;
	unsigned f, t;
	start();
	shows(LIMIT - CONTEXT);
	OK(cuMemAlloc_v2(&p, 100 * MIB));
	shows(LIMIT - CONTEXT - 100 * MIB);
	OK(cuMemGetInfo(&f, &t));
	EQUAL(t, LIMIT);
	overhead_is(10 * MIB);
	shows(LIMIT - CONTEXT - 110 * MIB);
	IS(cuMemAlloc_v2(&q, LIMIT - CONTEXT - 108 * MIB), OOM);
	OK(cuMemAlloc_v2(&q, LIMIT - CONTEXT - 110 * MIB));
	shows(0);
	OK(cuMemFree_v2(q));
	overhead_is(500 * MIB);
	shows(0);
	IS(cuMemAlloc_v2(&q, MIB), OOM);
	overhead_is(-10 * MIB);
	shows(LIMIT - CONTEXT - 90 * MIB);
	overhead_is(-500 * (int64_t)MIB);
	shows(LIMIT);
	overhead_is(0);
	OK(cuMemFree_v2(p));
	shows(LIMIT - CONTEXT);
}

static void set_limit(uint64_t bytes)
{
	__atomic_fetch_add(&suite_limits->generation, 1, __ATOMIC_ACQ_REL);
	__atomic_store_n(&suite_limits->dev[0].memory_limit, bytes, __ATOMIC_RELEASE);
	__atomic_fetch_add(&suite_limits->generation, 1, __ATOMIC_ACQ_REL);
}

static void limit_lowered(void)
{
	CUdeviceptr p, q;
	size_t f, t;
	start();
	OK(cuMemAlloc_v2(&p, 100 * MIB));
	set_limit(64 * MIB);
	OK(cuMemGetInfo_v2(&f, &t));
	CHECK(f == 0 && t == 64 * MIB);
	IS(cuMemAlloc_v2(&q, 1), OOM);
	IS(cuMemAllocAsync(&q, 1, NULL), OOM);
	OK(cuMemsetD8_v2(p, 1, 100 * MIB));
	OK(cuCtxSynchronize());
	OK(cuMemFree_v2(p));
	OK(cuMemAlloc_v2(&p, 32 * MIB));
	set_limit(400 * MIB);
	OK(cuMemAlloc_v2(&q, 300 * MIB));
	OK(cuMemFree_v2(q));
	OK(cuMemFree_v2(p));
	both(0, CONTEXT);
}

static void sizes_without_sense(void)
{
	static const uint64_t huge[] = {UINT64_MAX,	 UINT64_MAX - 4096, 1ull << 63, 1ull << 62,
					1ull << 46,	 1ull << 44,	    (1ull << 44) - 1,
					UINT64_MAX / 2};
	CUdeviceptr p;
	CUmemGenericAllocationHandle h;
	CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
				    .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
	size_t pitch;
	start();
	for (size_t i = 0; i < sizeof huge / sizeof *huge; i++) {
		CHECK(cuMemAlloc_v2(&p, huge[i]) != CUDA_SUCCESS);
		CHECK(cuMemAllocManaged(&p, huge[i], CU_MEM_ATTACH_GLOBAL) != CUDA_SUCCESS);
		CHECK(cuMemAllocAsync(&p, huge[i], NULL) != CUDA_SUCCESS);
		CHECK(cuMemAllocPitch_v2(&p, &pitch, huge[i], huge[i], 4) != CUDA_SUCCESS);
		CHECK(cuMemCreate(&h, huge[i], &prop, 0) != CUDA_SUCCESS);
		CHECK(cuMemMap(0, huge[i], huge[i], 0, 0) != CUDA_SUCCESS);
		CHECK(cuMemUnmap(2 * MIB, 0) != CUDA_SUCCESS);
		both(0, CONTEXT);
	}
	IS(cuMemAlloc_v2(&p, 0), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemFree_v2(0x1234), CUDA_ERROR_INVALID_VALUE);
	CHECK(cuMemCreate(NULL, 2 * MIB, &prop, 0) != CUDA_SUCCESS);
	CHECK(cuMemCreate(&h, 2 * MIB, NULL, 0) != CUDA_SUCCESS);
	both(0, CONTEXT);
}

/* --- broken slices --------------------------------------------------------------------------- */

/* Runs f in a child; its stderr comes back. */
static void stderr_of(void (*f)(void), char *out, size_t size)
{
	int p[2], status;
	size_t n = 0;
	ssize_t got;
	CHECK(pipe(p) == 0);
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		dup2(p[1], 2);
		close(p[0]);
		close(p[1]);
		f();
		_exit(0);
	}
	close(p[1]);
	while (n < size - 1 && (got = read(p[0], out + n, size - 1 - n)) > 0)
		n += (size_t)got;
	out[n] = 0;
	close(p[0]);
	CHECK(waitpid(pid, &status, 0) == pid);
	if (status != 0)
		printf("  %s", out);
	EQUAL(status, 0);
}

static void fails_closed(void)
{
	CUcontext c;
	CUdeviceptr p;
	CUmemGenericAllocationHandle h;
	CUdevice dev;
	CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
				    .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
	size_t f, t;
	int n = 0;
	IS(cuInit(0), CUDA_ERROR_SYSTEM_NOT_READY);
	IS(cuInit(0), CUDA_ERROR_SYSTEM_NOT_READY);
	CHECK(cuDeviceGetCount(&n) != CUDA_SUCCESS || n == 0);
	CHECK(cuDeviceGet(&dev, 0) != CUDA_SUCCESS);
	IS(cuCtxCreate_v2(&c, 0, 0), CUDA_ERROR_SYSTEM_NOT_READY);
	IS(cuDevicePrimaryCtxRetain(&c, 0), CUDA_ERROR_SYSTEM_NOT_READY);
	IS(cuMemAlloc_v2(&p, MIB), CUDA_ERROR_SYSTEM_NOT_READY);
	IS(cuMemAllocAsync(&p, MIB, NULL), CUDA_ERROR_SYSTEM_NOT_READY);
	IS(cuMemCreate(&h, 2 * MIB, &prop, 0), CUDA_ERROR_SYSTEM_NOT_READY);
	IS(cuMemGetInfo_v2(&f, &t), CUDA_ERROR_SYSTEM_NOT_READY);
	CHECK(cuMemFree_v2(0x1234) != CUDA_SUCCESS);
	CHECK(cuCtxSynchronize() != CUDA_SUCCESS);
}

static void limited_by_itself(void)
{
	CUdeviceptr p;
	start();
	OK(cuMemAlloc_v2(&p, LIMIT - CONTEXT));
	IS(cuMemAlloc_v2(&p, 1), OOM);
}

static int lines(const char *text)
{
	int n = 0;
	for (; *text != 0; text++)
		n += *text == '\n';
	return n;
}

static const char *file(const char *name)
{
	static char path[2][160];
	static int turn;
	turn = !turn;
	snprintf(path[turn], sizeof path[turn], "%s/%s", suite_dir, name);
	return path[turn];
}

static void must_fail_closed(const char *why)
{
	char text[4096];
	stderr_of(fails_closed, text, sizeof text);
	if (lines(text) != 1)
		printf("  %s: %s\n", why, text);
	EQUAL(lines(text), 1);
	CHECK(strncmp(text, "tranche: ", 9) == 0);
}

static void broken(void)
{
	char text[4096];
	CHECK(rename(file("limits"), file("saved")) == 0);
	must_fail_closed("no limits page");
	int fd = open(file("limits"), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	must_fail_closed("empty limits page");
	CHECK(ftruncate(fd, 2000) == 0);
	must_fail_closed("short limits page");
	CHECK(ftruncate(fd, 4096) == 0);
	must_fail_closed("zeroed limits page");
	close(fd);
	CHECK(rename(file("saved"), file("limits")) == 0);
	suite_limits->magic++;
	must_fail_closed("magic of the limits page");
	suite_limits->magic--;
	suite_limits->version++;
	must_fail_closed("version of the limits page");
	suite_limits->version--;
	suite_limits->n_devices = 17;
	must_fail_closed("devices of the limits page");
	suite_limits->n_devices = 1;
	CHECK(rename(file("ledger"), file("saved")) == 0);
	must_fail_closed("no ledger");
	CHECK(symlink(file("saved"), file("ledger")) == 0);
	must_fail_closed("a link for a ledger");
	CHECK(unlink(file("ledger")) == 0);
	fd = open(file("ledger"), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	CHECK(ftruncate(fd, 100000) == 0);
	must_fail_closed("short ledger");
	suite_limits->flags = TR_LIMITS_FAIL_OPEN;
	stderr_of(limited_by_itself, text, sizeof text);
	CHECK(strstr(text, "by itself") != NULL);
	suite_limits->flags = 0;
	close(fd);
	CHECK(rename(file("saved"), file("ledger")) == 0);
	suite_ledger->magic++;
	must_fail_closed("magic of the ledger");
	suite_ledger->magic--;
	stderr_of(limited_by_itself, text, sizeof text); /* all is well again */
	CHECK(chmod(file("ledger"), 0) == 0);
	if (geteuid() != 0)
		must_fail_closed("a ledger that may not be opened");
	CHECK(chmod(file("ledger"), 0600) == 0);
	if (geteuid() == 0) { /* root does not take another user's word */
		CHECK(chown(file("limits"), 65534, (gid_t)-1) == 0);
		must_fail_closed("a limits page of another user");
		CHECK(chown(file("limits"), 0, (gid_t)-1) == 0);
		stderr_of(limited_by_itself, text, sizeof text);
	}
	wait_both(0, 0);
}

/* Rubbish in the ledger loosens or tightens the slice's own limit; it breaks no process. */
static void rubbish(void)
{
	CUdeviceptr p;
	start();
	OK(cuMemAlloc_v2(&p, 10 * MIB));
	for (int i = 0; i < 200; i++) {
		uint64_t was = suite_ledger->account[0].word;
		suite_ledger->account[0].word = (uint64_t)i * 0x9e3779b97f4a7c15ull;
		CUdeviceptr q;
		size_t f, t;
		if (cuMemAlloc_v2(&q, MIB) == CUDA_SUCCESS)
			OK(cuMemFree_v2(q));
		OK(cuMemGetInfo_v2(&f, &t));
		CHECK(f <= t);
		suite_ledger->account[0].word = was;
	}
	OK(cuMemFree_v2(p));
	memset(suite_ledger->account, 0, sizeof suite_ledger->account);
	memset(suite_ledger->slot, 0, sizeof suite_ledger->slot);
}

/* --- hygiene --------------------------------------------------------------------------------- */

static int entries(const char *dir)
{
	int n = 0;
	DIR *d = opendir(dir);
	CHECK(d != NULL);
	while (readdir(d) != NULL)
		n++;
	closedir(d);
	return n;
}

static void uses_all(void)
{
	CUdeviceptr p, q;
	CUmodule m;
	CUfunction f;
	CUstream s;
	start();
	OK(cuMemAlloc_v2(&p, 3 * MIB));
	OK(cuMemAllocAsync(&q, 3 * MIB, NULL));
	OK(cuModuleLoadData(&m, ".version 7.0\n.visible .entry tranche_spin(.param .u64 ns) {}"));
	OK(cuModuleGetFunction(&f, m, "tranche_spin"));
	OK(cuStreamCreate(&s, 0));
	uint64_t ns = 100000;
	void *args[] = {&ns};
	for (int i = 0; i < 20; i++)
		OK(cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, s, args, NULL));
	OK(cuStreamSynchronize(s));
	IS(cuMemAlloc_v2(&q, LIMIT), OOM);
	OK(cuMemFree_v2(p));
}

/* Threads of the simulated driver have names of their own; of ours there are none. */
static int threads_of_ours(void)
{
	int n = 0;
	DIR *d = opendir("/proc/self/task");
	CHECK(d != NULL);
	for (struct dirent *e; (e = readdir(d)) != NULL;) {
		char path[300], name[32] = "";
		snprintf(path, sizeof path, "/proc/self/task/%s/comm", e->d_name);
		int fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd >= 0 && read(fd, name, sizeof name - 1) > 0)
			n += strncmp(name, "tranche", 7) == 0;
		if (fd >= 0)
			close(fd);
	}
	closedir(d);
	return n;
}

static void hygiene(void)
{
	struct sigaction before[65], after;
	sigset_t mask, mask_after;
	struct stat st;
	char cwd[256], cwd_after[256];
	FILE *keep = tmpfile();
	CHECK(keep != NULL);
	fflush(stdout);
	int out = dup(1);
	dup2(fileno(keep), 1);
	mode_t mode = umask(027);
	for (int s = 1; s < 65; s++)
		sigaction(s, NULL, &before[s]);
	sigprocmask(SIG_SETMASK, NULL, &mask);
	CHECK(getcwd(cwd, sizeof cwd) != NULL);
	uses_all();
	CHECK(umask(mode) == 027);
	for (int s = 1; s < 65; s++)
		if (sigaction(s, NULL, &after) == 0)
			CHECK(after.sa_handler == before[s].sa_handler &&
			      after.sa_flags == before[s].sa_flags);
	sigprocmask(SIG_SETMASK, NULL, &mask_after);
	CHECK(memcmp(&mask, &mask_after, sizeof mask) == 0);
	CHECK(getcwd(cwd_after, sizeof cwd_after) != NULL && strcmp(cwd, cwd_after) == 0);
	CHECK(fstat(1, &st) == 0 && st.st_size == 0);
	dup2(out, 1);
	CHECK(waitpid(-1, NULL, WNOHANG) == -1); /* no children */
	EQUAL(threads_of_ours(), 0);
	CHECK(entries(suite_dir) == 2 + 5); /* machine, lib, driver, limits, ledger */
}

static void quiet(void)
{
	start();
}

static void says_nothing(void)
{
	char text[4096];
	stderr_of(quiet, text, sizeof text);
	EQUAL(text[0], 0);
	wait_both(0, 0);
}

/* All descriptors of the library are out of the way and closed on exec. */
static void descriptors(void)
{
	int low = dup(0);
	start();
	for (int fd = low; fd < 1024; fd++) {
		char link[64], target[300];
		int flags = fcntl(fd, F_GETFD);
		snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
		ssize_t n = flags < 0 ? -1 : readlink(link, target, sizeof target - 1);
		if (n < 0)
			continue;
		target[n] = 0;
		if (strcmp(target, file("ledger")) != 0)
			continue;
		CHECK(flags & FD_CLOEXEC);
	}
}

#define T(f) {.name = #f, .run = f}
#define TWO(f) {.name = #f, .run = f, .order = {2, 0}, .devices = 2}
const struct suite_test slice_tests[] = {
	TWO(visible_devices), TWO(hidden_by_bus), TWO(two_accounts),
	T(free_and_total),    {.name = "limit_lowered", .run = limit_lowered, .may_pass_limit = true},
	T(sizes_without_sense),
	T(broken),	      T(rubbish),	  T(hygiene),
	T(says_nothing),      T(descriptors),	  {.name = NULL}};
