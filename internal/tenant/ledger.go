package tenant

import (
	"fmt"
	"math"
	"os"
	"slices"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// NoLimit is the limit of an operation that must not be refused.
const NoLimit = math.MaxUint64

const (
	amountMask = 1<<amountBits - 1
	slotMask   = 1<<slotBits - 1
	opMask     = 1<<opBits - 1
)

// Ledger is a mapped usage ledger. Its methods may be called from several goroutines and while
// the tenant's processes write; Reclaim only from one goroutine at a time.
type Ledger struct {
	page  *ledgerPage
	mem   []byte
	file  *os.File
	hosts *Hosts // nil: processes of other PID namespaces are not judged
}

// CreateLedger makes an empty ledger in dir.
func CreateLedger(dir string) error { return createLedger(at(dir)) }

// CreateLedgerIn is CreateLedger in an open directory.
func CreateLedgerIn(dir *os.File) error { return createLedger(in(dir)) }

func createLedger(dir place) error {
	mem, err := createMapped(dir, FileLedger, int(unsafe.Sizeof(ledgerPage{})))
	if err != nil {
		return err
	}
	p := (*ledgerPage)(unsafe.Pointer(&mem[0]))
	p.version, p.size, p.nSlots = abiVersion, uint32(unsafe.Sizeof(*p)), MaxProcs
	p.slot[0].state = slotOrphans
	atomic.StoreUint64(&p.magic, ledgerMagic)
	return unix.Munmap(mem)
}

// OpenLedger maps the ledger of dir. The descriptor is an open file description of its own, so
// locks of processes are seen as others'.
func OpenLedger(dir string) (*Ledger, error) { return openLedger(at(dir)) }

// OpenLedgerIn is OpenLedger in an open directory.
func OpenLedgerIn(dir *os.File) (*Ledger, error) { return openLedger(in(dir)) }

func openLedger(dir place) (*Ledger, error) {
	mem, f, err := openMapped(dir, FileLedger, int(unsafe.Sizeof(ledgerPage{})), true)
	if err != nil {
		return nil, err
	}
	l := &Ledger{page: (*ledgerPage)(unsafe.Pointer(&mem[0])), mem: mem, file: f}
	p := l.page
	var valid bool
	err = Guard(func() {
		valid = p.magic == ledgerMagic && p.version == abiVersion && p.size == uint32(unsafe.Sizeof(*p)) && p.nSlots == MaxProcs
	})
	if err == nil && !valid {
		err = fmt.Errorf("%s is damaged or of another version", f.Name())
	}
	if err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// Close unmaps the ledger.
func (l *Ledger) Close() {
	_ = unix.Munmap(l.mem)
	_ = l.file.Close()
}

// Usage is one device's account at one moment.
type Usage struct {
	// Memory in bytes with the measured overhead, as the limit is held against it.
	Memory uint64
	// Charged is what processes charged, Overhead the measured rest of Memory, negative where a context was
	// charged too high; bytes.
	Charged  uint64
	Overhead int64
	// GPUTimeNs is GPU time of all processes since the slice began.
	GPUTimeNs, ThrottledNs, Launches, AllocsRefused uint64
}

// Usage reads the account of one device of the slice.
func (l *Ledger) Usage(dev int) Usage {
	a := &l.page.account[dev]
	charged, overhead := amount(atomic.LoadUint64(&a.word))*Unit, atomic.LoadInt64(&a.overhead)
	return Usage{
		Memory: withOverhead(charged, overhead), Charged: charged, Overhead: overhead,
		GPUTimeNs: atomic.LoadUint64(&a.gpuTimeNs), ThrottledNs: atomic.LoadUint64(&a.throttledNs),
		Launches: atomic.LoadUint64(&a.launches), AllocsRefused: atomic.LoadUint64(&a.allocsRefused),
	}
}

// SetOverhead stores what the driver took beyond the charges, in bytes.
func (l *Ledger) SetOverhead(dev int, bytes int64) {
	atomic.StoreInt64(&l.page.account[dev].overhead, bytes)
}

// SlotUse is one process's part of one device.
type SlotUse struct {
	// Op is the number of the process's last ledger operation: equal twice, nothing changed.
	Op uint64
	// Charged is what the process contributes to the account, Context the part of it that was
	// charged for contexts, Imported what it holds of others; bytes.
	Charged, Context, Imported uint64
	GPUTimeNs                  uint64
}

// SlotInfo is a process that uses the slice.
type SlotInfo struct {
	Process
	Index   int
	HostPID int
	PIDNS   uint64
	Dev     [MaxDevices]SlotUse
}

// Slots lists the processes in the ledger, dead ones that were not reclaimed yet included.
func (l *Ledger) Slots() []SlotInfo {
	var out []SlotInfo
	for i := 1; i <= l.everUsed(); i++ {
		s := &l.page.slot[i]
		if atomic.LoadUint32(&s.state) != slotUsed {
			continue
		}
		info := SlotInfo{Index: i, Process: Process{PID: int(atomic.LoadUint32(&s.pid)), Start: atomic.LoadUint64(&s.starttime)},
			HostPID: int(atomic.LoadUint32(&s.hostPid)), PIDNS: atomic.LoadUint64(&s.pidns)}
		for d := range info.Dev {
			sd := &s.dev[d]
			info.Dev[d] = SlotUse{Op: atomic.LoadUint64(&sd.op), Charged: l.slotUnits(i, d) * Unit,
				Context: atomic.LoadUint64(&sd.context), Imported: atomic.LoadUint64(&sd.imported),
				GPUTimeNs: atomic.LoadUint64(&sd.gpuTimeNs)}
		}
		out = append(out, info)
	}
	return out
}

// Claims counts the claims of slots since the ledger was made. The tenant can write it.
func (l *Ledger) Claims() uint32 { return atomic.LoadUint32(&l.page.nextSlot) }

// everUsed is the highest slot that can have been used: claims take slots in turn. What is beyond is not
// touched, so a ledger with few processes costs little memory. A tenant that lies here hides its own
// processes, as it could by their slots' state.
func (l *Ledger) everUsed() int { return int(min(l.Claims(), MaxProcs-1)) }

// Trim cuts the ledger's file back to its size; true if somebody had made it longer.
func (l *Ledger) Trim() bool {
	info, err := l.file.Stat()
	return err == nil && info.Size() > int64(len(l.mem)) && l.file.Truncate(int64(len(l.mem))) == nil
}

// SetHosts makes processes of other PID namespaces judged, by where hosts finds them.
func (l *Ledger) SetHosts(hosts *Hosts) { l.hosts = hosts }

// HostOf is the number here of a process of the ledger; false: not known, or not yet.
func (l *Ledger) HostOf(s SlotInfo) (int, bool) {
	switch {
	case s.PIDNS == PIDNamespace():
		return s.PID, true
	case l.hosts != nil:
		return l.hosts.Find(s.PIDNS, s.Process)
	}
	return 0, false
}

// SetHostPID stores the process's number as NVML shows it.
func (l *Ledger) SetHostPID(index, pid int) {
	atomic.StoreUint32(&l.page.slot[index].hostPid, uint32(pid))
}

// InUse is true while a process of the ledger lives, or holds its slot, or cannot be judged. Root asks
// it of other users' ledgers, which their owners may cut short meanwhile: that is no crash of ours.
func (l *Ledger) InUse() bool {
	used := false
	err := Guard(func() {
		used = slices.ContainsFunc(l.Slots(), func(s SlotInfo) bool {
			return l.held(s.Index) || !l.gone(s.Index)
		})
	})
	return used || err != nil
}

func amount(w uint64) uint64 { return w & amountMask }
func wordSlot(w uint64) int  { return int(w>>amountBits&slotMask) - 1 }
func wordOp(w uint64) uint64 { return w >> (amountBits + slotBits) }

func makeWord(amount uint64, slot int, op uint64) uint64 {
	return amount | uint64(slot+1)<<amountBits | op&opMask<<(amountBits+slotBits)
}

func withOverhead(bytes uint64, overhead int64) uint64 {
	if overhead < 0 && uint64(-overhead) > bytes {
		return 0
	}
	return bytes + uint64(overhead)
}

// acknowledge makes the slot named in word w know that the operation named there took effect;
// false if the account's word is another one by now. Why what it writes is true however long it
// slept: shim/common/ledger.c.
func (l *Ledger) acknowledge(dev int, w uint64) bool {
	sd := &l.page.slot[wordSlot(w)].dev[dev]
	for {
		begun, known := atomic.LoadUint64(&sd.op), atomic.LoadUint64(&sd.ack)
		if atomic.LoadUint64(&l.page.account[dev].word) != w {
			return false
		}
		op := begun - (begun-wordOp(w))&opMask
		if op <= known || op > begun || atomic.CompareAndSwapUint64(&sd.ack, known, op) {
			return true
		}
	}
}

// applied tells whether the slot's last operation took effect. The word is read before ack:
// whoever replaced the word wrote ack first.
func (l *Ledger) applied(index, dev int, op uint64) bool {
	w := atomic.LoadUint64(&l.page.account[dev].word)
	if wordSlot(w) == index && wordOp(w) == op&opMask {
		return true
	}
	return atomic.LoadUint64(&l.page.slot[index].dev[dev].ack) >= op
}

func (l *Ledger) slotUnits(index, dev int) uint64 {
	sd := &l.page.slot[index].dev[dev]
	op := atomic.LoadUint64(&sd.op)
	if op == 0 {
		return 0
	}
	if !l.applied(index, dev, op) {
		op--
	}
	return atomic.LoadUint64(&sd.value[op&1]) & amountMask
}

// add changes the device's account on behalf of a slot, atomically and recoverably; see the
// comment on struct tr_account. The caller is the only one that acts for this slot. False, and
// nothing changed, when units > 0 and the sum with the overhead would pass limit.
func (l *Ledger) add(index, dev int, units int64, limit uint64) bool {
	a := &l.page.account[dev]
	op, units := l.begin(index, dev, units)
	for {
		w := atomic.LoadUint64(&a.word)
		have := amount(w)
		if units > 0 {
			sum := have + uint64(units)
			if sum > amountMask || limit != NoLimit && withOverhead(sum*Unit, atomic.LoadInt64(&a.overhead)) > limit {
				return false
			}
		}
		if units < 0 && uint64(-units) > have {
			have = uint64(-units) // a damaged ledger never wraps
		}
		if by := wordSlot(w); by >= 0 && by != index && by < MaxProcs && !l.acknowledge(dev, w) {
			continue
		}
		if atomic.CompareAndSwapUint64(&a.word, w, makeWord(have+uint64(units), index, op)) {
			return true
		}
	}
}

// begin writes the slot's next value and operation number; a last operation that did not take
// effect gives its number to this one.
func (l *Ledger) begin(index, dev int, units int64) (uint64, int64) {
	sd := &l.page.slot[index].dev[dev]
	op := atomic.LoadUint64(&sd.op)
	var now uint64
	switch {
	case op == 0:
		op = 1
	case !l.applied(index, dev, op):
		now = atomic.LoadUint64(&sd.value[(op-1)&1])
	default:
		now = atomic.LoadUint64(&sd.value[op&1])
		op++
	}
	now &= amountMask
	next := now + uint64(units)
	if units < 0 && uint64(-units) > now {
		next, units = 0, -int64(now)
	}
	atomic.StoreUint64(&sd.value[op&1], next)
	atomic.StoreUint64(&sd.op, op)
	return op, units
}
