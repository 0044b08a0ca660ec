package main

import (
	"fmt"
	"slices"

	"tranche.dev/tranche/bench/report"
)

// processes: several of one tenant share its account.
func processes() []*Scenario {
	small := flood(0.1, 100*us)
	four := func(cores int) Tenant {
		return Tenant{Name: "four", Target: float64(cores), Spec: fixed(cores), Procs: small.times(4)}
	}
	atMost := func(o *Outcome, v *Verdict) {
		v.row(o, report.Row{Case: "four", Metric: "share over limit", Unit: "", Value: o.share(0, Interval{warmUp, o.Length}) / o.Scenario.Tenants[0].Target,
			Target: 1.05, Better: "lower"})
	}
	list := []*Scenario{
		{Name: "processes-alone-30", Title: "four processes of one tenant, 0.1 ms, 30", Tenants: []Tenant{four(30)}, Quick: true},
		{Name: "processes-30-60", Title: "four processes of one tenant against one, 30/60", Tenants: []Tenant{four(30), holds("one", 60, small)}},
		{Name: "processes-mixed-60-30", Title: "four processes, 50 us to 20 ms, against one; 60/30", Tenants: []Tenant{
			{Name: "four", Target: 60, Spec: fixed(60), Procs: [][]Program{{flood(0.1, 50*us)}, {flood(0.1, ms)}, {flood(0.1, 20*ms)}, {flood(0.1, 200*us).sync(1)}}},
			holds("one", 30, small)}},
	}
	var all []*Scenario
	for _, s := range list {
		s.Rules = append(s.Rules, atMost)
		all = append(all, atSlices(s)...)
	}
	return all
}

// cycles are the intervals [first + k*period, +long) that fit.
func cycles(length, first, period, long int64) []Interval {
	var out []Interval
	for at := first; at+long <= length; at += period {
		out = append(out, Interval{at, at + long})
	}
	return out
}

// changes: what happens while others run.
func changes() []*Scenario {
	small, graphs := flood(0.1, 200*us), flood(0.1, 8*ms).graphs()
	idle := &Scenario{Name: "idle-busy-30-60", Title: "one tenant rests 5 s and works 5 s, in turn; 30/60",
		Tenants: []Tenant{holds("a", 30, small), holds("b", 60, small.onFor(5*sec, 5*sec))}}
	idle.Phases = func(length int64) []Phase {
		return []Phase{
			{Name: "both work", In: cycles(length, 10*sec, 10*sec, 5*sec), Targets: []float64{30, 60}, Change: true},
			{Name: "one rests", In: cycles(length, 5*sec, 10*sec, 5*sec), Targets: []float64{30, 0}, Change: true},
		}
	}
	all := atSlices(idle.quick())
	all = append(all, joinLeave(small, graphs), liveChange(small))
	for _, k := range []struct {
		name    string
		program Program
	}{{"small", small}, {"graphs", graphs}} {
		all = append(all, atSlices(killed(k.name, k.program, small))...)
	}
	return all
}

// joinLeave: a third tenant comes at 10 s and goes at 20 s.
func joinLeave(small, graphs Program) *Scenario {
	s := &Scenario{Name: "join-leave", Title: "a third tenant joins at 10 s and leaves at 20 s; 30/30/30",
		Tenants: []Tenant{holds("a", 30, small), holds("b", 30, graphs), holds("c", 30, flood(0.1, ms))}}
	s.Tenants[2].Late = true
	s.Script = func(r *Run) {
		r.At(10*sec, func() { r.Join(2) })
		r.At(20*sec, func() { r.Leave(2) })
	}
	s.Phases = func(length int64) []Phase {
		return []Phase{
			{Name: "two", In: []Interval{{warmUp, min(10*sec, length)}}, Targets: []float64{30, 30, 0}},
			{Name: "three", In: cycles(length, 10*sec, never/4, 10*sec), Targets: []float64{30, 30, 30}, Change: true},
			{Name: "two again", In: cycles(length, 20*sec, never/4, length-20*sec), Targets: []float64{30, 30, 0}, Change: true},
		}
	}
	return s
}

// liveChange: `tranche set` each 5 s.
func liveChange(small Program) *Scenario {
	s := &Scenario{Name: "live-change", Title: "limits change each 5 s: 30/60, 60/30, 10/20", Quick: true,
		Tenants: []Tenant{holds("a", 30, small), holds("b", 60, flood(0.1, ms))}}
	sets := [][2]int{{30, 60}, {60, 30}, {10, 20}}
	s.Script = func(r *Run) {
		for at, k := 5*sec, 1; at < r.Length; at, k = at+5*sec, k+1 {
			set := sets[k%3]
			r.At(at, func() {
				r.Set(0, fixed(set[0]))
				r.Set(1, fixed(set[1]))
			})
		}
	}
	s.Phases = func(length int64) []Phase {
		var out []Phase
		for k, set := range sets {
			first := int64(k) * 5 * sec
			if k == 0 {
				first = 15 * sec
			}
			if in := cycles(length, first, 15*sec, 5*sec); in != nil {
				out = append(out, Phase{Name: fmt.Sprintf("%d/%d", set[0], set[1]), In: in,
					Targets: []float64{float64(set[0]), float64(set[1])}, Change: true})
			}
		}
		return out
	}
	return s
}

// killed: a process is killed in its turn each 5 s; another one takes its place 1 s later.
func killed(name string, program, other Program) *Scenario {
	s := &Scenario{Name: "killed-" + name, Title: "a process is killed in its turn, and another starts 1 s later; 30/60; " + name,
		Tenants: []Tenant{holds("killed", 30, program), holds("b", 60, other)}, Quick: name == "graphs"}
	s.Script = func(r *Run) {
		n := 0
		for at := 3 * sec; at+3*sec < r.Length && n < 20; at, n = at+5*sec, n+1 {
			r.At(at, func() {
				victim := len(r.members[0].procs) - 1
				r.KillHolding(0, victim, func() {
					r.At(r.Now()+sec, func() { r.Start(0, []Program{program}) })
				})
			})
		}
	}
	s.Phases = func(length int64) []Phase {
		// 5.5 to 8 s, 10.5 to 13 s: both are there; 3.1 to 4 s: one is.
		in := cycles(length, 5500*ms, 5*sec, 2500*ms)
		return []Phase{{Name: "between kills", In: in[:min(len(in), 20)], Targets: []float64{30, 60}},
			{Name: "all the time", In: []Interval{{warmUp, min(length, 103*sec)}}, Targets: []float64{0, 60}}}
	}
	return s
}

// rounds adds how often each tenant's programs came round, and that they did.
func rounds(least float64) func(*Outcome, *Verdict) {
	return func(o *Outcome, v *Verdict) {
		for i, t := range o.Scenario.Tenants {
			for k, s := range o.Stats[i] {
				if s.Rounds == 0 && k > 0 {
					continue // a thread that only launches
				}
				v.row(o, report.Row{Case: fmt.Sprintf("%s, thread %d", t.Name, k+1), Metric: "rounds a second", Unit: "1/s",
					Value: float64(s.Rounds) / (float64(o.Length) / float64(sec)), Target: least, Better: "higher"})
			}
		}
	}
}

// hard are programs that could deadlock if launches were delayed without thought, and bad company.
func hard() []*Scenario {
	small := flood(0.1, 200*us)
	flags := Program{Kind: Flag, Units: []int64{200 * us}, Sigma: 0.1}
	spin := &Scenario{Name: "spin-flag", Tolerance: 1.5, Uneven: true, Title: "kernels that spin on a host flag, set after later launches; 30 beside 60",
		Tenants: []Tenant{asks("spins", fixed(30), flags), holds("b", 60, small)}, Rules: []func(*Outcome, *Verdict){onlyFirst(1)}}
	capture := Program{Kind: Capture, Units: []int64{100 * us}, Sigma: 0.1}
	captures := &Scenario{Name: "capture", Title: "one thread captures and launches graphs, one launches; 40 beside 50",
		Tenants: []Tenant{holds("captures", 40, capture, small), holds("b", 50, small)}, Rules: []func(*Outcome, *Verdict){onlyFirst(5)}}
	ranks := func(name string, cores int) Tenant {
		t := Tenant{Name: name, Spec: fixed(cores)}
		for g := range 2 {
			t.Procs = append(t.Procs, []Program{{Kind: Collective, GPU: g, Units: []int64{500 * us, 300 * us}, Sigma: 0.1, SyncEvery: 4, Peers: 2}})
		}
		return t
	}
	var all []*Scenario
	all = append(all, atSlices(spin)...)
	all = append(all, atSlices(captures)...)
	for _, c := range [][2]int{{45, 45}, {30, 60}} {
		s := &Scenario{Name: fmt.Sprintf("collectives-%d-%d", c[0], c[1]), Machine: Machine{GPUs: 2},
			Title:   fmt.Sprintf("two tenants' collectives spin across the same two GPUs; %d/%d", c[0], c[1]),
			Tenants: []Tenant{ranks("a", c[0]), ranks("b", c[1])}, Rules: []func(*Outcome, *Verdict){rounds(5), sharesOf(0), sharesOf(1)}}
		all = append(all, atSlices(s)...)
	}
	free := &Scenario{Name: "collectives-free", Machine: Machine{GPUs: 2}, NoArbiter: true, Phases: toldOnly,
		Title:   "the same collectives without any limiter, for comparison",
		Tenants: []Tenant{ranks("a", 45), ranks("b", 45)}, Rules: []func(*Outcome, *Verdict){rounds(0), sharesOf(0), sharesOf(1)}}
	for i := range free.Tenants {
		free.Tenants[i].Limiter = NoLimiter
	}
	all = append(all, atSlices(free)...)
	killed := []*Scenario{
		pair("arbiter-dies-30-60", "the arbiter is killed at random, the next comes 5 to 100 ms later; 0.2 ms, 30/60", 30, 60, small, small).quick(),
		alike("arbiter-dies-4x22", "the same with four tenants, 0.1 ms to 8 ms graphs", 4, 22,
			flood(0.1, 100*us), flood(0.1, 800*us), flood(0.1, 3*ms), flood(0.1, 8*ms).graphs()),
	}
	for _, s := range killed {
		s.KillArbiter, s.Tolerance = true, 3
		s.Phases = toldOnly
		s.Rules = append(s.Rules, progress(0.5))
		all = append(all, atSlices(s)...)
	}
	gone := pair("arbiter-gone-30-60", "the arbiter is killed at 5 s and none comes; 0.2 ms, 30/60", 30, 60, small, small)
	gone.Script = func(r *Run) { r.At(5*sec, func() { r.KillArbiter(never) }) }
	gone.Phases, gone.Quick = toldOnly, true
	gone.Rules = append(gone.Rules, progress(0.5), neverOver(1))
	wild := &Scenario{Name: "wild", Title: "a process without our library beside 30/40", Tenants: []Tenant{
		asks("a", fixed(30), small), asks("b", fixed(40), flood(0.1, ms)), asks("wild", fixed(20), flood(0.1, 500*us))}}
	wild.Tenants[2].Limiter = NoLimiter
	wild.Rules = append(wild.Rules, sharesOf(0), progress(0.2))
	return append(all, gone, wild)
}

// toldOnly scores nothing.
func toldOnly(int64) []Phase { return []Phase{} }

func onlyFirst(least float64) func(*Outcome, *Verdict) {
	return func(o *Outcome, v *Verdict) {
		v.row(o, report.Row{Case: o.Scenario.Tenants[0].Name, Metric: "rounds a second", Unit: "1/s",
			Value: float64(o.Stats[0][0].Rounds) / (float64(o.Length) / float64(sec)), Target: least, Better: "higher"})
	}
}

// sharesOf tells all shares on a GPU.
func sharesOf(gpu int) func(*Outcome, *Verdict) {
	return func(o *Outcome, v *Verdict) {
		for i, t := range o.Scenario.Tenants {
			s := score(o.Busy[i][gpu], []Interval{{warmUp, o.Length}}, t.Target)
			v.row(o, report.Row{Case: fmt.Sprintf("%s, GPU %d", t.Name, gpu), Metric: "mean share", Unit: "points", Value: s.Mean, Spread: [2]float64{s.Low, s.High}})
		}
	}
}

// progress asks that each window of each tenant has at least that part of its share: nobody hangs.
func progress(least float64) func(*Outcome, *Verdict) {
	return func(o *Outcome, v *Verdict) {
		for i, t := range o.Scenario.Tenants {
			if t.Limiter != Shipped {
				continue
			}
			s := score(o.Busy[i][0], []Interval{{warmUp, o.Length}}, t.Target)
			v.row(o, report.Row{Case: t.Name, Metric: "mean share", Unit: "points", Value: s.Mean, Spread: [2]float64{s.Low, s.High}})
			v.row(o, report.Row{Case: t.Name, Metric: "least window over share", Unit: "", Value: s.Low / float64(t.Spec.Cores),
				Target: least, Better: "higher"})
		}
	}
}

// neverOver asks that nobody's mean passes its limit by more than so many points.
func neverOver(points float64) func(*Outcome, *Verdict) {
	return func(o *Outcome, v *Verdict) {
		for i, t := range o.Scenario.Tenants {
			v.row(o, report.Row{Case: t.Name, Metric: "over its limit", Unit: "points",
				Value: max(0, o.share(i, Interval{warmUp, o.Length})-float64(t.Spec.Cores)), Target: points, Better: "lower"})
		}
	}
}

// --- burst ---------------------------------------------------------------------------------------------

func burst() []*Scenario {
	small := flood(0.1, 200*us)
	full := Interval{warmUp, never / 4}
	atLeast := func(i int, metric string, least float64) func(*Outcome, *Verdict) {
		return func(o *Outcome, v *Verdict) {
			s := score(o.Busy[i][0], []Interval{{full.From, o.Length}}, 0)
			v.row(o, report.Row{Case: o.Scenario.Tenants[i].Name, Metric: metric, Unit: "points", Value: s.Mean,
				Spread: [2]float64{s.Low, s.High}, Target: least, Better: "higher"})
		}
	}
	list := []*Scenario{
		{Name: "burst-idle", Title: "30 with ceiling 100, the neighbour's 65 idle", Quick: true,
			Tenants: []Tenant{asks("bursts", bursting(30, 100), small), asks("idle", fixed(65), small.from(never/4))},
			Rules:   []func(*Outcome, *Verdict){atLeast(0, "mean share with neighbours idle", 97)}},
		{Name: "burst-wake", Title: "30 with ceiling 100; a neighbour with 65 works 5 s and rests 5 s", Quick: true,
			Tenants: []Tenant{asks("bursts", bursting(30, 100), small), asks("wakes", fixed(65), small.onFor(5*sec, 5*sec))},
			Rules:   []func(*Outcome, *Verdict){wakes(65)}},
		{Name: "burst-wake-8ms", Title: "the same with 8 ms graphs bursting",
			Tenants: []Tenant{asks("bursts", bursting(30, 100), flood(0.1, 8*ms).graphs()), asks("wakes", fixed(65), small.onFor(5*sec, 5*sec))},
			Rules:   []func(*Outcome, *Verdict){wakes(65)}},
		{Name: "burst-equal", Title: "four tenants of 20 with ceiling 100, 0.1 ms to 8 ms", Tenants: []Tenant{
			asks("0.1 ms", bursting(20, 100), flood(0.1, 100*us)), asks("0.8 ms", bursting(20, 100), flood(0.1, 800*us)),
			asks("3 ms", bursting(20, 100), flood(0.1, 3*ms)), asks("8 ms graphs", bursting(20, 100), flood(0.1, 8*ms).graphs())},
			Rules: []func(*Outcome, *Verdict){fair, sharesOf(0)}},
		{Name: "burst-30-60", Title: "30/60, both with ceiling 100, 0.2 ms", Tenants: []Tenant{
			asks("a", bursting(30, 100), small), asks("b", bursting(60, 100), small)},
			Rules: []func(*Outcome, *Verdict){atLeast(0, "mean share", 30), atLeast(1, "mean share", 60), totalAtLeast(97)}},
		{Name: "burst-sync", Title: "60 that waits for each 0.5 ms, 30 that bursts", Tenants: []Tenant{
			asks("waits", fixed(60), flood(0.1, 500*us).sync(1)), asks("bursts", bursting(30, 100), flood(0.1, 500*us))},
			Rules: []func(*Outcome, *Verdict){atLeast(0, "mean share", 59.7), atLeast(1, "mean share", 30), sharesOf(0)}},
	}
	var all []*Scenario
	for _, s := range list {
		s.Phases = toldOnly
		all = append(all, atSlices(s)...)
	}
	return all
}

// wakes judges the second tenant, which works for 5 s and rests for 5 s: it has its share 500 ms after it
// woke.
func wakes(share float64) func(*Outcome, *Verdict) {
	return func(o *Outcome, v *Verdict) {
		busy, cycle := o.Busy[1][0], cycles(o.Length, 10*sec, 10*sec, 5*sec)
		early := report.Row{Case: "wakes", Metric: "share of the first 500 ms after waking", Unit: "points",
			Spread: [2]float64{100, 0}, Target: share - meanAccurate, Better: "higher"}
		var later []Interval
		for _, iv := range cycle {
			got := score(busy, []Interval{{iv.From, iv.From + 500*ms}}, share).Mean
			early.Value += got / float64(len(cycle))
			early.Spread = [2]float64{min(early.Spread[0], got), max(early.Spread[1], got)}
			later = append(later, Interval{iv.From + 500*ms, iv.To - sampleEvery})
		}
		v.row(o, early)
		at := score(busy, later, share)
		v.row(o, report.Row{Case: "wakes", Metric: "mean share from 500 ms after waking on", Unit: "points", Value: at.Mean,
			Spread: [2]float64{at.Low, at.High}, Target: share - maeMost/2, Better: "higher"})
		v.row(o, report.Row{Case: "wakes", Metric: "its mean absolute error of 1 s windows", Unit: "points", Value: at.MAE,
			Spread: [2]float64{0, at.Max}, Target: maeMost, Better: "lower"})
		rest := cycles(o.Length, 5*sec, 10*sec, 5*sec)
		s := score(o.Busy[0][0], rest, 0)
		v.row(o, report.Row{Case: "bursts", Metric: "mean share while the neighbour rests", Unit: "points", Value: s.Mean,
			Target: 96, Better: "higher"})
		s = score(o.Busy[0][0], cycles(o.Length, 10*sec, 10*sec, 5*sec), 0)
		v.row(o, report.Row{Case: "bursts", Metric: "mean share while the neighbour works", Unit: "points", Value: s.Mean,
			Target: 29.7, Better: "higher"})
	}
}

func fair(o *Outcome, v *Verdict) {
	var shares []float64
	for i := range o.Scenario.Tenants {
		shares = append(shares, o.share(i, Interval{warmUp, o.Length}))
	}
	v.row(o, report.Row{Metric: "Jain index", Unit: "", Value: jain(shares), Target: 0.99, Better: "higher"})
	totalAtLeast(97)(o, v)
}

func totalAtLeast(least float64) func(*Outcome, *Verdict) {
	return func(o *Outcome, v *Verdict) {
		var sum float64
		for i := range o.Scenario.Tenants {
			sum += o.share(i, Interval{warmUp, o.Length})
		}
		v.row(o, report.Row{Metric: "total", Unit: "points", Value: sum, Target: least, Better: "higher"})
	}
}

// --- latency class -------------------------------------------------------------------------------------

func latency() []*Scenario {
	client := Program{Kind: Requests, Units: []int64{2 * ms}, Sigma: 0.05, Period: 4 * ms, Blocks: 500}
	alone := &Scenario{Name: "latency-alone", Title: "a latency-class client alone: Poisson, 2 ms kernels, load 50 %",
		Tenants: []Tenant{asks("client", latencyClass(60, 100), client)}, Phases: toldOnly, Rules: []func(*Outcome, *Verdict){p99}}
	all := atSlices(alone)
	for _, unit := range []int64{200 * us, 5 * ms, 20 * ms} {
		s := &Scenario{Name: fmt.Sprintf("latency-beside-%gms", float64(unit)/float64(ms)), Phases: toldOnly,
			Title:   fmt.Sprintf("the client beside a tenant that saturates the GPU with kernels of %g ms", float64(unit)/float64(ms)),
			Tenants: []Tenant{asks("client", latencyClass(60, 100), client), asks("saturates", bursting(40, 100), flood(0.1, unit))},
			Rules:   []func(*Outcome, *Verdict){p99, leftOver(unit == 200*us), charged(0, 5), charged(1, 10)}}
		all = append(all, atSlices(s)...)
	}
	// examples/train-and-serve.yaml
	server := Program{Kind: Requests, Units: []int64{3 * ms}, Sigma: 0.05, Period: 20 * ms, Blocks: 500}
	serve := &Scenario{Name: "latency-beside-graphs", Phases: toldOnly, Title: "a server of 3 ms requests, load 15 %, beside a trainer of 4 ms graphs",
		Tenants: []Tenant{asks("server", latencyClass(30, 30), server), asks("trainer", bursting(50, 100), flood(0.1, 4*ms).graphs())},
		Rules:   []func(*Outcome, *Verdict){p99, leftOver(false)}}
	return append(all, atSlices(serve.quick())...)
}

func p99(o *Outcome, v *Verdict) {
	times := o.Stats[0][0].Latency
	slices.Sort(times)
	v.Figures["p99"] = float64(quantile(times, 0.99)) / float64(ms)
	for _, q := range []float64{0.5, 0.99} {
		v.row(o, report.Row{Case: "client", Metric: fmt.Sprintf("latency p%g", 100*q), Unit: "ms", Value: float64(quantile(times, q)) / float64(ms)})
	}
}

// leftOver is what the other tenant made of the time that the client left.
func leftOver(asked bool) func(*Outcome, *Verdict) {
	return func(o *Outcome, v *Verdict) {
		iv := Interval{warmUp, o.Length}
		r := report.Row{Case: "saturates", Metric: "part of the time left by the client", Unit: "%",
			Value: 100 * o.share(1, iv) / (100 - o.share(0, iv))}
		if asked {
			r.Target, r.Better = 85, "higher"
		}
		v.row(o, r)
	}
}

// charged compares what a tenant's ledger says with what it used, in percent of that: where work of two is on the GPU at
// once, each measures the other's time slices.
func charged(i int, within float64) func(*Outcome, *Verdict) {
	return func(o *Outcome, v *Verdict) {
		v.row(o, o.charged(i, report.Row{Target: 100, Better: "nearest", Off: within}))
	}
}

// chargedAtLeast asks only that it is not less.
func chargedAtLeast(i int, least float64) func(*Outcome, *Verdict) {
	return func(o *Outcome, v *Verdict) { v.row(o, o.charged(i, report.Row{Target: least, Better: "higher"})) }
}

func (o *Outcome) charged(i int, r report.Row) report.Row {
	busy := o.Busy[i][0]
	r.Case, r.Metric, r.Unit = o.Scenario.Tenants[i].Name, "charged, of what it used", "%"
	r.Value = 100 * float64(o.Ledger[i][0]) / float64(max(busy[len(busy)-1], 1))
	return r
}

// --- kernels whose cost is not what it was ---------------------------------------------------------------

// disguised are long kernels of a function and grid that is mostly short, by chance or on purpose: what was learned of the
// function says too little. They begin when the turn ends, so that they run beside the next one.
func disguised() []*Scenario {
	small := flood(0.1, 200*us)
	program := func(long int64, every int, late bool) Program {
		return Program{Kind: Disguise, Units: []int64{500 * us, long}, SyncEvery: every, Late: late, Blocks: 1000}
	}
	make := func(name, title string, limit, other int, procs [][]Program, victim Program) *Scenario {
		return &Scenario{Name: "disguised-" + name, Title: title, Phases: toldOnly,
			Tenants: []Tenant{{Name: "disguised", Spec: fixed(limit), Procs: procs}, asks("b", fixed(other), victim)},
			Rules:   []func(*Outcome, *Verdict){sharesOf(0), neverOver(1), chargedAtLeast(0, 95)}}
	}
	var all []*Scenario
	all = append(all, atSlices(make("6ms", "0.5 ms kernels, each fifth 6 ms, beside 2 ms, 5/90", 5, 90,
		[][]Program{{program(6*ms, 4, false)}}, flood(0.1, 2*ms)))...)
	all = append(all, atSlices(make("late", "0.5 ms kernels, and one of 5 ms just before each turn ends, 5/90", 5, 90,
		[][]Program{{program(5*ms, 4, true)}}, small).quick())...)
	all = append(all, atSlices(make("processes", "the same from four processes, 20/70", 20, 70, program(5*ms, 2, true).times(4), small))...)
	endless := program(3*sec, 50, true)
	killed := make("killed", "a kernel of 3 s just before the turn ends; its process is killed after 2 s, and another starts, 10/80", 10, 80,
		[][]Program{{endless}}, small)
	killed.Script = func(r *Run) {
		n := 0
		for at := 2 * sec; at+2*sec < r.Length && n < 20; at, n = at+2*sec, n+1 {
			r.At(at, func() {
				r.kill(r.members[0].procs[len(r.members[0].procs)-1])
				r.Start(0, []Program{endless})
			})
		}
	}
	return append(all, atSlices(killed)...)
}

// comparisons are figures over two scenarios.
type comparison struct {
	of, with, figure, metric string
	most                     float64 // 0: told only
}

func comparisons() []comparison {
	var out []comparison
	for _, n := range []int{1, 2, 4} {
		for _, u := range []string{"0.2", "5", "20"} {
			c := comparison{of: fmt.Sprintf("latency-beside-%sms@%dms", u, n), with: fmt.Sprintf("latency-alone@%dms", n), figure: "p99",
				metric: "p99 over p99 alone"}
			if u == "0.2" {
				c.most = 1.3
			}
			out = append(out, c)
		}
	}
	return out
}

// --- negative controls ---------------------------------------------------------------------------------

// controls must fail in the ways that are known of them; where they do not, the machine is too kind.
func controls() []*Scenario {
	small, graphs := flood(0.1, 200*us), flood(0.1, 8*ms).graphs()
	var all []*Scenario
	none := pair("control-none", "no limiter: two tenants share what switching leaves", 30, 60, small, small)
	none.NoArbiter, none.Phases = true, toldOnly
	for i := range none.Tenants {
		none.Tenants[i].Limiter = NoLimiter
	}
	none.Rules = append(none.Rules, mustBe(0, 46, 1.5), mustBe(1, 46, 1.5))
	all = append(all, none.quick())

	for _, k := range kernelShapes() {
		s := &Scenario{Name: "control-feedback-" + k.short, Title: "feedback from utilisation, " + k.name + ", limit 30", NoArbiter: true,
			Phases: toldOnly, Tenants: []Tenant{holds("a", 30, k.program())}, Rules: []func(*Outcome, *Verdict){maeOf}}
		s.Tenants[0].Limiter = Feedback
		all = append(all, s)
	}
	for _, k := range []shape{kernelShapes()[1], kernelShapes()[4]} {
		s := pair("control-feedback-30-70-"+k.short, "feedback from utilisation, two tenants of 30/70, "+k.name, 30, 70, k.program(), k.program())
		s.NoArbiter, s.Phases = true, toldOnly
		for i := range s.Tenants {
			s.Tenants[i].Limiter = Feedback
		}
		s.Rules = append(s.Rules, partOf(46, 6))
		all = append(all, s)
	}
	wall := pair("control-wall-graphs", "wall events without turns, 8 ms graphs, 30/60", 30, 60, graphs, graphs)
	wall.NoArbiter, wall.Phases = true, toldOnly
	wall.Rules = append(wall.Rules, underDelivers(10))
	return append(all, wall.quick())
}

func mustBe(i int, share, off float64) func(*Outcome, *Verdict) {
	return func(o *Outcome, v *Verdict) {
		v.row(o, report.Row{Case: o.Scenario.Tenants[i].Name, Metric: "mean share (a control: this is known of it)", Unit: "points",
			Value: o.share(i, Interval{warmUp, o.Length}), Target: share, Better: "nearest", Off: off})
	}
}

// maeOf is judged over all shapes together: some must be far off.
func maeOf(o *Outcome, v *Verdict) {
	s := score(o.Busy[0][0], []Interval{{5 * sec, o.Length}}, o.Scenario.Tenants[0].Target)
	v.Figures["mae"] = s.MAE
	v.row(o, report.Row{Case: "a", Metric: "mean share", Unit: "points", Value: s.Mean, Spread: [2]float64{s.Low, s.High}})
	v.row(o, report.Row{Case: "a", Metric: "mean absolute error of 1 s windows", Unit: "points", Value: s.MAE, Spread: [2]float64{0, s.Max}})
}

// feedbackMAE is what the worst of the shapes must be off by at least.
const feedbackMAE = 15.0

// partOf is the first tenant's part of what both get.
func partOf(share, off float64) func(*Outcome, *Verdict) {
	return func(o *Outcome, v *Verdict) {
		iv := Interval{5 * sec, o.Length}
		a, b := o.share(0, iv), o.share(1, iv)
		v.row(o, report.Row{Case: "a", Metric: "part of what both get (a control: this is known of it)", Unit: "%",
			Value: 100 * a / max(a+b, 1e-9), Target: share, Better: "nearest", Off: off})
	}
}

// underDelivers asks that a tenant gets at least so many points too little.
func underDelivers(points float64) func(*Outcome, *Verdict) {
	return func(o *Outcome, v *Verdict) {
		var worst float64
		for i, t := range o.Scenario.Tenants {
			worst = max(worst, t.Target-o.share(i, Interval{warmUp, o.Length}))
		}
		v.row(o, report.Row{Metric: "worst under-delivery (a control: this is known of it)", Unit: "points", Value: worst, Target: points, Better: "higher"})
		sharesOf(0)(o, v)
	}
}
