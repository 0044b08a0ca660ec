package bypass

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/tenant"
)

// WatchConfig is what a Watch needs; Dir and Tenants must be set.
type WatchConfig struct {
	Core Config
	// Dir holds the allocations' directories.
	Dir string
	// Tenants lists those that are bound, and what is left of others.
	Tenants func() []Tenant
	// Kill ends the process of each violation that begins.
	Kill bool
	// Every is the least time between two looks; default 1 s.
	Every time.Duration
	// Now is the clock; default time.Now.
	Now func() time.Time
}

// Watch looks for violations on this machine. It must see the tenants' processes: it runs in the machine's
// PID namespace. For one goroutine.
type Watch struct {
	config WatchConfig
	core   *Core
	last   time.Time
}

// NewWatch checks the configuration.
func NewWatch(config WatchConfig) (*Watch, error) {
	if config.Dir == "" || config.Tenants == nil {
		return nil, errors.New("bypass watch: no directory of allocations, or nobody to list them")
	}
	dir, err := filepath.EvalSymlinks(config.Dir)
	if err != nil {
		return nil, err
	}
	config.Dir = dir
	if config.Every <= 0 {
		config.Every = time.Second
	}
	if config.Now == nil {
		config.Now = time.Now
	}
	core, err := New(config.Core)
	if err != nil {
		return nil, err
	}
	return &Watch{config: config, core: core}, nil
}

// Killed is a process that was ended, or was not, for the reason in Err.
type Killed struct {
	Violation
	Err error
}

// Take compares a report of the driver with the ledgers. False: it is not time for a look. A process of which
// cannot be told where it belongs is left out, and the error names it; the rest of the result holds.
func (w *Watch) Take(r gpu.Report) (Result, []Killed, bool, error) {
	now := w.config.Now()
	if now.Sub(w.last) < w.config.Every {
		return Result{}, nil, false, nil
	}
	w.last = now
	own, err := w.place()
	if err != nil {
		return Result{}, nil, true, err
	}
	in := Input{Now: now, GPUs: map[string][]Process{}}
	var failed []error
	for _, d := range r.Devices {
		for _, p := range d.Processes {
			seen, err := own.look(p)
			switch {
			case err == nil && seen.PID != 0:
				in.GPUs[d.UUID] = append(in.GPUs[d.UUID], seen)
			case err != nil:
				failed = append(failed, err)
			}
		}
	}
	// After the driver's figures: who registers in between is no violation.
	in.Tenants = w.config.Tenants()
	result := w.core.Step(in)
	var killed []Killed
	if w.config.Kill {
		for _, v := range result.Began {
			killed = append(killed, Killed{Violation: v, Err: own.kill(v)})
		}
	}
	return result, killed, true, errors.Join(failed...)
}

// place is that of the directory, read anew: it may be mounted after we start.
func (w *Watch) place() (place, error) {
	mounts, err := mountsOf(os.Getpid())
	if err != nil {
		return place{}, err
	}
	p, ok := placeOf(mounts, w.config.Dir)
	if !ok {
		return place{}, fmt.Errorf("%s is in no mount", w.config.Dir)
	}
	return p, nil
}

// look tells where a process of the driver's list belongs; the zero value: it is over.
func (p place) look(by gpu.Process) (Process, error) {
	at, ok := tenant.Find(by.PID)
	if !ok || at.Gone() {
		return Process{}, nil
	}
	name, err := p.tenantOf(by.PID)
	if err != nil {
		if _, ok := tenant.Find(by.PID); !ok {
			return Process{}, nil
		}
		return Process{}, fmt.Errorf("process %d on a GPU: %w", by.PID, err)
	}
	return Process{PID: by.PID, Start: at.Start, Tenant: name, Used: by.Used}, nil
}

// hops bounds the way up through a process's parents.
const hops = 64

// tenantOf is the allocation whose directory a process or one of its parents has mounted: a process may unmount
// what it finds in a mount namespace of its own, but remains the child of its container's.
func (p place) tenantOf(pid int) (string, error) {
	for range hops {
		mounts, err := mountsOf(pid)
		if err != nil {
			return "", err
		}
		if name, ok := p.entryOf(mounts); ok {
			return name, nil
		}
		if pid, err = parentOf(pid); err != nil || pid <= 1 {
			return "", err
		}
	}
	return "", nil
}

func mountsOf(pid int) ([]Mount, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	// A zombie has no mounts any more.
	if errors.Is(err, unix.EINVAL) || errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return ParseMounts(data)
}

// parentOf is 0 for a process that is over.
func parentOf(pid int) (int, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	for line := range bytes.Lines(status) {
		if rest, ok := bytes.CutPrefix(line, []byte("PPid:")); ok {
			return strconv.Atoi(string(bytes.TrimSpace(rest)))
		}
	}
	return 0, fmt.Errorf("/proc/%d/status: no line PPid", pid)
}

// kill ends the violation's process if it is that process still: its number is held while it is looked at.
func (p place) kill(v Violation) error {
	fd, err := unix.PidfdOpen(v.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("process %d: %w", v.PID, err)
	}
	defer unix.Close(fd)
	now, ok := tenant.Find(v.PID)
	if !ok || now.Start != v.Start {
		return nil // it ended by itself, and the number may be another's
	}
	name, err := p.tenantOf(v.PID)
	if err != nil {
		return fmt.Errorf("process %d: %w", v.PID, err)
	}
	if name != v.Tenant || v.PID == os.Getpid() {
		return fmt.Errorf("process %d is in %q by now, not in %s: not ended", v.PID, name, v.Tenant)
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("process %d: %w", v.PID, err)
	}
	return nil
}
