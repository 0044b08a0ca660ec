// Package e2e tests Tranche on a real Kubernetes, the bed of test/e2e/bed.
//
// The tests share one bed, which the first of them brings up; they run one after the other and leave
// it as they found it. They run with TRANCHE_E2E=1 only, which `make e2e-kube` sets: they need root,
// and a cold cache takes minutes to fill.
package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"tranche.dev/tranche/test/e2e/bed"
)

func TestMain(m *testing.M) {
	bed.InitMachine()
	if address := os.Getenv(idleExtender); address != "" {
		fmt.Fprintln(os.Stderr, serveIdleExtender(address))
		os.Exit(1)
	}
	code := m.Run()
	if err := shared.down(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// shared is the bed that the tests share.
var shared cluster

const bedNodes = 3

type cluster struct {
	once sync.Once
	bed  *bed.Bed
	err  error
}

func (c *cluster) up(t *testing.T) *bed.Bed {
	t.Helper()
	if os.Getenv("TRANCHE_E2E") == "" {
		t.Skip("takes a machine and root: `make e2e-kube` runs it")
	}
	c.once.Do(func() {
		image, err := testImage(t)
		if err != nil {
			c.err = err
			return
		}
		c.bed, c.err = bed.Up(context.Background(), bed.Config{Nodes: bedNodes, Images: []string{image}, Say: say})
	})
	if errors.Is(c.err, bed.ErrUnable) && os.Getenv("CI") != "true" {
		t.Skip(c.err)
	}
	if c.err != nil {
		t.Fatal(c.err)
	}
	return c.bed
}

func (c *cluster) down() error {
	if c.bed == nil {
		return nil
	}
	return c.bed.Down()
}

func say(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// phase says how long a part of a test took.
func phase(t *testing.T, what string) func() {
	start := time.Now()
	return func() { t.Helper(); t.Logf("%s: %.2f s", what, time.Since(start).Seconds()) }
}

// sleeper is a pod that says hello and stays.
func sleeper(name, node string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  nodeName: %q
  containers:
  - {name: c, image: "%s", command: [sh, -c, "echo hello from $(hostname); exec sleep 100000"]}
`, name, node, testImageName)
}

func TestBedUp(t *testing.T) {
	b := shared.up(t)
	nodes, err := b.Client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	if err != nil || len(nodes.Items) != bedNodes {
		t.Fatalf("nodes: %v, %v", nodes.Items, err)
	}
	running := phase(t, "create to Running")
	pod := b.CreatePod(t, sleeper("hello", ""))
	pod = b.WaitPhase(t, pod, corev1.PodRunning, time.Minute)
	running()
	if got := b.PodLogs(t, pod, ""); got != "hello from hello\n" {
		t.Errorf("logs: %q", got)
	}
	if got := b.PodExec(t, pod, "", "hostname", "-i"); strings.TrimSpace(got) != pod.Status.PodIP {
		t.Errorf("hostname -i in the pod: %q, its address is %s", got, pod.Status.PodIP)
	}
	// From one node to a pod on the other, and by glibc programs of the image.
	other := b.CreatePod(t, sleeper("other", otherNode(b, pod.Spec.NodeName).Name))
	other = b.WaitPhase(t, other, corev1.PodRunning, time.Minute)
	if _, err := b.TryPodExec(t.Context(), pod, "", "ping", "-c", "1", "-W", "5", other.Status.PodIP); err != nil {
		t.Error(err)
	}
	// The Service kubernetes, for programs in pods.
	if _, err := b.TryPodExec(t.Context(), pod, "", "nc", "-w", "5", "10.96.0.1", "443", "-e", "true"); err != nil {
		t.Error(err)
	}
	if got := b.PodExec(t, pod, "", "gpuload", "--help"); !strings.Contains(got, "--kernel") {
		t.Errorf("gpuload --help: %q", got)
	}
	deleted := phase(t, "delete to gone")
	b.DeletePod(t, pod)
	deleted()
}

func otherNode(b *bed.Bed, name string) *bed.Machine {
	for _, m := range b.Nodes {
		if m.Name != name {
			return m
		}
	}
	return nil
}

// A Deployment's pod is there again after its node lost power, with the same name and a new container.
func TestReboot(t *testing.T) {
	b := shared.up(t)
	node := b.Nodes[1]
	b.Apply(t, fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: again}
spec:
  selector: {matchLabels: {app: again}}
  template:
    metadata: {labels: {app: again}}
    spec:
      nodeSelector: {kubernetes.io/hostname: %s}
      terminationGracePeriodSeconds: 0
      containers: [{name: c, image: "%s", imagePullPolicy: Never, command: [sleep, "100000"]}]
`, node.Name, testImageName))
	t.Cleanup(func() {
		if _, err := b.Kubectl(context.WithoutCancel(t.Context()), "delete", "deployment", "again", "--wait", "--cascade=foreground", "--timeout=1m"); err != nil {
			t.Error(err)
		}
	})
	pod := onePod(t, b, "app=again")
	before := b.WaitPhase(t, pod, corev1.PodRunning, time.Minute)
	if _, err := node.Exec(t.Context(), "sh", "-c", "echo kept > /var/lib/kubelet/mark; mknod /dev/mark c 1 3; touch /run/mark"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat("/dev/mark"); err == nil {
		t.Fatal("a device node made in a machine is on the host")
	}
	done := phase(t, "reboot to the pod's new container")
	if err := node.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	after := b.WaitPod(t, pod, time.Minute, "to run again", func(p *corev1.Pod) (bool, error) {
		s := p.Status.ContainerStatuses
		return len(s) == 1 && s[0].Ready && s[0].ContainerID != before.Status.ContainerStatuses[0].ContainerID, nil
	})
	done()
	if after.UID != before.UID || after.Status.ContainerStatuses[0].RestartCount != 1 {
		t.Errorf("pod %s with %d restarts, want %s with 1", after.UID, after.Status.ContainerStatuses[0].RestartCount, before.UID)
	}
	got, err := node.Exec(t.Context(), "sh", "-c", "cat /var/lib/kubelet/mark; ls /dev/mark /run/mark 2>/dev/null || echo gone")
	if err != nil || got != "kept\ngone\n" {
		t.Errorf("disk, /dev and /run after the reboot: %q, %v", got, err)
	}
}

func onePod(t *testing.T, b *bed.Bed, selector string) *corev1.Pod {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		pods, err := b.Client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{LabelSelector: selector})
		if err == nil && len(pods.Items) == 1 {
			return &pods.Items[0]
		}
	}
	t.Fatalf("no pod with %s within 30 s", selector)
	return nil
}

// Neither the end of kubelet nor that of containerd ends a container.
func TestKubeletRestart(t *testing.T) {
	b := shared.up(t)
	node := b.Nodes[0]
	pod := b.CreatePod(t, sleeper("stays", node.Name))
	before := b.WaitPhase(t, pod, corev1.PodRunning, time.Minute)
	for _, name := range []string{"kubelet", "containerd"} {
		_, starts := node.Daemon(name).PID()
		if err := node.Daemon(name).Kill(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		running := phase(t, "end of "+name+" to a new pod Running")
		again := b.CreatePod(t, sleeper("after-"+name, node.Name))
		b.WaitPhase(t, again, corev1.PodRunning, time.Minute)
		running()
		if _, now := node.Daemon(name).PID(); now != starts+1 {
			t.Errorf("%s: started %d times, was %d", name, now, starts)
		}
	}
	shown := phase(t, "restart of kubelet to its new capacity")
	if err := node.RestartKubelet("maxPods: 20\n"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := node.RestartKubelet(""); err != nil {
			t.Error(err)
		}
	})
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		n, err := b.Client.CoreV1().Nodes().Get(t.Context(), node.Name, metav1.GetOptions{})
		if err == nil && n.Status.Capacity.Pods().Value() == 20 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("capacity of %s after 30 s: %v, %v", node.Name, n.Status.Capacity, err)
		}
	}
	shown()
	after := b.WaitPhase(t, pod, corev1.PodRunning, time.Minute)
	if a, b := after.Status.ContainerStatuses[0], before.Status.ContainerStatuses[0]; a.ContainerID != b.ContainerID || a.RestartCount != 0 {
		t.Errorf("container %s with %d restarts, was %s", a.ContainerID, a.RestartCount, b.ContainerID)
	}
}

// Without the API server what runs goes on running; what it was told before comes to be after.
func TestAPIServerAway(t *testing.T) {
	b := shared.up(t)
	node := b.Nodes[0]
	pod := b.WaitPhase(t, b.CreatePod(t, sleeper("alone", node.Name)), corev1.PodRunning, time.Minute)
	server := b.Control.Daemon("kube-apiserver")
	stopped := phase(t, "end of the API server")
	server.Halt()
	stopped()
	t.Cleanup(func() {
		if err := errors.Join(server.Start(), b.WaitAPIServer(context.WithoutCancel(t.Context()))); err != nil {
			t.Error(err)
		}
	})
	if _, err := b.Client.CoreV1().Nodes().Get(t.Context(), node.Name, metav1.GetOptions{}); err == nil {
		t.Fatal("the API server answers and should be away")
	}
	got, err := node.Exec(t.Context(), "sh", "-c", "ctr -n k8s.io tasks list | grep -c RUNNING")
	if err != nil || strings.TrimSpace(got) == "0" {
		t.Errorf("running containers while the API server is away: %q, %v", got, err)
	}
	back := phase(t, "start of the API server to ready")
	if err := errors.Join(server.Start(), b.WaitAPIServer(t.Context())); err != nil {
		t.Fatal(err)
	}
	back()
	after := b.WaitPhase(t, pod, corev1.PodRunning, time.Minute)
	if after.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Errorf("its container was restarted %d times", after.Status.ContainerStatuses[0].RestartCount)
	}
	// kube-scheduler asks a server that was away again after up to a minute: 30 s and as much of jitter (client-go).
	b.WaitPhase(t, b.CreatePod(t, sleeper("later", "")), corev1.PodRunning, 2*time.Minute)
}
