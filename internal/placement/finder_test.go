package placement

import (
	"fmt"
	"math/rand"
	"slices"
	"testing"
)

// Every name is found at its slot, and no other, whatever slots are free.
func TestFinder(t *testing.T) {
	for _, n := range []int{0, 1, 2, 3, 100, 5000} {
		nodes := make([]*node, n)
		for i := range nodes {
			if i%3 != 1 {
				nodes[i] = &node{Node: Node{Name: fmt.Sprint("node-", i)}}
			}
		}
		f := newFinder(nodes)
		order := make([]int, 0, 5*(n+2))
		for range 3 { // the same order again, then others
			for i := range n + 2 {
				order = append(order, i)
			}
		}
		order = append(order, rand.Perm(n+2)...)
		order = append(order, rand.Perm(n+2)...)
		names, want := make([]string, len(order)), make([]int32, len(order))
		for at, i := range order {
			if names[at], want[at] = fmt.Sprint("node-", i), int32(i); i >= n || nodes[i] == nil {
				want[at] = -1
			}
		}
		got := f.find(names, nil)
		for range 3 { // as before, with two changed, and in another order
			if !slices.Equal(got, want) {
				t.Fatalf("%d nodes: %v at %v", n, names, got)
			}
			names[1], names[2], want[1], want[2] = names[2], names[1], want[2], want[1]
			got = f.find(names, got)
		}
		slices.Reverse(names)
		slices.Reverse(want)
		if got = f.find(names, got); !slices.Equal(got, want) {
			t.Fatalf("%d nodes: %v at %v", n, names, got)
		}
	}
}

// Names are looked up anew when nodes have come, gone, or taken the place of others.
func TestDecideFindsNodesThatChange(t *testing.T) {
	c, err := NewCluster(Config{})
	if err != nil {
		t.Fatal(err)
	}
	pod := &Pod{Containers: []Container{{Name: "main", Request: Request{Cores: 50, Count: 1}}}}
	gpu := []GPU{{UUID: "g", Memory: 16 << 30, FreeCores: 100, FreeMemory: 16 << 30}}
	check := func(want ...int) {
		t.Helper()
		d, err := c.Decide(pod, []string{"a", "b", "c"})
		if err != nil {
			t.Fatal(err)
		}
		for i, x := range d.Candidates {
			if (x.Score >= 0) != (want[i] == 1) {
				t.Errorf("%+v, wanted %v", d.Candidates, want)
			}
		}
	}
	check(0, 0, 0)
	c.SetNode(Node{Name: "a", GPUs: gpu})
	c.SetNode(Node{Name: "b", GPUs: gpu})
	check(1, 1, 0)
	c.RemoveNode("a")
	check(0, 1, 0)
	c.SetNode(Node{Name: "c", GPUs: gpu}) // in the slot of a
	check(0, 1, 1)
	c.SetNode(Node{Name: "a", GPUs: gpu})
	check(1, 1, 1)
}
