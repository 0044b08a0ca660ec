package arbiter

// The hardware's own time slices and a process's way from a futex to its first kernel set these.
const (
	graceMin      = 10 * ms // for work in flight beyond its expected end, before others go on beside it
	graceMax      = 100 * ms
	drainMost     = 200 * ms // others wait so long for what is expected to run beyond the end of a turn
	graceUnits    = 3        // of the longest unit in flight: durations vary
	idleLatency   = 60_000   // as idleRelease, of the latency class: it gets its turn back at once
	idleRelease   = 300_000  // a holder with nothing on the GPU for so long has no need of it
	firstWork     = 5 * ms   // the same before its first launch: it has to wake up
	shortUnit     = 1 * ms   // in-flight units up to this end when expected: the next holder may be named
	stuckAfter    = 20 * ms
	unreported    = 10 * ms // of its GPU time a process reports late at most
	hardwareSlice = ms      // of a GPU's time-slice groups, unless set otherwise
	latencyPart   = 1 * ms  // a latency-class process waits for the rest of a unit so long at most
	latencyWork   = 1 * ms  // in flight at once beside latency-class tenants
	lentWork      = 2 * ms  // and of who has time that is not guaranteed to it
)

// process is the turn's process as it was last reported; nil when it is gone.
func (u *turn) process() *Process {
	for i := range u.t.report.Processes {
		if p := &u.t.report.Processes[i]; p.Slot == u.slot {
			return p
		}
	}
	return nil
}

// closed is true when the process launches nothing more in this turn, by its own word.
func (u *turn) closed(p *Process) bool { return p.Closed >= u.seq }

// drained is true when the turn is over.
func (u *turn) drained(p *Process, now int64) bool {
	return p == nil || p.InFlight == 0 && (u.closed(p) || now >= u.end)
}

// expectedEnd of what is in flight.
func (u *turn) expectedEnd(p *Process, now int64) int64 {
	if p.InFlight == 0 {
		return now
	}
	return max(p.WorkEnd, now)
}

func (u *turn) endedAt(p *Process, now int64) int64 {
	if p == nil {
		return now
	}
	return min(max(p.LastEnd, u.start), now)
}

// drain looks after the turn that was overdue when the next began.
func (g *GPU) drain() {
	if g.old == nil {
		return
	}
	if g.cur != nil && g.cur.t == g.old.t && g.cur.slot == g.old.slot {
		g.old = nil // it has the GPU again
		return
	}
	p := g.old.process()
	if !g.old.drained(p, g.now) {
		g.suspect(g.old, p)
		return
	}
	if g.cur != nil {
		g.part(g.old.endedAt(p, g.now))
	}
	g.old = nil
}

// part ends the time in which two turns were on the GPU. If the old one's last unit ended as soon as its time
// slice allowed, it had the GPU until then.
func (g *GPU) part(end int64) {
	if end-g.cur.start < hardwareSlice*9/10 {
		g.cur.freed = end
		g.write(g.cur)
	}
	g.apart(end)
}

// chargeByClock charges a turn that is overdue for the time that it held the GPU without reporting its use. What it
// reports later is set off against that.
func (g *GPU) chargeByClock(u *turn) {
	held, used := g.now-max(u.start, u.clock), int64(u.t.gpuTime-u.gpuTime)
	if held-used > unreported {
		u.t.charge(held-used, false)
		u.t.advance += held - used
	}
}

func (g *GPU) suspect(u *turn, p *Process) {
	if u.due != 0 && g.now > u.due+stuckAfter {
		g.stuck = append(g.stuck, stuck{u.t.id, u.slot})
	}
}

// turn makes the next step in the life of turns; false when there is none now.
func (g *GPU) turn() bool {
	if g.cur == nil {
		return g.begin()
	}
	p := g.cur.process()
	g.lookAtFirst(p)
	switch {
	case g.cur.drained(p, g.now):
		g.finish(p)
		return true
	case g.next != nil && g.now >= g.next.start:
		g.chargeByClock(g.cur)
		g.old, g.cur, g.next = g.cur, g.next, nil
		g.together()
		return true
	case g.cur.local && g.otherWaits(g.cur):
		g.revoke(g.cur)
		return false
	case (g.wantsLatency(g.cur) || g.firstElse(g.cur)) && !g.cur.revoked:
		g.revoke(g.cur)
		return true
	case g.cur.lent && !g.cur.revoked && g.guaranteedWaits(g.cur):
		g.revoke(g.cur)
		return true
	case g.idle(g.cur, p) && !g.cur.revoked && g.candidate(g.now, g.cur) != nil:
		g.cur.unused = true
		g.revoke(g.cur)
		g.again = true
		return false
	}
	if g.next == nil && (g.cur.closed(p) || g.now >= g.cur.end) {
		return g.name(p)
	}
	return false
}

// lookAtFirst learns what the handover to the current turn cost.
func (g *GPU) lookAtFirst(p *Process) {
	u := g.cur
	if u.seenFirst || u.freed == 0 || p == nil || p.First < u.start {
		return
	}
	u.seenFirst = true
	if lost := p.First - u.freed; lost > 0 && lost < ms {
		g.forgive(lost)
	}
}

func (g *GPU) finish(p *Process) {
	end := g.cur.endedAt(p, g.now)
	g.freeSince = end
	g.lookForWaste(p)
	g.apart(end)
	g.cur = nil
	if g.next == nil {
		return
	}
	g.cur, g.next = g.next, nil
	g.cur.freed = end
	if g.cur.start > g.now {
		g.cur.start = g.now
	}
	g.write(g.cur)
	g.together()
}

// begin starts a turn on the free GPU.
func (g *GPU) begin() bool {
	if g.adopt() {
		return true
	}
	c := g.candidate(g.now, nil)
	if c == nil {
		return false
	}
	g.cur = g.grant(c, g.now, false)
	if g.otherWanted(c.t) && g.now-g.freeSince < recent {
		g.cur.freed = g.freeSince
	}
	g.together()
	return true
}

// adopt takes over a turn of another arbiter whose work is still in flight; it is over, but for that.
func (g *GPU) adopt() bool {
	for _, t := range g.tenants {
		if !t.adopt {
			continue
		}
		t.adopt = false
		gr := t.lease.Grants[t.seq&1]
		u := &turn{t: t, slot: gr.Slot, seq: gr.Seq, start: gr.Start, end: min(gr.End, g.now), revoked: true, seenFirst: true}
		if p := u.process(); gr.Seq == t.seq && p != nil && p.InFlight > 0 {
			g.cur = u
			return true
		}
	}
	return false
}

// name chooses who is next, when the holder has planned its last work.
func (g *GPU) name(p *Process) bool {
	at := min(g.cur.expectedEnd(p, g.now), g.now+drainMost)
	if g.cur.due == 0 {
		g.cur.due = at
		g.cur.grace = min(max(graceUnits*p.Longest, graceMin), graceMax)
	}
	c := g.candidate(at, nil)
	switch {
	case c == nil:
		return false
	case c.t == g.cur.t && c.slot == g.cur.slot:
		g.cur = g.grant(c, g.now, true)
		g.cur.end = at + g.length(c)
		g.cur.seenFirst = true
		g.write(g.cur)
		return true
	case c.t.spec.Latency && !g.cur.t.spec.Latency:
		g.next = g.grant(c, min(at+g.config.Lag, g.now+latencyPart), false)
		return true
	case c.t.awaited && g.cur.spinning(p, g.now):
		g.next = g.grant(c, g.now, false)
		return true
	case p.Longest <= shortUnit:
		g.next = g.grant(c, max(at+g.config.Lag, g.now), false)
		return true
	case g.now >= g.cur.due+g.cur.grace:
		g.next = g.grant(c, g.now, false)
		return true
	}
	g.suspect(g.cur, p)
	return false
}

// idle is true of a holder that makes no use of its turn.
func (g *GPU) idle(u *turn, p *Process) bool {
	return p.InFlight == 0 && g.now >= u.idleFrom(p)
}

// idleFrom is when the holder, if it goes on doing nothing, is idle.
func (u *turn) idleFrom(p *Process) int64 {
	if p.Waiting > 0 || p.LastEnd < u.start {
		return u.start + firstWork
	}
	if u.t.spec.Latency {
		return p.LastEnd + idleLatency
	}
	return p.LastEnd + idleRelease
}

// revoke tells the holder to launch no more.
func (g *GPU) revoke(u *turn) {
	u.revoked = true
	if u.end > g.now {
		u.end = g.now
		g.write(u)
		g.again = true
	}
	if u.local {
		// Until now the tenant's own account held it to its limit, with rests in between.
		u.local, u.clock, u.gpuTime = false, g.now, u.t.gpuTime
		g.write(u)
	}
}

// grant gives the candidate its turn.
func (g *GPU) grant(c *choice, start int64, continues bool) *turn {
	t := c.t
	t.seq++
	u := &turn{t: t, slot: c.slot, seq: t.seq, start: start, end: start + g.length(c), lent: c.lent, gpuTime: t.gpuTime}
	if !continues && g.alone(c) {
		u.local, u.end = true, never
	}
	t.lease.Granted++
	t.served = g.now
	g.take(t)
	gr := &t.lease.Grants[u.seq&1]
	*gr = Grant{Seq: u.seq, Slot: u.slot, Continues: continues, Coupled: t.coupled}
	if b := t.besideOf(u.slot); b != nil {
		gr.Beside, gr.BesideSince = b.total, b.since
	}
	switch {
	case g.latencyMember(t):
		gr.InFlight = latencyWork
	case c.lent:
		gr.InFlight = lentWork
	}
	g.write(u)
	return u
}

// write puts a turn's times into its grant.
func (g *GPU) write(u *turn) {
	gr := &u.t.lease.Grants[u.seq&1]
	if gr.Seq != u.seq {
		return
	}
	gr.Start, gr.End, gr.Local, gr.Since = u.start, u.end, u.local, u.freed
	u.t.changed = true
}

// wake is when something can happen that nobody reports.
func (g *GPU) wake() int64 {
	wake := g.now + recent
	at := func(when int64) {
		if when > g.now {
			wake = min(wake, when)
		}
	}
	if g.cur != nil {
		if p := g.cur.process(); p != nil {
			at(g.cur.end)
			if p.InFlight == 0 {
				at(g.cur.idleFrom(p))
			} else {
				at(g.cur.expectedEnd(p, g.now))
				if g.cur.due != 0 {
					at(g.cur.due + g.cur.grace)
					at(g.cur.due + stuckAfter + 1)
				}
			}
		}
	}
	if g.old != nil {
		wake = min(wake, g.now+stuckAfter)
	}
	if g.next != nil {
		at(g.next.start)
	}
	if !g.config.Links.alone() && (g.cur != nil || g.old != nil || g.anyWaits()) {
		at(g.now + spinLook) // nobody reports that nothing happens
	}
	if g.cur == nil || g.next == nil {
		at(g.eligibleAt())
	}
	return wake
}
