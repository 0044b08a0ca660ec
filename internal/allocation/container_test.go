package allocation

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/state"
	"tranche.dev/tranche/internal/tenant"
	"tranche.dev/tranche/test/fixture"
)

// box is a node with one simulated GPU, and one allocation on it.
type box struct {
	*testing.T
	store *Store
	sim   string
	c     fixture.Container
}

var testID = IDOf([]string{"a", "b"})

func newBox(t *testing.T, g GPU) *box {
	fixture.NeedContainers(t)
	b := &box{T: t, sim: fixture.NewSharedSim(t)}
	view := fixture.NewView(t)
	b.store = newStore(t, t.TempDir())
	g.UUID = fixture.SimUUID
	b.bind(g)
	b.c = fixture.Container{Slice: b.store.path(testID), View: view, Shared: []string{b.sim}}
	return b
}

func (b *box) bind(g GPU) {
	b.Helper()
	if err := b.store.Bind(testID, Owner{"ns", "pod", "uid", "main"}, []GPU{g}); err != nil {
		b.Fatal(err)
	}
}

func (b *box) command(run string) *exec.Cmd { return b.c.Command(b, run, "TRANCHE_SIM_DIR="+b.sim) }

// run runs a command in the container to its end.
func (b *box) run(run string) (string, error) {
	b.Helper()
	var out bytes.Buffer
	cmd := b.command(run)
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// start starts a command that ends with the test, or before with the returned function.
func (b *box) start(run string) (end func()) {
	b.Helper()
	cmd := b.command(run)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	over := false
	end = func() {
		if !over {
			over = true
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	}
	b.Cleanup(func() {
		end()
		if b.Failed() {
			b.Logf("container: %s", out.String())
		}
	})
	return end
}

func (b *box) driver() gpu.NVML {
	return gpu.NVML{Probe: fixture.Build("bin", "nvmlprobe"), Library: fixture.Build("sim", "libnvidia-ml.so.1"), Env: []string{"TRANCHE_SIM_DIR=" + b.sim}}
}

// supervise runs Supervise until the test ends.
func (b *box) supervise() {
	superviseStore(b, b.store, SuperviseConfig{Driver: b.driver(), Warn: func(id string, err error) { b.Errorf("%s: %v", id, err) }})
}

// until waits for a state of the use.
func (b *box) until(what string, ok func(Use) bool) Use {
	b.Helper()
	var u Use
	var err error
	await(b, func() bool {
		u, err = b.store.Use(testID)
		return err == nil && ok(u)
	}, func() string { return fmt.Sprintf("%s: %+v %v", what, u, err) })
	return u
}

func await(t testing.TB, ok func() bool, what func() string) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what())
		}
	}
}

const gpuload = "/opt/build/bin/gpuload"

// What a container sees: its limit in force for any user, in a user namespace too, limits that cannot be
// written, and a ledger that can.
func TestContainer(t *testing.T) {
	g := GPU{UUID: fixture.SimUUID, Cores: 30, CoresLimited: true, Memory: 2 << 30, MemoryLimited: true, ContextBytes: 64 << 20}
	b := newBox(t, g)
	// The last one finds the library by a path that no environment can take away.
	for _, run := range []string{gpuload, "unshare --user " + gpuload, "env -u LD_LIBRARY_PATH " + gpuload} {
		b.bind(g)
		// One block less than fits, for the context.
		out, err := b.run(run + " --alloc plain:64Mi --json")
		if err != nil || !strings.Contains(out, `"count":31,"bytes":2080374784`) {
			t.Errorf("%s: %v\n%s", run, err, out)
		}
	}
	out, _ := b.run("echo x >/etc/tranche/slice/limits; echo y >/etc/tranche/slice/new; id -u")
	if strings.Count(out, "Read-only file system") != 2 || !strings.HasSuffix(out, "65534\n") {
		t.Error(out)
	}
}

// Without limits, or without a ledger that can be written, a process has no GPU.
func TestFailsClosed(t *testing.T) {
	b := newBox(t, GPU{Cores: 30, CoresLimited: true})
	b.c.NoLedger = true
	if out, err := b.run(gpuload + " --kernel 1ms --time 1"); err == nil || !strings.Contains(out, "ledger: Read-only file system; no GPU for this process") {
		t.Errorf("without a ledger: %v\n%s", err, out)
	}
	b.c.NoLedger = false
	if err := os.Remove(b.store.path(testID) + "/" + tenant.FileLimits); err != nil {
		t.Fatal(err)
	}
	if out, err := b.run(gpuload + " --kernel 1ms --time 1"); err == nil || !strings.Contains(out, "limits: No such file or directory; no GPU for this process") {
		t.Errorf("without limits: %v\n%s", err, out)
	}
}

// Processes of other PID namespaces are found, measured, and given back when they are killed.
func TestProcesses(t *testing.T) {
	b := newBox(t, GPU{Cores: 100, Memory: 8 << 30, MemoryLimited: true, ContextBytes: 64 << 20})
	b.supervise()
	end := b.start(gpuload + " --alloc plain:64Mi:16 --hold 60")
	u := b.until("found and measured", func(u Use) bool {
		return len(u.Processes) == 1 && u.Processes[0].HostPID != 0 && u.Processes[0].Memory[0] == 1<<30+64<<20 && u.GPUs[0].Overhead != 0
	})
	p := u.Processes[0]
	if host, ok := tenant.Find(p.HostPID); !ok || p.Command != "gpuload" || host.Start != p.Start || p.PID == p.HostPID {
		t.Errorf("%+v, here %+v", p, host)
	}
	if g := u.GPUs[0]; g.Memory != uint64(int64(1<<30+64<<20)+g.Overhead) || g.Peak < g.Memory || g.Former != 0 {
		t.Errorf("%+v", g)
	}
	end()
	u = b.until("given back", func(u Use) bool { return len(u.Processes) == 0 })
	if g := u.GPUs[0]; g.Peak < 1<<30 {
		t.Errorf("%+v", g)
	}
	b.until("nothing is left", func(u Use) bool { return u.GPUs[0].Memory == 0 })
}

// A container starts again while a process of the one before still holds memory: that stays charged.
func TestFormer(t *testing.T) {
	g := GPU{UUID: fixture.SimUUID, Cores: 100, Memory: 4 << 30, MemoryLimited: true, ContextBytes: 64 << 20}
	b := newBox(t, g)
	b.supervise()
	end := b.start(gpuload + " --alloc plain:64Mi:16 --hold 60")
	b.until("there", func(u Use) bool { return u.GPUs[0].Memory >= 1<<30 })
	b.bind(g)
	u := b.until("charged", func(u Use) bool { return u.GPUs[0].Former >= 1<<30 })
	if len(u.Processes) != 0 || u.GPUs[0].Memory != u.GPUs[0].Former {
		t.Errorf("%+v", u)
	}
	left := b.store.Leftovers()
	if len(left) != 1 || left[0].Record.Serial != 1 || left[0].Memory[g.UUID] != u.GPUs[0].Former {
		t.Errorf("%+v", left)
	}
	if out, err := b.run(gpuload + " --alloc plain:64Mi --json"); err != nil || !strings.Contains(out, fmt.Sprintf(`"count":%d,`, (4<<30-64<<20-u.GPUs[0].Former)>>26)) {
		t.Errorf("beside %d bytes: %v\n%s", u.GPUs[0].Former, err, out)
	}
	// A node that starts now knows of it too.
	if again := b.store.Leftovers(); len(again) != 1 {
		t.Errorf("%+v", again)
	}
	end()
	b.until("all is free", func(u Use) bool { return u.GPUs[0].Memory == 0 && len(b.store.Leftovers()) == 0 })
	if entries, _ := os.ReadDir(b.store.config.Dir); len(entries) != 2 {
		t.Errorf("left: %v", entries)
	}

	// The same of an allocation whose pod is gone: it is not listed, and its rest goes by itself.
	end = b.start(gpuload + " --alloc plain:64Mi:16 --hold 60")
	b.until("there again", func(u Use) bool { return u.GPUs[0].Memory >= 1<<30 })
	if err := b.store.Remove(testID); err != nil {
		t.Fatal(err)
	}
	if left := b.store.Leftovers(); len(b.store.List()) != 0 || len(left) != 1 || left[0].Memory[g.UUID] < 1<<30 {
		t.Errorf("%+v %+v", b.store.List(), left)
	}
	end()
	await(t, func() bool { return len(b.store.Leftovers()) == 0 }, func() string { return fmt.Sprint(b.store.Leftovers()) })
}

// A container that was killed and starts again at once has all of its memory, though nobody has looked at it yet.
func TestRestartAtOnce(t *testing.T) {
	g := GPU{UUID: fixture.SimUUID, Cores: 100, Memory: 2 << 30, MemoryLimited: true, ContextBytes: 64 << 20}
	b := newBox(t, g)
	end := b.start(gpuload + " --alloc plain:64Mi:16 --hold 60")
	await(t, func() bool { u, err := b.store.Use(testID); return err == nil && u.GPUs[0].Memory >= 1<<30 }, func() string { return "not there" })
	end()
	b.bind(g)
	if left := b.store.Leftovers(); len(left) != 0 {
		t.Errorf("%+v", left)
	}
	if out, err := b.run(gpuload + " --alloc plain:64Mi --json"); err != nil || !strings.Contains(out, `"count":31,`) {
		t.Errorf("%v\n%s", err, out)
	}
}

// load starts kernels of 2 ms, and tells at their end what share of the GPU they had in the first and in the last
// second.
func (b *box) load(options string) func() (first, last float64) {
	b.Helper()
	cmd := b.command(gpuload + " --kernel 2ms --json " + options)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = cmd.Process.Kill() })
	return func() (float64, float64) {
		b.Helper()
		err := cmd.Wait()
		var report struct{ Intervals []float64 }
		if err == nil {
			err = json.Unmarshal(out.Bytes(), &report)
		}
		if err != nil || len(report.Intervals) < 2 {
			b.Fatalf("%v: %s%s", err, out.String(), errs.String())
		}
		return report.Intervals[0], report.Intervals[len(report.Intervals)-1]
	}
}

// Two containers on one GPU under the arbiter, and a live change of one: both get what they may, and the
// change is there within its second.
func TestArbiterAndChange(t *testing.T) {
	g := GPU{UUID: fixture.SimUUID, Cores: 30, CoresLimited: true, Memory: 4 << 30, MemoryLimited: true, ContextBytes: 64 << 20}
	b := newBox(t, g)
	b.supervise()
	registry, err := state.Open(filepath.Join(t.TempDir(), "slices"), false)
	if err != nil {
		t.Fatal(err)
	}
	a, err := StartArbiter(ArbiterConfig{Store: b.store, Registry: registry, Driver: b.driver(), Warn: func(id string, err error) { t.Errorf("%s: %v", id, err) }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Stop)
	other := IDOf([]string{"other"})
	if err := b.store.Bind(other, Owner{"ns", "pod2", "uid2", "main"}, []GPU{g}); err != nil {
		t.Fatal(err)
	}
	await(t, func() bool { return a.Status().Slices == 2 }, func() string { return fmt.Sprintf("%+v", a.Status()) })
	const load = gpuload + " --kernel 2ms --time 60"
	b.start(load)
	b.c.Slice = b.store.path(other)
	b.start("unshare --user " + load)
	b.until("both run", func(u Use) bool { return u.GPUs[0].GPUTimeNs > 1e9/2 })
	g.Cores = 60
	if err := b.store.Change(testID, []GPU{g}); err != nil {
		t.Fatal(err)
	}
	b.until("a share of 60", func(u Use) bool { return u.GPUs[0].Got != nil && *u.GPUs[0].Got > 50 })
	before, after := [2]uint64{spent(b, testID), spent(b, other)}, [2]uint64{}
	await(t, func() bool {
		after = [2]uint64{spent(b, testID), spent(b, other)}
		return after[0]-before[0] > 1e9
	}, func() string { return fmt.Sprint(before, after) })
	if ratio := float64(after[0]-before[0]) / float64(after[1]-before[1]); ratio < 1.6 || ratio > 2.4 {
		t.Errorf("GPU time as %.2f to 1; want 60 to 30", ratio)
	}
	status := a.Status()
	if !status.Mandate || status.Handovers == 0 {
		t.Errorf("%+v", status)
	}
}

// spent is an allocation's GPU time in ns.
func spent(b *box, id string) uint64 {
	b.Helper()
	u, err := b.store.Use(id)
	if err != nil {
		b.Fatal(err)
	}
	return u.GPUs[0].GPUTimeNs
}

// Less memory than what is held: nothing is taken away, nothing more is given.
func TestLessMemory(t *testing.T) {
	g := GPU{UUID: fixture.SimUUID, Cores: 100, Memory: 4 << 30, MemoryLimited: true, ContextBytes: 64 << 20}
	b := newBox(t, g)
	b.start(gpuload + " --alloc plain:64Mi:16 --hold 60")
	b.until("there", func(u Use) bool { return u.GPUs[0].Memory >= 1<<30 })
	g.Memory = 1 << 30
	if err := b.store.Change(testID, []GPU{g}); err != nil {
		t.Fatal(err)
	}
	if out, err := b.run(gpuload + " --alloc plain:64Mi"); err == nil && !strings.Contains(out, "memory limit reached") {
		t.Error(out)
	}
	b.until("refused", func(u Use) bool { return u.GPUs[0].AllocsRefused > 0 && u.GPUs[0].Memory >= 1<<30 })
}
