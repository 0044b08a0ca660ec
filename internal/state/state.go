// Package state is the registry of the slices on one machine: who reserved what on which GPU. For
// real GPUs all users of the machine share it; a simulated machine's belongs to one user.
//
// A slice is a directory made by its owner: info.json (what was reserved, never changed), set.json (what
// it was changed to), use.json (who runs and what they use), the last two replaced at once, limits and
// ledger (the owner's only). A
// reservation is valid while its supervisor holds a write lock on info.json, which nobody else can
// take, or while a process named in use.json or in the ledger lives. Decisions are taken under a
// lock on one file that everybody can open; waiting for it is bounded.
//
// Nothing that others wrote is trusted: no link is followed, only regular files of bounded size are
// read, the owner is taken from the file system, and what does not parse does not count. The
// owner of a shared directory can rename what others made in it, so a slice's directory is opened
// once, when it is made, and its files are reached through the descriptor only.
package state

import (
	"encoding/json"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/tenant"
)

// GPU is what a slice has of one GPU. Reserved amounts count against other slices; limits bind the
// slice itself.
type GPU struct {
	UUID           string `json:"uuid"`
	Index          int    `json:"index"`
	Name           string `json:"name"`
	Cores          int    `json:"cores"`
	Burst          int    `json:"burst"`
	Memory         uint64 `json:"memory"`
	ReservedCores  int    `json:"reserved_cores"`
	ReservedMemory uint64 `json:"reserved_memory"`
	Weight         int    `json:"weight,omitempty"`
	Latency        bool   `json:"latency,omitempty"`
}

// Info is written once, when the slice is made. As it is read GPUs are those of the last Change, if there
// was one.
type Info struct {
	Version int            `json:"version"`
	Name    string         `json:"name"`
	Command []string       `json:"command"`
	Started time.Time      `json:"started"`
	PIDNS   uint64         `json:"pid_namespace"`
	Leader  tenant.Process `json:"supervisor"`
	// Parent is the id of the slice around this one; its reservation is part of the parent's.
	Parent string `json:"parent,omitempty"`
	GPUs   []GPU  `json:"gpus"`
	// Libraries is where the slice's libraries lie, removed with it.
	Libraries string `json:"libraries"`
}

// GPUUse is what a slice uses of one GPU.
type GPUUse struct {
	Memory uint64 `json:"memory"`
	// Cores in hundredths of the GPU, over the last second or so.
	Cores float64 `json:"cores"`
	Account
}

// Account is what a slice wanted and got of one GPU: what ps shows, and what is for metrics.
type Account struct {
	// Since the slice began, in ns: GPU time, and time that launches waited for a turn or for the limit,
	// summed over threads.
	GPUTimeNs   uint64 `json:"gpu_time_ns"`
	ThrottledNs uint64 `json:"throttled_ns"`
	// Launches are counted where they are metered; AllocsRefused for the memory limit.
	Launches      uint64 `json:"launches"`
	AllocsRefused uint64 `json:"allocations_refused"`
	// Wanted and Got are over the last second, in hundredths of the GPU: the part of the time with work
	// waiting or running, and the GPU time. nil where no arbiter serves the slice.
	Wanted *float64 `json:"share_wanted,omitempty"`
	Got    *float64 `json:"share_got,omitempty"`
}

// ReadAccount reads a device's from the slice's pages; leases may be nil.
func ReadAccount(ledger *tenant.Ledger, leases *tenant.Leases, dev int) Account {
	u := ledger.Usage(dev)
	a := Account{GPUTimeNs: u.GPUTimeNs, ThrottledNs: u.ThrottledNs, Launches: u.Launches, AllocsRefused: u.AllocsRefused}
	if leases == nil || !leases.Served(tenant.NowNs()) {
		return a
	}
	if l, ok := leases.Get(dev); ok {
		wanted, got := float64(l.Wanted)/100, float64(l.Got)/100
		a.Wanted, a.Got = &wanted, &got
	}
	return a
}

// Arbiter is what the run says that is its user's arbiter.
type Arbiter struct {
	PID    int       `json:"pid"`
	Since  time.Time `json:"since"`
	Slices int       `json:"slices"`
	// Turns that were given when a bell rang, and how long it took from the arbiter's waking up to the
	// lease that says so, in ns.
	Handovers   uint64 `json:"handovers"`
	HandoverP50 int64  `json:"handover_p50_ns"`
	HandoverP99 int64  `json:"handover_p99_ns"`
	// The same from the moment that a process asked, waking up included, where it was answered at once.
	Requests   uint64 `json:"requests"`
	RequestP50 int64  `json:"request_p50_ns"`
	RequestP99 int64  `json:"request_p99_ns"`
}

// Use is kept up to date by the supervisor, for others.
type Use struct {
	Processes []tenant.Process `json:"processes"`
	GPUs      []GPUUse         `json:"gpus"`
	// Arbiter is there while the slice's run is the arbiter.
	Arbiter *Arbiter `json:"arbiter,omitempty"`
}

// Slice is an entry of the registry.
type Slice struct {
	ID, Dir string
	Info    Info
	Use     Use
	UID     int
	Alive   bool
	// Supervised is true while its supervisor lives.
	Supervised bool
	// Mine is true when the caller owns it.
	Mine bool
}

// User is the owner's name, or number.
func (s Slice) User() string {
	if u, err := user.LookupId(strconv.Itoa(s.UID)); err == nil {
		return u.Username
	}
	return strconv.Itoa(s.UID)
}

const (
	infoFile = "info.json"
	useFile  = "use.json"
	setFile  = "set.json"
	fileMax  = 256 << 10
	version  = 1
	// Bounds of what is recorded, in bytes.
	nameMax, commandMax = 63, 4 << 10
)

var idPattern = regexp.MustCompile(`^[0-9a-f]{16}$`)

// List reads all slices, dead ones too.
func (r *Registry) List() ([]Slice, error) {
	names, err := r.names()
	if err != nil {
		return nil, err
	}
	var out []Slice
	for _, name := range names {
		if s, ok := r.read(name); ok {
			out = append(out, s)
		}
	}
	findUsers(out)
	return out, nil
}

// names lists what is named as a slice.
func (r *Registry) names() ([]string, error) {
	dir, err := r.directory()
	if err != nil {
		return nil, err
	}
	// Opened again, as a descriptor has one position.
	again, err := openIn(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer again.Close()
	all, err := again.Readdirnames(-1)
	var out []string
	for _, name := range all {
		if idPattern.MatchString(name) {
			out = append(out, name)
		}
	}
	return out, err
}

// read loads one slice; false when it is not one.
func (r *Registry) read(id string) (Slice, bool) {
	s := Slice{ID: id, Dir: filepath.Join(r.Root, id)}
	dir, uid, err := r.openSlice(id)
	if err != nil {
		return s, false
	}
	defer dir.Close()
	s.UID, s.Mine = uid, uid == os.Getuid()
	f, err := openPlain(dir, infoFile, uid)
	if err != nil {
		return s, false
	}
	defer f.Close()
	if decode(f, &s.Info) != nil || !valid(s.Info) {
		return s, false
	}
	if c, err := readChange(dir, uid); err == nil && c.fits(s.Info.GPUs) {
		s.Info.GPUs = c.GPUs
	}
	if u, err := openPlain(dir, useFile, uid); err == nil {
		if decode(u, &s.Use) != nil {
			s.Use = Use{}
		}
		_ = u.Close()
	}
	s.Use.bound()
	s.Supervised = writeLocked(f)
	s.Alive = s.Supervised || s.processAlive() || (s.Mine || os.Getuid() == 0) && ledgerInUse(dir)
	return s, true
}

// openSlice opens a slice's directory and tells its owner.
func (r *Registry) openSlice(id string) (*os.File, int, error) {
	root, err := r.directory()
	if err != nil {
		return nil, 0, err
	}
	dir, err := openIn(root, id, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, 0, err
	}
	st, err := statOf(dir)
	if err != nil {
		_ = dir.Close()
	}
	return dir, int(st.Uid), err
}

// openPlain opens a regular file of the owner without following a link or waiting on a pipe.
func openPlain(dir *os.File, name string, uid int) (*os.File, error) {
	f, err := openIn(dir, name, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	st, err := statOf(f)
	if err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > fileMax || int(st.Uid) != uid) {
		err = fmt.Errorf("%s: not a file of ours", name)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func decode(f *os.File, v any) error {
	buf := make([]byte, fileMax)
	n, err := f.ReadAt(buf, 0)
	if n == 0 && err != nil {
		return err
	}
	return json.Unmarshal(buf[:n], v)
}

// valid bounds what a reservation can claim, and what is shown of it.
func valid(i Info) bool {
	if i.Version != version || len(i.GPUs) < 1 || len(i.GPUs) > tenant.MaxDevices || len(i.Name) > nameMax ||
		i.Started.Year() < 1970 || i.Started.Year() > 9000 || size(i.Command) > 2*commandMax || i.Parent != "" && !idPattern.MatchString(i.Parent) {
		return false
	}
	return !slices.ContainsFunc(i.GPUs, func(g GPU) bool { return !g.valid() })
}

func (g GPU) valid() bool {
	return g.ReservedCores >= 0 && g.ReservedCores <= 100 && g.ReservedMemory <= 1<<46 && len(g.UUID) <= 64 && len(g.Name) <= 128 &&
		g.Cores >= 0 && g.Cores <= 100 && g.Burst >= 0 && g.Burst <= 100 && g.Index >= 0 && g.Index <= 1<<16 &&
		g.Weight >= 0 && g.Weight <= 1000
}

// bound takes from a record of use what cannot be.
func (u *Use) bound() {
	u.Processes = u.Processes[:min(len(u.Processes), tenant.MaxProcs+1)]
	u.GPUs = u.GPUs[:min(len(u.GPUs), tenant.MaxDevices)]
	for i := range u.GPUs {
		g := &u.GPUs[i]
		g.Cores, g.Memory = percent(g.Cores), min(g.Memory, 1<<46)
		for _, share := range []*float64{g.Wanted, g.Got} {
			if share != nil {
				*share = percent(*share)
			}
		}
	}
}

func percent(v float64) float64 { return min(max(v, 0), 1000) }

// shorten keeps a command line to what people read of it.
func shorten(words []string) []string {
	left := commandMax
	var out []string
	for _, w := range words {
		if len(w)+1 > left {
			return append(out, strings.ToValidUTF8(w[:max(left-1, 0)], "")+"…")
		}
		left -= len(w) + 1
		out = append(out, w)
	}
	return out
}

func size(words []string) int {
	n := len(words)
	for _, w := range words {
		n += len(w)
	}
	return n
}

// writeLocked tells whether somebody who may write the file holds its write lock. A reader cannot
// pretend to.
func writeLocked(f *os.File) bool {
	fl := unix.Flock_t{Type: unix.F_RDLCK, Len: 1}
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &fl)
	return err == nil && fl.Type == unix.F_WRLCK
}

func (s Slice) processAlive() bool {
	if s.Info.PIDNS != tenant.PIDNamespace() {
		return false
	}
	for _, p := range s.Use.Processes {
		if p.PID > 0 && !p.Gone() {
			return true
		}
	}
	return false
}

func ledgerInUse(dir *os.File) bool {
	l, err := tenant.OpenLedgerIn(dir)
	if err != nil {
		return false
	}
	defer l.Close()
	return l.InUse()
}
