package placement

import (
	"fmt"
	"reflect"
	"testing"

	"tranche.dev/tranche/internal/quantity"
)

func TestPlacePod(t *testing.T) {
	share := func(name string, cores int, phase Phase) Container {
		return Container{Name: name, Phase: phase, Request: Request{Cores: cores, Memory: 8 * gi, Count: 1}}
	}
	for _, c := range []struct {
		name string
		gpus []GPU
		pod  Pod
		want string
		err  string
	}{
		{"an init container uses the GPU of the later one", free(100, 80, 100, 80),
			Pod{Containers: []Container{share("i", 50, Init), share("a", 30, App)}}, "[[0] [0]] 0:50/8 GiB", ""},
		{"app containers add up", free(100, 80, 100, 80),
			Pod{Containers: []Container{share("a", 60, App), share("b", 60, App)}}, "[[0] [1]] 0:60/8 GiB 1:60/8 GiB", ""},
		{"a sidecar is there while a later init container runs", free(100, 80, 100, 80),
			Pod{Containers: []Container{share("s", 60, Sidecar), share("i", 60, Init), share("a", 30, App)}}, "[[0] [1] [0]] 0:90/16 GiB 1:60/8 GiB", ""},
		{"an init container before the sidecar is alone", free(100, 80),
			Pod{Containers: []Container{share("i", 90, Init), share("s", 60, Sidecar), share("a", 30, App)}}, "[[0] [0] [0]] 0:90/16 GiB", ""},
		{"apart", free(100, 80, 100, 80),
			Pod{Containers: []Container{share("a", 20, App), share("b", 20, App)}, Apart: [][]string{{"a", "b"}}}, "[[0] [1]] 0:20/8 GiB 1:20/8 GiB", ""},
		{"together, where both have room", free(30, 80, 100, 80),
			Pod{Containers: []Container{share("a", 30, App), share("b", 20, App)}, Together: [][]string{{"a", "b"}}}, "[[1] [1]] 1:50/16 GiB", ""},
		{"whole GPUs have all memory", free(100, 80, 100, 70, 100, 80),
			Pod{Containers: []Container{{Name: "a", Request: Request{Cores: 100, Count: 2}}}}, "[[0 2]] 0:100/80 GiB 2:100/80 GiB", ""},
		{"spread", free(40, 80, 100, 80),
			Pod{Policy: Spread, Containers: []Container{share("a", 30, App)}}, "[[1]] 1:30/8 GiB", ""},
		{"nothing fits", free(20, 80, 90, 4),
			Pod{Containers: []Container{share("a", 30, App)}}, "",
			"asked 30 cores / 8 GiB: no GPU has both|gpu 0 (GPU-0000…): 30 of 100 cores asked, 20 free; memory 8 GiB asked, 80 GiB free\n" +
				"gpu 1 (GPU-0001…): 30 of 100 cores asked, 90 free; memory 8 GiB asked, 4 GiB free"},
		{"one of two asked fits", free(100, 80, 90, 80),
			Pod{Containers: []Container{{Name: "a", Request: Request{Cores: 100, Memory: gi, Count: 2}}}}, "",
			"asked 100 cores / 1 GiB on 2 GPUs: cores short|2 GPUs asked, the request fits on 1 of 2\n" +
				"gpu 1 (GPU-0001…): 100 of 100 cores asked, 90 free; memory 1 GiB asked, 80 GiB free; next free: gpu 0 (GPU-0000…) (100 cores, 80 GiB)"},
	} {
		n := &Node{GPUs: c.gpus}
		a, err := PlacePod(n, &c.pod)
		text, got := "", ""
		if err != nil {
			text = err.(*NoFit).Short + "|" + err.Error()
		} else {
			got = show(n, a)
		}
		if got != c.want || text != c.err {
			t.Errorf("%s: %s, %q; want %s, %q", c.name, got, text, c.want, c.err)
		}
	}
}

// show is an assignment by GPU index.
func show(n *Node, a Assignment) string {
	index := map[string]int{}
	for i, g := range n.GPUs {
		index[g.UUID] = i
	}
	var sets [][]int
	for _, uuids := range a.Containers {
		var at []int
		for _, u := range uuids {
			at = append(at, index[u])
		}
		sets = append(sets, at)
	}
	s := fmt.Sprint(sets)
	for _, h := range a.Held {
		s += fmt.Sprintf(" %d:%d/%v", index[h.UUID], h.Cores, h.Memory)
	}
	return s
}

func TestCheck(t *testing.T) {
	n := &Node{GPUs: free(100, 80, 20, 80)}
	c := &Container{Name: "a", Request: Request{Cores: 30, Memory: gi, Count: 1}}
	if at, err := Check(n, c, []string{"GPU-0000-aaaa"}); err != nil || !reflect.DeepEqual(at, []int{0}) {
		t.Error(at, err)
	}
	want := "gpu 1 (GPU-0001…): 30 of 100 cores asked, 20 free; memory 1 GiB asked, 80 GiB free; next free: gpu 0 (GPU-0000…) (100 cores, 80 GiB)"
	if _, err := Check(n, c, []string{"GPU-0001-aaaa"}); err == nil || err.Error() != want {
		t.Errorf("%v; want %s", err, want)
	}
}

// Two requests that read alike, 10 GiB each, are two kinds of pods.
func TestKindsByByte(t *testing.T) {
	c, err := NewCluster(Config{})
	if err != nil {
		t.Fatal(err)
	}
	c.SetNode(Node{Name: "a", GPUs: []GPU{{UUID: "u", Memory: 10320 << 20, FreeCores: CoresWhole, FreeMemory: 10320 << 20}}})
	best := func(mib quantity.Bytes) string {
		d, err := c.Decide(&Pod{Containers: []Container{{Name: "m", Request: Request{Cores: 10, Memory: mib << 20, Count: 1}}}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return d.Best
	}
	if large, small := best(10340), best(10300); large != "" || small != "a" {
		t.Errorf("10340 MiB on %q, 10300 MiB on %q of a GPU with 10320 MiB", large, small)
	}
}
