package node

import (
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"tranche.dev/tranche/internal/node/books"
)

// Kubelet dies after it took a pod's cores and before it noted them. It comes back, offers them again, and the pod, which it admits
// anew, has everything once.
func TestKubeletDiesBetweenCalls(t *testing.T) {
	w := newWorld(t, "a100-80g:2", 71)
	units := w.gpus[0].Units
	pod := w.pod(nil, containerSpec{name: "c", cores: 60, units: 8})
	half := calls{w.node, books.Core}
	w.kubelet.List(pod)
	var all []string
	for _, g := range w.gpus {
		w.node.mu.Lock()
		all = append(all, w.node.books.IDs(g.UUID, books.Core)...)
		w.node.mu.Unlock()
	}
	ids, err := half.Preferred(t.Context(), all, nil, 60)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := half.Allocate(t.Context(), ids); err != nil {
		t.Fatal(err)
	}
	if got, want := w.free(), fmt.Sprintf("40/%d 100/%d", units-8, units); got != want {
		t.Errorf("free after the first call: %s, want %s", got, want)
	}
	w.kubelet.Stop()
	if err := w.kubelet.Start(); err != nil {
		t.Fatal(err)
	}
	w.registered()
	w.mustAdmit(pod)
	if got := limits(t, w.start(pod, "c")); !reflect.DeepEqual(got, []string{"60-60 2048Mi"}) {
		t.Errorf("limits %q", got)
	}
	if got, want := w.free(), fmt.Sprintf("40/%d 100/%d", units-8, units); got != want {
		t.Errorf("free: %s, want %s", got, want)
	}
	w.kubelet.Delete(pod.UID)
	w.untilFree(fmt.Sprintf("100/%d 100/%d", units, units))
	eventually(t, 20*time.Second, "no allocation is left", func() bool { return len(w.node.store.List()) == 0 })
}

var ours = regexp.MustCompile(`tranche/internal/(node|deviceplugin|kubelet|allocation|arbiter|gpu|bypass|display)\.`)

// A node that has ended leaves nothing behind that runs, and a call that was on its way does nothing any more.
func TestEnd(t *testing.T) {
	_, kubeconfig := newAPIServer(t)
	for _, change := range []func(*Config){
		func(*Config) {},
		func(c *Config) {
			c.Kubeconfig, c.PodsFrom, c.LiveChange = kubeconfig, PodsAPIServer, LiveChange{On: true}
		},
	} {
		w := newWorld(t, "a100-80g:2", 72, change)
		pod := w.pod(nil, containerSpec{name: "c", cores: 60, units: 8})
		w.mustAdmit(pod)
		w.start(pod, "c")
		w.end()
		var left []string
		defer func() {
			if t.Failed() {
				t.Log(strings.Join(left, "\n\n"))
			}
		}()
		eventually(t, 10*time.Second, "nothing runs on", func() bool {
			stacks := make([]byte, 4<<20)
			stacks = stacks[:runtime.Stack(stacks, true)]
			left = nil
			for _, g := range strings.Split(string(stacks), "\n\n") {
				if ours.MatchString(g) && !strings.Contains(g, "testing.tRunner") {
					left = append(left, g)
				}
			}
			return len(left) == 0
		})
		ids := w.kubelet.IDs(pod.UID, "c", core)
		before := w.node.store.List()
		c := calls{w.node, books.Core}
		_, preferred := c.Preferred(t.Context(), ids, nil, 60)
		_, allocated := c.Allocate(t.Context(), ids)
		for _, err := range []error{preferred, allocated, c.Start(t.Context(), ids)} {
			if !errors.Is(err, errOver) {
				t.Errorf("a call after the end: %v", err)
			}
		}
		if after := w.node.store.List(); !reflect.DeepEqual(after, before) {
			t.Errorf("allocations after the end: %+v, before %+v", after, before)
		}
	}
}
