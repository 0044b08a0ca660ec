package allocation

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/state"
	"tranche.dev/tranche/internal/tenant"
	"tranche.dev/tranche/test/fixture"
)

// nodeDir makes the test binary a node of these allocations, to be killed.
const nodeDir = "TRANCHE_TEST_NODE"

func TestMain(m *testing.M) {
	dir := os.Getenv(nodeDir)
	if dir == "" {
		os.Exit(m.Run())
	}
	s, err := Open(Config{Dir: dir})
	if err == nil {
		_, err = StartArbiter(ArbiterConfig{Store: s})
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("serves")
	s.Supervise(context.Background(), SuperviseConfig{})
}

// The node is killed while a container works: its limits hold without it, and the next node knows all of it.
func TestNodeKilled(t *testing.T) {
	g := GPU{UUID: fixture.SimUUID, Cores: 30, CoresLimited: true, Memory: 4 << 30, MemoryLimited: true, ContextBytes: 64 << 20}
	b := newBox(t, g)
	want, _ := b.store.Get(testID)
	b.store.Close()

	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	node := exec.Command(self)
	node.Env = append(os.Environ(), nodeDir+"="+b.store.config.Dir)
	out, err := node.StdoutPipe()
	if err == nil {
		err = node.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = node.Process.Kill(); _ = node.Wait() })
	line := make([]byte, 100)
	if n, err := io.ReadAtLeast(out, line, 7); err != nil || string(line[:7]) != "serves\n" {
		t.Fatalf("%q %v", line[:n], err)
	}
	leases, err := tenant.OpenLeases(b.store.path(testID))
	if err != nil {
		t.Fatal(err)
	}
	defer leases.Close()
	if pid, _ := leases.Arbiter(); pid != node.Process.Pid {
		t.Errorf("arbiter %d; want %d", pid, node.Process.Pid)
	}

	load := b.load("--time 5")
	beside := b.load("--time 4")
	ledger, err := tenant.OpenLedger(b.store.path(testID))
	if err != nil {
		t.Fatal(err)
	}
	defer ledger.Close()
	await(t, func() bool { return ledger.Usage(0).GPUTimeNs > 3e8 }, func() string { return fmt.Sprint(ledger.Usage(0)) })
	_ = node.Process.Signal(syscall.SIGKILL)
	_ = node.Wait()
	killed := ledger.Usage(0)
	_, last := beside()
	if served := leases.Served(tenant.NowNs()); served {
		t.Error("a dead arbiter serves")
	}
	if last > 0.4 { // of one second; 0.3 over time
		t.Errorf("%.3f of the GPU without a node", last)
	}

	b.store = newStore(t, b.store.config.Dir)
	if got, _ := b.store.Get(testID); got.Serial != want.Serial || got.Owner != want.Owner || !got.IsBound() || len(b.store.Problems()) != 0 {
		t.Errorf("%+v; want %+v", got, want)
	}
	a, err := StartArbiter(ArbiterConfig{Store: b.store})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Stop)
	if pid, _ := leases.Arbiter(); pid != os.Getpid() || !leases.Served(tenant.NowNs()) {
		t.Errorf("the new node does not serve: %d", pid)
	}
	u, err := b.store.Use(testID)
	if err != nil || u.GPUs[0].GPUTimeNs < killed.GPUTimeNs || u.GPUs[0].Memory < 64<<20 {
		t.Errorf("%+v %v; it was %+v", u, err, killed)
	}
	load()
}

// One machine, one arbiter: while a `tranche run` has the mandate the node serves its own; then it serves all.
func TestElection(t *testing.T) {
	registry, err := state.Open(filepath.Join(t.TempDir(), "slices"), false)
	if err != nil {
		t.Fatal(err)
	}
	mandate, err := registry.TryMandate()
	if err != nil {
		t.Fatal(err)
	}
	info := state.Info{Name: "n", Command: []string{"c"}, Started: time.Now(), GPUs: []state.GPU{{UUID: "GPU-1", Cores: 30, ReservedCores: 30}}}
	own, err := registry.Create(state.NewID(), info, []tenant.Device{{UUID: "GPU-1", Cores: 30, CoresCeiling: 30, CoresLimited: true}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(own.Remove)
	served := func(dir string) bool {
		leases, err := tenant.OpenLeases(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer leases.Close()
		pid, _ := leases.Arbiter()
		return pid == os.Getpid() && leases.Served(tenant.NowNs())
	}

	s := newStore(t, t.TempDir())
	if err := s.Bind(testID, owner, some); err != nil {
		t.Fatal(err)
	}
	a, err := StartArbiter(ArbiterConfig{Store: s, Registry: registry, Warn: func(id string, err error) { t.Errorf("%s: %v", id, err) }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Stop)
	if status := a.Status(); !served(s.path(testID)) || served(own.Dir) || status.Mandate || status.Slices != 1 {
		t.Errorf("while another has the mandate: %+v", status)
	}
	mandate.Close(false)
	await(t, func() bool { return served(own.Dir) }, func() string { return fmt.Sprintf("%+v", a.Status()) })

	// A container that starts again is another member, and so is one that begins.
	if err := s.Bind(testID, owner, some); err != nil {
		t.Fatal(err)
	}
	await(t, func() bool { return served(s.path(testID)) }, func() string { return "bound anew and not served" })
	if err := s.Remove(testID); err != nil {
		t.Fatal(err)
	}
	await(t, func() bool { return a.Status().Slices == 1 }, func() string { return fmt.Sprintf("%+v", a.Status()) })
	a.Stop()
	if served(own.Dir) {
		t.Error("served when it is over")
	}
	if m, err := registry.TryMandate(); err != nil {
		t.Error(err)
	} else {
		m.Close(true)
	}
}

// A tenant that destroys its ledger hurts itself: the others are looked after, and it is told once.
func TestDestroyedLedger(t *testing.T) {
	s := newStore(t, t.TempDir())
	other := IDOf([]string{"other"})
	for _, id := range []string{testID, other} {
		if err := s.Bind(id, owner, some); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Truncate(filepath.Join(s.path(testID), tenant.FileLedger), 0); err != nil {
		t.Fatal(err)
	}
	v := &supervisor{store: s, warned: map[string]bool{}}
	var warned []string
	v.config.Warn = func(id string, err error) { warned = append(warned, id+": "+err.Error()) }
	for range 2 * lookAll {
		v.tick(time.Now())
	}
	if len(warned) != 1 || warned[0] != testID+": a file of the slice was cut short while it was mapped" {
		t.Errorf("%q", warned)
	}
	if _, err := s.Use(testID); err == nil {
		t.Error("it is read all the same")
	}
	if len(s.Tenants()) != 2 {
		t.Error(s.Tenants())
	}
	if _, err := s.Use(other); err != nil {
		t.Error(err)
	}
	if err := s.Change(testID, some); err != nil {
		t.Error(err)
	}
	if err := s.Bind(testID, owner, some); err != nil {
		t.Error(err)
	}
	if _, err := s.Use(testID); err != nil {
		t.Error(err)
	}
}

// What supervision and arbiter cost while 20 tenants do nothing: about 1 % of a core on a machine that does other
// things too, and memory for the pages that are used only.
func TestIdleCost(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 5 s")
	}
	s := newStore(t, memoryDir(t))
	for i := range 20 {
		g := []GPU{{UUID: fmt.Sprint("GPU-", i%8), Cores: 30, CoresLimited: true, Memory: gi, MemoryLimited: true}}
		if err := s.Bind(IDOf([]string{fmt.Sprint(i)}), owner, g); err != nil {
			t.Fatal(err)
		}
	}
	superviseStore(t, s, SuperviseConfig{})
	a, err := StartArbiter(ArbiterConfig{Store: s})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Stop)
	const over = 2 * time.Second
	least := over
	for range 3 { // other programs on this machine make system calls dearer
		before := cpu(t)
		time.Sleep(over) // what is measured is time that passes
		least = min(least, cpu(t)-before)
	}
	status, _ := os.ReadFile("/proc/self/status")
	_, shared, _ := strings.Cut(string(status), "RssShmem:")
	shared, _, _ = strings.Cut(shared, "\n")
	t.Logf("%.2f %% of a core; %s of pages", 100*least.Seconds()/over.Seconds(), strings.TrimSpace(shared))
	if least > over/25 { // room for the race detector
		t.Errorf("%v of processor time in %v", least, over)
	}
	var kib int
	if _, err := fmt.Sscan(shared, &kib); err != nil || kib > 20<<10 {
		t.Errorf("%d KiB of pages of 20 tenants: %v", kib, err)
	}
}

func cpu(t *testing.T) time.Duration {
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		t.Fatal(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// memoryDir is where a node's allocations should lie.
func memoryDir(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "tranche-test-")
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
