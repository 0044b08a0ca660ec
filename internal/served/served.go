// Package served is what whoever wins the election of the arbiter serves: the slices of the machine's registry
// (internal/state), and how their GPU time is measured. It decides nothing.
package served

import (
	"context"
	"errors"
	"os"
	"time"

	"tranche.dev/tranche/internal/arbiter"
	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/state"
	"tranche.dev/tranche/internal/tenant"
)

const (
	sampleEvery  = 100 * time.Millisecond // no longer than a driver's samples last
	measureEvery = 2 * time.Second
)

// Measure tells the arbiter what the driver saw of each process (arbiter.LoopConfig). Without a driver, or
// without samples, there is nothing to tell.
func Measure(driver gpu.Driver) func(context.Context, func(arbiter.Measured)) {
	return func(ctx context.Context, tell func(arbiter.Measured)) {
		if driver == nil {
			return
		}
		var meter gpu.BusyMeter
		_ = driver.WatchUse(ctx, sampleEvery, func(r gpu.Report) {
			now := time.Now()
			meter.Add(now, r)
			for _, b := range meter.Take(now, measureEvery) {
				m := arbiter.Measured{UUID: b.UUID, Over: b.Over.Nanoseconds(), Processes: map[int]int64{}}
				for pid, d := range b.Processes {
					m.Processes[pid] = d.Nanoseconds()
				}
				tell(m)
			}
		})
	}
}

// Slices are the registry's living slices of the caller, root's of all. Whoever ends the watch ends their use.
func Slices(registry *state.Registry, watch *state.Watch) arbiter.Slices {
	return served{registry, watch}
}

// served is the registry as the arbiter sees it.
type served struct {
	registry *state.Registry
	watch    *state.Watch
}

func (s served) IDs() ([]string, error) { return s.registry.IDs() }

func (s served) Alive(id string) bool { return s.registry.Alive(id) }

func (s served) Wait(ctx context.Context, d time.Duration) { s.watch.Wait(ctx, d) }

// Open maps a slice's pages, through its directory, which nobody can exchange.
func (s served) Open(id string) (*arbiter.Pages, error) {
	member, dir, err := s.registry.OpenMember(id)
	switch {
	case errors.Is(err, state.ErrNotYet):
		return nil, arbiter.ErrNotYet
	case errors.Is(err, state.ErrNoMember):
		return nil, nil
	case err != nil:
		return nil, err
	}
	defer dir.Close()
	var pages *arbiter.Pages
	if fault := tenant.Guard(func() { pages, err = Open(dir) }); fault != nil {
		err = fault
	}
	if err != nil {
		return nil, err
	}
	pages.Reserved, pages.Rival = s.reserved(member), s.rival(member.UID)
	return pages, nil
}

// reserved looks at the record anew: tranche set changes it.
func (s served) reserved(member state.Slice) func(int) int {
	return func(dev int) int {
		if now, ok := s.registry.Get(member.ID); ok {
			member = now
		}
		if dev >= len(member.Info.GPUs) {
			return 0
		}
		return member.Info.GPUs[dev].ReservedCores
	}
}

// Open maps the pages of a slice's directory for its arbiter.
func Open(dir *os.File) (*arbiter.Pages, error) {
	var p arbiter.Pages
	var err error
	if p.Ledger, err = tenant.OpenLedgerIn(dir); err != nil {
		return nil, err
	}
	if p.Limits, err = tenant.OpenLimitsIn(dir); err != nil {
		p.Ledger.Close()
		return nil, err
	}
	if p.Leases, err = tenant.OpenLeasesWriterIn(dir); err != nil {
		p.Ledger.Close()
		p.Limits.Close()
		return nil, err
	}
	return &p, nil
}

// rival is the other arbiter that may serve a user's slice: root's serves all, and the user's own.
func (s served) rival(uid int) func() bool {
	other := 0
	if os.Getuid() == 0 {
		other = uid
	}
	if other == os.Getuid() {
		return nil
	}
	return func() bool { return s.registry.HasArbiter(other) }
}
