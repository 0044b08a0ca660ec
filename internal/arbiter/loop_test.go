package arbiter

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	abi "tranche.dev/tranche/internal/tenant"
)

// worker is a process that takes turns as the library does. It counts how often it found another one
// inside the GPU, which is a lock in a shared file.
const worker = `
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "ledger.h"
static int64_t now(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1000000000ll + ts.tv_nsec;
}
static void *map(const char *dir, const char *file, size_t size, int prot, int *fd)
{
	char path[4096];
	snprintf(path, sizeof path, "%s/%s", dir, file);
	*fd = open(path, (prot & PROT_WRITE ? O_RDWR : O_RDONLY) | O_CLOEXEC);
	return mmap(0, size, prot, MAP_SHARED, *fd, 0);
}
static void ring(struct tr_ledger *l)
{
	__atomic_fetch_add(&l->bell, 1, __ATOMIC_SEQ_CST);
	syscall(SYS_futex, &l->bell, FUTEX_WAKE, 1, NULL, NULL, 0);
}
static volatile sig_atomic_t over;
static void end(int sig) { (void)sig; over = 1; }
#define SET(p, v) __atomic_store_n(&(p), v, __ATOMIC_SEQ_CST)
#define GET(p) __atomic_load_n(&(p), __ATOMIC_SEQ_CST)
/* worker SLICE GPUFILE MODE: turns, or flood (rings without end), or hold (never lets go) */
int main(int argc, char **argv)
{
	int fd, lfd, gfd;
	struct tr_ledger *l = map(argv[1], "ledger", sizeof *l, PROT_READ | PROT_WRITE, &fd);
	const char *limits = map(argv[1], "limits", TR_LEASES_OFFSET + 4096, PROT_READ, &lfd);
	uint32_t *inside = map(argv[2], "gpu", 4096, PROT_READ | PROT_WRITE, &gfd);
	const struct tr_leases *leases = (const struct tr_leases *)(limits + TR_LEASES_OFFSET);
	const struct tr_lease *lease = &leases->lease[0];
	int slot = tr_ledger_claim(l, fd);
	struct tr_slot_dev *s = &l->slot[slot].dev[0];
	long turns = 0, overlaps = 0;
	int64_t longest_gap = 0, last_beat = 0;
	signal(SIGTERM, end);
	printf("ready\n");
	fflush(stdout);
	__atomic_fetch_or(&l->clients[slot / 64], 1ull << (slot % 64), __ATOMIC_SEQ_CST);
	while (!over && !strcmp(argv[3], "flood"))
		ring(l);
	while (!over) {
		SET(s->waiting_since, now());
		SET(s->longest_ns, 100000);
		SET(s->waiting, 1);
		ring(l);
		struct tr_grant g;
		for (;;) {
			uint32_t word = GET(lease->word);
			int64_t t = now();
			if (last_beat && GET(leases->beat_ns) != last_beat && GET(leases->beat_ns) - last_beat > longest_gap)
				longest_gap = GET(leases->beat_ns) - last_beat;
			last_beat = GET(leases->beat_ns);
			g = lease->grant[lease->grant[1].seq > lease->grant[0].seq];
			if (over || (!(word & 1) && g.slot == (uint32_t)slot && g.seq > s->closed_seq && t >= g.start_ns && t < g.end_ns))
				break;
			int64_t until = g.slot == (uint32_t)slot && g.seq > s->closed_seq && t < g.start_ns ? g.start_ns - t : 20000000;
			struct timespec ts = {until / 1000000000, until % 1000000000};
			syscall(SYS_futex, &lease->word, FUTEX_WAIT, word, &ts, NULL, 0);
		}
		if (over)
			break;
		SET(s->in_flight, 1);
		SET(s->waiting, 0);
		SET(s->first_ns, now());
		if (__atomic_fetch_add(inside, 1, __ATOMIC_SEQ_CST) != 0)
			overlaps++;
		turns++;
		int64_t from = now();
		do {
			struct timespec ts = {0, 100000};
			nanosleep(&ts, NULL);
			int64_t to = now();
			__atomic_fetch_add(&l->account[0].gpu_time_ns, (uint64_t)(to - from), __ATOMIC_SEQ_CST);
			SET(s->gpu_time_ns, s->gpu_time_ns + (uint64_t)(to - from));
			from = to;
			SET(s->work_end_ns, to + 100000);
		} while (!over && (!strcmp(argv[3], "hold") || now() + 100000 < GET(lease->grant[g.seq & 1].end_ns)));
		__atomic_fetch_sub(inside, 1, __ATOMIC_SEQ_CST);
		SET(s->last_end_ns, now());
		SET(s->closed_seq, g.seq);
		SET(s->in_flight, 0);
		ring(l);
	}
	printf("%ld %ld %lld\n", turns, overlaps, (long long)longest_gap);
	return 0;
}
`

// world is some slices without a registry, and processes in them.
type world struct {
	t    *testing.T
	dir  string
	exe  string
	mu   sync.Mutex
	ids  map[string]bool
	tell chan struct{}
	dead map[string]bool
	// rival is what pages say about another arbiter.
	rival bool
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, dir: t.TempDir(), ids: map[string]bool{}, dead: map[string]bool{}, tell: make(chan struct{}, 100)}
	if err := os.WriteFile(filepath.Join(w.dir, "gpu"), make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	w.exe = filepath.Join(w.dir, "worker")
	cc := exec.Command("cc", "-std=gnu11", "-O1", "-pthread", "-I../../include", "-I../../shim/common", "-xc", "-", "-xc", "../../shim/common/ledger.c", "-o", w.exe)
	cc.Stdin = strings.NewReader(worker)
	if out, err := cc.CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, out)
	}
	return w
}

func (w *world) slice(id string, cores int) *abi.Limits {
	w.t.Helper()
	return w.sliceOf(id, []abi.Device{{UUID: "GPU-1", Cores: cores, CoresLimited: cores < 100, CoresCeiling: cores}})
}

func (w *world) sliceOf(id string, devices []abi.Device) *abi.Limits {
	w.t.Helper()
	dir := filepath.Join(w.dir, id)
	err := os.Mkdir(dir, 0o700)
	var l *abi.Limits
	if err == nil {
		l, err = abi.CreateLimits(dir, id, devices)
	}
	if err == nil {
		err = abi.CreateLedger(dir)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(l.Close)
	w.mu.Lock()
	w.ids[id] = true
	w.mu.Unlock()
	w.tell <- struct{}{}
	return l
}

func (w *world) remove(id string) {
	w.mu.Lock()
	delete(w.ids, id)
	w.mu.Unlock()
	w.tell <- struct{}{}
}

func (w *world) leases(id string) *abi.Leases {
	w.t.Helper()
	l, err := abi.OpenLeases(filepath.Join(w.dir, id))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(l.Close)
	return l
}

func (w *world) ledger(id string) *abi.Ledger {
	w.t.Helper()
	l, err := abi.OpenLedger(filepath.Join(w.dir, id))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(l.Close)
	return l
}

// The registry that the loop sees.
func (w *world) IDs() ([]string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []string
	for id := range w.ids {
		out = append(out, id)
	}
	return out, nil
}

func (w *world) Open(id string) (*Pages, error) {
	dir, err := os.Open(filepath.Join(w.dir, id))
	if err != nil {
		return nil, ErrNotYet
	}
	defer dir.Close()
	p := &Pages{Rival: func() bool { return w.rival }}
	if p.Ledger, err = abi.OpenLedgerIn(dir); err != nil {
		return nil, ErrNotYet
	}
	if p.Limits, err = abi.OpenLimitsIn(dir); err != nil {
		return nil, err
	}
	p.Leases, err = abi.OpenLeasesWriterIn(dir)
	return p, err
}

func (w *world) Alive(id string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.dead[id]
}

func (w *world) Wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-w.tell:
	case <-time.After(d):
	}
}

func (w *world) start(config LoopConfig) *Loop {
	config.Slices = w
	if config.Warn == nil {
		config.Warn = func(id string, err error) { w.t.Errorf("%s: %v", id, err) }
	}
	return Start(config)
}

// process is a running worker.
type process struct {
	cmd *exec.Cmd
	out *strings.Builder
}

func (w *world) work(id, mode string) *process {
	w.t.Helper()
	p := &process{cmd: exec.Command(w.exe, filepath.Join(w.dir, id), w.dir, mode), out: &strings.Builder{}}
	p.cmd.Stdout = p.out
	if err := p.cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = p.cmd.Process.Kill(); _ = p.cmd.Wait() })
	return p
}

// result ends the worker and returns what it counted.
func (p *process) result(t *testing.T) (turns, overlaps int, longestGap time.Duration) {
	t.Helper()

	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	if err := p.cmd.Wait(); err != nil && p.out.Len() == 0 {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(p.out.String(), "\n")
	if _, err := fmt.Sscan(text, &turns, &overlaps, (*int64)(&longestGap)); err != nil {
		t.Fatalf("%q: %v", p.out.String(), err)
	}
	return turns, overlaps, longestGap
}

func until(t *testing.T, within time.Duration, what string, ok func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	for !ok() {
		if time.Since(began) > within {
			t.Fatalf("not within %v: %s", within, what)
		}
		time.Sleep(time.Millisecond / 5)
	}
	return time.Since(began)
}

func used(l *abi.Ledger) float64 { return float64(l.Usage(0).GPUTimeNs) / 1e9 }

// Two slices with processes that want all of the GPU: each has its share, none is inside with another.
func TestLoopShares(t *testing.T) {
	w := newWorld(t)
	w.slice("a", 30)
	w.slice("b", 60)
	l := w.start(LoopConfig{})
	defer l.Stop(true)
	a, b := w.work("a", "turns"), w.work("b", "turns")
	la, lb := w.ledger("a"), w.ledger("b")
	time.Sleep(500 * time.Millisecond)
	fromA, fromB, began := used(la), used(lb), time.Now()
	time.Sleep(3 * time.Second)
	over := time.Since(began).Seconds()
	shareA, shareB := (used(la)-fromA)/over, (used(lb)-fromB)/over
	turnsA, overlapsA, gapA := a.result(t)
	turnsB, overlapsB, gapB := b.result(t)
	t.Logf("sim: shares %.3f %.3f, turns %d %d, overlaps %d %d, longest gap between beats %v %v", shareA, shareB, turnsA, turnsB, overlapsA, overlapsB, gapA, gapB)
	t.Logf("sim: %d decisions: p50 %v p99 %v max %v; %d requests: p50 %v p99 %v max %v",
		l.latency.Decision.Count(), l.latency.Decision.Quantile(0.5), l.latency.Decision.Quantile(0.99), l.latency.Decision.Max(),
		l.latency.Request.Count(), l.latency.Request.Quantile(0.5), l.latency.Request.Quantile(0.99), l.latency.Request.Max())
	// That they divide is tested here; how exactly, where nothing else runs, is the benchmark's.
	if shareA < 0.25 || shareA > 0.33 || shareB < 0.5 || shareB > 0.66 || shareB/shareA < 1.75 || shareB/shareA > 2.25 {
		t.Errorf("shares %.3f and %.3f of 0.30 and 0.60", shareA, shareB)
	}
	// The next is named so that it begins as the one before ends: a wake-up's time early at most.
	if n := overlapsA + overlapsB; n > (turnsA+turnsB)/4 {
		t.Errorf("%d overlaps in %d turns", n, turnsA+turnsB)
	}
	if lease, ok := w.leases("a").Get(0); !ok || !lease.Required || lease.Got < 2000 || lease.Wanted < 5000 {
		t.Errorf("%+v", lease)
	}
}

// A holder that is killed: the other goes on, and what it held comes back.
func TestLoopKilledHolder(t *testing.T) {
	w := newWorld(t)
	w.slice("a", 50)
	w.slice("b", 50)
	l := w.start(LoopConfig{})
	defer l.Stop(true)
	holder := w.work("a", "hold")
	la, lb := w.ledger("a"), w.ledger("b")
	until(t, 5*time.Second, "the holder works", func() bool { return used(la) > 0.01 })
	b := w.work("b", "turns")
	_ = holder.cmd.Process.Kill()
	// Its parent has not waited for it yet: a zombie is gone, too.
	took := until(t, 5*time.Second, "the other works", func() bool { return used(lb) > 0 })
	clients := 1
	gone := until(t, 5*time.Second, "reclaimed", func() bool {
		clients = 0
		la.Clients(0, func(abi.Work) { clients++ })
		return clients == 0
	})
	t.Logf("sim: the other works after %v, reclaimed after %v more", took, gone)
	if took > 500*time.Millisecond {
		t.Errorf("the other works after %v", took)
	}
	b.result(t)
}

// Slices come, go and change while the loop runs.
func TestLoopFollows(t *testing.T) {
	w := newWorld(t)
	l := w.start(LoopConfig{})
	defer l.Stop(true)
	// An entry whose files come later.
	w.mu.Lock()
	w.ids["late"] = true
	w.mu.Unlock()
	w.tell <- struct{}{}
	time.Sleep(20 * time.Millisecond)
	limits := w.slice("late", 30)
	leases := w.leases("late")
	t.Logf("sim: served after %v", until(t, time.Second, "served", func() bool { return leases.Served(abi.NowNs()) }))
	spec := func() Spec {
		l.mu.Lock()
		g := l.gpus["GPU-1"]
		l.mu.Unlock()
		g.mu.Lock()
		defer g.mu.Unlock()
		if len(g.core.tenants) != 1 {
			return Spec{}
		}
		return g.core.tenants[0].spec
	}
	if got := spec(); got != (Spec{Cores: 30, Ceiling: 30, Limited: true}) {
		t.Errorf("%+v", got)
	}
	change := []abi.Device{{UUID: "GPU-1", Cores: 20, CoresCeiling: 70, CoresLimited: true, Latency: true, Weight: 7}}
	if err := limits.Set(change); err != nil {
		t.Fatal(err)
	}
	until(t, time.Second, "changed", func() bool { return spec() == Spec{Cores: 20, Ceiling: 70, Limited: true, Latency: true, Weight: 7} })
	w.remove("late")
	until(t, time.Second, "left", func() bool { return l.Members() == 0 && spec() == Spec{} })
	w.slice("dead", 30)
	until(t, time.Second, "there", func() bool { return l.Members() == 1 })
	w.mu.Lock()
	w.dead["dead"] = true
	w.mu.Unlock()
	until(t, 5*time.Second, "over", func() bool { return l.Members() == 0 })
}

// A page that names GPUs that nobody has leaves nothing behind.
func TestLoopForgetsGPUs(t *testing.T) {
	w := newWorld(t)
	l := w.start(LoopConfig{})
	for i := range 6 {
		id := fmt.Sprint("wild", i)
		var devices []abi.Device
		for k := range abi.MaxDevices {
			devices = append(devices, abi.Device{UUID: fmt.Sprintf("GPU-%d-%d", i, k), Cores: 100})
		}
		w.sliceOf(id, devices)
		until(t, 5*time.Second, "there", func() bool { return l.Members() == 1 })
		w.remove(id)
		until(t, 5*time.Second, "gone", func() bool { return l.Members() == 0 })
	}
	// A slice that left lets its GPUs go just after it is out of the members.
	until(t, 5*time.Second, "no more idle GPUs than are kept", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.gpus) <= gpusIdle
	})
	l.Stop(true)
}

// A tenant that cuts its files short ends its own part only.
func TestLoopCutFiles(t *testing.T) {
	for _, file := range []string{abi.FileLedger, abi.FileLimits} {
		w := newWorld(t)
		w.slice("good", 50)
		w.slice("bad", 50)
		warned := make(chan string, 10)
		l := w.start(LoopConfig{Warn: func(id string, err error) { warned <- id }})
		until(t, time.Second, "both there", func() bool { return l.Members() == 2 })
		if err := os.Truncate(filepath.Join(w.dir, "bad", file), 0); err != nil {
			t.Fatal(err)
		}
		until(t, 5*time.Second, "left", func() bool { return l.Members() == 1 })
		if id := <-warned; id != "bad" {
			t.Errorf("%s: warned about %s", file, id)
		}
		if !w.leases("good").Served(abi.NowNs()) {
			t.Error("the other is not served any more")
		}
		l.Stop(true)
		if _, err := os.Stat(filepath.Join(w.dir, "good")); err != nil {
			t.Error(err)
		}
	}
}

// Whoever rings without end does not keep the others from their turns.
func TestLoopFlood(t *testing.T) {
	w := newWorld(t)
	for _, id := range []string{"a", "b", "flood"} {
		w.slice(id, 40)
	}
	l := w.start(LoopConfig{})
	defer l.Stop(true)
	flood, a, b := w.work("flood", "flood"), w.work("a", "turns"), w.work("b", "turns")
	la, lb := w.ledger("a"), w.ledger("b")
	until(t, 5*time.Second, "both work", func() bool { return used(la) > 0.2 && used(lb) > 0.2 })
	fromA, fromB, began := used(la), used(lb), time.Now()
	time.Sleep(2 * time.Second)
	over := time.Since(began).Seconds()
	shareA, shareB := (used(la)-fromA)/over, (used(lb)-fromB)/over
	a.result(t)
	b.result(t)
	t.Logf("sim: shares %.3f, %.3f beside a flood of bells", shareA, shareB)
	// More than 0.40 is what a busy machine kept from them before.
	if min(shareA, shareB) < 0.35 || max(shareA, shareB) > 0.50 {
		t.Errorf("shares %.3f, %.3f of 0.40", shareA, shareB)
	}
	_ = flood
}

// A new arbiter goes on from the books of the one before.
func TestLoopTakeover(t *testing.T) {
	w := newWorld(t)
	w.slice("a", 40)
	w.slice("b", 40)
	first := w.start(LoopConfig{PID: 1})
	a, b := w.work("a", "turns"), w.work("b", "turns")
	leases := w.leases("a")
	until(t, 5*time.Second, "some turns", func() bool { l, _ := leases.Get(0); return l.Granted > 20 })
	first.Stop(false)
	before, _ := leases.Get(0)
	if pid, beat := leases.Arbiter(); pid != 1 || beat == 0 || !before.Required {
		t.Errorf("a mandate that another takes over was released: %d %d %+v", pid, beat, before)
	}
	second := w.start(LoopConfig{PID: 2})
	after, _ := leases.Get(0)
	if after.Granted < before.Granted || max(after.Grants[0].Seq, after.Grants[1].Seq) < max(before.Grants[0].Seq, before.Grants[1].Seq) || after.GPUTime < before.GPUTime {
		t.Errorf("before %+v, after %+v", before, after)
	}
	until(t, 5*time.Second, "turns again", func() bool { l, _ := leases.Get(0); return l.Granted > before.Granted+5 })
	a.result(t)
	b.result(t)
	second.Stop(true)
	if l, _ := leases.Get(0); l.Required || leases.Served(abi.NowNs()) {
		t.Errorf("not released: %+v", l)
	}
}

// Of two arbiters the one that is to give way does, and comes back when the other is gone.
func TestLoopRivals(t *testing.T) {
	w := newWorld(t)
	w.rival = true
	w.slice("a", 50)
	leases := w.leases("a")
	mine := w.start(LoopConfig{PID: 1})
	defer mine.Stop(true)
	by := func(pid int) func() bool {
		return func() bool { got, _ := leases.Arbiter(); return got == pid && leases.Served(abi.NowNs()) }
	}
	until(t, time.Second, "served by the first", by(1))
	seated := func() bool {
		mine.mu.Lock()
		g := mine.gpus["GPU-1"]
		mine.mu.Unlock()
		g.mu.Lock()
		defer g.mu.Unlock()
		return len(g.places) == 1
	}
	if !seated() {
		t.Error("not seated")
	}
	roots := w.start(LoopConfig{PID: 2, Seize: true})
	until(t, time.Second, "seized", by(2))
	until(t, time.Second, "stood aside", func() bool { return !seated() })
	time.Sleep(200 * time.Millisecond)
	if seated() || !by(2)() {
		t.Error("did not stay aside")
	}
	roots.Stop(false) // as if killed
	took := until(t, time.Second, "back", func() bool { return seated() && by(1)() })
	t.Logf("sim: back after %v", took)
}

func TestAlarm(t *testing.T) {
	rang := make(chan int64, 100)
	a := newAlarm(abi.NowNs, func() { rang <- abi.NowNs() })
	done := make(chan struct{})
	go func() { a.run(); close(done) }()
	var late Histogram
	for i := range int64(100) {
		at := abi.NowNs() + 200_000 + i*10_000
		a.set(at + 5e9) // moved to an earlier time
		a.set(at)
		now := <-rang
		if now < at {
			t.Errorf("%v early", time.Duration(at-now))
		}
		late.Add(now - at)
	}
	t.Logf("sim: late by p50 %v, p99 %v", late.Quantile(0.5), late.Quantile(0.99))
	a.set(abi.NowNs() - 1)
	<-rang
	a.stop()
	<-done
}

func TestHistogram(t *testing.T) {
	var h Histogram
	if h.Quantile(0.5) != 0 || h.Max() != 0 {
		t.Error("empty")
	}
	for i := int64(1); i <= 1000; i++ {
		h.Add(i * 1000)
	}
	for q, want := range map[float64]time.Duration{0.5: 500_000, 0.99: 990_000, 1: 1_000_000} {
		if got := h.Quantile(q); got < want || got > want*5/4 {
			t.Errorf("%v: %v, want about %v", q, got, want)
		}
	}
	for ns := int64(-5); ns < 1<<40; ns = ns*5/4 + 7 {
		i := bucket(ns)
		if end := bucketEnd(i); end < ns || i > 0 && ns > 4 && bucketEnd(i-1) >= ns {
			t.Fatalf("%d is in bucket %d, which ends at %d", ns, i, end)
		}
	}
	h.Add(-1)
	if h.Count() != 1001 || h.Max() != time.Millisecond {
		t.Errorf("%d, %v", h.Count(), h.Max())
	}
}

// Three looks that show more than was said are charged together; after that each one is, for a while.
func TestDoubt(t *testing.T) {
	const s = int64(time.Second)
	var d doubt
	said := uint64(0)
	for i, c := range []struct {
		says, measured int64
		tell           bool
		charge         int64
	}{
		{s, s, true, 0}, {s / 2, s, false, 0}, {s, s, true, 0}, // once is chance
		{0, s, false, 0}, {0, s, false, 0}, {0, s, true, 3 * s}, {0, s, true, s}, // a liar
		{0, 0, true, 0}, {0, s, true, s}, // after a rest
		{s, s, true, 0}, {s, s, true, 0}, {s, s, true, 0}, {s, s, true, 0}, {s, s, true, 0}, {0, s, false, 0}, // honest again
	} {
		said += uint64(c.says)
		tell := d.look(said, c.measured, 2*s)
		if tell != c.tell || tell && d.measured != c.charge {
			t.Errorf("look %d: %v, %d; want %v, %d", i, tell, d.measured, c.tell, c.charge)
		}
		if tell {
			d.measured, d.over = 0, 0
		}
	}
}
