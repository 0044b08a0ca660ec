#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "driver.h"
#include "options.h"

static const char help[] =
	"usage: gpuload [OPTION]...\n"
	"Puts a known load on a GPU through the CUDA driver API and says what it achieved.\n"
	"\n"
	"kernels (each runs for a given time)\n"
	"  --kernel DURATION   launch kernels of this duration: 10us, 1.5ms, 2s\n"
	"  --grid BLOCKS       blocks of each launch (132)\n"
	"  --block THREADS     threads of each block (128)\n"
	"  --rate N            launches a second, all threads together (as fast as possible)\n"
	"  --poisson           at random times, so many a second in the mean; needs --rate\n"
	"  --latency           how long each launch took, from when it was due to when it was done\n"
	"  --depth N           launches in flight per stream (64); 0: never wait\n"
	"  --sync-each         wait for each launch\n"
	"  --streams N         streams of each thread (1)\n"
	"  --graph NODES       each launch is a graph of so many kernels\n"
	"  --capture           make that graph by stream capture\n"
	"  --threads N         launching threads (1)\n"
	"  --time SECONDS      measure for so long (5)\n"
	"  --warmup SECONDS    launch for so long before (0)\n"
	"  --delay SECONDS     be idle for so long before the first launch\n"
	"  --cycle ON:OFF      launch for ON seconds, be idle for OFF, and so on\n"
	"  --probe             kernels record on the GPU when they ran (real GPUs; 275 s at most)\n"
	"  --spin-flag SECONDS one kernel that spins until the host sets a flag after so long\n"
	"\n"
	"memory\n"
	"  --alloc FAMILY:SIZE[:COUNT]   allocate COUNT times, or until refused; may be repeated.\n"
	"                      plain pitched managed array2d array3d mipmap async pool vmm graph\n"
	"  --hold SECONDS      keep it for so long\n"
	"  --random-alloc SECONDS:MAX    allocate and free all families at random, MAX bytes at most\n"
	"                      at a time in this process\n"
	"  --forks N           with it, fork so many idle children on the way\n"
	"  --seed N            of the random choices\n"
	"  --ipc SIZE:IMPORTERS  one process exports SIZE bytes, the others import them\n"
	"\n"
	"  --procs N           do all of it in N processes\n"
	"  --gpu N             device ordinal (0)\n"
	"  --libcuda PATH      driver library (libcuda.so.1)\n"
	"  --json              one JSON object per process on stdout\n";

static void __attribute__((noreturn)) bad(const char *option, const char *value)
{
	die("--%s %s: not understood (gpuload --help)", option, value);
}

static double number(const char *option, const char *s, char **end)
{
	double v;

	errno = 0;
	v = strtod(s, end);
	if (errno || *end == s || v < 0)
		bad(option, s);
	return v;
}

static int64_t duration_ns(const char *option, const char *s)
{
	char *end;
	double v = number(option, s, &end);

	if (!strcmp(end, "ns"))
		return (int64_t)v;
	if (!strcmp(end, "us"))
		return (int64_t)(v * 1e3);
	if (!strcmp(end, "ms"))
		return (int64_t)(v * 1e6);
	if (!strcmp(end, "s"))
		return (int64_t)(v * 1e9);
	bad(option, s);
}

/* Bytes with an optional unit; stops at ':' or the end. */
static uint64_t size(const char *option, const char *s, char **end)
{
	static const struct {
		const char *name;
		double factor;
	} unit[] = {{"Ki", 1024.0}, {"Mi", 1048576.0}, {"Gi", 1073741824.0},
		    {"K", 1e3},	    {"M", 1e6},	       {"G", 1e9}};
	double v = number(option, s, end);

	for (unsigned i = 0; i < sizeof unit / sizeof *unit; i++) {
		size_t n = strlen(unit[i].name);
		if (!strncmp(*end, unit[i].name, n)) {
			*end += n;
			v *= unit[i].factor;
			break;
		}
	}
	if (**end && **end != ':')
		bad(option, s);
	return (uint64_t)v;
}

static unsigned whole(const char *option, const char *s)
{
	char *end;
	double v = number(option, s, &end);

	if (*end || v > 1e9)
		bad(option, s);
	return (unsigned)v;
}

static double seconds(const char *option, const char *s)
{
	char *end;
	double v = number(option, s, &end);

	if (*end && strcmp(end, "s"))
		bad(option, s);
	return v;
}

static void add_alloc(struct options *o, const char *s)
{
	struct alloc_pattern *a = &o->alloc[o->n_alloc];
	size_t n = strcspn(s, ":");
	char *end;

	if (o->n_alloc == MAX_ALLOCS || !s[n] || n >= sizeof a->family)
		bad("alloc", s);
	memcpy(a->family, s, n);
	a->size = size("alloc", s + n + 1, &end);
	if (*end == ':')
		a->count = whole("alloc", end + 1);
	if (!a->size)
		bad("alloc", s);
	o->n_alloc++;
}

/* "A:B" where A is a number of seconds or a size and B the other kind. */
static void pair(const char *option, const char *s, double *secs, uint64_t *bytes, unsigned *n)
{
	char *end;

	if (secs)
		*secs = number(option, s, &end);
	else
		*bytes = size(option, s, &end);
	if (*end != ':')
		bad(option, s);
	if (secs)
		*bytes = size(option, end + 1, &end);
	else
		*n = whole(option, end + 1);
}

static void cycle(struct options *o, const char *s)
{
	char *end;

	o->on_s = number("cycle", s, &end);
	if (*end != ':')
		bad("cycle", s);
	o->off_s = seconds("cycle", end + 1);
}

/* What the options ask for together. */
static void check(const struct options *o)
{
	if (!o->streams || !o->threads || !o->procs || !o->grid || !o->block)
		die("streams, threads, procs, grid and block start at 1");
	if (!o->kernel_ns && !o->n_alloc && !o->random_s && !o->ipc_size && !o->flag_s)
		die("nothing to do: --kernel, --alloc, --random-alloc, --ipc or --spin-flag (gpuload --help)");
	if (o->poisson && o->rate <= 0)
		die("--poisson: at what --rate?");
	if (o->latency && (o->threads > 1 || o->procs > 1 || o->streams > 1))
		die("--latency: one thread, one stream, one process");
}

enum {
	OPT_KERNEL = 256, OPT_GRID, OPT_BLOCK, OPT_RATE, OPT_DEPTH, OPT_SYNC, OPT_STREAMS,
	OPT_GRAPH, OPT_CAPTURE, OPT_THREADS, OPT_TIME, OPT_WARMUP, OPT_FLAG, OPT_ALLOC, OPT_HOLD,
	OPT_POISSON, OPT_LATENCY, OPT_DELAY, OPT_CYCLE, OPT_PROBE,
	OPT_RANDOM, OPT_FORKS, OPT_SEED, OPT_IPC, OPT_PROCS, OPT_GPU, OPT_LIBCUDA, OPT_JSON,
	OPT_HELP,
};

static const struct option longs[] = {
	{"kernel", 1, NULL, OPT_KERNEL},   {"grid", 1, NULL, OPT_GRID},
	{"block", 1, NULL, OPT_BLOCK},	   {"rate", 1, NULL, OPT_RATE},
	{"poisson", 0, NULL, OPT_POISSON}, {"latency", 0, NULL, OPT_LATENCY},
	{"delay", 1, NULL, OPT_DELAY},	   {"cycle", 1, NULL, OPT_CYCLE},
	{"probe", 0, NULL, OPT_PROBE},	   {"depth", 1, NULL, OPT_DEPTH},	   {"sync-each", 0, NULL, OPT_SYNC},
	{"streams", 1, NULL, OPT_STREAMS}, {"graph", 1, NULL, OPT_GRAPH},
	{"capture", 0, NULL, OPT_CAPTURE}, {"threads", 1, NULL, OPT_THREADS},
	{"time", 1, NULL, OPT_TIME},	   {"warmup", 1, NULL, OPT_WARMUP},
	{"spin-flag", 1, NULL, OPT_FLAG},  {"alloc", 1, NULL, OPT_ALLOC},
	{"hold", 1, NULL, OPT_HOLD},	   {"random-alloc", 1, NULL, OPT_RANDOM},
	{"forks", 1, NULL, OPT_FORKS},	   {"seed", 1, NULL, OPT_SEED},
	{"ipc", 1, NULL, OPT_IPC},	   {"procs", 1, NULL, OPT_PROCS},
	{"gpu", 1, NULL, OPT_GPU},	   {"libcuda", 1, NULL, OPT_LIBCUDA},
	{"json", 0, NULL, OPT_JSON},	   {"help", 0, NULL, OPT_HELP},
	{NULL, 0, NULL, 0},
};

static void set(struct options *o, int c, const char *name, const char *v)
{
	switch (c) {
	case OPT_KERNEL: o->kernel_ns = duration_ns(name, v); break;
	case OPT_GRID: o->grid = whole(name, v); break;
	case OPT_BLOCK: o->block = whole(name, v); break;
	case OPT_RATE: o->rate = seconds(name, v); break;
	case OPT_POISSON: o->poisson = true; break;
	case OPT_LATENCY: o->latency = true; break;
	case OPT_PROBE: o->probe = true; break;
	case OPT_DELAY: o->delay_s = seconds(name, v); break;
	case OPT_CYCLE: cycle(o, v); break;
	case OPT_DEPTH: o->depth = whole(name, v); break;
	case OPT_SYNC: o->sync_each = true; break;
	case OPT_STREAMS: o->streams = whole(name, v); break;
	case OPT_GRAPH: o->graph = whole(name, v); break;
	case OPT_CAPTURE: o->capture = true; break;
	case OPT_THREADS: o->threads = whole(name, v); break;
	case OPT_TIME: o->time_s = seconds(name, v); break;
	case OPT_WARMUP: o->warmup_s = seconds(name, v); break;
	case OPT_FLAG: o->flag_s = seconds(name, v); break;
	case OPT_ALLOC: add_alloc(o, v); break;
	case OPT_HOLD: o->hold_s = seconds(name, v); break;
	case OPT_RANDOM: pair(name, v, &o->random_s, &o->random_max, NULL); break;
	case OPT_FORKS: o->random_forks = whole(name, v); break;
	case OPT_SEED: o->seed = whole(name, v); break;
	case OPT_IPC: pair(name, v, NULL, &o->ipc_size, &o->ipc_importers); break;
	case OPT_PROCS: o->procs = whole(name, v); break;
	case OPT_GPU: o->gpu = (int)whole(name, v); break;
	case OPT_LIBCUDA: o->libcuda = v; break;
	case OPT_JSON: o->json = true; break;
	case OPT_HELP: fputs(help, stdout); exit(0);
	default: exit(2);
	}
}

void options_parse(struct options *o, int argc, char **argv)
{
	int c, index = 0;

	*o = (struct options){
		.libcuda = "libcuda.so.1", .grid = 132, .block = 128, .depth = 64, .streams = 1,
		.threads = 1, .time_s = 5, .procs = 1, .seed = 1,
	};
	while ((c = getopt_long(argc, argv, "", longs, &index)) != -1)
		set(o, c, c == '?' ? "" : longs[index].name, optarg);
	if (optind < argc)
		die("%s: not an option (gpuload --help)", argv[optind]);
	check(o);
}
