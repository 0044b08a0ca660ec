/* Tenants, processes and what the arbiter sees of them. */
#define _GNU_SOURCE
#include "inside.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CLOCK_STEP_NS (50 * SHARE_MS)

struct share_conf share_conf;
struct share_tenant share_tenants[SHARE_TENANTS];
struct share_proc share_procs[SHARE_PROCS];
int share_n_tenants, share_n_procs;
static bool listening;
static double clocks[SHARE_GPUS];
static int64_t began;

void share_die(const char *where)
{
	fprintf(stderr, "shares: %s failed\n", where);
	abort();
}

void share_say(const char *fmt, ...)
{
	if (!share_conf.trace)
		return;
	va_list ap;
	va_start(ap, fmt);
	fprintf(stderr, "%12.3f ms  ", (double)(share_now - began) / 1e6);
	vfprintf(stderr, fmt, ap);
	fputc('\n', stderr);
	va_end(ap);
}

/* --- the clock of the GPUs ---------------------------------------------------------------------- */

double share_clock(int gpu)
{
	return clocks[gpu];
}

static void wander(void *arg)
{
	(void)arg;
	for (;; share_until(share_now + CLOCK_STEP_NS))
		for (int i = 0; i < share_conf.gpus; i++) {
			double x = clocks[i] + 0.01 * share_normal();
			clocks[i] = x < 0.9 ? 0.9 : x > 1.1 ? 1.1 : x;
		}
}

/* --- a time line ------------------------------------------------------------------------------- */

/* Who has each GPU, to 20 us. */
static void look(void *arg)
{
	static int was[SHARE_GPUS];
	(void)arg;
	for (int i = 0; i < share_conf.gpus; i++)
		was[i] = -1;
	for (;; share_until(share_now + 20 * SHARE_US))
		for (int i = 0; i < share_conf.gpus; i++) {
			struct sim_engine *e = share_engine[i];
			sim_engine_advance(e, (uint64_t)share_now);
			bool runs = e->cur != SIM_NONE && e->switch_to == SIM_NONE &&
				    e->ctx[e->cur].runnable;
			int who = runs ? (int)e->ctx[e->cur].proc : -1;
			if (who == was[i])
				continue;
			was[i] = who;
			if (who < 0)
				share_say("gpu %d  idle", i);
			else
				share_say("gpu %d  runs tenant %d slot %d", i, share_procs[who].tenant,
					  share_procs[who].slot);
		}
}

/* --- start ------------------------------------------------------------------------------------- */

static const char *start(const struct share_conf *conf)
{
	static char path[4096];
	share_conf = *conf;
	if (strlen(conf->process) >= sizeof path || conf->gpus < 1 || conf->gpus > SHARE_GPUS)
		return "bad configuration";
	share_conf.process = strcpy(path, conf->process);
	if (access(path, R_OK) != 0)
		return "process.so cannot be read";
	share_co_start(conf->seed);
	began = share_now;
	share_driver_start();
	for (int i = 0; i < SHARE_GPUS; i++)
		clocks[i] = 1;
	if (conf->dvfs)
		share_spawn(NULL, wander, NULL, share_now);
	if (conf->trace)
		share_spawn(NULL, look, NULL, share_now);
	return NULL;
}

static int64_t now(void)
{
	return share_now;
}

/* --- the arbiter's ears ------------------------------------------------------------------------- */

static int64_t hop(void)
{
	return share_conf.hop_ns + (int64_t)share_exponential((double)share_conf.hop_tail_ns);
}

/* What the tenant's processes say as they ring. */
static void say_bell(const struct share_tenant *t)
{
	for (int slot = 1; slot <= t->procs; slot++)
		for (int i = 0; i < share_conf.gpus; i++) {
			const struct tr_slot_dev *d = &t->ledger->slot[slot].dev[i];
			if ((t->ledger->clients[slot / 64] >> (slot % 64) & 1) == 0)
				continue;
			share_say("bell   tenant %d slot %d gpu %d: in flight %u, waiting %u, closed %llu, pending %.3f ms, work end %+.3f",
				  (int)(t - share_tenants), slot, i, d->in_flight, d->waiting,
				  (unsigned long long)d->closed_seq, (double)d->pending_ns / 1e6,
				  (double)(d->work_end_ns - share_now) / 1e6);
		}
}

void share_ring(struct share_tenant *t)
{
	if (!listening || t->due != SHARE_NEVER)
		return;
	if (share_conf.trace)
		say_bell(t);
	t->due = share_now + hop();
	share_stop_at(t->due);
}

static int64_t run(int64_t until)
{
	for (int i = 0; i < share_n_tenants; i++)
		if (share_tenants[i].due < until)
			until = share_tenants[i].due;
	return share_run(until);
}

static uint32_t heard(void)
{
	uint32_t set = 0;
	for (int i = 0; i < share_n_tenants; i++)
		if (share_tenants[i].due <= share_now) {
			share_tenants[i].due = SHARE_NEVER;
			set |= 1u << i;
		}
	return set;
}

static void listen_to(bool on)
{
	listening = on;
	for (int i = 0; i < share_n_tenants; i++)
		share_tenants[i].due = SHARE_NEVER;
}

/* --- tenants ----------------------------------------------------------------------------------- */

static void *page(size_t size)
{
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		share_die(__func__);
	return p;
}

static void set_limits(int32_t tenant, const struct share_limits *l)
{
	struct tr_limits *p = share_tenants[tenant].limits;
	__atomic_store_n(&p->generation, p->generation + 1, __ATOMIC_SEQ_CST);
	for (int i = 0; i < share_conf.gpus; i++)
		p->dev[i] = (struct tr_limits_dev){
			.cores = (uint32_t)l->cores,
			.cores_ceiling = (uint32_t)(l->ceiling > l->cores ? l->ceiling : l->cores),
			.weight = (uint32_t)l->weight,
			.flags = (l->limited ? TR_DEV_CORES_LIMITED : 0) |
				 (l->ceiling > l->cores ? TR_DEV_BURST : 0) |
				 (l->latency ? TR_DEV_LATENCY : 0),
		};
	__atomic_store_n(&p->generation, p->generation + 1, __ATOMIC_SEQ_CST);
}

static int32_t tenant(const struct share_limits *l)
{
	if (share_n_tenants == SHARE_TENANTS)
		return -1;
	struct share_tenant *t = &share_tenants[share_n_tenants];
	uint8_t *limits = page(2 * TR_LEASES_OFFSET);
	*t = (struct share_tenant){.limits = (struct tr_limits *)limits,
				   .leases = (struct tr_leases *)(limits + TR_LEASES_OFFSET),
				   .ledger = page(sizeof(struct tr_ledger)),
				   .due = SHARE_NEVER};
	t->limits->magic = TR_LIMITS_MAGIC;
	t->limits->version = TR_ABI_VERSION;
	t->limits->size = sizeof *t->limits;
	t->limits->generation = 2;
	t->limits->n_devices = (uint32_t)share_conf.gpus;
	t->leases->magic = TR_LEASES_MAGIC;
	t->ledger->magic = TR_LEDGER_MAGIC;
	t->ledger->version = TR_ABI_VERSION;
	t->ledger->size = sizeof *t->ledger;
	t->ledger->n_slots = TR_MAX_PROCS;
	set_limits(share_n_tenants, l);
	return share_n_tenants++;
}

/* --- processes --------------------------------------------------------------------------------- */

static int current_device(void)
{
	CUcontext c = share_self->depth > 0 ? share_self->stack_ctx[share_self->depth - 1] : NULL;
	for (int i = 0; c != NULL && i < share_conf.gpus; i++)
		if (share_self->proc->ctx[i] == c)
			return i;
	return -1;
}

struct thread {
	void *(*body)(void *);
	void *arg;
};

static void thread_run(void *arg)
{
	struct thread t = *(struct thread *)arg;
	free(arg);
	t.body(t.arg);
}

/* A thread that the library makes. */
static int thread(void *(*body)(void *), void *arg)
{
	struct thread *t = malloc(sizeof *t);
	*t = (struct thread){body, arg};
	share_spawn(share_self->proc, thread_run, t, share_now + share_late());
	return 0;
}

/* A copy in memory, so that the loader takes it for another library. */
static void *load_copy(const char *path)
{
	char name[64];
	int in = open(path, O_RDONLY | O_CLOEXEC), out = memfd_create("process", MFD_CLOEXEC);
	off_t size = in < 0 ? -1 : lseek(in, 0, SEEK_END);
	void *bytes = size <= 0 ? MAP_FAILED : mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, in, 0);
	bool ok = bytes != MAP_FAILED && out >= 0 && write(out, bytes, (size_t)size) == size;
	snprintf(name, sizeof name, "/proc/self/fd/%d", out);
	void *lib = ok ? dlopen(name, RTLD_NOW | RTLD_LOCAL) : NULL;
	if (lib == NULL) {
		const char *why = ok ? dlerror() : "it cannot be copied";
		fprintf(stderr, "shares: %s: %s\n", path, why);
		exit(1);
	}
	if (bytes != MAP_FAILED)
		munmap(bytes, (size_t)size);
	close(in);
	return lib; /* the descriptor stays, so that the next copy has another name */
}

static void load(struct share_proc *p)
{
	const struct share_tenant *t = &share_tenants[p->tenant];
	struct share_host host = {
		.now = &share_now,	   .limits = t->limits,
		.leases = t->leases,	   .ledger = t->ledger,
		.slot = p->slot,	   .devices = share_conf.gpus,
		.current_device = current_device,
		.sleep_until = share_sleep, .wait = share_wait,
		.wake = share_wake,	   .thread = thread,
	};
	void *sym = dlsym(load_copy(share_conf.process), SHARE_PROCESS_SYMBOL);
	if (sym == NULL)
		share_die(__func__);
	share_process_fn *enter;
	memcpy(&enter, &sym, sizeof enter);
	enter(&host, &p->lib);
	p->self = p->lib.self;
	share_driver_fill(p->lib.real);
	p->lib.arm();
}

static int32_t process(int32_t of, int32_t limiter)
{
	static void *nobody[SHARE_PROCS];
	if (share_n_procs == SHARE_PROCS)
		return -1;
	struct share_tenant *t = &share_tenants[of];
	struct share_proc *p = &share_procs[share_n_procs];
	*p = (struct share_proc){.tenant = of, .slot = ++t->procs, .index = share_n_procs,
				 .limiter = (enum share_limiter)limiter,
				 .self = &nobody[share_n_procs]};
	t->ledger->slot[p->slot].state = TR_SLOT_USED;
	t->ledger->slot[p->slot].pid = (uint32_t)p->index + 1;
	t->ledger->slot[p->slot].abi = TR_ABI_VERSION;
	if (limiter == SHARE_SHIPPED)
		load(p);
	if (limiter == SHARE_FEEDBACK)
		share_feedback_start(p);
	return share_n_procs++;
}

static int32_t program(int32_t of, const struct share_program *what)
{
	return share_program_start(&share_procs[of], what);
}

static void kill_process(int32_t index)
{
	struct share_proc *p = &share_procs[index];
	p->dead = true;
	share_co_kill(p);
	share_driver_drop(p);
	share_say("kill   tenant %d slot %d", p->tenant, p->slot);
}

/* As a supervisor does: what the dead process said is taken back, and the arbiter told. */
static void reclaim(int32_t index)
{
	struct share_proc *p = &share_procs[index];
	struct share_tenant *t = &share_tenants[p->tenant];
	struct tr_slot *s = &t->ledger->slot[p->slot];
	memset(s, 0, sizeof *s);
	t->ledger->clients[p->slot / 64] &= ~(1ull << (p->slot % 64));
	t->ledger->bell++;
	share_ring(t);
}

/* --- what the arbiter reads and writes ---------------------------------------------------------- */

static int32_t reports(int32_t of, int32_t gpu, struct share_report *out, int32_t max,
		       uint64_t *gpu_time_ns)
{
	const struct tr_ledger *l = share_tenants[of].ledger;
	int32_t n = 0;
	*gpu_time_ns = l->account[gpu].gpu_time_ns;
	for (int w = 0; w < TR_MAX_PROCS / 64; w++)
		for (uint64_t set = l->clients[w]; set != 0 && n < max; set &= set - 1) {
			int slot = w * 64 + __builtin_ctzll(set);
			const struct tr_slot_dev *d = &l->slot[slot].dev[gpu];
			out[n++] = (struct share_report){
				.slot = slot,		       .in_flight = d->in_flight,
				.waiting = d->waiting,	       .waiting_since = d->waiting_since,
				.pending_ns = d->pending_ns,   .work_end_ns = d->work_end_ns,
				.last_end_ns = d->last_end_ns, .longest_ns = d->longest_ns,
				.first_ns = d->first_ns,       .closed_seq = d->closed_seq,
				.gpu_time_ns = d->gpu_time_ns,
			};
		}
	return n;
}

static void lease_get(int32_t of, int32_t gpu, struct share_lease *out)
{
	const struct tr_lease *l = &share_tenants[of].leases->lease[gpu];
	*out = (struct share_lease){.flags = l->flags, .eligible_ns = l->eligible_ns, .tat = l->tat,
				    .gpu_time_ns = l->gpu_time_ns, .wanted = l->share_wanted,
				    .got = l->share_got, .grants = l->grants};
	for (int i = 0; i < 2; i++) {
		const struct tr_grant *g = &l->grant[i];
		out->grant[i] = (struct share_grant){g->seq, g->slot, g->flags, g->start_ns, g->end_ns,
						     g->since_ns, g->in_flight_ns,
						     l->beside[i].total_ns, l->beside[i].since_ns};
	}
}

static void say_grant(int tenant_, const struct tr_grant *old, const struct share_grant *g)
{
	if (old->seq == g->seq && old->end_ns == g->end_ns && old->start_ns == g->start_ns)
		return;
	share_say("grant  tenant %d slot %u seq %llu%s start %+.3f end %+.3f since %+.3f ms", tenant_,
		  g->slot, (unsigned long long)g->seq, g->flags & TR_GRANT_LOCAL ? " local" : "",
		  (double)(g->start_ns - share_now) / 1e6, (double)(g->end_ns - share_now) / 1e6,
		  g->since_ns == 0 ? 0 : (double)(g->since_ns - share_now) / 1e6);
}

static void lease_set(int32_t of, int32_t gpu, const struct share_lease *in)
{
	struct tr_lease *l = &share_tenants[of].leases->lease[gpu];
	__atomic_store_n(&l->word, l->word + 1, __ATOMIC_SEQ_CST);
	l->flags = in->flags;
	l->eligible_ns = in->eligible_ns;
	l->tat = in->tat;
	l->gpu_time_ns = in->gpu_time_ns;
	l->share_wanted = in->wanted;
	l->share_got = in->got;
	l->grants = in->grants;
	for (int i = 0; i < 2; i++) {
		const struct share_grant *g = &in->grant[i];
		if (share_conf.trace)
			say_grant(of, &l->grant[i], g);
		l->grant[i] = (struct tr_grant){g->seq, g->slot, g->flags, g->start_ns, g->end_ns,
						g->since_ns, g->in_flight_ns};
		l->beside[i] = (struct tr_beside){g->beside_ns, g->beside_since_ns};
	}
	__atomic_store_n(&l->word, l->word + 1, __ATOMIC_SEQ_CST);
	share_wake(&l->word, INT32_MAX);
}

static void beat(bool alive)
{
	for (int i = 0; i < share_n_tenants; i++)
		share_tenants[i].leases->beat_ns = alive ? share_now : share_tenants[i].leases->beat_ns;
}

static void usage(int32_t of, int32_t gpu, struct share_usage *out)
{
	const struct tr_account *a = &share_tenants[of].ledger->account[gpu];
	*out = (struct share_usage){a->gpu_time_ns, a->throttled_ns, a->launches};
}

/* --- the truth --------------------------------------------------------------------------------- */

static int64_t busy(int32_t index, int32_t gpu)
{
	sim_engine_advance(share_engine[gpu], (uint64_t)share_now);
	return (int64_t)share_engine[gpu]->proc[index].busy_ns;
}

static int64_t switched(int32_t gpu)
{
	sim_engine_advance(share_engine[gpu], (uint64_t)share_now);
	return (int64_t)share_engine[gpu]->switch_ns;
}

static void stats(int32_t of, struct share_stats *out)
{
	share_program_stats(of, out);
}

static int64_t breaches(void)
{
	return share_breaches;
}

__attribute__((visibility("default"))) const struct share_api *share_world(void)
{
	static const struct share_api api = {
		.start = start,		.now = now,	      .run = run,
		.heard = heard,		.listen = listen_to,  .hop = hop,
		.tenant = tenant,	.set_limits = set_limits,
		.process = process,	.program = program,   .kill = kill_process,
		.reclaim = reclaim,	.reports = reports,   .lease_get = lease_get,
		.lease_set = lease_set, .beat = beat,	      .usage = usage,
		.busy = busy,		.switched = switched, .stats = stats,
		.stats_reset = share_program_reset,	      .breaches = breaches,
	};
	return &api;
}
