package main

import (
	"math"
	"math/rand/v2"
)

// Interval is a part of a run, in ns from its begin.
type Interval struct{ From, To int64 }

// Score of one tenant on one GPU, in points of GPU time.
type Score struct {
	Mean      float64
	Low, High float64 // of the windows
	MAE, Max  float64 // of the windows' distances from the target
}

// score looks at samples of busy time, one per sampleEvery from the begin of the run on.
func score(busy []int64, in []Interval, target float64) Score {
	s := Score{Low: math.Inf(1)}
	var used, length int64
	windows := 0
	for _, iv := range in {
		a, b := int(iv.From/sampleEvery), min(int(iv.To/sampleEvery), len(busy)-1)
		if b <= a {
			continue
		}
		used, length = used+busy[b]-busy[a], length+int64(b-a)*sampleEvery
		for i := a; i+windowSteps <= b; i++ {
			share := windowAt(busy, i)
			off := math.Abs(share - target)
			s.Low, s.High = min(s.Low, share), max(s.High, share)
			s.MAE, s.Max = s.MAE+off, max(s.Max, off)
			windows++
		}
	}
	s.Mean = 100 * float64(used) / float64(max(length, 1))
	s.MAE /= float64(max(windows, 1))
	if windows == 0 {
		s.Low = 0
	}
	return s
}

const windowSteps = int(window / sampleEvery)

func windowAt(busy []int64, i int) float64 {
	return 100 * float64(busy[i+windowSteps]-busy[i]) / float64(window)
}

// settleWithin is how near a window must be to its target, in points, for the share to count as settled.
const settleWithin = 1.5

// settled is the time after the begin of the interval from which on all windows are near the target, for
// two seconds at least; negative: they never are.
func settled(busy []int64, iv Interval, target, within float64) float64 {
	a, b := int(iv.From/sampleEvery), min(int(iv.To/sampleEvery), len(busy)-1)
	since := -1
	for i := a; i+windowSteps <= b; i++ {
		near := math.Abs(windowAt(busy, i)-target) <= within
		switch {
		case !near:
			since = -1
		case since < 0:
			since = i
		}
		if since >= 0 && i-since >= 2*windowSteps {
			break
		}
	}
	if since < 0 {
		return -1
	}
	return float64(int64(since-a)*sampleEvery) / float64(sec)
}

// idealMAE is the mean absolute error of windows of an ideal schedule of units of this length and log-normal
// jitter: each is followed by just the rest that its own length asks for. Nobody who cannot divide units does
// better in the long run.
func idealMAE(unit int64, sigma, target float64) float64 {
	const periods = 4000
	share := target / 100
	random := rand.New(rand.NewPCG(1, 2))
	var busy []int64 // by samples
	at, used := int64(0), int64(0)
	for range periods {
		x := float64(unit) * math.Exp(sigma*random.NormFloat64()-sigma*sigma/2)
		from, to := at, at+int64(x)
		at += int64(x / share)
		for t := int64(len(busy)) * sampleEvery; t < at; t = int64(len(busy)) * sampleEvery {
			busy = append(busy, used+min(max(t-from, 0), to-from))
		}
		used += to - from
	}
	return score(busy, []Interval{{0, at}}, target).MAE
}

// jain is the fairness index of some shares: 1 when they are equal.
func jain(shares []float64) float64 {
	var sum, squares float64
	for _, s := range shares {
		sum, squares = sum+s, squares+s*s
	}
	return sum * sum / max(float64(len(shares))*squares, 1e-9)
}
