// Package topology is the link graph of a node's GPUs: how far apart each pair is on PCIe, how many
// NVLinks join it, and about how fast the path is. It is built from what NVML tells (Build) or read from
// the text of `nvidia-smi topo -m` (Parse).
//
// Pure: no input or output, no clock. It imports nothing of this project, so that placement, the
// scheduler and the simulator use it as the node does.
package topology

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Level is what lies between two GPUs on PCIe, nearest first, by nvidia-smi's names.
type Level uint8

// Levels.
const (
	Unknown Level = iota // not told: nvidia-smi shows NV# in its place
	Self                 // the GPU itself
	PIX                  // at most one PCIe bridge; two GPUs of one board too
	PXB                  // several PCIe bridges, no host bridge
	PHB                  // a host bridge
	NODE                 // host bridges of one NUMA node
	SYS                  // the link between NUMA nodes
)

var levelNames = [...]string{"?", "X", "PIX", "PXB", "PHB", "NODE", "SYS"}

func (l Level) String() string {
	if int(l) < len(levelNames) {
		return levelNames[l]
	}
	return "Level(" + strconv.Itoa(int(l)) + ")"
}

// MarshalText implements encoding.TextMarshaler.
func (l Level) MarshalText() ([]byte, error) {
	if int(l) >= len(levelNames) {
		return nil, fmt.Errorf("topology: no level %d", l)
	}
	return []byte(levelNames[l]), nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (l *Level) UnmarshalText(text []byte) error {
	for i, name := range levelNames {
		if name == string(text) {
			*l = Level(i)
			return nil
		}
	}
	return fmt.Errorf("topology: no level %q", text)
}

// Link is the path between two GPUs.
type Link struct {
	Level Level `json:"level"`
	// NVLinks is how many join the two: directly, or each of them to the switches.
	NVLinks int `json:"nvlinks,omitempty"`
	// Switched: through NVSwitches, so the NVLinks of a GPU serve all of its peers.
	Switched bool `json:"switched,omitempty"`
	// GBps is an estimate of the bandwidth in one direction, in 10^9 bytes a second. It orders paths; it
	// was not measured.
	GBps float64 `json:"gbps"`
}

// String is nvidia-smi's cell: X, NV12, PXB.
func (l Link) String() string {
	if l.NVLinks > 0 {
		return "NV" + strconv.Itoa(l.NVLinks)
	}
	return l.Level.String()
}

// Matrix holds the link of each pair of GPUs: square, symmetric, Self on the diagonal. Its positions are
// those of the list of GPUs that it goes with.
type Matrix [][]Link

// New is a matrix of n GPUs of which no link is known.
func New(n int) Matrix {
	m := make(Matrix, n)
	for i := range m {
		m[i] = make([]Link, n)
		m[i][i].Level = Self
	}
	return m
}

// At is the link between two positions; one that is not there is Unknown.
func (m Matrix) At(i, j int) Link {
	if i < 0 || i >= len(m) || j < 0 || j >= len(m[i]) {
		return Link{}
	}
	return m[i][j]
}

// set writes both directions.
func (m Matrix) set(i, j int, l Link) { m[i][j], m[j][i] = l, l }

// Pick is the matrix of these positions, in this order.
func (m Matrix) Pick(positions []int) Matrix {
	out := New(len(positions))
	for a, i := range positions {
		for b, j := range positions {
			if a != b {
				out[a][b] = m.At(i, j)
			}
		}
	}
	return out
}

// Validate says why a matrix from elsewhere is none.
func (m Matrix) Validate() error {
	for i, row := range m {
		if len(row) != len(m) {
			return fmt.Errorf("topology: row %d has %d cells, there are %d GPUs", i, len(row), len(m))
		}
	}
	for i := range m {
		for j := range m {
			switch l := m[i][j]; {
			case (i == j) != (l.Level == Self):
				return fmt.Errorf("topology: cell %d,%d is %s", i, j, l)
			case l != m[j][i]:
				return fmt.Errorf("topology: cell %d,%d is %+v, cell %d,%d is %+v", i, j, l, j, i, m[j][i])
			case l.NVLinks < 0 || !(l.GBps >= 0 && l.GBps < 1e6):
				return fmt.Errorf("topology: cell %d,%d: %d NVLinks, %g GB/s", i, j, l.NVLinks, l.GBps)
			case int(l.Level) >= len(levelNames):
				return errors.New("topology: " + l.Level.String())
			}
		}
	}
	return nil
}

// String is the table as nvidia-smi prints it, GPUs only.
func (m Matrix) String() string {
	var b strings.Builder
	for j := range m {
		fmt.Fprintf(&b, "\tGPU%d", j)
	}
	b.WriteByte('\n')
	for i, row := range m {
		fmt.Fprintf(&b, "GPU%d", i)
		for _, l := range row {
			b.WriteString("\t" + l.String())
		}
		b.WriteByte('\n')
	}
	return b.String()
}
