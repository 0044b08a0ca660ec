/* gpuload: puts a known load on a GPU and says what it achieved. */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "alloc.h"
#include "driver.h"
#include "ipc.h"
#include "load.h"
#include "random.h"

const char *const program = "gpuload";

/* What the processes of one run share. */
struct run {
	atomic_uint ready; /* processes that are set up, or ended before they were */
	unsigned procs;
	struct load_result result[];
};
static struct run *run;

/* The processes start to launch together. */
static void start_line(void)
{
	atomic_fetch_add(&run->ready, 1);
	while (atomic_load(&run->ready) < run->procs)
		sleep_until_ns(now_ns() + 200000);
}

static void one_process(const struct options *o, unsigned proc)
{
	driver_open(o->libcuda, o->gpu);
	for (unsigned i = 0; i < o->n_alloc; i++)
		alloc_fill(&o->alloc[i], o->json);
	if (o->random_s > 0)
		random_run(o, proc);
	if (o->flag_s > 0)
		load_flag(o);
	if (o->kernel_ns)
		load_run(o, start_line, &run->result[proc]);
	sleep_until_ns(now_ns() + (int64_t)(o->hold_s * 1e9));
}

/* Forks before any CUDA call. Returns how many children failed. */
static int in_processes(const struct options *o)
{
	int status, failed = 0;

	for (unsigned i = 0; i < o->procs; i++) {
		pid_t pid = fork();
		if (pid < 0)
			die("fork failed after %u processes", i);
		if (pid == 0) {
			one_process(o, i);
			fflush(stdout);
			_exit(0);
		}
	}
	for (;;) {
		if (wait(&status) < 0) {
			if (errno == EINTR)
				continue;
			return failed;
		}
		if (status) {
			failed++;
			atomic_fetch_add(&run->ready, 1);
		}
	}
}

int main(int argc, char **argv)
{
	static struct options o;
	int failed = 0;
	size_t size;

	options_parse(&o, argc, argv);
	if (o.ipc_size)
		return ipc_run(&o);
	size = sizeof *run + o.procs * sizeof *run->result;
	run = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (run == MAP_FAILED)
		die("out of memory");
	run->procs = o.procs;
	if (o.procs > 1)
		failed = in_processes(&o);
	else
		one_process(&o, 0);
	if (o.kernel_ns)
		load_report(&o, run->result, o.procs);
	return failed ? 1 : 0;
}
