package assets

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

func TestUsable(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "tranche")
	if err := usable(dir); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{file, link, filepath.Join(t.TempDir(), "a:b"), "/proc/tranche"} {
		if usable(bad) == nil {
			t.Errorf("%s was taken", bad)
		}
	}
}

// Every file is rebuilt when its content, its mode or its kind is wrong.
func TestPathRepairs(t *testing.T) {
	if Version() == "" {
		t.Skip("built without assets; run `make build` first")
	}
	path, err := Path(NVMLProbe)
	if err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, damage := range map[string]func() error{
		"flipped byte": func() error { return os.WriteFile(path, append([]byte{good[0] ^ 1}, good[1:]...), 0o700) },
		"truncated":    func() error { return os.Truncate(path, 10) },
		"removed":      func() error { return os.Remove(path) },
		"mode":         func() error { return os.Chmod(path, 0o777) },
		"link": func() error {
			_ = os.Remove(path)
			return os.Symlink("/bin/sh", path)
		},
		"directory": func() error {
			_ = os.Remove(path)
			return os.MkdirAll(filepath.Join(path, "a", "b"), 0o700)
		},
		"a file for its directory": func() error {
			_ = os.RemoveAll(filepath.Dir(path))
			return os.WriteFile(filepath.Dir(path), nil, 0o600)
		},
		"a link for its directory": func() error {
			_ = os.RemoveAll(filepath.Dir(path))
			return os.Symlink(t.TempDir(), filepath.Dir(path))
		},
	} {
		if err := damage(); err != nil {
			t.Fatal(name, err)
		}
		again, err := Path(NVMLProbe)
		if err != nil || again != path {
			t.Fatal(name, again, err)
		}
		if info, err := os.Lstat(filepath.Dir(path)); err != nil || !info.IsDir() {
			t.Errorf("%s: %v, %v", name, info, err)
		}
		if got, _ := os.ReadFile(path); string(got) != string(good) {
			t.Errorf("%s: not repaired", name)
		}
	}
}

// What another version left is removed when it is old, and nothing else is.
func TestRemoveOld(t *testing.T) {
	base, now := t.TempDir(), time.Now()
	for name, age := range map[string]time.Duration{
		"0123456789abcdef": 31 * 24 * time.Hour, "1123456789abcdef": 29 * 24 * time.Hour, "slices": 99 * 24 * time.Hour,
		"somebody-elses": 99 * 24 * time.Hour, Version(): 99 * 24 * time.Hour,
	} {
		dir := filepath.Join(base, name)
		err := os.MkdirAll(filepath.Join(dir, "lib"), 0o700)
		if err == nil {
			err = os.Chtimes(dir, now, now.Add(-age))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	left := func() (names []string) {
		entries, _ := os.ReadDir(base)
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	before := left()
	removeOld(base, now)
	want := slices.DeleteFunc(before, func(name string) bool { return name == "0123456789abcdef" })
	if got := left(); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
