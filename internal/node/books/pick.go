package books

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/quantity"
)

// pick takes size IDs of the container's GPUs, those first that kubelet insists on.
func (b *Books) pick(t *tenant, res Resource, size int, offered, fixed ids) (ids, error) {
	gpus := t.pod.plan[t.name]
	if t.ask == nil {
		var err error
		if gpus, err = b.guess(t, res, size, offered); err != nil {
			return nil, err
		}
	}
	var out ids
	out.union(fixed)
	each := spread(size, len(gpus))
	for i, g := range gpus {
		left := each[i] - fixed.count(g)
		offered.minus(fixed).each(func(at, n int) bool {
			if at == g && left > 0 {
				out.add(g, n)
				left--
			}
			return at < g || at == g && left > 0
		})
	}
	if out.total() != size {
		return nil, &Refusal{Reason: NoRoom, Text: fmt.Sprintf("%d of %v asked on %s, which cannot be: %s", size, res, b.labels(gpus), b.whatIsFree())}
	}
	return out, nil
}

// guess chooses GPUs for a container of which only the number of one resource is known.
func (b *Books) guess(t *tenant, res Resource, size int, offered ids) ([]int, error) {
	if t.gpus != nil {
		return t.gpus, nil
	}
	count := 1
	if res == Core && size > placement.CoresWhole {
		if count = size / placement.CoresWhole; size%placement.CoresWhole != 0 {
			return nil, &Refusal{Reason: Wrong, Text: fmt.Sprintf("%d cores: more than one GPU's must be a multiple of %d", size, placement.CoresWhole)}
		}
	}
	req := placement.Request{Count: count}
	if res == Core {
		req.Cores = size / count
	} else {
		req.Memory = b.bytes(size)
	}
	return b.emptiest(b.node(t.pod, res, offered).GPUs, res, req)
}

// emptiest are GPUs that have what is asked of one resource, those first that have most of the other one: how much of that
// will be asked is not known.
func (b *Books) emptiest(gpus []placement.GPU, res Resource, req placement.Request) ([]int, error) {
	if _, err := placement.Choose(gpus, req); err != nil {
		return nil, err
	}
	one := req
	one.Count = 1
	var fit []int
	for g := range gpus {
		if _, err := placement.Choose(gpus[g:g+1], one); err == nil {
			fit = append(fit, g)
		}
	}
	room := func(g int) (cores int, memory int64) {
		gone := b.presumed[gpus[g].UUID]
		return gpus[g].FreeCores - gone.Cores, gpus[g].FreeMemory - int64(b.bytes(gone.Units))
	}
	slices.SortStableFunc(fit, func(p, q int) int {
		pc, pm := room(p)
		qc, qm := room(q)
		cores, memory := cmp.Compare(qc, pc), cmp.Compare(qm, pm)
		if res == Core {
			return cmp.Or(memory, cores)
		}
		return cmp.Or(cores, memory)
	})
	return sorted(fit[:req.Count]), nil
}

func (b *Books) bytes(units int) quantity.Bytes { return quantity.Bytes(units) * b.unit }

func (b *Books) labels(gpus []int) string {
	out := make([]string, len(gpus))
	for i, g := range gpus {
		out[i] = b.label(g)
	}
	return strings.Join(out, ", ")
}

func (b *Books) label(g int) string {
	return placement.GPU{Index: b.gpus[g].Index, UUID: b.gpus[g].UUID}.Label()
}

// whatIsFree is for the end of a refusal.
func (b *Books) whatIsFree() string {
	var parts []string
	for g := range b.gpus {
		left := b.free(g, nil)
		if b.gpus[g].Closed != "" {
			parts = append(parts, b.label(g)+" "+b.gpus[g].Closed)
			continue
		}
		parts = append(parts, fmt.Sprintf("%s %d cores and %v", b.label(g), max(left.Cores, 0), b.bytes(max(left.Units, 0))))
	}
	return "free are " + strings.Join(parts, "; ")
}

// Grant is what a container gets of a resource.
type Grant struct {
	// Pod and Container; nil and empty: not known yet.
	Pod       *Pod
	Container string
	// GPUs in order, and how much of each; memory 0: not known, or not asked.
	GPUs []GPU
	Each Amount
	// Carries: this resource brings the devices, the mounts and the rest; the other one nothing. IDs are
	// those that name the allocation, sorted.
	Carries bool
	IDs     []string
	// Again: the same IDs had been granted to the container before.
	Again bool
}

// Allocate takes note that kubelet gives IDs to a container.
func (b *Books) Allocate(res Resource, names []string) (Grant, error) {
	set, bad := b.parse(res, names)
	if bad != "" || len(names) == 0 {
		return Grant{}, &Refusal{Reason: Unknown, Text: fmt.Sprintf("device %q of resource %v: no such GPU is on this node", bad, res)}
	}
	t, again := b.taker(res, set)
	var gpus []int
	var err error
	if !again {
		err = t.pod.fault()
	}
	if err == nil {
		gpus, err = b.assign(t, res, set)
	}
	if err != nil {
		return Grant{}, b.refuse(t, err)
	}
	t.gpus = gpus
	if t.ask != nil {
		t.need = Amount{t.ask.Request.Cores, b.units(t.ask.Request.Memory)}
	} else if res == Core {
		t.need.Cores = len(names) / len(gpus)
	} else {
		t.need.Units = (len(names) + len(gpus) - 1) / len(gpus)
	}
	t.take(res, set)
	b.begun = nil
	if t.ask != nil && wants(t.ask, res.other()) > 0 && !t.granted[res.other()] {
		b.begun = t
	}
	t.empty = res == Memory && t.ask == nil
	return b.grant(t, res, again), nil
}

func (b *Books) units(bytes quantity.Bytes) int { return int((bytes + b.unit - 1) / b.unit) }

func (b *Books) grant(t *tenant, res Resource, again bool) Grant {
	out := Grant{Pod: t.public(), Container: t.name, Each: t.need, Again: again}
	for _, g := range t.gpus {
		out.GPUs = append(out.GPUs, b.gpus[g])
	}
	out.Carries = res == Core || t.ask != nil && t.ask.Cores == 0
	if out.Carries {
		out.IDs = b.names(res, t.ids[res])
	}
	return out
}

// taker is the container that IDs are for: it has them already; they are what it was told to take; its pod
// hands them on; or it is the one that is due.
func (b *Books) taker(res Resource, set ids) (t *tenant, again bool) {
	for _, p := range b.sorted() {
		for _, name := range p.order() {
			if t := p.tenants[name]; t.preferred[res] != nil && t.preferred[res].equal(set) {
				return t, false
			}
		}
	}
	for _, p := range b.sorted() {
		if !p.holds[res].intersects(set) {
			continue
		}
		if c := p.next(res, set.total()); c != nil && p.holds[res].contains(set) {
			return p.tenant(c.Name), false
		}
		for _, name := range p.order() {
			if t := p.tenants[name]; t.granted[res] && t.ids[res].equal(set) {
				return t, true
			}
		}
	}
	b.stale(res, set, nil)
	if t, _ := b.caller(res, set.total(), nil); t != nil {
		return t, false
	}
	return b.stranger(res), false
}

// order are the names of a pod's tenants, as its containers come.
func (p *pod) order() []string {
	var out []string
	for i := range p.Ask.Containers {
		if p.tenants[p.Ask.Containers[i].Name] != nil {
			out = append(out, p.Ask.Containers[i].Name)
		}
	}
	for name := range p.tenants {
		if !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	return out
}

// assign finds the GPUs that an ID set binds a container to, or says why it cannot be granted.
func (b *Books) assign(t *tenant, res Resource, set ids) ([]int, error) {
	on := set.gpus()
	if t.ask != nil && wants(t.ask, res) != set.total() {
		return nil, &Refusal{Reason: Wrong, Text: fmt.Sprintf("%d of %v, the container asks %d", set.total(), res, wants(t.ask, res))}
	}
	count := len(on)
	if t.ask != nil {
		count = t.ask.Request.Count
	} else if res == Core {
		count = max(1, set.total()/placement.CoresWhole)
	}
	if b.handed(t, res, set) && (len(on) != count || !even(set, on) || t.gpus != nil && !slices.Equal(sorted(t.gpus), on)) {
		return b.amongOwn(t, count)
	}
	if len(on) != count || !even(set, on) {
		return nil, &Refusal{Reason: Mixed, Text: fmt.Sprintf("kubelet's %d of %v are on %s, the container can have %d GPUs, evenly: %s",
			set.total(), res, b.labels(on), count, b.whatIsFree())}
	}
	if t.gpus != nil && !slices.Equal(sorted(t.gpus), on) {
		return nil, &Refusal{Reason: Elsewhere, Text: fmt.Sprintf("kubelet's %d of %v are on %s, the container's %v on %s: %s",
			set.total(), res, b.labels(on), res.other(), b.labels(t.gpus), b.whatIsFree())}
	}
	if t.gpus != nil {
		return t.gpus, nil
	}
	if plan := t.pod.plan[t.name]; slices.Equal(sorted(plan), on) {
		return plan, nil
	}
	return on, b.roomFor(t, res, on)
}

func sorted(gpus []int) []int {
	out := slices.Clone(gpus)
	slices.Sort(out)
	return out
}

// even tells whether a set takes as much of each GPU, give or take one.
func even(set ids, gpus []int) bool {
	least, most := set.total(), 0
	for _, g := range gpus {
		least, most = min(least, set.count(g)), max(most, set.count(g))
	}
	return most-least <= 1
}

// handed tells whether IDs come, all or in part, from an init container of the same pod.
func (b *Books) handed(t *tenant, res Resource, set ids) bool {
	for name, other := range t.pod.tenants {
		if name != t.name && other.ask != nil && other.ask.Init && !other.ask.Sidecar && other.ids[res].intersects(set) {
			return true
		}
	}
	return false
}

// amongOwn chooses count of the GPUs that the pod holds, those with most room first, for a container whose IDs
// were taken from several at random.
func (b *Books) amongOwn(t *tenant, count int) ([]int, error) {
	if t.gpus != nil {
		return t.gpus, nil
	}
	own := t.pod.holds[Core].gpus()
	if len(own) < count {
		own = t.pod.holds[Memory].gpus()
	}
	req := placement.Request{Count: 1}
	if t.ask != nil {
		req = t.ask.Request
	}
	req.Count, req.Pinned = count, nil
	gpus := make([]placement.GPU, len(own))
	for i, g := range own {
		left := b.free(g, t.pod)
		stay := Amount{}
		for _, other := range t.pod.tenants {
			if other != t && slices.Contains(other.gpus, g) && (other.ask == nil || !other.ask.Init || other.ask.Sidecar) {
				stay = stay.plus(b.need(other, g))
			}
		}
		gpus[i] = b.placementGPU(g, Amount{left.Cores - stay.Cores, left.Units - stay.Units})
		gpus[i].Excluded = ""
	}
	at, err := placement.Choose(gpus, req)
	if err != nil {
		return nil, fmt.Errorf("on the GPUs that the pod's init containers had: %w", err)
	}
	out := make([]int, len(at))
	for i, k := range at {
		out[i] = own[k]
	}
	return out, nil
}

// roomFor checks that the GPUs which kubelet chose may be used, and that they have what the container will need of
// the other resource.
func (b *Books) roomFor(t *tenant, res Resource, gpus []int) error {
	trial := *t
	if trial.gpus = gpus; t.ask != nil {
		trial.need = Amount{t.ask.Request.Cores, b.units(t.ask.Request.Memory)}
	}
	t.pod.tenants[t.name] = &trial
	defer func() { t.pod.tenants[t.name] = t }()
	for _, g := range gpus {
		if b.gpus[g].Closed != "" {
			return &Refusal{Reason: NoRoom, Text: fmt.Sprintf("kubelet took %s, which is %s: %s", b.label(g), b.gpus[g].Closed, b.whatIsFree())}
		}
		if need, left := b.reserve(t.pod, g).of(res.other()), b.free(g, t.pod).of(res.other()); need > left {
			return &Refusal{Reason: NoRoom, Text: fmt.Sprintf("%s: the pod needs %d of %v there, %d are free: %s", b.label(g), need, res.other(), max(left, 0), b.whatIsFree())}
		}
	}
	return nil
}

// Expects tells whether these are IDs that kubelet was told to take, or has.
func (b *Books) Expects(res Resource, names []string) bool {
	set, bad := b.parse(res, names)
	if bad != "" {
		return false
	}
	for _, p := range b.pods {
		for _, t := range p.tenants {
			if t.preferred[res] != nil && t.preferred[res].equal(set) {
				return true
			}
		}
	}
	return false
}
