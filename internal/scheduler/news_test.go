package scheduler

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	extender "k8s.io/kube-scheduler/extender/v1"
)

// No room is worth some waiting in a second, for a pod that has not just come; what is to be said is said once.
func TestNoRoomIsWorthAWait(t *testing.T) {
	c := testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib))
	bind(t, c, testPod("there", 60, 8), "a")
	p := testPod("p", 60, 8)
	for i, step := range []struct {
		do   func()
		want time.Duration
	}{
		{func() {}, 0},
		{func() {}, awaitNews},
		{func() { c.Waited(false, awaitAllNews-awaitNews/4) }, awaitNews / 4},
		{func() { c.Waited(false, awaitNews) }, 0},
		{func() { c.Tick() }, awaitNews},
		{func() { c.Waited(true, awaitVictims); bind(t, c, testPod("small", 10, 1), "a") }, awaitNews},
	} {
		step.do()
		if v := filter(t, c, p, "a"); len(v.Passed) != 0 || v.Await != step.want || (v.Event != "") != (i == 0) {
			t.Errorf("step %d: %+v", i, v)
		}
	}
	// One that came a while ago, and that kube-scheduler found no room for by itself until now.
	late := testPod("late", 60, 8)
	c.PodSeen(late)
	c.Tick()
	c.Tick()
	if v := filter(t, c, late, "a"); v.Await != awaitNews {
		t.Errorf("%+v", v)
	}
}

// Kube-scheduler hears that a pod is gone before we do, and asks: it is answered with what we hear a moment later, even if
// we hear of something else first. Else it is told that there is no room, and so is the pod's owner.
func TestNewsDuringFilter(t *testing.T) {
	for _, of := range []struct {
		what  string
		evict bool // there is one to evict as well
		news  func(*Core, *corev1.Pod)
		want  int
	}{
		{"nothing", false, func(*Core, *corev1.Pod) {}, 0},
		{"nothing of use", true, func(c *Core, _ *corev1.Pod) { c.SetQuotas(nil, false) }, 0},
		{"gone", false, func(c *Core, there *corev1.Pod) { c.PodGone(there.UID) }, 1},
		{"gone, and one to evict", true, func(c *Core, there *corev1.Pod) { c.PodGone(there.UID) }, 1},
		{"gone after something else", true, func(c *Core, there *corev1.Pod) {
			c.SetQuotas(nil, false)
			time.Sleep(3 * newsEvery)
			c.PodGone(there.UID)
		}, 1},
	} {
		c := testCore(t, CoreConfig{Evict: true}, testNode("a", 1, "T4", 16*gib))
		there := testPod("there", 60, 8)
		placeBound(c, there, "a", 0)
		p := testPod("p", 60, 8)
		if of.evict {
			priority(p, 5)
		}
		known(c, p)
		api := &fakeAPI{}
		s := ready(c, api)
		told := make(chan struct{})
		go func() {
			defer close(told)
			for waits := false; !waits; {
				waits = c.Stats().FilterEmpty > 0
			}
			of.news(c, there)
		}()
		names := []string{"a"}
		w := serve(t, s.Handler(), "predicates", extender.ExtenderArgs{Pod: p, NodeNames: &names})
		<-told
		s.Wait()
		var out extender.ExtenderFilterResult
		if err := json.Unmarshal(w.Body.Bytes(), &out); err != nil || out.NodeNames == nil || len(*out.NodeNames) != of.want {
			t.Errorf("%s: %v %s", of.what, err, w.Body)
			continue
		}
		room := slices.ContainsFunc(api.events, func(e string) bool { return strings.Contains(e, "no room on GPUs") })
		if room != (of.want == 0) || (len(api.evicted) == 1) != (of.evict && of.want == 0) || c.pods[p.UID].planning {
			t.Errorf("%s: events %q, evicted %q, planning %v", of.what, api.events, api.evicted, c.pods[p.UID].planning)
		}
	}
}
