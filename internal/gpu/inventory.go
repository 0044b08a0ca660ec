package gpu

import (
	"fmt"
	"time"

	"tranche.dev/tranche/internal/topology"
)

// Reason says why there are no GPUs to share.
type Reason string

// Reasons. Each is one word, fit for a condition or an event.
const (
	NoDriver Reason = "NoDriver"       // no library, or no kernel module
	Mismatch Reason = "DriverMismatch" // library and kernel module are of different releases
	NoGPU    Reason = "NoGPU"          // the driver answers and has none
	NoAnswer Reason = "NoAnswer"       // NVML hangs, crashes, or fails in another way
)

// Problem is what keeps the whole driver from use; the zero value is none.
type Problem struct {
	Reason Reason
	// Text is one line: what is wrong and what to do.
	Text string
}

func (p Problem) String() string {
	if p.Reason == "" {
		return "none"
	}
	return fmt.Sprintf("%s: %s", p.Reason, p.Text)
}

// State is a GPU's health.
type State struct {
	Healthy bool
	// Reason is what made it unhealthy, one line; "" when healthy.
	Reason string
	// Since is when it became so; of a healthy GPU when it was first seen or recovered.
	Since time.Time
}

// GPU is one GPU of the node: what it is, and whether it may be shared now.
type GPU struct {
	Index  int    // NVML's
	Minor  int    // of /dev/nvidiaN; -1: not told
	UUID   string // never empty
	Name   string
	PCI    string // 00000000:17:00.0
	Memory uint64 // bytes that processes can have: the total without what the driver reserves, as first seen
	NUMA   int    // -1: not told, or a machine without NUMA
	MIG    bool
	// ComputeMode is NVML's: 0 default, 1 and 3 exclusive, 2 prohibited.
	ComputeMode int
	State       State
	// Excluded says why it is not shared in its present mode (MIG, compute mode) and, behind ": ", what ends
	// that; "" if it may be shared.
	Excluded string
}

// Usable is true of a GPU on which new tenants may be placed.
func (g *GPU) Usable() bool { return g.State.Healthy && g.Excluded == "" }

// Inventory is what a node has. Once seen, a GPU stays in it: lost, or with its driver gone, it is unhealthy.
type Inventory struct {
	Driver string // 550.163.01
	CUDA   string // 12.4
	GPUs   []GPU  // by index
	// Links has the link of each pair, by position in GPUs.
	Links topology.Matrix
	// Unidentified are the GPUs that did not tell a UUID since this process began: index and error.
	Unidentified []Device
	Problem      Problem
}

// Find is the GPU of this UUID, nil when there is none.
func (inv *Inventory) Find(uuid string) *GPU {
	for i := range inv.GPUs {
		if inv.GPUs[i].UUID == uuid {
			return &inv.GPUs[i]
		}
	}
	return nil
}
