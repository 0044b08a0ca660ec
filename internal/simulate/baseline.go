package simulate

import (
	"fmt"
	"math"
	"math/rand"
	"slices"
)

// state is what is free of one node, for the baselines.
type state struct {
	*Node
	cpu, ram int64
	// left and memory of each GPU, total is the sum of left.
	left   []int
	memory []int64
	total  int
	// kinds counts the pods on the node by kind, for clustering.
	kinds   map[string]int
	version uint32
}

func newStates(nodes []Node) []state {
	out := make([]state, len(nodes))
	for i := range nodes {
		n := &nodes[i]
		out[i] = state{Node: n, cpu: n.CPU, ram: n.RAM, left: slices.Repeat([]int{Milli}, n.GPUs), memory: slices.Repeat([]int64{int64(n.GPUMemory)}, n.GPUs), total: n.GPUs * Milli, kinds: map[string]int{}, version: 1}
	}
	return out
}

func (p *Pod) whole() bool { return p.Milli == Milli }

// kind as the clustering policy tells pods apart.
func (p *Pod) kind() string {
	if p.whole() {
		return fmt.Sprintf("%d-gpu", p.GPUs)
	}
	return "share-gpu"
}

func (p *Pod) wants(model string) bool { return len(p.Models) == 0 || slices.Contains(p.Models, model) }

func (s *state) fits(p *Pod) bool {
	if s.cpu < p.CPU || s.ram < p.RAM || p.GPUs > 0 && !p.wants(s.Model) {
		return false
	}
	return s.has(p)
}

// room tells whether a GPU has what the pod takes of one; memory is that of p.memoryOn.
func (s *state) room(g int, p *Pod, memory int64) bool {
	return s.left[g] >= p.Milli && s.memory[g] >= memory
}

func (s *state) has(p *Pod) bool {
	need, memory := p.GPUs, p.memoryOn(s.Node)
	for g := range s.left {
		if need <= 0 {
			break
		}
		if s.room(g, p, memory) {
			need--
		}
	}
	return need <= 0
}

// take puts a pod on GPUs of the node.
func (s *state) take(p *Pod, gpus []int) {
	s.cpu -= p.CPU
	s.ram -= p.RAM
	for _, g := range gpus {
		s.left[g] -= p.Milli
		s.memory[g] -= p.memoryOn(s.Node)
		s.total -= p.Milli
	}
	if p.GPUs > 0 {
		s.kinds[p.kind()]++
	}
	s.version++
}

// roomy are the GPUs that have what the pod takes of one.
func (s *state) roomy(p *Pod) []int {
	var out []int
	memory := p.memoryOn(s.Node)
	for g := range s.left {
		if s.room(g, p, memory) {
			out = append(out, g)
		}
	}
	return out
}

// tightest are the fullest GPUs where the pod fits.
func (s *state) tightest(p *Pod) []int {
	order := s.roomy(p)
	slices.SortStableFunc(order, func(a, b int) int { return s.left[a] - s.left[b] })
	return order[:p.GPUs]
}

// A scorer is a baseline: the node with the highest score is taken, the first of equals.
type scorer interface {
	score(s *state, p *Pod) int
	gpus(s *state, p *Pod) []int
}

// bestFit takes the node with the least left of CPU and GPU together.
type bestFit struct{}

// What the published code takes for the largest node.
const (
	mostCPU = 128_000
	mostGPU = 8_000
)

func (bestFit) score(s *state, p *Pod) int {
	left := float64(s.cpu-p.CPU)/mostCPU*0.5 + float64(int64(s.total)-p.GPUMilli())/mostGPU*0.5
	return int((1 - left) * 100)
}
func (bestFit) gpus(s *state, p *Pod) []int { return s.tightest(p) }

// dotProduct takes the node whose free resources are least aligned with the request.
type dotProduct struct{}

func (dotProduct) score(s *state, p *Pod) int {
	dot := float64(s.cpu)/mostCPU*float64(p.CPU)/mostCPU + float64(s.total)/mostGPU*float64(p.GPUMilli())/mostGPU
	return int(100 * (1 - dot/2))
}
func (dotProduct) gpus(s *state, p *Pod) []int { return s.tightest(p) }

// packing takes used GPUs first, then free GPUs of used nodes, then free nodes.
type packing struct{}

func (packing) score(s *state, p *Pod) int {
	if p.GPUs == 0 {
		return 0
	}
	idle := 0
	for _, left := range s.left {
		if left == Milli {
			idle++
		}
	}
	if idle == len(s.left) {
		return max(33-idle, idle)
	}
	fresh, free := 0, 0
	for _, g := range s.tightest(p) {
		if s.left[g] == Milli {
			fresh++
		}
		free += s.left[g] * 100 / Milli
	}
	if fresh > 0 {
		return max(50-fresh, 33)
	}
	return max(100-free/10, 50)
}
func (packing) gpus(s *state, p *Pod) []int { return s.tightest(p) }

// clustering keeps pods of one kind (a share, one GPU, two) together.
type clustering struct{}

func (clustering) score(s *state, p *Pod) int {
	if p.GPUs == 0 {
		return 0
	}
	used := 25 * (mostGPU - s.total) / mostGPU
	switch same := s.kinds[p.kind()] > 0; {
	case same && len(s.kinds) == 1:
		return used + 75
	case same:
		return used + 50
	case len(s.kinds) == 0:
		return used + 25
	}
	return used
}
func (clustering) gpus(s *state, p *Pod) []int { return s.tightest(p) }

// fgd is the published fragmentation gradient descent. Where GPUs have memory, a usual pod cannot use those that have too
// little of it left either.
type fgd struct{ typical []typical }

func (f fgd) score(s *state, p *Pod) int {
	score, _ := f.best(s, p)
	return score
}

func (f fgd) gpus(s *state, p *Pod) []int {
	_, gpus := f.best(s, p)
	return gpus
}

func (f fgd) best(s *state, p *Pod) (int, []int) {
	before, memory := fragments(f.typical, s, s.cpu), p.memoryOn(s.Node)
	after := func(gpus []int) int {
		for _, g := range gpus {
			s.left[g] -= p.Milli
			s.memory[g] -= memory
		}
		d := before - fragments(f.typical, s, s.cpu-p.CPU)
		for _, g := range gpus {
			s.left[g] += p.Milli
			s.memory[g] += memory
		}
		return int(100 / (1 + math.Exp(-d/1000)))
	}
	if p.GPUs != 1 || p.whole() {
		gpus := s.tightest(p)
		return after(gpus), gpus
	}
	score, gpu := 0, -1
	for g := range s.left {
		if !s.room(g, p, memory) {
			continue
		}
		if with := after([]int{g}); gpu < 0 || with > score {
			score, gpu = with, g
		}
	}
	return score, []int{gpu}
}

// typical is a usual pod with its part of all pods.
type typical struct {
	Pod
	part float64
}

// typicalPods are the most frequent shapes of pods that make up 95 % of them, scaled to 1.
func typicalPods(pods []Pod) []typical {
	counts := map[string]*typical{}
	var list []*typical
	for _, p := range pods {
		key := fmt.Sprint(p.CPU, p.Milli, p.GPUs, uint64(p.GPUMemory), p.Models)
		if counts[key] == nil {
			counts[key] = &typical{Pod: p}
			list = append(list, counts[key])
		}
		counts[key].part++
	}
	slices.SortStableFunc(list, func(a, b *typical) int { return int(b.part - a.part) })
	var out []typical
	sum := 0.0
	for _, t := range list {
		if sum >= 0.95*float64(len(pods)) {
			break
		}
		sum += t.part
		out = append(out, *t)
	}
	for i := range out {
		out[i].part /= sum
	}
	return out
}

// fragments is the expected part of what is left on a node with so much CPU that a usual pod cannot use, in thousandths
// of a GPU: all of it for pods that do not fit, for others what is left on GPUs too full for them.
func fragments(usual []typical, s *state, cpu int64) float64 {
	total := 0
	for _, l := range s.left {
		total += l
	}
	sum := 0.0
	for i := range usual {
		t := &usual[i]
		small, enough, memory := 0, 0, t.memoryOn(s.Node)
		for g, l := range s.left {
			if l < t.Milli || s.memory[g] < memory {
				small += l
			} else {
				enough++
			}
		}
		if t.Milli == 0 || cpu < t.CPU || enough < t.GPUs || !t.wants(s.Model) {
			small = total
		}
		sum += t.part * float64(small)
	}
	return sum
}

// baseline runs a scorer.
type baseline struct {
	scorer
	nodes []state
	seen  map[string][]cached
}

type cached struct {
	version uint32
	score   int
}

func newBaseline(s scorer, nodes []Node) *baseline {
	return &baseline{scorer: s, nodes: newStates(nodes), seen: map[string][]cached{}}
}

func (b *baseline) place(p *Pod) (int, []int, bool, error) {
	key := fmt.Sprint(p.CPU, p.RAM, p.Milli, p.GPUs, uint64(p.GPUMemory), p.Models)
	seen := b.seen[key]
	if seen == nil {
		seen = make([]cached, len(b.nodes))
		b.seen[key] = seen
	}
	best, top := -1, -1
	for i := range b.nodes {
		n := &b.nodes[i]
		if seen[i].version != n.version {
			seen[i] = cached{n.version, -1}
			if n.fits(p) {
				seen[i].score = b.score(n, p)
			}
		}
		if seen[i].score > top {
			best, top = i, seen[i].score
		}
	}
	if best < 0 {
		return 0, nil, false, nil
	}
	n := &b.nodes[best]
	var gpus []int
	if p.GPUs > 0 {
		gpus = b.gpus(n, p)
	}
	n.take(p, gpus)
	return best, gpus, true, nil
}

// random takes any node and any GPU.
type random struct {
	rng   *rand.Rand
	nodes []state
}

func (r *random) place(p *Pod) (int, []int, bool, error) {
	var fit []int
	for i := range r.nodes {
		if r.nodes[i].fits(p) {
			fit = append(fit, i)
		}
	}
	if len(fit) == 0 {
		return 0, nil, false, nil
	}
	at := fit[r.rng.Intn(len(fit))]
	n := &r.nodes[at]
	gpus := n.roomy(p)
	if !p.whole() {
		r.rng.Shuffle(len(gpus), func(i, j int) { gpus[i], gpus[j] = gpus[j], gpus[i] })
	}
	n.take(p, gpus[:p.GPUs])
	return at, gpus[:p.GPUs], true, nil
}
