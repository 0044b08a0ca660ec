package gpu

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"tranche.dev/tranche/internal/topology"
)

// book is what has been learned of a node's GPUs: those of the newest report, those of earlier ones that
// are lost, and what is wrong. Pure.
type book struct {
	judge        *Judge
	driver, cuda string
	before       string // the driver's release when the faults were found that were recalled
	gpus         map[string]*GPU
	links        map[[2]string]topology.Link
	unidentified []Device
	problem      Problem
	down         bool // a problem ended, or may have ended, what the driver knew
}

func newBook(judge *Judge) *book {
	return &book{judge: judge, gpus: map[string]*GPU{}, links: map[[2]string]topology.Link{}}
}

// recall takes in faults that were found before, with the driver's release then.
func (b *book) recall(now time.Time, faults []Fault, driver string) {
	b.before = driver
	for _, f := range faults {
		b.judge.Recall(now, f)
	}
}

// release is the driver's newest that is known.
func (b *book) release() string { return cmp.Or(b.driver, b.before) }

// failed tells that the driver is of no use.
func (b *book) failed(now time.Time, p Problem) {
	b.problem = p
	b.down = b.down || p.Reason == NoDriver || p.Reason == Mismatch
	b.judge.Unreachable(now, p.Text)
}

// scanned takes a report of Inventory. True: the driver was loaded anew or replaced since the last one.
func (b *book) scanned(now time.Time, r Report) bool {
	last := b.release()
	anew := b.down || last != "" && last != r.DriverVersion
	if anew {
		b.judge.Reloaded()
	}
	b.problem, b.down = Problem{}, false
	b.driver, b.cuda = r.DriverVersion, cudaText(r.CUDAVersion)
	b.unidentified = nil
	seen := map[string]bool{}
	var mute []Device
	for _, d := range r.Devices {
		if d.mute() {
			mute = append(mute, d)
			continue
		}
		seen[d.UUID] = true
		b.learn(d)
		b.judge.Reading(now, d)
	}
	b.link(r)
	for _, d := range mute {
		// Most likely the one that was there: a lost GPU keeps its index until the driver is loaded anew.
		g := b.gpus[d.UUID]
		if g == nil {
			g = b.at(d.Index, seen)
		}
		if g == nil {
			b.unidentified = append(b.unidentified, Device{Index: d.Index, Error: d.Error, Code: d.Code})
			continue
		}
		seen[g.UUID] = true
		b.judge.Reading(now, Device{UUID: g.UUID, Error: d.Error, Code: d.Code})
	}
	for uuid := range b.judge.gpus {
		if !seen[uuid] {
			b.judge.Reading(now, Device{UUID: uuid, Error: "the driver does not list it any more", Code: gpuLost})
		}
	}
	switch {
	case len(r.Devices) == 0:
		b.problem = Problem{NoGPU, "the driver lists no GPU"}
	case len(b.unidentified) == len(r.Devices):
		b.problem = Problem{NoAnswer, fmt.Sprintf("no GPU answers; gpu %d: %s", mute[0].Index, mute[0].Error)}
	}
	return anew
}

// mute is true of a GPU that does not say what it is.
func (d *Device) mute() bool { return d.Error != "" || d.UUID == "" }

// at is the known GPU of an index that was not seen under its UUID.
func (b *book) at(index int, seen map[string]bool) *GPU {
	for uuid, g := range b.gpus {
		if g.Index == index && !seen[uuid] {
			return g
		}
	}
	return nil
}

// learn keeps what a GPU tells of itself. Its memory is that of the first time: the driver's reserve moves
// a little, and with it device IDs would come and go.
func (b *book) learn(d Device) {
	memory := d.MemoryTotal - min(d.MemoryReserved, d.MemoryTotal)
	if g := b.gpus[d.UUID]; g != nil && g.Memory > 0 && g.Memory <= d.MemoryTotal && d.MemoryTotal-g.Memory < d.MemoryTotal/8 {
		memory = g.Memory
	}
	b.gpus[d.UUID] = &GPU{Index: d.Index, Minor: d.Minor, UUID: d.UUID, Name: d.Name, PCI: d.PCI, Memory: memory,
		NUMA: d.NUMA, MIG: d.MIG, ComputeMode: d.ComputeMode, Excluded: excluded(d)}
}

// excluded says why a GPU is not shared in its mode, and what to do.
func excluded(d Device) string {
	const exclusiveThread, prohibited, exclusiveProcess = 1, 2, 3
	switch {
	case d.MIG:
		return fmt.Sprintf("MIG mode is on: `nvidia-smi -i %d -mig 0` makes it one GPU again", d.Index)
	case d.ComputeMode == exclusiveThread || d.ComputeMode == exclusiveProcess:
		return fmt.Sprintf("compute mode is exclusive, one process at a time: `nvidia-smi -i %d -c 0` ends that", d.Index)
	case d.ComputeMode == prohibited:
		return fmt.Sprintf("compute mode is prohibited: `nvidia-smi -i %d -c 0` ends that", d.Index)
	}
	return ""
}

// link keeps the links between GPUs that answer; those of a lost one stay as they were.
func (b *book) link(r Report) {
	var nodes []topology.Node
	var uuids []string
	for _, d := range r.Devices {
		if d.mute() {
			continue
		}
		n := topology.Node{Bus: d.PCI, LaneMBps: d.NVLinkMBps, PCIeMBps: d.PCIeMBps}
		for _, other := range r.Devices {
			if other.mute() {
				continue
			}
			level := -1
			if other.Index >= 0 && other.Index < len(d.Ancestors) {
				level = d.Ancestors[other.Index]
			}
			n.Ancestors = append(n.Ancestors, level)
		}
		for _, l := range d.NVLinks {
			n.Lanes = append(n.Lanes, topology.Lane{Switch: l.Type == "switch", Peer: gpuBus(l)})
		}
		nodes, uuids = append(nodes, n), append(uuids, d.UUID)
	}
	m := topology.Build(nodes)
	for i := range uuids {
		for j := range uuids {
			b.links[[2]string{uuids[i], uuids[j]}] = m[i][j]
		}
	}
}

func gpuBus(l NVLink) string {
	if l.Type == "gpu" {
		return l.PCI
	}
	return ""
}

// answering names the GPUs that a feed of health can watch.
func (b *book) answering() string {
	var uuids []string
	for uuid := range b.gpus {
		if g := b.judge.gpus[uuid]; g != nil && g.error == "" {
			uuids = append(uuids, uuid)
		}
	}
	slices.Sort(uuids)
	return strings.Join(uuids, ",")
}

// sick is true while some GPU is not as it should be.
func (b *book) sick() bool {
	for uuid := range b.gpus {
		if !b.judge.State(uuid).Healthy {
			return true
		}
	}
	return len(b.unidentified) > 0
}

func (b *book) inventory() Inventory {
	inv := Inventory{Driver: b.driver, CUDA: b.cuda, Unidentified: slices.Clone(b.unidentified), Problem: b.problem}
	for _, g := range b.gpus {
		copied := *g
		copied.State = b.judge.State(g.UUID)
		inv.GPUs = append(inv.GPUs, copied)
	}
	slices.SortFunc(inv.GPUs, func(a, b GPU) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
	})
	inv.Links = topology.New(len(inv.GPUs))
	for i := range inv.GPUs {
		for j := range inv.GPUs {
			if l, ok := b.links[[2]string{inv.GPUs[i].UUID, inv.GPUs[j].UUID}]; ok {
				inv.Links[i][j] = l
			}
		}
	}
	return inv
}

// cudaText is a CUDA version as people write it: 12040 is 12.4.
func cudaText(version int) string {
	if version == 0 {
		return ""
	}
	return fmt.Sprintf("%d.%d", version/1000, version%1000/10)
}
