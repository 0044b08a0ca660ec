package run

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"tranche.dev/tranche/internal/state"
	"tranche.dev/tranche/internal/tenant"
)

func registry(t *testing.T) *state.Registry {
	t.Helper()
	r, err := state.Open(filepath.Join(t.TempDir(), "slices"), false)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func newSlice(t *testing.T, r *state.Registry, cores int) *state.Own {
	t.Helper()
	info := state.Info{Name: "n", Command: []string{"c"}, Started: time.Now(), GPUs: []state.GPU{{UUID: "GPU-1", Cores: cores, ReservedCores: cores}}}
	o, err := r.Create(state.NewID(), info, []tenant.Device{{UUID: "GPU-1", Cores: cores, CoresCeiling: cores, CoresLimited: cores < 100}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(o.Remove)
	return o
}

func candidateOf(t *testing.T, r *state.Registry) *candidate {
	c := &candidate{registry: r, say: func(format string, args ...any) { t.Errorf(format, args...) }}
	t.Cleanup(c.stop)
	return c
}

func leasesOf(t *testing.T, o *state.Own) *tenant.Leases {
	t.Helper()
	l, err := tenant.OpenLeasesIn(o.Directory())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return l
}

func soon(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("never", what)
		}
	}
}

// Two candidates: one serves, what is there and what comes; when it leaves the other one does.
func TestCandidates(t *testing.T) {
	r := registry(t)
	a := newSlice(t, r, 30)
	leases := leasesOf(t, a)
	first, second := candidateOf(t, r), candidateOf(t, r)
	if !first.enter() {
		t.Fatal("nobody else is there")
	}
	if lease, ok := leases.Get(0); !ok || !lease.Required || !leases.Served(tenant.NowNs()) {
		t.Errorf("not served when enter returns: %+v", lease)
	}
	for range 2 { // it waits once only
		if second.enter() {
			t.Error("two arbiters")
		}
	}
	if second.use() != nil || first.use() == nil || first.use().PID != os.Getpid() || first.use().Slices != 1 {
		t.Errorf("%+v, %+v", first.use(), second.use())
	}
	b := newSlice(t, r, 100)
	awaitServed(b)
	if !leasesOf(t, b).Served(tenant.NowNs()) {
		t.Error("a new slice is not served before its command begins")
	}
	first.leave(false)
	soon(t, "the second", func() bool { return second.use() != nil && second.use().Slices == 2 })
	if first.enter() {
		t.Error("two arbiters")
	}
	second.stop()
	soon(t, "the first again", func() bool { return first.use() != nil && first.use().Slices == 2 })
	first.stop()
	if lease, _ := leases.Get(0); lease.Required || leases.Served(tenant.NowNs()) {
		t.Errorf("nobody is left, and the slice still waits for grants: %+v", lease)
	}
	if r.HasArbiter(os.Getuid()) {
		t.Error("the file is left")
	}
	var none *candidate
	none.stop()
	if none.use() != nil {
		t.Error("a slice within another has an arbiter")
	}
}

// Without an arbiter that answers a command starts all the same.
func TestNobodyServes(t *testing.T) {
	r := registry(t)
	mandate, err := r.TryMandate()
	if err != nil {
		t.Fatal(err)
	}
	defer mandate.Close(true)
	began := time.Now()
	awaitServed(newSlice(t, r, 30))
	if d := time.Since(began); d < servedWait || d > 20*servedWait {
		t.Errorf("waited for %v", d)
	}
}

func TestAskedTurns(t *testing.T) {
	for want, a := range map[string]Asked{
		"<nil>":                           {Cores: 30, Burst: 60, Weight: 1000, Class: ClassLatency},
		"--weight 1001: 1 to 1000":        {Weight: 1001},
		"--class slow: latency or normal": {Class: "slow"},
		"--burst 50: needs --cores, the share that is always there": {Burst: 50},
	} {
		if got := fmt.Sprint(a.Validate()); got != want {
			t.Errorf("%+v: %s; want %s", a, got, want)
		}
	}
}
