#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "calibrate.h"

#define PATIENCE_NS (120000 * MS) /* a measurement that takes longer has hung */
#define QUEUED 16		  /* kernels of 1 ms that a saturating process has in flight */

struct together *together_new(void)
{
	struct together *t = mmap(NULL, sizeof *t, PROT_READ | PROT_WRITE,
				  MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (t == MAP_FAILED)
		die("out of memory");
	return t;
}

static void __attribute__((noreturn)) one(struct together *t, unsigned number, unsigned n, role *r)
{
	driver_open(config->libcuda, config->gpu);
	spin(stream_new(), 1000); /* loads the module */
	MUST(cuCtxSynchronize());
	atomic_fetch_add(&t->ready, 1);
	while (atomic_load(&t->ready) < n && !atomic_load(&t->stop))
		sleep_until_ns(now_ns() + 200 * US);
	r(t, number);
	if (number == 0)
		atomic_store(&t->stop, 1);
	MUST(cuCtxSynchronize());
	_exit(0);
}

/* Waits for the processes; ends them all when one failed, or none ends. */
static bool all_end(struct together *t, pid_t *pid, unsigned n)
{
	int64_t end = now_ns() + PATIENCE_NS;
	unsigned left = n;
	bool ok = true;

	while (left) {
		bool late = now_ns() > end;
		for (unsigned i = 0; i < n; i++) {
			int status;
			if (pid[i] && (late || !ok))
				kill(pid[i], SIGKILL);
			if (!pid[i] || waitpid(pid[i], &status, late || !ok ? 0 : WNOHANG) != pid[i])
				continue;
			pid[i] = 0;
			left--;
			if (status && ok) {
				ok = false;
				atomic_store(&t->stop, 1);
			}
		}
		if (left)
			sleep_until_ns(now_ns() + MS);
		if (late)
			fprintf(stderr, "%s: a measurement took more than 120 s\n", program);
	}
	return ok;
}

bool run_together(struct together *t, unsigned n, role *first, role *others)
{
	pid_t pid[MAX_PROCESSES];

	memset(t, 0, sizeof *t);
	fflush(stdout);
	for (unsigned i = 0; i < n; i++) {
		pid[i] = fork();
		if (pid[i] < 0)
			die("cannot fork");
		if (pid[i] == 0)
			one(t, i, n, i ? others : first);
	}
	return all_end(t, pid, n);
}

void saturate(struct together *t, unsigned number)
{
	CUstream s = stream_new();
	CUevent done[QUEUED];
	unsigned i = 0;

	(void)number;
	for (unsigned k = 0; k < QUEUED; k++)
		done[k] = event_new(false);
	for (; !atomic_load(&t->stop); i++) {
		if (i >= QUEUED)
			MUST(cuEventSynchronize(done[i % QUEUED]));
		spin(s, MS);
		MUST(cuEventRecord(done[i % QUEUED], s));
	}
}
