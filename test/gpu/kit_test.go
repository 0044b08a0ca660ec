package gpu

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"tranche.dev/tranche/test/fixture"
)

// TestKit: what is carried to a GPU works from any directory and without the source tree, the
// toolchains and the environment; where there is no GPU it says so.
func TestKit(t *testing.T) {
	kit := t.TempDir()
	for _, f := range []string{"bin/tranche", "bin/gpuload", "bin/calibrate", "sim/simctl"} {
		place(t, fixture.Need(t, fixture.Build(f)), kit)
	}
	place(t, filepath.Join(fixture.Root(), "test/gpu/run.sh"), kit)
	build := exec.Command("go", "build", "-o", filepath.Join(kit, "shares-real"), "./bench/shares-real")
	build.Dir, build.Env = fixture.Root(), append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	run := func(args ...string) (string, int) {
		cmd := exec.Command(filepath.Join(kit, "run.sh"), args...)
		cmd.Dir = t.TempDir()
		cmd.Env = []string{"PATH=/usr/bin:/bin", "HOME=" + t.TempDir()}
		out, err := cmd.CombinedOutput()
		if _, failed := err.(*exec.ExitError); err != nil && !failed {
			t.Fatal(err)
		}
		return string(out), cmd.ProcessState.ExitCode()
	}

	if _, err := os.Stat("/dev/nvidiactl"); err != nil {
		if out, status := run(); status != 3 || !strings.Contains(out, "no GPU here: not run") {
			t.Errorf("without a GPU: status %d: %s", status, out)
		}
	}

	results := t.TempDir()
	if err := os.WriteFile(filepath.Join(results, "machine.yaml"), []byte("switch_us: 50\ngpus:\n- {model: t4}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	out, status := run("--out", results, "--sim", "-runs", "1", "-seconds", "2", "-settle", "1", "-cases", "^alone$")
	var rows []struct{ Label string }
	data, err := os.ReadFile(filepath.Join(results, "shares-sim.json"))
	if err == nil {
		err = json.Unmarshal(data, &rows)
	}
	if status > 1 || err != nil || len(rows) == 0 || rows[0].Label != "sim" || !strings.Contains(out, "machine.yaml") {
		t.Errorf("on the simulated GPU: status %d, %d rows, %v: %s", status, len(rows), err, out)
	}
}

func place(t *testing.T, file, dir string) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, filepath.Base(file)), data, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
}
