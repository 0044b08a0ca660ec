package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// upgraded is a GPU with two tenants of 30 and 40 hundredths.
type upgraded struct {
	node *gpuNode
	gpu  int
}

// busyLimit is the sum of the limits of the two tenants that a GPU of a crowd has.
const busyLimit = 70

// crowd are tenants that keep GPUs busy while something happens to the cluster.
type crowd struct {
	c       *chart
	pods    []*corev1.Pod
	measure *measured
	quiet   []gpuWork // before anything happened
	filled  int       // MiB that the first got
}

// newCrowd makes two tenants on each of so many GPUs of these nodes in turn, until the end of the test.
func newCrowd(t *testing.T, c *chart, gpus int, nodes []*gpuNode) *crowd {
	t.Helper()
	r := &crowd{c: c}
	var places []upgraded
	for i := range gpus {
		n, gpu := nodes[i%len(nodes)], i/len(nodes)
		uuid := c.inventory(t, n.Name).GPUs[gpu].UUID
		places = append(places, upgraded{n, gpu})
		for k, cores := range []int{30, 40} {
			manifest := podOf(fmt.Sprintf("up-%d-%d", i, k), container("c", "exec gpuload --kernel 5ms --time 100000", cores, 16), "tranche.dev/gpu-uuid", uuid) +
				"  schedulerName: tranche-scheduler\n  nodeSelector: {kubernetes.io/hostname: " + n.Name + "}\n"
			r.pods = append(r.pods, c.b.CreatePod(t, manifest))
		}
	}
	for i := range r.pods {
		r.pods[i] = c.b.WaitPhase(t, r.pods[i], corev1.PodRunning, soon)
	}
	nodes[0].deleteAll(t)
	r.filled = c.fill(t, r.pods[0], "c", 16)
	r.measure = measureGPUs(t, places)
	r.quiet = r.measure.during(10 * time.Second)
	return r
}

// unmoved checks that nothing that happened since has stopped a tenant, and that none got more than its limits.
func (r *crowd) unmoved(t *testing.T, what string, since time.Time) {
	t.Helper()
	for i, g := range r.measure.since(since) {
		name := fmt.Sprintf("GPU %d of %s", r.measure.places[i].gpu, r.measure.places[i].node.Name)
		t.Logf("%s, %s: %.1f %% (%.1f before), at most %.1f in a window of %d s", what, name, g.mean, r.quiet[i].mean, g.most, wide)
		if g.mean > busyLimit+1.5 {
			t.Errorf("%s worked %.1f %% during: %s; its tenants' limits are %d", name, g.mean, what, busyLimit)
		}
		if most := busyLimit*(1+owed(wide*time.Second)) + 3; g.most > most {
			t.Errorf("%s worked %.1f %% for %d s during: %s; its tenants' limits are %d", name, g.most, wide, what, busyLimit)
		}
		if g.mean < busyLimit/2 {
			t.Errorf("%s worked %.1f %% during: %s; and %.1f before", name, g.mean, what, r.quiet[i].mean)
		}
	}
	for _, p := range r.pods {
		if now := r.c.running(t, "default", p.Name); now.UID != p.UID || now.Status.ContainerStatuses[0].RestartCount != 0 {
			t.Errorf("%s was restarted by: %s", p.Name, what)
		}
	}
	if after := r.c.fill(t, r.pods[0], "c", 16); after != r.filled {
		t.Errorf("%s got %d MiB before and %d after: %s", r.pods[0].Name, r.filled, after, what)
	}
}

// An upgrade of the chart, and the way back, while ten tenants work on five GPUs: none restarts, each GPU works no more than its
// tenants' limits meanwhile, and works on.
func chartUpgrade(t *testing.T, c *chart) {
	crowd := newCrowd(t, c, 5, c.nodes)
	for _, step := range []struct {
		name, image string
		do          func() error
	}{
		{"upgrade", chartImageNext, func() error {
			// Two copies and back: the API server refuses some changes of a Deployment.
			c.install(t, append(chartValues, "--set-string", "image.tag=2", "--set", "scheduler.replicas=2")...)
			return nil
		}},
		{"rollback", chartImage, func() error {
			_, err := c.helm(t.Context(), "rollback", "tranche", "--wait", "--timeout", "3m")
			return err
		}},
	} {
		done := phase(t, step.name)
		start := time.Now()
		if err := step.do(); err != nil {
			t.Fatalf("%s: %v\n%s", step.name, err, c.explain(t))
		}
		done()
		c.reach(t)
		for _, n := range c.nodes {
			if image := c.nodePod(t, n.Name).Spec.Containers[0].Image; image != step.image {
				t.Errorf("after the %s %s runs %s", step.name, n.Name, image)
			}
		}
		crowd.unmoved(t, step.name, start)
		c.b.DeletePod(t, c.slice(t, "new", "")) // what is new has its slice, too
	}
}

// slice is a new pod with a slice, on a node if one is named, once it runs.
func (c *chart) slice(t *testing.T, name, node string) *corev1.Pod {
	t.Helper()
	manifest := podOf(name, container("c", "exec sleep 100000", 50, 8)) + "  schedulerName: tranche-scheduler\n"
	if node != "" {
		manifest += "  nodeSelector: {kubernetes.io/hostname: " + node + "}\n"
	}
	// A scheduler that was away asks again a minute later at most.
	return c.b.WaitPhase(t, c.b.CreatePod(t, manifest), corev1.PodRunning, 2*time.Minute)
}

// gpuWork is what a GPU worked in a time, in percent: in all of it, and at most in a window of `wide` seconds or somewhat more.
type gpuWork struct{ mean, most float64 }

const wide = 5

// measured samples GPUs each second until the end of the test, by the simulated machines' own account.
type measured struct {
	t      *testing.T
	places []upgraded
	simctl string

	mu      sync.Mutex
	samples []reading
}

// reading is what is known at one time, by place: for how long the GPU worked, and its machine's clock, in ns.
type reading struct {
	at        time.Time
	busy, now []int64
}

func measureGPUs(t *testing.T, places []upgraded) *measured {
	t.Helper()
	simctl, err := filepath.Abs("../../build/sim/simctl")
	if err != nil {
		t.Fatal(err)
	}
	m := &measured{t: t, places: places, simctl: simctl}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return m
}

func (m *measured) run(ctx context.Context) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		s, err := m.read(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		m.mu.Lock()
		m.samples = append(m.samples, s)
		m.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (m *measured) read(ctx context.Context) (reading, error) {
	s := reading{at: time.Now()}
	machines := map[string]truth{}
	for _, p := range m.places {
		v, known := machines[p.node.Name]
		if !known {
			out, err := p.node.Exec(ctx, m.simctl, simDir+"/machine", "truth", "--json")
			if err == nil {
				err = json.Unmarshal([]byte(out), &v)
			}
			if err != nil {
				return s, err
			}
			machines[p.node.Name] = v
		}
		s.busy, s.now = append(s.busy, v.GPUs[p.gpu].Busy), append(s.now, v.Now)
	}
	return s, nil
}

// during measures for so long.
func (m *measured) during(d time.Duration) []gpuWork {
	start := time.Now()
	time.Sleep(d)
	return m.since(start)
}

// since gives what was measured from then on.
func (m *measured) since(start time.Time) []gpuWork {
	m.t.Helper()
	m.mu.Lock()
	all := slices.DeleteFunc(slices.Clone(m.samples), func(s reading) bool { return s.at.Before(start) })
	m.mu.Unlock()
	if len(all) <= wide {
		m.t.Fatalf("%d samples in %v", len(all), time.Since(start))
	}
	out := make([]gpuWork, len(m.places))
	for i := range out {
		part := func(a, b reading) float64 { return 100 * float64(b.busy[i]-a.busy[i]) / float64(b.now[i]-a.now[i]) }
		out[i] = gpuWork{mean: part(all[0], all[len(all)-1])}
		for k := wide; k < len(all); k++ {
			out[i].most = max(out[i].most, part(all[k-wide], all[k]))
		}
	}
	return out
}
