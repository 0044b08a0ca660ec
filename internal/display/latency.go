package display

import (
	"slices"
	"sync"
	"time"
)

// Histogram counts durations. Buckets[i] counts those of at most LatencyBounds()[i], cumulative.
type Histogram struct {
	Count   uint64
	Sum     time.Duration
	Buckets []uint64
}

// latencyBounds span a call's 50 us to a stuck one's 10 s.
var latencyBounds = [...]time.Duration{
	50 * time.Microsecond, 100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond,
	50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond, time.Second, 10 * time.Second,
}

// LatencyBounds are the upper bounds of a Histogram's buckets, ascending.
func LatencyBounds() []time.Duration { return slices.Clone(latencyBounds[:]) }

// Latency collects a Histogram. The zero value is ready; safe for concurrent use.
type Latency struct {
	mu      sync.Mutex
	buckets [len(latencyBounds) + 1]uint64
	sum     time.Duration
}

// Observe counts one duration. A negative one, of a clock that was set back, counts as 0.
func (l *Latency) Observe(d time.Duration) {
	d = max(d, 0)
	i, _ := slices.BinarySearch(latencyBounds[:], d)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buckets[i]++
	l.sum += d
}

// Histogram is what was counted until now.
func (l *Latency) Histogram() Histogram {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := Histogram{Sum: l.sum, Buckets: make([]uint64, len(latencyBounds))}
	for i, n := range l.buckets {
		h.Count += n
		if i < len(h.Buckets) {
			h.Buckets[i] = h.Count
		}
	}
	return h
}
