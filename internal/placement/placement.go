// Package placement chooses GPUs: for one slice (Choose), for the containers of a pod on one node
// (PlacePod, Check), and the node as well, in a cluster (Cluster). The scheduler, the node, `tranche run`
// and the simulator call the same code. Pure: state and request in, choice out; no input or output, no
// clock, no goroutine, and equal input gives equal output.
package placement

import (
	"fmt"
	"sort"
	"strings"

	"tranche.dev/tranche/internal/quantity"
)

// CoresWhole is one whole GPU in cores, which are hundredths of a GPU.
const CoresWhole = 100

// GPU is what is known of one GPU: its size and what is reserved on it. Free amounts may be
// negative when more was reserved than there is (a limit lowered, a GPU swapped).
type GPU struct {
	Index int
	UUID  string
	// Name is the model, as NVML gives it: NVIDIA A100-SXM4-80GB.
	Name       string
	Memory     quantity.Bytes
	FreeCores  int
	FreeMemory int64
	// Excluded says why nothing new may be put here (unhealthy, MIG, used by others), in a few constant
	// words; empty: it may be used. What is there already stays.
	Excluded string
}

// Request is what one slice asks of each of Count GPUs. Zero Cores or Memory reserves none.
type Request struct {
	Cores  int
	Memory quantity.Bytes
	Count  int
	// Pinned, when not empty, names the GPUs by UUID: all of them and no others are taken.
	Pinned []string
}

// Label is how messages name a GPU: `gpu 0 (GPU-1b2c…)`.
func (g GPU) Label() string { return fmt.Sprintf("gpu %d (%s)", g.Index, shortUUID(g.UUID)) }

func shortUUID(uuid string) string {
	if len(uuid) > 8 {
		return uuid[:8] + "…"
	}
	return uuid
}

// Choose returns the positions in gpus of the chosen ones, in the order of Pinned, else by index.
// A request that reserves something goes to the tightest GPUs where it fits, so that large gaps
// stay large; one that reserves nothing goes where most is free.
func Choose(gpus []GPU, req Request) ([]int, error) {
	if len(req.Pinned) > 0 {
		return choosePinned(gpus, req)
	}
	var fit []int
	for i, g := range gpus {
		if g.Excluded == "" && fits(g, req) {
			fit = append(fit, i)
		}
	}
	if len(fit) < req.Count {
		return nil, noFit(gpus, req, len(fit))
	}
	roomy := req.Cores == 0 && req.Memory == 0
	sort.SliceStable(fit, func(a, b int) bool {
		la, lb := slack(gpus[fit[a]]), slack(gpus[fit[b]])
		if roomy {
			la, lb = lb, la
		}
		if la != lb {
			return la < lb
		}
		return gpus[fit[a]].Index < gpus[fit[b]].Index
	})
	chosen := fit[:req.Count]
	sort.Ints(chosen)
	return chosen, nil
}

func choosePinned(gpus []GPU, req Request) ([]int, error) {
	var chosen []int
	var short []GPU
	for _, uuid := range req.Pinned {
		for i, g := range gpus {
			if g.UUID != uuid {
				continue
			}
			chosen = append(chosen, i)
			if g.Excluded != "" || !fits(g, req) {
				short = append(short, g)
			}
		}
	}
	if len(chosen) != len(req.Pinned) {
		return nil, fmt.Errorf("%d GPUs named, %d of them exist", len(req.Pinned), len(chosen))
	}
	if len(short) > 0 {
		return nil, noFit(short, req, 0)
	}
	return chosen, nil
}

func fits(g GPU, req Request) bool {
	return req.Cores <= max(g.FreeCores, 0) && uint64(req.Memory) <= uint64(max(g.FreeMemory, 0))
}

// slack is what is free on a GPU, both kinds as shares of the whole.
func slack(g GPU) float64 {
	s := float64(g.FreeCores) / CoresWhole
	if g.Memory > 0 {
		s += float64(g.FreeMemory) / float64(g.Memory)
	}
	return s
}

func noFit(gpus []GPU, req Request, fitting int) error {
	e := &NoFit{Request: req}
	if req.Count > 1 && len(req.Pinned) == 0 {
		e.Lines = append(e.Lines, fmt.Sprintf("%d GPUs asked, the request fits on %d of %d", req.Count, fitting, len(gpus)))
	}
	for _, g := range gpus {
		e.Lines = append(e.Lines, describe(g, req))
	}
	return e
}

func describe(g GPU, req Request) string {
	if g.Excluded != "" {
		return g.Label() + ": " + g.Excluded
	}
	var parts []string
	if req.Cores > 0 {
		parts = append(parts, fmt.Sprintf("%d of %d cores asked, %d free", req.Cores, CoresWhole, max(g.FreeCores, 0)))
	}
	if req.Memory > 0 {
		parts = append(parts, fmt.Sprintf("memory %v asked, %v free", req.Memory, quantity.Bytes(max(g.FreeMemory, 0))))
	}
	return g.Label() + ": " + strings.Join(parts, "; ")
}
