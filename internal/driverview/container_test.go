package driverview_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"tranche.dev/tranche/internal/assets"
	"tranche.dev/tranche/internal/driverview"
	"tranche.dev/tranche/internal/simroot"
	"tranche.dev/tranche/internal/tenant"
	"tranche.dev/tranche/test/fixture"
)

// container is a root with a C library and little else, which mounts and a chroot in a mount
// namespace of its own turn into what a container runtime makes of a view.
type container struct {
	root   string
	mounts []driverview.Mount
	env    map[string]string
}

// newContainer makes the root of an image that was never meant for GPUs. It skips the test where
// that takes rights that are not there.
func newContainer(t *testing.T, view *driverview.View) *container {
	t.Helper()
	if out, err := exec.Command("unshare", "--mount", "true").CombinedOutput(); err != nil {
		t.Skipf("needs a mount namespace of its own (root): %v: %s", err, out)
	}
	if assets.Version() == "" {
		t.Skip("built without assets; run `make build` first")
	}
	c := &container{root: t.TempDir(), mounts: view.Mounts(), env: view.Env(false)}
	for _, dir := range []string{"usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/bin", "etc", "proc", "dev"} {
		if err := os.MkdirAll(filepath.Join(c.root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for link, target := range map[string]string{"lib": "usr/lib", "lib64": "usr/lib64", "bin": "usr/bin"} {
		if err := os.Symlink(target, filepath.Join(c.root, link)); err != nil {
			t.Fatal(err)
		}
	}
	libs := "/lib/x86_64-linux-gnu/"
	for from, to := range map[string]string{"/lib64/ld-linux-x86-64.so.2": "usr/lib64/", libs + "libc.so.6": "usr" + libs, libs + "libdl.so.2": "usr" + libs,
		libs + "libpthread.so.0": "usr" + libs, libs + "libm.so.6": "usr" + libs, libs + "librt.so.1": "usr" + libs,
		fixture.Compile(t, "test/loader/testdata/probe.c", "-ldl"): "usr/bin/"} {
		data, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(filepath.Join(c.root, to, filepath.Base(from)), data, 0o755)
		}
		if err != nil {
			t.Skip("not a root of Debian's kind: ", err)
		}
	}
	for _, dir := range []string{"/proc", "/dev"} {
		c.mounts = append(c.mounts, driverview.Mount{HostPath: dir, ContainerPath: dir})
	}
	return c
}

// run runs a program in the container and returns its standard output.
func (c *container) run(t *testing.T, env map[string]string, args ...string) string {
	t.Helper()
	script := []string{"set -eu", "mount --make-rprivate /"}
	for _, m := range c.mounts {
		to := filepath.Join(c.root, m.ContainerPath)
		prepare := "mkdir -p " + to
		if info, err := os.Stat(m.HostPath); err == nil && !info.IsDir() {
			prepare = fmt.Sprintf("mkdir -p %s; [ -e %s ] || : >%[2]s", filepath.Dir(to), to)
		}
		script = append(script, prepare, fmt.Sprintf("mount --rbind %s %s", m.HostPath, to))
		if m.ReadOnly {
			script = append(script, "mount -o remount,bind,ro "+to)
		}
	}
	script = append(script, fmt.Sprintf(`exec chroot %s "$@"`, c.root))
	cmd := exec.Command("unshare", append([]string{"--mount", "sh", "-c", strings.Join(script, "\n"), "sh"}, args...)...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	for k, v := range env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	out, err := cmd.Output()
	if err != nil {
		var said []byte
		if exit, ok := err.(*exec.ExitError); ok {
			said = exit.Stderr
		}
		t.Fatalf("%v: %v\n%s%s", args, err, out, said)
	}
	// The run path is padded with slashes.
	text := string(out)
	for strings.Contains(text, "//") {
		text = strings.ReplaceAll(text, "//", "/")
	}
	return text
}

func lines(l ...string) string { return strings.Join(l, "\n") + "\n" }

func put(t *testing.T, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(to), 0o755)
	}
	if err == nil {
		err = os.WriteFile(to, data, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func build(t *testing.T, root string) *driverview.Set {
	t.Helper()
	if assets.Version() == "" {
		t.Skip("built without assets; run `make build` first")
	}
	b, err := driverview.New(driverview.Config{Root: driverview.Root{Dir: root}, Base: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	set, err := b.Build()
	if err != nil {
		t.Fatalf("%v\n%s", err, set.Report.String())
	}
	return set
}

// In a container the loader of an ordinary program takes our libraries over NVIDIA's own, by each
// name, and with whatever LD_LIBRARY_PATH.
func TestContainerWithNVIDIA(t *testing.T) {
	versions := map[string]string{"535": "535.261.03", "550": "550.163.01"}
	for _, release := range fixture.Drivers {
		t.Run(release, func(t *testing.T) {
			root := t.TempDir()
			for _, stem := range []string{"libcuda", "libnvidia-ml"} {
				put(t, fixture.NVIDIA(t, release, stem+".so.1"), filepath.Join(root, "usr/lib/x86_64-linux-gnu", stem+".so."+versions[release]))
			}
			put(t, fixture.NVIDIA(t, release, "nvidia-smi"), filepath.Join(root, "usr/bin/nvidia-smi"))
			set := build(t, root)
			if set.Version != versions[release] {
				t.Errorf("version %s", set.Version)
			}
			c := newContainer(t, set.Share)
			for _, env := range []map[string]string{c.env, {}, {"LD_LIBRARY_PATH": "/opt/conda/lib"}} {
				front := "/usr/local/nvidia/lib64/"
				if env["LD_LIBRARY_PATH"] != c.env["LD_LIBRARY_PATH"] {
					front = "/lib/x86_64-linux-gnu/"
				}
				for _, f := range []struct{ stem, hooked, unhooked string }{
					{"libcuda", "cuMemAlloc_v2", "cuDriverGetVersion"}, {"libnvidia-ml", "nvmlDeviceGetMemoryInfo", "nvmlErrorString"}} {
					for _, name := range []string{f.stem + ".so.1", f.stem + ".so"} {
						got := c.run(t, env, "/usr/bin/probe", "open="+name+",n", "sym="+f.hooked, "sym="+f.unhooked, "again="+f.stem+".so.1")
						want := lines(f.hooked+" "+front+name, f.unhooked+" /usr/local/nvidia/driver/"+f.stem+"-driver.so.1", "again same")
						if got != want {
							t.Errorf("%v, %s: got\n%swant\n%s", env, name, got, want)
						}
					}
				}
			}
		})
	}
}

// What the driver opens by name is found beside it, without any LD_LIBRARY_PATH.
func TestContainerFindsCompiler(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "usr/lib/x86_64-linux-gnu")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for soname, source := range map[string]string{
		"libcuda.so.1":      `#include <dlfcn.h>` + "\n" + `int open_jit(int x) { return dlopen("libnvidia-ptxjitcompiler.so.1", 2) ? 7 : x; }`,
		"libnvidia-ml.so.1": "", "libnvidia-ptxjitcompiler.so.1": "",
	} {
		file := filepath.Join(dir, strings.TrimSuffix(soname, "1")+"999.1")
		cmd := exec.Command("gcc", "-shared", "-fPIC", "-xc", "-", "-Wl,-soname,"+soname, "-o", file)
		cmd.Stdin = strings.NewReader(source)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	c := newContainer(t, build(t, root).Share)
	if got, want := c.run(t, nil, "/usr/bin/probe", "open=libcuda.so.1,n", "call=open_jit,1"), "open_jit 7\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A simulated host from its spec to a container: the slice's limits hold in it, and NVIDIA's own
// nvidia-smi shows them.
func TestContainerOnSimulatedHost(t *testing.T) {
	if assets.Version() == "" {
		t.Skip("built without assets; run `make build` first")
	}
	top := t.TempDir()
	sim, err := simroot.Make(top, "a100-80g:2")
	if err != nil {
		t.Fatal(err)
	}
	put(t, fixture.NVIDIA(t, "550", "nvidia-smi"), filepath.Join(sim.Root, "usr/bin/nvidia-smi"))
	set := build(t, sim.Root)
	if set.Version != sim.Version {
		t.Errorf("version %s, want %s", set.Version, sim.Version)
	}
	c := newContainer(t, set.Share)
	c.mounts = append(c.mounts, driverview.Mount{HostPath: sim.Machine, ContainerPath: sim.Machine})
	uuid := uuidOf(t, c)

	slice := filepath.Join(top, "slice")
	if err := os.Mkdir(slice, 0o755); err != nil {
		t.Fatal(err)
	}
	limits, err := tenant.CreateLimits(slice, "test", []tenant.Device{{UUID: uuid, MemoryLimit: 2 << 30, MemoryLimited: true, Cores: 30}})
	if err != nil {
		t.Fatal(err)
	}
	limits.Close()
	if err := tenant.CreateLedger(slice); err != nil {
		t.Fatal(err)
	}
	c.mounts = append(c.mounts, driverview.Mount{HostPath: slice, ContainerPath: tenant.DirDefault})
	for _, env := range []map[string]string{c.env, {"LD_LIBRARY_PATH": "/opt/conda/lib"}} {
		got := c.run(t, env, "/usr/bin/probe", "open=libcuda.so.1,n", "context", "alloc=1536", "alloc=1024", "alloc=256")
		if want := lines("context 0", "alloc 1536 0", "alloc 1024 2", "alloc 256 0"); got != want {
			t.Errorf("got\n%swant\n%s", got, want)
		}
		got = c.run(t, env, "/usr/bin/nvidia-smi", "--query-gpu=uuid,memory.total", "--format=csv,noheader")
		if want := uuid + ", 2048 MiB\n"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// uuidOf asks the machine for its second GPU, past our libraries.
func uuidOf(t *testing.T, c *container) string {
	t.Helper()
	view := c.mounts[slices.IndexFunc(c.mounts, func(m driverview.Mount) bool { return m.ContainerPath == driverview.MountPath })].HostPath
	beyond := *c
	beyond.mounts = append(slices.Clone(c.mounts), driverview.Mount{HostPath: view + "/driver/libnvidia-ml-driver.so.1", ContainerPath: "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"})
	out := beyond.run(t, nil, "/usr/bin/nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
	uuids := strings.Fields(out)
	if len(uuids) != 2 {
		t.Fatalf("two GPUs expected: %q", out)
	}
	return uuids[1]
}
