package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/quantity"
)

// TestNode is `tranche node` on a real kubelet, over simulated GPUs.
func TestNode(t *testing.T) {
	b := shared.up(t)
	b.Cordon(t, b.Nodes[1:]...)
	n, err := startGPUNode(t.Context(), b, b.Nodes[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.end(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	for _, c := range []struct {
		name string
		f    func(*testing.T, *gpuNode)
	}{
		{"ExamplePod", nodeExamplePod},
		{"TwentyPods", nodeTwentyPods},
		{"TwentyReservedPods", nodeTwentyReservedPods},
		{"Containers", nodeContainers},
		{"WholeGPUs", nodeWholeGPUs},
		{"Killed", nodeKilled},
		{"KubeletRestart", nodeKubeletRestart},
		{"Reboot", nodeReboot},
		{"GPUsRenumbered", nodeGPUsRenumbered},
		{"GPUFails", nodeGPUFails},
		{"APIServerAway", nodeAPIServerAway},
		{"LiveChange", nodeLiveChange},
		{"PodsFromAPIServer", nodePodsFromAPIServer},
		{"Bypass", nodeBypass},
		{"StaticPod", nodeStaticPod},
		{"TopologyManager", nodeTopologyManager},
		{"DaemonSet", nodeDaemonSet},
	} {
		t.Run(c.name, func(t *testing.T) { c.f(t, n.ready(t)) })
	}
}

// The example of gpu-manager, as its users have it; what it runs is ours.
func nodeExamplePod(t *testing.T, n *gpuNode) {
	needNvidiaSMI(t)
	pod := n.b.CreatePod(t, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata:
  name: vcuda
spec:
  restartPolicy: Never
  containers:
  - image: %s
    name: nvidia
    command: [sh, -c, "/usr/local/nvidia/bin/nvidia-smi && %s"]
    resources:
      requests:
        tencent.com/vcuda-core: 30
        tencent.com/vcuda-memory: 32
      limits:
        tencent.com/vcuda-core: 30
        tencent.com/vcuda-memory: 32
`, testImageName, strings.ReplaceAll(look, `"`, `\"`)+load))
	running := phase(t, "create to Running")
	pod = n.b.WaitPhase(t, pod, corev1.PodRunning, soon)
	running()
	gpu := n.gpuOf(t, pod)
	n.wantSeen(t, pod, "nvidia", gpuUUID(gpu), 32)
	table := n.b.PodLogs(t, pod, "nvidia")
	for _, want := range []string{"NVIDIA-SMI 550", "A100-SXM4-40GB", "/   8192MiB"} {
		if !strings.Contains(table, want) {
			t.Errorf("nvidia-smi: no %q in\n%s", want, table)
		}
	}
	n.wantBusy(t, "share over 10 s", gpu, 30, 1, 10*time.Second)
	out := n.b.PodExec(t, pod, "nvidia", "nvidia-smi")
	if strings.Count(out, "gpuload") > 1 || !strings.Contains(out, "/   8192MiB") {
		t.Errorf("nvidia-smi while it works:\n%s", out)
	}
	if t.Failed() {
		t.Log(out)
	}
}

// shape is what a pod asks.
type shape struct{ cores, units int }

// created is a pod of the twenty with what it must have.
type created struct {
	*corev1.Pod
	shape
	gpu int // where it was reserved; -1: nowhere
}

func repetitions(t *testing.T) int {
	text := os.Getenv("TRANCHE_E2E_REPEAT")
	if text == "" {
		return 1
	}
	v, err := strconv.Atoi(text)
	if err != nil || v < 1 {
		t.Fatalf("TRANCHE_E2E_REPEAT=%s: not a number of repetitions", text)
	}
	return v
}

// Twenty pods of five shapes come at once and fill the node to its last unit of cores; two differ in memory only. Who does not
// know what comes next cannot do that in every order: it is one of those, 24 of 25, in which the placement does it.
func nodeTwentyPods(t *testing.T, n *gpuNode) {
	needNvidiaSMI(t)
	var shapes []shape
	for s, count := range map[shape]int{{50, 48}: 4, {25, 24}: 4, {25, 40}: 3, {5, 8}: 4, {1, 4}: 5} {
		shapes = append(shapes, slices.Repeat([]shape{s}, count)...)
	}
	for i := range repetitions(t) {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			for done := false; !done; done = n.canBePlaced(t, shapes) {
				rand.Shuffle(len(shapes), func(i, j int) { shapes[i], shapes[j] = shapes[j], shapes[i] })
			}
			var pods []created
			for _, s := range shapes {
				pods = append(pods, created{shape: s, gpu: -1})
			}
			n.twenty(t, pods)
			n.wantFree(t, 0, -1)
		})
	}
}

// canBePlaced tells whether pods that come in this order find room on an empty node.
func (n *gpuNode) canBePlaced(t *testing.T, shapes []shape) bool {
	t.Helper()
	unit := quantity.Bytes(unitMiB << 20)
	node := &placement.Node{}
	for i := range nodeGPUs {
		memory := quantity.Bytes(n.units) * unit
		node.GPUs = append(node.GPUs, placement.GPU{Index: i, UUID: gpuUUID(i), Name: "GPU", Memory: memory, FreeCores: placement.CoresWhole, FreeMemory: int64(memory)})
	}
	for _, s := range shapes {
		ask := placement.Request{Cores: s.cores, Memory: quantity.Bytes(s.units) * unit, Count: 1}
		a, err := placement.PlacePod(node, &placement.Pod{Containers: []placement.Container{{Name: "c", Request: ask}}})
		var full *placement.NoFit
		if errors.As(err, &full) {
			return false
		}
		if err != nil {
			t.Fatal(err)
		}
		g := slices.IndexFunc(node.GPUs, func(g placement.GPU) bool { return g.UUID == a.Containers[0][0] })
		node.GPUs[g].FreeCores -= s.cores
		node.GPUs[g].FreeMemory -= int64(ask.Memory)
	}
	return true
}

// The same with a scheduler's reservations, which fill memory to the last unit as well.
func nodeTwentyReservedPods(t *testing.T, n *gpuNode) {
	needNvidiaSMI(t)
	for i := range repetitions(t) {
		t.Run(fmt.Sprint(i), func(t *testing.T) { n.twentyReserved(t) })
	}
}

func (n *gpuNode) twentyReserved(t *testing.T) {
	t.Helper()
	var pods []created
	for gpu := range nodeGPUs {
		for _, s := range []shape{{30, 32}, {30, 48}, {20, 24}, {10, 24}, {10, n.units - 128}} {
			pods = append(pods, created{shape: s, gpu: gpu})
		}
	}
	rand.Shuffle(len(pods), func(i, j int) { pods[i], pods[j] = pods[j], pods[i] })
	n.twenty(t, pods)
	n.wantFree(t, 0, 0)
}

// twenty makes the pods at once and checks each of them by all that tell.
func (n *gpuNode) twenty(t *testing.T, pods []created) {
	t.Helper()
	done := phase(t, "created to all running")
	for i := range pods {
		p := &pods[i]
		var annotations []string
		if p.gpu >= 0 {
			annotations = []string{"tencent.com/predicate-node", n.Name, "tencent.com/predicate-time", fmt.Sprint(time.Now().UnixNano()),
				"tencent.com/gpu-assigned", "false", "tencent.com/predicate-gpu-idx-0", fmt.Sprint(p.gpu)}
		}
		p.Pod = n.b.CreatePod(t, podOf(fmt.Sprintf("p%02d", i), container("c", look+"exec sleep 100000", p.cores, p.units), annotations...))
	}
	n.deleteAll(t)
	for i := range pods {
		pods[i].Pod = n.b.WaitPhase(t, pods[i].Pod, corev1.PodRunning, 3*time.Minute)
	}
	done()
	defer phase(t, "all checked")()
	held := n.held(t)
	taken := map[string]string{}
	for _, p := range pods {
		where := n.place(t, p.Pod, "c")["c"]
		if len(where) != 1 || p.gpu >= 0 && where[0] != gpuUUID(p.gpu) {
			t.Errorf("%s is on %q and reserved on %d", p.Name, where, p.gpu)
			continue
		}
		n.wantSeen(t, p.Pod, "c", where[0], p.units)
		for resource, count := range map[string]int{coreName: p.cores, memoryName: p.units} {
			ids := held[[3]string{p.Name, "c", resource}]
			if len(ids) != count {
				t.Errorf("%s: kubelet holds %d of %s, want %d", p.Name, len(ids), resource, count)
			}
			for _, id := range ids {
				if !strings.HasPrefix(id, where[0]) || taken[resource+id] != "" {
					t.Errorf("%s on %s has %s, of %q", p.Name, where[0], id, taken[resource+id])
				}
				taken[resource+id] = p.Name
			}
		}
		if got := p.Status.ContainerStatuses[0].RestartCount; got != 0 {
			t.Errorf("%s started %d times", p.Name, got+1)
		}
	}
	n.wantTenants(t, pods)
}

// wantTenants checks what /metrics tell of the limits and the ledgers, and that the tree has them all.
func (n *gpuNode) wantTenants(t *testing.T, pods []created) {
	t.Helper()
	all, err := n.metrics()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pods {
		for name, want := range map[string]float64{"tranche_tenant_cores": float64(p.cores), "tranche_tenant_cores_ceiling": float64(p.cores),
			"tranche_tenant_memory_limit_bytes": float64(p.units) * unitMiB * (1 << 20)} {
			if got, err := ofTenant(all, name, p.Pod, "c"); got != want {
				t.Errorf("%s of %s: %v, want %v; %v", name, p.Name, got, want, err)
			}
		}
		if got, err := ofTenant(all, "tranche_tenant_allocations_refused_total", p.Pod, "c"); got != 1 {
			t.Errorf("%s: %v allocations were refused by its ledger, want 1; %v", p.Name, got, err)
		}
	}
}

// wantFree checks what is left of all GPUs, by metrics and by the tree; -1 is not checked.
func (n *gpuNode) wantFree(t *testing.T, cores, units int) {
	t.Helper()
	all, err := n.metrics()
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for key, v := range all {
		switch {
		case strings.HasPrefix(key, "tranche_gpu_cores_free{"):
			if found++; v != float64(cores) {
				t.Errorf("%s %v, want %d", key, v, cores)
			}
		case strings.HasPrefix(key, "tranche_gpu_memory_free_bytes{") && units >= 0:
			if v/(1<<20) >= unitMiB*float64(units+1) || v < 0 {
				t.Errorf("%s %v, want less than a unit", key, v)
			}
		}
	}
	if found != nodeGPUs {
		t.Errorf("%d GPUs in the metrics", found)
	}
	graph, err := n.get("/graph")
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("allocatableCores: %d, allocatableMemory: ", cores)
	if units >= 0 {
		want += fmt.Sprint(units*unitMiB<<20) + ")"
	}
	for i := range nodeGPUs {
		_, line, _ := strings.Cut(graph, fmt.Sprintf("|---GPU%d (", i))
		if line, _, _ = strings.Cut(line, `\n`); !strings.Contains(line, want) {
			t.Errorf("/graph: GPU%d (%s, want %s", i, line, want)
		}
	}
}

// Init container, sidecar and two containers with GPUs; one has 32-bit libraries, one sets LD_LIBRARY_PATH itself.
func nodeContainers(t *testing.T, n *gpuNode) {
	needNvidiaSMI(t)
	manifest := podOf("many", container("a", look+load, 30, 16, "env: [{name: compat32, value: \"true\"}]")+
		container("b", look+load, 20, 24, "env: [{name: LD_LIBRARY_PATH, value: /nowhere}]")+
		"  initContainers:\n"+container("first", strings.TrimSuffix(look, "&& "), 20, 8)+
		container("side", look+load, 10, 20, "restartPolicy: Always"), podspec.Together, "*")
	pod := n.b.WaitPhase(t, n.b.CreatePod(t, manifest), corev1.PodRunning, soon)
	where := n.place(t, pod, "a", "b", "side")
	want := map[string]shape{"first": {20, 8}, "side": {10, 20}, "a": {30, 16}, "b": {20, 24}}
	for _, c := range slices.Sorted(maps.Keys(want)) {
		uuid := where["a"][0]
		if c != "first" && !slices.Equal(where[c], []string{uuid}) {
			t.Errorf("%s is on %q, a on %s", c, where[c], uuid)
		}
		n.wantSeen(t, pod, c, uuid, want[c].units)
	}
	for c, has := range map[string]string{"a": "/usr/local/nvidia/lib64:/usr/local/nvidia/lib", "b": "/nowhere", "side": "/usr/local/nvidia/lib64"} {
		if got := strings.TrimSpace(n.b.PodExec(t, pod, c, "sh", "-c", "echo $LD_LIBRARY_PATH")); got != has {
			t.Errorf("LD_LIBRARY_PATH of %s: %q, want %q", c, got, has)
		}
	}
	delete(want, "first")
	n.wantTenantShares(t, "container", pod, want)
}

// wantTenantShares checks the shares of a pod's containers on one GPU by their ledgers, and their sum by the truth.
func (n *gpuNode) wantTenantShares(t *testing.T, what string, pod *corev1.Pod, of map[string]shape) {
	t.Helper()
	gpu := n.gpuOf(t, pod)
	read := func() map[string]float64 {
		all, err := n.metrics()
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]float64{}
		for c := range of {
			if out[c], err = ofTenant(all, "tranche_tenant_gpu_seconds_total", pod, c); err != nil {
				t.Fatal(err)
			}
		}
		return out
	}
	want := map[string]float64{"all": 0}
	for c, s := range of {
		want[c] = float64(s.cores)
		want["all"] += float64(s.cores)
	}
	n.wantShares(t, what, 1.5, owed(10*time.Second), want, func() map[string]float64 {
		start, before := time.Now(), read()
		got := map[string]float64{"all": n.busy(t, 10*time.Second)[gpu]}
		after, took := read(), time.Since(start).Seconds()
		for c := range of {
			got[c] = 100 * (after[c] - before[c]) / took
		}
		return got
	})
}

func nodeWholeGPUs(t *testing.T, n *gpuNode) {
	needNvidiaSMI(t)
	n.deleteAll(t)
	one := n.b.CreatePod(t, podOf("whole", container("c", look+"exec sleep 100000", 100, 0)))
	two := n.b.CreatePod(t, podOf("two-whole", container("c", look+"exec sleep 100000", 200, 64)))
	memory := n.b.CreatePod(t, podOf("memory-only", container("c", look+load, 0, 16)))
	one, two, memory = n.b.WaitPhase(t, one, corev1.PodRunning, soon), n.b.WaitPhase(t, two, corev1.PodRunning, soon), n.b.WaitPhase(t, memory, corev1.PodRunning, soon)
	whole := n.seen(t, one, "c")
	if len(whole.total) != 1 || whole.total[0] < n.units*unitMiB || whole.got < 38<<10 {
		t.Errorf("a whole GPU: %+v", whole)
	}
	if got := n.seen(t, two, "c"); !slices.Equal(got.total, []int{8192, 8192}) || got.got > 8192 || got.got < 7168 {
		t.Errorf("two whole GPUs with 8 GiB of each: %+v", got)
	}
	uuid := n.place(t, memory, "c")["c"][0]
	n.wantSeen(t, memory, "c", uuid, 16)
	if got := n.busy(t, 5*time.Second)[position(t, uuid)]; got < 90 {
		t.Errorf("memory only, on a GPU that nobody else uses: %.1f %% of it", got)
	}
}
