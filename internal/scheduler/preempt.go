package scheduler

import (
	"cmp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"tranche.dev/tranche/internal/placement"
)

// Victims are pods on one node that would have to go.
type Victims struct {
	UIDs []types.UID
	// Violations of disruption budgets among them.
	Violations int64
}

// preemptTicks is how long victims of kube-scheduler's may take to go before ours are looked for.
const preemptTicks = 60

// Preempt completes what kube-scheduler, which counts totals only, would evict for a pod: on each node, more
// pods of lower priority until the pod has GPUs there. A node where that is not enough is left out.
// violations is API.Violations.
func (c *Core) Preempt(a Asked, offers map[string]Victims, violations func([]types.NamespacedName) int) (map[string]Victims, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stats.Preemptions++
	p, err := c.asked(a)
	if err != nil {
		return nil, err
	}
	out := make(map[string]Victims, len(offers))
	if p.problem != nil {
		return out, nil
	}
	if len(p.spec.Containers) == 0 {
		return offers, nil
	}
	for name, offer := range offers {
		more, ok := c.victims(p, name, offer.UIDs)
		if !ok || len(offer.UIDs) == 0 {
			continue
		}
		v := Victims{UIDs: slices.Clone(offer.UIDs), Violations: offer.Violations}
		var all []types.NamespacedName
		for _, uid := range offer.UIDs {
			if q := c.pods[uid]; q != nil { // what others than GPU pods use up of a budget is not seen
				all = append(all, q.namespaced())
			}
		}
		offered := violations(all)
		for _, q := range more {
			v.UIDs, all = append(v.UIDs, q.uid), append(all, q.namespaced())
		}
		v.Violations += int64(violations(all) - offered)
		out[name] = v
	}
	if len(out) > 0 {
		p.preempted = max(c.tick, 1)
	}
	return out, nil
}

// victims are the fewest and least important pods that must go from a node, beside those given, for a pod to
// have room there.
func (c *Core) victims(p *pod, name string, given []types.UID) ([]*pod, bool) {
	view, ok := c.cluster.Node(name)
	n := c.nodes[name]
	if !ok || n.unplaced > 0 {
		return nil, false
	}
	// What holds nothing but a hint, and what the pod itself holds, is no obstacle.
	for _, q := range n.pods {
		if q == p || q.phase == held && q.hint || slices.Contains(given, q.uid) {
			release(&view, q.held)
		}
	}
	spec := c.specOn(p, name)
	fits := func() bool { _, err := placement.PlacePod(&view, spec); return err == nil }
	if fits() {
		return nil, true
	}
	var lower []*pod
	for _, q := range n.pods {
		if q.phase == bound && q.priority < p.priority && q != p && !slices.Contains(given, q.uid) && !n.awaited(q) {
			lower = append(lower, q)
		}
	}
	// The least important first; of those, the youngest.
	slices.SortFunc(lower, func(a, b *pod) int {
		return cmp.Or(cmp.Compare(a.priority, b.priority), b.started.Compare(a.started), strings.Compare(string(a.uid), string(b.uid)))
	})
	// One may be enough: the smallest that is.
	if one := c.oneVictim(lower, &view, fits); one != nil {
		return []*pod{one}, true
	}
	took := 0
	for ; took < len(lower); took++ {
		release(&view, lower[took].held)
		if fits() {
			break
		}
	}
	if took == len(lower) {
		return nil, false
	}
	// Who is not needed after all stays, the most important first.
	out := lower[:took+1]
	for i := len(out) - 1; i >= 0; i-- {
		holdAgain(&view, out[i].held)
		if fits() {
			out = slices.Delete(out, i, i+1)
		} else {
			release(&view, out[i].held)
		}
	}
	return out, true
}

// oneVictim is the least important single pod whose GPUs are enough, of equal ones the one that holds least.
func (c *Core) oneVictim(lower []*pod, view *placement.Node, fits func() bool) *pod {
	var best *pod
	for _, q := range lower {
		if best != nil && (q.priority > best.priority || total(q) >= total(best)) {
			continue
		}
		release(view, q.held)
		if fits() {
			best = q
		}
		holdAgain(view, q.held)
	}
	return best
}

func total(p *pod) int {
	sum := 0
	for _, h := range p.held {
		sum += h.Cores
	}
	return sum
}

func release(n *placement.Node, what []placement.Held)   { adjust(n, what, 1) }
func holdAgain(n *placement.Node, what []placement.Held) { adjust(n, what, -1) }

func adjust(n *placement.Node, what []placement.Held, sign int) {
	for _, h := range what {
		for i := range n.GPUs {
			if n.GPUs[i].UUID == h.UUID {
				n.GPUs[i].FreeCores += sign * h.Cores
				n.GPUs[i].FreeMemory += int64(sign) * int64(h.Memory)
			}
		}
	}
}

// claim is a node's GPUs that are being emptied for a pod.
type claim struct {
	pod   *pod
	node  string
	since uint64
	// waiting are the victims that are not gone; kept is what the others had, held under key.
	waiting map[types.UID]bool
	kept    []placement.Held
	key     string
}

// awaited tells whether a pod is being evicted for another one.
func (n *node) awaited(p *pod) bool {
	return slices.ContainsFunc(n.claims, func(k *claim) bool { return k.waiting[p.uid] })
}

// Eviction is what PlanEviction wants.
type Eviction struct {
	Node string
	Pods []types.NamespacedName
	UIDs []types.UID
}

// mayHelp tells whether there is a pod of lower priority at all.
func (c *Core) mayHelp(p *pod) bool {
	if p.claim != nil {
		return false
	}
	for _, q := range c.pods {
		if q.phase == bound && q.priority < p.priority {
			return true
		}
	}
	return false
}

// PlanEviction chooses a node among those given and pods there to evict for a pod that no node has room for
// though the totals would do: kube-scheduler, which counts totals, evicts nobody then. The pods' GPUs are
// kept for it as they become free, for claimTicks. violations is API.Violations.
// False: evicting nobody helps, or it is under way.
func (c *Core) PlanEviction(uid types.UID, names []string, violations func([]types.NamespacedName) int) (Eviction, bool) {
	defer c.planned(uid)
	at := ""
	var least [3]int
	for _, name := range names {
		measure, found, ok := c.tryEviction(uid, name, violations)
		if !ok {
			return Eviction{}, false
		}
		if found && (at == "" || slices.Compare(measure[:], least[:]) < 0) {
			at, least = name, measure
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	p, best, ok := c.evictFrom(uid, at, violations)
	if !ok || len(best) == 0 {
		return Eviction{}, false
	}
	e := Eviction{Node: at}
	p.claim = &claim{pod: p, node: at, since: c.tick, waiting: map[types.UID]bool{}, key: "claim/" + string(p.uid)}
	n := c.nodeOf(at)
	n.claims = append(n.claims, p.claim)
	for _, q := range best {
		p.claim.waiting[q.uid] = true
		e.UIDs = append(e.UIDs, q.uid)
	}
	e.Pods = namespacedAll(best)
	c.stats.Evictions++
	return e, true
}

// tryEviction measures what an eviction from one node would cost, if it helps there. It takes the lock for one node at a
// time: there may be thousands, and decisions wait for it. Not ok: nothing is to be planned any more.
func (c *Core) tryEviction(uid types.UID, name string, violations func([]types.NamespacedName) int) (measure [3]int, found, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, v, ok := c.evictFrom(uid, name, violations)
	if len(v) > 0 {
		measure, found = pain(v), true
	}
	return measure, found, ok
}

// evictFrom are the pods to evict from a node for a pod, none if that does not help. Not ok: nothing is to be planned any
// more.
func (c *Core) evictFrom(uid types.UID, name string, violations func([]types.NamespacedName) int) (p *pod, victims []*pod, ok bool) {
	p = c.pods[uid]
	if p == nil || p.phase != asked || p.problem != nil || p.claim != nil {
		return nil, nil, false
	}
	if c.nodes[name] == nil {
		return p, nil, true
	}
	v, fits := c.victims(p, name, nil)
	if fits && len(v) == 0 {
		return p, nil, false // there is room by now
	}
	if !fits || violations(namespacedAll(v)) > 0 {
		return p, nil, true
	}
	return p, v, true
}

func (p *pod) namespaced() types.NamespacedName {
	return types.NamespacedName{Namespace: p.namespace, Name: p.name}
}

func namespacedAll(pods []*pod) []types.NamespacedName {
	out := make([]types.NamespacedName, len(pods))
	for i, p := range pods {
		out[i] = p.namespaced()
	}
	return out
}

// pain measures victims: the highest priority among them, then how many, then how much they hold.
func pain(v []*pod) [3]int {
	m := [3]int{0: int(v[0].priority), 1: len(v)}
	for _, q := range v {
		m[0], m[2] = max(m[0], int(q.priority)), m[2]+total(q)
	}
	return m
}

// planned tells that nobody looks for pods to evict any more.
func (c *Core) planned(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.pods[uid]; p != nil {
		p.planning = false
	}
}

// Unheeded takes back what a verdict wanted: its event can be said again, its eviction planned again.
func (c *Core) Unheeded(uid types.UID, event, evict bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.pods[uid]
	if p == nil {
		return
	}
	if event {
		p.eventText = ""
	}
	if evict {
		p.planning = false
	}
}

// AbandonEviction gives a claim up: the evictions were not granted.
func (c *Core) AbandonEviction(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.pods[uid]; p != nil {
		p.planning = false
		c.unclaim(p)
	}
}

// unclaim ends a pod's claim. What it holds by then it keeps.
func (c *Core) unclaim(p *pod) {
	k := p.claim
	if k == nil {
		return
	}
	p.claim = nil
	c.changes++
	c.cluster.Release(k.key)
	n := c.nodeOf(k.node)
	n.claims = slices.DeleteFunc(n.claims, func(x *claim) bool { return x == k })
	c.forgetNode(n)
}

// freed gives what a pod that is gone had to the pod that evicted it: all at once if it is enough by now, else
// it is kept until the others are gone too.
func (c *Core) freed(name string, uid types.UID, had []placement.Held) {
	c.changes++
	n := c.nodes[name]
	if n == nil {
		return
	}
	for _, k := range slices.Clone(n.claims) {
		if !k.waiting[uid] {
			continue
		}
		delete(k.waiting, uid)
		c.cluster.Release(k.key)
		if a, err := c.cluster.Place(c.specOn(k.pod, name), name); err == nil && k.pod.phase == asked && c.take(k.pod, name, a) == nil {
			k.kept = nil
			c.to(k.pod, held)
			return
		}
		k.kept = append(k.kept, had...)
		c.cluster.Record(k.key, name, &placement.Pod{}, k.kept)
		return
	}
}

// claimed passes the node where pods were evicted for this one, if it is offered and there is room by now.
func (c *Core) claimed(p *pod, names []string, v *Verdict) bool {
	k := p.claim
	if k == nil {
		return false
	}
	if len(k.waiting) > 0 || !slices.Contains(names, k.node) {
		return false
	}
	c.unclaim(p)
	a, err := c.cluster.Place(c.specOn(p, k.node), k.node)
	if err != nil || c.take(p, k.node, a) != nil {
		return false
	}
	c.to(p, held)
	v.Passed = append(v.Passed, k.node)
	return true
}
