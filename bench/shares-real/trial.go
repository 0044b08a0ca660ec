package main

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	startSlack = 2 * time.Second  // in which all tenants have launched
	endSlack   = 10 * time.Second // in which a load ends after its time: beyond that it hangs
)

// Trial is tenants that run at the same time, once.
type Trial struct {
	Tenants []Tenant
	Seconds float64
	// Every is how often the truth is read.
	Every time.Duration
	// During, if there is one, runs beside the scored time.
	During func(*Running)
}

// Got is what a tenant got in the scored time.
type Got struct {
	Tenant
	Share  float64
	Series Series
	Report Report
}

// Outcome of a trial. Times are on the clock of the series.
type Outcome struct {
	Got      []Got
	From, To int64
	Arbiter  Arbiter
	// Host is how busy the machine's processors were, percent.
	Host float64
}

// Sum of all shares.
func (o Outcome) Sum() float64 {
	var sum float64
	for _, g := range o.Got {
		sum += g.Share
	}
	return sum
}

// windowError is how far a tenant's windows of 1 s are off its target in the mean, in points.
func (o Outcome) windowError(i int) float64 {
	windows := o.Got[i].Series.Windows(o.From, o.To, 1e9, 1e8)
	sum := 0.0
	for _, w := range windows {
		sum += math.Abs(w - o.Got[i].Target)
	}
	return sum / float64(max(1, len(windows)))
}

// Running is a trial under way.
type Running struct {
	bench   *Bench
	tenants []*process
	// Scored time by CLOCK_MONOTONIC, as far as it is known beforehand.
	Ends time.Time

	lock   sync.Mutex
	owner  map[int]owner // by pid, of processes with GPU time
	last   map[int]int64
	series []Series
	err    error
}

// owner of a process: its tenant, and when the process was born, as pids are used again.
type owner struct {
	tenant int
	born   string
}

// errHang is a load that did not end.
var errHang = errors.New("hangs")

// errLate is a trial in which the tenants did not run at the same time for long enough: the machine
// was too busy.
var errLate = errors.New("the tenants did not launch at the same time")

// run does a trial.
func (b *Bench) run(t Trial) (Outcome, error) {
	if err := b.machine.Fresh(); err != nil {
		return Outcome{}, err
	}
	r := &Running{bench: b, owner: map[int]owner{}, last: map[int]int64{}, series: make([]Series, len(t.Tenants))}
	b.running.Store(r)
	defer r.stop()
	seconds := t.Seconds + b.Settle + startSlack.Seconds()
	for _, tenant := range t.Tenants {
		p, err := tenant.start(b, seconds)
		if err != nil {
			return Outcome{}, err
		}
		r.lock.Lock()
		r.tenants = append(r.tenants, p)
		r.lock.Unlock()
	}
	if t.Every == 0 {
		t.Every = 100 * time.Millisecond
	}
	stop := make(chan struct{})
	var sampler sync.WaitGroup
	sampler.Go(func() { r.sample(t.Every, stop) })
	host := hostNow()
	var arbiter Arbiter
	if r.wait(r.allBegun, 8*time.Second) {
		arbiter = r.score(t)
	}
	busy := hostNow().since(host)
	ended := r.wait(r.allEnded, startSlack+endSlack)
	close(stop)
	sampler.Wait()
	if !ended {
		return Outcome{}, r.hanging()
	}
	if r.err != nil {
		return Outcome{}, r.err
	}
	o, err := r.outcome(t)
	o.Arbiter, o.Host = arbiter, busy
	return o, err
}

// score waits for the scored time to pass, with what is to happen in it.
func (r *Running) score(t Trial) Arbiter {
	time.Sleep(time.Duration(r.bench.Settle * float64(time.Second)))
	r.Ends = time.Now().Add(time.Duration(t.Seconds * float64(time.Second)))
	if t.During != nil {
		t.During(r)
	}
	time.Sleep(time.Until(r.Ends))
	return r.bench.asked()
}

// wait until something is so; false: it never was.
func (r *Running) wait(so func() bool, most time.Duration) bool {
	for end := time.Now().Add(most); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if so() {
			return true
		}
	}
	return false
}

func (r *Running) hanging() error {
	var errs []error
	for i, p := range r.tenants {
		if !r.over(i) {
			errs = append(errs, fmt.Errorf("tenant %s %w", p.tenant.Name, errHang))
		}
	}
	return errors.Join(errs...)
}

// allBegun: all have GPU time. Where that cannot be seen, after the time that it takes.
func (r *Running) allBegun() bool {
	if at, busy, _ := r.bench.machine.Truth(); at == 0 && busy == nil {
		time.Sleep(startSlack / 2)
		return true
	}
	r.lock.Lock()
	defer r.lock.Unlock()
	for i, s := range r.series {
		if _, ok := s.Begin(); !ok && !r.tenants[i].ended() {
			return false
		}
	}
	return true
}

func (r *Running) allEnded() bool {
	for i := range r.tenants {
		if !r.over(i) {
			return false
		}
	}
	return true
}

// over: the tenant's load has ended, also when its supervisor was killed before.
func (r *Running) over(i int) bool {
	p := r.tenants[i]
	if !p.ended() {
		return false
	}
	if !p.killed {
		return true
	}
	if _, err := p.report(); err == nil {
		return true
	}
	return r.bench.machine.Label() == "sim" && len(r.living(i)) == 0
}

// living are a tenant's processes that have GPU time and have not ended.
func (r *Running) living(i int) []int {
	r.lock.Lock()
	defer r.lock.Unlock()
	var out []int
	for pid, o := range r.owner {
		if o.tenant == i && alive(pid) && stat(pid).born == o.born {
			out = append(out, pid)
		}
	}
	return out
}

// sample reads the truth again and again.
func (r *Running) sample(every time.Duration, stop <-chan struct{}) {
	for tick := time.NewTicker(every); ; {
		select {
		case <-stop:
			tick.Stop()
			return
		case <-tick.C:
		}
		at, busy, err := r.bench.machine.Truth()
		if busy == nil && err == nil {
			return // not to be seen here
		}
		if err != nil {
			// The machine comes into being with the first program.
			if len(r.last) > 0 {
				r.err = err
			}
			continue
		}
		r.add(at, busy)
	}
}

func (r *Running) add(at int64, busy map[int]int64) {
	r.lock.Lock()
	defer r.lock.Unlock()
	for pid, ns := range busy {
		if _, known := r.owner[pid]; !known {
			for i, p := range r.tenants {
				if descends(pid, p.cmd.Process.Pid) {
					r.owner[pid] = owner{i, stat(pid).born}
				}
			}
		}
		// A process that ended is no longer shown; what it had stays.
		r.last[pid] = max(r.last[pid], ns)
	}
	sum := make([]int64, len(r.series))
	for pid, o := range r.owner {
		sum[o.tenant] += r.last[pid]
	}
	for i := range r.series {
		r.series[i] = append(r.series[i], Point{At: at, Busy: sum[i]})
	}
}

// outcome scores the part of the time in which all ran: from when the last has settled.
func (r *Running) outcome(t Trial) (Outcome, error) {
	var o Outcome
	end := int64(math.MaxInt64)
	for i, p := range r.tenants {
		report, err := p.report()
		if err != nil {
			return o, err
		}
		s := r.series[i]
		if report.Probe != nil {
			s = report.Probe.Series()
		}
		begin, ok := s.Begin()
		if !ok {
			return o, fmt.Errorf("tenant %s had no GPU time, by the machine's count", p.tenant.Name)
		}
		o.From = max(o.From, begin)
		if !strings.Contains(p.tenant.Load, "--cycle") {
			end = min(end, s.End())
		}
		o.Got = append(o.Got, Got{Tenant: p.tenant, Series: s, Report: report})
	}
	o.From += int64(r.bench.Settle * 1e9)
	o.To = o.From + int64(t.Seconds*1e9)
	if o.To > end {
		return o, errLate
	}
	for i := range o.Got {
		o.Got[i].Share = o.Got[i].Series.Share(o.From, o.To)
	}
	return o, nil
}

// stop ends what is left.
func (r *Running) stop() {
	r.lock.Lock()
	tenants := slices.Clone(r.tenants)
	r.lock.Unlock()
	for i, p := range tenants {
		if !p.ended() {
			_ = p.cmd.Process.Signal(syscall.SIGTERM)
			select {
			case <-p.done:
			case <-time.After(2 * time.Second):
				_ = p.cmd.Process.Kill()
			}
		}
		for _, pid := range r.living(i) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		p.close()
	}
}
