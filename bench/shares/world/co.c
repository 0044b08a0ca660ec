/* Coroutines in virtual time. The one with the least time runs; what it does takes time, and when
 * another one's time has come first, that one goes on. So all that is shared, the engines above
 * all, sees everything in the order of time. Futexes and sleep end in here.
 *
 * A switch is _setjmp and _longjmp, without a system call; ucontext makes only the first entry. */
#define _GNU_SOURCE
#include "inside.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

#define STACK (256 * 1024)
#define MAX_CO 512

int64_t share_now;
struct share_co *share_self;
static struct share_co *all;
static struct share_co caller;
static struct share_co *heap[MAX_CO];
static int n_heap;
static int64_t stop;
static uint64_t orders, seeds;

/* --- random ------------------------------------------------------------------------------------ */

static uint64_t mix(uint64_t *s)
{
	uint64_t z = *s += 0x9e3779b97f4a7c15ull;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	return z ^ z >> 31;
}

/* Each thread has numbers of its own, so that what one draws does not move the others'. */
uint64_t share_random(void)
{
	return mix(share_self != NULL ? &share_self->random : &caller.random);
}

double share_uniform(void)
{
	return (double)(share_random() >> 11) * 0x1p-53;
}

double share_exponential(double mean)
{
	return -mean * log(1 - share_uniform());
}

double share_normal(void)
{
	double u = 1 - share_uniform();
	return sqrt(-2 * log(u)) * cos(2 * M_PI * share_uniform());
}

/* --- who is next ------------------------------------------------------------------------------- */

static bool before(const struct share_co *a, const struct share_co *b)
{
	return a->at < b->at || (a->at == b->at && a->order < b->order);
}

static void put(struct share_co *c, int i)
{
	heap[i] = c;
	c->heap = i;
}

static void sift(struct share_co *c, int i)
{
	while (i > 0 && before(c, heap[(i - 1) / 2])) {
		put(heap[(i - 1) / 2], i);
		i = (i - 1) / 2;
	}
	for (;;) {
		int k = 2 * i + 1;
		if (k >= n_heap)
			break;
		if (k + 1 < n_heap && before(heap[k + 1], heap[k]))
			k++;
		if (!before(heap[k], c))
			break;
		put(heap[k], i);
		i = k;
	}
	put(c, i);
}

static void plan(struct share_co *c, int64_t at)
{
	c->at = at;
	c->order = ++orders;
	if (c->heap < 0) {
		c->heap = n_heap++;
	}
	sift(c, c->heap);
}

static void unplan(struct share_co *c)
{
	int i = c->heap;
	if (i < 0)
		return;
	c->heap = -1;
	if (i != --n_heap)
		sift(heap[n_heap], i);
}

/* --- switching --------------------------------------------------------------------------------- */

static void __attribute__((noinline)) jump(struct share_co *from, struct share_co *to)
{
	if (_setjmp(from->regs) != 0)
		return;
	if (to->boot != NULL) {
		ucontext_t *boot = to->boot;
		to->boot = NULL;
		setcontext(boot);
	}
	_longjmp(to->regs, 1);
}

static void switch_to(struct share_co *to)
{
	struct share_co *from = share_self != NULL ? share_self : &caller;
	if (from == to)
		return;
	if (from->proc != NULL)
		from->self = *from->proc->self;
	share_self = to == &caller ? NULL : to;
	jump(from, to);
	/* back again */
	if (from->proc != NULL)
		*from->proc->self = from->self;
}

/* Gives the turn away; comes back when the caller's time has come. */
static void yield(void)
{
	struct share_co *to = n_heap > 0 ? heap[0] : NULL;
	if (to == NULL || to->at > stop) {
		switch_to(&caller);
		return;
	}
	unplan(to);
	share_now = to->at;
	switch_to(to);
}

static void enter(void)
{
	struct share_co *c = share_self;
	if (c->proc != NULL)
		*c->proc->self = NULL;
	c->body(c->arg);
	c->dead = true;
	yield();
	share_die(__func__);
}

int64_t share_run(int64_t until)
{
	stop = until;
	while (n_heap > 0 && heap[0]->at <= stop)
		yield();
	if (stop > share_now)
		share_now = stop;
	return share_now;
}

void share_stop_at(int64_t at)
{
	if (at < stop)
		stop = at;
}

void share_co_start(uint64_t seed)
{
	seeds = seed;
	caller.random = mix(&seeds);
	share_now = 1000 * 1000 * SHARE_MS;
}

struct share_co *share_spawn(struct share_proc *proc, void (*body)(void *), void *arg, int64_t at)
{
	struct share_co *c = calloc(1, sizeof *c);
	ucontext_t *boot = malloc(sizeof *boot);
	void *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (c == NULL || boot == NULL || stack == MAP_FAILED || n_heap == MAX_CO)
		share_die(__func__);
	getcontext(boot);
	boot->uc_stack.ss_sp = stack;
	boot->uc_stack.ss_size = STACK;
	boot->uc_link = NULL;
	makecontext(boot, enter, 0);
	*c = (struct share_co){.boot = boot, .stack = stack, .body = body, .arg = arg, .heap = -1,
			       .random = mix(&seeds), .proc = proc, .next = all};
	all = c;
	plan(c, at > share_now ? at : share_now);
	return c;
}

void share_co_kill(struct share_proc *proc)
{
	for (struct share_co *c = all; c != NULL; c = c->next)
		if (c->proc == proc) {
			unplan(c);
			c->futex = NULL;
			c->dead = true;
		}
}

/* --- time and futexes -------------------------------------------------------------------------- */

int64_t share_late(void)
{
	return share_conf.wake_ns + (int64_t)share_exponential((double)share_conf.wake_tail_ns);
}

static void goes_on_at(int64_t at)
{
	if (at <= stop && (n_heap == 0 || at <= heap[0]->at)) {
		share_now = at;
		return;
	}
	plan(share_self, at);
	yield();
}

/* A thread that loses its processor goes on later; only one that computes can. */
static int64_t stalled(int64_t ns)
{
	struct share_co *c = share_self;
	int64_t every = share_conf.stall_every_ns;
	if (every == 0 || share_now < c->stall_at)
		return ns;
	if (c->stall_at != 0)
		ns += (int64_t)share_exponential((double)share_conf.stall_ns);
	c->stall_at = share_now + ns + (int64_t)share_exponential((double)every);
	return ns;
}

void share_host(int64_t ns)
{
	goes_on_at(share_now + stalled(ns));
}

void share_until(int64_t at)
{
	if (at > share_now)
		goes_on_at(at);
}

void share_sleep(int64_t at)
{
	if (at > share_now)
		goes_on_at(at + share_late());
}

bool share_wait(const uint32_t *word, uint32_t value, int64_t deadline, bool *changed)
{
	*changed = __atomic_load_n(word, __ATOMIC_RELAXED) != value;
	if (*changed || deadline <= share_now)
		return false;
	share_self->futex = word;
	if (deadline != INT64_MAX)
		plan(share_self, deadline + share_late());
	yield();
	bool woken = share_self->futex == NULL;
	share_self->futex = NULL;
	return woken;
}

int share_wake(const uint32_t *word, int n)
{
	int woken = 0;
	for (struct share_tenant *t = share_tenants; t < share_tenants + share_n_tenants; t++)
		if (word == &t->ledger->bell)
			share_ring(t);
	for (struct share_co *c = all; c != NULL && woken < n; c = c->next)
		if (c->futex == word) {
			c->futex = NULL;
			plan(c, share_now + share_late());
			woken++;
		}
	return woken;
}
