package supervise

import (
	"context"
	"slices"
	"sync"
	"time"

	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/state"
	"tranche.dev/tranche/internal/tenant"
)

const (
	tick  = 250 * time.Millisecond
	usage = time.Second
	grace = 200 * time.Millisecond
)

// Config is what a supervisor needs.
type Config struct {
	Slice  *state.Own
	Driver gpu.Driver
	Child  tenant.Process
	// Warn gets at most one line, when memory beyond the ledger cannot be measured.
	Warn func(error)
	// Arbiter tells what is published of the arbiter that this process is; nil, or its result: it is none.
	Arbiter func() *state.Arbiter
}

// Supervisor looks after one slice until Stop.
type Supervisor struct {
	config Config
	ledger *tenant.Ledger
	limits *tenant.Limits
	leases *tenant.Leases // nil: cannot be read
	uuids  []string
	cancel context.CancelFunc
	done   sync.WaitGroup

	lastUsage time.Time
	lastTime  []uint64
	gpus      []state.GPUUse
	arbiter   *state.Arbiter
}

// New opens the slice's files and starts.
func New(config Config) (*Supervisor, error) {
	s := &Supervisor{config: config}
	var err error
	if s.ledger, err = tenant.OpenLedgerIn(config.Slice.Directory()); err != nil {
		return nil, err
	}
	if s.limits, err = tenant.OpenLimitsWriterIn(config.Slice.Directory()); err != nil {
		s.ledger.Close()
		return nil, err
	}
	s.leases, _ = tenant.OpenLeasesIn(config.Slice.Directory())
	s.change()
	for _, g := range config.Slice.Info.GPUs {
		s.uuids = append(s.uuids, g.UUID)
	}
	s.lastTime, s.gpus = make([]uint64, len(s.uuids)), make([]state.GPUUse, len(s.uuids))
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	s.limits.Beat()
	s.publish(time.Now(), nil)
	s.done.Go(func() { s.loop(ctx) })
	s.done.Go(func() { s.watch(ctx) })
	return s, nil
}

func (s *Supervisor) loop(ctx context.Context) {
	t := time.NewTicker(tick)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-t.C:
			s.limits.Beat()
			s.change()
			reapOrphans(s.config.Child.PID)
			s.ledger.Reclaim()
			s.publish(now, nil)
		}
	}
}

// change follows what the slice was changed to.
func (s *Supervisor) change() {
	to, ok := s.config.Slice.Changed()
	if !ok || s.limits.Set(to.Limits) != nil {
		return
	}
	s.ledger.Ring() // the arbiter need not wait for its next look
}

// watch measures. In its own PID namespace NVML's numbers are the slots' own.
func (s *Supervisor) watch(ctx context.Context) {
	m := NewMeter()
	err := s.config.Driver.Watch(ctx, tick, func(r gpu.Report) {
		slots := s.ledger.Slots()
		for i := range slots {
			if slots[i].HostPID == 0 && slots[i].PIDNS == tenant.PIDNamespace() {
				slots[i].HostPID = slots[i].PID
				s.ledger.SetHostPID(slots[i].Index, slots[i].PID)
			}
		}
		for dev, bytes := range m.Sample(s.uuids, r, slots) {
			s.ledger.SetOverhead(dev, bytes)
		}
	})
	if err != nil && ctx.Err() == nil {
		s.config.Warn(err)
	}
}

// publish tells others who runs and what they use; left are processes that are not in the ledger.
func (s *Supervisor) publish(now time.Time, left []tenant.Process) {
	use := state.Use{Processes: append([]tenant.Process{s.config.Child}, left...)}
	for _, slot := range s.ledger.Slots() {
		if !slices.Contains(use.Processes, slot.Process) && len(use.Processes) < 1024 {
			use.Processes = append(use.Processes, slot.Process)
		}
	}
	s.measure(now)
	use.GPUs, use.Arbiter = s.gpus, s.arbiter
	s.config.Slice.SetUse(use)
}

// measure brings the figures up to date: memory at once, the others about once a second, so that a slice
// is not written about all the time.
func (s *Supervisor) measure(now time.Time) {
	passed := now.Sub(s.lastUsage)
	fresh := passed >= usage
	for dev := range s.gpus {
		g := &s.gpus[dev]
		g.Memory = s.ledger.Usage(dev).Memory
		if !fresh {
			continue
		}
		g.Account = state.ReadAccount(s.ledger, s.leases, dev)
		if !s.lastUsage.IsZero() {
			g.Cores = CoresUsed(s.lastTime[dev], g.GPUTimeNs, passed)
		}
		s.lastTime[dev] = g.GPUTimeNs
	}
	if !fresh {
		return
	}
	s.lastUsage = now
	if s.config.Arbiter != nil {
		s.arbiter = s.config.Arbiter()
	}
}

// CoresUsed is GPU time over time, in hundredths of a GPU, to one decimal.
func CoresUsed(before, after uint64, passed time.Duration) float64 {
	if after <= before || passed <= 0 {
		return 0
	}
	return float64(int(1000*float64(after-before)/float64(passed.Nanoseconds())+0.5)) / 10
}

// Stop ends the supervision once the child is gone; leftBehind lists living processes that it left behind and
// that may load the slice's libraries yet. True when nobody can use the slice any more; else use.json
// names who can, which keeps the reservation.
func (s *Supervisor) Stop(leftBehind func() []tenant.Process) bool {
	s.cancel()
	s.done.Wait()
	var left []tenant.Process
	over := false
	// Most that is left is about to end as well.
	for deadline := time.Now().Add(grace); ; time.Sleep(grace / 20) {
		left = leftBehind()
		s.ledger.Reclaim()
		over = len(left) == 0 && !s.ledger.InUse()
		if over || time.Now().After(deadline) {
			break
		}
	}
	s.publish(time.Now(), left)
	s.ledger.Close()
	s.limits.Close()
	if s.leases != nil {
		s.leases.Close()
	}
	return over
}
