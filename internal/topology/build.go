package topology

import "math"

// Lane is one NVLink of a GPU that is up.
type Lane struct {
	// Switch: its other end is an NVSwitch; else Peer is the bus of the GPU there, "" for anything else.
	Switch bool
	Peer   string
}

// Node is one GPU as NVML shows it.
type Node struct {
	// Bus names it, as other nodes' lanes do.
	Bus string
	// Ancestors has NVML's common-ancestor level (nvmlGpuTopologyLevel_t: 0, 10 ... 50) with the GPU at
	// each position, anything else where NVML did not tell.
	Ancestors []int
	Lanes     []Lane
	LaneMBps  int // of one lane in one direction, 10^6 bytes a second; 0: not told
	PCIeMBps  int // of its PCIe link in one direction; 0: not told
}

// What is taken where NVML does not tell: PCIe 3.0 x16, and a lane of NVLink 2 to 4.
const (
	pcieMBps = 15_760
	laneMBps = 25_000
)

// levelPart is what of a PCIe link's bandwidth is expected to reach a peer: each hop costs some, host
// bridges more, the link between sockets most. The order is what matters.
var levelPart = [...]float64{PIX: 1, PXB: 0.95, PHB: 0.8, NODE: 0.6, SYS: 0.4}

// Build makes the matrix of these GPUs.
func Build(nodes []Node) Matrix {
	m := New(len(nodes))
	for i := range nodes {
		for j := range i {
			a, b := &nodes[i], &nodes[j]
			link := Link{Level: level(a.Ancestors, j)}
			if link.Level == Unknown {
				link.Level = level(b.Ancestors, i)
			}
			link.NVLinks = min(a.lanesTo(b.Bus), b.lanesTo(a.Bus))
			if link.NVLinks == 0 {
				link.NVLinks = min(a.switched(), b.switched())
				link.Switched = link.NVLinks > 0
			}
			link.GBps = estimate(link, min(or(a.LaneMBps, laneMBps), or(b.LaneMBps, laneMBps)),
				min(or(a.PCIeMBps, pcieMBps), or(b.PCIeMBps, pcieMBps)))
			m.set(i, j, link)
		}
	}
	return m
}

func or(value, other int) int {
	if value > 0 {
		return value
	}
	return other
}

// level turns NVML's number into ours.
func level(ancestors []int, at int) Level {
	if at >= len(ancestors) {
		return Unknown
	}
	switch ancestors[at] {
	case 0, 10: // one board, one bridge
		return PIX
	case 20:
		return PXB
	case 30:
		return PHB
	case 40:
		return NODE
	case 50:
		return SYS
	}
	return Unknown
}

func (n *Node) lanesTo(bus string) int {
	count := 0
	for _, l := range n.Lanes {
		if !l.Switch && l.Peer != "" && l.Peer == bus {
			count++
		}
	}
	return count
}

func (n *Node) switched() int {
	count := 0
	for _, l := range n.Lanes {
		if l.Switch {
			count++
		}
	}
	return count
}

// estimate is the path's bandwidth in GB/s, to a tenth.
func estimate(l Link, lane, pcie int) float64 {
	mbps := float64(l.NVLinks * lane)
	if l.NVLinks == 0 {
		mbps = float64(pcie) * levelPart[l.Level]
	}
	return math.Round(mbps/100) / 10
}
