package tenant

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestLimits(t *testing.T) {
	dir := t.TempDir()
	want := []Device{
		{UUID: "GPU-1", MemoryLimit: 8 << 30, MemoryLimited: true, ContextBytes: 1 << 20, Cores: 30, CoresLimited: true, CoresCeiling: 60},
		{UUID: "GPU-2", MemoryLimit: 80 << 30, Cores: 100, CoresCeiling: 100},
	}
	l, err := CreateLimits(dir, "name", want)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	r, err := OpenLimits(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if got, err := r.Devices(); err != nil || !reflect.DeepEqual(got, want) || r.Name() != "name" {
		t.Errorf("%+v %v %q", got, err, r.Name())
	}
	// A writer that died in the middle is noticed.
	l.page.generation++
	if _, err := r.Devices(); err == nil {
		t.Error("half-written limits were taken")
	}
	if err := l.Set(want[:1]); err != nil {
		t.Fatal(err)
	}
	if got, err := r.Devices(); err != nil || len(got) != 1 {
		t.Errorf("%+v %v", got, err)
	}
	if _, err := CreateLimits(dir, "again", want); err == nil {
		t.Error("an existing file was taken")
	}
	if err := os.Truncate(filepath.Join(dir, FileLimits), 100); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenLimits(dir); err == nil {
		t.Error("a short file was mapped")
	}
}

const client = `
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "ledger.h"
int main(int argc, char **argv)
{
	int fd = open(argv[1], O_RDWR | O_CLOEXEC);
	struct tr_ledger *l = mmap(0, sizeof *l, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	int slot = tr_ledger_claim(l, fd);
	if (!tr_ledger_add(l, slot, 0, 1000, 8192000) || tr_ledger_add(l, slot, 0, 1001, 8192000))
		return 1;
	l->slot[slot].dev[0].imported = (unsigned long long)atoll(argv[2]);
	l->slot[slot].dev[0].exported = (unsigned long long)atoll(argv[3]);
	if (argc > 4 && fork() == 0)
		slot = -1;
	printf("%d\n", slot);
	fflush(stdout);
	pause();
	return 0;
}
`

// The library's own code in one process, this package in another.
func TestWithLibrary(t *testing.T) {
	exe := filepath.Join(t.TempDir(), "client")
	buildClient(t, exe)
	start := func(l *Ledger, args ...string) *exec.Cmd {
		cmd := exec.Command(exe, append([]string{l.file.Name()}, args...)...)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		lines.Scan()
		if lines.Text() == "" {
			t.Fatal("the client failed")
		}
		return cmd
	}
	end := func(cmd *exec.Cmd) {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}

	l := newLedger(t)
	a, b := start(l, "0", "0"), start(l, "0", "0")
	if got := l.Usage(0).Memory; got != 2000*Unit {
		t.Errorf("two clients: %d", got)
	}
	if n := l.Reclaim(); n != 0 || !l.InUse() {
		t.Errorf("%d living ones reclaimed", n)
	}
	slots := l.Slots()
	if len(slots) != 2 || slots[0].PID != a.Process.Pid || slots[0].Dev[0].Charged != 1000*Unit || slots[0].PIDNS != PIDNamespace() {
		t.Errorf("%+v", slots)
	}
	// A zombie is over.
	_ = a.Process.Kill()
	for range 1000 {
		if slots[0].Gone() {
			break
		}
	}
	if n := l.Reclaim(); n != 1 || l.Usage(0).Memory != 1000*Unit {
		t.Errorf("after a death: %d reclaimed, %d left", n, l.Usage(0).Memory)
	}
	_ = a.Wait()
	end(b)
	if n := l.Reclaim(); n != 1 || l.Usage(0).Memory != 0 || l.InUse() {
		t.Errorf("after both: %d reclaimed, %d left", n, l.Usage(0).Memory)
	}

	// What others imported outlives its creator.
	creator, importer := start(l, "0", "2048000"), start(l, "2048000", "0")
	end(creator)
	l.Reclaim()
	if got := l.Usage(0).Memory; got != 1000*Unit+2048000 {
		t.Errorf("orphans: %d", got)
	}
	end(importer)
	l.Reclaim()
	if got := l.Usage(0).Memory; got != 0 {
		t.Errorf("orphans at the end: %d", got)
	}
}

// A child that was forked keeps what its parent held: the driver's own descriptors live as long.
func TestForkHoldsSlot(t *testing.T) {
	exe := filepath.Join(t.TempDir(), "client")
	buildClient(t, exe)
	l := newLedger(t)
	cmd := exec.Command(exe, l.file.Name(), "0", "0", "fork")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	lines.Scan()
	lines.Scan()
	_ = cmd.Process.Kill()
	_, _ = cmd.Process.Wait()
	if n := l.Reclaim(); n != 0 || l.Usage(0).Memory != 1000*Unit || !l.InUse() {
		t.Errorf("reclaimed from under a fork: %d, %d left", n, l.Usage(0).Memory)
	}
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	for range 100 {
		if l.Reclaim() == 1 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if l.Usage(0).Memory != 0 {
		t.Errorf("%d left", l.Usage(0).Memory)
	}
}

func buildClient(t *testing.T, exe string) {
	t.Helper()
	buildProgram(t, client, exe)
}

// buildProgram compiles C with the library's own ledger.
func buildProgram(t *testing.T, program, exe string) {
	t.Helper()
	cc := exec.Command("cc", "-std=gnu11", "-pthread", "-I../../include", "-I../../shim/common", "-xc", "-", "-xc", "../../shim/common/ledger.c", "-o", exe)
	cc.Stdin = strings.NewReader(program)
	if out, err := cc.CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, out)
	}
}

func TestGone(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p, ok := Find(cmd.Process.Pid)
	if !ok || p.Gone() {
		t.Errorf("%+v is gone", p)
	}
	if (Process{PID: p.PID, Start: p.Start + 50}).Gone() == false {
		t.Error("another process with the same number passes for this one")
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if !p.Gone() {
		t.Error("it still lives")
	}
}

// A ledger that is cut short while it is mapped cannot be judged.
func TestInUseOfTruncated(t *testing.T) {
	dir := t.TempDir()
	if err := CreateLedger(dir); err != nil {
		t.Fatal(err)
	}
	l, err := OpenLedger(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if l.InUse() {
		t.Error("an empty ledger is in use")
	}
	if err := os.Truncate(filepath.Join(dir, FileLedger), 0); err != nil {
		t.Fatal(err)
	}
	if !l.InUse() {
		t.Error("a ledger without content was judged")
	}
}

// The clock is the kernel's, as the libraries read it.
func TestNow(t *testing.T) {
	for range 1000 {
		var ts unix.Timespec
		before := NowNs()
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
		after := NowNs()
		kernel := ts.Nano() - timeNamespace().monotonicNs
		if before > kernel+50_000 || after < kernel-50_000 {
			t.Fatalf("%d, the kernel's clock %d, %d", before, kernel, after)
		}
	}
}
