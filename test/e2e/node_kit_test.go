package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"tranche.dev/tranche/internal/kubelet"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/test/e2e/bed"
)

const (
	coreName   = "tencent.com/vcuda-core"
	memoryName = "tencent.com/vcuda-memory"
	unitMiB    = 256

	nodeGPUs   = 4
	nodeDaemon = "tranche-node"
	simDir     = "/run/tranche/sim"
	specFile   = "/etc/tranche-gpus" // on the disk, so that it is there after a reboot
	podsSocket = "/var/lib/kubelet/pod-resources/kubelet.sock"
)

// soon is a deadline of what takes a second or two on a quiet machine.
const soon = time.Minute

// gpuUUID is the GPU at a position of the machine as it begins.
func gpuUUID(i int) string { return fmt.Sprintf("GPU-5e110000-0000-4000-8000-00000000000%d", i) }

// gpuSpec is the simulated machine with its GPUs in this order.
func gpuSpec(order ...int) string {
	var b strings.Builder
	for _, i := range order {
		fmt.Fprintf(&b, "gpu model=a100-40g uuid=%s\n", gpuUUID(i))
	}
	return b.String()
}

// gpuNode is the machine with GPUs: `tranche node` over simulated ones is a daemon there.
type gpuNode struct {
	*bed.Machine
	b     *bed.Bed
	d     *bed.Daemon
	http  *http.Client
	units int // of memory that a GPU has
}

// ready begins a test of the node.
func (n *gpuNode) ready(t *testing.T) *gpuNode {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("--- %s\n%s", nodeDaemon, bed.Tail(n.d.Log, 60))
		}
	})
	n.units = n.waitAllocatable(t, nodeGPUs*100) / nodeGPUs
	return n
}

// end takes the GPUs off the node again.
func (n *gpuNode) end(ctx context.Context) error {
	n.d.Stop()
	patch := fmt.Sprintf(`{"metadata": {"annotations": {%q: null}}}`, podspec.Inventory)
	_, err := n.b.Client.CoreV1().Nodes().Patch(ctx, n.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	return err
}

func startGPUNode(ctx context.Context, b *bed.Bed, m *bed.Machine) (*gpuNode, error) {
	n := &gpuNode{Machine: m, b: b}
	n.http = &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) { return m.Dial(ctx, network, addr) }}}
	if err := os.WriteFile(m.Path(specFile), []byte(gpuSpec(0, 1, 2, 3)), 0o644); err != nil {
		return nil, err
	}
	argv, err := nodeCommand(b, m)
	if err != nil {
		return nil, err
	}
	n.d, err = m.Start(nodeDaemon, argv...)
	return n, err
}

// nodeCommand starts `tranche node` with more flags. NVIDIA's own nvidia-smi is in the simulated host, if it was
// fetched; /run is empty after a reboot.
func nodeCommand(b *bed.Bed, m *bed.Machine, flags ...string) ([]string, error) {
	program, err := filepath.Abs("../../build/bin/tranche")
	if err != nil {
		return nil, err
	}
	script := "exec \"$@\""
	if smi := nvidiaSMI(); smi != "" {
		script = fmt.Sprintf("mkdir -p %[1]s/root/usr/bin && cp %[2]s %[1]s/root/usr/bin/ && ", simDir, smi) + script
	}
	return append([]string{"sh", "-c", script, "sh", program, "node", "--sim=" + specFile, "--sim-dir=" + simDir,
		"--virtual-manager-path=/run/tranche/vm", "--kubeconfig=" + b.Kubeconfig("admin"), "--hostname-override=" + m.Name,
		"--query-addr=127.0.0.1", "--live-change=on", "--v=5"}, flags...), nil
}

// nvidiaSMI is NVIDIA's own, of the simulated driver's release; empty if it was not fetched.
func nvidiaSMI() string {
	path, err := filepath.Abs("../../build/nvidia/550/nvidia-smi")
	if err != nil || !exists(path) {
		return ""
	}
	return path
}

func needNvidiaSMI(t *testing.T) {
	t.Helper()
	if nvidiaSMI() == "" {
		t.Skip("needs NVIDIA's nvidia-smi: `make nvidia` gets it")
	}
}

// kubeletTells is true where kubelet has its pods service by default. Without it nobody knows a static pod while the API server
// is away.
func (n *gpuNode) kubeletTells() bool { return n.b.AtLeast(37) }

// restart runs the daemon with other flags until the end of the test.
func (n *gpuNode) restart(t *testing.T, flags ...string) {
	t.Helper()
	set := func(flags ...string) {
		argv, err := nodeCommand(n.b, n.Machine, flags...)
		if err != nil {
			t.Error(err)
			return
		}
		n.d.Stop()
		n.d.SetCmd(bed.Cmd{Argv: argv})
		if err := n.d.Start(); err != nil {
			t.Error(err)
		}
		n.waitFor(t, "the node to be ready", soon, func() error { _, err := n.get("/readyz"); return err })
	}
	set(flags...)
	t.Cleanup(func() { set() })
}

// waitFor polls f, four times a second, until it is happy.
func (n *gpuNode) waitFor(t *testing.T, what string, within time.Duration, f func() error) time.Duration {
	t.Helper()
	start := time.Now()
	for {
		err := f()
		if err == nil {
			return time.Since(start)
		}
		if time.Since(start) > within {
			t.Fatalf("waited %v for %s: %v", within, what, err)
		}
		time.Sleep(min(250*time.Millisecond, within/40))
	}
}

// waitAllocatable waits until kubelet has told so many cores, and returns the units of memory.
func (n *gpuNode) waitAllocatable(t *testing.T, cores int64) int {
	t.Helper()
	var units int64
	n.waitFor(t, fmt.Sprintf("%d cores to be allocatable", cores), 2*time.Minute, func() error {
		node, err := n.b.Client.CoreV1().Nodes().Get(context.WithoutCancel(t.Context()), n.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		have, memory := node.Status.Allocatable[coreName], node.Status.Allocatable[memoryName]
		if units = memory.Value(); have.Value() != cores || units == 0 {
			return fmt.Errorf("%s cores and %s units are", have.String(), memory.String())
		}
		return nil
	})
	return int(units)
}

// get asks the node over HTTP.
func (n *gpuNode) get(path string) (string, error) {
	resp, err := n.http.Get("http://127.0.0.1:5678" + path)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, resp.Status, text)
	}
	return string(text), err
}

// metrics are the node's by name and labels, as they are written.
func (n *gpuNode) metrics() (map[string]float64, error) {
	text, err := n.get("/metrics")
	out := map[string]float64{}
	for line := range strings.Lines(text) {
		i := strings.LastIndexByte(line, ' ')
		if i < 0 || line[0] == '#' {
			continue
		}
		if v, err := strconv.ParseFloat(strings.TrimSpace(line[i:]), 64); err == nil {
			out[line[:i]] = v
		}
	}
	return out, err
}

// ofTenant finds a metric of a container on its only GPU.
func ofTenant(all map[string]float64, name string, pod *corev1.Pod, container string) (float64, error) {
	for key, v := range all {
		if strings.HasPrefix(key, name+"{") && strings.Contains(key, `pod="`+pod.Name+`"`) && strings.Contains(key, `container="`+container+`"`) {
			return v, nil
		}
	}
	return 0, fmt.Errorf("no metric %s of %s/%s", name, pod.Name, container)
}

// truth is what the simulated machine counts itself.
type truth struct {
	Now  int64 `json:"now_ns"`
	GPUs []struct {
		Used uint64 `json:"used"`
		Busy int64  `json:"busy_ns"`
	} `json:"gpus"`
}

func (n *gpuNode) simctl(t *testing.T, args ...string) string {
	t.Helper()
	program, err := filepath.Abs("../../build/sim/simctl")
	if err != nil {
		t.Fatal(err)
	}
	out, err := n.Exec(context.WithoutCancel(t.Context()), append([]string{program, simDir + "/machine"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (n *gpuNode) truth(t *testing.T) truth {
	t.Helper()
	var out truth
	if err := json.Unmarshal([]byte(n.simctl(t, "truth", "--json")), &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// busy is the part of the time that each GPU worked, in percent.
func (n *gpuNode) busy(t *testing.T, during time.Duration) []float64 {
	t.Helper()
	a := n.truth(t)
	time.Sleep(during)
	b := n.truth(t)
	var out []float64
	for i := range a.GPUs {
		out = append(out, 100*float64(b.GPUs[i].Busy-a.GPUs[i].Busy)/float64(b.Now-a.Now))
	}
	return out
}

// windows is how often shares are measured at most.
const windows = 10

// owed is by how much of a limit, at most, a window can be above it where tenants share a GPU: time that others had is made
// good, up to half a second (docs/compute.md).
func owed(during time.Duration) float64 { return 0.5 / during.Seconds() }

// wantBusy checks what a tenant with a load makes of a GPU that it has alone, in percent.
func (n *gpuNode) wantBusy(t *testing.T, what string, gpu int, want, within float64, during time.Duration) {
	t.Helper()
	n.wantShares(t, what, within, 0, map[string]float64{"": want}, func() map[string]float64 {
		return map[string]float64{"": n.busy(t, during)[gpu]}
	})
}

// wantShares checks shares by name, in percent. No window may be above the limit by more than a part of it that is owed. One of
// several has to reach it: where this machine lacks processor time, tenants ask for less.
func (n *gpuNode) wantShares(t *testing.T, what string, within, owed float64, want map[string]float64, measure func() map[string]float64) {
	t.Helper()
	for i := range windows {
		got := measure()
		low := false
		for _, name := range slices.Sorted(maps.Keys(want)) {
			t.Logf("%s %s: %.2f %% (limit %.0f)", what, name, got[name], want[name])
			if most := want[name]*(1+owed) + within; got[name] > most {
				t.Errorf("%s %s: %.2f %%, want %.0f, at most %.2f", what, name, got[name], want[name], most)
				return
			}
			low = low || got[name] < want[name]-within
		}
		if !low {
			return
		}
		if i == windows-1 {
			t.Errorf("%s: %v, want %v ± %.1f in one of %d windows", what, got, want, within, windows)
		}
	}
}

// place waits until the node has said on the pod where its containers are: UUIDs by container.
func (n *gpuNode) place(t *testing.T, pod *corev1.Pod, containers ...string) map[string][]string {
	t.Helper()
	var out map[string][]string
	n.waitFor(t, "the annotation of "+pod.Name, soon, func() error {
		now, err := n.b.Client.CoreV1().Pods(pod.Namespace).Get(t.Context(), pod.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if now.Annotations["tencent.com/gpu-assigned"] != "true" {
			return fmt.Errorf("annotations %v", now.Annotations)
		}
		out, err = podspec.DecodeGPUs(now.Annotations[podspec.GPUs])
		for _, c := range containers {
			if err == nil && out[c] == nil {
				err = fmt.Errorf("%v lacks %s", out, c)
			}
		}
		return err
	})
	return out
}

// gpuOf is the position of a one-container pod's GPU.
func (n *gpuNode) gpuOf(t *testing.T, pod *corev1.Pod) int {
	t.Helper()
	c := pod.Spec.Containers[0].Name
	return position(t, n.place(t, pod, c)[c][0])
}

func position(t *testing.T, uuid string) int {
	t.Helper()
	i, err := strconv.Atoi(strings.TrimPrefix(uuid, gpuUUID(0)[:len(gpuUUID(0))-1]))
	if err != nil {
		t.Fatalf("%q is none of the GPUs", uuid)
	}
	return i
}

// held is what kubelet's PodResources tell: by pod, container and resource, the IDs.
func (n *gpuNode) held(t *testing.T) map[[3]string][]string {
	t.Helper()
	client, err := kubelet.NewPodResources(n.Path(podsSocket))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	list, err := client.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	out := map[[3]string][]string{}
	for _, h := range list {
		out[[3]string{h.Pod, h.Container, h.Resource}] = h.IDs
	}
	return out
}

// waitEvent waits for an event of a pod that begins so.
func (n *gpuNode) waitEvent(t *testing.T, pod *corev1.Pod, start string) string {
	t.Helper()
	var found string
	n.waitFor(t, "event "+start+" of "+pod.Name, soon, func() error {
		events, err := n.b.Events(t.Context(), pod)
		i := slices.IndexFunc(events, func(e string) bool { return strings.HasPrefix(e, start) })
		if err == nil && i < 0 {
			err = fmt.Errorf("there are %q", events)
		}
		if err == nil {
			found = events[i]
		}
		return err
	})
	t.Log(found)
	return found
}

func noEvent(t *testing.T, n *gpuNode, pod *corev1.Pod, start string) {
	t.Helper()
	events, err := n.b.Events(t.Context(), pod)
	if err != nil || slices.ContainsFunc(events, func(e string) bool { return strings.HasPrefix(e, start) }) {
		t.Errorf("%s has an event %s: %q, %v", pod.Name, start, events, err)
	}
}

// logLine waits for a whole line of a container's log that begins so, and gives all of the lines that do.
func (n *gpuNode) logLines(t *testing.T, pod *corev1.Pod, container, start string, count int) []string {
	t.Helper()
	var out []string
	n.waitFor(t, fmt.Sprintf("%d lines %q of %s", count, start, pod.Name), 2*time.Minute, func() error {
		opts := &corev1.PodLogOptions{Container: container}
		text, err := n.b.Client.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, opts).DoRaw(t.Context())
		out = nil
		for line := range strings.Lines(string(text)) {
			if strings.HasPrefix(line, start) && strings.HasSuffix(line, "\n") {
				out = append(out, strings.TrimSpace(line))
			}
		}
		if err == nil && len(out) < count {
			err = errors.New(string(text))
		}
		return err
	})
	return out
}

// seen is what programs in a container found: GPUs and memory that NVIDIA's nvidia-smi shows, and what the driver
// gave until it refused. The script look writes it.
type seen struct {
	uuids []string
	total []int // MiB
	got   int   // MiB
}

const look = `nvidia-smi --query-gpu=uuid,memory.total --format=csv,noheader,nounits && gpuload --json --alloc plain:16Mi && `

func (n *gpuNode) seen(t *testing.T, pod *corev1.Pod, container string) seen {
	t.Helper()
	var out seen
	var alloc struct {
		Bytes   uint64
		Error   string
		Refused string `json:"refused_by"`
	}
	if err := json.Unmarshal([]byte(n.logLines(t, pod, container, "{", 1)[0]), &alloc); err != nil {
		t.Fatal(err)
	}
	if alloc.Error != "CUDA_ERROR_OUT_OF_MEMORY" {
		t.Errorf("%s/%s: %+v", pod.Name, container, alloc)
	}
	out.got = int(alloc.Bytes >> 20)
	for _, line := range n.logLines(t, pod, container, "GPU-", 1) {
		uuid, total, _ := strings.Cut(line, ", ")
		v, err := strconv.Atoi(total)
		if err != nil {
			t.Errorf("nvidia-smi: %q", line)
		}
		out.uuids, out.total = append(out.uuids, uuid), append(out.total, v)
	}
	return out
}

// wantSeen checks a container on one GPU against its limit in units.
func (n *gpuNode) wantSeen(t *testing.T, pod *corev1.Pod, container, uuid string, units int) {
	t.Helper()
	s := n.seen(t, pod, container)
	limit := units * unitMiB
	if !slices.Equal(s.uuids, []string{uuid}) || !slices.Equal(s.total, []int{limit}) {
		t.Errorf("%s/%s: nvidia-smi shows %q with %v MiB, want %s with %d", pod.Name, container, s.uuids, s.total, uuid, limit)
	}
	// A context takes some of it.
	if s.got > limit || s.got < limit-1024 {
		t.Errorf("%s/%s: was given %d MiB, its limit is %d", pod.Name, container, s.got, limit)
	}
}

// container is YAML for one of them. What it runs is a shell's; more is YAML for the container.
func container(name, script string, cores, units int, more ...string) string {
	limits := ""
	if cores > 0 {
		limits += fmt.Sprintf("%s: %d, ", coreName, cores)
	}
	if units > 0 {
		limits += fmt.Sprintf("%s: %d", memoryName, units)
	}
	out := fmt.Sprintf("  - name: %s\n    image: %s\n    imagePullPolicy: Never\n    command: [sh, -c, %q]\n    resources: {limits: {%s}}\n", name, testImageName, script, limits)
	for _, line := range more {
		out += "    " + line + "\n"
	}
	return out
}

// podOf is YAML of a pod of these containers; keys and values of annotations follow.
func podOf(name, containers string, annotations ...string) string {
	out := "apiVersion: v1\nkind: Pod\nmetadata:\n  name: " + name + "\n  labels: {gpu: \"true\"}\n"
	if len(annotations) > 0 {
		out += "  annotations:\n"
	}
	for i := 0; i+1 < len(annotations); i += 2 {
		out += fmt.Sprintf("    %s: %q\n", annotations[i], annotations[i+1])
	}
	return out + "spec:\n  containers:\n" + containers
}

// load keeps the GPU busy.
const load = "exec gpuload --kernel 2ms --time 100000"

// deleteAll deletes the pods of podOf together at the end of the test, before each is waited for.
func (n *gpuNode) deleteAll(t *testing.T) {
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		err := n.b.Client.CoreV1().Pods("default").DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "gpu=true"})
		if err != nil {
			t.Error(err)
		}
	})
}
