package run

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"tranche.dev/tranche/internal/state"
	"tranche.dev/tranche/internal/tenant"
)

const asUser = "TRANCHE_TEST_REGISTRY"

// TestAsUser is the other user's process: a slice, and the arbiter of its user, until standard input ends.
func TestAsUser(t *testing.T) {
	root := os.Getenv(asUser)
	if root == "" {
		t.Skip("run by TestRootServesAll")
	}
	r, err := state.Open(root, true)
	if err != nil {
		t.Fatal(err)
	}
	own := newSlice(t, r, 30)
	c := candidateOf(t, r)
	c.enter()
	fmt.Println("slice", own.ID)
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// Root's arbiter takes over the slices of a user, whose own one stands aside and takes them back.
func TestRootServesAll(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("not root")
	}
	// A directory that another user can come to; that of the test is not.
	dir, err := os.MkdirTemp("", "tr")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	exe := filepath.Join(dir, "test")
	self, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = os.WriteFile(exe, self, 0o755)
	}
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	r, err := state.Open(filepath.Join(dir, "registry"), true)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run=^TestAsUser$")
	cmd.Env, cmd.Dir = append(os.Environ(), asUser+"="+r.Root, "TMPDIR=/tmp"), "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close(); _ = cmd.Wait() }()
	lines := bufio.NewScanner(out)
	lines.Scan()
	id, ok := strings.CutPrefix(lines.Text(), "slice ")
	if !ok {
		rest, _ := io.ReadAll(out)
		t.Fatalf("%s\n%s", lines.Text(), rest)
	}
	leases, err := tenant.OpenLeases(filepath.Join(r.Root, id))
	if err != nil {
		t.Fatal(err)
	}
	defer leases.Close()
	by := func(pid int) func() bool {
		return func() bool { got, _ := leases.Arbiter(); return got == pid && leases.Served(tenant.NowNs()) }
	}
	soon(t, "the user's own", by(cmd.Process.Pid))
	roots := candidateOf(t, r)
	if !roots.enter() {
		t.Fatal("root's arbiter is another one's")
	}
	began := time.Now()
	soon(t, "root's", func() bool { return by(os.Getpid())() && roots.use().Slices == 1 })
	t.Logf("sim: root's arbiter took over after %v", time.Since(began))
	for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if !by(os.Getpid())() {
			t.Fatal("the user's arbiter did not stay aside")
		}
	}
	roots.stop()
	began = time.Now()
	soon(t, "the user's own again", by(cmd.Process.Pid))
	t.Logf("sim: the user's took it back after %v", time.Since(began))
}
