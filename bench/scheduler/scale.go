package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand"
	"net"
	"net/http"
	"runtime"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	extender "k8s.io/kube-scheduler/extender/v1"

	"tranche.dev/tranche/bench/report"
	"tranche.dev/tranche/internal/inventory"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/scheduler"
)

const gib = 1 << 30

// cluster is a core with nodes of 8 GPUs and 10 pods on each.
type cluster struct {
	core  *scheduler.Core
	names []string
	bound []*corev1.Pod
	rng   *rand.Rand
	next  int
}

func newCluster(nodes int) (*cluster, error) {
	core, err := scheduler.NewCore(scheduler.CoreConfig{})
	if err != nil {
		return nil, err
	}
	c := &cluster{core: core, rng: rand.New(rand.NewSource(1))}
	for i := range nodes {
		name := fmt.Sprintf("node-%05d", i)
		inv := inventory.Node{Unit: podspec.UnitDefault, Domain: podspec.DomainDefault}
		for g := range 8 {
			inv.GPUs = append(inv.GPUs, inventory.GPU{Index: g, Minor: g, UUID: fmt.Sprintf("GPU-%08x-0000-0000-0000-%012x", i, g), Model: "NVIDIA H100 80GB HBM3", Memory: 80 * gib})
		}
		text, err := inventory.Encode(inv)
		if err != nil {
			return nil, err
		}
		core.NodeSeen(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{podspec.Inventory: text}},
			Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("192"), corev1.ResourceMemory: resource.MustParse("2Ti")}}})
		c.names = append(c.names, name)
	}
	for len(c.bound) < 10*nodes {
		if err := c.bind(c.pod(), c.names[c.rng.Intn(nodes)]); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// pod is one more; the size is one of several that are usual.
func (c *cluster) pod() *corev1.Pod {
	c.next++
	asks := [][2]int64{{10, 16}, {20, 32}, {25, 80}, {50, 160}, {50, 64}, {100, 0}, {5, 8}, {30, 32}}
	ask := asks[c.rng.Intn(len(asks))]
	name := fmt.Sprintf("pod-%07d", c.next)
	limits := corev1.ResourceList{"cpu": resource.MustParse("4"), "memory": resource.MustParse("16Gi")}
	limits[corev1.ResourceName(podspec.DefaultNames().Core())] = *resource.NewQuantity(ask[0], resource.DecimalSI)
	if ask[1] > 0 {
		limits[corev1.ResourceName(podspec.DefaultNames().Memory())] = *resource.NewQuantity(ask[1], resource.DecimalSI)
	}
	return &corev1.Pod{TypeMeta: metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID("5f1d0000-0000-4000-8000-" + fmt.Sprintf("%012d", c.next)), ResourceVersion: fmt.Sprint(c.next), Labels: map[string]string{"app": "training"}},
		Spec: corev1.PodSpec{SchedulerName: "default-scheduler", ServiceAccountName: "default", Containers: []corev1.Container{{Name: "main", Image: "registry.example/training:1",
			Command: []string{"python", "train.py"}, Env: []corev1.EnvVar{{Name: "A", Value: "b"}}, Resources: corev1.ResourceRequirements{Limits: limits, Requests: limits}}}}}
}

// bind binds a pod to a node if it fits there.
func (c *cluster) bind(p *corev1.Pod, node string) error {
	b, err := c.core.Bind(p.UID, node, p)
	if err != nil {
		c.core.PodGone(p.UID)
		return nil
	}
	p.Spec.NodeName, p.Annotations = node, b.Annotations
	c.core.Bound(b)
	c.core.PodSeen(p)
	c.bound = append(c.bound, p)
	return nil
}

// leave lets one pod end.
func (c *cluster) leave() {
	i := c.rng.Intn(len(c.bound))
	c.core.PodGone(c.bound[i].UID)
	c.bound[i] = c.bound[len(c.bound)-1]
	c.bound = c.bound[:len(c.bound)-1]
}

type times []time.Duration

// at is a quantile in milliseconds.
func (t times) at(q float64) float64 {
	s := slices.Sorted(slices.Values(t))
	return float64(s[min(len(s)-1, int(q*float64(len(s))))]) / float64(time.Millisecond)
}

func (t times) mean() float64 {
	sum := time.Duration(0)
	for _, d := range t {
		sum += d
	}
	return float64(sum) / float64(len(t)) / float64(time.Millisecond)
}

func heap() float64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc) / 1e6
}

// scale measures nodes and twice as many.
func scale(nodes, count int) ([]report.Row, error) {
	var rows []report.Row
	var medians []float64
	for i, n := range []int{nodes, 2 * nodes} {
		before := heap()
		c, err := newCluster(n)
		if err != nil {
			return nil, err
		}
		memory := heap() - before
		whole, filter, rank, err := c.decisions(count)
		if err != nil {
			return nil, err
		}
		medians = append(medians, whole.at(0.5))
		name := fmt.Sprintf("%d nodes, %d pods", n, len(c.bound))
		const decide = "in process: Filter and Prioritize of all nodes"
		sized := []report.Row{
			most(name, "decision p50", "ms", whole.at(0.5), 1, decide),
			most(name, "decision p99", "ms", whole.at(0.99), 3, decide),
			told(name, "decision p10", "ms", whole.at(0.1), "in process: the undisturbed ones"),
			told(name, "Filter p50", "ms", filter.at(0.5), "in process"),
			told(name, "Prioritize p50", "ms", rank.at(0.5), "in process"),
			{Case: name, Metric: "decisions", Unit: "1/s", Value: 1000 / whole.mean(), Target: 1000, Better: "higher", Label: "sim: in process, with bind and a pod that ends"},
			most(name, "memory", "MB", memory, 500, "heap of the core"),
		}
		if i > 0 { // the larger cluster is only told
			for at := range sized {
				sized[at].Target, sized[at].Better = 0, ""
			}
		}
		rows = append(rows, sized...)
		if i == 0 {
			for _, names := range []int{min(500, n), n} {
				r, err := c.web(names, max(count, 100))
				if err != nil {
					return nil, err
				}
				rows = append(rows, r...)
			}
		}
	}
	return append(rows, most(fmt.Sprintf("%d nodes over %d", 2*nodes, nodes), "cost per decision", "ratio", medians[1]/medians[0], 2.2, "in process, medians")), nil
}

// decisions schedules pods as kube-scheduler does, each after another has ended.
func (c *cluster) decisions(count int) (whole, filter, rank times, err error) {
	var v scheduler.Verdict
	var scores []scheduler.Score
	for i := range count + count/4 {
		c.leave()
		p := c.pod()
		c.core.PodSeen(p) // the watch shows it before kube-scheduler asks
		a := scheduler.AskedPod(p)
		t0 := time.Now()
		if err := c.core.Filter(a, c.names, &v); err != nil {
			return nil, nil, nil, err
		}
		t1 := time.Now()
		if scores, err = c.core.Prioritize(a, v.Passed, scores); err != nil {
			return nil, nil, nil, err
		}
		t2 := time.Now()
		if i >= count/4 { // after warming up
			whole, filter, rank = append(whole, t2.Sub(t0)), append(filter, t1.Sub(t0)), append(rank, t2.Sub(t1))
		}
		for _, s := range scores {
			if s.Score == 10 {
				if err := c.bind(p, s.Node); err != nil {
					return nil, nil, nil, err
				}
			}
		}
	}
	return whole, filter, rank, nil
}

// noAPI takes every binding.
type noAPI struct{}

func (noAPI) Pod(context.Context, string, string) (*corev1.Pod, error)     { return nil, nil }
func (noAPI) Bind(context.Context, scheduler.Binding) error                { return nil }
func (noAPI) Event(types.NamespacedName, types.UID, string)                {}
func (noAPI) Violations([]types.NamespacedName) int                        { return 0 }
func (noAPI) Evict(context.Context, types.NamespacedName, types.UID) error { return nil }

// serve serves on a loopback port until the returned function is called.
func serve(h http.Handler) (string, func(), error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	s := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = s.Serve(l) }() // ends with Close
	return "http://" + l.Addr().String(), func() { _ = s.Close() }, nil
}

func extenderServer(core *scheduler.Core) (string, func(), error) {
	s := scheduler.NewServer(core, noAPI{}, slog.New(slog.NewTextHandler(io.Discard, nil)), "bench", 0)
	s.Ready()
	return serve(s.Handler())
}

// web measures both verbs over HTTP against a server that reads the same bodies and writes the same answers
// without looking at them, in turn: the bare exchange, and with what kube-scheduler's client does on its side,
// which is to build and read the JSON.
func (c *cluster) web(names, count int) ([]report.Row, error) {
	ours, stop, err := extenderServer(c.core)
	if err != nil {
		return nil, err
	}
	defer stop()
	var answer []byte
	answers := [2][]byte{[]byte("{}"), []byte("[]")} // by verb: the last one's, of the same size within a few bytes
	echo, stopEcho, err := serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.ReadAll(r.Body); err == nil {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write(answer) // a failure shows at the client
		}
	}))
	if err != nil {
		return nil, err
	}
	defer stopEcho()
	list := slices.Clone(c.names[:names])
	verbs := []string{"predicates", "priorities"}
	var bare, client [2][2]times // verb, server
	for i := range count + count/4 {
		c.leave()
		p := c.pod()
		c.core.PodSeen(p)
		list = c.asWorkers(list, c.names[:names])
		var scores extender.HostPriorityList
		for v, verb := range verbs {
			args := extender.ExtenderArgs{Pod: p, NodeNames: &list}
			body, err := json.Marshal(args)
			if err != nil {
				return nil, err
			}
			results := []any{&extender.ExtenderFilterResult{}, &scores}
			urls := []string{ours + "/scheduler/" + verb, echo}
			answer = answers[v]
			for turn := range 2 {
				server := (turn + i) % 2 // who comes second finds the caches warm
				t0 := time.Now()
				got, err := post(urls[server], body)
				if err != nil {
					return nil, err
				}
				t1 := time.Now()
				if server == 0 {
					answer, answers[v] = got, got
				}
				if i >= count/4 {
					bare[v][server] = append(bare[v][server], t1.Sub(t0))
				}
			}
			for turn := range 2 {
				server := (turn + i) % 2
				t0 := time.Now()
				if err := send(urls[server], args, results[v]); err != nil {
					return nil, err
				}
				if i >= count/4 {
					client[v][server] = append(client[v][server], time.Since(t0))
				}
			}
		}
		for _, s := range scores {
			if s.Score == 10 {
				if err := c.bind(p, s.Host); err != nil {
					return nil, err
				}
				break
			}
		}
	}
	var rows []report.Row
	for v, verb := range verbs {
		name := fmt.Sprintf("HTTP %s, %d names", verb, names)
		a, b, ka, kb := bare[v][0], bare[v][1], client[v][0], client[v][1]
		rows = append(rows, told(name, "p50", "ms", a.at(0.5), "bodies made before"), told(name, "p99", "ms", a.at(0.99), "bodies made before"),
			told(name, "p50, echo", "ms", b.at(0.5), "the same bodies"),
			most(name, "p50 over echo", "ratio", a.at(0.5)/b.at(0.5), 1.5, "the same bodies, in turn"),
			told(name, "p10 over echo", "ratio", a.at(0.1)/b.at(0.1), "the undisturbed ones"),
			told(name, "client's p50", "ms", ka.at(0.5), "with kube-scheduler's JSON"),
			most(name, "client's p50 over echo", "ratio", ka.at(0.5)/kb.at(0.5), 1.5, "with kube-scheduler's JSON"))
	}
	return rows, nil
}

// asWorkers is the order in which kube-scheduler names nodes that pass its filters: 16 workers take chunks of the
// nodes, from where the last pod's search ended, and add what passes as they go.
func (c *cluster) asWorkers(to, from []string) []string {
	chunk := max(1, min(int(math.Sqrt(float64(len(from)))), len(from)/16+1))
	start := c.rng.Intn(len(from))
	var work [16][2]int
	next := 0
	to = to[:0]
	for len(to) < len(from) {
		w := &work[c.rng.Intn(len(work))]
		if w[0] == w[1] {
			if next == len(from) {
				continue
			}
			w[0], w[1] = next, min(next+chunk, len(from))
			next = w[1]
		}
		to = append(to, from[(start+w[0])%len(from)])
		w[0]++
	}
	return to
}

// send is what kube-scheduler's client does.
func send(url string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	resp, err := http.Post(url, "application/json", bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	return json.NewDecoder(resp.Body).Decode(out)
}

func post(url string, body []byte) ([]byte, error) {
	resp, err := http.Post(url, "application/json", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	out, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", url, resp.Status, out)
	}
	return out, err
}
