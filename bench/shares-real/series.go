package main

import (
	"math"
	"slices"
	"sort"
)

// Point is a tenant's GPU time up to a moment, ns.
type Point struct {
	At, Busy int64
}

// Series is a tenant's GPU time as it grew, by time.
type Series []Point

// busyAt is the GPU time up to a moment, between two points by proportion.
func (s Series) busyAt(at int64) float64 {
	i := sort.Search(len(s), func(i int) bool { return s[i].At >= at })
	switch {
	case len(s) == 0:
		return 0
	case i == 0:
		return float64(s[0].Busy)
	case i == len(s):
		return float64(s[i-1].Busy)
	}
	a, b := s[i-1], s[i]
	return float64(a.Busy) + float64(b.Busy-a.Busy)*float64(at-a.At)/float64(b.At-a.At)
}

// Share is the part of the time from `from` to `to` that the tenant had the GPU, in percent.
func (s Series) Share(from, to int64) float64 {
	return 100 * (s.busyAt(to) - s.busyAt(from)) / float64(to-from)
}

// Begin is when the tenant first had GPU time; false: never.
func (s Series) Begin() (int64, bool) {
	for i := 1; i < len(s); i++ {
		if s[i].Busy > s[0].Busy {
			return s[i-1].At, true
		}
	}
	return 0, false
}

// End is when it last had.
func (s Series) End() int64 {
	for i := len(s) - 1; i > 0; i-- {
		if s[i].Busy > s[i-1].Busy {
			return s[i].At
		}
	}
	return math.MinInt64
}

// Wakes are the ends of idle stretches of at least `idle` ns, by the series itself.
func (s Series) Wakes(idle int64) []int64 {
	var wakes []int64
	still := int64(math.MaxInt64)
	for i := 1; i < len(s); i++ {
		switch {
		case s[i].Busy == s[i-1].Busy:
			still = min(still, s[i-1].At)
		case still != math.MaxInt64:
			if s[i-1].At-still >= idle {
				wakes = append(wakes, s[i-1].At)
			}
			still = math.MaxInt64
		}
	}
	return wakes
}

// Windows are the shares in windows of a length, a step apart.
func (s Series) Windows(from, to, length, step int64) []float64 {
	var out []float64
	for t := from; t+length <= to; t += step {
		out = append(out, s.Share(t, t+length))
	}
	return out
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	n := len(s)
	if n == 0 {
		return math.NaN()
	}
	return (s[(n-1)/2] + s[n/2]) / 2
}

// jain is Jain's index of fairness: 1 when all are equal, 1/n when one has all.
func jain(v []float64) float64 {
	var sum, squares float64
	for _, x := range v {
		sum += x
		squares += x * x
	}
	return sum * sum / (float64(len(v)) * squares)
}
