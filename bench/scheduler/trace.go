package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"math/rand"
	"os"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	extender "k8s.io/kube-scheduler/extender/v1"

	"tranche.dev/tranche/bench/report"
	"tranche.dev/tranche/internal/inventory"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/scheduler"
	"tranche.dev/tranche/internal/simulate"
)

// extenderWeight is that of deploy/scheduler/kube-scheduler-config.yaml.
const extenderWeight = 4

// trace replays a workload through the extender's protocol over HTTP, in ranked mode, in a loop that does what
// kube-scheduler does: its filter of totals, its default scores of resources, the extender's at the sample's
// weight, a draw among equals. Beside it the figure in process.
func trace(nodeFile, podFile string, seeds int) ([]report.Row, error) {
	nodes, pods, err := read(nodeFile, podFile)
	if err != nil {
		return nil, err
	}
	config := simulate.Config{Nodes: nodes, Pods: pods, Protocol: "atc23", Load: 1.3}
	for s := range seeds {
		config.Seeds = append(config.Seeds, int64(42+s))
	}
	inside, err := simulate.Run(context.Background(), config)
	if err != nil {
		return nil, err
	}
	var outside []simulate.Point
	lost := 0
	for _, seed := range config.Seeds {
		w, err := simulate.ATC23(context.Background(), nodes, pods, seed, config.Load)
		if err != nil {
			return nil, err
		}
		points, mismatched, err := replay(w, seed)
		if err != nil {
			return nil, err
		}
		outside, lost = append(outside, points...), lost+mismatched
	}
	var rows []report.Row
	for _, arrived := range []int{100, 130} {
		at := func(points []simulate.Point) float64 {
			sum := 0.0
			for _, v := range simulate.At(points, "least-fragmentation", arrived, func(p simulate.Point) float64 { return p.Allocated }) {
				sum += v / float64(seeds)
			}
			return sum
		}
		a, b := at(inside), at(outside)
		name := fmt.Sprintf("trace, %d %% arrived", arrived)
		rows = append(rows, told(name, "GPUs allocated in process", "%", a, fmt.Sprintf("%d seeds", seeds)),
			told(name, "GPUs allocated over HTTP", "%", b, "ranked, default scores, random ties"),
			most(name, "lost", "points", a-b, 0.3, "in process less HTTP"))
	}
	return append(rows, told("trace", "holds mismatched", "", float64(lost)/float64(seeds), "pods per run that went elsewhere than held")), nil
}

func read(nodeFile, podFile string) ([]simulate.Node, []simulate.Pod, error) {
	n, err := os.Open(nodeFile)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = n.Close() }()
	p, err := os.Open(podFile)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = p.Close() }()
	nodes, err := simulate.ReadNodes(n)
	if err != nil {
		return nil, nil, err
	}
	pods, err := simulate.ReadPods(p)
	return nodes, pods, err
}

// host is what kube-scheduler knows of a node.
type host struct {
	name                      string
	cpu, ram, cores, units    int64
	usedCPU, usedRAM, used, m int64
}

func (h *host) fits(p *ask) bool {
	return h.usedCPU+p.cpu <= h.cpu && h.usedRAM+p.ram <= h.ram && h.used+p.cores <= h.cores && h.m+p.units <= h.units
}

// score is NodeResourcesFit (least allocated) and NodeResourcesBalancedAllocation at their default weights.
func (h *host) score(p *ask) int64 {
	free := func(used, of int64) int64 { return (of - used) * 100 / max(of, 1) }
	cpu, ram := h.usedCPU+p.cpu, h.usedRAM+p.ram
	a, b := float64(cpu)/float64(max(h.cpu, 1)), float64(ram)/float64(max(h.ram, 1))
	return (free(cpu, h.cpu)+free(ram, h.ram))/2 + int64((1-math.Abs(a-b)/2)*100)
}

// ask is a pod in kube-scheduler's resources.
type ask struct{ cpu, ram, cores, units int64 }

// memoryUnits are given to each GPU, so that a part of its cores has the same part of its memory.
const memoryUnits = 100

func replay(w simulate.Workload, seed int64) ([]simulate.Point, int, error) {
	core, err := scheduler.NewCore(scheduler.CoreConfig{})
	if err != nil {
		return nil, 0, err
	}
	url, stop, err := extenderServer(core)
	if err != nil {
		return nil, 0, err
	}
	defer stop()
	l := &loop{core: core, url: url, rng: rand.New(rand.NewSource(seed)), at: map[string]*host{}}
	var all int64
	for i := range w.Nodes {
		if err := l.node(i, &w.Nodes[i]); err != nil {
			return nil, 0, err
		}
		all += int64(w.Nodes[i].GPUs) * simulate.Milli
	}
	var sums []simulate.Point
	var counts []float64
	var arrived, used int64
	for i := range w.Pods {
		pod := &w.Pods[i]
		arrived += pod.GPUMilli()
		ok, err := l.schedule(i, pod)
		if err != nil {
			return nil, 0, fmt.Errorf("pod %d: %w", i, err)
		}
		if ok {
			used += pod.GPUMilli()
		}
		x := int(math.Round(100 * float64(arrived) / float64(all)))
		for len(sums) <= x {
			sums, counts = append(sums, simulate.Point{Policy: "least-fragmentation", Seed: seed, Arrived: len(sums)}), append(counts, 0)
		}
		sums[x].Allocated += 100 * float64(used) / float64(all)
		counts[x]++
	}
	var out []simulate.Point
	for x, n := range counts {
		if n > 0 {
			sums[x].Allocated /= n
			out = append(out, sums[x])
		}
	}
	return out, int(core.Stats().HoldsMismatched), nil
}

type loop struct {
	core  *scheduler.Core
	url   string
	rng   *rand.Rand
	hosts []*host
	at    map[string]*host
}

func (l *loop) node(rank int, n *simulate.Node) error {
	h := &host{name: fmt.Sprintf("%06d-%s", rank, n.Name), cpu: n.CPU, ram: n.RAM, cores: int64(n.GPUs) * 100, units: int64(n.GPUs) * memoryUnits}
	l.hosts, l.at[h.name] = append(l.hosts, h), h
	inv := inventory.Node{Unit: podspec.UnitDefault, Domain: podspec.DomainDefault}
	for g := range n.GPUs {
		inv.GPUs = append(inv.GPUs, inventory.GPU{Index: g, UUID: fmt.Sprintf("GPU-%d", g), Model: n.Model, Memory: memoryUnits * podspec.UnitDefault})
	}
	text, err := inventory.Encode(inv)
	if err != nil {
		return err
	}
	l.core.NodeSeen(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: h.name, Annotations: map[string]string{podspec.Inventory: text}},
		Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{corev1.ResourceCPU: *resource.NewMilliQuantity(n.CPU, resource.DecimalSI), corev1.ResourceMemory: *resource.NewQuantity(n.RAM, resource.BinarySI)}}})
	return nil
}

// object is the pod of the trace as a pod of Kubernetes.
func object(i int, p *simulate.Pod) (*corev1.Pod, ask) {
	a := ask{cpu: p.CPU, ram: p.RAM}
	requests := corev1.ResourceList{corev1.ResourceCPU: *resource.NewMilliQuantity(p.CPU, resource.DecimalSI), corev1.ResourceMemory: *resource.NewQuantity(p.RAM, resource.BinarySI)}
	limits := corev1.ResourceList{}
	out := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("p%d", i), Namespace: "default", UID: types.UID(fmt.Sprintf("u%d", i)), ResourceVersion: fmt.Sprint(i + 1), Annotations: map[string]string{}}}
	if p.GPUs > 0 {
		each := int64((p.Milli*100 + simulate.Milli - 1) / simulate.Milli)
		a.cores, a.units = each*int64(p.GPUs), each*int64(p.GPUs)
		limits[corev1.ResourceName(podspec.DefaultNames().Core())] = *resource.NewQuantity(a.cores, resource.DecimalSI)
		limits[corev1.ResourceName(podspec.DefaultNames().Memory())] = *resource.NewQuantity(a.units, resource.DecimalSI)
		out.Annotations[podspec.GPUCount] = fmt.Sprint(p.GPUs)
		for j, m := range p.Models {
			if j > 0 {
				out.Annotations[podspec.Models] += ","
			}
			out.Annotations[podspec.Models] += m
		}
	}
	out.Spec.Containers = []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{Requests: requests, Limits: limits}}}
	return out, a
}

// schedule is one cycle of kube-scheduler.
func (l *loop) schedule(i int, p *simulate.Pod) (bool, error) {
	pod, a := object(i, p)
	var names []string
	for _, h := range l.hosts {
		if h.fits(&a) {
			names = append(names, h.name)
		}
	}
	scores := map[string]int64{}
	var err error
	switch {
	case len(names) == 0:
	case p.GPUs > 0:
		l.core.PodSeen(pod) // the watch shows it before kube-scheduler asks
		names, scores, err = l.extend(pod, names)
	case len(names) > 1:
		scores, err = l.rank("priorities-others", pod, names)
	}
	if err != nil {
		return false, err
	}
	if len(names) == 0 {
		return false, nil
	}
	best, ties := "", 0
	top := int64(-1)
	for _, name := range names {
		switch s := l.at[name].score(&a) + scores[name]*extenderWeight*10; {
		case s > top:
			best, top, ties = name, s, 1
		case s == top:
			if ties++; l.rng.Intn(ties) == 0 {
				best = name
			}
		}
	}
	if p.GPUs > 0 {
		var out extender.ExtenderBindingResult
		if err := l.call("bind", extender.ExtenderBindingArgs{PodName: pod.Name, PodNamespace: pod.Namespace, PodUID: pod.UID, Node: best}, &out); err != nil || out.Error != "" {
			return false, err
		}
	} else {
		pod.Spec.NodeName = best
		l.core.PodSeen(pod)
	}
	h := l.at[best]
	h.usedCPU, h.usedRAM, h.used, h.m = h.usedCPU+a.cpu, h.usedRAM+a.ram, h.used+a.cores, h.m+a.units
	return true, nil
}

// extend asks the extender which nodes will do, and how well.
func (l *loop) extend(pod *corev1.Pod, names []string) ([]string, map[string]int64, error) {
	var filtered extender.ExtenderFilterResult
	if err := l.call("predicates", extender.ExtenderArgs{Pod: pod, NodeNames: &names}, &filtered); err != nil {
		return nil, nil, err
	}
	if filtered.Error != "" || filtered.NodeNames == nil || len(filtered.FailedAndUnresolvableNodes) > 0 {
		return nil, nil, fmt.Errorf("predicates: %+v", filtered.Error)
	}
	names = *filtered.NodeNames
	if len(names) < 2 {
		return names, nil, nil
	}
	scores, err := l.rank("priorities", pod, names)
	return names, scores, err
}

func (l *loop) rank(verb string, pod *corev1.Pod, names []string) (map[string]int64, error) {
	var ranked extender.HostPriorityList
	if err := l.call(verb, extender.ExtenderArgs{Pod: pod, NodeNames: &names}, &ranked); err != nil {
		return nil, err
	}
	scores := make(map[string]int64, len(ranked))
	for _, s := range ranked {
		scores[s.Host] = s.Score
	}
	return scores, nil
}

func (l *loop) call(verb string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	answer, err := post(l.url+"/scheduler/"+verb, body)
	if err != nil {
		return err
	}
	return json.Unmarshal(answer, out)
}
