package bed

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// What follows is for tests: it fails them with what is needed to see why.

// Apply makes or changes the objects of a manifest, as kubectl apply does.
func (b *Bed) Apply(t testing.TB, manifest string) {
	t.Helper()
	_, err := b.Control.Run(t.Context(), Cmd{Argv: []string{"kubectl", "apply", "-f", "-"}, Stdin: strings.NewReader(manifest)})
	if err != nil {
		t.Fatal(err)
	}
}

// Cordon keeps new pods off nodes until the end of the test. A node on which GPUs were shared may offer some for a while after.
func (b *Bed) Cordon(t testing.TB, nodes ...*Machine) {
	t.Helper()
	for _, n := range nodes {
		if _, err := b.Kubectl(t.Context(), "cordon", n.Name); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if _, err := b.Kubectl(context.WithoutCancel(t.Context()), "uncordon", n.Name); err != nil {
				t.Error(err)
			}
		})
	}
}

// CreatePod makes a pod from YAML, in its namespace or default. It is deleted at the end of the test.
// What is not said in it and would only cost time is set: no image pulls, no ServiceAccount's token unless
// there is a serviceAccountName, and a grace period of 1 s at deletion. (With 0 the API server would
// forget the pod before its containers end.)
func (b *Bed) CreatePod(t testing.TB, manifest string) *corev1.Pod {
	t.Helper()
	pod := new(corev1.Pod)
	if err := yaml.UnmarshalStrict([]byte(manifest), pod); err != nil {
		t.Fatalf("pod: %v\n%s", err, manifest)
	}
	if pod.Namespace == "" {
		pod.Namespace = "default"
	}
	spec := &pod.Spec
	if spec.TerminationGracePeriodSeconds == nil {
		spec.TerminationGracePeriodSeconds = new(int64(1))
	}
	if spec.AutomountServiceAccountToken == nil && spec.ServiceAccountName == "" {
		spec.AutomountServiceAccountToken = new(bool)
	}
	for _, list := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range list {
			if list[i].ImagePullPolicy == "" {
				list[i].ImagePullPolicy = corev1.PullNever
			}
		}
	}
	made, err := b.Client.CoreV1().Pods(pod.Namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.deletePod(context.WithoutCancel(t.Context()), made); err != nil {
			t.Error(err)
		}
	})
	return made
}

// DeletePod deletes a pod and returns when it is gone, and its containers with it unless its grace
// period is 0.
func (b *Bed) DeletePod(t testing.TB, pod *corev1.Pod) {
	t.Helper()
	if err := b.deletePod(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
}

func (b *Bed) deletePod(ctx context.Context, pod *corev1.Pod) error {
	pods := b.Client.CoreV1().Pods(pod.Namespace)
	err := pods.Delete(ctx, pod.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(pod.UID))})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	if err != nil {
		return err
	}
	err = b.wait(ctx, "pod "+pod.Name+" to be gone", func(ctx context.Context) error {
		now, err := pods.Get(ctx, pod.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) || err == nil && now.UID != pod.UID {
			return nil
		}
		return errors.Join(errors.New("it is still there"), err)
	})
	if err != nil {
		return fmt.Errorf("%w\n%s", err, b.Explain(ctx, pod))
	}
	return nil
}

// WaitPod returns the pod once ok says so. When it does not within the time, or says why it never
// will, the test fails with Explain.
func (b *Bed) WaitPod(t testing.TB, pod *corev1.Pod, within time.Duration, what string, ok func(*corev1.Pod) (bool, error)) *corev1.Pod {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	var last *corev1.Pod
	var never error
	err := b.wait(ctx, fmt.Sprintf("pod %s: %s", pod.Name, what), func(ctx context.Context) error {
		now, err := b.Client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		last = now
		done, err := ok(now)
		if err != nil {
			never = err
			return nil
		}
		if !done {
			return fmt.Errorf("it is %s", now.Status.Phase)
		}
		return nil
	})
	if err = errors.Join(err, never); err != nil {
		t.Fatalf("%v\n%s", err, b.Explain(context.WithoutCancel(t.Context()), pod))
	}
	return last
}

// WaitPhase waits for a phase: Running means that all containers are ready. A pod that has ended in
// another phase fails the test at once.
func (b *Bed) WaitPhase(t testing.TB, pod *corev1.Pod, phase corev1.PodPhase, within time.Duration) *corev1.Pod {
	t.Helper()
	return b.WaitPod(t, pod, within, "to be "+string(phase), func(p *corev1.Pod) (bool, error) {
		now := p.Status.Phase
		if now != phase {
			if now == corev1.PodSucceeded || now == corev1.PodFailed {
				return false, fmt.Errorf("pod %s is %s: %s %s", p.Name, now, p.Status.Reason, p.Status.Message)
			}
			return false, nil
		}
		if phase == corev1.PodRunning {
			for _, c := range p.Status.ContainerStatuses {
				if !c.Ready {
					return false, nil
				}
			}
		}
		return true, nil
	})
}

// PodExec runs a command in a container ("" is the first) and returns its output.
func (b *Bed) PodExec(t testing.TB, pod *corev1.Pod, container string, argv ...string) string {
	t.Helper()
	out, err := b.TryPodExec(t.Context(), pod, container, argv...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TryPodExec is PodExec for a command that may fail.
func (b *Bed) TryPodExec(ctx context.Context, pod *corev1.Pod, container string, argv ...string) (string, error) {
	if container == "" {
		container = pod.Spec.Containers[0].Name
	}
	return b.Kubectl(ctx, append([]string{"exec", "-n", pod.Namespace, pod.Name, "-c", container, "--"}, argv...)...)
}

// PodLogs gives what a container ("" is the first) has written.
func (b *Bed) PodLogs(t testing.TB, pod *corev1.Pod, container string) string {
	t.Helper()
	text, err := b.Client.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{Container: container}).DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Events gives the events of a pod, oldest first, as "reason: message".
func (b *Bed) Events(ctx context.Context, pod *corev1.Pod) ([]string, error) {
	list, err := b.Client.CoreV1().Events(pod.Namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.uid=" + string(pod.UID)})
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range list.Items {
		out = append(out, e.Reason+": "+e.Message)
	}
	return out, nil
}

// Explain says all about a pod that may tell why it is not as it should be: status, events, the
// containers' last lines, and what its node's kubelet and containerd say.
func (b *Bed) Explain(ctx context.Context, pod *corev1.Pod) string {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	var out strings.Builder
	describe, err := b.Kubectl(ctx, "describe", "pod", "-n", pod.Namespace, pod.Name)
	fmt.Fprintf(&out, "--- kubectl describe\n%s", describe)
	if err != nil {
		fmt.Fprintln(&out, err)
	}
	for _, c := range append(pod.Spec.InitContainers, pod.Spec.Containers...) {
		logs, err := b.Client.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{Container: c.Name, TailLines: new(int64(20))}).DoRaw(ctx)
		if err == nil {
			fmt.Fprintf(&out, "--- logs of %s\n%s", c.Name, logs)
		}
	}
	now, err := b.Client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	if err != nil || now.Spec.NodeName == "" {
		fmt.Fprintf(&out, "--- kube-scheduler\n%s\n", Tail(b.logFile("control-kube-scheduler"), 20))
		return out.String()
	}
	if m := b.Node(now.Spec.NodeName); m != nil {
		for _, d := range m.allDaemons() {
			fmt.Fprintf(&out, "--- %s on %s\n%s\n", d.Name, m.Name, Tail(d.Log, 20))
		}
	}
	return out.String()
}

// Node gives a node by name, or nil.
func (b *Bed) Node(name string) *Machine {
	for _, m := range b.Nodes {
		if m.Name == name {
			return m
		}
	}
	return nil
}
