package placement

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Mix is which pods are usual: what Learn saw, the older the less, and a small prior for when it saw
// nothing. The least fragmentation policy keeps GPUs usable for these.
type Mix struct {
	shapes map[string]*shape
	total  float64
	// fresh were counted since the mix was last looked at; full once the window was.
	fresh float64
	full  bool
}

// shape is a usual container, with its pod's CPU.
type shape struct {
	name        string
	container   Container
	cpu         int64
	count, part float64
}

const (
	// memory of a Mix in containers: beyond it, all counts are halved.
	mixWindow = 16384
	// mixUsual is the part of all containers that the usual shapes make up.
	mixUsual = 0.95
	// mixMoved is how much of all containers must ask for something else before nodes are judged anew, once
	// the window has been full. Until then more pods make the mix better in any case.
	mixMoved = 0.1
	// priorCount is the weight of each shape of the prior.
	priorCount = 4
)

func newMix() *Mix {
	m := &Mix{shapes: map[string]*shape{}}
	for _, cores := range []int{25, 50, CoresWhole} {
		m.add(&Container{Request: Request{Cores: cores, Count: 1}}, 0, priorCount)
	}
	return m
}

// learn counts a pod's containers, init containers left out.
func (m *Mix) learn(pod *Pod) {
	stay := 0
	for i := range pod.Containers {
		if pod.Containers[i].Phase != Init {
			stay++
		}
	}
	for i := range pod.Containers {
		if pod.Containers[i].Phase != Init {
			m.add(&pod.Containers[i], pod.CPU/int64(stay), 1)
		}
	}
	if m.total > mixWindow {
		m.age()
	}
}

func (m *Mix) add(c *Container, cpu int64, count float64) {
	name := fmt.Sprint(c.Request.Cores, c.Request.Memory, c.Request.Count, cpu, c.Constraints.Models, c.Constraints.NotModels)
	s := m.shapes[name]
	if s == nil {
		s = &shape{name: name, cpu: cpu, container: Container{Request: c.Request,
			Constraints: Constraints{Models: c.Constraints.Models, NotModels: c.Constraints.NotModels}}}
		m.shapes[name] = s
	}
	s.count += count
	m.total += count
	m.fresh += count
}

func (m *Mix) age() {
	m.total, m.full = 0, true
	for name, s := range m.shapes {
		if s.count /= 2; s.count < 1 {
			delete(m.shapes, name)
		} else {
			m.total += s.count
		}
	}
}

// stale tells whether the mix has grown enough to look at it anew.
func (m *Mix) stale() bool { return m.fresh >= max(32, m.total/4) }

// moved is what part of all containers is of other shapes than when the fragmenter was made.
func (m *Mix) moved(f *fragmenter) float64 {
	sum, known := 0.0, 0.0
	for _, s := range f.shapes {
		if now := m.shapes[s.name]; now != nil {
			sum += math.Abs(now.count/m.total - s.part)
			known += now.count / m.total
		} else {
			sum += s.part
		}
	}
	return (sum + 1 - known) / 2
}

// all shapes as they are now, the most frequent first, with their parts of the whole.
func (m *Mix) all() []*shape {
	out := make([]*shape, 0, len(m.shapes))
	for _, s := range m.shapes {
		known := *s
		known.part = s.count / m.total
		out = append(out, &known)
	}
	slices.SortFunc(out, func(a, b *shape) int { return cmp.Or(cmp.Compare(b.count, a.count), cmp.Compare(a.name, b.name)) })
	return out
}

// fragmenter values what is free on GPUs, by a mix. A GPU's free amount is one number here, its level: the
// hundredths that are free of what is shorter, cores or memory.
//
// Four values are made of it. potential is how much of a level gets used in the end, if offers containers of
// the mix, rare ones too, come by and each is taken or left as is best: a placement's loss is the potential that it takes
// beyond what it uses. stranded is how much of a node's potential stays unused because its CPU ends first.
// fragments is the metric of FGD (Weng et al., USENIX ATC 2023): what of a node's free GPUs the next usual
// pod could not use, which sees CPU and counts of GPUs as well. broken is what pods of several GPUs, too rare to be
// usual but large, could not use.
type fragmenter struct {
	shapes []*shape
	// usual is how many of the shapes, from the first, make up mixUsual of all; scale brings their parts to 1.
	usual int
	scale float64
	// cpus of the usual shapes of one GPU, each once, in order; many are the usual shapes of more than one, by position.
	cpus []int64
	many []int
	// several are the shapes of more than one GPU, by position, the most frequent of them.
	several []int
	// demand is the volume of all shapes.
	demand float64
	// gpus by model and number of GPUs in the cluster.
	gpus  map[string]int
	all   int
	views map[viewKey]*view
}

type viewKey struct {
	model  string
	memory int64
}

// view is the mix seen from GPUs of one model and memory.
type view struct {
	// sizes in hundredths by shape; unusable where the shape cannot use such GPUs at all.
	sizes []int
	// small is which part of the usual containers of one GPU cannot use such a GPU: by how many of the fragmenter's cpus
	// the host has enough for, and by level.
	small [][CoresWhole + 1]float64
	// potential by level, in hundredths of a GPU.
	potential [CoresWhole + 1]float64
	// cpu is how much of the host's CPU (units of Pod) goes with each hundredth of such a GPU that the mix uses,
	// and spread the variance of what goes with one.
	cpu, spread float64
	// price is how much of the capacity of this model is asked for by containers that can only use few models, 1: all.
	price float64
}

const (
	unusable = CoresWhole + 1
	// offers is how many containers a GPU is assumed to be offered before it has to be full.
	offers = 100
	// lossStep and fragmentStep, in hundredths of a GPU, are how much one placement must be better to count
	// as better; below, the fuller node is taken.
	lossStep     = 1
	fragmentStep = 6
	// brokenWeight is how much broken counts, beside fragments and stranded.
	brokenWeight = 0.1
	// maxSeveral is of how many shapes broken is made.
	maxSeveral = 32
	// priceWeight is what taking a GPU of a model that is wholly asked for costs, in GPUs.
	priceWeight = 1
)

func newFragmenter(shapes []*shape, gpus map[string]int) *fragmenter {
	f := &fragmenter{shapes: shapes, gpus: gpus, views: map[viewKey]*view{}}
	for _, n := range gpus {
		f.all += n
	}
	sum := 0.0
	for f.usual < len(shapes) && sum < mixUsual {
		sum += shapes[f.usual].part
		f.usual++
	}
	f.scale = 1 / sum
	for i, s := range shapes[:f.usual] {
		if s.container.Request.Count > 1 {
			f.many = append(f.many, i)
		} else {
			f.cpus = append(f.cpus, s.cpu)
		}
	}
	slices.Sort(f.cpus)
	f.cpus = slices.Compact(f.cpus)
	for i, s := range shapes {
		f.demand += s.volume()
		if s.container.Request.Count > 1 && len(f.several) < maxSeveral {
			f.several = append(f.several, i)
		}
	}
	return f
}

// view of a GPU. Made at first sight.
func (f *fragmenter) view(g *GPU) *view {
	key := viewKey{g.Name, int64(g.Memory)}
	v := f.views[key]
	if v == nil {
		v = f.newView(g)
		f.views[key] = v
	}
	return v
}

func (f *fragmenter) newView(g *GPU) *view {
	v := &view{sizes: make([]int, len(f.shapes))}
	for i, s := range f.shapes {
		v.sizes[i] = unusable
		if s.container.Constraints.allows(g) == "" {
			v.sizes[i] = sizeOn(&s.container, g)
		}
	}
	v.refuse(f)
	v.offer(f.shapes)
	v.cpu, v.spread = v.hostShare(f.shapes)
	v.price = f.price(g.Name)
	return v
}

// refuse computes small.
func (v *view) refuse(f *fragmenter) {
	v.small = make([][CoresWhole + 1]float64, len(f.cpus)+1)
	short := make([]float64, len(f.cpus)+1) // the parts with more CPU than that
	for i, s := range f.shapes[:f.usual] {
		if s.container.Request.Count > 1 {
			continue
		}
		at := f.enough(s.cpu)
		short[at-1] += s.part
		for l := range min(v.sizes[i], CoresWhole+1) {
			v.small[at][l] += s.part
		}
	}
	for at := len(f.cpus) - 1; at >= 0; at-- {
		short[at] += short[at+1]
	}
	for at := 1; at < len(v.small); at++ {
		for l := range v.small[at] {
			v.small[at][l] += v.small[at-1][l]
		}
	}
	for at := range v.small {
		for l := range v.small[at] {
			v.small[at][l] += short[at]
		}
	}
}

// enough is for how many of the CPUs of usual shapes so much CPU is enough; less than 0: for all.
func (f *fragmenter) enough(cpu int64) int {
	if cpu < 0 {
		return len(f.cpus)
	}
	at, found := slices.BinarySearch(f.cpus, cpu)
	if found {
		at++
	}
	return at
}

// sizeOn is what a container takes of a GPU in hundredths, of the scarcer of cores and memory.
func sizeOn(c *Container, g *GPU) int {
	cores, memory := c.on(g)
	if g.Memory > 0 {
		cores = max(cores, int((memory*CoresWhole+int64(g.Memory)-1)/int64(g.Memory)))
	}
	return min(cores, unusable)
}

// level of a GPU: its free hundredths, of what is scarcer.
func level(g *GPU, cores int, memory int64) int {
	if g.Excluded != "" {
		return 0
	}
	if g.Memory > 0 {
		cores = min(cores, int(memory*CoresWhole/int64(g.Memory)))
	}
	return min(max(cores, 0), CoresWhole)
}

// offer computes potential: the expected use of a level by the best choice at each of offers containers
// drawn from the mix.
func (v *view) offer(shapes []*shape) {
	var parts [CoresWhole + 1]float64
	for i, s := range shapes {
		if size := v.sizes[i]; size > 0 && size <= CoresWhole {
			parts[size] += s.part
		}
	}
	for range offers {
		before := v.potential
		for size, part := range parts {
			if part == 0 {
				continue
			}
			for r := size; r <= CoresWhole; r++ {
				if with := float64(size) + before[r-size]; with > before[r] {
					v.potential[r] += part * (with - before[r])
				}
			}
		}
	}
}

// hostShare computes cpu and spread: the mean over the shapes that can use such GPUs, and how far pods are from
// it, both by hundredth used.
func (v *view) hostShare(shapes []*shape) (cpu, spread float64) {
	used := 0.0
	for i, s := range shapes {
		if v.sizes[i] != unusable {
			used += s.part * float64(v.sizes[i]*s.container.Request.Count)
			cpu += s.part * float64(s.cpu)
		}
	}
	if used == 0 {
		return 0, 0
	}
	cpu /= used
	for i, s := range shapes {
		if v.sizes[i] != unusable {
			off := float64(s.cpu) - cpu*float64(v.sizes[i]*s.container.Request.Count)
			spread += s.part * off * off
		}
	}
	return cpu, spread / used
}

// stranded is what of the potential of a node's GPUs is expected to stay unused because its free CPU, if known,
// ends first. Filling the GPUs takes an amount of CPU that is a sum over many pods, so about normal.
func (f *fragmenter) stranded(views []*view, levels []int, cpu int64) float64 {
	potential, mean, variance := 0.0, 0.0, 0.0
	for g, l := range levels {
		p := views[g].potential[l]
		potential += p
		mean += p * views[g].cpu
		variance += p * views[g].spread
	}
	if cpu < 0 || mean == 0 {
		return 0
	}
	return potential * min(excess(mean, math.Sqrt(variance), float64(cpu))/mean, 1)
}

// excess is the mean of what a normal variable is above a limit, 0 when it is below.
func excess(mean, deviation, limit float64) float64 {
	z := (limit - mean) / deviation
	switch {
	case deviation == 0:
		return max(mean-limit, 0)
	case z > 6:
		return 0
	}
	return deviation*math.Exp(-z*z/2)/math.Sqrt(2*math.Pi) + (mean-limit)*math.Erfc(z/math.Sqrt2)/2
}

// price of a model: the sum, over the shapes that name models, of the part of all demand that they make
// over the part of all GPUs that they can use.
func (f *fragmenter) price(model string) float64 {
	price := 0.0
	for _, s := range f.shapes {
		usable := 0
		for name, n := range f.gpus {
			if s.container.Constraints.allows(&GPU{Name: name}) == "" {
				usable += n
			}
		}
		if usable > 0 && usable < f.all && s.container.Constraints.allows(&GPU{Name: model}) == "" {
			price += s.volume() / f.demand * float64(f.all) / float64(usable)
		}
	}
	return price
}

// volume is how much GPU the shape asks for, times how often.
func (s *shape) volume() float64 {
	return s.part * float64(max(s.container.Request.Cores, 1)*s.container.Request.Count)
}

// loss is the potential that a container on this GPU takes beyond what it uses. Less than 0: it uses what
// would have been left over.
func (f *fragmenter) loss(c *Container, g *GPU) float64 {
	v := f.view(g)
	cores, memory := c.on(g)
	from, to := level(g, g.FreeCores, g.FreeMemory), level(g, g.FreeCores-cores, g.FreeMemory-memory)
	return v.potential[from] - v.potential[to] - float64(sizeOn(c, g))
}

// unused is what of a node's free GPUs is in fragments, stranded or broken. Arguments as for fragments.
func (f *fragmenter) unused(views []*view, levels []int, cpu int64) float64 {
	return f.fragments(views, levels, cpu) + f.stranded(views, levels, cpu) + brokenWeight*f.broken(views, levels, cpu)
}

// broken is what of the levels of a node's GPUs the containers of several GPUs could not use, by their part of all
// demand: each, if it does not fit, all of it. Arguments as for fragments.
func (f *fragmenter) broken(views []*view, levels []int, cpu int64) float64 {
	total := 0
	for _, l := range levels {
		total += l
	}
	sum := 0.0
	for _, i := range f.several {
		s, enough := f.shapes[i], 0
		for g, l := range levels {
			if l >= views[g].sizes[i] {
				enough++
			}
		}
		if enough < s.container.Request.Count || cpu >= 0 && cpu < s.cpu {
			sum += s.volume()
		}
	}
	return sum / f.demand * float64(total)
}

// fragments is what of the levels of a node's GPUs the next usual pod could not use, in hundredths of a
// GPU. cpu is what is free of the host; less than 0: not known.
func (f *fragmenter) fragments(views []*view, levels []int, cpu int64) float64 {
	total := 0
	for _, l := range levels {
		total += l
	}
	if total == 0 {
		return 0
	}
	sum, at := 0.0, f.enough(cpu)
	for g, l := range levels {
		sum += views[g].small[at][l] * float64(l)
	}
	for _, i := range f.many {
		s, small, enough := f.shapes[i], total, 0
		if cpu < 0 || cpu >= s.cpu {
			small = 0
			for g, l := range levels {
				if l < views[g].sizes[i] {
					small += l
				} else {
					enough++
				}
			}
			if enough < s.container.Request.Count {
				small = total
			}
		}
		sum += s.part * float64(small)
	}
	return sum * f.scale
}

// steps counts how many whole steps a value is, so that small differences do not decide.
func steps(value, step float64) int64 { return int64(math.Floor(value / step)) }
