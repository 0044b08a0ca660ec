package e2e

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"tranche.dev/tranche/internal/kubelet"
	"tranche.dev/tranche/internal/podspec"
)

// annotate sets annotations of a pod.
func (n *gpuNode) annotate(t *testing.T, pod *corev1.Pod, pairs ...string) {
	t.Helper()
	var set []string
	for i := 0; i+1 < len(pairs); i += 2 {
		set = append(set, fmt.Sprintf("%q: %q", pairs[i], pairs[i+1]))
	}
	patch := fmt.Sprintf(`{"metadata": {"annotations": {%s}}}`, strings.Join(set, ", "))
	if _, err := n.b.Client.CoreV1().Pods(pod.Namespace).Patch(t.Context(), pod.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

// Annotations change the limits of a running pod within 2 s; what the GPU has not free is refused.
func nodeLiveChange(t *testing.T, n *gpuNode) {
	needNvidiaSMI(t)
	n.deleteAll(t)
	pod := n.b.CreatePod(t, podOf("changes", container("c", load, 30, 32), podspec.UUIDs, gpuUUID(0)))
	fill := n.b.CreatePod(t, podOf("neighbour", container("c", load, 20, 32), podspec.UUIDs, gpuUUID(0)))
	pod, fill = n.b.WaitPhase(t, pod, corev1.PodRunning, soon), n.b.WaitPhase(t, fill, corev1.PodRunning, soon)
	want := func(p *corev1.Pod, cores, ceiling float64, mib int, busy float64) {
		t.Helper()
		start := time.Now()
		for {
			all, err := n.metrics()
			if err != nil {
				t.Fatal(err)
			}
			a, _ := ofTenant(all, "tranche_tenant_cores", p, "c")
			b, _ := ofTenant(all, "tranche_tenant_cores_ceiling", p, "c")
			m, _ := ofTenant(all, "tranche_tenant_memory_limit_bytes", p, "c")
			if a == cores && b == ceiling && m == float64(mib)*(1<<20) {
				break
			}
			if time.Since(start) > 5*time.Second {
				t.Fatalf("%s has %v to %v cores and %v MiB, want %v to %v and %d", p.Name, a, b, m/(1<<20), cores, ceiling, mib)
			}
			time.Sleep(50 * time.Millisecond)
		}
		took := time.Since(start)
		t.Logf("%v to %v cores and %d MiB %.2f s after the annotation", cores, ceiling, mib, took.Seconds())
		if took > 2*time.Second {
			t.Errorf("the change took %v, want 2 s at most", took)
		}
		if out := n.b.PodExec(t, p, "c", "nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"); strings.TrimSpace(out) != fmt.Sprint(mib) {
			t.Errorf("nvidia-smi shows %q, want %d", out, mib)
		}
		n.wantShares(t, "both", 1.5, owed(5*time.Second), map[string]float64{"": busy}, func() map[string]float64 {
			return map[string]float64{"": n.busy(t, 5*time.Second)[0]}
		})
	}
	n.annotate(t, pod, podspec.Cores, "20", podspec.Memory, "6Gi")
	want(pod, 20, 20, 6144, 40)
	n.waitEvent(t, pod, "GPULimitsChanged")
	n.annotate(t, pod, podspec.Cores, "60", podspec.Memory, "10Gi")
	want(pod, 60, 60, 10240, 80)
	n.annotate(t, fill, podspec.Cores, "45")
	n.waitEvent(t, fill, "GPULimitsRefused")
	want(fill, 20, 20, 8192, 80)
	// What was raised is nobody else's to have, although kubelet's IDs are free.
	n.refused(t, podOf("no-room", container("c", load, 30, 8), podspec.UUIDs, gpuUUID(0)))
	n.annotate(t, pod, podspec.Cores, "10", "tencent.com/vcuda-core-limit", "35")
	want(pod, 10, 35, 10240, 80)
	want(fill, 45, 45, 8192, 80) // what was refused before has room by now
}

// Where kubelet does not tell of its pods (before 1.36) the API server does: pods of equal size have their own limits all the same.
func nodePodsFromAPIServer(t *testing.T, n *gpuNode) {
	n.restart(t, "--pods-from=apiserver")
	// Four of each size at once: whose call it is shows by the order in which kubelet heard of them.
	t.Run("TwentyReservedPods", func(t *testing.T) {
		needNvidiaSMI(t)
		n.twentyReserved(t)
	})
	n.deleteAll(t)
	asked := []struct{ cores, ceiling, units int }{{30, 60, 16}, {30, 30, 16}, {30, 90, 16}, {20, 20, 32}, {0, 100, 32}}
	var pods []*corev1.Pod
	for i, a := range asked {
		pods = append(pods, n.b.CreatePod(t, podOf(fmt.Sprintf("told-%d", i), container("c", load, a.cores, a.units), "tencent.com/vcuda-core-limit", fmt.Sprint(a.ceiling))))
	}
	for i, a := range asked {
		pods[i] = n.b.WaitPhase(t, pods[i], corev1.PodRunning, soon)
		all, err := n.metrics()
		if err != nil {
			t.Fatal(err)
		}
		for name, want := range map[string]int{"tranche_tenant_cores": a.cores, "tranche_tenant_cores_ceiling": a.ceiling, "tranche_tenant_memory_limit_bytes": a.units << 28} {
			if got, err := ofTenant(all, name, pods[i], "c"); err != nil || got != float64(want) {
				t.Errorf("%s: %s is %v, want %d; %v", pods[i].Name, name, got, want, err)
			}
		}
	}
	n.annotate(t, pods[3], podspec.Cores, "10")
	n.waitEvent(t, pods[3], "GPULimitsChanged")
}

// A program opens the vendor's library by its path. The node sees it, says so, and ends it if it is told to.
func nodeBypass(t *testing.T, n *gpuNode) {
	around := "exec gpuload --libcuda /usr/local/nvidia/driver/libcuda-driver.so.1 --kernel 2ms --time 100000"
	for _, done := range []string{"report", "kill"} {
		t.Run(done, func(t *testing.T) {
			if done == "kill" {
				n.restart(t, "--bypass=kill")
			}
			pod := n.b.WaitPhase(t, n.b.CreatePod(t, podOf("around-"+done, container("honest", load, 20, 16)+container("c", around, 20, 16), podspec.Together, "*")), corev1.PodRunning, soon)
			seen := phase(t, "Running until the event")
			action := map[string]string{"report": "reported", "kill": "ended"}[done]
			event := n.waitEvent(t, pod, "GPUBypass")
			seen()
			if !strings.Contains(event, "container c:") || !strings.Contains(event, action) {
				t.Errorf("event %q", event)
			}
			all, err := n.metrics()
			key := fmt.Sprintf(`tranche_violations_total{kind="unregistered",action=%q}`, action)
			other := fmt.Sprintf(`tranche_violations_total{action=%q,kind="unregistered"}`, action)
			if err != nil || max(all[key], all[other]) < 1 {
				t.Errorf("no %s; %v", key, err)
			}
			n.b.WaitPod(t, pod, soon, "to be as it should", func(p *corev1.Pod) (bool, error) {
				for _, s := range p.Status.ContainerStatuses {
					if s.Name == "honest" && s.RestartCount > 0 {
						return false, errors.New("the honest container was ended")
					}
					if s.Name == "c" && (s.RestartCount > 0) == (done == "kill") {
						return true, nil
					}
				}
				return false, nil
			})
		})
	}
}

// A pod from kubelet's directory is a tenant like any other.
func nodeStaticPod(t *testing.T, n *gpuNode) {
	name := n.static(t, podOf("static-gpu", container("c", load, 30, 16)))
	pod := &corev1.Pod{}
	pod.Name, pod.Namespace = name, "default"
	n.waitFor(t, "the static pod to work", soon, func() error {
		all, err := n.metrics()
		if err != nil {
			return err
		}
		got, err := ofTenant(all, "tranche_tenant_processes", pod, "c")
		if err == nil && got != 1 {
			err = fmt.Errorf("%v processes", got)
		}
		return err
	})
	all, err := n.metrics()
	for metric, want := range map[string]float64{"tranche_tenant_cores": 30, "tranche_tenant_memory_limit_bytes": 16 * unitMiB << 20} {
		if got, missing := ofTenant(all, metric, pod, "c"); got != want {
			t.Errorf("%s: %v, want %v; %v %v", metric, got, want, missing, err)
		}
	}
	n.wantShares(t, "share", 1.5, 0, map[string]float64{"": 30}, func() map[string]float64 {
		return map[string]float64{"": slices.Max(n.busy(t, 5*time.Second))}
	})
}

// Kubelet's Topology Manager in its strict policies has nothing to say while the node gives no hints.
func nodeTopologyManager(t *testing.T, n *gpuNode) {
	t.Cleanup(func() {
		if err := n.RestartKubelet(""); err != nil {
			t.Error(err)
		}
		n.waitAllocatable(t, nodeGPUs*100)
	})
	for _, policy := range []string{"restricted", "single-numa-node"} {
		if err := n.RestartKubelet("topologyManagerPolicy: " + policy + "\n"); err != nil {
			t.Fatal(err)
		}
		n.waitFor(t, "all devices to be allocatable", soon, func() error {
			got, err := n.allocatable(t.Context())
			if want := nodeGPUs * (100 + n.units); err == nil && got != want {
				err = fmt.Errorf("%d are, want %d", got, want)
			}
			return err
		})
		if n.kubeletTells() {
			// A pod that comes while kubelet admits its first ones is not listed: of its first call nobody can say what comes next.
			pods, err := kubelet.NewPods(n.Path("/var/lib/kubelet/pods-api/pods-api.sock"), func(*corev1.Pod) {})
			if err != nil {
				t.Fatal(err)
			}
			n.waitFor(t, "kubelet to list its pods", soon, func() error { _, err := pods.List(t.Context()); return err })
			if err := pods.Close(); err != nil {
				t.Error(err)
			}
		}
		pod := n.b.WaitPhase(t, n.b.CreatePod(t, podOf("policy-"+policy, container("a", load, 60, 8)+container("b", load, 60, 8))), corev1.PodRunning, soon)
		where := n.place(t, pod, "a", "b")
		if slices.Equal(where["a"], where["b"]) {
			t.Errorf("%s: 120 cores of one GPU: %q", policy, where)
		}
		n.b.DeletePod(t, pod)
	}
}

// The node as a pod of a DaemonSet, with the rights of its own account and no others.
func nodeDaemonSet(t *testing.T, n *gpuNode) {
	if !n.kubeletTells() {
		t.Skip("testdata/node.yaml mounts the socket of kubelet's pods service, on by default from 1.37; without it TestChart runs the node as a pod")
	}
	n.d.Stop()
	t.Cleanup(func() {
		if err := n.d.Start(); err != nil {
			t.Error(err)
		}
		n.waitFor(t, "the daemon to be ready again", soon, func() error { _, err := n.get("/readyz"); return err })
	})
	tar, err := trancheImage(t)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.ImportImage(t.Context(), tar); err != nil {
		t.Fatal(err)
	}
	// The same simulated host goes on, so that its nvidia-smi is there.
	file, err := filepath.Abs("testdata/node.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.b.Kubectl(t.Context(), "apply", "-f", file); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := n.b.Kubectl(context.WithoutCancel(t.Context()), "delete", "-f", file, "--wait", "--cascade=foreground", "--timeout=1m"); err != nil {
			t.Error(err)
		}
	})
	ready := phase(t, "DaemonSet to Ready")
	n.waitFor(t, "the DaemonSet's pod to be ready", 2*time.Minute, func() error {
		d, err := n.b.Client.AppsV1().DaemonSets("kube-system").Get(t.Context(), "tranche-node", metav1.GetOptions{})
		if err == nil && d.Status.NumberReady != 1 {
			logs, _ := n.b.Kubectl(t.Context(), "logs", "-n", "kube-system", "-l", "app=tranche-node", "--tail=20")
			err = fmt.Errorf("%d are ready of %d\n%s", d.Status.NumberReady, d.Status.DesiredNumberScheduled, logs)
		}
		return err
	})
	ready()
	n.waitAllocatable(t, nodeGPUs*100)
	pod := n.b.WaitPhase(t, n.b.CreatePod(t, podOf("under-daemonset", container("c", load, 30, 32))), corev1.PodRunning, soon)
	gpu := n.gpuOf(t, pod)
	n.wantBusy(t, "share", gpu, 30, 1, 10*time.Second)
	n.waitEventOf(t, pod)
	all, err := n.metrics()
	if got, missing := ofTenant(all, "tranche_tenant_processes", pod, "c"); err != nil || got != 1 {
		t.Errorf("its process is not known: %v, %v, %v", got, missing, err)
	}
	out, err := n.Exec(t.Context(), "sh", "-c", "kubectl auth can-i --list --as=system:serviceaccount:kube-system:tranche-node | grep -cE 'secrets|configmaps' || true")
	if err != nil || strings.TrimSpace(out) != "0" {
		t.Errorf("the account can see secrets or configmaps: %q, %v", out, err)
	}
}

// waitEventOf: a live change tells that events can be written by the account.
func (n *gpuNode) waitEventOf(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	n.annotate(t, pod, podspec.Cores, "20")
	n.waitEvent(t, pod, "GPULimitsChanged")
	n.annotate(t, pod, podspec.Cores, "30")
}
