/* smi OUR_LIB SIMULATED_NVML DIR NVIDIA_SMI: NVIDIA's nvidia-smi in a slice of the second of two
 * simulated GPUs. The slice has 8 GiB and one member, this process, with 1 GiB. Prints what is
 * missing or too much, and nvidia-smi's output then; exit status 1. Paths are absolute. */
#include "compat.h"
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "ledger.h"
#include "test/slice.h"

#define GIB (1ull << 30)
#define OTHER "GPU-aaaaaaaa-0000-0000-0000-000000000001"
#define OURS "GPU-bbbbbbbb-0000-0000-0000-000000000002"

static int failures;

static void make_machine(const char *dir)
{
	char path[8192];
	snprintf(path, sizeof path, "%s/sim", dir);
	mkdir(path, 0700);
	setenv("TRANCHE_SIM_DIR", path, 1);
	snprintf(path, sizeof path, "%s/sim/state", dir);
	unlink(path);
	snprintf(path, sizeof path, "%s/sim/spec", dir);
	FILE *f = fopen(path, "w");
	if (f == NULL) {
		perror(path);
		exit(2);
	}
	fprintf(f, "gpu model=a100-80g uuid=%s\ngpu model=a100-80g uuid=%s\n", OTHER, OURS);
	fclose(f);
}

static void make_slice(const char *dir)
{
	struct tr_limits *l = new_limits(dir);
	struct tr_ledger *ledger = new_ledger(dir);
	uint32_t pid;
	uint64_t start, ns;
	l->n_devices = 1;
	strcpy(l->dev[0].uuid, OURS);
	l->dev[0].memory_limit = 8 * GIB;
	l->dev[0].flags = TR_DEV_MEMORY_LIMITED;
	tr_self(&pid, &start, &ns);
	add_member(ledger, 1, 0, pid, start, ns, GIB);
}

static char *output_of(const char *command)
{
	static char text[65536];
	FILE *p = popen(command, "r");
	size_t n = p == NULL ? 0 : fread(text, 1, sizeof text - 1, p);
	text[n] = 0;
	int status = p == NULL ? -1 : pclose(p);
	if (status != 0) {
		printf("%s: status %d\n", command, status);
		failures++;
	}
	return text;
}

static void expect(const char *text, const char *what, int there)
{
	if ((strstr(text, what) != NULL) == there)
		return;
	printf("nvidia-smi %s %s:\n%s\n", there ? "lacks" : "shows", what, text);
	failures++;
}

int main(int argc, char **argv)
{
	char command[8192], me[64];
	if (argc != 5)
		return 2;
	lay_out(argv[1], argv[2], argv[3]);
	make_machine(argv[3]);
	make_slice(argv[3]);
	setenv("LD_LIBRARY_PATH", argv[3], 1);
	snprintf(command, sizeof command, "timeout 20 '%s' 2>&1", argv[4]);
	char *text = output_of(command);
	expect(text, " 1024MiB / ", 1); /* 535 and 550 pad differently */
	expect(text, " 8192MiB |", 1);
	expect(text, "81920MiB", 0);
	snprintf(me, sizeof me, " %d ", (int)getpid());
	expect(text, me, 1);
	snprintf(command, sizeof command, "timeout 20 '%s' -L 2>&1", argv[4]);
	text = output_of(command);
	expect(text, "GPU 0:", 1);
	expect(text, OURS, 1);
	expect(text, OTHER, 0);
	snprintf(command, sizeof command,
		 "timeout 20 '%s' --query-compute-apps=pid,used_memory --format=csv 2>&1", argv[4]);
	snprintf(me, sizeof me, "%d, 1024 MiB", (int)getpid());
	expect(output_of(command), me, 1);
	printf("%s in a slice: %s\n", argv[4], failures == 0 ? "ok" : "FAILED");
	return failures != 0;
}
