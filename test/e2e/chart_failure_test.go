package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What fails in a cluster's life, one after the other, while tenants keep two GPUs busy: none of them restarts or gets more
// than its limits, and a new pod has its slice soon after.
func chartFailures(t *testing.T, c *chart) {
	crowd := newCrowd(t, c, 2, c.nodes[:2])
	component := "component=" // of the chart
	for _, f := range []struct {
		name string
		do   func() error
	}{
		{"node killed", func() error { return c.killAll(t, component+"node", "node") }},
		{"extender killed", func() error { return c.killAll(t, component+"scheduler", "extender") }},
		{"kube-scheduler killed", func() error { return c.killAll(t, component+"scheduler", "kube-scheduler") }},
		{"webhook killed", func() error { return c.killAll(t, component+"webhook", "webhook") }},
		{"kubelet killed", func() error { return c.killDaemons("kubelet") }},
		{"containerd killed", func() error { return c.killDaemons("containerd") }},
		{"API server killed", func() error {
			if err := c.b.Control.Daemon("kube-apiserver").Kill(syscall.SIGKILL); err != nil {
				return err
			}
			return c.b.WaitAPIServer(t.Context())
		}},
	} {
		start := time.Now()
		if err := f.do(); err != nil {
			t.Errorf("%s: %v\n%s", f.name, err, c.explain(t))
		}
		took := phase(t, f.name+", until a new pod runs")
		pod := c.slice(t, "new", "")
		took()
		c.fill(t, pod, "c", 8)
		c.b.DeletePod(t, pod)
		if wait := (wide + 1) * time.Second; time.Since(start) < wait {
			time.Sleep(wait - time.Since(start))
		}
		crowd.unmoved(t, f.name, start)
	}
	t.Run("Drain", func(t *testing.T) { chartDrain(t, c, crowd) })
	t.Run("Full", func(t *testing.T) { chartFull(t, c) })
}

// killAll ends a container of all of the chart's pods of a component by SIGKILL, and waits until all run again.
func (c *chart) killAll(t *testing.T, component, container string) error {
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	selector := metav1.ListOptions{LabelSelector: "app.kubernetes.io/" + component}
	pods, err := c.b.Client.CoreV1().Pods(chartNamespace).List(ctx, selector)
	if err == nil && len(pods.Items) == 0 {
		err = fmt.Errorf("no pod has the label %s", component)
	}
	if err != nil {
		return err
	}
	before := map[string]int32{}
	for i := range pods.Items {
		p := &pods.Items[i]
		s := statusOf(p, container)
		if s == nil {
			return fmt.Errorf("%s has no container %s", p.Name, container)
		}
		before[p.Name] = s.RestartCount
		id := strings.TrimPrefix(s.ContainerID, "containerd://")
		if _, err := c.b.Node(p.Spec.NodeName).Exec(ctx, "ctr", "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL", id); err != nil {
			return err
		}
	}
	for {
		pods, err := c.b.Client.CoreV1().Pods(chartNamespace).List(ctx, selector)
		back := 0
		if err == nil {
			for i := range pods.Items {
				if s := statusOf(&pods.Items[i], container); s != nil && s.Ready && s.RestartCount > before[pods.Items[i].Name] {
					back++
				}
			}
			if back == len(before) {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d of %d are back: %w", back, len(before), errors.Join(ctx.Err(), err))
		case <-time.After(250 * time.Millisecond):
		}
	}
}

func statusOf(p *corev1.Pod, container string) *corev1.ContainerStatus {
	i := slices.IndexFunc(p.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool { return s.Name == container })
	if i < 0 {
		return nil
	}
	return &p.Status.ContainerStatuses[i]
}

// killDaemons ends a daemon of every node.
func (c *chart) killDaemons(name string) error {
	for _, m := range c.b.Nodes {
		if err := m.Daemon(name).Kill(syscall.SIGKILL); err != nil {
			return err
		}
	}
	return nil
}

// A node is drained, as an admin does it: its pods with slices run elsewhere, tenants of other nodes work on, and the node is
// used again afterwards.
func chartDrain(t *testing.T, c *chart, crowd *crowd) {
	start := time.Now()
	node := c.nodes[2]
	c.deployment(t, "moves", 3, "affinity: {nodeAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 100, preference: {matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: ["+node.Name+"]}]}}]}}")
	for _, p := range c.deployed(t, "moves", 3) {
		if p.Spec.NodeName != node.Name {
			t.Errorf("%s is on %s, and prefers %s", p.Name, p.Spec.NodeName, node.Name)
		}
	}
	drained := phase(t, "drain")
	if out, err := c.b.Kubectl(t.Context(), "drain", node.Name, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=2m"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	drained()
	back := func() error {
		_, err := c.b.Kubectl(context.WithoutCancel(t.Context()), "uncordon", node.Name)
		return err
	}
	t.Cleanup(func() {
		if err := back(); err != nil {
			t.Error(err)
		}
	})
	for _, p := range c.deployed(t, "moves", 3) {
		if p.Spec.NodeName == node.Name {
			t.Errorf("%s is still on %s", p.Name, p.Spec.NodeName)
		}
		c.fill(t, &p, "c", halfUnits)
	}
	node.waitFor(t, "the tenants to be gone from its metrics", soon, func() error {
		metrics, err := node.metrics()
		for name := range metrics {
			if strings.Contains(name, `pod="moves`) {
				return errors.New(name)
			}
		}
		return err
	})
	if err := back(); err != nil {
		t.Fatal(err)
	}
	c.b.DeletePod(t, c.slice(t, "returned", node.Name))
	crowd.unmoved(t, "drain", start)
}

// The cluster is filled to its last half GPU; one pod more waits, is told why, and runs when there is room.
func chartFull(t *testing.T, c *chart) {
	// Two GPUs have a crowd.
	const room = 2 * (3*8 - 2)
	filled := phase(t, fmt.Sprint(room, " pods"))
	c.deployment(t, "fills", room, "")
	c.deployed(t, "fills", room)
	filled()
	extra := c.b.CreatePod(t, podOf("extra", container("c", "exec sleep 100000", 50, 8))+"  schedulerName: tranche-scheduler\n")
	c.b.WaitPod(t, extra, soon, "told why it waits", func(p *corev1.Pod) (bool, error) {
		for _, s := range p.Status.Conditions {
			if s.Type == corev1.PodScheduled && s.Status == corev1.ConditionFalse {
				t.Log(s.Message)
				return strings.Contains(s.Message, "Insufficient tencent.com/vcuda-core") || strings.Contains(s.Message, "asked 50 cores / 2 GiB: "), nil
			}
		}
		return false, nil
	})
	if out, err := c.b.Kubectl(t.Context(), "scale", "deploy/fills", fmt.Sprint("--replicas=", room-1)); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	c.b.WaitPhase(t, extra, corev1.PodRunning, 2*time.Minute)
	c.deployed(t, "fills", room-1)
}

// halfUnits of memory are had twice on a GPU, of which the driver takes some.
const halfUnits = 60

// deployment makes one of so many pods of half a GPU, until the end of the test; more is YAML of a pod.
func (c *chart) deployment(t *testing.T, name string, replicas int, more string) {
	t.Helper()
	c.b.Apply(t, fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: %[1]s}
spec:
  replicas: %[2]d
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      schedulerName: tranche-scheduler
      terminationGracePeriodSeconds: 1
      %[3]s
      containers:
      - name: c
        image: %[4]s
        imagePullPolicy: Never
        command: [sleep, "100000"]
        resources: {limits: {tencent.com/vcuda-core: 50, tencent.com/vcuda-memory: %[5]d}}
`, name, replicas, more, testImageName, halfUnits))
	t.Cleanup(func() {
		if _, err := c.b.Kubectl(context.WithoutCancel(t.Context()), "delete", "deployment", name, "--wait", "--cascade=foreground", "--timeout=2m"); err != nil {
			t.Error(err)
		}
	})
}

// deployed waits until a Deployment has so many pods, all of which run. None may have failed.
func (c *chart) deployed(t *testing.T, name string, running int) (out []corev1.Pod) {
	t.Helper()
	c.nodes[0].waitFor(t, fmt.Sprintf("%d pods of %s", running, name), 3*time.Minute, func() error {
		pods, err := c.b.Client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{LabelSelector: "app=" + name})
		if err != nil {
			return err
		}
		out = nil
		waiting := 0
		for _, p := range pods.Items {
			switch s := statusOf(&p, "c"); {
			case p.DeletionTimestamp != nil: // it fails, being killed
			case p.Status.Phase == corev1.PodFailed:
				t.Fatalf("%s: %s %s", p.Name, p.Status.Reason, p.Status.Message)
			case s != nil && s.Ready:
				out = append(out, p)
			default:
				waiting++
			}
		}
		if len(out) != running || waiting > 0 {
			return fmt.Errorf("%d run and %d wait", len(out), waiting)
		}
		return nil
	})
	return out
}
