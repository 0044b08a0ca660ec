package placement

import (
	"fmt"
	"math/rand"
	"reflect"
	"slices"
	"testing"

	"tranche.dev/tranche/internal/quantity"
)

// randomPod has up to 4 containers of all phases, with constraints now and then.
func randomPod(rng *rand.Rand) Pod {
	var p Pod
	p.Policy = []Policy{LeastFragmentation, Binpack, Spread, Topology}[rng.Intn(4)]
	for i := range 1 + rng.Intn(4) {
		c := Container{Name: fmt.Sprint("c", i), Phase: Phase(rng.Intn(3)), Request: Request{
			Cores: []int{0, 20, 30, 50, 60, 100}[rng.Intn(6)], Memory: quantity.Bytes(rng.Intn(4)*20) * gi, Count: 1 + rng.Intn(2)}}
		switch rng.Intn(8) {
		case 0:
			c.Constraints.Models = []string{"A100"}
		case 1:
			c.Constraints.NotUUIDs = []string{"GPU-0001-aaaa"}
		}
		p.Containers = append(p.Containers, c)
	}
	if n := len(p.Containers); n > 1 {
		switch group := []string{"c0", "c1"}; rng.Intn(4) {
		case 0:
			p.Apart = [][]string{group}
		case 1:
			p.Together = [][]string{group}
			p.Containers[1].Request.Count = p.Containers[0].Request.Count
		}
	}
	return p
}

// possible tells by trying everything whether the pod has a place.
func possible(n *Node, p *Pod, chosen []set) bool {
	i := len(chosen)
	if i == len(p.Containers) {
		return verify(n, p, chosen) == ""
	}
	for s := set(1); s < 1<<len(n.GPUs); s++ {
		if s.len() == p.Containers[i].Request.Count && possible(n, p, append(slices.Clone(chosen), s)) {
			return true
		}
	}
	return false
}

// uses is what the pod uses of GPU g while container at runs, or, with at beyond the last, once it is up.
func uses(n *Node, p *Pod, chosen []set, g, at int) amount {
	var sum amount
	for i := range p.Containers {
		c := &p.Containers[i]
		runs := i == at || c.Phase == Sidecar && i < at || at == len(p.Containers) && c.Phase != Init
		if runs && chosen[i].has(g) {
			cores, memory := c.on(&n.GPUs[g])
			sum.cores, sum.memory = sum.cores+cores, sum.memory+memory
		}
	}
	return sum
}

// verify says what is wrong with a placement.
func verify(n *Node, p *Pod, chosen []set) string {
	for i := range p.Containers {
		c := &p.Containers[i]
		if chosen[i].len() != c.Request.Count {
			return c.Name + " has not as many GPUs as it asked for"
		}
		for _, g := range chosen[i].list() {
			if n.GPUs[g].Excluded != "" || c.Constraints.allows(&n.GPUs[g]) != "" {
				return c.Name + " is on a GPU that is not allowed"
			}
		}
		for j := range i {
			if grouped(p.Apart, c.Name, p.Containers[j].Name) && chosen[i]&chosen[j] != 0 {
				return "not apart"
			}
			if grouped(p.Together, c.Name, p.Containers[j].Name) && chosen[i] != chosen[j] {
				return "not together"
			}
		}
	}
	for g := range n.GPUs {
		for at := range len(p.Containers) + 1 {
			if at < len(p.Containers) && p.Containers[at].Phase != Init {
				continue
			}
			use := uses(n, p, chosen, g, at)
			if use.cores > max(n.GPUs[g].FreeCores, 0) || use.memory > max(n.GPUs[g].FreeMemory, 0) {
				return fmt.Sprintf("gpu %d is overcommitted", g)
			}
		}
	}
	return ""
}

func randomNode(rng *rand.Rand) *Node {
	n := &Node{}
	for range 2 + rng.Intn(2) {
		n.GPUs = append(n.GPUs, free(rng.Intn(11)*10+10*rng.Intn(2), rng.Intn(9)*10)...)
	}
	for i := range n.GPUs {
		n.GPUs[i].Index, n.GPUs[i].UUID = i, fmt.Sprintf("GPU-%04d-aaaa", i)
		n.GPUs[i].Name = []string{"NVIDIA A100-SXM4-80GB", "Tesla T4"}[rng.Intn(2)]
		n.GPUs[i].FreeCores = min(n.GPUs[i].FreeCores, 100)
		if rng.Intn(12) == 0 {
			n.GPUs[i].Excluded = "unhealthy"
		}
	}
	return n
}

// A place is found exactly when there is one, it keeps every rule, and the reservation is the peak.
func TestPlacePodAgainstBruteForce(t *testing.T) {
	seed := rand.Int63()
	rng := rand.New(rand.NewSource(seed))
	placed := 0
	for step := range 3000 {
		n, p := randomNode(rng), randomPod(rng)
		a, err := PlacePod(n, &p)
		if want := possible(n, &p, nil); want != (err == nil) {
			t.Fatalf("seed %d, step %d: %+v on %+v: %v; brute force says %v", seed, step, p, n, err, want)
		}
		if err != nil {
			continue
		}
		placed++
		chosen := make([]set, len(p.Containers))
		for i, uuids := range a.Containers {
			for _, u := range uuids {
				chosen[i] |= 1 << slices.IndexFunc(n.GPUs, func(g GPU) bool { return g.UUID == u })
			}
		}
		if wrong := verify(n, &p, chosen); wrong != "" {
			t.Fatalf("seed %d, step %d: %+v on %+v: %v: %s", seed, step, p, n, a, wrong)
		}
		var held []Held
		for g := range n.GPUs {
			var peak amount
			for at := range len(p.Containers) + 1 {
				if at == len(p.Containers) || p.Containers[at].Phase == Init {
					use := uses(n, &p, chosen, g, at)
					peak.cores, peak.memory = max(peak.cores, use.cores), max(peak.memory, use.memory)
				}
			}
			if peak != (amount{}) {
				held = append(held, Held{n.GPUs[g].UUID, peak.cores, quantity.Bytes(peak.memory)})
			}
		}
		if !reflect.DeepEqual(held, a.Held) {
			t.Fatalf("seed %d, step %d: %+v: held %v, the peak is %v", seed, step, p, a.Held, held)
		}
	}
	if placed < 300 {
		t.Errorf("only %d of 3000 had a place", placed)
	}
}

// A cluster that has seen pods come and go, nodes change, vanish and return decides as one that is made of
// its final state, and its free amounts are those that the pods leave.
func TestClusterAgainstAFreshOne(t *testing.T) {
	seed := rand.Int63()
	rng := rand.New(rand.NewSource(seed))
	for round := range 30 {
		c, err := NewCluster(Config{CheckHost: true})
		if err != nil {
			t.Fatal(err)
		}
		nodes, pods := map[string]*Node{}, map[string]Pod{}
		type held struct {
			node string
			pod  Pod
			gpus []Held
		}
		holds := map[string]held{}
		fresh := func() *Cluster {
			f, _ := NewCluster(Config{CheckHost: true})
			f.mix, f.frag = c.mix, nil
			for _, n := range nodes {
				f.SetNode(*n)
			}
			for key, h := range holds {
				f.Record(key, h.node, &h.pod, h.gpus)
			}
			return f
		}
		for step := range 60 {
			name, key := fmt.Sprint("n", rng.Intn(6)), fmt.Sprint("p", rng.Intn(20))
			switch rng.Intn(6) {
			case 0:
				n := randomNode(rng)
				n.Name, n.CPU, n.RAM, n.HostKnown = name, 8000, 1<<36, rng.Intn(3) > 0
				nodes[name] = n
				c.SetNode(*n)
			case 1:
				delete(nodes, name)
				c.RemoveNode(name)
			case 2:
				if _, ok := holds[key]; c.Release(key) != ok {
					t.Fatalf("seed %d: %s: release", seed, key)
				}
				delete(holds, key)
			default:
				p := randomPod(rng)
				p.CPU, pods[key] = int64(rng.Intn(3000)), p
				c.Learn(&p)
				d, err := c.Decide(&p, nil)
				if err != nil {
					t.Fatal(err)
				}
				f := fresh()
				f.fragmenter()
				f.frag.gpus, f.frag = c.frag.gpus, c.frag
				want, err := f.Decide(&p, nil)
				if err != nil || d.Best != want.Best || !reflect.DeepEqual(d.Assignment, want.Assignment) || !sameScores(d, want) {
					t.Fatalf("seed %d, round %d, step %d: %+v:\n%+v, a fresh one says\n%+v, %v", seed, round, step, p, *d, *want, err)
				}
				if d.Best == "" {
					continue
				}
				best, a := d.Best, d.Assignment
				if err := c.Reserve(key, best, &p, a); err != nil {
					if _, ok := holds[key]; !ok {
						t.Fatalf("seed %d: reserve what was decided: %v", seed, err)
					}
					continue
				}
				holds[key] = held{best, p, a.Held}
			}
		}
		f := fresh()
		for name := range nodes {
			got, _ := c.Node(name)
			want, _ := f.Node(name)
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("seed %d: node %s is %+v, should be %+v", seed, name, got, want)
			}
			for _, g := range got.GPUs {
				if h := holds; g.FreeCores < 0 && len(h) == 0 {
					t.Fatalf("seed %d: overcommitted without pods: %+v", seed, g)
				}
			}
		}
	}
}

// sameScores leaves out nodes that are only known by what is held on them.
func sameScores(a, b *Decision) bool {
	scores := func(d *Decision) map[string]string {
		m := map[string]string{}
		for i, c := range d.Candidates {
			if why := d.Why(i); why != noInventory {
				m[d.Node(i)] = fmt.Sprint(c.Score, why)
			}
		}
		return m
	}
	return reflect.DeepEqual(scores(a), scores(b))
}
