package supervise

import (
	"testing"

	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/tenant"
)

const mi = 1 << 20

// Each line is a sample of one process: NVML's figure, the charge, the context's part of it and the
// operation number, and the overhead that follows.
func TestMeter(t *testing.T) {
	type line struct {
		nvml, charged, context, imported, op uint64
		want                                 int64
	}
	for name, lines := range map[string][]line{
		"first sample only remembers": {{500, 400, 400, 0, 1, 0}},
		"a context larger than charged counts at once": {
			{500, 400, 400, 0, 1, 0}, {500, 400, 400, 0, 1, 100}},
		"lower only after two equal ones": {
			{500, 400, 400, 0, 1, 0}, {500, 400, 400, 0, 1, 100}, {450, 400, 400, 0, 1, 100}, {450, 400, 400, 0, 1, 50}},
		"lower and different is not yet lower": {
			{500, 400, 400, 0, 1, 0}, {500, 400, 400, 0, 1, 100}, {450, 400, 400, 0, 1, 100}, {440, 400, 400, 0, 1, 100}, {440, 400, 400, 0, 1, 40}},
		"a context charged too high": {
			{300, 400, 400, 0, 1, 0}, {300, 400, 400, 0, 1, 0}, {300, 400, 400, 0, 1, -100}},
		"never below the context's charge": {
			{0, 900, 400, 0, 1, 0}, {0, 900, 400, 0, 1, 0}, {0, 900, 400, 0, 1, -400}},
		"an allocation between the two readings is no overhead": {
			{400, 400, 400, 0, 1, 0}, {900, 400, 400, 0, 2, 0}, {900, 900, 400, 0, 3, 0}, {900, 900, 400, 0, 3, 0}},
		"imports are their creator's": {
			{700, 400, 400, 200, 1, 0}, {700, 400, 400, 200, 1, 100}, {450, 400, 400, 200, 2, 100}},
	} {
		m := NewMeter()
		for i, l := range lines {
			used := l.nvml * mi
			report := gpu.Report{Devices: []gpu.Device{{UUID: "other", Processes: []gpu.Process{{PID: 7, Used: new(uint64)}}},
				{UUID: "GPU-1", Processes: []gpu.Process{{PID: 7, Used: &used}, {PID: 8, Used: nil}}}}}
			slot := tenant.SlotInfo{Index: 1, Process: tenant.Process{PID: 7, Start: 1}}
			slot.Dev[0] = tenant.SlotUse{Op: l.op, Charged: l.charged * mi, Context: l.context * mi, Imported: l.imported * mi}
			if got := m.Sample([]string{"GPU-1"}, report, []tenant.SlotInfo{slot})[0]; got != l.want*mi {
				t.Errorf("%s: sample %d gives %d MiB, want %d", name, i, got/mi, l.want)
			}
		}
		if got := m.Sample([]string{"GPU-1"}, gpu.Report{}, nil)[0]; got != 0 || len(m.procs) != 0 {
			t.Errorf("%s: %d bytes remain of a process that is gone", name, got)
		}
	}
}

// A process that allocates all the time is measured too, by the lowest sample.
func TestMeterUnstable(t *testing.T) {
	m := NewMeter()
	var got int64
	for i := range uint64(20) {
		used := (500 + i%3*50) * mi
		report := gpu.Report{Devices: []gpu.Device{{UUID: "GPU-1", Processes: []gpu.Process{{PID: 7, Used: &used}}}}}
		slot := tenant.SlotInfo{Index: 1, Process: tenant.Process{PID: 7, Start: 1}}
		slot.Dev[0] = tenant.SlotUse{Op: i, Charged: 400 * mi, Context: 400 * mi}
		got = m.Sample([]string{"GPU-1"}, report, []tenant.SlotInfo{slot})[0]
	}
	if got != 100*mi {
		t.Errorf("%d MiB, want 100", got/mi)
	}
}
