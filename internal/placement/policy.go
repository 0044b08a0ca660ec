package placement

import "fmt"

// Policy is how GPUs are chosen among those that will do.
type Policy string

const (
	// LeastFragmentation keeps what stays free usable for the pods that are usual here (Mix), and keeps
	// scarce models for those who need them.
	LeastFragmentation Policy = "least-fragmentation"
	// Binpack takes the fullest GPU of the fullest node.
	Binpack Policy = "binpack"
	// Spread takes the emptiest GPU of the emptiest node.
	Spread Policy = "spread"
	// Topology takes the best linked GPUs first, of the fullest node among those.
	Topology Policy = "topology"
)

// Validate says which policies there are. Empty is one: the default.
func (p Policy) Validate() error {
	switch p {
	case "", LeastFragmentation, Binpack, Spread, Topology:
		return nil
	}
	return fmt.Errorf("policy %q: must be %s, %s, %s or %s", string(p), LeastFragmentation, Binpack, Spread, Topology)
}

func policyOr(p, otherwise Policy) Policy {
	if p == "" {
		return otherwise
	}
	return p
}
