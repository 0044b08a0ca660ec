package scheduler

import (
	"fmt"
	"maps"
	"math/rand"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/quantity"
)

// world is the API server, the pods' life and kube-scheduler, for two replicas of the core of which one leads.
// What it holds is the truth: a pod is bound, with annotations, or is not.
type world struct {
	t      *testing.T
	r      *rand.Rand
	seed   int64
	config CoreConfig
	now    time.Time
	ticks  int

	nodes   map[string]*corev1.Node
	pods    map[types.UID]*corev1.Pod
	created int
	// evictions were planned.
	evictions int
	replicas  [2]*replica
	leader    int
	// flights are bindings that the API server has not done yet.
	flights []*flight
	// liar says of a binding without an answer that it was refused.
	liar bool
	fail func(string)
}

type replica struct {
	core *Core
	// queue of events that the watch has not brought; seen is what an informer has in its store.
	queue []event
	seen  map[types.UID]bool
}

type event struct {
	uid types.UID
	pod *corev1.Pod // nil: deleted
}

type flight struct {
	b      Binding
	from   *Core
	lands  int // tick at which the API server does it
	silent bool
	// cut is true when the answer was given up; it may land all the same.
	cut bool
}

func newWorld(t *testing.T, seed int64, config CoreConfig) *world {
	w := &world{t: t, r: rand.New(rand.NewSource(seed)), seed: seed, config: config, now: time.Unix(1e9, 0), nodes: map[string]*corev1.Node{}, pods: map[types.UID]*corev1.Pod{}}
	w.fail = func(text string) { t.Helper(); t.Fatal(text) }
	w.config.Now = func() time.Time { return w.now }
	for i := range 6 {
		name := fmt.Sprint("n", i)
		w.nodes[name] = testNode(name, 1+w.r.Intn(4), []string{"T4", "V100"}[i%2], 16*gib)
	}
	for i := range w.replicas {
		w.replicas[i] = w.fresh()
	}
	return w
}

func (w *world) fatal(format string, args ...any) {
	w.t.Helper()
	w.fail(fmt.Sprintf("seed %d, tick %d: %s", w.seed, w.ticks, fmt.Sprintf(format, args...)))
}

// fresh is a replica that has just listed everything.
func (w *world) fresh() *replica {
	c, err := NewCore(w.config)
	if err != nil {
		w.fatal("%v", err)
	}
	rep := &replica{core: c, seen: map[types.UID]bool{}}
	for _, name := range slices.Sorted(maps.Keys(w.nodes)) {
		c.NodeSeen(w.nodes[name])
	}
	for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
		c.PodSeen(w.pods[uid])
		rep.seen[uid] = true
	}
	return rep
}

func (w *world) tell(uid types.UID) {
	for _, rep := range w.replicas {
		e := event{uid: uid}
		if p := w.pods[uid]; p != nil {
			e.pod = p.DeepCopy()
		}
		rep.queue = append(rep.queue, e)
	}
}

// deliver brings up to n events to a replica, in order.
func (rep *replica) deliver(n int) {
	for ; n > 0 && len(rep.queue) > 0; n-- {
		e := rep.queue[0]
		rep.queue = rep.queue[1:]
		if e.pod != nil {
			rep.seen[e.uid] = true
			rep.core.PodSeen(e.pod)
		} else if rep.seen[e.uid] {
			delete(rep.seen, e.uid)
			rep.core.PodGone(e.uid)
		}
	}
}

// relist is what an informer does after a lost watch: it compares a list with its store. Pods that came and
// went in between are never heard of.
func (w *world) relist(rep *replica) {
	rep.queue = nil
	for _, uid := range slices.Sorted(maps.Keys(rep.seen)) {
		if w.pods[uid] == nil {
			rep.queue = append(rep.queue, event{uid: uid})
		}
	}
	for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
		rep.queue = append(rep.queue, event{uid, w.pods[uid].DeepCopy()})
	}
}

// squeeze leaves out versions of pods that have a later one in the queue.
func (rep *replica) squeeze() {
	last := map[types.UID]int{}
	for i, e := range rep.queue {
		last[e.uid] = i
	}
	var out []event
	for i, e := range rep.queue {
		if last[e.uid] == i {
			out = append(out, e)
		}
	}
	rep.queue = out
}

func (w *world) lead() *replica { return w.replicas[w.leader] }

func (w *world) pick() *corev1.Pod {
	uids := slices.Sorted(maps.Keys(w.pods))
	if len(uids) == 0 {
		return nil
	}
	return w.pods[uids[w.r.Intn(len(uids))]]
}

func (w *world) create() {
	asks := [][]int64{{30, 4}, {50, 8}, {50, 40}, {100, 0}, {200, 0}, {60, 8, 30, 4}, {0, 16}, {10, 1}}
	p := testPod(fmt.Sprint("p", w.created), asks[w.r.Intn(len(asks))]...)
	w.created++
	if w.r.Intn(5) == 0 {
		p.Annotations[podspec.Models] = "T4"
	}
	if w.r.Intn(8) == 0 {
		init := p.Spec.Containers[0]
		init.Name = "init"
		p.Spec.InitContainers = []corev1.Container{init}
	}
	priority(p, int32(w.r.Intn(3)))
	w.pods[p.UID] = p
	w.tell(p.UID)
}

// evict makes room for a pod that has none, as the server does, or gives that up at some point.
func (w *world) evict(c *Core, p *corev1.Pod, names []string, v *Verdict) {
	switch w.r.Intn(5) {
	case 0:
		c.Unheeded(p.UID, v.Event != "", v.Evict)
		return
	case 1:
		if _, err := c.Preempt(AskedPod(p), map[string]Victims{names[0]: {UIDs: []types.UID{"unknown"}}}, allowed); err != nil {
			w.fatal("preempt: %v", err)
		}
	}
	violations := allowed
	if w.r.Intn(4) == 0 {
		violations = forbidden
	}
	e, ok := c.PlanEviction(p.UID, names, violations)
	if !ok {
		return
	}
	w.evictions++
	for _, uid := range e.UIDs {
		if w.r.Intn(6) == 0 {
			c.AbandonEviction(p.UID)
			return
		}
		if w.pods[uid] != nil && w.r.Intn(4) > 0 { // else it takes its time, or stays
			delete(w.pods, uid)
			w.tell(uid)
		}
	}
}

// schedule is one cycle of kube-scheduler for a pod, up to sending Bind.
func (w *world) schedule(p *corev1.Pod) {
	c := w.lead().core
	if p.Spec.NodeName != "" && w.r.Intn(10) > 0 {
		return
	}
	names := slices.Sorted(maps.Keys(w.nodes))
	w.r.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	names = names[:1+w.r.Intn(len(names))]
	unbound := p.DeepCopy()
	unbound.Spec.NodeName = "" // kube-scheduler may be late
	var v Verdict
	v.Again = w.r.Intn(8) == 0
	if err := c.Filter(AskedPod(unbound), names, &v); err != nil {
		return
	}
	if v.Evict {
		w.evict(c, unbound, names, &v)
	}
	if len(v.Passed) == 0 {
		return
	}
	node := v.Passed[0]
	if len(v.Passed) > 1 {
		scores, err := c.Prioritize(AskedPod(unbound), v.Passed, nil)
		if err != nil {
			w.fatal("prioritize: %v", err)
		}
		best := slices.IndexFunc(scores, func(s Score) bool { return s.Score == scoreBest })
		if best < 0 || slices.ContainsFunc(scores[best+1:], func(s Score) bool { return s.Score == scoreBest }) {
			w.fatal("no unique best: %v", scores)
		}
		node = scores[best].Node
		if w.r.Intn(3) == 0 {
			node = v.Passed[w.r.Intn(len(v.Passed))]
		}
	}
	if w.r.Intn(10) == 0 {
		return // something between Filter and Bind failed
	}
	b, err := c.Bind(p.UID, node, unbound)
	if err != nil || b.Done {
		return
	}
	w.flights = append(w.flights, &flight{b: b, from: c, lands: w.ticks + w.r.Intn(int(BindTimeout/time.Second)), silent: w.r.Intn(6) == 0})
}

// land does what the API server does with a binding.
func (w *world) land(f *flight) {
	answer := func(tell func()) {
		if !f.cut {
			tell()
		}
	}
	p := w.pods[f.b.UID]
	switch {
	case w.r.Intn(12) == 0: // refused, by webhook or whatever
		answer(func() { f.from.BindFailed(f.b, Refused) })
	case p == nil:
		answer(func() { f.from.BindFailed(f.b, NoPod) })
	case p.Spec.NodeName != "":
		// The server asks what is there, as Run does at a conflict.
		answer(func() {
			if p.Spec.NodeName == f.b.Node {
				f.from.Bound(f.b)
			} else {
				f.from.BindFailed(f.b, Refused)
			}
		})
	default:
		p = p.DeepCopy()
		p.Spec.NodeName = f.b.Node
		maps.Copy(p.Annotations, f.b.Annotations)
		w.pods[p.UID] = p
		w.tell(p.UID)
		answer(func() { f.from.Bound(f.b) })
	}
}

func (w *world) step() {
	switch k := w.r.Intn(100); {
	case k < 25:
		if len(w.pods) < 40 {
			w.create()
		}
	case k < 55:
		if p := w.pick(); p != nil {
			w.schedule(p)
		}
	case k < 63:
		if p := w.pick(); p != nil {
			delete(w.pods, p.UID)
			w.tell(p.UID)
		}
	case k < 66:
		if p := w.pick(); p != nil && p.Spec.NodeName != "" {
			p = p.DeepCopy()
			p.Status.Phase = corev1.PodSucceeded
			w.pods[p.UID] = p
			w.tell(p.UID)
		}
	case k < 82:
		for _, rep := range w.replicas {
			rep.deliver(w.r.Intn(6))
		}
	case k < 84:
		w.replicas[w.r.Intn(2)].squeeze()
	case k < 86:
		w.relist(w.replicas[w.r.Intn(2)])
	case k < 87:
		w.now = w.now.Add(time.Duration(w.r.Int63n(7200)-3600) * time.Second)
	case k < 88:
		w.handOver()
	case k < 90:
		w.touchNode()
	default:
		w.tick()
	}
}

// tick is a second: bindings land or lose their answer, checks are answered or not.
func (w *world) tick() {
	w.ticks++
	var left []*flight
	for _, f := range w.flights {
		switch {
		case w.ticks >= f.lands:
			w.land(f)
			continue
		case f.silent && !f.cut:
			f.cut = true
			how := NoAnswer
			if w.liar {
				how = Refused
			}
			f.from.BindFailed(f.b, how)
			if w.r.Intn(2) == 0 {
				continue // it never reached the API server
			}
		}
		left = append(left, f)
	}
	w.flights = left
	for _, q := range w.lead().core.Tick() {
		if w.r.Intn(3) > 0 {
			w.lead().core.Checked(q, w.pods[q.UID])
		}
	}
}

// handOver ends the leader, whose last bindings are done or dead before the next one starts from a list.
func (w *world) handOver() {
	for _, f := range w.flights {
		f.cut = true
		if w.r.Intn(2) == 0 {
			w.land(f)
		}
	}
	w.flights = nil
	w.replicas[w.leader] = w.fresh()
	if w.r.Intn(3) > 0 {
		w.leader = 1 - w.leader
	}
	var list []corev1.Pod
	for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
		list = append(list, *w.pods[uid].DeepCopy())
	}
	w.lead().core.Resync(list)
}

// touchNode takes a node away, brings it back, or changes something that does not matter.
func (w *world) touchNode() {
	name := fmt.Sprint("n", w.r.Intn(len(w.nodes)))
	for _, rep := range w.replicas {
		if w.r.Intn(2) == 0 {
			rep.core.NodeGone(name)
		}
		n := w.nodes[name].DeepCopy()
		n.Labels = map[string]string{ModelLabelDefault: fmt.Sprint(w.r.Intn(3))}
		rep.core.NodeSeen(n)
	}
}

// use is a brute count of what bound pods hold, by node and UUID.
func (w *world) use() map[string]placement.Held {
	out := map[string]placement.Held{}
	for _, p := range w.pods {
		if p.Spec.NodeName == "" || ended(p) {
			continue
		}
		ask, err := podspec.Parse(p, podspec.DefaultNames())
		if err != nil {
			w.fatal("%v", err)
		}
		r, ok, err := podspec.Reserved(p, podspec.DefaultNames())
		if err != nil || !ok {
			w.fatal("bound without reservation: %v", err)
		}
		// The init containers here ask what the first container asks, and run alone: they add nothing on its GPUs.
		peak := map[string][2]placement.Held{}
		for _, k := range ask.Containers {
			place := r.Places[k.Name]
			if len(place.UUIDs) != k.Request.Count {
				w.fatal("pod %s: container %s has %v", p.Name, k.Name, place.UUIDs)
			}
			for _, uuid := range place.UUIDs {
				memory := k.Request.Memory
				if k.Request.Cores == 100 && memory == 0 {
					memory = 16 * gib
				}
				sum := peak[uuid]
				at := 0
				if k.Init {
					at = 1
				}
				sum[at].Cores += k.Request.Cores
				sum[at].Memory += memory
				peak[uuid] = sum
			}
		}
		for uuid, sum := range peak {
			h := out[uuid]
			h.Cores += max(sum[0].Cores, sum[1].Cores)
			h.Memory += max(sum[0].Memory, sum[1].Memory)
			out[uuid] = h
		}
	}
	return out
}

func (w *world) check() {
	for uuid, h := range w.use() {
		if h.Cores > placement.CoresWhole || h.Memory > 16*gib {
			w.fatal("%s is over-committed: %d cores, %v", uuid, h.Cores, h.Memory)
		}
	}
	for _, rep := range w.replicas {
		w.recount(rep.core)
	}
}

// recount compares what the core keeps with a count from scratch.
func (w *world) recount(c *Core) {
	for name, n := range c.nodes {
		if !n.present {
			continue
		}
		got, _ := c.cluster.Node(name)
		for i, g := range n.gpus {
			cores, memory := g.FreeCores, g.FreeMemory
			for _, p := range c.pods {
				if p.node != name {
					continue
				}
				if n.pods[p.uid] != p {
					w.fatal("%v is not among the pods of %s", p, name)
				}
				for _, h := range p.held {
					if h.UUID == g.UUID {
						cores, memory = cores-h.Cores, memory-int64(h.Memory)
					}
				}
			}
			for _, k := range n.claims {
				if c.pods[k.pod.uid] != k.pod || k.pod.claim != k {
					w.fatal("a claim of %v, which has none, is left on %s", k.pod, name)
				}
				for _, h := range k.kept {
					if h.UUID == g.UUID {
						cores, memory = cores-h.Cores, memory-int64(h.Memory)
					}
				}
			}
			if got.GPUs[i].FreeCores != cores || got.GPUs[i].FreeMemory != memory {
				w.fatal("%s: %d cores, %v free, counted %d, %v", g.UUID, got.GPUs[i].FreeCores, quantity.Bytes(got.GPUs[i].FreeMemory), cores, quantity.Bytes(memory))
			}
		}
	}
	for uid, p := range c.pods {
		if (p.phase == bound) == (c.open[uid] == p) {
			w.fatal("%v in phase %v: open %v", p, p.phase, c.open[uid] == p)
		}
		if p.phase == asked && p.node != "" {
			w.fatal("%v holds on %s", p, p.node)
		}
	}
}

// finish lets everything come to rest: what is held then is what is bound.
func (w *world) finish() {
	for range 2 * confirmTicks {
		w.tick()
	}
	if len(w.flights) > 0 {
		w.fatal("%d bindings on their way", len(w.flights))
	}
	for _, rep := range w.replicas {
		rep.deliver(len(rep.queue))
	}
	// Pods of which the watch never told have to be found out.
	for range 20 * confirmTicks {
		w.tick()
	}
	w.check()
	c := w.lead().core
	for name, n := range c.nodes {
		if len(n.claims) > 0 {
			w.fatal("%d claims are left on %s", len(n.claims), name)
		}
	}
	use := w.use()
	if s := c.Stats(); s.Pods != s.Phases["bound"]+s.Phases["asked"] {
		w.fatal("not at rest: %+v", s.Phases)
	}
	for name, n := range c.nodes {
		got, _ := c.cluster.Node(name)
		for i := range n.gpus {
			h := use[got.GPUs[i].UUID]
			if got.GPUs[i].FreeCores != placement.CoresWhole-h.Cores || got.GPUs[i].FreeMemory != 16*gib-int64(h.Memory) {
				w.fatal("%s: %d cores free, %d are bound", got.GPUs[i].UUID, got.GPUs[i].FreeCores, h.Cores)
			}
		}
	}
	for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
		delete(w.pods, uid)
		w.tell(uid)
	}
	for _, rep := range w.replicas {
		rep.deliver(len(rep.queue))
	}
	if len(c.pods)+len(c.open)+len(c.used) > 0 {
		w.fatal("%d pods, %d open, %d namespaces are left", len(c.pods), len(c.open), len(c.used))
	}
}

// Whatever happens in whatever order, no GPU is over-committed, the books agree with a count from scratch, and
// in the end nothing is held. TRANCHE_STEPS sets the number of steps, default 2000; TRANCHE_SEED the first seed.
func TestNeverOvercommits(t *testing.T) {
	steps, seed := 2000, time.Now().UnixNano()
	for _, v := range []struct {
		key string
		to  func(int64)
	}{{"TRANCHE_STEPS", func(n int64) { steps = int(n) }}, {"TRANCHE_SEED", func(n int64) { seed = n }}} {
		if text := os.Getenv(v.key); text != "" {
			n, err := strconv.ParseInt(text, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			v.to(n)
		}
	}
	const perWorld = 500
	bindings, evictions := uint64(0), 0
	for i := 0; i*perWorld < steps; i++ {
		w := newWorld(t, seed+int64(i), CoreConfig{Exact: i%3 == 2, Evict: i%2 == 1})
		for range min(perWorld, steps) {
			w.step()
			w.check()
		}
		for _, rep := range w.replicas {
			bindings += rep.core.Stats().Binds
		}
		w.finish()
		evictions += w.evictions
	}
	t.Logf("seed %d: %d steps, %d bindings by the last leaders, %d evictions", seed, steps, bindings, evictions)
	if bindings == 0 || evictions == 0 && steps > perWorld {
		t.Error("nothing was bound, or nobody evicted")
	}
}

// The twin notices a core that is told less than the truth: here, that bindings without an answer were refused.
func TestTwinNotices(t *testing.T) {
	for seed := range int64(50) {
		w := newWorld(t, seed, CoreConfig{})
		w.liar = true
		w.fail = func(text string) { panic(text) }
		var found any
		func() {
			defer func() { found = recover() }()
			for range 500 {
				w.step()
				w.check()
			}
		}()
		if text, ok := found.(string); ok && strings.Contains(text, "over-committed") {
			return
		}
	}
	t.Error("50 worlds of a core that is lied to, and nothing was over-committed")
}
