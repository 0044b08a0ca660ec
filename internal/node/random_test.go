package node

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"tranche.dev/tranche/internal/node/books"
	"tranche.dev/tranche/internal/podspec"
)

// pinned keeps a pod on one GPU.
func pinned(uuid string) map[string]string { return map[string]string{podspec.UUIDs: uuid} }

func (w *world) uuids() []string {
	w.node.mu.Lock()
	defer w.node.mu.Unlock()
	var out []string
	for _, g := range w.node.books.GPUs() {
		out = append(out, g.UUID)
	}
	return out
}

// gpusOf are the GPUs that kubelet's IDs of a container are on.
func (w *world) gpusOf(pod *corev1.Pod, container, resource string) []string {
	seen := map[string]bool{}
	for _, id := range w.kubelet.IDs(pod.UID, container, resource) {
		uuid, _, _ := strings.Cut(id, "::")
		seen[uuid] = true
	}
	return slices.Sorted(maps.Keys(seen))
}

// Two pods ask for equal cores and unequal memory, and only one assignment fits both.
func TestEqualCoresUnequalMemory(t *testing.T) {
	w := newWorld(t, "a100-80g:2", 7)
	gpus := w.uuids()
	w.mustAdmit(w.pod(pinned(gpus[0]), containerSpec{name: "c", cores: 50, units: 60 * gib}))
	w.mustAdmit(w.pod(pinned(gpus[1]), containerSpec{name: "c", cores: 50, units: 20 * gib}))
	for round := range 200 {
		large := w.pod(nil, containerSpec{name: "c", cores: 50, units: 50 * gib})
		small := w.pod(nil, containerSpec{name: "c", cores: 50, units: 12 * gib})
		order := []*corev1.Pod{large, small}
		if round%2 == 1 {
			slices.Reverse(order)
		}
		for _, p := range order {
			w.mustAdmit(p)
		}
		for _, c := range []struct {
			pod  *corev1.Pod
			want string
		}{{large, gpus[1]}, {small, gpus[0]}} {
			for _, r := range []string{core, memory} {
				if got := w.gpusOf(c.pod, "c", r); !slices.Equal(got, []string{c.want}) {
					t.Fatalf("round %d: %s of %s is on %q, want %s", round, r, c.pod.Name, got, c.want)
				}
			}
		}
		if round%20 == 0 {
			for _, p := range order {
				w.start(p, "c")
			}
		}
		for _, p := range order {
			w.kubelet.Delete(p.UID)
		}
	}
}

// shapes are those of the random pods, by one container or more.
func (w *world) randomPod(r *rand.Rand) *corev1.Pod {
	switch r.IntN(7) {
	case 0:
		return w.pod(nil, containerSpec{name: "c", cores: int64(5 * (1 + r.IntN(10))), units: int64(1 + r.IntN(20*gib))})
	case 1:
		return w.pod(nil, containerSpec{name: "c", cores: 100})
	case 2:
		return w.pod(nil, containerSpec{name: "c", cores: 100 * int64(1+r.IntN(2)), units: int64(2 + r.IntN(40*gib))})
	case 3:
		return w.pod(nil, containerSpec{name: "c", units: int64(1 + r.IntN(8*gib))})
	case 4:
		return w.pod(map[string]string{podspec.GPUCount: "2"}, containerSpec{name: "c", cores: int64(2 * (1 + r.IntN(40))), units: int64(2 * (1 + r.IntN(8*gib)))})
	case 5:
		return w.pod(nil, containerSpec{name: "a", cores: int64(1 + r.IntN(60)), units: int64(1 + r.IntN(8*gib))},
			containerSpec{name: "b", cores: int64(1 + r.IntN(60)), units: int64(1 + r.IntN(8*gib))})
	default:
		return w.pod(nil, containerSpec{name: "i", cores: int64(1 + r.IntN(60)), units: int64(1 + r.IntN(8*gib)), init: true},
			containerSpec{name: "c", cores: int64(1 + r.IntN(60)), units: int64(1 + r.IntN(8*gib))})
	}
}

// asked are the limits that a container must have.
func asked(t *testing.T, pod *corev1.Pod, name string) []string {
	t.Helper()
	ask, err := podspec.Parse(pod, podspec.DefaultNames())
	if err != nil {
		t.Fatal(err)
	}
	c := ask.Find(name)
	memory := "all"
	if c.Units > 0 {
		memory = fmt.Sprintf("%dMi", c.Request.Memory>>20)
	}
	var out []string
	for range c.Request.Count {
		out = append(out, fmt.Sprintf("%d-%d %s", max(c.Request.Cores, 1), c.Ceiling, memory))
	}
	return out
}

// brute is the books by force: what kubelet's IDs and the pods' wishes take of each GPU.
type brute struct {
	units int
	free  map[string]books.Amount
}

func (w *world) brute(living []*corev1.Pod) brute {
	out := brute{free: map[string]books.Amount{}}
	for _, g := range w.gpus {
		out.free[g.UUID] = books.Amount{Cores: 100, Units: g.Units}
		out.units = g.Units
	}
	for _, p := range living {
		held := map[string]bool{} // init containers hand theirs on
		for _, c := range append(slices.Clone(p.Spec.InitContainers), p.Spec.Containers...) {
			for _, r := range []string{core, memory} {
				for _, id := range w.kubelet.IDs(p.UID, c.Name, r) {
					held[r+" "+id] = true
				}
			}
			if q := c.Resources.Limits[memory]; q.IsZero() { // whole GPUs have all of their memory
				for _, uuid := range w.gpusOf(p, c.Name, core) {
					for n := range out.units {
						held[fmt.Sprintf("%s %s::%d", memory, uuid, n)] = true
					}
				}
			}
		}
		for key := range held {
			r, id, _ := strings.Cut(key, " ")
			uuid, _, _ := strings.Cut(id, "::")
			a := out.free[uuid]
			if r == core {
				a.Cores--
			} else {
				a.Units--
			}
			out.free[uuid] = a
		}
	}
	return out
}

// fits tells by trying everything whether the containers, from the i-th on, find GPUs.
func (b brute) fits(pod *corev1.Pod, t *testing.T) bool {
	ask, err := podspec.Parse(pod, podspec.DefaultNames())
	if err != nil {
		t.Fatal(err)
	}
	cs := ask.Containers
	if len(cs) == 2 && cs[0].Init { // both on one GPU, as kubelet hands the IDs on
		one := cs[0]
		one.Request.Cores, one.Request.Memory = max(one.Request.Cores, cs[1].Request.Cores), max(one.Request.Memory, cs[1].Request.Memory)
		cs = []podspec.Container{one}
	}
	uuids := slices.Sorted(maps.Keys(b.free))
	var try func(i int) bool
	try = func(i int) bool {
		if i == len(cs) {
			return true
		}
		need := books.Amount{Cores: cs[i].Request.Cores, Units: int(cs[i].Request.Memory / (256 << 20))}
		if need.Cores == 100 && need.Units == 0 {
			need.Units = b.units
		}
		var pick func(from, count int) bool
		pick = func(from, count int) bool {
			if count == 0 {
				return try(i + 1)
			}
			for k := from; k < len(uuids); k++ {
				left := b.free[uuids[k]]
				if left.Cores < need.Cores || left.Units < need.Units {
					continue
				}
				b.free[uuids[k]] = books.Amount{Cores: left.Cores - need.Cores, Units: left.Units - need.Units}
				found := pick(k+1, count-1)
				b.free[uuids[k]] = left
				if found {
					return true
				}
			}
			return false
		}
		return pick(0, cs[i].Request.Count)
	}
	return try(0)
}

// check holds the node's books and what containers got against kubelet's.
func (w *world) check(step int, living []*corev1.Pod) {
	w.t.Helper()
	b := w.brute(living)
	for uuid, left := range b.free {
		if left.Cores < 0 || left.Units < 0 {
			w.show(living)
			w.t.Fatalf("step %d: gpu %s is given away beyond what it has: %+v", step, uuid, left)
		}
	}
}

func (w *world) show(living []*corev1.Pod) {
	w.t.Helper()
	for _, p := range living {
		w.t.Log(describe(p), p.Annotations, w.gpusOf(p, p.Spec.Containers[0].Name, core), w.gpusOf(p, p.Spec.Containers[0].Name, memory))
	}
}

func TestRandomPods(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv("SEED"); text != "" {
		seed, _ = strconv.ParseUint(text, 10, 64)
	}
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 2))
	w := newWorld(t, "a100-80g:3", seed)
	var living []*corev1.Pod
	admitted, refused := 0, 0
	for step := range 250 {
		switch dice := r.IntN(100); {
		case step%80 == 40:
			w.end()
			w.startNode()
		case step%60 == 30:
			w.kubelet.Stop()
			if err := w.kubelet.Start(); err != nil {
				t.Fatal(err)
			}
			w.registered()
		case dice < 60:
			pod := w.randomPod(r)
			room := w.brute(living)
			err := w.admit(pod)
			if want := room.fits(pod, t); want != (err == nil) {
				w.show(living)
				t.Fatalf("step %d: %s fits: %v in %v; answer: %v, %q %q", step, describe(pod), want, room.free, err,
					w.gpusOf(pod, pod.Spec.Containers[0].Name, core), w.gpusOf(pod, pod.Spec.Containers[0].Name, memory))
			}
			if err != nil {
				refused++
				continue
			}
			admitted++
			living = append(living, pod)
			w.startAll(pod)
		case dice < 90 && len(living) > 0:
			i := r.IntN(len(living))
			if r.IntN(2) == 0 {
				w.kubelet.SetPhase(living[i].UID, corev1.PodSucceeded)
			} else {
				w.kubelet.Delete(living[i].UID)
			}
			living = slices.Delete(living, i, i+1)
		case len(living) > 0: // a container starts again
			pod := living[r.IntN(len(living))]
			name := pod.Spec.Containers[0].Name
			if got, want := limits(t, w.start(pod, name)), asked(t, pod, name); !slices.Equal(got, want) {
				t.Fatalf("step %d: %s started again with %q, want %q", step, describe(pod), got, want)
			}
		}
		w.check(step, living)
	}
	t.Logf("%d admitted, %d refused", admitted, refused)
	for _, p := range living {
		w.kubelet.Delete(p.UID)
	}
	eventually(t, 10*time.Second, "nothing is left", func() bool { return len(w.node.store.List()) == 0 })
	w.node.mu.Lock()
	defer w.node.mu.Unlock()
	for _, g := range w.node.books.GPUs() {
		if free, _ := w.node.books.Free(g.UUID); free != (books.Amount{Cores: 100, Units: g.Units}) {
			t.Errorf("gpu %s: %+v free", g.UUID, free)
		}
	}
}

// startAll starts a pod's containers in order and holds their limits against what was asked.
func (w *world) startAll(pod *corev1.Pod) {
	w.t.Helper()
	for _, c := range pod.Spec.InitContainers {
		w.startOne(pod, c.Name)
		w.kubelet.Update(pod.UID, func(p *corev1.Pod) {
			p.Status.InitContainerStatuses = append(p.Status.InitContainerStatuses,
				corev1.ContainerStatus{Name: c.Name, State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}})
		})
	}
	for _, c := range pod.Spec.Containers {
		w.startOne(pod, c.Name)
	}
}

func (w *world) startOne(pod *corev1.Pod, name string) {
	w.t.Helper()
	s := w.start(pod, name)
	if got, want := limits(w.t, s), asked(w.t, pod, name); !slices.Equal(got, want) {
		w.t.Fatalf("%s, container %s: limits %q, want %q", describe(pod), name, got, want)
	}
	if !w.handedOn(pod, name) {
		if c, m := w.gpusOf(pod, name, core), w.gpusOf(pod, name, memory); len(c) > 0 && len(m) > 0 && !slices.Equal(c, m) {
			w.t.Fatalf("%s, container %s: cores on %q, memory on %q", describe(pod), name, c, m)
		}
	}
}

func (w *world) handedOn(pod *corev1.Pod, name string) bool {
	return len(pod.Spec.InitContainers) > 0 && pod.Spec.InitContainers[0].Name != name
}

func describe(pod *corev1.Pod) string {
	var parts []string
	for _, c := range append(slices.Clone(pod.Spec.InitContainers), pod.Spec.Containers...) {
		cores, units := c.Resources.Limits[core], c.Resources.Limits[memory]
		parts = append(parts, fmt.Sprintf("%s: %s cores %s units", c.Name, cores.String(), units.String()))
	}
	return pod.Name + " (" + strings.Join(parts, ", ") + ")"
}
