// Package cudart runs NVIDIA's own CUDA runtime (11.8 and 12.4) over our library, in front of real
// drivers and of the simulated one. The runtime gets every function by cuGetProcAddress.
package cudart

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"tranche.dev/tranche/internal/tenant"
	"tranche.dev/tranche/test/fixture"
)

var runtimes = []string{"cudart11", "cudart12"}

// lookup is one line of the library's trace for a cuGetProcAddress that found something.
var lookup = regexp.MustCompile(`cuGetProcAddress\((\w+)\): (our \w+|the driver's)`)

// traced runs the runtime's program over a slice and returns its output and the trace.
func traced(t *testing.T, s fixture.Slice, env []string, runtime string) (out, trace string) {
	t.Helper()
	program := fixture.Compile(t, "test/cudart/testdata/runtime.c", "-ldl")
	path := filepath.Join(t.TempDir(), "trace")
	env = append(append(s.Env(), "TRANCHE_TRACE="+path), env...)
	r := fixture.Run(t, "", env, program, fixture.NVIDIA(t, runtime, "libcudart.so"))
	if r.Code != 0 {
		t.Fatalf("exit %d\n%s%s", r.Code, r.Stdout, r.Stderr)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return r.Stdout, string(b)
}

// checkLookups: the runtime asked for hundreds of functions and got ours where we have them.
func checkLookups(t *testing.T, trace string) {
	t.Helper()
	found := lookup.FindAllStringSubmatch(trace, -1)
	ours := map[string]bool{}
	for _, m := range found {
		if symbol, ok := strings.CutPrefix(m[2], "our "); ok {
			ours[symbol] = true
			if symbol != m[1] && !strings.HasPrefix(symbol, m[1]+"_") {
				t.Errorf("asked for %s, got our %s", m[1], symbol)
			}
		} else if m[1] == "cuMemAlloc" || m[1] == "cuLaunchKernel" {
			t.Errorf("asked for %s, got the driver's", m[1])
		}
	}
	t.Logf("%d look-ups found, %d functions of ours", len(found), len(ours))
	if len(found) < 300 {
		t.Errorf("%d look-ups, want at least 300", len(found))
	}
	for _, symbol := range []string{"cuMemAlloc_v2", "cuMemFree_v2", "cuMemGetInfo_v2", "cuLaunchKernel",
		"cuGraphLaunch", "cuMemAllocAsync", "cuDevicePrimaryCtxRetain"} {
		if !ours[symbol] {
			t.Errorf("the runtime did not get our %s", symbol)
		}
	}
}

// Without a GPU the runtime loads all of the driver's functions and reports NVIDIA's error.
func TestRealDriver(t *testing.T) {
	for _, runtime := range runtimes {
		for _, driver := range fixture.Drivers {
			t.Run(runtime+"_"+driver, func(t *testing.T) {
				s := fixture.NewSlice(t, fixture.Build("lib"), filepath.Dir(fixture.NVIDIA(t, driver, "libcuda.so.1")))
				out, trace := traced(t, s, nil, runtime)
				version := map[string]int{"535": 12020, "550": 12040}[driver]
				if want := fmt.Sprintf("cudaDriverGetVersion 0 %d\ncudaGetDeviceCount 100 ", version); !strings.HasPrefix(out, want) {
					t.Errorf("got\n%swant\n%s", out, want)
				}
				checkLookups(t, trace)
			})
		}
	}
}

// Over the simulated driver the runtime finds the slice's GPU. How far it gets then depends on
// tables that NVIDIA does not document (docs/export-tables.md): it may stop with an error, but it
// does not crash, and what it allocates is charged.
func TestSimulatedDriver(t *testing.T) {
	const limit = 2 << 30
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			env, gpu := fixture.NewSim(t, limit)
			s := fixture.NewSlice(t, fixture.Build("lib"), fixture.Build("sim"), gpu)
			out, trace := traced(t, s, env, runtime)
			t.Logf("\n%s", out)
			if !strings.HasPrefix(out, "cudaDriverGetVersion 0 12040\ncudaGetDeviceCount ") {
				t.Errorf("got\n%s", out)
			}
			checkLookups(t, trace)
			if !strings.Contains(trace, "cuGetExportTable(") {
				t.Error("the trace does not show the runtime's private tables")
			}
			if strings.Contains(out, "cudaMalloc 0\n") {
				charged(t, s.Dir, out, limit)
			}
		})
	}
}

// charged: the program's 64 MiB were in the ledger, the slice's limit is what it saw, and more than
// the limit was refused (cudaErrorMemoryAllocation is 2).
func charged(t *testing.T, dir, out string, limit uint64) {
	t.Helper()
	ledger, err := tenant.OpenLedger(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer ledger.Close()
	if len(ledger.Slots()) != 1 {
		t.Errorf("%d processes in the ledger, want the one that ran", len(ledger.Slots()))
	}
	for _, want := range []string{fmt.Sprintf(" %d\n", limit>>20), "cudaMalloc 4 TiB 2\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}
