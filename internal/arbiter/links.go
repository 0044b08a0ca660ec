package arbiter

import "sync"

// Links joins the cores of one machine for tenants whose kernels on several GPUs wait for each other, as those of
// collectives do. When one has its turn and its partner has not, it spins, and is charged for it, and
// then owes so much that its partner will spin for it, longer each time.
//
// A tenant that was seen to spin on one GPU while a process of it waits on another is coupled for a while. Coupled
// tenants that share GPUs take their turns on all of these together: one of them has the token, and only it gets
// new turns, for the length of a turn; it goes first, beside a holder that spins. Nil: no other GPU.
//
// Safe for concurrent use: the cores may be stepped at the same time.
type Links struct {
	mu      sync.Mutex
	gpus    int
	tenants map[uint64]*linked
	token   *linked
	since   int64 // that it has been with it
}

// linked is a tenant on several GPUs; sets of GPUs are bits.
type linked struct {
	on      uint64 // member of
	waits   uint64
	spins   uint64
	holds   uint64
	coupled int64 // last seen to be
}

const (
	spinAfter  = 2 * ms  // without anything done, beyond twice what was expected
	spinKnown  = 20 * ms // what is expected of a kernel that has spun before is not known
	coupledFor = 2000 * ms
	gangDebt   = 50 * ms   // whose partners have their turn may owe so much: an independent load keeps its limit
	spinDebt   = 1000 * ms // and so much while they spin
	gangTurn   = slotMax
	spinLook   = ms // how often others look
)

// join numbers the cores.
func (l *Links) join() int {
	if l == nil {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.gpus++
	return l.gpus - 1
}

// alone is true when there is no other GPU.
func (l *Links) alone() bool {
	if l == nil {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.gpus < 2
}

// spinning is true of a turn whose work takes far longer than was expected, with nothing done meanwhile.
func (u *turn) spinning(p *Process, now int64) bool {
	return p != nil && p.InFlight > 0 && now-max(p.LastEnd, u.start) > min(2*p.Pending, spinKnown)+spinAfter
}

// meet tells the other GPUs how it is with this one's tenants, and learns who may go.
func (g *GPU) meet() {
	l := g.config.Links
	if l.alone() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	bit := uint64(1) << (g.number % 64)
	for _, t := range g.tenants {
		n := l.of(t.id)
		n.on |= bit
		set(&n.waits, bit, t.waiting)
		set(&n.holds, bit, false)
		set(&n.spins, bit, false)
	}
	for _, u := range []*turn{g.cur, g.next, g.old} {
		if u == nil {
			continue
		}
		n := l.of(u.t.id)
		n.holds |= bit
		set(&n.spins, bit, n.spins&bit != 0 || u.spinning(u.process(), g.now))
	}
	for _, t := range g.tenants {
		n := l.of(t.id)
		if n.spins != 0 && n.waits&^n.spins != 0 {
			n.coupled = g.now
		}
		t.coupled = n.isCoupled(g.now)
		t.barred, t.awaited = l.place(n, bit, g.now, t)
	}
}

// place tells whether a tenant must not have a new turn here, and whether it goes first.
func (l *Links) place(n *linked, bit uint64, now int64, t *tenant) (barred, awaited bool) {
	if !n.isCoupled(now) {
		return false, false
	}
	if o := l.token; o != nil && (o.holds == 0 && now > l.since+ms || !o.isCoupled(now)) {
		l.token = nil
	}
	if l.token == nil || l.token.on&n.on == 0 {
		return false, false
	}
	if l.token != n {
		return true, false
	}
	// Who spins goes on until its partners have had their turn.
	if n.spins == 0 && now-l.since > gangTurn && l.othersWait(now) {
		return true, false
	}
	return false, n.waits&bit != 0 && (n.spins != 0 && t.credit > -spinDebt || t.credit > -gangDebt)
}

// othersWait is true when another coupled tenant waits for GPUs of the token's holder.
func (l *Links) othersWait(now int64) bool {
	for _, n := range l.tenants {
		if n != l.token && n.isCoupled(now) && n.waits&l.token.on != 0 {
			return true
		}
	}
	return false
}

// take gives the token to a coupled tenant that gets a turn.
func (g *GPU) take(t *tenant) {
	l := g.config.Links
	if l.alone() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := l.of(t.id); l.token == nil && n.isCoupled(g.now) {
		l.token, l.since = n, g.now
	}
}

// unlink forgets a tenant on this GPU.
func (g *GPU) unlink(id uint64) {
	l := g.config.Links
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.of(id)
	bit := uint64(1) << (g.number % 64)
	for _, s := range []*uint64{&n.on, &n.waits, &n.spins, &n.holds} {
		set(s, bit, false)
	}
	if n.on == 0 {
		delete(l.tenants, id)
		if l.token == n {
			l.token = nil
		}
	}
}

func (l *Links) of(id uint64) *linked {
	if l.tenants == nil {
		l.tenants = map[uint64]*linked{}
	}
	n := l.tenants[id]
	if n == nil {
		n = &linked{}
		l.tenants[id] = n
	}
	return n
}

func (n *linked) isCoupled(now int64) bool { return n.coupled != 0 && now-n.coupled < coupledFor }

func set(word *uint64, bit uint64, on bool) {
	*word &^= bit
	if on {
		*word |= bit
	}
}

// first chooses a process whose partners on other GPUs have their turn.
func (g *GPU) first(not *turn) *choice {
	for _, t := range g.tenants {
		if !t.awaited || !t.waiting || g.othersLate() {
			continue
		}
		if slot, ok := t.nextProcess(not, g.now); ok {
			return &choice{t: t, slot: slot}
		}
	}
	return nil
}

// othersLate is true when a tenant that is coupled with nobody has waited long for what is its own: then who
// is waited for has no precedence.
func (g *GPU) othersLate() bool {
	for _, t := range g.tenants {
		if t.waiting && !t.barred && !t.awaited && t.credit > gangDebt {
			return true
		}
	}
	return false
}

// firstElse is true when such a process is not of the turn's tenant.
func (g *GPU) firstElse(u *turn) bool {
	c := g.first(u)
	return c != nil && c.t != u.t
}
