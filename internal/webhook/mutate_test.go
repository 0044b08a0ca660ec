package webhook

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"tranche.dev/tranche/internal/podspec"
)

const gib = 1 << 30

// Fleets of a cluster.
var (
	a100s = []GPU{{"GPU-1", "NVIDIA A100-SXM4-80GB", 80 * gib}, {"GPU-2", "NVIDIA A100-SXM4-80GB", 80 * gib}}
	mixed = append(slices.Clone(a100s), GPU{"GPU-3", "Tesla T4", 15 * gib})
)

// apply applies a patch as the API server does: what is removed or written below must be there.
func apply(t *testing.T, raw []byte, ops []Operation) []byte {
	t.Helper()
	text, err := json.Marshal(ops)
	if err != nil {
		t.Fatal(err)
	}
	var list []Operation
	var doc any
	if err := json.Unmarshal(text, &list); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, &doc); err != nil {
		t.Fatal(err)
	}
	for _, op := range list {
		at := doc
		parts := strings.Split(op.Path, "/")[1:]
		for i, part := range parts {
			key := strings.NewReplacer("~1", "/", "~0", "~").Replace(part)
			if array, ok := at.([]any); ok {
				n, err := strconv.Atoi(key)
				if err != nil || n >= len(array) || i == len(parts)-1 {
					t.Fatalf("%+v: not in\n%s", op, raw)
				}
				at = array[n]
				continue
			}
			object, ok := at.(map[string]any)
			if !ok {
				t.Fatalf("%+v: no object on the way in\n%s", op, raw)
			}
			if i < len(parts)-1 {
				at = object[key]
				continue
			}
			if _, there := object[key]; op.Op == "remove" && there {
				delete(object, key)
			} else if op.Op == "add" {
				object[key] = op.Value
			} else {
				t.Fatalf("%+v: cannot be done in\n%s", op, raw)
			}
		}
	}
	out, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// show is what matters of a pod, as lines.
func show(p *corev1.Pod) string {
	var b strings.Builder
	if p.Spec.SchedulerName != "" {
		fmt.Fprintf(&b, "scheduler %s\n", p.Spec.SchedulerName)
	}
	one := func(kind string, c corev1.Container) {
		fmt.Fprintf(&b, "%s%s:", kind, c.Name)
		limits := c.Resources.Limits
		for _, name := range slices.Sorted(maps.Keys(limits)) {
			q := limits[name]
			fmt.Fprintf(&b, " %s=%s", name, q.String())
			if r, ok := c.Resources.Requests[name]; !ok || r.Cmp(q) != 0 {
				fmt.Fprintf(&b, "(requests %s)", r.String())
			}
		}
		for name := range c.Resources.Requests {
			if _, ok := limits[name]; !ok {
				fmt.Fprintf(&b, " (requests %s)", name)
			}
		}
		b.WriteString("\n")
	}
	for _, c := range p.Spec.InitContainers {
		one("init ", c)
	}
	for _, c := range p.Spec.Containers {
		one("", c)
	}
	for _, key := range slices.Sorted(maps.Keys(p.Annotations)) {
		if strings.HasPrefix(key, "tranche.dev/") && key != Translated {
			fmt.Fprintf(&b, "%s=%s\n", strings.TrimPrefix(key, "tranche.dev/"), p.Annotations[key])
		}
	}
	return b.String()
}

// mutate sends a pod through, and what comes out once more: nothing may change then.
func mutate(t *testing.T, m *Mutator, raw []byte, gpus []GPU) (*corev1.Pod, []string, error) {
	t.Helper()
	pod := &corev1.Pod{}
	if err := json.Unmarshal(raw, pod); err != nil {
		t.Fatalf("%v\n%s", err, raw)
	}
	before := pod.DeepCopy()
	ops, warnings, err := m.Mutate(pod, gpus)
	if !reflect.DeepEqual(pod, before) {
		t.Errorf("the pod that was asked about is changed: %+v", pod)
	}
	if err != nil {
		if !refused(err) || len(ops) > 0 {
			t.Errorf("%v %+v", err, ops)
		}
		return nil, nil, err
	}
	out := apply(t, raw, ops)
	patched := &corev1.Pod{}
	if err := json.Unmarshal(out, patched); err != nil {
		t.Fatal(err)
	}
	if again, _, err := m.Mutate(patched, gpus); err != nil || len(again) > 0 {
		t.Errorf("the second time: %v, %+v\n%s", err, again, out)
	}
	return patched, warnings, nil
}

func hami() *Mutator {
	return &Mutator{Names: podspec.DefaultNames(), Scheduler: "tranche-scheduler", HAMi: &HAMi{}}
}

// short makes a pod: `a gpu=1 gpumem=3000` is a container with HAMi's limits, `init:` before the name makes an init
// container, `core=30` and `memory=8` are Tranche's, `key: value` an annotation.
func short(t *testing.T, lines string) []byte {
	t.Helper()
	names := map[string]string{"core": "tencent.com/vcuda-core", "memory": "tencent.com/vcuda-memory"}
	p := &corev1.Pod{Spec: corev1.PodSpec{SchedulerName: "default-scheduler"}}
	for line := range strings.SplitSeq(lines, "\n") {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		if key, value, ok := strings.Cut(line, ": "); ok {
			metav1.SetMetaDataAnnotation(&p.ObjectMeta, key, value)
			continue
		}
		words := strings.Fields(line)
		c := corev1.Container{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{}, Requests: corev1.ResourceList{}}}
		for _, word := range words[1:] {
			key, value, _ := strings.Cut(word, "=")
			if strings.ToUpper(key) == key {
				c.Env = append(c.Env, corev1.EnvVar{Name: key, Value: value})
				continue
			}
			name, ours := names[key]
			if !ours {
				name = "nvidia.com/" + key
			}
			c.Resources.Limits[corev1.ResourceName(name)] = resource.MustParse(value)
			c.Resources.Requests[corev1.ResourceName(name)] = resource.MustParse(value)
		}
		var init bool
		if c.Name, init = strings.CutPrefix(words[0], "init:"); init {
			p.Spec.InitContainers = append(p.Spec.InitContainers, c)
		} else {
			p.Spec.Containers = append(p.Spec.Containers, c)
		}
	}
	raw, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func TestTranslate(t *testing.T) {
	for _, c := range []struct{ name, pod, want string }{
		{"memory alone", "a gpu=1 gpumem=3000", "a: tencent.com/vcuda-core=1 tencent.com/vcuda-memory=12\ncore-limit.a=100\n"},
		{"up to the next unit", "a gpumem=3073 gpucores=7", "a: tencent.com/vcuda-core=7 tencent.com/vcuda-memory=13\n"},
		{"cores of two GPUs, memory of one said", "a gpu=2 gpumem=512 gpucores=100", "a: tencent.com/vcuda-core=200 tencent.com/vcuda-memory=4\n"},
		{"two GPUs, no cores", "a gpu=2 gpumem=512", "a: tencent.com/vcuda-core=2 tencent.com/vcuda-memory=4\ncore-limit.a=100\ngpu-count.a=2\n"},
		{"zero cores are none", "a gpu=1 gpumem=256 gpucores=0", "a: tencent.com/vcuda-core=1 tencent.com/vcuda-memory=1\ncore-limit.a=100\n"},
		{"cores, and all of the memory", "a gpu=1 gpucores=30", "a: tencent.com/vcuda-core=30 tencent.com/vcuda-memory=320\ngpu-model=NVIDIA A100-SXM4-80GB\n"},
		{"percent, no cores", "a gpumem-percentage=25", "a: tencent.com/vcuda-core=1 tencent.com/vcuda-memory=80\ncore-limit.a=100\ngpu-model=NVIDIA A100-SXM4-80GB\n"},
		{"percent down to a unit, but one", "a gpumem-percentage=1 gpucores=1\n b gpumem-percentage=33 gpucores=1\n nvidia.com/use-gpuuuid: GPU-2", "a: tencent.com/vcuda-core=1 tencent.com/vcuda-memory=3\n" +
			"b: tencent.com/vcuda-core=1 tencent.com/vcuda-memory=105\ngpu-uuid=GPU-2\n"},
		{"memory wins over percent, as there", "a gpumem=1024 gpumem-percentage=50 gpucores=5", "a: tencent.com/vcuda-core=5 tencent.com/vcuda-memory=4\n"},
		{"no GPU", "a gpu=0\n b core=30 memory=8", "a:\nb: tencent.com/vcuda-core=30 tencent.com/vcuda-memory=8\n"},
		{"init container, and one of Tranche's own", "init:i gpu=1\n a gpumem=256 gpucores=20\n b core=30 memory=8", "init i: tencent.com/vcuda-core=100\n" +
			"a: tencent.com/vcuda-core=20 tencent.com/vcuda-memory=1\nb: tencent.com/vcuda-core=30 tencent.com/vcuda-memory=8\n"},
		{"priority", "a gpumem=256 gpucores=20 priority=0\n b gpumem=256 gpucores=20 priority=1", "a: tencent.com/vcuda-core=20 tencent.com/vcuda-memory=1\n" +
			"b: tencent.com/vcuda-core=20 tencent.com/vcuda-memory=1\nclass.a=latency\n"},
		{"core limit turned off", "a gpumem=256 gpucores=20 GPU_CORE_UTILIZATION_POLICY=disable", "a: tencent.com/vcuda-core=20 tencent.com/vcuda-memory=1\ncore-limit.a=100\n"},
		{"Tranche's own word on it", "a gpumem=256\n tranche.dev/core-limit.a: 40", "a: tencent.com/vcuda-core=1 tencent.com/vcuda-memory=1\ncore-limit.a=40\n"},
		{"models and GPUs", "a gpu=1\n nvidia.com/use-gputype: NVIDIA-A100, H100,\n nvidia.com/nouse-gputype: PCIe\n nvidia.com/nouse-gpuuuid: GPU-2",
			"a: tencent.com/vcuda-core=100\ngpu-model=A100,H100\ngpu-model-not=PCIe\ngpu-uuid-not=GPU-2\n"},
		{"GPUs to use win", "a gpu=1\n nvidia.com/use-gpuuuid: GPU-1,GPU-2\n nvidia.com/nouse-gpuuuid: GPU-2", "a: tencent.com/vcuda-core=100\ngpu-uuid=GPU-1,GPU-2\n"},
		{"policies", "a gpumem=256 gpucores=20\n hami.io/gpu-scheduler-policy: binpack", "a: tencent.com/vcuda-core=20 tencent.com/vcuda-memory=1\npolicy=binpack\n"},
		{"links", "a gpu=2\n hami.io/gpu-scheduler-policy: topology-aware\n hami.io/node-scheduler-policy: binpack", "a: tencent.com/vcuda-core=200\npolicy=topology\n"},
		{"mode", "a gpu=1\n nvidia.com/vgpu-mode: hami-core", "a: tencent.com/vcuda-core=100\n"},
		{"numa-bind off", "a gpu=1\n nvidia.com/numa-bind: false", "a: tencent.com/vcuda-core=100\n"},
	} {
		pod, _, err := mutate(t, hami(), short(t, c.pod), a100s)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if got, want := show(pod), "scheduler tranche-scheduler\n"+c.want; got != want {
			t.Errorf("%s:\n%swant\n%s", c.name, got, want)
		}
	}
}

func TestRefused(t *testing.T) {
	for _, c := range []struct {
		pod  string
		gpus []GPU
		want string
	}{
		{"a gpu=17", nil, "container a: nvidia.com/gpu: 17: must be a whole number from 0 to 16"},
		{"a gpu=1 gpucores=101", nil, "container a: nvidia.com/gpucores: 101: must be a whole number from 0 to 100"},
		{"a gpu=1 gpumem=1500m", nil, "container a: nvidia.com/gpumem: 1500m: must be a whole number from 0 to 1048576"},
		{"a gpu=1 gpumem-percentage=0", nil, "container a: nvidia.com/gpumem-percentage: 0: must be 1 to 100"},
		{"a gpu=0 gpumem=30", nil, "container a: nvidia.com/gpu: 0, with memory or cores beside it: leave them out, or ask for a GPU"},
		{"a gpu=1 priority=2", nil, "container a: nvidia.com/priority: 2: must be a whole number from 0 to 1"},
		{"a gpu=1 core=30 memory=8", nil, "container a: tencent.com/vcuda-core: cannot be asked beside HAMi's nvidia.com/gpu=1: keep one of them"},
		{"a gpu=1 mig-1g.5gb=1", nil, "container a: nvidia.com/mig-1g.5gb: cannot be asked beside HAMi's nvidia.com/gpu=1: keep one of them"},
		{"a gpumem-percentage=50", nil, "container a: nvidia.com/gpumem-percentage: a part of a GPU's memory, and no GPU that this pod may have is known: say how many MiB in nvidia.com/gpumem"},
		{"a gpumem-percentage=50", mixed, "container a: nvidia.com/gpumem-percentage: a part of a GPU's memory, and the GPUs that this pod may have differ (NVIDIA A100-SXM4-80GB, Tesla T4): " +
			"name the model in nvidia.com/use-gputype, or say how many MiB in nvidia.com/gpumem"},
		{"a gpucores=30", mixed, "container a: nvidia.com/gpumem: a part of a GPU's memory, and the GPUs that this pod may have differ (NVIDIA A100-SXM4-80GB, Tesla T4): " +
			"name the model in nvidia.com/use-gputype, or say how many MiB in nvidia.com/gpumem"},
		{"a gpu=1\n nvidia.com/vgpu-mode: mig", nil, `nvidia.com/vgpu-mode: "mig": Tranche shares whole GPUs by its library only; remove the annotation, or ask NVIDIA's device plugin`},
		{"a gpu=1\n nvidia.com/numa-bind: true", nil, "nvidia.com/numa-bind: Tranche does not bind to a NUMA node; remove the annotation; for the best linked GPUs set tranche.dev/policy: topology"},
		{"a gpu=1\n nvidia.com/use-gpuindexes: 0,1", nil, `nvidia.com/use-gpuindexes: "0,1": Tranche knows GPUs by UUID; set tranche.dev/gpu-uuid or tranche.dev/gpu-uuid-not`},
		{"a gpu=1\n hami.io/vulkan: true", nil, "hami.io/vulkan: Tranche does not limit Vulkan's memory; remove the annotation to run with CUDA limited only"},
		{"a gpu=1\n hami.io/device-scoring-weights: x", nil, "hami.io/device-scoring-weights: Tranche has no such weights; remove the annotation; tranche.dev/policy chooses a policy"},
		{"a gpu=1\n hami.io/gpu-scheduler-policy: mutex", nil, `hami.io/gpu-scheduler-policy: "mutex": Tranche has binpack, spread and topology; remove the annotation, or set tranche.dev/policy; ` +
			"containers that must not share a GPU are named in tranche.dev/apart"},
		{"a gpumem=256\n hami.io/gpu-scheduler-policy: binpack\n hami.io/node-scheduler-policy: spread", nil,
			"hami.io/gpu-scheduler-policy: binpack, and spread for nodes: Tranche has one policy for both; remove one of the two annotations"},
		{"a gpu=1\n hami.io/node-scheduler-policy: numa", nil, `hami.io/node-scheduler-policy: "numa": must be binpack or spread`},
		{"a gpu=2\n nvidia.com/use-gpuuuid: GPU-1", nil, "container a: tranche.dev/gpu-uuid: 1 GPUs are named, 2 are asked"},
		{"a gpu=1\n nvidia.com/use-gputype: A100\n tranche.dev/gpu-model: H100", nil, `tranche.dev/gpu-model: "H100", where HAMi's words give "A100": keep one of them`},
		{"a gpu=2 gpumem=512 gpucores=100\n tranche.dev/gpu-count: 4", nil, "container a: nvidia.com/gpu=2: annotations of tranche.dev/gpu-count on this pod make something else of it: keep one of them"},
		{"a2345678901234567890123456789012345678901234567890123456789012 gpumem=256", nil, "container a2345678901234567890123456789012345678901234567890123456789012: " +
			"tranche.dev/core-limit.a2345678901234567890123456789012345678901234567890123456789012: an annotation's name has at most 63 characters: give the container a shorter name"},
	} {
		if _, _, err := mutate(t, hami(), short(t, c.pod), c.gpus); err == nil || err.Error() != c.want {
			t.Errorf("%q:\n%v\nwant\n%s", c.pod, err, c.want)
		}
	}
}

// The model that a pod names makes the memory known, and so does a UUID.
func TestKnown(t *testing.T) {
	for annotation, want := range map[string]string{
		"nvidia.com/use-gputype: T4":     "a: tencent.com/vcuda-core=30 tencent.com/vcuda-memory=30\ngpu-model=Tesla T4\n",
		"nvidia.com/nouse-gputype: A100": "a: tencent.com/vcuda-core=30 tencent.com/vcuda-memory=30\ngpu-model=Tesla T4\ngpu-model-not=A100\n",
		"nvidia.com/use-gpuuuid: GPU-3":  "a: tencent.com/vcuda-core=30 tencent.com/vcuda-memory=30\ngpu-uuid=GPU-3\n",
		"nvidia.com/nouse-gpuuuid: GPU-3": "a: tencent.com/vcuda-core=30 tencent.com/vcuda-memory=160\ngpu-model=NVIDIA A100-SXM4-80GB\n" +
			"gpu-uuid-not=GPU-3\n",
	} {
		pod, _, err := mutate(t, hami(), short(t, "a gpumem-percentage=50 gpucores=30\n"+annotation), mixed)
		if err != nil || show(pod) != "scheduler tranche-scheduler\n"+want {
			t.Errorf("%s: %v\n%s\nwant\n%s", annotation, err, show(pod), want)
		}
	}
}

func TestDefaults(t *testing.T) {
	m := hami()
	m.HAMi = &HAMi{DefaultMemory: 4 * gib, DefaultCores: 20}
	for pod, want := range map[string]string{
		"a gpu=1":                          "a: tencent.com/vcuda-core=20 tencent.com/vcuda-memory=16\n",
		"a gpu=1 gpucores=50":              "a: tencent.com/vcuda-core=50 tencent.com/vcuda-memory=16\n",
		"a gpu=1 gpumem=512":               "a: tencent.com/vcuda-core=20 tencent.com/vcuda-memory=2\n",
		"a gpu=1 gpumem-percentage=100":    "a: tencent.com/vcuda-core=20 tencent.com/vcuda-memory=320\ngpu-model=NVIDIA A100-SXM4-80GB\n",
		"a gpumem-percentage=50\n b gpu=0": "a: tencent.com/vcuda-core=20 tencent.com/vcuda-memory=160\nb:\ngpu-model=NVIDIA A100-SXM4-80GB\n",
	} {
		out, _, err := mutate(t, m, short(t, pod), a100s)
		if err != nil || show(out) != "scheduler tranche-scheduler\n"+want {
			t.Errorf("%s: %v\n%s\nwant\n%s", pod, err, show(out), want)
		}
	}
	for _, bad := range []HAMi{{DefaultCores: 101}, {DefaultCores: -1}, {DefaultMemory: 1 << 41}} {
		if m.HAMi = &bad; m.Validate() == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
}

// Who is sent to the scheduler.
func TestScheduler(t *testing.T) {
	slice := func(edit func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{}
		if err := json.Unmarshal(short(t, "a core=30 memory=8"), p); err != nil {
			t.Fatal(err)
		}
		edit(p)
		return p
	}
	own, none := &Mutator{Names: podspec.DefaultNames(), Scheduler: "tranche-scheduler"}, &Mutator{Names: podspec.DefaultNames()}
	fromHAMi := hami()
	fromHAMi.Scheduler = ""
	example := &Mutator{Names: podspec.Names{Domain: "example.org", Unit: podspec.UnitDefault}, Scheduler: "tranche-scheduler"}
	for _, c := range []struct {
		name string
		m    *Mutator
		edit func(*corev1.Pod)
		want string // the patch
	}{
		{"by default", own, func(*corev1.Pod) {}, `[{add /spec/schedulerName tranche-scheduler}]`},
		{"without a name", own, func(p *corev1.Pod) { p.Spec.SchedulerName = "" }, `[{add /spec/schedulerName tranche-scheduler}]`},
		{"another's", own, func(p *corev1.Pod) { p.Spec.SchedulerName = "volcano" }, `[]`},
		{"ours already", own, func(p *corev1.Pod) { p.Spec.SchedulerName = "tranche-scheduler" }, `[]`},
		{"on a node", own, func(p *corev1.Pod) { p.Spec.NodeName = "n1" }, `[]`},
		{"a mirror pod", own, func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"} }, `[]`},
		{"opted out", own, func(p *corev1.Pod) { p.Labels = map[string]string{OptOut: Ignore} }, `[]`},
		{"no slice", own, func(p *corev1.Pod) { p.Spec.Containers[0].Resources = corev1.ResourceRequirements{} }, `[]`},
		{"another domain", example, func(*corev1.Pod) {}, `[]`},
		{"the cluster's own scheduler", none, func(*corev1.Pod) {}, `[]`},
		{"HAMi's", hami(), func(p *corev1.Pod) { p.Spec.SchedulerName = "hami-scheduler" }, `[{add /spec/schedulerName tranche-scheduler}]`},
		{"HAMi's, and the cluster's own", fromHAMi, func(p *corev1.Pod) { p.Spec.SchedulerName = "hami-scheduler" }, `[{add /spec/schedulerName default-scheduler}]`},
		{"HAMi's where HAMi is", own, func(p *corev1.Pod) { p.Spec.SchedulerName = "hami-scheduler" }, `[]`},
	} {
		ops, warnings, err := c.m.Mutate(slice(c.edit), nil)
		if got := fmt.Sprint(ops); err != nil || got != c.want || len(warnings) > 0 {
			t.Errorf("%s: %s %v %v, want %s", c.name, got, warnings, err, c.want)
		}
	}
}

// HAMi's pods are left as they are where nobody asked for a translation.
func TestNotTranslated(t *testing.T) {
	raw := short(t, "a gpu=1 gpumem=3000")
	for name, edit := range map[string]func(*Mutator, *corev1.Pod){
		"off":          func(m *Mutator, _ *corev1.Pod) { m.HAMi = nil },
		"HAMi's label": func(_ *Mutator, p *corev1.Pod) { p.Labels = map[string]string{"hami.io/webhook": "ignore"} },
		"our label":    func(_ *Mutator, p *corev1.Pod) { p.Labels = map[string]string{OptOut: Ignore} },
		"another asked": func(_ *Mutator, p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"nvidia.com/mig-1g.5gb": resource.MustParse("1")}
			p.Spec.Containers[0].Resources.Requests = nil
		},
	} {
		p, m := &corev1.Pod{}, hami()
		if err := json.Unmarshal(raw, p); err != nil {
			t.Fatal(err)
		}
		edit(m, p)
		if ops, warnings, err := m.Mutate(p, nil); err != nil || len(ops) > 0 || len(warnings) > 0 {
			t.Errorf("%s: %+v %v %v", name, ops, warnings, err)
		}
	}
}

// What the node would refuse, or take no notice of, is told at once.
func TestWarnings(t *testing.T) {
	for pod, want := range map[string]string{
		"a core=30 memory=8\n tranche.dev/policy: fastest": `[policy "fastest": must be least-fragmentation, binpack, spread or topology]`,
		"a core=30": "[container a: tencent.com/vcuda-memory: 30 cores, a part of a GPU, need memory as well: say how many units of 256 MiB the container may use]",
		"a core=30 memory=8\n tencent.com/vcuda-core-limit: 20": "[container a: a ceiling of 20 is below its 30 cores and has no effect]",
		"a gpu=1 CUDA_DISABLE_CONTROL=true":                     "[container a: CUDA_DISABLE_CONTROL has no effect: limits hold]",
		"a core=30 memory=8":                                    "[]",
	} {
		if _, warnings, err := mutate(t, hami(), short(t, pod), nil); err != nil || fmt.Sprint(warnings) != want {
			t.Errorf("%q: %v %v, want %s", pod, warnings, err, want)
		}
	}
}

// Limits without requests, requests without limits, and both.
func TestLimitsAndRequests(t *testing.T) {
	const want = "scheduler tranche-scheduler\na: cpu=1(requests 0) tencent.com/vcuda-core=20 tencent.com/vcuda-memory=4\ngpu-count.a=2\n"
	for _, resources := range []string{
		`{limits: {cpu: 1, nvidia.com/gpu: 2, nvidia.com/gpumem: 512, nvidia.com/gpucores: 10}}`,
		`{limits: {cpu: 1, nvidia.com/gpu: 2}, requests: {nvidia.com/gpu: 2, nvidia.com/gpumem: 512, nvidia.com/gpucores: 10}}`,
		`{limits: {cpu: 1, nvidia.com/gpu: 2, nvidia.com/gpumem: 512, nvidia.com/gpucores: 10}, requests: {nvidia.com/gpu: 2, nvidia.com/gpumem: 512, nvidia.com/gpucores: 10}}`,
	} {
		raw, err := yaml.YAMLToJSON([]byte("metadata: {annotations: {x: z}}\nspec: {containers: [{name: a, resources: " + resources + "}]}"))
		if err != nil {
			t.Fatal(err)
		}
		if pod, _, err := mutate(t, hami(), raw, nil); err != nil || show(pod) != want {
			t.Errorf("%s: %v\n%s\nwant\n%s", resources, err, show(pod), want)
		}
	}
	raw, err := yaml.YAMLToJSON([]byte(`spec: {containers: [{name: a, resources: {limits: {nvidia.com/gpu: 2}, requests: {nvidia.com/gpu: 1}}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := mutate(t, hami(), raw, nil); err == nil || err.Error() != "container a: nvidia.com/gpu: limit 2 and request 1 must be equal" {
		t.Error(err)
	}
}

// Random pods: each comes out with what its words mean, by a reading of its own, or is refused.
func TestProperty(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	passed := 0
	for range 1000 {
		type ask struct{ gpus, mib, percent, cores int } // -1: not said
		var asks []ask
		var text strings.Builder
		pick := func(values ...int) int { return values[r.IntN(len(values))] }
		for i := range 1 + r.IntN(3) {
			a := ask{pick(-1, 1, 1, 2, 3), pick(-1, 256, 1000, 4096), pick(-1, -1, 1, 40, 100), pick(-1, 0, 1, 30, 99, 100)}
			asks = append(asks, a)
			if r.IntN(4) == 0 {
				text.WriteString("init:")
			}
			fmt.Fprintf(&text, "c%d", i)
			for _, v := range []struct {
				name  string
				value int
			}{{"gpu", a.gpus}, {"gpumem", a.mib}, {"gpumem-percentage", a.percent}, {"gpucores", a.cores}} {
				if v.value >= 0 {
					fmt.Fprintf(&text, " %s=%d", v.name, v.value)
				}
			}
			text.WriteString("\n")
		}
		fleet := [][]GPU{nil, a100s, mixed}[r.IntN(3)]
		pod, _, err := mutate(t, hami(), short(t, text.String()), fleet)
		needsModel := slices.ContainsFunc(asks, func(a ask) bool {
			whole := a.cores <= 0 || a.cores == 100
			return a.mib < 0 && (a.percent > 0 && a.percent < 100 || !whole && (a.percent > 0 || a.cores > 0))
		})
		known := len(fleet) == len(a100s)
		if err != nil {
			if !needsModel || known {
				t.Fatalf("%q: %v", text.String(), err)
			}
			continue
		}
		if needsModel && !known {
			t.Fatalf("%q: taken, with %v", text.String(), fleet)
		}
		passed++
		got, err := podspec.Parse(pod, podspec.DefaultNames())
		if err != nil {
			t.Fatalf("%q: %v", text.String(), err)
		}
		for i, a := range asks {
			c := got.Find(fmt.Sprintf("c%d", i))
			if a.gpus < 0 && a.mib < 0 && a.percent < 0 && a.cores <= 0 {
				if c != nil {
					t.Fatalf("%q: %+v", text.String(), c)
				}
				continue
			}
			mib, cores := a.mib, max(a.cores, 1)
			if mib < 0 {
				if percent := a.percent; percent > 0 && percent < 100 || a.cores > 0 && a.cores < 100 {
					if percent < 0 {
						percent = 100
					}
					mib = 80 * 1024 * percent / 100 / 256 * 256
				} else {
					mib, cores = 0, 100
				}
			}
			ceiling := cores
			if a.cores <= 0 {
				ceiling = 100
			}
			if want := fmt.Sprint(max(a.gpus, 1), cores, (mib+255)/256, ceiling); c == nil ||
				fmt.Sprint(c.Request.Count, c.Request.Cores, uint64(c.Request.Memory)>>28, c.Ceiling) != want {
				t.Fatalf("%q: c%d: %+v, want %s", text.String(), i, c, want)
			}
		}
	}
	if passed < 200 {
		t.Errorf("only %d pods were taken", passed)
	}
}

// Whatever a pod says: no panic, the patch can be applied, nothing of HAMi's is left, and the second time nothing
// changes (mutate checks that).
func FuzzMutate(f *testing.F) {
	f.Add([]byte(`{"metadata":{"annotations":{"nvidia.com/use-gputype":"NVIDIA-A100"}},"spec":{"containers":[{"name":"a","resources":{"limits":{"nvidia.com/gpu":"1","nvidia.com/gpumem":3000}}}]}}`))
	f.Add([]byte(`{"spec":{"initContainers":[{"name":"i","resources":{"requests":{"nvidia.com/gpumem-percentage":"50"}}}],"containers":[{"name":"a~/b","resources":{"limits":{"nvidia.com/gpu":"2"}}}]}}`))
	f.Add([]byte(`{"metadata":{"annotations":{"hami.io/gpu-scheduler-policy":"binpack"}},"spec":{"schedulerName":"hami-scheduler","containers":[{"name":"a","resources":{"limits":{"tencent.com/vcuda-core":"30"}}}]}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		var pod corev1.Pod
		if json.Unmarshal(raw, &pod) != nil {
			return
		}
		// As the API server writes it.
		raw, err := json.Marshal(pod)
		if err != nil {
			return
		}
		out, _, err := mutate(t, hami(), raw, a100s)
		if err != nil || out.Labels[OptOut] == Ignore || out.Labels[hamiOptOut] == Ignore || out.Annotations[corev1.MirrorPodAnnotationKey] != "" {
			return
		}
		e := editor{pod: out}
		for _, c := range e.containers() {
			for _, l := range c.lists() {
				for _, name := range Resources() {
					if _, ok := (*l.of)[corev1.ResourceName(name)]; ok {
						t.Errorf("%s is left in\n%s", name, raw)
					}
				}
			}
		}
	})
}
