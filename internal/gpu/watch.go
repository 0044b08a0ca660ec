package gpu

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"time"
)

// Watch calls f with the inventory at first, and at every change of it: a GPU added, lost, unhealthy,
// recovered, a driver gone or replaced. It returns when ctx ends. f is called from one goroutine and must
// not block: nothing is watched meanwhile.
func (w *Watcher) Watch(ctx context.Context, f func(Inventory)) {
	ctx, cancel := context.WithCancel(ctx)
	l := &look{WatcherConfig: w.config, ctx: ctx, book: newBook(NewJudge(w.config.XIDs, w.config.Every)),
		scans: make(chan scan), feeds: make(chan feedLine), cancels: map[int]context.CancelFunc{}}
	defer l.running.Wait()
	defer cancel()
	l.book.recall(l.Now(), w.config.Known, w.config.KnownDriver)
	faults := l.book.judge.Faults()
	timer := time.NewTimer(0)
	defer timer.Stop()
	var told *Inventory
	for {
		select {
		case <-ctx.Done():
			if len(faults) > 0 {
				l.Remember(l.book.judge.Faults(), l.book.release())
			}
			return
		case <-timer.C:
			if !l.scanning {
				l.scanning = true
				l.startScan()
			}
			continue
		case s := <-l.scans:
			l.scanning = false
			timer.Reset(l.scanned(s))
		case line := <-l.feeds:
			if again := l.fed(line); again {
				timer.Reset(l.backoff())
			}
		}
		if now := l.book.judge.Faults(); !slices.EqualFunc(now, faults, sameFault) {
			faults = now
			l.Remember(now, l.book.release())
		}
		if inv := l.book.inventory(); l.ready && (told == nil || !reflect.DeepEqual(inv, *told)) {
			told = &inv
			f(inv)
		}
	}
}

func sameFault(a, b Fault) bool { return a.UUID == b.UUID && a.XID == b.XID }

// look is one Watch: a loop that owns the state, scans that ask once, and a feed of health that runs on.
type look struct {
	WatcherConfig
	ctx     context.Context
	running sync.WaitGroup
	book    *book
	ready   bool // something is known: GPUs, or why there are none

	scans    chan scan
	scanning bool
	failures int // scans and feeds in a row

	feeds   chan feedLine
	newest  int // feed; those before it end when it speaks
	cancels map[int]context.CancelFunc
	feeding string // what the newest feed watches; "": there is none
}

// scan is the driver's answer to what there is.
type scan struct {
	prober Prober
	report Report
	err    error
}

// feedLine is one line of a feed, or its end.
type feedLine struct {
	feed   int
	health Health
	ended  bool
	err    error
}

func (l *look) startScan() {
	l.running.Go(func() {
		var s scan
		if s.prober, s.err = l.Open(); s.err == nil {
			s.report, s.err = s.prober.Inventory(l.ctx)
		}
		select {
		case l.scans <- s:
		case <-l.ctx.Done():
		}
	})
}

// scanned takes a scan and says when the next one is due.
func (l *look) scanned(s scan) time.Duration {
	if s.err != nil {
		problem := problemOf(s.err)
		l.failures++
		// One answer that is late means nothing while health is still told.
		if problem.Reason != NoAnswer || l.feeding == "" || l.failures > 1 {
			l.problem(problem)
		}
		return l.backoff()
	}
	l.ready = true
	anew := l.book.scanned(l.Now(), s.report)
	if l.book.problem.Reason != "" {
		l.failures++
		l.problem(l.book.problem)
		return l.backoff()
	}
	l.failures = 0
	if watch := l.book.answering(); watch != l.feeding || anew {
		l.feed(s.prober, watch)
	}
	if l.book.sick() {
		return min(2*l.Every, l.Rescan)
	}
	return l.Rescan
}

func (l *look) problem(p Problem) {
	if !l.ready || l.book.problem.Reason != p.Reason {
		l.Log.Warn("no GPU can be shared", "reason", string(p.Reason), "error", p.Text)
	}
	l.ready = true
	l.book.failed(l.Now(), p)
	for _, cancel := range l.cancels {
		cancel()
	}
	l.feeding = ""
}

func (l *look) backoff() time.Duration {
	wait := l.Retry
	for range max(l.failures, 1) - 1 {
		if wait *= 2; wait >= l.Rescan {
			return l.Rescan
		}
	}
	return wait
}

// feed starts to watch the GPUs that answer. The feed before goes on until this one speaks: no XID falls
// between the two.
func (l *look) feed(p Prober, watch string) {
	l.newest++
	l.feeding = watch
	ctx, cancel := context.WithCancel(l.ctx)
	feed := l.newest
	l.cancels[feed] = cancel
	l.running.Go(func() {
		send := func(line feedLine) {
			select {
			case l.feeds <- line:
			case <-l.ctx.Done():
			}
		}
		err := p.WatchHealth(ctx, l.Every, func(h Health) { send(feedLine{feed: feed, health: h}) })
		send(feedLine{feed: feed, ended: true, err: err})
	})
}

// fed takes a line of a feed. True: a scan is due after the back-off.
func (l *look) fed(line feedLine) bool {
	if line.ended {
		l.cancels[line.feed]()
		delete(l.cancels, line.feed)
		if line.feed != l.newest || l.feeding == "" {
			return false
		}
		l.feeding = ""
		l.failures++
		l.Log.Warn("the driver's health is watched anew", "error", line.err)
		return true
	}
	for feed, cancel := range l.cancels {
		if feed < line.feed {
			cancel()
		}
	}
	if l.book.problem.Reason != "" {
		return false // the feed of a driver that is gone
	}
	before := l.book.sick()
	if x := line.health.XID; x != nil {
		l.Log.Warn("critical error", "gpu", x.UUID, "xid", x.XID, "fault", l.XIDs.Fault(x.XID))
		l.book.judge.XID(l.Now(), *x)
	}
	for _, d := range line.health.Devices {
		if d.UUID != "" {
			l.book.judge.Reading(l.Now(), d)
		}
	}
	// A GPU that fell ill, or is fit again: ask anew what there is.
	return before != l.book.sick()
}

// problemOf turns what a driver, or the search for it, failed with into a Problem.
func problemOf(err error) Problem {
	var problem *ProblemError
	if errors.As(err, &problem) {
		return problem.Problem
	}
	const (
		driverNotLoaded = 9
		libraryNotFound = 12
		versionMismatch = 18
	)
	var nvml *NVMLError
	if errors.As(err, &nvml) {
		switch nvml.Code {
		case driverNotLoaded:
			return Problem{NoDriver, fmt.Sprintf("the NVIDIA kernel module is not loaded (%s): install the driver, or `modprobe nvidia`", nvml.Text)}
		case libraryNotFound:
			return Problem{NoDriver, fmt.Sprintf("no NVIDIA driver: %s", nvml.Text)}
		case versionMismatch:
			return Problem{Mismatch, fmt.Sprintf("the driver's libraries and the kernel module are of different releases (%s): reboot, or reload the module", nvml.Text)}
		}
	}
	return Problem{NoAnswer, err.Error()}
}
