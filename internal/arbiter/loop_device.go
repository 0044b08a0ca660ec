package arbiter

import (
	"sync"

	abi "tranche.dev/tranche/internal/tenant"
)

// device is the loop's part for one GPU: the core, and who sits at it.
type device struct {
	loop  *Loop
	uuid  string
	alarm *alarm
	refs  int // members that have it; under the loop's lock

	mu      sync.Mutex
	core    *GPU
	places  []place // few: searched
	reports func(uint64, *Report)
	writes  func(uint64, Lease)
	// faulty are members whose pages turned out to be cut short in the step under way.
	faulty   []*member
	clients  int // processes that the step under way saw, once for each report
	lastStep int64
}

// place is a member at the GPU.
type place struct {
	m       *member
	dev     int
	granted uint64
	// Of the step under way: what the lease says is new to processes; a grant is part of it, to a
	// process that has waited since then (0: it does not wait).
	tell, gave bool
	since      int64
	doubt      doubt
}

// wakeUp is why a step is made: whose bell was heard when, or nothing.
type wakeUp struct {
	by *member
	at int64
}

func newDevice(l *Loop, uuid string) *device {
	g := &device{loop: l, uuid: uuid, core: l.config.New()}
	g.reports, g.writes = g.report, g.write
	g.alarm = newAlarm(l.config.Now, func() { g.step(wakeUp{}) })
	return g
}

func (g *device) join(m *member, dev int, spec Spec) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var from Lease
	if abi.Guard(func() {
		if l, ok := m.pages.Leases.Get(dev); ok {
			from = fromPage(l)
		}
	}) != nil {
		return
	}
	g.places = append(g.places, place{m: m, dev: dev, granted: from.Granted})
	g.core.Join(m.key, spec, from, g.loop.config.Now())
}

func (g *device) leave(m *member) {
	g.mu.Lock()
	at := g.find(m.key)
	if at == nil {
		g.mu.Unlock()
		return
	}
	*at = g.places[len(g.places)-1]
	g.places = g.places[:len(g.places)-1]
	g.core.Leave(m.key, g.loop.config.Now())
	g.mu.Unlock()
	g.step(wakeUp{})
}

func (g *device) set(m *member, spec Spec) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.find(m.key) != nil {
		g.core.Set(m.key, spec)
	}
}

func (g *device) find(key uint64) *place {
	for i := range g.places {
		if g.places[i].m.key == key {
			return &g.places[i]
		}
	}
	return nil
}

// unusedNs is how often a GPU is looked at that no process asks for, all such GPUs at once: the runtime's
// bookkeeping goes on for 10 ms after a thread has woken up. The first one that asks rings.
const unusedNs = 1_000_000_000

// stepsMax bounds how often a step is made again at once.
const stepsMax = 8

// step reads all reports, decides, and writes the leases that changed.
func (g *device) step(by wakeUp) {
	g.mu.Lock()
	g.faulty, g.clients = g.faulty[:0], 0
	for i := range g.places {
		g.places[i].tell, g.places[i].gave = false, false
	}
	wake, again := int64(never), true
	for n := 0; again && n < stepsMax; n++ {
		wake, again = g.core.Step(g.loop.config.Now(), g.reports)
		g.core.Changed(g.writes)
	}
	done := g.loop.config.Now()
	g.wake(true)
	g.wake(false)
	g.measure(by, done)
	g.core.Stuck(g.stuck)
	switch {
	case again:
		wake = done
	case g.clients == 0:
		wake = max(wake, (done/unusedNs+1)*unusedNs)
	}
	g.alarm.set(wake)
	var faulty []*member
	if len(g.faulty) > 0 {
		faulty = append(faulty, g.faulty...)
	}
	g.mu.Unlock()
	for _, m := range faulty {
		m.loop.ignore(m.id, nil)
		go m.loop.leave(m) // not under the caller's locks
	}
}

// report reads what a member's processes say.
func (g *device) report(key uint64, r *Report) {
	p := g.find(key)
	if p == nil {
		return
	}
	if abi.Guard(func() {
		r.Processes = r.Processes[:0]
		p.m.pages.Ledger.Clients(p.dev, func(w abi.Work) { r.Processes = append(r.Processes, Process(w)) })
		r.GPUTime = p.m.pages.Ledger.Usage(p.dev).GPUTimeNs
	}) != nil {
		r.Processes = r.Processes[:0]
		g.faulty = append(g.faulty, p.m)
	}
	g.clients += len(r.Processes)
}

// write puts a lease into the member's page.
func (g *device) write(key uint64, l Lease) {
	p := g.find(key)
	if p == nil {
		return
	}
	if abi.Guard(func() {
		p.tell = p.m.pages.Leases.Set(p.dev, toPage(l)) || p.tell
		if l.Granted != p.granted {
			newest := l.Grants[0]
			if l.Grants[1].Seq > newest.Seq {
				newest = l.Grants[1]
			}
			p.granted, p.gave = l.Granted, true
			p.since = p.m.pages.Ledger.WaitingSince(newest.Slot, p.dev)
		}
	}) != nil {
		g.faulty = append(g.faulty, p.m)
	}
}

// wake wakes who sleeps on a lease with news: first those with a grant, which is what a handover waits
// for, then the others.
func (g *device) wake(gave bool) {
	for i := range g.places {
		if p := &g.places[i]; p.tell && p.gave == gave {
			_ = abi.Guard(func() { p.m.pages.Leases.Wake(p.dev) })
		}
	}
}

// measure takes how long the step's grants took, if a bell was why it was made.
func (g *device) measure(by wakeUp, done int64) {
	for i := range g.places {
		p := &g.places[i]
		if !p.gave || by.by == nil {
			continue
		}
		g.loop.latency.Decision.Add(done - by.at)
		// Asked since the last step: it is what this step answers.
		if p.since > g.lastStep && p.since < done {
			g.loop.latency.Request.Add(done - p.since)
		}
	}
	g.lastStep = done
}

func (g *device) stuck(key uint64, slot int) {
	p := g.find(key)
	if p == nil {
		return
	}
	select {
	case g.loop.suspect <- suspect{m: p.m, slot: slot}:
	default: // the next step says it again
	}
}

func toPage(l Lease) abi.Lease {
	return abi.Lease{Required: l.Required, Grants: [2]abi.Grant{abi.Grant(l.Grants[0]), abi.Grant(l.Grants[1])},
		Eligible: l.Eligible, TAT: l.TAT, GPUTime: l.GPUTime, Wanted: l.Wanted, Got: l.Got, Granted: l.Granted}
}

func fromPage(l abi.Lease) Lease {
	return Lease{Required: l.Required, Grants: [2]Grant{Grant(l.Grants[0]), Grant(l.Grants[1])},
		Eligible: l.Eligible, TAT: l.TAT, GPUTime: l.GPUTime, Wanted: l.Wanted, Got: l.Got, Granted: l.Granted}
}
