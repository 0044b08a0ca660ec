package arbiter

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// Handovers are the times that grants took. Safe for concurrent use.
type Handovers struct {
	// Decision: from the arbiter's waking up by a bell to the leases written.
	Decision Histogram
	// Request: from a process's asking to the leases written, where it was granted at once. The
	// waking-up is part of it.
	Request Histogram
}

// Histogram counts times by size, in steps of an eighth to a quarter.
type Histogram struct {
	n       [64 * 4]atomic.Uint64
	count   atomic.Uint64
	longest atomic.Int64
}

// bucket of a time: its highest bit and the two below.
func bucket(ns int64) int {
	v := uint64(max(ns, 4))
	top := bits.Len64(v) - 1
	return top*4 + int(v>>(top-2)&3)
}

// bucketEnd is the largest time of a bucket.
func bucketEnd(i int) int64 {
	top := i / 4
	return int64((uint64(i%4)+5)<<(top-2)) - 1
}

// Add counts one.
func (h *Histogram) Add(ns int64) {
	h.n[bucket(ns)].Add(1)
	h.count.Add(1)
	for {
		old := h.longest.Load()
		if ns <= old || h.longest.CompareAndSwap(old, ns) {
			return
		}
	}
}

// Count is how many were counted.
func (h *Histogram) Count() uint64 { return h.count.Load() }

// Max is the longest.
func (h *Histogram) Max() time.Duration { return time.Duration(h.longest.Load()) }

// Quantile is a time that the part q of all does not exceed; 0 when none was counted.
func (h *Histogram) Quantile(q float64) time.Duration {
	want := uint64(q * float64(h.count.Load()))
	var sum uint64
	for i := range h.n {
		if sum += h.n[i].Load(); sum > want || sum > 0 && sum == h.count.Load() {
			return min(time.Duration(bucketEnd(i)), h.Max())
		}
	}
	return 0
}
