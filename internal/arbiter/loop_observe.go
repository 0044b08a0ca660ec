package arbiter

import abi "tranche.dev/tranche/internal/tenant"

// Measured is what the driver says about one GPU over some time: the GPU time of each process that it
// knows of, by the number in its own PID namespace.
type Measured struct {
	UUID      string
	Over      int64 // ns
	Processes map[int]int64
}

// observe compares it with what the tenants say. Figures of the driver are rough; the core allows for
// that.
func (l *Loop) observe(by Measured) {
	l.mu.Lock()
	g := l.gpus[by.UUID]
	l.mu.Unlock()
	if g == nil {
		return
	}
	for _, m := range l.all() {
		var pids map[int]bool
		if m.with(func() { pids = hostPIDs(m.pages.Ledger) }) != nil {
			continue
		}
		var sum int64
		for pid, ns := range by.Processes {
			if pids[pid] {
				sum += ns
			}
		}
		g.observe(m, sum, by.Over)
	}
}

// hostPIDs are a slice's processes as the driver counts them; in one PID namespace these are their own
// numbers.
func hostPIDs(l *abi.Ledger) map[int]bool {
	out := map[int]bool{}
	for _, s := range l.Slots() {
		switch {
		case s.HostPID != 0:
			out[s.HostPID] = true
		case s.PIDNS == abi.PIDNamespace():
			out[s.PID] = true
		}
	}
	return out
}

const (
	// believed is how often the driver must have seen more than the tenant said: its samples are not of
	// the same time as the reports, to a second. Who was caught is believed less for a while.
	believed  = 3
	suspected = 8
)

// doubt is what the driver saw of a tenant beyond what it said.
type doubt struct {
	said           uint64 // GPU time by the tenant, at the last look
	times          int
	measured, over int64 // of looks that the core was not told of yet
}

// look takes one in; tell: the core is to charge what was measured in all this time.
func (d *doubt) look(said uint64, measured, over int64) (tell bool) {
	reported := int64(said - d.said)
	d.said = said
	switch {
	case measured > reported+reported/4+over/20:
		d.times = min(d.times+1, suspected)
		d.measured += measured
		d.over += over
		return d.times >= believed
	case measured > over/20: // an idle one says nothing
		d.times = max(d.times-1, 0)
	}
	d.measured, d.over = 0, 0
	return true
}

func (g *device) observe(m *member, measured, over int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	p := g.find(m.key)
	if p == nil {
		return
	}
	var said uint64
	if abi.Guard(func() { said = m.pages.Ledger.Usage(p.dev).GPUTimeNs }) != nil {
		return
	}
	if p.doubt.look(said, min(measured, over), over) {
		g.core.Observe(m.key, p.doubt.measured, p.doubt.over)
		p.doubt.measured, p.doubt.over = 0, 0
	}
}
