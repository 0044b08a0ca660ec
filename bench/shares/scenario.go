package main

import "tranche.dev/tranche/internal/arbiter"

// Scenario is a machine, its tenants, what happens to them, and what they must get.
type Scenario struct {
	// Name is short and without blanks; Title says what it is.
	Name, Title string
	Machine     Machine
	// Process is the copy of the meter that processes load.
	Process string
	// NoArbiter: nobody gives turns.
	NoArbiter bool
	// KillArbiter: it dies at random times and another one takes over 5 to 100 ms later.
	KillArbiter bool
	Tenants     []Tenant
	// Script plans what happens while it runs.
	Script func(*Run)
	// Phases are scored, of a run of this length; nil: all tenants with a target, after the warm-up.
	Phases func(length int64) []Phase
	// Tolerance of mean shares in points, where it is not that of the targets' sum.
	Tolerance float64
	// Uneven: the error of windows is told and not judged.
	Uneven bool
	// Rules add figures of their own.
	Rules []func(*Outcome, *Verdict)
	// Quick scenarios are the tests' too.
	Quick bool
}

// Tenant of a scenario.
type Tenant struct {
	Name    string
	Spec    arbiter.Spec
	Limiter Limiter
	// Target share in points; 0: not scored.
	Target float64
	// Late tenants are made by an event.
	Late bool
	// Procs are its processes, each with its threads' programs.
	Procs [][]Program
}

// unit is the longest unit that the tenant runs, in ns, and its jitter.
func (t Tenant) unit() (longest int64, sigma float64) {
	for _, p := range t.Procs {
		for _, g := range p {
			for _, u := range g.Units {
				if u > longest {
					longest, sigma = u, g.Sigma
				}
			}
		}
	}
	return longest, sigma
}

// Phase is a part of the run, maybe one that comes again, with targets of its own.
type Phase struct {
	Name    string
	In      []Interval
	GPU     int
	Targets []float64 // per tenant; 0: not scored
	// Change: the intervals begin with a change. Shares must have settled within a second, and are scored
	// from then on.
	Change bool
}

// sampleEvery is the step of the sliding windows, which are window long.
const (
	sampleEvery = 100 * ms
	window      = sec
	warmUp      = 2 * sec
)

// Outcome is what came out.
type Outcome struct {
	Scenario *Scenario
	Length   int64
	// Busy[i][g] are tenant i's samples on GPU g, one per sampleEvery.
	Busy [][][]int64
	// Stats of each tenant's programs, over all its processes in their order.
	Stats    [][]Stats
	Breaches int64
	Ledger   [][]int64 // GPU time of each tenant on each GPU by its own count
	Steps    int64     // of the arbiter
}
