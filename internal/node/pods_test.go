package node

import (
	"reflect"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"tranche.dev/tranche/internal/podspec"
)

// Kubelet tells of a new state of a pod with older annotations than it listed: its limits do not go back.
func TestOlderPod(t *testing.T) {
	names := podspec.DefaultNames()
	pod := func(cores string, phase corev1.PodPhase) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "1", Name: "p", Annotations: map[string]string{podspec.Cores: cores}},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{
				corev1.ResourceName(names.Core()): resource.MustParse("30"), corev1.ResourceName(names.Memory()): resource.MustParse("8")}}}}},
			Status: corev1.PodStatus{Phase: phase}}
	}
	table := newPodTable(names)
	for i, step := range []struct {
		pod   *corev1.Pod
		list  bool
		cores int
		over  bool
	}{
		{pod("30", corev1.PodPending), false, 30, false},
		{pod("20", corev1.PodRunning), true, 20, false},
		{pod("30", corev1.PodRunning), false, 20, false},
		{pod("30", corev1.PodFailed), false, 20, true},
		{pod("40", corev1.PodRunning), true, 40, false},
	} {
		if step.list {
			table.set([]*corev1.Pod{step.pod})
		} else {
			table.Changed(step.pod)
		}
		if got := table.get("1"); got.Changes[0].Cores != step.cores || got.Over != step.over {
			t.Errorf("step %d: %d cores, over %v; want %d, %v", i, got.Changes[0].Cores, got.Over, step.cores, step.over)
		}
	}
}

// After a reboot the allocations, which lay in memory, are gone; kubelet still has the mounts of the pods that it starts again.
func TestViewsAfterReboot(t *testing.T) {
	w := newWorld(t, "a100-80g", 12)
	pod := w.pod(nil, containerSpec{name: "c", cores: 30, units: 8})
	w.mustAdmit(pod)
	w.start(pod, "c")
	before, all := w.node.viewsInUse()
	if len(before) != 1 || !all {
		t.Fatalf("views %q, all %v", before, all)
	}
	for _, r := range w.node.store.List() {
		if err := w.node.store.Remove(r.ID); err != nil {
			t.Fatal(err)
		}
	}
	if after, all := w.node.viewsInUse(); !slices.Equal(after, before) || !all {
		t.Errorf("views in use without an allocation: %q, %v; want %q", after, all, before)
	}
}

// A pod that makes no sense is known by what is written in it, sidecars as such.
func TestWritten(t *testing.T) {
	names := podspec.DefaultNames()
	always := corev1.ContainerRestartPolicyAlways
	c := func(name string, policy *corev1.ContainerRestartPolicy) corev1.Container {
		return corev1.Container{Name: name, RestartPolicy: policy, Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceName(names.Core()): resource.MustParse("30")}}}
	}
	pod := &corev1.Pod{Spec: corev1.PodSpec{InitContainers: []corev1.Container{c("init", nil), c("side", &always)}, Containers: []corev1.Container{c("app", nil)}}}
	want := []podspec.Container{{Name: "init", Init: true, Cores: 30}, {Name: "side", Init: true, Sidecar: true, Cores: 30}, {Name: "app", Cores: 30}}
	if info := inform(pod, names); info == nil || info.Problem == "" || !reflect.DeepEqual(info.Written, want) {
		t.Errorf("%+v", info)
	}
}
