// Package elf reads the files that go into users' processes and onto users' machines, and holds
// them to what old systems can load.
package elf

import (
	"debug/elf"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"tranche.dev/tranche/test/fixture"
)

// The oldest C library that everything must load on, by architecture: CentOS 7 and, for arm64,
// the first one that the architecture has had.
const glibcFloor = "2.17"

// maxTLS is what one library may take of the static thread-local space that dlopen has left:
// glibc keeps 1,664 bytes for all libraries opened later.
const maxTLS = 64

func files(t *testing.T) (libraries, programs []string) {
	t.Helper()
	for _, f := range []string{"lib/libcuda.so.1", "lib/libnvidia-ml.so.1", "sim/libcuda.so.1", "sim/libnvidia-ml.so.1", "sim/libcuda-null.so.1"} {
		libraries = append(libraries, fixture.Need(t, fixture.Build(f)))
	}
	for _, f := range []string{"bin/nvmlprobe", "bin/gpuload", "bin/calibrate", "sim/simctl"} {
		programs = append(programs, fixture.Need(t, fixture.Build(f)))
	}
	return libraries, programs
}

func open(t *testing.T, path string) *elf.File {
	t.Helper()
	f, err := elf.Open(path)
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func name(path string) string {
	return filepath.Join(filepath.Base(filepath.Dir(path)), filepath.Base(path))
}

var glibcVersion = regexp.MustCompile(`^GLIBC_(\d+)\.(\d+)`)

// newer is true of a GLIBC symbol version after floor.
func newer(version, floor string) bool {
	m := glibcVersion.FindStringSubmatch(version)
	if m == nil {
		return strings.HasPrefix(version, "GLIBC_") // GLIBC_PRIVATE, GLIBC_ABI_...
	}
	f := glibcVersion.FindStringSubmatch("GLIBC_" + floor)
	number := func(s string) int { n, _ := strconv.Atoi(s); return n }
	if number(m[1]) != number(f[1]) {
		return number(m[1]) > number(f[1])
	}
	return number(m[2]) > number(f[2])
}

func checkGlibc(t *testing.T, path string) {
	t.Helper()
	symbols, err := open(t, path).ImportedSymbols()
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	versions := 0
	for _, s := range symbols {
		if s.Version != "" {
			versions++
		}
		if newer(s.Version, glibcFloor) {
			t.Errorf("%s wants %s@%s, newer than %s", name(path), s.Name, s.Version, glibcFloor)
		}
	}
	if len(symbols) > 3 && versions == 0 {
		t.Errorf("%s: no symbol versions at all", name(path))
	}
}

func TestGlibcFloor(t *testing.T) {
	libraries, programs := files(t)
	for _, path := range append(libraries, programs...) {
		checkGlibc(t, path)
	}
}

func TestNewerIsFound(t *testing.T) {
	for version, want := range map[string]bool{
		"GLIBC_2.2.5": false, "GLIBC_2.17": false, "GLIBC_2.18": true, "GLIBC_2.34": true,
		"GLIBC_3.0": true, "GLIBC_PRIVATE": true, "": false,
	} {
		if got := newer(version, glibcFloor); got != want {
			t.Errorf("newer(%q) = %v", version, got)
		}
	}
}

// TestArm64 holds the cross-compiled libraries to the same floor (`make arm64`).
func TestArm64(t *testing.T) {
	var found int
	for _, pattern := range []string{"arm64/lib/*.so.1", "arm64/sim/*.so.1"} {
		paths, err := filepath.Glob(fixture.Build(pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			found++
			if f := open(t, path); f.Machine != elf.EM_AARCH64 {
				t.Errorf("%s is for %v", path, f.Machine)
			}
			checkGlibc(t, path)
		}
	}
	if found == 0 {
		if os.Getenv("TRANCHE_TEST_ARM64") != "" {
			t.Fatal("nothing in build/arm64: `make arm64` did not run")
		}
		t.Skip("nothing in build/arm64: `make test-arm64` builds and tests that")
	}
}

// A large or initial-exec thread-local segment makes dlopen fail when the space for it is gone.
func TestThreadLocal(t *testing.T) {
	for _, path := range []string{fixture.Build("lib/libcuda.so.1"), fixture.Build("lib/libnvidia-ml.so.1")} {
		f := open(t, fixture.Need(t, path))
		for _, p := range f.Progs {
			if p.Type == elf.PT_TLS && p.Memsz > maxTLS {
				t.Errorf("%s: %d bytes of thread-local data, at most %d", name(path), p.Memsz, maxTLS)
			}
		}
	}
}

func TestSegments(t *testing.T) {
	libraries, programs := files(t)
	for _, path := range append(libraries, programs...) {
		var stack bool
		for _, p := range open(t, path).Progs {
			if p.Type == elf.PT_LOAD && p.Flags&(elf.PF_W|elf.PF_X) == elf.PF_W|elf.PF_X {
				t.Errorf("%s: a segment is writable and executable", name(path))
			}
			if p.Type == elf.PT_GNU_STACK {
				stack = true
				if p.Flags&elf.PF_X != 0 {
					t.Errorf("%s asks for an executable stack", name(path))
				}
			}
		}
		if !stack {
			t.Errorf("%s does not say that its stack is not executable", name(path))
		}
	}
}

// What each of our libraries is called, needs, and where it looks for the driver.
func TestDynamicSection(t *testing.T) {
	for file, want := range map[string][]string{
		"libcuda.so.1":      {"libcuda-driver.so.1", "libc.so.6"},
		"libnvidia-ml.so.1": {"libnvidia-ml-driver.so.1", "libc.so.6"},
	} {
		f := open(t, fixture.Need(t, fixture.Build("lib", file)))
		if soname, err := f.DynString(elf.DT_SONAME); err != nil || !slices.Equal(soname, []string{file}) {
			t.Errorf("%s: SONAME %v (%v)", file, soname, err)
		}
		needed, err := f.ImportedLibraries()
		if err != nil {
			t.Fatal(err)
		}
		for _, lib := range want {
			if !slices.Contains(needed, lib) {
				t.Errorf("%s does not need %s but %v", file, lib, needed)
			}
		}
		for _, lib := range needed {
			if !slices.Contains(append(want, "libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6"), lib) {
				t.Errorf("%s needs %s", file, lib)
			}
		}
		// DT_RPATH, because DT_RUNPATH comes after LD_LIBRARY_PATH.
		if run, _ := f.DynString(elf.DT_RUNPATH); len(run) != 0 {
			t.Errorf("%s has a RUNPATH: %v", file, run)
		}
		rpath, err := f.DynString(elf.DT_RPATH)
		if err != nil || len(rpath) != 1 || !strings.HasPrefix(rpath[0], "/@@TRANCHE_DRIVER@@") || len(rpath[0]) != 256 {
			t.Errorf("%s: RPATH %v (%v)", file, rpath, err)
		}
		data, err := os.ReadFile(fixture.Build("lib", file))
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(data), "@@TRANCHE_SLICE@@"); n != 1 {
			t.Errorf("%s: the slice's field is there %d times", file, n)
		}
		const nodelete = 0x8 // DF_1_NODELETE: threads and pointers to hooks outlive dlclose
		if flags, err := f.DynValue(elf.DT_FLAGS_1); err != nil || len(flags) != 1 || flags[0]&nodelete == 0 {
			t.Errorf("%s may be unloaded: DT_FLAGS_1 %x (%v)", file, flags, err)
		}
	}
}

// The export list is the table of hooks, no more and no less.
func TestExports(t *testing.T) {
	for file, table := range map[string]string{"libcuda.so.1": "shim/cuda/hooks.def", "libnvidia-ml.so.1": "shim/nvml/hooks.def"} {
		b, err := os.ReadFile(filepath.Join(fixture.Root(), table))
		if err != nil {
			t.Fatal(err)
		}
		var want []string
		for _, m := range regexp.MustCompile(`(?m)^TR_[A-Z]+\((\w+)`).FindAllStringSubmatch(string(b), -1) {
			want = append(want, m[1])
		}
		slices.Sort(want)
		path := fixture.Need(t, fixture.Build("lib", file))
		if got := fixture.Functions(t, path); !slices.Equal(got, want) {
			t.Errorf("%s exports\n%v\n%s has\n%v", file, got, table, want)
		}
		symbols, err := open(t, path).DynamicSymbols()
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range symbols {
			if s.Section != elf.SHN_UNDEF && elf.ST_TYPE(s.Info) == elf.STT_OBJECT {
				t.Errorf("%s exports data: %s", file, fmt.Sprint(s.Name))
			}
		}
	}
}

// The simulated driver binds its own functions to itself, as the real one does (DT_SYMBOLIC): else
// what it calls, and what its cuGetProcAddress answers, would be ours when we stand in front.
func TestSimulatedDriverIsSymbolic(t *testing.T) {
	for _, file := range []string{"sim/libcuda.so.1", "sim/libcuda-null.so.1"} {
		if v, err := open(t, fixture.Need(t, fixture.Build(file))).DynValue(elf.DT_SYMBOLIC); err != nil || len(v) != 1 {
			t.Errorf("%s is not linked with -Bsymbolic (%v)", file, err)
		}
	}
}
