// Package oracle holds cuGetProcAddress against NVIDIA's own drivers: the table of the simulated
// driver, and our library in front of real drivers and of the simulated one.
package oracle

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"tranche.dev/tranche/test/fixture"
)

var update = flag.Bool("update", false, "write simgpu/procaddress.tsv from the real driver 550")

const header = `# What cuGetProcAddress of NVIDIA's driver 550.163.01 (CUDA 12.4) answers, as asked of it.
# Made by: go test ./test/oracle -run TestTable -update
#
# name <TAB> min_cuda_version <TAB> flags <TAB> symbol
#
# Asked for name with a CUDA version v (taken as unsigned) and flags f, the driver returns the
# function exported as symbol, of the row with the greatest min_cuda_version <= v among the rows
# whose flags fit f:
#   *  any f
#   0  f = 0 (default) or 1 (legacy stream)
#   2  f = 2 (per-thread default stream) or 3
# Rows are sorted by name, flags, version. What the table does not hold:
#   f > 3                       CUDA_ERROR_INVALID_VALUE (1), pointer and status not written
#   name has rows, none fits    _v2: CUDA_SUCCESS, pointer NULL, status 2 (VERSION_NOT_SUFFICIENT)
#                               v1: CUDA_ERROR_NOT_FOUND (500), pointer not written
#   name has no row             _v2: CUDA_SUCCESS, pointer NULL, status 1 (SYMBOL_NOT_FOUND)
#                               v1: CUDA_ERROR_NOT_FOUND (500), pointer not written
#   found                       CUDA_SUCCESS, status 0 (FOUND); a NULL status pointer is allowed
# Names with a suffix (cuMemAlloc_v2, cuLaunchKernel_ptsz) have no row. It works before cuInit.
# Driver 535.261.03 (CUDA 12.2) answers the same, but for the rows whose symbol it does not export.
`

// row is one change point of the driver's answer.
type row struct {
	name    string
	version int
	flags   string
	symbol  string
}

func (r row) String() string {
	return fmt.Sprintf("%s\t%d\t%s\t%s", r.name, r.version, r.flags, r.symbol)
}

// table asks a driver library and folds what is the same for several flags into one row.
func table(t *testing.T, oracle, driver string, names []string) []string {
	t.Helper()
	r := fixture.Run(t, strings.Join(names, "\n")+"\n", nil, oracle, "table", driver)
	if r.Code != 0 {
		t.Fatalf("oracle table %s: exit %d\n%s", driver, r.Code, r.Stderr)
	}
	t.Log(strings.TrimSpace(r.Stderr))
	asked := map[string]map[string][]row{} // by name and flags
	for line := range strings.Lines(r.Stdout) {
		f := strings.Split(strings.TrimSpace(line), "\t")
		version, err := strconv.Atoi(f[1])
		if err != nil || len(f) != 4 {
			t.Fatalf("oracle: bad row %q", line)
		}
		if asked[f[0]] == nil {
			asked[f[0]] = map[string][]row{}
		}
		asked[f[0]][f[2]] = append(asked[f[0]][f[2]], row{f[0], version, f[2], f[3]})
	}
	var rows []row
	for name, by := range asked {
		if !same(by["0"], by["1"]) {
			t.Errorf("%s: flags 0 and 1 differ, which the table cannot say", name)
		}
		if same(by["0"], by["2"]) {
			for _, r := range by["0"] {
				rows = append(rows, row{r.name, r.version, "*", r.symbol})
			}
			continue
		}
		rows = append(append(rows, by["0"]...), by["2"]...)
	}
	slices.SortFunc(rows, func(a, b row) int {
		return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.flags, b.flags), cmp.Compare(a.version, b.version))
	})
	lines := make([]string, len(rows))
	for i, r := range rows {
		lines[i] = r.String()
	}
	return lines
}

func same(a, b []row) bool {
	return slices.EqualFunc(a, b, func(x, y row) bool { return x.version == y.version && x.symbol == y.symbol })
}

func build(t *testing.T) string {
	return fixture.Compile(t, "test/oracle/testdata/oracle.c", "-Ishim/cuda", "-ldl")
}

func committed(t *testing.T) (path string, lines []string) {
	t.Helper()
	path = filepath.Join(fixture.Root(), "simgpu/procaddress.tsv")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if !strings.HasPrefix(line, "#") {
			lines = append(lines, strings.TrimSuffix(line, "\n"))
		}
	}
	return path, lines
}

// TestTable holds the committed table against the driver that it was made from, and checks what
// its header says about the older one.
func TestTable(t *testing.T) {
	oracle := build(t)
	newer := fixture.NVIDIA(t, "550", "libcuda.so.1")
	got := table(t, oracle, newer, fixture.Names(t, newer))
	if *update {
		path := filepath.Join(fixture.Root(), "simgpu/procaddress.tsv")
		if err := os.WriteFile(path, []byte(header+strings.Join(got, "\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	path, want := committed(t)
	diff(t, path, want, got)

	older := fixture.NVIDIA(t, "535", "libcuda.so.1")
	exports := fixture.Functions(t, older)
	var had []string
	for _, line := range want {
		symbol := line[strings.LastIndexByte(line, '\t')+1:]
		if _, ok := slices.BinarySearch(exports, symbol); ok {
			had = append(had, line)
		}
	}
	diff(t, "the rows of 550 whose symbol 535 exports", had, table(t, oracle, older, fixture.Names(t, older)))
}

// diff reports the rows of two sorted tables that are in one only.
func diff(t *testing.T, name string, want, got []string) {
	t.Helper()
	if len(want) < 550 {
		t.Errorf("%s: %d rows, want at least 550", name, len(want))
	}
	for _, w := range want {
		if !slices.Contains(got, w) {
			t.Errorf("%s: the driver does not have %q", name, w)
		}
	}
	for _, g := range got {
		if !slices.Contains(want, g) {
			t.Errorf("%s: lacks %q", name, g)
		}
	}
}

// TestOurs holds our library against each driver that it may stand in front of: the hook of
// exactly the function that the driver names, the driver's own pointer, or its error.
func TestOurs(t *testing.T) {
	oracle := build(t)
	for _, driver := range append([]string{"sim"}, fixture.Drivers...) {
		t.Run(driver, func(t *testing.T) {
			var library string
			if driver == "sim" {
				library = fixture.Need(t, fixture.Build("sim", "libcuda.so.1"))
			} else {
				library = fixture.NVIDIA(t, driver, "libcuda.so.1")
			}
			names := fixture.Names(t, library)
			s := fixture.NewSlice(t, fixture.Build("lib"), filepath.Dir(library))
			r := fixture.Run(t, strings.Join(names, "\n")+"\n", s.Env(), oracle, "compare",
				filepath.Join(s.Lib, "libcuda.so.1"), filepath.Join(s.Driver, "libcuda-driver.so.1"))
			t.Log(strings.TrimSpace(r.Stderr))
			if r.Code != 0 || len(names) < 550 {
				t.Errorf("exit %d, %d names", r.Code, len(names))
			}
		})
	}
}

// TestOursCanFail: a library that is the driver itself, with no hooks, is not taken for ours.
func TestOursCanFail(t *testing.T) {
	driver := fixture.NVIDIA(t, "550", "libcuda.so.1")
	r := fixture.Run(t, "cuDriverGetVersion\n", nil, build(t), "compare", fixture.NVIDIA(t, "535", "libcuda.so.1"), driver)
	if r.Code != 1 || !strings.Contains(r.Stderr, "cuGetProcAddress_v2(cuDriverGetVersion, version 2020") {
		t.Errorf("exit %d\n%s", r.Code, r.Stderr)
	}
}

// TestSimulatedDriver: the simulated driver answers from the same table.
func TestSimulatedDriver(t *testing.T) {
	driver := fixture.Need(t, fixture.Build("sim", "libcuda.so.1"))
	path, want := committed(t)
	diff(t, path, want, table(t, build(t), driver, fixture.Names(t, driver)))
}
