/* Turns: which process may have work on a GPU that several want, and until when.
 *
 * The arbiter writes grants into the tenant's lease (struct tr_lease), which is read-only here; a
 * process says in its own ledger slot what it has in flight, what it waits for and which grant it
 * has used up. So nothing that one tenant writes is read by another one. Everything in this file but
 * tr_lease_sleep is under the meter's lock.
 *
 * in_flight is raised before the grant is looked at (tr_lease_enter), and the arbiter takes a grant away
 * before it reads in_flight: one of the two sees the other. */
#include "compat.h"
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <sys/prctl.h>
#include <time.h>
#include "meter.h"
#include "slice.h"
#include "trace.h"

#define TRIES 100
#define GRANT_WORDS (sizeof(struct tr_grant[2]) / 8)

static const struct tr_lease *lease_of(int dev)
{
	return &tr_leases()->lease[dev];
}

static struct tr_slot_dev *own(int dev)
{
	int slot = tr_slot_index();
	return slot < 0 ? NULL : &tr_ledger()->slot[slot].dev[dev];
}

/* --- what the arbiter says -------------------------------------------------------------------- */

/* A consistent copy of both grants. False: the arbiter is writing for too long, or died at it. */
static bool read_grants(const struct tr_lease *l, struct tr_grant out[2])
{
	for (int i = 0; i < TRIES; i++) {
		/* Sequentially consistent: after the store of in_flight (tr_lease_enter). */
		uint32_t before = __atomic_load_n(&l->word, __ATOMIC_SEQ_CST);
		const uint64_t *from = (const uint64_t *)l->grant;
		uint64_t *to = (uint64_t *)out;
		for (size_t w = 0; w < GRANT_WORDS; w++)
			to[w] = __atomic_load_n(&from[w], __ATOMIC_ACQUIRE);
		if ((before & 1) == 0 && __atomic_load_n(&l->word, __ATOMIC_ACQUIRE) == before)
			return true;
	}
	return false;
}

bool tr_lease_flagged(int dev)
{
	return (__atomic_load_n(&lease_of(dev)->flags, __ATOMIC_SEQ_CST) & TR_LEASE_REQUIRED) != 0;
}

/* Without an arbiter that lives, the tenant's own account holds its limit. */
static bool required(int dev, int64_t now)
{
	return tr_lease_flagged(dev) && tr_slot_index() > 0 && tr_ledger_shared() &&
	       now - __atomic_load_n(&tr_leases()->beat_ns, __ATOMIC_RELAXED) < TR_BEAT_STALE_NS;
}

static enum tr_turn look(int dev, int64_t now)
{
	struct tr_dev *d = &tr_meter.dev[dev];
	struct tr_grant g[2] = {0};
	if (!required(dev, now))
		return TR_TURN_FREE;
	if (!read_grants(lease_of(dev), g))
		return TR_TURN_WAIT;
	const struct tr_grant *mine = NULL;
	for (int i = 0; i < 2; i++)
		if (g[i].seq != 0 && g[i].slot == (uint32_t)tr_slot_index() &&
		    (mine == NULL || g[i].seq > mine->seq))
			mine = &g[i];
	if (mine == NULL)
		return TR_TURN_WAIT;
	if (d->grant.seq != mine->seq && (mine->flags & TR_GRANT_CONTINUES) != 0)
		d->begun_seq = mine->seq;
	d->grant = *mine;
	if (d->closed_seq >= mine->seq || now >= mine->end_ns)
		return TR_TURN_WAIT;
	if (now < mine->start_ns)
		return TR_TURN_SOON;
	return (mine->flags & TR_GRANT_LOCAL) != 0 ? TR_TURN_LOCAL : TR_TURN_HELD;
}

enum tr_turn tr_lease_look(int dev, int64_t now)
{
	struct tr_dev *d = &tr_meter.dev[dev];
	enum tr_turn before = d->turn;
	d->turn = look(dev, now);
	if (before > TR_TURN_LOCAL && d->turn <= TR_TURN_LOCAL)
		tr_credit_follow(dev, __atomic_load_n(&lease_of(dev)->tat, __ATOMIC_RELAXED));
	return d->turn;
}

int64_t tr_lease_beside(int dev, int64_t at)
{
	const struct tr_lease *l = lease_of(dev);
	for (int i = 0; i < TRIES; i++) {
		uint32_t before = __atomic_load_n(&l->word, __ATOMIC_SEQ_CST);
		uint64_t newest = 0;
		int64_t total = 0, since = 0;
		for (int n = 0; n < 2; n++) {
			uint64_t seq = __atomic_load_n(&l->grant[n].seq, __ATOMIC_ACQUIRE);
			if (seq <= newest || __atomic_load_n(&l->grant[n].slot, __ATOMIC_ACQUIRE) !=
						     (uint32_t)tr_slot_index())
				continue;
			newest = seq;
			total = __atomic_load_n(&l->beside[n].total_ns, __ATOMIC_ACQUIRE);
			since = __atomic_load_n(&l->beside[n].since_ns, __ATOMIC_ACQUIRE);
		}
		if ((before & 1) == 0 && __atomic_load_n(&l->word, __ATOMIC_ACQUIRE) == before)
			return total + (since != 0 && at > since ? at - since : 0);
	}
	return 0;
}

int64_t tr_lease_since(int dev, uint64_t seq)
{
	struct tr_grant g[2] = {0};
	return read_grants(lease_of(dev), g) && g[seq & 1].seq == seq ? g[seq & 1].since_ns : 0;
}

int64_t tr_lease_eligible(int dev)
{
	return __atomic_load_n(&lease_of(dev)->eligible_ns, __ATOMIC_RELAXED);
}

/* --- what we say ------------------------------------------------------------------------------ */

/* When the work in flight is expected to be done. */
int64_t tr_lease_work_end(int dev, int64_t now)
{
	const struct tr_dev *d = &tr_meter.dev[dev];
	int64_t end = d->run_from + d->taken;
	return end > now ? end : now;
}

static int64_t longest(const struct tr_dev *d, int64_t now)
{
	int64_t most = d->waiting > 0 ? d->wanted_ns : 0;
	for (const struct tr_unit *u = d->oldest; u != NULL; u = u->newer)
		if (u->n == 1 && u->est > most)
			most = u->est;
	/* What takes longer than expected may take longer still. */
	if (d->units > 0 && now - d->run_from - d->oldest->est > most)
		most = now - d->run_from;
	return most;
}

void tr_lease_publish(int dev)
{
	struct tr_dev *d = &tr_meter.dev[dev];
	struct tr_slot_dev *s = own(dev);
	if (s == NULL || !d->client)
		return;
	int64_t now = tr_now_ns();
	uint32_t busy = (uint32_t)(d->units + d->open + d->entering);
	__atomic_store_n(&s->pending_ns, d->taken > 0 ? d->taken : 0, __ATOMIC_RELAXED);
	__atomic_store_n(&s->work_end_ns, tr_lease_work_end(dev, now), __ATOMIC_RELAXED);
	__atomic_store_n(&s->longest_ns, longest(d, now), __ATOMIC_RELAXED);
	__atomic_store_n(&s->last_end_ns, d->last_end, __ATOMIC_RELAXED);
	__atomic_store_n(&s->first_ns, d->first_ns, __ATOMIC_RELAXED);
	__atomic_store_n(&s->waiting_since, d->waiting_since, __ATOMIC_RELAXED);
	__atomic_store_n(&s->waiting, (uint32_t)d->waiting, __ATOMIC_RELEASE);
	__atomic_store_n(&s->closed_seq, d->closed_seq, __ATOMIC_RELEASE);
	__atomic_store_n(&s->in_flight, busy, __ATOMIC_SEQ_CST);
}

void tr_lease_ring(void)
{
	struct tr_ledger *l = tr_ledger();
	__atomic_fetch_add(&l->bell, 1, __ATOMIC_SEQ_CST);
	tr_wake_word(&l->bell);
}

/* The first launch that the arbiter is to know of. */
static void become_client(struct tr_dev *d)
{
	int slot = tr_slot_index();
	d->client = true;
	if (slot > 0)
		__atomic_fetch_or(&tr_ledger()->clients[slot / 64], 1ull << (slot % 64),
				  __ATOMIC_SEQ_CST);
}

void tr_lease_enter(int dev)
{
	struct tr_dev *d = &tr_meter.dev[dev];
	d->entering++;
	if (!tr_lease_flagged(dev))
		return; /* nobody asks */
	if (!d->client)
		become_client(d);
	struct tr_slot_dev *s = own(dev);
	if (s != NULL)
		__atomic_store_n(&s->in_flight, (uint32_t)(d->units + d->open + d->entering),
				 __ATOMIC_SEQ_CST);
}

void tr_lease_leave(int dev)
{
	tr_meter.dev[dev].entering--; /* published with the lock's release */
}

void tr_lease_close(int dev)
{
	struct tr_dev *d = &tr_meter.dev[dev];
	if (d->grant.seq == 0 || d->closed_seq >= d->grant.seq)
		return;
	d->closed_seq = d->grant.seq;
	tr_lease_publish(dev);
	tr_lease_ring();
}

void tr_lease_wait_begin(int dev, int64_t est, int64_t now)
{
	struct tr_dev *d = &tr_meter.dev[dev];
	if (d->waiting++ == 0)
		d->waiting_since = now;
	if (est > d->wanted_ns || d->waiting == 1)
		d->wanted_ns = est;
	tr_lease_publish(dev);
	tr_lease_ring();
}

void tr_lease_wait_end(int dev)
{
	struct tr_dev *d = &tr_meter.dev[dev];
	if (--d->waiting == 0)
		d->waiting_since = 0;
	tr_lease_publish(dev);
}

/* The end of what was in flight when the turn was over is what the arbiter waits for. */
static bool just_drained(struct tr_dev *d, int64_t now)
{
	if (d->units + d->open + d->entering > 0 || d->drained_said >= d->grant.seq ||
	    (d->closed_seq < d->grant.seq && now < d->grant.end_ns))
		return false;
	d->drained_said = d->grant.seq;
	return true;
}

/* Nobody asks any more; what is there then must not look like work for ever. */
static void leave_arbiter(int dev)
{
	struct tr_slot_dev *s = own(dev);
	tr_meter.dev[dev].client = false;
	if (s == NULL)
		return;
	__atomic_store_n(&s->waiting, 0, __ATOMIC_RELAXED);
	__atomic_store_n(&s->in_flight, 0, __ATOMIC_RELEASE);
}

void tr_lease_flush(void)
{
	for (int i = 0; i < tr_limits_devices(); i++) {
		struct tr_dev *d = &tr_meter.dev[i];
		if (!d->client)
			continue;
		if (!tr_lease_flagged(i)) {
			leave_arbiter(i);
			continue;
		}
		tr_lease_publish(i);
		if (d->grant.seq != 0 && just_drained(d, tr_now_ns()))
			tr_lease_ring();
	}
}

/* --- credit in flight ------------------------------------------------------------------------- */

void tr_lease_taken(int dev, int64_t ns)
{
	struct tr_dev *d = &tr_meter.dev[dev];
	int64_t now = ns > 0 && d->taken <= 0 ? tr_now_ns() : 0;
	if (now > d->run_from)
		d->run_from = now;
	d->taken += ns;
	if (d->taken < 0)
		d->taken = 0;
}

/* A unit ended: the next one in flight has been running since. */
void tr_lease_ended(int dev, int64_t end)
{
	struct tr_dev *d = &tr_meter.dev[dev];
	if (end > d->run_from)
		d->run_from = end;
	if (end > d->last_end)
		d->last_end = end;
}

/* --- waiting ---------------------------------------------------------------------------------- */

/* Turns begin to the microsecond; a thread's sleeps are rounded up by 50 us unless it asks. */
static bool wait_word(const uint32_t *word, uint32_t value, int64_t until)
{
	int64_t left = until - tr_now_ns();
	struct timespec ts = {left / 1000000000, left % 1000000000};
	if (left <= 0)
		return false;
	long slack = syscall(SYS_prctl, PR_GET_TIMERSLACK, 0, 0, 0, 0);
	syscall(SYS_prctl, PR_SET_TIMERSLACK, 1, 0, 0, 0);
	bool woken = syscall(SYS_futex, word, FUTEX_WAIT, value, &ts, NULL, 0) == 0 ||
		     errno == EAGAIN;
	if (slack > 0)
		syscall(SYS_prctl, PR_SET_TIMERSLACK, slack, 0, 0, 0);
	return woken;
}
bool (*tr_wait_word)(const uint32_t *word, uint32_t value, int64_t until) = wait_word;

static void wake_word(uint32_t *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}
void (*tr_wake_word)(uint32_t *word) = wake_word;

void tr_lease_sleep(int dev, uint32_t word, int64_t until)
{
	/* A word that is odd changes at once, or its writer has died: then the beat tells. */
	tr_wait_word(&lease_of(dev)->word, word, until);
}

uint32_t tr_lease_word(int dev)
{
	return __atomic_load_n(&lease_of(dev)->word, __ATOMIC_ACQUIRE);
}
