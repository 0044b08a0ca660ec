package simulate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"tranche.dev/tranche/internal/placement"
)

// openb reads the openb trace, which is not part of this project: from $OPENB or from beside it.
func openb(t *testing.T, name string) ([]Node, []Pod) {
	dir := os.Getenv("OPENB")
	if dir == "" {
		dir = "../../../shared/data/openb"
	}
	open := func(file string) io.Reader {
		data, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			t.Skipf("the openb trace is not there (set OPENB to its folder): %v", err)
		}
		return bytes.NewReader(data)
	}
	nodes, err := ReadNodes(open("openb_node_list_gpu_node.csv"))
	if err != nil {
		t.Fatal(err)
	}
	pods, err := ReadPods(open("openb_pod_list_" + name + ".csv"))
	if err != nil {
		t.Fatal(err)
	}
	return nodes, pods
}

func seeds(from, to int64) []int64 {
	var out []int64
	for ; from <= to; from++ {
		out = append(out, from)
	}
	return out
}

// The baselines land where they were published: GPUs allocated when 100 and 130 % of the cluster's have
// arrived, mean of seeds 42 to 51. The scheduler's policy is better than the best of them.
func TestPublishedFigures(t *testing.T) {
	if testing.Short() || raceDetector {
		t.Skip("half a minute of CPU, minutes under the race detector: `make test` runs it without")
	}
	nodes, pods := openb(t, "default")
	published := map[string][2]float64{"fgd": {95.23, 95.39}, "bestfit": {92.86, 93.08}, "gpupacking": {91.78, 92.00},
		"gpuclustering": {91.65, 91.88}, "dotprod": {90.62, 90.85}, "random": {86.30, 87.47}}
	names := []string{"least-fragmentation"}
	for name := range published {
		names = append(names, name)
	}
	points, err := Run(context.Background(), Config{Nodes: nodes, Pods: pods, Policies: names, Seeds: seeds(42, 51), Protocol: "atc23"})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range published {
		for i, x := range []int{100, 130} {
			if got := mean(values(At(points, name, x, allocated))).Mean; math.Abs(got-want[i]) > 0.3 {
				t.Errorf("%s at %d %%: %.2f, published %.2f", name, x, got, want[i])
			}
		}
	}
	if d := Paired(points, "least-fragmentation", "fgd", 100); d.Mean < 0.5 {
		t.Errorf("least-fragmentation is better than fgd by %.2f points only", d.Mean)
	}
}

// A tiny trace with a known outcome, in every form of output.
func TestOutputs(t *testing.T) {
	nodes := []Node{{Name: "a", CPU: 8000, RAM: 1 << 34, GPUs: 1, Model: "T4"}}
	pods := []Pod{{Name: "p", GPUs: 1, Milli: 600}, {Name: "q", GPUs: 1, Milli: 600}, {Name: "r", GPUs: 1, Milli: 400}}
	points, err := Run(context.Background(), Config{Nodes: nodes, Pods: pods, Policies: []string{"least-fragmentation", "bestfit"}, Seeds: []int64{1}})
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for _, write := range []func(io.Writer, []Point) error{WriteCSV, WriteTable} {
		if err := write(&out, points); err != nil {
			t.Fatal(err)
		}
	}
	want := `policy,seed,arrived_pct,allocated_pct,fragmented_pct,refused,refused_largest
least-fragmentation,1,60,60.0000,26.6667,0.0000,0.0000
least-fragmentation,1,120,60.0000,26.6667,1.0000,1.0000
least-fragmentation,1,160,100.0000,0.0000,1.0000,1.0000
bestfit,1,60,60.0000,26.6667,0.0000,0.0000
bestfit,1,120,60.0000,26.6667,1.0000,1.0000
bestfit,1,160,100.0000,0.0000,1.0000,1.0000
policy               seeds  allocated @50%  fragmented  allocated @80%  fragmented    allocated @100%  fragmented    allocated @160%  fragmented
least-fragmentation  1      -               -           60.00 ± 0.00    26.67 ± 0.00  60.00 ± 0.00     26.67 ± 0.00  100.00 ± 0.00    0.00 ± 0.00
bestfit              1      -               -           60.00 ± 0.00    26.67 ± 0.00  60.00 ± 0.00     26.67 ± 0.00  100.00 ± 0.00    0.00 ± 0.00
least-fragmentation: 0.0 pods without room when 95 % have arrived, 0.0 of them of the largest
bestfit: 0.0 pods without room when 95 % have arrived, 0.0 of them of the largest
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
	var svg, json bytes.Buffer
	if err := WriteSVG(&svg, points); err != nil || strings.Count(svg.String(), "<polyline") != 4 {
		t.Errorf("%v: %s", err, svg.String())
	}
	if err := WriteJSON(&json, points[:1]); err != nil || json.String() != `[
 {
  "policy": "least-fragmentation",
  "seed": 1,
  "arrived_pct": 60,
  "allocated_pct": 60,
  "fragmented_pct": 26.666666666666664
 }
]
` {
		t.Errorf("%v: %s", err, json.String())
	}
}

// What a run has no point for is left out of the table, and so is what only some of its seeds have.
func TestTableBeforeTheFirstPoint(t *testing.T) {
	for _, c := range []struct {
		points []Point
		want   string
	}{
		{[]Point{{Policy: "fgd", Seed: 1, Arrived: 120, Allocated: 100, Memory: 70}}, `
policy  seeds  allocated @50%  fragmented  memory  allocated @80%  fragmented  memory  allocated @100%  fragmented  memory  allocated @120%  fragmented   memory
fgd     1      -               -           -       -               -           -       -                -           -       100.00 ± 0.00    0.00 ± 0.00  70.00 ± 0.00
`},
		{[]Point{{Policy: "fgd", Seed: 1, Arrived: 40, Allocated: 40}, {Policy: "fgd", Seed: 1, Arrived: 96, Allocated: 90}, {Policy: "fgd", Seed: 2, Arrived: 96, Allocated: 90}}, `
policy  seeds  allocated @50%  fragmented  allocated @80%  fragmented  allocated @96%  fragmented
fgd     2      -               -           -               -           90.00 ± 0.00    0.00 ± 0.00
`},
	} {
		var out strings.Builder
		if err := WriteTable(&out, c.points); err != nil || "\n"+out.String() != c.want {
			t.Errorf("%v; got\n%s\nwant%s", err, out.String(), c.want)
		}
	}
}

// A pod of 2 GPUs finds one of each node taken.
func TestRefused(t *testing.T) {
	var nodes []Node
	var pods []Pod
	for _, model := range []string{"T4", "A10", "G3"} {
		nodes = append(nodes, Node{Name: model, CPU: 8000, RAM: 1 << 34, GPUs: 2, Model: model})
		pods = append(pods, Pod{Name: model, GPUs: 1, Milli: 1000, Models: []string{model}})
	}
	pods = append(pods, Pod{Name: "cpu", CPU: 9000}, Pod{Name: "two", GPUs: 2, Milli: 1000})
	points, err := Run(context.Background(), Config{Nodes: nodes, Pods: pods})
	if err != nil {
		t.Fatal(err)
	}
	if p := points[len(points)-1]; p.Arrived != 83 || p.Refused != 2 || p.RefusedLargest != 1 {
		t.Errorf("%+v", p)
	}
	var out strings.Builder
	if err := WriteTable(&out, points); err != nil || !strings.HasSuffix(out.String(), "\nleast-fragmentation: 2.0 pods without room when 83 % have arrived, 1.0 of them of the largest\n") {
		t.Error(err, out.String())
	}
}

// A part of a model's name will do, for the scheduler's policies and for baselines alike.
func TestPartOfAModelsName(t *testing.T) {
	config := Config{Policies: []string{"least-fragmentation", "bestfit"},
		Nodes: []Node{{Name: "a", GPUs: 1, Model: "H100-SXM5-80GB"}, {Name: "b", GPUs: 1, Model: "T4"}},
		Pods:  []Pod{{Name: "p", GPUs: 1, Milli: 1000, Models: []string{"h100"}}, {Name: "q", GPUs: 1, Milli: 1000, Models: []string{"h100"}}}}
	points, err := Run(t.Context(), config)
	var got []string
	for _, p := range points {
		got = append(got, fmt.Sprint(p.Policy, " ", p.Arrived, " ", p.Allocated))
	}
	want := []string{"least-fragmentation 50 50", "least-fragmentation 100 50", "bestfit 50 50", "bestfit 100 50"}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
}

// Pods that ask for a million times the cluster take no memory for the per cents in between.
func TestFarTooManyPods(t *testing.T) {
	pods := slices.Repeat([]Pod{{Name: "p", GPUs: 64, Milli: 1000}}, 20_000)
	points, err := Run(t.Context(), Config{Policies: []string{"random"}, Nodes: []Node{{Name: "a", GPUs: 1}}, Pods: pods})
	if err != nil || len(points) != len(pods) || points[len(points)-1].Arrived != 128_000_000 {
		t.Fatalf("%d points, %v", len(points), err)
	}
	var plot bytes.Buffer
	if err := WriteSVG(&plot, points[len(points)-2:]); err != nil || strings.Count(plot.String(), "<polyline") != 2 {
		t.Error(err)
	}
}

func TestHowMany(t *testing.T) {
	nodes := []Node{{Name: "a", CPU: 8000, RAM: 1 << 34, GPUs: 2, Model: "H100", GPUMemory: 80 << 30}}
	pods := []Pod{{Name: "p", GPUs: 1, Milli: 600, GPUMemory: 10 << 30}, {Name: "q", GPUs: 2, Milli: 1000}}
	shape, err := ParseShape("cores=20,memory=30Gi")
	if err != nil {
		t.Fatal(err)
	}
	got, err := HowMany(context.Background(), Config{Nodes: nodes, Pods: pods}, placement.LeastFragmentation, shape)
	if want := (Fit{Placed: 1, Failed: 1, More: 4}); err != nil || got != want {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
}

// So many that fit are counted, one more is an error.
func TestFillIsBounded(t *testing.T) {
	shape := Pod{Name: "fit", GPUs: 1, Milli: 250}
	for most, want := range map[int]string{4: "4 <nil>", 3: "3 pod fit: more than 3 fit: must ask for more of a GPU"} {
		o, err := newOurs(placement.LeastFragmentation, []Node{{Name: "a", GPUs: 1}})
		if err != nil {
			t.Fatal(err)
		}
		n, err := o.fill(t.Context(), &shape, most)
		if got := fmt.Sprint(n, err); got != want {
			t.Errorf("at most %d: %s; want %s", most, got, want)
		}
	}
}

// The protocol is the published one, draw for draw: what it draws from a seed does not change.
func TestATC23(t *testing.T) {
	var nodes []Node
	var pods []Pod
	for i := range 4 {
		nodes = append(nodes, Node{Name: fmt.Sprint("n", i), GPUs: 1})
		pods = append(pods, Pod{Name: fmt.Sprint("p", i), GPUs: 1, Milli: 200 * (i + 1)})
	}
	w, err := ATC23(t.Context(), nodes, pods, 42, 1)
	if err != nil {
		t.Fatal(err)
	}
	got := ""
	for _, p := range w.Pods {
		got += p.Name + " "
	}
	for _, n := range w.Nodes {
		got += n.Name + " "
	}
	var sum int64
	for i := range w.Pods {
		sum += w.Pods[i].GPUMilli()
	}
	if sum > 4000 || len(w.Pods) < 4 || len(w.Nodes) != 4 {
		t.Errorf("%d asked for of 4000: %s", sum, got)
	}
	if again, err := ATC23(t.Context(), nodes, pods, 42, 1); err != nil || fmt.Sprint(again) != fmt.Sprint(w) {
		t.Errorf("%v, then %v, %v", w, again, err)
	}
}

// Loads that need pods without end, or none, are refused before anything is replayed.
func TestLoadOutOfReach(t *testing.T) {
	nodes := []Node{{Name: "a", GPUs: 64}, {Name: "b", GPUs: 64}}
	pods := []Pod{{Name: "p", GPUs: 1, Milli: 1}, {Name: "q"}}
	for load, want := range map[float64]string{
		100:       "seed 42: load 100: takes about 25600000 pods like these: must be at most 10000000, which is a load of about 39.1",
		0.0000001: "seed 42: load 1e-07: leaves no pod that asks for GPUs: together they may ask for 1.28e-05",
	} {
		if _, err := Run(t.Context(), Config{Nodes: nodes, Pods: pods, Protocol: "atc23", Load: load}); err == nil || err.Error() != want {
			t.Errorf("load %v: %v; want %s", load, err, want)
		}
	}
}

// Pods are drawn and taken out no longer than the context lasts.
func TestTuningHeedsTheContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	pods := []Pod{{Name: "p", GPUs: 1, Milli: 500}, {Name: "q", GPUs: 1, Milli: 500}}
	for _, load := range []float64{0.5, 100} {
		if _, err := ATC23(ctx, []Node{{Name: "a", GPUs: 1}}, pods, 42, load); !errors.Is(err, context.Canceled) {
			t.Errorf("load %v: %v", load, err)
		}
	}
}
