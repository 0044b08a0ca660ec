// Package classify holds the two tables of libcuda.so.1 (hooks.def: intercepted, passthrough.def:
// not, and why) against what drivers export, so that no function is forgotten.
package classify

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"tranche.dev/tranche/test/fixture"
)

var (
	blockComment = regexp.MustCompile(`(?s)/\*.*?\*/`)
	joinedLine   = regexp.MustCompile(`\\\n`)
	hookLine     = regexp.MustCompile(`TR_HOOK\((\w+)\)`)
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

// hooked returns the functions in hooks.def.
func hooked(t *testing.T) map[string]bool {
	names := map[string]bool{}
	for _, m := range hookLine.FindAllStringSubmatch(source(t, "shim/cuda/hooks.def"), -1) {
		if names[m[1]] {
			t.Errorf("hooks.def names %s twice", m[1])
		}
		names[m[1]] = true
	}
	return names
}

// passed returns the functions in passthrough.def with their reasons, macros spelled out.
func passed(t *testing.T) map[string]string {
	text := source(t, "shim/cuda/passthrough.def")
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

// later returns the checked-in names of functions newer than the drivers at hand.
func later(t *testing.T) []string {
	var names []string
	for line := range strings.Lines(source(t, "test/data/cuda13-new.txt")) {
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
	pass := passed(t)
	for name := range hooked(t) {
		if _, both := pass[name]; both {
			t.Errorf("%s is intercepted, and passthrough.def says that it is not", name)
		}
	}
}

func TestLaterFunctionsAreClassified(t *testing.T) {
	names := later(t)
	if !slices.IsSorted(names) || len(names) < 60 {
		t.Errorf("cuda13-new.txt: %d names, sorted %v", len(names), slices.IsSorted(names))
	}
	for _, name := range unclassified(names, hooked(t), passed(t)) {
		t.Errorf("%s (CUDA 12.5 or later) is in neither hooks.def nor passthrough.def", name)
	}
}

func TestDriverExportsAreClassified(t *testing.T) {
	hooks, pass := hooked(t), passed(t)
	known := map[string]bool{}
	for _, name := range later(t) {
		known[name] = true
	}
	for driver, functions := range map[string]int{"535": 600, "550": 636} {
		exports := fixture.Functions(t, fixture.NVIDIA(t, driver, "libcuda.so.1"))
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
}

// TestForgottenFunctionIsFound shows that the check can fail: each table without one of its
// entries leaves that function unclassified.
func TestForgottenFunctionIsFound(t *testing.T) {
	hooks, pass := hooked(t), passed(t)
	exports := []string{"cuMemAlloc_v2", "cuDriverGetVersion", "cuMemAllocLater"}
	if got := unclassified(exports, hooks, pass); !slices.Equal(got, []string{"cuMemAllocLater"}) {
		t.Errorf("unclassified: %v", got)
	}
	delete(hooks, "cuMemAlloc_v2")
	delete(pass, "cuDriverGetVersion")
	if got := unclassified(exports, hooks, pass); !slices.Equal(got, exports) {
		t.Errorf("unclassified: %v, want %v", got, exports)
	}
}
