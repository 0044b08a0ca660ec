package simulate

import (
	"cmp"
	"math/rand"
	"slices"
)

// Workload is what one run replays: pods in their order of arrival, nodes in the order by which ties are
// broken.
type Workload struct {
	Nodes []Node
	Pods  []Pod
}

// ATC23 is the protocol under which the figures of FGD were published (Weng et al., USENIX ATC 2023), draw for
// draw: from Go's math/rand with the seed, one number is thrown away, the pods, sorted by name, are shuffled,
// pods of the trace are drawn with replacement and appended until the GPUs asked for would pass load times
// those of the cluster (or taken out until they no longer do), and the nodes, sorted by name, get a random rank.
func ATC23(nodes []Node, pods []Pod, seed int64, load float64) Workload {
	rng := rand.New(rand.NewSource(seed))
	rng.Int()
	trace := slices.Clone(pods)
	slices.SortStableFunc(trace, func(a, b Pod) int { return cmp.Compare(a.Name, b.Name) })
	w := Workload{Nodes: slices.Clone(nodes), Pods: slices.Clone(trace)}
	rng.Shuffle(len(w.Pods), func(i, j int) { w.Pods[i], w.Pods[j] = w.Pods[j], w.Pods[i] })
	w.tune(rng, trace, load)
	slices.SortStableFunc(w.Nodes, func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })
	ranked := make([]Node, len(w.Nodes))
	for i, rank := range rng.Perm(len(w.Nodes)) {
		ranked[rank] = w.Nodes[i]
	}
	w.Nodes = ranked
	return w
}

// tune brings the pods to load times the GPUs of the nodes.
func (w *Workload) tune(rng *rand.Rand, trace []Pod, load float64) {
	target := load * float64(capacity(w.Nodes))
	var asked int64
	for i := range w.Pods {
		asked += w.Pods[i].GPUMilli()
	}
	if asked == 0 {
		return
	}
	for float64(asked) > target {
		i := rng.Intn(len(w.Pods))
		asked -= w.Pods[i].GPUMilli()
		w.Pods = slices.Delete(w.Pods, i, i+1)
	}
	for float64(asked) < target {
		p := trace[rng.Intn(len(trace))]
		// The published code compares with one GPU of the pod, not with all of them.
		if float64(asked+int64(p.Milli)) > target {
			return
		}
		asked += p.GPUMilli()
		w.Pods = append(w.Pods, p)
	}
}

// InOrder is the plain protocol: the pods as they stand in the file, ties by node name.
func InOrder(nodes []Node, pods []Pod) Workload {
	w := Workload{Nodes: slices.Clone(nodes), Pods: pods}
	slices.SortStableFunc(w.Nodes, func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })
	return w
}

// capacity of the nodes in thousandths of a GPU.
func capacity(nodes []Node) int64 {
	var sum int64
	for i := range nodes {
		sum += int64(nodes[i].GPUs) * Milli
	}
	return sum
}
