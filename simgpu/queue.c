/* The queues of a simulated GPU: contexts, their streams and what is enqueued on them, and which
 * of it may start. When things end is engine.c's. */
#include <string.h>
#include "queue.h"

static bool ctx_open(const struct sim_ctx_q *c)
{
	return c->gen & 1;
}

static void mark_busy(struct sim_engine *e, uint32_t ctx, bool busy)
{
	uint64_t bit = 1ULL << (ctx % 64);
	if (busy)
		e->busy_ctx[ctx / 64] |= bit;
	else
		e->busy_ctx[ctx / 64] &= ~bit;
}

/* --- contexts ---------------------------------------------------------------------------------- */

static void clear_ctx(struct sim_ctx_q *c)
{
	uint32_t streams = c->stream_top < SIM_ENGINE_STREAMS ? c->stream_top : SIM_ENGINE_STREAMS;
	uint32_t cells = c->cell_top < SIM_ENGINE_CELLS ? c->cell_top : SIM_ENGINE_CELLS;
	for (uint32_t i = 0; i < streams; i++) {
		struct sim_stream_q *q = &c->stream[i];
		q->gen = (q->gen + 1) & ~1u;
		q->head = q->tail = SIM_NONE;
		q->active = 0;
	}
	memset(c->cell, 0, cells * sizeof c->cell[0]);
	c->active = SIM_NONE;
	c->op_free = c->cell_free = SIM_NONE;
	c->kernels = c->ops = c->op_top = c->cell_top = c->stream_top = 0;
	c->dirty = c->waiting = c->runnable = 0;
	c->run_occ = 0;
	c->copy_end_ns = SIM_NEVER;
}

uint32_t sim_engine_ctx_open(struct sim_engine *e, uint32_t proc, uint32_t pid, uint64_t now_ns)
{
	sim_engine_advance(e, now_ns);
	for (uint32_t i = 0; i < SIM_ENGINE_CTXS && proc < SIM_ENGINE_PROCS; i++) {
		struct sim_ctx_q *c = &e->ctx[i];
		if (ctx_open(c))
			continue;
		clear_ctx(c);
		c->proc = proc;
		c->pid = pid;
		e->proc[proc].pid = pid;
		e->proc[proc].contexts++;
		if (i >= e->ctx_top)
			e->ctx_top = i + 1;
		__atomic_store_n(&c->gen, c->gen + 1, __ATOMIC_RELEASE);
		sim_engine_stream_open(e, i, 0);
		return i;
	}
	return SIM_NONE;
}

/* Copy engines are free again once the copies that still run have ended. */
static void recount_copies(struct sim_engine *e)
{
	uint64_t free_ns[SIM_COPY_ENGINES] = { 0 };
	for (uint32_t i = 0; i < e->ctx_top && i < SIM_ENGINE_CTXS; i++) {
		const struct sim_ctx_q *c = &e->ctx[i];
		if (!ctx_open(c))
			continue;
		FOR_ACTIVE(c, s) {
			uint32_t head = c->stream[s].head;
			const struct sim_op *o = head < SIM_ENGINE_OPS ? &c->op[head] : NULL;
			if (o && o->kind == SIM_OP_COPY && o->reached_ns &&
			    o->end_ns > free_ns[o->copy_engine % SIM_COPY_ENGINES])
				free_ns[o->copy_engine % SIM_COPY_ENGINES] = o->end_ns;
		}
	}
	memcpy(e->copy_free_ns, free_ns, sizeof free_ns);
}

/* A context goes without the model having been worked out up to now. */
static void close_ctx(struct sim_engine *e, uint32_t ctx)
{
	struct sim_ctx_q *c = &e->ctx[ctx];
	__atomic_store_n(&c->gen, c->gen + 1, __ATOMIC_RELEASE);
	clear_ctx(c);
	mark_busy(e, ctx, false);
	if (e->proc[c->proc].contexts)
		e->proc[c->proc].contexts--;
	if (e->switch_to == ctx)
		e->switch_to = SIM_NONE;
	if (e->cur == ctx)
		e->cur = SIM_NONE;
	recount_copies(e);
}

void sim_engine_ctx_close(struct sim_engine *e, uint32_t ctx, uint64_t now_ns)
{
	if (ctx >= SIM_ENGINE_CTXS || !ctx_open(&e->ctx[ctx]))
		return;
	sim_engine_advance(e, now_ns);
	close_ctx(e, ctx);
}

void sim_engine_drop_proc(struct sim_engine *e, uint32_t proc, uint64_t now_ns, bool forget)
{
	sim_engine_advance(e, now_ns);
	for (uint32_t i = 0; i < e->ctx_top && i < SIM_ENGINE_CTXS; i++)
		if (ctx_open(&e->ctx[i]) && e->ctx[i].proc == proc)
			close_ctx(e, i);
	if (forget && proc < SIM_ENGINE_PROCS)
		memset(&e->proc[proc], 0, sizeof e->proc[proc]);
}

void sim_engine_lose(struct sim_engine *e, uint64_t now_ns)
{
	sim_engine_advance(e, now_ns);
	for (uint32_t i = 0; i < e->ctx_top && i < SIM_ENGINE_CTXS; i++)
		if (ctx_open(&e->ctx[i]))
			close_ctx(e, i);
	__atomic_store_n(&e->lost, 1, __ATOMIC_RELEASE);
}

bool sim_engine_ctx_idle(const struct sim_engine *e, uint32_t ctx)
{
	return ctx >= SIM_ENGINE_CTXS || !ctx_open(&e->ctx[ctx]) || e->ctx[ctx].ops == 0;
}

/* --- streams and cells ------------------------------------------------------------------------- */

static void free_stream(struct sim_stream_q *q)
{
	__atomic_store_n(&q->gen, q->gen + 1, __ATOMIC_RELEASE);
}

uint32_t sim_engine_stream_open(struct sim_engine *e, uint32_t ctx, uint32_t flags)
{
	struct sim_ctx_q *c = &e->ctx[ctx];
	if (!ctx_open(c))
		return SIM_NONE;
	for (uint32_t i = 0; i < SIM_ENGINE_STREAMS; i++) {
		struct sim_stream_q *q = &c->stream[i];
		if (i < c->stream_top && (q->gen & 1))
			continue;
		uint32_t gen = (q->gen & ~1u) + 1;
		*q = (struct sim_stream_q){ .flags = flags, .head = SIM_NONE, .tail = SIM_NONE,
					    .next_active = SIM_NONE };
		if (i >= c->stream_top)
			c->stream_top = i + 1;
		__atomic_store_n(&q->gen, gen, __ATOMIC_RELEASE);
		return i;
	}
	return SIM_NONE;
}

void sim_engine_stream_close(struct sim_engine *e, uint32_t ctx, uint32_t stream)
{
	struct sim_ctx_q *c = &e->ctx[ctx];
	if (!ctx_open(c) || stream >= c->stream_top || !(c->stream[stream].gen & 1))
		return;
	struct sim_stream_q *q = &c->stream[stream];
	if (q->active)
		q->flags |= SIM_STREAM_CLOSING;
	else
		free_stream(q);
}

uint32_t sim_engine_cell_open(struct sim_engine *e, uint32_t ctx)
{
	struct sim_ctx_q *c = &e->ctx[ctx];
	uint32_t i = c->cell_free;
	if (!ctx_open(c))
		return SIM_NONE;
	if (i < SIM_ENGINE_CELLS)
		c->cell_free = (uint32_t)c->cell[i].ts_ns;
	else if (c->cell_top < SIM_ENGINE_CELLS)
		i = c->cell_top++;
	else
		i = SIM_NONE;
	return i;
}

/* `done` stays: an old record that is still queued must not look new to the next owner. */
void sim_engine_cell_close(struct sim_engine *e, uint32_t ctx, uint32_t cell)
{
	struct sim_ctx_q *c = &e->ctx[ctx];
	if (!ctx_open(c) || cell >= c->cell_top)
		return;
	c->cell[cell].done = c->next_rec;
	c->cell[cell].ts_ns = c->cell_free;
	c->cell_free = cell;
}

uint64_t sim_engine_next_rec(struct sim_engine *e, uint32_t ctx)
{
	return ++e->ctx[ctx].next_rec;
}

/* --- enqueueing -------------------------------------------------------------------------------- */

static bool is_kernel(uint32_t kind)
{
	return kind == SIM_OP_KERNEL || kind == SIM_OP_SPIN;
}

bool sim_engine_room(const struct sim_engine *e, uint32_t ctx, enum sim_op_kind kind)
{
	const struct sim_ctx_q *c = &e->ctx[ctx];
	return c->ops < SIM_ENGINE_OPS && (!is_kernel(kind) || c->kernels < e->conf.depth);
}

static uint32_t take_op(struct sim_ctx_q *c)
{
	uint32_t i = c->op_free;
	if (i < SIM_ENGINE_OPS) {
		c->op_free = c->op[i].next;
		return i;
	}
	return c->op_top < SIM_ENGINE_OPS ? c->op_top++ : SIM_NONE;
}

static void fill_op(struct sim_op *o, const struct sim_op_desc *d)
{
	*o = (struct sim_op){ .next = SIM_NONE, .kind = (uint16_t)d->kind,
			      .copy_engine = (uint16_t)(d->copy_engine % SIM_COPY_ENGINES),
			      .occ = d->occ ? d->occ : 1, .cell = d->cell, .dur_ns = d->dur_ns,
			      .wait = d->wait };
	if (o->occ > SIM_ENGINE_OCC_FULL)
		o->occ = SIM_ENGINE_OCC_FULL;
	if (d->kind == SIM_OP_KERNEL)
		o->rem_ns = d->dur_ns ? d->dur_ns : 1;
	else if (d->kind == SIM_OP_SPIN)
		o->rem_ns = SIM_NEVER;
	else if (d->kind == SIM_OP_MARK)
		o->rec = d->rec;
}

/* Link op i at the end of the stream. */
static void append(struct sim_ctx_q *c, uint32_t stream, uint32_t i)
{
	struct sim_stream_q *q = &c->stream[stream];
	if (q->tail < SIM_ENGINE_OPS)
		c->op[q->tail].next = i;
	else
		q->head = i;
	q->tail = i;
	if (!q->active) {
		q->next_active = c->active;
		q->active = 1;
		c->active = stream;
	}
	c->ops++;
	c->kernels += is_kernel(c->op[i].kind);
}

bool sim_engine_push(struct sim_engine *e, uint32_t ctx, uint32_t stream,
		     const struct sim_op_desc *desc, uint64_t now_ns, uint32_t *op,
		     struct sim_ticket *ticket)
{
	struct sim_ctx_q *c = &e->ctx[ctx];
	sim_engine_advance(e, now_ns);
	if (!ctx_open(c) || stream >= c->stream_top || !sim_engine_room(e, ctx, desc->kind))
		return false;
	uint32_t i = take_op(c);
	if (i == SIM_NONE)
		return false;
	struct sim_stream_q *q = &c->stream[stream];
	fill_op(&c->op[i], desc);
	c->op[i].id = ++c->next_id;
	c->op[i].seq = ++q->tail_seq;
	bool was_head = q->head >= SIM_ENGINE_OPS;
	append(c, stream, i);
	mark_busy(e, ctx, true);
	if (op)
		*op = i;
	if (ticket)
		*ticket = sim_engine_tail(e, ctx, stream);
	if (was_head) { /* else it waits behind others and changes nothing now */
		c->dirty = 1;
		sim_engine_advance(e, now_ns);
	}
	return true;
}

void sim_engine_release(struct sim_engine *e, uint32_t ctx, uint32_t op, uint64_t id, uint64_t now_ns)
{
	struct sim_ctx_q *c = &e->ctx[ctx];
	sim_engine_advance(e, now_ns);
	if (!ctx_open(c) || op >= SIM_ENGINE_OPS)
		return;
	struct sim_op *o = &c->op[op];
	if (o->id != id || (o->kind != SIM_OP_HOST && o->kind != SIM_OP_SPIN))
		return;
	o->released = 1;
	if (o->kind == SIM_OP_SPIN)
		o->rem_ns = 1; /* it still has to be on the engine to notice */
	c->dirty = 1;
	sim_engine_advance(e, now_ns);
}

bool sim_engine_queued(const struct sim_engine *e, uint32_t ctx, uint32_t op, uint64_t id)
{
	const struct sim_ctx_q *c = &e->ctx[ctx];
	return ctx_open(c) && op < SIM_ENGINE_OPS && c->op[op].id == id && c->op[op].kind != SIM_OP_FREE;
}

const struct sim_op *sim_engine_reached(const struct sim_engine *e, uint32_t ctx, uint32_t op,
					uint64_t id)
{
	const struct sim_op *o = &e->ctx[ctx].op[op];
	return sim_engine_queued(e, ctx, op, id) && o->reached_ns ? o : NULL;
}

struct sim_ticket sim_engine_tail(const struct sim_engine *e, uint32_t ctx, uint32_t stream)
{
	const struct sim_ctx_q *c = &e->ctx[ctx];
	return (struct sim_ticket){ .ctx = ctx, .ctx_gen = c->gen, .stream = stream,
				    .stream_gen = c->stream[stream].gen,
				    .seq = c->stream[stream].tail_seq };
}

uint32_t sim_engine_ctx_tails(const struct sim_engine *e, uint32_t ctx, struct sim_ticket *t,
			      uint32_t n)
{
	const struct sim_ctx_q *c = &e->ctx[ctx];
	uint32_t i = 0;
	if (!ctx_open(c))
		return 0;
	FOR_ACTIVE(c, s)
		if (i < n)
			t[i++] = sim_engine_tail(e, ctx, s);
	return i;
}

bool sim_engine_passed(const struct sim_engine *e, const struct sim_ticket *t)
{
	if (t->ctx >= SIM_ENGINE_CTXS || t->stream >= SIM_ENGINE_STREAMS)
		return true;
	const struct sim_ctx_q *c = &e->ctx[t->ctx];
	const struct sim_stream_q *q = &c->stream[t->stream];
	return __atomic_load_n(&q->done_seq, __ATOMIC_ACQUIRE) >= t->seq ||
	       __atomic_load_n(&q->gen, __ATOMIC_ACQUIRE) != t->stream_gen ||
	       __atomic_load_n(&c->gen, __ATOMIC_ACQUIRE) != t->ctx_gen;
}

/* --- what may start, what has ended ------------------------------------------------------------ */

/* Does the barrier of the legacy default stream let the head of `stream` start? The legacy stream
 * waits for everything enqueued before on blocking streams, and they for it. */
static bool barrier_open(const struct sim_ctx_q *c, uint32_t stream, const struct sim_op *o)
{
	if (stream != 0) {
		if (c->stream[stream].flags & SIM_STREAM_NON_BLOCKING)
			return true;
		uint32_t head = c->stream[0].head;
		return head >= SIM_ENGINE_OPS || c->op[head].id > o->id;
	}
	FOR_ACTIVE(c, s) {
		uint32_t head = c->stream[s].head;
		if (s != 0 && !(c->stream[s].flags & SIM_STREAM_NON_BLOCKING) &&
		    head < SIM_ENGINE_OPS && c->op[head].id < o->id)
			return false;
	}
	return true;
}

static void start_copy(struct sim_engine *e, struct sim_op *o)
{
	uint64_t *free_ns = &e->copy_free_ns[o->copy_engine];
	o->end_ns = (*free_ns > e->t_ns ? *free_ns : e->t_ns) + o->dur_ns;
	*free_ns = o->end_ns;
}

static void stamp(struct sim_engine *e, struct sim_ctx_q *c, const struct sim_op *o)
{
	struct sim_cell *cell = &c->cell[o->cell % SIM_ENGINE_CELLS];
	if (o->rec <= cell->done)
		return; /* recorded again since, and that one was faster */
	__atomic_store_n(&cell->ts_ns, e->t_ns, __ATOMIC_RELAXED);
	__atomic_store_n(&cell->done, o->rec, __ATOMIC_RELEASE);
}

/* Is the head op over at e->t_ns? */
static bool over(struct sim_engine *e, struct sim_ctx_q *c, struct sim_op *o)
{
	switch (o->kind) {
	case SIM_OP_KERNEL:
	case SIM_OP_SPIN:
		return o->rem_ns == 0;
	case SIM_OP_COPY:
		return o->end_ns <= e->t_ns;
	case SIM_OP_HOST:
		return o->released;
	case SIM_OP_WAIT:
		return sim_engine_passed(e, &o->wait);
	case SIM_OP_MARK:
		stamp(e, c, o);
		return true;
	default:
		return true;
	}
}

/* The order of the stores is what sim_engine_repair relies on. */
static void pop(struct sim_engine *e, struct sim_ctx_q *c, struct sim_stream_q *q)
{
	uint32_t i = q->head;
	struct sim_op *o = &c->op[i];
	e->kernels_done += is_kernel(o->kind);
	__atomic_store_n(&q->done_seq, o->seq, __ATOMIC_RELEASE);
	q->head = o->next;
	if (q->head >= SIM_ENGINE_OPS)
		q->tail = SIM_NONE;
	c->ops--;
	c->kernels -= is_kernel(o->kind);
	o->kind = SIM_OP_FREE;
	o->next = c->op_free;
	c->op_free = i;
}

/* Complete what can at the head of one stream. */
static bool settle_stream(struct sim_engine *e, struct sim_ctx_q *c, uint32_t stream)
{
	struct sim_stream_q *q = &c->stream[stream];
	bool progress = false;
	while (q->head < SIM_ENGINE_OPS) {
		struct sim_op *o = &c->op[q->head];
		if (!o->reached_ns) {
			if (!barrier_open(c, stream, o))
				break;
			if (o->kind == SIM_OP_COPY)
				start_copy(e, o);
			o->reached_ns = e->t_ns ? e->t_ns : 1;
		}
		if (!over(e, c, o))
			break;
		pop(e, c, q);
		progress = true;
	}
	return progress;
}

/* Streams that have run dry leave the list; those destroyed meanwhile are free. */
static void sweep(struct sim_engine *e, uint32_t ctx)
{
	struct sim_ctx_q *c = &e->ctx[ctx];
	uint32_t *link = &c->active;
	for (int n = 0; *link < SIM_ENGINE_STREAMS && n < SIM_ENGINE_STREAMS; n++) {
		struct sim_stream_q *q = &c->stream[*link];
		if (q->head < SIM_ENGINE_OPS) {
			link = &q->next_active;
			continue;
		}
		*link = q->next_active;
		q->active = 0;
		if (q->flags & SIM_STREAM_CLOSING)
			free_stream(q);
	}
	if (c->active >= SIM_ENGINE_STREAMS)
		mark_busy(e, ctx, false);
}

/* What the heads are now: kernels that may run, copies under way, waits. */
static void summarize(struct sim_ctx_q *c)
{
	c->runnable = c->waiting = 0;
	c->run_occ = 0;
	c->copy_end_ns = SIM_NEVER;
	FOR_ACTIVE(c, s) {
		const struct sim_op *o = &c->op[c->stream[s].head];
		if (!o->reached_ns)
			continue;
		if (is_kernel(o->kind)) {
			c->runnable++;
			c->run_occ += o->occ;
		} else if (o->kind == SIM_OP_WAIT) {
			c->waiting = 1;
		} else if (o->kind == SIM_OP_COPY && o->end_ns < c->copy_end_ns) {
			c->copy_end_ns = o->end_ns;
		}
	}
	c->dirty = 0;
}

bool sim_queue_settle(struct sim_engine *e, uint32_t ctx)
{
	struct sim_ctx_q *c = &e->ctx[ctx];
	bool any = false, progress = true;
	while (progress) {
		progress = false;
		FOR_ACTIVE(c, s)
			progress |= settle_stream(e, c, s);
		any |= progress;
	}
	sweep(e, ctx);
	summarize(c);
	return any;
}

/* --- after a death ----------------------------------------------------------------------------- */

/* Walk one stream, keeping what is whole; `seen` marks the ops that are in use. */
static void repair_stream(struct sim_ctx_q *c, uint32_t stream, uint8_t *seen)
{
	struct sim_stream_q *q = &c->stream[stream];
	uint32_t *link = &q->head, last = SIM_NONE;
	while (*link < c->op_top && !seen[*link] && c->op[*link].kind != SIM_OP_FREE &&
	       c->op[*link].seq > q->done_seq) {
		last = *link;
		seen[last] = 1;
		c->ops++;
		c->kernels += is_kernel(c->op[last].kind);
		link = &c->op[last].next;
	}
	*link = SIM_NONE;
	q->tail = last;
	if (q->tail_seq < q->done_seq)
		q->tail_seq = q->done_seq;
	q->active = q->head != SIM_NONE;
	if (q->active) {
		q->next_active = c->active;
		c->active = stream;
	} else if (q->flags & SIM_STREAM_CLOSING) {
		free_stream(q);
	}
}

/* pop() advances done_seq before the head: an op at the head with seq == done_seq was completed. */
static void drop_popped_head(struct sim_ctx_q *c, struct sim_stream_q *q)
{
	if (q->head < c->op_top && c->op[q->head].seq == q->done_seq)
		q->head = c->op[q->head].next;
}

static void repair_ctx(struct sim_engine *e, uint32_t ctx)
{
	struct sim_ctx_q *c = &e->ctx[ctx];
	uint8_t seen[SIM_ENGINE_OPS] = { 0 };
	if (c->op_top > SIM_ENGINE_OPS)
		c->op_top = SIM_ENGINE_OPS;
	if (c->stream_top > SIM_ENGINE_STREAMS)
		c->stream_top = SIM_ENGINE_STREAMS;
	c->ops = c->kernels = 0;
	c->active = c->op_free = SIM_NONE;
	for (uint32_t i = 0; i < c->stream_top; i++) {
		c->stream[i].active = 0;
		if (!(c->stream[i].gen & 1))
			continue;
		drop_popped_head(c, &c->stream[i]);
		repair_stream(c, i, seen);
	}
	for (uint32_t i = 0; i < c->op_top; i++)
		if (!seen[i]) {
			c->op[i].kind = SIM_OP_FREE;
			c->op[i].next = c->op_free;
			c->op_free = i;
		}
	c->dirty = 1;
	mark_busy(e, ctx, c->active != SIM_NONE);
}

void sim_engine_repair(struct sim_engine *e)
{
	if (e->ctx_top > SIM_ENGINE_CTXS)
		e->ctx_top = SIM_ENGINE_CTXS;
	memset(e->busy_ctx, 0, sizeof e->busy_ctx);
	for (uint32_t i = 0; i < SIM_ENGINE_PROCS; i++)
		e->proc[i].contexts = 0;
	for (uint32_t i = 0; i < SIM_ENGINE_CTXS; i++) {
		if (!ctx_open(&e->ctx[i]))
			continue;
		if (i >= e->ctx_top)
			e->ctx_top = i + 1;
		e->proc[e->ctx[i].proc % SIM_ENGINE_PROCS].contexts++;
		repair_ctx(e, i);
	}
	if (e->cur != SIM_NONE && (e->cur >= SIM_ENGINE_CTXS || !ctx_open(&e->ctx[e->cur])))
		e->cur = SIM_NONE;
	if (e->switch_to != SIM_NONE && (e->switch_to >= SIM_ENGINE_CTXS || !ctx_open(&e->ctx[e->switch_to])))
		e->switch_to = SIM_NONE;
	if (e->window_end_ns < e->t_ns)
		e->window_end_ns = e->t_ns + e->conf.sample_ns;
	recount_copies(e);
}
