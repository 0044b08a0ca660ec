package arbiter

import (
	"cmp"
	"slices"
)

// Config of a core; the zero value has the defaults.
type Config struct {
	// Lag is how long after the predicted end of one holder's work the next may start, in ns. Earlier, and
	// where the prediction was wrong the hardware switches forth and back in the middle of the last unit,
	// which then looks longer than it was; later, and the GPU idles. Default 20 us.
	Lag int64
	// Links to the machine's other GPUs; nil: none.
	Links *Links
}

// GPU is the core of one physical GPU: pure, not safe for concurrent use.
//
// Invariants: at most one turn runs (cur), one is named (next), and one that was overdue may still be
// draining (old). A turn ends only when its process has said that it launches nothing more, or was told
// so and has nothing in flight, or is overdue by its grace.
type GPU struct {
	config  Config
	number  int // among linked GPUs
	now     int64
	tenants []*tenant // by id
	active  int       // tenants with recent demand
	lost    float64   // by handovers, see forgive

	cur, next, old *turn
	freeSince      int64 // when the GPU became free
	again          bool
	stuck          []stuck
}

// turn is a grant that counts.
type turn struct {
	t          *tenant
	slot       int
	seq        uint64
	start, end int64
	due        int64  // when its last work was expected to be done, 0: it has not planned it yet
	gpuTime    uint64 // of the tenant, when the turn was given
	clock      int64  // from when on it is charged by the clock, if later than start
	grace      int64  // how long after due others go on beside it
	lent       bool   // beyond the guarantee
	local      bool
	revoked    bool
	unused     bool // for longer than a process needs to wake up
	seenFirst  bool
	freed      int64 // when the one before was done, 0: it was not
}

type stuck struct {
	id   uint64
	slot int
}

// New returns the core of a GPU without members.
func New(c Config) *GPU {
	if c.Lag == 0 {
		c.Lag = 20_000
	}
	return &GPU{config: c, number: c.Links.join()}
}

// Join adds a tenant. from is what its page says: zero for a new one; the books of another arbiter, from
// which this one goes on. Turns that the other one gave are taken back: their holders ask again.
func (g *GPU) Join(id uint64, spec Spec, from Lease, now int64) {
	t := &tenant{id: id, spec: spec, gpuTime: from.GPUTime, changed: true}
	if from.TAT != 0 {
		// Capped when what ran since then is known.
		t.credit = min(max(now-from.TAT, -debtMost), debtMost)
	}
	t.seq = max(from.Grants[0].Seq, from.Grants[1].Seq)
	t.adopt = t.seq > 0
	t.lease = Lease{Required: from.Required, Granted: from.Granted, Grants: from.Grants}
	for i := range t.lease.Grants {
		gr := &t.lease.Grants[i]
		gr.End, gr.Local = min(gr.End, now), false
		t.adoptBeside(gr)
	}
	at, _ := slices.BinarySearchFunc(g.tenants, id, func(t *tenant, id uint64) int { return cmp.Compare(t.id, id) })
	g.tenants = slices.Insert(g.tenants, at, t)
	g.guarantee(now)
}

// Leave removes a tenant; what it had is free.
func (g *GPU) Leave(id uint64, now int64) {
	i, t := g.find(id)
	if t == nil {
		return
	}
	g.tenants = slices.Delete(g.tenants, i, i+1)
	g.unlink(id)
	for _, turn := range []**turn{&g.cur, &g.next, &g.old} {
		if *turn != nil && (*turn).t == t {
			*turn = nil
		}
	}
	g.freeSince = now
}

// Set changes what a tenant may use. What it owes and is owed stays, in time.
func (g *GPU) Set(id uint64, spec Spec) {
	if _, t := g.find(id); t != nil {
		t.spec = spec
		g.guarantee(g.now)
	}
}

func (g *GPU) find(id uint64) (int, *tenant) {
	for i, t := range g.tenants {
		if t.id == id {
			return i, t
		}
	}
	return -1, nil
}

// Step takes everybody's report and decides. wake is when to step again at the latest, if nothing is
// reported before; again: a turn was taken from a process that seemed idle, so write the leases, read the
// reports anew and step at once.
func (g *GPU) Step(now int64, report func(id uint64, r *Report)) (wake int64, again bool) {
	now = max(now, g.now)
	g.account(now, report)
	g.again = false
	g.stuck = g.stuck[:0]
	g.drain()
	g.meet()
	for range 4 { // a turn may end, the named one begin, and another be named
		if !g.turn() {
			break
		}
	}
	g.meet()
	g.separate()
	g.publish()
	return g.wake(), g.again
}

// account brings all books up to now.
func (g *GPU) account(now int64, report func(id uint64, r *Report)) {
	dt := now - g.now
	if g.now == 0 {
		dt = 0
	}
	g.decay(dt)
	g.active = 0
	for _, t := range g.tenants {
		wanted := t.waiting || t.inFlight
		t.report.Processes = t.report.Processes[:0]
		report(t.id, &t.report)
		idleSince := t.wanted
		used := t.see(now)
		if t.wanted == now && now-idleSince > recent {
			t.lent = max(t.lent, g.leastLent(t))
		}
		wants := t.waiting || t.inFlight
		var idle int64
		switch {
		case !wants:
			idle = min(max(now-max(g.now, t.lastEnd+gap), 0), dt)
		case !wanted && t.since != 0:
			idle = min(max(t.since-g.now, 0), dt)
		}
		t.earn(dt, idle)
		t.charge(used, t.bursts() && g.isLent(t))
		t.cap(now)
		if now-t.wanted < recent {
			g.active++
		}
		if t.share.add(now, dt, used, wants) {
			t.changed = true
		}
	}
	g.now = now
	g.guarantee(now)
}

// leastLent is where a tenant that comes back begins in the division of lent time, so that it does not
// catch up on what it did not want.
func (g *GPU) leastLent(not *tenant) float64 {
	least, any := 0.0, false
	for _, t := range g.tenants {
		if t != not && t.bursts() && g.now-t.wanted < recent && (!any || t.lent < least) {
			least, any = t.lent, true
		}
	}
	return least
}

// isLent is true while the tenant has the GPU beyond its guarantee.
func (g *GPU) isLent(t *tenant) bool {
	for _, turn := range []*turn{g.cur, g.old} {
		if turn != nil && turn.t == t {
			return turn.lent || turn.local
		}
	}
	return false
}

// Changed calls f for each tenant whose lease is to be written, since the last call.
func (g *GPU) Changed(f func(id uint64, l Lease)) {
	for _, t := range g.tenants {
		if t.changed {
			t.changed = false
			f(t.id, t.lease)
		}
	}
}

// Stuck calls f for each process whose turn is over with work in flight for suspiciously long: it may be
// dead.
func (g *GPU) Stuck(f func(id uint64, slot int)) {
	for _, s := range g.stuck {
		f(s.id, s.slot)
	}
}

// Observe compares the GPU time that was measured from outside over a time with what the tenant reported in
// it. A tenant that reports clearly less is charged the difference.
func (g *GPU) Observe(id uint64, measured, over int64) {
	_, t := g.find(id)
	if t == nil {
		return
	}
	reported := int64(min(t.gpuTime-t.observed, uint64(usedMost)))
	first := t.observed == 0
	t.observed = t.gpuTime
	if !first && measured > reported+reported/4+over/20 {
		t.excess = min(t.excess+measured-reported, usedMost)
	}
}

const eligibleStep = 2 * ms

// needsTurns is false of a tenant that has the GPU to itself, and may have all of it: it is not even metered.
func (g *GPU) needsTurns(t *tenant) bool {
	return len(g.tenants) > 1 || t.spec.Limited && t.spec.Cores < 100
}

// publish refreshes what every lease says besides its grants.
func (g *GPU) publish() {
	for _, t := range g.tenants {
		l := &t.lease
		if needs := g.needsTurns(t); needs != l.Required {
			l.Required, t.changed = needs, true
		}
		// Until then its own debt makes it wait; past values say no more than that it does not.
		if at := g.now - t.credit; t.credit < 0 && (at > l.Eligible+eligibleStep || at < l.Eligible-eligibleStep) {
			l.Eligible, t.changed = at, true
		} else if t.credit >= 0 && l.Eligible > g.now {
			l.Eligible, t.changed = g.now, true
		}
		l.TAT, l.GPUTime = g.now-t.credit, t.gpuTime
		l.Wanted, l.Got = t.share.wanted, t.share.got
	}
}
