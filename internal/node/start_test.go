package node

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/client-go/kubernetes/fake"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/simroot"
)

// freePort is one that nobody has, most likely.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "localhost:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// get asks the node over HTTP, once it serves.
func (w *world) get(path string) (status int, body string) {
	w.t.Helper()
	w.until("HTTP is served", func() bool {
		resp, err := http.Get("http://localhost:" + strconv.Itoa(w.config.QueryPort) + path)
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		status, body = resp.StatusCode, string(text)
		return err == nil
	})
	return status, body
}

// Without kubelet and API server everything runs that needs neither.
func TestStandalone(t *testing.T) {
	started := make(chan struct{})
	w := makeWorld(t, "t4:2", 41, func(c *Config) {
		c.Standalone, c.QueryPort, c.Started = true, freePort(t), func() { close(started) }
		c.PodResourcesSocket, c.PodsSocket = "/none", "/none"
	})
	w.run()
	select {
	case <-started:
	case <-w.alive.Done():
		t.Fatal(context.Cause(w.alive))
	}
	for path, want := range map[string]string{"/healthz": "ok", "/readyz": "ok"} {
		if status, body := w.get(path); status != http.StatusOK || strings.TrimSpace(body) != want {
			t.Errorf("%s: %d %q", path, status, body)
		}
	}
	if _, body := w.get("/graph"); strings.Count(body, "GPU0") != 1 || strings.Count(body, "GPU1") != 1 {
		t.Errorf("/graph: %s", body)
	}
	if _, body := w.get("/metrics"); !strings.Contains(body, `tranche_gpu_healthy`) {
		t.Errorf("/metrics has nothing of the GPUs:\n%s", body)
	}
	// Nothing of it is kubelet's business.
	entries, err := os.ReadDir(w.config.DevicePluginDir)
	if err != nil || len(entries) != 1 || entries[0].Name() != "kubelet.sock" {
		t.Errorf("%s: %v, %v", w.config.DevicePluginDir, entries, err)
	}
	w.end()
	if _, err := os.Stat(w.node.checkpointPath()); err != nil {
		t.Errorf("checkpoint: %v", err)
	}
}

// There is no driver at first. The node says so, registers with nothing to give, and all is well when the driver is there.
func TestDriverAppears(t *testing.T) {
	var client *fake.Clientset
	w := makeWorld(t, "", 42, func(c *Config) {
		client = fakeCluster(c)
		c.QueryPort = freePort(t)
	})
	w.config.HostRoot = filepath.Join(w.dir, "host")
	if err := os.Mkdir(w.config.HostRoot, 0o755); err != nil {
		t.Fatal(err)
	}
	w.run()
	var status int
	var body string
	w.until("kubelet knows the node", func() bool {
		status, body = w.get("/readyz")
		return !strings.Contains(body, "not registered") && !strings.Contains(body, "not answered")
	})
	if status != http.StatusServiceUnavailable || !strings.HasPrefix(body, "NoDriver: ") || strings.Count(strings.TrimSpace(body), "\n") != 0 {
		t.Errorf("/readyz: %d %q", status, body)
	}
	if status, body := w.get("/healthz"); status != http.StatusOK {
		t.Errorf("/healthz: %d %q", status, body)
	}
	w.eventually(client, "Node node GPUNoDriver: ")
	if err := w.kubelet.Registered(w.alive, core, memory); err != nil {
		t.Fatal(err)
	}
	if n := w.kubelet.Healthy(core); n != 0 {
		t.Errorf("%d cores without a driver", n)
	}
	if err := w.admit(w.pod(nil, containerSpec{name: "c", cores: 30, units: 8})); err == nil {
		t.Error("a pod was admitted without a driver")
	}
	sim, err := simroot.Make(filepath.Join(w.dir, "sim"), "a100-80g")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"usr", "proc", "dev"} {
		if err := os.Rename(filepath.Join(sim.Root, name), filepath.Join(w.config.HostRoot, name)); err != nil {
			t.Fatal(err)
		}
	}
	w.until("the node is ready", func() bool { status, _ = w.get("/readyz"); return status == http.StatusOK })
	w.until("kubelet has its devices", func() bool { return w.kubelet.Healthy(core) == 100 })
	w.eventually(client, "Node node GPUDriverReady: the driver answers again")
	pod := w.pod(nil, containerSpec{name: "c", cores: 30, units: 8})
	w.mustAdmit(pod)
	s := w.start(pod, "c")
	if got := limits(t, s); !reflect.DeepEqual(got, []string{"30-30 2048Mi"}) || s.Devices["/dev/nvidia0"] != "/dev/nvidia0" {
		t.Errorf("limits %q, devices %q", got, s.Devices)
	}
}

// With --topology-hints kubelet is told each ID's NUMA node, without nothing.
func TestTopologyHints(t *testing.T) {
	for _, hints := range []bool{true, false} {
		spec := filepath.Join(t.TempDir(), "spec")
		writeFile(t, spec, "gpu model=t4 numa=1\ngpu model=t4 numa=0\n")
		w := newWorld(t, spec, 43, func(c *Config) { c.TopologyHints = hints })
		gpus := w.uuids()
		for i, units := range []int{100, w.gpus[0].Units} {
			conn, err := grpc.NewClient("unix:"+w.node.plugins[i].Socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			stream, err := api.NewDevicePluginClient(conn).ListAndWatch(ctx, &api.Empty{})
			if err != nil {
				t.Fatal(err)
			}
			list, err := stream.Recv()
			if err != nil {
				t.Fatal(err)
			}
			got := map[string]int{}
			for _, d := range list.GetDevices() {
				uuid, _, _ := strings.Cut(d.GetID(), "::")
				var nodes []string
				for _, n := range d.GetTopology().GetNodes() {
					nodes = append(nodes, fmt.Sprint(n.GetID()))
				}
				got[uuid+" on "+strings.Join(nodes, ",")]++
			}
			want := map[string]int{gpus[0] + " on 1": units, gpus[1] + " on 0": units}
			if !hints {
				want = map[string]int{gpus[0] + " on ": units, gpus[1] + " on ": units}
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("hints %v, plugin %d: %v, want %v", hints, i, got, want)
			}
			cancel()
			_ = conn.Close()
		}
		w.end()
	}
}

// A driver before 570 does not say when a GPU is fit again after an XID: a restart of the node is no reason to think so, an
// admin's word is.
func TestFaultsAreRemembered(t *testing.T) {
	w := newWorld(t, "a100-80g:2", 44)
	w.simctl("xid", "1", "79")
	eventually(t, 20*time.Second, "its IDs leave", func() bool { return w.kubelet.Healthy(core) == 100 })
	w.end()
	w.startNode()
	if n := w.kubelet.Healthy(core); n != 100 {
		t.Errorf("%d healthy cores after a restart", n)
	}
	if g := w.node.Snapshot().GPUs[1]; g.Healthy || g.Reason != "unhealthy: XID 79" {
		t.Errorf("%+v", g)
	}
	if err := w.admit(w.pod(pinned(w.uuids()[1]), containerSpec{name: "c", cores: 30, units: 8})); err == nil {
		t.Error("a pod was admitted on a GPU that had failed")
	}
	w.end()
	if err := os.Remove(w.node.faultsPath()); err != nil {
		t.Fatal(err)
	}
	w.startNode()
	if n := w.kubelet.Healthy(core); n != 200 {
		t.Errorf("%d healthy cores after an admin's word", n)
	}
}

// A unit of memory that is more than a GPU has is said, once for each GPU.
func TestUnitLargerThanGPU(t *testing.T) {
	var log bytes.Buffer
	n := &Node{config: Config{MemoryUnit: 20 << 30}, log: slog.New(slog.NewTextHandler(&log, nil)), names: podspec.DefaultNames()}
	small, large := gpu.GPU{UUID: "GPU-small", Memory: 16 << 30}, gpu.GPU{UUID: "GPU-large", Memory: 80 << 30}
	before, after := gpu.Inventory{}, gpu.Inventory{GPUs: []gpu.GPU{small, large}}
	n.tellUnit(before, after)
	n.tellUnit(after, after)
	if text := log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "--memory-unit") || !strings.Contains(text, "GPU-small") {
		t.Errorf("%q", text)
	}
}
