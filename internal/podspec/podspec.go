package podspec

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/quantity"
)

// Container is what one container asks. Only containers that ask for GPUs are listed.
type Container struct {
	Name string
	// Index counts the pod's containers, or its init containers.
	Index int
	// Init containers run one after the other before the others; a Sidecar is one that keeps running.
	Init, Sidecar bool
	// Cores and Units are what the pod asks of the two resources, over all GPUs.
	Cores int
	Units int64
	// Request is the same for the placement: cores and memory of each of Count GPUs. Memory that is not
	// divisible by whole GPUs is rounded up to a unit here.
	Request placement.Request
	// Ceiling may be used of each GPU while it is otherwise idle, in hundredths; at least Request.Cores. Limit is the same as
	// annotated, which may be less; 0: not annotated.
	Ceiling, Limit int
	// Latency is true of ClassLatency.
	Latency bool
	// Weight as annotated; 0: the cores.
	Weight int
	// Constraints on the GPUs' kind.
	Constraints placement.Constraints
}

// Whole is true when the container asks for whole GPUs.
func (c Container) Whole() bool { return c.Request.Cores == CoresWhole }

// MemoryLimited is true when the container asks for memory, and so is limited to it. Whole GPUs without
// it have all of their memory.
func (c Container) MemoryLimited() bool { return c.Units > 0 }

// Ask is what a pod asks of GPUs.
type Ask struct {
	// Containers in the order of the pod: init containers first.
	Containers []Container
	// Policy is a name that placement knows; empty: the cluster's default.
	Policy string
	// Apart and Together are groups of container names.
	Apart, Together [][]string
	// Warnings are for whoever looks at the pod's events.
	Warnings []string
}

// Find returns the container of this name, nil when it asks for no GPU.
func (a *Ask) Find(name string) *Container {
	for i := range a.Containers {
		if a.Containers[i].Name == name {
			return &a.Containers[i]
		}
	}
	return nil
}

// Placement is the same in the placement's words, without what the pod takes of the host.
func (a *Ask) Placement() placement.Pod {
	out := placement.Pod{Policy: placement.Policy(a.Policy), Apart: a.Apart, Together: a.Together}
	for _, c := range a.Containers {
		phase := placement.App
		switch {
		case c.Sidecar:
			phase = placement.Sidecar
		case c.Init:
			phase = placement.Init
		}
		out.Containers = append(out.Containers, placement.Container{Name: c.Name, Phase: phase, Request: c.Request, Constraints: c.Constraints})
	}
	return out
}

// Wants tells quickly whether a pod asks for one of the resources.
func Wants(pod *corev1.Pod, names Names) bool {
	asks := func(c corev1.Container) bool {
		cores, units := c.Resources.Limits[corev1.ResourceName(names.Core())], c.Resources.Limits[corev1.ResourceName(names.Memory())]
		return !cores.IsZero() || !units.IsZero()
	}
	return slices.ContainsFunc(pod.Spec.Containers, asks) || slices.ContainsFunc(pod.Spec.InitContainers, asks)
}

// Parse reads a pod. An error says what the pod's author has to change; it is of type *Error. An Ask
// without containers is that of a pod that wants no GPU.
//
// The rules: cores of 1 to 100 are a part of one GPU, n*100 are n whole ones, any other number needs
// GPUCount. Parts need memory. Memory alone reserves no compute: the container gets what others leave.
func Parse(pod *corev1.Pod, names Names) (Ask, error) {
	p := parser{names: names, annotations: pod.Annotations}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		sidecar := c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
		if err := p.container(c, i, true, sidecar); err != nil {
			return Ask{}, err
		}
	}
	for i := range pod.Spec.Containers {
		if err := p.container(&pod.Spec.Containers[i], i, false, false); err != nil {
			return Ask{}, err
		}
	}
	if len(p.ask.Containers) == 0 {
		return Ask{}, nil
	}
	return p.ask, p.pod()
}

// Error is what is wrong with a pod.
type Error struct {
	// Container, or empty for the pod; Key is the resource or the annotation.
	Container, Key string
	Problem        string
}

// Error is cut as Short does it: annotations that it quotes may have 256 KiB.
func (e *Error) Error() string {
	s := e.Key + ": " + e.Problem
	if e.Container != "" {
		s = "container " + e.Container + ": " + s
	}
	return Short(s)
}

// shortMax is how much an event's message may have at most (1024 bytes), with room for words before it.
const shortMax = 900

// Short cuts text for people to what an event and a pod's status can hold. A status that is too large is not
// written, and the pod's failure is seen nowhere.
func Short(text string) string { return Cut(text, shortMax) }

// Cut takes what is more than so many bytes off a text, between characters.
func Cut(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}

type parser struct {
	names       Names
	annotations map[string]string
	ask         Ask
}

func (p *parser) container(c *corev1.Container, index int, init, sidecar bool) error {
	out := Container{Name: c.Name, Index: index, Init: init, Sidecar: sidecar}
	cores, err := p.amount(c, p.names.Core(), MaxGPUs*CoresWhole)
	if err != nil {
		return err
	}
	if out.Units, err = p.amount(c, p.names.Memory(), 1<<24); err != nil {
		return err
	}
	if out.Cores = int(cores); cores == 0 && out.Units == 0 {
		return nil
	}
	for _, step := range []func(*Container) error{p.request, p.sharing, p.constraints} {
		if err := step(&out); err != nil {
			return err
		}
	}
	p.ask.Containers = append(p.ask.Containers, out)
	return nil
}

func (p *parser) amount(c *corev1.Container, key string, most int64) (int64, error) {
	q := c.Resources.Limits[corev1.ResourceName(key)]
	v, exact := q.AsInt64()
	if !exact || v < 0 || v > most {
		return 0, &Error{c.Name, key, fmt.Sprintf("%s: must be a whole number from 0 to %d", q.String(), most)}
	}
	return v, nil
}

// request divides what the container asks over its GPUs.
func (p *parser) request(c *Container) error {
	count := max(1, c.Cores/CoresWhole)
	asked, key, err := p.number(GPUCount, c.Name, 1, MaxGPUs)
	switch {
	case err != nil:
		return err
	case asked > 0 && c.Cores%asked != 0:
		return &Error{c.Name, key, fmt.Sprintf("%d cores cannot be divided by %d GPUs", c.Cores, asked)}
	case asked > 0 && c.Cores > asked*CoresWhole:
		return &Error{c.Name, key, fmt.Sprintf("%d cores are more than %d GPUs have", c.Cores, asked)}
	case asked > 0 && c.Cores < asked*CoresWhole && c.Units%int64(asked) != 0:
		return &Error{c.Name, key, fmt.Sprintf("%d units of memory cannot be divided by %d GPUs", c.Units, asked)}
	case asked > 0:
		count = asked
	case c.Cores > CoresWhole && c.Cores%CoresWhole != 0:
		return &Error{c.Name, p.names.Core(), fmt.Sprintf("%d: more than %d must be a multiple of %d (whole GPUs); for parts of several GPUs set the annotation %s",
			c.Cores, CoresWhole, CoresWhole, GPUCount)}
	}
	each := c.Cores / count
	if each > 0 && each < CoresWhole && c.Units == 0 {
		return &Error{c.Name, p.names.Memory(), fmt.Sprintf("%s, a part of a GPU, need memory as well: say how many units of %v the container may use", coresOf(c.Cores, count), p.names.Unit)}
	}
	if c.Units > 0 && c.Units < int64(count) {
		return &Error{c.Name, p.names.Memory(), fmt.Sprintf("%d units are less than one for each of %d GPUs", c.Units, count)}
	}
	c.Request = placement.Request{Cores: each, Count: count, Memory: p.units(c.Units, count)}
	return nil
}

// units is the memory of each of count GPUs in bytes, rounded up to a unit.
func (p *parser) units(units int64, count int) quantity.Bytes {
	return quantity.Bytes((units+int64(count)-1)/int64(count)) * p.names.Unit
}

func (p *parser) sharing(c *Container) error {
	ceiling, _, err := p.number(CoreLimit, c.Name, 1, CoresWhole)
	if err == nil && ceiling == 0 {
		ceiling = p.podCeiling()
	}
	if err == nil {
		c.Weight, _, err = p.number(Weight, c.Name, 1, 1000)
	}
	if err != nil {
		return err
	}
	if c.Limit = ceiling; c.Request.Cores == 0 && ceiling == 0 {
		ceiling = CoresWhole
	}
	if ceiling > 0 && ceiling < c.Request.Cores {
		p.warn("container %s: a ceiling of %d is below its %d cores and has no effect", c.Name, ceiling, c.Request.Cores)
	}
	c.Ceiling = max(ceiling, c.Request.Cores)
	switch class, key := p.text(Class, c.Name); class {
	case "", ClassNormal:
	case ClassLatency:
		c.Latency = true
	default:
		return &Error{c.Name, key, fmt.Sprintf("%q: must be %s or %s", class, ClassNormal, ClassLatency)}
	}
	return nil
}

// podCeiling reads the originals' annotation as they do: what is no number has no effect, what is
// above a whole GPU is one.
func (p *parser) podCeiling() int {
	text, ok := p.annotations[p.names.CoreLimit()]
	if !ok {
		return 0
	}
	v, err := strconv.Atoi(strings.TrimSpace(text))
	if err != nil || v < 1 {
		p.warn("annotation %s: %q is no number from 1 to %d and has no effect", p.names.CoreLimit(), text, CoresWhole)
		return 0
	}
	return min(v, CoresWhole)
}

func (p *parser) warn(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(p.ask.Warnings, text) {
		p.ask.Warnings = append(p.ask.Warnings, text)
	}
}

// maxItems is how long a list in an annotation may be: all are compared with each GPU of the cluster.
const maxItems = 128

func (p *parser) constraints(c *Container) error {
	for _, l := range []struct {
		key string
		to  *[]string
	}{{Models, &c.Constraints.Models}, {NotModels, &c.Constraints.NotModels}, {UUIDs, &c.Constraints.UUIDs}, {NotUUIDs, &c.Constraints.NotUUIDs}} {
		text, key := p.text(l.key, c.Name)
		if text == "" {
			continue
		}
		for item := range strings.SplitSeq(text, ",") {
			if item = strings.TrimSpace(item); item == "" {
				return &Error{c.Name, key, fmt.Sprintf("%q: an empty item in the list", text)}
			}
			*l.to = append(*l.to, item)
		}
		if len(*l.to) > maxItems {
			return &Error{c.Name, key, fmt.Sprintf("%d items: must be at most %d", len(*l.to), maxItems)}
		}
	}
	if n := len(c.Constraints.UUIDs); n > 0 && n < c.Request.Count {
		return &Error{c.Name, UUIDs, fmt.Sprintf("%d GPUs are named, %d are asked", n, c.Request.Count)}
	}
	return nil
}

// text returns an annotation for a container, and the key that it has.
func (p *parser) text(key, container string) (string, string) {
	if v, ok := p.annotations[key+"."+container]; ok {
		return strings.TrimSpace(v), key + "." + container
	}
	return strings.TrimSpace(p.annotations[key]), key
}

// number is text as a number; 0 when there is none.
func (p *parser) number(key, container string, least, most int) (int, string, error) {
	text, key := p.text(key, container)
	if text == "" {
		return 0, key, nil
	}
	v, err := strconv.Atoi(text)
	if err != nil || v < least || v > most {
		return 0, key, &Error{container, key, fmt.Sprintf("%q: must be a whole number from %d to %d", text, least, most)}
	}
	return v, key, nil
}

// pod reads what concerns the pod as a whole.
func (p *parser) pod() error {
	p.ask.Policy = strings.TrimSpace(p.annotations[Policy])
	var err error
	if p.ask.Apart, err = p.groups(Apart); err != nil {
		return err
	}
	if p.ask.Together, err = p.groups(Together); err != nil {
		return err
	}
	return p.suffixes()
}

func (p *parser) groups(key string) ([][]string, error) {
	text := strings.TrimSpace(p.annotations[key])
	if text == "" {
		return nil, nil
	}
	if text == "*" {
		var all []string
		for _, c := range p.ask.Containers {
			all = append(all, c.Name)
		}
		return [][]string{all}, nil
	}
	var out [][]string
	for part := range strings.SplitSeq(text, ";") {
		var group []string
		for name := range strings.SplitSeq(part, ",") {
			name = strings.TrimSpace(name)
			if p.ask.Find(name) == nil {
				return nil, &Error{"", key, fmt.Sprintf("%q: no container of this name asks for a GPU", name)}
			}
			if slices.Contains(group, name) {
				return nil, &Error{"", key, fmt.Sprintf("%q is named twice in a group", name)}
			}
			group = append(group, name)
		}
		out = append(out, group)
	}
	if len(out) > maxItems {
		return nil, &Error{"", key, fmt.Sprintf("%d groups: must be at most %d", len(out), maxItems)}
	}
	return out, nil
}

// perContainer are the annotations that can name a container behind the key.
func perContainer() []string {
	return []string{GPUCount, CoreLimit, Class, Weight, Models, NotModels, UUIDs, NotUUIDs, Cores, Memory}
}

// suffixes finds annotations for containers that ask for no GPU: a slip of the pen would go unnoticed.
func (p *parser) suffixes() error {
	keys := make([]string, 0, len(p.annotations))
	for key := range p.annotations {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	for _, key := range keys {
		for _, base := range perContainer() {
			if name, ok := strings.CutPrefix(key, base+"."); ok && p.ask.Find(name) == nil {
				return &Error{"", key, fmt.Sprintf("no container %q asks for a GPU", name)}
			}
		}
	}
	return nil
}

// coresOf says how many cores a container asks of its GPUs.
func coresOf(cores, count int) string {
	if count == 1 {
		return fmt.Sprintf("%d cores", cores)
	}
	return fmt.Sprintf("%d cores of each of %d GPUs", cores/count, count)
}

// quantityBytes reads an amount of memory as Kubernetes writes it.
func quantityBytes(text string) (uint64, error) {
	q, err := quantity.ParseKubernetes(text)
	if err != nil {
		return 0, fmt.Errorf("%q: must be an amount of memory, as 8Gi", text)
	}
	v, ok := q.AsInt64()
	if !ok || v <= 0 {
		return 0, fmt.Errorf("%q: must be a positive amount of memory", text)
	}
	return uint64(v), nil
}
