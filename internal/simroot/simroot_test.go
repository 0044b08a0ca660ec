package simroot

import (
	"debug/elf"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/assets"
)

func needAssets(t *testing.T) {
	t.Helper()
	if assets.Version() == "" {
		t.Skip("built without assets; run `make build` first")
	}
}

func listing(t *testing.T, dir string) string {
	t.Helper()
	var lines []string
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		line := rel + " " + info.Mode().String()
		if target, err := os.Readlink(path); err == nil {
			line = rel + " -> " + target
		}
		lines = append(lines, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	sort.Strings(lines)
	return strings.Join(lines, "\n")
}

func TestMake(t *testing.T) {
	needAssets(t)
	dir := t.TempDir()
	spec := filepath.Join(dir, "spec.yaml")
	if err := os.WriteFile(spec, []byte("driver_version: 535.104.05\ngpus:\n- {model: t4}\n- {model: a100-80g, count: 2}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	host := filepath.Join(dir, "host")
	sim, err := Make(host, spec)
	if err != nil {
		t.Fatal(err)
	}
	device := "Dcrw-rw-rw-"
	if sim.NoDevices != nil {
		device = "-rw-r--r--"
	}
	lib := "root/usr/lib/" + map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH] + "/"
	want := strings.Join([]string{
		"machine/spec -rw-r--r--", "machine/state -rw-rw-rw-",
		"root/dev/nvidia-uvm " + device, "root/dev/nvidia-uvm-tools " + device,
		"root/dev/nvidia0 " + device, "root/dev/nvidia1 " + device, "root/dev/nvidia2 " + device, "root/dev/nvidiactl " + device,
		"root/proc/driver/nvidia/version -rwxr-xr-x",
		lib + "libcuda.so -> libcuda.so.1", lib + "libcuda.so.1 -> libcuda.so.535.104.05", lib + "libcuda.so.535.104.05 -rwxr-xr-x",
		lib + "libnvidia-ml.so -> libnvidia-ml.so.1", lib + "libnvidia-ml.so.1 -> libnvidia-ml.so.535.104.05", lib + "libnvidia-ml.so.535.104.05 -rwxr-xr-x",
	}, "\n")
	if got := listing(t, host); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if sim.Version != "535.104.05" || sim.GPUs != 3 || sim.Machine != host+"/machine" || sim.Root != host+"/root" {
		t.Errorf("%+v", sim)
	}
	file := filepath.Join(host, lib, "libcuda.so.535.104.05")
	data, err := os.ReadFile(file)
	if err != nil || !strings.Contains(string(data), "@@TRANCHE_SIM@@"+sim.Machine+"\x00") {
		t.Errorf("the machine's path is not in %s: %v", file, err)
	}
	if obj, err := elf.Open(file); err != nil {
		t.Error(err)
	} else if name, _ := obj.DynString(elf.DT_SONAME); len(name) != 1 || name[0] != "libcuda.so.1" {
		t.Errorf("SONAME %v", name)
	}

	before := map[string]unix.Stat_t{}
	each(t, host, func(path string, st unix.Stat_t) { before[path] = st })
	again, err := Make(host, spec)
	if err != nil || again.Root != sim.Root || again.Machine != sim.Machine || again.Version != sim.Version || again.GPUs != sim.GPUs ||
		(again.NoDevices == nil) != (sim.NoDevices == nil) {
		t.Errorf("%+v, %v", again, err)
	}
	each(t, host, func(path string, st unix.Stat_t) {
		if before[path].Ino != st.Ino || before[path].Mtim != st.Mtim && !strings.HasSuffix(path, "/state") {
			t.Errorf("%s was made again", path)
		}
	})
}

func each(t *testing.T, dir string, visit func(string, unix.Stat_t)) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		if !e.IsDir() {
			visit(path, st)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestMakeRefuses(t *testing.T) {
	needAssets(t)
	dir := t.TempDir()
	if _, err := Make(dir, "t4"); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ dir, spec, want string }{
		{dir, "a100-80g", "--sim a100-80g: " + dir + "/machine/spec has another machine; remove " + dir + " or choose another directory"},
		{dir + "/a", "t5", `--sim t5: line 1: gpu: no model 't5'; there are t4, v100-16g, `},
		{dir + "/b", "T4!", `--sim T4!: "T4!" is not MODEL or MODEL:COUNT`},
		{"relative", "t4", `"relative" is not an absolute path`},
		{"/" + strings.Repeat("x", 300), "t4", `is not an absolute path of at most 200 bytes`},
	} {
		if _, err := Make(c.dir, c.spec); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s, %s: %v, want %s", c.dir, c.spec, err, c.want)
		}
		if _, err := os.Stat(filepath.Join(c.dir, "machine/spec")); err == nil && c.dir != dir {
			t.Errorf("%s: a spec was left behind", c.dir)
		}
	}
}

// The directory of a machine that is there already is used where it is.
func TestMakeOverMachine(t *testing.T) {
	needAssets(t)
	first, err := Make(t.TempDir(), "t4")
	if err != nil {
		t.Fatal(err)
	}
	second, err := Make(t.TempDir(), first.Machine)
	if err != nil || second.Machine != first.Machine || second.GPUs != 1 || second.Version != versionDefault {
		t.Errorf("%+v, %v", second, err)
	}
}

func TestVersionIn(t *testing.T) {
	for spec, want := range map[string]string{
		"":                                     versionDefault,
		"driver_version=550.1\ngpu model=t4\n": "550.1",
		"cuda_version=12020 driver_version=535.1.2 # driver_version=1.2\n": "535.1.2",
		"# driver_version=1.2\n": versionDefault,
	} {
		if got := versionIn([]byte(spec)); got != want {
			t.Errorf("%q: %s, want %s", spec, got, want)
		}
	}
}
