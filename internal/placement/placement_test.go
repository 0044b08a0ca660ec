package placement

import (
	"fmt"
	"math/rand"
	"reflect"
	"testing"

	"tranche.dev/tranche/internal/quantity"
)

const gi = quantity.Bytes(1 << 30)

func free(free ...int) []GPU {
	var gpus []GPU
	for i := 0; i < len(free); i += 2 {
		gpus = append(gpus, GPU{Index: i / 2, UUID: fmt.Sprintf("GPU-%04d-aaaa", i/2), Memory: 80 * gi,
			FreeCores: free[i], FreeMemory: int64(free[i+1]) << 30})
	}
	return gpus
}

func TestChoose(t *testing.T) {
	for _, c := range []struct {
		name string
		gpus []GPU
		req  Request
		want []int
		err  string
	}{
		{"empty node, lowest index", free(100, 80, 100, 80), Request{Cores: 30, Memory: 8 * gi, Count: 1}, []int{0}, ""},
		{"tightest that fits", free(100, 80, 40, 20, 20, 80), Request{Cores: 30, Memory: 8 * gi, Count: 1}, []int{1}, ""},
		{"exact fit", free(100, 80, 30, 8), Request{Cores: 30, Memory: 8 * gi, Count: 1}, []int{1}, ""},
		{"nothing reserved: the emptiest", free(40, 20, 100, 80), Request{Count: 1}, []int{1}, ""},
		{"two whole GPUs", free(100, 80, 90, 80, 100, 80), Request{Cores: 100, Count: 2}, []int{0, 2}, ""},
		{"pinned, in the order given", free(100, 80, 100, 80), Request{Cores: 1, Count: 2, Pinned: []string{"GPU-0001-aaaa", "GPU-0000-aaaa"}}, []int{1, 0}, ""},
		{"cores short", free(20, 3), Request{Cores: 30, Memory: 8 * gi, Count: 1}, nil,
			"gpu 0 (GPU-0000…): 30 of 100 cores asked, 20 free; memory 8 GiB asked, 3 GiB free"},
		{"overcommitted shows 0", free(-5, 80), Request{Cores: 1, Count: 1}, nil, "gpu 0 (GPU-0000…): 1 of 100 cores asked, 0 free"},
		{"pinned one is full", free(0, 80, 100, 80), Request{Cores: 1, Count: 1, Pinned: []string{"GPU-0000-aaaa"}}, nil,
			"gpu 0 (GPU-0000…): 1 of 100 cores asked, 0 free"},
		{"too few", free(100, 80, 50, 80), Request{Cores: 100, Count: 2}, nil,
			"2 GPUs asked, the request fits on 1 of 2\ngpu 0 (GPU-0000…): 100 of 100 cores asked, 100 free\ngpu 1 (GPU-0001…): 100 of 100 cores asked, 50 free"},
	} {
		got, err := Choose(c.gpus, c.req)
		text := ""
		if err != nil {
			text = err.Error()
		}
		if !reflect.DeepEqual(got, c.want) || text != c.err {
			t.Errorf("%s: %v, %q; want %v, %q", c.name, got, text, c.want, c.err)
		}
	}
}

// A chosen GPU fits, and no GPU that fits is tighter.
func TestChooseIsBestFit(t *testing.T) {
	seed := rand.Int63()
	rng := rand.New(rand.NewSource(seed))
	for range 2000 {
		gpus := free(rng.Intn(101), rng.Intn(81), rng.Intn(101), rng.Intn(81), rng.Intn(101), rng.Intn(81))
		req := Request{Cores: 1 + rng.Intn(100), Memory: quantity.Bytes(rng.Intn(81)) * gi, Count: 1}
		best := -1
		for i, g := range gpus {
			if fits(g, req) && (best < 0 || slack(g) < slack(gpus[best])) {
				best = i
			}
		}
		got, err := Choose(gpus, req)
		if (best < 0) != (err != nil) || (best >= 0 && got[0] != best) {
			t.Fatalf("seed %d: %+v on %+v: %v, %v; want %d", seed, req, gpus, got, err, best)
		}
	}
}
