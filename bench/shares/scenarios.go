package main

import (
	"fmt"

	"tranche.dev/tranche/internal/arbiter"
)

// scenarios are all of the suite, in the order of its tables.
func scenarios() []*Scenario {
	var all []*Scenario
	for _, part := range [][]*Scenario{accurate(), whole(), shapes(), processes(), changes(), hard(), burst(), latency(), disguised(), controls()} {
		all = append(all, part...)
	}
	return all
}

// --- the words in which scenarios are written ----------------------------------------------------------

func fixed(cores int) arbiter.Spec { return arbiter.Spec{Cores: cores, Ceiling: cores, Limited: true} }

func bursting(cores, ceiling int) arbiter.Spec {
	return arbiter.Spec{Cores: cores, Ceiling: ceiling, Limited: true}
}

func latencyClass(cores, ceiling int) arbiter.Spec {
	return arbiter.Spec{Cores: cores, Ceiling: ceiling, Limited: true, Latency: true}
}

// flood launches units of these lengths one after the other, with that log-normal jitter.
func flood(sigma float64, units ...int64) Program {
	return Program{Units: units, Sigma: sigma, Blocks: 1000}
}

func (p Program) graphs() Program             { p.Graph = true; return p }
func (p Program) sync(every int) Program      { p.SyncEvery = every; return p }
func (p Program) working(host int64) Program  { p.Host = host; return p }
func (p Program) onFor(on, off int64) Program { p.On, p.Off = on, off; return p }
func (p Program) overStreams(n int) Program   { p.Streams = n; return p }
func (p Program) from(start int64) Program    { p.Start = start; return p }
func (p Program) blocks(n int) Program        { p.Blocks = n; return p }
func (p Program) times(n int) (out [][]Program) {
	for range n {
		out = append(out, []Program{p})
	}
	return out
}

// holds makes a tenant with a fixed share as its target.
func holds(name string, cores int, threads ...Program) Tenant {
	return Tenant{Name: name, Target: float64(cores), Spec: fixed(cores), Procs: [][]Program{threads}}
}

// asks makes a tenant whose share is not scored by itself.
func asks(name string, spec arbiter.Spec, threads ...Program) Tenant {
	return Tenant{Name: name, Spec: spec, Procs: [][]Program{threads}}
}

// pair is two tenants with fixed shares.
func pair(name, title string, a, b int, of, with Program) *Scenario {
	return &Scenario{Name: name, Title: title, Tenants: []Tenant{holds("a", a, of), holds("b", b, with)}}
}

// atSlices makes the scenario three times, at time slices of 1, 2 and 4 ms.
func atSlices(s *Scenario) []*Scenario {
	var out []*Scenario
	for _, n := range []int64{1, 2, 4} {
		c := *s
		c.Name, c.Machine.Slice = fmt.Sprintf("%s@%dms", s.Name, n), n*ms
		c.Quick = s.Quick && n == 2
		out = append(out, &c)
	}
	return out
}

func (s *Scenario) quick() *Scenario { s.Quick = true; return s }

// --- shares that leave some time to spare ---------------------------------------------------------------

// accurate are the tables of the design (docs/compute.md), and more of the kind: targets up to 95.
func accurate() []*Scenario {
	small, graphs := flood(0.1, 200*us), flood(0.1, 8*ms).graphs()
	mixed := []Program{flood(0.1, 100*us), flood(0.1, 800*us), flood(0.1, 3*ms), flood(0.1, 8*ms).graphs()}
	list := []*Scenario{
		pair("small-30-60", "0.2 ms kernels, 30/60", 30, 60, small, small).quick(),
		pair("graphs-30-60", "8 ms graphs, 30/60", 30, 60, graphs, graphs).quick(),
		alike("mixed-4x22", "four tenants, 0.1 ms to 8 ms, 22 each", 4, 22, mixed...).quick(),
		pair("tiny-long-45-45", "20 us against 5 ms kernels, 45/45", 45, 45, flood(0.1, 20*us), flood(0.1, 5*ms)),
		pair("2ms-0.1ms-20-60", "2 ms against 0.1 ms kernels, 20/60", 20, 60, flood(0.1, 2*ms), flood(0.1, 100*us)),
		alike("mixed-8x11", "eight tenants, 0.1 ms to 8 ms, 11 each", 8, 11, mixed...),
		{Name: "jitter-10-20-60", Title: "50 us, 15 ms graphs with jitter 0.5, 0.8 ms; 10/20/60", Tenants: []Tenant{
			holds("50 us", 10, flood(0.3, 50*us)), holds("15 ms graphs", 20, flood(0.5, 15*ms).graphs()),
			holds("0.8 ms", 60, flood(0.3, 800*us))}},
		pair("60ms-0.1ms-30-60", "60 ms kernels, waited for, against 0.1 ms; 30/60", 30, 60, flood(0.1, 60*ms).sync(1), flood(0.1, 100*us)),
		pair("small-5-90", "0.2 ms kernels, 5/90", 5, 90, small, small),
		{Name: "wide-5x19", Title: "five tenants of 20 us to 100 ms, 19 each", Tenants: []Tenant{
			holds("20 us", 19, flood(0.1, 20*us)), holds("0.2 ms", 19, flood(0.1, 200*us)), holds("2 ms", 19, flood(0.1, 2*ms)),
			holds("20 ms", 19, flood(0.1, 20*ms)), holds("100 ms", 19, flood(0.1, 100*ms))}},
		pair("medley-30-60", "both launch 20 us, 1 ms, 10 ms and 0.1 ms in turn; 30/60", 30, 60,
			flood(0.2, 20*us, ms, 10*ms, 100*us), flood(0.2, 20*us, ms, 10*ms, 100*us)),
		pair("sync-60-30", "0.5 ms kernels: one tenant waits for each, the other for none; 60/30", 60, 30,
			flood(0.1, 500*us).sync(1), flood(0.1, 500*us)),
		pair("gaps-30-60", "works on the CPU between bursts of 2 ms, against 0.2 ms; 30/60", 30, 60,
			flood(0.1, 200*us).sync(10).working(500*us), small),
		pair("rate-30-60", "8 us kernels, 10^5 launches a second; 30/60", 30, 60, flood(0, 8*us), flood(0, 8*us)),
		{Name: "threads-40-50", Title: "two threads: one launches three graphs of 2 ms and waits, one launches 0.2 ms; 40 beside 50", Tenants: []Tenant{
			holds("threads", 40, flood(0.1, 2*ms).graphs().sync(3), small), holds("b", 50, small)}},
		pair("streams-30-60", "four streams at once against one; 30/60", 30, 60, flood(0.1, 200*us).overStreams(4), small),
	}
	var all []*Scenario
	for _, s := range list {
		all = append(all, atSlices(s)...)
	}
	wander := pair("wander-30-60", "the GPU's clock wanders by 10 %; 0.2 ms against 8 ms graphs, 30/60", 30, 60, small, graphs)
	wander.Machine.DVFS = true
	stalls := pair("stalls-30-60", "threads lose the processor for 3 ms, ten times a second of computing; 0.2 ms, 30/60", 30, 60, small, small)
	stalls.Machine.StallEvery, stalls.Machine.Stall = 100*ms, 3*ms
	all = append(all, wander, stalls,
		&Scenario{Name: "alone-small-30", Title: "alone, 0.2 ms kernels, 30", Tenants: []Tenant{holds("a", 30, small)}, Quick: true},
		&Scenario{Name: "alone-60ms-30", Title: "alone, 60 ms kernels, waited for; 30", Tenants: []Tenant{holds("a", 30, flood(0.1, 60*ms).sync(1))}})
	for _, n := range []int{1, 2, 4, 8, 16} {
		all = append(all, atSlices(alike(fmt.Sprintf("crowd-%d", n), fmt.Sprintf("%d tenants, 0.1 ms to 3 ms, %d each", n, 95/n), n, 95/n, mixed[:3]...))...)
	}
	return all
}

// alike is n tenants with the same share and these programs in turn.
func alike(name, title string, n, cores int, programs ...Program) *Scenario {
	s := &Scenario{Name: name, Title: title}
	for i := range n {
		s.Tenants = append(s.Tenants, holds(fmt.Sprintf("t%d", i+1), cores, programs[i%len(programs)]))
	}
	return s
}

// whole are GPUs that are given away to the last hundredth.
func whole() []*Scenario {
	small := flood(0.1, 200*us)
	var all []*Scenario
	for _, s := range []*Scenario{
		alike("whole-4x25", "0.2 ms kernels, four tenants of 25", 4, 25, small).quick(),
		pair("whole-30-70", "0.2 ms kernels, 30/70", 30, 70, small, small).quick(),
		pair("whole-75-25", "0.2 ms kernels, 75/25", 75, 25, small, small),
		pair("whole-10-90", "0.2 ms kernels, 10/90", 10, 90, small, small),
		pair("whole-mixed-30-70", "1 ms against 0.1 ms kernels, 30/70", 30, 70, flood(0.1, ms), flood(0.1, 100*us)),
	} {
		all = append(all, atSlices(s)...)
	}
	return all
}

// shapes is HAMi's table: one tenant, five kernel shapes, four limits.
func shapes() []*Scenario {
	var all []*Scenario
	for _, k := range kernelShapes() {
		for _, cores := range []int{10, 30, 50, 80} {
			all = append(all, &Scenario{Name: fmt.Sprintf("shape-%s-%d", k.short, cores),
				Title: fmt.Sprintf("%s, limit %d", k.name, cores), Tolerance: 1, Quick: cores == 30,
				Tenants: []Tenant{holds("a", cores, k.program())}})
		}
	}
	return all
}

type shape struct {
	short, name string
	blocks      int
	unit        int64
	batch       int
}

func (k shape) program() Program { return flood(0.05, k.unit).blocks(k.blocks).sync(k.batch) }

func kernelShapes() []shape {
	return []shape{
		{"132x0.1ms", "132 blocks, 0.1 ms", 132, 100 * us, 100},
		{"1k-1ms", "1,000 blocks, 1 ms", 1000, ms, 10},
		{"10k-1ms", "10,000 blocks, 1 ms", 10000, ms, 10},
		{"100k-1ms", "100,000 blocks, 1 ms", 100000, ms, 10},
		{"100x10ms", "100 blocks, 10 ms", 100, 10 * ms, 2},
	}
}
