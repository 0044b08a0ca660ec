/* The text that says what a simulated machine has. One item a line, # starts a comment:
 *
 *   driver_version=550.163.01        key=value for the machine, see machine_key()
 *   gpu model=a100-80g [count=2] [memory=BYTES] [uuid=GPU-...] [pci=0000:07:00.0] [context=BYTES]
 *       [name=NAME_WITH_UNDERSCORES] [numa=N] [hide_processes=1] [mig=1]
 *   link 0 1 nvlink=12               and/or pcie=PIX|PXB|PHB|NODE|SYS
 *
 * BYTES may carry Ki, Mi, Gi. What is not said has the model's value. */
#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "state.h"

struct parser {
	struct sim_state *s;
	const char *dir;
	char *why;
	size_t why_n;
	int line;
};

__attribute__((format(printf, 2, 3))) static int fail(struct parser *p, const char *fmt, ...)
{
	int n = snprintf(p->why, p->why_n, "line %d: ", p->line);
	va_list ap;
	va_start(ap, fmt);
	if (n >= 0 && (size_t)n < p->why_n)
		vsnprintf(p->why + n, p->why_n - (size_t)n, fmt, ap);
	va_end(ap);
	return -1;
}

static bool parse_bytes(const char *t, uint64_t *out)
{
	char *end;
	errno = 0;
	unsigned long long v = strtoull(t, &end, 0);
	if (end == t || errno || *t == '-')
		return false;
	int shift = !strcmp(end, "Ki") ? 10 : !strcmp(end, "Mi") ? 20 : !strcmp(end, "Gi") ? 30 :
		    !*end ? 0 : -1;
	if (shift < 0 || v > UINT64_MAX >> shift)
		return false;
	*out = v << shift;
	return true;
}

static bool parse_u32(const char *t, uint32_t *out)
{
	uint64_t v;
	if (!parse_bytes(t, &v) || v > UINT32_MAX)
		return false;
	*out = (uint32_t)v;
	return true;
}

static int machine_key(struct parser *p, const char *key, const char *value)
{
	struct sim_state *s = p->s;
	const struct { const char *key; uint32_t *at; uint32_t min; } number[] = {
		{ "cuda_version", &s->cuda_version, 2000 }, { "slice_us", &s->slice_us, 1 },
		{ "switch_us", &s->switch_us, 0 }, { "launch_ns", &s->launch_ns, 0 },
		{ "sync_ns", &s->sync_ns, 0 }, { "jitter_permille", &s->jitter_permille, 0 },
		{ "queue_depth", &s->queue_depth, 1 }, { "sample_ms", &s->sample_ms, 1 },
		{ "numa_nodes", &s->numa_nodes, 1 }, { "seed", &s->seed, 0 },
		{ "kernel_wave_ns", &s->kernel_wave_ns, 1 }, { "kernel_min_ns", &s->kernel_min_ns, 1 },
		{ "kernel_wave_blocks", &s->kernel_wave_blocks, 1 },
	};
	if (!strcmp(key, "driver_version")) {
		if (!*value || strlen(value) >= sizeof s->driver_version)
			return fail(p, "driver_version: bad value '%s'", value);
		strcpy(s->driver_version, value);
		return 0;
	}
	for (size_t i = 0; i < sizeof number / sizeof number[0]; i++) {
		if (strcmp(key, number[i].key))
			continue;
		if (!parse_u32(value, number[i].at) || *number[i].at < number[i].min)
			return fail(p, "%s: bad value '%s'", key, value);
		return 0;
	}
	return fail(p, "unknown key '%s'", key);
}

static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ull;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

/* A UUID that depends on the directory and the index only. */
static void make_uuid(struct sim_gpu *g, const char *dir, uint32_t index)
{
	uint64_t h = 1469598103934665603ull;
	for (const char *c = dir; *c; c++)
		h = (h ^ (uint8_t)*c) * 1099511628211ull;
	uint64_t a = mix(h + index), b = mix(a ^ 0x5851f42d4c957f2dull);
	for (int i = 0; i < 8; i++) {
		g->uuid_bytes[i] = (uint8_t)(a >> (8 * i));
		g->uuid_bytes[8 + i] = (uint8_t)(b >> (8 * i));
	}
	g->uuid_bytes[6] = (uint8_t)((g->uuid_bytes[6] & 0x0f) | 0x40);
	g->uuid_bytes[8] = (uint8_t)((g->uuid_bytes[8] & 0x3f) | 0x80);
	snprintf(g->serial, sizeof g->serial, "13%011llu", (unsigned long long)(b % 100000000000ull));
}

static void print_uuid(struct sim_gpu *g)
{
	const uint8_t *u = g->uuid_bytes;
	snprintf(g->uuid, sizeof g->uuid,
		 "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1],
		 u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14],
		 u[15]);
}

static bool parse_uuid(struct sim_gpu *g, const char *t)
{
	int n = 0;
	if (strncmp(t, "GPU-", 4))
		return false;
	for (t += 4; *t && n < 32; t++) {
		if (*t == '-')
			continue;
		if (!isxdigit((unsigned char)*t))
			return false;
		unsigned d = isdigit((unsigned char)*t) ? (unsigned)(*t - '0') :
							  (unsigned)(tolower(*t) - 'a' + 10);
		g->uuid_bytes[n / 2] = (uint8_t)(n % 2 ? g->uuid_bytes[n / 2] | d : d << 4);
		n++;
	}
	return n == 32 && !*t;
}

static bool parse_pci(struct sim_gpu *g, const char *t)
{
	unsigned domain, bus, dev;
	char tail;
	if (sscanf(t, "%x:%x:%x.%c", &domain, &bus, &dev, &tail) < 3 || bus > 0xff || dev > 0x1f)
		return false;
	g->pci_domain = domain;
	g->pci_bus = bus;
	g->pci_dev = dev;
	return true;
}

static int gpu_key(struct parser *p, struct sim_gpu *g, const char *key, const char *value)
{
	struct sim_model *m = &g->model;
	uint64_t reserved = m->memory_nvml - m->memory;
	if (!strcmp(key, "memory")) {
		if (!parse_bytes(value, &m->memory) || m->memory < 4ull << 20)
			return fail(p, "memory: bad value '%s'", value);
		m->memory_nvml = m->memory + reserved;
	} else if (!strcmp(key, "context")) {
		if (!parse_bytes(value, &m->context_bytes))
			return fail(p, "context: bad value '%s'", value);
	} else if (!strcmp(key, "uuid")) {
		if (!parse_uuid(g, value))
			return fail(p, "uuid: '%s' is not GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", value);
	} else if (!strcmp(key, "pci")) {
		if (!parse_pci(g, value))
			return fail(p, "pci: '%s' is not dddd:bb:dd.f", value);
	} else if (!strcmp(key, "name")) {
		snprintf(m->name, sizeof m->name, "%s", value);
		for (char *c = m->name; *c; c++)
			*c = *c == '_' ? ' ' : *c;
	} else if (!strcmp(key, "numa")) {
		if (!parse_u32(value, &g->numa_node))
			return fail(p, "numa: bad value '%s'", value);
	} else if (!strcmp(key, "sms")) {
		if (!parse_u32(value, &m->sms) || !m->sms)
			return fail(p, "sms: bad value '%s'", value);
	} else if (!strcmp(key, "hide_processes")) {
		if (!parse_u32(value, &g->hide_processes))
			return fail(p, "hide_processes: bad value '%s'", value);
	} else if (!strcmp(key, "mig")) {
		if (!parse_u32(value, &g->mig) || g->mig > m->mig_capable)
			return fail(p, "mig: bad value '%s' (1 only of a GPU that is capable of it)", value);
	} else {
		return fail(p, "gpu: unknown key '%s'", key);
	}
	return 0;
}

/* "key=value" split in place; NULL: no '='. */
static char *split(char *item)
{
	char *eq = strchr(item, '=');
	if (!eq || eq == item)
		return NULL;
	*eq = 0;
	return eq + 1;
}

static uint32_t default_bus(uint32_t index)
{
	static const uint8_t first[] = { 0x07, 0x0f, 0x47, 0x4e, 0x87, 0x90, 0xb7, 0xbd };
	return index < sizeof first ? first[index] : 0xc0 + index;
}

static int add_gpu(struct parser *p, const struct sim_model *m, char **item, int n)
{
	if (p->s->n_gpus == SIM_MAX_GPUS)
		return fail(p, "more than %d GPUs", SIM_MAX_GPUS);
	uint32_t index = p->s->n_gpus;
	struct sim_gpu *g = &p->s->gpu[index];
	g->model = *m;
	g->minor = index;
	g->numa_node = UINT32_MAX;
	g->pci_bus = default_bus(index);
	make_uuid(g, p->dir, index);
	for (int i = 0; i < n; i += 2)
		if (gpu_key(p, g, item[i], item[i + 1]))
			return -1;
	print_uuid(g);
	snprintf(g->pci, sizeof g->pci, "%04x:%02x:%02x.0", g->pci_domain & 0xffff, g->pci_bus,
		 g->pci_dev);
	g->capacity = g->model.memory & ~((2ull << 20) - 1);
	for (uint32_t i = 0; i < index; i++)
		if (!strcmp(p->s->gpu[i].uuid, g->uuid) || !strcmp(p->s->gpu[i].pci, g->pci))
			return fail(p, "gpu %u has the uuid or pci id of gpu %u", index, i);
	p->s->n_gpus++;
	return 0;
}

static int gpu_line(struct parser *p, char *rest)
{
	char *item[64], *save = NULL;
	int n = 0;
	uint32_t count = 1;
	const struct sim_model *m = NULL;
	for (char *t = strtok_r(rest, " \t", &save); t; t = strtok_r(NULL, " \t", &save)) {
		char *value = split(t);
		if (!value)
			return fail(p, "gpu: '%s' is not key=value", t);
		if (!strcmp(t, "model")) {
			if (!(m = sim_model_find(value)))
				return fail(p, "gpu: no model '%s' (simctl models lists them)", value);
		} else if (!strcmp(t, "count")) {
			if (!parse_u32(value, &count) || !count || count > SIM_MAX_GPUS)
				return fail(p, "count: bad value '%s'", value);
		} else if (n + 2 <= 64) {
			item[n++] = t;
			item[n++] = value;
		}
	}
	if (!m)
		return fail(p, "gpu: model= is missing");
	for (uint32_t i = 0; i < count; i++)
		if (add_gpu(p, m, item, n))
			return -1;
	return 0;
}

static const char *const pcie_names[] = { "X", "PIX", "PXB", "PHB", "NODE", "SYS" };

/* Links are applied after all GPUs are known, so they may stand before them. */
static int link_line(struct parser *p, char *rest)
{
	unsigned a, b;
	int used = 0;
	if (sscanf(rest, "%u %u %n", &a, &b, &used) < 2 || a == b || a >= p->s->n_gpus ||
	    b >= p->s->n_gpus)
		return fail(p, "link: two GPU indices expected, of %u GPUs", p->s->n_gpus);
	struct sim_link l = p->s->link[a][b];
	char *save = NULL;
	for (char *t = strtok_r(rest + used, " \t", &save); t; t = strtok_r(NULL, " \t", &save)) {
		char *value = split(t);
		uint32_t v;
		if (value && !strcmp(t, "nvlink") && parse_u32(value, &v) && v <= 18) {
			l.nvlink = (uint8_t)v;
			continue;
		}
		uint8_t kind = SIM_LINK_PIX;
		while (value && !strcmp(t, "pcie") && kind <= SIM_LINK_SYS && strcmp(value, pcie_names[kind]))
			kind++;
		if (!value || strcmp(t, "pcie") || kind > SIM_LINK_SYS)
			return fail(p, "link: nvlink=0..18 or pcie=PIX|PXB|PHB|NODE|SYS expected");
		l.pcie = kind;
	}
	p->s->link[a][b] = p->s->link[b][a] = l;
	return 0;
}

/* A machine as sold: pairs below one switch, halves below one socket, NVLink between SXM parts. */
static void default_links(struct sim_state *s)
{
	uint32_t n = s->n_gpus, half = n > 4 ? (n + 1) / 2 : n;
	for (uint32_t i = 0; i < n; i++) {
		if (s->gpu[i].numa_node == UINT32_MAX)
			s->gpu[i].numa_node = i / half % s->numa_nodes;
		for (uint32_t j = 0; j < n; j++) {
			if (i == j)
				continue;
			struct sim_link *l = &s->link[i][j];
			l->pcie = i / 2 == j / 2 ? SIM_LINK_PXB : i / half == j / half ? SIM_LINK_NODE :
											 SIM_LINK_SYS;
			uint32_t a = s->gpu[i].model.nvlinks, b = s->gpu[j].model.nvlinks;
			uint32_t links = a < b ? a : b;
			/* Six links make no full mesh: a V100 board gives 2 to each near peer. */
			l->nvlink = (uint8_t)(links >= 12 ? links : links && i / 4 == j / 4 ? 2 : 0);
		}
	}
}

static void defaults(struct sim_state *s)
{
	strcpy(s->driver_version, "550.163.01");
	s->cuda_version = 12040;
	s->slice_us = 1024;
	s->switch_us = 80;
	s->launch_ns = 0;
	s->sync_ns = 0;
	s->jitter_permille = 0;
	s->queue_depth = 1024;
	s->sample_ms = 167;
	s->numa_nodes = 2;
	s->kernel_wave_ns = 10000;
	s->kernel_wave_blocks = 8;
	s->kernel_min_ns = 2000;
}

static int parse_line(struct parser *p, char *line, bool links)
{
	char *hash = strchr(line, '#');
	if (hash)
		*hash = 0;
	while (isspace((unsigned char)*line))
		line++;
	for (char *e = line + strlen(line); e > line && isspace((unsigned char)e[-1]);)
		*--e = 0;
	if (!*line)
		return 0;
	bool is_link = !strncmp(line, "link", 4) && isspace((unsigned char)line[4]);
	if (is_link != links)
		return 0;
	if (is_link)
		return link_line(p, line + 5);
	if (!strncmp(line, "gpu", 3) && isspace((unsigned char)line[3]))
		return gpu_line(p, line + 4);
	char *value = split(line);
	if (!value)
		return fail(p, "'%s' is neither key=value, nor gpu, nor link", line);
	return machine_key(p, line, value);
}

static int parse_pass(struct parser *p, const char *text, bool links)
{
	char *copy = strdup(text), *next = copy;
	int r = copy ? 0 : -1;
	for (p->line = 1; !r && next; p->line++) {
		char *line = strsep(&next, "\n");
		r = parse_line(p, line, links);
	}
	free(copy);
	return r;
}

int sim_spec_parse(const char *text, const char *dir, struct sim_state *s, char *why, size_t n)
{
	struct parser p = { .s = s, .dir = dir, .why = why, .why_n = n };
	snprintf(why, n, "out of memory");
	defaults(s);
	if (parse_pass(&p, text, false))
		return -1;
	if (s->n_gpus == 0) {
		snprintf(why, n, "no GPU in it: a line like `gpu model=t4` is needed");
		return -1;
	}
	default_links(s);
	return parse_pass(&p, text, true);
}
