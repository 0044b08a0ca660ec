// Package state is the registry of the slices on one machine: who reserved what on which GPU. For
// real GPUs all users of the machine share it; a simulated machine's belongs to one user.
//
// A slice is a directory made by its owner: info.json (what was reserved, never changed), use.json
// (who runs and what they use, replaced at once), limits and ledger (the owner's only). A
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
}

// Info is written once, when the slice is made.
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

// GPUUse is what a slice used of one GPU.
type GPUUse struct {
	Memory uint64 `json:"memory"`
	// Cores in hundredths of the GPU, over the last second or so.
	Cores float64 `json:"cores"`
}

// Use is kept up to date by the supervisor, for others.
type Use struct {
	Processes []tenant.Process `json:"processes"`
	GPUs      []GPUUse         `json:"gpus"`
}

// Slice is an entry of the registry.
type Slice struct {
	ID, Dir string
	Info    Info
	Use     Use
	UID     int
	Alive   bool
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
	if u, err := openPlain(dir, useFile, uid); err == nil {
		if decode(u, &s.Use) != nil {
			s.Use = Use{}
		}
		_ = u.Close()
	}
	s.Use.bound()
	s.Alive = writeLocked(f) || s.processAlive() || (s.Mine || os.Getuid() == 0) && ledgerInUse(dir)
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
	for _, g := range i.GPUs {
		if g.ReservedCores < 0 || g.ReservedCores > 100 || g.ReservedMemory > 1<<46 || len(g.UUID) > 64 || len(g.Name) > 128 ||
			g.Cores < 0 || g.Cores > 100 || g.Burst < 0 || g.Burst > 100 || g.Index < 0 || g.Index > 1<<16 {
			return false
		}
	}
	return true
}

// bound takes from a record of use what cannot be.
func (u *Use) bound() {
	u.Processes = u.Processes[:min(len(u.Processes), tenant.MaxProcs+1)]
	u.GPUs = u.GPUs[:min(len(u.GPUs), tenant.MaxDevices)]
	for i := range u.GPUs {
		g := &u.GPUs[i]
		g.Cores, g.Memory = min(max(g.Cores, 0), 1000), min(g.Memory, 1<<46)
	}
}

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
