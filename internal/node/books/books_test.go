package books

import (
	"fmt"
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
