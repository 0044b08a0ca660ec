package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"tranche.dev/tranche/internal/ps"
)

func (b *box) set(args ...string) (string, *os.ProcessState) {
	b.t.Helper()
	return b.run(append([]string{"set"}, args...)...)
}

func TestSet(t *testing.T) {
	b := newBox(t)
	sim := func(name string, args ...string) {
		b.start(append(append([]string{"run", "--sim", "t4:2", "--strict", "off", "--name", name}, args...), "--", "sleep", "60")...)
	}
	sim("a", "--cores", "30", "--memory", "2Gi", "--gpu", "0")
	sim("b", "--cores", "40", "--memory", "4Gi", "--gpu", "0,1")
	sim("plain", "--gpu", "1")
	b.until("three", func(r []ps.Row) bool { return len(r) == 4 })
	of := func(name string) (out []ps.Row) {
		for _, r := range b.ps() {
			if r.Name == name {
				out = append(out, r)
			}
		}
		return out
	}
	for _, c := range []struct {
		args, want string
		code       int
	}{
		{"a", "nothing to change", 1}, {"", "which slice", 1}, {"a --cores 0", "--cores 0: 1 to 100", 1}, {"a --cores 200", "--cores 200: 1 to 100 of each GPU", 1},
		{"a --class fast", "--class fast: latency or normal", 1}, {"a --weight 0", "--weight 0: 1 to 1000", 1}, {"a --cores=", "--cores: no value given", 1},
		{"nobody --cores 1", "no slice nobody; running: a, b, plain", 1}, {"a --gpu 1 --cores 1", "slice a: --gpu 1: no such GPU; there are 0 (GPU-", 1},
		{"a --sim t4 --cores 1", "no slice a; none is running", 1},
		{"a --cores 61", "): 61 of 100 cores asked, 60 free", 1}, {"a --memory 11Gi", "memory 11 GiB asked, 10.5 GiB free", 1},
		{"plain --burst 50", "--burst 50: the slice has no share to go beyond", 1}, {"a --burst 20", "--burst 20: from the slice's cores (30", 1},
		{"a --cores 60", "", 0}, {"b --cores 41", "41 of 100 cores asked, 40 free", 1}, {"b --gpu 1 --cores 90 --burst 100", "", 0},
		{"a --memory 3Gi --class latency --weight 9", "", 0}, {"a --cores 20 --burst 70", "", 0}, {"plain --cores 10 --memory 1Gi", "", 0},
	} {
		began := time.Now()
		out, state := b.set(strings.Fields(c.args)...)
		if took := time.Since(began); state.ExitCode() != c.code || !strings.Contains(out, c.want) || c.want == "" && out != "" || took > time.Second {
			t.Errorf("set %s: status %d after %v, %q; want %d, %q", c.args, state.ExitCode(), took, out, c.code, c.want)
		}
	}
	if a := of("a"); a[0].Cores != 20 || a[0].Burst != 70 || a[0].Memory != 3<<30 || !a[0].Latency || a[0].Weight != 9 {
		t.Errorf("%+v", a)
	}
	if two := of("b"); two[0].Cores != 40 || two[1].Cores != 90 || two[1].Burst != 100 || two[0].Memory != 4<<30 {
		t.Errorf("%+v", two)
	}
	// What was given back is free for others.
	if out, state := b.run("run", "--sim", "t4:2", "--gpu", "0", "--cores", "40", "--memory", "7Gi", "--", "true"); state.ExitCode() != 0 {
		t.Error(out)
	}
	if _, state := b.run("run", "--sim", "t4:2", "--gpu", "0", "--cores", "41", "--", "true"); state.ExitCode() != 125 {
		t.Error("more was given than is free")
	}
}

// A lower memory limit takes nothing away, and refuses what comes.
func TestSetMemoryBelowUse(t *testing.T) {
	b, load := newBox(t), gpuload(t)
	word := filepath.Join(t.TempDir(), "go")
	if err := syscall.Mkfifo(word, 0o600); err != nil {
		t.Fatal(err)
	}
	first, second := load+" --alloc "+mi64+"10 --hold 60 & ", "read x <"+word+"; "+load+" --alloc "+mi64+"3; kill -9 $!; wait; "+load+" --alloc "+mi64+"3"
	cmd := b.command("run", "--sim", "t4", "--memory", "2Gi", "--name", "a", "--", "sh", "-c", first+second)
	var out strings.Builder
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	b.until("memory in use", func(r []ps.Row) bool { return len(r) == 1 && r[0].Used >= 640<<20 })
	if said, state := b.set("a", "--memory", "512Mi"); state.ExitCode() != 0 || !strings.Contains(said, "more than its new limit of 512 MiB: nothing is taken away") || strings.Count(said, "\n") != 1 {
		t.Errorf("%v, %q", state, said)
	}
	if r := b.ps(); r[0].Used < 640<<20 || r[0].Memory != 512<<20 {
		t.Errorf("%+v", r)
	}
	if err := exec.Command("sh", "-c", "echo now >"+word).Run(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	// The second has no room for its context.
	if n := allocations(out.String()); len(n) != 2 || n[0] != 10 || n[1] != 3 {
		t.Errorf("10 blocks, none while these are held, 3 then: %s", out.String())
	}
}

// Without a supervisor that follows nothing changes, and that is said.
func TestSetWithoutSupervisor(t *testing.T) {
	b := newBox(t)
	stopped := b.start("run", "--sim", "t4", "--cores", "30", "--name", "stopped", "--", "sleep", "60")
	killed := b.start("run", "--sim", "t4", "--cores", "30", "--name", "killed", "--", "sleep", "60")
	rows := b.until("two", func(r []ps.Row) bool { return len(r) == 2 && len(r[0].PIDs) == 1 && len(r[1].PIDs) == 1 })
	defer func() {
		for _, r := range rows {
			_ = syscall.Kill(r.PIDs[0], syscall.SIGKILL)
		}
	}()
	_ = killed.Process.Kill()
	_ = killed.Wait()
	if out, state := b.set("killed", "--cores", "40"); state.ExitCode() != 1 || !strings.Contains(out, "slice killed has no `tranche run` any more") {
		t.Errorf("%v, %q", state, out)
	}
	_ = stopped.Process.Signal(syscall.SIGSTOP)
	out, state := b.set("stopped", "--cores", "40")
	if state.ExitCode() != 1 || !strings.Contains(out, "did not follow within 2s; is it stopped? Nothing was changed") {
		t.Errorf("%v, %q", state, out)
	}
	_ = stopped.Process.Signal(syscall.SIGCONT)
	time.Sleep(600 * time.Millisecond)
	for _, r := range b.ps() {
		if r.Cores != 30 {
			t.Errorf("%+v", r)
		}
	}
	if out, state := b.set("stopped", "--cores", "40"); state.ExitCode() != 0 {
		t.Error(out)
	}
}

// A slice within another is cut to that one's limits.
func TestSetNested(t *testing.T) {
	b := newBox(t)
	inner := program + " run --memory 600Mi --name inner -- sleep 60"
	b.start("run", "--sim", "t4", "--cores", "50", "--memory", "1Gi", "--name", "outer", "--", "sh", "-c", inner)
	b.until("both", func(r []ps.Row) bool { return len(r) == 2 })
	if out, state := b.set("inner", "--cores", "90", "--memory", "8Gi"); state.ExitCode() != 0 {
		t.Error(out)
	}
	for _, r := range b.ps() {
		if r.Name == "inner" && (r.Cores != 50 || r.Memory != 1<<30) {
			t.Errorf("%+v", r)
		}
	}
}
