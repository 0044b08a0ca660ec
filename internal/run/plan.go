// Package run is `tranche run`: it reserves a slice, lays it out, runs the command in it and looks
// after it until the command ends.
package run

import (
	"fmt"
	"sort"
	"strings"

	"tranche.dev/tranche/internal/machine"
	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/quantity"
	"tranche.dev/tranche/internal/state"
	"tranche.dev/tranche/internal/tenant"
)

// Asked is what the user wants. Zero Cores, Memory and Burst mean that the flag was not given.
type Asked struct {
	// Cores in hundredths of a GPU: 1 to 100 of each GPU, or n*100 for n whole ones.
	Cores  int
	Memory quantity.Bytes // of each GPU
	Burst  int
	GPUs   []string
	// Weight, 1 to 1000, divides time that nobody is guaranteed; 0: as Cores.
	Weight int
	// Class is ClassNormal, or "", or ClassLatency.
	Class string
}

// Classes of slices: those of the latency class go before the others, within their limits.
const (
	ClassNormal  = "normal"
	ClassLatency = "latency"
)

// Validate checks what can be checked without a machine.
func (a Asked) Validate() error {
	switch {
	case a.Cores < 0 || a.Cores > 100 && a.Cores%100 != 0:
		return fmt.Errorf("--cores %d: 1 to 100 of one GPU, or a multiple of 100 for whole GPUs", a.Cores)
	case a.Cores > 100*tenant.MaxDevices:
		return fmt.Errorf("--cores %d: a slice has at most %d GPUs", a.Cores, tenant.MaxDevices)
	case a.Burst != 0 && a.Cores == 0:
		return fmt.Errorf("--burst %d: needs --cores, the share that is always there", a.Burst)
	case a.Burst != 0 && (a.Cores >= 100 || a.Burst < a.Cores || a.Burst > 100):
		return fmt.Errorf("--burst %d: from --cores (%d, less than 100) to 100", a.Burst, a.Cores)
	case a.Cores > 100 && len(a.GPUs) > 0 && len(a.GPUs) != a.Cores/100:
		return fmt.Errorf("--gpu names %d GPUs, --cores %d takes %d", len(a.GPUs), a.Cores, a.Cores/100)
	case len(a.GPUs) > tenant.MaxDevices:
		return fmt.Errorf("--gpu names %d GPUs; a slice has at most %d", len(a.GPUs), tenant.MaxDevices)
	}
	return a.validateTurns()
}

func (a Asked) validateTurns() error {
	switch {
	case a.Weight < 0 || a.Weight > weightMax:
		return fmt.Errorf("--weight %d: 1 to %d", a.Weight, weightMax)
	case a.Class != "" && a.Class != ClassNormal && a.Class != ClassLatency:
		return fmt.Errorf("--class %s: %s or %s", a.Class, ClassLatency, ClassNormal)
	}
	return nil
}

const weightMax = 1000

// count is the number of GPUs asked for.
func (a Asked) count() int { return max(1, a.Cores/100, len(a.GPUs)) }

// coresEach is what is asked of each GPU.
func (a Asked) coresEach() int { return min(a.Cores, 100) }

// pick finds the GPUs that the user named, by index or by a prefix of the UUID that only one has.
func pick(gpus []machine.GPU, names []string) ([]string, error) {
	var out []string
	for _, name := range names {
		var found []string
		for _, g := range gpus {
			if name == fmt.Sprint(g.Index) {
				found = []string{g.UUID}
				break
			}
			if len(name) >= 2 && (strings.HasPrefix(g.UUID, name) || strings.HasPrefix(strings.TrimPrefix(g.UUID, "GPU-"), name)) {
				found = append(found, g.UUID)
			}
		}
		switch {
		case len(found) == 0:
			return nil, fmt.Errorf("--gpu %s: no such GPU; there are %s", name, listing(gpus))
		case len(found) > 1:
			return nil, fmt.Errorf("--gpu %s: %d GPUs begin so; there are %s", name, len(found), listing(gpus))
		}
		for _, uuid := range out {
			if uuid == found[0] {
				return nil, fmt.Errorf("--gpu %s: named twice", name)
			}
		}
		out = append(out, found[0])
	}
	return out, nil
}

func listing(gpus []machine.GPU) string {
	var parts []string
	for _, g := range gpus {
		parts = append(parts, fmt.Sprintf("%d (%s)", g.Index, g.UUID))
	}
	return strings.Join(parts, ", ")
}

// free takes from each GPU what living slices reserved. A slice within another lives on that one's
// reservation.
func free(gpus []machine.GPU, slices []state.Slice) []placement.GPU {
	alive := map[string]bool{}
	for _, s := range slices {
		alive[s.ID] = s.Alive
	}
	out := make([]placement.GPU, len(gpus))
	for i, g := range gpus {
		out[i] = placement.GPU{Index: g.Index, UUID: g.UUID, Name: g.Name, Memory: quantity.Bytes(g.Memory),
			FreeCores: placement.CoresWhole, FreeMemory: int64(g.Memory)}
		for _, s := range slices {
			if !s.Alive || s.Info.Parent != "" && alive[s.Info.Parent] {
				continue
			}
			for _, r := range s.Info.GPUs {
				if r.UUID == g.UUID {
					out[i].FreeCores -= r.ReservedCores
					out[i].FreeMemory -= int64(r.ReservedMemory)
				}
			}
		}
	}
	return out
}

// within gives each GPU what the slice around us may use of it, instead of what is reserved.
func within(gpus []machine.GPU) []placement.GPU {
	out := make([]placement.GPU, len(gpus))
	for i, g := range gpus {
		memory := g.Memory
		if g.Outer.MemoryLimited {
			memory = min(memory, g.Outer.MemoryLimit)
		}
		out[i] = placement.GPU{Index: g.Index, UUID: g.UUID, Name: g.Name, Memory: quantity.Bytes(memory),
			FreeCores: g.Outer.Cores, FreeMemory: int64(memory)}
	}
	return out
}

// decide chooses GPUs and says what of each the slice reserves and is held to.
func decide(asked Asked, gpus []machine.GPU, slices []state.Slice) ([]state.GPU, []tenant.Device, error) {
	pinned, err := pick(gpus, asked.GPUs)
	if err != nil {
		return nil, nil, err
	}
	req := placement.Request{Cores: asked.coresEach(), Memory: asked.Memory, Count: asked.count(), Pinned: pinned}
	nested := gpus[0].Outer != nil
	var have []placement.GPU
	if nested {
		// The smaller of the two limits holds, so nothing can be too much here.
		have, req.Cores, req.Memory = within(gpus), 0, 0
	} else {
		have = free(gpus, slices)
		if asked.Cores >= placement.CoresWhole && asked.Memory == 0 {
			req.Memory = wholeMemory(have)
		}
	}
	chosen, err := placement.Choose(have, req)
	if err != nil {
		return nil, nil, err
	}
	var reserved []state.GPU
	var limits []tenant.Device
	for _, i := range chosen {
		r, d := one(asked, gpus[i], have[i], nested)
		reserved, limits = append(reserved, r), append(limits, d)
	}
	return reserved, limits, nil
}

// wholeMemory is what a whole GPU's worth of memory is, at the smallest of them: the fit is tested
// against what is free, so a GPU on which any memory is reserved is not whole.
func wholeMemory(gpus []placement.GPU) quantity.Bytes {
	sizes := make([]quantity.Bytes, len(gpus))
	for i, g := range gpus {
		sizes[i] = g.Memory
	}
	sort.Slice(sizes, func(i, j int) bool { return sizes[i] < sizes[j] })
	return sizes[0]
}

// one is the part of a slice on one GPU.
func one(asked Asked, g machine.GPU, have placement.GPU, nested bool) (state.GPU, tenant.Device) {
	cores, memory := asked.coresEach(), asked.Memory
	d := tenant.Device{UUID: g.UUID, ContextBytes: g.Context, Cores: placement.CoresWhole, MemoryLimit: uint64(have.Memory)}
	if cores > 0 && cores < placement.CoresWhole {
		d.Cores, d.CoresLimited = cores, true
	}
	if nested && g.Outer.CoresLimited && d.Cores >= g.Outer.Cores {
		d.Cores, d.CoresLimited = g.Outer.Cores, true
	}
	d.CoresCeiling = max(d.Cores, asked.Burst)
	d.Weight, d.Latency = asked.Weight, asked.Class == ClassLatency
	switch {
	case memory > 0:
		d.MemoryLimit, d.MemoryLimited = min(uint64(memory), uint64(have.Memory)), true
	case nested:
		d.MemoryLimited = g.Outer.MemoryLimited
	case have.FreeMemory < int64(have.Memory):
		// Nothing asked, so nothing reserved; but what others reserved is theirs.
		d.MemoryLimit, d.MemoryLimited = uint64(max(have.FreeMemory, 0)), true
	}
	r := state.GPU{UUID: g.UUID, Index: g.Index, Name: g.Name, Cores: d.Cores, Burst: d.CoresCeiling, Memory: d.MemoryLimit,
		ReservedCores: cores, ReservedMemory: uint64(memory), Weight: d.Weight, Latency: d.Latency}
	if cores >= placement.CoresWhole && memory == 0 {
		r.ReservedMemory = uint64(have.Memory)
	}
	return r, d
}
