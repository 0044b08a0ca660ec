package placement

import (
	"hash/maphash"
	"math/bits"
	"strings"
)

// finder finds nodes' slots by name. A decision asks for thousands of names in any order: so the names are
// close together here and nothing of the nodes is touched.
type finder struct {
	seed  maphash.Seed
	names []string // by slot
	// cells are slots + 1 by hash, 0 for none, the next free one when that is taken. At most a sixth is used.
	cells []int32
}

// newFinder knows the nodes by their slots; nil is a slot that is free.
func newFinder(nodes []*node) *finder {
	f := &finder{seed: maphash.MakeSeed(), names: make([]string, len(nodes)), cells: make([]int32, 1<<bits.Len(uint(6*len(nodes))))}
	var all strings.Builder
	for _, n := range nodes {
		if n != nil {
			all.WriteString(n.Name)
		}
	}
	rest := all.String()
	for slot, n := range nodes {
		if n == nil {
			continue
		}
		f.names[slot], rest = rest[:len(n.Name)], rest[len(n.Name):]
		at := f.at(n.Name)
		for f.cells[at] != 0 {
			at = (at + 1) & (len(f.cells) - 1)
		}
		f.cells[at] = int32(slot) + 1
	}
	return f
}

func (f *finder) at(name string) int {
	return int(maphash.String(f.seed, name) & uint64(len(f.cells)-1))
}

// find returns the names' slots, -1 for none. last is an answer of this finder, or empty: if the names seem to come in the
// same order again, it is only checked. Else each step is a loop of its own, so that the processor waits for many
// names' memory at a time. The answer takes the place of last.
func (f *finder) find(names []string, last []int32) []int32 {
	is := func(i int) bool { return last[i] >= 0 && f.names[last[i]] == names[i] }
	if n := len(names); n > 0 && n == len(last) && is(0) && is(n/2) && is(n-1) {
		for i := range last {
			if !is(i) {
				last[i] = f.search(names[i])
			}
		}
		return last
	}
	slots := last[:0]
	for _, name := range names {
		slots = append(slots, int32(f.at(name)))
	}
	for i, at := range slots {
		slots[i] = f.cells[at] - 1
	}
	for i, slot := range slots {
		if slot >= 0 && f.names[slot] != names[i] {
			slots[i] = f.search(names[i])
		}
	}
	return slots
}

// search finds a name whose first cell has another one.
func (f *finder) search(name string) int32 {
	for at := f.at(name); f.cells[at] != 0; at = (at + 1) & (len(f.cells) - 1) {
		if slot := f.cells[at] - 1; f.names[slot] == name {
			return slot
		}
	}
	return -1
}
