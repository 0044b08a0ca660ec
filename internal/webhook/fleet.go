package webhook

import (
	"maps"
	"slices"
	"sync"

	"tranche.dev/tranche/internal/inventory"
	"tranche.dev/tranche/internal/quantity"
)

// fleet is the GPUs of all nodes. Safe for concurrent use.
type fleet struct {
	mu    sync.Mutex
	nodes map[string][]GPU
	all   []GPU // made anew when it is nil; never changed
}

func newFleet() *fleet { return &fleet{nodes: map[string][]GPU{}} }

// set takes what a node publishes; empty: nothing.
func (f *fleet) set(node, text string) error {
	n, err := inventory.Node{}, error(nil)
	if text != "" {
		n, err = inventory.Decode(text)
	}
	var gpus []GPU
	for _, g := range n.GPUs {
		gpus = append(gpus, GPU{UUID: g.UUID, Model: g.Model, Memory: quantity.Bytes(g.Memory)})
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if slices.Equal(f.nodes[node], gpus) {
		return err
	}
	f.all = nil
	if f.nodes[node] = gpus; gpus == nil {
		delete(f.nodes, node)
	}
	return err
}

// gpus are all of them, in an order that is always the same.
func (f *fleet) gpus() []GPU {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.all == nil {
		f.all = []GPU{}
		for _, node := range slices.Sorted(maps.Keys(f.nodes)) {
			f.all = append(f.all, f.nodes[node]...)
		}
	}
	return f.all
}
