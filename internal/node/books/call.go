package books

import (
	"cmp"
	"fmt"
	"slices"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/podspec"
)

// Refusal is a call of kubelet's that is not followed: the pod fails with the text.
type Refusal struct {
	// Reason is one of a few constant words, for metrics.
	Reason string
	Text   string
	// Pod, if it is known whose call it was.
	Pod *Pod
	pod *pod
}

func (r *Refusal) Error() string { return r.Text }

// Reasons of refusals and of failed starts.
const (
	NoRoom    = "no-room"    // no GPU has what is asked
	Mixed     = "mixed"      // kubelet's choice of IDs is on more GPUs than the container can have
	Elsewhere = "elsewhere"  // the container's cores and memory are on different GPUs
	Unknown   = "unknown-id" // no GPU of ours has the ID
	Faulty    = "faulty-pod" // the pod contradicts itself
	Wrong     = "wrong-size" // kubelet's number of IDs is not what the pod asks
	PartsOff  = "whole-only" // parts of a GPU are turned off
	NoPod     = "no-pod"     // nobody is known to hold the IDs
	Moved     = "moved"      // a GPU has another device node than the container got
)

// Choice is the answer to Preferred.
type Choice struct {
	IDs []string
	// Pod and Container that it is for; empty: not known.
	Pod       *Pod
	Container string
	// Replanned says why the pod does not go where its scheduler reserved; empty: it does, or nothing was.
	Replanned string
}

// Preferred says which of the available IDs kubelet should take for the container that it is about to admit,
// in all size of them, including must. A refusal fails the pod; anything else that is wrong would make
// kubelet take IDs at random.
func (b *Books) Preferred(res Resource, available, must []string, size int) (Choice, error) {
	offered, bad := b.parse(res, available)
	fixed, bad2 := b.parse(res, must)
	if bad = cmp.Or(bad, bad2); bad != "" {
		return Choice{}, &Refusal{Reason: Unknown, Text: fmt.Sprintf("device %s of resource %v: no such GPU is on this node", bad, res)}
	}
	offered.union(fixed)
	b.stale(res, offered, fixed)
	t, _ := b.caller(res, size, fixed)
	if t == nil {
		t = b.stranger(res)
	}
	b.handOver(t, res)
	out := Choice{Container: t.name, Pod: t.public()}
	var err error
	if out.Replanned, err = b.settle(t, res, size, offered, fixed); err != nil {
		return out, b.refuse(t, err)
	}
	chosen, err := b.pick(t, res, size, offered, fixed)
	if err != nil {
		return out, b.refuse(t, err)
	}
	t.preferred[res] = chosen
	out.IDs = b.names(res, chosen)
	return out, nil
}

// handOver gives a container the grant before, if that was not for whom it was taken to be: kubelet asks for both resources of
// a container one after the other. What this one was believed to have was then the other one's.
func (b *Books) handOver(t *tenant, res Resource) {
	from, other := b.due(res), res.other()
	if from == nil || from == t || t.ask == nil || t.granted[res] || wants(t.ask, other) != from.ids[other].total() {
		return
	}
	b.begun = nil
	set, gpus := from.ids[other], from.gpus
	if t.granted[other] {
		from.take(other, t.ids[other])
		from.gpus, from.pod.plan = t.gpus, nil
	} else {
		from.undo()
	}
	t.take(other, set)
	t.gpus, t.pod.plan = gpus, nil
	b.size(t)
}

// due is the container of the last grant, if kubelet asks for this resource for it next.
func (b *Books) due(res Resource) *tenant {
	t := b.begun
	if t == nil || t.forgotten() || t.granted[res] || !t.granted[res.other()] {
		return nil
	}
	return t
}

// forgotten is true of a container whose pod was made one that kubelet has not yet called for.
func (t *tenant) forgotten() bool { return t.pod.tenants[t.name] != t }

// undo takes back what a container was believed to have.
func (t *tenant) undo() {
	t.take(Core, nil)
	t.take(Memory, nil)
	delete(t.pod.tenants, t.name)
	if !t.pod.hasIDs() {
		t.pod.forget()
	}
}

func (t *tenant) public() *Pod {
	if t.pod.anonymous {
		return nil
	}
	p := t.pod.Pod
	return &p
}

// refuse is what a call is answered that cannot be followed.
func (b *Books) refuse(t *tenant, err error) error {
	r, ok := err.(*Refusal)
	if !ok {
		r = &Refusal{Reason: NoRoom, Text: err.Error()}
	}
	r.Pod, r.pod = t.public(), t.pod
	return r
}

// Fail notes that kubelet was given a refusal: it fails the pod, and makes no further call for it.
func (b *Books) Fail(r *Refusal) {
	if r.pod == nil {
		return
	}
	if t := b.begun; t != nil && t.pod != r.pod && !t.forgotten() {
		t.undo() // it was the same pod's: kubelet takes its IDs back
	}
	b.begun = nil
	r.pod.failed = true
	if r.pod.anonymous {
		delete(b.pods, r.pod.UID)
	}
}

// stale drops pods that hold IDs which kubelet offers again. fixed are IDs that their own pod hands on.
func (b *Books) stale(res Resource, offered, fixed ids) {
	free := offered.minus(fixed)
	for uid, p := range b.pods {
		if !p.holds[res].intersects(free) {
			continue
		}
		if p.anonymous {
			delete(b.pods, uid)
			continue
		}
		p.forget()
	}
}

// forget makes a pod one that kubelet has not yet called for.
func (p *pod) forget() {
	p.tenants, p.holds, p.plan, p.listed = map[string]*tenant{}, [2]ids{}, nil, false
}

// KnowsCaller tells whether a call of Preferred would be of a pod that is known.
func (b *Books) KnowsCaller(res Resource, must []string, size int) bool {
	fixed, _ := b.parse(res, must)
	_, known := b.caller(res, size, fixed)
	return known
}

// caller finds the container that a call is for, nil if it cannot be told: the one of the last grant, if it is due; the holder of
// the IDs that its pod hands on; else one for which the last grant can have been; else a pod that has begun; else the first of
// that size; then pods that kubelet held IDs for when the books were opened; and last of all one that was refused, not known: the
// refusal may have been another's of its size.
func (b *Books) caller(res Resource, size int, fixed ids) (t *tenant, known bool) {
	begun := b.due(res)
	if begun != nil && fixed.total() == 0 {
		if c := begun.pod.next(res, size); c != nil && c.Name == begun.name {
			return begun, true
		}
	}
	const failed = 6
	var best *tenant
	least := failed + 1
	for _, p := range b.sorted() {
		c := p.next(res, size)
		if c == nil {
			continue
		}
		rank := 4
		switch {
		case fixed.total() > 0 && p.holds[res].contains(fixed):
			rank = 0
		case begun != nil && !p.listed && wants(c, res.other()) == begun.ids[res.other()].total():
			if rank = 1; p.hasIDs() {
				rank = 2
			}
		case p.failed:
			rank = failed
		case p.listed:
			rank = 5
		case p.hasIDs():
			rank = 3
		}
		if rank < least {
			least, best = rank, p.tenant(c.Name)
		}
	}
	return best, best != nil && least < failed
}

// next is the container of a pod that kubelet asks for next, if that is for so much of the resource. Kubelet
// goes container by container.
func (p *pod) next(res Resource, size int) *podspec.Container {
	if p.Over {
		return nil
	}
	containers := p.containers()
	for i := range containers {
		c := &containers[i]
		t := p.tenants[c.Name]
		got := func(r Resource) bool { return wants(c, r) == 0 || t != nil && t.granted[r] }
		if got(Core) && got(Memory) {
			continue
		}
		if !got(res) && wants(c, res) == size {
			return c
		}
		if !p.listed {
			return nil
		}
	}
	return nil
}

// stranger is a tenant for a call by a pod that is not known. The one that still lacks this resource is
// taken to be the same.
func (b *Books) stranger(res Resource) *tenant {
	for _, p := range b.sorted() {
		if !p.anonymous || p.failed {
			continue
		}
		for _, t := range p.tenants {
			if t.granted[res.other()] && !t.granted[res] {
				return t
			}
		}
	}
	b.anonymous++
	p := &pod{anonymous: true, tenants: map[string]*tenant{}}
	p.UID = fmt.Sprintf("unknown-%d", b.anonymous)
	b.pods[p.UID] = p
	return p.tenant("")
}

// settle makes sure that the container has GPUs in its pod's plan which will do for this call.
func (b *Books) settle(t *tenant, res Resource, size int, offered, fixed ids) (replanned string, err error) {
	if err := t.pod.fault(); err != nil {
		return "", err
	}
	if t.ask == nil {
		return "", nil // pick does what it can
	}
	if b.wholeOnly && !t.ask.Whole() {
		return "", &Refusal{Reason: PartsOff, Text: "parts of a GPU are turned off on this node (--share-mode=false)"}
	}
	if b.stands(t, res, offered, fixed) {
		return "", nil
	}
	moved := t.pod.plan != nil
	if replanned, err = b.plan(t.pod, res, offered); err != nil {
		return "", err
	}
	if moved && replanned == "" {
		replanned = "the GPUs that were planned for container " + t.name + " are no longer free"
	}
	return replanned, nil
}

// fault is why a pod that contradicts itself gets nothing.
func (p *pod) fault() error {
	if p.Problem == "" {
		return nil
	}
	return &Refusal{Reason: Faulty, Text: p.Problem}
}

// stands tells whether the plan has room for the call.
func (b *Books) stands(t *tenant, res Resource, offered, fixed ids) bool {
	gpus := t.pod.plan[t.name]
	if len(gpus) == 0 {
		return false
	}
	each := spread(wants(t.ask, res), len(gpus))
	for i, g := range gpus {
		if b.gpus[g].Closed != "" || offered.count(g) < each[i] || fixed.count(g) > each[i] {
			return false
		}
	}
	for _, g := range fixed.gpus() {
		if !slices.Contains(gpus, g) {
			return false
		}
	}
	return true
}

// spread divides n as evenly as it goes.
func spread(n, parts int) []int {
	out := make([]int, parts)
	for i := range out {
		out[i] = n / parts
		if i < n%parts {
			out[i]++
		}
	}
	return out
}

// plan places the whole pod. What is granted stays; where a scheduler reserved comes first.
func (b *Books) plan(p *pod, res Resource, offered ids) (replanned string, err error) {
	node := b.node(p, res, offered)
	want := p.placement()
	for i := range want.Containers {
		if t := p.tenants[want.Containers[i].Name]; t != nil && t.gpus != nil {
			want.Containers[i].Constraints = placement.Constraints{UUIDs: b.uuids(t.gpus)}
		}
	}
	if reserved, ok := b.reserved(p, want); ok {
		a, err := placement.PlacePod(node, &reserved)
		if err == nil {
			b.note(p, a)
			return "", nil
		}
		replanned = "the reserved GPU does not do any more: " + err.Error()
	}
	a, err := placement.PlacePod(node, &want)
	if err != nil {
		return "", err
	}
	b.note(p, a)
	return replanned, nil
}

func (b *Books) note(p *pod, a placement.Assignment) {
	p.plan = map[string][]int{}
	for i, uuids := range a.Containers {
		for _, u := range uuids {
			p.plan[p.Ask.Containers[i].Name] = append(p.plan[p.Ask.Containers[i].Name], b.byUUID[u])
		}
	}
}

// node is the node as the placement sees it when p has nothing. Of the resource that kubelet asks for, no more
// is free than it offers.
func (b *Books) node(p *pod, res Resource, offered ids) *placement.Node {
	out := &placement.Node{Links: b.links}
	for g := range b.gpus {
		left := b.free(g, p)
		most := offered.count(g) + p.holds[res].minus(offered).count(g)
		if res == Core {
			left.Cores = min(left.Cores, most)
		} else {
			left.Units = min(left.Units, most)
		}
		out.GPUs = append(out.GPUs, b.placementGPU(g, left))
	}
	return out
}

func (b *Books) placementGPU(g int, left Amount) placement.GPU {
	gpu := &b.gpus[g]
	return placement.GPU{Index: gpu.Index, UUID: gpu.UUID, Name: gpu.Model, Memory: b.bytes(gpu.Units), Excluded: gpu.Closed,
		FreeCores: left.Cores, FreeMemory: int64(left.Units) * int64(b.unit)}
}

func (b *Books) uuids(gpus []int) []string {
	out := make([]string, len(gpus))
	for i, g := range gpus {
		out[i] = b.gpus[g].UUID
	}
	return out
}

// placement is the pod as the placement sees it.
func (p *pod) placement() placement.Pod {
	out := p.Ask.Placement()
	out.Together = slices.Concat(out.Together, p.handedOn())
	return out
}

// handedOn are the groups of containers that get the same GPU because kubelet hands IDs of init containers
// on to those that follow, as long as there are any. IDs of several GPUs are handed on at random: what
// becomes of those is seen in Allocate.
func (p *pod) handedOn() [][]string {
	var groups [][]string
	var group []string
	var pool Amount
	for i := range p.Ask.Containers {
		c := &p.Ask.Containers[i]
		if c.Request.Count > 1 {
			pool, group = Amount{}, nil
			continue
		}
		takes := Amount{wants(c, Core), wants(c, Memory)}
		if min(takes.Cores, pool.Cores) > 0 || min(takes.Units, pool.Units) > 0 {
			group = append(group, c.Name)
			groups[len(groups)-1] = group
		} else if c.Init && !c.Sidecar {
			group = []string{c.Name}
			groups = append(groups, group)
		}
		if c.Init && !c.Sidecar {
			pool = pool.max(takes)
			continue
		}
		pool = Amount{max(pool.Cores-takes.Cores, 0), max(pool.Units-takes.Units, 0)}
	}
	return slices.DeleteFunc(groups, func(g []string) bool { return len(g) < 2 })
}

// reserved is the pod with its containers held to the GPUs that a scheduler reserved; false if it did not.
func (b *Books) reserved(p *pod, want placement.Pod) (placement.Pod, bool) {
	any := false
	want.Containers = slices.Clone(want.Containers)
	for i := range want.Containers {
		c := &want.Containers[i]
		place, ok := p.Reserved[c.Name]
		if t := p.tenants[c.Name]; !ok || t != nil && t.gpus != nil {
			continue
		}
		uuids := slices.Clone(place.UUIDs)
		for _, index := range place.Indexes {
			if g := slices.IndexFunc(b.gpus, func(g GPU) bool { return g.Index == index && g.Closed != "gone" }); g >= 0 {
				uuids = append(uuids, b.gpus[g].UUID)
			}
		}
		if len(uuids) > 0 {
			any, c.Constraints = true, placement.Constraints{UUIDs: uuids}
		}
	}
	return want, any
}
