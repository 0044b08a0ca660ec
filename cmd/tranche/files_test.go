package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tranche.dev/tranche/internal/assets"
)

// ps says when it cannot tell, instead of an empty list.
func TestPsRefusals(t *testing.T) {
	b := newBox(t)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	machine := t.TempDir()
	for name, text := range map[string]string{"spec": "gpu model=t4\n", "slices": ""} {
		if err := os.WriteFile(filepath.Join(machine, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for args, want := range map[string]string{
		"ps --sim " + machine: "not a directory",
		"ps --sim nonsense":   "no model 'nonsense'; there are t4, ", "ps --sim=": "--sim: no value given", "ps -o yaml": `-o "yaml": table or json`,
		"ps --sim none.yaml": "no such file or directory",
	} {
		if out, state := b.run(strings.Fields(args)...); state.ExitCode() != 1 || !strings.Contains(out, want) {
			t.Errorf("%s: %v, %q", args, state, out)
		}
	}
	if out, state := b.run("ps", "--sim", "t4"); state.ExitCode() != 0 || strings.Count(out, "\n") != 1 {
		t.Errorf("a machine without slices: %v, %q", state, out)
	}
	b.env = append(b.env, "TRANCHE_STATE_DIR="+file)
	if out, state := b.run("ps"); state.ExitCode() != 1 || !strings.Contains(out, "not a directory") {
		t.Errorf("a file for the state: %v, %q", state, out)
	}
}

// A relative directory for the state is the caller's, wherever the command goes.
func TestRelativeStateDir(t *testing.T) {
	b := newBox(t)
	cmd := b.command("run", "--sim", "t4", "--name", "seen", "--", "sh", "-c", "cd / && "+program+" ps")
	cmd.Env, cmd.Dir = append(cmd.Env, "TRANCHE_STATE_DIR=state"), t.TempDir()
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "seen") {
		t.Errorf("%v: %s", err, out)
	}
}

// Libraries of slices that went with a reboot are removed when they are old; young ones are not, and
// those of a slice that is there are not.
func TestOldLibraries(t *testing.T) {
	b := newBox(t)
	home := filepath.Join(b.lookup("XDG_CACHE_HOME"), "tranche")
	// Not a directory: replaced.
	if err := os.MkdirAll(home, 0o711); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(home, "slices"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, state := b.run("run", "--sim", "t4", "--", "true"); state.ExitCode() != 0 {
		t.Fatal(out)
	}
	old := time.Now().Add(-31 * 24 * time.Hour)
	age := func(id string, when time.Time) string {
		dir := filepath.Join(home, "slices", id)
		data, err := assets.Read(assets.CUDA)
		if err == nil {
			err = os.MkdirAll(filepath.Join(dir, "lib"), 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, "lib", "libcuda.so.1"), data, 0o755)
		}
		if err == nil {
			err = os.Chtimes(dir, when, when)
		}
		if err != nil {
			t.Fatal(err)
		}
		return dir
	}
	gone, young := age("0123456789abcdef", old), age("1123456789abcdef", time.Now())
	script := "d=$(dirname $(dirname ${LD_LIBRARY_PATH%%:*}/x)); touch -d '40 days ago' $d; " + program + " run --sim t4 -- true; test -e $d/lib/libcuda.so.1"
	if out, state := b.run("run", "--sim", "t4", "--strict", "off", "--", "sh", "-c", script); state.ExitCode() != 0 {
		t.Errorf("a living slice lost its libraries: %s", out)
	}
	if _, err := os.Stat(gone); err == nil {
		t.Error("old libraries are still there")
	}
	if _, err := os.Stat(young); err != nil {
		t.Error(err)
	}
}
