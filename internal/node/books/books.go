// Package books decides which GPU a container gets on this node, and knows who holds what. It is pure: no
// input or output, no clock, no goroutine. What kubelet asks and tells goes in, IDs, grants and bindings
// come out. Not safe for concurrent use.
//
// Kubelet gives IDs of two resources, each of which names its GPU, to one container at a time, in either
// order, and does not say for whom. It first asks which IDs it should take (Preferred), then takes them
// (Allocate), and, once it has noted both, tells before each start of the container (Start).
//
// Invariants
//   - What kubelet says of IDs is right: an ID that is offered again is held by nobody, whatever was known.
//   - A pod is placed as a whole at its first call, by package placement; its later calls follow the plan.
//   - An ID set that mixes GPUs, or is on another GPU than the container's other one, is never granted.
//   - A pod holds of a GPU the IDs that kubelet gave it, or what its containers are bound to there if that is
//     more, until it ends.
package books

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/quantity"
)

// Resource is one of the two that a GPU is given away by.
type Resource int

// The resources.
const (
	Core Resource = iota
	Memory
)

func (r Resource) String() string {
	if r == Core {
		return "core"
	}
	return "memory"
}

func (r Resource) other() Resource { return 1 - r }

// GPU is one GPU of the node.
type GPU struct {
	UUID         string
	Index, Minor int
	Model        string
	// Units of memory that can be given away, and what all of the memory is in bytes.
	Units int
	Bytes uint64
	// Closed says, in a few constant words, why nothing new is put there; empty: it is open.
	Closed string
	// Foreign is used by others than our tenants.
	Foreign Amount
}

func (g *GPU) size(res Resource) int {
	if res == Core {
		return placement.CoresWhole
	}
	return g.Units
}

// Amount is of one GPU: cores in hundredths, memory in units.
type Amount struct{ Cores, Units int }

func (a Amount) of(res Resource) int {
	if res == Core {
		return a.Cores
	}
	return a.Units
}

func (a Amount) max(b Amount) Amount { return Amount{max(a.Cores, b.Cores), max(a.Units, b.Units)} }
func (a Amount) plus(b Amount) Amount {
	return Amount{a.Cores + b.Cores, a.Units + b.Units}
}

// Pod is what is known of a pod.
type Pod struct {
	UID, Namespace, Name string
	// Order is where kubelet takes the pod on, after those with a smaller one; 0: it is not known, or was there at the start.
	Order   uint64
	Created time.Time
	// Over: it ended, or kubelet refused it. It holds nothing.
	Over bool
	Ask  podspec.Ask
	// Problem is why the pod cannot have what it asks, in words for its author. Ask is empty then, and Written has its containers'
	// cores and units.
	Problem string
	Written []podspec.Container
	// Reserved is where a scheduler put its containers.
	Reserved map[string]podspec.Place
	// InitDone has the init containers that have ended well.
	InitDone map[string]bool
}

// Books are those of one node. The zero value is not usable.
type Books struct {
	unit   quantity.Bytes
	gpus   []GPU // never removed: IDs of a GPU that is gone may still be held
	byUUID map[string]int
	links  placement.Links
	pods   map[string]*pod
	// spelled has the device IDs, by resource and GPU, as far as they were needed.
	spelled [2][][]string
	// presumed is what pods probably hold of GPUs, until Open.
	presumed map[string]Amount
	// wholeOnly refuses parts of GPUs.
	wholeOnly bool
	anonymous int
	// begun is the container of the last grant, if it lacks another resource that it asks for: kubelet asks for that next.
	begun *tenant
}

// New makes empty books. unit is one unit of memory.
func New(unit quantity.Bytes, wholeOnly bool) *Books {
	return &Books{unit: unit, byUUID: map[string]int{}, pods: map[string]*pod{}, presumed: map[string]Amount{}, wholeOnly: wholeOnly}
}

// SetGPUs tells which GPUs there are now; links by position in gpus, nil: not known. One that was there and
// is not any more is closed.
func (b *Books) SetGPUs(gpus []GPU, links placement.Links) {
	for i := range b.gpus {
		b.gpus[i].Closed = "gone"
	}
	at := make([]int, len(gpus))
	for i, g := range gpus {
		known, ok := b.byUUID[g.UUID]
		if !ok {
			known = len(b.gpus)
			b.byUUID[g.UUID] = known
			b.gpus = append(b.gpus, g)
		}
		g.Units = max(g.Units, b.gpus[known].Units) // its IDs stay valid
		b.gpus[known], at[i] = g, known
	}
	b.links = nil
	if links != nil {
		b.links = make(placement.Links, len(b.gpus))
		for i := range b.links {
			b.links[i] = make([]placement.Link, len(b.gpus))
		}
		for i := range at {
			for j := range at {
				b.links[at[i]][at[j]] = links[i][j]
			}
		}
	}
}

// GPUs are all that were ever there.
func (b *Books) GPUs() []GPU { return slices.Clone(b.gpus) }

// SetPods tells all pods of the node. Those that are not named any more are gone.
func (b *Books) SetPods(pods []Pod) {
	there := map[string]bool{}
	for _, p := range pods {
		there[p.UID] = true
		b.SetPod(p)
	}
	for uid, p := range b.pods {
		if !there[uid] && !p.anonymous {
			delete(b.pods, uid)
		}
	}
}

// SetPod tells of one pod.
func (b *Books) SetPod(p Pod) {
	known := b.pods[p.UID]
	if known == nil && !p.Over {
		known = b.pods[placeholder(p.Namespace, p.Name)]
		delete(b.pods, placeholder(p.Namespace, p.Name))
	}
	if known == nil {
		known = &pod{tenants: map[string]*tenant{}}
	}
	b.pods[p.UID], known.anonymous = known, false
	known.Pod = p
	for name, t := range known.tenants {
		t.ask = known.Ask.Find(name)
	}
}

// DropPod tells that a pod is gone.
func (b *Books) DropPod(uid string) { delete(b.pods, uid) }

// sorted are the pods, those first that kubelet most likely takes on first: by their order, where that is not known the oldest.
func (b *Books) sorted() []*pod {
	return slices.SortedFunc(maps.Values(b.pods), func(p, q *pod) int {
		return cmp.Or(cmp.Compare(p.Order, q.Order), p.Created.Compare(q.Created), cmp.Compare(p.UID, q.UID))
	})
}

// pod is a Pod and what its containers have.
type pod struct {
	Pod
	// anonymous: kubelet took IDs for it before it was known; UID is ours.
	anonymous bool
	// listed: kubelet held IDs for it when these books were opened, so its init containers may be over.
	listed bool
	// failed: a call for it was refused; kubelet does not try again.
	failed  bool
	tenants map[string]*tenant
	// misses counts how often in a row kubelet held nothing for an anonymous one.
	misses int
	// holds are the IDs that kubelet holds for it, those of init containers included.
	holds [2]ids
	// plan has the GPUs of each container; nil: not planned yet.
	plan map[string][]int
}

// tenant is a container that has GPUs, or is about to.
type tenant struct {
	pod  *pod
	name string
	ask  *podspec.Container // nil: not known
	// ids that kubelet took; preferred that it was told to take.
	ids, preferred [2]ids
	granted        [2]bool
	// foreign are IDs that kubelet holds for it and that are none of ours: another program's, before us.
	foreign [2][]string
	// empty: it was given memory when it was not known that it asks for nothing else, so it got no device.
	empty bool
	// gpus that it is bound to, nil before the first grant, and how much of each: what was asked, or what
	// a live change made of it.
	gpus []int
	need Amount
	// split: what kubelet holds for it is on more GPUs than those, and it was not seen to be granted so.
	split bool
}

func (p *pod) tenant(name string) *tenant {
	t := p.tenants[name]
	if t == nil {
		t = &tenant{pod: p, name: name, ask: p.Ask.Find(name)}
		p.tenants[name] = t
	}
	return t
}

// containers are the pod's, also when it makes no sense, as its author may make of one that runs.
func (p *pod) containers() []podspec.Container {
	if p.Problem != "" {
		return p.Written
	}
	return p.Ask.Containers
}

func (p *pod) hasIDs() bool {
	for _, t := range p.tenants {
		if t.granted[Core] || t.granted[Memory] {
			return true
		}
	}
	return false
}

// take notes the IDs that kubelet took for a container, and that it took others back.
func (t *tenant) take(res Resource, set ids) {
	t.ids[res], t.granted[res], t.preferred[res] = set, set != nil, nil
	var all ids
	for _, each := range t.pod.tenants {
		all.union(each.ids[res])
	}
	t.pod.holds[res] = all
}

// wants is how many IDs of a resource a container takes in all.
func wants(c *podspec.Container, res Resource) int {
	if res == Core {
		return c.Cores
	}
	return int(c.Units)
}

// reserve is what the pod holds of a GPU.
func (b *Books) reserve(p *pod, gpu int) Amount {
	if p.Over {
		return Amount{}
	}
	held := Amount{p.holds[Core].count(gpu), p.holds[Memory].count(gpu)}
	return held.max(b.bound(p, gpu))
}

// bound is the most that the pod's containers are bound to on a GPU at one time.
func (b *Books) bound(p *pod, gpu int) Amount {
	var stay, peak Amount
	known := p.containers()
	for i := range known {
		c := &known[i]
		t := p.tenants[c.Name]
		if t == nil || !slices.Contains(t.gpus, gpu) {
			continue
		}
		if c.Init && !c.Sidecar {
			peak = peak.max(stay.plus(b.need(t, gpu)))
			continue
		}
		stay = stay.plus(b.need(t, gpu))
	}
	for name, t := range p.tenants {
		listed := slices.ContainsFunc(known, func(c podspec.Container) bool { return c.Name == name })
		if !listed && slices.Contains(t.gpus, gpu) {
			stay = stay.plus(b.need(t, gpu))
		}
	}
	return peak.max(stay)
}

// need is what a tenant is bound to on a GPU of its own. Whole GPUs come with all of their memory, and keep it, which nothing
// limits, when a live change makes their cores fewer.
func (b *Books) need(t *tenant, gpu int) Amount {
	n := t.need
	whole := n.Cores == placement.CoresWhole || len(t.gpus) > 0 && t.ids[Core].total() == placement.CoresWhole*len(t.gpus)
	if whole && n.Units == 0 {
		n.Units = b.gpus[gpu].Units
	}
	return n
}

// Free is what nobody holds of a GPU; negative where more is held than there is.
func (b *Books) Free(uuid string) (Amount, bool) {
	g, ok := b.byUUID[uuid]
	if !ok {
		return Amount{}, false
	}
	return b.free(g, nil), true
}

// free is what is left of a GPU without what pod but holds.
func (b *Books) free(gpu int, but *pod) Amount {
	left := Amount{placement.CoresWhole - b.gpus[gpu].Foreign.Cores, b.gpus[gpu].Units - b.gpus[gpu].Foreign.Units}
	for _, p := range b.pods {
		if p != but {
			r := b.reserve(p, gpu)
			left.Cores, left.Units = left.Cores-r.Cores, left.Units-r.Units
		}
	}
	return left
}
