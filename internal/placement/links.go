package placement

import "math/bits"

// Link is what connects two GPUs.
type Link struct {
	// Level is the PCIe distance as NVML counts it: 0 same board, 10 PIX, 20 PXB, 30 PHB, 40 NODE, 50 SYS.
	Level int
	// Bandwidth over NVLink in GB/s each way, summed over the pair's links; 0: none.
	Bandwidth int
}

// Links is a symmetric matrix over the positions of a node's GPUs. The diagonal is not looked at.
type Links [][]Link

func (l Links) at(i, j int) Link {
	if i < len(l) && j < len(l[i]) {
		return l[i][j]
	}
	return Link{}
}

// set is a set of positions in a node's GPUs.
type set uint64

func (s set) has(i int) bool { return s>>i&1 != 0 }
func (s set) len() int       { return bits.OnesCount64(uint64(s)) }
func (s set) first() int     { return bits.TrailingZeros64(uint64(s)) }

// list gives the members in order.
func (s set) list() []int {
	out := make([]int, 0, s.len())
	for ; s != 0; s &= s - 1 {
		out = append(out, s.first())
	}
	return out
}

// exactGPUs is up to how many eligible GPUs all subsets are tried: 12,870 for 8 of 16.
const exactGPUs = 16

// quality is how good a subset of GPUs is for one container that uses them together, compared field by
// field, less is better: how many models it mixes; the weakest NVLink of any pair, and the sum of all;
// the worst PCIe level, and the sum; then the same sums over what is left, so that later containers
// find well linked GPUs too.
type quality [7]int

func (q quality) better(than quality) bool {
	for i := range q {
		if q[i] != than[i] {
			return q[i] < than[i]
		}
	}
	return false
}

// best finds the best k of the eligible GPUs, of equal ones that with the lowest positions. It is exact up
// to exactGPUs; above, it grows a set from each GPU and keeps the best. Fewer than k: the empty set.
func best(gpus []GPU, links Links, eligible set, k int) set {
	n := eligible.len()
	if k <= 0 || n < k {
		return 0
	}
	if n == k {
		return eligible
	}
	l := newLinked(gpus, links, eligible)
	switch {
	case l.alike:
		for n > k {
			eligible &^= 1 << (bits.Len64(uint64(eligible)) - 1)
			n--
		}
		return eligible
	case n <= exactGPUs:
		l.enumerate(0, k, inside{weakest: maxBandwidth})
	default:
		l.grow(k)
	}
	return l.found
}

const maxBandwidth = 1 << 30

// linked is the state of one search for a subset.
type linked struct {
	gpus  []GPU
	links Links
	at    []int
	// degree of each eligible GPU to the other eligible ones: sums of bandwidth and of levels.
	bandwidth, level       []int
	allBandwidth, allLevel int
	alike                  bool
	found                  set
	quality                quality
}

// inside is what is known of a set while it grows.
type inside struct {
	set                                      set
	models, weakest, bandwidth, worst, level int
	// degreeBandwidth, degreeLevel sum the members' degrees.
	degreeBandwidth, degreeLevel int
}

func newLinked(gpus []GPU, links Links, eligible set) *linked {
	l := &linked{gpus: gpus, links: links, at: eligible.list(), alike: true}
	l.bandwidth, l.level = make([]int, len(l.at)), make([]int, len(l.at))
	first := links.at(l.at[0], l.at[1])
	for a, i := range l.at {
		l.alike = l.alike && gpus[i].Name == gpus[l.at[0]].Name
		for b, j := range l.at[:a] {
			link := links.at(i, j)
			l.alike = l.alike && link == first
			l.bandwidth[a] += link.Bandwidth
			l.bandwidth[b] += link.Bandwidth
			l.level[a] += link.Level
			l.level[b] += link.Level
			l.allBandwidth += link.Bandwidth
			l.allLevel += link.Level
		}
	}
	return l
}

// with is the set with the eligible GPU a added.
func (l *linked) with(in inside, a int) inside {
	i, newModel := l.at[a], 1
	for s := in.set; s != 0; s &= s - 1 {
		j := s.first()
		link := l.links.at(i, j)
		in.weakest = min(in.weakest, link.Bandwidth)
		in.bandwidth += link.Bandwidth
		in.worst = max(in.worst, link.Level)
		in.level += link.Level
		if l.gpus[i].Name == l.gpus[j].Name {
			newModel = 0
		}
	}
	in.set |= 1 << i
	in.models += newModel
	in.degreeBandwidth += l.bandwidth[a]
	in.degreeLevel += l.level[a]
	return in
}

// offer keeps a set if it is better than those before.
func (l *linked) offer(in inside) {
	left := l.allBandwidth - in.degreeBandwidth + in.bandwidth
	leftLevel := l.allLevel - in.degreeLevel + in.level
	q := quality{in.models, -in.weakest, -in.bandwidth, in.worst, in.level, -left, leftLevel}
	if l.found == 0 || q.better(l.quality) {
		l.found, l.quality = in.set, q
	}
}

// enumerate offers all sets of k more GPUs from position a on, in lexicographic order.
func (l *linked) enumerate(a, k int, in inside) {
	if k == 0 {
		l.offer(in)
		return
	}
	for ; a <= len(l.at)-k; a++ {
		l.enumerate(a+1, k-1, l.with(in, a))
	}
}

// grow offers one set for each GPU: that GPU and, step by step, the one that makes the best set with it.
func (l *linked) grow(k int) {
	for seed := range l.at {
		in := l.with(inside{weakest: maxBandwidth}, seed)
		for in.set.len() < k {
			step := linked{allBandwidth: l.allBandwidth, allLevel: l.allLevel}
			var next inside
			for a, i := range l.at {
				if in.set.has(i) {
					continue
				}
				with := l.with(in, a)
				if before := step.found; true {
					step.offer(with)
					if step.found != before {
						next = with
					}
				}
			}
			in = next
		}
		l.offer(in)
	}
}

// linkCost ranks sets of GPUs on different nodes by their weakest link: NVLink bandwidth, then PCIe level.
func linkCost(links Links, gpus set) int64 {
	at := gpus.list()
	weakest, worst := maxBandwidth, 0
	for a, i := range at {
		for _, j := range at[:a] {
			link := links.at(i, j)
			weakest, worst = min(weakest, link.Bandwidth), max(worst, link.Level)
		}
	}
	return -int64(weakest)<<8 + int64(worst)
}
