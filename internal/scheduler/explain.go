package scheduler

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/quantity"
	"tranche.dev/tranche/internal/quota"
)

const (
	// explainedPods is of how many pods the last verdict is kept, explainedNodes how many nodes are told of.
	explainedPods  = 1000
	explainedNodes = 100
	// nearestNodes are named in an event.
	nearestNodes = 3
)

// explained keeps the last verdict on each of the last pods.
type explained struct {
	by   map[string]*note
	ring []string
	next int
}

type note struct {
	uid    types.UID
	at     time.Time
	spec   placement.Pod
	passed int
	failed map[string]int
}

func (e *explained) note(p *pod, v *Verdict, at time.Time) {
	if e.by == nil {
		e.by = map[string]*note{}
	}
	key := p.String()
	n := e.by[key]
	if n == nil {
		n = &note{}
		if len(e.ring) < explainedPods {
			e.ring = append(e.ring, key)
		} else {
			delete(e.by, e.ring[e.next])
			e.ring[e.next] = key
			e.next = (e.next + 1) % explainedPods
		}
		e.by[key] = n
	}
	*n = note{uid: p.uid, at: at, spec: p.spec, passed: len(v.Passed), failed: tally(v.Failed)}
}

// tally counts reasons.
func tally(failed []Failure) map[string]int {
	out := map[string]int{}
	for i := 0; i < len(failed); {
		j := i
		for j < len(failed) && failed[j].Why == failed[i].Why {
			j++
		}
		out[failed[i].Why] += j - i
		i = j
	}
	return out
}

// Explanation is what the scheduler knows of a pod.
type Explanation struct {
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	UID       types.UID `json:"uid"`
	// Phase is asked, held, binding, unsure, assumed or bound; empty: it is not in work.
	Phase string              `json:"phase,omitempty"`
	Node  string              `json:"node,omitempty"`
	GPUs  map[string][]string `json:"gpus,omitempty"`
	// Problem is why the pod cannot be understood.
	Problem string `json:"problem,omitempty"`
	// Filtered is when Filter was last asked; Passed counts the nodes that it passed and Failed the others, by
	// reason.
	Filtered time.Time      `json:"filtered,omitzero"`
	Passed   int            `json:"passed"`
	Failed   map[string]int `json:"failed,omitempty"`
	Quota    string         `json:"quota,omitempty"`
	// Nodes are as they are now: those that would do, then those that come nearest.
	Nodes []NodeReport `json:"nodes,omitempty"`
	// More nodes are not told of.
	More int `json:"more,omitempty"`
}

// NodeReport is one node's answer to a pod.
type NodeReport struct {
	Node string              `json:"node"`
	Fits bool                `json:"fits"`
	GPUs map[string][]string `json:"gpus,omitempty"`
	Why  []string            `json:"why,omitempty"`
}

// Explain tells what is known of a pod, by namespace and name. False: nothing.
func (c *Core) Explain(namespace, name string) (Explanation, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := Explanation{Namespace: namespace, Name: name}
	n := c.explained.by[namespace+"/"+name]
	var p *pod
	if n != nil {
		p = c.pods[n.uid]
	}
	for _, q := range c.pods {
		if p == nil && q.namespace == namespace && q.name == name {
			p = q
		}
	}
	if n == nil && p == nil {
		return e, false
	}
	spec := placement.Pod{}
	if n != nil {
		e.UID, e.Filtered, e.Passed, e.Failed, spec = n.uid, n.at, n.passed, n.failed, n.spec
	}
	if p != nil {
		e.UID, e.Phase, e.Node, spec = p.uid, p.phase.String(), p.node, p.spec
		e.GPUs = named(&p.spec, p.containers)
		if p.problem != nil {
			e.Problem = p.problem.Error()
			return e, true
		}
		e.Quota = c.overQuota(p)
		if p.phase >= binding {
			return e, true
		}
	}
	names := c.cluster.Nodes()
	near := c.nearest(&spec, names, explainedNodes)
	e.More = len(names) - len(near)
	for _, x := range near {
		r := NodeReport{Node: x.node}
		a, err := c.cluster.Place(&spec, x.node)
		var none *placement.NoFit
		switch {
		case err == nil:
			r.Fits, r.GPUs = true, named(&spec, a.Containers)
		case errors.As(err, &none):
			r.Why = append([]string{none.Short}, none.Lines...)
		default:
			r.Why = []string{err.Error()}
		}
		e.Nodes = append(e.Nodes, r)
	}
	slices.SortStableFunc(e.Nodes, func(a, b NodeReport) int {
		if a.Fits != b.Fits {
			return map[bool]int{true: -1, false: 1}[a.Fits]
		}
		return 0
	})
	return e, true
}

func named(spec *placement.Pod, containers [][]string) map[string][]string {
	out := map[string][]string{}
	for i := range containers {
		if i < len(spec.Containers) {
			out[spec.Containers[i].Name] = containers[i]
		}
	}
	return out
}

// overQuota has the figures of the quota that a pod is above, on any kind of GPU; empty: none.
func (c *Core) overQuota(p *pod) string {
	limit, limited := c.quotas[p.namespace]
	if !limited || p.phase >= binding {
		return ""
	}
	seen := map[quota.Place]bool{}
	var out []string
	for _, name := range c.cluster.Nodes() {
		n := c.nodes[name]
		for i := range n.gpus {
			place := n.place(n.gpus[i].UUID)
			if seen[place] {
				continue
			}
			seen[place] = true
			if _, detail := limit.Refuse(c.used[p.namespace], place, p.asks(&n.gpus[i])); detail != "" && !slices.Contains(out, detail) {
				out = append(out, detail)
			}
		}
	}
	slices.Sort(out)
	return strings.Join(out[:min(len(out), nearestNodes)], "; ")
}

// near is how near a node comes to a request, by its best GPU.
type near struct {
	node  string
	score float64
	text  string
}

// nearest are the nodes that have the largest part of what the pod's hardest container asks of a GPU.
func (c *Core) nearest(spec *placement.Pod, names []string, most int) []near {
	if len(spec.Containers) == 0 {
		return nil
	}
	hard := &spec.Containers[0]
	for i := range spec.Containers {
		if x := &spec.Containers[i]; x.Request.Cores*x.Request.Count > hard.Request.Cores*hard.Request.Count {
			hard = x
		}
	}
	var out []near
	for _, name := range names {
		n, ok := c.cluster.Node(name)
		if !ok {
			continue
		}
		best := near{node: name, score: -1, text: name + " (no GPU of the kind)"}
		for i := range n.GPUs {
			g := &n.GPUs[i]
			if g.Excluded != "" || !kind(hard.Constraints, g) {
				continue
			}
			memory := hard.Request.Memory
			if memory == 0 && hard.Request.Cores == placement.CoresWhole {
				memory = g.Memory
			}
			score := part(int64(g.FreeCores), int64(hard.Request.Cores)) + part(g.FreeMemory, int64(memory))
			if score > best.score {
				best.score = score
				best.text = fmt.Sprintf("%s (gpu %d: %d cores, %v free)", name, g.Index, max(g.FreeCores, 0), quantity.Bytes(max(g.FreeMemory, 0)))
			}
		}
		out = append(out, best)
	}
	slices.SortFunc(out, func(a, b near) int { return cmp.Or(cmp.Compare(b.score, a.score), strings.Compare(a.node, b.node)) })
	return out[:min(len(out), most)]
}

// part of what is asked that is there, at most 1.
func part(free, asks int64) float64 {
	if asks <= 0 || free >= asks {
		return 1
	}
	return float64(max(free, 0)) / float64(asks)
}

func kind(k placement.Constraints, g *placement.GPU) bool {
	is := func(model string) bool { return placement.ModelMatches(g.Name, model) }
	return (len(k.Models) == 0 || slices.ContainsFunc(k.Models, is)) && !slices.ContainsFunc(k.NotModels, is) &&
		(len(k.UUIDs) == 0 || slices.Contains(k.UUIDs, g.UUID)) && !slices.Contains(k.NotUUIDs, g.UUID)
}

const (
	// awaitVictims is how long, in a second, Filters wait for the watch to show that victims are gone.
	awaitVictims = 500 * time.Millisecond
	// awaitNews is how long a Filter waits to hear of what else made kube-scheduler ask, awaitAllNews all of them in a second.
	awaitNews    = 100 * time.Millisecond
	awaitAllNews = 2 * awaitNews
)

// Waited tells for how long a Filter waited, after a verdict with Await.
func (c *Core) Waited(victims bool, d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if victims {
		c.victimsLeft -= d
	} else {
		c.newsLeft -= d
	}
}

// nothing is for a pod that no node has room for.
func (c *Core) nothing(p *pod, names []string, v *Verdict) {
	v.changes = c.changes
	// Kube-scheduler may ask because it has seen, from a watch of its own, that there is room, which ours will show in a
	// moment. It would not try again then. So much waiting in a second keeps it going where many pods find no room.
	v.evicts = p.claim != nil || p.preempted > 0 && c.tick < p.preempted+preemptTicks
	switch {
	case v.Again:
	case v.evicts:
		v.Await = max(c.victimsLeft, 0)
	case p.refused || c.tick > p.came+1: // a pod that has just come is asked for because it has come
		v.Await = min(max(c.newsLeft, 0), c.newsMost)
	}
	p.refused = true
	if v.evicts {
		return
	}
	if v.Evict = c.config.Evict && p.mayEvict && !p.planning && c.mayHelp(p); v.Evict {
		p.planning = true
	}
	if p.eventText != "" && c.tick-p.eventTick < eventTicks {
		return
	}
	counts := tally(v.Failed)
	var parts []string
	for _, why := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%d %s", counts[why], why))
	}
	text := fmt.Sprintf("no room on GPUs: of %d nodes, %s", len(names), strings.Join(parts, ", "))
	if over := c.overQuota(p); over != "" {
		text += "; " + over
	}
	var nodes []string
	for _, x := range c.nearest(&p.spec, names, nearestNodes) {
		nodes = append(nodes, x.text)
	}
	if len(nodes) > 0 {
		text += "; nearest: " + strings.Join(nodes, ", ")
	}
	c.event(p, text, v)
}

// event lets a pod's owner know what is wrong, unless he knows.
func (c *Core) event(p *pod, text string, v *Verdict) {
	if p.problem != nil {
		text = p.problem.Error()
	}
	if p.eventText == text && c.tick-p.eventTick < eventTicks {
		return
	}
	p.eventText, p.eventTick, v.Event = text, c.tick, text
}
