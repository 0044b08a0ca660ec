/* The law: the generic cell rate algorithm in GPU time, one account per tenant and device.
 *
 * With share s = cores / 100, taking w ns of GPU time moves the account's TAT by w / s; work may
 * start while TAT <= now. Debt is never forgiven: what turns out longer than estimated moves TAT
 * further. Unused time counts little: while nobody wants the GPU at most IDLE_NS of it is kept
 * (a burst of s * IDLE_NS), while somebody does up to WAIT_NS, because it was lost by waking late
 * and not by choice.
 *
 * All processes of the tenant share the account, by single atomic operations. It holds the limit as
 * long as nobody else wants the GPU or no arbiter lives; in turns between several (lease.c) the arbiter
 * keeps the books, from the GPU time that is reported here, and this account follows when it ends. */
#include "compat.h"
#include "meter.h"
#include "slice.h"
#include "trace.h"

#define IDLE_NS (5 * TR_MS)
#define WAIT_NS (100 * TR_MS)
#define EDGE_NS TR_MS /* demand has ended when none is known for that long */
#define ABSURD_NS (3600 * 1000 * TR_MS)

static struct tr_account *account(int dev)
{
	return &tr_ledger()->account[dev];
}

bool tr_credit_limited(int dev)
{
	return (__atomic_load_n(&tr_limits()->dev[dev].flags, __ATOMIC_RELAXED) &
		TR_DEV_CORES_LIMITED) != 0;
}

/* In a turn between others the arbiter keeps the books. */
static bool keeps_books(int dev)
{
	return tr_meter.dev[dev].turn <= TR_TURN_LOCAL;
}

/* Wall time in which a tenant with the limit of this moment earns `ns` of GPU time. */
static int64_t scaled(int dev, int64_t ns)
{
	const struct tr_limits_dev *l = &tr_limits()->dev[dev];
	/* Alone on the GPU, by the arbiter's word, a tenant may have its ceiling. */
	int64_t cores = __atomic_load_n(tr_meter.dev[dev].turn == TR_TURN_LOCAL ? &l->cores_ceiling
										: &l->cores,
					__ATOMIC_RELAXED);
	if (cores < 1)
		cores = 1;
	if (cores > TR_CORES_WHOLE || !tr_credit_limited(dev))
		cores = TR_CORES_WHOLE;
	return ns * TR_CORES_WHOLE / cores;
}

static void raise(uint64_t *word, int64_t to)
{
	uint64_t old = __atomic_load_n(word, __ATOMIC_RELAXED);
	while ((int64_t)old < to &&
	       !__atomic_compare_exchange_n(word, &old, (uint64_t)to, true, __ATOMIC_RELAXED,
					    __ATOMIC_RELAXED))
		;
}

/* The oldest TAT that still counts. */
static int64_t credit_floor(struct tr_account *a, int64_t now, bool waiting)
{
	int64_t until = (int64_t)__atomic_load_n(&a->active_until, __ATOMIC_RELAXED);
	int64_t since = (int64_t)__atomic_load_n(&a->demand_since, __ATOMIC_RELAXED);
	if (since == 0 || since > now || (!waiting && now > until + EDGE_NS)) {
		since = now;
		__atomic_store_n(&a->demand_since, (uint64_t)now, __ATOMIC_RELAXED);
	}
	int64_t a1 = since - IDLE_NS, a2 = now - WAIT_NS;
	return a1 > a2 ? a1 : a2;
}

/* A TAT that no law explains comes from damage; waiting for it would be for ever. */
static void repair(struct tr_account *a, int dev, int64_t tat, int64_t now)
{
	static bool said;
	if (__atomic_compare_exchange_n(&a->tat, &tat, now, false, __ATOMIC_RELAXED,
					__ATOMIC_RELAXED) &&
	    !__atomic_exchange_n(&said, true, __ATOMIC_RELAXED))
		tr_complain("device %d: the ledger's compute account was %lld s ahead; set right",
			    dev, (long long)((tat - now) / (1000 * TR_MS)));
}

bool tr_credit_take(int dev, int64_t want, bool waiting, int64_t *retry_at)
{
	struct tr_account *a = account(dev);
	int64_t now = tr_now_ns(), step = scaled(dev, want);
	int64_t floor = credit_floor(a, now, waiting);
	int64_t tat = __atomic_load_n(&a->tat, __ATOMIC_RELAXED);
	for (;;) {
		if (tat > now + ABSURD_NS) {
			repair(a, dev, tat, now);
			tat = __atomic_load_n(&a->tat, __ATOMIC_RELAXED);
			continue;
		}
		if (tat > now && tr_credit_limited(dev)) {
			*retry_at = tat;
			raise(&a->active_until, tat < now + WAIT_NS ? tat : now + WAIT_NS);
			return false;
		}
		int64_t base = tat > floor ? tat : floor;
		if (__atomic_compare_exchange_n(&a->tat, &tat, base + step, true, __ATOMIC_RELAXED,
						__ATOMIC_RELAXED))
			break;
	}
	raise(&a->active_until, now + want);
	return true;
}

void tr_credit_force(int dev, int64_t want)
{
	struct tr_account *a = account(dev);
	int64_t now = tr_now_ns(), step = scaled(dev, want);
	int64_t floor = credit_floor(a, now, true);
	int64_t tat = __atomic_load_n(&a->tat, __ATOMIC_RELAXED);
	while (!__atomic_compare_exchange_n(&a->tat, &tat, (tat > floor ? tat : floor) + step, true,
					    __ATOMIC_RELAXED, __ATOMIC_RELAXED))
		;
	raise(&a->active_until, now + want);
}

void tr_credit_follow(int dev, int64_t tat)
{
	int64_t now = tr_now_ns();
	if (tat < now + ABSURD_NS)
		raise((uint64_t *)&account(dev)->tat, tat);
}

void tr_credit_settle(int dev, int64_t ns)
{
	if (ns != 0 && keeps_books(dev))
		__atomic_fetch_add(&account(dev)->tat, scaled(dev, ns), __ATOMIC_RELAXED);
}

void tr_credit_report(int dev, int64_t busy_ns, int64_t settle_ns)
{
	struct tr_account *a = account(dev);
	int slot = tr_slot_index();
	tr_credit_settle(dev, settle_ns);
	__atomic_fetch_add(&a->gpu_time_ns, (uint64_t)busy_ns, __ATOMIC_RELAXED);
	if (slot >= 0)
		__atomic_fetch_add(&tr_ledger()->slot[slot].dev[dev].gpu_time_ns,
				   (uint64_t)busy_ns, __ATOMIC_RELAXED);
	raise(&a->active_until, tr_now_ns());
}
