// Package simulate replays traces of pods against a cluster, through the placement code that the
// scheduler uses and through baselines from the literature, and counts how much of the GPUs gets
// allocated. It reads files' contents, not files, and writes reports to what it is given. It never places
// anything for real.
package simulate

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/quantity"
)

// Milli is one whole GPU in the traces' unit.
const Milli = 1000

// Node is one node of a trace. All its GPUs are alike.
type Node struct {
	Name string
	// CPU in thousandths of a core, RAM in bytes.
	CPU, RAM int64
	GPUs     int
	Model    string
	// GPUMemory of each GPU; 0: not known, and then pods that ask for some do not fit.
	GPUMemory quantity.Bytes
}

// Pod is one pod of a trace: it wants Milli thousandths and GPUMemory of each of GPUs GPUs.
type Pod struct {
	Name      string
	CPU, RAM  int64
	GPUs      int
	Milli     int
	GPUMemory quantity.Bytes
	// Models that will do; empty: any.
	Models []string
}

// memoryOn is what the pod takes of the memory of each of its GPUs: all, if it wants whole GPUs and does not say.
func (p *Pod) memoryOn(n *Node) int64 {
	if p.GPUMemory == 0 && p.whole() {
		return int64(n.GPUMemory)
	}
	return int64(p.GPUMemory)
}

// GPUMilli is what the pod wants over all its GPUs.
func (p *Pod) GPUMilli() int64 { return int64(p.GPUs) * int64(p.Milli) }

// Limits of what a file may say: far above any machine, low enough that sums do not overflow.
const (
	maxGPUs  = 64
	maxMilli = 1e9
	maxMiB   = 1 << 32
	// leastMemory is the least that a pod may ask of a GPU's memory, 1 MiB as in the CSV: of bytes so many fit that
	// counting them would not end.
	leastMemory = 1 << 20
)

// table is a CSV file with a header line.
type table struct {
	r      *csv.Reader
	column map[string]int
	row    []string
	line   int
}

func newTable(r io.Reader, needed ...string) (*table, error) {
	t := &table{r: csv.NewReader(r), column: map[string]int{}}
	t.r.ReuseRecord = true
	header, err := t.r.Read()
	if err != nil {
		return nil, fmt.Errorf("header: %w", err)
	}
	header[0] = strings.TrimPrefix(header[0], "\ufeff") // as spreadsheets write it
	for i, name := range header {
		t.column[strings.TrimSpace(name)] = i
	}
	for _, name := range needed {
		if _, ok := t.column[name]; !ok {
			return nil, fmt.Errorf("header: no column %s", name)
		}
	}
	return t, nil
}

func (t *table) next() (bool, error) {
	row, err := t.r.Read()
	if errors.Is(err, io.EOF) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	t.row = row
	t.line, _ = t.r.FieldPos(0)
	return true, nil
}

// text of a column; empty where the file has no such column.
func (t *table) text(column string) string {
	if i, ok := t.column[column]; ok {
		return strings.TrimSpace(t.row[i])
	}
	return ""
}

// number of a column, 0 for an empty field.
func (t *table) number(column string, most int64) (int64, error) {
	text := t.text(column)
	if text == "" {
		return 0, nil
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || v < 0 || v > float64(most) || v != math.Trunc(v) {
		return 0, fmt.Errorf("line %d: %s %q: must be a whole number from 0 to %d", t.line, column, text, most)
	}
	return int64(v), nil
}

// numbers reads several columns at once.
func (t *table) numbers(most int64, to map[string]*int64) error {
	for column, v := range to {
		var err error
		if *v, err = t.number(column, most); err != nil {
			return err
		}
	}
	return nil
}

// ReadNodes reads nodes from CSV in the format of the openb trace: sn, cpu_milli, memory_mib, gpu, model, and
// gpu_memory_mib as an extension. Nodes without GPUs are left out.
func ReadNodes(r io.Reader) ([]Node, error) {
	t, err := newTable(r, "sn", "cpu_milli", "memory_mib", "gpu")
	if err != nil {
		return nil, err
	}
	var out []Node
	for {
		more, err := t.next()
		if err != nil || !more {
			return out, err
		}
		n := Node{Name: t.text("sn"), Model: t.text("model")}
		var mib, gpus, gpuMiB int64
		if err := t.numbers(maxMiB, map[string]*int64{"cpu_milli": &n.CPU, "memory_mib": &mib, "gpu_memory_mib": &gpuMiB, "gpu": &gpus}); err != nil {
			return nil, err
		}
		if n.Name == "" || gpus > maxGPUs {
			return nil, fmt.Errorf("line %d: node %q with %d GPUs: must have a name and at most %d", t.line, n.Name, gpus, maxGPUs)
		}
		n.RAM, n.GPUs, n.GPUMemory = mib<<20, int(gpus), quantity.Bytes(gpuMiB)<<20
		if gpus > 0 {
			out = append(out, n)
		}
	}
}

// ReadPods reads pods from CSV in the format of the openb trace: name, cpu_milli, memory_mib, num_gpu, gpu_milli,
// gpu_spec (models with | between them) and gpu_memory_mib (of each GPU) as an extension. Other columns are
// not looked at.
func ReadPods(r io.Reader) ([]Pod, error) {
	t, err := newTable(r, "name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
	if err != nil {
		return nil, err
	}
	var out []Pod
	for {
		more, err := t.next()
		if err != nil || !more {
			return out, err
		}
		p := Pod{Name: t.text("name")}
		var mib, gpus, milli, gpuMiB int64
		if err := t.numbers(maxMiB, map[string]*int64{"cpu_milli": &p.CPU, "memory_mib": &mib, "num_gpu": &gpus, "gpu_milli": &milli, "gpu_memory_mib": &gpuMiB}); err != nil {
			return nil, err
		}
		for model := range strings.SplitSeq(t.text("gpu_spec"), "|") {
			if model = strings.TrimSpace(model); model != "" {
				p.Models = append(p.Models, model)
			}
		}
		p.RAM, p.GPUs, p.Milli, p.GPUMemory = mib<<20, int(gpus), int(milli), quantity.Bytes(gpuMiB)<<20
		if err := p.check(); err != nil {
			return nil, fmt.Errorf("line %d: %w", t.line, err)
		}
		out = append(out, p)
	}
}

func (p *Pod) check() error {
	if p.GPUs == 0 {
		p.Milli = 0
	}
	switch {
	case p.Name == "":
		return errors.New("a pod without a name")
	case p.GPUs > maxGPUs || p.Milli > Milli:
		return fmt.Errorf("pod %s: %d thousandths of %d GPUs: must be at most %d of %d", p.Name, p.Milli, p.GPUs, Milli, maxGPUs)
	case p.GPUMemory > 0 && p.GPUMemory < leastMemory:
		return fmt.Errorf("pod %s: %v of GPU memory: must be at least 1 MiB", p.Name, p.GPUMemory)
	case p.GPUs > 0 && p.Milli == 0 && p.GPUMemory == 0:
		return fmt.Errorf("pod %s: asks for GPUs but for nothing of them", p.Name)
	}
	return nil
}

// File is our own format, YAML: nodes and pods by shape, each with a count.
type File struct {
	Nodes []nodeShape `json:"nodes"`
	Pods  []podShape  `json:"pods"`
}

// nodeShape is so many equal nodes.
type nodeShape struct {
	Name string `json:"name"`
	// Count is nil where the file does not say: one.
	Count     *int   `json:"count"`
	CPU       string `json:"cpu"`
	RAM       string `json:"ram"`
	GPUs      int    `json:"gpus"`
	Model     string `json:"model"`
	GPUMemory string `json:"gpuMemory"`
}

// podShape is so many equal pods.
type podShape struct {
	Name string `json:"name"`
	// Count is nil where the file does not say: one.
	Count *int   `json:"count"`
	CPU   string `json:"cpu"`
	RAM   string `json:"ram"`
	// GPUs is 1 where the file does not say and the pod asks for cores or memory of one.
	GPUs      int      `json:"gpus"`
	Cores     int      `json:"cores"`
	GPUMemory string   `json:"gpuMemory"`
	Models    []string `json:"models"`
}

// maxCount is how many nodes or pods one file may make.
const maxCount = 1_000_000

// ReadYAML reads our own format: what ReadNodes and ReadPods read from two files, with counts instead of
// lines. CPU is in cores (8, 500m), memory as quantities, cores in hundredths of each GPU. Errors name the entry by its
// list and its place there, from 0.
func ReadYAML(data []byte) ([]Node, []Pod, error) {
	var f File
	if err := yaml.UnmarshalStrict(data, &f); err != nil {
		return nil, nil, err
	}
	var nodes []Node
	var pods []Pod
	for i := range f.Nodes {
		n, count, err := f.Nodes[i].read(maxCount - len(nodes))
		if err != nil {
			return nil, nil, fmt.Errorf("nodes[%d]: %w", i, err)
		}
		for k := range count {
			each := n
			if count > 1 {
				each.Name = fmt.Sprintf("%s-%04d", n.Name, k)
			}
			nodes = append(nodes, each)
		}
	}
	for i := range f.Pods {
		p, count, err := f.Pods[i].read(maxCount - len(pods))
		if err != nil {
			return nil, nil, fmt.Errorf("pods[%d]: %w", i, err)
		}
		for k := range count {
			each := p
			if count > 1 {
				each.Name = fmt.Sprintf("%s-%05d", p.Name, k)
			}
			pods = append(pods, each)
		}
	}
	return nodes, pods, nil
}

// read is the node and how many there are of it, 1 to most.
func (in *nodeShape) read(most int) (Node, int, error) {
	n := Node{Name: in.Name, GPUs: in.GPUs, Model: in.Model}
	if n.Name == "" {
		return n, 0, errors.New("a node without a name")
	}
	host, err := amounts(in.CPU, in.RAM, in.GPUMemory)
	if err != nil {
		return n, 0, fmt.Errorf("node %s: %w", in.Name, err)
	}
	n.CPU, n.RAM, n.GPUMemory = host.cpu, host.ram, host.gpu
	if n.GPUs < 1 || n.GPUs > maxGPUs {
		return n, 0, fmt.Errorf("node %s: gpus %d: must be 1 to %d", in.Name, in.GPUs, maxGPUs)
	}
	count, err := countOr1(in.Count, most)
	if err != nil {
		return n, 0, fmt.Errorf("node %s: %w", in.Name, err)
	}
	return n, count, nil
}

// read is the pod and how many there are of it, 1 to most.
func (in *podShape) read(most int) (Pod, int, error) {
	p := Pod{Name: in.Name, GPUs: in.GPUs, Models: in.Models}
	if in.Cores < 0 || in.Cores > placement.CoresWhole {
		return p, 0, fmt.Errorf("pod %s: cores %d: must be 0 to %d: one GPU has %d; several need gpus, with the cores of each", in.Name, in.Cores, placement.CoresWhole, placement.CoresWhole)
	}
	if in.GPUs < 0 || in.GPUs > maxGPUs {
		return p, 0, fmt.Errorf("pod %s: gpus %d: must be 0 to %d", in.Name, in.GPUs, maxGPUs)
	}
	host, err := amounts(in.CPU, in.RAM, in.GPUMemory)
	if err != nil {
		return p, 0, fmt.Errorf("pod %s: %w", in.Name, err)
	}
	p.Milli = in.Cores * Milli / placement.CoresWhole
	if p.CPU, p.RAM, p.GPUMemory = host.cpu, host.ram, host.gpu; p.GPUs == 0 && (p.Milli > 0 || p.GPUMemory > 0) {
		p.GPUs = 1
	}
	count, err := countOr1(in.Count, most)
	if err != nil {
		return p, 0, fmt.Errorf("pod %s: %w", in.Name, err)
	}
	return p, count, p.check()
}

// countOr1 is 1 for a count that the file leaves out.
func countOr1(count *int, most int) (int, error) {
	v := 1
	if count != nil {
		v = *count
	}
	if v < 1 || v > most {
		return 0, fmt.Errorf("count %d: must be 1 or more (1 if left out), and at most %d in all", v, maxCount)
	}
	return v, nil
}

type hostAmounts struct {
	cpu, ram int64
	gpu      quantity.Bytes
}

func amounts(cpu, ram, gpu string) (hostAmounts, error) {
	var out hostAmounts
	if cpu != "" {
		scale, number := 1000.0, cpu
		if cut, ok := strings.CutSuffix(cpu, "m"); ok {
			scale, number = 1, cut
		}
		v, err := strconv.ParseFloat(number, 64)
		if err != nil || !(v >= 0 && v*scale <= maxMilli) {
			return out, fmt.Errorf("cpu %q: must be cores (8) or thousandths (500m)", cpu)
		}
		out.cpu = int64(v * scale)
	}
	host, err := memoryAmount(ram)
	if err != nil {
		return out, err
	}
	out.ram = int64(host)
	out.gpu, err = memoryAmount(gpu)
	return out, err
}

// memoryAmount is an amount of memory, 0 for none.
func memoryAmount(text string) (quantity.Bytes, error) {
	if text == "" {
		return 0, nil
	}
	return quantity.Parse(text)
}
