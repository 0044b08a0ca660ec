package node

import (
	"context"
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"tranche.dev/tranche/internal/deviceplugin"
	"tranche.dev/tranche/internal/kubelet"
	"tranche.dev/tranche/internal/node/books"
)

// simple gives what is asked, the first of what there is.
type simple struct{}

func (simple) Preferred(_ context.Context, available, _ []string, size int) ([]string, error) {
	return available[:size], nil
}

func (simple) Allocate(context.Context, []string) (*api.ContainerAllocateResponse, error) {
	return &api.ContainerAllocateResponse{}, nil
}

func (simple) Start(context.Context, []string) error { return nil }

// plugin makes another device plugin known to kubelet.
func (w *world) plugin(name string, ids ...string) *deviceplugin.Plugin {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Minute)
	defer cancel()
	p, err := deviceplugin.New(deviceplugin.Config{Dir: w.kubelet.Dir, Endpoint: strings.ReplaceAll(name, "/", "-") + ".s", Resource: name, Allocator: simple{}})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(p.Close)
	var devices []*api.Device
	for _, id := range ids {
		devices = append(devices, &api.Device{ID: id, Health: api.Healthy})
	}
	p.SetDevices(devices)
	if err := p.Listen(); err != nil {
		w.t.Fatal(err)
	}
	if err := kubelet.Register(ctx, w.kubelet.Dir, p.Endpoint(), name, p.Options()); err != nil {
		w.t.Fatal(err)
	}
	if err := w.kubelet.Registered(ctx, name); err != nil {
		w.t.Fatal(err)
	}
	return p
}

func fakeCluster(c *Config) *fake.Clientset {
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}})
	c.client = client
	return client
}

// free is what the books have of each GPU, as cores and units.
func (w *world) free() string {
	w.node.mu.Lock()
	defer w.node.mu.Unlock()
	var out []string
	for _, g := range w.node.books.GPUs() {
		a, _ := w.node.books.Free(g.UUID)
		out = append(out, fmt.Sprintf("%d/%d", a.Cores, a.Units))
	}
	return strings.Join(out, " ")
}

func (w *world) untilFree(want string) {
	w.t.Helper()
	var got string
	defer func() {
		if w.t.Failed() {
			w.t.Logf("free: %s, want %s", got, want)
		}
	}()
	eventually(w.t, 20*time.Second, "free is "+want, func() bool { got = w.free(); return got == want })
}

// A GPU that NVIDIA's device plugin has given away is closed to new tenants, those that are there stay, and it opens again. Also
// for a node that starts meanwhile, from its first word to kubelet.
func TestOtherDevicePlugin(t *testing.T) {
	w := newWorld(t, "a100-80g:2", 21)
	gpus := w.uuids()
	units := w.gpus[0].Units
	tenant := w.pod(nil, containerSpec{name: "c", cores: 30, units: 8})
	tenant.Annotations = pinned(gpus[1])
	w.mustAdmit(tenant)
	w.plugin("nvidia.com/gpu", gpus[1])
	other := w.pod(nil)
	other.Spec.Containers = []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": *resource.NewQuantity(1, resource.DecimalSI)}}}}
	w.mustAdmit(other)
	for _, when := range []string{"running", "started anew"} {
		if when == "started anew" {
			w.end()
			w.startNode()
		} else {
			eventually(t, 20*time.Second, "its IDs leave", func() bool { return w.kubelet.Healthy(core) == 100 && w.kubelet.Healthy(memory) == units })
		}
		if n := w.kubelet.Healthy(core); n != 100 {
			t.Errorf("%s: %d core IDs are healthy", when, n)
		}
		first := w.pod(nil, containerSpec{name: "c", cores: 50, units: 8})
		w.mustAdmit(first)
		second := w.pod(nil, containerSpec{name: "c", cores: 51, units: 8})
		if err := w.admit(second); err == nil {
			t.Errorf("%s: a pod was admitted on %q", when, w.gpusOf(second, "c", core))
		}
		if got := w.gpusOf(first, "c", core); !reflect.DeepEqual(got, gpus[:1]) {
			t.Errorf("%s: placed on %q", when, got)
		}
		if got := limits(t, w.start(tenant, "c")); !reflect.DeepEqual(got, []string{"30-30 2048Mi"}) {
			t.Errorf("%s: the tenant that was there before starts with %q", when, got)
		}
		w.kubelet.Delete(first.UID)
	}
	w.kubelet.Delete(other.UID)
	eventually(t, 20*time.Second, "its IDs return", func() bool { return w.kubelet.Healthy(core) == 200 })
	w.untilFree(fmt.Sprintf("100/%d 70/%d", units, units-8))
}

// A pod of gpu-manager keeps its part of its GPU, over restarts of the node, until it ends.
func TestPodOfGPUManager(t *testing.T) {
	var client *fake.Clientset
	w := makeWorld(t, "a100-80g:2", 22, func(c *Config) { client = fakeCluster(c) })
	var ids [2][]string
	for i := range 100 {
		ids[0], ids[1] = append(ids[0], fmt.Sprintf("%s-%d", core, i)), append(ids[1], fmt.Sprintf("%s-%d", memory, i))
	}
	plugins := []*deviceplugin.Plugin{w.plugin(core, ids[0]...), w.plugin(memory, ids[1]...)}
	old := w.pod(nil, containerSpec{name: "c", cores: 50, units: 80})
	w.mustAdmit(old)
	for _, p := range plugins {
		p.Close()
	}
	if err := replaceFile(filepath.Join(w.config.CheckpointDir, originalFile), []byte(`{"PodGPUMapping":{
		"uid-pod-1":{"c":{"Devices":["/dev/nvidia1"],"Cores":50,"Memory":21474836480}},
		"uid-that-ended":{"c":{"Devices":["/dev/nvidia0"],"Cores":100,"Memory":85899345920}}}}`)); err != nil {
		t.Fatal(err)
	}
	w.startNode()
	gpus, units := w.uuids(), w.gpus[0].Units
	w.untilFree(fmt.Sprintf("100/%d 50/%d", units, units-80))
	// One that asks the same is not taken for it, and shares its GPU, as there is room.
	same := w.pod(pinned(gpus[1]), containerSpec{name: "c", cores: 50, units: 80})
	w.mustAdmit(same)
	if got := limits(t, w.start(same, "c")); !reflect.DeepEqual(got, []string{"50-50 20480Mi"}) {
		t.Errorf("limits %q", got)
	}
	if err := w.admit(w.pod(pinned(gpus[1]), containerSpec{name: "c", cores: 1, units: 1})); err == nil {
		t.Error("what gpu-manager gave was given again")
	}
	want := fmt.Sprintf("100/%d 0/%d", units, units-160)
	w.untilFree(want)
	w.end()
	w.startNode()
	w.untilFree(want)
	if tenants := w.node.Snapshot().Tenants; len(tenants) != 1 || tenants[0].Pod != same.Name {
		t.Errorf("tenants %+v", tenants)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := w.kubelet.StartContainer(ctx, old.UID, "c"); err == nil || !strings.Contains(err.Error(), "no such GPU is on this node; delete the pod") {
		t.Errorf("its container starts again: %v", err)
	}
	w.eventually(client, "Pod "+old.Name+" GPUStartFailed: container c: ")
	w.kubelet.SetPhase(old.UID, corev1.PodSucceeded)
	w.untilFree(fmt.Sprintf("100/%d 50/%d", units, units-80))
	if got := w.node.Snapshot().GPUs[1].FreeCores; got != 50 {
		t.Errorf("%d cores are shown as free", got)
	}
}

// Kubelet is told of pods' devices late: the node starts while kubelet still waits for its list of pods. What raised limits and
// init containers have is in the books all the same, and a pod that kubelet admits meanwhile goes where it fits.
func TestKubeletInitialises(t *testing.T) {
	var client *fake.Clientset
	w := newWorld(t, "a100-80g:2", 23, func(c *Config) {
		client = fakeCluster(c)
		c.LiveChange = LiveChange{On: true}
	})
	gpus, units := w.uuids(), w.gpus[0].Units
	raised := w.pod(pinned(gpus[0]), containerSpec{name: "c", cores: 10, units: 200})
	w.mustAdmit(raised)
	w.start(raised, "c")
	w.kubelet.Update(raised.UID, func(p *corev1.Pod) { p.Annotations["tranche.dev/cores"] = "20" })
	w.eventually(client, "GPULimitsChanged: container c: limits of each GPU are now 20 cores")
	init := w.pod(pinned(gpus[1]), containerSpec{name: "i", cores: 20, units: 8, init: true}, containerSpec{name: "c", cores: 5, units: 4})
	w.mustAdmit(init)
	before := fmt.Sprintf("80/%d 80/%d", units-200, units-8)
	w.untilFree(before)
	w.end()

	w.kubelet.Initialise()
	w.startNode()
	stranger := w.pod(nil, containerSpec{name: "c", cores: 80, units: 150})
	w.mustAdmit(stranger)
	if c, m := w.gpusOf(stranger, "c", core), w.gpusOf(stranger, "c", memory); !reflect.DeepEqual([][]string{c, m}, [][]string{gpus[1:], gpus[1:]}) {
		t.Errorf("placed on %q and %q", c, m)
	}
	if got := limits(t, w.start(stranger, "c")); !reflect.DeepEqual(got, []string{"80-80 38400Mi"}) {
		t.Errorf("limits %q", got)
	}
	w.kubelet.Initialised()
	w.untilFree(fmt.Sprintf("80/%d 0/%d", units-200, units-158))
	w.kubelet.Delete(stranger.UID)
	w.untilFree(before)
	if got := limits(t, w.start(raised, "c")); !reflect.DeepEqual(got, []string{"20-20 51200Mi"}) {
		t.Errorf("started again with %q", got)
	}
}

// Memory alone takes no cores; one core that may use all that is idle takes one. A restart mixes nothing up.
func TestMemoryOnlyAfterRestart(t *testing.T) {
	w := newWorld(t, "a100-80g:2", 24)
	gpus, units := w.uuids(), w.gpus[0].Units
	for i, p := range []*corev1.Pod{w.pod(pinned(gpus[0]), containerSpec{name: "c", units: 8}), w.pod(pinned(gpus[1]), containerSpec{name: "c", cores: 1, units: 8})} {
		p.Annotations["tencent.com/vcuda-core-limit"] = "100"
		w.mustAdmit(p)
		if got := limits(t, w.start(p, "c")); !reflect.DeepEqual(got, []string{"1-100 2048Mi"}) {
			t.Errorf("pod %d: limits %q", i, got)
		}
	}
	want := fmt.Sprintf("100/%d 99/%d", units-8, units-8)
	w.untilFree(want)
	w.end()
	w.startNode()
	w.untilFree(want)
	var each []books.Amount
	w.node.mu.Lock()
	for _, tenant := range w.node.books.Tenants() {
		each = append(each, tenant.Each)
	}
	w.node.mu.Unlock()
	if !reflect.DeepEqual(each, []books.Amount{{Cores: 0, Units: 8}, {Cores: 1, Units: 8}}) {
		t.Errorf("%+v", each)
	}
}
