package tenant

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
)

// Hosts relates processes as ledgers name them, by their own PID namespace, to processes as this one
// sees them. It sees all only in the machine's first PID namespace, or in one around all tenants'. It
// reads /proc when Scan is called and not otherwise. Safe for concurrent use.
type Hosts struct {
	mu    sync.Mutex
	found map[inner]Process // by their numbers here
	asked map[question]*ask
	scans uint64
	blind map[int]bool // inner numbers of processes that the last scan could not see well enough
}

// inner is a process in a PID namespace (its inode).
type inner struct {
	ns  uint64
	pid int
}

// question is which process a ledger means; ask, after how many scans it was put first and last.
type question struct {
	inner
	start uint64
}
type ask struct{ first, last uint64 }

// NewHosts returns one that has not looked yet.
func NewHosts() *Hosts {
	return &Hosts{found: map[inner]Process{}, asked: map[question]*ask{}}
}

// Find is the process's number here; false: not known, until Scan has found it.
func (h *Hosts) Find(ns uint64, p Process) (int, bool) {
	if ns == PIDNamespace() {
		return p.PID, true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	key := inner{ns, p.PID}
	if host, ok := h.found[key]; ok && sameStart(host.Start, p.Start) {
		return host.PID, true
	}
	h.ask(question{key, p.Start})
	return 0, false
}

// Gone is true when the process certainly is a zombie or no more: where it was, it is not, or a scan that
// began after this was first asked did not find it.
func (h *Hosts) Gone(ns uint64, p Process) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	key := inner{ns, p.PID}
	if host, ok := h.found[key]; ok && sameStart(host.Start, p.Start) {
		return host.Gone()
	}
	a := h.ask(question{key, p.Start})
	return h.scans > a.first && !h.blind[p.PID]
}

func (h *Hosts) ask(key question) *ask {
	a := h.asked[key]
	if a == nil {
		a = &ask{first: h.scans}
		h.asked[key] = a
	}
	a.last = h.scans
	return a
}

// Wanted is true while a question waits for a scan.
func (h *Hosts) Wanted() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, a := range h.asked {
		if a.first == h.scans {
			return true
		}
	}
	return false
}

// Scan looks for what was asked.
func (h *Hosts) Scan() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	wanted := map[uint64]bool{}
	for key := range h.found {
		wanted[key.ns] = true
	}
	for key, a := range h.asked {
		if a.last+1 < h.scans { // answered, or nobody asks any more
			delete(h.asked, key)
			continue
		}
		wanted[key.ns] = true
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	found, blind := map[inner]Process{}, map[int]bool{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		key, err := look(e.Name(), wanted)
		switch {
		case err == nil && key.ns != 0:
			if p, ok := Find(pid); ok {
				found[key] = p
			}
		case err != nil && key.pid != 0:
			blind[key.pid] = true
		}
	}
	h.found, h.blind = found, blind
	h.scans++
	return nil
}

// look tells which process this is in its own namespace; the zero value: of none that is wanted, or over. With an
// error it is one in some namespace that we may not know.
func look(pid string, wanted map[uint64]bool) (inner, error) {
	ns, hidden := namespaceOf(filepath.Join("/proc", pid, "ns/pid"))
	if hidden == nil && !wanted[ns] {
		return inner{}, nil
	}
	status, err := os.ReadFile(filepath.Join("/proc", pid, "status"))
	if err != nil {
		return inner{}, nil
	}
	pids, err := NSPIDs(status)
	if err != nil {
		return inner{}, fmt.Errorf("/proc/%s/status: %w", pid, err)
	}
	if hidden != nil && len(pids) == 1 { // in our own namespace
		return inner{}, nil
	}
	return inner{ns, pids[len(pids)-1]}, hidden
}

// namespaceOf reads a link such as "pid:[4026531836]".
func namespaceOf(path string) (uint64, error) {
	link, err := os.Readlink(path)
	if err != nil {
		return 0, err
	}
	_, number, _ := strings.Cut(strings.TrimSuffix(link, "]"), "[")
	return strconv.ParseUint(number, 10, 64)
}

// nestMax is how deep the kernel nests PID namespaces.
const nestMax = 33

// NSPIDs reads the line NSpid of /proc/PID/status (proc(5)): the process's numbers, from the reader's PID
// namespace inwards, one at least.
func NSPIDs(status []byte) ([]int, error) {
	for line := range bytes.Lines(status) {
		rest, ok := bytes.CutPrefix(line, []byte("NSpid:"))
		if !ok {
			continue
		}
		fields := bytes.Fields(rest)
		if len(fields) == 0 || len(fields) > nestMax {
			return nil, fmt.Errorf("NSpid with %d numbers", len(fields))
		}
		out := make([]int, len(fields))
		for i, f := range fields {
			n, err := strconv.ParseUint(string(f), 10, 31)
			if err != nil {
				return nil, fmt.Errorf("NSpid: %w", err)
			}
			out[i] = int(n)
		}
		return out, nil
	}
	return nil, errors.New("no line NSpid")
}
