package driverview

import (
	"cmp"
	"debug/elf"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"testing"
	"time"

	"tranche.dev/tranche/internal/assets"
	"tranche.dev/tranche/internal/tenant"
	"tranche.dev/tranche/test/fixture"
)

var update = flag.Bool("update", false, "write the answers in testdata/*.txt anew")

// hostMark is in each file of a fake host before its own path, so that a listing can say which file
// lies where.
const hostMark = "@@HOST@@"

// fakeHost makes a host's root from lines:
//
//	/path elf MACHINE [soname=S] [needed=A,B] [interp=P] [abi=M.N.S]
//	/path -> TARGET
//	/path text ...
//	/path cache /PATH[=32] ...
func fakeHost(t testing.TB, lines []string) string {
	t.Helper()
	root := t.TempDir()
	for _, line := range lines {
		f := strings.Fields(line)
		at := filepath.Join(root, f[0])
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		var data []byte
		switch f[1] {
		case "->":
			if err := os.Symlink(f[2], at); err != nil {
				t.Fatal(err)
			}
			continue
		case "elf":
			data = append(fakeObject(t, f[2:]).bytes(), hostMark+f[0]...)
		case "cache":
			entries := map[string]int32{}
			for _, p := range f[2:] {
				p, narrow := strings.CutSuffix(p, "=32")
				entries[p] = map[bool]int32{false: 0x0303, true: 3}[narrow]
			}
			data = ldCache(entries)
		case "text":
			data = []byte(strings.Join(f[2:], " ") + "\n")
		default:
			t.Fatalf("what is %q?", line)
		}
		if err := os.WriteFile(at, data, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func fakeObject(t testing.TB, f []string) object {
	machines := map[string]elf.Machine{"x86-64": elf.EM_X86_64, "aarch64": elf.EM_AARCH64, "i386": elf.EM_386, "ppc64": elf.EM_PPC64}
	o := object{machine: machines[f[0]]}
	if o.machine == elf.EM_NONE {
		t.Fatalf("machine %s", f[0])
	}
	for _, kv := range f[1:] {
		k, v, _ := strings.Cut(kv, "=")
		switch k {
		case "soname":
			o.soname = v
		case "needed":
			o.needed = strings.Split(v, ",")
		case "interp":
			o.interp = v
		case "data":
			o.data = v
		case "abi":
			for n := range strings.SplitSeq(v, ".") {
				i, err := strconv.Atoi(n)
				if err != nil {
					t.Fatal(err)
				}
				o.abi = append(o.abi, uint32(i))
			}
		default:
			t.Fatalf("what is %q?", kv)
		}
	}
	return o
}

// fakeAsset stands for our libraries: only the fields that are written into.
func fakeAsset(name string) ([]byte, error) {
	return []byte("ours " + name + "\x00" + tenant.SliceMark + strings.Repeat("\x00", tenant.SliceField) +
		tenant.RpathMark + strings.Repeat("/", tenant.RpathField)), nil
}

// tree lists a view: links, ours, and for each file the host's path.
func tree(t testing.TB, dir string) string {
	t.Helper()
	var lines []string
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		if e.IsDir() {
			lines = append(lines, rel+"/")
			return nil
		}
		if e.Type()&fs.ModeSymlink != 0 {
			target, err := os.Readlink(path)
			lines = append(lines, rel+" -> "+target)
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		_, from, found := strings.Cut(string(data), hostMark)
		if !found {
			from, _, _ = strings.Cut(string(data), "\x00")
		}
		if strings.HasPrefix(from, elf.ELFMAG) {
			from = "a real file"
		}
		lines = append(lines, rel+" = "+from)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	sort.Strings(lines)
	return strings.Join(lines, "\n") + "\n"
}

// answer is the complete result of a Build as text.
func answer(t testing.TB, set *Set, err error, root string) string {
	var b strings.Builder
	if err != nil {
		fmt.Fprintf(&b, "error: %v\n", err)
	} else {
		fmt.Fprintf(&b, "driver %q, NVML %s\n", set.Version, strings.TrimPrefix(set.NVML, root))
	}
	fmt.Fprintf(&b, "%s", set.Report.String())
	for _, v := range []*View{set.Share, set.Origin} {
		if v == nil {
			continue
		}
		fmt.Fprintf(&b, "\nview %s\n%s", v.Name[:strings.LastIndex(v.Name, "-")], tree(t, v.Dir))
		v.Report.Linked, v.Report.Copied, v.Report.CopiedBytes = 0, 0, 0
		fmt.Fprintf(&b, "\n%s", v.Report.String())
		fmt.Fprintf(&b, "\nmounts\n")
		for _, m := range v.Mounts() {
			fmt.Fprintf(&b, "%s on %s%s\n", strings.Replace(m.HostPath, v.HostDir, "VIEW", 1), m.ContainerPath, map[bool]string{true: " ro"}[m.ReadOnly])
		}
	}
	return b.String()
}

// small is a volume.conf that keeps the listings short.
const small = `{"volume": [
 {"name": "nvidia", "base": "/unused", "components": {"binaries": ["nvidia-smi", "nvidia-debugdump", "gpu-client"],
  "libraries": ["libnvidia-ml.so", "libcuda.so", "libcuda-control.so", "libnvidia-ptxjitcompiler.so", "libnvidia-pkcs11*", "libGLX_nvidia.so", "libGL.so", "libEGL.so", "libnvidia-tls.so", "libdxcore.so"]}},
 {"name": "origin", "base": "/unused", "components": {"binaries": ["nvidia-smi"], "libraries": ["libnvidia-ml.so", "libcuda.so"]}}]}`

// Each scenario is a host and the whole answer: what the views hold, what was left out and why, what
// is mounted.
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			script, want, _ := strings.Cut(string(data), "\n----\n")
			cfg := Config{Base: t.TempDir(), HostBase: "/etc/gpu-manager/vdriver", Arch: elf.EM_X86_64, Asset: fakeAsset}
			if cfg.Volumes, err = ParseVolumes([]byte(small)); err != nil {
				t.Fatal(err)
			}
			var host []string
			usr := false
			for line := range strings.Lines(script) {
				line = strings.TrimSpace(line)
				key, value, _ := strings.Cut(line, " ")
				switch {
				case line == "" || line[0] == '#':
				case key == "kernel":
					cfg.KernelVersion = value
				case key == "arch":
					cfg.Arch = map[string]elf.Machine{"aarch64": elf.EM_AARCH64}[value]
				case key == "usr-only":
					usr = true
				default:
					host = append(host, line)
				}
			}
			root := fakeHost(t, host)
			if cfg.Root = (Root{Dir: root}); usr {
				cfg.Root = Root{Usr: root + "/usr"}
				if cfg.KernelVersion == "" {
					t.Fatal("such a root takes the version from this machine's kernel: name one")
				}
			}
			b, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			set, err := b.Build()
			compare(t, file, script, answer(t, set, err, root), want)
		})
	}
}

func compare(t *testing.T, file, script, got, want string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(script+"\n----\n"+got), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// NVIDIA's real driver 535 as Debian lays it out, with the list for current drivers.
func TestNVIDIARoot(t *testing.T) {
	root := fixture.NVIDIARoot(t)
	const file = "testdata/nvidia535.golden"
	data, err := os.ReadFile(file)
	if err != nil && !*update {
		t.Fatal(err)
	}
	script, want, _ := strings.Cut(string(data), "\n----\n")
	base, err := os.MkdirTemp(filepath.Dir(root), "views") // beside it: hard links
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(base)
	b, err := New(Config{Root: Root{Dir: root}, Base: base, HostBase: "/etc/gpu-manager/vdriver", Arch: elf.EM_X86_64, Asset: fakeAsset})
	if err != nil {
		t.Fatal(err)
	}
	set, err := b.Build()
	// Debian updates the release now and then.
	got := strings.ReplaceAll(answer(t, set, err, root), cmp.Or(set.Version, "no version"), "535.RELEASE")
	compare(t, file, script, got, want)
	at := time.Now()
	again, err := b.Build()
	if err != nil || again.Share.Name != set.Share.Name {
		t.Errorf("%+v, %v", again, err)
	}
	t.Logf("again in %v", time.Since(at))
}

// builder is one over a small host, with what it is made of.
func builder(t testing.TB, lines ...string) (*Builder, string) {
	t.Helper()
	root := fakeHost(t, lines)
	volumes, err := ParseVolumes([]byte(small))
	if err != nil {
		t.Fatal(err)
	}
	b, err := New(Config{Root: Root{Dir: root}, Base: t.TempDir(), Volumes: volumes, Arch: elf.EM_X86_64, Asset: fakeAsset})
	if err != nil {
		t.Fatal(err)
	}
	return b, root
}

func driverFiles(version string) []string {
	return []string{
		"/usr/lib/x86_64-linux-gnu/libcuda.so." + version + " elf x86-64 soname=libcuda.so.1",
		"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so." + version + " elf x86-64 soname=libnvidia-ml.so.1",
		"/usr/lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so." + version + " elf x86-64 soname=libnvidia-ptxjitcompiler.so.1",
	}
}

func TestNew(t *testing.T) {
	base := []Volume{{Name: "origin", Base: "/b"}}
	for _, c := range []struct {
		cfg  Config
		want string
	}{
		{Config{Volumes: base}, `driver view: no volume "nvidia" among those of volume.conf`},
		{Config{Base: "views"}, `driver view: base "views" is not an absolute path`},
		{Config{Arch: elf.EM_PPC64}, `driver view: machine EM_PPC64; x86-64 and aarch64 are known`},
	} {
		if _, err := New(c.cfg); err == nil || err.Error() != c.want {
			t.Errorf("%v, want %s", err, c.want)
		}
	}
	b, err := New(Config{})
	if err != nil || b.cfg.Base != "/etc/gpu-manager/vdriver" || b.cfg.HostBase != b.cfg.Base {
		t.Errorf("%+v, %v", b, err)
	}
}

func TestWithoutAssets(t *testing.T) {
	b, _ := builder(t, driverFiles("535.1.2")...)
	b.cfg.Asset = func(string) ([]byte, error) { return nil, assets.ErrMissing }
	if _, err := b.Build(); !errors.Is(err, assets.ErrMissing) {
		t.Error(err)
	}
}
