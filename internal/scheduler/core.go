package scheduler

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/quota"
)

// Ages in ticks, which are seconds. They count calls of Tick, so that no jump of a clock ends anything
// early.
const (
	holdTicksDefault = 30
	// unsureTicks is after how long it is asked what became of a binding without an answer. It is more than
	// BindTimeout, after which the API server has given the request up.
	unsureTicks = 20
	// confirmTicks is after how long it is asked why a bound pod was not seen by the watch.
	confirmTicks = 60
	// claimTicks is how long an evicted pod's GPU is kept for who evicted it, once it is free or before.
	claimTicks = 300
	// latelyTicks is how long a pod that is gone is known as such: kube-scheduler may still ask about it.
	latelyTicks = 60
	// eventTicks is how long no second event of the same kind is made for a pod.
	eventTicks = 300
)

// BindTimeout is the longest that the API server may work on a binding. A new leader must not start until an
// old one's bindings are past it.
const BindTimeout = 5 * time.Second

// CoreConfig is what a Core needs. Zero values mean defaults.
type CoreConfig struct {
	// Names of resources and annotations; default: the originals'.
	Names podspec.Names
	// Policy for pods that name none; default: least fragmentation.
	Policy placement.Policy
	// Exact returns one node from Filter instead of all that fit.
	Exact bool
	// HoldTicks is how long a GPU is held for a pod that is not bound; default 30.
	HoldTicks int
	// ModelLabel and PoolLabel are labels of nodes, for quotas; default: the originals'.
	ModelLabel, PoolLabel string
	// Evict lets PlanEviction answer, and Filter ask for it.
	Evict bool
	// Now stamps what is written on pods; default time.Now. Nothing else depends on it.
	Now func() time.Time
	// Warn is told about nodes and pods that are not as they should be; default: nobody.
	Warn func(text string, attrs ...any)
}

// Core decides. Safe for concurrent use.
type Core struct {
	config CoreConfig

	mu      sync.Mutex
	cluster *placement.Cluster
	nodes   map[string]*node
	pods    map[types.UID]*pod
	// open are the pods in a phase that does not last.
	open map[types.UID]*pod
	// lately has the pods that are gone, and since which tick.
	lately map[types.UID]uint64
	// plain are the bound pods without GPUs, for what they take of the host.
	plain map[types.UID]plainPod
	tick  uint64

	quotas quota.Quotas
	// quotaWait is true while quotas are wanted but were not read yet.
	quotaWait bool
	used      map[string]quota.Used
	// unplaced is the sum over all nodes.
	unplaced int

	// changes counts what may alter a decision.
	changes uint64
	// newsLeft and victimsLeft are how long Filters may still wait in this tick, newsMost how long one of them for news.
	newsLeft, victimsLeft, newsMost time.Duration
	recent                          recent
	explained                       explained
	stats                           Stats
}

// phase of a pod. What is held in each is let go only as said.
type phase uint8

const (
	// asked: Filter was or will be asked for it; it holds nothing. Forgotten when it is gone, and after HoldTicks
	// if the watch has not shown it.
	asked phase = iota
	// held: GPUs are reserved in here only. Let go after HoldTicks, at the next Filter and when it is gone.
	held
	// binding: a Binding is on its way. Ends with Bound or BindFailed.
	binding
	// unsure: a Binding had no answer. Let go when, after unsureTicks, the API server says it is not bound.
	unsure
	// assumed: the API server took the Binding, or said that the pod is bound, but the watch has not shown it and
	// may never. Let go when the pod has ended or is gone, which is asked after confirmTicks.
	assumed
	// bound: the watch has shown it on its node. Let go when it has ended or is gone.
	bound
)

func (p phase) String() string {
	return [...]string{"asked", "held", "binding", "unsure", "assumed", "bound"}[p]
}

// pod is one that asks for GPUs.
type pod struct {
	uid             types.UID
	namespace, name string
	// version is the resourceVersion that ask was read from.
	version string
	ask     podspec.Ask
	spec    placement.Pod
	// problem is why the pod cannot be understood.
	problem  error
	priority int32
	// mayEvict is false of pods that must not preempt; violates and started are for victims' order.
	mayEvict bool
	started  time.Time
	// preempted is the tick at which kube-scheduler chose victims for it, 0: it did not.
	preempted uint64
	names     []string // of all containers without init containers, in order

	learned bool // counted among the usual pods
	// waits is true of a pod that the watch has shown before it was bound: it is known until it is gone.
	waits bool
	phase phase
	since uint64
	// attempt counts bindings.
	attempt int
	// doubt is true while an earlier binding than the last one may still be done.
	doubt bool
	// hint is true of a hold that another pod's Bind may take.
	hint bool
	node string
	// places as annotated, for pods that were bound by others or before; containers are the GPUs' UUIDs.
	places     map[string]podspec.Place
	mark       string // the annotations that places and raised were read from
	containers [][]string
	held       []placement.Held
	// unplaced is true of a bound pod whose GPUs are not known and cannot be guessed.
	unplaced bool
	// guessed is true of a bound pod whose GPUs are a guess.
	guessed bool
	// raised is what annotations give above what the pod asks.
	raised quota.Amount
	counts []counted

	claim *claim
	// came is the tick in which the pod became known; refused: no node had room for it before.
	came    uint64
	refused bool
	// planning is true while somebody looks for pods to evict.
	planning  bool
	eventTick uint64
	eventText string
}

// counted is what was added to a namespace's use.
type counted struct {
	place  quota.Place
	amount quota.Amount
}

type plainPod struct {
	node     string
	cpu, ram int64
}

// Stats are counters since the start, and gauges.
type Stats struct {
	Filters, FilterEmpty, Prioritized, Holds, HoldsExpired, HoldsKept, HoldsMismatched, HoldsTaken uint64
	Binds, BindFailed, BindUnsure, BindConflicts, QuotaRefused, Preemptions, Evictions             uint64
	Nodes, NodesWithoutInventory, Pods, Unplaced                                                   int
	Phases                                                                                         map[string]int
}

// NewCore makes a core that knows nothing yet.
func NewCore(config CoreConfig) (*Core, error) {
	if config.Names == (podspec.Names{}) {
		config.Names = podspec.DefaultNames()
	}
	if err := config.Names.Validate(); err != nil {
		return nil, err
	}
	if config.HoldTicks == 0 {
		config.HoldTicks = holdTicksDefault
	}
	if config.HoldTicks < 1 || config.HoldTicks > 3600 {
		return nil, fmt.Errorf("holds of %d s: must be 1 to 3600", config.HoldTicks)
	}
	if config.ModelLabel == "" {
		config.ModelLabel = ModelLabelDefault
	}
	if config.PoolLabel == "" {
		config.PoolLabel = PoolLabelDefault
	}
	if config.Now == nil {
		config.Now = time.Now
	}
	if config.Warn == nil {
		config.Warn = func(string, ...any) {}
	}
	cluster, err := placement.NewCluster(placement.Config{Policy: config.Policy})
	if err != nil {
		return nil, err
	}
	return &Core{config: config, cluster: cluster, nodes: map[string]*node{}, pods: map[types.UID]*pod{}, open: map[types.UID]*pod{}, lately: map[types.UID]uint64{}, newsLeft: awaitAllNews, victimsLeft: awaitVictims, newsMost: awaitNews,
		plain: map[types.UID]plainPod{}, used: map[string]quota.Used{}}, nil
}

// The originals' node labels for quotas.
const (
	ModelLabelDefault = "gaia.tencent.com/gpu-model"
	PoolLabelDefault  = "gaia.tencent.com/gpu-pool"
)

// SetQuotas replaces the quotas. waiting refuses every pod until they are known, as gpu-admission did.
func (c *Core) SetQuotas(q quota.Quotas, waiting bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changes++
	c.quotas, c.quotaWait = q, waiting
}

// NoQuotas ends the wait for quotas: there are none. It changes nothing if they have come meanwhile.
func (c *Core) NoQuotas() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.quotaWait {
		c.changes++
		c.quotas, c.quotaWait = nil, false
	}
}

// Stats returns counters and gauges.
func (c *Core) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.stats
	s.Pods, s.Phases = len(c.pods), map[string]int{}
	for ph := asked; ph <= assumed; ph++ {
		s.Phases[ph.String()] = 0
	}
	for _, p := range c.open {
		s.Phases[p.phase.String()]++
	}
	s.Phases[bound.String()] = len(c.pods) - len(c.open)
	for _, n := range c.nodes {
		if !n.present {
			continue
		}
		s.Nodes++
		if n.divided {
			s.NodesWithoutInventory++
		}
		s.Unplaced += n.unplaced
	}
	return s
}

// sorted gives pods in an order that does not change.
func sorted(pods map[types.UID]*pod) []*pod {
	return slices.SortedFunc(maps.Values(pods), func(a, b *pod) int { return strings.Compare(string(a.uid), string(b.uid)) })
}

// to moves a pod to a phase.
func (c *Core) to(p *pod, ph phase) {
	p.phase, p.since = ph, c.tick
	if ph != binding && ph != unsure {
		p.doubt = false
	}
	if ph == bound {
		delete(c.open, p.uid)
	} else {
		c.open[p.uid] = p
	}
}

// take reserves GPUs for a pod: a choice that must fit what is free.
func (c *Core) take(p *pod, node string, a placement.Assignment) error {
	if err := c.cluster.Reserve(string(p.uid), node, &p.spec, a); err != nil {
		return err
	}
	c.uncount(p)
	p.node, p.containers, p.held = node, a.Containers, a.Held
	c.count(p)
	return nil
}

// record notes what a pod has, whatever else is there.
func (c *Core) record(p *pod, node string, containers [][]string, held []placement.Held) {
	c.cluster.Record(string(p.uid), node, &p.spec, held)
	c.uncount(p)
	p.node, p.containers, p.held = node, containers, held
	c.count(p)
}

// drop lets go of what a pod holds.
func (c *Core) drop(p *pod) {
	c.cluster.Release(string(p.uid))
	c.uncount(p)
	p.node, p.containers, p.held, p.hint = "", nil, nil, false
}

// count adds what a pod holds to its node and to its namespace's use.
func (c *Core) count(p *pod) {
	c.changes++
	n := c.nodeOf(p.node)
	n.pods[p.uid] = p
	if p.unplaced {
		n.unplaced++
		c.unplaced++
	}
	used := c.used[p.namespace]
	if used == nil {
		used = quota.Used{}
		c.used[p.namespace] = used
	}
	for i, h := range p.held {
		a := quota.Amount{Cores: int64(h.Cores), Memory: int64(h.Memory)}
		if i == 0 {
			a.Cores, a.Memory = a.Cores+p.raised.Cores, a.Memory+p.raised.Memory
		}
		place := n.place(h.UUID)
		used.Add(place, a)
		p.counts = append(p.counts, counted{place, a})
	}
}

func (c *Core) uncount(p *pod) {
	if p.node != "" {
		c.changes++
	}
	if n := c.nodes[p.node]; n != nil && p.node != "" {
		delete(n.pods, p.uid)
		if p.unplaced {
			n.unplaced--
			c.unplaced--
		}
		c.forgetNode(n)
	}
	p.unplaced, p.guessed = false, false
	used := c.used[p.namespace]
	for _, x := range p.counts {
		used.Add(x.place, quota.Amount{Cores: -x.amount.Cores, Memory: -x.amount.Memory})
	}
	if len(used) == 0 {
		delete(c.used, p.namespace)
	}
	p.counts = nil
}

// forget drops a pod that is gone, and gives what it had to who evicted it.
func (c *Core) forget(p *pod) {
	node, had := p.node, p.held
	c.drop(p)
	c.unclaim(p)
	delete(c.pods, p.uid)
	delete(c.open, p.uid)
	c.freed(node, p.uid, had)
}

// learn counts a pod among those that are usual here, once.
func (c *Core) learn(p *pod) {
	if p.learned || p.problem != nil || len(p.spec.Containers) == 0 {
		return
	}
	p.learned = true
	// One that waits is forgotten and asked for again; what was said to it is remembered.
	if n := c.explained.by[p.String()]; n == nil || n.uid != p.uid {
		c.changes++
		c.cluster.Learn(&p.spec)
	}
}

// errors that callers tell apart.
var (
	// ErrUnknownPod: the core has not heard of the pod; its object is needed.
	ErrUnknownPod = errors.New("pod is not known yet")
)

// Asked is the pod that a verb is about.
type Asked struct {
	UID types.UID
	// Version is its resourceVersion. The core parses Object only if it does not know this version.
	Version string
	Object  func() (*corev1.Pod, error)
}

// AskedPod wraps an object.
func AskedPod(p *corev1.Pod) Asked {
	return Asked{p.UID, p.ResourceVersion, func() (*corev1.Pod, error) { return p, nil }}
}

// asked returns what is known of a pod that a verb is about.
func (c *Core) asked(a Asked) (*pod, error) {
	if p := c.pods[a.UID]; p != nil && p.version == a.Version && a.Version != "" {
		c.learn(p)
		return p, nil
	}
	object, err := a.Object()
	if err != nil {
		return nil, err
	}
	if object.UID == "" || object.UID != a.UID {
		return nil, fmt.Errorf("pod %s/%s: no UID", object.Namespace, object.Name)
	}
	if _, gone := c.lately[a.UID]; gone {
		return nil, fmt.Errorf("pod %s/%s is gone", object.Namespace, object.Name)
	}
	p := c.pods[a.UID]
	if p != nil && (p.namespace != object.Namespace || p.name != object.Name) {
		return nil, fmt.Errorf("pod %s/%s has the UID of pod %v", object.Namespace, object.Name, p)
	}
	if p == nil {
		p = &pod{uid: a.UID, came: c.tick}
		c.pods[a.UID] = p
		c.to(p, asked)
	}
	// What is bound or on its way stays as it was asked.
	if p.phase == asked || p.phase == held {
		before := p.spec
		p.read(object, c.config.Names)
		if !reflect.DeepEqual(before, p.spec) {
			c.refilter(p)
		}
		c.learn(p)
	}
	return p, nil
}
