package scheduler

import (
	"errors"
	"fmt"
	"maps"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/quota"
)

// read fills in what a pod asks.
func (p *pod) read(object *corev1.Pod, names podspec.Names) {
	p.namespace, p.name, p.version = object.Namespace, object.Name, object.ResourceVersion
	p.ask, p.problem = podspec.Parse(object, names)
	p.spec = placementPod(object, &p.ask)
	if p.problem == nil {
		p.problem = p.spec.Validate()
	}
	if p.problem != nil {
		// It is said once for each node, and may quote an annotation.
		p.problem = errors.New(podspec.Cut(p.problem.Error(), 500))
	}
	p.priority = 0
	if object.Spec.Priority != nil {
		p.priority = *object.Spec.Priority
	}
	p.mayEvict = object.Spec.PreemptionPolicy == nil || *object.Spec.PreemptionPolicy != corev1.PreemptNever
	if object.Status.StartTime != nil {
		p.started = object.Status.StartTime.Time
	}
	p.names = p.names[:0]
	for i := range object.Spec.Containers {
		p.names = append(p.names, object.Spec.Containers[i].Name)
	}
}

// placementPod is what a pod asks, in the placement's words.
func placementPod(object *corev1.Pod, ask *podspec.Ask) placement.Pod {
	out := ask.Placement()
	out.CPU, out.RAM = hostRequests(object)
	return out
}

// hostRequests are a pod's CPU in thousandths and memory in bytes, as kube-scheduler counts them: the larger
// of what runs together and of each init container with the sidecars before it, and the overhead.
func hostRequests(object *corev1.Pod) (cpu, ram int64) {
	var side, most [2]int64
	of := func(r corev1.ResourceList) [2]int64 { return [2]int64{r.Cpu().MilliValue(), r.Memory().Value()} }
	for i := range object.Spec.InitContainers {
		c := &object.Spec.InitContainers[i]
		r := of(c.Resources.Requests)
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			side[0], side[1] = side[0]+r[0], side[1]+r[1]
			r = [2]int64{}
		}
		most[0], most[1] = max(most[0], side[0]+r[0]), max(most[1], side[1]+r[1])
	}
	for i := range object.Spec.Containers {
		r := of(object.Spec.Containers[i].Resources.Requests)
		side[0], side[1] = side[0]+r[0], side[1]+r[1]
	}
	over := of(object.Spec.Overhead)
	return max(most[0], side[0]) + over[0], max(most[1], side[1]) + over[1]
}

// ended tells whether a pod's containers have ended for good.
func ended(object *corev1.Pod) bool {
	return object.Status.Phase == corev1.PodSucceeded || object.Status.Phase == corev1.PodFailed
}

// PodSeen tells what the watch shows of a pod that was added or has changed. Versions of one pod must come in
// their order, but may come late or be left out. PodGone must follow in the end.
func (c *Core) PodSeen(object *corev1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.podSeen(object, true)
}

// PodRead tells of a pod that was read otherwise. The watch may never show it, if it goes before.
func (c *Core) PodRead(object *corev1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.podSeen(object, false)
}

func (c *Core) podSeen(object *corev1.Pod, watched bool) {
	p := c.pods[object.UID]
	switch {
	case ended(object):
		c.gone(object.UID)
	case object.Spec.NodeName == "":
		// An old version of a pod that is being bound says nothing. One that is being deleted cannot be bound.
		switch {
		case p != nil && (p.phase == held || p.phase == asked) && object.DeletionTimestamp != nil:
			c.forget(p)
		case p != nil && watched:
			p.waits = true
		case p == nil && watched && object.DeletionTimestamp == nil && podspec.Wants(object, c.config.Names):
			// Filter will be asked: then it need not be parsed any more.
			p = &pod{uid: object.UID, waits: true, came: c.tick}
			c.pods[object.UID] = p
			c.to(p, asked)
			p.read(object, c.config.Names)
		}
	case p == nil && !podspec.Wants(object, c.config.Names):
		if watched {
			c.plainSeen(object)
		}
	default:
		c.boundSeen(p, object, watched)
	}
}

// PodGone tells that a pod was deleted.
func (c *Core) PodGone(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gone(uid)
}

func (c *Core) gone(uid types.UID) {
	if p := c.pods[uid]; p != nil {
		c.forget(p)
		c.lately[uid] = c.tick
	}
	if x, ok := c.plain[uid]; ok {
		delete(c.plain, uid)
		c.host(x.node, -x.cpu, -x.ram)
	}
}

// plainSeen notes a bound pod without GPUs.
func (c *Core) plainSeen(object *corev1.Pod) {
	if _, known := c.plain[object.UID]; known {
		return
	}
	x := plainPod{node: object.Spec.NodeName}
	x.cpu, x.ram = hostRequests(object)
	c.plain[object.UID] = x
	c.host(x.node, x.cpu, x.ram)
}

// boundSeen notes where a pod is.
func (c *Core) boundSeen(p *pod, object *corev1.Pod, watched bool) {
	if p == nil {
		p = &pod{uid: object.UID}
		c.pods[object.UID] = p
	}
	mark := c.mark(object)
	same := p.node == object.Spec.NodeName
	if p.phase == bound && same && p.mark == mark {
		return
	}
	to := bound
	if !watched && p.phase != bound {
		to = assumed
	}
	if p.version == "" {
		p.read(object, c.config.Names)
	}
	if p.problem != nil {
		// Annotations may have been spoilt since it was bound; it holds what it holds.
		err, bare := p.problem, *object
		bare.Annotations = nil
		p.read(&bare, c.config.Names)
		how := "by its resources alone"
		if p.problem != nil {
			how = "not at all"
		}
		c.config.Warn("a pod was bound that cannot be understood", "pod", object.Namespace+"/"+object.Name, "err", err, "counted", how)
	}
	c.learn(p)
	c.unclaim(p)
	p.mark, p.hint = mark, false
	p.raised = c.raised(p, object)
	r, ok, err := podspec.Reserved(object, c.config.Names)
	if err != nil {
		c.config.Warn("a pod's reservation is damaged", "pod", object.Namespace+"/"+object.Name, "err", err)
	}
	p.places = nil
	if ok {
		p.places = r.Places
	}
	if p.places == nil && same && len(p.held) > 0 {
		// Our own choice, of which the annotations were taken away.
		c.to(p, to)
		return
	}
	c.to(p, to)
	c.settle(p, object.Spec.NodeName)
}

// mark is the text of the annotations that say where a bound pod is and what it was given.
func (c *Core) mark(object *corev1.Pod) string {
	a := object.Annotations
	if len(a) == 0 {
		return ""
	}
	text := a[podspec.GPUs]
	ours := text != "" && text != noGPUs
	var b strings.Builder
	b.WriteString(text)
	for i := range object.Spec.Containers {
		if !ours {
			b.WriteString("|" + a[c.config.Names.GPUIndex(i)])
		}
		name := object.Spec.Containers[i].Name
		b.WriteString("|" + a[podspec.Cores+"."+name] + "|" + a[podspec.Memory+"."+name])
	}
	b.WriteString("|" + a[podspec.Cores] + "|" + a[podspec.Memory])
	return b.String()
}

// raised is what a pod's annotations give it above its request, for its quota.
func (c *Core) raised(p *pod, object *corev1.Pod) quota.Amount {
	var out quota.Amount
	if p.problem != nil {
		return out
	}
	changes, _ := podspec.Changes(object, c.config.Names) // a wrong one changes nothing
	for _, ch := range changes {
		if asks := p.ask.Find(ch.Container); asks != nil {
			n := int64(asks.Request.Count)
			out.Cores += n * int64(max(0, ch.Cores-asks.Request.Cores))
			if asks.Request.Memory > 0 && ch.Memory > asks.Request.Memory {
				out.Memory += n * int64(ch.Memory-asks.Request.Memory)
			}
		}
	}
	return out
}

// settle works out what a bound pod holds on its node, from its places and what is known of the node.
func (c *Core) settle(p *pod, name string) {
	n := c.nodeOf(name)
	view, _ := c.cluster.Node(name)
	containers, known := p.resolve(n)
	if p.problem != nil {
		c.record(p, name, nil, nil)
		return
	}
	if known || !n.present {
		c.record(p, name, containers, placement.HeldAt(&view, &p.spec, containers))
		return
	}
	// Bound by somebody who said nothing of GPUs, and the node has not confirmed it: a guess keeps them free.
	c.drop(p)
	if a, err := c.cluster.Place(&p.spec, name); err == nil {
		c.record(p, name, a.Containers, a.Held)
		p.guessed = true
		return
	}
	c.cluster.Record(string(p.uid), name, &p.spec, nil)
	p.unplaced, p.node = true, name
	c.count(p)
	c.config.Warn("a pod's GPUs are not known, and the node has no room for it: nothing new goes there", "pod", p.String(), "node", name)
}

// settleAll works out again what the bound pods of a node hold: guesses last, in a fixed order.
func (c *Core) settleAll(n *node) {
	var guesses []*pod
	for _, p := range sorted(n.pods) {
		switch {
		case p.phase < assumed || p.problem != nil:
		case p.places == nil && (p.guessed || p.unplaced || len(p.held) == 0):
			guesses = append(guesses, p)
			c.drop(p)
		case p.places != nil:
			c.settle(p, n.name)
		}
	}
	for _, p := range guesses {
		c.settle(p, n.name)
	}
}

// resolve turns places into UUIDs. False: some are missing.
func (p *pod) resolve(n *node) ([][]string, bool) {
	out := make([][]string, len(p.spec.Containers))
	all := true
	for i := range p.spec.Containers {
		at, ok := p.places[p.spec.Containers[i].Name]
		switch {
		case !ok && p.spec.Containers[i].Phase == placement.Init:
			// gpu-admission wrote nothing for init containers; they had the GPUs of the others.
		case !ok:
			all = false
		case len(at.UUIDs) > 0:
			out[i] = at.UUIDs
		default:
			for _, index := range at.Indexes {
				if uuid, ok := n.byIndex[index]; ok {
					out[i] = append(out[i], uuid)
				}
			}
		}
	}
	return out, all && len(p.places) > 0
}

// Check is a question to the API server: what became of this pod? The answer goes to Checked.
type Check struct {
	UID             types.UID
	Namespace, Name string
	attempt         int
}

// Tick tells that a second has passed. It returns what should be asked; each is asked again later if there
// is no answer.
func (c *Core) Tick() []Check {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tick++
	c.newsLeft, c.victimsLeft = awaitAllNews, awaitVictims
	maps.DeleteFunc(c.lately, func(_ types.UID, at uint64) bool { return c.tick-at > latelyTicks })
	var out []Check
	for _, p := range c.open {
		age := int(c.tick - p.since)
		switch p.phase {
		case asked, held:
			if p.claim != nil {
				if int(c.tick-p.claim.since) < claimTicks {
					continue
				}
				c.unclaim(p)
			}
			if age >= c.config.HoldTicks {
				if p.phase == held {
					c.stats.HoldsExpired++
				}
				if p.waits {
					c.drop(p)
					c.unclaim(p)
					c.to(p, asked)
				} else {
					c.forget(p)
				}
			}
		case unsure, assumed:
			wait := unsureTicks
			if p.phase == assumed {
				wait = confirmTicks
			}
			if age >= wait && (age-wait)%5 == 0 {
				out = append(out, Check{p.uid, p.namespace, p.name, p.attempt})
			}
		}
	}
	return out
}

// Checked is the answer to a Check that was asked after Tick gave it out: the pod as it is, nil if there is
// none of this UID.
func (c *Core) Checked(q Check, object *corev1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.pods[q.UID]
	if p == nil || p.attempt != q.attempt || p.phase != unsure && p.phase != assumed {
		return
	}
	switch {
	case object == nil || object.UID != q.UID || ended(object):
		c.forget(p)
	case object.Spec.NodeName != "":
		c.boundSeen(p, object, false)
	default:
		c.drop(p)
		c.to(p, asked)
	}
}

// Resync adds a list that was read at once, with what the watch has yet to show: what a leader starts from. Pods that
// the watch has shown stay though they are not in the list, since it may be ahead of it; it will show when they are gone.
func (c *Core) Resync(list []corev1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	seen := make(map[types.UID]bool, len(list))
	for i := range list {
		seen[list[i].UID] = true
		c.podSeen(&list[i], false)
	}
	for uid, p := range c.pods {
		if p.phase == assumed && !seen[uid] {
			c.forget(p)
		}
	}
	// Guesses were made while not all pods were known.
	for _, n := range c.nodes {
		if n.present {
			c.settleAll(n)
		}
	}
}

func (p *pod) String() string { return fmt.Sprintf("%s/%s", p.namespace, p.name) }
