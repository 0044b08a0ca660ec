package main

import (
	"fmt"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"tranche.dev/tranche/internal/ps"
	"tranche.dev/tranche/internal/tenant"
)

// registry is the directory of the box's one simulated machine.
func (b *box) registry() string {
	found, _ := filepath.Glob(filepath.Join(b.lookup("TRANCHE_STATE_DIR"), "sim/*/slices"))
	if len(found) != 1 {
		b.t.Fatalf("%d machines", len(found))
	}
	return found[0]
}

func (b *box) leases(id string) *tenant.Leases {
	b.t.Helper()
	l, err := tenant.OpenLeases(filepath.Join(b.registry(), id))
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(l.Close)
	return l
}

// within waits for something that takes milliseconds.
func within(t *testing.T, limit time.Duration, what string, ok func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	for !ok() {
		if time.Since(began) > limit {
			t.Fatalf("not within %v: %s", limit, what)
		}
		time.Sleep(time.Millisecond / 2)
	}
	return time.Since(began)
}

// The arbiter is killed at random, again and again: another run takes over, and the slices that are left
// see signs of life all the time.
func TestArbiterKilled(t *testing.T) {
	b := newBox(t)
	rng := rand.New(rand.NewSource(1))
	runs := map[int]*exec.Cmd{}
	start := func(name string) {
		cmd := b.start("run", "--sim", "t4", "--cores", "10", "--strict", "off", "--name", name, "--", "sleep", "300")
		runs[cmd.Process.Pid] = cmd
	}
	for i := range 4 {
		start(fmt.Sprint("first", i))
	}
	rows := b.until("all there", func(r []ps.Row) bool {
		return len(r) == 4 && !slices.ContainsFunc(r, func(r ps.Row) bool { return len(r.PIDs) == 0 })
	})
	var took, gaps []time.Duration
	defer func() {
		for _, r := range b.ps() {
			_ = syscall.Kill(r.PIDs[0], syscall.SIGKILL)
		}
	}()
	for round := range 4 {
		leases := map[string]*tenant.Leases{}
		arbiter := 0
		for _, r := range rows {
			leases[r.ID] = b.leases(r.ID)
			within(t, time.Second, "served", func() bool { return leases[r.ID].Served(tenant.NowNs()) })
			arbiter, _ = leases[r.ID].Arbiter()
		}
		cmd := runs[arbiter]
		if cmd == nil {
			t.Fatalf("round %d: the arbiter, %d, is none of the runs", round, arbiter)
		}
		time.Sleep(time.Duration(rng.Intn(40)) * time.Millisecond)
		_ = cmd.Process.Kill()
		began := time.Now()
		last := map[string]int64{}
		for id, l := range leases {
			_, last[id] = l.Arbiter()
		}
		for id, l := range leases {
			var beat int64
			within(t, time.Second, "another arbiter for "+id, func() bool {
				var pid int
				pid, beat = l.Arbiter()
				return pid != arbiter
			})
			gaps = append(gaps, time.Duration(beat-last[id]))
		}
		took = append(took, time.Since(began))
		_ = cmd.Wait()
		delete(runs, arbiter)
		// Its command goes on, and is served: it is a slice like the others.
		start(fmt.Sprint("later", round))
		rows = b.until("one more", func(r []ps.Row) bool {
			return len(r) == 5+round && !slices.ContainsFunc(r, func(r ps.Row) bool { return len(r.PIDs) == 0 })
		})
	}
	slices.Sort(took)
	slices.Sort(gaps)
	t.Logf("sim: gap between signs of life: %v", gaps)
	t.Logf("sim: takeover after kill -9, from the kill to the last slice's new arbiter: %v", took)
	if took[len(took)/2] > 100*time.Millisecond || took[len(took)-1] > 200*time.Millisecond {
		t.Errorf("takeover took %v", took)
	}
	// An arbiter whom nobody asks for turns gives a sign of life every 100 ms, so a gap is up to that and the takeover.
	if gaps[len(gaps)-1] > tenant.BeatStaleNs {
		t.Errorf("gaps of %v", gaps)
	}
}

// With nobody left nothing is left; with somebody left the next one goes on at once.
func TestArbiterEnds(t *testing.T) {
	b := newBox(t)
	if out, state := b.run("run", "--sim", "t4", "--cores", "10", "--", "true"); state.ExitCode() != 0 {
		t.Fatal(out)
	}
	registry := b.registry()
	left := func() []string {
		var names []string
		entries, _ := os.ReadDir(registry)
		for _, e := range entries {
			if e.Name() != "lock" {
				names = append(names, e.Name())
			}
		}
		return names
	}
	if names := left(); len(names) != 0 {
		t.Errorf("left: %v", names)
	}
	first := b.start("run", "--sim", "t4", "--cores", "10", "--name", "first", "--", "sleep", "60")
	b.until("one", func(r []ps.Row) bool { return len(r) == 1 })
	second := b.start("run", "--sim", "t4", "--cores", "10", "--name", "second", "--", "sleep", "60")
	rows := b.until("two", func(r []ps.Row) bool { return len(r) == 2 && len(r[1].PIDs) == 1 })
	leases := b.leases(rows[1].ID)
	if pid, _ := leases.Arbiter(); pid != first.Process.Pid {
		t.Errorf("%d is the arbiter, of %d and %d", pid, first.Process.Pid, second.Process.Pid)
	}
	_ = first.Process.Signal(syscall.SIGTERM)
	_ = first.Wait()
	took := within(t, time.Second, "the second is the arbiter", func() bool { pid, _ := leases.Arbiter(); return pid == second.Process.Pid })
	t.Logf("sim: takeover after an orderly end: %v", took)
	_ = second.Process.Signal(syscall.SIGTERM)
	_ = second.Wait()
	if names := left(); len(names) != 0 {
		t.Errorf("left: %v", names)
	}
}

// A command finds its slice served, by another run too.
func TestServedBeforeTheCommand(t *testing.T) {
	b := newBox(t)
	b.start("run", "--sim", "t4", "--cores", "10", "--", "sleep", "60")
	b.until("one", func(r []ps.Row) bool { return len(r) == 1 })
	slice, copied := filepath.Join(b.registry(), "*"), filepath.Join(t.TempDir(), "limits")
	// The youngest slice is its own.
	script := "d=$(ls -td " + slice + "/ | head -1); cp $d/limits " + copied
	if out, state := b.run("run", "--sim", "t4", "--cores", "20", "--strict", "off", "--", "sh", "-c", script); state.ExitCode() != 0 {
		t.Fatal(out)
	}
	leases, err := tenant.OpenLeases(filepath.Dir(copied))
	if err != nil {
		t.Fatal(err)
	}
	defer leases.Close()
	if lease, ok := leases.Get(0); !ok || !lease.Required || !leases.Served(tenant.NowNs()) {
		t.Errorf("%+v", lease)
	}
}

// Ctrl-Z on the arbiter's terminal: another run goes on, and the stopped one stops and continues as any
// program.
func TestArbiterStopped(t *testing.T) {
	b := newBox(t)
	first := b.command("run", "--sim", "t4", "--cores", "10", "--", "sh", "-c", "sleep 2; exit 3")
	// Not an orphaned process group, whose members the terminal does not stop.
	first.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := first.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = first.Process.Kill() })
	b.until("one", func(r []ps.Row) bool { return len(r) == 1 })
	second := b.start("run", "--sim", "t4", "--cores", "10", "--", "sleep", "60")
	rows := b.until("two", func(r []ps.Row) bool { return len(r) == 2 })
	leases := b.leases(rows[1].ID)
	by := func(pid int) func() bool { return func() bool { got, _ := leases.Arbiter(); return got == pid } }
	within(t, time.Second, "the first is the arbiter", by(first.Process.Pid))
	_ = first.Process.Signal(syscall.SIGTSTP)
	t.Logf("sim: takeover from a stopped one: %v", within(t, time.Second, "the second is the arbiter", by(second.Process.Pid)))
	within(t, time.Second, "stopped", func() bool {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", first.Process.Pid))
		return strings.Contains(string(text), ") T ")
	})
	_ = first.Process.Signal(syscall.SIGCONT)
	_ = first.Wait()
	if code := first.ProcessState.ExitCode(); code != 3 {
		t.Errorf("exit status %d of 3", code)
	}
	if !by(second.Process.Pid)() {
		t.Error("the second is not the arbiter any more")
	}
}

// ps tells what slices got, and who divides.
func TestAccounts(t *testing.T) {
	b, load := newBox(t), gpuload(t)
	a := b.start("run", "--sim", "t4", "--cores", "30", "--memory", "1Gi", "--name", "a", "--", load, "--kernel", "200us", "--time", "60")
	b.until("one", func(r []ps.Row) bool { return len(r) == 1 })
	b.start("run", "--sim", "t4", "--cores", "60", "--memory", "1Gi", "--name", "b", "--", "sh", "-c", load+" --alloc "+mi64+"100; exec "+load+" --kernel 200us --time 60")
	b.until("accounts", func(r []ps.Row) bool {
		if len(r) != 2 {
			return false
		}
		for _, row := range r {
			if row.GPUTimeNs == 0 || row.ThrottledNs == 0 || row.Launches == 0 || row.Wanted == nil || *row.Wanted < 50 || *row.Got < 20 {
				return false
			}
		}
		arbiter := r[0].Arbiter
		return r[1].AllocsRefused > 0 && r[1].Arbiter == nil && arbiter != nil && arbiter.PID == a.Process.Pid && arbiter.Slices == 2 &&
			arbiter.Handovers > 0 && arbiter.HandoverP99 >= arbiter.HandoverP50 && arbiter.HandoverP50 > 0
	})
	if out, _ := b.run("ps"); !strings.Contains(out, fmt.Sprintf("arbiter: a (pid %d), 2 slices (sim), handover ", a.Process.Pid)) {
		t.Error(out)
	}
}
