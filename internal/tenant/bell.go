package tenant

import (
	"math/bits"
	"sync/atomic"
)

// Work is what a process says about its work on one device (struct tr_slot_dev). Nothing of it is
// verified.
type Work struct {
	Slot         int
	InFlight     int
	Waiting      int
	WaitingSince int64
	Pending      int64
	WorkEnd      int64
	LastEnd      int64
	Longest      int64
	Closed       uint64
	First        int64
	GPUTime      uint64
}

// Clients calls f with what each process that ever asked for a grant says about a device of the
// slice. The order is that of the slots.
func (l *Ledger) Clients(dev int, f func(Work)) {
	for w := range l.page.clients {
		for set := atomic.LoadUint64(&l.page.clients[w]); set != 0; set &= set - 1 {
			i := w*64 + bits.TrailingZeros64(set)
			if atomic.LoadUint32(&l.page.slot[i].state) == slotUsed {
				f(l.work(i, dev))
			}
		}
	}
}

// HasClients tells whether a process that ever asked for a grant is there.
func (l *Ledger) HasClients() bool {
	for w := range l.page.clients {
		if atomic.LoadUint64(&l.page.clients[w]) != 0 {
			return true
		}
	}
	return false
}

func (l *Ledger) work(index, dev int) Work {
	s := &l.page.slot[index].dev[dev]
	// in_flight before what was done: a process first reports what is done, then that it is.
	return Work{
		Slot:         index,
		InFlight:     int(atomic.LoadUint32(&s.inFlight)),
		Waiting:      int(atomic.LoadUint32(&s.waiting)),
		WaitingSince: atomic.LoadInt64(&s.waitingSince),
		Pending:      atomic.LoadInt64(&s.pendingNs),
		WorkEnd:      atomic.LoadInt64(&s.workEndNs),
		LastEnd:      atomic.LoadInt64(&s.lastEndNs),
		Longest:      atomic.LoadInt64(&s.longestNs),
		Closed:       atomic.LoadUint64(&s.closedSeq),
		First:        atomic.LoadInt64(&s.firstNs),
		GPUTime:      atomic.LoadUint64(&s.gpuTimeNs),
	}
}

// Bell is the number of times that something happened on which the arbiter may act.
func (l *Ledger) Bell() uint32 { return atomic.LoadUint32(&l.page.bell) }

// Ring raises the bell and wakes the arbiter.
func (l *Ledger) Ring() {
	atomic.AddUint32(&l.page.bell, 1)
	FutexWake(&l.page.bell)
}

// WaitBell sleeps until the bell is no longer at value, or the time has come; it may return for no
// reason. An error says that the ledger cannot be waited on any more.
func (l *Ledger) WaitBell(value uint32, until int64) error {
	return FutexWait(&l.page.bell, value, until)
}

// WaitingSince is since when a process waits for a grant; 0: it does not.
func (l *Ledger) WaitingSince(slot, dev int) int64 {
	if slot < 0 || slot >= MaxProcs {
		return 0
	}
	s := &l.page.slot[slot].dev[dev]
	if atomic.LoadUint32(&s.waiting) == 0 {
		return 0
	}
	return atomic.LoadInt64(&s.waitingSince)
}
