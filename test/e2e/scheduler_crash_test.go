package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	extender "k8s.io/kube-scheduler/extender/v1"

	"tranche.dev/tranche/test/e2e/bed"
)

// The leader of two replicas is killed in the midst of binding. The test is kube-scheduler, with 8 cycles at a time. The
// other takes over, knows what the dead one bound, and fills the rest: nothing is given twice, nothing is lost.
func TestSchedulerLeaderCrash(t *testing.T) {
	const port, nodes, gpus = extenderPort, 4, 4
	const pods, room = 2*nodes*gpus + 8, 2 * nodes * gpus
	b := shared.up(t)
	f := &fleet{t: t, b: b, http: &http.Client{Transport: &http.Transport{DialContext: b.Control.Dial}, Timeout: 20 * time.Second}}
	b.Control.Daemon("kube-controller-manager").Stop()
	t.Cleanup(func() {
		if err := b.Control.Daemon("kube-controller-manager").Start(); err != nil {
			t.Error(err)
		}
	})
	program, err := filepath.Abs("../../build/bin/tranche")
	if err != nil {
		t.Fatal(err)
	}
	var replicas []*bed.Daemon
	for i := range 2 {
		d, err := b.Control.Start(fmt.Sprintf("replica-%d", i), program, "scheduler", "--kubeconfig="+b.Kubeconfig("admin"), fmt.Sprintf("--address=127.0.0.1:%d", port+i),
			"--pprofAddress=", "--leader-elect", "--leader-elect-resource-name=crash")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(d.Stop)
		replicas = append(replicas, d)
		if f.ext = d; i == 0 {
			f.wait(time.Minute, "the first", func() (bool, error) { return f.ready(port), nil })
		}
	}
	f.nodes("crash", nodes, gpus, nil)
	var list []*corev1.Pod
	for i := range pods {
		p := slicePod(fmt.Sprintf("crash-%d", i), 50, 32)
		p.Spec.SchedulerName = "the-test"
		list = append(list, p)
	}
	f.create(list...)
	made, err := b.Client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{LabelSelector: "app=gpu"})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for i := range nodes {
		names = append(names, fmt.Sprintf("crash%03d", i))
	}
	// all tries to bind every pod that is left, as long as the replica answers.
	left := made.Items
	all := func(port int, each func(done int)) {
		var mu sync.Mutex
		var wg sync.WaitGroup
		var failed []corev1.Pod
		done, next := 0, make(chan *corev1.Pod)
		for range 8 {
			wg.Go(func() {
				for p := range next {
					err := f.cycle(port, p, names)
					mu.Lock()
					if err != nil {
						failed = append(failed, *p)
					} else if done++; each != nil {
						each(done)
					}
					mu.Unlock()
				}
			})
		}
		for i := range left {
			next <- &left[i]
		}
		close(next)
		wg.Wait()
		left = failed
	}
	var killed time.Time
	all(port, func(done int) {
		if done == room/2 {
			killed = time.Now()
			replicas[0].Halt()
		}
	})
	if killed.IsZero() || f.ready(port+1) {
		t.Fatalf("%d pods are left; killed %v", len(left), killed)
	}
	f.wait(time.Minute, "the second", func() (bool, error) { return f.ready(port + 1), nil })
	t.Logf("%.1f s from SIGKILL of the leader to the other being ready", time.Since(killed).Seconds())
	for range 3 { // those that raced try again
		all(port+1, nil)
	}
	full := f.bound(room, time.Minute)
	f.whole(full)
	unanswered, none := 0, 0
	for i := range left {
		if _, ok := full[left[i].Name]; ok {
			unanswered++ // by the leader when it was killed
		} else {
			none++
		}
	}
	t.Logf("%d pods were bound without an answer", unanswered)
	if len(full) != room || none != pods-room {
		t.Errorf("%d pods have a place and %d none; want %d and %d", len(full), none, room, pods-room)
	}
}

func (f *fleet) ready(port int) bool {
	resp, err := f.http.Get(fmt.Sprintf("http://127.0.0.1:%d/readyz", port))
	if err != nil {
		return false
	}
	return resp.Body.Close() == nil && resp.StatusCode == http.StatusOK
}

// cycle is kube-scheduler's for one pod, without scores of its own.
func (f *fleet) cycle(port int, p *corev1.Pod, names []string) error {
	var filtered extender.ExtenderFilterResult
	if err := f.verb(port, "predicates", extender.ExtenderArgs{Pod: p, NodeNames: &names}, &filtered); err != nil {
		return err
	}
	if filtered.Error != "" || len(*filtered.NodeNames) == 0 {
		return errors.New(filtered.Error)
	}
	names = *filtered.NodeNames
	best := names[0]
	if len(names) > 1 {
		var scores extender.HostPriorityList
		if err := f.verb(port, "priorities", extender.ExtenderArgs{Pod: p, NodeNames: &names}, &scores); err != nil {
			return err
		}
		for _, s := range scores {
			if s.Score == 10 {
				best = s.Host
			}
		}
	}
	var bound extender.ExtenderBindingResult
	err := f.verb(port, "bind", extender.ExtenderBindingArgs{PodName: p.Name, PodNamespace: p.Namespace, PodUID: p.UID, Node: best}, &bound)
	if err == nil && bound.Error != "" {
		err = errors.New(bound.Error)
	}
	return err
}

func (f *fleet) verb(port int, verb string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	resp, err := f.http.Post(fmt.Sprintf("http://127.0.0.1:%d/scheduler/%s", port, verb), "application/json", bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(out)
}
