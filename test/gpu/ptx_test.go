package gpu

import (
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"tranche.dev/tranche/test/fixture"
)

// Offsets of gpuload/ptx.h, in words.
const (
	probeKernels, probeRun, probeGaps, probeGapNs, probeLast, probeBuckets = 0, 1, 2, 3, 4, 16
	stampStart, stampEnd, stampRun, stampGaps, stampGap                    = 0, 1, 2, 3, 4
	bucketBits, buckets                                                    = 26, 4096
)

const memoryAt = 1 << 20

// device is a GPU that a kernel has in turns: `turn` ns, then `away` ns not. Its timer moves in
// steps; a look at it takes `look` ns.
type device struct {
	turn, away, step, look uint64
	now                    uint64
	left                   uint64   // of the turn
	gaps                   []uint64 // pairs: when it went, when it came back
	ran                    map[uint64]uint64
}

func (d *device) timer() uint64 {
	d.now += d.look
	d.ran[d.now>>bucketBits] += d.look
	if d.away > 0 {
		if d.left < d.look {
			d.gaps = append(d.gaps, d.now, d.now+d.away)
			d.now += d.away
			d.left = d.turn
		}
		d.left -= d.look
	}
	return d.now / d.step * d.step
}

func (d *device) total() (sum uint64) {
	for _, ns := range d.ran {
		sum += ns
	}
	return sum
}

func kernels(t *testing.T) map[string]kernel {
	t.Helper()
	return parsePTX(fixture.Run(t, "", nil, fixture.Need(t, fixture.Build("bin", "calibrate")), "--ptx").Stdout)
}

// launch runs a kernel for ns; what it wrote, by word.
func launch(t *testing.T, d *device, name string, ns, room, tid uint64) []uint64 {
	t.Helper()
	d.ran, d.left = map[uint64]uint64{}, d.turn/2
	d.now = 77_777_777_777
	th := thread{t: t, kernel: kernels(t)[name], params: map[string]uint64{"ns": ns, "words": memoryAt, "room": room},
		memory: map[uint64]uint64{}, timer: d.timer, tid: tid}
	if !th.run(50_000_000) {
		t.Fatalf("%s does not end", name)
	}
	words := make([]uint64, probeBuckets+buckets)
	for at, v := range th.memory {
		words[(at-memoryAt)/8] = v
	}
	return words
}

func near(t *testing.T, what string, got, want, within uint64) {
	t.Helper()
	if math.Abs(float64(got)-float64(want)) > float64(within) {
		t.Errorf("%s is %d, want %d (within %d)", what, got, want, within)
	}
}

// TestSpin: a kernel is the same work whether it has the GPU alone or in turns.
func TestSpin(t *testing.T) {
	for name, d := range map[string]device{
		"alone":            {turn: 1, step: 32, look: 120},
		"alone, 1 us":      {turn: 1, step: 1024, look: 60},
		"turns":            {turn: 1_024_000, away: 1_184_000, step: 32, look: 120},
		"short turns":      {turn: 200_000, away: 30_000, step: 1024, look: 100},
		"a slow processor": {turn: 1_024_000, away: 1_184_000, step: 1024, look: 2000},
	} {
		for _, kernel := range []string{"tranche_spin", "tranche_probe", "tranche_stamp"} {
			launch(t, &d, kernel, 4_000_000, 0, 0)
			near(t, name+": "+kernel+" had the GPU for", d.total(), 4_000_000, 4_000_000/200)
		}
	}
}

// TestSpinEnds also where the timer is of no use for it.
func TestSpinEnds(t *testing.T) {
	d := device{turn: 1, step: 1_000_000, look: 5000}
	launch(t, &d, "tranche_spin", 100_000, 0, 0)
	near(t, "with a timer in steps of 1 ms it takes", d.now-77_777_777_777, 1_000_000_000+256*100_000, 3_000_000)
}

// TestProbe: what is recorded is what was.
func TestProbe(t *testing.T) {
	d := device{turn: 1_024_000, away: 1_184_000, step: 32, look: 500}
	w := launch(t, &d, "tranche_probe", 150_000_000, 0, 0)
	gaps := uint64(len(d.gaps) / 2)
	near(t, "kernels", w[probeKernels], 1, 0)
	near(t, "run_ns", w[probeRun], d.total(), gaps*600)
	near(t, "gaps", w[probeGaps], gaps, 0)
	near(t, "gap_ns", w[probeGapNs], gaps*d.away, gaps*600)
	near(t, "last_ns", w[probeLast], d.now, 600)
	if len(d.ran) < 4 {
		t.Fatalf("the kernel ran in %d buckets only", len(d.ran))
	}
	sum := uint64(0)
	for i, got := range w[probeBuckets:] {
		sum += got
		for bucket, want := range d.ran {
			if bucket%buckets == uint64(i) {
				near(t, "a bucket", got, want, want/1000+1000)
			}
		}
	}
	near(t, "the sum of buckets", sum, w[probeRun], 0)
	for _, v := range launch(t, &d, "tranche_probe", 1_000_000, 0, 5) {
		if v != 0 {
			t.Fatal("another thread than the first one records")
		}
	}
}

// TestStamp: each gap is noted, as far as there is room.
func TestStamp(t *testing.T) {
	d := device{turn: 1_024_000, away: 1_184_000, step: 32, look: 100}
	for _, room := range []uint64{1000, 5} {
		d.gaps = nil
		w := launch(t, &d, "tranche_stamp", 20_000_000, room, 0)
		near(t, "start", w[stampStart], 77_777_777_777, 150)
		near(t, "end", w[stampEnd], d.now, 150)
		near(t, "run", w[stampRun], 20_000_000, 20_000)
		near(t, "gaps", w[stampGaps], uint64(len(d.gaps)/2), 0)
		for i, at := range d.gaps {
			switch noted := w[stampGap+i]; {
			case uint64(i) < 2*room:
				near(t, "a gap", noted, at, 150)
			case noted != 0:
				t.Fatalf("noted %d gaps, there was room for %d", i/2, room)
			}
		}
	}
}

// TestAssembles: NVIDIA's assembler takes the kernels. Skipped where it is not installed.
func TestAssembles(t *testing.T) {
	ptxas, err := exec.LookPath("ptxas")
	if err != nil {
		t.Skip("no ptxas here (it comes with the CUDA toolkit)")
	}
	file := filepath.Join(t.TempDir(), "kernels.ptx")
	text := fixture.Run(t, "", nil, fixture.Build("bin", "calibrate"), "--ptx").Stdout
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, arch := range []string{"sm_75", "sm_80", "sm_90"} {
		if out, err := exec.Command(ptxas, "-arch="+arch, "-o", os.DevNull, file).CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", arch, err, out)
		}
	}
}
