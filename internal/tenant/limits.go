package tenant

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Device is what a tenant may use of one GPU.
type Device struct {
	UUID string
	// MemoryLimit in bytes; it binds when MemoryLimited, else it is what the tenant is shown.
	MemoryLimit   uint64
	MemoryLimited bool
	// ContextBytes is charged for a process's context until it has been measured.
	ContextBytes uint64
	// Cores in hundredths of the GPU; they bind when CoresLimited. CoresCeiling may be used while
	// the GPU is otherwise idle.
	Cores        int
	CoresLimited bool
	CoresCeiling int
	// Latency class: goes before others, within its limit.
	Latency bool
	// Weight of the slice where time that nobody is guaranteed is divided, 1 to 1000; 0: as Cores.
	Weight int
}

// Limits is a mapped limits page. One writer: the supervisor.
type Limits struct {
	page *limitsPage
	mem  []byte
}

// CreateLimits makes the limits file in dir, which must not have one yet.
func CreateLimits(dir, name string, devices []Device) (*Limits, error) {
	return createLimits(at(dir), name, devices)
}

// CreateLimitsIn is CreateLimits in an open directory.
func CreateLimitsIn(dir *os.File, name string, devices []Device) (*Limits, error) {
	return createLimits(in(dir), name, devices)
}

func createLimits(dir place, name string, devices []Device) (*Limits, error) {
	if len(devices) < 1 || len(devices) > MaxDevices {
		return nil, fmt.Errorf("%d devices in a slice; 1 to %d can be", len(devices), MaxDevices)
	}
	mem, err := createMapped(dir, FileLimits, limitsFileSize)
	if err != nil {
		return nil, err
	}
	l := &Limits{page: (*limitsPage)(unsafe.Pointer(&mem[0])), mem: mem}
	l.page.version, l.page.size = abiVersion, uint32(unsafe.Sizeof(limitsPage{}))
	copy(l.page.name[:nameLen-1], name)
	l.page.generation = 2
	(*leasesPage)(unsafe.Pointer(&mem[leasesOffset])).magic = leasesMagic
	if err := l.Set(devices); err != nil {
		return nil, err
	}
	atomic.StoreUint64(&l.page.magic, limitsMagic)
	return l, nil
}

// OpenLimits maps an existing limits file for reading.
func OpenLimits(dir string) (*Limits, error) { return openLimits(at(dir), false) }

// OpenLimitsIn is OpenLimits in an open directory.
func OpenLimitsIn(dir *os.File) (*Limits, error) { return openLimits(in(dir), false) }

// OpenLimitsWriterIn maps the limits file of an open directory for its writer, the supervisor.
func OpenLimitsWriterIn(dir *os.File) (*Limits, error) { return openLimits(in(dir), true) }

func openLimits(dir place, write bool) (*Limits, error) {
	mem, f, err := openMapped(dir, FileLimits, limitsFileSize, write)
	if err != nil {
		return nil, err
	}
	_ = f.Close()
	l := &Limits{page: (*limitsPage)(unsafe.Pointer(&mem[0])), mem: mem}
	p := l.page
	var valid bool
	err = Guard(func() {
		valid = p.magic == limitsMagic && p.version == abiVersion && p.size == uint32(unsafe.Sizeof(*p)) &&
			p.nDevices >= 1 && p.nDevices <= MaxDevices
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

// Set replaces the devices. Readers see all of it or none (seqlock on generation).
func (l *Limits) Set(devices []Device) error {
	for _, d := range devices {
		if len(d.UUID) >= uuidLen {
			return fmt.Errorf("GPU UUID %q is longer than %d characters", d.UUID, uuidLen-1)
		}
	}
	before := atomic.LoadUint64(&l.page.generation) &^ 1
	atomic.StoreUint64(&l.page.generation, before+1)
	atomic.StoreUint32(&l.page.nDevices, uint32(len(devices)))
	for i, d := range devices {
		from := encode(d)
		for w, v := range words(&from) {
			atomic.StoreUint64(&words(&l.page.dev[i])[w], v)
		}
	}
	atomic.StoreUint64(&l.page.generation, before+2)
	tellMetered(l.mem)
	return nil
}

// words is a device's entry as the atomic words that it is read and written by.
func words(d *limitsDev) *[limitsDevWords]uint64 { return (*[limitsDevWords]uint64)(unsafe.Pointer(d)) }

const limitsDevWords = unsafe.Sizeof(limitsDev{}) / 8

func encode(d Device) limitsDev {
	out := limitsDev{memoryLimit: d.MemoryLimit, contextBytes: d.ContextBytes,
		cores: uint32(d.Cores), coresCeiling: uint32(max(d.Cores, d.CoresCeiling)), weight: uint32(d.Weight)}
	copy(out.uuid[:], d.UUID)
	if d.MemoryLimited {
		out.flags |= flagMemoryLimited
	}
	if d.CoresLimited {
		out.flags |= flagCoresLimited
	}
	if d.CoresLimited && d.CoresCeiling > d.Cores {
		out.flags |= flagBurst
	}
	if d.Latency {
		out.flags |= flagLatency
	}
	return out
}

// Devices returns a consistent copy, or an error when the writer died in the middle of a change.
func (l *Limits) Devices() ([]Device, error) {
	for range 1000 {
		before := atomic.LoadUint64(&l.page.generation)
		n := min(int(atomic.LoadUint32(&l.page.nDevices)), MaxDevices)
		devices := make([]Device, n)
		for i := range devices {
			var d limitsDev
			for w := range words(&d) {
				words(&d)[w] = atomic.LoadUint64(&words(&l.page.dev[i])[w])
			}
			devices[i] = decode(&d)
		}
		if before&1 == 0 && atomic.LoadUint64(&l.page.generation) == before {
			return devices, nil
		}
	}
	return nil, errors.New("the limits page is being written for too long")
}

func decode(d *limitsDev) Device {
	return Device{
		UUID: text(d.uuid[:]), MemoryLimit: d.memoryLimit, ContextBytes: d.contextBytes,
		MemoryLimited: d.flags&flagMemoryLimited != 0, CoresLimited: d.flags&flagCoresLimited != 0,
		Cores: int(d.cores), CoresCeiling: int(d.coresCeiling),
		Latency: d.flags&flagLatency != 0, Weight: int(d.weight),
	}
}

// Generation changes with every Set.
func (l *Limits) Generation() uint64 { return atomic.LoadUint64(&l.page.generation) }

func text(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// Name is the slice's name.
func (l *Limits) Name() string { return text(l.page.name[:]) }

// Beat records a sign of life of the supervisor.
func (l *Limits) Beat() { atomic.StoreUint64(&l.page.heartbeatNs, uint64(NowNs())) }

// Close unmaps the page; the Limits must not be used after it.
func (l *Limits) Close() { _ = unix.Munmap(l.mem) }
