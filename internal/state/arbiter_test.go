package state

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/tenant"
)

func mandate(t *testing.T, r *Registry) *Mandate {
	t.Helper()
	m, err := r.TryMandate()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestMandate(t *testing.T) {
	r := open(t)
	file := filepath.Join(r.Root, arbiterFile(os.Getuid()))
	first := mandate(t, r)
	if !r.HasArbiter(os.Getuid()) || r.HasArbiter(os.Getuid()+1) {
		t.Error("HasArbiter")
	}
	if _, err := r.TryMandate(); !errors.Is(err, ErrHeld) {
		t.Errorf("two arbiters: %v", err)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("others could hold the lock: %v, %v", info.Mode(), err)
	}
	waited := make(chan *Mandate)
	for range 2 {
		go func() {
			m, err := r.WaitMandate()
			if err != nil {
				t.Error(err)
			}
			waited <- m
		}()
	}
	select {
	case <-waited:
		t.Fatal("did not wait")
	case <-time.After(50 * time.Millisecond):
	}
	first.Close(false)
	second := <-waited
	// The file goes with the last one, as it believes: who waited for it makes a new one.
	second.Close(true)
	third := <-waited
	if _, err := r.TryMandate(); !errors.Is(err, ErrHeld) || !third.inPlace() {
		t.Errorf("the third is not the arbiter: %v", err)
	}
	third.Close(true)
	if exists(file) || r.HasArbiter(os.Getuid()) {
		t.Error("the file is left")
	}
}

// What others put in the place of the file is refused.
func TestMandateSquatted(t *testing.T) {
	r := open(t)
	file := filepath.Join(r.Root, arbiterFile(os.Getuid()))
	victim := filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(victim, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for what, put := range map[string]func() error{
		"a link": func() error { return os.Symlink(victim, file) },
		"a pipe": func() error { return unix.Mkfifo(file, 0o644) },
		"another user's": func() error {
			if os.Getuid() != 0 {
				return os.Mkdir(file, 0o755)
			}
			if err := os.WriteFile(file, nil, 0o666); err != nil {
				return err
			}
			return os.Chown(file, 65534, 65534)
		},
	} {
		if err := put(); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { _, err := r.TryMandate(); done <- err }()
		select {
		case err := <-done:
			if err == nil || errors.Is(err, ErrHeld) {
				t.Errorf("%s: %v", what, err)
			}
		case <-time.After(5 * time.Second):
			t.Fatalf("%s: hangs", what)
		}
		_ = os.RemoveAll(file)
	}
	if info, err := os.Stat(victim); err != nil || info.Mode().Perm() != 0o644 {
		t.Error("the link was followed")
	}
}

func TestOpenMember(t *testing.T) {
	r := open(t)
	o := create(t, r)
	s, dir, err := r.OpenMember(o.ID)
	if err != nil || s.ID != o.ID || !s.Supervised {
		t.Fatalf("%+v, %v", s, err)
	}
	_ = dir.Close()
	if ids, err := r.IDs(); err != nil || len(ids) != 1 || ids[0] != o.ID || !r.Alive(o.ID) {
		t.Errorf("%v, %v", ids, err)
	}
	// In the making.
	id := NewID()
	if err := os.Mkdir(filepath.Join(r.Root, id), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.OpenMember(id); !errors.Is(err, ErrNotYet) {
		t.Error(err)
	}
	if os.Getuid() != 0 {
		t.Log("others' slices: not tested")
	}
	// Within another one.
	info := o.Info
	info.Parent = o.ID
	inner, err := r.Create(NewID(), info, []tenant.Device{{UUID: "GPU-1", Cores: 30}})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.OpenMember(inner.ID); !errors.Is(err, ErrNoMember) {
		t.Error(err)
	}
	o.Release()
	if _, _, err := r.OpenMember(o.ID); !errors.Is(err, ErrNoMember) || r.Alive(o.ID) {
		t.Errorf("dead: %v", err)
	}
}

func TestWatch(t *testing.T) {
	for _, name := range []string{"inotify", "none"} {
		r, w := open(t), &Watch{}
		if name == "inotify" {
			if w = r.Watch(); w.file == nil {
				t.Error("the kernel does not tell")
			}
		}
		began := time.Now()
		w.Wait(context.Background(), 30*time.Millisecond)
		if d := time.Since(began); d < 25*time.Millisecond || d > 10*time.Second {
			t.Errorf("%s: a wait of 30 ms took %v", name, d)
		}
		o := create(t, r)
		began = time.Now()
		w.Wait(context.Background(), 20*time.Second)
		if d := time.Since(began); d > 5*time.Second {
			t.Errorf("%s: a new slice was seen after %v", name, d)
		}
		w.Wait(context.Background(), time.Millisecond)
		o.Remove()
		w.Wait(context.Background(), 20*time.Second)
		if d := time.Since(began); d > 5*time.Second {
			t.Errorf("%s: a removed slice was seen after %v", name, d)
		}
		ctx, cancel := context.WithCancel(context.Background())
		time.AfterFunc(20*time.Millisecond, cancel)
		for ctx.Err() == nil {
			w.Wait(ctx, 20*time.Second)
		}
		if d := time.Since(began); d > 10*time.Second {
			t.Errorf("%s: cancelled after %v", name, d)
		}
		w.Close()
	}
}

func TestChange(t *testing.T) {
	r := open(t)
	o := create(t, r)
	if _, ok := o.Changed(); ok {
		t.Error("a change of nobody")
	}
	s := list(t, r)[0]
	to := Change{GPUs: []GPU{{UUID: "GPU-1", Cores: 50, Burst: 80, Memory: 2 << 30, ReservedCores: 50, ReservedMemory: 2 << 30, Weight: 3}},
		Limits: []tenant.Device{{UUID: "GPU-1", Cores: 50, CoresCeiling: 80, CoresLimited: true, MemoryLimit: 2 << 30, MemoryLimited: true, Weight: 3}}}
	for n := uint64(1); n <= 2; n++ {
		if got, err := r.Change(s, to); err != nil || got != n {
			t.Fatalf("%d, %v", got, err)
		}
		c, ok := o.Changed()
		if !ok || c.Number != n || c.Limits[0] != to.Limits[0] {
			t.Errorf("%+v, %v", c, ok)
		}
		if _, again := o.Changed(); again {
			t.Error("told twice")
		}
		to.GPUs[0].Weight++
	}
	if got := list(t, r)[0].Info.GPUs[0]; got.Cores != 50 || got.ReservedMemory != 2<<30 || got.Weight != 4 {
		t.Errorf("the list has %+v", got)
	}
	for what, bad := range map[string]Change{
		"none": {}, "another GPU": {GPUs: []GPU{{UUID: "GPU-2"}}, Limits: []tenant.Device{{UUID: "GPU-2", Cores: 1, CoresCeiling: 1}}},
		"too much":  {GPUs: []GPU{{UUID: "GPU-1", ReservedCores: 101}}, Limits: []tenant.Device{{UUID: "GPU-1", Cores: 1, CoresCeiling: 1}}},
		"no limits": {GPUs: to.GPUs}, "a wild limit": {GPUs: to.GPUs, Limits: []tenant.Device{{UUID: "GPU-1", Cores: 50, CoresCeiling: 20}}},
	} {
		if _, err := r.Change(s, bad); err == nil {
			t.Errorf("%s: recorded", what)
		}
	}
	// A record that nobody could have made that way does not count.
	if err := os.WriteFile(filepath.Join(o.Dir, setFile), []byte(`{"number":9,"gpus":[{"uuid":"GPU-1","reserved_cores":-1}],"limits":[{"UUID":"GPU-1","Cores":1,"CoresCeiling":1}]}`), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, ok := o.Changed(); ok || list(t, r)[0].Info.GPUs[0].ReservedCores != 30 {
		t.Error("a damaged change was taken")
	}
	limits, ledger, err := r.Pages(s)
	if err != nil || !strings.Contains(limits.Name(), "n") {
		t.Error(err)
	}
	limits.Close()
	ledger.Close()
	o.Remove()
	if exists(o.Dir) {
		t.Error("left")
	}
}
