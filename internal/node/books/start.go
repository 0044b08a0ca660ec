package books

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/podspec"
)

// Held is what kubelet holds for a container of one of our resources.
type Held struct {
	Namespace, Pod, Container string
	Resource                  Resource
	IDs                       []string
}

// placeholder stands for the UID of a pod of which only the name is known.
func placeholder(namespace, name string) string { return namespace + "/" + name }

// Reconcile takes in what kubelet holds, all of it. It says which containers hold IDs by now that were not
// known to; pods that nobody knows and for whom kubelet holds nothing, twice in a row, are dropped.
func (b *Books) Reconcile(listing []Held) {
	seen := map[*pod]bool{}
	sets := make([]ids, len(listing))
	for i, h := range listing {
		sets[i] = b.learn(h)
	}
	b.mend(listing, sets)
	for i, h := range listing {
		p := b.named(h.Namespace, h.Pod)
		if p == nil {
			p = &pod{anonymous: true, tenants: map[string]*tenant{}}
			p.Namespace, p.Name, p.UID = h.Namespace, h.Pod, placeholder(h.Namespace, h.Pod)
			b.pods[p.UID] = p
		}
		seen[p] = true
		b.adopt(p, h, sets[i])
	}
	for uid, p := range b.pods {
		if !p.anonymous || seen[p] {
			p.misses = 0
			continue
		}
		if p.misses++; p.misses > 1 {
			delete(b.pods, uid)
		}
	}
}

// mend forgets what pods were believed to hold where kubelet says otherwise of any of it, as when calls for one were taken to be
// for another: of IDs of two pods that were mixed up none may stay, whichever is listed first. sets are the IDs of the list.
func (b *Books) mend(listing []Held, sets []ids) {
	var wrong []*pod
	for i, h := range listing {
		set := sets[i]
		own := b.named(h.Namespace, h.Pod)
		if own != nil {
			if t := own.tenants[h.Container]; t != nil && t.granted[h.Resource] && !t.ids[h.Resource].equal(set) {
				wrong = append(wrong, own)
			}
		}
		for _, p := range b.pods {
			if p != own && !p.anonymous && p.holds[h.Resource].intersects(set) {
				wrong = append(wrong, p)
			}
		}
	}
	for _, p := range wrong {
		p.forget()
	}
}

// Open is the first Reconcile after all pods are known: what a pod holds that these books did not place was given before.
func (b *Books) Open(listing []Held) {
	b.presumed = map[string]Amount{}
	b.Reconcile(listing)
	for _, p := range b.pods {
		p.listed = p.hasIDs() && p.plan == nil
	}
}

// Presume tells what pods probably hold of a GPU. Until Open it guides where a pod goes that is not known; nothing is refused
// for it.
func (b *Books) Presume(uuid string, a Amount) { b.presumed[uuid] = b.presumed[uuid].plus(a) }

// Restarted tells that kubelet may have started anew, and asks again for pods that it had not yet made known as failed.
func (b *Books) Restarted() {
	for _, p := range b.pods {
		p.failed = false
	}
}

// adopt notes IDs of a container, which may have been taken while it was not known.
func (b *Books) adopt(p *pod, h Held, set ids) {
	t := p.tenant(h.Container)
	if t.granted[h.Resource] && t.ids[h.Resource].equal(set) {
		return
	}
	for uid, other := range b.pods {
		if other == p || !other.anonymous || !other.holds[h.Resource].intersects(set) {
			continue
		}
		for _, o := range other.tenants {
			t.gpus, t.need, t.empty = o.gpus, o.need, t.empty || o.empty
		}
		delete(b.pods, uid)
	}
	t.take(h.Resource, set)
	if t.foreign[h.Resource] = nil; set == nil {
		t.granted[h.Resource], t.foreign[h.Resource] = true, h.IDs
	}
	if on := set.gpus(); len(on) > 0 {
		if t.gpus == nil {
			t.gpus = on
		}
		t.split = t.split || !slices.Equal(sorted(t.gpus), on)
	}
	b.size(t)
}

// size notes how much a container has of each of its GPUs: what it asked, or what its IDs say.
func (b *Books) size(t *tenant) {
	if t.ask != nil {
		t.need = t.need.max(Amount{t.ask.Request.Cores, b.units(t.ask.Request.Memory)})
		return
	}
	n := max(len(t.gpus), 1)
	t.need = t.need.max(Amount{t.ids[Core].total() / n, (t.ids[Memory].total() + n - 1) / n})
}

// learn parses IDs that kubelet holds, of GPUs that are gone too.
func (b *Books) learn(h Held) ids {
	for _, name := range h.IDs {
		uuid, number, ok := strings.Cut(name, separator)
		n, err := strconv.Atoi(number)
		if !ok || err != nil || n < 0 || n >= idMax {
			continue
		}
		g, known := b.byUUID[uuid]
		if !known {
			g = len(b.gpus)
			b.byUUID[uuid] = g
			b.gpus = append(b.gpus, GPU{UUID: uuid, Index: -1, Minor: -1, Closed: "gone"})
		}
		if h.Resource == Memory {
			b.gpus[g].Units = max(b.gpus[g].Units, n+1)
		}
	}
	set, _ := b.parse(h.Resource, h.IDs)
	return set
}

// named is the pod of that name which is not over, the newest if there are several.
func (b *Books) named(namespace, name string) *pod {
	all := b.sorted()
	for i := len(all) - 1; i >= 0; i-- {
		if p := all[i]; p.Namespace == namespace && p.Name == name && !p.Over {
			return p
		}
	}
	return nil
}

// Knows tells whether everything about a pod of this name is known.
func (b *Books) Knows(namespace, name string) bool {
	p := b.named(namespace, name)
	return p != nil && !p.anonymous
}

// Bound tells what a container was bound to, according to its allocation: raised or lowered limits and GPUs
// that its IDs do not show. An allocation of an earlier pod of the same name says nothing of this one.
func (b *Books) Bound(uid, namespace, name, container string, uuids []string, each Amount) {
	p := b.named(namespace, name)
	if p == nil || p.tenants[container] == nil || !p.anonymous && uid != p.UID && uid != placeholder(namespace, name) {
		return
	}
	var gpus []int
	for _, u := range uuids {
		if g, ok := b.byUUID[u]; ok {
			gpus = append(gpus, g)
		}
	}
	if len(gpus) == len(uuids) {
		p.tenants[container].gpus, p.tenants[container].need, p.tenants[container].split = gpus, each, false
	}
}

// Binding is what a container that is about to start gets.
type Binding struct {
	Pod       Pod
	Container string
	// Ask is nil of a pod that is not known: then what kubelet holds counts.
	Ask *podspec.Container
	// IDs name the allocation. GPUs in order, and how much of each.
	IDs  []string
	GPUs []GPU
	Each Amount
	// Nothing: this resource has nothing to bind, the container's other one has.
	Nothing bool
}

// Start finds out which container is about to start with these IDs; Reconcile came before. A container and an
// init container before it can hold the same IDs: then it is the first of them that is not done.
func (b *Books) Start(res Resource, names []string) (Binding, error) {
	set, bad := b.parse(res, names)
	if bad != "" {
		return b.holder(res, bad), &Refusal{Reason: Unknown, Text: fmt.Sprintf("device %q of resource %v: no such GPU is on this node; delete the pod", bad, res)}
	}
	t := b.starting(res, set)
	if t == nil {
		return Binding{}, &Refusal{Reason: NoPod, Text: fmt.Sprintf("kubelet lists no pod that holds the %d %v devices that a container is to start with", len(names), res)}
	}
	out := Binding{Pod: t.pod.Pod, Container: t.name, Ask: t.ask}
	if res == Memory && (t.ask == nil || t.ask.Cores > 0) && (t.granted[Core] || t.ask != nil) {
		out.Nothing = true
		return out, nil
	}
	if t.empty && res == Memory {
		return out, &Refusal{Reason: NoPod, Pod: t.public(), Text: fmt.Sprintf("container %s got no device: its pod was not known when its memory was given; delete the pod", t.name)}
	}
	if err := b.verify(t, res, set); err != nil {
		return out, err
	}
	out.IDs = b.names(res, set)
	out.Each = t.need
	for _, g := range t.gpus {
		out.GPUs = append(out.GPUs, b.gpus[g])
	}
	return out, nil
}

// holder is whom kubelet gave an ID that is none of ours; the zero value: nobody that is known.
func (b *Books) holder(res Resource, id string) Binding {
	for _, p := range b.sorted() {
		for name, t := range p.tenants {
			if slices.Contains(t.foreign[res], id) {
				return Binding{Pod: p.Pod, Container: name}
			}
		}
	}
	return Binding{}
}

// starting is the container that holds exactly these IDs, or one of a pod that holds some of them.
func (b *Books) starting(res Resource, set ids) *tenant {
	for _, p := range b.sorted() {
		if !p.Over && p.holds[res].intersects(set) {
			if t := p.starting(res, set); t != nil {
				return t
			}
		}
	}
	return nil
}

func (p *pod) starting(res Resource, set ids) *tenant {
	var last *tenant
	for _, name := range p.order() {
		t := p.tenants[name]
		if !t.granted[res] || !t.ids[res].equal(set) {
			continue
		}
		if last = t; t.ask != nil && t.ask.Init && !t.ask.Sidecar && p.InitDone[name] {
			continue
		}
		return t
	}
	if last != nil {
		return last
	}
	// An init container whose IDs were given before these books were opened: kubelet does not list it.
	for i := range p.Ask.Containers {
		c := &p.Ask.Containers[i]
		if c.Init && !c.Sidecar && !p.InitDone[c.Name] && wants(c, res) == set.total() && !p.tenant(c.Name).granted[res] {
			t := p.tenant(c.Name)
			t.gpus = set.gpus()
			t.need = Amount{}
			t.take(res, set)
			return t
		}
	}
	return nil
}

// verify holds what the container is bound to against its IDs and what its pod asks.
func (b *Books) verify(t *tenant, res Resource, set ids) error {
	b.sizeUnlessBound(t)
	if cores := t.ids[Core].total(); t.ask == nil && cores%placement.CoresWhole != 0 && t.ids[Memory].total() == 0 {
		return &Refusal{Reason: Faulty, Pod: t.public(), Text: fmt.Sprintf("container %s has %d cores, a part of a GPU, and no memory; delete the pod", t.name, cores)}
	}
	if t.ask != nil && wants(t.ask, res) != set.total() {
		return &Refusal{Reason: Wrong, Pod: t.public(), Text: fmt.Sprintf("container %s asks %d of %v, kubelet gave it %d", t.name, wants(t.ask, res), res, set.total())}
	}
	want := max(1, set.total()/placement.CoresWhole)
	if t.ask != nil {
		want = t.ask.Request.Count
	}
	if res == Core && len(t.gpus) != want {
		return &Refusal{Reason: Mixed, Pod: t.public(), Text: fmt.Sprintf("container %s: kubelet's devices are on %s, it can have %d GPUs; delete the pod", t.name, b.labels(t.gpus), want)}
	}
	other := t.ids[res.other()].gpus()
	if len(other) > 0 && (t.split || !slices.Equal(other, sorted(t.gpus))) && !b.handed(t, res.other(), t.ids[res.other()]) {
		return &Refusal{Reason: Elsewhere, Pod: t.public(), Text: fmt.Sprintf("container %s: its %v is on %s, its %v on %s; delete the pod", t.name, res, b.labels(set.gpus()), res.other(), b.labels(other))}
	}
	return nil
}

func (b *Books) sizeUnlessBound(t *tenant) {
	if t.need == (Amount{}) {
		b.size(t)
	}
}

// Change notes other limits of a running container; each is per GPU.
func (b *Books) Change(uid, container string, each Amount) {
	if p := b.pods[uid]; p != nil && p.tenants[container] != nil {
		p.tenants[container].need = each
	}
}

// Raised is what the containers on a GPU were given above what their pods hold by kubelet's IDs.
func (b *Books) Raised(uuid string) Amount {
	g, ok := b.byUUID[uuid]
	if !ok {
		return Amount{}
	}
	var out Amount
	for _, p := range b.pods {
		if p.Over || p.anonymous {
			continue
		}
		asked := Amount{p.holds[Core].count(g), p.holds[Memory].count(g)}
		for _, t := range p.tenants {
			if t.ask != nil && t.ask.Whole() && t.ask.Units == 0 && slices.Contains(t.gpus, g) {
				asked.Units = b.gpus[g].Units
			}
		}
		r := b.reserve(p, g)
		out = out.plus(Amount{max(0, r.Cores-asked.Cores), max(0, r.Units-asked.Units)})
	}
	return out
}

// Tenant is a container that has GPUs.
type Tenant struct {
	Pod       *Pod // nil: not known
	Container string
	Ask       *podspec.Container
	UUIDs     []string
	Each      Amount
	// IDs that kubelet took, by resource.
	IDs [2][]string
}

// Tenants are all containers that hold something, oldest pod first.
func (b *Books) Tenants() []Tenant {
	var out []Tenant
	for _, p := range b.sorted() {
		if p.Over {
			continue
		}
		for _, name := range p.order() {
			t := p.tenants[name]
			if t.ids[Core] == nil && t.ids[Memory] == nil {
				continue
			}
			out = append(out, Tenant{Pod: t.public(), Container: name, Ask: t.ask, UUIDs: b.uuids(t.gpus), Each: t.need,
				IDs: [2][]string{b.names(Core, t.ids[Core]), b.names(Memory, t.ids[Memory])}})
		}
	}
	return out
}

// Pods are all pods that are known and not over.
func (b *Books) Pods() []Pod {
	var out []Pod
	for _, p := range b.sorted() {
		if !p.anonymous && !p.Over {
			out = append(out, p.Pod)
		}
	}
	return out
}

// Room is by how much a pod's containers may be raised on a GPU: what nobody has, and what kubelet holds for the
// pod beyond what its containers are bound to.
func (b *Books) Room(uid, uuid string) Amount {
	p, g := b.pods[uid], b.byUUID[uuid]
	if p == nil || b.gpus[g].UUID != uuid {
		return Amount{}
	}
	left, bound := b.free(g, p), b.bound(p, g)
	return Amount{left.Cores - bound.Cores, left.Units - bound.Units}
}

// Recall tells of IDs that a container had by the last node's notes: kubelet does not list init containers.
func (b *Books) Recall(h Held) {
	p := b.named(h.Namespace, h.Pod)
	if p == nil || p.tenants[h.Container] != nil && p.tenants[h.Container].granted[h.Resource] {
		return
	}
	set := b.learn(h)
	for _, other := range b.pods {
		if other != p && other.holds[h.Resource].intersects(set) {
			return
		}
	}
	b.adopt(p, h, set)
}
