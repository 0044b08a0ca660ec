package scheduler

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"tranche.dev/tranche/internal/inventory"
	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/quantity"
	"tranche.dev/tranche/internal/quota"
)

// node is what is known of a node beside what the cluster keeps. Present is false of one that is only known
// by the pods on it.
type node struct {
	name    string
	present bool
	// mark is what the rest was read from.
	mark nodeMark
	// divided is true of a node without inventory: its GPUs are its totals, divided, and have no UUIDs of theirs.
	divided bool
	model   string // value of the model label
	pool    string
	gpus    []placement.GPU
	links   placement.Links
	byIndex map[int]string
	models  map[string]string // by UUID
	pods    map[types.UID]*pod
	// unplaced counts pods whose GPUs are not known.
	unplaced int
	// cpu, ram are the host's; plainCPU, plainRAM what pods without GPUs take of it.
	cpu, ram           int64
	plainCPU, plainRAM int64
	claims             []*claim
}

type nodeMark struct {
	inventory, model, pool string
	cores, units, cpu, ram int64
}

func (c *Core) nodeOf(name string) *node {
	n := c.nodes[name]
	if n == nil {
		n = &node{name: name, pods: map[types.UID]*pod{}}
		c.nodes[name] = n
	}
	return n
}

// forgetNode drops a node of which nothing is left.
func (c *Core) forgetNode(n *node) {
	if !n.present && len(n.pods) == 0 && len(n.claims) == 0 && n.plainCPU == 0 && n.plainRAM == 0 {
		delete(c.nodes, n.name)
	}
}

// place is the kind of a GPU, for quotas.
func (n *node) place(uuid string) quota.Place {
	return quota.Place{Label: n.model, Pool: n.pool, Model: n.models[uuid]}
}

// host counts what a pod without GPUs takes of a node.
func (c *Core) host(name string, cpu, ram int64) {
	if cpu == 0 && ram == 0 {
		return
	}
	n := c.nodeOf(name)
	n.plainCPU, n.plainRAM = n.plainCPU+cpu, n.plainRAM+ram
	if n.present {
		c.set(n)
	}
	c.forgetNode(n)
}

// set hands a node to the cluster.
func (c *Core) set(n *node) {
	c.changes++
	c.cluster.SetNode(placement.Node{Name: n.name, GPUs: n.gpus, Links: n.links,
		CPU: n.cpu - n.plainCPU, RAM: n.ram - n.plainRAM, HostKnown: n.cpu > 0})
}

// NodeGone tells that a node was deleted. Its pods stay until they are gone.
func (c *Core) NodeGone(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.nodes[name]
	if n == nil {
		return
	}
	n.present, n.mark, n.gpus, n.byIndex = false, nodeMark{}, nil, nil
	c.changes++
	c.cluster.RemoveNode(name)
	c.forgetNode(n)
}

// NodeSeen tells of a node that was added or has changed.
func (c *Core) NodeSeen(object *corev1.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	amount := func(name string) int64 {
		q := object.Status.Capacity[corev1.ResourceName(name)]
		return q.Value()
	}
	mark := nodeMark{inventory: object.Annotations[podspec.Inventory], model: object.Labels[c.config.ModelLabel], pool: object.Labels[c.config.PoolLabel],
		cores: amount(c.config.Names.Core()), units: amount(c.config.Names.Memory()),
		cpu: object.Status.Allocatable.Cpu().MilliValue(), ram: object.Status.Allocatable.Memory().Value()}
	n := c.nodes[object.Name]
	if n != nil && n.present && n.mark == mark {
		return
	}
	if mark.inventory == "" && mark.cores == 0 {
		if n != nil && n.present {
			n.present, n.mark, n.gpus, n.byIndex = false, nodeMark{}, nil, nil
			c.changes++
			c.cluster.RemoveNode(n.name)
			c.forgetNode(n)
		}
		return
	}
	n = c.nodeOf(object.Name)
	n.present, n.mark, n.model, n.pool, n.cpu, n.ram = true, mark, mark.model, mark.pool, mark.cpu, mark.ram
	if mark.inventory == "" {
		n.divide(c.config.Names)
		c.config.Warn("node without inventory: its totals are divided evenly over its GPUs; run tranche node there", "node", n.name, "gpus", len(n.gpus))
	} else {
		n.published(c.config)
	}
	n.byIndex, n.models = make(map[int]string, len(n.gpus)), make(map[string]string, len(n.gpus))
	for i := range n.gpus {
		n.byIndex[n.gpus[i].Index], n.models[n.gpus[i].UUID] = n.gpus[i].UUID, n.gpus[i].Name
	}
	c.set(n)
	c.settleAll(n)
}

// mostMemory is more than any GPU has; a capacity is what its node says.
const mostMemory = 1 << 50

// divide makes GPUs of a node's totals, as gpu-admission did.
func (n *node) divide(names podspec.Names) {
	count := min(int(n.mark.cores/placement.CoresWhole), placement.MaxGPUs)
	n.divided, n.links, n.gpus = true, nil, nil
	for i := range count {
		memory := min(n.mark.units/int64(count), mostMemory/int64(names.Unit)) * int64(names.Unit)
		n.gpus = append(n.gpus, placement.GPU{Index: i, UUID: fmt.Sprintf("%s#%d", n.name, i), Name: n.mark.model,
			Memory: quantity.Bytes(memory), FreeCores: placement.CoresWhole, FreeMemory: memory})
	}
}

// published reads the inventory.
func (n *node) published(config CoreConfig) {
	n.divided, n.links, n.gpus = false, nil, nil
	inv, err := inventory.Decode(n.mark.inventory)
	if err != nil {
		config.Warn("a node's inventory cannot be read: nothing new goes there", "node", n.name, "err", err)
		return
	}
	why := ""
	switch {
	case len(inv.GPUs) > 0 && inv.Domain != config.Names.Domain:
		why = "other resource domain"
	case len(inv.GPUs) > 0 && inv.Unit != uint64(config.Names.Unit):
		why = "other memory unit"
	}
	if why != "" {
		config.Warn("a node is configured differently: nothing new goes there", "node", n.name, "why", why, "domain", inv.Domain, "unit", inv.Unit)
	}
	for _, g := range inv.GPUs {
		gpu := placement.GPU{Index: g.Index, UUID: g.UUID, Name: g.Model, Memory: quantity.Bytes(g.Memory),
			FreeCores:  placement.CoresWhole - g.Foreign.Cores - g.Raised.Cores,
			FreeMemory: int64(g.Memory) - int64(g.Foreign.Memory) - int64(g.Raised.Memory), Excluded: why}
		if g.Unusable != "" {
			gpu.Excluded = unusable(g.Unusable)
		}
		n.gpus = append(n.gpus, gpu)
	}
	matrix, err := inv.Matrix()
	if err != nil {
		return // Decode has looked at it already
	}
	for _, row := range matrix {
		var to []placement.Link
		for _, l := range row {
			to = append(to, link(l))
		}
		n.links = append(n.links, to)
	}
}

// unusable shortens a reason to its constant part: kube-scheduler counts equal texts.
func unusable(why string) string {
	for i, r := range why {
		if r == ':' {
			return "GPU " + why[:i]
		}
	}
	return "GPU " + why
}

// perNVLink is the bandwidth of one link in GB/s each way. Generations differ, but not within a node.
const perNVLink = 25

func link(l inventory.Link) placement.Link {
	level := map[string]int{"": 0, "PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}[l.Level]
	return placement.Link{Level: level, Bandwidth: l.NVLinks * perNVLink}
}
