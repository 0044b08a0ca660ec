#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include "driver.h"
#include "ipc.h"

#define PATTERN 0x5a

static void hold(const struct options *o)
{
	sleep_until_ns(now_ns() + (int64_t)(o->hold_s * 1e9));
}

static void need_ipc(void)
{
	if (!cu.cuIpcGetMemHandle || !cu.cuIpcOpenMemHandle_v2 || !cu.cuMemsetD8_v2 ||
	    !cu.cuMemcpyDtoH_v2)
		die("the driver has no IPC");
}

static void export_to(const struct options *o, int to)
{
	CUipcMemHandle h;
	CUdeviceptr p;

	driver_open(o->libcuda, o->gpu);
	need_ipc();
	MUST(cuMemAlloc_v2(&p, o->ipc_size));
	MUST(cuMemsetD8_v2(p, PATTERN, o->ipc_size));
	MUST(cuCtxSynchronize());
	MUST(cuIpcGetMemHandle(&h, p));
	for (unsigned i = 0; i < o->ipc_importers; i++)
		if (write(to, &h, sizeof h) != (ssize_t)sizeof h)
			die("ipc: write failed");
}

static void import_from(const struct options *o, int from, unsigned i)
{
	unsigned char first = 0, last = 0;
	CUipcMemHandle h;
	CUdeviceptr p;

	driver_open(o->libcuda, o->gpu);
	need_ipc();
	if (read(from, &h, sizeof h) != (ssize_t)sizeof h)
		die("ipc: the exporter gave nothing");
	MUST(cuIpcOpenMemHandle_v2(&p, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	MUST(cuMemcpyDtoH_v2(&first, p, 1));
	MUST(cuMemcpyDtoH_v2(&last, p + o->ipc_size - 1, 1));
	if (first != PATTERN || last != PATTERN)
		die("ipc: importer %u sees other bytes", i);
}

/* Child 0 exports, the others import. The exporter stays until every importer has come: a
 * pipe's end closes with the last of them. */
static void __attribute__((noreturn)) child(const struct options *o, unsigned i, int handle[2],
					     int done[2])
{
	char byte;

	close(done[i == 0]);
	if (i == 0) {
		close(handle[0]);
		export_to(o, handle[1]);
		close(handle[1]);
		while (read(done[0], &byte, 1) > 0)
			;
	} else {
		close(handle[1]);
		import_from(o, handle[0], i);
		hold(o);
	}
	_exit(0);
}

int ipc_run(const struct options *o)
{
	int handle[2], done[2], status, bad = 0;

	if (pipe(handle) || pipe(done))
		die("ipc: no pipe");
	for (unsigned i = 0; i <= o->ipc_importers; i++) {
		pid_t pid = fork();
		if (pid < 0)
			die("ipc: fork failed");
		if (pid == 0)
			child(o, i, handle, done);
	}
	close(handle[0]);
	close(handle[1]);
	close(done[0]);
	close(done[1]);
	while (wait(&status) > 0)
		bad |= status != 0;
	if (o->json)
		printf("{\"ipc\":%llu,\"importers\":%u,\"ok\":%s}\n", (unsigned long long)o->ipc_size,
		       o->ipc_importers, bad ? "false" : "true");
	else
		printf("ipc: %llu bytes, %u importers: %s\n", (unsigned long long)o->ipc_size,
		       o->ipc_importers, bad ? "FAILED" : "ok");
	return bad ? 1 : 0;
}
