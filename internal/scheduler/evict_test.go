package scheduler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	policylisters "k8s.io/client-go/listers/policy/v1"
	"k8s.io/client-go/tools/cache"
)

// lows fills node a with one pod of low priority on each GPU, and returns the core in its second tick.
func lows(t *testing.T, gpus int) *Core {
	t.Helper()
	c := testCore(t, CoreConfig{Evict: true}, testNode("a", gpus, "T4", 16*gib))
	c.Tick()
	for i := range gpus {
		placeBound(c, testPod(fmt.Sprint("low-", i), 60, 8), "a", i)
	}
	return c
}

// known is a pod that the watch showed a while ago. Filter waits for news for it a second, as the machine may be busy.
func known(c *Core, p *corev1.Pod) *corev1.Pod {
	c.PodSeen(p)
	c.Tick()
	c.Tick()
	c.newsLeft, c.newsMost = time.Second, time.Second
	return p
}

func ready(c *Core, api API) *Server {
	s := NewServer(c, api, quiet(), "", 0)
	s.Ready()
	return s
}

// ask is one request, and what follows it.
func ask(t *testing.T, s *Server, p *corev1.Pod, names ...string) *Verdict {
	t.Helper()
	var v Verdict
	if err := s.filter(t.Context(), AskedPod(p), names, &v); err != nil {
		t.Fatal(err)
	}
	if v.Event != "" || v.Evict {
		s.unplaced(AskedPod(p), names, &v)
	}
	s.Wait()
	return &v
}

// A claim ends after its time, however often its pod is asked for meanwhile.
func TestClaimEnds(t *testing.T) {
	c := lows(t, 2)
	p := priority(testPod("p", 200, 16), 5)
	c.PodSeen(p)
	if v := filter(t, c, p, "a"); !v.Evict {
		t.Fatalf("%+v", v)
	}
	if e, ok := c.PlanEviction(p.UID, []string{"a"}, allowed); !ok || len(e.Pods) != 2 {
		t.Fatalf("%+v", e)
	}
	c.PodGone("uid-low-0") // the other one stays
	other := testPod("other", 60, 8)
	for i := range claimTicks + 20 {
		c.Tick()
		if i%10 == 0 {
			filter(t, c, p, "a")
		}
		if v := filter(t, c, other, "a"); (len(v.Passed) > 0) != (i >= claimTicks-1) {
			t.Fatalf("%d s after the eviction: %+v", i+1, v)
		}
	}
}

// Two pods that need room each get a victim of their own.
func TestVictimOfOne(t *testing.T) {
	c := lows(t, 2)
	api := &fakeAPI{}
	s := ready(c, api)
	for _, name := range []string{"p", "q"} {
		ask(t, s, priority(testPod(name, 60, 8), 5), "a")
	}
	slices.Sort(api.evicted)
	if !slices.Equal(api.evicted, []string{"ns/low-0", "ns/low-1"}) {
		t.Errorf("evicted %q", api.evicted)
	}
}

// Nobody is evicted for a pod that went during the wait for news, and it is not taken for a new one.
func TestGoneDuringWait(t *testing.T) {
	c := lows(t, 1)
	api := &fakeAPI{}
	s := ready(c, api)
	p := known(c, priority(testPod("p", 60, 8), 5))
	time.AfterFunc(20*time.Millisecond, func() { c.PodGone(p.UID) })
	var v Verdict
	err := s.filter(t.Context(), AskedPod(p), []string{"a"}, &v)
	if err == nil || !strings.Contains(err.Error(), "pod ns/p is gone") || c.pods[p.UID] != nil {
		t.Errorf("%v, %+v", err, v)
	}
	for range latelyTicks + 1 {
		c.Tick()
	}
	if len(c.lately) > 0 {
		t.Error("it is known for ever")
	}
}

// What was to be said of a pod is said later, if it found room first and lost it.
func TestEventAfterWait(t *testing.T) {
	c := lows(t, 1)
	api := &fakeAPI{}
	s := ready(c, api)
	p := known(c, testPod("p", 60, 8))
	time.AfterFunc(20*time.Millisecond, func() { c.PodGone("uid-low-0") })
	if v := ask(t, s, p, "a"); len(v.Passed) != 1 || len(api.events) > 0 {
		t.Fatalf("%+v %q", v, api.events)
	}
	q := testPod("q", 60, 8)
	placeBound(c, q, "a", 0) // another scheduler's
	if ask(t, s, p, "a"); len(api.events) != 1 {
		t.Errorf("events %q", api.events)
	}
}

// A replica that no longer leads evicts nobody more.
func TestNoEvictionAfterStop(t *testing.T) {
	c := lows(t, 1)
	api := &fakeAPI{}
	s := ready(c, api)
	p := known(c, priority(testPod("p", 60, 8), 5))
	time.AfterFunc(20*time.Millisecond, func() { s.Stop("the lease was lost") })
	if ask(t, s, p, "a"); len(api.evicted) > 0 || c.pods[p.UID].planning {
		t.Errorf("evicted %q, planning %v", api.evicted, c.pods[p.UID].planning)
	}
	// Between two evictions.
	c = lows(t, 2)
	stopping := &stoppingAPI{}
	stopping.stop = func() { stopping.s.Stop("the lease was lost") }
	stopping.s = ready(c, stopping)
	p = priority(testPod("p", 200, 16), 5)
	if ask(t, stopping.s, p, "a"); len(stopping.evicted) != 1 || c.pods[p.UID].claim != nil {
		t.Errorf("evicted %q", stopping.evicted)
	}
}

type stoppingAPI struct {
	fakeAPI
	s    *Server
	stop func()
}

func (f *stoppingAPI) Evict(ctx context.Context, pod types.NamespacedName, uid types.UID) error {
	defer f.stop()
	return f.fakeAPI.Evict(ctx, pod, uid)
}

// Waits for victims last half of a second in all, and another look for a request takes none and is not counted.
func TestWaitsAreFew(t *testing.T) {
	c := lows(t, 4)
	s := ready(c, &fakeAPI{})
	for i := range 4 {
		ask(t, s, priority(testPod(fmt.Sprint("p", i), 60, 8), 5), "a")
	}
	c.Tick()
	began := time.Now()
	for range 2 {
		for i := range 4 {
			ask(t, s, priority(testPod(fmt.Sprint("p", i), 60, 8), 5), "a")
		}
	}
	if took := time.Since(began); took < awaitVictims || took > awaitVictims+2*time.Second {
		t.Errorf("8 requests in one second waited for %v", took)
	}
	before := c.Stats()
	c.Tick()
	v := Verdict{Again: true}
	if err := c.Filter(AskedPod(testPod("again", 60, 8)), []string{"a"}, &v); err != nil || v.Await > 0 {
		t.Errorf("%v, another look waits for %v", err, v.Await)
	}
	if after := c.Stats(); after.Filters != before.Filters || after.FilterEmpty != before.FilterEmpty {
		t.Errorf("another look was counted: %+v", after)
	}
}

// A pod that was asked for before the watch showed it is known until it is gone, like the others.
func TestWatchAfterFilter(t *testing.T) {
	c := lows(t, 1)
	p := testPod("p", 60, 8)
	events := 0
	for i := range 4 {
		if v := filter(t, c, p, "a"); v.Event != "" {
			events++
		}
		if i == 0 {
			c.PodSeen(p)
		}
		for range holdTicksDefault + 1 {
			c.Tick()
		}
	}
	if events != 1 || c.pods[p.UID] == nil {
		t.Errorf("%d events, pod known %v", events, c.pods[p.UID] != nil)
	}
}

// A request that gives a pod another name is refused. One that gives it other containers is about those, whatever was held.
func TestSameUID(t *testing.T) {
	c := testCore(t, CoreConfig{}, testNode("a", 2, "T4", 16*gib))
	p := testPod("p", 60, 8)
	filter(t, c, p, "a")
	other := p.DeepCopy()
	other.Namespace, other.ResourceVersion = "other", "2"
	var v Verdict
	if err := c.Filter(AskedPod(other), []string{"a"}, &v); err == nil || !strings.Contains(err.Error(), "pod other/p has the UID of pod ns/p") {
		t.Error(err)
	}
	more := testPod("p", 60, 8, 20, 4)
	more.ResourceVersion = "2"
	if _, err := c.Preempt(AskedPod(more), nil, allowed); err != nil {
		t.Fatal(err)
	}
	b, err := c.Bind(p.UID, "a", nil)
	if err != nil || len(c.pods[p.UID].containers) != 2 {
		t.Errorf("%v %+v", err, b)
	}
}

// Evictions use a budget up; a pod under two budgets cannot be evicted at all.
func TestViolations(t *testing.T) {
	pods, budgets := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{}), cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	var err error
	for name, app := range map[string]string{"a1": "a", "a2": "a", "a3": "a", "b1": "b", "free": "none"} {
		p := testPod(name, 30, 1)
		p.Labels = map[string]string{"app": app}
		err = errors.Join(err, pods.Add(p))
	}
	budget := func(name, app string, left int32) {
		err = errors.Join(err, budgets.Add(&policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns"},
			Spec:   policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}},
			Status: policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: left}}))
	}
	budget("a", "a", 2)
	budget("b", "b", 5)
	budget("b-too", "b", 5)
	if err != nil {
		t.Fatal(err)
	}
	k := &kube{pods: storeOnly{store: pods}, budgets: policylisters.NewPodDisruptionBudgetLister(budgets)}
	for names, want := range map[string]int{"": 0, "a1": 0, "a1 a2": 0, "a1 a2 a3": 1, "a1 free a2": 0, "b1": 1, "free": 0, "unknown": 0} {
		var of []types.NamespacedName
		for _, name := range strings.Fields(names) {
			of = append(of, types.NamespacedName{Namespace: "ns", Name: name})
		}
		if got := k.Violations(of); got != want {
			t.Errorf("%q: %d, want %d", names, got, want)
		}
	}
}

// storeOnly is an informer of which nothing but the store is used.
type storeOnly struct {
	cache.SharedIndexInformer
	store cache.Store
}

func (s storeOnly) GetStore() cache.Store { return s.store }
