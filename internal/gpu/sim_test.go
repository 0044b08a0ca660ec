package gpu_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/test/fixture"
)

// machine is a simulated machine and its NVML.
type machine struct {
	t   *testing.T
	dir string
	gpu.NVML
}

func newMachine(t *testing.T, spec string) machine {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "spec"), []byte(spec), 0o644); err != nil {
		t.Fatal(err)
	}
	return machine{t, dir, gpu.NVML{Probe: fixture.Need(t, fixture.Build("bin", "nvmlprobe")),
		Library: fixture.Need(t, fixture.Build("sim", "libnvidia-ml.so.1")), Env: []string{"TRANCHE_SIM_DIR=" + dir}}}
}

func (m machine) ctl(args ...string) {
	m.t.Helper()
	if out, err := exec.Command(fixture.Need(m.t, fixture.Build("sim", "simctl")), append([]string{m.dir}, args...)...).CombinedOutput(); err != nil {
		m.t.Fatalf("simctl %v: %v\n%s", args, err, out)
	}
}

// spec has two A100 and one in MIG mode; the UUIDs end in the index.
func spec(driver string) string {
	text := "driver_version=" + driver + "\ncuda_version=12080\n"
	for i := range 3 {
		text += fmt.Sprintf("gpu model=a100-80g uuid=GPU-00000000-0000-4000-8000-%012d mig=%d\n", i, i/2)
	}
	return text
}

func TestSimInventory(t *testing.T) {
	m := newMachine(t, spec("570.86.15"))
	r, err := m.Inventory(t.Context())
	if err != nil || len(r.Devices) != 3 || r.DriverVersion != "570.86.15" {
		t.Fatalf("%+v, %v", r, err)
	}
	d := r.Devices[1]
	if d.Minor != 1 || d.NUMA != 0 || d.ComputeMode != 0 || d.PCIeMBps != 31504 || d.NVLinkMBps != 25000 || len(d.NVLinks) != 12 ||
		d.NVLinks[0].Type != "switch" || fmt.Sprint(d.Ancestors) != "[20 -1 40]" || d.MIG || !r.Devices[2].MIG ||
		d.Recovery == nil || *d.Recovery != 0 || d.Energy == nil {
		t.Errorf("%+v", d)
	}
}

// told collects what a watcher tells.
type told struct {
	mu  sync.Mutex
	all []string
	inv gpu.Inventory
}

func (m machine) watch() *told {
	w, err := gpu.NewWatcher(gpu.WatcherConfig{Open: func() (gpu.Prober, error) { return m.NVML, nil },
		Every: 200 * time.Millisecond, Rescan: time.Second, Retry: 50 * time.Millisecond})
	if err != nil {
		m.t.Fatal(err)
	}
	x := &told{}
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		w.Watch(ctx, func(inv gpu.Inventory) {
			x.mu.Lock()
			defer x.mu.Unlock()
			text := string(inv.Problem.Reason)
			for _, g := range inv.GPUs {
				state := "ok"
				if !g.State.Healthy {
					state = g.State.Reason
				}
				text += fmt.Sprintf(" | %d %s", g.Index, state)
				if g.Excluded != "" {
					text += ", excluded"
				}
			}
			x.all, x.inv = append(x.all, text), inv
		})
	})
	m.t.Cleanup(func() { cancel(); done.Wait() })
	return x
}

// until waits for the newest word, and returns how long it took.
func (x *told) until(t *testing.T, want string) time.Duration {
	t.Helper()
	began := time.Now()
	for time.Since(began) < 20*time.Second {
		x.mu.Lock()
		n := len(x.all)
		ok := n > 0 && x.all[n-1] == want
		x.mu.Unlock()
		if ok {
			return time.Since(began)
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatalf("told:\n%s\nnot told: %s", strings.Join(x.all, "\n"), want)
	return 0
}

// With the recovery action of newer drivers, and without it.
func TestSimHealth(t *testing.T) {
	for _, c := range []struct{ driver, asked string }{{"570.86.15", "; the driver asks for a GPU reset"}, {"550.163.01", ""}} {
		m := newMachine(t, spec(c.driver))
		x := m.watch()
		x.until(t, " | 0 ok | 1 ok | 2 ok, excluded")
		if inv := x.inv; inv.Driver != c.driver || inv.CUDA != "12.8" || inv.Links.At(0, 1).String() != "NV12" || !inv.Links.At(0, 1).Switched {
			t.Errorf("%+v", inv)
		}
		time.Sleep(time.Second) // for the energy counter to be ahead of what it is after the reset
		m.ctl("xid", "0", "13")
		m.ctl("xid", "0", "48")
		t.Logf("sim: driver %s: XID to unhealthy: %v", c.driver, x.until(t, " | 0 XID 48"+c.asked+" | 1 ok | 2 ok, excluded"))
		m.ctl("lose", "1")
		gone := "GPU is lost; XID 79"
		x.until(t, " | 0 XID 48"+c.asked+" | 1 "+gone+" | 2 ok, excluded")
		m.ctl("recover", "0")
		t.Logf("sim: driver %s: reset to healthy: %v", c.driver, x.until(t, " | 0 ok | 1 "+gone+" | 2 ok, excluded"))
		// A GPU that is watched anew tells its errors again.
		m.ctl("recover", "1")
		t.Logf("sim: driver %s: back to healthy: %v", c.driver, x.until(t, " | 0 ok | 1 ok | 2 ok, excluded"))
		m.ctl("xid", "1", "95")
		x.until(t, " | 0 ok | 1 XID 95"+c.asked+" | 2 ok, excluded")
		x.mu.Lock()
		for _, text := range x.all {
			if strings.Contains(text, "XID 13") || !strings.Contains(text, "2 ok") {
				t.Error(text)
			}
		}
		x.mu.Unlock()
	}
}

func TestSimDriverStates(t *testing.T) {
	m := newMachine(t, "gpu model=t4\n")
	m.ctl("nvml", "9")
	x := m.watch()
	x.until(t, "NoDriver")
	m.ctl("nvml", "0")
	x.until(t, " | 0 ok")
	m.ctl("nvml", "18")
	x.until(t, "DriverMismatch | 0 the driver's libraries and the kernel module are of different releases (Driver/library version mismatch): reboot, or reload the module")
	m.ctl("nvml", "0")
	x.until(t, " | 0 ok")
}

// NVIDIA's own NVML, on a machine without its kernel module.
func TestNVIDIAWithoutGPU(t *testing.T) {
	if _, err := os.Stat("/proc/driver/nvidia/version"); err == nil {
		t.Skip("this machine has a GPU")
	}
	for _, driver := range fixture.Drivers {
		n := gpu.NVML{Probe: fixture.Need(t, fixture.Build("bin", "nvmlprobe")), Library: fixture.NVIDIA(t, driver, "libnvidia-ml.so.1")}
		_, err := n.Inventory(t.Context())
		var said *gpu.NVMLError
		if !errors.As(err, &said) || said.Code != 9 {
			t.Errorf("driver %s: %v", driver, err)
		}
		x := machine{t: t, NVML: n}.watch()
		x.until(t, "NoDriver")
	}
}
