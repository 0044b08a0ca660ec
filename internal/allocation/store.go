package allocation

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/tenant"
)

// Config is what a Store needs; only Dir must be set.
type Config struct {
	// Dir holds the allocations. It should lie in memory (tmpfs): on a disk the writing back of pages holds up
	// who writes to them, the arbiter and every launch.
	Dir string
	// HostDir is Dir as the container runtime names it; default Dir.
	HostDir string
	// Now is the clock; default time.Now.
	Now func() time.Time
}

// Store is the allocations of one node. Safe for concurrent use. One process has it at a time.
type Store struct {
	config Config
	lock   *os.File
	hosts  *tenant.Hosts
	aside  []Problem

	mu      sync.Mutex
	entries map[string]*entry
	serial  uint64
	changed chan struct{} // closed when allocations come or go
}

// entry is an allocation. Its directory, pages and former bindings are used under mu, which may be held
// for long (a tenant can hold up who reclaims in its ledger); record and there under the store's. Who takes both
// takes mu first.
type entry struct {
	id     string
	mu     sync.Mutex
	pages  *pages // nil: not bound
	former []*former

	record Record
	there  bool // false: of an allocation that was removed, former bindings are left
}

// former is what is left of an earlier binding: processes of it live.
type former struct {
	dir    string
	record Record // the zero value if it cannot be read
	pages  *pages
}

// Problem is an entry of the directory that was set aside.
type Problem struct{ Path, Reason string }

// ErrLocked says that another process has the directory.
var ErrLocked = errors.New("another tranche node serves it")

// ErrUnbound says that an allocation has no container.
var ErrUnbound = errors.New("not bound to a container")

const (
	lockName = ".lock"
	stageEnd = ".new"
)

var formerPattern = regexp.MustCompile(`^[0-9a-f]{32}\.[0-9]+$`)

// Open reads what is there, and makes the directory if need be. What cannot be read is not bound, or set
// aside; it is no error.
func Open(config Config) (*Store, error) {
	if config.Dir == "" || !filepath.IsAbs(config.Dir) {
		return nil, fmt.Errorf("directory of the allocations: %q is no absolute path", config.Dir)
	}
	if config.HostDir == "" {
		config.HostDir = config.Dir
	}
	if config.Now == nil {
		config.Now = time.Now
	}
	if err := os.MkdirAll(config.Dir, 0o755); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(config.Dir, lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = lock.Close()
		return nil, fmt.Errorf("%s: %w", config.Dir, ErrLocked)
	}
	s := &Store{config: config, lock: lock, hosts: tenant.NewHosts(), entries: map[string]*entry{}, changed: make(chan struct{})}
	if err := s.read(); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Close unmaps everything. Tenants keep their limits; the next Open takes over.
func (s *Store) Close() {
	for _, e := range s.all() {
		e.mu.Lock()
		if e.pages != nil {
			e.pages.close()
			e.pages = nil
		}
		for _, f := range e.former {
			f.pages.close()
		}
		e.former = nil
		e.mu.Unlock()
	}
	_ = s.lock.Close()
}

// OnDisk tells whether the directory lies on a disk, where it should not (Config.Dir).
func (s *Store) OnDisk() bool {
	var st unix.Statfs_t
	return unix.Statfs(s.config.Dir, &st) == nil && st.Type != unix.TMPFS_MAGIC && st.Type != unix.RAMFS_MAGIC
}

// Problems are what Open set aside.
func (s *Store) Problems() []Problem { return slices.Clone(s.aside) }

func (s *Store) path(id string) string { return filepath.Join(s.config.Dir, id) }

// read takes in the directory: allocations first, as former bindings go to theirs.
func (s *Store) read() error {
	names, err := os.ReadDir(s.config.Dir)
	if err != nil {
		return err
	}
	var left []string
	for _, n := range names {
		name := n.Name()
		switch {
		case idPattern.MatchString(name) && n.IsDir():
			s.adopt(name)
		case formerPattern.MatchString(name), strings.HasSuffix(name, stageEnd) && idPattern.MatchString(strings.TrimSuffix(name, stageEnd)):
			left = append(left, name)
		case name != lockName:
			s.aside = append(s.aside, Problem{Path: s.path(name), Reason: "not an allocation"})
		}
	}
	for _, name := range left {
		e := s.entry(name[:32])
		if err := s.retire(e, s.path(name), nil); err != nil {
			s.aside = append(s.aside, Problem{Path: s.path(name), Reason: err.Error()})
		}
	}
	return nil
}

// adopt reads an allocation. The record is the truth: a change that was recorded and not made is made.
func (s *Store) adopt(id string) {
	e := s.entry(id)
	e.there = true
	dir := s.path(id)
	record, err := readRecord(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return // reserved
	}
	if err == nil && record.ID != id {
		err = fmt.Errorf("%s: the record is that of %s", dir, record.ID)
	}
	if err == nil {
		e.pages, err = openPages(dir, record.GPUs, s.hosts)
	}
	if err == nil {
		if err = e.pages.follow(record); err != nil {
			e.pages.close()
			e.pages = nil
		}
	}
	if err != nil {
		e.record.Problem = err.Error()
		s.aside = append(s.aside, Problem{Path: dir, Reason: err.Error()})
		return
	}
	e.record = record
	s.serial = max(s.serial, record.Serial)
}

// entry is that of an id, new if need be.
func (s *Store) entry(id string) *entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[id]
	if e == nil {
		e = &entry{id: id, record: Record{ID: id}}
		s.entries[id] = e
	}
	return e
}

// hold is the locked entry of an id; nil where there is none and make is false.
func (s *Store) hold(id string, make bool) *entry {
	for {
		s.mu.Lock()
		e := s.entries[id]
		s.mu.Unlock()
		if e == nil && !make {
			return nil
		}
		e = s.entry(id)
		e.mu.Lock()
		s.mu.Lock()
		same := s.entries[id] == e
		s.mu.Unlock()
		if same {
			return e
		}
		e.mu.Unlock() // removed meanwhile
	}
}

func (s *Store) all() []*entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*entry, 0, len(s.entries))
	for _, e := range s.entries {
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b *entry) int { return strings.Compare(a.id, b.id) })
	return out
}

// set changes a record and tells who waits for changes.
func (s *Store) set(e *entry, r Record, there bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e.record, e.there = r, there
	if !there && len(e.former) == 0 {
		delete(s.entries, e.id)
	}
	s.tell()
}

func (s *Store) tell() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Changed is closed at the next change of what allocations there are.
func (s *Store) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// Reserve makes the allocation's directory, so that it can be named as a mount. It changes nothing that is
// there.
func (s *Store) Reserve(id string) error {
	if !idPattern.MatchString(id) {
		return fmt.Errorf("allocation %q: not 32 hexadecimal digits", id)
	}
	e := s.hold(id, true)
	defer e.mu.Unlock()
	if err := os.MkdirAll(s.path(id), 0o755); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e.there = true
	return nil
}

// Bind gives the allocation to a container that is about to start: new limits, a new ledger, read back. Until
// it returns nil the container must not start. What processes of an earlier container of the same pod hold
// stays charged to it until they are gone.
func (s *Store) Bind(id string, owner Owner, gpus []GPU) error {
	if !idPattern.MatchString(id) {
		return fmt.Errorf("allocation %q: not 32 hexadecimal digits", id)
	}
	if err := check(owner, gpus); err != nil {
		return fmt.Errorf("allocation %s: %w", id, err)
	}
	e := s.hold(id, true)
	defer e.mu.Unlock()
	s.mu.Lock()
	s.serial++
	record := Record{ID: id, Serial: s.serial, Owner: owner, GPUs: slices.Clone(gpus), Bound: s.config.Now().UTC()}
	s.mu.Unlock()
	if err := s.bind(e, record); err != nil {
		return fmt.Errorf("allocation %s of %s: %w", id, owner, err)
	}
	return nil
}

// bind builds the new directory aside and exchanges it for the present one in one step.
func (s *Store) bind(e *entry, record Record) error {
	dir, stage := s.path(e.id), s.path(e.id)+stageEnd
	if err := os.RemoveAll(stage); err != nil {
		return err
	}
	if err := build(stage, record); err != nil {
		_ = os.RemoveAll(stage)
		return err
	}
	err := unix.Renameat2(unix.AT_FDCWD, stage, unix.AT_FDCWD, dir, unix.RENAME_EXCHANGE)
	replaced := err == nil
	if errors.Is(err, fs.ErrNotExist) {
		err = os.Rename(stage, dir)
	}
	if err != nil {
		_ = os.RemoveAll(stage)
		return fmt.Errorf("%s: putting the new slice in place: %w", dir, err)
	}
	before := e.pages
	e.pages = nil
	if replaced {
		err = s.retire(e, stage, before)
	}
	var problem string
	var now *pages
	if err == nil {
		now, err = verify(dir, record, s.hosts)
	}
	if err != nil {
		problem = err.Error()
	}
	e.pages = now
	if now != nil {
		e.chargeFormer(record.Owner)
	}
	record.Problem = problem
	s.set(e, record, true)
	return err
}

// retire keeps what was bound before as long as a process of it lives, and removes it otherwise. before are its
// pages, nil if they are not open.
func (s *Store) retire(e *entry, dir string, before *pages) error {
	record, err := readRecord(dir)
	if err != nil {
		record = Record{ID: e.id} // whose it was is not known; that it is used may be
	}
	if before == nil {
		before, _ = openLedger(dir, record.GPUs, s.hosts)
	}
	if before == nil || !s.lives(before) {
		if before != nil {
			before.close()
		}
		return os.RemoveAll(dir)
	}
	to := dir
	for n := record.Serial; !formerPattern.MatchString(filepath.Base(to)); n++ {
		if _, err := os.Lstat(fmt.Sprintf("%s.%d", s.path(e.id), n)); errors.Is(err, fs.ErrNotExist) {
			to = fmt.Sprintf("%s.%d", s.path(e.id), n)
			if err := os.Rename(dir, to); err != nil {
				before.close()
				return err
			}
		}
	}
	e.former = append(e.former, &former{dir: to, record: record, pages: before})
	return nil
}

// lives tells whether a process of a binding lives. One that nobody has looked for yet is looked for now: what a
// container held that has just ended is not to be missing to its successor.
func (s *Store) lives(p *pages) bool {
	return p.inUse() && (s.hosts.Scan() != nil || p.inUse())
}

// Change sets other limits while the container runs; the GPUs stay the same. Whether they fit is the caller's
// question (Fits).
func (s *Store) Change(id string, gpus []GPU) error {
	if err := checkGPUs(gpus); err != nil {
		return fmt.Errorf("allocation %s: %w", id, err)
	}
	e := s.hold(id, false)
	if e == nil {
		return fmt.Errorf("allocation %s: %w", id, ErrUnbound)
	}
	defer e.mu.Unlock()
	record, _ := s.Get(id)
	if e.pages == nil || !record.IsBound() {
		return fmt.Errorf("allocation %s: %w", id, ErrUnbound)
	}
	if !slices.EqualFunc(record.GPUs, gpus, func(a, b GPU) bool { return a.UUID == b.UUID }) {
		return fmt.Errorf("allocation %s: a change must name the GPUs that it has, in their order", id)
	}
	record.GPUs, record.Changes = slices.Clone(gpus), record.Changes+1
	if err := writeRecord(s.path(id), record); err != nil {
		return err
	}
	s.mu.Lock()
	e.record = record // no tell: nothing came or went
	s.mu.Unlock()
	return e.pages.follow(record)
}

// Remove takes an allocation away whose pod is gone. What its processes hold that live all the same
// stays counted (Leftovers).
func (s *Store) Remove(id string) error {
	e := s.hold(id, false)
	if e == nil {
		return nil
	}
	defer e.mu.Unlock()
	before := e.pages
	e.pages = nil
	err := s.retire(e, s.path(id), before)
	s.set(e, Record{ID: id}, false)
	return err
}

// Get is the record of an allocation; false where there is none.
func (s *Store) Get(id string) (Record, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[id]
	if e == nil || !e.there {
		return Record{}, false
	}
	r := e.record
	r.GPUs = slices.Clone(r.GPUs)
	return r, true
}

// List is all records, reserved allocations included, by id.
func (s *Store) List() []Record {
	var out []Record
	for _, e := range s.all() {
		if r, ok := s.Get(e.id); ok {
			out = append(out, r)
		}
	}
	return out
}
