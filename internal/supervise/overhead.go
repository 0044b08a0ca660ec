package supervise

import (
	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/tenant"
)

// unstableMax is how many samples of a process that allocates all the time are skipped before the
// lowest of them counts.
const unstableMax = 8

// Meter turns NVML's figures into what the driver took beyond the ledger's charges (contexts,
// modules), per device. NVML and the ledger are not read at one instant, so a sample counts only
// when the process's charge did not change around it; the figure is raised at once and lowered
// after two equal samples. Pure: no clock, no input or output.
type Meter struct {
	procs map[meterKey]*procMeter
	last  map[meterKey]tenant.SlotUse
}

type meterKey struct {
	slot  int
	start uint64
	dev   int
}

type procMeter struct {
	// excess is what counts; candidate a lower one seen once; lowest the least of the unstable
	// samples seen so far. Bytes.
	excess, candidate, lowest int64
	hasCandidate              bool
	unstable                  int
}

// NewMeter returns one that knows of no process.
func NewMeter() *Meter {
	return &Meter{procs: map[meterKey]*procMeter{}, last: map[meterKey]tenant.SlotUse{}}
}

// Sample takes one report of NVML, keyed by UUID and process, and the ledger's slots read after it.
// It returns the overhead of each device of the slice.
func (m *Meter) Sample(uuids []string, report gpu.Report, slots []tenant.SlotInfo) []int64 {
	out := make([]int64, len(uuids))
	seen := map[meterKey]bool{}
	for dev, uuid := range uuids {
		used := usedByPID(report, uuid)
		for _, s := range slots {
			key := meterKey{slot: s.Index, start: s.Start, dev: dev}
			seen[key] = true
			use := s.Dev[dev]
			pid := s.HostPID
			if pid == 0 {
				pid = s.PID
			}
			if bytes, ok := used[pid]; ok {
				m.one(key, bytes, use)
			}
			m.last[key] = use
			if p := m.procs[key]; p != nil {
				out[dev] += p.excess
			}
		}
	}
	for key := range m.last {
		if !seen[key] {
			delete(m.last, key)
			delete(m.procs, key)
		}
	}
	return out
}

func usedByPID(report gpu.Report, uuid string) map[int]uint64 {
	out := map[int]uint64{}
	for _, d := range report.Devices {
		if d.UUID != uuid {
			continue
		}
		for _, p := range d.Processes {
			if p.Used != nil {
				out[p.PID] = *p.Used
			}
		}
	}
	return out
}

// one takes a sample of one process on one device.
func (m *Meter) one(key meterKey, nvml uint64, use tenant.SlotUse) {
	before, known := m.last[key]
	if !known {
		return
	}
	p := m.procs[key]
	if p == nil {
		p = &procMeter{}
		m.procs[key] = p
	}
	excess := excessOf(nvml, use)
	if before.Op != use.Op || before.Charged != use.Charged {
		if p.unstable == 0 || excess < p.lowest {
			p.lowest = excess
		}
		if p.unstable++; p.unstable < unstableMax {
			return
		}
		excess = p.lowest
	}
	p.unstable = 0
	p.take(excess)
}

func (p *procMeter) take(excess int64) {
	switch {
	case excess >= p.excess:
		p.excess, p.hasCandidate = excess, false
	case p.hasCandidate && p.candidate == excess:
		p.excess, p.hasCandidate = excess, false
	default:
		p.candidate, p.hasCandidate = excess, true
	}
}

// excessOf is NVML's figure beyond the charge. Never lower than the context's charge allows: what is
// charged for allocations has been given out. Memory that the process imported may or may not be in
// NVML's figure, and is charged to its creator: an excess up to it is not counted.
func excessOf(nvml uint64, use tenant.SlotUse) int64 {
	excess := int64(nvml) - int64(use.Charged)
	if excess > 0 && use.Imported > 0 {
		excess = max(0, excess-int64(use.Imported))
	}
	return max(excess, -int64(min(use.Context, use.Charged)))
}
