package arbiter

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	abi "tranche.dev/tranche/internal/tenant"
)

// member is a slice that is served.
type member struct {
	loop  *Loop
	id    string
	key   uint64 // among all members that ever were
	pages *Pages
	seats []seat
	// closed is closed when nothing of the slice is mapped any more.
	closed chan struct{}
	over   atomic.Bool
	// generation of the limits that the cores know.
	generation atomic.Uint64

	mu       sync.RWMutex // held by who uses the pages outside of the listener and of the devices' locks
	unmapped bool

	// Of the beating goroutine, but for the start: another arbiter serves the slice, as far as is known.
	aside    bool
	rivalAt  int64 // its last beat that was seen
	patience int   // beats to go without another of it
}

// seat is a member's place at one GPU.
type seat struct {
	gpu *device
	dev int // the GPU's number within the slice
}

// rivalBeats without a sign of life of the arbiter before, and its slices are taken over.
const rivalBeats = 3

// newMember takes the slice in; begin makes it take part.
func (l *Loop) newMember(id string, pages *Pages) (*member, error) {
	m := &member{loop: l, id: id, pages: pages, closed: make(chan struct{})}
	var devices []abi.Device
	var err error
	fault := abi.Guard(func() {
		m.generation.Store(pages.Limits.Generation())
		devices, err = pages.Limits.Devices()
		pid, beat := pages.Leases.Arbiter()
		other := beat != 0 && pid != l.config.PID && l.config.Now()-beat < abi.BeatStaleNs
		m.aside = other && m.hasRival()
		m.rivalAt, m.patience = beat, rivalBeats
	})
	if fault != nil {
		err = fault
	}
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.members) >= membersMax {
		return nil, errors.New("too many slices for one arbiter")
	}
	l.nextKey++
	m.key = l.nextKey
	for i, d := range devices {
		g := l.device(d.UUID)
		g.refs++
		m.seats = append(m.seats, seat{gpu: g, dev: i})
	}
	return m, nil
}

const (
	membersMax = 512
	// gpusIdle GPUs that nobody has any more keep their core.
	gpusIdle = 32
)

// device is the loop's part for one GPU, made at first use. The lock is held.
func (l *Loop) device(uuid string) *device {
	g := l.gpus[uuid]
	if g == nil {
		g = newDevice(l, uuid)
		l.gpus[uuid] = g
		l.done.Go(g.alarm.run)
	}
	return g
}

// begin makes new members take part, those that no other arbiter serves: all of them before anything is
// decided.
func (l *Loop) begin(all []*member) {
	for _, m := range all {
		if !m.aside {
			m.sit()
		}
	}
	for _, m := range all {
		m.decide()
		l.mu.Lock()
		l.members[m.id] = m // from now on others act on it
		l.mu.Unlock()
		go m.listen()
	}
}

// sit takes the member's places at its GPUs.
func (m *member) sit() {
	now := m.loop.config.Now()
	if m.with(func() { m.pages.Leases.Beat(now, m.loop.config.PID) }) != nil {
		return
	}
	specs := m.specs()
	for i, s := range m.seats {
		s.gpu.join(m, s.dev, specs[i])
	}
}

func (m *member) decide() {
	for _, s := range m.seats {
		s.gpu.step(wakeUp{})
	}
}

// specs is what the limits page says now.
func (m *member) specs() []Spec {
	out := make([]Spec, len(m.seats))
	_ = m.with(func() {
		devices, err := m.pages.Limits.Devices()
		for i := range min(len(out), len(devices)) {
			d := devices[i]
			out[i] = Spec{Cores: d.Cores, Ceiling: d.CoresCeiling, Limited: d.CoresLimited, Latency: d.Latency, Weight: d.Weight}
			// A whole GPU is asked for without a limit, but guaranteed.
			if m.pages.Reserved != nil && d.Cores >= 100 && m.pages.Reserved(i) >= 100 {
				out[i].Limited = true
			}
		}
		if err != nil {
			m.loop.config.Warn(m.id, err)
		}
	})
	for i := range out {
		out[i].bound()
	}
	return out
}

// bound takes from what a page says what cannot be.
func (s *Spec) bound() {
	s.Cores = min(max(s.Cores, 1), 100)
	s.Ceiling = min(max(s.Ceiling, s.Cores), 100)
	s.Weight = min(max(s.Weight, 0), 1000)
}

// with calls f, which uses the member's pages.
func (m *member) with(f func()) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.unmapped {
		return nil
	}
	return abi.Guard(f)
}

// leave takes the member out of everything. Its pages are unmapped when its listener has woken up.
func (l *Loop) leave(m *member) {
	l.mu.Lock()
	if l.members[m.id] == m {
		delete(l.members, m.id)
	}
	l.mu.Unlock()
	m.stand()
	if m.over.Swap(true) {
		return
	}
	_ = m.with(m.pages.Ledger.Ring)
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range m.seats {
		if s.gpu.refs--; s.gpu.refs == 0 && len(l.gpus) > gpusIdle {
			s.gpu.alarm.stop()
			delete(l.gpus, s.gpu.uuid)
		}
	}
}

// stand leaves the seats.
func (m *member) stand() {
	for _, s := range m.seats {
		s.gpu.leave(m)
	}
}

// listen sleeps on the bell, and decides when it rings.
func (m *member) listen() {
	turnThread()
	var pace pace
	for !m.over.Load() {
		if err := m.hear(&pace); err != nil {
			m.loop.leave(m)
			m.loop.ignore(m.id, err)
		}
	}
	m.mu.Lock()
	m.unmapped = true
	m.pages.Close()
	m.mu.Unlock()
	close(m.closed)
}

func (m *member) hear(p *pace) (err error) {
	fault := abi.Guard(func() {
		value := m.pages.Ledger.Bell()
		if value == p.heard {
			// Not for ever: nobody can ring a bell that was cut off.
			err = m.pages.Ledger.WaitBell(value, m.loop.config.Now()+bellPatience)
			p.woken = m.loop.config.Now()
			value = m.pages.Ledger.Bell()
		}
		p.heard = value
	})
	if fault != nil {
		return fault
	}
	if err != nil || m.over.Load() {
		return err
	}
	if rest := p.rest(m.loop.config.Now()); rest > 0 {
		time.Sleep(time.Duration(rest))
	}
	m.refresh()
	for _, s := range m.seats {
		s.gpu.step(wakeUp{by: m, at: p.woken})
	}
	return nil
}

// refresh passes changed limits on.
func (m *member) refresh() {
	var now uint64
	if m.with(func() { now = m.pages.Limits.Generation() }) != nil || now == m.generation.Load() || now&1 != 0 {
		return
	}
	m.generation.Store(now)
	for i, spec := range m.specs() {
		m.seats[i].gpu.set(m, spec)
		m.seats[i].gpu.step(wakeUp{})
	}
}

// pace bounds what a tenant that rings without end costs the others.
type pace struct {
	heard uint32
	woken int64
	spent int64 // the time up to which its rings are paid for
}

const (
	bellPatience = 10_000_000_000 // each wake-up keeps the runtime busy for 10 ms

	ringCost  = 100_000     // ns of time per ring
	ringBurst = 100_000_000 // and that much in advance
)

// rest is how long to sleep before the next ring is heard.
func (p *pace) rest(now int64) int64 {
	p.spent = max(p.spent, now-ringBurst) + ringCost
	return p.spent - now
}

// beat gives signs of life to all members, and looks for what changed in their pages.
func (l *Loop) beat(ctx context.Context) {
	t := time.NewTimer(abi.BeatNs)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		wait := time.Duration(idleBeatNs)
		for _, m := range l.all() {
			m.beat()
			if m.listens() {
				wait = time.Duration(abi.BeatNs)
			}
		}
		t.Reset(wait)
	}
}

// idleBeatNs is how often the arbiter gives a sign of life while nobody acts on a late one; still long before
// it is taken for dead.
const idleBeatNs = abi.BeatStaleNs / 2

// listens is true while somebody may act on signs of life: a process that asks for grants, or a rival.
func (m *member) listens() bool {
	listens := m.pages.Rival != nil
	_ = m.with(func() { listens = listens || m.pages.Ledger.HasClients() })
	return listens
}

func (m *member) beat() {
	if m.rival() {
		return
	}
	now := m.loop.config.Now()
	if err := m.with(func() { m.pages.Leases.Beat(now, m.loop.config.PID) }); err != nil {
		m.loop.leave(m)
		m.loop.ignore(m.id, err)
		return
	}
	m.refresh()
}

// rival gives way to another arbiter that serves the slice, and takes over when it is gone. True while
// the slice is not ours.
func (m *member) rival() bool {
	c := m.loop.config
	var pid int
	var beat int64
	if m.with(func() { pid, beat = m.pages.Leases.Arbiter() }) != nil {
		return false
	}
	switch {
	case !m.aside && (pid == c.PID || pid == 0 || c.Seize || !m.hasRival()):
		return false
	case !m.aside:
		m.stand()
		m.aside, m.rivalAt, m.patience = true, beat, rivalBeats
		return true
	case c.Seize:
		// The other sees our name and leaves, before we write leases.
		_ = m.with(func() { m.pages.Leases.Beat(c.Now(), c.PID) })
		m.patience--
	case beat != m.rivalAt && pid != c.PID:
		m.rivalAt, m.patience = beat, rivalBeats
		return true
	default:
		m.patience--
	}
	if m.patience > 0 {
		return true
	}
	m.aside = false
	m.sit()
	m.decide()
	return false
}

func (m *member) hasRival() bool { return m.pages.Rival != nil && m.pages.Rival() }

// suspect is a process that holds a turn and may be dead.
type suspect struct {
	m    *member
	slot int
}

// bury gives back what suspects held that are gone.
func (l *Loop) bury(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case s := <-l.suspect:
			_ = s.m.with(func() { s.m.pages.Ledger.ReclaimSlot(s.slot) })
		}
	}
}
