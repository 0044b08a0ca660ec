package simulate

import (
	"context"
	"fmt"
	"math/rand"
	"strings"
	"testing"
)

// Drawn in order of name; the pods stay in the order in which they come.
func TestSyntheticMemory(t *testing.T) {
	nodes := []Node{{Name: "a", Model: "T4"}, {Name: "b", Model: "G3"}, {Name: "c", Model: "other", GPUMemory: 5}}
	var pods []Pod
	for i, milli := range []int{500, 500, 500, 1000, 10, 900, 0, 330} {
		pods = append(pods, Pod{Name: fmt.Sprint("p", 7-i), GPUs: min(1, milli), Milli: milli})
	}
	var out strings.Builder
	gotNodes, gotPods := SyntheticMemory(nodes, pods, 42)
	for _, n := range gotNodes {
		fmt.Fprintf(&out, "%s %v\n", n.Name, n.GPUMemory)
	}
	for _, p := range gotPods {
		fmt.Fprintf(&out, "%s %d %v\n", p.Name, p.Milli, p.GPUMemory)
	}
	want := `a 16 GiB
b 80 GiB
c 16 GiB
p7 500 8 GiB
p6 500 8 GiB
p5 500 4 GiB
p4 1000 0 B
p3 10 512 MiB
p2 900 16 GiB
p1 0 0 B
p0 330 10.7 GiB
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
	if pods[0].GPUMemory != 0 || nodes[2].GPUMemory != 5 {
		t.Error("the trace was changed")
	}
}

// blind puts every pod on the only GPU.
type blind struct{}

func (blind) place(*Pod) (int, []int, bool, error) { return 0, []int{0}, true, nil }

// A placer that heeds cores alone is found out by the simulation's own books; none of the policies is.
func TestMemoryIsNeverOverCommitted(t *testing.T) {
	w := Workload{Nodes: []Node{{Name: "a", CPU: 8000, RAM: 1 << 34, GPUs: 1, GPUMemory: 16 * gib}},
		Pods: []Pod{{Name: "p", GPUs: 1, Milli: 300, GPUMemory: 10 * gib}, {Name: "q", GPUs: 1, Milli: 300, GPUMemory: 7 * gib}}}
	_, err := replay(context.Background(), w, blind{}, nil, func(int) {})
	if err == nil || err.Error() != "pod q was put on GPUs [0] of node a, where it does not fit" {
		t.Error(err)
	}

	rng := rand.New(rand.NewSource(7))
	var nodes []Node
	var pods []Pod
	for i := range 20 {
		nodes = append(nodes, Node{Name: fmt.Sprint("n", i), CPU: 64_000, RAM: 1 << 40, GPUs: 1 + rng.Intn(8), Model: []string{"T4", "G2", "V100M32"}[rng.Intn(3)]})
	}
	for i := range 200 {
		pods = append(pods, Pod{Name: fmt.Sprint("p", i), CPU: 1000, GPUs: 1, Milli: []int{100, 250, 500, 1000}[rng.Intn(4)]})
	}
	points, err := Run(context.Background(), Config{Nodes: nodes, Pods: pods, Policies: Policies(), Seeds: []int64{1, 2}, Protocol: "atc23", Memory: "synthetic"})
	if err != nil {
		t.Fatal(err)
	}
	for _, policy := range Policies() {
		for seed, v := range At(points, policy, 130, memory) {
			if v < 30 || v > 100 {
				t.Errorf("%s, seed %d: %v %% of the memory is allocated", policy, seed, v)
			}
		}
	}
	var out strings.Builder
	if err := WriteCSV(&out, points[:1]); err != nil || !strings.HasPrefix(out.String(), "policy,seed,arrived_pct,allocated_pct,fragmented_pct,refused,refused_largest,memory_pct\nleast-fragmentation,1,1,1.1364,0.0000,0.0000,0.0000,1.0870\n") {
		t.Error(err, out.String())
	}
}
