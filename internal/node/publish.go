package node

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/inventory"
	"tranche.dev/tranche/internal/node/books"
	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/topology"
)

// modelLabel is the label whose value is the GPUs' model, if the admin lists it.
const modelLabel = "gaia.tencent.com/gpu-model"

// republish is how often the same is written again: the node's object may be another by now, as when its kubelet registers anew.
const republish = 5 * time.Minute

// publish tells the API server what there is: labels, and the inventory for schedulers. It writes when there is
// something new.
func (n *Node) publish() {
	if n.cluster == nil {
		return
	}
	n.mu.Lock()
	inv := n.describe()
	labels := n.labels()
	n.mu.Unlock()
	text, err := inventory.Encode(inv)
	if err != nil {
		n.log.Error("the inventory cannot be published", "error", err)
		return
	}
	state, now := fmt.Sprint(labels)+text, n.config.Now()
	n.mu.Lock()
	same := n.published == state && now.Sub(n.publishedAt) < republish
	if !same {
		n.published, n.publishedAt = state, now
	}
	n.mu.Unlock()
	if same {
		return
	}
	set := map[string]*string{}
	for k, v := range labels {
		set[k] = &v
	}
	n.cluster.patchNode("inventory and labels", set, map[string]*string{podspec.Inventory: &text}, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.published = ""
	})
}

func (n *Node) labels() map[string]string {
	out := map[string]string{}
	for k, v := range n.config.Labels {
		if k == modelLabel {
			if len(n.inventory.GPUs) == 0 {
				continue
			}
			v = modelOf(n.inventory.GPUs[0].Name)
		}
		out[k] = v
	}
	return out
}

// modelOf makes a label's value of a product name: the word after the maker's, as gpu-manager did: M40 of
// Tesla M40 24GB.
func modelOf(name string) string {
	words := strings.Fields(name)
	for len(words) > 1 && slices.Contains([]string{"NVIDIA", "Tesla", "GeForce", "Quadro"}, words[0]) {
		words = words[1:]
	}
	if len(words) == 0 {
		return ""
	}
	label := strings.Map(func(r rune) rune {
		if r == '-' || r == '.' || r == '_' || r >= '0' && r <= '9' || r >= 'A' && r <= 'Z' || r >= 'a' && r <= 'z' {
			return r
		}
		return '-'
	}, words[0])
	return strings.Trim(label[:min(len(label), 63)], "-._")
}

// describe is the node's inventory. The lock is held.
func (n *Node) describe() inventory.Node {
	out := inventory.Node{Driver: n.inventory.Driver, CUDA: n.inventory.CUDA, Unit: uint64(n.config.MemoryUnit), Domain: n.config.ResourceDomain,
		Problem: n.inventory.Problem.Text}
	unit := uint64(n.config.MemoryUnit)
	for _, g := range n.inventory.GPUs {
		raised := n.books.Raised(g.UUID)
		foreign := n.foreign[g.UUID]
		out.GPUs = append(out.GPUs, inventory.GPU{Index: g.Index, Minor: g.Minor, UUID: g.UUID, Model: g.Name, Memory: g.Memory / unit * unit,
			NUMA: g.NUMA, Unusable: unusable(g),
			Foreign: inventory.Amount{Cores: foreign.Cores, Memory: uint64(foreign.Units) * unit},
			Raised:  inventory.Amount{Cores: min(raised.Cores, 100), Memory: uint64(raised.Units) * unit}})
	}
	if len(n.inventory.Links) == len(n.inventory.GPUs) && len(out.GPUs) > 1 {
		links := make([][]inventory.Link, len(out.GPUs))
		for i := range links {
			for j := range out.GPUs {
				links[i] = append(links[i], inventoryLink(n.inventory.Links.At(i, j)))
			}
		}
		out.SetMatrix(links)
	}
	return out
}

func unusable(g gpu.GPU) string {
	if g.Excluded == "" && !g.State.Healthy {
		return "unhealthy: " + g.State.Reason
	}
	return g.Excluded
}

func inventoryLink(l topology.Link) inventory.Link {
	out := inventory.Link{NVLinks: l.NVLinks}
	if l.Level >= topology.PIX {
		out.Level = l.Level.String()
	}
	return out
}

// placementLink is a link as the placement weighs it, by NVML's levels.
func placementLink(l topology.Link) placement.Link {
	level := map[topology.Level]int{topology.PIX: 10, topology.PXB: 20, topology.PHB: 30, topology.NODE: 40, topology.SYS: 50}[l.Level]
	bandwidth := 0
	if l.NVLinks > 0 {
		bandwidth = int(l.GBps)
	}
	return placement.Link{Level: level, Bandwidth: bandwidth}
}

// confirm writes on the pod where its containers are, as gpu-manager did, and by UUID.
func (n *Node) confirm(b books.Binding) {
	if n.cluster == nil || strings.Contains(b.Pod.UID, "/") {
		return
	}
	n.mu.Lock()
	places := map[string][]string{}
	minors := map[string][]int{}
	for _, t := range n.books.Tenants() {
		if t.Pod == nil || t.Pod.UID != b.Pod.UID {
			continue
		}
		places[t.Container] = t.UUIDs
		for _, u := range t.UUIDs {
			if g := n.inventory.Find(u); g != nil {
				minors[t.Container] = append(minors[t.Container], g.Minor)
			}
		}
	}
	n.mu.Unlock()
	yes, text := "true", podspec.EncodeGPUs(places)
	set := map[string]*string{n.names.GPUAssigned(): &yes, podspec.GPUs: &text}
	for i := range b.Pod.Ask.Containers {
		c := &b.Pod.Ask.Containers[i]
		if c.Init {
			continue
		}
		if m, ok := minors[c.Name]; ok {
			value := strings.Trim(strings.Join(strings.Fields(fmt.Sprint(m)), ","), "[]")
			set[n.names.GPUIndex(c.Index)] = &value
		}
	}
	n.cluster.patchPod(b.Pod, "assigned", set)
}
