// Package inventory is what a node publishes of its GPUs and a scheduler reads: the annotation
// podspec.Inventory of the Node object, JSON. It holds facts about the hardware and about use that no pod
// shows (other programs, limits raised above what a pod asked); what pods hold follows from the pods
// themselves. Pure: no I/O.
package inventory

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

const (
	// Version of the format. A reader takes its own version only.
	Version = 1
	// MaxGPUs is the most GPUs of a node, MaxBytes the most bytes of the annotation.
	MaxGPUs  = 64
	MaxBytes = 64 << 10
)

// Node is what is published.
type Node struct {
	Version int `json:"version"`
	// Driver and CUDA are versions, as 550.163.01 and 12.4.
	Driver string `json:"driver,omitempty"`
	CUDA   string `json:"cuda,omitempty"`
	// Unit is one unit of the node's memory resource in bytes, Domain its resource domain.
	Unit   uint64 `json:"unit"`
	Domain string `json:"domain"`
	// Problem says why there are no GPUs to share, for people; empty: nothing is wrong.
	Problem string `json:"problem,omitempty"`
	// GPUs by index.
	GPUs []GPU `json:"gpus,omitempty"`
	// Links has a row of len(GPUs) connections for each GPU but the first, to those before it, separated by
	// spaces, in the words of nvidia-smi topo: X, NV12, PIX, PXB, PHB, NODE, SYS. NVLink and PCIe level of one
	// pair are joined by '+': NV12+SYS. Empty: not known.
	Links []string `json:"links,omitempty"`
}

// GPU is one of the node's.
type GPU struct {
	Index int    `json:"index"`
	Minor int    `json:"minor"`
	UUID  string `json:"uuid"`
	Model string `json:"model"`
	// Memory that can be shared, in bytes: whole units.
	Memory uint64 `json:"memory"`
	// NUMA node, -1: unknown.
	NUMA int `json:"numa"`
	// Unusable says why nothing new may be placed here: unhealthy, MIG, left out. Empty: it may.
	Unusable string `json:"unusable,omitempty"`
	// Foreign is used by others than our pods: pods of other device plugins, programs outside of pods.
	Foreign Amount `json:"foreign,omitzero"`
	// Raised is what running containers were given above what their pods ask. What was taken from them is free
	// for nobody else, as kubelet still counts it for their pods.
	Raised Amount `json:"raised,omitzero"`
}

// Amount of a GPU. A whole GPU that is held by others is 100 cores.
type Amount struct {
	Cores  int    `json:"cores,omitempty"`  // hundredths
	Memory uint64 `json:"memory,omitempty"` // bytes
}

// Encode writes the annotation. It fails for a node that Decode would not take.
func Encode(n Node) (string, error) {
	n.Version = Version
	if err := n.validate(); err != nil {
		return "", err
	}
	data, err := json.Marshal(n)
	if err != nil {
		return "", err
	}
	if len(data) > MaxBytes {
		return "", fmt.Errorf("the inventory takes %d bytes, more than %d", len(data), MaxBytes)
	}
	return string(data), nil
}

// Decode reads the annotation. What it returns is consistent: indexes and UUIDs are unique and amounts in
// range. ErrVersion: another version of Tranche wrote it.
func Decode(text string) (Node, error) {
	var n Node
	if len(text) > MaxBytes {
		return n, fmt.Errorf("%d bytes, more than %d", len(text), MaxBytes)
	}
	var v struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		return n, fmt.Errorf("not JSON: %w", err)
	}
	if v.Version != Version {
		return n, fmt.Errorf("%w: %d, this is %d", ErrVersion, v.Version, Version)
	}
	if err := json.Unmarshal([]byte(text), &n); err != nil {
		return Node{}, err
	}
	if err := n.validate(); err != nil {
		return Node{}, err
	}
	return n, nil
}

// ErrVersion says that the inventory has another version.
var ErrVersion = errors.New("inventory of another version")

func (n Node) validate() error {
	if len(n.GPUs) > MaxGPUs {
		return fmt.Errorf("%d GPUs, more than %d", len(n.GPUs), MaxGPUs)
	}
	if len(n.GPUs) > 0 && (n.Unit < 1<<20 || n.Domain == "") {
		return fmt.Errorf("unit of %d bytes, domain %q: GPUs need both", n.Unit, n.Domain)
	}
	indexes, uuids := map[int]bool{}, map[string]bool{}
	for _, g := range n.GPUs {
		switch {
		case g.UUID == "" || len(g.UUID) > 64 || uuids[g.UUID]:
			return fmt.Errorf("gpu %d: UUID %q is missing, too long or there twice", g.Index, g.UUID)
		case g.Index < 0 || g.Index > 1024 || indexes[g.Index]:
			return fmt.Errorf("gpu %s: index %d is out of range or there twice", g.UUID, g.Index)
		case g.Memory > 1<<50:
			return fmt.Errorf("gpu %s: %d bytes of memory", g.UUID, g.Memory)
		}
		for _, a := range []Amount{g.Foreign, g.Raised} {
			if a.Cores < 0 || a.Cores > 100 || a.Memory > 1<<50 {
				return fmt.Errorf("gpu %s: %d cores and %d bytes used by others", g.UUID, a.Cores, a.Memory)
			}
		}
		indexes[g.Index], uuids[g.UUID] = true, true
	}
	_, err := n.Matrix()
	return err
}

// Link is how two GPUs are connected.
type Link struct {
	// NVLinks between them, 0: none.
	NVLinks int
	// Level of the PCIe path: PIX, PXB, PHB, NODE or SYS; empty: not known.
	Level string
}

// Matrix returns the links by positions in GPUs, symmetric; nil when they are not known.
func (n Node) Matrix() ([][]Link, error) {
	if len(n.Links) == 0 {
		return nil, nil
	}
	if len(n.Links) != len(n.GPUs)-1 {
		return nil, fmt.Errorf("links of %d GPUs to those before, there are %d GPUs", len(n.Links), len(n.GPUs))
	}
	out := make([][]Link, len(n.GPUs))
	for i := range out {
		out[i] = make([]Link, len(n.GPUs))
	}
	for i, row := range n.Links {
		words := strings.Fields(row)
		if len(words) != i+1 {
			return nil, fmt.Errorf("links of gpu %d: %d, must be %d", i+1, len(words), i+1)
		}
		for j, word := range words {
			l, err := parseLink(word)
			if err != nil {
				return nil, fmt.Errorf("links of gpu %d: %w", i+1, err)
			}
			out[i+1][j], out[j][i+1] = l, l
		}
	}
	return out, nil
}

func parseLink(word string) (Link, error) {
	var l Link
	for part := range strings.SplitSeq(word, "+") {
		digits, nv := strings.CutPrefix(part, "NV")
		switch {
		case nv && l.NVLinks == 0:
			v, err := strconv.Atoi(digits)
			if err != nil || v < 1 || v > 64 {
				return l, fmt.Errorf("%q: NV needs 1 to 64", word)
			}
			l.NVLinks = v
		case l.Level == "" && (part == "PIX" || part == "PXB" || part == "PHB" || part == "NODE" || part == "SYS"):
			l.Level = part
		case word == "X":
		default:
			return l, fmt.Errorf("%q is no connection", word)
		}
	}
	return l, nil
}

// SetMatrix fills Links from a matrix by positions in GPUs.
func (n *Node) SetMatrix(links [][]Link) {
	n.Links = nil
	for i := 1; i < len(links); i++ {
		words := make([]string, i)
		for j := range i {
			words[j] = links[i][j].String()
		}
		n.Links = append(n.Links, strings.Join(words, " "))
	}
}

func (l Link) String() string {
	switch {
	case l.NVLinks > 0 && l.Level != "":
		return fmt.Sprintf("NV%d+%s", l.NVLinks, l.Level)
	case l.NVLinks > 0:
		return fmt.Sprintf("NV%d", l.NVLinks)
	case l.Level != "":
		return l.Level
	}
	return "X"
}
