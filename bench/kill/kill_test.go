// Package kill is the memory limit under fire: the processes of one slice allocate and free every
// family of device memory at random, and many of them are killed on the way.
package kill

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"tranche.dev/tranche/bench/report"
	"tranche.dev/tranche/internal/tenant"
	"tranche.dev/tranche/test/fixture"
)

var (
	processes = flag.Int("kill.processes", 200, "processes in the slice")
	seconds   = flag.Int("kill.seconds", 15, "how long each allocates")
	file      = flag.String("kill.json", "", "file for the figures, as the other benchmarks write them")
	seed      = flag.Int64("kill.seed", 0, "of the random choices; 0: from the clock")
)

const (
	gib          = 1 << 30
	limit        = 6 * gib
	contextBytes = 16 << 20 // of the simulated GPU: 200 contexts must fit beside the load
	eachMax      = "256Mi"
)

// TestKill holds two things: the simulated driver's own count of the slice's memory, at its highest
// ever, is not above the limit; and when the last process is gone the ledger is exactly zero.
func TestKill(t *testing.T) {
	if *seed == 0 {
		*seed = time.Now().UnixNano() % 1e9
	}
	t.Logf("seed %d (-kill.seed)", *seed)
	random := rand.New(rand.NewSource(*seed))

	simDir := newMachine(t)
	device := tenant.Device{UUID: fixture.SimUUID, MemoryLimit: limit, MemoryLimited: true,
		ContextBytes: contextBytes, Cores: 100}
	slice := fixture.NewSlice(t, fixture.Build("lib"), fixture.Build("sim"), device)
	ledger, err := tenant.OpenLedger(slice.Dir)
	if err != nil {
		t.Fatal(err)
	}
	defer ledger.Close()

	killed := fire(t, random, *processes, *seconds, append(slice.Env(), "TRANCHE_SIM_DIR="+simDir))
	waitForForks(t, ledger)

	peak := simPeak(t, simDir)
	t.Logf("%d processes, %d killed: peak %.1f MiB of %.1f MiB", *processes, killed, mib(peak), mib(limit))
	writeReport(t, killed, peak, ledger.Usage(0).Memory)
	if peak > limit {
		t.Errorf("the driver's own count reached %d bytes, limit %d", peak, int64(limit))
	}
	if peak < limit*9/10 {
		t.Errorf("peak %d: the load never came near the limit, so this proves nothing", peak)
	}
	for i, s := range ledger.Slots() {
		t.Errorf("slot %d is still held: %+v", i, s)
	}
	if used := ledger.Usage(0).Memory; used != 0 {
		t.Errorf("the ledger holds %d bytes after the last process is gone", used)
	}
}

// TestKillWithoutLibrary is the control: the same load straight on the driver passes the limit.
func TestKillWithoutLibrary(t *testing.T) {
	simDir := newMachine(t)
	env := []string{"LD_LIBRARY_PATH=" + fixture.Build("sim"), "TRANCHE_SIM_DIR=" + simDir}
	fire(t, rand.New(rand.NewSource(1)), 80, 5, env)
	peak := simPeak(t, simDir)
	t.Logf("without the library: peak %.1f MiB", mib(peak))
	if peak <= limit {
		t.Errorf("the load alone reaches %d bytes, which is not above the limit of %d", peak, int64(limit))
	}
}

func newMachine(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	spec := fmt.Sprintf("gpu model=a100-80g uuid=%s context=%d\n", fixture.SimUUID, contextBytes)
	if err := os.WriteFile(filepath.Join(dir, "spec"), []byte(spec), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// worker is one process at a time. A process that finds no room for its context tries again.
type worker struct {
	sync.Mutex
	now    *exec.Cmd
	killed bool
}

func (w *worker) run(end time.Time, command func(left time.Duration) *exec.Cmd) error {
	for left := time.Until(end); left > time.Second; left = time.Until(end) {
		c := command(left)
		var stderr bytes.Buffer
		c.Stderr = &stderr
		w.Lock()
		err := c.Start()
		w.now = c
		w.Unlock()
		if err != nil {
			return err
		}
		err = c.Wait()
		w.Lock()
		w.now = nil
		done := w.killed
		w.Unlock()
		switch {
		case done || err == nil:
			return nil
		case bytes.Contains(stderr.Bytes(), []byte("cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY")):
			time.Sleep(100 * time.Millisecond)
		default:
			return fmt.Errorf("%w: %s", err, &stderr)
		}
	}
	return nil
}

// kill ends the worker's process, once it has one.
func (w *worker) kill() bool {
	w.Lock()
	defer w.Unlock()
	if w.now == nil || w.killed {
		return false
	}
	w.killed = w.now.Process.Kill() == nil
	return w.killed
}

// fire runs the processes, kills a third of them at random moments and waits for all.
func fire(t *testing.T, random *rand.Rand, n, seconds int, env []string) (killed int) {
	t.Helper()
	gpuload := fixture.Need(t, fixture.Build("bin", "gpuload"))
	end := time.Now().Add(time.Duration(seconds) * time.Second)
	workers := make([]worker, n)
	errs := make(chan error)
	for i := range workers {
		go func() {
			errs <- workers[i].run(end, func(left time.Duration) *exec.Cmd {
				c := exec.Command(gpuload, "--random-alloc", fmt.Sprintf("%.0f:%s", left.Seconds(), eachMax),
					"--forks", "2", "--seed", fmt.Sprint(*seed+int64(i)))
				c.Env = append(os.Environ(), env...)
				return c
			})
		}()
	}
	third := n / 3
	for time.Now().Before(end) && killed < third {
		time.Sleep(time.Duration(random.Int63n(int64(seconds) * int64(time.Second) / int64(third))))
		if workers[random.Intn(len(workers))].kill() {
			killed++
		}
	}
	for range workers {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	return killed
}

// waitForForks reclaims until nothing is held: children of killed parents live for some seconds and
// keep their parents' memory, as with the real driver.
func waitForForks(t *testing.T, ledger *tenant.Ledger) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		ledger.Reclaim()
		if !ledger.InUse() && ledger.Usage(0).Memory == 0 {
			return
		}
	}
}

func simPeak(t *testing.T, dir string) int64 {
	t.Helper()
	out, err := exec.Command(fixture.Need(t, fixture.Build("sim", "simctl")), dir, "truth", "--json").Output()
	if err != nil {
		t.Fatal(err)
	}
	var truth struct {
		GPUs []struct {
			Peak int64 `json:"peak"`
		} `json:"gpus"`
	}
	if err := json.Unmarshal(out, &truth); err != nil || len(truth.GPUs) != 1 {
		t.Fatalf("simctl truth: %v: %s", err, out)
	}
	return truth.GPUs[0].Peak
}

func mib(bytes int64) float64 { return float64(bytes) / (1 << 20) }

// writeReport writes the figures (docs/bench.md).
func writeReport(t *testing.T, killed int, peak int64, left uint64) {
	t.Helper()
	if *file == "" {
		return
	}
	name := fmt.Sprintf("%d processes, %d killed", *processes, killed)
	if err := report.Write(*file, []report.Row{
		{Case: name, Metric: "driver's own peak / limit", Unit: "ratio", Value: float64(peak) / float64(int64(limit)), Target: 1, Better: "lower", Label: "sim"},
		{Case: name, Metric: "ledger after the last process", Unit: "bytes", Value: float64(left), Better: "lower", Label: "sim"},
	}); err != nil {
		t.Error(err)
	}
}
