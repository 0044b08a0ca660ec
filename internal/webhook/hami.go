package webhook

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/quantity"
)

// HAMi's names, as in its chart's default values.
const (
	hamiGPU      = "nvidia.com/gpu"               // GPUs
	hamiMemory   = "nvidia.com/gpumem"            // MiB of each
	hamiPercent  = "nvidia.com/gpumem-percentage" // of each GPU's memory
	hamiCores    = "nvidia.com/gpucores"          // hundredths of each
	hamiPriority = "nvidia.com/priority"          // 0 high, 1 low

	hamiUseModel, hamiNotModel = "nvidia.com/use-gputype", "nvidia.com/nouse-gputype"
	hamiUseUUID, hamiNotUUID   = "nvidia.com/use-gpuuuid", "nvidia.com/nouse-gpuuuid"
	hamiMode                   = "nvidia.com/vgpu-mode"
	hamiNodePolicy             = "hami.io/node-scheduler-policy"
	hamiGPUPolicy              = "hami.io/gpu-scheduler-policy"

	hamiScheduler = "hami-scheduler"
	hamiOptOut    = "hami.io/webhook" // a label

	hamiCorePolicy = "GPU_CORE_UTILIZATION_POLICY" // variables of the container
	hamiNoControl  = "CUDA_DISABLE_CONTROL"
)

// HAMi is what of HAMi's configuration decides how its pods are read. Zero values are HAMi's own defaults.
type HAMi struct {
	// DefaultMemory of each GPU for containers that name none (defaultMem); 0: all of it.
	DefaultMemory quantity.Bytes
	// DefaultCores of each GPU for containers that name none (defaultCores); 0: not limited.
	DefaultCores int
}

// Resources are HAMi's resources for NVIDIA's GPUs: a container with one of them is translated.
func Resources() []string { return []string{hamiGPU, hamiMemory, hamiPercent, hamiCores, hamiPriority} }

// wish is what a container asks in HAMi's words.
type wish struct {
	container
	asked                            []string // as written, for people
	count, memory, percent, priority int64    // memory in MiB; -1: not said
	cores                            int      // of each GPU; 0: not limited
	want                             placement.Request
}

// translate puts Tranche's resources and annotations in the place of HAMi's. Other pods stay as they are.
func (m *Mutator) translate(e *editor, gpus []GPU) ([]string, error) {
	var wishes []*wish
	for _, c := range e.containers() {
		w, err := m.read(c)
		if err != nil {
			return nil, err
		}
		for _, name := range Resources() {
			e.drop(c, name)
		}
		if w != nil {
			wishes = append(wishes, w)
		}
	}
	if len(wishes) == 0 {
		return nil, nil
	}
	t := &translation{m, e, gpus, placement.Constraints{}, nil}
	for _, step := range []func([]*wish) error{t.refuse, t.constrain, t.containers, t.policy, t.check} {
		if err := step(wishes); err != nil {
			return nil, err
		}
	}
	return t.warnings, nil
}

// read reads a container; nil: it asks for no GPU.
func (m *Mutator) read(c container) (*wish, error) {
	w := &wish{container: c}
	for _, r := range []struct {
		name string
		most int64
		to   *int64
	}{{hamiGPU, podspec.MaxGPUs, &w.count}, {hamiMemory, 1 << 20, &w.memory}, {hamiPercent, 100, &w.percent}, {hamiPriority, 1, &w.priority}} {
		var err error
		if *r.to, err = w.amount(r.name, r.most); err != nil {
			return nil, err
		}
	}
	cores, err := w.amount(hamiCores, podspec.CoresWhole)
	if err != nil {
		return nil, err
	}
	some := w.memory > 0 || w.percent > 0 || cores > 0
	switch {
	case w.count <= 0 && !some:
		return nil, nil
	case w.count == 0:
		return nil, problem(c.Name, hamiGPU, "0, with memory or cores beside it: leave them out, or ask for a GPU")
	case w.percent == 0:
		return nil, problem(c.Name, hamiPercent, "0: must be 1 to 100")
	}
	w.count = max(w.count, 1)
	if w.cores = int(cores); cores <= 0 {
		w.cores = m.HAMi.DefaultCores
	}
	for _, other := range others(c, m.Names) {
		return nil, problem(c.Name, other, "cannot be asked beside HAMi's %s: keep one of them", w.asked[0])
	}
	return w, nil
}

// amount is what is asked of a resource; -1: nothing is said.
func (w *wish) amount(name string, most int64) (int64, error) {
	q, limited := w.Resources.Limits[corev1.ResourceName(name)]
	r, requested := w.Resources.Requests[corev1.ResourceName(name)]
	switch {
	case !limited && !requested:
		return -1, nil
	case !limited:
		q = r
	case requested && q.Cmp(r) != 0:
		return 0, problem(w.Name, name, "limit %s and request %s must be equal", q.String(), r.String())
	}
	v, exact := q.AsInt64()
	if !exact || v < 0 || v > most {
		return 0, problem(w.Name, name, "%s: must be a whole number from 0 to %d", q.String(), most)
	}
	w.asked = append(w.asked, fmt.Sprintf("%s=%d", name, v))
	return v, nil
}

// others are resources of GPUs that a container asks besides HAMi's.
func others(c container, names podspec.Names) []string {
	found := map[string]bool{}
	for _, l := range c.lists() {
		for name, q := range *l.of {
			n := string(name)
			if !q.IsZero() && !slices.Contains(Resources(), n) && (strings.HasPrefix(n, "nvidia.com/") || n == names.Core() || n == names.Memory()) {
				found[n] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// translation is that of one pod.
type translation struct {
	*Mutator
	*editor
	gpus        []GPU
	constraints placement.Constraints
	warnings    []string
}

func (t *translation) warn(format string, args ...any) {
	t.warnings = append(t.warnings, fmt.Sprintf(format, args...))
}

// refuse finds what Tranche has nothing for.
func (t *translation) refuse([]*wish) error {
	a := t.pod.Annotations
	yes := func(key string) bool { v, err := strconv.ParseBool(strings.TrimSpace(a[key])); return err == nil && v }
	switch mode := strings.TrimSpace(a[hamiMode]); {
	case mode != "" && !slices.Contains(strings.Split(mode, ","), "hami-core"):
		return problem("", hamiMode, "%q: Tranche shares whole GPUs by its library only; remove the annotation, or ask NVIDIA's device plugin", mode)
	case yes("nvidia.com/numa-bind"):
		return problem("", "nvidia.com/numa-bind", "Tranche does not bind to a NUMA node; remove the annotation; for the best linked GPUs set %s: %s", podspec.Policy, placement.Topology)
	case yes("hami.io/vulkan"):
		return problem("", "hami.io/vulkan", "Tranche does not limit Vulkan's memory; remove the annotation to run with CUDA limited only")
	}
	for _, key := range []string{"nvidia.com/use-gpuindexes", "nvidia.com/nouse-gpuindexes"} {
		if a[key] != "" {
			return problem("", key, "%q: Tranche knows GPUs by UUID; set %s or %s", a[key], podspec.UUIDs, podspec.NotUUIDs)
		}
	}
	if a["hami.io/device-scoring-weights"] != "" {
		return problem("", "hami.io/device-scoring-weights", "Tranche has no such weights; remove the annotation; %s chooses a policy", podspec.Policy)
	}
	return nil
}

// items are those of HAMi's comma list.
func items(text string) []string {
	var out []string
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item != "" {
			out = append(out, item)
		}
	}
	return out
}

// constrain translates which GPUs will do.
func (t *translation) constrain([]*wish) error {
	a, c := t.pod.Annotations, &t.constraints
	model := func(key string) []string {
		out := items(a[key])
		for i, name := range out {
			// HAMi puts the vendor before the product's name.
			if v := len("NVIDIA-"); len(name) > v && strings.EqualFold(name[:v], "NVIDIA-") {
				out[i] = name[v:]
			}
		}
		return out
	}
	c.Models, c.NotModels, c.UUIDs = model(hamiUseModel), model(hamiNotModel), items(a[hamiUseUUID])
	if len(c.UUIDs) == 0 {
		c.NotUUIDs = items(a[hamiNotUUID]) // HAMi looks at one of them only
	}
	for _, l := range []struct {
		key  string
		list []string
	}{{podspec.NotModels, c.NotModels}, {podspec.UUIDs, c.UUIDs}, {podspec.NotUUIDs, c.NotUUIDs}} {
		if err := t.say(l.key, l.list); err != nil {
			return err
		}
	}
	return nil
}

// say writes a list as annotation, if it does not say something else already.
func (t *translation) say(key string, list []string) error {
	text := strings.Join(list, ",")
	if text == "" {
		return nil
	}
	if old, ok := t.pod.Annotations[key]; ok && old != text {
		return problem("", key, "%q, where HAMi's words give %q: keep one of them", old, text)
	}
	t.annotate(key, text)
	return nil
}

// containers translates what they ask.
func (t *translation) containers(wishes []*wish) error {
	var asked []string
	for _, w := range wishes {
		memory, err := t.memory(w)
		if err != nil {
			return err
		}
		if err := t.container(w, memory); err != nil {
			return err
		}
		asked = append(asked, w.Name+": "+strings.Join(w.asked, " "))
	}
	t.annotate(Translated, strings.Join(asked, "; "))
	return t.say(podspec.Models, t.constraints.Models)
}

// container asks for units of memory of each GPU; 0: all of it, with all cores.
func (t *translation) container(w *wish, units int64) error {
	cores, count := max(w.cores, 1), w.count
	if units == 0 {
		cores = podspec.CoresWhole
	}
	w.want = placement.Request{Cores: cores, Count: int(count), Memory: quantity.Bytes(units) * t.Names.Unit}
	t.set(w.container, t.Names.Core(), int64(cores)*count)
	if units > 0 {
		t.set(w.container, t.Names.Memory(), units*count)
	}
	notes := map[string]string{}
	if count > 1 && cores < podspec.CoresWhole {
		notes[podspec.GPUCount] = strconv.FormatInt(count, 10)
	}
	if w.cores == 0 && cores < podspec.CoresWhole || w.variable(hamiCorePolicy) == "disable" {
		notes[podspec.CoreLimit] = strconv.Itoa(podspec.CoresWhole)
	}
	if w.priority == 0 {
		notes[podspec.Class] = podspec.ClassLatency
	}
	if w.variable(hamiNoControl) == "true" {
		t.warn("container %s: %s has no effect: limits hold", w.Name, hamiNoControl)
	}
	for _, key := range slices.Sorted(maps.Keys(notes)) {
		if _, said := t.pod.Annotations[key+"."+w.Name]; said {
			continue // by whoever knows Tranche; what it must not change is checked at the end
		}
		_, short, _ := strings.Cut(key+"."+w.Name, "/")
		if len(short) > 63 {
			return problem(w.Name, key+"."+w.Name, "an annotation's name has at most 63 characters: give the container a shorter name")
		}
		t.annotate(key+"."+w.Name, notes[key])
	}
	return nil
}

// variable is one of the container's own that is written out.
func (w *wish) variable(name string) string {
	for _, v := range w.Env {
		if v.Name == name {
			return v.Value
		}
	}
	return ""
}

// memory is how many units of each GPU's memory a container is to have; 0: all, and the GPUs are whole.
func (t *translation) memory(w *wish) (int64, error) {
	unit := uint64(t.Names.Unit)
	amount := uint64(t.HAMi.DefaultMemory)
	if w.memory > 0 {
		amount = uint64(w.memory) << 20
	}
	whole := w.cores == 0 || w.cores == podspec.CoresWhole
	switch percent := uint64(w.percent); {
	case amount > 0 && (w.memory > 0 || w.percent < 0):
		// What is asked is had: up to the next unit.
		return int64((amount + unit - 1) / unit), nil
	case whole && (w.percent < 0 || percent == 100):
		return 0, nil
	default:
		if w.percent < 0 {
			percent = 100
		}
		all, err := t.known(w)
		if err != nil {
			return 0, err
		}
		// Down, so that parts which are 100 % together fit on one GPU.
		return max(1, int64(uint64(all)*percent/100/unit)), nil
	}
}

// known is the memory that all GPUs have which the pod may get. From then on the pod is for these models only.
func (t *translation) known(w *wish) (quantity.Bytes, error) {
	key := hamiPercent
	if w.percent < 0 {
		key = hamiMemory
	}
	memory, models := map[quantity.Bytes]bool{}, map[string]bool{}
	for _, g := range t.gpus {
		if allows(t.constraints, g) {
			memory[g.Memory], models[g.Model] = true, true
		}
	}
	names := slices.Sorted(maps.Keys(models))
	switch {
	case len(names) == 0:
		return 0, problem(w.Name, key, "a part of a GPU's memory, and no GPU that this pod may have is known: say how many MiB in %s", hamiMemory)
	case len(memory) > 1:
		return 0, problem(w.Name, key, "a part of a GPU's memory, and the GPUs that this pod may have differ (%s): name the model in %s, or say how many MiB in %s",
			strings.Join(names, ", "), hamiUseModel, hamiMemory)
	}
	if len(t.constraints.UUIDs) == 0 {
		t.constraints.Models = names
	}
	for size := range memory {
		return size, nil
	}
	return 0, nil
}

func allows(c placement.Constraints, g GPU) bool {
	model := func(wanted string) bool { return placement.ModelMatches(g.Model, wanted) }
	return (len(c.Models) == 0 || slices.ContainsFunc(c.Models, model)) && !slices.ContainsFunc(c.NotModels, model) &&
		(len(c.UUIDs) == 0 || slices.Contains(c.UUIDs, g.UUID)) && !slices.Contains(c.NotUUIDs, g.UUID)
}

// policy translates HAMi's two: which node, and which GPU of it.
func (t *translation) policy(wishes []*wish) error {
	node, gpu := strings.TrimSpace(t.pod.Annotations[hamiNodePolicy]), strings.TrimSpace(t.pod.Annotations[hamiGPUPolicy])
	if node != "" && node != "binpack" && node != "spread" {
		return problem("", hamiNodePolicy, "%q: must be binpack or spread", node)
	}
	// Of whole GPUs none is fuller than another.
	whole := !slices.ContainsFunc(wishes, func(w *wish) bool { return w.want.Cores < podspec.CoresWhole })
	policy := placement.Policy(node)
	switch gpu {
	case "":
	case "topology-aware":
		policy = placement.Topology
	case "binpack", "spread":
		if node == "" {
			policy = placement.Policy(gpu)
		} else if gpu != node && !whole {
			return problem("", hamiGPUPolicy, "%s, and %s for nodes: Tranche has one policy for both; remove one of the two annotations", gpu, node)
		}
	default:
		return problem("", hamiGPUPolicy, "%q: Tranche has %s, %s and %s; remove the annotation, or set %s; containers that must not share a GPU are named in %s",
			gpu, placement.Binpack, placement.Spread, placement.Topology, podspec.Policy, podspec.Apart)
	}
	if policy == "" || t.pod.Annotations[podspec.Policy] != "" {
		return nil
	}
	t.annotate(podspec.Policy, string(policy))
	return nil
}

// check reads the pod as scheduler and node will, and holds it against what was asked: annotations of Tranche's
// that were there before may have changed it.
func (t *translation) check(wishes []*wish) error {
	ask, err := podspec.Parse(t.pod, t.Names)
	if err != nil {
		return err
	}
	for _, w := range wishes {
		if c := ask.Find(w.Name); c == nil || c.Request.Cores != w.want.Cores || c.Request.Count != w.want.Count || c.Request.Memory != w.want.Memory {
			return problem(w.Name, w.asked[0], "annotations of %s on this pod make something else of it: keep one of them", podspec.GPUCount)
		}
	}
	return nil
}
