/* cuInit, and the whole start up to the first allocation, in fresh processes: straight to the
 * driver and through the library in turn, with 0, 7 and 63 other processes in the tenant. */
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include "bench.h"

struct sample {
	double init_ms;	 /* cuInit */
	double start_ms; /* from cuInit to the first allocation */
};

static struct sample fresh(const char *library)
{
	struct sample s = {0};
	struct api a;
	CUdeviceptr p;
	int fd[2];

	if (pipe(fd))
		die("no pipe");
	fflush(stdout);
	if (fork() == 0) {
		api_open(&a, library);
		double start = now_ns();
		if (a.cuInit(0))
			_exit(1);
		s.init_ms = (now_ns() - start) / 1e6;
		api_start(&a);
		if (a.cuMemAlloc_v2(&p, 4 << 20))
			_exit(1);
		s.start_ms = (now_ns() - start) / 1e6;
		_exit(write(fd[1], &s, sizeof s) != (ssize_t)sizeof s);
	}
	close(fd[1]);
	if (read(fd[0], &s, sizeof s) != (ssize_t)sizeof s)
		die("a fresh process could not start CUDA through %s", library);
	close(fd[0]);
	wait(NULL);
	return s;
}

static void one(const struct setting *s, unsigned processes)
{
	enum { N_MAX = 60 };
	double d_init[N_MAX], o_init[N_MAX], d_start[N_MAX], o_start[N_MAX];
	unsigned n = s->quick ? 10 : N_MAX;
	char dir[64], library[4096], name[64];
	struct crowd others;

	slice_for(s, 0, dir, sizeof dir, library, sizeof library);
	crowd_start(&others, library, processes - 1);
	for (unsigned i = 0; i < n; i++) {
		struct sample d = fresh(s->null_driver), o = fresh(library);
		d_init[i] = d.init_ms;
		o_init[i] = o.init_ms;
		d_start[i] = d.start_ms;
		o_start[i] = o.start_ms;
	}
	snprintf(name, sizeof name, "cuInit, %u process%s", processes, processes > 1 ? "es" : "");
	report_added(name, "ms", stats_of(d_init, n), stats_of(o_init, n), 2);
	snprintf(name, sizeof name, "cuInit to first allocation, %u process%s", processes,
		 processes > 1 ? "es" : "");
	report_added(name, "ms", stats_of(d_start, n), stats_of(o_start, n), NO_TARGET);
	crowd_end(&others);
	slice_remove(dir);
}

void case_init(const struct setting *s)
{
	report_group("start");
	report_head("Start of a process", "ms");
	one(s, 1);
	one(s, 8);
	one(s, 64);
}
