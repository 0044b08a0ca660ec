package placement

import (
	"math/bits"
	"math/rand"
	"os"
	"testing"

	"tranche.dev/tranche/internal/topology"
)

// matrix reads the output of `nvidia-smi topo -m` of a real machine.
func matrix(t *testing.T, name string) Links {
	text, err := os.ReadFile("../topology/testdata/" + name + ".txt")
	if err != nil {
		t.Fatal(err)
	}
	m, err := topology.Parse(string(text))
	if err != nil {
		t.Fatal(err)
	}
	out := make(Links, len(m))
	for i := range m {
		for j := range m {
			link := Link{Level: 10 * int(m[i][j].Level)}
			if m[i][j].NVLinks > 0 {
				link.Bandwidth = int(m[i][j].GBps)
			}
			out[i] = append(out[i], link)
		}
	}
	return out
}

// judgeSlowly is the quality of a subset, worked out from the definition.
func judgeSlowly(gpus []GPU, links Links, eligible, chosen set) quality {
	models := map[string]bool{}
	q := quality{1: -maxBandwidth}
	for i := range gpus {
		for j := range i {
			link := links.at(i, j)
			in, left := chosen.has(i) && chosen.has(j), eligible.has(i) && eligible.has(j) && !chosen.has(i) && !chosen.has(j)
			if in {
				q[1] = max(q[1], -link.Bandwidth)
				q[2] -= link.Bandwidth
				q[3] = max(q[3], link.Level)
				q[4] += link.Level
			}
			if left {
				q[5] -= link.Bandwidth
				q[6] += link.Level
			}
		}
		if chosen.has(i) {
			models[gpus[i].Name] = true
		}
	}
	q[0] = len(models)
	return q
}

// Of all subsets there is none better, and no equal one with lower positions, on real machines and on
// random graphs, whichever GPUs are free.
func TestBestIsBest(t *testing.T) {
	seed := rand.Int63()
	rng := rand.New(rand.NewSource(seed))
	machines := map[string]Links{}
	for _, name := range []string{"dgx-1-v100", "dgx-a100", "dgx-h100", "pcie-8"} {
		machines[name] = matrix(t, name)
	}
	machines["random"] = make(Links, 10)
	for i := range machines["random"] {
		machines["random"][i] = make([]Link, 10)
		for j := range i {
			link := Link{Level: 10 * rng.Intn(6), Bandwidth: 25 * rng.Intn(4)}
			machines["random"][i][j], machines["random"][j][i] = link, link
		}
	}
	for name, links := range machines {
		gpus := make([]GPU, len(links))
		for i := range gpus {
			gpus[i].Name = []string{"A", "B"}[rng.Intn(10)/8]
		}
		for eligible := set(1); eligible < 1<<len(gpus); eligible++ {
			k := 1 + rng.Intn(eligible.len())
			want, judged := set(0), quality{}
			for chosen := set(1); chosen <= eligible; chosen++ {
				if chosen&^eligible != 0 || chosen.len() != k {
					continue
				}
				q := judgeSlowly(gpus, links, eligible, chosen)
				if want == 0 || q.better(judged) || q == judged && bits.Reverse64(uint64(chosen)) > bits.Reverse64(uint64(want)) {
					want, judged = chosen, q
				}
			}
			if got := best(gpus, links, eligible, k); got != want {
				t.Fatalf("seed %d: %s, %d of %v: %v, want %v", seed, name, k, eligible.list(), got.list(), want.list())
			}
		}
	}
}

// More than exactGPUs: a set of the right size out of the eligible ones, and all of one island where one is
// large enough.
func TestBestOfMany(t *testing.T) {
	gpus, links := make([]GPU, 32), make(Links, 32)
	for i := range links {
		links[i] = make([]Link, 32)
		for j := range links[i] {
			if links[i][j].Level = 50; i%4 == j%4 {
				links[i][j].Bandwidth = 100
			}
		}
	}
	if got, want := best(gpus, links, 1<<32-1, 8), set(0x11111111); got != want {
		t.Errorf("%v, want %v", got.list(), want.list())
	}
}
