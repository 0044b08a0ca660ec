/* bench-shim: what our libcuda.so.1 adds to a call of the driver's, over a driver that does
 * nothing. docs/bench.md says what each figure means. */
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "bench.h"

static const struct {
	const char *name;
	void (*run)(const struct setting *);
	bool all_cpus;
} cases[] = {
	{"launch", case_launch, false},
	{"launch-limited", case_launch_limited, false},
	{"threads", case_threads, true},
	{"threads-limited", case_threads_limited, true},
	{"memory", case_memory, false},
	{"memory-processes", case_memory_processes, false},
	{"init", case_init, false},
};

/* Each case in a process of its own: no case sees another one's libraries or memory. */
static void run_case(unsigned i, const struct setting *s)
{
	int status;

	fflush(stdout);
	pid_t pid = fork();
	if (pid < 0)
		die("fork failed");
	if (pid == 0) {
		if (!cases[i].all_cpus)
			pin_to_cpu();
		cases[i].run(s);
		fflush(stdout);
		_exit(0);
	}
	if (waitpid(pid, &status, 0) != pid || status)
		die("case %s failed", cases[i].name);
}

int main(int argc, char **argv)
{
	static const struct option longs[] = {
		{"null", 1, NULL, 'n'}, {"shim", 1, NULL, 's'},	 {"json", 1, NULL, 'j'},
		{"case", 1, NULL, 'c'}, {"quick", 0, NULL, 'q'}, {"check", 0, NULL, 'k'},
		{NULL, 0, NULL, 0},
	};
	struct setting s = {0};
	const char *json = NULL, *only = NULL;
	bool check = false;
	int c;

	while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1) {
		switch (c) {
		case 'n': s.null_driver = optarg; break;
		case 's': s.shim = optarg; break;
		case 'j': json = optarg; break;
		case 'c': only = optarg; break;
		case 'q': s.quick = true; break;
		case 'k': check = true; break;
		default: return 2;
		}
	}
	if (!s.null_driver || !s.shim)
		die("usage: bench-shim --null DRIVER --shim LIBRARY [--json FILE] [--case NAME] "
		    "[--quick] [--check]");
	report_open(json);
	printf("Calls straight to a driver that does nothing, and through our library; %ld CPUs.\n",
	       sysconf(_SC_NPROCESSORS_ONLN));
	for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++)
		if (!only || !strcmp(only, cases[i].name))
			run_case(i, &s);
	unsigned missed = report_close();
	printf("\n%u targets missed\n", missed);
	return check && missed ? 1 : 0;
}
