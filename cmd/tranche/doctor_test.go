package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tranche.dev/tranche/internal/doctor"
)

func TestDoctor(t *testing.T) {
	b := newBox(t)
	out, state := b.run("doctor", "--sim", "a100-80g:2,t4", "-o", "json")
	var report struct {
		Failed bool
		Checks []doctor.Check
	}
	if err := json.NewDecoder(strings.NewReader(out)).Decode(&report); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if (state.ExitCode() == 1) != report.Failed {
		t.Errorf("failed: %v, exit status %d", report.Failed, state.ExitCode())
	}
	seen := map[string]string{}
	for _, c := range report.Checks {
		if c.Area == "driver" || c.Area == "gpus" || c.Name == "binary" {
			if seen[c.Name] = c.Text; c.Status != doctor.OK {
				t.Errorf("%+v", c)
			}
		}
	}
	for name, want := range map[string]string{"NVML": "3 GPUs", "gpu 2": "Tesla T4", "links": "NVLink between 1 of 3 pairs",
		"device nodes": "nvidia2", "libraries": "550.163.01 /usr/lib/"} {
		if !strings.Contains(seen[name], want) {
			t.Errorf("%s: %q, want %s", name, seen[name], want)
		}
	}
	// A root with nothing in it has no driver.
	root := t.TempDir()
	if err := os.WriteFile(filepath.Join(root, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string]string{
		"doctor --root " + root:           "fail  libraries ",
		"doctor --root " + root + "/x":    "root: ",
		"doctor --root " + root + "/file": "is not a directory",
		"doctor -o yaml":                  `-o "yaml": text or json`,
		"doctor --sim=":                   "--sim",
		"doctor --sim x99":                "x99",
	} {
		if out, state := b.run(strings.Fields(args)...); state.ExitCode() != 1 || !strings.Contains(out, want) {
			t.Errorf("%s: %v, %q, want %s", args, state, out, want)
		}
	}
}
