package arbiter

const (
	slotShared   = 32 * ms // divided by those who want the GPU
	slotMin      = 2 * ms
	slotMax      = 10 * ms
	slotPerCore  = ms * 6 / 10 // and at most so much per hundredth: small shares take short turns
	slotLent     = 9 * ms
	anticipation = 2 * ms   // a guaranteed tenant that just finished will be back: its time is not lent
	latencyAhead = 250 * ms // how long the latency class may keep others from what is theirs
	longUnit     = 10 * ms  // and not to units that would keep it waiting
)

// choice is a process that may have a turn.
type choice struct {
	t    *tenant
	slot int
	lent bool
}

// candidate chooses who should have the GPU at a time, not counting the process of `not`:
// latency class first, then guaranteed time by deadline, then time that nobody is guaranteed.
func (g *GPU) candidate(at int64, not *turn) *choice {
	if c := g.first(not); c != nil {
		return c
	}
	if c := g.guaranteed(at, not, true); c != nil {
		return c
	}
	// The latency class may go beyond its guarantee before others have theirs, as long as that does not
	// keep them waiting for long: its peaks are short.
	if c := g.lend(at, not, true); c != nil && !g.late(c.t) {
		return c
	}
	if c := g.guaranteed(at, not, false); c != nil {
		return c
	}
	return g.lend(at, not, false)
}

// late is true when somebody else has waited long for what is guaranteed to it.
func (g *GPU) late(not *tenant) bool {
	for _, t := range g.tenants {
		if t != not && t.waiting && t.credit > latencyAhead {
			return true
		}
	}
	return false
}

// guaranteed chooses among tenants that are not in debt the one whose turn would be due first: earliest
// deadline first holds every guarantee as long as together they fit.
func (g *GPU) guaranteed(at int64, not *turn, latency bool) *choice {
	var best *choice
	var due int64
	for _, t := range g.tenants {
		if !t.waiting || t.barred || t.spec.Latency != latency || t.creditAt(at-g.now) < 0 {
			continue
		}
		slot, ok := t.nextProcess(not, g.now)
		if !ok {
			continue
		}
		deadline := scaled(g.length(&choice{t: t}), t.cores) - t.creditAt(at-g.now)
		if best == nil || deadline < due || deadline == due && t.served < best.t.served {
			best, due = &choice{t: t, slot: slot}, deadline
		}
	}
	return best
}

// lend chooses who may use time that nobody is guaranteed now.
func (g *GPU) lend(at int64, not *turn, latency bool) *choice {
	var best *choice
	for _, t := range g.tenants {
		if !t.waiting || t.barred || !t.bursts() || latency && !t.spec.Latency || t.roomAt(at-g.now) < 0 || g.expected(t) > g.now {
			continue
		}
		slot, ok := t.nextProcess(not, g.now)
		if ok && (best == nil || t.lent < best.t.lent) {
			best = &choice{t: t, slot: slot, lent: true}
		}
	}
	return best
}

// expected is until when the GPU is kept free of `to` for a guaranteed tenant that is about to come
// back; now or before: it is not.
func (g *GPU) expected(to *tenant) int64 {
	until := g.now
	for _, t := range g.tenants {
		// The latency class takes its turn back when it comes.
		if t == to || !t.spec.Limited || t.spec.Latency || t.waiting || t.inFlight {
			continue
		}
		if t.credit >= 0 {
			until = max(until, t.lastEnd+anticipation)
		}
		if to.longest > longUnit && g.now-t.wanted < recent {
			until = max(until, t.wanted+recent)
		}
	}
	return until
}

// nextProcess is the tenant's process that has waited longest, not that of `not`.
func (t *tenant) nextProcess(not *turn, now int64) (slot int, ok bool) {
	var since int64
	for i := range t.report.Processes {
		p := &t.report.Processes[i]
		if p.Waiting == 0 || not != nil && not.t == t && not.slot == p.Slot || t.passedOver(p, now) {
			continue
		}
		if !ok || p.WaitingSince < since {
			slot, since, ok = p.Slot, p.WaitingSince, true
		}
	}
	return slot, ok
}

// length of a turn.
func (g *GPU) length(c *choice) int64 {
	if c.lent {
		return slotLent
	}
	n := min(slotShared/int64(max(g.active, 1)), slotMax, int64(c.t.cores*float64(slotPerCore)))
	return max(n, slotMin)
}

// alone is true when no other process was on the GPU or wanted it lately.
func (g *GPU) alone(c *choice) bool {
	for _, t := range g.tenants {
		if t != c.t && (t.waiting || t.inFlight || t.wanted != 0 && g.now-t.wanted < activeFor) {
			return false
		}
	}
	for i := range c.t.report.Processes {
		p := &c.t.report.Processes[i]
		if p.Slot != c.slot && (p.Waiting > 0 || p.InFlight > 0 || p.LastEnd != 0 && g.now-p.LastEnd < activeFor) {
			return false
		}
	}
	return true
}

func (g *GPU) anyWaits() bool {
	for _, t := range g.tenants {
		if t.waiting {
			return true
		}
	}
	return false
}

// otherWaits is true when another process than the turn's waits.
func (g *GPU) otherWaits(u *turn) bool {
	for _, t := range g.tenants {
		if t.waiting {
			if _, ok := t.nextProcess(u, g.now); ok {
				return true
			}
		}
	}
	return false
}

func (g *GPU) otherWanted(not *tenant) bool {
	for _, t := range g.tenants {
		if t != not && g.now-t.wanted < recent {
			return true
		}
	}
	return false
}

// wantsLatency is true when a latency-class tenant waits for a holder that is not.
func (g *GPU) wantsLatency(u *turn) bool {
	if u.t.spec.Latency {
		return false
	}
	if g.guaranteed(g.now, u, true) != nil {
		return true
	}
	c := g.lend(g.now, u, true)
	return c != nil && !g.late(c.t)
}

// guaranteedWaits is true when somebody else waits for time that is guaranteed to it.
func (g *GPU) guaranteedWaits(u *turn) bool {
	if u.t.spec.Latency && !g.late(u.t) {
		return false
	}
	c := g.guaranteed(g.now, u, false)
	return c != nil && c.t != u.t
}

func (g *GPU) latencyMember(not *tenant) bool {
	if not.spec.Latency {
		return false
	}
	for _, t := range g.tenants {
		if t.spec.Latency && g.now-t.wanted < activeFor {
			return true
		}
	}
	return false
}

// eligibleAt is when a waiting tenant comes out of its debt, or time may be lent.
func (g *GPU) eligibleAt() int64 {
	at := int64(never)
	for _, t := range g.tenants {
		if !t.waiting {
			continue
		}
		at = min(at, t.wasteEnds(g.now))
		if c := t.creditAt(0); c < 0 {
			at = min(at, g.now-c)
		}
		if t.bursts() {
			at = min(at, max(g.now-t.roomAt(0), g.expected(t)))
		}
	}
	return at
}
