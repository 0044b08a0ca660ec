// Package simnvml tests what programs other than nvidia-smi see of the simulated NVML: the export
// list, superseded entry points, error codes and events.
package simnvml

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"tranche.dev/tranche/test/fixture"
)

func library(t *testing.T) string {
	return fixture.Need(t, fixture.Build("sim", "libnvidia-ml.so.1"))
}

// machine is a directory with two T4 GPUs, and the environment of a program on it.
func machine(t *testing.T) (dir string, env []string) {
	dir = t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "spec"), []byte("gpu model=t4 count=2\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir, []string{"TRANCHE_SIM_DIR=" + dir, "LD_LIBRARY_PATH=" + fixture.Build("sim")}
}

func program(t *testing.T) string {
	return fixture.Compile(t, "test/simnvml/testdata/nvml.c", "-Iinclude", "-Wno-unused", library(t))
}

func simctl(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command(fixture.Need(t, fixture.Build("sim", "simctl")), args...).CombinedOutput(); err != nil {
		t.Fatalf("simctl %v: %v\n%s", args, err, out)
	}
}

// Every function of NVIDIA's own library is there.
func TestExports(t *testing.T) {
	ours := map[string]bool{}
	for _, f := range fixture.Functions(t, library(t)) {
		ours[f] = true
	}
	for _, driver := range fixture.Drivers {
		for _, f := range fixture.Functions(t, fixture.NVIDIA(t, driver, "libnvidia-ml.so.1")) {
			if strings.HasPrefix(f, "nvml") && !ours[f] {
				t.Errorf("%s of driver %s is missing", f, driver)
			}
		}
	}
}

func TestAnswers(t *testing.T) {
	_, env := machine(t)
	if r := fixture.Run(t, "", env, program(t)); r.Code != 0 {
		t.Errorf("exit code %d\n%s%s", r.Code, r.Stdout, r.Stderr)
	}
}

// An XID reaches a program that waits; a GPU that falls off the bus ends the waiting.
func TestEvents(t *testing.T) {
	dir, env := machine(t)
	cmd := exec.Command(program(t), "wait")
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	lines := bufio.NewScanner(out)
	next := func(want string) {
		t.Helper()
		if !lines.Scan() || lines.Text() != want {
			t.Fatalf("got %q, want %q", lines.Text(), want)
		}
	}
	next("ready")
	simctl(t, dir, "xid", "1", "48")
	next("xid 48 on 1")
	simctl(t, dir, "lose", "0")
	next("xid 79 on 0") // "GPU has fallen off the bus"
	next("then GPU is lost")
}
