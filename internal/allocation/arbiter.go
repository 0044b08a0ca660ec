package allocation

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"sync"
	"time"

	"tranche.dev/tranche/internal/arbiter"
	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/served"
	"tranche.dev/tranche/internal/state"
	"tranche.dev/tranche/internal/tenant"
)

// ArbiterConfig is what an Arbiter needs; only Store must be set.
type ArbiterConfig struct {
	Store *Store
	// Registry is that of the machine's `tranche run` slices; nil: they are none of this arbiter's business.
	Registry *state.Registry
	// Driver tells what processes really used; nil: tenants are believed.
	Driver gpu.Driver
	// Warn gets what goes wrong, with the allocation or slice, or "".
	Warn func(id string, err error)
}

// Arbiter serves the node's allocations, and takes part in the election of the machine's arbiter: while it has
// that mandate it serves the slices of `tranche run` as well, in the same cores, so that one GPU has one
// arbiter. While another process has the mandate each serves its own, and a GPU that has tenants of both is
// divided by the hardware; every tenant is held to its limit all the same, where it has one.
type Arbiter struct {
	config ArbiterConfig
	slices *members
	loop   *arbiter.Loop
	since  time.Time

	mu      sync.Mutex
	over    bool
	mandate *state.Mandate
}

// StartArbiter returns with the first leases of all bound allocations written.
func StartArbiter(config ArbiterConfig) (*Arbiter, error) {
	if config.Store == nil {
		return nil, errors.New("an arbiter without allocations")
	}
	if config.Warn == nil {
		config.Warn = func(string, error) {}
	}
	a := &Arbiter{config: config, slices: &members{store: config.Store}, since: time.Now()}
	waits := false
	if config.Registry != nil {
		switch mandate, err := config.Registry.TryMandate(); {
		case err == nil:
			a.win(mandate)
		case errors.Is(err, state.ErrHeld):
			waits = true
		default:
			config.Warn("", fmt.Errorf("slices of `tranche run` are not served: %w", err))
		}
	}
	// As in tranche run, who wakes up must not wait for a processor of the runtime; but each one that is idle helps the
	// garbage collector, which then keeps kubelet waiting on a small machine.
	runtime.GOMAXPROCS(max(runtime.GOMAXPROCS(0), 4))
	measure := served.Measure(config.Driver)
	a.loop = arbiter.Start(arbiter.LoopConfig{Slices: a.slices, Seize: os.Getuid() == 0, Warn: config.Warn,
		Measure: func(ctx context.Context, tell func(arbiter.Measured)) {
			config.Store.phases(ctx, func(ctx context.Context, busy bool) {
				if !busy || config.Driver == nil {
					<-ctx.Done()
					return
				}
				measure(ctx, tell)
			})
		}})
	if waits {
		go a.wait() // it cannot be broken off; who wins when all is over gives the mandate back
	}
	return a, nil
}

func (a *Arbiter) wait() {
	mandate, err := a.config.Registry.WaitMandate()
	if err != nil {
		a.config.Warn("", fmt.Errorf("slices of `tranche run` are not served: %w", err))
		return
	}
	a.win(mandate)
}

// win takes the slices of the registry in.
func (a *Arbiter) win(mandate *state.Mandate) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.over {
		mandate.Close(false)
		return
	}
	a.mandate = mandate
	watch := a.config.Registry.Watch()
	a.slices.join(&others{Slices: served.Slices(a.config.Registry, watch), watch: watch})
}

// Stop lets tenants go on by themselves at once, each under its own limit.
func (a *Arbiter) Stop() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.over {
		return
	}
	a.over = true
	a.loop.Stop(true)
	if o := a.slices.join(nil); o != nil {
		o.watch.Close()
	}
	if a.mandate != nil {
		a.mandate.Close(false)
	}
}

// Status is what is shown of the arbiter. Serves is false while another process has the machine's mandate.
type Status struct {
	state.Arbiter
	Mandate bool
}

// Status reads it.
func (a *Arbiter) Status() Status {
	decision, request := &a.loop.Handovers().Decision, &a.loop.Handovers().Request
	at := func(h *arbiter.Histogram, q float64) int64 { return h.Quantile(q).Nanoseconds() }
	a.mu.Lock()
	defer a.mu.Unlock()
	return Status{Mandate: a.mandate != nil, Arbiter: state.Arbiter{PID: os.Getpid(), Since: a.since, Slices: a.loop.Members(),
		Handovers: decision.Count(), HandoverP50: at(decision, 0.5), HandoverP99: at(decision, 0.99),
		Requests: request.Count(), RequestP50: at(request, 0.5), RequestP99: at(request, 0.99)}}
}

// others are the slices of the registry, while they are this arbiter's.
type others struct {
	arbiter.Slices
	watch *state.Watch
}

// members are both kinds as the loop sees them. A binding is an entry of its own, so a container that starts
// again is another member.
type members struct {
	store *Store

	changed <-chan struct{} // since the entries were listed last; of the loop's goroutine

	mu     sync.Mutex
	others *others
}

// join changes what is served beside the allocations, and returns what was.
func (s *members) join(o *others) *others {
	s.mu.Lock()
	before := s.others
	s.others = o
	s.mu.Unlock()
	s.store.mu.Lock()
	s.store.tell()
	s.store.mu.Unlock()
	return before
}

func (s *members) beside() *others {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.others
}

func arbiterID(r Record) string { return fmt.Sprintf("%s.%d", r.ID, r.Serial) }

var bindingPattern = regexp.MustCompile(`^[0-9a-f]{32}\.[0-9]+$`)

// IDs implements arbiter.Slices.
func (s *members) IDs() ([]string, error) {
	s.changed = s.store.Changed()
	var out []string
	for _, r := range s.store.List() {
		if r.IsBound() {
			out = append(out, arbiterID(r))
		}
	}
	o := s.beside()
	if o == nil {
		return out, nil
	}
	more, err := o.IDs()
	if err != nil {
		return out, nil // the registry may be gone; the allocations are served all the same
	}
	return append(out, more...), nil
}

// Open implements arbiter.Slices.
func (s *members) Open(id string) (*arbiter.Pages, error) {
	if !bindingPattern.MatchString(id) {
		if o := s.beside(); o != nil {
			return o.Open(id)
		}
		return nil, nil
	}
	record, ok := s.store.bound(id)
	if !ok {
		return nil, nil
	}
	dir, err := os.Open(s.store.path(record.ID))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	var pages *arbiter.Pages
	if fault := tenant.Guard(func() { pages, err = served.Open(dir) }); fault != nil {
		err = fault
	}
	if err != nil {
		return nil, err
	}
	if now, _ := s.store.Get(record.ID); now.Serial != record.Serial {
		pages.Close() // bound anew meanwhile; that is another entry
		return nil, nil
	}
	pages.Reserved = func(dev int) int {
		if now, ok := s.store.bound(id); ok && dev < len(now.GPUs) {
			return now.GPUs[dev].Cores
		}
		return 0
	}
	return pages, nil
}

// bound is the record of a binding that is in force.
func (s *Store) bound(id string) (Record, bool) {
	r, ok := s.Get(id[:32])
	return r, ok && r.IsBound() && arbiterID(r) == id
}

// Alive implements arbiter.Slices.
func (s *members) Alive(id string) bool {
	if bindingPattern.MatchString(id) {
		_, ok := s.store.bound(id)
		return ok
	}
	o := s.beside()
	return o != nil && o.Alive(id)
}

// Wait implements arbiter.Slices.
func (s *members) Wait(ctx context.Context, d time.Duration) {
	changed := s.changed
	if o := s.beside(); o != nil {
		within, stop := context.WithCancel(ctx)
		defer stop()
		go func() {
			select {
			case <-changed:
				stop()
			case <-within.Done():
			}
		}()
		o.Wait(within, d)
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-changed:
	case <-timer.C:
	}
}
