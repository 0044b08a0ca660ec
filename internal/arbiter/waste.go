package arbiter

// waste is a process that waited, was given a turn and did not use it: it is stopped, or dead, or lies. It is
// passed over for a while, longer each time, unless it says something new.
type waste struct {
	slot  int
	since int64 // its WaitingSince then
	ended int64 // and LastEnd
	until int64
	pause int64
}

const (
	wasteFirst = 5 * ms
	wasteMost  = 1000 * ms
	wasteLeast = ms / 5 // a turn costs at least a handover
)

// lookForWaste charges a turn that ended unused, for the time in which nobody else had the GPU.
func (g *GPU) lookForWaste(p *Process) {
	u := g.cur
	if !u.unused && (u.revoked || g.now >= u.end) {
		return // it may not have had the time
	}
	if p == nil || p.Waiting == 0 || p.LastEnd >= u.start || p.WaitingSince > u.start || u.t.gpuTime != u.gpuTime {
		return
	}
	u.t.charge(max(g.now-u.start, wasteLeast), false)
	u.t.waste(p, g.now)
	g.stuck = append(g.stuck, stuck{u.t.id, u.slot})
}

func (t *tenant) waste(p *Process, now int64) {
	w := t.wasteOf(p.Slot)
	if w == nil {
		t.wasted = append(t.wasted, waste{slot: p.Slot})
		w = &t.wasted[len(t.wasted)-1]
	}
	if w.since != p.WaitingSince || w.ended != p.LastEnd {
		w.pause = 0
	}
	w.pause = min(max(2*w.pause, wasteFirst), wasteMost)
	w.since, w.ended, w.until = p.WaitingSince, p.LastEnd, now+w.pause
}

func (t *tenant) wasteOf(slot int) *waste {
	for i := range t.wasted {
		if t.wasted[i].slot == slot {
			return &t.wasted[i]
		}
	}
	return nil
}

// passedOver is true of a process that wasted its last turn and said nothing new.
func (t *tenant) passedOver(p *Process, now int64) bool {
	w := t.wasteOf(p.Slot)
	return w != nil && now < w.until && w.since == p.WaitingSince && w.ended == p.LastEnd
}

// wasteEnds is when a process of the tenant is no longer passed over; never: there is none.
func (t *tenant) wasteEnds(now int64) int64 {
	at := int64(never)
	for i := range t.report.Processes {
		if p := &t.report.Processes[i]; p.Waiting > 0 && t.passedOver(p, now) {
			at = min(at, t.wasteOf(p.Slot).until)
		}
	}
	return at
}
