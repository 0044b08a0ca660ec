package simulate

import (
	"cmp"
	"math/rand"
	"slices"

	"tranche.dev/tranche/internal/quantity"
)

const (
	gib = 1 << 30
	// syntheticLeast is the memory of the smallest GPU, of which the pods' is a part: so every pod fits every GPU.
	syntheticLeast = 16 * gib
	// syntheticStep is what a pod's memory is rounded up to.
	syntheticStep = gib / 4
)

// syntheticGPU is the memory of the openb trace's models. Those whose names are made up (G2, G3) are taken for GPUs of
// 24 and 80 GiB; models that are not here have syntheticLeast.
var syntheticGPU = map[string]quantity.Bytes{"V100M32": 32 * gib, "A10": 24 * gib, "G2": 24 * gib, "G3": 80 * gib}

// SyntheticMemory gives memory to the GPUs and pods of a trace that has none. A pod that wants part of a GPU gets, of 16
// GiB, the same part, or half or twice of it, each with a chance of a third, at most all and in steps of 256 MiB; a pod
// that wants whole GPUs has all of their memory. One number of math/rand is drawn for each pod with a part, in order of
// name, so the order of the file does not count; the pods keep it.
func SyntheticMemory(nodes []Node, pods []Pod, seed int64) ([]Node, []Pod) {
	nodes, pods = slices.Clone(nodes), slices.Clone(pods)
	for i := range nodes {
		nodes[i].GPUMemory = cmp.Or(syntheticGPU[nodes[i].Model], syntheticLeast)
	}
	byName := make([]int, len(pods))
	for i := range byName {
		byName[i] = i
	}
	slices.SortStableFunc(byName, func(a, b int) int { return cmp.Compare(pods[a].Name, pods[b].Name) })
	rng := rand.New(rand.NewSource(seed))
	for _, i := range byName {
		p := &pods[i]
		p.GPUMemory = 0
		if p.GPUs == 0 || p.whole() {
			continue
		}
		half := int64(1) << rng.Intn(3)
		bytes := min(int64(p.Milli)*syntheticLeast/Milli*half/2, syntheticLeast)
		p.GPUMemory = quantity.Bytes((bytes + syntheticStep - 1) / syntheticStep * syntheticStep)
	}
	return nodes, pods
}
