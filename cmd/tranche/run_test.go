package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"tranche.dev/tranche/internal/assets"
	"tranche.dev/tranche/internal/ps"
	"tranche.dev/tranche/internal/sandbox"
)

// program is the tranche under test, built as it is shipped (and not with the race detector, which
// makes each of its many starts slow).
var program string

func TestMain(m *testing.M) {
	// The sandbox's second stage is this program again, when a test calls it by itself.
	if len(os.Args) == 3 && os.Args[1] == sandbox.EnterCommand {
		main()
		os.Exit(0)
	}
	if assets.Version() == "" {
		fmt.Println("SKIP: built without the libraries; run `make build` first")
		os.Exit(0)
	}
	dir, err := os.MkdirTemp("", "tranche-test")
	if err != nil {
		panic(err)
	}
	program = filepath.Join(dir, "tranche")
	build := exec.Command("go", "build", "-buildvcs=false", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Printf("go build: %v\n%s", err, out)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// box is a state directory of its own, with what its programs need.
type box struct {
	t   *testing.T
	env []string
}

func newBox(t *testing.T) *box {
	t.Helper()
	env := append(os.Environ(), "TRANCHE_STATE_DIR="+t.TempDir(), "XDG_CACHE_HOME="+cacheDir(t))
	return &box{t: t, env: env}
}

func cacheDir(t *testing.T) string {
	// Short: its path goes into the libraries.
	dir, err := os.MkdirTemp("", "tr")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func gpuload(t *testing.T) string {
	t.Helper()
	path, _ := filepath.Abs("../../build/bin/gpuload")
	if _, err := os.Stat(path); err != nil {
		t.Skip("no gpuload; run `make build gpuload`")
	}
	return path
}

func (b *box) command(args ...string) *exec.Cmd {
	cmd := exec.Command(program, args...)
	cmd.Env = b.env
	return cmd
}

// run returns both outputs together and how it ended.
func (b *box) run(args ...string) (string, *os.ProcessState) {
	b.t.Helper()
	cmd := b.command(args...)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		b.t.Fatal(err)
	}
	return string(out), cmd.ProcessState
}

func (b *box) start(args ...string) *exec.Cmd {
	b.t.Helper()
	cmd := b.command(args...)
	if err := cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = cmd.Process.Kill(); _, _ = cmd.Process.Wait() })
	return cmd
}

func (b *box) ps() []ps.Row {
	b.t.Helper()
	out, err := b.command("ps", "-o", "json").Output()
	var rows []ps.Row
	if err == nil {
		err = json.Unmarshal(out, &rows)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return rows
}

// until waits for a state of the list of slices.
func (b *box) until(what string, ok func([]ps.Row) bool) []ps.Row {
	b.t.Helper()
	var rows []ps.Row
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if rows = b.ps(); ok(rows) {
			return rows
		}
	}
	b.t.Fatalf("never %s: %+v", what, rows)
	return nil
}

var got = regexp.MustCompile(`plain: got (\d+) x`)

// allocations is how many blocks gpuload got, for each line of it.
func allocations(out string) []int {
	var n []int
	for _, m := range got.FindAllStringSubmatch(out, -1) {
		v, _ := strconv.Atoi(m[1])
		n = append(n, v)
	}
	return n
}

const mi64 = "plain:67108864:" // gpuload --alloc, blocks of 64 MiB

func TestEndsAsTheCommand(t *testing.T) {
	b := newBox(t)
	for command, want := range map[string]string{
		"exit 0": "exit status 0", "exit 7": "exit status 7", "kill -TERM $$": "signal: terminated", "kill -KILL $$": "signal: killed",
		"kill -SEGV $$": "signal: segmentation fault", "kill -INT $$": "signal: interrupt", "kill -QUIT $$": "signal: quit",
	} {
		out, state := b.run("run", "--sim", "t4", "--", "sh", "-c", command)
		if state.String() != want || out != "" {
			t.Errorf("%s: %v, %q; want %s", command, state, out, want)
		}
	}
	if rows := b.ps(); len(rows) != 0 {
		t.Errorf("left: %+v", rows)
	}
}

func TestForwardsSignals(t *testing.T) {
	b := newBox(t)
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT, syscall.SIGUSR1} {
		cmd := b.command("run", "--sim", "t4", "--", "sh", "-c", "trap 'echo got; exit 3' HUP TERM INT USR1; echo ready; while :; do sleep 0.02; done")
		// A session of its own: no terminal sends signals to the child by itself.
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		var out bytes.Buffer
		pipe, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 6)
		_, _ = pipe.Read(buf)
		_ = cmd.Process.Signal(sig)
		_, _ = out.ReadFrom(pipe)
		err = cmd.Wait()
		if out.String() != "got\n" || cmd.ProcessState.ExitCode() != 3 {
			t.Errorf("%v: %q, %v", sig, out.String(), err)
		}
	}
}

func TestRefusals(t *testing.T) {
	b := newBox(t)
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	fifo, spec := filepath.Join(t.TempDir(), "fifo"), filepath.Join(t.TempDir(), "spec.YAML")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(spec, []byte("gpus:\n- model: t4\n\nzzz: 3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	machine := t.TempDir()
	for name, text := range map[string]string{"spec": "\ngpu model=zzz\n", "count": "gpu model=t4 count=17\n"} {
		if err := os.WriteFile(filepath.Join(machine, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"--cores 101 -- true", 125, "tranche: --cores 101: 1 to 100 of one GPU, or a multiple of 100 for whole GPUs\n"},
		{"--cores 0 -- true", 125, "tranche: --cores 0: 1 to 100"},
		{"--memory 8g -- true", 125, "tranche: --memory 8g: write 8Gi (gibibytes) or 8G (gigabytes)\n"},
		{"--burst 50 -- true", 125, "tranche: --burst 50: needs --cores"},
		{"--cores 30 --burst 20 -- true", 125, "tranche: --burst 20: from --cores (30"},
		{"--strict maybe -- true", 125, "tranche: --strict maybe: auto, on or off\n"},
		{"--sim t4", 125, "no command given"},
		{"--sim a100-79g -- true", 125, "no model 'a100-79g'"},
		{"--sim t4 --gpu 3 -- true", 125, "--gpu 3: no such GPU; there are 0 (GPU-"},
		{"--sim t4:2 --gpu 0,0 -- true", 125, "--gpu 0: named twice"},
		{"--sim t4:2 --gpu 0 --cores 200 -- true", 125, "--gpu names 1 GPUs, --cores 200 takes 2"},
		{"--sim t4 --cores 200 -- true", 125, "2 GPUs asked, the request fits on 1 of 1"},
		{"--sim t4 --memory 20Gi -- true", 125, "…): memory 20 GiB asked, 14.5 GiB free"},
		{"--sim t4 -- /no/such/program", 127, "no such file"},
		{"--sim t4 -- " + text, 126, "permission denied"},
		{"--sim t4 --gpu= -- true", 125, "--gpu: a GPU without a name"},
		{"--sim t4 --gpu , -- true", 125, "--gpu: a GPU without a name"},
		{"--sim t4 --name= -- true", 125, "--name: no value given"},
		{"--sim t4 --strict= -- true", 125, "--strict: no value given"},
		{"--sim t4 --trace=/nonexistent/x -- true", 125, "--trace: open /nonexistent/x: no such file"},
		{"--sim t4 --trace file -- true", 125, "--trace takes its file behind =, as in --trace=file\n"},
		{"--sim t4 --cores 10 --burst 20 --weight 5 --class latency -- true", 0, ""},
		{"--sim t4 --weight 1001 -- true", 125, "--weight 1001: 1 to 1000\n"},
		{"--sim t4 --class fast -- true", 125, "--class fast: latency or normal\n"},
		{"--sim t4 --class= -- true", 125, "--class: no value given"},
		{"--sim t4:0 -- true", 125, "--sim t4:0: \"t4:0\": 1 to 16 GPUs\n"},
		{"--sim t4:17 -- true", 125, "1 to 16 GPUs\n"},
		{"--sim " + machine + " -- true", 125, "line 2: gpu: no model 'zzz'; there are t4, "},
		{"--sim " + machine + "/count -- true", 125, "line 1: count: bad value '17'; 1 to 16\n"},
		{"--sim /dev/zero -- true", 125, "--sim /dev/zero: not a file or directory\n"},
		{"--sim " + fifo + " -- true", 125, "not a file or directory\n"},
		{"--sim " + spec + " -- true", 125, "line 4: unknown key"},
		{"--nonsense -- true", 125, "unknown flag: --nonsense"},
	} {
		out, state := b.run(append([]string{"run"}, strings.Fields(c.args)...)...)
		if state.ExitCode() != c.code || !strings.Contains(out, c.want) {
			t.Errorf("%s: status %d, %q; want %d, %q", c.args, state.ExitCode(), out, c.code, c.want)
		}
	}
}

func TestNoGPU(t *testing.T) {
	b := newBox(t)
	if out, err := exec.Command("sh", "-c", "ldconfig -p; ls /usr/lib/wsl/lib").Output(); err == nil && strings.Contains(string(out), "libcuda.so.1") {
		t.Skip("this machine has a driver")
	}
	out, state := b.run("run", "--", "true")
	if state.ExitCode() != 125 || strings.Count(out, "\n") != 1 || !strings.Contains(out, "no GPU") || !strings.Contains(out, "--sim") {
		t.Errorf("%d, %q", state.ExitCode(), out)
	}
}

func TestMemoryLimitHolds(t *testing.T) {
	b, load := newBox(t), gpuload(t)
	free, _ := b.run("run", "--sim", "t4", "--memory", "1Gi", "--", load, "--alloc", mi64+"100")
	n := allocations(free)
	// A context and 1 MiB of the reserved kind are charged before.
	if len(n) != 1 || n[0] < 13 || n[0] > 15 || !strings.Contains(free, "CUDA_ERROR_OUT_OF_MEMORY") {
		t.Errorf("%v of 16 blocks of 64 MiB: %s", n, free)
	}
	all, _ := b.run("run", "--sim", "t4", "--", load, "--alloc", mi64+"20")
	if n := allocations(all); len(n) != 1 || n[0] != 20 {
		t.Errorf("without a limit: %s", all)
	}
}

// With no variable left, and asked by path, the limit holds.
func TestStrict(t *testing.T) {
	b, load := newBox(t), gpuload(t)
	if err := sandbox.Probe(); err != nil && os.Getuid() != 0 {
		t.Skip(err)
	}
	out, state := b.run("run", "--sim", "t4", "--memory", "1Gi", "--strict", "on", "--", "env", "-i", load, "--alloc", mi64+"100")
	if n := allocations(out); len(n) != 1 || n[0] < 13 || n[0] > 15 {
		t.Errorf("%v: %s", state, out)
	}
	if _, err := os.Stat("/etc/ld.so.cache"); err != nil {
		return
	}
	out, _ = b.run("run", "--sim", "t4", "--strict", "on", "--", "sh", "-c", "/sbin/ldconfig -p | grep -c 'libcuda.so.1 .*slices'")
	if strings.TrimSpace(out) != "1" {
		t.Errorf("the loader's cache does not lead to the slice: %q", out)
	}
}

func TestSharing(t *testing.T) {
	b := newBox(t)
	sim := []string{"run", "--sim", "t4:2", "--strict", "off"}
	run := func(args ...string) []string { return append(append([]string{}, sim...), args...) }
	b.start(run("--name", "a", "--cores", "60", "--memory", "8Gi", "--", "sleep", "60")...)
	b.until("one slice", func(r []ps.Row) bool { return len(r) == 1 })
	b.start(run("--name", "b", "--cores", "40", "--memory", "2Gi", "--", "sleep", "60")...)
	rows := b.until("two slices", func(r []ps.Row) bool { return len(r) == 2 })
	if rows[0].UUID != rows[1].UUID || rows[0].Name != "a" || rows[1].Cores != 40 || rows[1].Memory != 2<<30 || len(rows[1].PIDs) != 1 {
		t.Errorf("best fit puts both on one GPU: %+v", rows)
	}
	out, state := b.run(run("--cores", "10", "--gpu", "0", "--", "true")...)
	if state.ExitCode() != 125 || !strings.Contains(out, "gpu 0 (GPU-") || !strings.Contains(out, "10 of 100 cores asked, 0 free") {
		t.Errorf("a full GPU: %d, %q", state.ExitCode(), out)
	}
	if out, state := b.run(run("--cores", "100", "--", "true")...); state.ExitCode() != 0 {
		t.Errorf("the other GPU is free: %s", out)
	}
}

// The supervisor is killed: the command goes on under its limits, the reservation stays as long.
func TestKilledSupervisor(t *testing.T) {
	b := newBox(t)
	marker := filepath.Join(t.TempDir(), "pid")
	sup := b.start("run", "--sim", "t4", "--cores", "90", "--", "sh", "-c", "echo $$ >"+marker+"; exec sleep 60")
	rows := b.until("running", func(r []ps.Row) bool {
		_, err := os.Stat(marker)
		return len(r) == 1 && err == nil && len(r[0].PIDs) > 0
	})
	_ = sup.Process.Kill()
	_, _ = sup.Process.Wait()
	if again := b.ps(); len(again) != 1 || again[0].ID != rows[0].ID {
		t.Errorf("the reservation went with the supervisor: %+v", again)
	}
	if _, state := b.run("run", "--sim", "t4", "--cores", "20", "--", "true"); state.ExitCode() != 125 {
		t.Error("what is still used was given away")
	}
	text, _ := os.ReadFile(marker)
	pid, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	if pid != rows[0].PIDs[0] {
		t.Errorf("pid %d, listed %v", pid, rows[0].PIDs)
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)
	b.until("free again", func(r []ps.Row) bool { return len(r) == 0 })
	if out, state := b.run("run", "--sim", "t4", "--cores", "100", "--", "true"); state.ExitCode() != 0 {
		t.Error(out)
	}
	libraries, _ := filepath.Glob(filepath.Join(b.lookup("XDG_CACHE_HOME"), "tranche/slices/*"))
	if len(libraries) != 0 {
		t.Errorf("left: %v", libraries)
	}
}

func (b *box) lookup(name string) string {
	for _, e := range b.env {
		if v, ok := strings.CutPrefix(e, name+"="); ok {
			return v
		}
	}
	return ""
}

// A daemon that the command leaves behind keeps the slice.
func TestDaemon(t *testing.T) {
	b := newBox(t)
	marker := filepath.Join(t.TempDir(), "pid")
	_, state := b.run("run", "--sim", "t4", "--cores", "50", "--", "sh", "-c", "setsid sh -c 'echo $$ >"+marker+"; exec sleep 60' >/dev/null 2>&1 </dev/null & while ! test -s "+marker+"; do sleep 0.02; done")
	text, _ := os.ReadFile(marker)
	pid, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	if rows := b.ps(); state.ExitCode() != 0 || len(rows) != 1 || len(rows[0].PIDs) != 1 || rows[0].PIDs[0] != pid {
		t.Errorf("%v, daemon %d: %+v", state, pid, rows)
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)
	b.until("free again", func(r []ps.Row) bool { return len(r) == 0 })
}

// A process of the slice is killed while it holds memory: the slice gets it back.
func TestKilledProcess(t *testing.T) {
	b, load := newBox(t), gpuload(t)
	b.start("run", "--sim", "t4", "--memory", "1Gi", "--", "sh", "-c", load+" --alloc "+mi64+"10 --hold 60 & sleep 1.5; kill -9 $!; sleep 30")
	b.until("memory in use", func(r []ps.Row) bool { return len(r) == 1 && r[0].Used >= 640<<20 })
	b.until("memory given back", func(r []ps.Row) bool { return len(r) == 1 && r[0].Used == 0 })
}

// Slices within a slice share its limit, and each has its own.
func TestNested(t *testing.T) {
	b, load := newBox(t), gpuload(t)
	inner := program + " run --memory %s -- " + load + " --alloc " + mi64 + "100"
	script := fmt.Sprintf(inner, "600Mi") + " --hold 3 & sleep 1.5; " + fmt.Sprintf(inner, "4Gi") + "; wait; " + fmt.Sprintf(inner, "4Gi")
	out, _ := b.run("run", "--sim", "t4", "--memory", "1Gi", "--name", "outer", "--", "sh", "-c", script)
	if !strings.Contains(out, "gpu 0: memory 4 GiB asked, the slice around this one has 1 GiB") {
		t.Errorf("not told: %s", out)
	}
	n := allocations(out)
	if len(n) != 3 {
		t.Fatal(out)
	}
	// gpuload prints when it is through with holding: the second is first.
	first, second, alone := n[1], n[0], n[2]
	if n[0] > n[1] {
		first, second = n[0], n[1]
	}
	if first < 6 || first > 8 || second < 3 || first+second > 13 {
		t.Errorf("one of 600 MiB got %d blocks, beside it %d of 64 MiB, in 1 GiB\n%s", first, second, out)
	}
	if alone < 13 || alone > 15 {
		t.Errorf("alone in 1 GiB: %d blocks\n%s", alone, out)
	}
}

func TestWholeGPUsAndLists(t *testing.T) {
	b := newBox(t)
	b.start("run", "--sim", "t4:3", "--cores", "200", "--", "sleep", "60")
	rows := b.until("two GPUs", func(r []ps.Row) bool { return len(r) == 2 })
	if rows[0].GPU != 0 || rows[1].GPU != 1 || rows[0].Cores != 100 {
		t.Errorf("%+v", rows)
	}
	prefix := rows[0].UUID[:12]
	out, state := b.run("run", "--sim", "t4:3", "--gpu", prefix, "--cores", "1", "--", "true")
	if state.ExitCode() != 125 || !strings.Contains(out, "1 of 100 cores asked, 0 free") {
		t.Errorf("%s: %d %q", prefix, state.ExitCode(), out)
	}
	if out, state := b.run("run", "--sim", "t4:3", "--gpu", "2", "--cores", "20", "--memory", "1Gi", "--", "true"); state.ExitCode() != 0 {
		t.Error(out)
	}
}

func TestVersionAndTrace(t *testing.T) {
	b, load := newBox(t), gpuload(t)
	if out, _ := b.run("version"); !strings.Contains(out, "libraries "+assets.Version()) {
		t.Error(out)
	}
	file := filepath.Join(t.TempDir(), "trace")
	b.run("run", "--sim", "t4", "--trace="+file, "--", load, "--alloc", mi64+"1")
	if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text), "cuInit") {
		t.Errorf("trace: %v, %q", err, text)
	}
}

// driverBox is a box whose loader finds a driver on the library path, installed as a vendor does:
// versioned files and links. It is the simulated driver, but tranche does not know.
func driverBox(t *testing.T) (b *box, dir string) {
	b, dir = newBox(t), t.TempDir()
	machine := t.TempDir()
	if err := os.WriteFile(filepath.Join(machine, "spec"), []byte("gpu model=t4\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for asset, name := range map[string]string{assets.SimCUDA: "libcuda.so", assets.SimNVML: "libnvidia-ml.so"} {
		data, err := assets.Read(asset)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name+".550.1"), data, 0o755)
		}
		if err == nil {
			err = os.Symlink(name+".550.1", filepath.Join(dir, name+".1"))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	b.env = append(b.env, "LD_LIBRARY_PATH="+dir, "TRANCHE_SIM_DIR="+machine)
	return b, dir
}

func TestDriverOnLibraryPath(t *testing.T) {
	b, dir := driverBox(t)
	load := gpuload(t) + " --alloc " + mi64 + "20"
	past := "LD_LIBRARY_PATH=" + dir + " " + load
	if out, _ := b.run("run", "--memory", "1Gi", "--strict", "off", "--", "sh", "-c", load+"; "+past); len(allocations(out)) != 2 || allocations(out)[0] > 15 || allocations(out)[1] != 20 {
		t.Errorf("off: the first is limited, the one that goes past us is not: %s", out)
	}
	if err := sandbox.Probe(); err != nil {
		t.Skip(err)
	}
	limited := func(what, out string, most ...int) {
		t.Helper()
		n := allocations(out)
		ok := len(n) == len(most)
		for i := range n {
			ok = ok && i < len(most) && n[i] > 0 && n[i] <= most[i]
		}
		if !ok {
			t.Errorf("%s: got %v, at most %v: %s", what, n, most, out)
		}
	}
	out, _ := b.run("run", "--memory", "1Gi", "--strict", "on", "--", "sh", "-c", load+"; "+past)
	limited("on: past us leads to us", out, 15, 15)
	inner := program + " run --memory 600Mi --strict on -- sh -c '" + load + "; " + past + "'; " + load
	for _, outer := range []string{"on", "off"} {
		out, _ := b.run("run", "--memory", "1Gi", "--strict", outer, "--", "sh", "-c", inner)
		limited("strict within "+outer, out, 8, 8, 15)
	}
}
