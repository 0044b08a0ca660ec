package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"tranche.dev/tranche/internal/podspec"
)

const (
	webhookName = "tranche-webhook"
	gpuUnits    = 128 // of a v100-32g
)

// The webhook as the chart installs it: unchanged pods of gpu-manager and HAMi run with their limits, what has no
// translation is refused, and without it pods are made as failurePolicy says.
func chartWebhook(t *testing.T, c *chart) {
	for _, sub := range []struct {
		name string
		f    func(*testing.T, *chart)
	}{
		{"GPUManager", webhookGPUManager},
		{"TimeSlicing", webhookTimeSlicing},
		{"HAMi", webhookHAMi},
		{"Refused", webhookRefused},
		{"LeftAlone", webhookLeftAlone},
		{"Trust", webhookTrust},
		{"Rights", func(t *testing.T, c *chart) { wantRights(t, c, nil, webhookName) }},
		{"Down", webhookDown},
	} {
		t.Run(sub.name, func(t *testing.T) { sub.f(t, c) })
	}
	c.install(t, chartValues...)
	c.webhooks(t, 2)
}

// guide runs the commands of a page of the documentation as they are written, but for what is in capitals or lies elsewhere here.
// Tranche is installed already. It returns what they said.
func (c *chart) guide(t *testing.T, page, manifest string) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/" + page)
	if err != nil {
		t.Fatal(err)
	}
	here := strings.NewReplacer("=NODE:", "=NODE:", "NODE", c.b.Nodes[2].Name, "TEAM", "default", "NAMESPACE", "default", "build/chart/tranche-*.tgz", c.dir, "vcuda.yaml", manifest)
	var said strings.Builder
	ran := 0
	joined := strings.ReplaceAll(string(text), "\\\n", " ")
	for _, command := range regexp.MustCompile(`(?m)^    +((?:kubectl|helm) .*)$`).FindAllStringSubmatch(joined, -1) {
		if strings.HasPrefix(command[1], "helm install ") {
			continue
		}
		line := here.Replace(command[1])
		out, err := c.b.Control.Exec(t.Context(), "sh", "-c", line)
		fmt.Fprintf(&said, "$ %s\n%s\n", line, out)
		if ran++; err != nil {
			t.Errorf("%s: %s: %v", page, line, err)
		}
	}
	t.Log(said.String())
	if ran < 2 {
		t.Errorf("%s has %d commands", page, ran)
	}
	c.webhooks(t, 2) // those of before an upgrade are gone
	return said.String()
}

// foreign is a pod as others' users write it: it names neither scheduler nor anything of Tranche's.
func foreign(name, limits string, annotations ...string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: default, annotations: {%s}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: c
    image: %s
    imagePullPolicy: Never
    command: [gpuload, --kernel, 1ms, --time, "100000"]
    resources: {limits: {%s}}
`, name, strings.Join(annotations, ", "), testImageName, limits)
}

// foreign makes such a pod.
func (c *chart) foreign(t *testing.T, name, limits string, annotations ...string) (*corev1.Pod, error) {
	t.Helper()
	var pod corev1.Pod
	if err := yaml.UnmarshalStrict([]byte(foreign(name, limits, annotations...)), &pod); err != nil {
		t.Fatal(err)
	}
	made, err := c.b.Client.CoreV1().Pods("default").Create(t.Context(), &pod, metav1.CreateOptions{})
	if err == nil {
		t.Cleanup(func() { c.remove(t, name) })
	}
	return made, err
}

// remove deletes a pod and waits for its end, after a test too.
func (c *chart) remove(t *testing.T, name string) {
	if out, err := c.b.Kubectl(context.WithoutCancel(t.Context()), "delete", "pod", name, "--ignore-not-found", "--wait", "--timeout=1m"); err != nil {
		t.Errorf("%v %s", err, out)
	}
}

// runs makes such a pod, which must go to Tranche's scheduler, and waits for it.
func (c *chart) runs(t *testing.T, name, limits string, annotations ...string) *corev1.Pod {
	t.Helper()
	pod, err := c.foreign(t, name, limits, annotations...)
	if err != nil {
		t.Fatal(err)
	}
	if pod.Spec.SchedulerName != "tranche-scheduler" {
		t.Errorf("%s has scheduler %s", name, pod.Spec.SchedulerName)
	}
	return c.b.WaitPhase(t, pod, corev1.PodRunning, soon)
}

// webhooks waits until so many are there, those that end included.
func (c *chart) webhooks(t *testing.T, n int) {
	t.Helper()
	c.nodes[0].waitFor(t, fmt.Sprint(n, " webhooks"), soon, func() error {
		pods, err := c.b.Client.CoreV1().Pods(chartNamespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=webhook"})
		if err == nil && len(pods.Items) != n {
			err = fmt.Errorf("%d are there", len(pods.Items))
		}
		return err
	})
}

func webhookGPUManager(t *testing.T, c *chart) {
	c.b.Apply(t, fmt.Sprintf(`
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: gpu-manager-daemonset, namespace: kube-system}
spec:
  selector: {matchLabels: {name: gpu-manager-ds}}
  template:
    metadata: {labels: {name: gpu-manager-ds}}
    spec: {nodeSelector: {none: none}, containers: [{name: c, image: %q}]}
`, testImageName))
	manifest := filepath.Join(t.TempDir(), "vcuda.yaml")
	if err := os.WriteFile(manifest, []byte(foreign("vcuda", "tencent.com/vcuda-core: 50, tencent.com/vcuda-memory: 30")), 0o644); err != nil {
		t.Fatal(err)
	}
	if said := c.guide(t, "migrate-gpu-manager.md", manifest); !strings.Contains(said, "tranche-scheduler") {
		t.Error("the pod was not sent to Tranche's scheduler")
	}
	pod, err := c.b.Client.CoreV1().Pods("default").Get(t.Context(), "vcuda", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.remove(t, "vcuda") })
	pod = c.b.WaitPhase(t, pod, corev1.PodRunning, soon)
	c.fill(t, pod, "c", 30)
	gpus := c.gpus(t, pod, "c")
	c.node(pod.Spec.NodeName).wantTenantsOf(t, gpus[0], map[tenant]float64{{pod, "c"}: 50})
}

// What the guide gives to pods of four replicas.
func webhookTimeSlicing(t *testing.T, c *chart) {
	c.guide(t, "migrate-nvidia-time-slicing.md", "")
	pod := c.runs(t, "replica", "nvidia.com/gpu: 1")
	c.fill(t, pod, "c", 40)
	gpus := c.gpus(t, pod, "c")
	c.node(pod.Spec.NodeName).wantTenantsOf(t, gpus[0], map[tenant]float64{{pod, "c"}: 25})
	c.install(t, chartValues...)
}

// The shapes of HAMi's examples, on GPUs of 32 GiB.
func webhookHAMi(t *testing.T, c *chart) {
	c.guide(t, "migrate-hami.md", "")
	for _, e := range []struct {
		name, limits string
		annotations  []string
		gpus, cores  int // of each
		units        int // of each
	}{
		{"default-use", "nvidia.com/gpu: 2, nvidia.com/gpumem: 3000, nvidia.com/gpucores: 30", nil, 2, 30, 12},
		{"as-normal", "nvidia.com/gpu: 2", nil, 2, 100, gpuUnits},
		{"exclusive", "nvidia.com/gpu: 2, nvidia.com/gpumem-percentage: 100, nvidia.com/gpucores: 100", nil, 2, 100, gpuUnits},
		{"fraction", "nvidia.com/gpu: 2, nvidia.com/gpumem-percentage: 50, nvidia.com/gpucores: 30", nil, 2, 30, gpuUnits / 2},
		{"sharing", "nvidia.com/gpu: 1, nvidia.com/gpumem-percentage: 40, nvidia.com/gpucores: 60", nil, 1, 60, gpuUnits * 40 / 100},
		{"memory", "nvidia.com/gpu: 1, nvidia.com/gpumem: 4000", []string{"hami.io/gpu-scheduler-policy: binpack"}, 1, 1, 16},
		{"model", "nvidia.com/gpu: 1", []string{`nvidia.com/use-gputype: "A100,V100"`, `nvidia.com/nouse-gputype: "1080,2080"`}, 1, 100, gpuUnits},
	} {
		t.Run(e.name, func(t *testing.T) {
			if e.name != "sharing" { // which is measured, so it is alone on its GPU
				t.Parallel()
			}
			pod := c.runs(t, e.name, e.limits, e.annotations...)
			ask, err := podspec.Parse(pod, podspec.DefaultNames())
			if err != nil || len(ask.Containers) != 1 {
				t.Fatalf("%v %+v", err, ask)
			}
			if r := ask.Containers[0].Request; r.Count != e.gpus || r.Cores != e.cores {
				t.Errorf("%+v, want %d GPUs, %d cores of each", r, e.gpus, e.cores)
			}
			gpus := c.gpus(t, pod, "c")
			if len(gpus) != e.gpus {
				t.Errorf("GPUs %v, want %d", gpus, e.gpus)
			}
			// gpuload takes the first.
			c.fill(t, pod, "c", e.units)
			if e.name == "sharing" {
				c.node(pod.Spec.NodeName).wantTenantsOf(t, gpus[0], map[tenant]float64{{pod, "c"}: float64(e.cores)})
			}
		})
	}
}

func webhookRefused(t *testing.T, c *chart) {
	_, err := c.foreign(t, "mig", "nvidia.com/gpu: 1, nvidia.com/gpumem: 8000", "nvidia.com/vgpu-mode: mig")
	const want = `admission webhook "pods.tranche.dev" denied the request: tranche: nvidia.com/vgpu-mode: "mig": Tranche shares whole GPUs by its library only`
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
}

// Pods, and namespaces, that say so stay as they are; others have nothing to do with it.
func webhookLeftAlone(t *testing.T, c *chart) {
	say := func(value string) {
		patch := fmt.Sprintf(`{"metadata": {"labels": {"tranche.dev/webhook": %s}}}`, value)
		if _, err := c.b.Client.CoreV1().Namespaces().Patch(context.WithoutCancel(t.Context()), "default", types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	say(`"ignore"`)
	t.Cleanup(func() { say("null") })
	// The API server hears of the label a little later.
	c.nodes[0].waitFor(t, "a pod that is left alone", soon, func() error {
		pod, err := c.foreign(t, fmt.Sprintf("alone-%d", time.Now().UnixNano()), "nvidia.com/gpu: 1")
		if q := pod.Spec.Containers[0].Resources.Limits["nvidia.com/gpu"]; err == nil && (q.Value() != 1 || pod.Spec.SchedulerName != corev1.DefaultSchedulerName) {
			err = fmt.Errorf("%+v", pod.Spec)
		}
		return err
	})
}

// Somebody takes the authority out of the configuration: it is back, and pods are translated again.
func webhookTrust(t *testing.T, c *chart) {
	patch := `[{"op": "remove", "path": "/webhooks/0/clientConfig/caBundle"}]`
	if _, err := c.b.Client.AdmissionregistrationV1().MutatingWebhookConfigurations().Patch(t.Context(), webhookName, types.JSONPatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	took := c.nodes[0].waitFor(t, "the authority to be back", soon, func() error {
		w, err := c.b.Client.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(t.Context(), webhookName, metav1.GetOptions{})
		if err == nil && len(w.Webhooks[0].ClientConfig.CABundle) == 0 {
			err = fmt.Errorf("nobody is trusted")
		}
		return err
	})
	t.Logf("trusted again after %v", took)
	c.nodes[0].waitFor(t, "a translated pod", soon, func() error {
		pod, err := c.foreign(t, fmt.Sprintf("trust-%d", time.Now().UnixNano()), "nvidia.com/gpu: 1, nvidia.com/gpumem: 256")
		if err == nil && pod.Spec.SchedulerName != "tranche-scheduler" {
			err = fmt.Errorf("scheduler %s", pod.Spec.SchedulerName)
		}
		return err
	})
}

// Without a webhook: with Ignore a pod goes to the cluster's own scheduler, and its node places it and holds it to its
// limits all the same; with Fail it is not made, and the API server names the webhook.
func webhookDown(t *testing.T, c *chart) {
	scale := func(n int) {
		if out, err := c.b.Kubectl(t.Context(), "scale", "-n", chartNamespace, "deploy/"+webhookName, fmt.Sprint("--replicas=", n)); err != nil {
			t.Fatalf("%v %s", err, out)
		}
		c.webhooks(t, n)
	}
	scale(0)
	pod, err := c.foreign(t, "ignored", "tencent.com/vcuda-core: 30, tencent.com/vcuda-memory: 8")
	if err != nil {
		t.Fatal(err)
	}
	if pod.Spec.SchedulerName != corev1.DefaultSchedulerName {
		t.Errorf("scheduler %s, with no webhook", pod.Spec.SchedulerName)
	}
	pod = c.b.WaitPhase(t, pod, corev1.PodRunning, soon)
	c.fill(t, pod, "c", 8)
	c.b.DeletePod(t, pod)

	policy := func(value string) {
		patch := fmt.Sprintf(`[{"op": "replace", "path": "/webhooks/0/failurePolicy", "value": %q}]`, value)
		if _, err := c.b.Client.AdmissionregistrationV1().MutatingWebhookConfigurations().Patch(t.Context(), webhookName, types.JSONPatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	policy("Fail")
	c.nodes[0].waitFor(t, "a pod that is not made", soon, func() error {
		_, err := c.foreign(t, fmt.Sprintf("failed-%d", time.Now().UnixNano()), "tencent.com/vcuda-core: 30, tencent.com/vcuda-memory: 8")
		if err == nil || !strings.Contains(err.Error(), `failed calling webhook "pods.tranche.dev"`) {
			return fmt.Errorf("%w: no word of the webhook", err)
		}
		t.Log(err)
		return nil
	})
	// Pods without GPUs are not held up.
	if _, err := c.foreign(t, "plain", "cpu: 1m"); err != nil {
		t.Error(err)
	}
	// As Helm left it.
	policy("Ignore")
	scale(2)
}
