package display

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

func TestGraph(t *testing.T) {
	plain := func(index int, links ...Link) GPU {
		return GPU{Index: index, Memory: 100, FreeCores: 100, FreeMemory: 100, Idle: true, Healthy: true, Links: links}
	}
	for _, c := range []struct {
		name string
		s    Snapshot
		want string
	}{
		{"nothing", Snapshot{}, "ROOT:0\n"},
		{"one GPU", Snapshot{GPUs: []GPU{plain(0)}}, `
ROOT:1
|---GPU0 (pids: [], usedMemory: 0, totalMemory: 100, allocatableCores: 100, allocatableMemory: 100)
`},
		{"no link is known", Snapshot{GPUs: []GPU{plain(0), plain(1)}}, `
ROOT:2
|---GPU0 (pids: [], usedMemory: 0, totalMemory: 100, allocatableCores: 100, allocatableMemory: 100)
|---GPU1 (pids: [], usedMemory: 0, totalMemory: 100, allocatableCores: 100, allocatableMemory: 100)
`},
		{"a pair of one board, and a third", Snapshot{GPUs: []GPU{plain(0, Link{Peer: 2, Level: LevelBoard}), plain(1, Link{Peer: 0, Level: LevelNode}), plain(2)}}, `
ROOT:3
|---CPU (aval: 3, pids: [], usedMemory: 0, totalMemory: 300, allocatableCores: 300, allocatableMemory: 300)
|   |---GPU1 (pids: [], usedMemory: 0, totalMemory: 100, allocatableCores: 100, allocatableMemory: 100)
|   |---PIX (aval: 2, pids: [], usedMemory: 0, totalMemory: 200, allocatableCores: 200, allocatableMemory: 200)
|   |   |---GPU0 (pids: [], usedMemory: 0, totalMemory: 100, allocatableCores: 100, allocatableMemory: 100)
|   |   |---GPU2 (pids: [], usedMemory: 0, totalMemory: 100, allocatableCores: 100, allocatableMemory: 100)
`},
		{"more given than there is, a link to nowhere", Snapshot{GPUs: []GPU{{Index: 7, Memory: 100, FreeCores: -5, FreeMemory: -1, Healthy: true, Links: []Link{{Peer: 9, Level: LevelNode}}}}}, `
ROOT:0
|---GPU7 (pids: [], usedMemory: 0, totalMemory: 100, allocatableCores: 0, allocatableMemory: 0)
`},
		{"in use", example(), `
ROOT:1
|---SYS (aval: 1, pids: [410 977 1200], usedMemory: 41875931136, totalMemory: 171798691840, allocatableCores: 120, allocatableMemory: 68719476736)
|   |---PIX (aval: 0, pids: [410 977 1200], usedMemory: 41875931136, totalMemory: 85899345920, allocatableCores: 20, allocatableMemory: 25769803776)
|   |   |---GPU0 (pids: [410 977], usedMemory: 9663676416, totalMemory: 42949672960, allocatableCores: 20, allocatableMemory: 25769803776)
|   |   |---GPU1 (pids: [1200], usedMemory: 32212254720, totalMemory: 42949672960, allocatableCores: 0, allocatableMemory: 0)
|   |---PIX (aval: 1, pids: [], usedMemory: 0, totalMemory: 85899345920, allocatableCores: 100, allocatableMemory: 42949672960)
|   |   |---GPU2 (pids: [], usedMemory: 0, totalMemory: 42949672960, allocatableCores: 100, allocatableMemory: 42949672960)
|   |   |---GPU3 (pids: [], usedMemory: 0, totalMemory: 42949672960, allocatableCores: 0, allocatableMemory: 0) unhealthy: XID 79: fallen off the bus
`},
	} {
		if got, want := Graph(c.s), strings.TrimPrefix(c.want, "\n"); got != want {
			t.Errorf("%s:\n%s\nwant\n%s", c.name, got, want)
		}
	}
}

// Whatever links are claimed, every GPU has one line, and the root counts those that are whole.
func TestGraphAnyLinks(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	for range 2000 {
		s := Snapshot{}
		whole, n := 0, r.IntN(12)
		for i := range n {
			g := GPU{Index: i, Healthy: r.IntN(4) > 0, Idle: r.IntN(2) == 0}
			if g.Healthy && g.Idle {
				whole++
			}
			for range r.IntN(4) {
				g.Links = append(g.Links, Link{Peer: r.IntN(14) - 1, Level: Level(r.IntN(80) - 10)})
			}
			s.GPUs = append(s.GPUs, g)
		}
		got := Graph(s)
		if !strings.HasPrefix(got, fmt.Sprintf("ROOT:%d\n", whole)) {
			t.Fatalf("seed %d: want ROOT:%d\n%s", seed, whole, got)
		}
		for i := range n {
			if c := strings.Count(got, fmt.Sprintf("|---GPU%d (", i)); c != 1 {
				t.Fatalf("seed %d: %d lines of GPU %d of %d\n%s", seed, c, i, n, got)
			}
		}
	}
}
