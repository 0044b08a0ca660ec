package allocation

import (
	"context"
	"slices"
	"sync"
	"time"

	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/tenant"
)

const (
	tick     = 250 * time.Millisecond
	idleTick = time.Second // while no tenant has a process
	// Slots of a ledger in which no process was seen are looked through when one is claimed, and at every
	// lookAll-th tick.
	lookAll = 20
	// scanEvery bounds how often all of /proc is read for processes that were not found.
	scanEvery = time.Second
	// quiet is how long no tenant has a process before the driver is asked seldom, every idleWatch.
	quiet     = 10 * time.Second
	idleWatch = 2 * time.Second
)

// SuperviseConfig is what Supervise needs.
type SuperviseConfig struct {
	// Driver tells what processes take of the GPUs; nil: what the ledgers do not see is not measured.
	Driver gpu.Driver
	// Warn gets what goes wrong with an allocation; id is empty where it is the driver, which is tried again and may
	// fail every second.
	Warn func(id string, err error)
	// Report gets each of the driver's reports, after it was taken in; nil: nobody.
	Report func(gpu.Report)
}

// Supervise looks after all allocations until ctx ends: it gives back what dead processes held, tells ledgers
// the numbers of their processes on this machine and what the driver took beyond the charges, and removes
// what is left of former bindings.
func (s *Store) Supervise(ctx context.Context, config SuperviseConfig) {
	if config.Warn == nil {
		config.Warn = func(string, error) {}
	}
	v := &supervisor{store: s, config: config, warned: map[string]bool{}}
	var done sync.WaitGroup
	if config.Driver != nil {
		done.Go(func() { v.measure(ctx) })
	}
	for wait := tick; ; {
		changed := s.Changed()
		select {
		case <-ctx.Done():
			done.Wait()
			return
		case <-changed:
		case <-time.After(wait):
		}
		wait = idleTick
		if v.tick(time.Now()) {
			wait = tick
		}
	}
}

type supervisor struct {
	store    *Store
	config   SuperviseConfig
	lastScan time.Time
	warned   map[string]bool // directories whose ledger was destroyed
}

// tick looks at every allocation once. True: one has a process.
func (v *supervisor) tick(now time.Time) bool {
	s, busy := v.store, false
	if s.hosts.Wanted() && now.Sub(v.lastScan) >= scanEvery {
		v.lastScan = now
		if err := s.hosts.Scan(); err != nil {
			v.config.Warn("", err)
		}
	}
	for _, e := range s.all() {
		e.mu.Lock()
		if e.pages != nil {
			if err := tenant.Guard(e.pages.look); err != nil {
				v.warnOnce(e, err)
			}
			busy = busy || e.pages.busy
		}
		if len(e.former) > 0 {
			e.dropFormer()
			if e.pages != nil {
				record, _ := s.Get(e.id)
				e.chargeFormer(record.Owner)
			}
			s.forget(e)
			busy = true
		}
		e.mu.Unlock()
	}
	return busy
}

func (v *supervisor) warnOnce(e *entry, err error) {
	record, _ := v.store.Get(e.id)
	if key := arbiterID(record); !v.warned[key] {
		v.warned[key] = true
		v.config.Warn(e.id, err)
	}
}

// forget drops the entry of an allocation that was removed when nothing is left of it. Its lock is held.
func (s *Store) forget(e *entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !e.there && len(e.former) == 0 {
		delete(s.entries, e.id)
	}
}

// look is one tick of a ledger.
func (p *pages) look() {
	if p.limits != nil {
		p.limits.Beat()
	}
	p.ledger.Trim()
	claims := p.ledger.Claims()
	if p.looks++; !p.busy && claims == p.claims && p.looks%lookAll != 0 {
		return
	}
	p.claims = claims
	p.ledger.Reclaim()
	p.busy = false
	for _, slot := range p.ledger.Slots() {
		p.busy = true
		if host, ok := p.ledger.HostOf(slot); ok && host != slot.HostPID {
			p.ledger.SetHostPID(slot.Index, host)
		}
	}
	for dev := range p.gpus {
		p.peak[dev] = max(p.peak[dev], p.ledger.Usage(dev).Memory)
	}
}

// measure asks the driver: often while a tenant has a process, seldom otherwise, for those that use a GPU and
// never told so.
func (v *supervisor) measure(ctx context.Context) {
	v.store.phases(ctx, func(ctx context.Context, busy bool) {
		every := idleWatch
		if busy {
			every = tick
		}
		err := v.config.Driver.Watch(ctx, every, func(r gpu.Report) {
			v.take(r)
			if v.config.Report != nil {
				v.config.Report(r)
			}
		})
		if err != nil && ctx.Err() == nil {
			v.config.Warn("", err)
		}
	})
}

// phases calls f again and again until ctx ends, with whether a tenant has a process; f's context ends when that
// changes. Where f returns by itself it is called again after a second.
func (s *Store) phases(ctx context.Context, f func(ctx context.Context, busy bool)) {
	every := time.NewTicker(idleTick)
	defer every.Stop()
	for ctx.Err() == nil {
		busy, last := s.Busy(), time.Now()
		within, end := context.WithCancel(ctx)
		over := make(chan struct{})
		go func() {
			defer close(over)
			f(within, busy)
		}()
		for running := true; running; {
			select {
			case <-over:
				running = false
			case <-every.C:
			}
			now := s.Busy()
			if now {
				last = time.Now()
			}
			if now && !busy || busy && time.Since(last) > quiet {
				end()
			}
		}
		ended := within.Err() != nil
		end()
		if !ended {
			select {
			case <-ctx.Done():
			case <-every.C:
			}
		}
	}
}

// Busy tells whether a tenant had a process when it was last looked at.
func (s *Store) Busy() bool {
	for _, e := range s.all() {
		e.mu.Lock()
		busy := e.pages != nil && e.pages.busy || len(e.former) > 0
		e.mu.Unlock()
		if busy {
			return true
		}
	}
	return false
}

// take brings a report to the ledgers.
func (v *supervisor) take(r gpu.Report) {
	for _, e := range v.store.all() {
		e.mu.Lock()
		if p := e.pages; p != nil && (p.busy || slices.ContainsFunc(p.own, func(bytes int64) bool { return bytes != 0 })) {
			_ = tenant.Guard(func() { e.pages.measure(r) })
			record, _ := v.store.Get(e.id)
			e.chargeFormer(record.Owner)
		}
		for _, f := range e.former {
			_ = tenant.Guard(func() {
				f.pages.measure(r)
				for dev, bytes := range f.pages.own {
					f.pages.ledger.SetOverhead(dev, bytes)
				}
			})
		}
		e.mu.Unlock()
	}
}

// measure works out the overhead of the processes whose numbers on this machine are known. What the ledger
// itself says about them is not taken: its tenant could write another's.
func (p *pages) measure(r gpu.Report) {
	var slots []tenant.SlotInfo
	for _, slot := range p.ledger.Slots() {
		host, ok := p.ledger.HostOf(slot)
		if slot.HostPID = host; ok {
			slots = append(slots, slot)
		}
	}
	copy(p.own, p.meter.Sample(p.gpus, r, slots))
}
