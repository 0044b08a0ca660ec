package tenant

import (
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Grant is a turn of one process on one device (struct tr_grant).
type Grant struct {
	Seq        uint64
	Slot       int
	Local      bool
	Continues  bool
	Coupled    bool
	Start, End int64
	Since      int64
	InFlight   int64
	// Another process's work was on the GPU too (struct tr_beside).
	Beside, BesideSince int64
}

// Lease is what the arbiter says about one device (struct tr_lease).
type Lease struct {
	Required bool
	Grants   [2]Grant
	Eligible int64
	TAT      int64
	GPUTime  uint64
	// Wanted and Got in hundredths of a hundredth of the GPU.
	Wanted, Got int
	Granted     uint64
}

// Leases is a mapped leases page, the second of the limits file. One writer: the arbiter. Reading is
// safe from several goroutines, writing from one at a time per device.
type Leases struct {
	page *leasesPage
	mem  []byte
}

// OpenLeases maps the leases of a slice for reading.
func OpenLeases(dir string) (*Leases, error) { return openLeases(at(dir), false) }

// OpenLeasesIn is OpenLeases in an open directory.
func OpenLeasesIn(dir *os.File) (*Leases, error) { return openLeases(in(dir), false) }

// OpenLeasesWriterIn maps the leases of an open directory for their writer, the arbiter. What a
// writer that died left half written is made readable.
func OpenLeasesWriterIn(dir *os.File) (*Leases, error) {
	l, err := openLeases(in(dir), true)
	if err != nil {
		return nil, err
	}
	if err := Guard(l.repair); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

func openLeases(dir place, write bool) (*Leases, error) {
	// All of the file: its second page does not begin at a page of every machine.
	mem, f, err := openMapped(dir, FileLimits, limitsFileSize, write)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	l := &Leases{page: (*leasesPage)(unsafe.Pointer(&mem[leasesOffset])), mem: mem}
	var damaged bool
	err = Guard(func() { damaged = !write && atomic.LoadUint64(&l.page.magic) != leasesMagic })
	if damaged {
		err = fmt.Errorf("%s is damaged or of another version", f.Name())
	}
	if err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

func (l *Leases) repair() {
	if atomic.LoadUint64(&l.page.magic) != leasesMagic {
		clear(l.mem[leasesOffset:])
	}
	for i := range l.page.lease {
		if w := &l.page.lease[i].word; atomic.LoadUint32(w)&1 != 0 {
			atomic.AddUint32(w, 1)
			FutexWake(w)
		}
	}
	atomic.StoreUint64(&l.page.magic, leasesMagic)
	tellMetered(l.mem)
}

// Set writes the lease of a device of the slice. True: it says something new to processes, and who
// sleeps on it is to be woken.
func (l *Leases) Set(dev int, to Lease) bool {
	p := &l.page.lease[dev]
	// A word that is odd here was left by a writer that died after us opening the page.
	word := atomic.LoadUint32(&p.word) | 1
	atomic.StoreUint32(&p.word, word)
	before := atomic.LoadUint32(&p.flags)
	news := p.put(to)
	atomic.StoreUint32(&p.word, word+1)
	if atomic.LoadUint32(&p.flags) != before {
		tellMetered(l.mem)
	}
	return news
}

// Wake wakes who sleeps on the lease.
func (l *Leases) Wake(dev int) { FutexWake(&l.page.lease[dev].word) }

// tellMetered tells processes that are not metered whether they are to be: a device has a compute limit or
// needs grants. The supervisor and the arbiter both call it after a change of theirs.
func tellMetered(mem []byte) {
	limits := (*limitsPage)(unsafe.Pointer(&mem[0]))
	leases := (*leasesPage)(unsafe.Pointer(&mem[leasesOffset]))
	for {
		var metered uint32
		for i := range min(int(atomic.LoadUint32(&limits.nDevices)), MaxDevices) {
			if atomic.LoadUint32(&limits.dev[i].flags)&flagCoresLimited != 0 || atomic.LoadUint32(&leases.lease[i].flags)&leaseRequired != 0 {
				metered = 1
			}
		}
		// Again until it stays: the other one may have looked before our change and stored after it.
		if atomic.SwapUint32(&leases.metered, metered) == metered {
			return
		}
	}
}

// put stores the fields; true when one changed on which launches may wait.
func (p *lease) put(to Lease) bool {
	var flags uint32
	if to.Required {
		flags |= leaseRequired
	}
	news := atomic.SwapUint32(&p.flags, flags) != flags
	news = atomic.SwapInt64(&p.eligibleNs, to.Eligible) != to.Eligible || news
	for i := range to.Grants {
		atomic.StoreInt64(&p.beside[i].totalNs, to.Grants[i].Beside)
		atomic.StoreInt64(&p.beside[i].sinceNs, to.Grants[i].BesideSince)
		news = p.grant[i].put(to.Grants[i]) || news
	}
	atomic.StoreInt64(&p.tat, to.TAT)
	atomic.StoreUint64(&p.gpuTimeNs, to.GPUTime)
	atomic.StoreUint32(&p.shareWanted, uint32(to.Wanted))
	atomic.StoreUint32(&p.shareGot, uint32(to.Got))
	atomic.StoreUint64(&p.grants, to.Granted)
	return news
}

func (g *grant) put(to Grant) bool {
	to.Beside, to.BesideSince = 0, 0 // nobody waits for them
	if g.get() == to {
		return false
	}
	var flags uint32
	if to.Local {
		flags |= grantLocal
	}
	if to.Continues {
		flags |= grantContinues
	}
	if to.Coupled {
		flags |= grantCoupled
	}
	atomic.StoreUint64(&g.seq, to.Seq)
	atomic.StoreUint32(&g.slot, uint32(to.Slot))
	atomic.StoreUint32(&g.flags, flags)
	atomic.StoreInt64(&g.startNs, to.Start)
	atomic.StoreInt64(&g.endNs, to.End)
	atomic.StoreInt64(&g.sinceNs, to.Since)
	atomic.StoreInt64(&g.inFlightNs, to.InFlight)
	return true
}

func (g *grant) get() Grant {
	flags := atomic.LoadUint32(&g.flags)
	return Grant{Seq: atomic.LoadUint64(&g.seq), Slot: int(atomic.LoadUint32(&g.slot)), Local: flags&grantLocal != 0,
		Continues: flags&grantContinues != 0, Coupled: flags&grantCoupled != 0, Start: atomic.LoadInt64(&g.startNs), End: atomic.LoadInt64(&g.endNs),
		Since: atomic.LoadInt64(&g.sinceNs), InFlight: atomic.LoadInt64(&g.inFlightNs)}
}

// Get reads the lease of a device; false when it is being written for too long.
func (l *Leases) Get(dev int) (Lease, bool) {
	p := &l.page.lease[dev]
	for range 1000 {
		before := atomic.LoadUint32(&p.word)
		out := p.get()
		if before&1 == 0 && atomic.LoadUint32(&p.word) == before {
			return out, true
		}
	}
	return Lease{}, false
}

func (p *lease) get() Lease {
	l := Lease{
		Required: atomic.LoadUint32(&p.flags)&leaseRequired != 0,
		Grants:   [2]Grant{p.grant[0].get(), p.grant[1].get()},
		Eligible: atomic.LoadInt64(&p.eligibleNs),
		TAT:      atomic.LoadInt64(&p.tat), GPUTime: atomic.LoadUint64(&p.gpuTimeNs),
		Wanted: int(atomic.LoadUint32(&p.shareWanted)), Got: int(atomic.LoadUint32(&p.shareGot)),
		Granted: atomic.LoadUint64(&p.grants),
	}
	for i := range l.Grants {
		l.Grants[i].Beside, l.Grants[i].BesideSince = atomic.LoadInt64(&p.beside[i].totalNs), atomic.LoadInt64(&p.beside[i].sinceNs)
	}
	return l
}

// Beat is the arbiter's sign of life.
func (l *Leases) Beat(now int64, pid int) {
	atomic.StoreUint32(&l.page.arbiterPid, uint32(pid))
	atomic.StoreInt64(&l.page.beatNs, now)
}

// Arbiter is who serves the slice, by its own PID namespace, and its last sign of life; 0: nobody did
// yet, or the last one has gone in order.
func (l *Leases) Arbiter() (pid int, beat int64) {
	return int(atomic.LoadUint32(&l.page.arbiterPid)), atomic.LoadInt64(&l.page.beatNs)
}

// Served is true while an arbiter that lives serves the slice.
func (l *Leases) Served(now int64) bool {
	_, beat := l.Arbiter()
	return beat != 0 && now-beat < BeatStaleNs
}

// Release says that no arbiter is there any more; waiting launches go on under their own account.
func (l *Leases) Release() {
	atomic.StoreInt64(&l.page.beatNs, 0)
	atomic.StoreUint32(&l.page.arbiterPid, 0)
	for i := range l.page.lease {
		p := &l.page.lease[i]
		word := atomic.LoadUint32(&p.word) | 1
		atomic.StoreUint32(&p.word, word)
		atomic.StoreUint32(&p.flags, 0)
		atomic.StoreUint32(&p.word, word+1)
		FutexWake(&p.word)
	}
	tellMetered(l.mem)
}

// Close unmaps the page; the Leases must not be used after it.
func (l *Leases) Close() { _ = unix.Munmap(l.mem) }
