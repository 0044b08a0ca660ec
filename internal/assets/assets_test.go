package assets

import (
	"os"
	"path/filepath"
	"testing"
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
	} {
		if err := damage(); err != nil {
			t.Fatal(name, err)
		}
		again, err := Path(NVMLProbe)
		if err != nil || again != path {
			t.Fatal(name, again, err)
		}
		if got, _ := os.ReadFile(path); string(got) != string(good) {
			t.Errorf("%s: not repaired", name)
		}
	}
}
