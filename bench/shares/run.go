package main

import (
	"fmt"
	"math/rand/v2"

	"tranche.dev/tranche/internal/arbiter"
)

// Run is a scenario under way.
type Run struct {
	World    *World
	Length   int64
	scenario *Scenario
	begin    int64
	members  []*member
	arb      *served
	random   *rand.Rand
	restart  int64 // when the next arbiter comes, never: one is there, or none is to come
	nextKill int64
	plans    []plan
}

// member is a tenant of the run.
type member struct {
	Tenant
	number   int // in the world; -1: not made yet
	spec     arbiter.Spec
	gone     bool
	procs    []*process
	programs []int
	busy     [][]int64 // per GPU
}

type process struct {
	number, slot    int
	dead, reclaimed bool
}

type plan struct {
	at int64
	do func()
}

const (
	reclaimAfter = 250 * ms // a supervisor's tick
	holdLook     = 200 * us
	noticeAfter  = 20 * ms // an arbiter, of new slices and changed limits
)

// play runs the scenario for a time.
func play(s *Scenario, dir string, length int64) (*Outcome, error) {
	s.Machine = s.Machine.withDefaults()
	w, err := openWorld(dir, s.Process, s.Machine)
	if err != nil {
		return nil, err
	}
	r := &Run{World: w, Length: length, scenario: s, begin: w.Now(), restart: never, nextKill: never,
		random: rand.New(rand.NewPCG(s.Machine.Seed, 1))}
	for _, t := range s.Tenants {
		r.members = append(r.members, &member{Tenant: t, number: -1, spec: t.Spec, busy: make([][]int64, s.Machine.GPUs)})
	}
	for i, t := range s.Tenants {
		if !t.Late {
			r.Join(i)
		}
	}
	if !s.NoArbiter {
		r.serve()
	}
	if s.KillArbiter {
		r.planKill()
	}
	if s.Script != nil {
		s.Script(r)
	}
	r.loop()
	return r.outcome(), nil
}

// --- what scripts do -----------------------------------------------------------------------------------

// Now is the time since the begin of the run.
func (r *Run) Now() int64 { return r.World.Now() - r.begin }

// At plans something for a time since the begin.
func (r *Run) At(at int64, do func()) {
	i := 0
	for i < len(r.plans) && r.plans[i].at <= r.begin+at {
		i++
	}
	r.plans = append(r.plans[:i], append([]plan{{r.begin + at, do}}, r.plans[i:]...)...)
}

// Join makes tenant i with all its processes. An arbiter that runs already hears of it a little later.
func (r *Run) Join(i int) {
	m := r.members[i]
	m.number = r.World.Tenant(m.spec)
	if arb := r.arb; arb != nil {
		r.At(r.Now()+noticeAfter, func() {
			if arb == r.arb { // another one has found it by itself
				arb.join(m.number, m.spec)
			}
		})
	}
	for _, p := range m.Procs {
		r.Start(i, p)
	}
}

// Start starts a process of tenant i; its programs' times count from now.
func (r *Run) Start(i int, programs []Program) {
	m := r.members[i]
	p := &process{number: r.World.Process(m.number, m.Limiter), slot: len(m.procs) + 1}
	for _, g := range programs {
		g.Start += r.World.Now()
		if g.Stop != 0 {
			g.Stop += r.World.Now()
		}
		m.programs = append(m.programs, r.World.Program(p.number, g))
	}
	m.procs = append(m.procs, p)
}

// Leave ends tenant i: its processes, then its membership.
func (r *Run) Leave(i int) {
	m := r.members[i]
	for _, p := range m.procs {
		r.kill(p)
		r.reclaim(p)
	}
	m.gone = true
	if r.arb != nil {
		r.arb.leave(m.number)
	}
}

// Set changes tenant i's limits while it runs; the arbiter notices a little later.
func (r *Run) Set(i int, spec arbiter.Spec) {
	m := r.members[i]
	m.spec = spec
	r.World.SetLimits(m.number, spec)
	r.At(r.Now()+noticeAfter, func() {
		if r.arb != nil {
			r.arb.set(m.number, m.spec)
		}
	})
}

// KillHolding ends process n of tenant i as SIGKILL does, as soon as it holds a turn with work in flight.
// Its supervisor notices 250 ms later, if the arbiter does not before. Then calls do.
func (r *Run) KillHolding(i, n int, do func()) {
	m, now := r.members[i], r.World.Now()
	p := m.procs[n]
	var report arbiter.Report
	holds := false
	r.World.Report(m.number, 0, &report)
	for _, w := range report.Processes {
		holds = holds || w.Slot == p.slot && w.InFlight > 0
	}
	lease := r.World.Lease(m.number, 0)
	turn := false
	for _, g := range lease.Grants {
		turn = turn || g.Slot == p.slot && g.Start <= now && now < g.End
	}
	if !holds || !turn {
		r.At(r.Now()+holdLook, func() { r.KillHolding(i, n, do) })
		return
	}
	r.kill(p)
	r.At(r.Now()+reclaimAfter, func() { r.reclaim(p) })
	do()
}

func (r *Run) kill(p *process) {
	if !p.dead {
		p.dead = true
		r.World.Kill(p.number)
	}
}

func (r *Run) reclaim(p *process) {
	if p.dead && !p.reclaimed {
		p.reclaimed = true
		r.World.Reclaim(p.number)
	}
}

// KillArbiter ends it; another one comes after a time (never: none does).
func (r *Run) KillArbiter(after int64) {
	r.arb = nil
	r.World.Listen(false)
	if after != never {
		r.restart = r.World.Now() + after
	}
}

// --- the arbiter's life --------------------------------------------------------------------------------

func (r *Run) planKill() {
	r.nextKill = r.World.Now() + int64(200+r.random.IntN(1800))*ms
}

func (r *Run) serve() {
	r.restart = never
	r.arb = serve(r.World, r.scenario.Machine.GPUs, r.members)
	r.arb.suspect = func(tenant, slot int) {
		for _, m := range r.members {
			if m.number == tenant && slot >= 1 && slot <= len(m.procs) {
				r.reclaim(m.procs[slot-1])
			}
		}
	}
}

func (r *Run) arbiterEvents(now int64) {
	if now >= r.restart {
		r.serve()
	}
	if now >= r.nextKill {
		r.KillArbiter(int64(5+r.random.IntN(96)) * ms)
		r.planKill()
	}
	if r.arb != nil {
		r.arb.run()
	}
}

// --- the loop ------------------------------------------------------------------------------------------

func (r *Run) loop() {
	end, sample := r.begin+r.Length, r.begin
	for {
		until := min(end, sample, r.nextKill, r.restart)
		if r.arb != nil {
			until = min(until, r.arb.next())
		}
		if len(r.plans) > 0 {
			until = min(until, r.plans[0].at)
		}
		now := r.World.Run(max(until, r.World.Now()))
		r.arbiterEvents(now)
		for len(r.plans) > 0 && now >= r.plans[0].at {
			do := r.plans[0].do
			r.plans = r.plans[1:]
			do()
		}
		if now >= sample {
			r.sample()
			if sample == r.begin+warmUp {
				r.World.ResetStats()
			}
			sample += sampleEvery
		}
		if now >= end {
			return
		}
	}
}

func (r *Run) sample() {
	for _, m := range r.members {
		for g := range m.busy {
			var sum int64
			for _, p := range m.procs {
				sum += r.World.Busy(p.number, g)
			}
			m.busy[g] = append(m.busy[g], sum)
		}
	}
}

func (r *Run) outcome() *Outcome {
	o := &Outcome{Scenario: r.scenario, Length: r.Length, Breaches: r.World.Breaches()}
	for _, m := range r.members {
		var stats []Stats
		for _, n := range m.programs {
			stats = append(stats, r.World.Stats(n))
		}
		o.Stats = append(o.Stats, stats)
		o.Busy = append(o.Busy, m.busy)
		ledger := make([]int64, r.scenario.Machine.GPUs)
		for g := range ledger {
			if m.number >= 0 {
				ledger[g], _, _ = r.World.Usage(m.number, g)
			}
		}
		o.Ledger = append(o.Ledger, ledger)
	}
	if r.arb != nil {
		o.Steps = r.arb.steps
	}
	return o
}

// summary is for people at work on the law.
func (r *Outcome) summary() string {
	text := fmt.Sprintf("arbiter: %d steps", r.Steps)
	for i, t := range r.Scenario.Tenants {
		var sum Stats
		for _, s := range r.Stats[i] {
			sum.Launches += s.Launches
			sum.Errors += s.Errors
			sum.Rounds += s.Rounds
			sum.Longest = max(sum.Longest, s.Longest)
			sum.Beyond = max(sum.Beyond, s.Beyond)
		}
		text += fmt.Sprintf("\n%-12s launches %d, rounds %d, errors %d; longest launch %.2f ms, %.2f ms beyond its debt",
			t.Name, sum.Launches, sum.Rounds, sum.Errors, float64(sum.Longest)/1e6, float64(sum.Beyond)/1e6)
		for g, busy := range r.Busy[i] {
			text += fmt.Sprintf("; GPU %d %.3f, ledger/truth %.4f", g, score(busy, []Interval{{warmUp, r.Length}}, 0).Mean,
				float64(r.Ledger[i][g])/float64(max(busy[len(busy)-1], 1)))
		}
	}
	return text
}
