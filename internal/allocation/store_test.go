package allocation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/tenant"
)

func newStore(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := Open(Config{Dir: dir, Now: func() time.Time { return time.Unix(1e9, 0) }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// reopen is a store as the next node finds it.
func reopen(t testing.TB, s *Store) *Store {
	t.Helper()
	s.Close()
	return newStore(t, s.config.Dir)
}

func superviseStore(t interface{ Cleanup(func()) }, s *Store, config SuperviseConfig) {
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() { s.Supervise(ctx, config) })
	t.Cleanup(func() { cancel(); done.Wait() })
}

const gi = 1 << 30

var (
	owner = Owner{Namespace: "ns", Pod: "pod", UID: "uid", Container: "main"}
	some  = []GPU{{UUID: "GPU-1", Index: 1, Minor: 3, Name: "T4", Cores: 30, Ceiling: 60, CoresLimited: true, Memory: 8 * gi, MemoryLimited: true,
		ContextBytes: 1 << 20, Latency: true, Weight: 7}, {UUID: "GPU-2", Cores: 100, Memory: 16 * gi}}
)

// A directory as the container finds it, at each step of an allocation's life.
func TestLife(t *testing.T) {
	old := unix.Umask(0o077) // modes are set, not left to chance
	defer unix.Umask(old)
	s := newStore(t, filepath.Join(t.TempDir(), "etc/vm"))
	id := IDOf([]string{"b", "a", "b"})
	if id != IDOf([]string{"a", "b"}) || id == IDOf([]string{"a"}) || !idPattern.MatchString(id) {
		t.Errorf("id %s", id)
	}
	for range 2 {
		if err := s.Reserve(id); err != nil {
			t.Fatal(err)
		}
	}
	want := Record{ID: id}
	check := func(what, files string) {
		t.Helper()
		if r, ok := s.Get(id); !ok || !reflect.DeepEqual(r, want) || !reflect.DeepEqual(s.List(), []Record{want}) {
			t.Errorf("%s: %+v %v; want %+v", what, r, ok, want)
		}
		var got []string
		entries, _ := os.ReadDir(s.path(id))
		for _, e := range entries {
			info, _ := e.Info()
			got = append(got, fmt.Sprintf("%s %o", e.Name(), info.Mode().Perm()))
		}
		if all := strings.Join(got, ", "); all != files {
			t.Errorf("%s: %s; want %s", what, all, files)
		}
	}
	const whole = "ledger 666, limits 644, record.json 600"
	check("reserved", "")
	if _, err := s.Use(id); !errors.Is(err, ErrUnbound) {
		t.Error(err)
	}
	if err := s.Change(id, some); !errors.Is(err, ErrUnbound) {
		t.Error(err)
	}
	if err := s.Bind(id, owner, some); err != nil {
		t.Fatal(err)
	}
	want = Record{ID: id, Serial: 1, Owner: owner, GPUs: some, Bound: time.Unix(1e9, 0).UTC()}
	check("bound", whole)
	if info, _ := os.Stat(s.path(id)); info.Mode().Perm() != 0o755 {
		t.Errorf("directory: %v", info.Mode())
	}
	limits, err := tenant.OpenLimits(s.path(id))
	if err != nil {
		t.Fatal(err)
	}
	defer limits.Close()
	page, err := limits.Devices()
	if wantPage := []tenant.Device{
		{UUID: "GPU-1", MemoryLimit: 8 * gi, MemoryLimited: true, ContextBytes: 1 << 20, Cores: 30, CoresLimited: true, CoresCeiling: 60, Latency: true, Weight: 7},
		{UUID: "GPU-2", MemoryLimit: 16 * gi, Cores: 100, CoresCeiling: 100},
	}; err != nil || !reflect.DeepEqual(page, wantPage) || limits.Name() != "ns/pod/main" {
		t.Errorf("%+v %v %q", page, err, limits.Name())
	}

	// A change is seen where the page is mapped already, and is kept.
	to := slices.Clone(some)
	to[0].Cores, to[0].Memory = 20, 4*gi
	if err := s.Change(id, to); err != nil {
		t.Fatal(err)
	}
	want.GPUs, want.Changes = to, 1
	check("changed", whole)
	if page, _ = limits.Devices(); page[0].Cores != 20 || page[0].MemoryLimit != 4*gi {
		t.Errorf("%+v", page)
	}
	if err := s.Change(id, []GPU{to[1], to[0]}); err == nil {
		t.Error("a change exchanged the GPUs")
	}
	s = reopen(t, s)
	check("taken over", whole)

	before := inode(t, s, id)
	if err := s.Bind(id, owner, some); err != nil {
		t.Fatal(err)
	}
	want = Record{ID: id, Serial: 2, Owner: owner, GPUs: some, Bound: want.Bound}
	check("bound anew", whole)
	if inode(t, s, id) == before {
		t.Error("a new container has the old one's ledger")
	}
	if use, err := s.Use(id); err != nil || len(use.GPUs) != 2 || use.GPUs[1].UUID != "GPU-2" || len(use.Processes) != 0 {
		t.Errorf("%+v %v", use, err)
	}
	if err := errors.Join(s.Remove(id), s.Remove(id)); err != nil {
		t.Fatal(err)
	}
	if r, ok := s.Get(id); ok || len(s.List()) != 0 {
		t.Errorf("after its removal: %+v", r)
	}
	if entries, _ := os.ReadDir(s.config.Dir); len(entries) != 1 || len(s.Problems()) != 0 {
		t.Errorf("left: %v %v", entries, s.Problems())
	}
}

func inode(t *testing.T, s *Store, id string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(s.path(id), tenant.FileLedger), &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

func TestMounts(t *testing.T) {
	s, err := Open(Config{Dir: t.TempDir(), HostDir: "/host/vm"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	want := []Mount{{"/host/vm/x", "/etc/tranche/slice", true}, {"/host/vm/x/ledger", "/etc/tranche/slice/ledger", false}}
	if got := s.Mounts("x"); !slices.Equal(got, want) {
		t.Errorf("%+v", got)
	}
}

func TestRefused(t *testing.T) {
	s := newStore(t, t.TempDir())
	id := IDOf(nil)
	with := func(change func(*GPU)) []GPU {
		g := some[0]
		change(&g)
		return []GPU{g}
	}
	for want, err := range map[string]error{
		`allocation "../x": not 32 hexadecimal digits`:                             s.Reserve("../x"),
		`allocation "x": not 32 hexadecimal digits`:                                s.Bind("x", owner, some),
		"owner \"ns/pod/\": a name is missing, or longer than 256 characters":      s.Bind(id, Owner{Namespace: "ns", Pod: "pod", UID: "u"}, some),
		"0 GPUs in an allocation; 1 to 16 can be":                                  s.Bind(id, owner, nil),
		"17 GPUs in an allocation; 1 to 16 can be":                                 s.Bind(id, owner, make([]GPU, 17)),
		`GPU "GPU-1": no UUID, too long a one, or twice in the allocation`:         s.Bind(id, owner, []GPU{some[0], some[0]}),
		"GPU GPU-1: 0 cores; 1 to 100 can be":                                      s.Bind(id, owner, with(func(g *GPU) { g.Cores = 0 })),
		"GPU GPU-1: 101 cores; 1 to 100 can be":                                    s.Bind(id, owner, with(func(g *GPU) { g.Cores = 101 })),
		"GPU GPU-1: a ceiling of 29 cores over 30; it can be up to 100":            s.Bind(id, owner, with(func(g *GPU) { g.Ceiling = 29 })),
		"GPU GPU-1: a memory limit of 0 bytes":                                     s.Bind(id, owner, with(func(g *GPU) { g.Memory = 0 })),
		"GPU GPU-1: a weight of 1001; 1 to 1000 can be, or 0 for that of the core": s.Bind(id, owner, with(func(g *GPU) { g.Weight = 1001 })),
		"not bound to a container":                                                 s.Change(id, some),
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %s", err, want)
		}
	}
	if got := s.List(); len(got) != 0 {
		t.Errorf("%+v", got)
	}
	if _, err := Open(s.config); !errors.Is(err, ErrLocked) {
		t.Errorf("a second store: %v", err)
	}
	if _, err := Open(Config{Dir: "vm"}); err == nil {
		t.Error("a relative directory was taken")
	}
}

// What a node that was killed at any step, a full disk or a curious admin leaves: never fatal, never half.
func TestDamage(t *testing.T) {
	id := IDOf([]string{"x"})
	for name, c := range map[string]struct {
		damage  func(dir string) error
		problem string // "": bound as before
	}{
		"untouched": {func(string) error { return nil }, ""},
		"a stage that was never put in place": {func(dir string) error {
			return build(dir+stageEnd, Record{ID: id, Serial: 9, Owner: owner, GPUs: some})
		}, ""},
		"half a stage":       {func(dir string) error { return os.Mkdir(dir+stageEnd, 0o700) }, ""},
		"a former, unused":   {func(dir string) error { return build(dir+".7", Record{ID: id, Serial: 7, Owner: owner, GPUs: some}) }, ""},
		"half a change":      {func(dir string) error { return oddGeneration(dir) }, ""},
		"a record not made":  {func(dir string) error { return os.WriteFile(filepath.Join(dir, ".record"), []byte("{"), 0o600) }, ""},
		"a record cut short": {func(dir string) error { return os.Truncate(filepath.Join(dir, recordFile), 40) }, "record.json is damaged: unexpected end of JSON input"},
		"a record changed":   {replaceIn(recordFile, `"cores":30`, `"cores":90`), "record.json is damaged: its checksum is wrong"},
		"a record to come":   {replaceIn(recordFile, `{"version":1`, `{"version":2`), "record.json is damaged: version 2, not 1"},
		"no limits":          {func(dir string) error { return os.Remove(filepath.Join(dir, tenant.FileLimits)) }, "limits: no such file"},
		"short limits":       {func(dir string) error { return os.Truncate(filepath.Join(dir, tenant.FileLimits), 4096) }, "limits is damaged: not a file of 8192 bytes"},
		"a ledger of zeros":  {func(dir string) error { return os.Truncate(filepath.Join(dir, tenant.FileLedger), 0) }, "ledger is damaged: not a file of"},
		"another's directory": {func(dir string) error {
			return writeRecord(dir, Record{ID: IDOf(nil), Serial: 1, Owner: owner, GPUs: some})
		}, "the record is that of"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t, t.TempDir())
			if err := s.Bind(id, owner, some); err != nil {
				t.Fatal(err)
			}
			want, _ := s.Get(id)
			s.Close()
			if err := c.damage(s.path(id)); err != nil {
				t.Fatal(err)
			}
			s = newStore(t, s.config.Dir)
			got, ok := s.Get(id)
			switch {
			case c.problem == "" && (!reflect.DeepEqual(got, want) || len(s.Problems()) != 0):
				t.Errorf("%+v %v", got, s.Problems())
			case c.problem != "" && (!ok || got.IsBound() || !strings.Contains(got.Problem, c.problem) || len(s.Problems()) != 1):
				t.Errorf("%+v %v; want %s", got, s.Problems(), c.problem)
			}
			// In either case the next container starts.
			if err := s.Bind(id, owner, some); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Use(id); err != nil {
				t.Error(err)
			}
			if entries, _ := os.ReadDir(s.config.Dir); len(entries) != 2 {
				t.Errorf("left: %v", entries)
			}
		})
	}
}

func replaceIn(file, old, new string) func(dir string) error {
	return func(dir string) error {
		path := filepath.Join(dir, file)
		data, err := os.ReadFile(path)
		if err == nil && !strings.Contains(string(data), old) {
			err = fmt.Errorf("no %s in %s", old, data)
		}
		if err == nil {
			err = os.WriteFile(path, []byte(strings.Replace(string(data), old, new, 1)), 0o600)
		}
		return err
	}
}

// oddGeneration is what a writer leaves that dies in the middle of a change.
func oddGeneration(dir string) error {
	f, err := os.OpenFile(filepath.Join(dir, tenant.FileLimits), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteAt([]byte{3}, 16) // struct tr_limits, generation
	return err
}

// Foreign things in the directory are named and left alone.
func TestAside(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "b6f1c1f2-pod-of-the-original"), 0o755); err != nil {
		t.Fatal(err)
	}
	s := newStore(t, dir)
	if got := s.Problems(); len(got) != 1 || got[0].Reason != "not an allocation" {
		t.Errorf("%+v", got)
	}
	if len(s.List()) != 0 {
		t.Error(s.List())
	}
}

func TestFits(t *testing.T) {
	gpus := func(cores int, memory uint64) []GPU { return []GPU{{UUID: "GPU-1", Cores: cores, Memory: memory}} }
	for _, c := range []struct {
		to   []GPU
		free Free
		want string
	}{
		{gpus(30, 8*gi), Free{}, "<nil>"},
		{gpus(1, 1), Free{Cores: -5}, "<nil>"},
		{gpus(50, 8*gi), Free{Cores: 20}, "<nil>"},
		{gpus(51, 8*gi), Free{Cores: 20}, "gpu GPU-1: 51 cores asked, 21 more than now; free: 20"},
		{gpus(31, 8*gi), Free{Cores: -5}, "gpu GPU-1: 31 cores asked, 1 more than now; free: 0"},
		{gpus(20, 9*gi), Free{Memory: gi}, "<nil>"},
		{gpus(20, 10*gi), Free{Memory: gi}, "gpu GPU-1: 10 GiB of memory asked, 2 GiB more than now; free: 1 GiB"},
		{[]GPU{{UUID: "GPU-2"}}, Free{}, "a change of GPU-1 to GPU-2: the GPU stays the same"},
		{nil, Free{}, "a change to 0 GPUs of an allocation of 1"},
	} {
		if got := fmt.Sprint(Fits(gpus(30, 8*gi), c.to, map[string]Free{"GPU-1": c.free})); got != c.want {
			t.Errorf("%+v with %+v free: %s; want %s", c.to, c.free, got, c.want)
		}
	}
}

// Memory alone is guaranteed none of the core that its record has.
func TestFitsMemoryOnly(t *testing.T) {
	memory, cores := []GPU{{UUID: "GPU-1", Cores: 1, MemoryOnly: true}}, []GPU{{UUID: "GPU-1", Cores: 20}}
	for _, c := range []struct {
		from, to []GPU
		free     int
		want     string
	}{
		{memory, cores, 20, "<nil>"},
		{memory, cores, 19, "gpu GPU-1: 20 cores asked, 20 more than now; free: 19"},
		{cores, memory, 0, "<nil>"},
	} {
		if got := fmt.Sprint(Fits(c.from, c.to, map[string]Free{"GPU-1": {Cores: c.free}})); got != c.want {
			t.Errorf("%+v to %+v with %d free: %s; want %s", c.from, c.to, c.free, got, c.want)
		}
	}
}

// Records of before memory alone was noted as such, and of now, are read by what they say.
func TestRecordsOfBefore(t *testing.T) {
	for text, want := range map[string]bool{
		`{"cores":1,"ceiling":100}`:                     true,
		`{"cores":1,"ceiling":100,"memory_only":false}`: false,
		`{"cores":1,"ceiling":100,"memory_only":true}`:  true,
		`{"cores":1,"ceiling":50}`:                      false,
		`{"cores":30,"ceiling":100}`:                    false,
		`{"cores":1,"memory_limited":true}`:             false,
	} {
		var g GPU
		if err := json.Unmarshal([]byte(text), &g); err != nil || g.MemoryOnly != want {
			t.Errorf("%s: %+v, %v", text, g, err)
		}
	}
	r := Record{ID: IDOf(nil), Serial: 1, Owner: owner, GPUs: []GPU{{UUID: "GPU-1", Cores: 1, Ceiling: 100}, {UUID: "GPU-2", Cores: 1, Ceiling: 100, MemoryOnly: true}}}
	data, err := encodeRecord(r)
	if err != nil {
		t.Fatal(err)
	}
	if back, err := decodeRecord(data); err != nil || !reflect.DeepEqual(back, r) {
		t.Errorf("%+v, %v", back, err)
	}
	r.GPUs[1].Cores = 2
	if err := check(r.Owner, r.GPUs); err == nil {
		t.Error("two cores for memory alone")
	}
}

// Many at once: every allocation is whole whenever it is looked at.
func TestConcurrent(t *testing.T) {
	s := newStore(t, t.TempDir())
	superviseStore(t, s, SuperviseConfig{})
	var done sync.WaitGroup
	for w := range 8 {
		id := IDOf([]string{fmt.Sprint(w % 4)})
		done.Go(func() {
			for i := range 20 {
				err := s.Bind(id, owner, some)
				if i%7 == 3 {
					err = errors.Join(err, s.Remove(id))
				}
				if err != nil {
					t.Error(err)
				}
				for _, r := range s.List() {
					if r.Problem != "" || r.IsBound() && len(r.GPUs) != 2 {
						t.Errorf("%+v", r)
					}
				}
				if _, err := s.Use(id); err != nil && !errors.Is(err, ErrUnbound) {
					t.Error(err)
				}
			}
		})
	}
	done.Wait()
	for _, r := range reopen(t, s).List() {
		if !r.IsBound() {
			t.Errorf("%+v", r)
		}
	}
}

func FuzzRecord(f *testing.F) {
	whole, err := encodeRecord(Record{ID: IDOf(nil), Serial: 1, Owner: owner, GPUs: some})
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range []string{string(whole), "", "{}", `{"version":1,"sha256":"","record":{}}`, `{"version":1,"record":null}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := decodeRecord(data)
		if err != nil {
			return
		}
		again, err := encodeRecord(r)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := decodeRecord(again); err != nil || !reflect.DeepEqual(back, r) {
			t.Errorf("%+v becomes %+v: %v", r, back, err)
		}
	})
}
