package node

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"tranche.dev/tranche/internal/assets"
	"tranche.dev/tranche/internal/inventory"
	"tranche.dev/tranche/internal/node/books"
	"tranche.dev/tranche/internal/podspec"
)

func events(t *testing.T, client *fake.Clientset) []string {
	t.Helper()
	list, err := client.CoreV1().Events("").List(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range list.Items {
		out = append(out, e.InvolvedObject.Kind+" "+e.InvolvedObject.Name+" "+e.Reason+": "+e.Message)
	}
	slices.Sort(out)
	return out
}

func (w *world) eventually(client *fake.Clientset, want ...string) {
	w.t.Helper()
	var got []string
	defer func() {
		if w.t.Failed() {
			w.t.Logf("events:\n%s", strings.Join(got, "\n"))
		}
	}()
	for _, text := range want {
		eventually(w.t, 10*time.Second, "an event with "+text, func() bool {
			got = events(w.t, client)
			return slices.ContainsFunc(got, func(e string) bool { return strings.Contains(e, text) })
		})
	}
}

// simctl acts on the simulated machine.
func (w *world) simctl(args ...string) {
	w.t.Helper()
	path, err := assets.Path(assets.SimCtl)
	if err != nil {
		w.t.Fatal(err)
	}
	if out, err := exec.Command(path, append([]string{filepath.Join(w.dir, "sim/machine")}, args...)...).CombinedOutput(); err != nil {
		w.t.Fatalf("simctl %v: %v\n%s", args, err, out)
	}
}

func TestManyContainers(t *testing.T) {
	w := newWorld(t, "a100-80g:2", 3)
	pod := w.pod(map[string]string{"tencent.com/vcuda-core-limit": "80"}, containerSpec{name: "init", cores: 200, units: 40, init: true},
		containerSpec{name: "a", cores: 30, units: 16}, containerSpec{name: "b", cores: 60, units: 8}, containerSpec{name: "plain"})
	w.mustAdmit(pod)
	for _, c := range []struct {
		name string
		want []string
	}{{"init", []string{"100-100 5120Mi", "100-100 5120Mi"}}, {"a", []string{"30-80 4096Mi"}}, {"b", []string{"60-80 2048Mi"}}} {
		if got := limits(t, w.start(pod, c.name)); !reflect.DeepEqual(got, c.want) {
			t.Errorf("container %s: limits %q, want %q", c.name, got, c.want)
		}
		if c.name == "init" {
			w.kubelet.Update(pod.UID, func(p *corev1.Pod) {
				p.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "init", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}}}
			})
		}
	}
	// The pod holds both GPUs until it ends: kubelet has all IDs, and nobody else gets in.
	if err := w.admit(w.pod(nil, containerSpec{name: "c", cores: 10, units: 4})); err == nil {
		t.Error("a second pod was admitted on GPUs that are held")
	}
}

func TestMemoryOnly(t *testing.T) {
	w := newWorld(t, "a100-80g", 4)
	pod := w.pod(nil, containerSpec{name: "c", units: 12})
	w.mustAdmit(pod)
	s := w.start(pod, "c")
	if got := limits(t, s); !reflect.DeepEqual(got, []string{"1-100 3072Mi"}) {
		t.Errorf("limits %q", got)
	}
	if s.Devices["/dev/nvidia0"] == "" {
		t.Errorf("devices %q", s.Devices)
	}
}

func TestReservation(t *testing.T) {
	w := newWorld(t, "a100-80g:3", 5)
	gpus := w.uuids()
	reserve := func(uuid string) map[string]string {
		return map[string]string{podspec.GPUs: podspec.EncodeGPUs(map[string][]string{"c": {uuid}})}
	}
	kept := w.pod(reserve(gpus[2]), containerSpec{name: "c", cores: 80, units: 8})
	w.mustAdmit(kept)
	if got := w.gpusOf(kept, "c", core); !slices.Equal(got, gpus[2:]) {
		t.Errorf("the reservation of %s was not kept: %q", gpus[2], got)
	}
	// By the originals' annotation, an ordinal.
	old := w.pod(map[string]string{"tencent.com/predicate-gpu-idx-0": "1", "tencent.com/gpu-assigned": "false"}, containerSpec{name: "c", cores: 80, units: 8})
	w.mustAdmit(old)
	if got := w.gpusOf(old, "c", memory); !slices.Equal(got, gpus[1:2]) {
		t.Errorf("the reservation of %s was not kept: %q", gpus[1], got)
	}
	// The GPU is taken by now: the node finds another and says so.
	moved := w.pod(reserve(gpus[2]), containerSpec{name: "c", cores: 50, units: 8})
	w.mustAdmit(moved)
	if got := w.gpusOf(moved, "c", core); !slices.Equal(got, gpus[:1]) {
		t.Errorf("placed anew on %q", got)
	}
	if s := w.node.stats.counters(); len(s.Replans) != 1 || s.Replans[0].N != 1 {
		t.Errorf("replans %+v", s.Replans)
	}
}

func TestClusterIsTold(t *testing.T) {
	var client *fake.Clientset
	w := newWorld(t, "a100-80g:2", 6, func(c *Config) {
		client = fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}})
		c.client = client
		c.Labels = map[string]string{"gaia.tencent.com/gpu-model": "", "pool": "x"}
	})
	gpus := w.uuids()
	node := func() *corev1.Node {
		n, err := client.CoreV1().Nodes().Get(context.Background(), "node", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	eventually(t, 5*time.Second, "an inventory", func() bool { return node().Annotations[podspec.Inventory] != "" })
	inv, err := inventory.Decode(node().Annotations[podspec.Inventory])
	if err != nil || len(inv.GPUs) != 2 || inv.GPUs[0].UUID != gpus[0] || inv.GPUs[0].Memory == 0 {
		t.Errorf("inventory %+v, %v", inv, err)
	}
	if got := node().Labels; got["gaia.tencent.com/gpu-model"] != "A100-SXM4-80GB" || got["pool"] != "x" {
		t.Errorf("labels %q", got)
	}

	pod := w.pod(nil, containerSpec{name: "c", cores: 30, units: 8})
	if _, err := client.CoreV1().Pods("test").Create(context.Background(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	w.mustAdmit(pod)
	w.start(pod, "c")
	where := w.gpusOf(pod, "c", core)
	eventually(t, 5*time.Second, "the pod's annotations", func() bool {
		p, err := client.CoreV1().Pods("test").Get(context.Background(), pod.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		index := map[string]string{gpus[0]: "0", gpus[1]: "1"}[where[0]]
		return reflect.DeepEqual(p.Annotations, map[string]string{"tencent.com/gpu-assigned": "true", "tencent.com/predicate-gpu-idx-0": index,
			podspec.GPUs: podspec.EncodeGPUs(map[string][]string{"c": where})})
	})

	refused := w.pod(nil, containerSpec{name: "c", cores: 100, units: 400})
	if err := w.admit(refused); err == nil || !strings.Contains(err.Error(), "free") {
		t.Errorf("a pod that fits nowhere: %v", err)
	}
	wrong := w.pod(nil, containerSpec{name: "c", cores: 130, units: 1})
	if err := w.admit(wrong); err == nil {
		t.Error("130 cores were granted")
	}
	w.eventually(client, "Pod "+refused.Name+" GPURefused: ", "Pod "+wrong.Name+" GPURefused: container c: tencent.com/vcuda-core: 130")
}

func TestHealth(t *testing.T) {
	var client *fake.Clientset
	// From 570 on a driver says when a GPU is fit again.
	spec := filepath.Join(t.TempDir(), "spec")
	writeFile(t, spec, "driver_version=570.86.15\ngpu model=a100-80g count=2\n")
	w := newWorld(t, spec, 8, func(c *Config) {
		client = fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}})
		c.client = client
	})
	gpus := w.uuids()
	pod := w.pod(pinned(gpus[1]), containerSpec{name: "c", cores: 30, units: 8})
	w.mustAdmit(pod)
	w.start(pod, "c")
	w.simctl("xid", "1", "79")
	eventually(t, 20*time.Second, "the IDs of the failed GPU leave", func() bool { return w.kubelet.Healthy(core) == 100 })
	w.eventually(client, "Node node GPUUnhealthy: gpu 1", "Pod "+pod.Name+" GPUUnhealthy: gpu 1")
	w.simctl("recover", "1")
	eventually(t, 60*time.Second, "they return", func() bool { return w.kubelet.Healthy(core) == 200 })
	w.eventually(client, "Node node GPURecovered: gpu 1")
}

func TestLiveChange(t *testing.T) {
	var client *fake.Clientset
	w := newWorld(t, "a100-80g", 9, func(c *Config) {
		client = fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}})
		c.client, c.LiveChange = client, LiveChange{On: true, Namespaces: []string{"test"}}
	})
	pod := w.pod(nil, containerSpec{name: "c", cores: 30, units: 8})
	other := w.pod(nil, containerSpec{name: "c", cores: 40, units: 8})
	for _, p := range []*corev1.Pod{pod, other} {
		w.mustAdmit(p)
	}
	s := w.start(pod, "c")
	w.start(other, "c")
	annotate := func(cores, memory string) {
		w.kubelet.Update(pod.UID, func(p *corev1.Pod) {
			p.Annotations = map[string]string{podspec.Cores: cores, podspec.Memory: memory}
		})
	}
	for _, c := range []struct{ cores, memory, want string }{
		{"50", "4Gi", "50-50 4096Mi"}, {"10", "1Gi", "10-10 1024Mi"}, {"60", "2Gi", "60-60 2048Mi"}} {
		annotate(c.cores, c.memory)
		eventually(t, 2*time.Second, "limits of "+c.want, func() bool { return limits(t, s)[0] == c.want })
	}
	// 60 and 40 are given; raised ones count for everybody.
	annotate("61", "2Gi")
	w.eventually(client, "GPULimitsChanged: container c: ", "GPULimitsRefused: container c: gpu "+w.uuids()[0]+": 61 cores asked, 1 more than now; free: 0")
	if got := limits(t, s)[0]; got != "60-60 2048Mi" {
		t.Errorf("a change that was refused made %q", got)
	}
	if err := w.admit(w.pod(nil, containerSpec{name: "c", cores: 10, units: 4})); err == nil {
		t.Error("cores that were given to a running pod were given again")
	}
	n, err := client.CoreV1().Nodes().Get(context.Background(), "node", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	inv, err := inventory.Decode(n.Annotations[podspec.Inventory])
	if err != nil || inv.GPUs[0].Raised.Cores != 30 {
		t.Errorf("inventory %+v, %v", inv.GPUs, err)
	}
	// Limits of a container that starts again are those that it had.
	if got := limits(t, w.start(pod, "c"))[0]; got != "60-60 2048Mi" {
		t.Errorf("started again with %q", got)
	}
	// Lowered ones too, to the byte, and with a ceiling that was below what was asked.
	annotate("10", "1000Mi")
	eventually(t, 2*time.Second, "limits of 10-10 1000Mi", func() bool { return limits(t, s)[0] == "10-10 1000Mi" })
	s = w.start(pod, "c")
	if got := limits(t, s)[0]; got != "10-10 1000Mi" {
		t.Errorf("started again with %q", got)
	}
	w.kubelet.Update(pod.UID, func(p *corev1.Pod) { p.Annotations["tencent.com/vcuda-core-limit"] = "20" })
	eventually(t, 2*time.Second, "a ceiling of 20", func() bool { return limits(t, s)[0] == "10-20 1000Mi" })
}

// A pod gets the IDs of one that has just gone: until it starts, what is there under them is not its own.
func TestIDsOfAPodThatIsGone(t *testing.T) {
	var client *fake.Clientset
	w := newWorld(t, "a100-80g", 11, func(c *Config) {
		client = fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}})
		c.client, c.LiveChange = client, LiveChange{On: true}
	})
	old := w.pod(nil, containerSpec{name: "c", cores: 30, units: 8})
	w.mustAdmit(old)
	s := w.start(old, "c")
	w.kubelet.Update(old.UID, func(p *corev1.Pod) { p.Annotations = map[string]string{podspec.Cores: "20", podspec.Memory: "1Gi"} })
	eventually(t, 5*time.Second, "the change", func() bool { return limits(t, s)[0] == "20-20 1024Mi" })
	w.kubelet.Delete(old.UID)
	next := w.pod(nil, containerSpec{name: "c", cores: 30, units: 8})
	w.mustAdmit(next)
	if a, b := w.kubelet.IDs(old.UID, "c", core), w.kubelet.IDs(next.UID, "c", core); len(a) > 0 && !slices.Equal(a, b) {
		t.Fatalf("the IDs are others: %q, %q", a, b)
	}
	w.node.tendOnce(t.Context(), true, false)
	// Where the old pod's allocation has been removed by now nothing of it can be wrong.
	if _, err := os.Stat(filepath.Join(s.Mounts["/etc/tranche/slice"], "limits")); err == nil {
		if got := limits(t, s)[0]; got != "20-20 1024Mi" {
			t.Errorf("the limits of a container of the old pod are now %q", got)
		}
	}
	for _, tenant := range w.node.Snapshot().Tenants {
		if p := tenant.GPUs[0]; tenant.Pod == next.Name && (p.Ceiling != 30 || p.MemoryLimit != 2<<30) {
			t.Errorf("the new pod is shown with the old one's limits: %+v", p)
		}
	}
	if got := limits(t, w.start(next, "c"))[0]; got != "30-30 2048Mi" {
		t.Errorf("the new pod starts with %q", got)
	}
}

func TestRestarts(t *testing.T) {
	w := newWorld(t, "a100-80g:2", 10)
	pod := w.pod(nil, containerSpec{name: "i", cores: 70, units: 40, init: true}, containerSpec{name: "c", cores: 30, units: 8})
	w.mustAdmit(pod)
	w.start(pod, "i")
	free := func() (out []books.Amount) {
		w.node.mu.Lock()
		defer w.node.mu.Unlock()
		for _, g := range w.node.books.GPUs() {
			a, _ := w.node.books.Free(g.UUID)
			out = append(out, a)
		}
		return out
	}
	before := free()
	w.end()
	w.startNode()
	if got := free(); !reflect.DeepEqual(got, before) {
		t.Errorf("free after a restart of the node: %+v, before %+v", got, before)
	}
	if got := limits(t, w.start(pod, "i")); !reflect.DeepEqual(got, []string{"70-70 10240Mi"}) {
		t.Errorf("the init container started again with %q", got)
	}

	w.kubelet.Stop()
	if err := w.kubelet.Start(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := w.kubelet.Registered(ctx, core, memory); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("registered %v after kubelet's socket was back", took)
	}
	w.mustAdmit(w.pod(nil, containerSpec{name: "c", cores: 100, units: 8}))
}

// A reboot gives GPUs other device nodes; kubelet still mounts the old ones.
func TestMovedDeviceNode(t *testing.T) {
	w := newWorld(t, "a100-80g:2", 11)
	pod := w.pod(nil, containerSpec{name: "c", cores: 30, units: 8})
	w.mustAdmit(pod)
	w.start(pod, "c")
	n := w.node
	n.mu.Lock()
	n.inventory.GPUs = slices.Clone(n.inventory.GPUs) // the watcher's own are not ours to change
	for i := range n.inventory.GPUs {
		n.inventory.GPUs[i].Minor = 1 - n.inventory.GPUs[i].Minor
	}
	n.setGPUs()
	n.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := w.kubelet.StartContainer(ctx, pod.UID, "c")
	if err == nil || !strings.Contains(err.Error(), "was /dev/nvidia0 when the container got it and is /dev/nvidia1 now") {
		t.Errorf("a container whose GPU has another device node: %v", err)
	}
}

// An API server that is away holds nobody up.
func TestAPIServerAway(t *testing.T) {
	over := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-over }))
	t.Cleanup(func() { close(over); server.Close() })
	dir := t.TempDir()
	config := filepath.Join(dir, "kubeconfig")
	writeFile(t, config, "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: "+server.URL+"}}]\ncontexts: [{name: c, context: {cluster: c}}]\ncurrent-context: c\n")
	w := newWorld(t, "a100-80g", 12, func(c *Config) { c.Kubeconfig = config })
	began := time.Now()
	pod := w.pod(nil, containerSpec{name: "c", cores: 30, units: 8})
	w.mustAdmit(pod)
	w.start(pod, "c")
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("a pod took %v to start while the API server is away", took)
	}
}

// A pod that contradicts itself has nothing, whatever its numbers say.
func TestContradictions(t *testing.T) {
	var client *fake.Clientset
	w := newWorld(t, "a100-80g:2", 13, func(c *Config) { client = fakeCluster(c) })
	before := w.free()
	for _, c := range []struct {
		pod  *corev1.Pod
		want string
	}{
		{w.pod(nil, containerSpec{name: "c", cores: 30}), "container c: tencent.com/vcuda-memory: 30 cores, a part of a GPU, need memory as well"},
		{w.pod(nil, containerSpec{name: "c", cores: 130, units: 8}), "container c: tencent.com/vcuda-core: 130: more than 100"},
		{w.pod(map[string]string{podspec.GPUCount: "two"}, containerSpec{name: "c", cores: 30, units: 8}), `container c: tranche.dev/gpu-count: "two"`},
		{w.pod(map[string]string{podspec.Class: "fast"}, containerSpec{name: "c", units: 8}), `container c: tranche.dev/class: "fast"`},
		{w.pod(nil, containerSpec{name: "a", cores: 30, units: 8}, containerSpec{name: "c", cores: 30}), "container c: tencent.com/vcuda-memory: 30 cores"},
	} {
		if err := w.admit(c.pod); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", describe(c.pod), err, c.want)
		}
		w.eventually(client, "Pod "+c.pod.Name+" GPURefused: "+c.want)
	}
	w.untilFree(before)
	if got := w.node.store.List(); len(got) != 0 {
		t.Errorf("allocations: %+v", got)
	}
	// Where kubelet cannot tell of the pod its numbers are not enough to start it without a limit.
	w.end()
	w.kubelet.Initialise()
	w.startNode()
	pod := w.pod(nil, containerSpec{name: "c", cores: 30})
	w.mustAdmit(pod)
	if _, err := w.kubelet.StartContainer(w.alive, pod.UID, "c"); err == nil || !strings.Contains(err.Error(), "30 cores, a part of a GPU, and no memory; delete the pod") {
		t.Errorf("it starts: %v", err)
	}
}
