package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"tranche.dev/tranche/internal/podspec"
)

// Tenants keep their limits while `tranche node` is dead, and it finds all of their use afterwards. Without an arbiter a
// tenant that is alone on its GPU has its share; two of one GPU have less than theirs, since each measures the other's
// time slices as its own (docs/compute.md), and never more.
func nodeKilled(t *testing.T, n *gpuNode) {
	script := "gpuload --alloc plain:64Mi:16 --hold 100000 >/dev/null & " + load // 1 GiB held
	two := map[string]shape{"a": {20, 32}, "b": {40, 64}}
	pod := n.b.CreatePod(t, podOf("survives", container("a", script, 20, 32)+container("b", script, 40, 64), podspec.Together, "*"))
	pod = n.b.WaitPhase(t, pod, corev1.PodRunning, soon)
	gpu := n.gpuOf(t, pod)
	alone := n.b.WaitPhase(t, n.b.CreatePod(t, podOf("alone", container("c", load, 40, 32), podspec.NotUUIDs, gpuUUID(gpu))), corev1.PodRunning, soon)
	own := n.gpuOf(t, alone)
	used := func() (out [2]float64) {
		all, err := n.metrics()
		for i, c := range []string{"a", "b"} {
			var missing error
			out[i], missing = ofTenant(all, "tranche_tenant_memory_used_bytes", pod, c)
			err = errors.Join(err, missing)
		}
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	n.waitFor(t, "both to hold 1 GiB", soon, func() error {
		if u := used(); min(u[0], u[1]) < 1<<30 {
			return fmt.Errorf("they hold %.0f", u)
		}
		return nil
	})
	n.wantTenantShares(t, "before", pod, two)
	before := used()
	pid, starts := n.d.PID()
	n.d.Halt()
	time.Sleep(time.Second) // the arbiter's turns end 0.2 s after its death
	n.wantShares(t, "without the node", 1.5, 0, map[string]float64{"alone": 40}, func() map[string]float64 {
		busy := n.busy(t, 10*time.Second)
		t.Logf("two of one GPU without the node: %.2f %% (limit 60)", busy[gpu])
		if busy[gpu] > 61.5 || busy[gpu] < 30 {
			t.Errorf("two of one GPU without the node: %.2f %%, want 30 to 61.5", busy[gpu])
		}
		return map[string]float64{"alone": busy[own]}
	})
	for c, want := range two {
		out, err := n.b.TryPodExec(t.Context(), pod, c, "gpuload", "--json", "--alloc", "plain:16Mi")
		got := regexp.MustCompile(`"bytes":(\d+)`).FindStringSubmatch(out)
		if err != nil || got == nil {
			t.Errorf("%s: gpuload without the node: %v, %q", c, err, out)
			continue
		}
		bytes, err := strconv.Atoi(got[1])
		t.Logf("container %s without the node: %d MiB more of %d", c, bytes>>20, want.units*unitMiB)
		if most := (want.units*unitMiB - 1024) << 20; err != nil || bytes > most || bytes < most-2<<30 {
			t.Errorf("%s was given %d bytes more, want %d at most, %v", c, bytes, most, err)
		}
	}
	if now := n.truth(t).GPUs[gpu].Used; now < 2<<30 {
		t.Errorf("%d bytes are in use: the holders ended", now)
	}
	accounted := phase(t, "start of the node until all is accounted for")
	if err := n.d.Start(); err != nil {
		t.Fatal(err)
	}
	n.waitFor(t, "the node to be ready", soon, func() error { _, err := n.get("/readyz"); return err })
	n.waitFor(t, "both tenants' use to be known", soon, func() error {
		all, err := n.metrics()
		if err != nil {
			return err
		}
		for i, c := range []string{"a", "b"} {
			for name, want := range map[string]float64{"tranche_tenant_cores": float64(two[c].cores), "tranche_tenant_processes": 2} {
				if got, err := ofTenant(all, name, pod, c); err != nil || got != want {
					return fmt.Errorf("%s of %s is %v, not %v; %w", name, c, got, want, err)
				}
			}
			if got, err := ofTenant(all, "tranche_tenant_memory_used_bytes", pod, c); err != nil || got < before[i]*0.99 || got > before[i]*1.01 {
				return fmt.Errorf("%s uses %v, was %v; %w", c, got, before[i], err)
			}
		}
		return nil
	})
	accounted()
	if now, started := n.d.PID(); now == pid || started != starts+1 {
		t.Errorf("the node is process %d, was %d; started %d times", now, pid, started-starts)
	}
	n.wantTenantShares(t, "after", pod, two)
	now, err := n.b.Client.CoreV1().Pods("default").Get(t.Context(), pod.Name, metav1.GetOptions{})
	if err != nil || slices.ContainsFunc(now.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool { return s.RestartCount > 0 }) {
		t.Errorf("containers after all: %+v, %v", now.Status.ContainerStatuses, err)
	}
	// What is free is known: 30 cores of this GPU fit, 20 more do not.
	n.b.WaitPhase(t, n.b.CreatePod(t, podOf("fits", container("c", "exec sleep 100000", 30, 4), podspec.UUIDs, gpuUUID(gpu))), corev1.PodRunning, soon)
	n.refused(t, podOf("fits-not", container("c", "exec sleep 100000", 20, 4), podspec.UUIDs, gpuUUID(gpu)))
}

// refused makes a pod that the node must refuse, and gives it.
func (n *gpuNode) refused(t *testing.T, manifest string) *corev1.Pod {
	t.Helper()
	pod := n.b.CreatePod(t, manifest)
	pod = n.b.WaitPod(t, pod, soon, "to be refused", func(p *corev1.Pod) (bool, error) {
		if p.Status.Phase == corev1.PodRunning {
			return false, errors.New("it runs")
		}
		return p.Status.Phase == corev1.PodFailed, nil
	})
	t.Logf("%s: %s: %s", pod.Name, pod.Status.Reason, pod.Status.Message)
	return pod
}

// Kubelet restarts: it knows the devices again at once, and the pod keeps its container and its share.
func nodeKubeletRestart(t *testing.T, n *gpuNode) {
	pod := n.b.WaitPhase(t, n.b.CreatePod(t, podOf("through-kubelet", container("c", load, 40, 32))), corev1.PodRunning, soon)
	gpu := n.gpuOf(t, pod)
	socket := "/var/lib/kubelet/device-plugins/kubelet.sock"
	var old int64 = n.stamp(t, socket)
	said := len(n.registrations(t))
	ids := nodeGPUs * (100 + n.units)
	if err := n.RestartKubelet(""); err != nil {
		t.Fatal(err)
	}
	n.waitFor(t, "kubelet's new socket", soon, func() error {
		if s, err := os.Stat(n.Path(socket)); err != nil || s.ModTime().UnixNano() == old {
			return fmt.Errorf("it is not there, %v", err)
		}
		return nil
	})
	made := time.Unix(0, n.stamp(t, socket))
	n.waitFor(t, "all devices to be allocatable", soon, func() error {
		got, err := n.allocatable(t.Context())
		if err == nil && got != ids {
			err = fmt.Errorf("%d are, want %d", got, ids)
		}
		return err
	})
	complete := time.Since(made)
	lines := n.registrations(t)[said:]
	if len(lines) < 2 {
		t.Fatalf("registrations after the restart: %v", lines)
	}
	t.Logf("registered %.3f s after the socket, all %d devices allocatable after %.3f s", lines[1].Sub(made).Seconds(), ids, complete.Seconds())
	if after := lines[1].Sub(made); after > time.Second {
		t.Errorf("registered %v after kubelet's socket, want 1 s at most", after)
	}
	if complete > 3*time.Second {
		t.Errorf("GetAllocatableResources complete %v after kubelet's socket, want 3 s at most", complete)
	}
	n.waitAllocatable(t, nodeGPUs*100)
	after := n.b.WaitPhase(t, pod, corev1.PodRunning, soon)
	if a, b := after.Status.ContainerStatuses[0], pod.Status.ContainerStatuses[0]; a.ContainerID != b.ContainerID {
		t.Errorf("container %s, was %s", a.ContainerID, b.ContainerID)
	}
	n.wantBusy(t, "share after kubelet's restart", gpu, 40, 1.5, 5*time.Second)
	n.b.WaitPhase(t, n.b.CreatePod(t, podOf("after-kubelet", container("c", "exec sleep 100000", 60, 32), podspec.UUIDs, gpuUUID(gpu))), corev1.PodRunning, soon)
}

func (n *gpuNode) stamp(t *testing.T, path string) int64 {
	t.Helper()
	s, err := os.Stat(n.Path(path))
	if err != nil {
		t.Fatal(err)
	}
	return s.ModTime().UnixNano()
}

// registrations are the times at which the node's log tells of one.
func (n *gpuNode) registrations(t *testing.T) (out []time.Time) {
	t.Helper()
	text, err := os.ReadFile(n.d.Log)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if !strings.Contains(line, `"registered with kubelet"`) {
			continue
		}
		at, err := time.Parse(time.RFC3339Nano, strings.TrimPrefix(strings.Fields(line)[0], "time="))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, at)
	}
	return out
}

// allocatable counts the device IDs that kubelet could give.
func (n *gpuNode) allocatable(ctx context.Context) (int, error) {
	conn, err := grpc.NewClient("unix://"+n.Path(podsSocket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	got, err := podresources.NewPodResourcesListerClient(conn).GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
	if err != nil {
		return 0, err
	}
	count := 0
	for _, d := range got.Devices {
		count += len(d.DeviceIds)
	}
	return count, nil
}

// The node loses power: a Deployment's pod returns with its limits, and its directory, which lay in memory, is made anew. It
// can be a new pod: kubelet rejects those that it finds at its start until the device plugin is there.
func nodeReboot(t *testing.T, n *gpuNode) {
	needNvidiaSMI(t)
	pod, was := n.deploy(t)
	done := phase(t, "reboot to the Deployment's new container")
	if err := n.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	if left, err := filepath.Glob(n.Path("/run/tranche/vm/*/limits")); err != nil || len(left) != 0 {
		t.Errorf("allocations after the reboot: %q, %v", left, err)
	}
	again := n.deployed(t, was)
	done()
	t.Logf("the same pod: %v", again.UID == pod.UID)
	n.wantSeen(t, again, "c", gpuUUID(1), 24)
	n.wantBusy(t, "share after the reboot", 1, 30, 1.5, 5*time.Second)
}

// The driver is loaded anew and numbers two GPUs the other way round: a container does not start with a device node
// that is another GPU's by now.
func nodeGPUsRenumbered(t *testing.T, n *gpuNode) {
	needNvidiaSMI(t)
	pod, was := n.deploy(t)
	reload := func(order ...int) {
		n.d.Stop()
		if err := os.WriteFile(n.Path(specFile), []byte(gpuSpec(order...)), 0o644); err != nil {
			t.Error(err)
		}
		if _, err := n.Exec(context.WithoutCancel(t.Context()), "rm", "-r", simDir); err != nil {
			t.Error(err)
		}
		if err := n.d.Start(); err != nil {
			t.Error(err)
		}
		n.waitFor(t, "the node to be ready", soon, func() error { _, err := n.get("/readyz"); return err })
	}
	reload(1, 0, 2, 3)
	t.Cleanup(func() { reload(0, 1, 2, 3); n.waitAllocatable(t, nodeGPUs*100) })
	if _, err := n.Exec(t.Context(), "ctr", "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL", strings.TrimPrefix(was, "containerd://")); err != nil {
		t.Fatal(err)
	}
	event := n.waitEvent(t, pod, "GPUStartFailed")
	for _, want := range []string{gpuUUID(1), "/dev/nvidia1", "/dev/nvidia0", "delete the pod"} {
		if !strings.Contains(event, want) {
			t.Errorf("event %q: no %q", event, want)
		}
	}
	pod = n.b.WaitPod(t, pod, soon, "to say why it does not run", func(p *corev1.Pod) (bool, error) {
		s := p.Status.ContainerStatuses
		if len(s) == 1 && s[0].State.Running != nil && s[0].ContainerID != was {
			return false, errors.New("it runs, with the device node of another GPU")
		}
		return len(s) == 1 && s[0].State.Waiting != nil && s[0].State.Waiting.Message != "", nil
	})
	t.Log(pod.Status.ContainerStatuses[0].State.Waiting.Message)
	if got := n.busy(t, time.Second); slices.Max(got) > 0 {
		t.Errorf("GPUs work: %v", got)
	}
	// A new pod of the Deployment has the right one.
	if err := n.b.Client.CoreV1().Pods(pod.Namespace).Delete(t.Context(), pod.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	n.wantSeen(t, n.deployed(t, was), "c", gpuUUID(1), 24)
}

// deploy makes a Deployment of one pod on GPU 1 until the end of the test, and gives the pod and its container's ID.
func (n *gpuNode) deploy(t *testing.T) (*corev1.Pod, string) {
	t.Helper()
	n.b.Apply(t, fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: returns}
spec:
  selector: {matchLabels: {app: returns}}
  template:
    metadata:
      labels: {app: returns}
      annotations: {tranche.dev/gpu-uuid: %q}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: c
        image: %s
        imagePullPolicy: Never
        command: [sh, -c, %q]
        resources: {limits: {tencent.com/vcuda-core: 30, tencent.com/vcuda-memory: 24}}
`, gpuUUID(1), testImageName, look+load))
	t.Cleanup(func() {
		if _, err := n.b.Kubectl(context.WithoutCancel(t.Context()), "delete", "deployment", "returns", "--wait", "--cascade=foreground", "--timeout=1m"); err != nil {
			t.Error(err)
		}
	})
	pod := n.deployed(t, "")
	n.wantSeen(t, pod, "c", gpuUUID(1), 24)
	return pod, pod.Status.ContainerStatuses[0].ContainerID
}

// deployed waits for a ready container of the Deployment other than this one.
func (n *gpuNode) deployed(t *testing.T, other string) (pod *corev1.Pod) {
	t.Helper()
	n.waitFor(t, "a pod of the Deployment", 2*time.Minute, func() error {
		pods, err := n.b.Client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{LabelSelector: "app=returns"})
		if err != nil {
			return err
		}
		var states []string
		for i := range pods.Items {
			p := &pods.Items[i]
			if s := p.Status.ContainerStatuses; p.DeletionTimestamp == nil && len(s) == 1 && s[0].Ready && s[0].ContainerID != other {
				pod = p
				return nil
			}
			states = append(states, fmt.Sprintf("%s %s %s %s", p.Name, p.Status.Phase, p.Status.Reason, p.Status.Message))
		}
		return fmt.Errorf("there are %q", states)
	})
	return pod
}

// A GPU fails and recovers. Its devices leave and return, its pod is told; nothing happens to the others.
func nodeGPUFails(t *testing.T, n *gpuNode) {
	n.deleteAll(t)
	on := func(name string, gpu int) *corev1.Pod {
		return n.b.CreatePod(t, podOf(name, container("c", load, 30, 16), podspec.UUIDs, gpuUUID(gpu)))
	}
	hit, other := on("hit", 2), on("other", 3)
	hit, other = n.b.WaitPhase(t, hit, corev1.PodRunning, soon), n.b.WaitPhase(t, other, corev1.PodRunning, soon)
	left := phase(t, "XID until the devices have left")
	n.simctl(t, "xid", "2", "74")
	recovered := false
	recover := func() {
		if !recovered {
			n.simctl(t, "recover", "2")
		}
		recovered = true
	}
	t.Cleanup(recover)
	n.waitFor(t, "the devices to leave", soon, func() error {
		got, err := n.allocatable(t.Context())
		if want := (nodeGPUs - 1) * (100 + n.units); err == nil && got != want {
			err = fmt.Errorf("%d are allocatable, want %d", got, want)
		}
		return err
	})
	left()
	n.waitAllocatable(t, (nodeGPUs-1)*100)
	if got := n.waitEvent(t, hit, "GPUUnhealthy"); !strings.Contains(got, gpuUUID(2)) || !strings.Contains(got, "74") {
		t.Errorf("event: %q", got)
	}
	noEvent(t, n, other, "GPUUnhealthy")
	n.wantShares(t, "with GPU 2 failed, on GPU", 1.5, 0, map[string]float64{"2": 30, "3": 30}, func() map[string]float64 {
		busy := n.busy(t, 5*time.Second)
		return map[string]float64{"2": busy[2], "3": busy[3]}
	})
	n.refused(t, podOf("too-late", container("c", load, 30, 16), podspec.UUIDs, gpuUUID(2)))
	back := phase(t, "recovery until the devices are back")
	recover()
	n.waitAllocatable(t, nodeGPUs*100)
	back()
	again := n.b.WaitPhase(t, on("again", 2), corev1.PodRunning, soon)
	if gpu := n.gpuOf(t, again); gpu != 2 {
		t.Errorf("it is on GPU %d", gpu)
	}
	for _, p := range []*corev1.Pod{other} {
		now, err := n.b.Client.CoreV1().Pods("default").Get(t.Context(), p.Name, metav1.GetOptions{})
		if err != nil || now.Status.ContainerStatuses[0].RestartCount != 0 {
			t.Errorf("%s: %+v, %v", p.Name, now.Status, err)
		}
	}
}

// away is how long the API server is away.
func away(t *testing.T) time.Duration {
	text := os.Getenv("TRANCHE_E2E_AWAY")
	if text == "" {
		return 20 * time.Second
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 10*time.Second {
		t.Fatalf("TRANCHE_E2E_AWAY=%s: not a duration of 10s or more", text)
	}
	return d
}

// Without the API server bound pods start: one whose turn comes after its init container, one that restarts, one
// from kubelet's own directory. All is written down once it is back.
func nodeAPIServerAway(t *testing.T, n *gpuNode) {
	n.deleteAll(t)
	later := n.b.CreatePod(t, podOf("later-gpu", container("c", "echo runs; "+load, 30, 16)+
		"  initContainers:\n"+container("wait", "until [ -e /tmp/away ]; do sleep 0.2; done", 0, 0, "volumeMounts: [{name: tmp, mountPath: /tmp}]")+
		"  volumes: [{name: tmp, hostPath: {path: /var/lib/away, type: DirectoryOrCreate}}]\n"))
	again := n.b.CreatePod(t, podOf("again-gpu", container("c", "until [ -e /tmp/away ] && [ ! -e /tmp/ended ]; do [ -e /tmp/ended ] && exec gpuload --kernel 2ms --time 100000; sleep 0.2; done; touch /tmp/ended; exit 1",
		20, 16, "volumeMounts: [{name: tmp, mountPath: /tmp}]")+"  volumes: [{name: tmp, hostPath: {path: /var/lib/away, type: DirectoryOrCreate}}]\n"))
	again = n.b.WaitPhase(t, again, corev1.PodRunning, soon)
	gpu := n.gpuOf(t, again)
	n.b.WaitPod(t, later, soon, "to be in its init container", func(p *corev1.Pod) (bool, error) {
		s := p.Status.InitContainerStatuses
		return len(s) == 1 && s[0].State.Running != nil, nil
	})
	server := n.b.Control.Daemon("kube-apiserver")
	server.Halt()
	t.Cleanup(func() {
		if err := errors.Join(server.Start(), n.b.WaitAPIServer(context.WithoutCancel(t.Context()))); err != nil {
			t.Error(err)
		}
	})
	start := time.Now()
	data := "/var/lib/away"
	t.Cleanup(func() {
		if err := os.RemoveAll(n.Path(data)); err != nil {
			t.Error(err)
		}
	})
	if err := os.WriteFile(n.Path(data+"/away"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	names, sum := []string{"later-gpu", "again-gpu"}, 50.0
	if n.kubeletTells() {
		names, sum = append(names, n.static(t, podOf("static", container("c", load, 10, 8)))), 60
	}
	running := phase(t, "pods' start without the API server")
	n.waitFor(t, "all of them to have their limits and to work", soon, func() error {
		all, err := n.metrics()
		if err != nil {
			return err
		}
		for _, name := range names {
			p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}}
			if got, err := ofTenant(all, "tranche_tenant_processes", p, "c"); err != nil || got != 1 {
				return fmt.Errorf("%v processes, %w", got, err)
			}
		}
		return nil
	})
	running()
	n.wantShares(t, "without the API server", 2, owed(5*time.Second), map[string]float64{"all": sum}, func() map[string]float64 {
		all := 0.0
		for _, b := range n.busy(t, 5*time.Second) {
			all += b
		}
		return map[string]float64{"all": all}
	})
	for _, path := range []string{"/healthz", "/readyz"} {
		if _, err := n.get(path); err != nil {
			t.Error(err)
		}
	}
	time.Sleep(away(t) - time.Since(start))
	if _, err := n.get("/readyz"); err != nil {
		t.Error(err)
	}
	t.Logf("the API server was away for %.0f s", time.Since(start).Seconds())
	converged := phase(t, "API server's return until all is written")
	if err := errors.Join(server.Start(), n.b.WaitAPIServer(t.Context())); err != nil {
		t.Fatal(err)
	}
	n.place(t, n.b.WaitPhase(t, later, corev1.PodRunning, soon), "c")
	// The server still has the status from before until kubelet writes the new one.
	now := n.b.WaitPod(t, again, soon, "to have been restarted", func(p *corev1.Pod) (bool, error) {
		s := p.Status.ContainerStatuses
		return len(s) == 1 && s[0].RestartCount > 0 && s[0].State.Running != nil, nil
	})
	if got := now.Status.ContainerStatuses[0].RestartCount; got != 1 || n.gpuOf(t, now) != gpu {
		t.Errorf("%d restarts, on GPU %d, was %d", got, n.gpuOf(t, now), gpu)
	}
	converged()
	// kube-scheduler asks a server that was away again after up to a minute: 30 s and as much of jitter (client-go). A new one
	// does at once.
	scheduler := n.b.Control.Daemon("kube-scheduler")
	scheduler.Stop()
	if err := scheduler.Start(); err != nil {
		t.Fatal(err)
	}
	n.b.WaitPhase(t, n.b.CreatePod(t, podOf("after-away", container("c", load, 30, 16))), corev1.PodRunning, soon)
}

// static has kubelet run a pod from its directory until the end of the test, and gives its name.
func (n *gpuNode) static(t *testing.T, manifest string) string {
	t.Helper()
	file := "/var/lib/kubelet/manifests/" + strings.Fields(manifest[strings.Index(manifest, "name: "):])[1] + ".yaml"
	if err := os.WriteFile(n.Path(file), []byte(manifest), 0o644); err != nil {
		t.Fatal(err)
	}
	name := strings.TrimSuffix(filepath.Base(file), ".yaml") + "-" + n.Name
	t.Cleanup(func() {
		if err := os.Remove(n.Path(file)); err != nil {
			t.Error(err)
		}
		n.waitFor(t, "the static pod's end", soon, func() error {
			all, err := n.metrics()
			if err != nil {
				return err
			}
			if _, err := ofTenant(all, "tranche_tenant_cores", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}}, "c"); err == nil {
				return errors.New("the node still has it")
			}
			return nil
		})
	})
	return name
}
