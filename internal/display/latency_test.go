package display

import (
	"math/rand/v2"
	"testing"
	"time"
)

func TestLatency(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	var l Latency
	bounds := LatencyBounds()
	want := make([]uint64, len(bounds))
	var sum time.Duration
	for i := range 3000 {
		d := time.Duration(r.Int64N(int64(20*time.Second)) >> r.IntN(30))
		switch i {
		case 0:
			d = bounds[3]
		case 1:
			d = -time.Second
		}
		l.Observe(d)
		d = max(d, 0)
		sum += d
		for b, bound := range bounds {
			if d <= bound {
				want[b]++
			}
		}
	}
	h := l.Histogram()
	if h.Count != 3000 || h.Sum != sum || len(h.Buckets) != len(want) {
		t.Fatalf("seed %d: %+v, want a sum of %v", seed, h, sum)
	}
	for i, n := range h.Buckets {
		if n != want[i] {
			t.Errorf("seed %d: %d of at most %v, want %d", seed, n, bounds[i], want[i])
		}
	}
}
