package tenant

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Process is a process as slots record it.
type Process struct {
	PID int `json:"pid"`
	// Start is field 22 of /proc/PID/stat, relative to the initial time namespace.
	Start uint64 `json:"start"`
}

// Self returns the calling process.
func Self() Process { p, _ := Find(os.Getpid()); return p }

// Find returns the living process with this number; false when there is none.
func Find(pid int) (Process, bool) {
	st, err := readStat(pid)
	return Process{PID: pid, Start: st.start}, err == nil
}

// Gone is true when the process certainly is a zombie or no more; in doubt it is false.
func (p Process) Gone() bool {
	st, err := readStat(p.PID)
	if err != nil {
		hidden := !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH)
		return !hidden && errors.Is(unix.Kill(p.PID, 0), unix.ESRCH)
	}
	if p.Start != 0 && !sameStart(st.start, p.Start) {
		return true
	}
	return (st.state == 'Z' || st.state == 'X') && st.threads <= 1
}

// sameStart compares start times, which the libraries compute to one tick.
func sameStart(a, b uint64) bool { return a == b || a == b+1 || a+1 == b }

type procStat struct {
	state   byte
	threads int
	start   uint64
}

func readStat(pid int) (procStat, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return procStat{}, err
	}
	// Fields from the third on; the command before may hold any character.
	i := bytes.LastIndexByte(data, ')')
	fields := strings.Fields(string(data[i+1:]))
	if i < 0 || len(fields) < 20 {
		return procStat{}, fmt.Errorf("/proc/%d/stat: unknown form", pid)
	}
	threads, _ := strconv.Atoi(fields[17])
	start, err := strconv.ParseInt(fields[19], 10, 64)
	return procStat{state: fields[0][0], threads: threads, start: uint64(start - timeNamespace().startTicks)}, err
}

// PIDNamespace is the inode of the caller's PID namespace, 0 when unknown.
var PIDNamespace = sync.OnceValue(func() uint64 {
	link, _ := os.Readlink("/proc/self/ns/pid")
	_, number, _ := strings.Cut(strings.TrimSuffix(link, "]"), "[")
	n, _ := strconv.ParseUint(number, 10, 64)
	return n
})

type timeOffsets struct{ startTicks, monotonicNs int64 }

// timeNamespace is how far this time namespace is from the initial one.
var timeNamespace = sync.OnceValue(func() timeOffsets {
	const ticksPerSecond = 100 // USER_HZ, part of the kernel's ABI
	var out timeOffsets
	data, _ := os.ReadFile("/proc/self/timens_offsets")
	for line := range strings.Lines(string(data)) {
		var clock string
		var s, ns int64
		if _, err := fmt.Sscan(line, &clock, &s, &ns); err != nil {
			continue
		}
		switch clock {
		case "boottime":
			out.startTicks = s * ticksPerSecond
		case "monotonic":
			out.monotonicNs = s*int64(time.Second) + ns
		}
	}
	return out
})

// NowNs is CLOCK_MONOTONIC of the initial time namespace.
func NowNs() int64 {
	e := epoch()
	return e.ns + time.Since(e.at).Nanoseconds()
}

type instant struct {
	at time.Time
	ns int64
}

// epoch relates the runtime's clock, which is the same one and read without a system call, to NowNs.
var epoch = sync.OnceValue(func() instant {
	var best instant
	shortest := time.Hour
	for range 10 {
		var ts unix.Timespec
		before := time.Now()
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
		if took := time.Since(before); took < shortest {
			shortest, best = took, instant{at: before, ns: ts.Nano() - timeNamespace().monotonicNs - took.Nanoseconds()/2}
		}
	}
	return best
})
