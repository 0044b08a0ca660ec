package placement

import (
	"fmt"
	"slices"
	"strings"

	"tranche.dev/tranche/internal/quantity"
)

// MaxGPUs is the most GPUs of one node that placement looks at.
const MaxGPUs = 64

// Phase is when a container runs within its pod's life.
type Phase int

const (
	// App containers run together until the pod ends.
	App Phase = iota
	// Sidecar containers start in their turn among the init containers and run until the pod ends.
	Sidecar
	// Init containers end before the next container starts, and leave their GPUs to it.
	Init
)

// Constraints say which GPUs will do, by model (ModelMatches) and by UUID. Empty lists constrain nothing.
type Constraints struct {
	Models, NotModels, UUIDs, NotUUIDs []string
}

// Container is what one container of a pod asks. Of its Request, Count is 1 to MaxGPUs and Cores 0 to
// CoresWhole; 100 cores without memory take all of a GPU's memory. Count whole GPUs are chosen by their links.
type Container struct {
	Name        string
	Phase       Phase
	Request     Request
	Constraints Constraints
}

// Pod is what a pod asks of one node.
type Pod struct {
	// Containers in the order in which they start.
	Containers []Container
	// Policy by which to choose; empty: the cluster's, on a single node least fragmentation.
	Policy Policy
	// Apart are groups of container names that share no GPU, Together groups that have the same GPUs.
	Apart, Together [][]string
	// CPU in thousandths of a core and RAM in bytes, of the host. They weigh in where the node's are known.
	CPU, RAM int64
}

// Node is one node's GPUs with what is free on each.
type Node struct {
	Name string
	GPUs []GPU
	// Links between the GPUs, by position; nil: unknown, all alike.
	Links Links
	// CPU and RAM are what is free of the host (units of Pod), if HostKnown.
	CPU, RAM  int64
	HostKnown bool
}

// Held is what a pod holds of one GPU until it ends.
type Held struct {
	UUID   string
	Cores  int
	Memory quantity.Bytes
}

// Assignment is where a pod's containers go.
type Assignment struct {
	// Containers has the UUIDs of the GPUs of each of the pod's containers, in the pod's order.
	Containers [][]string
	// Held is the pod's reservation: of each GPU the most that its containers use at one time. In the order
	// of the node's GPUs.
	Held []Held
}

// ModelMatches tells whether a GPU's model is the wanted one: all of its name or a part of it between
// separators, in any case. A100 is A100-SXM4-80GB, T4 is not T400.
func ModelMatches(model, wanted string) bool {
	words := func(s string) string {
		return " " + strings.Join(strings.FieldsFunc(strings.ToLower(s), func(r rune) bool { return strings.ContainsRune(" -_/", r) }), " ") + " "
	}
	return strings.TrimSpace(wanted) != "" && strings.Contains(words(model), words(wanted))
}

// allows tells why not this GPU; empty: it is allowed.
func (c Constraints) allows(g *GPU) string {
	model := func(wanted string) bool { return ModelMatches(g.Name, wanted) }
	switch {
	case len(c.Models) > 0 && !slices.ContainsFunc(c.Models, model), slices.ContainsFunc(c.NotModels, model):
		return wrongModel
	case len(c.UUIDs) > 0 && !slices.Contains(c.UUIDs, g.UUID), slices.Contains(c.NotUUIDs, g.UUID):
		return wrongGPU
	}
	return ""
}

// on is what the container takes of one GPU.
func (c *Container) on(g *GPU) (cores int, memory int64) {
	if c.Request.Cores == CoresWhole && c.Request.Memory == 0 {
		return CoresWhole, int64(g.Memory)
	}
	return c.Request.Cores, int64(c.Request.Memory)
}

// Validate says what of the pod no node could ever do.
func (p *Pod) Validate() error {
	if err := p.Policy.Validate(); err != nil {
		return err
	}
	for i := range p.Containers {
		c := &p.Containers[i]
		switch r := c.Request; {
		case r.Count < 1 || r.Count > MaxGPUs:
			return fmt.Errorf("container %s: %d GPUs: must be 1 to %d", c.Name, r.Count, MaxGPUs)
		case r.Cores < 0 || r.Cores > CoresWhole:
			return fmt.Errorf("container %s: %d cores of a GPU: must be 0 to %d", c.Name, r.Cores, CoresWhole)
		case r.Memory > 1<<50:
			return fmt.Errorf("container %s: %v of memory: more than any GPU has", c.Name, r.Memory)
		case len(r.Pinned) > 0:
			return fmt.Errorf("container %s: a pod's GPUs are constrained, not pinned", c.Name)
		}
	}
	for _, group := range append(slices.Clone(p.Apart), p.Together...) {
		for _, name := range group {
			if p.find(name) < 0 {
				return fmt.Errorf("no container %q asks for a GPU", name)
			}
		}
	}
	for _, group := range p.Together {
		for _, name := range group {
			if a, b := p.Containers[p.find(group[0])], p.Containers[p.find(name)]; a.Request.Count != b.Request.Count {
				return fmt.Errorf("containers %s and %s must share their GPUs but ask for %d and %d", a.Name, b.Name, a.Request.Count, b.Request.Count)
			}
		}
	}
	return nil
}

func (p *Pod) find(name string) int {
	return slices.IndexFunc(p.Containers, func(c Container) bool { return c.Name == name })
}

// PlacePod puts all containers of a pod on the node's GPUs, or says in a *NoFit what is missing. It finds a
// place if there is one: it searches, in the policy's order, and gives up only after searchSteps.
func PlacePod(node *Node, pod *Pod) (Assignment, error) {
	if err := pod.Validate(); err != nil {
		return Assignment{}, err
	}
	s := newSearch(node, pod, policyOr(pod.Policy, LeastFragmentation), nil)
	if !s.solve() {
		return Assignment{}, s.noFit()
	}
	return s.assignment(), nil
}

// Check tells whether the GPUs that a container was given will do: they exist, are allowed, and have what
// it asks free. It returns their positions in the order given. The error is of type *NoFit.
func Check(node *Node, c *Container, uuids []string) ([]int, error) {
	e := &NoFit{Request: c.Request, Short: notReserved}
	var at []int
	for _, uuid := range uuids {
		i := slices.IndexFunc(node.GPUs, func(g GPU) bool { return g.UUID == uuid })
		switch {
		case i < 0:
			e.Lines = append(e.Lines, fmt.Sprintf("gpu %s: this node has none of that UUID", uuid))
		case slices.Contains(at, i):
			e.Lines = append(e.Lines, fmt.Sprintf("gpu %s: named twice", uuid))
		default:
			if why := c.refuses(&node.GPUs[i]); why != "" {
				e.Lines = append(e.Lines, describeFor(node.GPUs, i, c))
			}
			at = append(at, i)
		}
	}
	if len(e.Lines) == 0 && len(at) != c.Request.Count {
		e.Lines = append(e.Lines, fmt.Sprintf("%d GPUs asked, %d reserved", c.Request.Count, len(at)))
	}
	if len(e.Lines) > 0 {
		return nil, e
	}
	return at, nil
}

// refuses is the constant reason why a container cannot go to a GPU as it is; empty: it can.
func (c *Container) refuses(g *GPU) string {
	if g.Excluded != "" {
		return g.Excluded
	}
	if why := c.Constraints.allows(g); why != "" {
		return why
	}
	cores, memory := c.on(g)
	if cores > max(g.FreeCores, 0) || memory > max(g.FreeMemory, 0) {
		return shortOn(g, cores, memory)
	}
	return ""
}
