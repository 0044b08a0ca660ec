/* What happens on a simulated GPU as time goes by. The queues themselves: queue.c. */
#include <string.h>
#include "engine.h"
#include "queue.h"

void sim_engine_init(struct sim_engine *e, const struct sim_engine_conf *conf, uint64_t now_ns)
{
	e->conf = *conf;
	if (e->conf.slice_ns < 1000)
		e->conf.slice_ns = 1000;
	if (!e->conf.sample_ns)
		e->conf.sample_ns = SIM_ENGINE_SAMPLE_NS;
	if (!e->conf.depth || e->conf.depth > SIM_ENGINE_OPS - 64)
		e->conf.depth = SIM_ENGINE_DEPTH;
	e->t_ns = now_ns;
	e->window_end_ns = now_ns + e->conf.sample_ns;
	e->cur = SIM_NONE;
	e->switch_to = SIM_NONE;
}

/* --- utilisation samples ----------------------------------------------------------------------- */

static uint32_t percent(uint64_t part, uint64_t whole)
{
	uint64_t p = (part * 100 + whole / 2) / whole;
	return p > 100 ? 100 : (uint32_t)p;
}

static void gpu_sample(struct sim_engine *e, uint32_t pct)
{
	struct sim_sample *s = &e->gpu_sample[e->gpu_sample_count % SIM_ENGINE_GPU_SAMPLES];
	*s = (struct sim_sample){ .end_ns = e->window_end_ns, .percent = pct };
	e->gpu_sample_count++;
}

/* The end of a sampling period: a sample for the GPU and for each process that ran in it. */
static void close_window(struct sim_engine *e)
{
	gpu_sample(e, percent(e->window_busy_ns, e->conf.sample_ns));
	for (uint32_t i = 0; e->window_busy_ns && i < SIM_ENGINE_PROCS; i++) {
		struct sim_engine_proc *p = &e->proc[i];
		if (!p->window_ns)
			continue;
		e->sample[e->sample_count % SIM_ENGINE_SAMPLES] = (struct sim_sample){
			.end_ns = e->window_end_ns, .proc = i, .pid = p->pid,
			.percent = percent(p->window_ns, e->conf.sample_ns)
		};
		e->sample_count++;
		p->window_ns = 0;
	}
	e->window_busy_ns = 0;
	e->window_end_ns += e->conf.sample_ns;
}

/* With nothing to do until now_ns: the periods that pass are all zero; those that the ring would
 * lose anyway are left out. */
static void skip_idle_windows(struct sim_engine *e, uint64_t now_ns)
{
	if (e->window_busy_ns || now_ns < e->window_end_ns)
		return;
	uint64_t n = (now_ns - e->window_end_ns) / e->conf.sample_ns;
	if (n > SIM_ENGINE_GPU_SAMPLES)
		e->window_end_ns += (n - SIM_ENGINE_GPU_SAMPLES) * e->conf.sample_ns;
}

/* --- the compute engine ------------------------------------------------------------------------ */

#define FOR_BUSY_CTX(e, i)                                                                         \
	for (uint32_t i = sim_next_busy(e, 0); i != SIM_NONE; i = sim_next_busy(e, i + 1))

/* Next context with work at or after `from`. */
static uint32_t sim_next_busy(const struct sim_engine *e, uint32_t from)
{
	while (from < SIM_ENGINE_CTXS) {
		uint64_t word = e->busy_ctx[from / 64] >> (from % 64);
		if (word)
			return from + (uint32_t)__builtin_ctzll(word);
		from = (from / 64 + 1) * 64;
	}
	return SIM_NONE;
}

/* The context whose turn comes after `cur`, cur itself last; SIM_NONE: no kernel can run. */
static uint32_t next_turn(const struct sim_engine *e, uint32_t cur)
{
	uint32_t first = SIM_NONE;
	FOR_BUSY_CTX(e, i) {
		if (!e->ctx[i].runnable)
			continue;
		if (cur == SIM_NONE || i > cur)
			return i;
		if (first == SIM_NONE)
			first = i;
	}
	return first;
}

static bool current_runs(const struct sim_engine *e)
{
	return e->switch_to == SIM_NONE && e->cur != SIM_NONE && e->ctx[e->cur].runnable;
}

static void load(struct sim_engine *e, uint32_t ctx)
{
	e->cur = ctx;
	e->switch_to = SIM_NONE;
	e->slice_end_ns = e->t_ns + e->conf.slice_ns;
}

/* Decide who has the engine from now on. */
static void schedule(struct sim_engine *e)
{
	if (e->switch_to != SIM_NONE) {
		if (e->t_ns < e->switch_end_ns)
			return;
		load(e, e->switch_to);
	}
	bool runs = current_runs(e);
	if (runs && e->t_ns < e->slice_end_ns)
		return;
	uint32_t next = next_turn(e, e->cur);
	if (next == SIM_NONE)
		return;
	if (runs && next == e->cur) { /* renewed, as often as nobody else was there */
		uint64_t over = e->t_ns - e->slice_end_ns;
		e->slice_end_ns += (over / e->conf.slice_ns + 1) * e->conf.slice_ns;
		return;
	}
	if (next == e->cur || e->cur == SIM_NONE || !e->conf.switch_ns) {
		load(e, next);
		return;
	}
	e->switch_to = next;
	e->switch_end_ns = e->t_ns + e->conf.switch_ns;
}

/* Wall time that a kernel needs for rem_ns of full-rate work when the loaded context's kernels
 * together ask for `occ` of the GPU; and what it gets done in a time. */
static uint64_t wall_of(uint64_t rem_ns, uint64_t occ)
{
	if (occ <= SIM_ENGINE_OCC_FULL)
		return rem_ns;
	return (uint64_t)(((unsigned __int128)rem_ns * occ + SIM_ENGINE_OCC_FULL - 1) /
			  SIM_ENGINE_OCC_FULL);
}

static uint64_t work_of(uint64_t wall_ns, uint64_t occ)
{
	if (occ <= SIM_ENGINE_OCC_FULL)
		return wall_ns;
	return (uint64_t)((unsigned __int128)wall_ns * SIM_ENGINE_OCC_FULL / occ);
}

/* The ops at the heads of the loaded context that are running kernels. */
static struct sim_op *running(struct sim_ctx_q *c, uint32_t stream)
{
	uint32_t head = c->stream[stream].head;
	if (head >= SIM_ENGINE_OPS)
		return NULL;
	struct sim_op *o = &c->op[head];
	return (o->kind == SIM_OP_KERNEL || o->kind == SIM_OP_SPIN) && o->reached_ns ? o : NULL;
}

static uint64_t min64(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* When something changes by itself next, at most `until`. */
static uint64_t next_change(struct sim_engine *e, uint64_t until)
{
	FOR_BUSY_CTX(e, i)
		until = min64(until, e->ctx[i].copy_end_ns);
	if (e->switch_to != SIM_NONE)
		return min64(until, e->switch_end_ns);
	if (!current_runs(e))
		return until;
	struct sim_ctx_q *c = &e->ctx[e->cur];
	FOR_ACTIVE(c, s) {
		struct sim_op *o = running(c, s);
		if (o && o->rem_ns != SIM_NEVER)
			until = min64(until, e->t_ns + wall_of(o->rem_ns, c->run_occ));
	}
	if (next_turn(e, e->cur) != e->cur)
		until = min64(until, e->slice_end_ns);
	return until;
}

/* The loaded context's kernels progress, and the books are kept, for dt. */
static void run_for(struct sim_engine *e, uint64_t dt)
{
	if (e->switch_to != SIM_NONE) {
		e->switch_ns += dt;
		e->proc[e->ctx[e->switch_to].proc].switch_ns += dt;
		return;
	}
	if (!current_runs(e))
		return;
	struct sim_ctx_q *c = &e->ctx[e->cur];
	struct sim_engine_proc *p = &e->proc[c->proc];
	p->busy_ns += dt;
	p->window_ns += dt;
	e->busy_ns += dt;
	e->window_busy_ns += dt;
	uint64_t work = work_of(dt, c->run_occ);
	FOR_ACTIVE(c, s) {
		struct sim_op *o = running(c, s);
		if (!o || o->rem_ns == SIM_NEVER)
			continue;
		/* rounding: what needs the whole interval has had it */
		bool ends = wall_of(o->rem_ns, c->run_occ) <= dt;
		o->rem_ns = ends ? 0 : o->rem_ns - work;
		if (ends)
			c->dirty = 1;
	}
}

/* Let everything at the heads of the queues that can complete at this instant complete. */
static void settle(struct sim_engine *e)
{
	bool progress = true;
	while (progress) {
		progress = false;
		FOR_BUSY_CTX(e, i) {
			struct sim_ctx_q *c = &e->ctx[i];
			if (c->copy_end_ns <= e->t_ns)
				c->dirty = 1;
			if (c->dirty || c->waiting)
				progress |= sim_queue_settle(e, i);
		}
	}
}

void sim_engine_advance(struct sim_engine *e, uint64_t now_ns)
{
	if (e->lost)
		return;
	for (;;) {
		settle(e);
		schedule(e);
		if (e->t_ns >= now_ns)
			return;
		if (sim_next_busy(e, 0) == SIM_NONE && e->switch_to == SIM_NONE)
			skip_idle_windows(e, now_ns);
		uint64_t next = next_change(e, min64(now_ns, e->window_end_ns));
		if (next < e->t_ns)
			next = e->t_ns;
		run_for(e, next - e->t_ns);
		e->t_ns = next;
		if (e->t_ns >= e->window_end_ns)
			close_window(e);
	}
}

/* --- when will it be done ---------------------------------------------------------------------- */

#define ETA_LOOK 64 /* queue entries that an estimate looks at */

/* Least time until `stream` has done everything up to seq, if its context had the engine. Sets
 * *compute if a kernel is among it. */
static uint64_t stream_needs(const struct sim_engine *e, const struct sim_ctx_q *c, uint32_t stream,
			     uint64_t seq, bool *compute)
{
	const struct sim_stream_q *q = &c->stream[stream];
	uint64_t sum = 0;
	uint32_t i = q->head;
	for (int n = 0; n < ETA_LOOK && i < SIM_ENGINE_OPS && c->op[i].seq <= seq; n++) {
		const struct sim_op *o = &c->op[i];
		if (o->kind == SIM_OP_KERNEL) {
			sum += o->rem_ns;
			*compute = true;
		} else if (o->kind == SIM_OP_COPY) {
			sum += !o->reached_ns ? o->dur_ns : o->end_ns > e->t_ns ? o->end_ns - e->t_ns : 0;
		}
		i = o->next;
	}
	return sum;
}

/* Least time until the engine can turn to another context than the loaded one. */
static uint64_t turn_needs(const struct sim_engine *e)
{
	if (e->switch_to != SIM_NONE)
		return e->switch_end_ns > e->t_ns ? e->switch_end_ns - e->t_ns : 0;
	if (!current_runs(e))
		return e->conf.switch_ns;
	const struct sim_ctx_q *c = &e->ctx[e->cur];
	uint64_t most = 0, slice = e->slice_end_ns > e->t_ns ? e->slice_end_ns - e->t_ns : 0;
	FOR_ACTIVE(c, s) {
		bool compute;
		uint64_t n = stream_needs(e, c, s, UINT64_MAX, &compute);
		if (n > most)
			most = n;
	}
	return min64(slice, most) + e->conf.switch_ns;
}

uint64_t sim_engine_eta(const struct sim_engine *e, const struct sim_ticket *t)
{
	if (sim_engine_passed(e, t))
		return 0;
	bool compute = false;
	uint64_t need = stream_needs(e, &e->ctx[t->ctx], t->stream, t->seq, &compute);
	bool loaded = e->cur == t->ctx && e->switch_to == SIM_NONE;
	return compute && !loaded ? need + turn_needs(e) : need;
}

uint64_t sim_engine_head_eta(const struct sim_engine *e, uint32_t ctx)
{
	const struct sim_ctx_q *c = &e->ctx[ctx];
	uint64_t best = SIM_NEVER;
	FOR_ACTIVE(c, s) {
		struct sim_ticket t = { .ctx = ctx, .ctx_gen = c->gen, .stream = s,
					.stream_gen = c->stream[s].gen,
					.seq = c->stream[s].done_seq + 1 };
		best = min64(best, sim_engine_eta(e, &t));
	}
	return best == SIM_NEVER ? 0 : best;
}
