package tenant

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// lock acts on a slot's byte of the ledger file; held reports the lock that stands in the way.
func (l *Ledger) lockOp(index int, cmd int, kind int16) (int16, error) {
	fl := unix.Flock_t{Type: kind, Start: lockBase + int64(index), Len: 1}
	err := unix.FcntlFlock(l.file.Fd(), cmd, &fl)
	return fl.Type, err
}

func (l *Ledger) tryLock(index int) bool {
	_, err := l.lockOp(index, unix.F_OFD_SETLK, unix.F_WRLCK)
	return err == nil
}

func (l *Ledger) unlock(index int) { _, _ = l.lockOp(index, unix.F_OFD_SETLK, unix.F_UNLCK) }

// held is true when another open file description holds the slot, or when that is unknown.
func (l *Ledger) held(index int) bool {
	kind, err := l.lockOp(index, unix.F_OFD_GETLK, unix.F_WRLCK)
	return err != nil || kind != unix.F_UNLCK
}

func (l *Ledger) process(index int) Process {
	s := &l.page.slot[index]
	return Process{PID: int(atomic.LoadUint32(&s.pid)), Start: atomic.LoadUint64(&s.starttime)}
}

// dead is true of a used slot whose process certainly is gone.
func (l *Ledger) dead(index int) bool {
	return atomic.LoadUint32(&l.page.slot[index].state) == slotUsed && l.gone(index)
}

// gone is true when the slot's process certainly is gone. Of another PID namespace it can be judged only with
// Hosts.
func (l *Ledger) gone(index int) bool {
	ns := atomic.LoadUint64(&l.page.slot[index].pidns)
	if ns == PIDNamespace() {
		return l.process(index).Gone()
	}
	return l.hosts != nil && l.hosts.Gone(ns, l.process(index))
}

// Reclaim gives back what processes held that are gone (zombie or no more, and nobody holds their
// file lock). It returns the number of slots freed.
func (l *Ledger) Reclaim() int {
	freed := 0
	for i := 1; i <= l.everUsed(); i++ {
		if l.ReclaimSlot(i) {
			freed++
		}
	}
	l.settleOrphans()
	return freed
}

// ReclaimSlot is Reclaim for one process; true when it was gone. The arbiter is told.
func (l *Ledger) ReclaimSlot(index int) bool {
	s := &l.page.slot[index]
	if atomic.LoadUint32(&s.state) != slotUsed || l.held(index) || !l.dead(index) || !l.tryLock(index) {
		return false
	}
	defer l.unlock(index)
	if atomic.LoadUint32(&s.state) != slotUsed || !l.dead(index) || !l.clear(index) {
		return false
	}
	l.Ring()
	return true
}

// clear gives back all that a dead process held. The caller holds the slot's file lock. False: not
// now, what it exported could not be left to its importers.
func (l *Ledger) clear(index int) bool {
	s := &l.page.slot[index]
	for d := range s.dev {
		sd := &s.dev[d]
		atomic.StoreUint64(&sd.imported, 0)
		if bytes := l.slotUnits(index, d) * Unit; bytes > 0 {
			if exported := atomic.LoadUint64(&sd.exported); exported > 0 {
				if !l.orphan(index, d, min(exported, bytes)) {
					return false
				}
				atomic.StoreUint64(&sd.exported, 0)
			}
			if units := l.slotUnits(index, d); units > 0 {
				l.add(index, d, -int64(units), NoLimit)
			}
		}
		atomic.StoreUint64(&sd.exported, 0)
		atomic.StoreUint64(&sd.context, 0)
		atomic.StoreUint64(&sd.gpuTimeNs, 0)
		atomic.StoreUint32(&sd.inFlight, 0)
		atomic.StoreUint32(&sd.waiting, 0)
		for _, p := range []*int64{&sd.waitingSince, &sd.pendingNs, &sd.workEndNs, &sd.longestNs} {
			atomic.StoreInt64(p, 0)
		}
		atomic.StoreUint64(&sd.closedSeq, 0)
	}
	atomic.AndUint64(&l.page.clients[index/64], ^(uint64(1) << (index % 64)))
	// Free first: a reclaimer that dies here leaves a free slot, not one of nobody.
	atomic.StoreUint32(&s.state, slotFree)
	atomic.StoreUint32(&s.pid, 0)
	atomic.StoreUint32(&s.hostPid, 0)
	atomic.StoreUint64(&s.starttime, 0)
	s.reserved = [len(s.reserved)]uint64{}
	return true
}

// orphan moves bytes that outlive their creator to slot 0, as far as living processes hold imports
// on the device, and gives the rest back. All orphans together are at most what importers hold.
// False: nothing was done, as another process holds the orphans' lock for long.
func (l *Ledger) orphan(index, dev int, bytes uint64) bool {
	if l.imports(dev) > 0 {
		if !l.lockOrphans() {
			return false
		}
		imports, have := l.imports(dev), l.slotUnits(0, dev)*Unit
		if imports > have {
			l.add(0, dev, int64(min(bytes, imports-have)/Unit), NoLimit)
		}
		l.unlock(0)
	}
	l.add(index, dev, -int64(bytes/Unit), NoLimit)
	return true
}

// lockOrphans waits for the lock of slot 0, which is held for microseconds at a time.
func (l *Ledger) lockOrphans() bool {
	for range 1000 {
		if l.tryLock(0) {
			return true
		}
		time.Sleep(50 * time.Microsecond)
	}
	return false
}

// imports is what living processes hold of others' memory on a device.
func (l *Ledger) imports(dev int) uint64 {
	var sum uint64
	for i := 1; i <= l.everUsed(); i++ {
		s := &l.page.slot[i]
		if atomic.LoadUint32(&s.state) != slotUsed {
			continue
		}
		if n := atomic.LoadUint64(&s.dev[dev].imported); n != 0 && (l.held(i) || !l.gone(i)) {
			sum += n
		}
	}
	return sum
}

// settleOrphans lowers slot 0 to what living processes still hold through imports.
func (l *Ledger) settleOrphans() {
	any := false
	for d := range MaxDevices {
		any = any || l.slotUnits(0, d) != 0
	}
	if !any || !l.tryLock(0) {
		return
	}
	defer l.unlock(0)
	for d := range MaxDevices {
		have := l.slotUnits(0, d) * Unit
		if have == 0 {
			continue
		}
		if imports := l.imports(d); imports < have {
			l.add(0, d, -int64((have-imports)/Unit), NoLimit)
		}
	}
}
