package placement

import (
	"cmp"
	"fmt"
	"slices"

	"tranche.dev/tranche/internal/quantity"
)

// searchSteps bounds the search for a place of one pod on one node, in sets of GPUs tried.
const searchSteps = 100_000

// search puts the containers of a pod on one node's GPUs, one after the other, the hardest first and init
// containers last, and goes back where that fails.
type search struct {
	node   *Node
	pod    *Pod
	policy Policy
	frag   *fragmenter
	// order in which the containers are decided; chosen and decided by container.
	order   []int
	chosen  []set
	decided []bool
	// used[m] is what the pod uses of each GPU at moment m: while its m-th init container runs, and last of all
	// once it is up. free is what there is.
	used [][]amount
	free []amount
	// alike is true while GPUs in equal state are interchangeable: no container names a UUID.
	alike bool
	steps int
}

// amount is of one GPU.
type amount struct {
	cores  int
	memory int64
}

func newSearch(node *Node, pod *Pod, policy Policy, frag *fragmenter) *search {
	n := len(pod.Containers)
	s := &search{node: node, pod: pod, policy: policy, frag: frag, chosen: make([]set, n), decided: make([]bool, n), alike: true}
	moments := 1
	for i := range pod.Containers {
		c := &pod.Containers[i]
		s.order = append(s.order, i)
		s.alike = s.alike && len(c.Constraints.UUIDs)+len(c.Constraints.NotUUIDs) == 0
		if c.Phase == Init {
			moments++
		}
	}
	slices.SortStableFunc(s.order, func(a, b int) int { return hardestFirst(&pod.Containers[a], &pod.Containers[b]) })
	s.used = make([][]amount, moments)
	for m := range s.used {
		s.used[m] = make([]amount, len(node.GPUs))
	}
	for i := range node.GPUs {
		s.free = append(s.free, amount{max(node.GPUs[i].FreeCores, 0), max(node.GPUs[i].FreeMemory, 0)})
	}
	return s
}

func hardestFirst(a, b *Container) int {
	init := func(c *Container) int {
		if c.Phase == Init {
			return 1
		}
		return 0
	}
	return cmp.Or(init(a)-init(b), cmp.Compare(b.Request.Cores*b.Request.Count, a.Request.Cores*a.Request.Count),
		cmp.Compare(b.Request.Memory, a.Request.Memory))
}

// moments are those at which container i runs.
func (s *search) moments(i int) []int {
	var out []int
	m, last := 0, len(s.used)-1
	switch s.pod.Containers[i].Phase {
	case App:
		return []int{last}
	case Sidecar:
		for j := range s.pod.Containers {
			if s.pod.Containers[j].Phase == Init {
				if j > i {
					out = append(out, m)
				}
				m++
			}
		}
		return append(out, last)
	default:
		for j := range s.pod.Containers[:i] {
			if s.pod.Containers[j].Phase == Init {
				m++
			}
		}
		return []int{m}
	}
}

// solve finds a place for the whole pod.
func (s *search) solve() bool { return s.onOne() || s.place(0) }

// onOne puts all containers of a pod with init containers on one GPU, the policy's best where that is
// possible: kubelet hands the device IDs of an init container on to those after it without asking, and the IDs
// name the GPU.
func (s *search) onOne() bool {
	if len(s.used) == 1 || len(s.pod.Apart) > 0 || slices.ContainsFunc(s.pod.Containers, func(c Container) bool { return c.Request.Count > 1 }) {
		return false
	}
	hardest := s.order[0]
	all, _ := s.eligible(hardest, s.moments(hardest))
	for _, g := range s.ranked(hardest, s.moments(hardest), all) {
		done := 0
		for _, i := range s.order {
			if fit, _ := s.eligible(i, s.moments(i)); !fit.has(g) {
				break
			}
			s.chosen[i], s.decided[i] = 1<<g, true
			s.add(i, s.moments(i), 1)
			done++
		}
		if done == len(s.order) {
			return true
		}
		for _, i := range s.order[:done] {
			s.add(i, s.moments(i), -1)
			s.decided[i] = false
		}
	}
	return false
}

// place decides the containers from the k-th of the order on.
func (s *search) place(k int) bool {
	if k == len(s.order) {
		return true
	}
	i := s.order[k]
	moments := s.moments(i)
	return s.each(i, moments, func(gpus set) bool {
		if s.steps++; s.steps > searchSteps {
			return true
		}
		s.chosen[i], s.decided[i] = gpus, true
		s.add(i, moments, 1)
		if s.place(k + 1) {
			return s.steps <= searchSteps
		}
		s.add(i, moments, -1)
		s.decided[i] = false
		return false
	}) && s.steps <= searchSteps
}

// add counts container i's use of its GPUs, sign times.
func (s *search) add(i int, moments []int, sign int) {
	for gpus := s.chosen[i]; gpus != 0; gpus &= gpus - 1 {
		g := gpus.first()
		cores, memory := s.pod.Containers[i].on(&s.node.GPUs[g])
		for _, m := range moments {
			s.used[m][g].cores += sign * cores
			s.used[m][g].memory += int64(sign) * memory
		}
	}
}

// each offers sets of GPUs for container i, the policy's best first and then all others, until one is
// taken.
func (s *search) each(i int, moments []int, take func(set) bool) bool {
	c := &s.pod.Containers[i]
	eligible, fixed := s.eligible(i, moments)
	if fixed != 0 {
		return eligible&fixed == fixed && take(fixed)
	}
	if eligible.len() < c.Request.Count {
		return false
	}
	if c.Request.Count == 1 && c.Request.Cores != CoresWhole {
		return s.eachOne(s.ranked(i, moments, eligible), take)
	}
	first := s.several(i, moments, eligible)
	if take(first) {
		return true
	}
	if len(s.order) == 1 {
		return false
	}
	if c.Request.Count == 1 {
		return s.eachOne(eligible.list(), take)
	}
	return s.others(eligible.list(), c.Request.Count, 0, first, take)
}

// eachOne offers single GPUs, one of each kind that are interchangeable.
func (s *search) eachOne(gpus []int, take func(set) bool) bool {
	for k, g := range gpus {
		if s.alike && slices.ContainsFunc(gpus[:k], func(h int) bool { return s.same(g, h) }) {
			continue
		}
		if take(1 << g) {
			return true
		}
	}
	return false
}

// same tells whether two GPUs are in equal state as far as it matters for what fits.
func (s *search) same(g, h int) bool {
	a, b := &s.node.GPUs[g], &s.node.GPUs[h]
	if a.Name != b.Name || a.Memory != b.Memory || s.free[g] != s.free[h] {
		return false
	}
	for i, gpus := range s.chosen {
		if s.decided[i] && gpus.has(g) != gpus.has(h) {
			return false
		}
	}
	return true
}

// others offers all sets of k of the GPUs, from position at on, joined to with, but not the first.
func (s *search) others(gpus []int, k, at int, first set, take func(set) bool) bool {
	var add func(at, k int, to set) bool
	add = func(at, k int, to set) bool {
		if k == 0 {
			return to != first && take(to)
		}
		for ; at <= len(gpus)-k; at++ {
			if add(at+1, k-1, to|1<<gpus[at]) {
				return true
			}
		}
		return false
	}
	return add(at, k, 0)
}

// eligible are the GPUs where container i may go and fits, whatever the others will need. fixed is not
// empty when it must have the GPUs of another one.
func (s *search) eligible(i int, moments []int) (eligible, fixed set) {
	c := &s.pod.Containers[i]
	apart := set(0)
	for j := range s.pod.Containers {
		if !s.decided[j] {
			continue
		}
		name := s.pod.Containers[j].Name
		if grouped(s.pod.Apart, c.Name, name) {
			apart |= s.chosen[j]
		}
		if grouped(s.pod.Together, c.Name, name) {
			fixed |= s.chosen[j]
		}
	}
	for g := range s.node.GPUs {
		if !apart.has(g) && s.node.GPUs[g].Excluded == "" && c.Constraints.allows(&s.node.GPUs[g]) == "" && s.fits(c, g, moments) {
			eligible |= 1 << g
		}
	}
	return eligible, fixed
}

func grouped(groups [][]string, a, b string) bool {
	return a != b && slices.ContainsFunc(groups, func(g []string) bool { return slices.Contains(g, a) && slices.Contains(g, b) })
}

func (s *search) fits(c *Container, g int, moments []int) bool {
	cores, memory := c.on(&s.node.GPUs[g])
	for _, m := range moments {
		if s.used[m][g].cores+cores > s.free[g].cores || s.used[m][g].memory+memory > s.free[g].memory {
			return false
		}
	}
	return true
}

// several is the policy's choice of more than one GPU, or of a whole one.
func (s *search) several(i int, moments []int, eligible set) set {
	c := &s.pod.Containers[i]
	count := c.Request.Count
	if c.Phase == Init {
		// Where the pod holds GPUs anyway, if those are enough.
		if own := eligible & s.held(i, moments); own.len() >= count {
			eligible = own
		}
	}
	if c.Request.Cores == CoresWhole || s.policy == Topology {
		return best(s.node.GPUs, s.node.Links, eligible, count)
	}
	var out set
	for _, g := range s.ranked(i, moments, eligible)[:count] {
		out |= 1 << g
	}
	return out
}

// held are the GPUs where init container i would not add to what the pod holds.
func (s *search) held(i int, moments []int) set {
	var out set
	for g := range s.node.GPUs {
		if grown := s.growth(i, g, moments); grown == (amount{}) {
			out |= 1 << g
		}
	}
	return out
}

// growth is by how much container i on GPU g would add to the most that the pod uses of it at one time.
func (s *search) growth(i, g int, moments []int) amount {
	cores, memory := s.pod.Containers[i].on(&s.node.GPUs[g])
	peak := s.peak(g)
	var out amount
	for _, m := range moments {
		out.cores = max(out.cores, s.used[m][g].cores+cores-peak.cores)
		out.memory = max(out.memory, s.used[m][g].memory+memory-peak.memory)
	}
	return out
}

func (s *search) peak(g int) amount {
	var out amount
	for m := range s.used {
		out.cores, out.memory = max(out.cores, s.used[m][g].cores), max(out.memory, s.used[m][g].memory)
	}
	return out
}

// ranked are the eligible GPUs, the policy's best first.
func (s *search) ranked(i int, moments []int, eligible set) []int {
	gpus := eligible.list()
	type order struct{ grown, policy int64 }
	ranks := make([]order, len(s.node.GPUs))
	for _, g := range gpus {
		if s.pod.Containers[i].Phase == Init {
			grown := s.growth(i, g, moments)
			ranks[g].grown = int64(grown.cores)*10 + share(grown.memory, s.node.GPUs[g].Memory)
		}
		peak := s.peak(g)
		left := s.node.GPUs[g]
		left.FreeCores, left.FreeMemory = left.FreeCores-peak.cores, left.FreeMemory-peak.memory
		ranks[g].policy = rank(s.policy, s.frag, &s.pod.Containers[i], &left)
	}
	slices.SortStableFunc(gpus, func(a, b int) int {
		return cmp.Or(cmp.Compare(ranks[a].grown, ranks[b].grown), cmp.Compare(ranks[a].policy, ranks[b].policy))
	})
	return gpus
}

// rank of a GPU, with left of it free, for a part of it: lower is better.
func rank(policy Policy, frag *fragmenter, c *Container, left *GPU) int64 {
	free := left.free()
	reservesNothing := c.Request.Cores == 0 && c.Request.Memory == 0
	if policy == Spread || reservesNothing {
		return -free
	}
	if policy == LeastFragmentation && frag != nil {
		return steps(frag.loss(c, left), lossStep)<<32 + free
	}
	return free
}

// free is what is free of a GPU in thousandths, cores and memory added.
func (g *GPU) free() int64 { return int64(g.FreeCores)*10 + share(g.FreeMemory, g.Memory) }

// share is a part of a GPU's memory in thousandths.
func share(part int64, whole quantity.Bytes) int64 {
	if whole == 0 {
		return 0
	}
	return part / max(int64(whole)/1000, 1)
}

// assignment is what was decided.
func (s *search) assignment() Assignment {
	a := Assignment{Containers: make([][]string, len(s.chosen))}
	for i, gpus := range s.chosen {
		for _, g := range gpus.list() {
			a.Containers[i] = append(a.Containers[i], s.node.GPUs[g].UUID)
		}
	}
	for g := range s.node.GPUs {
		if peak := s.peak(g); peak != (amount{}) {
			a.Held = append(a.Held, Held{UUID: s.node.GPUs[g].UUID, Cores: peak.cores, Memory: quantity.Bytes(peak.memory)})
		}
	}
	return a
}

// noFit says why there is no place: of the first container that fits nowhere by itself, GPU by GPU, else
// that they do not fit together.
func (s *search) noFit() *NoFit {
	for i := range s.pod.Containers {
		c := &s.pod.Containers[i]
		if e := c.noFitAlone(s.node); e != nil {
			return e
		}
	}
	e := &NoFit{Short: noTogether}
	if s.steps > searchSteps {
		e.Short = gaveUp
	}
	if len(s.pod.Containers) > 0 {
		e.Request = s.pod.Containers[0].Request
	}
	e.Lines = append(e.Lines, fmt.Sprintf("each of the pod's %d containers fits, but %s:", len(s.pod.Containers), e.Short))
	for i := range s.pod.Containers {
		c := &s.pod.Containers[i]
		e.Lines = append(e.Lines, fmt.Sprintf("container %s %s", c.Name, c.asked()))
	}
	for g := range s.node.GPUs {
		gpu := &s.node.GPUs[g]
		e.Lines = append(e.Lines, fmt.Sprintf("%s: %d cores and %v free", gpu.Label(), s.free[g].cores, quantity.Bytes(s.free[g].memory)))
	}
	return e
}

// noFitAlone says why the container by itself has no place on the node; nil: it has.
func (c *Container) noFitAlone(node *Node) *NoFit {
	e := &NoFit{Request: c.Request, Short: noGPUs}
	if len(node.GPUs) == 0 {
		e.Lines = []string{"the node has no GPUs"}
		return e
	}
	fit := 0
	for g := range node.GPUs {
		if c.refuses(&node.GPUs[g]) == "" {
			fit++
		} else {
			e.Lines = append(e.Lines, describeFor(node.GPUs, g, c))
		}
	}
	if fit >= c.Request.Count {
		return nil
	}
	if c.Request.Count > 1 {
		e.Lines = append([]string{fmt.Sprintf("%d GPUs asked, the request fits on %d of %d", c.Request.Count, fit, len(node.GPUs))}, e.Lines...)
	}
	e.Short = c.short(node, c.asked())
	return e
}

// short is the constant reason why fewer GPUs of the node fit than the container asked for.
func (c *Container) short(node *Node, asked string) string {
	if len(node.GPUs) == 0 {
		return noGPUs
	}
	allowed, why := 0, ""
	cores, memory := 0, 0
	for g := range node.GPUs {
		gpu := &node.GPUs[g]
		if gpu.Excluded != "" {
			why = cmp.Or(why, gpu.Excluded)
			continue
		}
		if no := c.Constraints.allows(gpu); no != "" {
			why = no
			continue
		}
		allowed++
		needCores, needMemory := c.on(gpu)
		if needCores <= gpu.FreeCores {
			cores++
		}
		if needMemory <= gpu.FreeMemory {
			memory++
		}
	}
	count := c.Request.Count
	switch {
	case allowed < count && why != "":
		return why
	case len(node.GPUs) < count:
		return asked + ": too few GPUs"
	case cores < count && memory >= count:
		return asked + ": cores short"
	case memory < count && cores >= count:
		return asked + ": memory short"
	case cores >= count && memory >= count:
		return asked + ": no GPU has both"
	}
	return asked + ": cores and memory short"
}
