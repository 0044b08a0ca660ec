package arbiter

import "math"

// Credit: how far a tenant is behind its share, in ns of wall time; negative is debt. It is the
// distance V - TAT of the generic cell rate algorithm, kept as a difference because the virtual time V
// stands still for what handovers lose (forgive), so that in overload all lose the same part.
const (
	ms int64 = 1_000_000

	creditIdle = 5 * ms   // earned without demand, at most
	creditWait = 500 * ms // earned while others have the GPU, at most
	gap        = 1 * ms   // between two pieces of work is demand still
	idleEdge   = 10 * ms  // without demand for longer, credit beyond creditIdle is lost
	debtLent   = 20 * ms  // debt from time that nobody else wanted, at most: then its guarantee counts again
	overdue    = 20 * ms  // credit of a waiting tenant that shows overload
	recent     = 100 * ms // demand since then counts as demand
	activeFor  = 1000 * ms

	usedMost    = 3600 * 1000 * ms // more cannot have run since the last report
	debtMost    = 3600 * 1000 * ms
	pendingMost = 10 * 1000 * ms
	never       = math.MaxInt64
)

// tenant is one member of a GPU.
type tenant struct {
	id    uint64
	spec  Spec
	cores float64 // guaranteed now, hundredths
	ceil  float64

	report  Report
	gpuTime uint64  // charged up to here
	credit  int64   // against cores
	room    int64   // the same against the ceiling
	lent    float64 // time beyond its guarantee, by weight

	waiting  bool
	inFlight bool
	pending  int64
	lastEnd  int64
	ran      bool // since lastEnd
	longest  int64
	since    int64  // waiting since, 0: does not wait
	wanted   int64  // last seen with demand
	blocked  int64  // last seen waiting for a turn
	observed uint64 // report.GPUTime at the last Observe
	excess   int64  // measured beyond what it reported, to be charged

	seq     uint64
	coupled bool // its kernels wait for each other across GPUs
	awaited bool // its partners on other GPUs have their turn
	barred  bool // and those of another tenant that shares GPUs with it
	wasted  []waste
	besides []beside
	advance int64 // charged by the clock, and not reported yet
	served  int64 // when it was last given a turn
	adopt   bool  // the latest grant is of another arbiter
	lease   Lease
	changed bool
	share   share
}

// see takes the report in: demand, and the charge for what ran since the last one.
func (t *tenant) see(now int64) int64 {
	wasWaiting := t.waiting
	var ended, used int64
	// It only grows; a page that cannot be read for once reads as less.
	if t.report.GPUTime > t.gpuTime {
		used = int64(min(t.report.GPUTime-t.gpuTime, uint64(usedMost)))
		t.gpuTime = t.report.GPUTime
	}
	t.waiting, t.inFlight, t.pending, t.longest, t.since = false, false, 0, 0, 0
	for i := range t.report.Processes {
		p := &t.report.Processes[i]
		t.bound(p, now)
		if p.Waiting > 0 {
			t.waiting = true
			if t.since == 0 || p.WaitingSince < t.since {
				t.since = p.WaitingSince
			}
		}
		t.inFlight = t.inFlight || p.InFlight > 0
		t.pending += p.Pending
		ended = max(ended, p.LastEnd)
		t.longest = max(t.longest, p.Longest)
	}
	// Only what was charged for counts as an end of work; the two may arrive one after the other.
	t.ran = t.ran || used > 0
	if t.ran && ended > t.lastEnd {
		t.lastEnd, t.ran = ended, false
	}
	if t.waiting || wasWaiting {
		t.blocked = now
	}
	if t.waiting || t.inFlight {
		t.wanted = now
	}
	paid := min(used, t.advance)
	t.advance -= paid
	return used - paid + t.takeExcess()
}

// bound takes from a report what cannot be, so that who lies hurts nobody else.
func (t *tenant) bound(p *Process, now int64) {
	p.InFlight, p.Waiting = max(p.InFlight, 0), max(p.Waiting, 0)
	p.Pending = min(max(p.Pending, 0), pendingMost)
	p.WorkEnd = min(p.WorkEnd, now+pendingMost)
	p.Longest = min(max(p.Longest, 0), pendingMost)
	p.WaitingSince = min(max(p.WaitingSince, 0), now)
	if p.LastEnd > now {
		p.LastEnd = 0
	}
	if p.First > now {
		p.First = 0
	}
	if p.Closed > t.seq {
		p.Closed = 0 // a turn that was not given
	}
}

func (t *tenant) takeExcess() int64 {
	e := t.excess
	t.excess = 0
	return e
}

// earn adds dt of wall time; idle is the part of it in which the tenant wanted nothing.
func (t *tenant) earn(dt, idle int64) {
	t.credit = earned(t.credit, dt, idle)
	t.room = earned(t.room, dt, idle)
}

func earned(credit, dt, idle int64) int64 {
	credit += dt - idle
	if credit < creditIdle {
		credit = min(credit+idle, creditIdle)
	}
	return credit
}

// cap bounds the credit, after what ran in the same time has been charged: that may have been long, as
// when the arbiter was stopped, or there was none, and the tenants' own accounts held their limits.
func (t *tenant) cap(now int64) {
	most := creditWait
	if now-t.wanted > idleEdge {
		most = creditIdle
	}
	t.credit = min(max(t.credit, -debtMost), most)
	t.room = min(max(t.room, -debtMost), most)
}

// charge takes used ns of GPU time from the account. What was lent costs at most debtLent.
func (t *tenant) charge(used int64, lent bool) {
	if used == 0 {
		return
	}
	before := t.credit
	t.credit -= scaled(used, t.cores)
	if lent && t.credit < -debtLent {
		t.credit = min(before, -debtLent)
	}
	t.room -= scaled(used, t.ceil)
	if lent {
		t.lent += float64(used) / t.weight()
	}
}

func scaled(ns int64, cores float64) int64 {
	return int64(float64(min(max(ns, -usedMost), usedMost)) * 100 / max(cores, 0.1))
}

func (t *tenant) weight() float64 {
	if t.spec.Weight > 0 {
		return float64(t.spec.Weight)
	}
	return max(t.cores, 1)
}

// bursts is true of a tenant that may have more than its guarantee.
func (t *tenant) bursts() bool { return t.ceil > t.cores }

// creditAt is the credit at a later time, when what is in flight has been charged.
func (t *tenant) creditAt(ahead int64) int64 { return t.credit + ahead - scaled(t.pending, t.cores) }

func (t *tenant) roomAt(ahead int64) int64 {
	if t.ceil >= 100 {
		return 0
	}
	return t.room + ahead - scaled(t.pending, t.ceil)
}

// guarantee divides the GPU among its members: limited tenants have what they asked for, scaled down
// together where those that want it want more than there is; the others divide what is left.
func (g *GPU) guarantee(now int64) {
	limited, wanted, unlimited := 0, 0, 0
	for _, t := range g.tenants {
		if !t.spec.Limited {
			unlimited++
			continue
		}
		limited += t.spec.Cores
		if now-t.wanted < recent {
			wanted += t.spec.Cores
		}
	}
	scale := 100 / float64(max(wanted, 100))
	for _, t := range g.tenants {
		if t.spec.Limited {
			t.cores, t.ceil = float64(t.spec.Cores)*scale, float64(max(t.spec.Ceiling, t.spec.Cores))
			continue
		}
		t.cores = max(1, float64(100-limited)/float64(unlimited))
		t.ceil = 100
	}
}

// forgive slows the virtual time by what a handover lost, when those that want the GPU are guaranteed
// more than handovers leave of it. Without it each tenant's credit would run into creditWait at another
// moment, and the ratio of what they get would no longer be that of their shares.
func (g *GPU) forgive(lost int64) {
	// Part of the time lost, smoothed over half a second.
	g.lost += float64(lost)
	sum, late := 0.0, false
	for _, t := range g.tenants {
		if g.now-t.blocked < recent {
			sum += t.cores
		}
		late = late || t.waiting && t.credit > overdue
	}
	if !late || sum+100*g.lost/float64(lossOver) < 99.5 {
		return
	}
	for _, t := range g.tenants {
		if g.now-t.wanted < recent {
			t.credit -= lost
		}
	}
}

const lossOver = 500 * ms

// decay forgets old losses.
func (g *GPU) decay(dt int64) { g.lost *= math.Exp(-float64(dt) / float64(lossOver)) }
