package allocation

import (
	"fmt"

	"tranche.dev/tranche/internal/quantity"
)

// Free is what nobody has of a GPU.
type Free struct {
	Cores  int
	Memory uint64
}

// Fits tells whether an allocation may change from what it has: lowering always, raising within what is free
// of each GPU, by UUID. The error names the GPU, what more is asked of it, and what is free.
func Fits(from, to []GPU, free map[string]Free) error {
	if len(from) != len(to) {
		return fmt.Errorf("a change to %d GPUs of an allocation of %d", len(to), len(from))
	}
	for i, g := range to {
		had, left := from[i], free[g.UUID]
		if g.UUID != had.UUID {
			return fmt.Errorf("a change of %s to %s: the GPU stays the same", had.UUID, g.UUID)
		}
		if more := g.Guaranteed() - had.Guaranteed(); more > max(left.Cores, 0) {
			return fmt.Errorf("gpu %s: %d cores asked, %d more than now; free: %d", g.UUID, g.Cores, more, max(left.Cores, 0))
		}
		if g.Memory > had.Memory && g.Memory-had.Memory > left.Memory {
			return fmt.Errorf("gpu %s: %s of memory asked, %s more than now; free: %s", g.UUID,
				quantity.Bytes(g.Memory), quantity.Bytes(g.Memory-had.Memory), quantity.Bytes(left.Memory))
		}
	}
	return nil
}
