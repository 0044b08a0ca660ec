package placement

import (
	"fmt"
	"slices"
)

// kinds are remembered up to so many, the least recently used goes first.
const maxKinds = 256

// kind are the pods that ask the same, and what is known of each node for them, by its slot.
type kind struct {
	policy  Policy
	seen    []entry
	reasons []string
	used    uint64
	// models remembers which models the only container may use: why not, or empty.
	models map[string]string
	// asked names what the only container asks.
	asked string
	// size is what it takes of GPUs that are seen as sized.
	sized *view
	size  int
}

// entry is what is known of one node for one kind of pod while the node has this version. Why is a position
// in the kind's reasons, 0 when the pod fits.
type entry struct {
	version uint64
	why     uint8
	key     key
}

// key ranks nodes for a pod: first, then second; lower is better.
type key struct{ first, second int64 }

func (k key) less(than key) bool {
	return k.first < than.first || k.first == than.first && k.second < than.second
}

// kindName tells kinds of pods apart. Memory is there in bytes: as text it is rounded.
func (p *Pod) kindName() string {
	name := fmt.Append(nil, p.Policy, p.CPU, p.RAM)
	for i := range p.Containers {
		c := &p.Containers[i]
		name = fmt.Append(name, "|", c.Phase, c.Request.Cores, uint64(c.Request.Memory), c.Request.Count)
		if len(c.Constraints.Models)+len(c.Constraints.NotModels)+len(c.Constraints.UUIDs)+len(c.Constraints.NotUUIDs) > 0 {
			name = fmt.Appendf(name, "%q", c.Constraints)
		}
		if len(p.Apart)+len(p.Together) > 0 {
			name = fmt.Appendf(name, "%q", c.Name)
		}
	}
	if len(p.Apart)+len(p.Together) > 0 {
		name = fmt.Appendf(name, "%q%q", p.Apart, p.Together)
	}
	return string(name)
}

func (c *Cluster) kind(pod *Pod) *kind {
	name := pod.kindName()
	k := c.kinds[name]
	if k == nil {
		if len(c.kinds) >= maxKinds {
			c.forgetKind()
		}
		k = &kind{policy: policyOr(pod.Policy, c.config.Policy), reasons: []string{""}, models: map[string]string{}}
		if len(pod.Containers) == 1 {
			k.asked = pod.Containers[0].asked()
		}
		c.kinds[name] = k
	}
	c.clock++
	k.used = c.clock
	if len(k.seen) < c.slots {
		k.seen = append(k.seen, make([]entry, c.slots-len(k.seen))...)
	}
	return k
}

func (c *Cluster) forgetKind() {
	oldest := ""
	for name, k := range c.kinds {
		if oldest == "" || k.used < c.kinds[oldest].used {
			oldest = name
		}
	}
	delete(c.kinds, oldest)
}

// reason is the position of a text in the kind's reasons. There are few; should there be too many, the last
// stands for the others.
func (k *kind) reason(text string) uint8 {
	i := slices.Index(k.reasons, text)
	if i < 0 && len(k.reasons) < 255 {
		i = len(k.reasons)
		k.reasons = append(k.reasons, text)
	} else if i < 0 {
		i = 254
	}
	return uint8(i)
}

// look finds out how a node is for a kind of pod.
func (c *Cluster) look(k *kind, pod *Pod, n *node, e *entry) {
	*e = entry{version: c.versions[n.slot]}
	switch {
	case c.hostShort(n, pod):
		e.why = k.reason(hostShort)
	case len(pod.Containers) == 0:
		e.key = c.judge(k, pod, n, nil)
	case len(pod.Containers) == 1 && (pod.Containers[0].Request.Count == 1 || k.policy != Topology):
		c.lookOne(k, pod, n, e)
	default:
		s := newSearch(&n.Node, pod, k.policy, c.frag)
		if !s.solve() {
			e.why = k.reason(s.noFit().Short)
			return
		}
		e.key = c.judgeSearch(k, pod, n, s)
	}
}

// lookOne is look for pods of one container, without a search.
func (c *Cluster) lookOne(k *kind, pod *Pod, n *node, e *entry) {
	ct := &pod.Containers[0]
	count, whole := ct.Request.Count, ct.Request.Cores == CoresWhole
	var fit [MaxGPUs]taken
	found := 0
	valued := !whole && k.policy == LeastFragmentation && (ct.Request.Cores > 0 || ct.Request.Memory > 0)
	if valued {
		c.value(n)
	}
	for g := range n.GPUs {
		gpu := &n.GPUs[g]
		cores, memory := ct.on(gpu)
		if cores > gpu.FreeCores || memory > gpu.FreeMemory && memory > 0 || !k.allows(ct, gpu) || gpu.Excluded != "" {
			continue
		}
		fit[found] = taken{gpu: g, cores: cores, memory: memory}
		switch {
		case whole:
		case found > 0 && n.alike(fit[found-1].gpu, g):
			fit[found].rank = fit[found-1].rank
		case valued:
			fit[found].rank = k.rank(ct, n, g, cores, memory)
		default:
			fit[found].rank = rank(k.policy, c.frag, ct, gpu)
		}
		found++
	}
	if found < count {
		e.why = k.reason(ct.short(&n.Node, k.asked))
		return
	}
	// The count of lowest rank; of equal ones the first.
	for i := range min(count, found-1) {
		least := i
		for j := i + 1; j < found; j++ {
			if fit[j].rank < fit[least].rank {
				least = j
			}
		}
		pick := fit[least]
		copy(fit[i+1:least+1], fit[i:least])
		fit[i] = pick
	}
	e.key = c.judge(k, pod, n, fit[:count])
}

// rank is the function rank for least fragmentation, with what is known of the node.
func (k *kind) rank(c *Container, n *node, g, cores int, memory int64) int64 {
	gpu, v := &n.GPUs[g], n.views[g]
	if k.sized != v {
		k.sized, k.size = v, sizeOn(c, gpu)
	}
	to := level(gpu, gpu.FreeCores-cores, gpu.FreeMemory-memory)
	return steps(v.potential[n.levels[g]]-v.potential[to]-float64(k.size), lossStep)<<32 + gpu.free()
}

// alike tells whether two GPUs of a node are in the same state.
func (n *node) alike(a, b int) bool {
	x, y := &n.GPUs[a], &n.GPUs[b]
	return x.FreeCores == y.FreeCores && x.FreeMemory == y.FreeMemory && x.Memory == y.Memory && x.Name == y.Name
}

func (k *kind) allows(c *Container, g *GPU) bool {
	if len(c.Constraints.UUIDs)+len(c.Constraints.NotUUIDs) > 0 {
		return c.Constraints.allows(g) == ""
	}
	if len(c.Constraints.Models)+len(c.Constraints.NotModels) == 0 {
		return true
	}
	why, known := k.models[g.Name]
	if !known {
		why = c.Constraints.allows(g)
		k.models[g.Name] = why
	}
	return why == ""
}

// taken is what a pod takes of one GPU.
type taken struct {
	gpu    int
	cores  int
	memory int64
	rank   int64
}

func (c *Cluster) judgeSearch(k *kind, pod *Pod, n *node, s *search) key {
	var take []taken
	for g := range n.GPUs {
		if peak := s.peak(g); peak != (amount{}) {
			take = append(take, taken{gpu: g, cores: peak.cores, memory: peak.memory})
		}
	}
	out := c.judge(k, pod, n, take)
	if k.policy == Topology && len(s.chosen) > 0 {
		out.second = out.first
		out.first = 0
		for i, gpus := range s.chosen {
			if pod.Containers[i].Request.Count > 1 {
				out.first += linkCost(n.Links, gpus)
			}
		}
	}
	return out
}

// judge is the policy's key for a node when the pod takes this of it.
func (c *Cluster) judge(k *kind, pod *Pod, n *node, take []taken) key {
	c.value(n)
	free := n.free
	for _, t := range take {
		free -= int64(t.cores)*10 + share(t.memory, n.GPUs[t.gpu].Memory)
	}
	switch k.policy {
	case Spread:
		return key{-free, 0}
	case LeastFragmentation:
		return c.judgeFragments(pod, n, take, free)
	}
	return key{free, 0}
}

// judgeFragments is the key of least fragmentation. Of a part of a GPU the loss of potential counts first; whole
// GPUs lose none, so for them it is the growth of what is unused of the node, which counts second for parts.
// Scarce models cost extra.
func (c *Cluster) judgeFragments(pod *Pod, n *node, take []taken, free int64) key {
	var levels [MaxGPUs]int
	copy(levels[:], n.levels)
	loss, price, part := 0.0, 0.0, false
	for _, t := range take {
		g := &n.GPUs[t.gpu]
		v := n.views[t.gpu]
		to := level(g, g.FreeCores-t.cores, g.FreeMemory-t.memory)
		size := t.cores
		if g.Memory > 0 {
			size = max(size, int((t.memory*CoresWhole+int64(g.Memory)-1)/int64(g.Memory)))
		}
		loss += v.potential[n.levels[t.gpu]] - v.potential[to] - float64(size)
		price += v.price * float64(size)
		part = part || t.cores < CoresWhole
		levels[t.gpu] = to
	}
	grown := c.frag.unused(n.views, levels[:len(n.GPUs)], n.cpuLeft(pod.CPU)) - n.unused
	if !part {
		loss = grown
	}
	return key{steps(loss+priceWeight*price, lossStep), steps(grown, fragmentStep)<<32 + free}
}

// cpuLeft is the host's free CPU less what a pod takes; -1: not known.
func (n *node) cpuLeft(less int64) int64 {
	if !n.HostKnown {
		return -1
	}
	return max(n.CPU-less, 0)
}

// value finds out the node's levels and what of them is unused.
func (c *Cluster) value(n *node) {
	if n.views != nil {
		return
	}
	n.views, n.levels = make([]*view, len(n.GPUs)), make([]int, len(n.GPUs))
	n.free = 0
	for g := range n.GPUs {
		gpu := &n.GPUs[g]
		n.free += gpu.free()
		n.views[g], n.levels[g] = c.frag.view(gpu), level(gpu, gpu.FreeCores, gpu.FreeMemory)
	}
	n.unused = c.frag.unused(n.views, n.levels, n.cpuLeft(0))
}
