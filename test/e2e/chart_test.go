package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"tranche.dev/tranche/internal/inventory"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/test/e2e/bed"
	"tranche.dev/tranche/test/e2e/image"
)

const (
	chartImage     = "tranche.local/chart:1"
	chartImageNext = "tranche.local/chart:2" // the same, as the next version
	kubeRepository = "tranche.local/kube-scheduler"
	chartNamespace = "tranche"
	// Two groups of four GPUs that NVLink connects.
	chartGPUs  = "v100-32g:8"
	chartCores = "800"
)

// chart is the chart on the bed.
type chart struct {
	b     *bed.Bed
	dir   string
	nodes []*gpuNode // with GPUs, in the order of the bed's
}

// newChart puts the images on the nodes, and sees to it that nothing is left in the end.
func newChart(t *testing.T) *chart {
	t.Helper()
	b := shared.up(t)
	dir, err := filepath.Abs("../../deploy/helm/tranche")
	if err != nil {
		t.Fatal(err)
	}
	c := &chart{b: b, dir: dir}
	imported := phase(t, "images")
	files := chartImages(t, b)
	var nodes sync.WaitGroup
	for _, n := range b.Nodes {
		nodes.Go(func() {
			for _, file := range files {
				if err := n.ImportImage(t.Context(), file); err != nil {
					t.Error(err)
				}
			}
			if _, err := n.Exec(t.Context(), "ctr", "-n", "k8s.io", "images", "tag", "--force", chartImage, chartImageNext); err != nil {
				t.Error(err)
			}
		})
	}
	nodes.Wait()
	imported()
	if t.Failed() {
		t.FailNow()
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*time.Minute)
		defer cancel()
		if _, err := c.helm(ctx, "uninstall", "tranche", "--ignore-not-found", "--wait"); err != nil {
			t.Error(err)
		}
		for _, n := range b.Nodes {
			label(t, b, n.Name, "null")
			if _, err := n.Exec(ctx, "rm", "-rf", "/run/tranche", "/etc/gpu-manager"); err != nil {
				t.Error(err)
			}
			patch := fmt.Sprintf(`{"metadata": {"annotations": {%q: null}}}`, podspec.Inventory)
			if _, err := b.Client.CoreV1().Nodes().Patch(ctx, n.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
				t.Error(err)
			}
		}
	})
	return c
}

// chartImages are the image that `make images` makes, of this machine's processor, and kube-scheduler's.
func chartImages(t *testing.T, b *bed.Bed) []string {
	t.Helper()
	tranche, err := made(t)(image.Tranche(root, chartImage))
	if err != nil {
		t.Fatal(err)
	}
	kube, err := made(t)(image.KubeScheduler(kubeRepository+":"+b.Version, b.Program("kube-scheduler")), nil)
	if err != nil {
		t.Fatal(err)
	}
	return []string{tranche, kube}
}

// helm runs it on the control machine, in the chart's namespace.
func (c *chart) helm(ctx context.Context, args ...string) (string, error) {
	return c.b.Control.Exec(ctx, append([]string{"helm", "-n", chartNamespace}, args...)...)
}

// install installs the chart or changes it, as a user would: default values but images, and more of them.
func (c *chart) install(t *testing.T, more ...string) {
	t.Helper()
	out, err := c.helm(t.Context(), append([]string{"upgrade", "--install", "tranche", c.dir, "--create-namespace", "--reset-values",
		"--set", "image.repository=tranche.local/chart", "--set-string", "image.tag=1", "--set", "image.pullPolicy=Never",
		"--set", "scheduler.kubeScheduler.repository=" + kubeRepository}, more...)...)
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, out, c.explain(t))
	}
}

// explain is what a user would look at.
func (c *chart) explain(t *testing.T) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
	defer cancel()
	var all strings.Builder
	for _, what := range [][]string{{"get", "pods", "-A", "-o", "wide"}, {"get", "events", "-A"}, {"logs", "-n", chartNamespace, "-l", "app.kubernetes.io/component=node", "--prefix", "--tail=200"},
		{"logs", "-n", chartNamespace, "deploy/tranche-scheduler", "--all-containers", "--tail=30"}} {
		out, err := c.b.Kubectl(ctx, what...)
		fmt.Fprintf(&all, "--- kubectl %s: %v\n%s", strings.Join(what, " "), err, out)
	}
	return all.String()
}

// reach finds the pods of the DaemonSet, once they are ready.
func (c *chart) reach(t *testing.T) {
	t.Helper()
	c.nodes = nil
	for _, m := range c.b.Nodes {
		waitOffer(t, c.b, m.Name, chartCores)
		address := net.JoinHostPort(c.nodePod(t, m.Name).Status.PodIP, "5678")
		c.nodes = append(c.nodes, &gpuNode{Machine: m, b: c.b, http: &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
			DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) { return m.Dial(ctx, network, address) }}}})
	}
}

// nodePod is the DaemonSet's pod on a node.
func (c *chart) nodePod(t *testing.T, node string) *corev1.Pod {
	t.Helper()
	list, err := c.b.Client.CoreV1().Pods(chartNamespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=node", FieldSelector: "spec.nodeName=" + node})
	if err != nil || len(list.Items) != 1 {
		t.Fatalf("%d pods of the DaemonSet on %s: %v", len(list.Items), node, err)
	}
	return &list.Items[0]
}

func (c *chart) node(name string) *gpuNode {
	return c.nodes[slices.IndexFunc(c.nodes, func(n *gpuNode) bool { return n.Name == name })]
}

// inventory is what a node published.
func (c *chart) inventory(t *testing.T, node string) inventory.Node {
	t.Helper()
	n, err := c.b.Client.CoreV1().Nodes().Get(t.Context(), node, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	inv, err := inventory.Decode(n.Annotations[podspec.Inventory])
	if err != nil {
		t.Fatal(err)
	}
	return inv
}

// gpus are the positions of a container's GPUs on its node, as the node confirmed them.
func (c *chart) gpus(t *testing.T, pod *corev1.Pod, container string) []int {
	t.Helper()
	inv := c.inventory(t, pod.Spec.NodeName)
	var out []int
	for _, uuid := range c.node(pod.Spec.NodeName).place(t, pod, container)[container] {
		i := slices.IndexFunc(inv.GPUs, func(g inventory.GPU) bool { return g.UUID == uuid })
		if i < 0 {
			t.Fatalf("%s: %s is not on %s", pod.Name, uuid, pod.Spec.NodeName)
		}
		out = append(out, inv.GPUs[i].Index)
	}
	return out
}

// The chart with simulated GPUs, with default values otherwise: an installation is used, changed and removed.
func TestChart(t *testing.T) {
	c := newChart(t)
	for _, n := range c.b.Nodes {
		label(t, c.b, n.Name, `"enable"`)
	}
	installed := phase(t, "install to ready")
	c.install(t, chartValues...)
	installed()
	c.reach(t)
	for _, sub := range []struct {
		name string
		f    func(*testing.T, *chart)
	}{
		{"Services", chartServices},
		{"Accounts", chartAccounts},
		{"Webhook", chartWebhook},
		{"Examples", chartExamples},
		{"Upgrade", chartUpgrade},
		{"Failures", chartFailures},
		{"Uninstall", chartUninstall},
		{"Broken", chartBroken},
	} {
		t.Run(sub.name, func(t *testing.T) {
			sub.f(t, c)
			if t.Failed() {
				t.Log(c.explain(t))
			}
		})
	}
}

// chartValues are what the examples need beside the defaults.
var chartValues = []string{"--wait", "--timeout", "3m", "--set", "simulated=" + chartGPUs, "--set", "node.liveChange=on", "--set", "scheduler.quotaConfigMap=tranche-quota"}

// A Service's address leads to the pods behind it, from pods and from the control machine, where the API server calls webhooks.
func chartServices(t *testing.T, c *chart) {
	c.b.Apply(t, `
apiVersion: v1
kind: Service
metadata: {name: answers}
spec: {selector: {app: answers}, ports: [{port: 80, targetPort: 8080}]}
`)
	t.Cleanup(func() {
		if _, err := c.b.Kubectl(context.WithoutCancel(t.Context()), "delete", "service", "answers"); err != nil {
			t.Error(err)
		}
	})
	pod := c.b.CreatePod(t, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: answers, labels: {app: answers}}
spec:
  containers:
  - {name: c, image: %q, command: [sh, -c, "while echo it answers | nc -l -p 8080; do :; done"]}
`, testImageName))
	pod = c.b.WaitPhase(t, pod, corev1.PodRunning, soon)
	service, err := c.b.Client.CoreV1().Services("default").Get(t.Context(), "answers", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	address := service.Spec.ClusterIP
	for _, m := range append([]*bed.Machine{c.b.Control}, c.b.Nodes...) {
		c.node(pod.Spec.NodeName).waitFor(t, "the Service's answer on "+m.Name, soon, func() error {
			out, err := m.Exec(t.Context(), "busybox", "nc", "-w", "3", address, "80")
			if err == nil && out != "it answers\n" {
				err = fmt.Errorf("it says %q", out)
			}
			return err
		})
	}
	// A pod on the same node, whose answer does not leave it.
	other := c.b.WaitPhase(t, c.b.CreatePod(t, sleeper("asks", pod.Spec.NodeName)), corev1.PodRunning, soon)
	if out := c.b.PodExec(t, other, "", "nc", "-w", "3", address, "80"); out != "it answers\n" {
		t.Errorf("from a pod beside it: %q", out)
	}
}

// The chart goes, and a pod with a slice keeps it.
func chartUninstall(t *testing.T, c *chart) {
	pod := c.b.WaitPhase(t, c.b.CreatePod(t, podOf("stays", container("c", "exec sleep 100000", 30, 8))), corev1.PodRunning, soon)
	before := c.fill(t, pod, "c", 8)
	if out, err := c.helm(t.Context(), "uninstall", "tranche", "--wait"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if after := c.fill(t, pod, "c", 8); after != before {
		t.Errorf("%d MiB before and %d after the end of the node", before, after)
	}
}

// fill takes GPU memory in a container until it is refused; so much of a limit in units has to be had, but for a context.
func (c *chart) fill(t *testing.T, pod *corev1.Pod, container string, units int) int {
	t.Helper()
	out, err := c.b.TryPodExec(t.Context(), pod, container, "gpuload", "--json", "--alloc", "plain:64Mi")
	var alloc struct {
		Bytes uint64
		Error string
	}
	if err == nil {
		err = json.Unmarshal([]byte(out), &alloc)
	}
	got, limit := int(alloc.Bytes>>20), units*unitMiB
	if err != nil || alloc.Error != "CUDA_ERROR_OUT_OF_MEMORY" || got > limit || got < limit-1536 {
		t.Errorf("%s/%s with %d MiB got %d: %v\n%s", pod.Name, container, limit, got, err, out)
	}
	return got
}

// label sets the label that chooses nodes; value is JSON.
func label(t *testing.T, b *bed.Bed, node, value string) {
	t.Helper()
	patch := fmt.Sprintf(`{"metadata": {"labels": {"nvidia-device-enable": %s}}}`, value)
	if _, err := b.Client.CoreV1().Nodes().Patch(context.WithoutCancel(t.Context()), node, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Error(err)
	}
}

// waitOffer waits until a node offers so many cores.
func waitOffer(t *testing.T, b *bed.Bed, name, cores string) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), soon, errors.New("the node does not offer its GPUs"))
	defer cancel()
	for {
		n, err := b.Client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		if err == nil {
			if q := n.Status.Allocatable[coreName]; q.String() == cores {
				return
			}
		}
		select {
		case <-ctx.Done():
			t.Fatal(context.Cause(ctx), err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}
