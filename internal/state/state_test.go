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
	libs := filepath.Join(t.TempDir(), "slices")
	id := NewID()
	info := Info{Name: "n", Command: []string{"c"}, Started: time.Now(), Libraries: filepath.Join(libs, id),
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
