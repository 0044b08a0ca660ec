package main

import (
	"math"
	"math/rand"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

const ms = int64(1e6)

func TestSeries(t *testing.T) {
	// 100 ms idle, 100 ms at half, 200 ms idle, 100 ms full.
	s := Series{{0, 0}, {100 * ms, 0}, {200 * ms, 50 * ms}, {300 * ms, 50 * ms}, {400 * ms, 50 * ms}, {500 * ms, 150 * ms}}
	for _, c := range []struct {
		from, to int64
		want     float64
	}{{100 * ms, 200 * ms, 50}, {150 * ms, 250 * ms, 25}, {0, 500 * ms, 30}, {400 * ms, 500 * ms, 100}, {450 * ms, 600 * ms, 100. / 3}} {
		if got := s.Share(c.from, c.to); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("share from %d to %d: %v, want %v", c.from, c.to, got, c.want)
		}
	}
	if at, ok := s.Begin(); !ok || at != 100*ms {
		t.Errorf("begin %d, %v", at, ok)
	}
	if s.End() != 500*ms {
		t.Errorf("end %d", s.End())
	}
	if got := s.Wakes(150 * ms); !slices.Equal(got, []int64{400 * ms}) {
		t.Errorf("wakes after 150 ms of rest: %v", got)
	}
	if got := s.Wakes(50 * ms); !slices.Equal(got, []int64{100 * ms, 400 * ms}) {
		t.Errorf("wakes after 50 ms of rest: %v", got)
	}
	if _, ok := (Series{{0, 7}, {1, 7}}).Begin(); ok {
		t.Error("a series that does not grow begins")
	}
	if m := median([]float64{3, 1, 2, 10}); m != 2.5 {
		t.Errorf("median %v", m)
	}
	if j := jain([]float64{1, 1, 1, 1}); j != 1 {
		t.Errorf("Jain's index of equals %v", j)
	}
	if j := jain([]float64{1, 0, 0, 0}); j != 0.25 {
		t.Errorf("Jain's index of one that has all %v", j)
	}
}

// fakes are programs in place of tranche and gpuload: two tenants whose kernels recorded 30 and 60 %
// of a real GPU on its own clock, the second from 1 s later.
const fakeTranche = `#!/bin/sh
while [ "$1" != -- ]; do case $1 in --name) name=$2 ;; ps) echo '[]'; exit ;; esac; shift; done
shift
NAME=$name exec "$@"
`
const fakeLoad = `#!/bin/sh
case " $* " in *" --probe "*) ;; *) echo "no --probe" >&2; exit 1 ;; esac
case $NAME in a) first=1000 busy=20132659 n=100 ;; b) first=1015 busy=40265318 n=100 ;; esac
printf '{"kernel_ns":1,"kernels_per_s":1.5,"probe":{"bucket_ns":67108864,"first":%d,"busy_ns":[' $first
i=1; while [ $i -lt $n ]; do printf '%d,' $busy; i=$((i+1)); done
echo "$busy]}}"
`

// TestReal: on a real GPU the score comes from what the kernels recorded, over the time in which all
// ran.
func TestReal(t *testing.T) {
	bin := t.TempDir()
	for name, text := range map[string]string{"tranche": fakeTranche, "gpuload": fakeLoad} {
		if err := os.WriteFile(filepath.Join(bin, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	b := &Bench{Config: Config{Runs: 1, Seconds: 3, Settle: 0.5, Bin: bin}, machine: &gpuMachine{name: "fake"}, dir: t.TempDir(), random: rand.New(rand.NewSource(1))}
	if err := shares("30/60", 1, tenant("a", 30, ""), tenant("b", 60, "")).Run(b); err != nil {
		t.Fatal(err)
	}
	if b.missed != 0 {
		t.Errorf("%d missed", b.missed)
	}
	row := b.rows[0]
	if row.Case != "real time: 30/60" || math.Abs(row.Value-30) > 0.01 || row.Label != "gpu" || row.Target != 30 || row.Better != "nearest" {
		t.Errorf("row %+v", row)
	}
}
