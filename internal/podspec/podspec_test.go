package podspec

import (
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// pod makes one from lines: `a 30 32` is a container with cores and units, `init:` and `sidecar:` before
// the name make it one, `key=value` is an annotation.
func pod(lines string) *corev1.Pod {
	out := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{}}}
	for line := range strings.SplitSeq(lines, "\n") {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		if key, value, ok := strings.Cut(line, "="); ok {
			out.Annotations[key] = value
			continue
		}
		var name, cores, units string
		_, _ = fmt.Sscan(line, &name, &cores, &units)
		kind, rest, special := strings.Cut(name, ":")
		if special {
			name = rest
		}
		c := corev1.Container{Name: name, Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{}}}
		if cores != "0" {
			c.Resources.Limits["tencent.com/vcuda-core"] = resource.MustParse(cores)
		}
		if units != "0" {
			c.Resources.Limits["tencent.com/vcuda-memory"] = resource.MustParse(units)
		}
		if kind == "sidecar" {
			always := corev1.ContainerRestartPolicyAlways
			c.RestartPolicy = &always
		}
		if special {
			out.Spec.InitContainers = append(out.Spec.InitContainers, c)
		} else {
			out.Spec.Containers = append(out.Spec.Containers, c)
		}
	}
	return out
}

// show writes an Ask as lines.
func show(a Ask) string {
	var b strings.Builder
	for _, c := range a.Containers {
		kind := map[[2]bool]string{{true, false}: "init ", {true, true}: "sidecar "}[[2]bool{c.Init, c.Sidecar}]
		fmt.Fprintf(&b, "%s%s #%d: %d x (%d cores, %v), ceiling %d", kind, c.Name, c.Index, c.Request.Count, c.Request.Cores, c.Request.Memory, c.Ceiling)
		if c.Latency {
			b.WriteString(", latency")
		}
		if c.Weight > 0 {
			fmt.Fprintf(&b, ", weight %d", c.Weight)
		}
		if k := c.Constraints; len(k.Models)+len(k.NotModels)+len(k.UUIDs)+len(k.NotUUIDs) > 0 {
			fmt.Fprintf(&b, ", %q %q %q %q", k.Models, k.NotModels, k.UUIDs, k.NotUUIDs)
		}
		b.WriteString("\n")
	}
	if a.Policy != "" {
		fmt.Fprintf(&b, "policy %s\n", a.Policy)
	}
	for _, g := range a.Apart {
		fmt.Fprintf(&b, "apart %q\n", g)
	}
	for _, g := range a.Together {
		fmt.Fprintf(&b, "together %q\n", g)
	}
	for _, w := range a.Warnings {
		fmt.Fprintf(&b, "warning: %s\n", w)
	}
	return b.String()
}

func TestParse(t *testing.T) {
	for _, c := range []struct{ name, pod, want string }{
		{"the originals' example", "c 30 32", "c #0: 1 x (30 cores, 8 GiB), ceiling 30\n"},
		{"no GPU", "c 0 0", ""},
		{"whole", "c 100 0", "c #0: 1 x (100 cores, 0 B), ceiling 100\n"},
		{"two whole, odd memory", "c 200 31", "c #0: 2 x (100 cores, 4 GiB), ceiling 100\n"},
		{"burst", "c 30 32\n tencent.com/vcuda-core-limit=60", "c #0: 1 x (30 cores, 8 GiB), ceiling 60\n"},
		{"burst above a GPU", "c 30 32\n tencent.com/vcuda-core-limit=250", "c #0: 1 x (30 cores, 8 GiB), ceiling 100\n"},
		{"burst that is none", "c 30 32\n tencent.com/vcuda-core-limit=much", "c #0: 1 x (30 cores, 8 GiB), ceiling 30\n" +
			"warning: annotation tencent.com/vcuda-core-limit: \"much\" is no number from 1 to 100 and has no effect\n"},
		{"burst below", "c 30 32\n d 10 4\n tencent.com/vcuda-core-limit=20", "c #0: 1 x (30 cores, 8 GiB), ceiling 30\nd #1: 1 x (10 cores, 1 GiB), ceiling 20\n" +
			"warning: container c: a ceiling of 20 is below its 30 cores and has no effect\n"},
		{"memory only", "c 0 4", "c #0: 1 x (0 cores, 1 GiB), ceiling 100\n"},
		{"parts of two GPUs", "c 60 8\n tranche.dev/gpu-count=2", "c #0: 2 x (30 cores, 1 GiB), ceiling 30\n"},
		{"of one container", "a 60 8\n b 60 8\n tranche.dev/gpu-count.b=2", "a #0: 1 x (60 cores, 2 GiB), ceiling 60\nb #1: 2 x (30 cores, 1 GiB), ceiling 30\n"},
		{"init, sidecar", "a 30 8\n init:i 100 0\n sidecar:s 10 1\n n 0 0", "init i #0: 1 x (100 cores, 0 B), ceiling 100\nsidecar s #1: 1 x (10 cores, 256 MiB), ceiling 10\na #0: 1 x (30 cores, 2 GiB), ceiling 30\n"},
		{"all annotations", `a 30 8
			b 30 8
			tranche.dev/class=latency
			tranche.dev/class.b=normal
			tranche.dev/weight.a=7
			tranche.dev/core-limit.b=90
			tranche.dev/gpu-model=A100, H100
			tranche.dev/gpu-model-not=PCIe
			tranche.dev/gpu-uuid.a=GPU-1
			tranche.dev/gpu-uuid-not.a=GPU-2
			tranche.dev/policy=spread
			tranche.dev/apart=*
			tranche.dev/together=a,b`,
			`a #0: 1 x (30 cores, 2 GiB), ceiling 30, latency, weight 7, ["A100" "H100"] ["PCIe"] ["GPU-1"] ["GPU-2"]
b #1: 1 x (30 cores, 2 GiB), ceiling 90, ["A100" "H100"] ["PCIe"] [] []
policy spread
apart ["a" "b"]
together ["a" "b"]
`},
	} {
		ask, err := Parse(pod(c.pod), DefaultNames())
		if err != nil || show(ask) != c.want {
			t.Errorf("%s: %v\n%s\nwant\n%s", c.name, err, show(ask), c.want)
		}
		if got := Wants(pod(c.pod), DefaultNames()); got != (c.want != "") {
			t.Errorf("%s: wants %v", c.name, got)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for _, c := range []struct{ pod, want string }{
		{"c 200 0\n tranche.dev/gpu-count=4", "container c: tencent.com/vcuda-memory: 50 cores of each of 4 GPUs, a part of a GPU, need memory as well: say how many units of 256 MiB the container may use"},
		{"c 30 0", "container c: tencent.com/vcuda-memory: 30 cores, a part of a GPU, need memory as well: say how many units of 256 MiB the container may use"},
		{"c 150 8", "container c: tencent.com/vcuda-core: 150: more than 100 must be a multiple of 100 (whole GPUs); for parts of several GPUs set the annotation tranche.dev/gpu-count"},
		{"c 1700 0", "container c: tencent.com/vcuda-core: 1700: must be a whole number from 0 to 1600"},
		{"c 1500m 1", "container c: tencent.com/vcuda-core: 1500m: must be a whole number from 0 to 1600"},
		{"c 50 8\n tranche.dev/gpu-count=4", "container c: tranche.dev/gpu-count: 50 cores cannot be divided by 4 GPUs"},
		{"c 40 7\n tranche.dev/gpu-count=4", "container c: tranche.dev/gpu-count: 7 units of memory cannot be divided by 4 GPUs"},
		{"c 400 8\n tranche.dev/gpu-count=2", "container c: tranche.dev/gpu-count: 400 cores are more than 2 GPUs have"},
		{"c 40 8\n tranche.dev/gpu-count=none", `container c: tranche.dev/gpu-count: "none": must be a whole number from 1 to 16`},
		{"c 400 3", "container c: tencent.com/vcuda-memory: 3 units are less than one for each of 4 GPUs"},
		{"c 40 8\n tranche.dev/class=gold", `container c: tranche.dev/class: "gold": must be normal or latency`},
		{"c 40 8\n tranche.dev/weight=0", `container c: tranche.dev/weight: "0": must be a whole number from 1 to 1000`},
		{"c 40 8\n tranche.dev/gpu-model=A100,", `container c: tranche.dev/gpu-model: "A100,": an empty item in the list`},
		{"c 40 8\n tranche.dev/gpu-model=" + strings.Repeat("T4,", 128) + "T4", "container c: tranche.dev/gpu-model: 129 items: must be at most 128"},
		{"c 40 8\n tranche.dev/apart=" + strings.Repeat("c;", 128) + "c", "tranche.dev/apart: 129 groups: must be at most 128"},
		{"c 200 8\n tranche.dev/gpu-uuid=GPU-1", "container c: tranche.dev/gpu-uuid: 1 GPUs are named, 2 are asked"},
		{"c 40 8\n tranche.dev/apart=c,d", `tranche.dev/apart: "d": no container of this name asks for a GPU`},
		{"c 40 8\n tranche.dev/together=c,c", `tranche.dev/together: "c" is named twice in a group`},
		{"c 40 8\n tranche.dev/weight.d=3", `tranche.dev/weight.d: no container "d" asks for a GPU`},
	} {
		ask, err := Parse(pod(c.pod), DefaultNames())
		if err == nil || err.Error() != c.want || len(ask.Containers) > 0 && err == nil {
			t.Errorf("%q:\n%v\nwant\n%s", c.pod, err, c.want)
		}
	}
}

// What is quoted of an annotation fits into an event and a pod's status.
func TestErrorIsShort(t *testing.T) {
	long := strings.Repeat("ü", 100_000)
	_, err := Parse(pod("c 40 8\n tranche.dev/weight="+long), DefaultNames())
	want := `container c: tranche.dev/weight: "ü`
	if err == nil || !strings.HasPrefix(err.Error(), want) || len(err.Error()) > 1000 || !utf8.ValidString(err.Error()) {
		t.Errorf("%d bytes: %.100v", len(fmt.Sprint(err)), err)
	}
	for _, text := range []string{"", "ü", strings.Repeat("x", shortMax)} {
		if got := Short(text); got != text {
			t.Errorf("%q is cut to %q", text, got)
		}
	}
	for _, text := range []string{"", "abc", "abcd", "abü", "aü", "üü", "üüü"} {
		if got := Cut(text, 3); !utf8.ValidString(got) || len(text) <= 3 && got != text || len(text) > 3 && !strings.HasPrefix(text, strings.TrimSuffix(got, "…")) || len(got) > 3+len("…") {
			t.Errorf("%q: %q", text, got)
		}
	}
}

func TestReserved(t *testing.T) {
	p := pod(`a 30 32
		b 200 0
		tencent.com/predicate-node=n1
		tencent.com/predicate-time=1600000000000000001
		tencent.com/gpu-assigned=false
		tencent.com/predicate-gpu-idx-0=3
		tencent.com/predicate-gpu-idx-1=0,2`)
	r, ok, err := Reserved(p, DefaultNames())
	got := fmt.Sprintf("%v %v %v %v %v %v", ok, err, r.Node, r.Since.UnixNano(), r.Assigned, r.Places)
	if want := "true <nil> n1 1600000000000000001 false map[a:{[] [3]} b:{[] [0 2]}]"; got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	p.Annotations[GPUs] = `{"a":["GPU-x"]}`
	if r, ok, err = Reserved(p, DefaultNames()); !ok || err != nil || fmt.Sprint(r.Places) != "map[a:{[GPU-x] []} b:{[] [0 2]}]" {
		t.Error(r, ok, err)
	}
	for key, value := range map[string]string{GPUs: `{"a":[]}`, "tencent.com/predicate-gpu-idx-1": "1,x", "tencent.com/predicate-time": "now"} {
		bad := p.DeepCopy()
		bad.Annotations[key] = value
		if _, _, err := Reserved(bad, DefaultNames()); err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%s: %v", key, err)
		}
	}
	if _, ok, err := Reserved(pod("a 30 32"), DefaultNames()); ok || err != nil {
		t.Error(ok, err)
	}
}

func TestReservationAnnotations(t *testing.T) {
	p := pod("a 30 32\n n 0 0\n b 200 0")
	at := time.Unix(0, 1600000000000000001)
	places := map[string][]string{"a": {"GPU-x"}, "b": {"GPU-y", "GPU-z"}}
	p.Annotations = ReservationAnnotations(p, DefaultNames(), "n1", at, places, map[string][]int{"a": {3}, "b": {0, 2}})
	want := map[string]string{
		"tencent.com/predicate-node": "n1", "tencent.com/predicate-time": "1600000000000000001", "tencent.com/gpu-assigned": "false",
		"tencent.com/predicate-gpu-idx-0": "3", "tencent.com/predicate-gpu-idx-2": "0,2", GPUs: `{"a":["GPU-x"],"b":["GPU-y","GPU-z"]}`,
	}
	if fmt.Sprint(p.Annotations) != fmt.Sprint(want) {
		t.Errorf("%v", p.Annotations)
	}
	if r, ok, err := Reserved(p, DefaultNames()); !ok || err != nil || !r.Since.Equal(at) || fmt.Sprint(r.Places) != "map[a:{[GPU-x] []} b:{[GPU-y GPU-z] []}]" {
		t.Error(r, ok, err)
	}
}

func TestChanges(t *testing.T) {
	for _, c := range []struct{ pod, want string }{
		{"a 30 32", "[{a 30 30 8 GiB}] []"},
		{"a 30 32\n tranche.dev/cores=20", "[{a 20 20 8 GiB}] []"},
		{"a 30 32\n tranche.dev/cores=20\n tencent.com/vcuda-core-limit=60", "[{a 20 60 8 GiB}] []"},
		{"a 30 32\n tranche.dev/cores=70\n tencent.com/vcuda-core-limit=60", "[{a 70 70 8 GiB}] []"},
		// A ceiling below the asked cores counts once they are lowered below it.
		{"a 30 32\n tencent.com/vcuda-core-limit=20", "[{a 30 30 8 GiB}] []"},
		{"a 30 32\n tranche.dev/cores=10\n tencent.com/vcuda-core-limit=20", "[{a 10 20 8 GiB}] []"},
		{"a 30 32\n tranche.dev/cores=25\n tencent.com/vcuda-core-limit=20", "[{a 25 25 8 GiB}] []"},
		{"a 0 32\n tranche.dev/cores=25", "[{a 25 100 8 GiB}] []"},
		{"a 30 32\n b 200 0\n init:i 30 1\n tranche.dev/memory.a=6Gi\n tranche.dev/cores.b=100", "[{a 30 30 6 GiB} {b 50 50 0 B}] []"},
		{"a 30 32\n b 30 32\n tranche.dev/cores.a=half", `[{a 30 30 8 GiB} {b 30 30 8 GiB}] [container a: tranche.dev/cores.a: "half": must be a whole number from 1 to 1600]`},
		{"a 30 32\n tranche.dev/cores=130", "[{a 30 30 8 GiB}] [container a: tranche.dev/cores: 130 cores: must be divisible by the container's 1 GPUs, and at most 100 of each]"},
		{"a 30 32\n tranche.dev/memory=-1", `[{a 30 30 8 GiB}] [container a: tranche.dev/memory: "-1": must be a positive amount of memory]`},
		{"a 30 32\n tranche.dev/memory=lots", `[{a 30 30 8 GiB}] [container a: tranche.dev/memory: "lots": must be an amount of memory, as 8Gi]`},
		{"a 30 32\n tranche.dev/memory=1e-2000000000", `[{a 30 30 8 GiB}] [container a: tranche.dev/memory: "1e-2000000000": must be an amount of memory, as 8Gi]`},
	} {
		changes, errs := Changes(pod(c.pod), DefaultNames())
		if got := fmt.Sprint(changes, errs); got != c.want {
			t.Errorf("%q:\n%s\nwant\n%s", c.pod, got, c.want)
		}
	}
}

func TestNames(t *testing.T) {
	for _, n := range []Names{{Domain: "", Unit: UnitDefault}, {Domain: "Tencent", Unit: UnitDefault}, {Domain: "a.b", Unit: 5}} {
		if n.Validate() == nil {
			t.Errorf("%+v is taken", n)
		}
	}
	if err := DefaultNames().Validate(); err != nil {
		t.Error(err)
	}
}

// Whatever annotations say: no panic, and what is taken can be placed.
func FuzzAnnotations(f *testing.F) {
	f.Add(30, 32, GPUCount, "2", GPUs, `{"a":["GPU-x"]}`)
	f.Add(200, 3, "tencent.com/predicate-gpu-idx-0", "0,1", Memory+".a", "8Gi")
	f.Add(30, 32, Memory, "1e-2000000000", Cores, "1e9")
	f.Add(0, 3, Apart, "a;a", "tencent.com/vcuda-core-limit", "-7")
	f.Fuzz(func(t *testing.T, cores, units int, key1, value1, key2, value2 string) {
		p := pod(fmt.Sprintf("a %d %d", cores, units))
		p.Annotations[key1], p.Annotations[key2] = value1, value2
		names := DefaultNames()
		_, _, _ = Reserved(p, names)
		ask, err := Parse(p, names)
		if err != nil {
			return
		}
		changes, _ := Changes(p, names)
		for i, c := range ask.Containers {
			r := c.Request
			if r.Count < 1 || r.Count > MaxGPUs || r.Cores < 0 || r.Cores > CoresWhole || r.Cores*r.Count != c.Cores || c.Ceiling < r.Cores || c.Ceiling > CoresWhole {
				t.Errorf("%+v", c)
			}
			if ch := changes[i]; ch.Cores > CoresWhole || ch.Ceiling < ch.Cores {
				t.Errorf("%+v", ch)
			}
		}
	})
}
