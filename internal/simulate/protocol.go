package simulate

import (
	"cmp"
	"context"
	"fmt"
	"math/rand"
	"slices"
)

// maxPods is how many pods a run may come to by drawing or by --fit: about 1 GiB of them.
const maxPods = 10_000_000

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
// A load that leaves no pod with GPUs, or that takes more than 10 million, is an error. It ends early when ctx does.
func ATC23(ctx context.Context, nodes []Node, pods []Pod, seed int64, load float64) (Workload, error) {
	rng := rand.New(rand.NewSource(seed))
	rng.Int()
	trace := slices.Clone(pods)
	slices.SortStableFunc(trace, func(a, b Pod) int { return cmp.Compare(a.Name, b.Name) })
	w := Workload{Nodes: slices.Clone(nodes), Pods: slices.Clone(trace)}
	rng.Shuffle(len(w.Pods), func(i, j int) { w.Pods[i], w.Pods[j] = w.Pods[j], w.Pods[i] })
	if err := w.tune(ctx, rng, trace, load); err != nil {
		return w, err
	}
	slices.SortStableFunc(w.Nodes, func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })
	ranked := make([]Node, len(w.Nodes))
	for i, rank := range rng.Perm(len(w.Nodes)) {
		ranked[rank] = w.Nodes[i]
	}
	w.Nodes = ranked
	return w, nil
}

// tune brings the pods to load times the GPUs of the nodes.
func (w *Workload) tune(ctx context.Context, rng *rand.Rand, trace []Pod, load float64) error {
	target := load * float64(capacity(w.Nodes))
	var asked int64
	for i := range w.Pods {
		asked += w.Pods[i].GPUMilli()
	}
	if asked == 0 {
		return nil
	}
	// Each draw adds what the trace's mean pod asks for.
	if about := target / float64(asked) * float64(len(trace)); float64(asked) < target && about > maxPods {
		return fmt.Errorf("load %v: takes about %.0f pods like these: must be at most %d, which is a load of about %.3g", load, about, maxPods, load*maxPods/about)
	}
	for float64(asked) > target {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		i := rng.Intn(len(w.Pods))
		asked -= w.Pods[i].GPUMilli()
		w.Pods = slices.Delete(w.Pods, i, i+1)
	}
	for float64(asked) < target {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		p := trace[rng.Intn(len(trace))]
		// The published code compares with one GPU of the pod, not with all of them.
		if float64(asked+int64(p.Milli)) > target {
			break
		}
		asked += p.GPUMilli()
		w.Pods = append(w.Pods, p)
	}
	if asked == 0 {
		return fmt.Errorf("load %v: leaves no pod that asks for GPUs: together they may ask for %.3g", load, target/Milli)
	}
	return nil
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
