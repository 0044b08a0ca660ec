package placement

import (
	"fmt"
	"slices"
	"strings"

	"tranche.dev/tranche/internal/quantity"
)

// Config of a Cluster.
type Config struct {
	// Policy for pods that name none; empty: least fragmentation.
	Policy Policy
	// CheckHost refuses nodes whose CPU or RAM is short. Off, they only weigh in: kube-scheduler checks them.
	CheckHost bool
}

// Cluster knows what is free on every GPU of every node and decides where pods go. What it knows of a node
// for a kind of pod it keeps until the node changes, so a decision does not recount the cluster. Not safe
// for concurrent use.
type Cluster struct {
	config Config
	nodes  map[string]*node
	// order has all nodes by name.
	order []*node
	holds map[string]*hold
	kinds map[string]*kind
	last  Decision
	slots int
	// bySlot are the nodes by slot, and versions theirs, apart from them, so that a decision reads little memory;
	// 0: not present. finder is nil when nodes have come or gone.
	bySlot   []*node
	versions []uint64
	finder   *finder
	// found are the slots of the last decision's candidates.
	found   []int32
	counter uint64
	free    []int
	mix     *Mix
	frag    *fragmenter
	clock   uint64
}

// hold is what one pod holds, by the caller's key.
type hold struct {
	node     string
	gpus     []Held
	cpu, ram int64
}

// node is a node with what its pods hold taken off. Present is false of one that is only known by them.
type node struct {
	Node
	present bool
	slot    int
	// held are the holds by key: what SetNode takes off again.
	held map[string]*hold
	at   map[string]int
	// views and levels of the GPUs, what is free of them and what of that is unused, by the current mix; views is
	// nil when that is to be found out.
	views  []*view
	free   int64
	levels []int
	unused float64
}

// Candidate is one node of a Decision. There may be thousands, so it is small and points to nothing.
type Candidate struct {
	// Score is 0 to 10 if the pod fits, -1 if not. Only the best node has 10.
	Score int32
	// slot of the node, -1: not known. why is a position in the kind's reasons, or unknown.
	slot int32
	why  uint8
}

// unknown is Candidate.why of a node without GPUs.
const unknown = 255

// Decision is where a pod should go.
type Decision struct {
	// Best is the node that the policy wants, empty when none fits; Assignment its GPUs.
	Best       string
	Assignment Assignment
	// Candidates in the order in which they were given. Valid until the next decision.
	Candidates []Candidate

	given, names, reasons []string
}

// Node is the name of the candidate at a position: not what was given, which may not last, if the node is known.
func (d *Decision) Node(i int) string {
	if slot := d.Candidates[i].slot; slot >= 0 {
		return d.names[slot]
	}
	return d.given[i]
}

// Why is the constant reason why the candidate at a position has score -1; empty: it has another one.
func (d *Decision) Why(i int) string {
	if why := d.Candidates[i].why; why != unknown {
		return d.reasons[why]
	}
	return noInventory
}

// NewCluster makes an empty cluster.
func NewCluster(config Config) (*Cluster, error) {
	if err := config.Policy.Validate(); err != nil {
		return nil, err
	}
	config.Policy = policyOr(config.Policy, LeastFragmentation)
	return &Cluster{config: config, nodes: map[string]*node{}, holds: map[string]*hold{}, kinds: map[string]*kind{}, mix: newMix()}, nil
}

// Learn counts a pod among those that are usual here. Called once for each pod that wants a GPU, at the
// latest before it is decided on.
func (c *Cluster) Learn(pod *Pod) {
	c.mix.learn(pod)
	if c.frag != nil && c.mix.stale() {
		c.mix.fresh = 0
		if !c.mix.full || c.mix.moved(c.frag) > mixMoved {
			c.frag = nil
		}
	}
}

// fragmenter is the valuation by the current mix. It is renewed when the mix has grown by a quarter and
// has changed (mixMoved), which makes everything that is known of nodes old.
func (c *Cluster) fragmenter() *fragmenter {
	if c.frag != nil {
		return c.frag
	}
	gpus := map[string]int{}
	for _, n := range c.nodes {
		for i := range n.GPUs {
			gpus[n.GPUs[i].Name]++
		}
		c.touch(n)
	}
	c.mix.fresh = 0
	c.frag = newFragmenter(c.mix.all(), gpus)
	return c.frag
}

// touch makes what is known of the node old. Versions are never used twice, so slots may be.
func (c *Cluster) touch(n *node) {
	c.counter++
	n.views, c.versions[n.slot] = nil, c.counter
	if !n.present {
		c.versions[n.slot] = 0
	}
}

// SetNode adds a node or replaces what is known of it. What is free in n is so before the pods held here
// are counted; they stay, and are found again by UUID. GPUs beyond MaxGPUs are not used.
func (c *Cluster) SetNode(n Node) {
	to := c.node(n.Name)
	to.Node, to.present = n, true
	to.GPUs = slices.Clone(n.GPUs[:min(len(n.GPUs), MaxGPUs)])
	to.at = make(map[string]int, len(to.GPUs))
	for i := range to.GPUs {
		to.at[to.GPUs[i].UUID] = i
	}
	for _, h := range to.held {
		to.count(h, 1)
	}
	c.touch(to)
}

// RemoveNode forgets a node but not the pods that are held on it.
func (c *Cluster) RemoveNode(name string) {
	if n := c.nodes[name]; n != nil {
		n.Node, n.present, n.at = Node{Name: name}, false, nil
		c.touch(n)
		c.drop(n)
	}
}

// drop forgets a node of which nothing is left.
func (c *Cluster) drop(n *node) {
	if !n.present && len(n.held) == 0 {
		delete(c.nodes, n.Name)
		c.free, c.finder, c.bySlot[n.slot] = append(c.free, n.slot), nil, nil
		i, _ := c.find(n.Name)
		c.order = slices.Delete(c.order, i, i+1)
	}
}

func (c *Cluster) node(name string) *node {
	n := c.nodes[name]
	if n == nil {
		n = &node{Node: Node{Name: name}, held: map[string]*hold{}, slot: c.slots}
		if last := len(c.free) - 1; last >= 0 {
			n.slot, c.free = c.free[last], c.free[:last]
		} else {
			c.slots++
			c.versions, c.bySlot = append(c.versions, 0), append(c.bySlot, nil)
		}
		c.nodes[name], c.bySlot[n.slot], c.finder = n, n, nil
		i, _ := c.find(name)
		c.order = slices.Insert(c.order, i, n)
	}
	return n
}

func (c *Cluster) find(name string) (int, bool) {
	return slices.BinarySearchFunc(c.order, name, func(n *node, name string) int { return strings.Compare(n.Name, name) })
}

// Node returns a node with what is free now. The GPUs are a copy.
func (c *Cluster) Node(name string) (Node, bool) {
	n := c.nodes[name]
	if n == nil || !n.present {
		return Node{}, false
	}
	out := n.Node
	out.GPUs = slices.Clone(n.GPUs)
	return out, true
}

// Nodes are the names of all nodes that were set, in order.
func (c *Cluster) Nodes() []string {
	var out []string
	for _, n := range c.order {
		if n.present {
			out = append(out, n.Name)
		}
	}
	return out
}

// Reserve holds an assignment for a pod, by a key of the caller's. It replaces what that key held, unless it
// fails: the node is not known or has no longer free what is asked.
func (c *Cluster) Reserve(key, name string, pod *Pod, a Assignment) error {
	n := c.nodes[name]
	if n == nil || !n.present {
		return fmt.Errorf("node %s: %s", name, noInventory)
	}
	h := &hold{node: name, gpus: a.Held, cpu: pod.CPU, ram: pod.RAM}
	old := c.holds[key]
	c.Release(key)
	if err := c.has(n, h); err != nil {
		if old != nil {
			c.record(key, old)
		}
		return err
	}
	c.record(key, h)
	return nil
}

func (c *Cluster) has(n *node, h *hold) error {
	for _, held := range h.gpus {
		i, ok := n.at[held.UUID]
		if !ok {
			return fmt.Errorf("node %s: gpu %s is gone", n.Name, held.UUID)
		}
		switch g := &n.GPUs[i]; {
		case g.Excluded != "":
			return fmt.Errorf("node %s: %s: %s", n.Name, g.Label(), g.Excluded)
		case held.Cores > max(g.FreeCores, 0) || int64(held.Memory) > max(g.FreeMemory, 0):
			return fmt.Errorf("node %s: %s", n.Name, describe(*g, Request{Cores: held.Cores, Memory: held.Memory}))
		}
	}
	if c.config.CheckHost && n.HostKnown && (h.cpu > n.CPU || h.ram > n.RAM) {
		return fmt.Errorf("node %s: %s", n.Name, hostShort)
	}
	return nil
}

// Record holds for a pod what it has, as a fact: more than there is, and on nodes and GPUs that are not
// known (yet). It replaces what the key held.
func (c *Cluster) Record(key, name string, pod *Pod, held []Held) {
	c.Release(key)
	c.record(key, &hold{node: name, gpus: held, cpu: pod.CPU, ram: pod.RAM})
}

func (c *Cluster) record(key string, h *hold) {
	n := c.node(h.node)
	c.holds[key], n.held[key] = h, h
	n.count(h, 1)
	c.touch(n)
}

// Release lets go of what a key holds. False: it holds nothing.
func (c *Cluster) Release(key string) bool {
	h := c.holds[key]
	if h == nil {
		return false
	}
	n := c.nodes[h.node]
	n.count(h, -1)
	delete(c.holds, key)
	delete(n.held, key)
	c.touch(n)
	c.drop(n)
	return true
}

// Holds returns what a key holds, and where.
func (c *Cluster) Holds(key string) (node string, held []Held, ok bool) {
	if h := c.holds[key]; h != nil {
		return h.node, h.gpus, true
	}
	return "", nil, false
}

// count takes a hold off what is free, or with sign -1 puts it back.
func (n *node) count(h *hold, sign int64) {
	for _, held := range h.gpus {
		if i, ok := n.at[held.UUID]; ok {
			n.GPUs[i].FreeCores -= int(sign) * held.Cores
			n.GPUs[i].FreeMemory -= sign * int64(held.Memory)
		}
	}
	n.CPU -= sign * h.cpu
	n.RAM -= sign * h.ram
}

// Place puts a pod on one node, as Decide would. The error is a *NoFit with a line for each GPU.
func (c *Cluster) Place(pod *Pod, name string) (Assignment, error) {
	if err := pod.Validate(); err != nil {
		return Assignment{}, err
	}
	n := c.nodes[name]
	switch {
	case n == nil || !n.present:
		return Assignment{}, &NoFit{Short: noInventory, Lines: []string{fmt.Sprintf("node %s: %s", name, noInventory)}}
	case c.hostShort(n, pod):
		return Assignment{}, &NoFit{Short: hostShort, Lines: []string{fmt.Sprintf("CPU %dm asked, %dm free; memory %v asked, %v free",
			pod.CPU, n.CPU, quantity.Bytes(pod.RAM), quantity.Bytes(max(n.RAM, 0)))}}
	}
	s := newSearch(&n.Node, pod, policyOr(pod.Policy, c.config.Policy), c.fragmenter())
	if !s.solve() {
		return Assignment{}, s.noFit()
	}
	return s.assignment(), nil
}

func (c *Cluster) hostShort(n *node, pod *Pod) bool {
	return c.config.CheckHost && n.HostKnown && (pod.CPU > n.CPU || pod.RAM > n.RAM)
}

// Decide ranks the candidates for a pod, nil for all nodes, and chooses GPUs on the best. The error is
// that of Pod.Validate; that no node fits is none.
func (c *Cluster) Decide(pod *Pod, candidates []string) (*Decision, error) {
	if err := pod.Validate(); err != nil {
		return nil, err
	}
	c.fragmenter()
	k := c.kind(pod)
	b := better{Decision: &c.last, k: k}
	b.Best, b.Assignment = "", Assignment{}
	if c.finder == nil {
		c.finder, c.found = newFinder(c.bySlot), c.found[:0]
	}
	if candidates == nil {
		c.found = c.found[:0]
		for _, n := range c.order {
			c.found = append(c.found, int32(n.slot))
		}
	} else {
		c.found = c.finder.find(candidates, c.found)
	}
	b.given, b.names = candidates, c.finder.names
	b.Candidates = slices.Grow(b.Candidates[:0], len(c.found))[:len(c.found)]
	for i, slot := range c.found {
		c.weigh(&b, pod, slot, i)
	}
	b.reasons = k.reasons
	return b.Decision, c.finish(&b, pod)
}

// better is a decision while candidates are looked at.
type better struct {
	*Decision
	k   *kind
	top *node
	key key
	// at is the position of top among the candidates.
	at int
}

// mostFirst bounds key.first where scores are made of it; its differences from the best count up to 9.
const mostFirst = 1 << 30

// weigh judges the candidate at a position by its slot; -1: not known.
func (c *Cluster) weigh(b *better, pod *Pod, slot int32, at int) {
	if slot < 0 || c.versions[slot] == 0 {
		b.Candidates[at] = Candidate{-1, slot, unknown}
		return
	}
	e := &b.k.seen[slot]
	if e.version != c.versions[slot] {
		c.look(b.k, pod, c.bySlot[slot], e)
	}
	if e.why > 0 {
		b.Candidates[at] = Candidate{-1, slot, e.why}
		return
	}
	b.Candidates[at] = Candidate{int32(min(max(e.key.first, -mostFirst), mostFirst)), slot, 0}
	if b.top == nil || e.key.less(b.key) || e.key == b.key && b.names[slot] < b.top.Name {
		b.top, b.key, b.at = c.bySlot[slot], e.key, at
	}
}

// finish places the pod on the best node and turns keys into scores.
func (c *Cluster) finish(b *better, pod *Pod) error {
	if b.top == nil {
		return nil
	}
	a, err := c.Place(pod, b.top.Name)
	if err != nil {
		return fmt.Errorf("node %s was found to fit: %w", b.top.Name, err)
	}
	b.Best, b.Assignment = b.top.Name, a
	first := int32(min(max(b.key.first, -mostFirst), mostFirst))
	for i := range b.Candidates {
		switch x := &b.Candidates[i]; {
		case x.why > 0:
		case i == b.at:
			x.Score = 10
		default:
			x.Score = max(0, 9-(x.Score-first))
		}
	}
	return nil
}
