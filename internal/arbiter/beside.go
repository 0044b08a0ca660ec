package arbiter

// beside is for how long others' work was on the GPU beside that of a process (struct tr_beside). The hardware divides the
// GPU between them, and each measures the other's time slices as its own; the library takes out what they were by
// what it knows of the cost of its work (shim/cuda/unit.c).
type beside struct {
	slot  int
	total int64
	since int64 // 0: not now
}

func (t *tenant) besideOf(slot int) *beside {
	for i := range t.besides {
		if t.besides[i].slot == slot {
			return &t.besides[i]
		}
	}
	return nil
}

// tell writes the count into the grants of its process.
func (t *tenant) tell(b *beside) {
	for i := range t.lease.Grants {
		if gr := &t.lease.Grants[i]; gr.Slot == b.slot {
			gr.Beside, gr.BesideSince, t.changed = b.total, b.since, true
		}
	}
}

func (t *tenant) ends(b *beside, at int64) {
	if b.since != 0 {
		b.total += max(at-b.since, 0)
		b.since = 0
		t.tell(b)
	}
}

// adoptBeside goes on from what another arbiter wrote.
func (t *tenant) adoptBeside(gr *Grant) {
	gr.BesideSince = 0
	if gr.Beside == 0 {
		return
	}
	if b := t.besideOf(gr.Slot); b != nil {
		b.total = max(b.total, gr.Beside)
		return
	}
	t.besides = append(t.besides, beside{slot: gr.Slot, total: gr.Beside})
}

// two is true while two processes have work on the GPU.
func (g *GPU) two() bool {
	return g.old != nil && g.cur != nil && (g.old.t != g.cur.t || g.old.slot != g.cur.slot)
}

// together begins to count for both, when a turn began.
func (g *GPU) together() {
	if !g.two() {
		return
	}
	for _, u := range []*turn{g.old, g.cur} {
		b := u.t.besideOf(u.slot)
		if b == nil {
			u.t.besides = append(u.t.besides, beside{slot: u.slot})
			b = &u.t.besides[len(u.t.besides)-1]
		}
		if b.since == 0 {
			b.since = max(g.cur.start, 1)
			u.t.tell(b)
		}
	}
}

// apart ends that: the work of one of them ended at a time.
func (g *GPU) apart(end int64) {
	for _, u := range []*turn{g.old, g.cur} {
		if u == nil {
			continue
		}
		if b := u.t.besideOf(u.slot); b != nil {
			u.t.ends(b, end)
		}
	}
}

// separate ends it for who went in another way: it left, or a third one began beside it.
func (g *GPU) separate() {
	for _, t := range g.tenants {
		for i := range t.besides {
			b := &t.besides[i]
			if b.since != 0 && !(g.two() && (g.old.t == t && g.old.slot == b.slot || g.cur.t == t && g.cur.slot == b.slot)) {
				t.ends(b, g.now)
			}
		}
	}
}
