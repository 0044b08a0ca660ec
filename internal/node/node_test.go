package node

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"tranche.dev/tranche/internal/kubelet/kubelettest"
	"tranche.dev/tranche/internal/node/books"
	"tranche.dev/tranche/internal/tenant"
)

const (
	core   = "tencent.com/vcuda-core"
	memory = "tencent.com/vcuda-memory"
	gib    = 4 // units
)

// world is a node with simulated GPUs and a kubelet.
type world struct {
	t       *testing.T
	dir     string
	kubelet *kubelettest.Kubelet
	config  Config
	node    *Node
	end     func()
	alive   context.Context // ends with the node
	mu      sync.Mutex
	pods    int
	gpus    []books.GPU
}

// socketDir is short enough for sockets.
func socketDir(t *testing.T) string {
	dir, err := os.MkdirTemp("", "tn")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func newWorld(t *testing.T, sim string, seed uint64, change ...func(*Config)) *world {
	w := makeWorld(t, sim, seed, change...)
	w.startNode()
	return w
}

// makeWorld is newWorld in which the node does not run yet.
func makeWorld(t *testing.T, sim string, seed uint64, change ...func(*Config)) *world {
	dir := socketDir(t)
	k, err := kubelettest.New(dir, seed)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Stop)
	w := &world{t: t, dir: dir, kubelet: k, config: Config{NodeName: "node", DevicePluginDir: k.Dir, PodResourcesSocket: k.Resources,
		PodsSocket: k.Pods, AllocationDir: filepath.Join(dir, "vm"), ViewDir: filepath.Join(dir, "view"), CheckpointDir: filepath.Join(dir, "ckpt"),
		Sim: sim, SimDir: filepath.Join(dir, "sim"), QueryPort: -1, DisplaySocket: filepath.Join(dir, "d.sock"), CheckPeriod: time.Second,
		Kubeconfig: "/none", Log: slog.New(slog.NewTextHandler(&testLog{t: t}, &slog.HandlerOptions{Level: slog.LevelDebug}))}}
	for _, f := range change {
		f(&w.config)
	}
	return w
}

// testLog writes to a test's log.
type testLog struct {
	t    *testing.T
	mu   sync.Mutex
	over bool
}

func (l *testLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if testing.Verbose() && !l.over {
		l.t.Log(strings.TrimSpace(string(p)))
	}
	return len(p), nil
}

func (w *world) startNode() {
	w.t.Helper()
	w.run()
	w.registered()
	if w.gpus == nil {
		w.node.mu.Lock()
		w.gpus = w.node.books.GPUs()
		w.node.mu.Unlock()
	}
}

// run starts the node, which may not register.
func (w *world) run() {
	w.t.Helper()
	n, err := New(w.config)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	alive, over := context.WithCancelCause(context.Background())
	go func() {
		err := n.Run(ctx)
		over(fmt.Errorf("the node ended: %v", err))
		done <- err
	}()
	var once sync.Once
	w.node, w.alive = n, alive
	w.end = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				w.t.Errorf("the node ended with %v", err)
			}
		})
	}
	w.t.Cleanup(w.end)
}

// registered waits, as long as the node lives, until kubelet knows its devices.
func (w *world) registered() {
	w.t.Helper()
	w.until("the node is ready", func() bool { return len(w.node.ready()) == 0 })
	if err := w.kubelet.Registered(w.alive, core, memory); err != nil {
		w.t.Fatal(err, context.Cause(w.alive))
	}
}

// until waits for a condition as long as the node lives; how long that may take is the test run's limit.
func (w *world) until(what string, ok func() bool) {
	w.t.Helper()
	for !ok() {
		select {
		case <-w.alive.Done():
			w.t.Fatalf("never: %s: %v", what, context.Cause(w.alive))
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// containerSpec is a container of a test pod: cores, units of memory.
type containerSpec struct {
	name         string
	cores, units int64
	init         bool
}

func (w *world) pod(annotations map[string]string, containers ...containerSpec) *corev1.Pod {
	w.mu.Lock()
	w.pods++
	name := fmt.Sprintf("pod-%d", w.pods)
	at := metav1.NewTime(time.Unix(int64(1_700_000_000+w.pods), 0))
	w.mu.Unlock()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "test", UID: types.UID("uid-" + name), CreationTimestamp: at, Annotations: annotations}}
	for _, c := range containers {
		limits := corev1.ResourceList{}
		if c.cores > 0 {
			limits[core] = *resource.NewQuantity(c.cores, resource.DecimalSI)
		}
		if c.units > 0 {
			limits[memory] = *resource.NewQuantity(c.units, resource.DecimalSI)
		}
		out := corev1.Container{Name: c.name, Resources: corev1.ResourceRequirements{Limits: limits}}
		if c.init {
			pod.Spec.InitContainers = append(pod.Spec.InitContainers, out)
		} else {
			pod.Spec.Containers = append(pod.Spec.Containers, out)
		}
	}
	return pod
}

// limits are what a started container's library would read: GPU, cores, ceiling, bytes.
func limits(t *testing.T, s kubelettest.Started) []string {
	t.Helper()
	l, err := tenant.OpenLimits(s.Mounts["/etc/tranche/slice"])
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	devices, err := l.Devices()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, d := range devices {
		memory := "all"
		if d.MemoryLimited {
			memory = fmt.Sprintf("%dMi", d.MemoryLimit>>20)
		}
		out = append(out, fmt.Sprintf("%d-%d %s", d.Cores, d.CoresCeiling, memory))
	}
	return out
}

func (w *world) admit(pod *corev1.Pod) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	return w.kubelet.Admit(ctx, pod)
}

func (w *world) mustAdmit(pod *corev1.Pod) {
	w.t.Helper()
	if err := w.admit(pod); err != nil {
		w.t.Fatalf("%s: %v", pod.Name, err)
	}
}

func (w *world) start(pod *corev1.Pod, container string) kubelettest.Started {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	s, err := w.kubelet.StartContainer(ctx, pod.UID, container)
	if err != nil {
		w.t.Fatalf("%s/%s: %v", pod.Name, container, err)
	}
	return s
}

// eventually waits for a condition.
func eventually(t *testing.T, within time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(within); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", within, what)
		}
	}
}

func TestOnePod(t *testing.T) {
	w := newWorld(t, "a100-80g:2", 1)
	pod := w.pod(nil, containerSpec{name: "c", cores: 30, units: 8 * gib})
	w.mustAdmit(pod)
	s := w.start(pod, "c")
	if got := limits(t, s); !reflect.DeepEqual(got, []string{"30-30 8192Mi"}) {
		t.Errorf("limits %q", got)
	}
	var devices []string
	for d := range s.Devices {
		devices = append(devices, d)
	}
	slices.Sort(devices)
	if want := []string{"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia0", "/dev/nvidiactl"}; !reflect.DeepEqual(devices, want) {
		t.Errorf("devices %q, want %q", devices, want)
	}
	if s.Env["LD_LIBRARY_PATH"] != "/usr/local/nvidia/lib64" || s.Env["NVIDIA_VISIBLE_DEVICES"] != "void" {
		t.Errorf("environment %q", s.Env)
	}
	want := map[string]string{core: "30", memory: fmt.Sprint(8 << 30), "tencent.com/vcuda-device": "/dev/nvidia0"}
	if !reflect.DeepEqual(s.Annotations, want) {
		t.Errorf("annotations %q", s.Annotations)
	}
	if s.ReadOnly["/etc/tranche/slice/ledger"] || !s.ReadOnly["/etc/tranche/slice"] || !s.ReadOnly["/usr/local/nvidia"] {
		t.Errorf("read-only: %v", s.ReadOnly)
	}
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
