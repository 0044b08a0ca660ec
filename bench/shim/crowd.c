#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include "bench.h"

static void __attribute__((noreturn)) member(const char *library, int ready, int go)
{
	struct api a;
	CUdeviceptr p;
	char byte = 0;

	api_open(&a, library);
	api_start(&a);
	if (a.cuMemAlloc_v2(&p, 4 << 20))
		die("a process of the tenant got no memory");
	if (write(ready, &byte, 1) != 1)
		_exit(1);
	while (read(go, &byte, 1) > 0)
		;
	_exit(0);
}

void crowd_start(struct crowd *c, const char *library, unsigned n)
{
	int ready[2], go[2];
	char byte;

	c->n = n;
	c->pid = calloc(n + 1, sizeof *c->pid);
	if (!c->pid || pipe(ready) || pipe(go))
		die("no pipe");
	fflush(stdout);
	for (unsigned i = 0; i < n; i++) {
		c->pid[i] = fork();
		if (c->pid[i] < 0)
			die("fork failed after %u processes", i);
		if (c->pid[i] == 0) {
			close(go[1]);
			close(ready[0]);
			member(library, ready[1], go[0]);
		}
	}
	close(ready[1]);
	close(go[0]);
	for (unsigned i = 0; i < n; i++)
		if (read(ready[0], &byte, 1) != 1)
			die("%u of %u processes of the tenant did not start", n - i, n);
	close(ready[0]);
	c->go = go[1];
}

void crowd_end(struct crowd *c)
{
	close(c->go);
	for (unsigned i = 0; i < c->n; i++)
		waitpid(c->pid[i], NULL, 0);
	free(c->pid);
}
