package tenant

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
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
}

// Limits is a mapped limits page. One writer: the supervisor.
type Limits struct {
	page *limitsPage
	mem  []byte
}

// CreateLimits makes the limits file in dir, which must not have one yet.
func CreateLimits(dir, name string, devices []Device) (*Limits, error) {
	if len(devices) < 1 || len(devices) > MaxDevices {
		return nil, fmt.Errorf("%d devices in a slice; 1 to %d can be", len(devices), MaxDevices)
	}
	mem, err := createMapped(filepath.Join(dir, FileLimits), limitsFileSize)
	if err != nil {
		return nil, err
	}
	l := &Limits{page: (*limitsPage)(unsafe.Pointer(&mem[0])), mem: mem}
	l.page.version, l.page.size = abiVersion, uint32(unsafe.Sizeof(limitsPage{}))
	copy(l.page.name[:nameLen-1], name)
	l.page.generation = 2
	if err := l.Set(devices); err != nil {
		return nil, err
	}
	atomic.StoreUint64(&l.page.magic, limitsMagic)
	return l, nil
}

// OpenLimits maps an existing limits file for reading.
func OpenLimits(dir string) (*Limits, error) { return openLimits(dir, false) }

// OpenLimitsWriter maps an existing limits file for its writer, the supervisor.
func OpenLimitsWriter(dir string) (*Limits, error) { return openLimits(dir, true) }

func openLimits(dir string, write bool) (*Limits, error) {
	mem, f, err := openMapped(filepath.Join(dir, FileLimits), limitsFileSize, write)
	if err != nil {
		return nil, err
	}
	_ = f.Close()
	l := &Limits{page: (*limitsPage)(unsafe.Pointer(&mem[0])), mem: mem}
	p := l.page
	if p.magic != limitsMagic || p.version != abiVersion || p.size != uint32(unsafe.Sizeof(*p)) ||
		p.nDevices < 1 || p.nDevices > MaxDevices {
		l.Close()
		return nil, fmt.Errorf("%s is damaged or of another version", filepath.Join(dir, FileLimits))
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
	l.page.nDevices = uint32(len(devices))
	for i, d := range devices {
		l.page.dev[i] = encode(d)
	}
	atomic.StoreUint64(&l.page.generation, before+2)
	return nil
}

func encode(d Device) limitsDev {
	out := limitsDev{memoryLimit: d.MemoryLimit, contextBytes: d.ContextBytes,
		cores: uint32(d.Cores), coresCeiling: uint32(max(d.Cores, d.CoresCeiling))}
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
	return out
}

// Devices returns a consistent copy, or an error when the writer died in the middle of a change.
func (l *Limits) Devices() ([]Device, error) {
	for range 1000 {
		before := atomic.LoadUint64(&l.page.generation)
		n := min(int(l.page.nDevices), MaxDevices)
		devices := make([]Device, n)
		for i := range devices {
			devices[i] = decode(&l.page.dev[i])
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
	}
}

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

// createMapped makes a file of exactly size bytes, readable and writable by its owner only, and
// maps it shared.
func createMapped(path string, size int) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := f.Chmod(0o600); err != nil {
		return nil, err
	}
	// Allocated, not sparse: a full file system is an error here, not a SIGBUS in the tenant.
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(size)); err != nil {
		return nil, fmt.Errorf("%s: no room for %d bytes: %w", path, size, err)
	}
	return unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

// openMapped maps an existing regular file of at least size bytes. The file is returned open.
func openMapped(path string, size int, write bool) ([]byte, *os.File, error) {
	mode, prot := os.O_RDONLY, unix.PROT_READ
	if write {
		mode, prot = os.O_RDWR, unix.PROT_READ|unix.PROT_WRITE
	}
	f, err := os.OpenFile(path, mode|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && (!info.Mode().IsRegular() || info.Size() < int64(size)) {
		err = fmt.Errorf("%s is damaged: not a file of %d bytes", path, size)
	}
	var mem []byte
	if err == nil {
		mem, err = unix.Mmap(int(f.Fd()), 0, size, prot, unix.MAP_SHARED)
	}
	if err != nil {
		_ = f.Close()
		return nil, nil, err
	}
	return mem, f, nil
}
