package scheduler

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	extender "k8s.io/kube-scheduler/extender/v1"
)

// A pod that is asked for again though nothing has changed is worth a wait, once a second.
func TestAskedAgainWithoutNews(t *testing.T) {
	c := testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib))
	c.Tick()
	there := testPod("there", 60, 8)
	bind(t, c, there, "a")
	p := testPod("p", 60, 8)
	for i, step := range []struct {
		do   func()
		want time.Duration
	}{
		{func() {}, 0},
		{func() {}, awaitNews},
		{func() {}, 0},
		{func() { c.Tick() }, awaitNews},
		{func() { c.Tick(); bind(t, c, testPod("small", 10, 1), "a") }, 0},
		{func() {}, awaitNews},
	} {
		step.do()
		if v := filter(t, c, p, "a"); len(v.Passed) != 0 || v.Await != step.want || (v.Event != "") != (i == 0) {
			t.Errorf("step %d: %+v", i, v)
		}
	}
}

// Kube-scheduler hears that a pod is gone before we do, and asks: it is answered with what we hear a moment later.
func TestNewsDuringFilter(t *testing.T) {
	c := testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib))
	c.Tick()
	there := testPod("there", 60, 8)
	bind(t, c, there, "a")
	s := NewServer(c, &fakeAPI{}, quiet(), "", 0)
	s.Ready()
	web := httptest.NewServer(s.Handler())
	defer web.Close()
	names := []string{"a"}
	in := extender.ExtenderArgs{Pod: testPod("p", 60, 8), NodeNames: &names}
	for i, want := range []int{0, 1} {
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			if i == 1 {
				for waits := false; !waits; {
					c.mu.Lock()
					waits = c.waited == c.tick
					c.mu.Unlock()
				}
				c.PodGone(there.UID)
			}
		}()
		out := extender.ExtenderFilterResult{NodeNames: &[]string{}}
		if code := post(t, web.URL+"/scheduler/predicates", in, &out); code != http.StatusOK || len(*out.NodeNames) != want {
			t.Errorf("request %d: %d, %v", i, code, *out.NodeNames)
		}
		<-gone
	}
}
