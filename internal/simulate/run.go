package simulate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand"
	"slices"
	"strings"

	"tranche.dev/tranche/internal/placement"
)

// Policies that can be replayed: the scheduler's own, then the baselines.
func Policies() []string {
	return append([]string{string(placement.LeastFragmentation), string(placement.Binpack), string(placement.Spread), string(placement.Topology)},
		"fgd", "bestfit", "gpupacking", "gpuclustering", "dotprod", "random")
}

// Config of a simulation.
type Config struct {
	Nodes []Node
	Pods  []Pod
	// Policies as in Policies. Default: least-fragmentation.
	Policies []string
	// Seeds of the runs, one run for each seed and policy. Not used by the plain protocol, except by random.
	Seeds []int64
	// Load is the GPUs asked for over those of the cluster, more than 0; Protocol is atc23 (ATC23) or plain: the
	// pods as they stand, once. Default: plain.
	Load     float64
	Protocol string
	// Memory is where GPU memory comes from: trace, from the nodes and pods, or synthetic (SyntheticMemory), drawn anew
	// for each seed. Default: trace.
	Memory string
	// Progress, if not nil, is told after each pod how many of all are done.
	Progress func(done, of int)
}

// Point is the state of a run when so much has arrived.
type Point struct {
	Policy string `json:"policy"`
	Seed   int64  `json:"seed"`
	// Arrived GPUs in whole per cent of the cluster's, whether placed or not. Allocated and Fragmented are means
	// over the arrivals within that per cent: GPUs allocated, and GPUs that the next usual pod could not use
	// (FGD's measure), in per cent of the cluster's.
	Arrived    int     `json:"arrived_pct"`
	Allocated  float64 `json:"allocated_pct"`
	Fragmented float64 `json:"fragmented_pct"`
	// Refused pods until then, and those among them that asked for the most GPUs of any.
	Refused        float64 `json:"refused,omitempty"`
	RefusedLargest float64 `json:"refused_largest,omitempty"`
	// Memory of GPUs that is allocated, in per cent of the cluster's; 0 where it has none.
	Memory float64 `json:"memory_pct,omitempty"`
}

// placer puts pods on nodes, in order of arrival. It says on which node and GPUs; no GPUs are named for a
// pod that wants none.
type placer interface {
	place(p *Pod) (node int, gpus []int, ok bool, err error)
}

// Run replays every policy with every seed. The points are in order of policy, seed, arrived. It ends early
// when ctx does.
func Run(ctx context.Context, config Config) ([]Point, error) {
	if err := config.complete(); err != nil {
		return nil, err
	}
	var out []Point
	done := 0
	for _, policy := range config.Policies {
		for _, seed := range config.Seeds {
			nodes, pods := config.trace(seed)
			w, err := config.workload(ctx, nodes, pods, seed)
			if err != nil {
				return nil, fmt.Errorf("seed %d: %w", seed, err)
			}
			usual := typicalPods(pods)
			p, err := newPlacer(policy, w.Nodes, usual, seed)
			if err != nil {
				return nil, err
			}
			points, err := replay(ctx, w, p, usual, func(i int) {
				if config.Progress != nil {
					config.Progress(done+i, len(config.Policies)*len(config.Seeds)*len(w.Pods))
				}
			})
			if err != nil {
				return nil, fmt.Errorf("policy %s, seed %d: %w", policy, seed, err)
			}
			done += len(w.Pods)
			for _, point := range points {
				point.Policy, point.Seed = policy, seed
				out = append(out, point)
			}
		}
	}
	return out, nil
}

func (c *Config) complete() error {
	if len(c.Policies) == 0 {
		c.Policies = []string{string(placement.LeastFragmentation)}
	}
	for _, p := range c.Policies {
		if !slices.Contains(Policies(), p) {
			return fmt.Errorf("policy %q: must be one of %s", p, strings.Join(Policies(), ", "))
		}
	}
	if c.Protocol = cmp.Or(c.Protocol, "plain"); c.Protocol != "plain" && c.Protocol != "atc23" {
		return fmt.Errorf("protocol %q: must be plain or atc23", c.Protocol)
	}
	if c.Memory = cmp.Or(c.Memory, "trace"); c.Memory != "trace" && c.Memory != "synthetic" {
		return fmt.Errorf("memory %q: must be trace or synthetic", c.Memory)
	}
	if c.Load == 0 {
		c.Load = 1.3
	}
	if !(c.Load > 0 && c.Load <= 100) {
		return fmt.Errorf("load %v: must be more than 0 and at most 100", c.Load)
	}
	if len(c.Seeds) == 0 {
		c.Seeds = []int64{42}
	}
	if len(c.Nodes) == 0 || len(c.Pods) == 0 {
		return errors.New("no nodes with GPUs, or no pods")
	}
	c.Pods = namedModels(c.Nodes, c.Pods)
	return nil
}

// namedModels adds to the models of pods the nodes' names of the same: A100 is A100-SXM4-80GB too, as the scheduler has
// it. Baselines and books then compare whole names.
func namedModels(nodes []Node, pods []Pod) []Pod {
	var models []string
	for i := range nodes {
		if !slices.Contains(models, nodes[i].Model) {
			models = append(models, nodes[i].Model)
		}
	}
	meant := map[string][]string{}
	out := slices.Clone(pods)
	for i := range out {
		p := &out[i]
		for _, wanted := range p.Models {
			if _, known := meant[wanted]; !known {
				meant[wanted] = slices.DeleteFunc(slices.Clone(models), func(model string) bool { return !placement.ModelMatches(model, wanted) })
			}
			for _, model := range meant[wanted] {
				if !slices.Contains(p.Models, model) {
					p.Models = append(slices.Clip(p.Models), model)
				}
			}
		}
	}
	return out
}

// trace is the nodes and pods that a seed replays.
func (c *Config) trace(seed int64) ([]Node, []Pod) {
	if c.Memory == "synthetic" {
		return SyntheticMemory(c.Nodes, c.Pods, seed)
	}
	return c.Nodes, c.Pods
}

func (c *Config) workload(ctx context.Context, nodes []Node, pods []Pod, seed int64) (Workload, error) {
	if c.Protocol == "atc23" {
		return ATC23(ctx, nodes, pods, seed, c.Load)
	}
	return InOrder(nodes, pods), nil
}

func newPlacer(policy string, nodes []Node, usual []typical, seed int64) (placer, error) {
	switch policy {
	case "fgd":
		return newBaseline(fgd{usual}, nodes), nil
	case "bestfit":
		return newBaseline(bestFit{}, nodes), nil
	case "gpupacking":
		return newBaseline(packing{}, nodes), nil
	case "gpuclustering":
		return newBaseline(clustering{}, nodes), nil
	case "dotprod":
		return newBaseline(dotProduct{}, nodes), nil
	case "random":
		return &random{rng: rand.New(rand.NewSource(seed)), nodes: newStates(nodes)}, nil
	}
	return newOurs(placement.Policy(policy), nodes)
}

// replay feeds the workload to a placer. It keeps its own books of what is free, so that the measure is the
// same for all, and a placer that puts too much on a GPU is found out.
func replay(ctx context.Context, w Workload, p placer, usual []typical, progress func(int)) ([]Point, error) {
	all := float64(capacity(w.Nodes))
	memory := 0.0
	for i := range w.Nodes {
		memory += float64(w.Nodes[i].GPUs) * float64(w.Nodes[i].GPUMemory)
	}
	nodes := newStates(w.Nodes)
	fragmented := make([]float64, len(nodes))
	total := 0.0
	for i := range nodes {
		fragmented[i] = fragments(usual, &nodes[i], nodes[i].cpu)
		total += fragmented[i]
	}
	// Points in order of what has arrived; per cents in which nothing arrived have none.
	var out []Point
	var counts []int
	var arrived, used, held int64
	refused, refusedLargest, largest := 0, 0, largest(w.Pods)
	for i := range w.Pods {
		if i%256 == 0 && ctx.Err() != nil {
			return nil, ctx.Err()
		}
		pod := &w.Pods[i]
		arrived += pod.GPUMilli()
		at, gpus, ok, err := p.place(pod)
		if err != nil {
			return nil, err
		}
		if ok {
			n := &nodes[at]
			if !n.holds(pod, gpus) {
				return nil, fmt.Errorf("pod %s was put on GPUs %v of node %s, where it does not fit", pod.Name, gpus, n.Name)
			}
			n.take(pod, gpus)
			used += pod.GPUMilli()
			held += int64(pod.GPUs) * pod.memoryOn(n.Node)
			total -= fragmented[at]
			fragmented[at] = fragments(usual, n, n.cpu)
			total += fragmented[at]
		} else {
			refused++
			if pod.GPUs == largest {
				refusedLargest++
			}
		}
		x := int(math.Round(100 * float64(arrived) / all))
		if len(out) == 0 || out[len(out)-1].Arrived != x {
			out, counts = append(out, Point{Arrived: x}), append(counts, 0)
		}
		last := len(out) - 1
		point := &out[last]
		point.Allocated += 100 * float64(used) / all
		point.Fragmented += 100 * total / all
		point.Refused += float64(refused)
		point.RefusedLargest += float64(refusedLargest)
		if memory > 0 {
			point.Memory += 100 * float64(held) / memory
		}
		counts[last]++
		progress(i + 1)
	}
	for i, n := range counts {
		point := &out[i]
		point.Allocated /= float64(n)
		point.Fragmented /= float64(n)
		point.Memory /= float64(n)
		point.Refused /= float64(n)
		point.RefusedLargest /= float64(n)
	}
	return out, nil
}

// largest is how many GPUs the largest pod asks for.
func largest(pods []Pod) int {
	most := 0
	for i := range pods {
		most = max(most, pods[i].GPUs)
	}
	return most
}

// holds tells whether a pod fits on these GPUs of the node.
func (s *state) holds(p *Pod, gpus []int) bool {
	if s.cpu < p.CPU || s.ram < p.RAM || len(gpus) != p.GPUs || p.GPUs > 0 && !p.wants(s.Model) {
		return false
	}
	for i, g := range gpus {
		if !s.room(g, p, p.memoryOn(s.Node)) || slices.Contains(gpus[:i], g) {
			return false
		}
	}
	return true
}
