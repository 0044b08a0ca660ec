package arbiter

import (
	"sync/atomic"

	abi "tranche.dev/tranche/internal/tenant"
)

// alarm calls f at a time that may be changed, from a thread of its own whose timer is precise: the
// runtime's timers can be late by as much as a handover may cost.
type alarm struct {
	now      func() int64
	f        func()
	word     uint32 // changed to wake the thread
	at       atomic.Int64
	sleeping atomic.Int64 // until when the thread sleeps, as it last said
	over     atomic.Bool
}

func newAlarm(now func() int64, f func()) *alarm {
	a := &alarm{now: now, f: f}
	a.at.Store(never)
	a.sleeping.Store(never)
	return a
}

// set moves the time. From several goroutines the last one counts.
func (a *alarm) set(at int64) {
	a.at.Store(at)
	if at < a.sleeping.Load() {
		a.kick()
	}
}

func (a *alarm) kick() {
	atomic.AddUint32(&a.word, 1)
	abi.FutexWake(&a.word)
}

func (a *alarm) stop() {
	a.over.Store(true)
	a.kick()
}

func (a *alarm) run() {
	turnThread()
	for {
		word := atomic.LoadUint32(&a.word) // before all that is looked at, so that no kick is missed
		if a.over.Load() {
			return
		}
		at := a.at.Load()
		a.sleeping.Store(at)
		switch {
		case a.at.Load() != at: // set before it could know how long we sleep
		case at <= a.now():
			a.at.CompareAndSwap(at, never)
			a.f()
		default:
			_ = abi.FutexWait(&a.word, word, at)
		}
	}
}
