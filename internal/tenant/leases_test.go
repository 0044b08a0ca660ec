package tenant

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// newSlice makes the files of a slice of two GPUs.
func newSlice(t *testing.T, devices ...Device) (string, *Leases) {
	t.Helper()
	dir := t.TempDir()
	if len(devices) == 0 {
		devices = []Device{{UUID: "GPU-1", Cores: 100}, {UUID: "GPU-2", Cores: 100}}
	}
	l, err := CreateLimits(dir, "name", devices)
	if err == nil {
		err = CreateLedger(dir)
	}
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	return dir, openWriter(t, dir)
}

func openWriter(t *testing.T, dir string) *Leases {
	t.Helper()
	d, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	l, err := OpenLeasesWriterIn(d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return l
}

func sampleLease() Lease {
	return Lease{Required: true, Eligible: 5, TAT: -7, GPUTime: 9, Wanted: 5000, Got: 3000, Granted: 11, Grants: [2]Grant{
		{Seq: 4, Slot: 3, Local: true, Start: 100, End: Forever, Since: 90, InFlight: 1, Beside: 120, BesideSince: 140},
		{Seq: 5, Slot: 1023, Continues: true, Coupled: true, Start: 200, End: 300}}}
}

func TestLeases(t *testing.T) {
	dir, w := newSlice(t)
	r, err := OpenLeases(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	want := sampleLease()
	w.Set(1, want)
	if got, ok := r.Get(1); !ok || got != want {
		t.Errorf("%+v, %v; want %+v", got, ok, want)
	}
	if got, ok := r.Get(0); !ok || got != (Lease{}) {
		t.Errorf("another device: %+v, %v", got, ok)
	}
	if r.Served(1000) {
		t.Error("served before a sign of life")
	}
	w.Beat(1000, 42)
	if pid, beat := r.Arbiter(); pid != 42 || beat != 1000 || !r.Served(1000+BeatStaleNs-1) || r.Served(1000+BeatStaleNs) {
		t.Errorf("arbiter %d, last seen %d", pid, beat)
	}
	w.Release()
	got, _ := r.Get(1)
	if want.Required = false; got != want || r.Served(1001) {
		t.Errorf("released: %+v", got)
	}
}

// A writer that died in the middle keeps readers out, until the next one opens the page.
func TestLeasesRepair(t *testing.T) {
	dir, w := newSlice(t)
	w.Set(0, sampleLease())
	w.page.lease[0].word++
	if _, ok := w.Get(0); ok {
		t.Error("a half-written lease was taken")
	}
	again := openWriter(t, dir)
	if got, ok := again.Get(0); !ok || got != sampleLease() {
		t.Errorf("%+v, %v", got, ok)
	}
	w.page.lease[0].word++
	again.Set(0, sampleLease())
	if _, ok := w.Get(0); !ok || w.page.lease[0].word&1 != 0 {
		t.Error("not readable after the next writer's Set")
	}
	// Not a leases page: begun anew.
	w.page.magic++
	if _, err := OpenLeases(dir); err == nil {
		t.Error("a damaged page was read")
	}
	if got, ok := openWriter(t, dir).Get(0); !ok || got != (Lease{}) {
		t.Errorf("taken from a damaged page: %+v", got)
	}
}

// Readers that sleep are woken by what is new to them.
func TestLeasesWake(t *testing.T) {
	_, w := newSlice(t)
	l := sampleLease()
	w.Set(0, l)
	word := &w.page.lease[0].word
	woken := make(chan error, 1)
	sleep := func() {
		started := make(chan struct{})
		go func() {
			close(started)
			woken <- FutexWait(word, atomic.LoadUint32(word), NowNs()+20e9)
		}()
		<-started
		time.Sleep(20 * time.Millisecond)
	}
	sleep()
	if l.TAT, l.Got = 1, 2; w.Set(0, l) {
		t.Error("the arbiter's books are no news")
	}
	if l.Grants[1].End = 250; !w.Set(0, l) {
		t.Error("a turn's end is news")
	}
	w.Wake(0)
	if err := <-woken; err != nil {
		t.Error(err)
	}
	sleep()
	w.Release()
	if err := <-woken; err != nil {
		t.Error(err)
	}
}

// What a process without a meter looks at.
func TestMetered(t *testing.T) {
	dir, w := newSlice(t)
	metered := func() uint32 { return atomic.LoadUint32(&w.page.metered) }
	d, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	limits, err := OpenLimitsWriterIn(d)
	if err != nil {
		t.Fatal(err)
	}
	defer limits.Close()
	limited := []Device{{UUID: "GPU-1", Cores: 100}, {UUID: "GPU-2", Cores: 30, CoresLimited: true}}
	free := []Device{{UUID: "GPU-1", Cores: 100}, {UUID: "GPU-2", Cores: 100}}
	for i, step := range []struct {
		do   func()
		want uint32
	}{
		{func() {}, 0},
		{func() { _ = limits.Set(limited) }, 1},
		{func() { w.Set(0, Lease{Required: true}) }, 1},
		{func() { _ = limits.Set(free) }, 1},
		{func() { w.Set(0, Lease{}) }, 0},
		{func() { w.Set(1, Lease{Required: true}) }, 1},
		{w.Release, 0},
	} {
		if step.do(); metered() != step.want {
			t.Errorf("step %d: %d", i, metered())
		}
	}
	_, w = newSlice(t, limited...)
	if metered() != 1 {
		t.Error("a new slice with a limit")
	}
}

const turnTaker = `
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "ledger.h"
int main(int argc, char **argv)
{
	int fd = open(argv[1], O_RDWR | O_CLOEXEC);
	struct tr_ledger *l = mmap(0, sizeof *l, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	int lfd = open(argv[2], O_RDONLY | O_CLOEXEC);
	char *limits = mmap(0, TR_LEASES_OFFSET + 4096, PROT_READ, MAP_SHARED, lfd, 0);
	const struct tr_lease *lease = &((const struct tr_leases *)(limits + TR_LEASES_OFFSET))->lease[1];
	int slot = tr_ledger_claim(l, fd);
	struct tr_slot_dev *s = &l->slot[slot].dev[1];
	s->in_flight = 1, s->waiting = 2, s->waiting_since = 3, s->pending_ns = 4, s->work_end_ns = 5;
	s->last_end_ns = 6, s->longest_ns = 7, s->closed_seq = 8, s->first_ns = 9, s->gpu_time_ns = 10;
	l->account[1].gpu_time_ns = 11;
	uint32_t word = lease->word;
	__atomic_fetch_or(&l->clients[slot / 64], 1ull << (slot % 64), __ATOMIC_SEQ_CST);
	__atomic_fetch_add(&l->bell, 1, __ATOMIC_SEQ_CST);
	syscall(SYS_futex, &l->bell, FUTEX_WAKE, 1, NULL, NULL, 0);
	printf("%d\n", slot);
	fflush(stdout);
	while (__atomic_load_n(&lease->word, __ATOMIC_ACQUIRE) == word)
		syscall(SYS_futex, &lease->word, FUTEX_WAIT, word, NULL, NULL, 0);
	printf("seq %llu, end %lld\n", (unsigned long long)lease->grant[0].seq, (long long)lease->grant[0].end_ns);
	fflush(stdout);
	pause();
	return 0;
}
`

// A process of C rings and sleeps, this package answers.
func TestBell(t *testing.T) {
	dir, w := newSlice(t)
	l, err := OpenLedger(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	exe := filepath.Join(t.TempDir(), "client")
	buildProgram(t, turnTaker, exe)
	heard := make(chan error, 1)
	go func() {
		value, err := l.Bell(), error(nil)
		for l.Bell() == value && err == nil {
			err = l.WaitBell(value, Forever)
		}
		heard <- err
	}()
	cmd := exec.Command(exe, l.file.Name(), filepath.Join(dir, FileLimits))
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	lines := bufio.NewScanner(out)
	lines.Scan()
	if err := <-heard; err != nil {
		t.Fatal(err)
	}
	var got []Work
	l.Clients(1, func(w Work) { got = append(got, w) })
	want := []Work{{Slot: 1, InFlight: 1, Waiting: 2, WaitingSince: 3, Pending: 4, WorkEnd: 5, LastEnd: 6, Longest: 7, Closed: 8, First: 9, GPUTime: 10}}
	if !reflect.DeepEqual(got, want) || l.Usage(1).GPUTimeNs != 11 || l.WaitingSince(1, 1) != 3 || l.WaitingSince(-1, 1) != 0 || l.WaitingSince(MaxProcs, 1) != 0 {
		t.Errorf("%+v; want %+v", got, want)
	}
	w.Set(1, Lease{Grants: [2]Grant{{Seq: 2, End: 77}}})
	w.Wake(1)
	lines.Scan()
	if lines.Text() != "seq 2, end 77" {
		t.Errorf("the process read %q", lines.Text())
	}
	// Its death is told by the bell, and it is a client no more.
	_ = cmd.Process.Kill()
	before := l.Bell()
	for range 1000 {
		if l.ReclaimSlot(1) {
			break
		}
		time.Sleep(time.Millisecond)
	}
	got = nil
	l.Clients(1, func(w Work) { got = append(got, w) })
	if len(got) != 0 || l.Bell() == before {
		t.Errorf("after its death: %+v, bell %d", got, l.Bell())
	}
}

// A ledger says anything, of slots that are not there too.
func TestClientsOfDamagedLedger(t *testing.T) {
	l := newLedger(t)
	for i := range l.page.clients {
		l.page.clients[i] = ^uint64(0)
	}
	n := 0
	l.Clients(MaxDevices-1, func(Work) { n++ })
	if n != 0 {
		t.Errorf("%d clients without processes", n)
	}
	for i := range l.page.slot {
		l.page.slot[i].state = slotUsed
	}
	l.Clients(MaxDevices-1, func(Work) { n++ })
	if n != MaxProcs {
		t.Errorf("%d clients", n)
	}
}

func TestFutexWaitEnds(t *testing.T) {
	word := new(uint32)
	before := NowNs()
	if err := FutexWait(word, 0, before+30e6); err != nil || NowNs() < before+30e6 {
		t.Errorf("%v after %v", err, time.Duration(NowNs()-before))
	}
	if err := FutexWait(word, 1, Forever); err != nil {
		t.Error(err)
	}
	if err := FutexWait(word, 0, -1); err != nil {
		t.Error("a time in the past:", err)
	}
}

// Files that are cut short under us are errors.
func TestGuard(t *testing.T) {
	dir, w := newSlice(t)
	l, err := OpenLedger(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, file := range []string{FileLimits, FileLedger} {
		if err := os.Truncate(filepath.Join(dir, file), 0); err != nil {
			t.Fatal(err)
		}
	}
	for name, f := range map[string]func(){
		"Set": func() { w.Set(0, sampleLease()) }, "Get": func() { w.Get(0) }, "Beat": func() { w.Beat(1, 1) },
		"Clients": func() { l.Clients(0, func(Work) {}) }, "Ring": l.Ring, "Bell": func() { l.Bell() },
	} {
		if err := Guard(f); err == nil || !strings.Contains(err.Error(), "cut short") {
			t.Errorf("%s: %v", name, err)
		}
	}
	var waited error
	if err := Guard(func() { waited = l.WaitBell(0, Forever) }); err == nil && waited == nil {
		t.Error("waited on a word that is not there")
	}
	defer func() {
		if recover() == nil {
			t.Error("another panic was swallowed")
		}
	}()
	_ = Guard(func() { panic("other") })
}
