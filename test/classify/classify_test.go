// Package classify holds the two tables of each library (hooks.def: intercepted, passthrough.def: not,
// and why) against what drivers export, so that no function is forgotten.
package classify

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"tranche.dev/tranche/test/fixture"
)

// library is one of our two: where its tables are, and what drivers export.
type library struct {
	name  string
	dir   string // of hooks.def and passthrough.def
	later string // checked-in names of functions that are newer than the drivers at hand
	// functions is how many each driver exports: the check that the files are the right ones.
	functions map[string]int
	// undocumented are names that no header declares and none of these drivers has.
	undocumented []string
}

var libraries = []library{
	{name: "libcuda.so.1", dir: "shim/cuda", later: "test/data/cuda13-new.txt", functions: map[string]int{"535": 600, "550": 636}},
	{name: "libnvidia-ml.so.1", dir: "shim/nvml", later: "test/data/nvml13-new.txt", functions: map[string]int{"535": 332, "550": 350},
		undocumented: []string{"nvmlDeviceGetHandles", "nvmlDeviceSetDriverModel_v2"}},
}

func each(t *testing.T, f func(t *testing.T, l library)) {
	for _, l := range libraries {
		t.Run(l.name, func(t *testing.T) { f(t, l) })
	}
}

var (
	blockComment = regexp.MustCompile(`(?s)/\*.*?\*/`)
	joinedLine   = regexp.MustCompile(`\\\n`)
	hookLine     = regexp.MustCompile(`(?m)^TR_(?:HOOK\((\w+)\)|(?:DENY|ABSENT)\((\w+),\s*"([^"]*)"\))$`)
	passLine     = regexp.MustCompile(`TR_PASS\((\w+),\s*([^)]*(?:"[^"]*"\s*)*)\)\n`)
	macroLine    = regexp.MustCompile(`(?m)^#define (PASS_\w+)\s+(".*)$`)
)

func source(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(fixture.Root(), path))
	if err != nil {
		t.Fatal(err)
	}
	return joinedLine.ReplaceAllString(blockComment.ReplaceAllString(string(b), ""), " ")
}

// hooked returns the functions in hooks.def: those that act, and those that only refuse, which say
// why.
func (l library) hooked(t *testing.T) map[string]bool {
	text := source(t, l.dir+"/hooks.def")
	names := map[string]bool{}
	for _, m := range hookLine.FindAllStringSubmatch(text, -1) {
		name := m[1] + m[2]
		if names[name] {
			t.Errorf("hooks.def names %s twice", name)
		}
		if m[2] != "" && len(m[3]) < 10 {
			t.Errorf("hooks.def gives no reason for %s: %q", name, m[3])
		}
		names[name] = true
	}
	if lines := strings.Count(text, "\nTR_"); lines != len(names) {
		t.Errorf("hooks.def: %d lines, %d understood", lines, len(names))
	}
	return names
}

// passed returns the functions in passthrough.def with their reasons, macros spelled out.
func (l library) passed(t *testing.T) map[string]string {
	text := source(t, l.dir+"/passthrough.def")
	macros := map[string]string{}
	for _, m := range macroLine.FindAllStringSubmatch(text, -1) {
		macros[m[1]] = m[2]
	}
	reasons := map[string]string{}
	for _, m := range passLine.FindAllStringSubmatch(text, -1) {
		name, reason := m[1], strings.TrimSpace(m[2])
		if _, twice := reasons[name]; twice {
			t.Errorf("passthrough.def names %s twice", name)
		}
		if !strings.HasPrefix(reason, `"`) {
			reason = macros[reason]
		}
		if len(reason) < 10 {
			t.Errorf("passthrough.def gives no reason for %s: %q", name, m[2])
		}
		reasons[name] = reason
	}
	if lines := strings.Count(text, "TR_PASS("); lines != len(reasons) {
		t.Errorf("passthrough.def: %d lines, %d understood", lines, len(reasons))
	}
	return reasons
}

// laterNames returns the checked-in names of functions newer than the drivers at hand.
func (l library) laterNames(t *testing.T) []string {
	var names []string
	for line := range strings.Lines(source(t, l.later)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			names = append(names, line)
		}
	}
	return names
}

// unclassified are the functions in neither table.
func unclassified(exports []string, hooks map[string]bool, pass map[string]string) (missing []string) {
	for _, name := range exports {
		if _, ok := pass[name]; !ok && !hooks[name] {
			missing = append(missing, name)
		}
	}
	return missing
}

func TestNothingInBoth(t *testing.T) {
	each(t, func(t *testing.T, l library) {
		pass := l.passed(t)
		for name := range l.hooked(t) {
			if _, both := pass[name]; both {
				t.Errorf("%s is intercepted, and passthrough.def says that it is not", name)
			}
		}
	})
}

func TestLaterFunctionsAreClassified(t *testing.T) {
	each(t, func(t *testing.T, l library) {
		names := l.laterNames(t)
		if !slices.IsSorted(names) || len(names) < 60 {
			t.Errorf("%s: %d names, sorted %v", l.later, len(names), slices.IsSorted(names))
		}
		for _, name := range unclassified(names, l.hooked(t), l.passed(t)) {
			t.Errorf("%s (%s) is in neither hooks.def nor passthrough.def", name, l.later)
		}
	})
}

func TestDriverExportsAreClassified(t *testing.T) {
	each(t, func(t *testing.T, l library) {
		hooks, pass := l.hooked(t), l.passed(t)
		known := map[string]bool{}
		for _, name := range append(l.laterNames(t), l.undocumented...) {
			known[name] = true
		}
		for driver, functions := range l.functions {
			exports := fixture.Functions(t, fixture.NVIDIA(t, driver, l.name))
			if len(exports) != functions {
				t.Errorf("driver %s exports %d functions, want %d: is the file another one?", driver, len(exports), functions)
			}
			for _, name := range unclassified(exports, hooks, pass) {
				t.Errorf("%s (driver %s) is in neither hooks.def nor passthrough.def", name, driver)
			}
			for _, name := range exports {
				known[name] = true
			}
		}
		for name := range hooks {
			if !known[name] {
				t.Errorf("hooks.def names %s, which no driver has", name)
			}
		}
		for name := range pass {
			if !known[name] {
				t.Errorf("passthrough.def names %s, which no driver has", name)
			}
		}
	})
}

// TestBuiltExports holds the library itself against its table: it exports what hooks.def names.
func TestBuiltExports(t *testing.T) {
	each(t, func(t *testing.T, l library) {
		got := fixture.Functions(t, fixture.Need(t, fixture.Build("lib", l.name)))
		if want := slices.Sorted(maps.Keys(l.hooked(t))); !slices.Equal(got, want) {
			t.Errorf("exported, not in hooks.def: %v; in hooks.def, not exported: %v", without(got, want), without(want, got))
		}
	})
}

func without(a, b []string) (rest []string) {
	for _, name := range a {
		if !slices.Contains(b, name) {
			rest = append(rest, name)
		}
	}
	return rest
}

// TestForgottenFunctionIsFound shows that the check can fail: each table without one of its
// entries leaves that function unclassified.
func TestForgottenFunctionIsFound(t *testing.T) {
	samples := map[string][3]string{ // intercepted, passed, unheard of
		"libcuda.so.1":      {"cuMemAlloc_v2", "cuDriverGetVersion", "cuMemAllocLater"},
		"libnvidia-ml.so.1": {"nvmlDeviceSetEccMode", "nvmlErrorString", "nvmlDeviceGetLater"},
	}
	each(t, func(t *testing.T, l library) {
		hooks, pass, sample := l.hooked(t), l.passed(t), samples[l.name]
		if got := unclassified(sample[:], hooks, pass); !slices.Equal(got, sample[2:]) {
			t.Errorf("unclassified: %v", got)
		}
		delete(hooks, sample[0])
		delete(pass, sample[1])
		if got := unclassified(sample[:], hooks, pass); !slices.Equal(got, sample[:]) {
			t.Errorf("unclassified: %v, want %v", got, sample)
		}
	})
}
