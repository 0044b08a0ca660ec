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
// read, the owner is taken from the file system, and what does not parse does not count.
package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
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
	lockFile = "lock"
	fileMax  = 256 << 10
	version  = 1
	lockWait = 10 * time.Second
)

var idPattern = regexp.MustCompile(`^[0-9a-f]{16}$`)

// Registry is one machine's.
type Registry struct{ Root string }

// Open makes the directory if need be. A shared one is writable by all users, and sticky.
func Open(root string, shared bool) (*Registry, error) {
	mode := os.FileMode(0o700)
	if shared {
		mode = 0o777 | fs.ModeSticky
	}
	if err := os.MkdirAll(filepath.Dir(root), 0o755); err != nil {
		return nil, err
	}
	err := os.Mkdir(root, mode.Perm())
	if err == nil {
		err = os.Chmod(root, mode)
	} else if errors.Is(err, fs.ErrExist) {
		err = nil
	}
	if err != nil {
		return nil, err
	}
	info, err := os.Lstat(root)
	if err != nil {
		return nil, err
	}
	st := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || !shared && int(st.Uid) != os.Getuid() {
		return nil, fmt.Errorf("%s is not a directory of this user", root)
	}
	if shared && info.Mode().Perm()&0o022 != 0 && info.Mode()&fs.ModeSticky == 0 {
		return nil, fmt.Errorf("%s is writable by others and not sticky; remove it", root)
	}
	return &Registry{Root: root}, nil
}

// Lock takes the machine's lock; the returned function gives it back.
func (r *Registry) Lock() (func(), error) {
	f, err := r.openLock()
	if err != nil {
		return nil, err
	}
	deadline := time.Now().Add(lockWait)
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || time.Now().After(deadline) {
			_ = f.Close()
			return nil, fmt.Errorf("%s is locked by another process for %v (`fuser -v` shows it): %w", f.Name(), lockWait, err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// openLock opens the lock file, for reading, as no more is needed and other users' files in a sticky
// directory may not be opened for creation (fs.protected_regular).
func (r *Registry) openLock() (*os.File, error) {
	path := filepath.Join(r.Root, lockFile)
	for range 3 {
		f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if err == nil {
			if info, e := f.Stat(); e != nil || !info.Mode().IsRegular() {
				_ = f.Close()
				return nil, fmt.Errorf("%s is not a regular file; remove it", path)
			}
			return f, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		made, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o644)
		if err == nil {
			err = made.Chmod(0o644)
			_ = made.Close()
		}
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
	}
	return nil, fmt.Errorf("%s comes and goes", path)
}

// List reads all slices, dead ones too.
func (r *Registry) List() ([]Slice, error) {
	entries, err := os.ReadDir(r.Root)
	if err != nil {
		return nil, err
	}
	var out []Slice
	for _, e := range entries {
		if !e.IsDir() || !idPattern.MatchString(e.Name()) {
			continue
		}
		if s, ok := r.read(e.Name()); ok {
			out = append(out, s)
		}
	}
	return out, nil
}

// read loads one slice; false when it is not one.
func (r *Registry) read(id string) (Slice, bool) {
	s := Slice{ID: id, Dir: filepath.Join(r.Root, id)}
	root, err := os.OpenRoot(s.Dir)
	if err != nil {
		return s, false
	}
	defer root.Close()
	dir, err := root.Stat(".")
	if err != nil {
		return s, false
	}
	s.UID = int(dir.Sys().(*syscall.Stat_t).Uid)
	s.Mine = s.UID == os.Getuid()
	f, err := openPlain(root, infoFile, s.UID)
	if err != nil {
		return s, false
	}
	defer f.Close()
	if decode(f, &s.Info) != nil || !valid(s.Info) {
		return s, false
	}
	if u, err := openPlain(root, useFile, s.UID); err == nil {
		if decode(u, &s.Use) != nil {
			s.Use = Use{}
		}
		_ = u.Close()
	}
	s.Alive = writeLocked(f) || s.processAlive()
	return s, true
}

// openPlain opens a regular file of the owner without following a link or waiting on a pipe.
func openPlain(root *os.Root, name string, uid int) (*os.File, error) {
	f, err := root.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && (!info.Mode().IsRegular() || info.Size() > fileMax || int(info.Sys().(*syscall.Stat_t).Uid) != uid) {
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

// valid bounds what a reservation can claim.
func valid(i Info) bool {
	if i.Version != version || len(i.GPUs) < 1 || len(i.GPUs) > tenant.MaxDevices {
		return false
	}
	for _, g := range i.GPUs {
		if g.ReservedCores < 0 || g.ReservedCores > 100 || g.ReservedMemory > 1<<46 || len(g.UUID) > 64 || len(g.Name) > 128 {
			return false
		}
	}
	return true
}

// writeLocked tells whether somebody who may write the file holds its write lock. A reader cannot
// pretend to.
func writeLocked(f *os.File) bool {
	fl := unix.Flock_t{Type: unix.F_RDLCK, Len: 1}
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &fl)
	return err == nil && fl.Type == unix.F_WRLCK
}

func (s Slice) processAlive() bool {
	if s.Info.PIDNS == tenant.PIDNamespace() {
		for _, p := range s.Use.Processes {
			if p.PID > 0 && !p.Gone() {
				return true
			}
		}
	}
	if !s.Mine && os.Getuid() != 0 {
		return false
	}
	l, err := tenant.OpenLedger(s.Dir)
	if err != nil {
		return false
	}
	defer l.Close()
	return l.InUse()
}

// RemoveDead removes slices that are over, as far as the caller may. The machine's lock is held.
func (r *Registry) RemoveDead(slices []Slice) {
	for _, s := range slices {
		if !s.Alive && (s.Mine || os.Getuid() == 0) {
			s.remove()
		}
	}
	r.removeUnfinished()
}

func (s Slice) remove() {
	_ = os.RemoveAll(s.Dir)
	// Only a path that this program itself would have chosen; root leaves others' libraries alone.
	if s.Mine && filepath.Base(s.Info.Libraries) == s.ID && filepath.Base(filepath.Dir(s.Info.Libraries)) == "slices" {
		_ = os.RemoveAll(s.Info.Libraries)
	}
}

// removeUnfinished removes directories of the caller that never became a slice: their maker died
// under the lock that the caller holds now.
func (r *Registry) removeUnfinished() {
	entries, _ := os.ReadDir(r.Root)
	for _, e := range entries {
		if !e.IsDir() || !idPattern.MatchString(e.Name()) {
			continue
		}
		if _, ok := r.read(e.Name()); ok {
			continue
		}
		if info, err := e.Info(); err == nil && int(info.Sys().(*syscall.Stat_t).Uid) == os.Getuid() {
			_ = os.RemoveAll(filepath.Join(r.Root, e.Name()))
		}
	}
}
