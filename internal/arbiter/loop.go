package arbiter

import (
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	abi "tranche.dev/tranche/internal/tenant"
)

// Pages are the mapped files of a slice that is served.
type Pages struct {
	Ledger *abi.Ledger
	Limits *abi.Limits
	Leases *abi.Leases
	// Reserved is what the slice has reserved of a device by now, in hundredths; nil: nothing.
	Reserved func(dev int) int
	// Rival tells whether another arbiter than those of this election may serve the slice; nil: never.
	Rival func() bool
}

// Close unmaps all of them.
func (p *Pages) Close() {
	p.Ledger.Close()
	p.Limits.Close()
	p.Leases.Close()
}

// ErrNotYet says that an entry of the registry is no slice, or none yet.
var ErrNotYet = errors.New("not a slice yet")

// Slices is what the loop sees of the registry. Called from one goroutine.
type Slices interface {
	// IDs lists the entries: slices, what is to become one, and what is left of others.
	IDs() ([]string, error)
	// Open maps the files of a slice that is to be served, nil for one that is not. ErrNotYet: ask
	// again soon.
	Open(id string) (*Pages, error)
	// Alive is false of a slice that nobody can use any more.
	Alive(id string) bool
	// Wait returns when the entries may have changed, at the latest after d or when ctx ends.
	Wait(ctx context.Context, d time.Duration)
}

// LoopConfig is what a Loop needs; only Slices must be set.
type LoopConfig struct {
	Slices Slices
	// New makes the core of a GPU; default: New(Config{}).
	New func() *GPU
	// Now is the clock; default abi.NowNs.
	Now func() int64
	// PID is how this process signs its leases; default its own.
	PID int
	// Seize makes this one take slices over from a rival; without it this one gives way.
	Seize bool
	// Measure calls f from time to time with measured device times, until ctx ends. nil: nothing is
	// measured.
	Measure func(ctx context.Context, f func(Measured))
	// Warn gets what goes wrong with a slice, once each.
	Warn func(id string, err error)
}

// Loop runs a core for each GPU on the pages of living slices, until Stop. One thread per slice sleeps on
// its bell and, when it rings, decides itself: one hop from a process that asks to the one that may.
type Loop struct {
	config LoopConfig
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu      sync.Mutex
	members map[string]*member
	gpus    map[string]*device
	nextKey uint64
	// ignored are entries that are not served, as long as they are there.
	ignored map[string]bool
	latency Handovers
	suspect chan suspect
}

const (
	// scanSoon is how often the registry is looked at while an entry is not yet a slice, for
	// scanPatience at most.
	scanSoon     = time.Millisecond
	scanPatience = time.Second
	aliveEvery   = time.Second
)

// Start serves the slices that are there, and returns with the first leases written.
func Start(config LoopConfig) *Loop {
	if config.New == nil {
		links := &Links{}
		config.New = func() *GPU { return New(Config{Links: links}) }
	}
	if config.Now == nil {
		config.Now = abi.NowNs
	}
	if config.PID == 0 {
		config.PID = os.Getpid()
	}
	if config.Warn == nil {
		config.Warn = func(string, error) {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	l := &Loop{config: config, cancel: cancel, members: map[string]*member{}, gpus: map[string]*device{},
		ignored: map[string]bool{}, suspect: make(chan suspect, 16)}
	s := &scanner{loop: l, young: map[string]time.Time{}}
	s.scan()
	l.done.Go(func() { s.run(ctx) })
	l.done.Go(func() { l.beat(ctx) })
	l.done.Go(func() { l.bury(ctx) })
	if config.Measure != nil {
		l.done.Go(func() { config.Measure(ctx, l.observe) })
	}
	return l
}

// Stop ends the loop. release: no other arbiter follows, so the slices go on by themselves at once.
func (l *Loop) Stop(release bool) {
	l.cancel()
	l.mu.Lock()
	for _, g := range l.gpus {
		g.alarm.stop()
	}
	l.mu.Unlock()
	l.done.Wait()
	all := l.all()
	for _, m := range all {
		m.stand() // from then on nobody writes its leases
		if release && !m.aside {
			_ = m.with(m.pages.Leases.Release)
		}
	}
	for _, m := range all {
		l.leave(m)
		select {
		case <-m.closed:
		case <-time.After(100 * time.Millisecond): // its bell was cut off
		}
	}
}

func (l *Loop) all() []*member {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Collect(maps.Values(l.members))
}

// Members is the number of slices that are served.
func (l *Loop) Members() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.members)
}

// Handovers tells how fast leases are written.
func (l *Loop) Handovers() *Handovers { return &l.latency }

// scanner keeps the members what the registry says.
type scanner struct {
	loop      *Loop
	young     map[string]time.Time // entries that are not yet slices, and since when
	lastAlive time.Time
}

func (s *scanner) run(ctx context.Context) {
	for ctx.Err() == nil {
		wait := aliveEvery
		if len(s.young) > 0 {
			wait = scanSoon
			time.Sleep(scanSoon) // whatever others do in the directory
		}
		s.loop.config.Slices.Wait(ctx, wait)
		if ctx.Err() == nil {
			s.scan()
		}
	}
}

// scan takes in what is new and lets go what is over.
func (s *scanner) scan() {
	l := s.loop
	ids, err := l.config.Slices.IDs()
	if err != nil {
		return
	}
	there := map[string]bool{}
	var joined []*member
	for _, id := range ids {
		there[id] = true
		if m := s.admit(id); m != nil {
			joined = append(joined, m)
		}
	}
	l.forget(there)
	for id := range s.young {
		if !there[id] {
			delete(s.young, id)
		}
	}
	if now := time.Now(); now.Sub(s.lastAlive) >= aliveEvery {
		s.lastAlive = now
		s.dropDead()
	}
	l.begin(joined)
}

// admit opens an entry that is new; nil if there is nothing to serve.
func (s *scanner) admit(id string) *member {
	l := s.loop
	l.mu.Lock()
	known := l.members[id] != nil || l.ignored[id]
	l.mu.Unlock()
	if known {
		return nil
	}
	pages, err := l.config.Slices.Open(id)
	if errors.Is(err, ErrNotYet) {
		first, waits := s.young[id]
		if !waits {
			s.young[id] = time.Now()
			return nil
		}
		if time.Since(first) < scanPatience {
			return nil
		}
	}
	delete(s.young, id)
	if err == nil && pages != nil {
		var m *member
		if m, err = l.newMember(id, pages); err == nil {
			return m
		}
		pages.Close()
	}
	l.ignore(id, err)
	return nil
}

func (l *Loop) ignore(id string, err error) {
	l.mu.Lock()
	l.ignored[id] = true
	l.mu.Unlock()
	if err != nil && !errors.Is(err, ErrNotYet) {
		l.config.Warn(id, err)
	}
}

// forget lets go what is not in the registry any more.
func (l *Loop) forget(there map[string]bool) {
	l.mu.Lock()
	var gone []*member
	for id, m := range l.members {
		if !there[id] {
			gone = append(gone, m)
		}
	}
	for id := range l.ignored {
		if !there[id] {
			delete(l.ignored, id)
		}
	}
	l.mu.Unlock()
	for _, m := range gone {
		l.leave(m)
	}
}

// dropDead lets go slices that are over though nobody removed them.
func (s *scanner) dropDead() {
	l := s.loop
	for _, m := range l.all() {
		if !l.config.Slices.Alive(m.id) {
			l.leave(m)
			l.ignore(m.id, nil)
		}
	}
}
