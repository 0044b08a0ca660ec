package main

import (
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// childEnv makes this test's program play one scenario, as the suite's own program does.
const childEnv = "TRANCHE_SHARES_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// suite is ready to play with that copy of the meter, or the test is skipped.
func suite(t *testing.T, process string, seconds float64) *Suite {
	t.Helper()
	dir, err := filepath.Abs("../../build/bench/shares")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"world.so", process} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Skipf("%v; `make shares` builds it", err)
		}
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return &Suite{Program: exe, Dir: dir, Process: process, Env: []string{childEnv + "=1"}, Seconds: seconds, Seed: 1, Jobs: 2, Out: io.Discard}
}

// TestQuick plays the short list; full length and all scenarios: make bench-shares.
func TestQuick(t *testing.T) {
	s := suite(t, "process.so", 40)
	var quick []*Scenario
	for _, c := range scenarios() {
		if c.Quick {
			quick = append(quick, c)
		}
	}
	results, err := s.Play(quick)
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	s.Out = &text
	missed, err := s.Report(results, "", "")
	if err != nil {
		t.Fatal(err)
	}
	if missed > 0 {
		t.Errorf("%d figures missed their targets\n%s", missed, text.String())
	}
}

// TestBrokenCharge: a meter that reports half of the time must not pass.
func TestBrokenCharge(t *testing.T) {
	s := suite(t, "process-broken.so", 10)
	for _, name := range []string{"alone-small-30", "small-30-60", "graphs-30-60", "shape-1k-1ms-30"} {
		results, err := s.Play([]*Scenario{find(scenarios(), name)})
		if err != nil {
			t.Fatal(err)
		}
		missed, err := s.Report(results, "", "")
		if err != nil {
			t.Fatal(err)
		}
		if missed == 0 {
			t.Errorf("%s: the suite is content with a charge that is half of the truth", name)
		}
	}
}

// TestRepeats: one seed, one result; another seed, another one.
func TestRepeats(t *testing.T) {
	s := suite(t, "process.so", 5)
	shares := func(seed uint64) []Curve {
		s.Seed = seed
		results, err := s.Play([]*Scenario{find(scenarios(), "mixed-4x22")})
		if err != nil {
			t.Fatal(err)
		}
		return results[0].Shares
	}
	first := shares(7)
	if !reflect.DeepEqual(first, shares(7)) {
		t.Error("the same seed gave another result")
	}
	if reflect.DeepEqual(first, shares(8)) {
		t.Error("another seed gave the same result")
	}
}

// TestScore: a GPU that is busy for 40 ms of each 100 ms for 4 s, then idle for 2 s.
func TestScore(t *testing.T) {
	var busy []int64
	for i := range int64(61) {
		busy = append(busy, min(i, 40)*40*ms)
	}
	if s := score(busy, []Interval{{0, 4 * sec}}, 30); s.Mean != 40 || s.MAE != 10 || s.Max != 10 || s.Low != 40 || s.High != 40 {
		t.Errorf("steady: %+v", s)
	}
	if s := score(busy, []Interval{{0, 6 * sec}}, 40); math.Abs(s.Mean-80.0/3) > 1e-9 || s.Max != 40 || s.Low != 0 {
		t.Errorf("with the rest: %+v", s)
	}
	if s := score(busy, []Interval{{0, 2 * sec}, {4 * sec, 6 * sec}}, 0); s.Mean != 20 {
		t.Errorf("two intervals: %+v", s)
	}
	if got := settled(busy, Interval{3 * sec, 6 * sec}, 0, 1); got != 1 {
		t.Errorf("settled on 0 after %g s, want 1", got)
	}
	if got := settled(busy, Interval{0, 6 * sec}, 80, 1); got != -1 {
		t.Errorf("settled on 80 after %g s, want never", got)
	}
}

func TestIdeal(t *testing.T) {
	for _, c := range []struct {
		unit          int64
		sigma, target float64
		low, high     float64
	}{
		{60 * ms, 0, 30, 0, 0.001},     // five periods of 200 ms in a second
		{100 * ms, 0, 30, 0, 0.001},    // three of 333.3 ms
		{90 * ms, 0, 40, 2.6, 2.7},     // 4.44 of 225 ms
		{60 * ms, 0.1, 30, 0.2, 1.5},   // with jitter
		{2000 * ms, 0, 50, 37.4, 37.6}, // three of four windows lie across an edge of 2 s
	} {
		if got := idealMAE(c.unit, c.sigma, c.target); got < c.low || got > c.high {
			t.Errorf("unit %d ms, jitter %g, target %g: %.3f, want %g to %g", c.unit/ms, c.sigma, c.target, got, c.low, c.high)
		}
	}
}

func TestJain(t *testing.T) {
	if got := jain([]float64{25, 25, 25, 25}); got != 1 {
		t.Errorf("equal: %g", got)
	}
	if got := jain([]float64{100, 0, 0, 0}); got != 0.25 {
		t.Errorf("one has all: %g", got)
	}
}

// TestNames: each scenario can be named.
func TestNames(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range scenarios() {
		if seen[s.Name] {
			t.Errorf("%s twice", s.Name)
		}
		seen[s.Name] = true
	}
	for _, c := range comparisons() {
		if !seen[c.of] || !seen[c.with] {
			t.Errorf("comparison of %s with %s: no such scenario", c.of, c.with)
		}
	}
}
