package driverview

import (
	"debug/elf"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func build(t testing.TB, b *Builder) *Set {
	t.Helper()
	set, err := b.Build()
	if err != nil {
		t.Fatalf("%v\n%s", err, set.Report.String())
	}
	return set
}

// stamp is what can be seen of a change to a tree.
func stamp(t testing.TB, dir string) map[string]unix.Stat_t {
	t.Helper()
	out := map[string]unix.Stat_t{}
	err := filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		st.Atim = unix.Timespec{}
		out[path] = st
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// The same files give the same views, and the second time nothing is touched.
func TestBuildAgain(t *testing.T) {
	b, _ := builder(t, driverFiles("535.1.2")...)
	first := build(t, b)
	before := stamp(t, first.Share.Dir)
	second := build(t, b)
	if first.Share.Name != second.Share.Name || first.Origin.Name != second.Origin.Name {
		t.Errorf("%s, %s; then %s, %s", first.Share.Name, first.Origin.Name, second.Share.Name, second.Origin.Name)
	}
	for path, st := range stamp(t, first.Share.Dir) {
		if before[path] != st {
			t.Errorf("%s was touched", path)
		}
	}
	if r := second.Share.Report; r.Linked+r.Copied != 0 {
		t.Errorf("wrote %d links, %d copies", r.Linked, r.Copied)
	}
}

// A driver appears; another takes its place; the old view stays as it is until nobody uses it.
func TestUpgrade(t *testing.T) {
	b, root := builder(t)
	var none *NoDriverError
	if _, err := b.Build(); !errors.As(err, &none) {
		t.Fatal(err)
	}
	if removed, err := b.GC(nil); removed != nil || err != nil {
		t.Fatal(removed, err)
	}
	add := func(version string) {
		for path := range stamp(t, fakeHost(t, driverFiles(version))) {
			if info, err := os.Stat(path); err == nil && !info.IsDir() {
				to := filepath.Join(root, "usr/lib/x86_64-linux-gnu", filepath.Base(path))
				if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.Rename(path, to)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	add("535.1.2")
	old := build(t, b)
	before := tree(t, old.Share.Dir)
	if err := os.RemoveAll(root + "/usr"); err != nil {
		t.Fatal(err)
	}
	add("550.3")
	set := build(t, b)
	if old.Version != "535.1.2" || set.Version != "550.3" || tree(t, old.Share.Dir) != before {
		t.Fatalf("%s, %s; the old view:\n%s", old.Version, set.Version, tree(t, old.Share.Dir))
	}

	base := b.cfg.Base
	for _, dir := range []string{tempPrefix + "123/lib64", "nvidia/lib64", "something-else"} {
		if err := os.MkdirAll(filepath.Join(base, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	removed, err := b.GC([]string{old.Share.Name})
	if err != nil || !slices.Equal(removed, []string{old.Origin.Name}) {
		t.Errorf("removed %v, %v", removed, err)
	}
	if removed, err = b.GC(nil); err != nil || !slices.Equal(removed, []string{old.Share.Name}) {
		t.Errorf("removed %v, %v", removed, err)
	}
	var left []string
	entries, err := os.ReadDir(base)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		left = append(left, e.Name())
	}
	if want := []string{lockName, "nvidia", set.Share.Name, set.Origin.Name, "something-else"}; !slices.Equal(left, want) {
		t.Errorf("left %v, want %v", left, want)
	}
}

// What is damaged in a view is made again, and nothing else is.
func TestRepair(t *testing.T) {
	b, _ := builder(t, driverFiles("535.1.2")...)
	set := build(t, b)
	dir, whole := set.Share.Dir, tree(t, set.Share.Dir)
	before := stamp(t, dir)
	ours, jit := filepath.Join(dir, "lib64/libcuda.so.1"), filepath.Join(dir, "lib64/libnvidia-ptxjitcompiler.so.1")
	for name, damage := range map[string]func() error{
		"ours truncated": func() error { return os.Truncate(ours, 3) },
		"ours changed": func() error {
			data, err := os.ReadFile(ours)
			if err == nil {
				data[0]++
				err = os.WriteFile(ours, data, 0o755)
			}
			return err
		},
		"a link elsewhere":       func() error { return errors.Join(os.Remove(jit), os.Symlink("/etc/passwd", jit)) },
		"a file for a link":      func() error { return errors.Join(os.Remove(jit), os.WriteFile(jit, nil, 0o644)) },
		"a directory for a file": func() error { return errors.Join(os.Remove(ours), os.MkdirAll(ours+"/x", 0o755)) },
		"removed":                func() error { return os.RemoveAll(filepath.Join(dir, "driver")) },
	} {
		if err := damage(); err != nil {
			t.Fatal(name, err)
		}
		if tree(t, dir) == whole {
			t.Errorf("%s: no damage", name)
		}
		build(t, b)
		if got := tree(t, dir); got != whole {
			t.Errorf("%s:\n%s", name, got)
		}
	}
	same := filepath.Join(dir, "lib64/libnvidia-ptxjitcompiler.so.535.1.2")
	if after := stamp(t, dir); after[same].Ino != before[same].Ino {
		t.Errorf("%s was made again", same)
	}
}

// Several builders, as of an old and a new process, at once: each gets the same whole views.
func TestConcurrent(t *testing.T) {
	first, root := builder(t, driverFiles("535.1.2")...)
	var wg sync.WaitGroup
	names := make([]string, 16)
	trees := make([]string, len(names))
	for i := range names {
		wg.Go(func() {
			b := first
			if i%2 == 1 {
				var err error
				if b, err = New(Config{Root: Root{Dir: root}, Base: first.cfg.Base, Volumes: first.cfg.Volumes, Arch: elf.EM_X86_64, Asset: fakeAsset}); err != nil {
					t.Error(err)
					return
				}
			}
			set, err := b.Build()
			if err != nil {
				t.Error(err)
				return
			}
			names[i], trees[i] = set.Share.Name, tree(t, set.Share.Dir)
			if _, err := b.GC(nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if len(slices.Compact(names)) != 1 || len(slices.Compact(trees)) != 1 {
		t.Errorf("%v\n%v", names, trees)
	}
	left, err := filepath.Glob(first.cfg.Base + "/" + tempPrefix + "*")
	if err != nil || left != nil {
		t.Error(left, err)
	}
}

// A hard link within a file system, a copy with the right mode and size across two.
func TestCopyAcrossMounts(t *testing.T) {
	b, root := builder(t, driverFiles("535.1.2")...)
	if r := build(t, b).Share.Report; r.Linked != 3 || r.Copied != 0 {
		t.Errorf("%d links, %d copies", r.Linked, r.Copied)
	}
	base, err := os.MkdirTemp("/dev/shm", "driverview")
	if err != nil {
		t.Skip("no other file system: ", err)
	}
	defer os.RemoveAll(base)
	var a, c unix.Stat_t
	if err := errors.Join(unix.Stat(root, &a), unix.Stat(base, &c)); err != nil {
		t.Fatal(err)
	}
	if a.Dev == c.Dev {
		t.Skip("the temporary directory is in /dev/shm")
	}
	b.cfg.Base = base
	set := build(t, b)
	source, err := os.Stat(root + "/usr/lib/x86_64-linux-gnu/libcuda.so.535.1.2")
	if err != nil {
		t.Fatal(err)
	}
	if r := set.Share.Report; r.Linked != 0 || r.Copied != 3 || r.CopiedBytes < 3*source.Size()-100 {
		t.Errorf("%+v", r)
	}
	info, err := os.Stat(filepath.Join(set.Share.Dir, "driver/libcuda-driver.so.1"))
	if err != nil || info.Size() != source.Size() || info.Mode().Perm() != 0o755 {
		t.Errorf("%v, %v", info, err)
	}
}

// Another time of change is another driver: NVIDIA's installer may replace a release by itself.
func TestReinstalled(t *testing.T) {
	b, root := builder(t, driverFiles("535.1.2")...)
	first := build(t, b)
	if err := os.Chtimes(root+"/usr/lib/x86_64-linux-gnu/libcuda.so.535.1.2", time.Time{}, time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if second := build(t, b); second.Share.Name == first.Share.Name {
		t.Error("the same view")
	}
}

func BenchmarkBuildAgain(b *testing.B) {
	over, _ := builder(b, driverFiles("535.1.2")...)
	build(b, over)
	for b.Loop() {
		build(b, over)
	}
}
