package state

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/tenant"
)

func open(t *testing.T) *Registry {
	t.Helper()
	r, err := Open(filepath.Join(t.TempDir(), "registry"), true)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func create(t *testing.T, r *Registry) *Own {
	t.Helper()
	return createFor(t, r, "c")
}

func createFor(t *testing.T, r *Registry, command ...string) *Own {
	t.Helper()
	libs := filepath.Join(t.TempDir(), "slices")
	id := NewID()
	info := Info{Name: "n", Command: command, Started: time.Now(), Libraries: filepath.Join(libs, id),
		GPUs: []GPU{{UUID: "GPU-1", ReservedCores: 30, ReservedMemory: 1 << 30}}}
	if err := os.MkdirAll(info.Libraries, 0o755); err != nil {
		t.Fatal(err)
	}
	o, err := r.Create(id, info, []tenant.Device{{UUID: "GPU-1", Cores: 30, MemoryLimit: 1 << 30}})
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func list(t *testing.T, r *Registry) []Slice {
	t.Helper()
	s, err := r.List()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func exists(path string) bool { _, err := os.Lstat(path); return err == nil }

func TestLifeOfAReservation(t *testing.T) {
	unmask := syscall.Umask(0o077)
	defer syscall.Umask(unmask)
	r := open(t)
	o := create(t, r)
	if s := list(t, r); len(s) != 1 || !s[0].Alive || !s[0].Mine || s[0].Info.GPUs[0].ReservedCores != 30 {
		t.Fatalf("%+v", s)
	}
	for path, mode := range map[string]os.FileMode{".": 0o755, "info.json": 0o644, "limits": 0o600, "ledger": 0o600} {
		if info, err := os.Stat(filepath.Join(o.Dir, path)); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v; want %v", path, info.Mode(), err, mode)
		}
	}
	// The supervisor is gone, its child lives.
	child := exec.Command("sleep", "60")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	p, _ := tenant.Find(child.Process.Pid)
	o.SetUse(Use{Processes: []tenant.Process{p}})
	o.Release()
	if s := list(t, r); !s[0].Alive || s[0].Use.Processes[0] != p {
		t.Errorf("with a living child: %+v", s)
	}
	r.RemoveDead(list(t, r))
	if !exists(o.Dir) {
		t.Fatal("a living slice was removed")
	}
	_ = child.Process.Kill()
	_ = child.Wait()
	if s := list(t, r); s[0].Alive {
		t.Errorf("with a dead child: %+v", s)
	}
	r.RemoveDead(list(t, r))
	if exists(o.Dir) || exists(o.Info.Libraries) {
		t.Error("a dead slice is still there")
	}
}

// A reader cannot keep another's dead slice alive with a lock of its own.
func TestReaderCannotPretend(t *testing.T) {
	r := open(t)
	o := create(t, r)
	o.Release()
	f, err := os.Open(filepath.Join(o.Dir, infoFile))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Len: 1}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if s := list(t, r); s[0].Alive {
		t.Error("alive by a reader's lock")
	}
}

// What others can put into the directory neither stops nor misleads us.
func TestHostileEntries(t *testing.T) {
	r := open(t)
	good := create(t, r)
	defer good.Remove()
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	entry := func(n string) string {
		dir := filepath.Join(r.Root, n+strings.Repeat("0", 16-len(n)))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		return filepath.Join(dir, infoFile)
	}
	_ = unix.Mkfifo(entry("a1"), 0o644)
	_ = os.Symlink(filepath.Join(good.Dir, infoFile), entry("a2"))
	_ = os.WriteFile(entry("a3"), []byte(strings.Repeat("[", 100000)), 0o644)
	_ = os.WriteFile(entry("a4"), []byte(`{"version":1,"gpus":[{"uuid":"GPU-1","reserved_cores":-1000}]}`), 0o644)
	_ = os.WriteFile(entry("a5"), make([]byte, fileMax+1), 0o644)
	_ = os.WriteFile(entry("a6"), []byte(`{"version":1,"gpus":[]}`), 0o644)
	_ = os.WriteFile(entry("c1"), []byte(`{"version":1,"started":"9999-01-01T00:00:00Z","gpus":[{"uuid":"GPU-1"}]}`), 0o644)
	_ = os.WriteFile(entry("c2"), []byte(`{"version":1,"started":"2026-01-01T00:00:00Z","name":"`+strings.Repeat("x", 100000)+`","gpus":[{"uuid":"GPU-1"}]}`), 0o644)
	_ = os.WriteFile(entry("a7"), nil, 0o644)
	_ = os.Mkdir(entry("a8"), 0o755)
	_ = os.Symlink(good.Dir, filepath.Join(r.Root, "a900000000000000"))
	_ = os.WriteFile(filepath.Join(r.Root, "b000000000000000"), nil, 0o644)
	done := make(chan []Slice, 1)
	go func() { s, _ := r.List(); done <- s }()
	select {
	case s := <-done:
		if len(s) != 1 || s[0].ID != good.ID {
			t.Errorf("%+v", s)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("List hangs")
	}
	r.RemoveDead(list(t, r))
	if !exists(good.Dir) || !exists(secret) {
		t.Error("removed too much")
	}
}

func TestLockIsBoundedAndNotALink(t *testing.T) {
	r := open(t)
	unlock, err := r.Lock()
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	go func() {
		again, err := r.Lock()
		if err == nil {
			again()
		}
		got <- err
	}()
	select {
	case err := <-got:
		t.Fatal("two at once:", err)
	case <-time.After(50 * time.Millisecond):
	}
	unlock()
	if err := <-got; err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(r.Root, lockFile)
	_ = os.Remove(path)
	_ = os.Symlink("/etc/passwd", path)
	if _, err := r.Lock(); err == nil {
		t.Error("a link was followed")
	}
	_ = os.Remove(path)
	_ = unix.Mkfifo(path, 0o666)
	if _, err := r.Lock(); err == nil {
		t.Error("a pipe was taken for the lock")
	}
}

// A long command line is shortened, so that the record stays one that readers take.
func TestLongCommandLine(t *testing.T) {
	r := open(t)
	for _, word := range []string{"<>&\x01\xff", "語", "x"} {
		for _, words := range []int{1, 1000} {
			var command []string
			for range words {
				command = append(command, strings.Repeat(word, 1<<20/words))
			}
			o := createFor(t, r, command...)
			s := list(t, r)
			if len(s) != 1 || !s[0].Alive || size(s[0].Info.Command) > 2*commandMax || !strings.HasPrefix(s[0].Info.Command[0], word[:1]) {
				t.Errorf("%d times %q: %d slices", words, word, len(s))
			}
			o.Remove()
		}
	}
	o := createFor(t, r, "python", "train.py")
	defer o.Remove()
	if got := list(t, r)[0].Info.Command; len(got) != 2 || got[1] != "train.py" {
		t.Errorf("a short one was changed: %q", got)
	}
}

// What cannot be read as a slice stays as long as its supervisor lives.
func TestUnreadableButSupervised(t *testing.T) {
	r := open(t)
	o := create(t, r)
	if err := os.Truncate(filepath.Join(o.Dir, infoFile), fileMax+1); err != nil {
		t.Fatal(err)
	}
	r.RemoveDead(list(t, r))
	if !exists(filepath.Join(o.Dir, tenant.FileLedger)) {
		t.Fatal("a supervised slice was removed")
	}
	o.Release()
	r.RemoveDead(list(t, r))
	if exists(o.Dir) {
		t.Error("what nobody uses is still there")
	}
}

// The owner of the registry's directory puts another in the place of a slice's, with links to files
// of the slice's owner: none is written.
func TestExchangedDirectory(t *testing.T) {
	r := open(t)
	o := create(t, r)
	victim := filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(victim, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	stolen := filepath.Join(r.Root, "stolen")
	if err := os.Rename(o.Dir, stolen); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(o.Dir, 0o777); err != nil {
		t.Fatal(err)
	}
	names := []string{".use", ".new", useFile, infoFile, tenant.FileLimits, tenant.FileLedger}
	for _, name := range names {
		_ = os.Symlink(victim, filepath.Join(o.Dir, name))
	}
	o.SetUse(Use{Processes: []tenant.Process{tenant.Self()}})
	if !exists(filepath.Join(stolen, useFile)) {
		t.Error("the slice's own record was not written")
	}
	// As its supervisor opens them.
	if l, err := tenant.OpenLedgerIn(o.Directory()); err != nil {
		t.Error(err)
	} else {
		l.Close()
	}
	// A link in the slice's own directory, which only its owner can make.
	_ = os.Symlink(victim, filepath.Join(stolen, ".new"))
	o.SetUse(Use{})
	for _, name := range names {
		if target, err := os.Readlink(filepath.Join(o.Dir, name)); err != nil || target != victim {
			t.Errorf("%s was replaced: %v", name, err)
		}
	}
	o.Remove()
	if data, err := os.ReadFile(victim); err != nil || string(data) != "secret" {
		t.Errorf("%q, %v", data, err)
	}
	if info, err := os.Stat(victim); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if !exists(o.Dir) || exists(filepath.Join(stolen, infoFile)) || exists(o.Info.Libraries) {
		t.Error("Remove is to remove what is ours, and that only")
	}
}

// The registry's directory stays the one that was opened, when its path comes to mean another.
func TestExchangedRegistry(t *testing.T) {
	r := open(t)
	elsewhere := t.TempDir()
	if err := os.Rename(r.Root, r.Root+".old"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(elsewhere, r.Root); err != nil {
		t.Fatal(err)
	}
	o := create(t, r)
	unlock, err := r.Lock()
	if err != nil {
		t.Fatal(err)
	}
	unlock()
	if names, _ := os.ReadDir(elsewhere); len(names) != 0 {
		t.Errorf("written through a link: %v", names)
	}
	if !exists(filepath.Join(r.Root+".old", o.ID, infoFile)) {
		t.Error("not written where it was opened")
	}
	precious := filepath.Join(elsewhere, o.ID)
	_ = os.Mkdir(precious, 0o755)
	o.Remove()
	if !exists(precious) || exists(filepath.Join(r.Root+".old", o.ID)) {
		t.Error("removed elsewhere")
	}
}

func TestSharedDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shared")
	mode := func() os.FileMode {
		info, err := os.Stat(dir)
		if err != nil {
			t.Fatal(err)
		}
		return info.Mode() & (os.ModePerm | os.ModeSticky)
	}
	unmask := syscall.Umask(0o077)
	defer syscall.Umask(unmask)
	for _, before := range []string{"none", "not for all"} {
		if before != "none" {
			_ = os.Chmod(dir, 0o755)
		}
		if _, err := Open(dir, true); err != nil || mode() != 0o777|os.ModeSticky {
			t.Errorf("%s: %v, %v", before, mode(), err)
		}
	}
	if os.Getuid() != 0 {
		return
	}
	// Of another user: root takes it, so that nobody can rename in it.
	for _, before := range []os.FileMode{0o777 | os.ModeSticky, 0o755} {
		_ = os.Chown(dir, 65534, 65534)
		_ = os.Chmod(dir, before)
		if _, err := Open(dir, true); err != nil || mode() != 0o777|os.ModeSticky {
			t.Errorf("%v: %v, %v", before, mode(), err)
		}
		if info, _ := os.Stat(dir); info.Sys().(*syscall.Stat_t).Uid != 0 {
			t.Error("still another user's")
		}
	}
}

// A process that was born after the supervisor's last look keeps the slice, by its environment.
func TestProcessOfNoRecord(t *testing.T) {
	r := open(t)
	o := create(t, r)
	daemon := exec.Command("sleep", "60")
	daemon.Env = []string{"LD_LIBRARY_PATH=" + filepath.Join(o.Info.Libraries, "lib") + ":/lib"}
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = daemon.Process.Kill() }()
	other := create(t, r)
	o.Release()
	other.Release()
	p, _ := tenant.Find(daemon.Process.Pid)
	for _, s := range list(t, r) {
		if s.ID != o.ID {
			if s.Alive {
				t.Error("a slice without processes is alive")
			}
			continue
		}
		if !s.Alive || len(s.Use.Processes) != 1 || s.Use.Processes[0] != p {
			t.Errorf("daemon %v: alive %v, %v", p, s.Alive, s.Use.Processes)
		}
	}
	_ = daemon.Process.Kill()
	_ = daemon.Wait()
	for _, s := range list(t, r) {
		if s.Alive {
			t.Errorf("alive by nobody: %+v", s)
		}
	}
}

// What is in the way says what to do.
func TestLockAdvice(t *testing.T) {
	r := open(t)
	path := filepath.Join(r.Root, lockFile)
	_ = os.Symlink("nowhere", path)
	if _, err := r.Lock(); err == nil || !strings.Contains(err.Error(), "is a link; remove it") {
		t.Error(err)
	}
	if os.Getuid() != 0 {
		return
	}
	_ = os.Lchown(path, 65534, 65534)
	if _, err := r.Lock(); err == nil || !strings.Contains(err.Error(), "its owner, nobody, or root can remove it") {
		t.Error(err)
	}
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	open := filepath.Join(dir, "open")
	_ = os.Mkdir(open, 0o777)
	_ = os.Chmod(open, 0o777)
	if _, err := Open(open, true); err == nil {
		t.Error("a directory where everybody may remove others' slices was taken")
	}
	link := filepath.Join(dir, "link")
	_ = os.Symlink(dir, link)
	if _, err := Open(link, true); err == nil {
		t.Error("a link was taken")
	}
}
