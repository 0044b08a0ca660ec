package driverfind

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"tranche.dev/tranche/internal/tenant"
)

// library compiles a small shared object at path; text goes into its read-only data.
func library(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("cc", "-shared", "-fPIC", "-xc", "-", "-o", path)
	cmd.Stdin = strings.NewReader(`const char mark[256] = "` + text + `"; int f(void) { return mark[0]; }`)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

func TestAll(t *testing.T) {
	root := t.TempDir()
	dirs := DefaultDirs()
	library(t, root+"/opt/compat/libcuda.so.1", "vendor")
	library(t, root+"/ours/libcuda.so.1", tenant.SliceMark+"/dev/shm/tranche/abc")
	library(t, root+"/unpatched/libcuda.so.1", tenant.SliceMark)
	library(t, root+dirs[1]+"/libcuda.so.1", "vendor")
	if err := os.MkdirAll(root+"/text", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(root+"/text/libcuda.so.1", []byte("not a library"), 0o644); err != nil {
		t.Fatal(err)
	}
	f := Finder{Root: root, LibraryPath: "/text:/ours:unpatched:/opt/compat", Cwd: "/"}
	want := []Library{
		{Path: "/ours/libcuda.so.1", Ours: true, Slice: "/dev/shm/tranche/abc"},
		{Path: "/unpatched/libcuda.so.1", Ours: true, Slice: tenant.DirDefault},
		{Path: "/opt/compat/libcuda.so.1"},
		{Path: dirs[1] + "/libcuda.so.1"},
	}
	if got := f.All("libcuda.so.1"); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
	if got := f.All("libnvidia-ml.so.1"); got != nil {
		t.Errorf("found %+v", got)
	}
}

// The real ldconfig makes a cache, ours replaces two names in it; ldconfig -p and the parser agree on the result.
func TestReplaceInCache(t *testing.T) {
	ldconfig := "/sbin/ldconfig"
	if _, err := os.Stat(ldconfig); err != nil {
		t.Skip("no ldconfig")
	}
	dir := t.TempDir()
	for _, name := range []string{"libcuda.so.1", "libcuda.so.9", "liba.so", "libzz.so.10", "libzz.so.9"} {
		path := filepath.Join(dir, name)
		library(t, path, "x")
	}
	conf := filepath.Join(dir, "conf")
	if err := os.WriteFile(conf, []byte(dir+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	cache := filepath.Join(dir, "cache")
	if out, err := exec.Command(ldconfig, "-X", "-C", cache, "-f", conf).CombinedOutput(); err != nil {
		t.Skipf("ldconfig: %v: %s", err, out)
	}
	data, err := os.ReadFile(cache)
	if err != nil {
		t.Fatal(err)
	}
	before := ParseCache(data)
	if len(before) < 5 {
		t.Fatalf("parsed %d entries", len(before))
	}
	ours := map[string]string{"libcuda.so.1": "/s/lib/libcuda.so.1", "libcuda.so": "/s/lib/libcuda.so"}
	changed := ReplaceInCache(data, ours)
	want := map[string]string{}
	for _, e := range before {
		if _, ok := want[e.Name]; !ok {
			want[e.Name] = e.Path
		}
	}
	for name, path := range ours {
		want[name] = path
	}
	got := map[string]string{}
	for i, e := range ParseCache(changed) {
		if _, ok := got[e.Name]; !ok {
			got[e.Name] = e.Path
		}
		if all := ParseCache(changed); i > 0 && compareNames(all[i-1].Name, e.Name) < 0 {
			t.Errorf("%s stands before %s", all[i-1].Name, e.Name)
		}
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
	if err := os.WriteFile(cache, changed, 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(ldconfig, "-p", "-C", cache).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "libcuda.so.1 (libc6,x86-64) => /s/lib/libcuda.so.1") &&
		!strings.Contains(string(out), "libcuda.so.1 (libc6,AArch64) => /s/lib/libcuda.so.1") {
		t.Errorf("ldconfig -p: %v\n%s", err, out)
	}
}

// No cache content makes the parser fail.
func FuzzParseCache(f *testing.F) {
	if data, err := os.ReadFile(CachePath); err == nil {
		f.Add(data[:min(len(data), 4096)])
	}
	f.Add([]byte(cacheMagic + strings.Repeat("\xff", 80)))
	f.Fuzz(func(t *testing.T, data []byte) {
		ParseCache(data)
		ReplaceInCache(data, map[string]string{"a": "b"})
	})
}

// Entries of every ABI, as ldconfig writes them: the machine's own, 32-bit x86, aarch64 and others.
func TestParseCacheAll(t *testing.T) {
	entries := []CacheEntry{
		{Name: "libcuda.so.1", Path: "/usr/lib/x86_64-linux-gnu/libcuda.so.1", flags: 0x0303},
		{Name: "libcuda.so.1", Path: "/usr/lib/i386-linux-gnu/libcuda.so.1", flags: 0x0003},
		{Name: "libcuda.so.1", Path: "/usr/lib/aarch64-linux-gnu/libcuda.so.1", flags: 0x0a03},
		{Name: "libcuda.so.1", Path: "/usr/libx32/libcuda.so.1", flags: 0x0803},
	}
	data := writeCache(append([]byte(cacheMagic), make([]byte, headerSize)...), entries, nil)
	got := ParseCacheAll(append([]byte("ld.so-1.7.0\x00 the older format, which is passed by"), data...))
	if !reflect.DeepEqual(got, entries) {
		t.Errorf("%+v", got)
	}
	var arches []elf.Machine
	for _, e := range got {
		arches = append(arches, e.Arch())
	}
	if want := []elf.Machine{elf.EM_X86_64, elf.EM_386, elf.EM_AARCH64, elf.EM_NONE}; !reflect.DeepEqual(arches, want) {
		t.Errorf("%v, want %v", arches, want)
	}
}

// Whatever the cache holds: what ReplaceInCache writes can be read again and leads to the new path
// alone.
func FuzzReplaceInCache(f *testing.F) {
	head := append([]byte(cacheMagic), make([]byte, headerSize)...)
	entries := []CacheEntry{{Name: "libcuda.so.1", Path: "/lib/libcuda.so.1", flags: abiFlag(), hwcap: 1 << 62}, {Name: "liba", Path: "/lib/liba"}}
	f.Add(writeCache(head, entries, []string{"x86-64-v3"}))
	f.Add(writeCache(head, nil, nil))
	f.Add([]byte(cacheMagic))
	f.Fuzz(func(t *testing.T, data []byte) {
		changed := ReplaceInCache(data, map[string]string{"libcuda.so.1": "/ours"})
		if changed == nil {
			return
		}
		var paths []string
		for _, e := range ParseCache(changed) {
			if e.Name == "libcuda.so.1" {
				paths = append(paths, e.Path)
			}
		}
		if !reflect.DeepEqual(paths, []string{"/ours"}) {
			t.Errorf("%v after the change", paths)
		}
	})
}
