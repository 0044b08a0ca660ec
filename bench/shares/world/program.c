/* What tenants run: each program is one thread of a process. */
#define _GNU_SOURCE
#include "inside.h"
#include <math.h>
#include <stdlib.h>

#define MAX_PROGRAMS 128
#define GRAPH_KERNELS 20
#define FLAG_LAUNCHES 3
#define SMALL_OCC (SIM_ENGINE_OCC_FULL / 100)

struct program {
	struct share_program what;
	struct share_proc *proc;
	CUcontext ctx;
	CUstream *stream;
	CUgraphExec graph[SHARE_UNITS];
	struct share_stats stats;
	int64_t *latency;
	int64_t max_latency;
	int64_t called, debt; /* of the launch under way, called 0: none */
};
static struct program programs[MAX_PROGRAMS];
static int n_programs;

/* --- one launch -------------------------------------------------------------------------------- */

static int64_t max64(int64_t a, int64_t b)
{
	return a > b ? a : b;
}

static int64_t min64(int64_t a, int64_t b)
{
	return a < b ? a : b;
}

/* When the tenant's own debt is over, as its account and the arbiter have it. */
static int64_t debt_until(const struct program *g)
{
	const struct share_tenant *t = &share_tenants[g->proc->tenant];
	const struct tr_lease *l = &t->leases->lease[g->what.gpu];
	bool local = !(l->flags & TR_LEASE_REQUIRED);
	for (int i = 0; i < 2; i++)
		local |= (l->grant[i].flags & TR_GRANT_LOCAL) && l->grant[i].end_ns > share_now;
	return local ? t->ledger->account[g->what.gpu].tat : l->eligible_ns;
}

static void begin(struct program *g)
{
	g->called = share_now;
	g->debt = debt_until(g);
}

/* How long the launch under way has taken, and how much of it was not its tenant's debt. */
static void measure(const struct program *g, struct share_stats *s)
{
	/* What ran before may be charged while it waits; and who is let through in debt waited for that. */
	int64_t took = share_now - g->called, debt = max64(g->debt, debt_until(g));
	int64_t own = max64(min64(debt, share_now) - g->called, 0);
	s->longest_ns = max64(s->longest_ns, took);
	s->beyond_ns = max64(s->beyond_ns, took - own);
}

static void end(struct program *g, CUresult r)
{
	int64_t took = share_now - g->called;
	g->stats.launches++;
	g->stats.errors += r != CUDA_SUCCESS;
	measure(g, &g->stats);
	g->called = 0;
	if (took > SHARE_MS || share_conf.trace > 1)
		share_say("launch tenant %d slot %d took %.3f ms", g->proc->tenant, g->proc->slot,
			  (double)took / 1e6);
}

static void launch(struct program *g, int unit, CUstream s, struct share_kernel *k)
{
	CUfunction f = (CUfunction)(uintptr_t)(0x5000 + unit * 64);
	void **params = (void **)k;
	begin(g);
	if (g->proc->limiter == SHARE_FEEDBACK)
		share_feedback_take(g->proc, g->what.gpu, g->what.blocks);
	CUresult r = (g->proc->limiter == SHARE_SHIPPED ? g->proc->lib.launch : share_driver_launch)(
		f, g->what.blocks, 1, 1, 256, 1, 1, 0, s, params, NULL);
	end(g, r);
}

static void launch_graph(struct program *g, int unit, CUstream s, int64_t dur_ns)
{
	begin(g);
	share_graph_set(g->graph[unit], dur_ns);
	CUresult r = (g->proc->limiter == SHARE_SHIPPED ? g->proc->lib.graph
							: share_driver_graph)(g->graph[unit], s);
	end(g, r);
}

static void wait_for(struct program *g, CUstream s)
{
	CUresult r = (g->proc->limiter == SHARE_SHIPPED ? g->proc->lib.sync : share_driver_sync)(s);
	g->stats.errors += r != CUDA_SUCCESS;
}

/* --- units ------------------------------------------------------------------------------------- */

static int64_t duration(const struct program *g, int unit)
{
	double sigma = g->what.sigma, x = (double)g->what.unit_ns[unit];
	if (sigma > 0)
		x *= exp(sigma * share_normal() - sigma * sigma / 2);
	x *= share_clock(g->what.gpu);
	return x < 1000 ? 1000 : (int64_t)x;
}

static void one(struct program *g, int64_t i)
{
	int unit = (int)(i % g->what.units);
	CUstream s = g->stream[i % g->what.streams];
	struct share_kernel k = {.dur_ns = duration(g, unit), .occ = SIM_ENGINE_OCC_FULL};
	if (g->what.graph)
		launch_graph(g, unit, s, k.dur_ns);
	else
		launch(g, unit, s, &k);
}

static bool over(const struct program *g)
{
	return g->what.stop_ns != 0 && share_now >= g->what.stop_ns;
}

static void work(struct program *g)
{
	if (g->what.host_ns > 0)
		share_host((int64_t)share_exponential((double)g->what.host_ns));
}

/* The pause between two bursts; when the next one ends. */
static int64_t rest(const struct program *g, int64_t burst_end)
{
	if (g->what.off_ns == 0 || share_now < burst_end)
		return burst_end;
	share_sleep(burst_end + g->what.off_ns);
	return share_now + g->what.on_ns;
}

static void loop(struct program *g)
{
	int64_t burst_end = share_now + g->what.on_ns, due = share_now;
	for (int64_t i = 0; !over(g); i++) {
		burst_end = rest(g, burst_end);
		if (g->what.period_ns > 0)
			share_sleep(due += g->what.period_ns);
		one(g, i);
		if (g->what.sync_every == 0 || (i + 1) % g->what.sync_every != 0)
			continue;
		wait_for(g, g->stream[i % g->what.streams]);
		work(g);
	}
}

static void add_latency(struct program *g, int64_t ns)
{
	if (g->stats.n_latency == g->max_latency) {
		g->max_latency = g->max_latency * 2 + 1024;
		g->latency = realloc(g->latency, (size_t)g->max_latency * sizeof *g->latency);
		if (g->latency == NULL)
			share_die(__func__);
		g->stats.latency = g->latency;
	}
	g->latency[g->stats.n_latency++] = ns;
}

static void requests(struct program *g)
{
	int64_t arrival = share_now;
	for (int64_t i = 0; !over(g); i++) {
		arrival += (int64_t)share_exponential((double)g->what.period_ns);
		share_sleep(arrival);
		one(g, i);
		wait_for(g, g->stream[i % g->what.streams]);
		add_latency(g, share_now - arrival);
	}
}

/* --- captures ---------------------------------------------------------------------------------- */

static void capture(struct program *g)
{
	bool shipped = g->proc->limiter == SHARE_SHIPPED;
	while (!over(g)) {
		CUgraph graph;
		int64_t sum = 0;
		(shipped ? g->proc->lib.begin : share_driver_begin)(g->stream[0],
								    CU_STREAM_CAPTURE_MODE_GLOBAL);
		for (int i = 0; i < GRAPH_KERNELS; i++) {
			struct share_kernel k = {.dur_ns = duration(g, 0), .occ = SIM_ENGINE_OCC_FULL};
			sum += k.dur_ns;
			launch(g, 0, g->stream[0], &k);
			share_host(20 * SHARE_US);
		}
		g->stats.errors += (shipped ? g->proc->lib.end : share_driver_end)(
					   g->stream[0], &graph) != CUDA_SUCCESS;
		for (int i = 0; i < 3; i++)
			launch_graph(g, 0, g->stream[0], sum);
		wait_for(g, g->stream[0]);
		g->stats.rounds++;
		work(g);
	}
}

/* --- kernels that spin ------------------------------------------------------------------------- */

static void release(struct program *g, const struct share_kernel *k)
{
	sim_engine_release(share_engine[g->what.gpu], share_ctx_queue(g->ctx), k->op, k->id,
			   (uint64_t)share_now);
}

/* A kernel spins on a flag in host memory that is set only when later launches have returned. */
static void flag(struct program *g)
{
	while (!over(g)) {
		struct share_kernel spin = {.dur_ns = -1, .occ = SMALL_OCC};
		launch(g, 1, g->stream[0], &spin);
		for (int i = 0; i < FLAG_LAUNCHES; i++) {
			struct share_kernel k = {.dur_ns = duration(g, 0), .occ = SIM_ENGINE_OCC_FULL / 2};
			launch(g, 0, g->stream[1], &k);
		}
		release(g, &spin);
		wait_for(g, g->stream[0]);
		wait_for(g, g->stream[1]);
		g->stats.rounds++;
		work(g);
	}
}

/* A collective: each rank's kernel spins until those of all ranks have been on their GPUs. */
#define RANKS SHARE_GPUS
struct meeting {
	struct program *rank[RANKS];
	struct share_kernel kernel[RANKS];
	bool waits[RANKS], ran[RANKS];
	int peers;
};
static struct meeting meetings[SHARE_TENANTS];

static void meet(void *arg)
{
	struct meeting *m = arg;
	for (;; share_until(share_now + 10 * SHARE_US)) {
		int ran = 0;
		for (int i = 0; i < m->peers; i++) {
			if (!m->waits[i])
				break;
			struct program *g = m->rank[i];
			struct sim_engine *e = share_engine[g->what.gpu];
			sim_engine_advance(e, (uint64_t)share_now);
			m->ran[i] |= e->cur == share_ctx_queue(g->ctx) && e->switch_to == SIM_NONE &&
				     sim_engine_reached(e, e->cur, m->kernel[i].op, m->kernel[i].id) != NULL;
			ran += m->ran[i];
		}
		for (int i = 0; ran == m->peers && i < m->peers; i++) {
			m->waits[i] = m->ran[i] = false;
			release(m->rank[i], &m->kernel[i]);
		}
	}
}

static void collective(struct program *g)
{
	struct meeting *m = &meetings[g->proc->tenant];
	int rank = g->what.gpu;
	m->rank[rank] = g;
	if (rank == 0) {
		m->peers = g->what.peers;
		share_spawn(NULL, meet, m, share_now);
	}
	for (int64_t i = 0; !over(g); i++) {
		for (int k = 0; k < g->what.sync_every; k++)
			one(g, 0);
		struct share_kernel *k = &m->kernel[rank];
		*k = (struct share_kernel){.dur_ns = -1, .occ = SIM_ENGINE_OCC_FULL,
					   .then_ns = duration(g, 1)};
		launch(g, 1, g->stream[0], k);
		m->waits[rank] = true;
		wait_for(g, g->stream[0]);
		g->stats.rounds++;
		work(g);
	}
}

/* What is left of the turn, by the page, which a process can read. */
static int64_t turn_left(const struct program *g)
{
	const struct tr_lease *l = &share_tenants[g->proc->tenant].leases->lease[g->what.gpu];
	int64_t end = 0;
	for (int i = 0; i < 2; i++)
		if (l->grant[i].slot == (uint32_t)g->proc->slot && l->grant[i].start_ns <= share_now)
			end = max64(end, l->grant[i].end_ns);
	return end - share_now;
}

static bool too_early(const struct program *g)
{
	int64_t left = turn_left(g);
	return g->what.late != 0 && (left < 0 || left > 3 * g->what.unit_ns[0] / 2);
}

static void disguise(struct program *g)
{
	while (!over(g)) {
		for (int i = 0; i < g->what.sync_every || too_early(g); i++) {
			struct share_kernel k = {.dur_ns = duration(g, 0), .occ = SIM_ENGINE_OCC_FULL};
			launch(g, 0, g->stream[0], &k);
			wait_for(g, g->stream[0]);
		}
		struct share_kernel k = {.dur_ns = duration(g, 1), .occ = SIM_ENGINE_OCC_FULL};
		launch(g, 0, g->stream[0], &k);
		wait_for(g, g->stream[0]);
	}
}

/* --- start ------------------------------------------------------------------------------------- */

static void run(void *arg)
{
	struct program *g = arg;
	static void (*const body[])(struct program *) = {
		[SHARE_LOOP] = loop,	   [SHARE_REQUESTS] = requests,	    [SHARE_CAPTURE] = capture,
		[SHARE_FLAG] = flag, [SHARE_COLLECTIVE] = collective, [SHARE_DISGUISE] = disguise,
	};
	if (g->proc->ctx[g->what.gpu] == NULL)
		g->proc->ctx[g->what.gpu] = share_ctx_make(g->proc, g->what.gpu);
	g->ctx = g->proc->ctx[g->what.gpu];
	share_self->stack_ctx[share_self->depth++] = g->ctx;
	g->stream = calloc((size_t)g->what.streams, sizeof *g->stream);
	for (int i = 0; i < g->what.streams; i++)
		g->stream[i] = share_stream_make(g->ctx);
	for (int i = 0; i < g->what.units; i++)
		g->graph[i] = share_graph_make(0, SIM_ENGINE_OCC_FULL);
	body[g->what.kind](g);
}

int share_program_start(struct share_proc *p, const struct share_program *what)
{
	if (n_programs == MAX_PROGRAMS)
		share_die(__func__);
	struct program *g = &programs[n_programs];
	*g = (struct program){.what = *what, .proc = p};
	if (g->what.streams < 1)
		g->what.streams = 1;
	if (g->what.kind == SHARE_FLAG)
		g->what.streams = 2;
	if (g->what.units < 1)
		g->what.units = 1;
	share_spawn(p, run, g, what->start_ns);
	return n_programs++;
}

void share_program_stats(int program, struct share_stats *out)
{
	const struct program *g = &programs[program];
	*out = g->stats;
	if (g->called != 0 && !g->proc->dead)
		measure(g, out);
}

void share_program_reset(void)
{
	for (struct program *g = programs; g < programs + n_programs; g++) {
		g->stats.longest_ns = g->stats.beyond_ns = 0;
		g->stats.n_latency = 0;
	}
}
