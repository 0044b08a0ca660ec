package run

import (
	"errors"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/arbiter"
	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/machine"
	"tranche.dev/tranche/internal/served"
	"tranche.dev/tranche/internal/slice"
	"tranche.dev/tranche/internal/state"
	"tranche.dev/tranche/internal/supervise"
	"tranche.dev/tranche/internal/tenant"
)

// candidate is this run's part in the election of the arbiter: it serves the slices of its user while it
// has the mandate, and waits for the mandate otherwise.
type candidate struct {
	registry *state.Registry
	driver   gpu.Driver // nil: there is none to ask
	say      func(format string, args ...any)

	mu      sync.Mutex
	over    bool
	waiting bool // for the mandate, in a goroutine
	mandate *state.Mandate
	loop    *arbiter.Loop
	watch   *state.Watch
	since   time.Time
}

// takePart returns with the own slice served, by this process or by another one, as far as that takes no
// time. nil, whose methods do nothing, for a slice within another: that one has the lease.
func takePart(config Config, m *machine.Machine, own *state.Own, layout slice.Layout) *candidate {
	if m.Beneath.Outer != "" {
		return nil
	}
	c := &candidate{registry: m.Registry, say: config.say}
	if driver, err := m.Driver(layout.BaseNVML); err == nil {
		c.driver = driver
	}
	if !c.enter() {
		awaitServed(own)
	}
	if !signal.Ignored(unix.SIGTSTP) {
		stops := make(chan os.Signal, 1)
		signal.Notify(stops, unix.SIGTSTP)
		go c.pause(stops)
	}
	return c
}

// enter takes the mandate if it is free, and waits for it in the background otherwise.
func (c *candidate) enter() bool {
	mandate, err := c.registry.TryMandate()
	switch {
	case err == nil:
		c.serve(mandate)
		return true
	case errors.Is(err, state.ErrHeld):
		c.mu.Lock()
		defer c.mu.Unlock()
		if !c.waiting {
			c.waiting = true
			go c.wait()
		}
	default:
		c.noArbiter(err)
	}
	return false
}

// pause lets another one be the arbiter while this process is stopped by the terminal.
func (c *candidate) pause(stops chan os.Signal) {
	for range stops {
		c.leave(false)
		supervise.StopSelf()
		c.enter()
	}
}

func (c *candidate) noArbiter(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return
	}
	c.say("GPU time is not divided between this user's slices, only limited: %v", err)
}

func (c *candidate) wait() {
	mandate, err := c.registry.WaitMandate()
	c.mu.Lock()
	c.waiting = false
	c.mu.Unlock()
	if err != nil {
		c.noArbiter(err)
		return
	}
	c.serve(mandate)
}

// serve makes this process the arbiter.
func (c *candidate) serve(mandate *state.Mandate) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over || c.loop != nil {
		mandate.Close(false)
		return
	}
	c.mandate, c.watch, c.since = mandate, c.registry.Watch(), time.Now()
	// A thread of the arbiter that wakes up must not wait for a processor of the runtime that another
	// thread, for which the kernel has no time now, holds.
	runtime.GOMAXPROCS(max(runtime.GOMAXPROCS(0), 16))
	c.loop = arbiter.Start(arbiter.LoopConfig{Slices: served.Slices(c.registry, c.watch), Seize: os.Getuid() == 0, Measure: served.Measure(c.driver)})
}

// stop ends this run's part. Whoever waits for the mandate goes on.
func (c *candidate) stop() {
	if c == nil {
		return
	}
	c.leave(true)
}

// leave gives the mandate back, for good or for now.
func (c *candidate) leave(over bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over = c.over || over
	if c.loop == nil {
		return
	}
	last := !c.others()
	c.loop.Stop(last)
	c.watch.Close()
	c.mandate.Close(last)
	c.loop = nil
}

// use is what is published of the arbiter; nil while this process is none.
func (c *candidate) use() *state.Arbiter {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.loop == nil {
		return nil
	}
	decision, request := &c.loop.Handovers().Decision, &c.loop.Handovers().Request
	at := func(h *arbiter.Histogram, q float64) int64 { return h.Quantile(q).Nanoseconds() }
	return &state.Arbiter{PID: os.Getpid(), Since: c.since, Slices: c.loop.Members(),
		Handovers: decision.Count(), HandoverP50: at(decision, 0.5), HandoverP99: at(decision, 0.99),
		Requests: request.Count(), RequestP50: at(request, 0.5), RequestP99: at(request, 0.99)}
}

// others tells whether another run of this user may wait for the mandate.
func (c *candidate) others() bool {
	slices, err := c.registry.List()
	if err != nil {
		return true
	}
	for _, s := range slices {
		if s.Supervised && s.UID == os.Getuid() && s.Info.Leader != tenant.Self() {
			return true
		}
	}
	return false
}

// servedWait is how long a command's start waits at most for an arbiter to see its slice.
const servedWait = 50 * time.Millisecond

func awaitServed(own *state.Own) {
	leases, err := tenant.OpenLeasesIn(own.Directory())
	if err != nil {
		return
	}
	defer leases.Close()
	for end := time.Now().Add(servedWait); time.Now().Before(end); time.Sleep(time.Millisecond / 2) {
		if leases.Served(tenant.NowNs()) {
			return
		}
	}
}
