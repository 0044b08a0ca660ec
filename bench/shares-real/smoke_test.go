package main

import (
	"errors"
	"fmt"
	"math/rand"
	"testing"

	"tranche.dev/tranche/test/fixture"
)

const (
	smokeWithin = 8 // points: a test machine may be busy, and 5 s are short
	smokeTries  = 3
)

func smokeBench(t *testing.T) *Bench {
	t.Helper()
	fixture.Need(t, fixture.Build("bin", "gpuload"))
	fixture.Need(t, fixture.Build("bin", "tranche"))
	b, err := NewBench(Config{Runs: 1, Seconds: 5, Settle: 1, Bin: fixture.Build("bin"),
		Simctl: fixture.Need(t, fixture.Build("sim", "simctl")), Machine: "h200-141g", list: true})
	if err != nil {
		t.Fatal(err)
	}
	b.random = rand.New(rand.NewSource(1))
	t.Cleanup(b.Close)
	return b
}

// wrong tells what of a trial should not be. On a machine whose processors had no time for the launches
// less than its target is no fault of a tenant; more, or another order, is.
func wrong(o Outcome) (why []string) {
	for i, g := range o.Got {
		least := g.Target - smokeWithin
		if o.Host > crowded {
			least = 0
		}
		if g.Share < least || g.Share > g.Target+smokeWithin {
			why = append(why, fmt.Sprintf("%s got %.1f of %.0f", g.Name, g.Share, g.Target))
		}
		for _, other := range o.Got[:i] {
			if (g.Share > other.Share) != (g.Target > other.Target) {
				why = append(why, fmt.Sprintf("%s got %.1f, %s %.1f", g.Name, g.Share, other.Name, other.Share))
			}
		}
	}
	return why
}

// TestShares: real processes on one simulated GPU get about the shares that they asked for, and
// nobody hangs when the arbiter dies. How exact it is, `make bench-shares` tells.
func TestShares(t *testing.T) {
	tenants := []Tenant{tenant("small", 20, "--kernel 0.5ms"), tenant("graphs", 65, "--kernel 0.2ms --graph 20")}
	for name, kills := range map[string]int{"shares": 0, "arbiter killed": 2} {
		t.Run(name, func(t *testing.T) {
			b := smokeBench(t)
			for try := 1; ; try++ {
				killed := 0
				trial := Trial{Tenants: tenants, Seconds: b.Seconds}
				if kills > 0 {
					// With one more, somebody is left to be the arbiter.
					trial.Tenants = append([]Tenant{tenant("third", 10, "--kernel 1ms --sync-each")}, tenants...)
					trial.During = func(r *Running) { killed, _ = r.killArbiters(kills) }
				}
				o, err := b.run(trial)
				if err != nil && !errors.Is(err, errLate) {
					t.Fatal(err)
				}
				why := wrong(o)
				if killed != kills {
					why = append(why, fmt.Sprintf("%d arbiters of %d killed", killed, kills))
				}
				switch {
				case err == nil && len(why) == 0:
					t.Logf("processors busy %.0f %%", o.Host)
					return
				case try == smokeTries:
					t.Fatalf("try %d: %v, %v; processors busy %.0f %%", try, err, why, o.Host)
				}
				t.Logf("try %d: %v, %v; processors busy %.0f %%", try, err, why, o.Host)
			}
		})
	}
}
