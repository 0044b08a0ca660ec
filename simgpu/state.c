/* Making, opening and sharing the state file. The contracts are in state.h. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "state.h"

struct sim_state *sim_shared;

static pthread_mutex_t open_mutex = PTHREAD_MUTEX_INITIALIZER;
static char state_dir[4096];
static int state_fd = -1;
static char why_text[512];

/* `tranche run` writes the machine's directory behind the mark. */
#define DIR_MARK "@@TRANCHE_SIM@@"
__attribute__((used)) static const volatile char dir_field[256] = DIR_MARK;

uint64_t sim_now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

uint64_t sim_realtime_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	return (uint64_t)t.tv_sec * 1000000ull + (uint64_t)t.tv_nsec / 1000;
}

const char *sim_state_dir(void)
{
	return state_dir;
}

int sim_state_fd(void)
{
	return state_fd;
}

static void find_dir(const char *dir)
{
	if (!dir)
		dir = getenv("TRANCHE_SIM_DIR");
	if (dir && *dir) {
		snprintf(state_dir, sizeof state_dir, "%s", dir);
		return;
	}
	size_t mark = sizeof DIR_MARK - 1;
	for (size_t i = mark; i < sizeof dir_field; i++)
		state_dir[i - mark] = dir_field[i];
	state_dir[sizeof dir_field - mark] = 0;
	if (!state_dir[0])
		snprintf(state_dir, sizeof state_dir, "/dev/shm/tranche-sim-%u/default", (unsigned)geteuid());
}

__attribute__((format(printf, 1, 2))) static void *fail(const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(why_text, sizeof why_text, fmt, ap);
	va_end(ap);
	return NULL;
}

static char *read_spec(int fd)
{
	struct stat st;
	if (sim_fstat(fd, &st) || st.st_size > 1 << 20)
		return NULL;
	char *text = calloc(1, (size_t)st.st_size + 1);
	size_t n = 0;
	while (text && n < (size_t)st.st_size) {
		ssize_t r = read(fd, text + n, (size_t)st.st_size - n);
		if (r <= 0)
			break;
		n += (size_t)r;
	}
	return text;
}

static void init_mutex(pthread_mutex_t *m)
{
	pthread_mutexattr_t a;
	pthread_mutexattr_init(&a);
	pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
	pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
	pthread_mutex_init(m, &a);
	pthread_mutexattr_destroy(&a);
}

static size_t state_bytes(uint32_t gpus)
{
	return offsetof(struct sim_state, gpu) + gpus * sizeof(struct sim_gpu);
}

static void *map(int fd, size_t n)
{
	void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
	if (p == MAP_FAILED)
		return NULL;
	madvise(p, n, MADV_DONTDUMP);
	return p;
}

static void fill_state(struct sim_state *s)
{
	uint64_t now = sim_now_ns();
	struct sim_engine_conf conf = { .slice_ns = s->slice_us * 1000ull,
					.switch_ns = s->switch_us * 1000ull,
					.sample_ns = s->sample_ms * 1000000ull,
					.depth = s->queue_depth };
	s->version = SIM_VERSION;
	s->size = state_bytes(s->n_gpus);
	s->created_ns = now;
	init_mutex(&s->lock);
	for (uint32_t i = 0; i < s->n_gpus; i++) {
		init_mutex(&s->gpu[i].lock);
		sim_engine_init(&s->gpu[i].engine, &conf, now);
	}
	s->magic = SIM_MAGIC;
}

/* The file is sparse: a write into it when its file system is full would be a bus error, so some
 * room must be there from the start. */
#define STATE_ROOM (16ull << 20)
static bool room(int fd)
{
	struct statvfs v;
	return fstatvfs(fd, &v) != 0 || (uint64_t)v.f_bavail * v.f_frsize >= STATE_ROOM;
}

/* Makes <dir>/state under a name of its own and renames it, so that whoever can open it finds it
 * whole. The caller holds the flock on spec. */
static bool create_state(int spec_fd, const char *path)
{
	char tmp[4300], why[300];
	char *text = read_spec(spec_fd);
	if (!text)
		return fail("%s/spec: cannot be read", state_dir), false;
	snprintf(tmp, sizeof tmp, "%s.%d", path, (int)getpid());
	int fd = open(tmp, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	size_t n = state_bytes(SIM_MAX_GPUS);
	struct sim_state *s = fd >= 0 && !ftruncate(fd, (off_t)n) ? map(fd, n) : NULL;
	bool ok = s != NULL;
	if (!ok) {
		fail("%s: %s", tmp, strerror(errno));
	} else if (!room(fd)) {
		fail("%s: no room in its file system", path);
		ok = false;
	} else if (sim_spec_parse(text, state_dir, s, why, sizeof why)) {
		fail("%s/spec: %s", state_dir, why);
		ok = false;
	} else {
		fill_state(s);
		ok = !ftruncate(fd, (off_t)s->size) && !rename(tmp, path);
		if (!ok)
			fail("%s: %s", path, strerror(errno));
	}
	if (s)
		munmap(s, n);
	if (fd >= 0)
		close(fd);
	if (!ok)
		unlink(tmp);
	free(text);
	return ok;
}

static int open_or_create(const char *path)
{
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd >= 0 || errno != ENOENT)
		return fd;
	char spec[4200];
	snprintf(spec, sizeof spec, "%s/spec", state_dir);
	int spec_fd = open(spec, O_RDONLY | O_CLOEXEC);
	if (spec_fd < 0)
		return fail("no simulated machine: %s: %s", spec, strerror(errno)), -1;
	while (flock(spec_fd, LOCK_EX) && errno == EINTR)
		;
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0 && create_state(spec_fd, path))
		fd = open(path, O_RDWR | O_CLOEXEC);
	close(spec_fd);
	return fd;
}

static struct sim_state *open_state(const char *dir)
{
	char path[4200];
	struct stat st;
	find_dir(dir);
	snprintf(path, sizeof path, "%s/state", state_dir);
	why_text[0] = 0;
	int fd = open_or_create(path);
	if (fd < 0)
		return why_text[0] ? NULL : fail("%s: %s", path, strerror(errno));
	if (sim_fstat(fd, &st) || (size_t)st.st_size < state_bytes(0)) {
		close(fd);
		return fail("%s: not a state file", path);
	}
	struct sim_state *s = map(fd, (size_t)st.st_size);
	if (!s || s->magic != SIM_MAGIC || s->version != SIM_VERSION || s->size != (uint64_t)st.st_size ||
	    s->size != state_bytes(s->n_gpus)) {
		if (s)
			munmap(s, (size_t)st.st_size);
		close(fd);
		return fail("%s: made by another version; remove it", path);
	}
	state_fd = fd;
	return s;
}

struct sim_state *sim_state_open(const char *dir, const char **why)
{
	pthread_mutex_lock(&open_mutex);
	if (!sim_shared)
		__atomic_store_n(&sim_shared, open_state(dir), __ATOMIC_RELEASE);
	if (why)
		*why = why_text;
	pthread_mutex_unlock(&open_mutex);
	return sim_shared;
}

/* The sums follow from the parts: whatever a dead owner left half done is in one of the parts. */
static void recount(struct sim_state *s)
{
	for (uint32_t g = 0; g < s->n_gpus; g++) {
		uint64_t used = 0, orphans = 0;
		for (int i = 0; i < SIM_MAX_PROCS; i++)
			if (s->proc[i].state == SIM_PROC_USED)
				used += s->proc[i].gpu[g].memory;
		for (int i = 0; i < SIM_MAX_OBJECTS; i++)
			if (s->object[i].used && s->object[i].orphan && s->object[i].gpu == g)
				orphans += s->object[i].size;
		s->gpu[g].orphans = orphans;
		s->gpu[g].used = used + orphans;
	}
}

void sim_lock(void)
{
	if (pthread_mutex_lock(&sim_shared->lock) == EOWNERDEAD) {
		recount(sim_shared);
		pthread_mutex_consistent(&sim_shared->lock);
	}
}

void sim_unlock(void)
{
	pthread_mutex_unlock(&sim_shared->lock);
}

void sim_gpu_lock(struct sim_gpu *g)
{
	if (pthread_mutex_lock(&g->lock) == EOWNERDEAD) {
		sim_engine_repair(&g->engine);
		pthread_mutex_consistent(&g->lock);
	}
}

void sim_gpu_unlock(struct sim_gpu *g)
{
	pthread_mutex_unlock(&g->lock);
}

/* Errors of programs: the GPU is as good as before. */
static bool by_program(uint32_t xid)
{
	static const uint32_t list[] = { 13, 31, 43, 45, 68, 109, 154 };
	for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
		if (list[i] == xid)
			return true;
	return false;
}

void sim_xid_raise(int g, uint32_t xid)
{
	sim_lock();
	if (!by_program(xid))
		__atomic_store_n(&sim_shared->gpu[g].recovery, 1, __ATOMIC_RELEASE);
	struct sim_xid_event *e = &sim_shared->xid[sim_shared->xid_head % SIM_MAX_XIDS];
	*e = (struct sim_xid_event){ .time_ns = sim_now_ns(), .gpu = (uint32_t)g, .xid = xid };
	sim_shared->gpu[g].xid = xid;
	__atomic_add_fetch(&sim_shared->xid_head, 1, __ATOMIC_RELEASE);
	sim_unlock();
}
