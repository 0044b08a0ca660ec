// Command placement measures the scheduler's decision in process: how long a decision takes, how many there are a second and how much memory the
// state takes, on a cluster of 8-GPU nodes that is kept nearly full by pods that come and go.
package main

import (
	"flag"
	"fmt"
	"math/rand"
	"os"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/bench/report"
	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/quantity"
)

func main() {
	nodes := flag.Int("nodes", 5000, "nodes of 8 GPUs; a second run has twice as many")
	decisions := flag.Int("decisions", 2000, "decisions measured")
	out := flag.String("json", "", "`file` for the rows; default: only standard output")
	check := flag.Bool("check", false, "end with 1 when a target is missed")
	flag.Parse()
	one, err := measure(*nodes, *decisions)
	if err == nil {
		var two result
		if two, err = measure(2*(*nodes), *decisions); err == nil {
			err = report.Finish(rows(one, two), *out, *check)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench/placement:", err)
		os.Exit(1)
	}
}

type result struct {
	nodes, pods int
	// Times of the deciding thread: by the clock, and on the CPU alone, which other load does not touch.
	p50, p99     time.Duration
	cpu50, cpu99 time.Duration
	fresh        time.Duration
	mean         time.Duration
	memory       float64
}

// rows are the figures. What is only told has no target.
func rows(one, two result) []report.Row {
	name, twice := fmt.Sprintf("%d nodes, %d pods", one.nodes, one.pods), fmt.Sprintf("%d nodes, %d pods", two.nodes, two.pods)
	const label = "sim: CPU time of the deciding thread"
	most := func(name, metric, unit string, value, target float64) report.Row {
		return report.Row{Case: name, Metric: metric, Unit: unit, Value: value, Target: target, Better: "lower", Label: label}
	}
	told := func(name, metric string, value time.Duration, label string) report.Row {
		return report.Row{Case: name, Metric: metric, Unit: "ms", Value: ms(value), Label: label}
	}
	return []report.Row{
		most(name, "decision p50", "ms", ms(one.cpu50), 1),
		most(name, "decision p99", "ms", ms(one.cpu99), 3),
		told(name, "decision p50", one.p50, "sim: by the clock"),
		told(name, "decision p99", one.p99, "sim: by the clock"),
		told(name, "first of its kind", one.fresh, label+", the dearest while kinds are new"),
		{Case: name, Metric: "decisions", Unit: "1/s", Value: float64(time.Second) / float64(one.mean), Target: 1000, Better: "higher", Label: label + ", with reserve and release"},
		{Case: name, Metric: "memory", Unit: "MB", Value: one.memory, Target: 500, Better: "lower", Label: "sim: heap in use after the run"},
		told(twice, "decision p50", two.cpu50, label),
		told(twice, "decision p99", two.cpu99, label),
		most(fmt.Sprintf("%d nodes over %d", two.nodes, one.nodes), "cost per decision", "ratio", float64(two.mean)/float64(one.mean), 2.2),
	}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// measure fills a cluster with 10 pods a node and then replaces one after the other.
func measure(nodes, decisions int) (result, error) {
	c, err := placement.NewCluster(placement.Config{})
	if err != nil {
		return result{}, err
	}
	rng := rand.New(rand.NewSource(1))
	var names []string
	for i := range nodes {
		n := placement.Node{Name: fmt.Sprintf("node-%05d", i)}
		for g := range 8 {
			n.GPUs = append(n.GPUs, placement.GPU{Index: g, UUID: fmt.Sprintf("GPU-%05d-%d", i, g), Name: "NVIDIA H100 80GB HBM3", Memory: 80 << 30,
				FreeCores: placement.CoresWhole, FreeMemory: 80 << 30})
		}
		c.SetNode(n)
		names = append(names, n.Name)
	}
	pods := make([]placement.Pod, 10*nodes)
	for i := range pods {
		pods[i] = randomPod(rng)
		c.Learn(&pods[i])
		// Where they are does not matter: the fill is not measured.
		for range 20 {
			name := names[rng.Intn(nodes)]
			if a, err := c.Place(&pods[i], name); err == nil {
				if err := c.Reserve(fmt.Sprint(i), name, &pods[i], a); err != nil {
					return result{}, err
				}
				break
			}
		}
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var took, onCPU []time.Duration
	var fresh, begin time.Duration
	const warm = 300
	for i := range warm + decisions {
		if i == warm {
			begin = threadCPU()
		}
		victim := fmt.Sprint(rng.Intn(len(pods)))
		c.Release(victim)
		p := randomPod(rng)
		c.Learn(&p)
		start, cpu := time.Now(), threadCPU()
		d, err := c.Decide(&p, names)
		if spent := threadCPU() - cpu; i < warm {
			fresh = max(fresh, spent)
		} else {
			took, onCPU = append(took, time.Since(start)), append(onCPU, spent)
		}
		if err != nil {
			return result{}, err
		}
		if d.Best != "" {
			if err := c.Reserve(victim, d.Best, &p, d.Assignment); err != nil {
				return result{}, fmt.Errorf("decision %d: %w", i, err)
			}
		}
	}
	mean := (threadCPU() - begin) / time.Duration(decisions)
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	runtime.KeepAlive(c)
	slices.Sort(took)
	slices.Sort(onCPU)
	n := decisions
	return result{nodes: nodes, pods: len(pods), p50: took[n/2], p99: took[n*99/100], cpu50: onCPU[n/2], cpu99: onCPU[n*99/100],
		fresh: fresh, mean: mean, memory: float64(m.HeapInuse) / 1e6}, nil
}

// threadCPU is the CPU time of this thread.
func threadCPU() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

func randomPod(rng *rand.Rand) placement.Pod {
	r := placement.Request{Count: 1}
	switch k := rng.Intn(20); {
	case k < 14:
		r.Cores = 10 * (1 + rng.Intn(7))
		r.Memory = quantity.Bytes(4*(1+rng.Intn(6))) << 30
	case k < 19:
		r.Cores = placement.CoresWhole
	default:
		r.Cores, r.Count = placement.CoresWhole, 2
	}
	return placement.Pod{Containers: []placement.Container{{Name: "main", Request: r}}}
}
