package simulate

import (
	"fmt"
	"strconv"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/quantity"
)

// ours places through the scheduler's own code.
type ours struct {
	cluster *placement.Cluster
	placed  int
	// ranks of nodes and positions of GPUs by their names.
	ranks, gpus map[string]int
}

// newOurs makes a cluster of the nodes. Node names are ranks, so that equal nodes are told apart as the
// workload says.
func newOurs(policy placement.Policy, nodes []Node) (*ours, error) {
	c, err := placement.NewCluster(placement.Config{Policy: policy, CheckHost: true})
	if err != nil {
		return nil, err
	}
	o := &ours{cluster: c, ranks: map[string]int{}, gpus: map[string]int{}}
	for rank := range nodes {
		n := &nodes[rank]
		out := placement.Node{Name: fmt.Sprintf("%06d-%s", rank, n.Name), CPU: n.CPU, RAM: n.RAM, HostKnown: true}
		for g := range n.GPUs {
			out.GPUs = append(out.GPUs, placement.GPU{Index: g, UUID: fmt.Sprintf("GPU-%d", g), Name: n.Model, Memory: n.GPUMemory,
				FreeCores: placement.CoresWhole, FreeMemory: int64(n.GPUMemory)})
		}
		c.SetNode(out)
		o.ranks[out.Name] = rank
		for g := range out.GPUs {
			o.gpus[out.GPUs[g].UUID] = g
		}
	}
	return o, nil
}

// cores rounds up to hundredths of a GPU.
func (p *Pod) cores() int { return (p.Milli*placement.CoresWhole + Milli - 1) / Milli }

// placementPod is the pod as the scheduler sees it.
func (p *Pod) placementPod() placement.Pod {
	out := placement.Pod{CPU: p.CPU, RAM: p.RAM}
	if p.GPUs > 0 {
		out.Containers = []placement.Container{{Name: "main", Request: placement.Request{Cores: p.cores(), Memory: quantity.Bytes(p.GPUMemory), Count: p.GPUs},
			Constraints: placement.Constraints{Models: p.Models}}}
	}
	return out
}

func (o *ours) place(p *Pod) (int, []int, bool, error) {
	pod := p.placementPod()
	if p.GPUs > 0 {
		o.cluster.Learn(&pod)
	}
	d, err := o.cluster.Decide(&pod, nil)
	if err != nil || d.Best == "" {
		return 0, nil, false, err
	}
	o.placed++
	var gpus []int
	for _, held := range d.Assignment.Held {
		gpus = append(gpus, o.gpus[held.UUID])
	}
	return o.ranks[d.Best], gpus, true, o.cluster.Reserve(strconv.Itoa(o.placed), d.Best, &pod, d.Assignment)
}
