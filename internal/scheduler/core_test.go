package scheduler

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"tranche.dev/tranche/internal/inventory"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/quota"
)

const gib = 1 << 30

func testNode(name string, gpus int, model string, memory uint64) *corev1.Node {
	inv := inventory.Node{Unit: podspec.UnitDefault, Domain: podspec.DomainDefault}
	for i := range gpus {
		inv.GPUs = append(inv.GPUs, inventory.GPU{Index: i, UUID: fmt.Sprintf("GPU-%s-%d", name, i), Model: model, Memory: memory})
	}
	text, err := inventory.Encode(inv)
	if err != nil {
		panic(err)
	}
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{podspec.Inventory: text}},
		Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("64"), corev1.ResourceMemory: resource.MustParse("512Gi")}}}
}

// testPod asks for cores and units in each of its containers c0, c1, …
func testPod(name string, asks ...int64) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns", UID: types.UID("uid-" + name), ResourceVersion: "1", Annotations: map[string]string{}}}
	for i := 0; i < len(asks); i += 2 {
		limits := corev1.ResourceList{}
		limits[corev1.ResourceName(podspec.DefaultNames().Core())] = *resource.NewQuantity(asks[i], resource.DecimalSI)
		limits[corev1.ResourceName(podspec.DefaultNames().Memory())] = *resource.NewQuantity(asks[i+1], resource.DecimalSI)
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: fmt.Sprintf("c%d", i/2), Resources: corev1.ResourceRequirements{Limits: limits}})
	}
	return p
}

func priority(p *corev1.Pod, v int32) *corev1.Pod { p.Spec.Priority = &v; return p }

func testCore(t *testing.T, config CoreConfig, nodes ...*corev1.Node) *Core {
	t.Helper()
	config.Now = func() time.Time { return time.Unix(0, 42) }
	c, err := NewCore(config)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes {
		c.NodeSeen(n)
	}
	return c
}

func filter(t *testing.T, c *Core, p *corev1.Pod, names ...string) Verdict {
	t.Helper()
	var v Verdict
	if err := c.Filter(AskedPod(p), names, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

func bind(t *testing.T, c *Core, p *corev1.Pod, node string) Binding {
	t.Helper()
	b, err := c.Bind(p.UID, node, p)
	if err != nil {
		t.Fatal(err)
	}
	c.Bound(b)
	return b
}

func TestRankedLife(t *testing.T) {
	c := testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib), testNode("b", 1, "T4", 16*gib))
	p, q, r := testPod("p", 60, 8), testPod("q", 60, 8), testPod("r", 60, 8)
	if v := filter(t, c, p, "a", "b", "gone"); !reflect.DeepEqual(v.Passed, []string{"a", "b"}) || len(v.Failed) != 1 || c.Stats().Phases["held"] != 0 {
		t.Fatalf("%+v", v)
	}
	scores, err := c.Prioritize(AskedPod(p), []string{"a", "b"}, nil)
	if err != nil || scores[0].Score != 10 || scores[1].Score > scoreOthers || c.Stats().Phases["held"] != 1 {
		t.Fatal(scores, err)
	}
	// The next pod's cycle runs before the bind. One node is left: the hold is made in Filter.
	if v := filter(t, c, q, "a", "b"); !reflect.DeepEqual(v.Passed, []string{"b"}) || c.Stats().Phases["held"] != 2 {
		t.Fatalf("%+v", v)
	}
	if v := filter(t, c, r, "a", "b"); len(v.Passed) != 0 || v.Failed[0].Why != v.Failed[1].Why ||
		v.Event != "no room on GPUs: of 2 nodes, 2 asked 60 cores / 2 GiB: cores short; nearest: a (gpu 0: 40 cores, 14 GiB free), b (gpu 0: 40 cores, 14 GiB free)" {
		t.Fatalf("%+v", v)
	}
	if v := filter(t, c, r, "a", "b"); v.Event != "" {
		t.Errorf("a second event at once: %q", v.Event)
	}
	b := bind(t, c, p, "a")
	want := map[string]string{"tencent.com/predicate-node": "a", "tencent.com/predicate-time": "42", "tencent.com/gpu-assigned": "false",
		"tencent.com/predicate-gpu-idx-0": "0", "tranche.dev/gpus": `{"c0":["GPU-a-0"]}`}
	if !reflect.DeepEqual(b.Annotations, want) {
		t.Errorf("%v", b.Annotations)
	}
	// A retry of a bind that was done, and of one to elsewhere.
	if again, err := c.Bind(p.UID, "a", nil); err != nil || !again.Done {
		t.Error(again, err)
	}
	if _, err := c.Bind(p.UID, "b", nil); err == nil {
		t.Error("bound twice")
	}
	c.PodGone(p.UID)
	if v := filter(t, c, r, "a", "b"); !reflect.DeepEqual(v.Passed, []string{"a"}) {
		t.Errorf("%+v", v)
	}
	for range holdTicksDefault {
		c.Tick()
	}
	if s := c.Stats(); s.Pods != 0 || s.HoldsExpired != 2 {
		t.Errorf("%+v", s)
	}
}

// A pod counts among the usual ones once it was asked for, whether the watch had shown it before or not, and though
// no node had room for it.
func TestAskedForIsUsual(t *testing.T) {
	for _, shown := range []bool{false, true} {
		c := testCore(t, CoreConfig{}, testNode("a", 1, "A", 16))
		p := testPod("p", 200, 8)
		if shown {
			c.PodSeen(p)
			if c.pods[p.UID].learned {
				t.Error("a pod was counted that nobody asked for")
			}
		}
		for range 2 {
			if v := filter(t, c, p, "a"); len(v.Passed) > 0 {
				t.Fatalf("two GPUs on a node with one: %+v", v)
			}
		}
		if !c.pods[p.UID].learned {
			t.Errorf("shown before: %v: a pod was asked for and not counted", shown)
		}
	}
}

// kube-scheduler took another node than the one that was held.
func TestBindElsewhere(t *testing.T) {
	c := testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib), testNode("b", 2, "T4", 16*gib))
	p, q := testPod("p", 60, 8), testPod("q", 60, 8)
	scores, err := c.Prioritize(AskedPod(p), []string{"a", "b"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	other := "a"
	if scores[0].Score == 10 {
		other = "b"
	}
	b := bind(t, c, p, other)
	if b.Node != other || c.Stats().HoldsMismatched != 1 {
		t.Errorf("%+v %+v", b, c.Stats())
	}
	bind(t, c, q, "a")
	if other == "a" {
		t.Fatal("two on one")
	}
	if _, err := c.Bind("uid-r", "a", testPod("r", 60, 8)); err == nil || err.Error() != "node a: asked 60 cores / 2 GiB: cores short" {
		t.Error(err)
	}
}

// A hold that is a hint gives way to a bind; one that is not does not.
func TestBindTakesHint(t *testing.T) {
	for _, hint := range []bool{true, false} {
		c := testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib))
		p, q := testPod("p", 60, 8), testPod("q", 60, 8)
		if hint {
			if _, err := c.Prioritize(AskedPod(p), []string{"a"}, nil); err != nil {
				t.Fatal(err)
			}
		} else {
			filter(t, c, p, "a")
		}
		_, err := c.Bind(q.UID, "a", q)
		if (err == nil) != hint || hint && c.pods[p.UID].phase != asked {
			t.Errorf("hint %v: %v", hint, err)
		}
	}
}

// The originals' "had been predicated!": a failed bind must not be the end.
func TestBindFails(t *testing.T) {
	c := testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib), testNode("b", 1, "T4", 16*gib))
	p := testPod("p", 100, 0)
	p.Annotations["tencent.com/predicate-time"] = "1"
	p.Annotations["tencent.com/gpu-assigned"] = "false"
	b, err := c.Bind(p.UID, "a", p)
	if err != nil {
		t.Fatal(err)
	}
	c.BindFailed(b, Refused)
	if v := filter(t, c, p, "a", "b"); len(v.Passed) != 2 {
		t.Errorf("%+v", v)
	}
	// No answer: only that node, until it is known.
	if b, err = c.Bind(p.UID, "b", nil); err != nil {
		t.Fatal(err)
	}
	c.BindFailed(b, NoAnswer)
	if v := filter(t, c, p, "a", "b"); !reflect.DeepEqual(v.Passed, []string{"b"}) {
		t.Errorf("%+v", v)
	}
	var v Verdict
	if err := c.Filter(AskedPod(p), []string{"a"}, &v); err == nil {
		t.Error("offered elsewhere while it may be bound")
	}
	// A second try that is refused says nothing of the first.
	if b, err = c.Bind(p.UID, "b", nil); err != nil {
		t.Fatal(err)
	}
	c.BindFailed(b, Refused)
	if c.pods[p.UID].phase != unsure {
		t.Error(c.pods[p.UID].phase)
	}
	var checks []Check
	for range unsureTicks {
		checks = c.Tick()
	}
	if len(checks) != 1 {
		t.Fatal(checks)
	}
	c.Checked(checks[0], p)
	if v := filter(t, c, p, "a", "b"); len(v.Passed) != 2 {
		t.Errorf("%+v", v)
	}
}

func TestExact(t *testing.T) {
	c := testCore(t, CoreConfig{Exact: true}, testNode("a", 2, "T4", 16*gib), testNode("b", 2, "T4", 16*gib))
	for i := range 4 {
		p := testPod(fmt.Sprint("p", i), 100, 0)
		v := filter(t, c, p, "a", "b")
		if len(v.Passed) != 1 || c.pods[p.UID].node != v.Passed[0] || c.pods[p.UID].hint {
			t.Fatalf("%+v", v)
		}
	}
	if v := filter(t, c, testPod("more", 10, 1), "a", "b"); len(v.Passed) != 0 {
		t.Errorf("%+v", v)
	}
}

// Pods that were placed by gpu-admission, by us before a restart, and by nobody.
func TestRebuild(t *testing.T) {
	old := testPod("old", 60, 8)
	old.Annotations["tencent.com/predicate-gpu-idx-0"] = "1"
	ours := testPod("ours", 60, 8)
	ours.Annotations[podspec.GPUs] = `{"c0":["GPU-a-0"]}`
	nobody := testPod("nobody", 60, 8)
	lost := testPod("lost", 60, 8)
	c := testCore(t, CoreConfig{})
	for _, p := range []*corev1.Pod{old, ours, nobody, lost} {
		p.Spec.NodeName = "a"
		c.PodSeen(p)
	}
	c.NodeSeen(testNode("a", 3, "T4", 16*gib))
	free := func() string {
		n, _ := c.cluster.Node("a")
		var out []string
		for _, g := range n.GPUs {
			out = append(out, fmt.Sprint(g.FreeCores))
		}
		return strings.Join(out, " ")
	}
	if free() != "40 40 40" || c.Stats().Unplaced != 1 {
		t.Fatal(free(), c.Stats())
	}
	if v := filter(t, c, testPod("new", 10, 1), "a"); len(v.Failed) != 1 || v.Failed[0].Why != unknownPod {
		t.Errorf("%+v", v)
	}
	// The node tells where the guessed one is: beside ours.
	confirmed := nobody.DeepCopy()
	confirmed.Annotations[podspec.GPUs] = `{"c0":["GPU-a-0"]}`
	c.PodSeen(confirmed)
	c.PodGone(lost.UID)
	if free() != "-20 40 100" || c.Stats().Unplaced != 0 {
		t.Error(free(), c.Stats())
	}
	// A list may be older than what the watch has shown: who is not in it stays until the watch shows him gone.
	c.Resync([]corev1.Pod{*ours})
	if free() != "-20 40 100" {
		t.Error(free())
	}
	c.PodGone(nobody.UID)
	if free() != "40 40 100" {
		t.Error(free())
	}
}

func TestDividedNode(t *testing.T) {
	c := testCore(t, CoreConfig{})
	n := testNode("a", 0, "", 0)
	n.Annotations = nil
	n.Status.Capacity = corev1.ResourceList{"tencent.com/vcuda-core": resource.MustParse("200"), "tencent.com/vcuda-memory": resource.MustParse("128")}
	c.NodeSeen(n)
	p := testPod("p", 100, 0)
	filter(t, c, p, "a")
	b := bind(t, c, p, "a")
	if b.Annotations[podspec.GPUs] != "{}" || b.Annotations["tencent.com/predicate-gpu-idx-0"] != "0" || c.Stats().NodesWithoutInventory != 1 {
		t.Errorf("%v %+v", b.Annotations, c.Stats())
	}
	// What the pod's author wrote of GPUs does not hide where it is.
	p.Annotations = map[string]string{podspec.GPUs: `{"main":["elsewhere"]}`}
	maps.Copy(p.Annotations, b.Annotations)
	p.Spec.NodeName = "a"
	c.PodSeen(p)
	if v, _ := c.cluster.Node("a"); v.GPUs[0].FreeCores != 0 || v.GPUs[1].FreeCores != 100 {
		t.Errorf("%+v", v.GPUs)
	}
	if v := filter(t, c, testPod("q", 50, 65), "a"); v.Failed[0].Why != "asked 50 cores / 16.25 GiB: memory short" && len(v.Passed) != 0 {
		t.Errorf("%+v", v)
	}
}

func TestForeignAndUnusable(t *testing.T) {
	inv := inventory.Node{Unit: podspec.UnitDefault, Domain: podspec.DomainDefault, GPUs: []inventory.GPU{
		{Index: 0, UUID: "GPU-0", Model: "T4", Memory: 16 * gib, Foreign: inventory.Amount{Cores: 100}},
		{Index: 1, UUID: "GPU-1", Model: "T4", Memory: 16 * gib, Unusable: "unhealthy: XID 79"},
		{Index: 2, UUID: "GPU-2", Model: "T4", Memory: 16 * gib, Raised: inventory.Amount{Cores: 60}}}}
	text, err := inventory.Encode(inv)
	if err != nil {
		t.Fatal(err)
	}
	n := testNode("a", 0, "", 0)
	n.Annotations[podspec.Inventory] = text
	c := testCore(t, CoreConfig{}, n)
	if v := filter(t, c, testPod("p", 41, 1), "a"); len(v.Passed) != 0 {
		t.Errorf("%+v", v)
	}
	q := testPod("q", 40, 1)
	filter(t, c, q, "a")
	if b := bind(t, c, q, "a"); b.Annotations[podspec.GPUs] != `{"c0":["GPU-2"]}` {
		t.Errorf("%v", b.Annotations)
	}
}

func TestQuota(t *testing.T) {
	q, err := quota.Parse(map[string]string{quota.Key: `{"ns":{"quota":{"T4":1}}}`})
	if err != nil {
		t.Fatal(err)
	}
	c := testCore(t, CoreConfig{}, testNode("a", 2, "Tesla T4", 16*gib), testNode("b", 2, "V100", 16*gib))
	c.SetQuotas(nil, true)
	var v Verdict
	if err := c.Filter(AskedPod(testPod("p", 60, 1)), []string{"a"}, &v); err == nil {
		t.Error("quotas are not known yet")
	}
	c.SetQuotas(q, false)
	p := testPod("p", 60, 1)
	if v := filter(t, c, p, "a", "b"); !reflect.DeepEqual(v.Passed, []string{"a"}) || v.Failed[0].Why != "quota: GPU model not allowed for the namespace" {
		t.Errorf("%+v", v)
	}
	bind(t, c, p, "a")
	if v := filter(t, c, testPod("q", 60, 1), "a", "b"); len(v.Passed) != 0 || !strings.Contains(v.Event, "T4: 60 cores asked, 60 of 100 used") {
		t.Errorf("%+v", v)
	}
	if _, err := c.Bind("uid-q", "a", nil); err == nil || err.Error() != "node a: quota of the namespace exceeded for T4" {
		t.Error(err)
	}
	// Raised by an annotation: it counts.
	raised := p.DeepCopy()
	raised.Spec.NodeName = "a"
	raised.Annotations[podspec.Cores] = "90"
	raised.Annotations[podspec.GPUs] = `{"c0":["GPU-a-0"]}`
	c.PodSeen(raised)
	if v := filter(t, c, testPod("q", 20, 1), "a"); len(v.Passed) != 0 {
		t.Errorf("%+v", v)
	}
	c.PodGone(p.UID)
	if v := filter(t, c, testPod("q", 100, 1), "a"); len(v.Passed) != 1 {
		t.Errorf("%+v", v)
	}
}

func placeBound(c *Core, p *corev1.Pod, node string, gpu int) {
	p.Spec.NodeName = node
	p.Annotations[podspec.GPUs] = fmt.Sprintf(`{"c0":["GPU-%s-%d"]}`, node, gpu)
	c.PodSeen(p)
}

// allowed and forbidden are API.Violations where budgets allow every eviction, and none.
func allowed([]types.NamespacedName) int        { return 0 }
func forbidden(pods []types.NamespacedName) int { return len(pods) }

func TestPreempt(t *testing.T) {
	c := testCore(t, CoreConfig{Evict: true}, testNode("a", 2, "T4", 16*gib), testNode("b", 1, "T4", 16*gib))
	placeBound(c, testPod("low0", 50, 4), "a", 0)
	placeBound(c, testPod("low1", 50, 4), "a", 1)
	placeBound(c, priority(testPod("high", 50, 4), 9), "b", 0)
	p := priority(testPod("p", 100, 0), 5)
	// kube-scheduler offers one of two; either leaves a GPU free. On b only one that must not go is there.
	got, err := c.Preempt(AskedPod(p), map[string]Victims{"a": {UIDs: []types.UID{"uid-low1"}}, "b": {UIDs: []types.UID{"uid-other"}}}, allowed)
	if want := (map[string]Victims{"a": {UIDs: []types.UID{"uid-low1"}}}); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v %v", got, err)
	}
	// Offered something that does not help: one more has to go.
	got, err = c.Preempt(AskedPod(p), map[string]Victims{"a": {UIDs: []types.UID{"uid-plain"}}}, forbidden)
	if want := (map[string]Victims{"a": {UIDs: []types.UID{"uid-plain", "uid-low0"}, Violations: 1}}); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v %v", got, err)
	}
	// While kube-scheduler's victims go, ours are not looked for.
	c.Tick()
	if v := filter(t, c, p, "a", "b"); len(v.Passed) != 0 || v.Evict || v.Await == 0 || v.Event != "" {
		t.Fatalf("%+v", v)
	}
	for range preemptTicks {
		c.Tick()
	}
	// Fragmentation alone: ours evicts, and nobody else gets the GPU.
	if v := filter(t, c, p, "a", "b"); len(v.Passed) != 0 || !v.Evict {
		t.Fatalf("%+v", v)
	}
	if e, ok := c.PlanEviction(p.UID, []string{"a", "b"}, forbidden); ok {
		t.Errorf("not evictable, and %+v", e)
	}
	e, ok := c.PlanEviction(p.UID, []string{"a", "b"}, allowed)
	if !ok || e.Node != "a" || !slices.Equal(e.UIDs, []types.UID{"uid-low0"}) {
		t.Fatalf("%+v", e)
	}
	if _, ok := c.PlanEviction(p.UID, []string{"a", "b"}, allowed); ok {
		t.Error("evicted twice")
	}
	c.PodGone("uid-low0")
	if v := filter(t, c, priority(testPod("thief", 60, 1), 5), "a", "b"); len(v.Passed) != 0 {
		t.Errorf("%+v", v)
	}
	if v := filter(t, c, p, "a", "b"); !reflect.DeepEqual(v.Passed, []string{"a"}) {
		t.Errorf("%+v", v)
	}
	bind(t, c, p, "a")
	if c.pods[p.UID].claim != nil || len(c.nodes["a"].claims) != 0 {
		t.Error("a claim is left")
	}
}

// Two victims: what the first had is kept until the second is gone.
func TestClaimOfTwo(t *testing.T) {
	c := testCore(t, CoreConfig{Evict: true}, testNode("a", 2, "T4", 16*gib))
	placeBound(c, testPod("low0", 50, 4), "a", 0)
	placeBound(c, testPod("low1", 50, 4), "a", 1)
	p := priority(testPod("p", 200, 0), 5)
	filter(t, c, p, "a")
	e, ok := c.PlanEviction(p.UID, []string{"a"}, allowed)
	if !ok || len(e.UIDs) != 2 {
		t.Fatalf("%+v", e)
	}
	c.PodGone("uid-low0")
	if n, _ := c.cluster.Node("a"); n.GPUs[0].FreeCores != 50 {
		t.Errorf("%+v", n.GPUs)
	}
	c.PodGone("uid-low1")
	if n, _ := c.cluster.Node("a"); n.GPUs[0].FreeCores != 0 || n.GPUs[1].FreeCores != 0 || c.pods[p.UID].phase != held {
		t.Errorf("%+v", n.GPUs)
	}
	c.PodGone(p.UID)
	if n, _ := c.cluster.Node("a"); n.GPUs[0].FreeCores != 100 || len(c.pods) != 0 || len(c.nodes["a"].claims) != 0 {
		t.Errorf("%+v", n.GPUs)
	}
}

// Pods without GPUs go where there are none, then where they are least in the way.
func TestPrioritizeOthers(t *testing.T) {
	c := testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib), testNode("b", 1, "T4", 16*gib))
	rank := func(p *corev1.Pod, names ...string) []Score {
		got, err := c.PrioritizeOthers(AskedPod(p), names, nil)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	plain := testPod("plain")
	plain.Spec.Containers = []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse("2")}}}}
	if got := rank(plain, ""); got[0].Score != 10 {
		t.Errorf("%v", got)
	}
	if got := rank(plain, "cpu-0", "a", "cpu-1"); got[0].Score != 10 || got[1].Score >= 10 || got[2].Score != 10 {
		t.Errorf("%v", got)
	}
	if got := rank(plain, "a", "b"); (got[0].Score == 10) == (got[1].Score == 10) {
		t.Errorf("%v", got)
	}
	if got := rank(testPod("gpu", 30, 4), "a", "b"); len(got) != 0 {
		t.Errorf("%v", got)
	}
}

func TestExplain(t *testing.T) {
	c := testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib), testNode("b", 1, "V100", 32*gib))
	placeBound(c, testPod("x", 80, 4), "a", 0)
	p := testPod("p", 30, 4)
	p.Annotations[podspec.Models] = "T4"
	filter(t, c, p, "a", "b")
	e, ok := c.Explain("ns", "p")
	want := []NodeReport{{Node: "a", Why: []string{"asked 30 cores / 1 GiB: cores short"}}, {Node: "b", Why: []string{"wrong model"}}}
	for i := range e.Nodes {
		e.Nodes[i].Why = e.Nodes[i].Why[:1]
	}
	if !ok || e.Phase != "asked" || e.Passed != 0 || !reflect.DeepEqual(e.Failed, map[string]int{"wrong model": 1, "asked 30 cores / 1 GiB: cores short": 1}) || !reflect.DeepEqual(e.Nodes, want) {
		t.Errorf("%+v", e)
	}
	if e, ok := c.Explain("ns", "x"); !ok || e.Phase != "bound" || !reflect.DeepEqual(e.GPUs, map[string][]string{"c0": {"GPU-a-0"}}) {
		t.Errorf("%+v", e)
	}
	if _, ok := c.Explain("ns", "nobody"); ok {
		t.Error("explained nobody")
	}
	for i := range 3 * explainedPods {
		filter(t, c, testPod(fmt.Sprint("many", i), 30, 4), "b")
		c.PodGone(types.UID(fmt.Sprint("uid-many", i)))
	}
	if len(c.explained.by) != explainedPods {
		t.Error(len(c.explained.by))
	}
}

// A pod whose annotations were spoilt after it was bound still holds its GPU for a scheduler that starts then.
func TestSpoiltAnnotations(t *testing.T) {
	nodes := []*corev1.Node{testNode("a", 2, "T4", 16*gib)}
	p := testPod("p", 60, 8)
	placeBound(testCore(t, CoreConfig{}, nodes...), p, "a", 1)
	p.Annotations[podspec.Class] = "gold"
	c := testCore(t, CoreConfig{}, nodes...)
	c.PodSeen(p)
	if n, _ := c.cluster.Node("a"); n.GPUs[0].FreeCores != 100 || n.GPUs[1].FreeCores != 40 {
		t.Errorf("%+v", n.GPUs)
	}
}
