// Package loader tests what the dynamic loader makes of our two libraries in front of a driver, in
// every way in which programs are known to open them.
package loader

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"tranche.dev/tranche/internal/tenant"
	"tranche.dev/tranche/test/fixture"
)

// drivers are what the suite runs over: NVIDIA's real libraries, and the simulated ones.
var drivers = append([]string{"sim"}, fixture.Drivers...)

func driverDir(t *testing.T, name string) string {
	t.Helper()
	if name == "sim" {
		return filepath.Dir(fixture.Need(t, fixture.Build("sim", "libcuda.so.1")))
	}
	return filepath.Dir(fixture.NVIDIA(t, name, "libcuda.so.1"))
}

// run runs a program over a slice and returns its output with the two places named: "ours", "driver".
func run(t *testing.T, s fixture.Slice, env []string, program string, ops ...string) string {
	t.Helper()
	r := fixture.Run(t, "", append(s.Env(), env...), program, ops...)
	if r.Code != 0 {
		t.Fatalf("%s %v: exit %d\n%s%s", filepath.Base(program), ops, r.Code, r.Stdout, r.Stderr)
	}
	return strings.NewReplacer(
		s.Driver+"/libcuda-driver.so.1", "driver", s.Driver+"/libnvidia-ml-driver.so.1", "driver",
		s.Lib+"/libcuda.so.1", "ours", s.Lib+"/libcuda.so", "ours",
		s.Lib+"/libnvidia-ml.so.1", "ours", s.Lib+"/libnvidia-ml.so", "ours").Replace(compact(r.Stdout))
}

// compact takes the padding out of the run path: /a/b////c is /a/b/c.
func compact(s string) string {
	for strings.Contains(s, "//") {
		s = strings.ReplaceAll(s, "//", "/")
	}
	return s
}

func want(t *testing.T, got string, lines ...string) {
	t.Helper()
	if expected := strings.Join(lines, "\n") + "\n"; got != expected {
		t.Errorf("got\n%swant\n%s", got, expected)
	}
}

// family is one of the two libraries: a hooked and an unhooked function of it.
type family struct{ name, hooked, unhooked string }

var families = []family{
	{"libcuda", "cuMemAlloc_v2", "cuDriverGetVersion"},
	{"libnvidia-ml", "nvmlDeviceGetMemoryInfo", "nvmlErrorString"},
}

func TestOpenEachName(t *testing.T) {
	probe := fixture.Compile(t, "test/loader/testdata/probe.c", "-ldl")
	for _, driver := range drivers {
		t.Run(driver, func(t *testing.T) {
			s := fixture.NewSlice(t, fixture.Build("lib"), driverDir(t, driver))
			for _, f := range families {
				for _, flags := range []string{"zl", "nl", "zg", "ng", "zd", "nd", "ngd"} {
					for _, order := range [][2]string{{".so.1", ".so"}, {".so", ".so.1"}, {".so.1", ".so.1"}, {".so", ".so"}} {
						first, second := f.name+order[0], f.name+order[1]
						t.Run(first+"_"+flags+"_"+second, func(t *testing.T) {
							got := run(t, s, nil, probe, "open="+first+","+flags, "sym="+f.hooked, "sym="+f.unhooked,
								"again="+second, "open="+second+",z", "sym="+f.hooked, "sym="+f.unhooked)
							want(t, got, f.hooked+" ours", f.unhooked+" driver", "again same",
								f.hooked+" ours", f.unhooked+" driver")
						})
					}
				}
			}
		})
	}
}

// A global open serves every later look-up without a handle; a local one serves none.
func TestGlobalScope(t *testing.T) {
	probe := fixture.Compile(t, "test/loader/testdata/probe.c", "-ldl")
	for _, driver := range drivers {
		t.Run(driver, func(t *testing.T) {
			s := fixture.NewSlice(t, fixture.Build("lib"), driverDir(t, driver))
			for _, f := range families {
				want(t, run(t, s, nil, probe, "open="+f.name+".so.1,ng", "default="+f.hooked, "default="+f.unhooked),
					f.hooked+" ours", f.unhooked+" driver")
				want(t, run(t, s, nil, probe, "open="+f.name+".so.1,nl", "default="+f.hooked), f.hooked+": not found")
			}
		})
	}
}

func TestBindNow(t *testing.T) {
	probe := fixture.Compile(t, "test/loader/testdata/probe.c", "-ldl")
	for _, driver := range drivers {
		t.Run(driver, func(t *testing.T) {
			s := fixture.NewSlice(t, fixture.Build("lib"), driverDir(t, driver))
			for _, f := range families {
				want(t, run(t, s, []string{"LD_BIND_NOW=1"}, probe, "open="+f.name+".so,z", "sym="+f.hooked, "sym="+f.unhooked),
					f.hooked+" ours", f.unhooked+" driver")
			}
		})
	}
}

// Linked as with the toolkit's stub: the file has the driver's functions and its SONAME.
func TestDirectLink(t *testing.T) {
	programs := map[string][]string{ // with what each must print
		"libcuda":      {"cuInit ours\n", "cuMemAlloc_v2 ours\n", "cuDriverGetVersion driver\n", "version 1\n"},
		"libnvidia-ml": {"nvmlInit ours\n", "nvmlDeviceGetMemoryInfo ours\n", "nvmlErrorString driver\n", "text 1\n"},
	}
	sources := map[string]string{"libcuda": "linked.c", "libnvidia-ml": "linked_nvml.c"}
	for _, driver := range drivers {
		for name, lines := range programs {
			t.Run(driver+"_"+name, func(t *testing.T) {
				dir := driverDir(t, driver)
				s := fixture.NewSlice(t, fixture.Build("lib"), dir)
				for _, flags := range [][]string{{"-Wl,-z,lazy"}, {"-Wl,-z,now"}} {
					program := fixture.Compile(t, "test/loader/testdata/"+sources[name],
						append(flags, filepath.Join(dir, name+".so.1"), "-ldl", "-Wl,--allow-shlib-undefined")...)
					for _, env := range [][]string{nil, {"LD_BIND_NOW=1"}} {
						got := run(t, s, env, program)
						for _, line := range lines {
							if !strings.Contains(got, line) {
								t.Errorf("flags %v, env %v: no %q in\n%s", flags, env, line, got)
							}
						}
					}
				}
			})
		}
	}
}

// The oldest nvmlInit as the first call of all: over a simulated driver it works, and shows the slice;
// over a real one it gives that driver's own answer.
func TestPlainNVMLInitFirst(t *testing.T) {
	probe := fixture.Compile(t, "test/loader/testdata/probe.c", "-ldl")
	ops := []string{"call=nvmlInit", "call=nvmlShutdown", "call=nvmlShutdown"}
	env, gpu := fixture.NewSim(t, 256<<20)
	s := fixture.NewSlice(t, fixture.Build("lib"), driverDir(t, "sim"), gpu)
	for _, name := range []string{"libnvidia-ml.so.1", "libnvidia-ml.so"} {
		const uninitialized = "1"
		want(t, run(t, s, env, probe, append([]string{"open=" + name + ",n"}, ops...)...),
			"nvmlInit 0", "nvmlShutdown 0", "nvmlShutdown "+uninitialized)
	}
	for _, driver := range fixture.Drivers {
		dir := driverDir(t, driver)
		s := fixture.NewSlice(t, fixture.Build("lib"), dir)
		direct := fixture.Run(t, "", nil, probe, append([]string{"open=" + filepath.Join(dir, "libnvidia-ml.so.1") + ",n"}, ops...)...)
		if got := run(t, s, nil, probe, append([]string{"open=libnvidia-ml.so.1,n"}, ops...)...); got != direct.Stdout {
			t.Errorf("driver %s over our library\n%sthe driver itself\n%s", driver, got, direct.Stdout)
		}
	}
}

// A second copy of everything, in a namespace of its own, is ours as well.
func TestNamespace(t *testing.T) {
	probe := fixture.Compile(t, "test/loader/testdata/probe.c", "-ldl")
	for _, driver := range drivers {
		t.Run(driver, func(t *testing.T) {
			s := fixture.NewSlice(t, fixture.Build("lib"), driverDir(t, driver))
			for _, f := range families {
				want(t, run(t, s, nil, probe, "open="+f.name+".so.1,n", "sym="+f.hooked, "mopen="+f.name+".so.1", "sym="+f.hooked,
					"sym="+f.unhooked), f.hooked+" ours", f.hooked+" ours", f.unhooked+" driver")
			}
		})
	}
}

// What the driver says when there is no GPU reaches the program unchanged.
func TestNoDevice(t *testing.T) {
	probe := fixture.Compile(t, "test/loader/testdata/probe.c", "-ldl")
	for _, driver := range fixture.Drivers {
		t.Run(driver, func(t *testing.T) {
			dir := driverDir(t, driver)
			s := fixture.NewSlice(t, fixture.Build("lib"), dir)
			for _, ops := range [][]string{
				{"libcuda.so.1", "call=cuInit,0", "call=cuInit,0", "call=cuCtxSynchronize", "call=cuDeviceGetCount", "call=cuInit,77"},
				{"libnvidia-ml.so.1", "call=nvmlInit_v2", "call=nvmlShutdown", "call=nvmlInit"},
			} {
				direct := fixture.Run(t, "", nil, probe, append([]string{"open=" + filepath.Join(dir, ops[0]) + ",n"}, ops[1:]...)...)
				got := run(t, s, nil, probe, append([]string{"open=" + ops[0] + ",n"}, ops[1:]...)...)
				if got != direct.Stdout || strings.Contains(got, " 0\n") && ops[0] == "libcuda.so.1" {
					t.Errorf("over our library\n%sthe driver itself\n%s", got, direct.Stdout)
				}
			}
		})
	}
}

// Neither library loads the other one's driver, whichever comes first.
func TestBothLibraries(t *testing.T) {
	probe := fixture.Compile(t, "test/loader/testdata/probe.c", "-ldl")
	cuda := []string{"open=libcuda.so.1,n", "call=cuInit,0", "sym=cuMemAlloc_v2", "sym=cuDriverGetVersion"}
	nvml := []string{"open=libnvidia-ml.so.1,n", "call=nvmlInit_v2", "sym=nvmlDeviceGetMemoryInfo", "sym=nvmlErrorString"}
	for _, driver := range drivers {
		t.Run(driver, func(t *testing.T) {
			var env []string
			var gpus []tenant.Device
			lines := []string{"cuMemAlloc_v2 ours\n", "cuDriverGetVersion driver\n", "nvmlDeviceGetMemoryInfo ours\n", "nvmlErrorString driver\n"}
			if driver == "sim" {
				var gpu tenant.Device
				env, gpu = fixture.NewSim(t, 256<<20)
				gpus = append(gpus, gpu)
				lines = append(lines, "cuInit 0\n", "nvmlInit_v2 0\n")
			}
			s := fixture.NewSlice(t, fixture.Build("lib"), driverDir(t, driver), gpus...)
			first := run(t, s, env, probe, append(append([]string{}, cuda...), nvml...)...)
			second := run(t, s, env, probe, append(append([]string{}, nvml...), cuda...)...)
			for _, got := range []string{first, second} {
				for _, line := range lines {
					if !strings.Contains(got, line) {
						t.Errorf("no %q in\n%s", line, got)
					}
				}
			}
			if a, b := results(first), results(second); a != b {
				t.Errorf("CUDA first: %s; NVML first: %s", a, b)
			}
		})
	}
}

// results are the lines of the two inits, in a fixed order.
func results(out string) string {
	var cuda, nvml string
	for line := range strings.Lines(out) {
		switch {
		case strings.HasPrefix(line, "cuInit "):
			cuda = strings.TrimSpace(line)
		case strings.HasPrefix(line, "nvmlInit_v2 "):
			nvml = strings.TrimSpace(line)
		}
	}
	return fmt.Sprintf("%s, %s", cuda, nvml)
}

// Two copies of our library in one process, over two copies of the driver, share the slice's limit.
func TestNamespacesCountTogether(t *testing.T) {
	probe := fixture.Compile(t, "test/loader/testdata/probe.c", "-ldl")
	env, gpu := fixture.NewSim(t, 256<<20)
	s := fixture.NewSlice(t, fixture.Build("lib"), driverDir(t, "sim"), gpu)
	const outOfMemory = "2"
	want(t, run(t, s, env, probe, "open=libcuda.so.1,n", "context", "alloc=150",
		"mopen=libcuda.so.1", "context", "alloc=150", "alloc=100", "alloc=10"),
		"context 0", "alloc 150 0", "context 0", "alloc 150 "+outOfMemory, "alloc 100 0", "alloc 10 "+outOfMemory)
}
