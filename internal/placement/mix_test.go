package placement

import (
	"fmt"
	"math"
	"math/rand"
	"testing"

	"tranche.dev/tranche/internal/quantity"
)

// excess is the integral that it stands for.
func TestExcess(t *testing.T) {
	for _, c := range []struct{ mean, deviation, limit float64 }{{10, 2, 10}, {10, 2, 7}, {10, 2, 15}, {100, 30, 180}, {5, 0, 3}, {5, 0, 9}, {5, 1, 90}, {50, 1, 3}} {
		want, dx := 0.0, c.deviation/1000
		if c.deviation == 0 {
			want = max(c.mean-c.limit, 0)
		}
		for i := -8000; i < 8000 && dx > 0; i++ {
			z := (float64(i) + 0.5) / 1000
			want += max(c.mean+z*c.deviation-c.limit, 0) * math.Exp(-z*z/2) / math.Sqrt(2*math.Pi) / 1000
		}
		if got := excess(c.mean, c.deviation, c.limit); math.Abs(got-want) > 1e-4*c.mean {
			t.Errorf("%+v: %v, want %v", c, got, want)
		}
	}
}

// hostNode is a node with idle GPUs and CPU in cores.
func hostNode(name string, gpus int, cpu int64) Node {
	n := Node{Name: name, CPU: cpu * 1000, RAM: 1 << 40, HostKnown: true}
	for g := range gpus {
		n.GPUs = append(n.GPUs, GPU{Index: g, UUID: fmt.Sprint("GPU-", name, g), Name: "T4", FreeCores: CoresWhole})
	}
	return n
}

func hostPod(gpus int, cpu int64) *Pod {
	return &Pod{CPU: cpu * 1000, RAM: 1 << 30, Containers: []Container{{Name: "main", Request: Request{Cores: CoresWhole, Count: gpus}}}}
}

// Pods that need more CPU than is usual for a GPU go where CPU is left over, others where it is short, so that no
// GPU ends up without CPU. Where the CPU is not known, the name decides.
func TestCPUIsLeftForGPUs(t *testing.T) {
	for _, known := range []bool{true, false} {
		got := ""
		for _, cpu := range []int64{16, 2} {
			c, err := NewCluster(Config{})
			if err != nil {
				t.Fatal(err)
			}
			for i := range 200 {
				c.Learn(hostPod(1, int64(6+i%5)))
			}
			for _, n := range []Node{hostNode("poor", 2, 20), hostNode("rich", 2, 40)} {
				n.HostKnown = known
				c.SetNode(n)
			}
			d, err := c.Decide(hostPod(1, cpu), nil)
			if err != nil {
				t.Fatal(err)
			}
			got += d.Best + " "
		}
		if want := map[bool]string{true: "rich poor ", false: "poor poor "}[known]; got != want {
			t.Errorf("known %v: %q, want %q", known, got, want)
		}
	}
}

// A node of 8 is worth keeping whole although the pods that want all of it are too few to be usual. In a mix of 99
// pods of one GPU and one of 8, those are 8 parts in 107 of the demand.
func TestRarePodsOfManyGPUs(t *testing.T) {
	m := &Mix{shapes: map[string]*shape{}}
	for range 99 {
		m.learn(hostPod(1, 4))
	}
	m.learn(hostPod(8, 32))
	f := newFragmenter(m.all(), map[string]int{"T4": 8})
	n := hostNode("n", 8, 0)
	var views []*view
	for g := range n.GPUs {
		views = append(views, f.view(&n.GPUs[g]))
	}
	whole, part := []int{100, 100, 100, 100, 100, 100, 100, 100}, []int{0, 100, 100, 100, 100, 100, 100, 100}
	for _, c := range []struct {
		levels []int
		cpu    int64
		want   float64
	}{{whole, -1, 0}, {whole, 32_000, 0}, {whole, 31_999, 800 * 8. / 107}, {part, -1, 700 * 8. / 107}} {
		if got := f.broken(views, c.levels, c.cpu); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%v, CPU %d: %v, want %v", c.levels, c.cpu, got, c.want)
		}
	}
	if got := f.fragments(views, part, -1); got != 0 {
		t.Errorf("a usual pod cannot use %v", got)
	}
}

// What the next usual pod cannot use is looked up; it is what counting pod by pod gives.
func TestFragments(t *testing.T) {
	for seed := range int64(20) {
		rng := rand.New(rand.NewSource(seed))
		m := &Mix{shapes: map[string]*shape{}}
		for range 200 {
			r := Request{Cores: rng.Intn(11) * 10, Memory: quantity.Bytes(rng.Intn(5)) << 30, Count: max(1, rng.Intn(6)-2)}
			k := Constraints{}
			if rng.Intn(4) == 0 {
				k.Models = []string{[]string{"T4", "A10"}[rng.Intn(2)]}
			}
			m.learn(&Pod{CPU: int64(rng.Intn(4)) * 1000, Containers: []Container{{Request: r, Constraints: k}}})
		}
		f := newFragmenter(m.all(), map[string]int{"T4": 8, "A10": 4})
		for range 50 {
			var views []*view
			var levels []int
			total := 0
			for range 1 + rng.Intn(8) {
				views = append(views, f.view(&GPU{Name: []string{"T4", "A10"}[rng.Intn(2)], Memory: quantity.Bytes(8*(1+rng.Intn(2))) << 30}))
				levels = append(levels, rng.Intn(3)*50)
				total += levels[len(levels)-1]
			}
			cpu := int64(rng.Intn(6)-1) * 700
			want, parts := 0.0, 0.0
			for i, s := range f.shapes[:f.usual] {
				small, enough := 0, 0
				for g, l := range levels {
					if l < views[g].sizes[i] {
						small += l
					} else {
						enough++
					}
				}
				if enough < s.container.Request.Count || cpu >= 0 && cpu < s.cpu {
					small = total
				}
				want, parts = want+s.part*float64(small), parts+s.part
			}
			if got := f.fragments(views, levels, cpu); math.Abs(got-want/parts) > 1e-9 {
				t.Fatalf("seed %d, levels %v, CPU %d: %v, want %v", seed, levels, cpu, got, want/parts)
			}
		}
	}
}
