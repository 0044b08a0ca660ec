package main

import (
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"
)

// Case is a scenario with its targets.
type Case struct {
	Name string
	Run  func(*Bench) error
}

// cases are those of the accuracy that Tranche promises in real time (docs/compute.md). The loads
// are ones that two processors can drive on a simulated GPU.
func cases(Machine) []Case {
	return []Case{
		shares("alone", 1, tenant("a", 30, "--kernel 1ms")),
		shares("30/60", 2, tenant("a", 30, "--kernel 1ms"), tenant("b", 60, "--kernel 1ms")),
		shares("30/60 graphs, small", 2, tenant("graphs", 30, "--kernel 0.2ms --graph 40"), tenant("small", 60, "--kernel 0.2ms")),
		shares("10/80 long, small", 2, tenant("long", 10, "--kernel 20ms"), tenant("small", 80, "--kernel 0.2ms")),
		shares("10/80 small, long", 2, tenant("small", 10, "--kernel 0.2ms"), tenant("long", 80, "--kernel 5ms")),
		shares("70/25 sync, async", 2, tenant("sync", 70, "--kernel 2ms --sync-each"), tenant("async", 25, "--kernel 1ms")),
		shares("four 20/25/25/25", 2, tenant("small", 20, "--kernel 0.2ms"), tenant("graphs", 25, "--kernel 0.2ms --graph 10"),
			tenant("long", 25, "--kernel 8ms"), tenant("sync", 25, "--kernel 2ms --sync-each")),
		shares("30/70", 3, tenant("a", 30, "--kernel 1ms"), tenant("b", 70, "--kernel 1ms")),
		{"75/25", full},
		{"four processes", fourProcesses},
		{"burst", burst},
		{"equal tenants", equal},
		{"latency class", latency},
		{"overhead", overhead},
		{"live change", liveChange},
		{"arbiter killed", arbiterKilled},
	}
}

func tenant(name string, cores int, load string) Tenant {
	return Tenant{Name: name, Cores: cores, Load: load, Target: float64(cores)}
}

// shares: each tenant gets its target, within so many points.
func shares(name string, within float64, tenants ...Tenant) Case {
	return Case{name, func(b *Bench) error {
		outcomes, err := b.runs(Trial{Tenants: tenants, Seconds: b.Seconds})
		if err != nil {
			return err
		}
		b.heading(name)
		b.sharesOf(name, within, tenants, outcomes)
		return nil
	}}
}

// sharesOf are the figures of tenants with targets.
func (b *Bench) sharesOf(name string, within float64, tenants []Tenant, outcomes []Outcome) {
	for i, t := range tenants {
		got := each(outcomes, func(o Outcome) float64 { return o.Got[i].Share })
		b.figure(Figure{Case: name, Metric: t.Name + " (" + t.Load + ")", Unit: "% of one GPU", Values: got, Target: t.Target, Within: within,
			Better: "nearest", Windows: each(outcomes, func(o Outcome) float64 { return o.windowError(i) })})
		b.bars = append(b.bars, bar{name + ": " + t.Name, t.Target, median(got), slices.Min(got), slices.Max(got), within})
	}
	b.figure(Figure{Case: name, Metric: "sum", Unit: "% of one GPU", Values: each(outcomes, Outcome.Sum)})
	b.handovers(name, outcomes)
	b.figure(Figure{Case: name, Metric: "processors of this machine busy", Unit: "%", Values: each(outcomes, func(o Outcome) float64 { return o.Host })})
}

// handovers is how long turns took to be given, as the arbiter says itself.
func (b *Bench) handovers(name string, outcomes []Outcome) {
	for _, f := range []struct {
		metric string
		count  func(Arbiter) uint64
		ns     func(Arbiter) int64
	}{
		{"arbiter awake to turn given, median", func(a Arbiter) uint64 { return a.Handovers }, func(a Arbiter) int64 { return a.P50 }},
		{"arbiter awake to turn given, p99", func(a Arbiter) uint64 { return a.Handovers }, func(a Arbiter) int64 { return a.P99 }},
		{"turn asked for to given, median", func(a Arbiter) uint64 { return a.Requests }, func(a Arbiter) int64 { return a.RequestP50 }},
		{"turn asked for to given, p99", func(a Arbiter) uint64 { return a.Requests }, func(a Arbiter) int64 { return a.RequestP99 }},
	} {
		var us []float64
		for _, o := range outcomes {
			if f.count(o.Arbiter) > 0 {
				us = append(us, float64(f.ns(o.Arbiter))/1000)
			}
		}
		if len(us) > 0 {
			b.figure(Figure{Case: name, Metric: f.metric, Unit: "us", Values: us})
		}
	}
}

func each[T any](in []T, f func(T) float64) []float64 {
	var out []float64
	for _, v := range in {
		out = append(out, f(v))
	}
	return out
}

// full: 75/25, which leaves nothing, against what one tenant gets alone.
func full(b *Bench) error {
	tenants := []Tenant{tenant("a", 75, "--kernel 1ms"), tenant("b", 25, "--kernel 1ms")}
	alone, err := b.some(3, Trial{Tenants: []Tenant{{Name: "alone", Load: "--kernel 1ms"}}, Seconds: b.Seconds / 2})
	if err != nil {
		return err
	}
	outcomes, err := b.runs(Trial{Tenants: tenants, Seconds: b.Seconds})
	if err != nil {
		return err
	}
	b.heading("75/25")
	b.sharesOf("75/25", 3, tenants, outcomes)
	whole := slices.Max(each(alone, Outcome.Sum)) // what else runs here only takes from it
	b.figure(Figure{Case: "75/25", Metric: "sum, of one tenant alone without limit", Unit: "%", Better: "higher", Target: 97,
		Values: each(outcomes, func(o Outcome) float64 { return 100 * o.Sum() / whole })})
	return nil
}

// fourProcesses of a tenant get what one gets, alone and beside a neighbour.
func fourProcesses(b *Bench) error {
	const name = "four processes"
	b.heading(name + " in a tenant of 30")
	for _, load := range []string{"--kernel 0.1ms", "--kernel 0.5ms", "--kernel 5ms"} {
		var got [2][]float64
		for i, procs := range []string{" --procs 1", " --procs 4"} {
			outcomes, err := b.runs(Trial{Tenants: []Tenant{tenant("tenant", 30, load+procs)}, Seconds: b.Seconds / 2})
			if err != nil {
				return err
			}
			got[i] = each(outcomes, Outcome.Sum)
		}
		b.figure(Figure{Case: name, Metric: "one process (" + load + ")", Unit: "% of one GPU", Values: got[0], Better: "nearest", Target: 30, Within: 2})
		b.figure(Figure{Case: name, Metric: "four (" + load + ")", Unit: "% of one GPU", Values: got[1], Better: "nearest", Target: 30, Within: 2})
		b.figure(Figure{Case: name, Metric: "four, of the limit (" + load + ")", Unit: "ratio", Better: "lower", Target: 1.05,
			Values: each(got[1], func(v float64) float64 { return v / 30 })})
	}
	tenants := []Tenant{tenant("four", 30, "--kernel 0.5ms --procs 4"), tenant("neighbour", 60, "--kernel 1ms")}
	outcomes, err := b.runs(Trial{Tenants: tenants, Seconds: b.Seconds})
	if err != nil {
		return err
	}
	b.sharesOf(name+", 30/60", 2, tenants, outcomes)
	return nil
}

// burst: a tenant of 30 with ceiling 100 has the GPU while its neighbour of 65 rests, and gives it back.
func burst(b *Bench) error {
	const name = "burst"
	tenants := []Tenant{{Name: "burst", Cores: 30, Burst: 100, Load: "--kernel 1ms"}, tenant("wakes", 65, "--kernel 1ms --cycle 3:3")}
	outcomes, err := b.runs(Trial{Tenants: tenants, Seconds: max(b.Seconds, 12), Every: 25 * time.Millisecond})
	if err != nil {
		return err
	}
	var idle, within, took []float64
	for _, o := range outcomes {
		i, w, t := b.wakes(o)
		idle, within, took = append(idle, median(i)), append(within, median(w)), append(took, median(t))
	}
	b.heading(name + ": 30 to 100 beside 65 that works 3 s and rests 3 s")
	b.figure(Figure{Case: name, Metric: "share of 30-100, neighbour idle", Unit: "% of one GPU", Values: idle, Better: "higher", Target: 97})
	b.figure(Figure{Case: name, Metric: "the 65, from 500 ms after it woke", Unit: "% of one GPU", Values: within, Better: "nearest", Target: 65, Within: 2})
	b.figure(Figure{Case: name, Metric: "time until it has 63 in 200 ms", Unit: "ms", Values: took, Better: "lower", Target: 500})
	return nil
}

// wakes scores each stretch of a trial in which the second tenant works and rests 3 s each: the
// first one's share in the last 2 s of its rest, the second one's from 500 ms after it woke, and how long
// it took to have 63 % in 200 ms (2800 ms: it never had).
func (b *Bench) wakes(o Outcome) (idle, within, took []float64) {
	const ms = int64(time.Millisecond)
	first, second := o.Got[0].Series, o.Got[1].Series
	times := o.Got[1].Report.Wakes
	if o.Got[1].Report.Probe != nil {
		times = second.Wakes(1000 * ms)
	}
	for _, wake := range times {
		if wake < o.From || wake+3000*ms > o.To {
			continue
		}
		idle = append(idle, first.Share(wake-2000*ms, wake))
		within = append(within, second.Share(wake+500*ms, wake+2900*ms))
		t := int64(0)
		for t < 2800*ms && second.Share(wake+t, wake+t+200*ms) < 63 {
			t += 5 * ms
		}
		took = append(took, float64(t/ms))
	}
	return idle, within, took
}

// equal tenants get equal parts, whatever their kernels.
func equal(b *Bench) error {
	const name = "equal tenants"
	var tenants []Tenant
	for _, load := range []string{"--kernel 0.2ms", "--kernel 1ms", "--kernel 5ms", "--kernel 0.2ms --graph 20"} {
		tenants = append(tenants, Tenant{Name: fmt.Sprint("t", len(tenants)), Cores: 20, Burst: 100, Load: load})
	}
	outcomes, err := b.runs(Trial{Tenants: tenants, Seconds: b.Seconds})
	if err != nil {
		return err
	}
	b.heading(name + ": four of 20 with ceiling 100")
	for i, t := range tenants {
		b.figure(Figure{Case: name, Metric: t.Name + " (" + t.Load + ")", Unit: "% of one GPU",
			Values: each(outcomes, func(o Outcome) float64 { return o.Got[i].Share })})
	}
	b.figure(Figure{Case: name, Metric: "Jain's index", Unit: "index", Better: "higher", Target: 0.99,
		Values: each(outcomes, func(o Outcome) float64 {
			return jain(each(o.Got, func(g Got) float64 { return g.Share }))
		})})
	b.figure(Figure{Case: name, Metric: "sum", Unit: "% of one GPU", Values: each(outcomes, Outcome.Sum)})
	return nil
}

// latency: an open-loop client at half load, alone and beside a tenant that takes what is left.
func latency(b *Bench) error {
	const name = "latency class"
	// Its limit is no part of the question: with it, requests that come close together would wait for that.
	client := Tenant{Name: "client", Cores: 60, Burst: 100, Latency: true, Load: "--kernel 2ms --rate 250 --poisson --latency"}
	b.heading(name + ": 2 ms requests, Poisson, 50 % load")
	alone, err := b.runs(Trial{Tenants: []Tenant{client}, Seconds: b.Seconds})
	if err != nil {
		return err
	}
	p99 := func(o Outcome) float64 { return o.Got[0].Report.Latency.P99 }
	base := each(alone, p99)
	b.figure(Figure{Case: name, Metric: "p99 alone", Unit: "ms", Values: base})
	for i, kernel := range []string{"0.2ms", "5ms", "20ms"} {
		outcomes, err := b.runs(Trial{Tenants: []Tenant{client, {Name: "other", Cores: 40, Burst: 100, Load: "--kernel " + kernel}}, Seconds: b.Seconds})
		if err != nil {
			return err
		}
		beside := "beside " + kernel
		b.figure(Figure{Case: name, Metric: "p99 " + beside, Unit: "ms", Values: each(outcomes, p99)})
		b.figure(Figure{Case: name, Metric: "p99 " + beside + ", of alone", Unit: "ratio", Better: held("lower", i == 0), Target: 1.3,
			Values: each(outcomes, func(o Outcome) float64 { return p99(o) / median(base) })})
		b.figure(Figure{Case: name, Metric: "the other, of the time left", Unit: "%", Better: held("higher", i == 0), Target: 85,
			Values: each(outcomes, func(o Outcome) float64 { return 100 * o.Got[1].Share / (100 - o.Got[0].Share) })})
	}
	return nil
}

// overhead at limit 100 alone, against no limit: pairs of runs, one after the other.
func overhead(b *Bench) error {
	const name = "overhead"
	b.heading(name + ": throughput at limit 100 alone, against no limit")
	for _, load := range []struct {
		flags string
		free  bool
	}{{"--kernel 1ms", false}, {"--kernel 20us --depth 256", false}, {"--kernel 0.2ms --graph 10", false}, {"--kernel 2us --depth 512", true}} {
		var ratio []float64
		for range max(3, b.Runs) {
			var rate [2]float64
			for i, cores := range []int{0, 100} {
				o, err := b.some(1, Trial{Tenants: []Tenant{{Name: "alone", Cores: cores, Load: load.flags}}, Seconds: b.Seconds / 2})
				if err != nil {
					return err
				}
				rate[i] = o[0].Got[0].Report.KernelsPerSecond
			}
			ratio = append(ratio, 100*(1-rate[1]/rate[0]))
		}
		b.figure(Figure{Case: name, Metric: "throughput lost (" + load.flags + ")", Unit: "%", Values: ratio, Better: held("lower", !load.free), Target: 0.5})
	}
	return nil
}

// liveChange: the limits of running tenants are changed, and hold a second later.
func liveChange(b *Bench) error {
	const name = "live change"
	before := []Tenant{tenant("a", 30, "--kernel 1ms"), tenant("b", 60, "--kernel 1ms")}
	after := []Tenant{tenant("a", 55, "--kernel 1ms"), tenant("b", 35, "--kernel 1ms")}
	var first, second [2][]float64
	for range b.Runs {
		var changed time.Duration // from the begin of the scored time
		var failed error
		o, err := b.run(Trial{Tenants: before, Seconds: b.Seconds, During: func(r *Running) {
			time.Sleep(time.Duration(b.Seconds / 2 * float64(time.Second)))
			failed = errors.Join(b.set("b", 35), b.set("a", 55))
			changed = time.Duration(b.Seconds*float64(time.Second)) - time.Until(r.Ends)
		}})
		if errors.Is(err, errLate) {
			b.late++
			continue
		}
		if err := errors.Join(err, failed); err != nil {
			return err
		}
		// The scored time begins up to half a second before the sleep does, by when tenants are seen.
		at := o.From + int64(changed)
		for i := range before {
			first[i] = append(first[i], o.Got[i].Series.Share(o.From, at-int64(time.Second)))
			second[i] = append(second[i], o.Got[i].Series.Share(at+int64(time.Second), o.To))
		}
	}
	b.heading(name + ": 30/60 becomes 55/35; scored from 1 s after it")
	for i := range before {
		b.figure(Figure{Case: name, Metric: before[i].Name + " before", Unit: "% of one GPU", Values: first[i], Better: "nearest", Target: before[i].Target, Within: 2})
	}
	for i := range after {
		b.figure(Figure{Case: name, Metric: after[i].Name + " after", Unit: "% of one GPU", Values: second[i], Better: "nearest", Target: after[i].Target, Within: 2})
	}
	return nil
}

// arbiterKilled: the process that arbitrates is killed at random moments. Nobody hangs, another takes
// over, and the shares hold.
func arbiterKilled(b *Bench) error {
	const name = "arbiter killed"
	tenants := []Tenant{tenant("a", 30, "--kernel 1ms"), tenant("b", 30, "--kernel 0.2ms --graph 20"), tenant("c", 30, "--kernel 2ms --sync-each")}
	var takeover []float64
	kills, hangs := 0, 0
	var outcomes []Outcome
	for range b.Runs {
		o, err := b.run(Trial{Tenants: tenants, Seconds: b.Seconds, During: func(r *Running) {
			k, t := r.killArbiters(2)
			kills += k
			takeover = append(takeover, t...)
		}})
		switch {
		case errors.Is(err, errHang):
			hangs++
			fmt.Println("  ", err)
		case errors.Is(err, errLate):
			b.late++
		case err != nil:
			return err
		default:
			outcomes = append(outcomes, o)
		}
	}
	b.heading(fmt.Sprintf("%s: %d times in %d runs", name, kills, b.Runs))
	if kills == 0 {
		fmt.Println("no arbiter was found to kill")
		b.missed++
		return nil
	}
	if len(outcomes) > 0 {
		b.sharesOf(name, 3, tenants, outcomes)
	}
	b.figure(Figure{Case: name, Metric: "runs in which a tenant hung", Unit: "runs", Values: []float64{float64(hangs)}, Better: "lower", Target: 0})
	if len(takeover) > 0 {
		b.figure(Figure{Case: name, Metric: "until another gives leases", Unit: "ms", Values: takeover, Better: "lower", Target: 100})
	}
	return nil
}

// killArbiters kills the arbiter so many times in the scored time, and tells how long it took each
// time until another one was there, in ms (1e9: nobody came within 2 s).
func (r *Running) killArbiters(times int) (kills int, took []float64) {
	part := time.Until(r.Ends) / time.Duration(times)
	for range times {
		next := time.Now().Add(part)
		time.Sleep(time.Duration(r.bench.random.Int63n(int64(part * 3 / 4))))
		pid := r.bench.arbiter()
		for _, p := range r.tenants {
			if pid == 0 || p.cmd.Process.Pid != pid || p.ended() {
				continue
			}
			p.killed = true
			if p.cmd.Process.Signal(syscall.SIGKILL) == nil {
				kills++
				took = append(took, r.bench.takeover(pid))
			}
		}
		time.Sleep(time.Until(next))
	}
	return kills, took
}
