package main

import (
	"fmt"
	"math"
	"slices"

	"tranche.dev/tranche/bench/report"
)

// What the suite asks for, in points of GPU time.
const (
	sumAccurate   = 95.0 // targets up to this sum are met within
	meanAccurate  = 0.3
	meanFull      = 1.5 // and those of 100 within
	totalFull     = 97.0
	ratioFull     = 0.01
	maeMost       = 1.0
	longUnit      = 60 * ms // units from which on the MAE is compared with the ideal schedule's
	settleMost    = 1.0     // seconds
	beyondDebtMax = 300.0   // ms: 200 and the drain grace
)

// Tenants' scores in one phase, as the table shows them.
type Line struct {
	Phase, Tenant string
	Target        float64
	Score         Score
	MAEMost       float64
	Ideal         float64 // of the unit; 0: not asked for
	Missed        bool
}

// Verdict is what is made of an outcome.
type Verdict struct {
	Lines []Line
	Rows  []report.Row
	// Figures are for comparisons with other scenarios.
	Figures map[string]float64
	// Shares are the sliding windows of each tenant on each GPU.
	Shares []Curve
}

// Curve is a tenant's share over time.
type Curve struct {
	Name   string
	Target float64
	Share  []float64 // one per sampleEvery, of the window that begins there
}

func judge(o *Outcome) *Verdict {
	v := &Verdict{Figures: map[string]float64{}}
	for _, p := range o.phases() {
		v.phase(o, p)
	}
	v.waits(o)
	for _, rule := range o.Scenario.Rules {
		rule(o, v)
	}
	for i, t := range o.Scenario.Tenants {
		for g := range o.Busy[i] {
			name := t.Name
			if len(o.Busy[i]) > 1 {
				name = fmt.Sprintf("%s, GPU %d", t.Name, g)
			}
			c := Curve{Name: name, Target: t.Target}
			for k := 0; k+windowSteps < len(o.Busy[i][g]); k++ {
				c.Share = append(c.Share, windowAt(o.Busy[i][g], k))
			}
			v.Shares = append(v.Shares, c)
		}
	}
	return v
}

// phases of the scenario; by default one, after the warm-up.
func (o *Outcome) phases() []Phase {
	if o.Scenario.Phases != nil {
		return o.Scenario.Phases(o.Length)
	}
	p := Phase{In: []Interval{{warmUp, o.Length}}}
	for _, t := range o.Scenario.Tenants {
		p.Targets = append(p.Targets, t.Target)
	}
	return []Phase{p}
}

func (v *Verdict) row(o *Outcome, r report.Row) {
	r.Label = "sim"
	if r.Case == "" {
		r.Case = o.Scenario.Name
	} else {
		r.Case = o.Scenario.Name + ": " + r.Case
	}
	v.Rows = append(v.Rows, r)
}

// phase scores all tenants that have a target in it.
func (v *Verdict) phase(o *Outcome, p Phase) {
	var sum, total float64
	for _, t := range p.Targets {
		sum += t
	}
	tolerance := meanAccurate
	if sum > sumAccurate {
		tolerance = meanFull
	}
	if o.Scenario.Tolerance > 0 {
		tolerance = o.Scenario.Tolerance
	}
	scored := slices.Clone(p.In)
	if p.Change {
		for i := range scored {
			scored[i].From += sec
		}
	}
	means := make([]float64, len(p.Targets))
	for i, target := range p.Targets {
		if target == 0 {
			continue
		}
		t := o.Scenario.Tenants[i]
		name := t.Name
		if p.Name != "" {
			name = p.Name + ", " + t.Name
		}
		l := Line{Phase: p.Name, Tenant: t.Name, Target: target, MAEMost: maeMost,
			Score: score(o.Busy[i][p.GPU], scored, target)}
		l.Ideal = o.Scenario.idealMAE(t, target)
		l.MAEMost += l.Ideal
		means[i], total = l.Score.Mean, total+l.Score.Mean
		mean := report.Row{Case: name, Metric: "mean share", Unit: "points", Value: l.Score.Mean,
			Spread: [2]float64{l.Score.Low, l.Score.High}, Target: target, Better: "nearest", Off: tolerance}
		mae := report.Row{Case: name, Metric: "mean absolute error of 1 s windows", Unit: "points",
			Value: l.Score.MAE, Spread: [2]float64{0, l.Score.Max}, Target: l.MAEMost, Better: "lower"}
		if o.Scenario.Uneven {
			mae.Better = ""
		}
		l.Missed = mean.Missed() || mae.Missed()
		v.Lines = append(v.Lines, l)
		v.row(o, mean)
		v.row(o, mae)
		if p.Change {
			v.settle(o, p, i, name)
		}
	}
	if sum > sumAccurate {
		v.full(o, p, means, sum, total)
	}
}

func (v *Verdict) settle(o *Outcome, p Phase, i int, name string) {
	r := report.Row{Case: name, Metric: "settled after a change", Unit: "s", Target: settleMost, Better: "lower",
		Spread: [2]float64{1e9, 0}}
	for _, iv := range p.In {
		at := settled(o.Busy[i][p.GPU], iv, p.Targets[i], settleWithin)
		if at < 0 {
			at = float64(iv.To-iv.From) / float64(sec)
		}
		r.Value = max(r.Value, at)
		r.Spread = [2]float64{min(r.Spread[0], at), max(r.Spread[1], at)}
	}
	v.row(o, r)
}

// full judges a GPU that is given away whole.
func (v *Verdict) full(o *Outcome, p Phase, means []float64, sum, total float64) {
	v.row(o, report.Row{Case: p.Name, Metric: "total", Unit: "points", Value: total, Target: totalFull, Better: "higher"})
	var worst float64
	for i, m := range means {
		if p.Targets[i] > 0 {
			worst = max(worst, math.Abs(m/max(total, 1e-9)/(p.Targets[i]/sum)-1))
		}
	}
	v.row(o, report.Row{Case: p.Name, Metric: "ratio, off by", Unit: "%", Value: 100 * worst, Target: 100 * ratioFull, Better: "lower"})
}

// waits judges how long launches waited beyond their tenants' own debt, and that nothing went wrong.
func (v *Verdict) waits(o *Outcome) {
	var beyond float64
	var errors int64
	metered := false
	for i, t := range o.Scenario.Tenants {
		for _, s := range o.Stats[i] {
			errors += s.Errors
			if t.Limiter == Shipped {
				beyond, metered = max(beyond, float64(s.Beyond)/float64(ms)), true
			}
		}
	}
	if metered {
		v.row(o, report.Row{Metric: "longest wait of a launch beyond its tenant's debt", Unit: "ms", Value: beyond,
			Target: beyondDebtMax, Better: "lower"})
	}
	if errors+o.Breaches > 0 {
		v.row(o, report.Row{Metric: "errors of driver calls", Unit: "calls", Value: float64(errors + o.Breaches), Better: "lower"})
	}
}

// share of tenant i on GPU 0 in an interval.
func (o *Outcome) share(i int, iv Interval) float64 {
	return score(o.Busy[i][0], []Interval{iv}, 0).Mean
}

// quantile of some times; they are sorted.
func quantile(sorted []int64, q float64) int64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// idealMAE is that of the tenant's long units, or of those of another one if that is more: while such a unit runs
// nobody else can, so the others' windows are uneven by as much.
func (s *Scenario) idealMAE(of Tenant, target float64) float64 {
	var most float64
	for _, t := range s.Tenants {
		own := t.Target
		if t.Name == of.Name {
			own = target
		}
		if own == 0 {
			own = float64(t.Spec.Cores)
		}
		if unit, sigma := t.unit(); unit >= longUnit {
			most = max(most, idealMAE(unit, sigma, own))
		}
	}
	return most
}
