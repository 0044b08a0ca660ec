package arbiter

import (
	"math"
	"math/rand/v2"
	"testing"
)

// honest is a tenant with work without end that keeps to its turns: it runs in them, and says so.
type honest struct {
	used    uint64
	from    int64 // of the work under way, 0: none
	until   int64
	seq     uint64
	waiting int64
	lastEnd int64
	closed  uint64
}

// step moves it to a time, under what its lease says.
func (h *honest) step(now int64, l Lease) {
	if h.from != 0 && now >= h.until {
		h.used += uint64(h.until - h.from)
		h.lastEnd, h.from = h.until, 0
	}
	g := l.Grants[0]
	if l.Grants[1].Seq > g.Seq {
		g = l.Grants[1]
	}
	if h.from == 0 && g.Seq > h.seq && now >= g.Start && now < g.End {
		h.from, h.until, h.seq, h.closed = now, min(g.End, now+20*ms), g.Seq, g.Seq
	}
	if h.waiting == 0 {
		h.waiting = now
	}
}

func (h *honest) report(now int64, r *Report) {
	p := Process{Slot: 1, Waiting: 1, WaitingSince: h.waiting, LastEnd: h.lastEnd, Closed: h.closed}
	if h.from != 0 {
		p.InFlight, p.Pending, p.WorkEnd = 1, h.until-now, h.until
	}
	r.Processes, r.GPUTime = append(r.Processes, p), h.used
}

// wild is any number, often an extreme one.
func wild(r *rand.Rand, now int64) int64 {
	switch r.IntN(6) {
	case 0:
		return 0
	case 1:
		return math.MaxInt64 - r.Int64N(3)
	case 2:
		return math.MinInt64 + r.Int64N(3)
	case 3:
		return now + r.Int64N(2000*ms) - 1000*ms
	case 4:
		return r.Int64N(20 * ms)
	}
	return int64(r.Uint64())
}

func liar(r *rand.Rand, now int64, out *Report) {
	for slot := range 1 + r.IntN(3) {
		out.Processes = append(out.Processes, Process{Slot: slot, InFlight: r.IntN(3) - 1, Waiting: r.IntN(3) - 1,
			WaitingSince: wild(r, now), Pending: wild(r, now), WorkEnd: wild(r, now), LastEnd: wild(r, now), Longest: wild(r, now),
			Closed: uint64(wild(r, now)), First: wild(r, now), GPUTime: uint64(wild(r, now))})
	}
	out.GPUTime = uint64(wild(r, now))
}

// Whatever a tenant of 20 says, one of 60 beside it gets most of its share: turns are bounded by the clock.
func TestLiesHurtOnlyTheLiar(t *testing.T) {
	for seed := range uint64(30) {
		r := rand.New(rand.NewPCG(seed, 1))
		g := New(Config{})
		g.Join(1, Spec{Cores: 60, Ceiling: 60, Limited: true}, Lease{}, epoch)
		g.Join(2, Spec{Cores: 20, Ceiling: 20 + 80*int(seed%2), Limited: true, Latency: seed%3 == 0}, Lease{}, epoch)
		var h honest
		var lease Lease
		// A liar that changes its mind at each look, or keeps to one lie for a while.
		every := []int64{1, 20, 400}[seed%3]
		var lie Report
		const over = 20_000
		for i := int64(1); i < over; i++ {
			now := epoch + i*ms
			if i%every == 0 {
				lie = Report{}
				liar(r, now, &lie)
			}
			h.step(now, lease)
			for again, n := true, 0; again && n < 8; n++ {
				_, again = g.Step(now, func(id uint64, out *Report) {
					if id == 1 {
						h.report(now, out)
						return
					}
					out.Processes, out.GPUTime = append(out.Processes, lie.Processes...), lie.GPUTime
				})
				g.Changed(func(id uint64, l Lease) {
					if id == 1 {
						lease = l
					}
				})
			}
		}
		if got := float64(h.used) / float64(over*ms); got < 0.40 {
			t.Errorf("seed %d: the honest tenant of 60 got %.1f", seed, 100*got)
		} else {
			t.Logf("seed %d: %.1f", seed, 100*got)
		}
	}
}
