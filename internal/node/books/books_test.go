package books

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/quantity"
)

const unit = 256 << 20

// desk is books of GPUs A, B, ... of 320 units, and what kubelet took, by IDs.
type desk struct {
	*Books
	t     *testing.T
	taken [2]map[string]bool
}

func newDesk(t *testing.T, gpus int) *desk {
	d := &desk{Books: New(unit, false), t: t, taken: [2]map[string]bool{{}, {}}}
	var list []GPU
	for i := range gpus {
		list = append(list, GPU{UUID: "GPU-" + string(rune('A'+i)), Index: i, Minor: i, Units: 320, Bytes: 320 * unit})
	}
	d.SetGPUs(list, nil)
	return d
}

// asking is a pod of a container c.
func asking(name string, cores, units int) Pod {
	return Pod{UID: "uid-" + name, Namespace: "n", Name: name, Created: time.Unix(int64(name[0]), 0), Ask: podspec.Ask{Containers: []podspec.Container{
		{Name: "c", Cores: cores, Units: int64(units), Ceiling: cores, Request: placement.Request{Cores: cores, Count: 1, Memory: quantity.Bytes(units) * unit}}}}}
}

// call does what kubelet does for one resource of a container, and says on which GPUs it took IDs.
func (d *desk) call(res Resource, size int) (string, error) {
	d.t.Helper()
	var available []string
	for _, g := range d.gpus {
		for _, id := range d.IDs(g.UUID, res) {
			if !d.taken[res][id] {
				available = append(available, id)
			}
		}
	}
	choice, err := d.Preferred(res, available, nil, size)
	if err == nil {
		_, err = d.Allocate(res, choice.IDs)
	}
	if err != nil {
		return "", err
	}
	for _, id := range choice.IDs {
		d.taken[res][id] = true
	}
	return on(choice.IDs), nil
}

func (d *desk) mustCall(res Resource, size int) string {
	d.t.Helper()
	where, err := d.call(res, size)
	if err != nil {
		d.t.Fatal(err)
	}
	return where
}

func on(ids []string) string {
	var out []string
	for _, id := range ids {
		gpu, _, _ := strings.Cut(strings.TrimPrefix(id, "GPU-"), separator)
		if !slices.Contains(out, gpu) {
			out = append(out, gpu)
		}
	}
	return strings.Join(out, "+")
}

// free is what nobody has, in cores and units.
func (d *desk) free() string {
	var out []string
	for _, g := range d.gpus {
		a, _ := d.Free(g.UUID)
		out = append(out, fmt.Sprintf("%s %d/%d", strings.TrimPrefix(g.UUID, "GPU-"), a.Cores, a.Units))
	}
	return strings.Join(out, ", ")
}

func (d *desk) expect(what, got, want string) {
	d.t.Helper()
	if got != want {
		d.t.Errorf("%s: %s, want %s", what, got, want)
	}
}

func idsOn(gpu string, n int) (out []string) {
	for i := range n {
		out = append(out, fmt.Sprintf("GPU-%s%s%d", gpu, separator, i))
	}
	return out
}

// held is what kubelet lists of container c of a pod, both resources on one GPU.
func held(pod, gpu string, cores, units int) []Held {
	return []Held{{Namespace: "n", Pod: pod, Container: "c", Resource: Core, IDs: idsOn(gpu, cores)},
		{Namespace: "n", Pod: pod, Container: "c", Resource: Memory, IDs: idsOn(gpu, units)}}
}

// Of a pod that is not known the first call says half. It goes where the other half most likely is, not where it fits best.
func TestStranger(t *testing.T) {
	for _, c := range []struct {
		name       string
		full       []Held // B has less of the first resource, and little of the second
		first      Resource
		size, then int
	}{
		{"cores first", held("x", "B", 40, 300), Core, 60, 100},
		{"memory first", held("x", "B", 90, 100), Memory, 100, 60},
	} {
		d := newDesk(t, 3)
		d.SetPods([]Pod{asking("x", len(c.full[0].IDs), len(c.full[1].IDs))})
		d.Open(c.full)
		for _, h := range c.full {
			for _, id := range h.IDs {
				d.taken[h.Resource][id] = true
			}
		}
		got := d.mustCall(c.first, c.size)
		d.expect(c.name, got+d.mustCall(c.first.other(), c.then), "AA")
	}
	d := newDesk(t, 2)
	d.expect("two whole GPUs", d.mustCall(Core, 200), "A+B")
	if _, err := d.call(Core, 1); err == nil || !strings.Contains(err.Error(), "free") {
		t.Errorf("a core beyond all: %v", err)
	}
}

// A pod that another program served holds IDs that are none of ours. It is not the one that asks, however equal.
func TestForeignIDs(t *testing.T) {
	d := newDesk(t, 2)
	d.SetPods([]Pod{asking("a", 30, 8), asking("b", 30, 8)})
	old := []Held{{Namespace: "n", Pod: "a", Container: "c", Resource: Core, IDs: []string{"tencent.com/vcuda-core-7"}},
		{Namespace: "n", Pod: "a", Container: "c", Resource: Memory, IDs: []string{"tencent.com/vcuda-memory-3"}}}
	d.Open(old)
	d.mustCall(Memory, 8)
	d.mustCall(Core, 30)
	var got []string
	for _, tenant := range d.Tenants() {
		got = append(got, fmt.Sprint(tenant.Pod.Name, tenant.UUIDs, tenant.Each))
	}
	d.expect("tenants", strings.Join(got, " "), "b[GPU-A] {30 8}")
	d.expect("free", d.free(), "A 70/312, B 100/320")
	binding, err := d.Start(Core, old[0].IDs)
	want := `device "tencent.com/vcuda-core-7" of resource core: no such GPU is on this node; delete the pod`
	if err == nil || err.Error() != want || binding.Pod.Name != "a" || binding.Container != "c" {
		t.Errorf("%+v, %v", binding, err)
	}
}

// Kubelet forgets which pods it failed if it ends before that is known, and asks for them again.
func TestKubeletAsksAgain(t *testing.T) {
	d := newDesk(t, 2)
	a := asking("a", 30, 400)
	a.Reserved = map[string]podspec.Place{"c": {UUIDs: []string{"GPU-B"}}}
	d.SetPods([]Pod{a})
	_, err := d.call(Memory, 400)
	refusal, ok := err.(*Refusal)
	if !ok || refusal.Reason != NoRoom {
		t.Fatal(err)
	}
	d.Fail(refusal)
	a.Ask = asking("a", 30, 8).Ask // as if there were room
	d.SetPods([]Pod{a})
	d.Restarted()
	d.expect("its reservation", d.mustCall(Memory, 8)+d.mustCall(Core, 30), "BB")
}

// The books open when kubelet tells of its pods, which may be after it began to admit some.
func TestOpenedLate(t *testing.T) {
	d := newDesk(t, 2)
	d.SetPods([]Pod{asking("b", 30, 8)})
	d.expect("before", d.mustCall(Core, 30), "A")
	a := asking("a", 30, 8) // ran before, and is older
	d.SetPods([]Pod{a, asking("b", 30, 8)})
	listing := append(held("a", "B", 30, 8), Held{Namespace: "n", Pod: "b", Container: "c", Resource: Core, IDs: idsOn("A", 30)})
	d.Open(listing)
	d.Bound("uid-a", "n", "a", "c", []string{"GPU-B"}, Amount{60, 8})
	// An allocation of an earlier pod of the same name.
	d.Bound("uid-other", "n", "b", "c", []string{"GPU-B"}, Amount{90, 90})
	for _, h := range listing {
		for _, id := range h.IDs {
			d.taken[h.Resource][id] = true
		}
	}
	d.expect("the second half of b", d.mustCall(Memory, 8), "A")
	d.expect("free", d.free(), "A 70/312, B 40/312")
}

// Where the API server tells of pods, the oldest of a size is taken to ask. It was another: what kubelet then says puts it right.
func TestWrongGuess(t *testing.T) {
	d := newDesk(t, 2)
	a, b := asking("a", 30, 8), asking("b", 30, 8)
	a.Reserved = map[string]podspec.Place{"c": {UUIDs: []string{"GPU-B"}}}
	d.SetPods([]Pod{a, b})
	d.expect("the calls for b", d.mustCall(Core, 30)+d.mustCall(Memory, 8), "BB")
	d.Reconcile(held("b", "B", 30, 8))
	d.expect("free", d.free(), "A 100/320, B 70/312")
	d.expect("the calls for a", d.mustCall(Memory, 8)+d.mustCall(Core, 30), "BB")
	d.expect("free", d.free(), "A 100/320, B 40/304")
	var got []string
	for _, tenant := range d.Tenants() {
		got = append(got, fmt.Sprint(tenant.Pod.Name, tenant.UUIDs, tenant.Each))
	}
	d.expect("tenants", strings.Join(got, " "), "a[GPU-B] {30 8} b[GPU-B] {30 8}")
}

// The calls for two pods of a size were each taken to be for the other. Whichever kubelet lists first, both are put right at once.
func TestMixedUp(t *testing.T) {
	list := append(held("a", "A", 30, 8), held("b", "B", 30, 8)...)
	for _, order := range [][]int{{0, 1, 2, 3}, {2, 3, 0, 1}, {0, 2, 1, 3}, {2, 0, 3, 1}, {1, 3, 0, 2}, {3, 2, 1, 0}, {1, 0, 3, 2}, {0, 3, 2, 1}} {
		d := newDesk(t, 2)
		a, b := asking("a", 30, 8), asking("b", 30, 8)
		a.Reserved = map[string]podspec.Place{"c": {UUIDs: []string{"GPU-B"}}}
		b.Reserved = map[string]podspec.Place{"c": {UUIDs: []string{"GPU-A"}}}
		d.SetPods([]Pod{a, b})
		d.expect("the calls for b", d.mustCall(Core, 30)+d.mustCall(Memory, 8), "BB")
		d.expect("the calls for a", d.mustCall(Memory, 8)+d.mustCall(Core, 30), "AA")
		for range 2 {
			var listing []Held
			for _, i := range order {
				listing = append(listing, list[i])
			}
			d.Reconcile(listing)
			for _, h := range list {
				got, err := d.Start(h.Resource, h.IDs)
				if err != nil || got.Pod.Name != h.Pod || !got.Nothing && on([]string{got.GPUs[0].UUID}) != on(h.IDs) {
					t.Errorf("listed as %v: start of %s with %v on %s: %+v, %v", order, h.Pod, h.Resource, on(h.IDs), got, err)
				}
			}
			d.expect("free", d.free(), "A 70/312, B 70/312")
		}
	}
}

// The first call for a pod was taken to be for an older one of as many cores. The second one, which only it can have made, shows whose it
// was: both resources are on one GPU, or the pod is refused, and the older one has its own.
func TestHandOver(t *testing.T) {
	pods := func() (a, b Pod) {
		a, b = asking("a", 30, 8), asking("b", 30, 200)
		a.Reserved = map[string]podspec.Place{"c": {UUIDs: []string{"GPU-B"}}}
		return a, b
	}
	for _, first := range []Resource{Core, Memory} {
		d := newDesk(t, 2)
		a, b := pods()
		d.SetPods([]Pod{a, b})
		if first == Core {
			d.expect("the calls for b", d.mustCall(Core, 30)+d.mustCall(Memory, 200), "BB")
			d.expect("the calls for a", d.mustCall(Core, 30)+d.mustCall(Memory, 8), "BB")
		} else {
			d.mustCall(Memory, 200)
			d.mustCall(Core, 30)
			d.expect("the calls for a", d.mustCall(Memory, 8)+d.mustCall(Core, 30), "BB")
		}
		var got []string
		for _, tenant := range d.Tenants() {
			got = append(got, fmt.Sprint(tenant.Pod.Name, tenant.Each))
		}
		d.expect("tenants", strings.Join(got, " "), "a{30 8} b{30 200}")
	}

	d := newDesk(t, 2)
	a, b := pods()
	d.SetPods([]Pod{a, b, asking("0", 10, 150)})
	d.Reconcile(held("0", "B", 10, 150))
	for _, id := range idsOn("B", 150) {
		d.taken[Memory][id] = true
	}
	for _, id := range idsOn("B", 10) {
		d.taken[Core][id] = true
	}
	d.expect("the first call for b", d.mustCall(Core, 30), "B")
	_, err := d.call(Memory, 200)
	refusal, ok := err.(*Refusal)
	if !ok || refusal.Pod == nil || refusal.Pod.Name != "b" {
		t.Fatalf("%+v, want a refusal of b", err)
	}
	d.Fail(refusal)
	b.Over = true
	d.SetPod(b)
	d.taken[Core] = map[string]bool{}
	for _, id := range idsOn("B", 10) {
		d.taken[Core][id] = true
	}
	d.expect("the calls for a", d.mustCall(Core, 30)+d.mustCall(Memory, 8), "BB")
	d.expect("free", d.free(), "A 100/320, B 60/162")
}

// Pods that the API server told of are admitted in any order, and end. Each is refused, or starts with both of its resources on one GPU,
// those that its IDs are of; in the end the books have what kubelet holds.
func TestAnyOrder(t *testing.T) {
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 1))
		d := newDesk(t, 3)
		var all []Pod
		kubelet := map[string][]Held{}
		listing := func() (out []Held) {
			for _, h := range kubelet {
				out = append(out, h...)
			}
			r.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
			return out
		}
		refused := 0
		for round := range 12 {
			var news []int
			for range 1 + r.IntN(4) {
				shape := [][2]int{{30, 8}, {30, 100}, {50, 100}, {30, 8}}[r.IntN(4)]
				p := asking(fmt.Sprintf("%c-%d-%d", 'a'+r.IntN(20), round, len(news)), shape[0], shape[1])
				if r.IntN(2) == 0 {
					p.Reserved = map[string]podspec.Place{"c": {UUIDs: []string{"GPU-" + string(rune('A'+r.IntN(3)))}}}
				}
				news, all = append(news, len(all)), append(all, p)
			}
			d.SetPods(all)
			r.Shuffle(len(news), func(i, j int) { news[i], news[j] = news[j], news[i] })
			for _, i := range news {
				p := &all[i]
				sizes, order := [2]int{p.Ask.Containers[0].Cores, int(p.Ask.Containers[0].Units)}, []Resource{Core, Memory}
				if r.IntN(2) == 0 {
					slices.Reverse(order)
				}
				var got []Held
				for _, res := range order {
					before := maps.Clone(d.taken[res])
					_, err := d.call(res, sizes[res])
					if err != nil {
						refusal, ok := err.(*Refusal)
						if !ok {
							t.Fatalf("seed %d: %v", seed, err)
						}
						d.Fail(refusal)
						for _, h := range got {
							for _, id := range h.IDs {
								delete(d.taken[h.Resource], id)
							}
						}
						got, p.Over = nil, true
						refused++
						break
					}
					h := Held{Namespace: "n", Pod: p.Name, Container: "c", Resource: res}
					for id := range d.taken[res] {
						if !before[id] {
							h.IDs = append(h.IDs, id)
						}
					}
					got = append(got, h)
				}
				if kubelet[p.Name] = got; got == nil {
					delete(kubelet, p.Name)
				}
				if r.IntN(3) == 0 {
					d.SetPods(all)
					d.Reconcile(listing())
				}
			}
			// Those that run are started, in any order, after kubelet was asked.
			d.SetPods(all)
			for name, held := range kubelet {
				d.Reconcile(listing())
				for _, h := range held {
					got, err := d.Start(h.Resource, h.IDs)
					if err != nil || got.Pod.Name != name || !got.Nothing && on([]string{got.GPUs[0].UUID}) != on(h.IDs) {
						t.Fatalf("seed %d: start of %s with %v on %s: %s %v %v", seed, name, h.Resource, on(h.IDs), got.Pod.Name, got.GPUs, err)
					}
				}
			}
			for i := range all {
				if p := &all[i]; !p.Over && r.IntN(3) == 0 {
					p.Over = true
					for _, h := range kubelet[p.Name] {
						for _, id := range h.IDs {
							delete(d.taken[h.Resource], id)
						}
					}
					delete(kubelet, p.Name)
				}
			}
		}
		d.SetPods(all)
		d.Reconcile(listing())
		want := map[string]Amount{"A": {100, 320}, "B": {100, 320}, "C": {100, 320}}
		for res := range d.taken {
			for id := range d.taken[res] {
				a := want[on([]string{id})]
				if res == int(Core) {
					a.Cores--
				} else {
					a.Units--
				}
				want[on([]string{id})] = a
			}
		}
		d.expect(fmt.Sprintf("seed %d: free", seed), d.free(), fmt.Sprintf("A %d/%d, B %d/%d, C %d/%d", want["A"].Cores, want["A"].Units, want["B"].Cores, want["B"].Units, want["C"].Cores, want["C"].Units))
		if seed == 0 {
			t.Logf("%d of %d refused", refused, len(all))
		}
	}
}

// Pods that were reserved all of a node come at once, in an order that is known, and are told of as late as can be or all at
// once: each gets what was reserved for it, though many are of one size and of one age.
func TestOrderOfAdmission(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 2))
		d := newDesk(t, 4)
		var all []Pod
		for g := range 4 {
			for _, s := range [][2]int{{30, 32}, {30, 48}, {20, 24}, {10, 24}, {10, 192}} {
				p := asking(fmt.Sprintf("p%d-%d", r.Uint64(), len(all)), s[0], s[1])
				p.Reserved = map[string]podspec.Place{"c": {Indexes: []int{g}}}
				all = append(all, p)
			}
		}
		r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		for i := range all {
			all[i].Order = uint64(i + 1)
		}
		for i := range all {
			d.SetPods(all[:i+1+r.IntN(len(all)-i)])
			want := string(rune('A' + all[i].Reserved["c"].Indexes[0]))
			sizes, order := [2]int{all[i].Ask.Containers[0].Cores, int(all[i].Ask.Containers[0].Units)}, []Resource{Core, Memory}
			if r.IntN(2) == 0 {
				slices.Reverse(order)
			}
			for _, res := range order {
				if on := d.mustCall(res, sizes[res]); on != want {
					t.Fatalf("seed %d: %v of pod %d is on %s, reserved on %s", seed, res, i, on, want)
				}
			}
		}
		d.expect(fmt.Sprintf("seed %d: free", seed), d.free(), "A 0/0, B 0/0, C 0/0, D 0/0")
	}
}

// A whole GPU whose cores are made fewer keeps its memory, as nothing limits it; also when its pod does not make sense any more.
func TestWholeWithFewerCores(t *testing.T) {
	d := newDesk(t, 1)
	whole := asking("x", 100, 0)
	d.SetPods([]Pod{whole})
	d.mustCall(Core, 100)
	d.expect("whole", d.free(), "A 0/0")
	d.Change(whole.UID, "c", Amount{Cores: 50})
	d.expect("50 of it", d.free(), "A 0/0")
	whole.Ask, whole.Problem = podspec.Ask{}, "does not make sense"
	d.SetPod(whole)
	d.expect("its pod makes no sense", d.free(), "A 0/0")
	d.Change(whole.UID, "c", Amount{Cores: 50, Units: 100})
	d.expect("its memory made less", d.free(), fmt.Sprintf("A 0/%d", d.gpus[0].Units-100))
}

// Annotations that spoil a running pod make it hold no more: its init container's IDs are those of the container after it.
func TestSpoiltHoldsNoMore(t *testing.T) {
	d := newDesk(t, 1)
	p := asking("x", 60, 100)
	first := p.Ask.Containers[0]
	first.Name, first.Init = "i", true
	p.Ask.Containers = append([]podspec.Container{first}, p.Ask.Containers...)
	d.SetPods([]Pod{p})
	for _, res := range []Resource{Core, Memory} {
		d.mustCall(res, wants(&first, res))
	}
	for _, res := range []Resource{Core, Memory} {
		if _, err := d.Allocate(res, idsOn("A", wants(&first, res))); err != nil {
			t.Fatal(err)
		}
	}
	d.expect("before", d.free(), "A 40/220")
	p.Written, p.Ask, p.Problem = p.Ask.Containers, podspec.Ask{}, "does not make sense"
	d.SetPod(p)
	d.expect("after", d.free(), "A 40/220")
}
