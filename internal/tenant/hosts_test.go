package tenant

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestNSPIDs(t *testing.T) {
	for status, want := range map[string]string{
		"Name:\tx\nNSpid:\t4120\t29\nNSpgid:\t1\n": "[4120 29] <nil>",
		"NSpid:\t7":             "[7] <nil>",
		"Name:\tNSpid:\t7\n":    "[] no line NSpid",
		"NSpid:\n":              "[] NSpid with 0 numbers",
		"NSpid:\t1\t-1\n":       `[] NSpid: strconv.ParseUint: parsing "-1": invalid syntax`,
		"NSpid:\t99999999999\n": `[] NSpid: strconv.ParseUint: parsing "99999999999": value out of range`,
	} {
		pids, err := NSPIDs([]byte(status))
		if got := fmt.Sprint(pids, " ", err); got != want {
			t.Errorf("%q: %s; want %s", status, got, want)
		}
	}
}

func FuzzNSPIDs(f *testing.F) {
	for _, seed := range []string{"", "NSpid:\t1\t2\n", "NSpid:", "Name:\tNSpid:\t1\n", "NSpid:\t0x1\n"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, status []byte) {
		pids, err := NSPIDs(status)
		if (err == nil) == (len(pids) == 0) || len(pids) > nestMax || slices.ContainsFunc(pids, func(p int) bool { return p < 0 }) {
			t.Errorf("%v %v", pids, err)
		}
	})
}

// A process below our PID namespace is found once it is looked for, and gone when it is; what nobody has looked
// for is never gone.
func TestHosts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes a PID namespace")
	}
	// Number 1 and its child 2, a zombie: of those the kernel does not tell the namespace.
	cmd := exec.Command("sh", "-c", "readlink /proc/self & exec sleep 60")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Skipf("no PID namespace: %v", err)
	}
	lines := bufio.NewScanner(out)
	lines.Scan() // /proc shows our own namespace's numbers
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		status, err := os.ReadFile(filepath.Join("/proc", lines.Text(), "status"))
		if err == nil && strings.Contains(string(status), "State:\tZ") {
			break
		}
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("no zombie %q: %s %v", lines.Text(), status, err)
		}
	}
	ns, err := namespaceOf(fmt.Sprintf("/proc/%d/ns/pid", cmd.Process.Pid))
	if err != nil || ns == PIDNamespace() {
		t.Fatal(ns, err)
	}
	here, _ := Find(cmd.Process.Pid)
	inside, other := Process{PID: 1, Start: here.Start}, Process{PID: 2, Start: here.Start}

	h := NewHosts()
	if _, ok := h.Find(ns, inside); ok || h.Gone(ns, inside) || h.Gone(ns, other) || !h.Wanted() {
		t.Error("known before any scan")
	}
	if err := h.Scan(); err != nil || h.Wanted() {
		t.Error(err)
	}
	if pid, ok := h.Find(ns, inside); !ok || pid != here.PID || h.Gone(ns, inside) {
		t.Errorf("%d %v; want %d", pid, ok, here.PID)
	}
	if !h.Gone(ns, other) {
		t.Error("what a scan did not find lives")
	}
	if h.Gone(ns, Process{PID: 1, Start: here.Start + 500}) {
		t.Error("a process that has the number of another one was never looked for, and is gone")
	}
	if pid, ok := h.Find(PIDNamespace(), Process{PID: 77}); !ok || pid != 77 {
		t.Error(pid)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if !h.Gone(ns, inside) {
		t.Error("it lives on")
	}
	if err := h.Scan(); err != nil {
		t.Fatal(err)
	}
	if _, ok := h.Find(ns, inside); ok {
		t.Error("found when it is gone")
	}
}

// A file that a tenant made longer is cut back.
func TestTrim(t *testing.T) {
	l := newLedger(t)
	if l.Trim() {
		t.Error("a whole ledger was cut")
	}
	if err := l.file.Truncate(1 << 30); err != nil {
		t.Fatal(err)
	}
	if info, _ := l.file.Stat(); !l.Trim() || info.Size() != 1<<30 {
		t.Error("not cut")
	}
	if info, _ := l.file.Stat(); info.Size() != int64(len(l.mem)) {
		t.Error(info.Size())
	}
}
