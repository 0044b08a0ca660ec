package scheduler

import (
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/quota"
)

// Failure is a node that Filter refuses, and why, in one of few constant texts.
type Failure struct{ Node, Why string }

// Verdict is the answer of Filter. Its slices may be used again for the next.
type Verdict struct {
	Passed []string
	Failed []Failure
	// Unresolvable is why no node will ever do; then there is nothing in the other two.
	Unresolvable string
	// Event is what the pod's owner should read, if it is time to say so.
	Event string
	// Evict asks the caller to look for pods to evict: PlanEviction, or Unheeded, must follow.
	Evict bool
	// Await is for how long Filter is worth another call whenever something changes: room for this pod is about to be made, or
	// was, which the watch may not have shown yet. Event and Evict are to be heeded when that was in vain.
	Await time.Duration
	// Again, set by the caller, makes it another look for the same request.
	Again bool
	// evicts: Await is for victims to go. changes is the core's count when no node had room.
	evicts  bool
	changes uint64
}

// Filter tells which of the nodes have GPUs for the pod. In exact mode, and when one node is left, the GPUs
// are held from here on. A pod whose binding is on its way, or may have been done, passes on that node only.
func (c *Core) Filter(a Asked, names []string, v *Verdict) error {
	*v = Verdict{Passed: v.Passed[:0], Failed: v.Failed[:0], Again: v.Again}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !v.Again {
		c.stats.Filters++
	}
	p, err := c.asked(a)
	if err != nil {
		return err
	}
	if p.problem != nil {
		v.Unresolvable = p.problem.Error()
		c.event(p, "", v)
		return nil
	}
	if c.quotaWait {
		return errors.New("quotas were not read yet")
	}
	if len(p.spec.Containers) == 0 {
		v.Passed = append(v.Passed, names...)
		return nil
	}
	switch p.phase {
	case bound, assumed:
		return fmt.Errorf("pod %v is bound to node %s", p, p.node)
	case binding, unsure:
		return c.onlyOn(p, names, v)
	}
	c.refilter(p)
	if c.claimed(p, names, v) {
		return nil
	}
	d, err := c.decide(p, names, v)
	if err != nil {
		return err
	}
	c.explained.note(p, v, c.config.Now())
	if len(v.Passed) == 0 {
		if !v.Again {
			c.stats.FilterEmpty++
		}
		c.nothing(p, names, v)
		return nil
	}
	if c.config.Exact {
		v.Passed = append(v.Passed[:0], d.Best)
	}
	if len(v.Passed) == 1 {
		return c.hold(p, d, false)
	}
	c.recent.keep(p, d, v.Passed, c.changes)
	return nil
}

// ChangedSince tells whether a verdict that no node has room may be another one by now.
func (c *Core) ChangedSince(v *Verdict) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changes != v.changes
}

// recent is the last decision of Filter: what Prioritize, which follows with the same nodes, needs as long as
// nothing has changed.
type recent struct {
	pod        *pod
	changes    uint64
	names      []string
	scores     []int32
	best       string
	assignment placement.Assignment
}

func (r *recent) keep(p *pod, d *placement.Decision, passed []string, changes uint64) {
	r.pod, r.changes, r.best, r.assignment = p, changes, d.Best, d.Assignment
	r.names, r.scores = append(r.names[:0], passed...), r.scores[:0]
	for i := range d.Candidates {
		if score := d.Candidates[i].Score; score >= 0 {
			r.scores = append(r.scores, score)
		}
	}
	if len(r.scores) != len(r.names) {
		r.pod = nil
	}
}

// refilter lets a pod start anew.
func (c *Core) refilter(p *pod) {
	if p.phase == held {
		c.drop(p)
	}
	c.to(p, asked)
}

// onlyOn passes the node to which a pod may be bound already.
func (c *Core) onlyOn(p *pod, names []string, v *Verdict) error {
	for _, name := range names {
		if name == p.node {
			v.Passed = append(v.Passed, name)
			return nil
		}
	}
	return fmt.Errorf("pod %v: it is not known yet whether it was bound to node %s", p, p.node)
}

// decide fills in who passes.
func (c *Core) decide(p *pod, names []string, v *Verdict) (*placement.Decision, error) {
	d, err := c.cluster.Decide(&p.spec, given(names))
	if err != nil {
		return nil, err
	}
	limit, limited := c.quotas[p.namespace]
	refused := map[quota.Place]string{}
	best := d.Best
	for i := range d.Candidates {
		name, why := d.Node(i), d.Why(i)
		if why == "" && (limited || c.unplaced > 0) {
			why = c.refuse(p, name, &limit, limited, refused)
		}
		if why == "" {
			v.Passed = append(v.Passed, name)
			continue
		}
		d.Candidates[i].Score = -1
		v.Failed = append(v.Failed, Failure{name, why})
		if name == best {
			best = ""
		}
	}
	if best == "" && len(v.Passed) > 0 {
		// The best was refused for another reason than its GPUs: ask again among the others.
		if d, err = c.cluster.Decide(&p.spec, v.Passed); err != nil {
			return nil, err
		}
	}
	if spec := c.specOn(p, d.Best); spec != &p.spec && len(v.Passed) > 0 {
		d.Assignment, err = c.cluster.Place(spec, d.Best)
	}
	return d, err
}

// given are names that were given: none are not all nodes.
func given(names []string) []string {
	if names == nil {
		return []string{}
	}
	return names
}

// unknownPod is why nothing is put on a node that has a pod whose GPUs are not known.
const unknownPod = "holds a pod whose GPUs are not known"

// refuse tells why a node that has GPUs for a pod must not have it; empty: it may. refused keeps what was found
// out about kinds of GPUs. Of a node with GPUs of several kinds those count that are not refused.
func (c *Core) refuse(p *pod, name string, limit *quota.Namespace, limited bool, refused map[quota.Place]string) string {
	n := c.nodes[name]
	if n == nil {
		return ""
	}
	if n.unplaced > 0 {
		return unknownPod
	}
	if !limited {
		return ""
	}
	last, first, some := quota.Place{}, "", false
	for i := range n.gpus {
		kind := quota.Place{Label: n.model, Pool: n.pool, Model: n.gpus[i].Name}
		if i > 0 && kind == last {
			continue
		}
		last = kind
		why, known := refused[kind]
		if !known {
			why, _ = limit.Refuse(c.used[p.namespace], kind, p.asks(&n.gpus[i]))
			refused[kind] = why
		}
		if why == "" {
			some = true
		} else if first == "" {
			first = why
		}
	}
	if first == "" {
		return ""
	}
	if some {
		if _, err := c.cluster.Place(c.specOn(p, name), name); err == nil {
			return ""
		}
	}
	c.stats.QuotaRefused++
	return first
}

// specOn is what a pod asks of a node: where GPUs are of several kinds, those that its namespace's quota refuses are
// left out.
func (c *Core) specOn(p *pod, name string) *placement.Pod {
	limit, limited := c.quotas[p.namespace]
	n := c.nodes[name]
	if !limited || n == nil || !slices.ContainsFunc(n.gpus, func(g placement.GPU) bool { return g.Name != n.gpus[0].Name }) {
		return &p.spec
	}
	var not []string
	for i := range n.gpus {
		if why, _ := limit.Refuse(c.used[p.namespace], n.place(n.gpus[i].UUID), p.asks(&n.gpus[i])); why != "" {
			not = append(not, n.gpus[i].UUID)
		}
	}
	if len(not) == 0 {
		return &p.spec
	}
	spec := p.spec
	spec.Containers = slices.Clone(spec.Containers)
	for i := range spec.Containers {
		k := &spec.Containers[i].Constraints
		k.NotUUIDs = slices.Concat(k.NotUUIDs, not)
	}
	return &spec
}

// asks is what a pod takes of GPUs like this one, all together.
func (p *pod) asks(like *placement.GPU) quota.Amount {
	var run, most quota.Amount
	for i := range p.spec.Containers {
		k := &p.spec.Containers[i]
		memory := k.Request.Memory
		if memory == 0 && k.Request.Cores == placement.CoresWhole {
			memory = like.Memory
		}
		a := quota.Amount{Cores: int64(k.Request.Cores * k.Request.Count), Memory: int64(memory) * int64(k.Request.Count)}
		if k.Phase == placement.Init {
			most = quota.Amount{Cores: max(most.Cores, a.Cores), Memory: max(most.Memory, a.Memory)}
		} else {
			run = quota.Amount{Cores: run.Cores + a.Cores, Memory: run.Memory + a.Memory}
		}
	}
	return quota.Amount{Cores: max(run.Cores, most.Cores), Memory: max(run.Memory, most.Memory)}
}

// hold reserves what was decided. hint: another pod's Bind may take it.
func (c *Core) hold(p *pod, d *placement.Decision, hint bool) error {
	if err := c.take(p, d.Best, d.Assignment); err != nil {
		return fmt.Errorf("pod %v: %w", p, err)
	}
	p.hint = hint
	c.to(p, held)
	c.stats.Holds++
	return nil
}

// Scores of the extender's protocol. The best node is as far above the second as the others are spread, so
// that kube-scheduler's own scores, which are added, do not overturn the choice by accident, while what a pod
// prefers can (docs/scheduler.md has the sums).
const (
	scoreBest   = 10
	scoreOthers = 4
	scoreScale  = 9 // of placement.Candidate.Score, for all but the best
)

// Score is a node's rank, 0 to 10.
type Score struct {
	Node  string
	Score int
}

// Prioritize ranks nodes that passed Filter and holds GPUs on the best one: a hint, since kube-scheduler adds
// its own scores.
func (c *Core) Prioritize(a Asked, names []string, out []Score) ([]Score, error) {
	out = out[:0]
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stats.Prioritized++
	p, err := c.asked(a)
	if err != nil {
		return out, err
	}
	if p.phase != asked && p.phase != held || p.problem != nil || len(p.spec.Containers) == 0 {
		for _, name := range names {
			s := Score{name, 0}
			if name == p.node {
				s.Score = scoreBest
			}
			out = append(out, s)
		}
		return out, nil
	}
	c.refilter(p)
	r := &c.recent
	if r.pod != p || r.changes != c.changes || !slices.Equal(r.names, names) {
		var v Verdict
		d, err := c.decide(p, names, &v)
		if err != nil {
			return out, err
		}
		if len(v.Passed) == 0 {
			for _, name := range names {
				out = append(out, Score{name, 0})
			}
			return out, nil
		}
		r.keep(p, d, v.Passed, c.changes)
		if len(v.Passed) < len(names) {
			return c.scored(p, names, v.Passed, out)
		}
	}
	return c.scored(p, names, nil, out)
}

// scored writes the recent decision as scores and holds the best. passed, if not nil, are the names that it is
// about; the others have no room any more.
func (c *Core) scored(p *pod, names, passed []string, out []Score) ([]Score, error) {
	r := &c.recent
	next := 0
	for _, name := range names {
		s := Score{name, 0}
		if passed == nil || next < len(passed) && passed[next] == name {
			s.Score = score(r.scores[next], name == r.best)
			next++
		}
		out = append(out, s)
	}
	return out, c.hold(p, &placement.Decision{Best: r.best, Assignment: r.assignment}, true)
}

func score(placed int32, best bool) int {
	switch {
	case best:
		return scoreBest
	case placed > 0:
		return min(int(placed), scoreScale) * scoreOthers / scoreScale
	}
	return 0
}

// PrioritizeOthers ranks nodes for a pod without GPUs, so that it takes no CPU and memory that pods with GPUs
// will need: first nodes that have no GPUs, then GPU nodes by the policy. Pods with GPUs get no scores, which
// stand for zeros: Prioritize ranks for them.
func (c *Core) PrioritizeOthers(a Asked, names []string, out []Score) ([]Score, error) {
	out = out[:0]
	c.mu.Lock()
	defer c.mu.Unlock()
	var object *corev1.Pod
	gpus := c.pods[a.UID] != nil // then it need not be parsed
	if !gpus {
		var err error
		if object, err = a.Object(); err != nil {
			return out, err
		}
		gpus = podspec.Wants(object, c.config.Names)
	}
	if gpus {
		return out, nil
	}
	spec := placement.Pod{}
	spec.CPU, spec.RAM = hostRequests(object)
	d, err := c.cluster.Decide(&spec, given(names))
	if err != nil {
		return out, err
	}
	plain := 0
	for i := range d.Candidates {
		name := d.Node(i)
		s := Score{name, score(d.Candidates[i].Score, name == d.Best)}
		if n := c.nodes[name]; n == nil || !n.present || len(n.gpus) == 0 {
			s.Score = scoreBest
			plain++
		}
		out = append(out, s)
	}
	if plain > 0 {
		for i := range out {
			if n := c.nodes[d.Best]; out[i].Node == d.Best && n != nil && len(n.gpus) > 0 {
				out[i].Score = scoreOthers
			}
		}
	}
	return out, nil
}

// Binding is what to send to the API server.
type Binding struct {
	UID                   types.UID
	Namespace, Name, Node string
	Annotations           map[string]string
	// Done is true of a pod that is bound there already: nothing needs to be sent.
	Done    bool
	attempt int
}

// Bind decides on which GPUs of the node the pod goes, for good: those that are held for it there, others if it
// holds none, at need those that other pods hold as a hint. Bound or BindFailed must follow, unless Done.
// object may be nil; ErrUnknownPod asks for it.
func (c *Core) Bind(uid types.UID, node string, object *corev1.Pod) (Binding, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.pods[uid]
	if p == nil {
		if object == nil {
			return Binding{}, ErrUnknownPod
		}
		var err error
		if p, err = c.asked(AskedPod(object)); err != nil {
			return Binding{}, err
		}
	}
	switch p.phase {
	case bound, assumed:
		if p.node != node {
			return Binding{}, fmt.Errorf("pod %v is bound to node %s, not %s", p, p.node, node)
		}
		return Binding{UID: uid, Namespace: p.namespace, Name: p.name, Node: node, Done: true}, nil
	case binding:
		return Binding{}, fmt.Errorf("pod %v: a binding to node %s is on its way", p, p.node)
	case unsure:
		if p.node != node {
			return Binding{}, fmt.Errorf("pod %v: it is not known yet whether it was bound to node %s", p, p.node)
		}
	default:
		if err := c.firm(p, node); err != nil {
			c.stats.BindFailed++
			return Binding{}, err
		}
	}
	c.unclaim(p)
	p.hint = false
	p.attempt++
	c.to(p, binding)
	c.stats.Binds++
	return Binding{UID: uid, Namespace: p.namespace, Name: p.name, Node: node, Annotations: c.annotations(p), attempt: p.attempt}, nil
}

// firm makes sure that a pod holds GPUs on a node.
func (c *Core) firm(p *pod, name string) error {
	if p.problem != nil {
		return p.problem
	}
	if p.phase == held {
		if p.node == name && c.take(p, name, placement.Assignment{Containers: p.containers, Held: p.held}) == nil {
			c.stats.HoldsKept++
			return nil
		}
		c.stats.HoldsMismatched++
		c.drop(p)
		c.to(p, asked)
	}
	if limit, limited := c.quotas[p.namespace]; limited || c.unplaced > 0 {
		if why := c.refuse(p, name, &limit, limited, map[quota.Place]string{}); why != "" {
			return fmt.Errorf("node %s: %s", name, why)
		}
	}
	a, err := c.cluster.Place(c.specOn(p, name), name)
	if err != nil {
		var none *placement.NoFit
		if !errors.As(err, &none) {
			return err
		}
		return c.displace(p, name, none)
	}
	return c.take(p, name, a)
}

// displace takes GPUs that other pods hold on the node as a hint. Those get others there if there are any.
func (c *Core) displace(p *pod, name string, none *placement.NoFit) error {
	c.stats.BindConflicts++
	var hints []*pod
	for _, q := range sorted(c.nodeOf(name).pods) {
		if q.phase == held && q.hint {
			hints = append(hints, q)
		}
	}
	before := make([]placement.Assignment, len(hints))
	for i, q := range hints {
		before[i] = placement.Assignment{Containers: q.containers, Held: q.held}
		c.cluster.Release(string(q.uid))
	}
	a, err := c.cluster.Place(c.specOn(p, name), name)
	if err == nil {
		err = c.take(p, name, a)
	}
	for i, q := range hints {
		if c.cluster.Reserve(string(q.uid), name, &q.spec, before[i]) == nil {
			continue
		}
		c.stats.HoldsTaken++
		other, placeErr := c.cluster.Place(c.specOn(q, name), name)
		if placeErr != nil || c.take(q, name, other) != nil {
			c.drop(q)
			c.to(q, asked)
		}
	}
	if err != nil {
		return fmt.Errorf("node %s: %s", name, none.Short)
	}
	return nil
}

// noGPUs is podspec.GPUs of a pod that has its GPUs by index only.
const noGPUs = "{}"

// annotations are written on the pod with its binding.
func (c *Core) annotations(p *pod) map[string]string {
	n := c.nodeOf(p.node)
	index := make(map[string]int, len(n.gpus))
	for i := range n.gpus {
		index[n.gpus[i].UUID] = n.gpus[i].Index
	}
	places, indexes := map[string][]string{}, map[string][]int{}
	for i := range p.spec.Containers {
		name := p.spec.Containers[i].Name
		places[name] = p.containers[i]
		for _, uuid := range p.containers[i] {
			indexes[name] = append(indexes[name], index[uuid])
		}
	}
	stub := &corev1.Pod{Spec: corev1.PodSpec{Containers: make([]corev1.Container, len(p.names))}}
	for i, name := range p.names {
		stub.Spec.Containers[i].Name = name
	}
	out := podspec.ReservationAnnotations(stub, c.config.Names, p.node, c.config.Now(), places, indexes)
	if n.divided {
		// The UUIDs are not the node's. Whatever the pod's author wrote there must not stand for them.
		out[podspec.GPUs] = noGPUs
	}
	return out
}

// Bound tells that the API server took a binding.
func (c *Core) Bound(b Binding) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.pods[b.UID]; p != nil && p.phase == binding && p.attempt == b.attempt {
		c.to(p, assumed)
	}
}

// Failure kinds of a binding.
type BindFailure int

const (
	// Refused: the pod was not bound by this binding and will not be. It can be scheduled anew.
	Refused BindFailure = iota
	// NoPod: there is no pod of this UID any more.
	NoPod
	// NoAnswer: it may have been bound, now or until BindTimeout is over.
	NoAnswer
)

// BindFailed tells that a binding was not taken, or that nobody knows.
func (c *Core) BindFailed(b Binding, how BindFailure) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stats.BindFailed++
	p := c.pods[b.UID]
	if p == nil || p.phase != binding || p.attempt != b.attempt {
		return
	}
	switch how {
	case NoPod:
		c.forget(p)
	case NoAnswer:
		c.stats.BindUnsure++
		p.doubt = true
		c.to(p, unsure)
	default:
		if p.doubt {
			c.to(p, unsure)
			return
		}
		c.drop(p)
		c.to(p, asked)
	}
}
