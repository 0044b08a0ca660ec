/* simctl: what an operator, and a test that wants the truth, may do with a simulated machine. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "state.h"

typedef unsigned long long ull;

static int usage(void)
{
	fputs("usage: simctl models | check SPECFILE | DIR gpus|procs|truth [--json] | DIR xid GPU N |\n"
	      "       DIR lose GPU | DIR recover GPU | DIR nvml CODE\n", stderr);
	return 2;
}

static int models(void)
{
	const struct sim_model *m;
	for (int i = 0; (m = sim_model_at(i)); i++)
		printf("%-12s %-24s %8llu MiB %4u SMs  compute %u.%u  context %llu MiB\n", m->key, m->name,
		       (ull)(m->memory >> 20), m->sms, m->cc_major, m->cc_minor,
		       (ull)(m->context_bytes >> 20));
	return 0;
}

static int check(const char *path)
{
	static char text[1 << 20];
	char why[300];
	FILE *f = fopen(path, "r");
	if (!f) {
		fprintf(stderr, "simctl: %s: %s\n", path, strerror(errno));
		return 1;
	}
	text[fread(text, 1, sizeof text - 1, f)] = 0;
	fclose(f);
	struct sim_state *s = calloc(1, sizeof *s);
	int r = s ? sim_spec_parse(text, path, s, why, sizeof why) : -1;
	if (r)
		fprintf(stderr, "simctl: %s: %s\n", path, why);
	else
		printf("%u GPUs\n", s->n_gpus);
	free(s);
	return r ? 1 : 0;
}

static void show_gpus(struct sim_state *s, bool json)
{
	for (uint32_t i = 0; i < s->n_gpus; i++) {
		struct sim_gpu *g = &s->gpu[i];
		if (json)
			printf("%s{\"index\":%u,\"uuid\":\"%s\",\"model\":\"%s\",\"name\":\"%s\",\"pci\":\"%s\","
			       "\"memory\":%llu,\"capacity\":%llu,\"used\":%llu,\"context\":%llu,\"sms\":%u,"
			       "\"numa\":%u,\"lost\":%s,\"xid\":%u}",
			       i ? "," : "", i, g->uuid, g->model.key, g->model.name, g->pci,
			       (ull)g->model.memory, (ull)g->capacity, (ull)g->used,
			       (ull)g->model.context_bytes, g->model.sms, g->numa_node,
			       g->lost ? "true" : "false", g->xid);
		else
			printf("%u  %s  %-24s %s  used %llu of %llu MiB%s\n", i, g->uuid, g->model.name, g->pci,
			       (ull)(g->used >> 20), (ull)(g->capacity >> 20), g->lost ? "  LOST" : "");
	}
}

static uint64_t busy(struct sim_gpu *g, int slot)
{
	sim_gpu_lock(g);
	sim_engine_advance(&g->engine, sim_now_ns());
	uint64_t ns = slot < 0 ? g->engine.busy_ns : g->engine.proc[slot].busy_ns;
	sim_gpu_unlock(g);
	return ns;
}

/* procs: what runs now. */
static void show_procs(struct sim_state *s, bool json, bool truth)
{
	const char *sep = "";
	for (int i = 0; i < SIM_MAX_PROCS; i++) {
		struct sim_proc *p = &s->proc[i];
		if (p->state != SIM_PROC_USED)
			continue;
		for (uint32_t g = 0; g < s->n_gpus; g++) {
			struct sim_proc_gpu *m = &p->gpu[g];
			if (!m->memory && !m->peak)
				continue;
			ull ns = truth ? (ull)busy(&s->gpu[g], i) : 0;
			if (json)
				printf("%s{\"pid\":%u,\"comm\":\"%s\",\"gpu\":%u,\"memory\":%llu,\"contexts\":%llu,"
				       "\"context_bytes\":%llu,\"peak\":%llu,\"busy_ns\":%llu}",
				       sep, p->pid, p->comm, g, (ull)m->memory, (ull)m->n_contexts,
				       (ull)m->contexts, (ull)m->peak, ns);
			else
				printf("gpu %u  pid %-8u %-16s memory %llu peak %llu busy_ns %llu\n", g, p->pid,
				       p->comm, (ull)m->memory, (ull)m->peak, ns);
			sep = ",";
		}
	}
}

static void show_truth(struct sim_state *s, bool json)
{
	if (json)
		printf("{\"now_ns\":%llu,\"gpus\":[", (ull)sim_now_ns());
	for (uint32_t g = 0; g < s->n_gpus; g++) {
		struct sim_gpu *gpu = &s->gpu[g];
		ull ns = (ull)busy(gpu, -1);
		printf(json ? "%s{\"gpu\":%u,\"used\":%llu,\"orphans\":%llu,\"peak\":%llu,\"busy_ns\":%llu}" :
			      "%sgpu %u  used %llu orphans %llu peak %llu busy_ns %llu\n",
		       json && g ? "," : "", g, (ull)gpu->used, (ull)gpu->orphans, (ull)gpu->peak, ns);
	}
	if (json)
		printf("],\"procs\":[");
	show_procs(s, json, true);
	if (json)
		printf("]}\n");
}

static int show(struct sim_state *s, const char *what, bool json)
{
	sim_reap();
	if (!strcmp(what, "truth")) {
		show_truth(s, json);
		return 0;
	}
	bool gpus = !strcmp(what, "gpus");
	if (!gpus && strcmp(what, "procs"))
		return usage();
	if (json)
		printf("[");
	if (gpus)
		show_gpus(s, json);
	else
		show_procs(s, json, false);
	if (json)
		printf("]\n");
	return 0;
}

static int gpu_index(struct sim_state *s, const char *text)
{
	char *end;
	unsigned long v = strtoul(text, &end, 10);
	if (*end || end == text || v >= s->n_gpus) {
		fprintf(stderr, "simctl: no gpu '%s', there are %u\n", text, s->n_gpus);
		return -1;
	}
	return (int)v;
}

static void lose(struct sim_gpu *g, int index)
{
	sim_xid_raise(index, 79); /* first: who waits for events learns of it before it fails */
	sim_gpu_lock(g);
	__atomic_store_n(&g->lost, 1, __ATOMIC_RELEASE);
	sim_engine_lose(&g->engine, sim_now_ns());
	sim_gpu_unlock(g);
}

/* What a reset does: whatever was wrong is over. */
static void recover(struct sim_gpu *g)
{
	sim_gpu_lock(g);
	sim_engine_advance(&g->engine, sim_now_ns());
	g->reset_ns = sim_now_ns();
	g->reset_busy_ns = g->engine.busy_ns;
	g->xid = 0;
	__atomic_store_n(&g->recovery, 0, __ATOMIC_RELEASE);
	__atomic_store_n(&g->engine.lost, 0, __ATOMIC_RELEASE);
	__atomic_store_n(&g->lost, 0, __ATOMIC_RELEASE);
	sim_gpu_unlock(g);
}

int main(int argc, char **argv)
{
	const char *why;
	if (argc == 2 && !strcmp(argv[1], "models"))
		return models();
	if (argc == 3 && !strcmp(argv[1], "check"))
		return check(argv[2]);
	if (argc < 3)
		return usage();
	struct sim_state *s = sim_state_open(argv[1], &why);
	if (!s) {
		fprintf(stderr, "simctl: %s\n", why);
		return 1;
	}
	if (!strcmp(argv[2], "xid") && argc == 5) {
		int g = gpu_index(s, argv[3]);
		if (g >= 0)
			sim_xid_raise(g, (uint32_t)strtoul(argv[4], NULL, 10));
		return g < 0;
	}
	if (!strcmp(argv[2], "lose") && argc == 4) {
		int g = gpu_index(s, argv[3]);
		if (g >= 0)
			lose(&s->gpu[g], g);
		return g < 0;
	}
	if (!strcmp(argv[2], "recover") && argc == 4) {
		int g = gpu_index(s, argv[3]);
		if (g >= 0)
			recover(&s->gpu[g]);
		return g < 0;
	}
	if (!strcmp(argv[2], "nvml") && argc == 4) {
		__atomic_store_n(&s->nvml_error, (uint32_t)strtoul(argv[3], NULL, 10), __ATOMIC_RELEASE);
		return 0;
	}
	return show(s, argv[2], argc == 4 && !strcmp(argv[3], "--json"));
}
