package books

import (
	"math/bits"
	"strconv"
	"strings"
)

// separator stands between the UUID and the number in a device ID.
const separator = "::"

// idMax bounds the number in an ID that kubelet holds: 1 TiB of the smallest unit.
const idMax = 1 << 20

// ids is a set of device IDs of one resource: for each GPU, by its position in the books, a bit for each number.
type ids [][]uint64

func (s *ids) add(gpu, n int) {
	for len(*s) <= gpu {
		*s = append(*s, nil)
	}
	words := (*s)[gpu]
	for len(words) <= n/64 {
		words = append(words, 0)
	}
	words[n/64] |= 1 << (n % 64)
	(*s)[gpu] = words
}

func (s ids) count(gpu int) int {
	if gpu >= len(s) {
		return 0
	}
	total := 0
	for _, w := range s[gpu] {
		total += bits.OnesCount64(w)
	}
	return total
}

func (s ids) total() int {
	total := 0
	for g := range s {
		total += s.count(g)
	}
	return total
}

// gpus are those of which there is an ID, in order.
func (s ids) gpus() []int {
	var out []int
	for g := range s {
		if s.count(g) > 0 {
			out = append(out, g)
		}
	}
	return out
}

func (s ids) word(gpu, i int) uint64 {
	if gpu >= len(s) || i >= len(s[gpu]) {
		return 0
	}
	return s[gpu][i]
}

func (s ids) intersects(t ids) bool {
	for g := range s {
		for i, w := range s[g] {
			if w&t.word(g, i) != 0 {
				return true
			}
		}
	}
	return false
}

func (s ids) contains(t ids) bool {
	for g := range t {
		for i, w := range t[g] {
			if w&^s.word(g, i) != 0 {
				return false
			}
		}
	}
	return true
}

func (s ids) equal(t ids) bool { return s.contains(t) && t.contains(s) }

func (s *ids) union(t ids) {
	t.each(func(g, n int) bool { s.add(g, n); return true })
}

func (s ids) minus(t ids) ids {
	out := make(ids, len(s))
	for g := range s {
		out[g] = make([]uint64, len(s[g]))
		for i, w := range s[g] {
			out[g][i] = w &^ t.word(g, i)
		}
	}
	return out
}

// each calls f in order until it returns false.
func (s ids) each(f func(gpu, n int) bool) {
	for g := range s {
		for i, w := range s[g] {
			for ; w != 0; w &= w - 1 {
				if !f(g, i*64+bits.TrailingZeros64(w)) {
					return
				}
			}
		}
	}
}

// parse reads device IDs. bad is one that none of our GPUs has, empty if there is none.
func (b *Books) parse(res Resource, names []string) (set ids, bad string) {
	for _, name := range names {
		end := strings.LastIndexByte(name, ':')
		uuid, ok := strings.CutSuffix(name[:end+1], separator)
		g, known := b.byUUID[uuid]
		n, err := strconv.Atoi(name[end+1:])
		if !ok || !known || err != nil || n < 0 || n >= b.gpus[g].size(res) {
			return nil, name
		}
		set.add(g, n)
	}
	return set, ""
}

func (b *Books) names(res Resource, set ids) []string {
	out := make([]string, 0, set.total())
	var of []string
	last := -1
	set.each(func(g, n int) bool {
		if g != last {
			last, of = g, b.spell(res, g)
		}
		out = append(out, of[n])
		return true
	})
	return out
}

// IDs are all device IDs of a GPU for a resource, in order. The caller must not change them.
func (b *Books) IDs(uuid string, res Resource) []string {
	g, ok := b.byUUID[uuid]
	if !ok {
		return nil
	}
	return b.spell(res, g)
}

// spell is IDs by position. They are made once: there are thousands, and most calls name many.
func (b *Books) spell(res Resource, g int) []string {
	for len(b.spelled[res]) <= g {
		b.spelled[res] = append(b.spelled[res], nil)
	}
	known, size := b.spelled[res][g], b.gpus[g].size(res)
	for n := len(known); n < size; n++ {
		known = append(known, b.gpus[g].UUID+separator+strconv.Itoa(n))
	}
	b.spelled[res][g] = known
	return known[:size]
}
