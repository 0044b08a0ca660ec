/* Who uses the machine: process slots, what they hold, and taking it back. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "state.h"

/* A process whose lock is free but which still runs has called exec, or is about to become a zombie.
 * After this long it is the former. */
#define EXEC_GRACE_NS 100000000ull

static pthread_mutex_t claim_mutex = PTHREAD_MUTEX_INITIALIZER;
static int my_slot = -1;
static uint32_t holds[SIM_MAX_OBJECTS]; /* uses of other processes' objects here */
static int hold_fd = -1; /* the description whose read locks hold other processes' objects */

/* --- /proc ------------------------------------------------------------------------------------ */

/* State letter and start time of a process; 0: gone. */
static char read_stat(uint32_t pid, uint64_t *start)
{
	char path[32], text[1024];
	snprintf(path, sizeof path, "/proc/%u/stat", pid);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	ssize_t n = read(fd, text, sizeof text - 1);
	close(fd);
	if (n <= 0)
		return 0;
	text[n] = 0;
	char *p = strrchr(text, ')');
	char state = 0;
	unsigned long long t = 0;
	if (!p || sscanf(p + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
				"%*s %*s %llu", &state, &t) != 2)
		return 0;
	*start = t;
	return state;
}

uint64_t sim_proc_starttime(uint32_t pid)
{
	uint64_t start = 0;
	return read_stat(pid, &start) ? start : 0;
}

static uint64_t pid_namespace(void)
{
	struct stat st;
	int fd = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC);
	uint64_t inode = fd >= 0 && !sim_fstat(fd, &st) ? (uint64_t)st.st_ino : 0;
	if (fd >= 0)
		close(fd);
	return inode;
}

/* --- processes of other PID namespaces -------------------------------------------------------- */

#define SCAN_NS 50000000ull

static pthread_mutex_t here_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
	uint64_t generation;
	uint32_t pid;
} here[SIM_MAX_PROCS]; /* their numbers in this one, once found */

/* The last number of the line NSpid: the process's own. */
static uint32_t innermost_pid(const char *pid)
{
	char path[300], text[4096];
	snprintf(path, sizeof path, "/proc/%s/status", pid);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : 0;
	if (fd >= 0)
		close(fd);
	text[n > 0 ? n : 0] = 0;
	char *line = strstr(text, "\nNSpid:");
	if (!line)
		return 0;
	line[1 + strcspn(line + 1, "\n")] = 0;
	char *last = strrchr(line, '\t');
	return last ? (uint32_t)strtoul(last + 1, NULL, 10) : 0;
}

static void find_here(void)
{
	DIR *proc = opendir("/proc");
	for (struct dirent *d; proc && (d = readdir(proc));) {
		char path[300], link[64];
		uint64_t start = 0;
		uint32_t pid = (uint32_t)strtoul(d->d_name, NULL, 10);
		if (!pid)
			continue;
		snprintf(path, sizeof path, "/proc/%s/ns/pid", d->d_name);
		ssize_t n = readlink(path, link, sizeof link - 1);
		link[n > 0 ? n : 0] = 0;
		uint64_t ns = n > 5 ? strtoull(link + 5, NULL, 10) : 0; /* pid:[N] */
		for (int i = 0; ns && i < SIM_MAX_PROCS; i++) {
			const struct sim_proc *p = &sim_shared->proc[i];
			if (p->state != SIM_PROC_USED || p->pidns != ns || ns == pid_namespace() ||
			    p->pid != innermost_pid(d->d_name) || !read_stat(pid, &start) ||
			    start != p->starttime)
				continue;
			here[i].generation = p->generation;
			here[i].pid = pid;
		}
	}
	if (proc)
		closedir(proc);
}

uint32_t sim_proc_pid_here(int i)
{
	static uint64_t scanned;
	const struct sim_proc *p = &sim_shared->proc[i];
	uint64_t now = sim_now_ns();
	if (!p->pidns || p->pidns == pid_namespace())
		return p->pid;
	pthread_mutex_lock(&here_mutex);
	if (here[i].generation != p->generation && now - scanned > SCAN_NS) {
		scanned = now;
		find_here();
	}
	uint32_t pid = here[i].generation == p->generation ? here[i].pid : 1u << 30 | (uint32_t)i;
	pthread_mutex_unlock(&here_mutex);
	return pid;
}

/* --- locks ------------------------------------------------------------------------------------ */

static bool lock_byte(int fd, int64_t at, short type)
{
	struct flock l = { .l_type = type, .l_whence = SEEK_SET, .l_start = at, .l_len = 1 };
	return !fcntl(fd, F_OFD_SETLK, &l);
}

/* Whether anyone holds a lock on the byte. The descriptor asked through never holds one. */
static bool byte_locked(int64_t at)
{
	struct flock l = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = at, .l_len = 1 };
	if (fcntl(sim_state_fd(), F_OFD_GETLK, &l))
		return true; /* cannot tell: keep */
	return l.l_type != F_UNLCK;
}

/* A new open file description of the state file. */
static int open_again(int flags)
{
	char path[4200];
	snprintf(path, sizeof path, "/proc/self/fd/%d", sim_state_fd());
	return open(path, flags | O_CLOEXEC);
}

/* --- slots ------------------------------------------------------------------------------------ */

bool sim_proc_alive(const struct sim_proc *p)
{
	uint64_t start = 0;
	if (p->pidns && p->pidns != pid_namespace())
		return true;
	char c = read_stat(p->pid, &start);
	return c && c != 'Z' && c != 'X' && start == p->starttime;
}

static bool slot_dead(struct sim_proc *p, int i)
{
	if (byte_locked(SIM_LOCK_PROC + i)) {
		p->lock_free_since = 0;
		return false;
	}
	if ((p->pidns && p->pidns != pid_namespace()) || !sim_proc_alive(p))
		return true;
	uint64_t now = sim_now_ns();
	if (!p->lock_free_since)
		p->lock_free_since = now;
	return now - p->lock_free_since > EXEC_GRACE_NS;
}

/* Each step leaves counts that recount() of state.c can rebuild. */
static void free_slot(int i)
{
	struct sim_state *s = sim_shared;
	struct sim_proc *p = &s->proc[i];
	for (int k = 0; k < (int)s->object_top; k++) {
		struct sim_object *o = &s->object[k];
		if (!o->used || o->orphan || o->slot != (uint32_t)i || o->slot_generation != p->generation)
			continue;
		if (byte_locked(SIM_LOCK_OBJECT + k)) {
			o->orphan = 1;
			p->gpu[o->gpu].memory -= o->size;
			s->gpu[o->gpu].orphans += o->size;
		} else {
			o->used = 0;
		}
	}
	for (uint32_t g = 0; g < s->n_gpus; g++) {
		struct sim_gpu *gpu = &s->gpu[g];
		sim_gpu_lock(gpu);
		sim_engine_drop_proc(&gpu->engine, (uint32_t)i, sim_now_ns(), false);
		sim_gpu_unlock(gpu);
		gpu->used -= p->gpu[g].memory;
		p->gpu[g].memory = 0;
		p->gpu[g].contexts = p->gpu[g].n_contexts = 0;
	}
	p->state = SIM_PROC_FREE;
}

static void reap_locked(void)
{
	struct sim_state *s = sim_shared;
	for (int i = 0; i < SIM_MAX_PROCS; i++)
		if (s->proc[i].state == SIM_PROC_USED && i != my_slot && slot_dead(&s->proc[i], i))
			free_slot(i);
	for (int k = 0; k < (int)s->object_top; k++) {
		struct sim_object *o = &s->object[k];
		if (!o->used || !o->orphan || byte_locked(SIM_LOCK_OBJECT + k))
			continue;
		o->used = 0;
		s->gpu[o->gpu].orphans -= o->size;
		s->gpu[o->gpu].used -= o->size;
	}
}

void sim_reap(void)
{
	sim_lock();
	reap_locked();
	sim_unlock();
}

static void forked(void)
{
	/* The descriptors stay: a living fork keeps its parent's memory. */
	my_slot = -1;
	hold_fd = -1;
	memset(holds, 0, sizeof holds);
	pthread_mutex_init(&claim_mutex, NULL);
}

static void take_slot(int i)
{
	struct sim_state *s = sim_shared;
	struct sim_proc *p = &s->proc[i];
	uint64_t generation = p->generation + 1;
	memset(p, 0, sizeof *p);
	p->generation = generation;
	p->pid = (uint32_t)getpid();
	p->starttime = sim_proc_starttime(p->pid);
	p->pidns = pid_namespace();
	p->claimed_ns = sim_now_ns();
	int fd = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
	if (fd >= 0) {
		ssize_t n = read(fd, p->comm, sizeof p->comm - 1);
		if (n > 0 && p->comm[n - 1] == '\n')
			p->comm[n - 1] = 0;
		close(fd);
	}
	for (uint32_t g = 0; g < s->n_gpus; g++) {
		sim_gpu_lock(&s->gpu[g]);
		sim_engine_drop_proc(&s->gpu[g].engine, (uint32_t)i, sim_now_ns(), true);
		sim_gpu_unlock(&s->gpu[g]);
	}
	__atomic_store_n(&p->state, SIM_PROC_USED, __ATOMIC_RELEASE);
}

static int claim_locked(int fd)
{
	struct sim_state *s = sim_shared;
	uint32_t pid = (uint32_t)getpid();
	uint64_t start = sim_proc_starttime(pid);
	/* This very process before an exec: its memory went with the descriptors. */
	for (int i = 0; i < SIM_MAX_PROCS; i++)
		if (s->proc[i].state == SIM_PROC_USED && s->proc[i].pid == pid &&
		    s->proc[i].starttime == start && !byte_locked(SIM_LOCK_PROC + i))
			free_slot(i);
	for (int pass = 0; pass < 2; pass++) {
		for (int i = 0; i < SIM_MAX_PROCS; i++) {
			if (s->proc[i].state != SIM_PROC_FREE || !lock_byte(fd, SIM_LOCK_PROC + i, F_WRLCK))
				continue;
			take_slot(i);
			return i;
		}
		reap_locked();
	}
	return -1;
}

int sim_proc_claim(void)
{
	static bool hooked;
	pthread_mutex_lock(&claim_mutex);
	if (!hooked)
		hooked = !pthread_atfork(NULL, NULL, forked);
	if (my_slot < 0) {
		int fd = open_again(O_RDWR);
		if (fd >= 0) {
			sim_lock();
			my_slot = claim_locked(fd);
			sim_unlock();
			if (my_slot < 0)
				close(fd);
		}
	}
	pthread_mutex_unlock(&claim_mutex);
	return my_slot;
}

int sim_proc_slot(void)
{
	return my_slot;
}

/* --- memory ----------------------------------------------------------------------------------- */

bool sim_mem_charge(int g, uint64_t bytes)
{
	struct sim_gpu *gpu = &sim_shared->gpu[g];
	struct sim_proc_gpu *mine = &sim_shared->proc[my_slot].gpu[g];
	sim_lock();
	/* The dead are looked for when they would matter: to the capacity, or to the peak. */
	if (bytes > gpu->capacity - gpu->used || gpu->used + bytes > gpu->peak)
		reap_locked();
	bool fits = bytes <= gpu->capacity - gpu->used;
	if (fits) {
		gpu->used += bytes;
		mine->memory += bytes;
		if (mine->memory > mine->peak)
			mine->peak = mine->memory;
		if (gpu->used > gpu->peak)
			gpu->peak = gpu->used;
	}
	sim_unlock();
	if (!fits)
		SIM_TRACE("gpu %d: %llu bytes refused, %llu of %llu used", g, (unsigned long long)bytes,
			  (unsigned long long)gpu->used, (unsigned long long)gpu->capacity);
	return fits;
}

void sim_mem_uncharge(int g, uint64_t bytes)
{
	if (my_slot < 0)
		return;
	sim_lock();
	sim_shared->proc[my_slot].gpu[g].memory -= bytes;
	sim_shared->gpu[g].used -= bytes;
	sim_unlock();
}

/* --- objects ---------------------------------------------------------------------------------- */

int sim_object_new(uint32_t kind, int gpu, int fd, uint64_t offset, uint64_t size)
{
	struct sim_state *s = sim_shared;
	int found = -1;
	sim_lock();
	for (int pass = 0; pass < 2 && found < 0; pass++) {
		for (int k = 0; k < SIM_MAX_OBJECTS && found < 0; k++)
			if (!s->object[k].used && !byte_locked(SIM_LOCK_OBJECT + k))
				found = k;
		if (found < 0)
			reap_locked();
	}
	if (found >= 0) {
		s->object[found] = (struct sim_object){
			.kind = kind, .gpu = (uint32_t)gpu, .slot = (uint32_t)my_slot,
			.slot_generation = s->proc[my_slot].generation, .src_pid = (uint32_t)getpid(),
			.src_fd = fd, .src_start = s->proc[my_slot].starttime, .offset = offset, .size = size,
			.serial = ++s->object_serial,
		};
		if ((uint64_t)found >= s->object_top)
			s->object_top = (uint64_t)found + 1;
		__atomic_store_n(&s->object[found].used, 1, __ATOMIC_RELEASE);
	}
	sim_unlock();
	return found;
}

bool sim_object_drop(int k)
{
	struct sim_state *s = sim_shared;
	struct sim_object *o = &s->object[k];
	sim_lock();
	bool held = byte_locked(SIM_LOCK_OBJECT + k);
	uint64_t size = o->size;
	if (held) {
		o->orphan = 1;
		s->gpu[o->gpu].orphans += size;
	} else {
		o->used = 0;
		s->gpu[o->gpu].used -= size;
	}
	s->proc[my_slot].gpu[o->gpu].memory -= size;
	sim_unlock();
	return held;
}

int sim_object_export(int k)
{
	int fd = open_again(O_RDONLY);
	if (fd < 0)
		return -1;
	if (!lock_byte(fd, SIM_LOCK_OBJECT + k, F_RDLCK) || lseek(fd, SIM_LOCK_OBJECT + k, SEEK_SET) < 0) {
		close(fd);
		return -1;
	}
	return fd;
}

int sim_object_of_fd(int fd)
{
	struct stat mine, other;
	if (sim_fstat(fd, &other) || sim_fstat(sim_state_fd(), &mine) || mine.st_ino != other.st_ino ||
	    mine.st_dev != other.st_dev)
		return -1;
	off_t at = lseek(fd, 0, SEEK_CUR);
	return at >= SIM_LOCK_OBJECT && at < SIM_LOCK_OBJECT + SIM_MAX_OBJECTS ?
		       (int)(at - SIM_LOCK_OBJECT) : -1;
}

bool sim_object_hold(int k, uint64_t serial)
{
	struct sim_object *o = &sim_shared->object[k];
	sim_lock();
	if (hold_fd < 0)
		hold_fd = open_again(O_RDONLY);
	bool ok = hold_fd >= 0 && o->used && (!serial || o->serial == serial) &&
		  (holds[k] || lock_byte(hold_fd, SIM_LOCK_OBJECT + k, F_RDLCK));
	holds[k] += ok;
	sim_unlock();
	return ok;
}

void sim_object_unhold(int k)
{
	struct sim_object *o = &sim_shared->object[k];
	sim_lock();
	if (--holds[k] == 0)
		lock_byte(hold_fd, SIM_LOCK_OBJECT + k, F_UNLCK);
	if (!holds[k] && o->used && o->orphan && !byte_locked(SIM_LOCK_OBJECT + k)) {
		o->used = 0;
		sim_shared->gpu[o->gpu].orphans -= o->size;
		sim_shared->gpu[o->gpu].used -= o->size;
	}
	sim_unlock();
}

int sim_object_open(int k)
{
	struct sim_object *o = &sim_shared->object[k];
	char path[64];
	if (sim_proc_starttime(o->src_pid) != o->src_start)
		return -1;
	snprintf(path, sizeof path, "/proc/%u/fd/%d", o->src_pid, o->src_fd);
	return open(path, O_RDWR | O_CLOEXEC);
}

void sim_object_serve(int k, int fd)
{
	struct sim_object *o = &sim_shared->object[k];
	sim_lock();
	o->src_fd = fd;
	o->src_start = sim_shared->proc[my_slot].starttime;
	o->src_pid = (uint32_t)getpid();
	sim_unlock();
}
