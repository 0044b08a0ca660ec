package bed

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	InitMachine()
	os.Exit(m.Run())
}

// bare is a bed of machines without Kubernetes: these tests need no binaries.
func bare(t *testing.T, nodes int) *Bed {
	t.Helper()
	return bareIn(t, t.TempDir(), nodes)
}

func bareIn(t *testing.T, dir string, nodes int) *Bed {
	t.Helper()
	unable(t, able())
	b := &Bed{bin: t.TempDir(), config: Config{Say: t.Logf}}
	if err := b.makeDir(dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Down(); err != nil {
			t.Error(err)
		}
		if exists(b.Dir) {
			t.Errorf("%s is left", b.Dir)
		}
	})
	b.Control = &Machine{Name: "control", IP: controlIP, Dir: filepath.Join(b.Dir, "control"), bed: b}
	for i := range nodes {
		name := fmt.Sprintf("node%d", i+1)
		b.Nodes = append(b.Nodes, &Machine{Name: name, IP: fmt.Sprintf("10.88.0.%d", 11+i), Dir: filepath.Join(b.Dir, name), bed: b})
	}
	if err := os.Mkdir(filepath.Join(b.Dir, "log"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, m := range b.machines() {
		if err := m.makeDirs(); err != nil {
			t.Fatal(err)
		}
		if err := m.boot(t.Context()); errors.Is(err, ErrUnable) {
			unable(t, err)
		} else if err != nil {
			t.Fatal(err)
		}
	}
	return b
}

// unable skips the test, or fails it where these tests are what is asked for.
func unable(t *testing.T, err error) {
	t.Helper()
	if err != nil && os.Getenv("CI") == "true" && os.Getenv("TRANCHE_E2E") != "" {
		t.Fatal(err)
	}
	if err != nil {
		t.Skip(err)
	}
}

func TestExec(t *testing.T) {
	m := bare(t, 0).Control
	tests := []struct {
		name, script, stdin, out, err string
	}{
		{name: "output", script: "echo a; echo b >&2", out: "a\n"},
		{name: "status", script: "echo a; echo b >&2; exit 7", out: "a\n", err: "status 7: b"},
		{name: "signal", script: "kill -KILL $$", err: "ended by killed"},
		{name: "input", script: "cat", stdin: strings.Repeat("x", 1<<20), out: strings.Repeat("x", 1<<20)},
		{name: "names", script: "hostname; [ -e /proc/1 ] && tr '\\0' '\\n' < /proc/1/cmdline | head -n 1", out: "control\nbed-machine\n"},
		{name: "own processes", script: "cat /proc/[0-9]*/comm", out: "exe\nsh\n"},
		{name: "own devices", script: "mknod /dev/bed-test c 1 3; echo x > /dev/bed-test; ls /dev/pts/ptmx /dev/shm", out: "/dev/pts/ptmx\n\n/dev/shm:\n"},
		{name: "own state", script: "ls /var/lib /run; touch /etc/bed-test", out: "/run:\ncdi\nlock\n\n/var/lib:\nkubelet\n"},
		{name: "the host cannot be written", script: "for d in / /usr /opt /root; do touch $d/bed-test 2>/dev/null && echo $d; done; true"},
		{name: "sysctls as kubelet wants them", script: "cat /proc/sys/vm/overcommit_memory", out: "1\n"},
		{name: "the root of its cgroups", script: "cut -d: -f3 /proc/self/cgroup | grep -vx -e / -e /init; [ $? = 1 ]"},
		{name: "no such command", script: "", err: "executable file not found"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			c := Cmd{Argv: []string{"sh", "-c", test.script}}
			if test.script == "" {
				c.Argv = []string{"no-such-command"}
			}
			if test.stdin != "" {
				c.Stdin = strings.NewReader(test.stdin)
			}
			out, err := m.Run(t.Context(), c)
			if out != test.out {
				t.Errorf("%.200q, want %.200q", out, test.out)
			}
			if test.err == "" && err != nil || test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
				t.Errorf("error %v, want %q", err, test.err)
			}
		})
	}
	for _, path := range []string{"/dev/bed-test", "/etc/bed-test"} {
		if exists(path) {
			t.Errorf("%s, made in the machine, is on the host", path)
		}
		if !exists(m.Path(path)) {
			t.Errorf("%s cannot be seen from the host", m.Path(path))
		}
	}
}

// A command whose context ends takes its children along, and the machine goes on.
func TestExecContext(t *testing.T) {
	m := bare(t, 0).Control
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	start := time.Now()
	_, err := m.Exec(ctx, "sh", "-c", "sleep 1000 & sleep 1000")
	if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) > 10*time.Second {
		t.Errorf("%v after %v", err, time.Since(start))
	}
	awaitOutput(t, m, "0\n", "pgrep -c sleep || true")
}

// awaitOutput waits until a script says what it should.
func awaitOutput(t *testing.T, m *Machine, want, script string) {
	t.Helper()
	var got string
	var err error
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if got, err = m.Exec(t.Context(), "sh", "-c", script); err == nil && got == want {
			return
		}
	}
	t.Errorf("%s: %q, %v; want %q", script, got, err, want)
}

func TestDaemon(t *testing.T) {
	m := bare(t, 0).Control
	d, err := m.Start("sleeper", "sh", "-c", "echo started; exec sleep 1000")
	if err != nil {
		t.Fatal(err)
	}
	first, _ := d.PID()
	awaitOutput(t, m, "started\n", "cat "+d.Log)
	if err := d.Kill(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for _, starts := d.PID(); starts != 2; _, starts = d.PID() {
		time.Sleep(10 * time.Millisecond)
	}
	if second, _ := d.PID(); second == 0 || second == first {
		t.Errorf("process %d, was %d", second, first)
	}
	awaitOutput(t, m, "1\n", "pgrep -c sleep || true")
	d.Stop()
	awaitOutput(t, m, "0\n", "pgrep -c sleep || true")
	if err := d.Kill(syscall.SIGKILL); err == nil {
		t.Error("a stopped daemon was killed")
	}
	if err := d.Start(); err != nil {
		t.Fatal(err)
	}
	awaitOutput(t, m, "started\nstarted\nstarted\n", "cat "+d.Log)
	if _, err := m.Start("sleeper", "true"); err == nil {
		t.Error("two daemons of one name")
	}
	if _, err := m.Start("none", "/no/such/command"); err == nil {
		t.Error("a command that is not there was started")
	}
}

// After a reboot files, daemons and network are there, and nothing else.
func TestMachineReboot(t *testing.T) {
	b := bare(t, 2)
	m := b.Nodes[0]
	if _, err := m.Start("server", "busybox", "httpd", "-f", "-p", "80", "-h", "/var/lib"); err != nil {
		t.Fatal(err)
	}
	stopped, err := m.Start("stopped", "sleep", "1000")
	if err != nil {
		t.Fatal(err)
	}
	stopped.Stop()
	if _, err := m.Exec(t.Context(), "sh", "-c", "echo a > /var/lib/a; echo a > /run/a; mkdir /sys/fs/cgroup/*/a; setsid sleep 1000 > /dev/null 2>&1 &"); err != nil {
		t.Fatal(err)
	}
	awaitOutput(t, m, "1\n", "pgrep -c sleep || true")
	before := m.InitPID()
	if err := m.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	if exists(fmt.Sprintf("/proc/%d", before)) {
		t.Error("the former process 1 is still there")
	}
	awaitOutput(t, m, "a\n0\n", "ls /var/lib | grep -x a; ls /run | grep -x a; ls /sys/fs/cgroup/*/ | grep -x a; pgrep -c sleep || true")
	var got string
	for deadline := time.Now().Add(10 * time.Second); got == "" && time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		got, err = b.Nodes[1].Exec(t.Context(), "sh", "-c", "busybox wget -q -O - http://"+m.IP+"/a || true")
	}
	if got != "a\n" {
		t.Errorf("from the other node: %q, %v", got, err)
	}
	conn, err := m.Dial(t.Context(), "tcp", "127.0.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if _, err := net.InterfaceByName("br0"); err == nil {
		t.Error("the machines' bridge is on the host")
	}
}

// What a killed test leaves: no process, and what the next bed removes.
func TestKilledTest(t *testing.T) {
	const variable = "BED_TEST_KILLED"
	if dir := os.Getenv(variable); dir != "" {
		b := bareIn(t, dir, 0)
		if _, err := b.Control.Start("sleeper", "sleep", "1000"); err != nil {
			t.Fatal(err)
		}
		fmt.Println(b.Control.InitPID(), b.Dir, b.Control.cgroups[0])
		select {}
	}
	dir := t.TempDir()
	killed := exec.Command("/proc/self/exe", "-test.run=^TestKilledTest$")
	killed.Env = append(os.Environ(), variable+"="+dir)
	out, err := killed.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	unable(t, able())
	if err := killed.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	var left, cgroup string
	_, err = fmt.Fscan(out, &pid, &left, &cgroup)
	if killErr := killed.Process.Kill(); err != nil || killErr != nil {
		t.Fatal(err, killErr)
	}
	_ = killed.Wait()
	deadline := time.Now().Add(10 * time.Second)
	for exists(fmt.Sprintf("/proc/%d/ns", pid)) && time.Now().Before(deadline) {
		if state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil && strings.Contains(string(state), ") Z ") {
			break // nobody here reaps it
		}
		time.Sleep(20 * time.Millisecond)
	}
	if time.Now().After(deadline) {
		t.Errorf("process %d is there 10 s after its test was killed", pid)
	}
	if !exists(left) || !exists(cgroup) {
		t.Fatalf("%s and %s were to be there", left, cgroup)
	}
	bareIn(t, dir, 0)
	if exists(left) || exists(cgroup) {
		t.Errorf("%s or %s is still there after the next bed", left, cgroup)
	}
}
