/* Lays out a machine and a slice for each test, runs it, and holds the end of each against the same
 * rules: nothing is left charged or in use, and the limit was never passed. */
#define _GNU_SOURCE
#include "suite.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "ledger.h"
#include "state.h"

#define MACHINE_GPUS 3

struct tr_limits *suite_limits;
struct tr_ledger *suite_ledger;
char suite_dir[128];
static int ledger_fd = -1;
static char self_path[4096];

void suite_fail(const char *file, int line, const char *what, uint64_t got, uint64_t want)
{
	fprintf(stderr, "%s:%d: pid %d: %s", file, line, (int)getpid(), what);
	if (got != 0 || want != 0)
		fprintf(stderr, " (%llu, %llu)", (unsigned long long)got, (unsigned long long)want);
	fprintf(stderr, "\n");
	_exit(1);
}

/* --- the judge ----------------------------------------------------------------------------- */

static void open_machine(void)
{
	char dir[160];
	const char *why;
	snprintf(dir, sizeof dir, "%s/machine", suite_dir);
	if (sim_shared == NULL && sim_state_open(dir, &why) == NULL) {
		fprintf(stderr, "machine: %s\n", why);
		_exit(1);
	}
}

static struct sim_gpu *gpu_of(int d)
{
	open_machine();
	for (uint32_t i = 0; i < sim_shared->n_gpus; i++)
		if (strcmp(sim_shared->gpu[i].uuid, suite_limits->dev[d].uuid) == 0)
			return &sim_shared->gpu[i];
	CHECK(!"the slice's device is on the machine");
	return NULL;
}

uint64_t sim_used(int d)
{
	struct sim_gpu *g = gpu_of(d);
	sim_reap();
	return g->used;
}

uint64_t sim_peak(int d)
{
	return gpu_of(d)->peak;
}

const char *sim_uuid(int ordinal)
{
	open_machine();
	return sim_shared->gpu[ordinal].uuid;
}

const char *sim_pci(int ordinal)
{
	open_machine();
	return sim_shared->gpu[ordinal].pci;
}

static void *map_file(const char *name, size_t size, int *fd)
{
	char path[160];
	snprintf(path, sizeof path, "%s/%s", suite_dir, name);
	*fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	CHECK(*fd >= 0 && ftruncate(*fd, (off_t)size) == 0);
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
	CHECK(p != MAP_FAILED);
	return p;
}

void suite_map(void)
{
	int fd;
	suite_limits = map_file(TR_FILE_LIMITS, TR_LEASES_OFFSET + 4096, &fd);
	close(fd);
	suite_ledger = map_file(TR_FILE_LEDGER, sizeof *suite_ledger, &ledger_fd);
}

uint64_t charged(int d)
{
	tr_ledger_reclaim(suite_ledger, ledger_fd, -1);
	tr_ledger_settle_orphans(suite_ledger, ledger_fd);
	return tr_account_bytes(suite_ledger, d);
}

void both(int d, uint64_t bytes)
{
	EQUAL(charged(d), bytes);
	EQUAL(sim_used(d), bytes);
}

void nap_ms(int ms)
{
	nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000l}, NULL);
}

void wait_both(int d, uint64_t bytes)
{
	for (int i = 0; i < 1000 && (charged(d) != bytes || sim_used(d) != bytes); i++)
		nap_ms(5);
	both(d, bytes);
}

/* --- processes ----------------------------------------------------------------------------- */

CUcontext start(void)
{
	CUcontext c;
	OK(cuInit(0));
	OK(cuCtxCreate_v2(&c, 0, 0));
	return c;
}

pid_t actor(void (*f)(int sock), int *sock)
{
	int s[2];
	CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, s) == 0);
	fflush(stdout);
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		close(s[0]);
		f(s[1]);
		_exit(0);
	}
	close(s[1]);
	*sock = s[0];
	return pid;
}

void reap(pid_t pid)
{
	int status;
	CHECK(waitpid(pid, &status, 0) == pid);
	EQUAL(status, 0);
}

void end(pid_t pid)
{
	CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
}

void give(int sock, const void *p, size_t n)
{
	CHECK(send(sock, p, n, MSG_NOSIGNAL) == (ssize_t)n);
}

void take(int sock, void *p, size_t n)
{
	CHECK(recv(sock, p, n, MSG_WAITALL) == (ssize_t)n);
}

void say(int sock)
{
	give(sock, "x", 1);
}

void hear(int sock)
{
	char c;
	take(sock, &c, 1);
}

void give_fd(int sock, int fd)
{
	char c = 'f', buf[CMSG_SPACE(sizeof fd)] = {0};
	struct iovec io = {&c, 1};
	struct msghdr m = {
		.msg_iov = &io, .msg_iovlen = 1, .msg_control = buf, .msg_controllen = sizeof buf};
	struct cmsghdr *h = CMSG_FIRSTHDR(&m);
	h->cmsg_level = SOL_SOCKET;
	h->cmsg_type = SCM_RIGHTS;
	h->cmsg_len = CMSG_LEN(sizeof fd);
	memcpy(CMSG_DATA(h), &fd, sizeof fd);
	CHECK(sendmsg(sock, &m, 0) == 1);
}

int take_fd(int sock)
{
	int fd;
	char c, buf[CMSG_SPACE(sizeof fd)];
	struct iovec io = {&c, 1};
	struct msghdr m = {
		.msg_iov = &io, .msg_iovlen = 1, .msg_control = buf, .msg_controllen = sizeof buf};
	CHECK(recvmsg(sock, &m, MSG_CMSG_CLOEXEC) == 1 && CMSG_FIRSTHDR(&m) != NULL);
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
	return fd;
}

/* --- layout -------------------------------------------------------------------------------- */

/* Replaces what the field that starts with mark holds behind its first `keep` bytes. */
static void fill_field(char *image, size_t size, const char *mark, size_t keep, const char *value,
		       char pad)
{
	char *at = memmem(image, size, mark, strlen(mark));
	CHECK(at != NULL && strlen(value) + keep < TR_SLICE_FIELD);
	memset(at + keep, pad, TR_SLICE_FIELD - keep);
	memcpy(at + keep, value, strlen(value));
}

static void lay_out_library(const char *library, const char *driver)
{
	char path[200], drivers[160];
	struct stat st;
	snprintf(drivers, sizeof drivers, "%s/driver", suite_dir);
	CHECK(mkdir(drivers, 0700) == 0);
	snprintf(path, sizeof path, "%s/libcuda-driver.so.1", drivers);
	CHECK(symlink(driver, path) == 0);
	int fd = open(library, O_RDONLY | O_CLOEXEC);
	CHECK(fd >= 0 && fstat(fd, &st) == 0);
	size_t size = (size_t)st.st_size;
	char *image = malloc(size);
	CHECK(image != NULL && read(fd, image, size) == (ssize_t)size);
	close(fd);
	fill_field(image, size, TR_SLICE_MARK, strlen(TR_SLICE_MARK), suite_dir, 0);
	fill_field(image, size - 1, TR_RPATH_MARK, 0, drivers, '/');
	snprintf(path, sizeof path, "%s/lib", suite_dir);
	CHECK(mkdir(path, 0700) == 0);
	snprintf(path, sizeof path, "%s/lib/libcuda.so.1", suite_dir);
	fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0700);
	CHECK(fd >= 0 && write(fd, image, size) == (ssize_t)size);
	close(fd);
	free(image);
}

static void lay_out_machine(void)
{
	char path[160];
	snprintf(path, sizeof path, "%s/machine", suite_dir);
	CHECK(mkdir(path, 0700) == 0);
	snprintf(path, sizeof path, "%s/machine/spec", suite_dir);
	FILE *f = fopen(path, "w");
	CHECK(f != NULL);
	fprintf(f, "gpu model=h100-80g count=%d memory=%llu context=%llu\n", MACHINE_GPUS, CAPACITY,
		CONTEXT);
	CHECK(fclose(f) == 0);
	open_machine();
}

static uint64_t limit_of(const struct suite_test *t)
{
	return t->limit == 0 ? LIMIT : t->limit;
}

static void lay_out_slice(const struct suite_test *t)
{
	int n = t->devices == 0 ? 1 : t->devices;
	suite_map();
	*suite_limits = (struct tr_limits){.magic = TR_LIMITS_MAGIC,
					   .version = TR_ABI_VERSION,
					   .size = sizeof *suite_limits,
					   .generation = 2,
					   .n_devices = (uint32_t)n};
	for (int i = 0; i < n; i++) {
		struct tr_limits_dev *d = &suite_limits->dev[i];
		snprintf(d->uuid, sizeof d->uuid, "%s", sim_uuid(t->order[i]));
		d->memory_limit = limit_of(t);
		d->context_bytes = CONTEXT;
		d->cores = d->cores_ceiling = TR_CORES_WHOLE;
		d->flags = TR_DEV_MEMORY_LIMITED;
		if (t->cores > 0) {
			d->cores = d->cores_ceiling = (uint32_t)t->cores;
			d->flags |= TR_DEV_CORES_LIMITED;
		}
	}
	suite_ledger->magic = TR_LEDGER_MAGIC;
	suite_ledger->version = TR_ABI_VERSION;
	suite_ledger->size = sizeof *suite_ledger;
	suite_ledger->n_slots = TR_MAX_PROCS;
}

static int settled(const struct suite_test *t)
{
	int bad = 0;
	CHECK(suite_limits->magic == TR_LIMITS_MAGIC);
	for (int d = 0; d < (t->devices == 0 ? 1 : t->devices); d++) {
		uint64_t used = 1, left = 1;
		for (int i = 0; i < 400 && (used != 0 || left != 0); i++) {
			used = sim_used(d);
			left = charged(d) - (uint64_t)suite_ledger->account[d].overhead;
			if (used != 0 || left != 0)
				nap_ms(5);
		}
		if (used != 0 || left != 0 || (sim_peak(d) > limit_of(t) && !t->may_pass_limit)) {
			printf("  device %d at the end: %llu in use, %llu charged, peak %llu of %llu\n", d,
			       (unsigned long long)used, (unsigned long long)left,
			       (unsigned long long)sim_peak(d), (unsigned long long)limit_of(t));
			bad = 1;
		}
	}
	return bad;
}

/* In a process per test, as the machine's state is mapped once in a process. */
static int keep(const struct suite_test *t, const char *library, const char *driver)
{
	char lib[160], machine[160];
	int status;
	lay_out_machine();
	lay_out_slice(t);
	lay_out_library(library, driver);
	snprintf(lib, sizeof lib, "%s/lib", suite_dir);
	snprintf(machine, sizeof machine, "%s/machine", suite_dir);
	setenv("LD_LIBRARY_PATH", lib, 1);
	setenv("TRANCHE_SIM_DIR", machine, 1);
	setenv("SUITE_DIR", suite_dir, 1);
	pid_t pid = fork();
	if (pid == 0) {
		alarm(120);
		execl(self_path, "suite", "--test", t->name, (char *)NULL);
		_exit(127);
	}
	CHECK(waitpid(pid, &status, 0) == pid);
	if (status != 0)
		printf("  %s ended with status %x\n", t->name, (unsigned)status);
	int bad = status != 0;
	bad |= settled(t);
	return bad;
}

static bool passes(const struct suite_test *t, const char *library, const char *driver)
{
	char command[160];
	int status;
	strcpy(suite_dir, "/dev/shm/tranche-suite-XXXXXX");
	CHECK(mkdtemp(suite_dir) != NULL);
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		int bad = keep(t, library, driver);
		fflush(stdout);
		_exit(bad);
	}
	CHECK(waitpid(pid, &status, 0) == pid);
	snprintf(command, sizeof command, "rm -r '%s'", suite_dir);
	bool ok = system(command) == 0 && status == 0;
	printf("%s %s\n", ok ? "ok  " : "FAIL", t->name);
	return ok;
}

/* --- main ---------------------------------------------------------------------------------- */

static const struct suite_test *const all[] = {fill_tests, share_tests, life_tests, slice_tests};

static void run_one(const char *name)
{
	Dl_info at;
	snprintf(suite_dir, sizeof suite_dir, "%s", getenv("SUITE_DIR"));
	suite_map();
	CHECK(dladdr(dlsym(RTLD_DEFAULT, "cuMemAlloc_v2"), &at) != 0 &&
	      strncmp(at.dli_fname, suite_dir, strlen(suite_dir)) == 0);
	for (size_t g = 0; g < sizeof all / sizeof *all; g++)
		for (const struct suite_test *t = all[g]; t->name != NULL; t++)
			if (strcmp(t->name, name) == 0)
				t->run();
}

int main(int argc, char **argv)
{
	int failed = 0, ran = 0;
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc == 3 && strcmp(argv[1], "--test") == 0) {
		run_one(argv[2]);
		fflush(stdout);
		_exit(0);
	}
	if (argc < 3) {
		fprintf(stderr, "usage: suite OUR_LIBCUDA DRIVER_LIBCUDA [TEST ...]\n");
		return 2;
	}
	CHECK(readlink("/proc/self/exe", self_path, sizeof self_path - 1) > 0);
	unsetenv("CUDA_VISIBLE_DEVICES");
	for (size_t g = 0; g < sizeof all / sizeof *all; g++)
		for (const struct suite_test *t = all[g]; t->name != NULL; t++) {
			bool wanted = argc == 3;
			for (int i = 3; i < argc; i++)
				wanted |= strncmp(t->name, argv[i], strlen(argv[i])) == 0;
			if (!wanted || t->inner)
				continue;
			failed += !passes(t, argv[1], argv[2]);
			ran++;
		}
	printf("%d tests, %d failed\n", ran, failed);
	return failed != 0 || ran == 0;
}
