package display

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Graph draws the GPUs as a tree, in the form that gpu-manager drew it: the root with the number of
// GPUs that can be taken whole, below it a line for each GPU, and for each group of GPUs that are near
// each other, those with the fewest whole ones first. A group's figures are the sums of its GPUs'. Memory is in bytes. A GPU that is not
// shared has the reason behind its line; nothing of it counts as allocatable.
func Graph(s Snapshot) string {
	root := &branch{level: root, children: tree(s.GPUs)}
	root.sum()
	var b strings.Builder
	fmt.Fprintf(&b, "ROOT:%d\n", root.whole)
	for _, c := range root.children {
		c.write(&b, 0)
	}
	return b.String()
}

const (
	leaf Level = 0
	root Level = -1
)

// branch is a GPU or a group of branches.
type branch struct {
	level    Level // leaf, root, or of the group
	gpu      *GPU  // of a leaf
	children []*branch
	first    int // lowest Index
	whole    int // GPUs that can be taken whole
	// Sums over the GPUs.
	pids                      []int
	used, total, cores, bytes uint64
}

// tree groups GPUs level by level: those that a link of the level connects, with what they were
// grouped with before, become one branch.
func tree(gpus []GPU) []*branch {
	top := make([]*branch, len(gpus)) // by position: the branch that the GPU is in now
	at := map[int]int{}
	for i := range gpus {
		top[i] = &branch{level: leaf, gpu: &gpus[i]}
		at[gpus[i].Index] = i
	}
	for level := LevelSwitch; level <= LevelSystem; level += 10 {
		for i, g := range gpus {
			for _, l := range g.Links {
				if j, ok := at[l.Peer]; ok && bucket(l.Level) == level && top[i] != top[j] {
					join(top, top[i], top[j], level)
				}
			}
		}
	}
	var out []*branch
	for _, b := range top {
		if !slices.Contains(out, b) {
			out = append(out, b)
		}
	}
	return out
}

// join makes one branch of a and b, or takes one into the other if that is of the level already.
func join(top []*branch, a, b *branch, level Level) {
	if a.level != level {
		a, b = b, a
	}
	into := a
	switch {
	case a.level != level:
		into = &branch{level: level, children: []*branch{a, b}}
	case b.level == level:
		a.children = append(a.children, b.children...)
	default:
		a.children = append(a.children, b)
	}
	for i := range top {
		if top[i] == a || top[i] == b {
			top[i] = into
		}
	}
}

// bucket is the level in steps of ten, as the originals knew it.
func bucket(l Level) Level {
	return min(max((l+9)/10*10, LevelSwitch), LevelSystem)
}

func (b *branch) sum() {
	if g := b.gpu; g != nil {
		b.first, b.pids, b.used, b.total = g.Index, g.PIDs, g.UsedMemory, g.Memory
		if g.Healthy {
			b.cores, b.bytes = uint64(max(g.FreeCores, 0)), uint64(max(g.FreeMemory, 0))
			if g.Idle {
				b.whole = 1
			}
		}
		return
	}
	for i, c := range b.children {
		c.sum()
		if i == 0 || c.first < b.first {
			b.first = c.first
		}
		b.whole += c.whole
		b.pids = append(b.pids, c.pids...)
		b.used, b.total, b.cores, b.bytes = b.used+c.used, b.total+c.total, b.cores+c.cores, b.bytes+c.bytes
	}
	slices.Sort(b.pids)
	slices.SortFunc(b.children, func(x, y *branch) int {
		if c := cmp.Compare(x.level, y.level); c != 0 || x.level == leaf {
			return cmp.Or(c, cmp.Compare(x.first, y.first))
		}
		return cmp.Or(cmp.Compare(x.whole, y.whole), cmp.Compare(x.first, y.first))
	})
}

func (b *branch) write(w *strings.Builder, depth int) {
	w.WriteString(strings.Repeat("|   ", depth) + "|---")
	figures := fmt.Sprintf("pids: %v, usedMemory: %d, totalMemory: %d, allocatableCores: %d, allocatableMemory: %d", b.pids, b.used, b.total, b.cores, b.bytes)
	if g := b.gpu; g != nil {
		fmt.Fprintf(w, "GPU%d (%s)", g.Index, figures)
		if !g.Healthy {
			w.WriteString(" unhealthy: " + oneLine(g.Reason))
		}
		w.WriteString("\n")
		return
	}
	fmt.Fprintf(w, "%s (aval: %d, %s)\n", b.level, b.whole, figures)
	for _, c := range b.children {
		c.write(w, depth+1)
	}
}

// String is the level's name in the originals.
func (l Level) String() string {
	return map[Level]string{LevelSwitch: "PIX", LevelSwitches: "PXB", LevelBridge: "PHB", LevelNode: "CPU", LevelSystem: "SYS"}[bucket(l)]
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
