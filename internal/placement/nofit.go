package placement

import (
	"fmt"
	"strings"

	"tranche.dev/tranche/internal/quantity"
)

// The constant short reasons, beside those that name the request (asked). kube-scheduler counts equal
// texts, so there are few.
const (
	wrongModel  = "wrong model"
	wrongGPU    = "GPU not allowed"
	noGPUs      = "no GPUs"
	noInventory = "not known to the scheduler"
	hostShort   = "host CPU or memory short"
	notReserved = "reserved GPUs do not fit"
	noTogether  = "containers do not fit together"
	gaveUp      = "too many combinations"
)

// NoFit says for every GPU that was considered what is missing.
type NoFit struct {
	Request Request
	Lines   []string
	// Short is a constant reason without figures of the node: wrong model, or asked 30 cores / 8 GiB: no GPU
	// has both. Choose leaves it empty.
	Short string
}

func (e *NoFit) Error() string { return strings.Join(e.Lines, "\n") }

// asked names a request in short reasons.
func (c *Container) asked() string {
	var parts []string
	if c.Request.Cores > 0 {
		parts = append(parts, fmt.Sprintf("%d cores", c.Request.Cores))
	}
	if c.Request.Memory > 0 {
		parts = append(parts, c.Request.Memory.String())
	}
	s := "asked " + strings.Join(parts, " / ")
	if c.Request.Count > 1 {
		s += fmt.Sprintf(" on %d GPUs", c.Request.Count)
	}
	return s
}

// shortOn says what of a request a GPU lacks.
func shortOn(g *GPU, cores int, memory int64) string {
	switch c, m := cores > max(g.FreeCores, 0), memory > max(g.FreeMemory, 0); {
	case c && m:
		return "cores and memory short"
	case c:
		return "cores short"
	default:
		return "memory short"
	}
}

// describeFor is a line on what GPU i lacks for a container, and where it would fit.
func describeFor(gpus []GPU, i int, c *Container) string {
	g := &gpus[i]
	if g.Excluded != "" {
		return g.Label() + ": " + g.Excluded
	}
	if why := c.Constraints.allows(g); why != "" {
		return fmt.Sprintf("%s: %s (%s)", g.Label(), why, g.Name)
	}
	cores, memory := c.on(g)
	line := describe(*g, Request{Cores: cores, Memory: quantity.Bytes(memory)})
	if next := nextFree(gpus, i, c); next >= 0 {
		line += fmt.Sprintf("; next free: %s (%d cores, %v)", gpus[next].Label(), gpus[next].FreeCores, quantity.Bytes(max(gpus[next].FreeMemory, 0)))
	}
	return line
}

// nextFree is another GPU where the container fits, -1 for none.
func nextFree(gpus []GPU, not int, c *Container) int {
	for j := range gpus {
		if j != not && c.refuses(&gpus[j]) == "" {
			return j
		}
	}
	return -1
}
