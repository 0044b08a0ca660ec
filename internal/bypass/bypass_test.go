package bypass

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	mi = 1 << 20
	gi = 1 << 30
)

// A script has a look a line: the second; "gpu pid tenant used" of each process, in MiB (? : the driver cannot
// tell), "-" for no tenant; "ledger tenant charged limit pids". Behind > what is to come: Began, then Ended, then
// Foreign.
func TestCore(t *testing.T) {
	for name, script := range map[string]string{
		"a tenant's process that is registered": `
			0 g1 7 a 500; ledger a 500 1000 7 >
			60 g1 7 a 500; ledger a 500 1000 7 >`,
		"one that registers late": `
			0 g1 7 a 500; ledger a 0 1000 >
			4 g1 7 a 500; ledger a 0 1000 >
			5 g1 7 a 500; ledger a 500 1000 7 >
			20 g1 7 a 500; ledger a 500 1000 7 >`,
		"one that never does": `
			0 g1 7 a 500; ledger a 0 1000 >
			4 g1 7 a 500; ledger a 0 1000 >
			5 g1 7 a 600; ledger a 0 1000 > began unregistered a g1 7 600/0 since 0
			9 g1 7 a 600; ledger a 0 1000 >
			10 ledger a 0 1000 >
			12 g1 7 a 600; ledger a 0 1000 >
			26 ledger a 0 1000 >
			27 ledger a 0 1000 > ended unregistered a g1 7 600/0 since 0`,
		"gone before it is sure, and another one": `
			0 g1 7 a 500; ledger a 0 1000 >
			4 ledger a 0 1000 >
			5 g1 8 a 500; ledger a 0 1000 >
			9 g1 8 a 500; ledger a 0 1000 >
			10 g1 8 a 500; ledger a 0 1000 > began unregistered a g1 8 500/0 since 5`,
		"of an allocation that is no more": `
			0 g1 7 a ? >
			5 g1 7 a ? > began unregistered a g1 7 0/0 since 0`,
		"on the second GPU only, beside one that is registered": `
			0 g1 7 a 500; g2 8 a 300; ledger a 500 0 7 >
			5 g1 7 a 500; g2 8 a 300; ledger a 500 0 7 > began unregistered a g2 8 300/0 since 0`,
		"more than the ledger says": `
			0 g1 7 a 1524; g1 8 a 1400; ledger a 500 9000 7 8 >
			16 g1 7 a 1624; g1 8 a 1400; ledger a 500 9000 7 8 > began memory a g1 7 3024/500 since 0
			17 g1 7 a 1024; g1 8 a 1400; ledger a 500 9000 7 8 >
			32 g1 7 a 1024; g1 8 a 1400; ledger a 500 9000 7 8 > ended memory a g1 7 3024/500 since 0`,
		"as much as contexts and modules take": `
			0 g1 7 a 1524; ledger a 500 9000 7 >
			60 g1 7 a 1524; ledger a 500 9000 7 >`,
		"allocations between the two readings": `
			0 g1 7 a 5000; ledger a 500 9000 7 >
			10 g1 7 a 5000; ledger a 5000 9000 7 >
			16 g1 7 a 5000; ledger a 500 9000 7 >
			20 g1 7 a 5000; ledger a 500 9000 7 >`,
		"a ledger that lies": `
			0 g1 7 a 5000; ledger a 9000 1000 7 >
			15 g1 7 a 5000; ledger a 9000 1000 7 > began limit a g1 7 5000/1000 since 0`,
		"no limit, no violation": `
			0 g1 7 a 5000; ledger a 5000 0 7 >
			60 g1 7 a 5000; ledger a 5000 0 7 >`,
		"foreign use": `
			0 g1 7 - 500; g2 8 - ? >
			5 g1 7 - 600; g2 8 - ? > foreign g1 7 600, foreign g2 8 0
			6 g2 8 - ? > foreign g2 8 0
			7 g1 7 - 600; g2 8 - ? > foreign g2 8 0`,
	} {
		t.Run(name, func(t *testing.T) {
			core, err := New(Config{})
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(strings.TrimSpace(script)) {
				look, want, _ := strings.Cut(strings.TrimSpace(line), ">")
				if got := describe(core.Step(parseLook(t, look))); got != strings.TrimSpace(want) {
					t.Errorf("%s: %s; want %s", strings.TrimSpace(look), got, want)
				}
			}
		})
	}
}

var start = time.Unix(1e9, 0)

func parseLook(t *testing.T, look string) Input {
	in := Input{GPUs: map[string][]Process{}}
	second, rest, _ := strings.Cut(look, " ")
	var s int
	if _, err := fmt.Sscan(second, &s); err != nil {
		t.Fatal(err)
	}
	in.Now = start.Add(time.Duration(s) * time.Second)
	for part := range strings.SplitSeq(rest, ";") {
		words := strings.Fields(part)
		number := func(i int) (n uint64) {
			if _, err := fmt.Sscan(words[i], &n); err != nil {
				t.Fatal(part, err)
			}
			return n
		}
		switch {
		case len(words) == 0:
		case words[0] == "ledger":
			tenant := Tenant{Name: words[1], Registered: map[int]bool{}, GPUs: map[string]Account{"g1": {Charged: number(2) * mi, Limit: number(3) * mi}}}
			for i := range words[4:] {
				tenant.Registered[int(number(4+i))] = true
			}
			in.Tenants = append(in.Tenants, tenant)
		default:
			p := Process{PID: int(number(1)), Start: number(1) * 100, Tenant: strings.Trim(words[2], "-")}
			if words[3] != "?" {
				used := number(3) * mi
				p.Used = &used
			}
			in.GPUs[words[0]] = append(in.GPUs[words[0]], p)
		}
	}
	return in
}

func describe(r Result) string {
	var out []string
	for what, list := range map[string][]Violation{"began": r.Began, "ended": r.Ended} {
		for _, v := range list {
			out = append(out, fmt.Sprintf("%s %s %s %s %d %d/%d since %d", what, v.Kind, v.Tenant, v.GPU, v.PID, v.Used/mi, v.Allowed/mi, int(v.Since.Sub(start).Seconds())))
		}
	}
	for _, f := range r.Foreign {
		out = append(out, fmt.Sprintf("foreign %s %d %d", f.GPU, f.PID, f.Used/mi))
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}

// What lasts is told at every look, and memory that does not fit a number is more than any limit.
func TestLasting(t *testing.T) {
	core, err := New(Config{MemoryPatience: 1, Calm: 1, Slack: 1 << 63})
	if err != nil {
		t.Fatal(err)
	}
	all := ^uint64(0)
	in := Input{Now: start, GPUs: map[string][]Process{"g": {{PID: 7, Start: 1, Tenant: "a", Used: &all}}},
		Tenants: []Tenant{{Name: "a", Registered: map[int]bool{7: true}, GPUs: map[string]Account{"g": {Charged: 5}}}}}
	core.Step(in)
	for i := range 3 {
		in.Now = in.Now.Add(1)
		want := []Violation{{Kind: Memory, Tenant: "a", GPU: "g", PID: 7, Start: 1, Used: all, Allowed: 5, Since: start}}
		if r := core.Step(in); !reflect.DeepEqual(r.Lasting, want) || (len(r.Began) == 1) != (i == 0) {
			t.Errorf("%+v", r)
		}
	}
	in.GPUs = nil
	in.Now = in.Now.Add(1)
	if r := core.Step(in); len(r.Ended) != 1 || len(core.cases) != 0 {
		t.Errorf("%+v", r)
	}
	if _, err := New(Config{Calm: -1}); err == nil {
		t.Error("a negative time was taken")
	}
}

func TestMessages(t *testing.T) {
	v := Violation{GPU: "GPU-1", PID: 7, Used: 3 * gi, Allowed: gi}
	for kind, want := range map[Kind]string{
		Unregistered: "process 7 uses gpu GPU-1 (3 GiB) and never registered: it has loaded a driver library other than the slice's",
		Memory:       "gpu GPU-1: 3 GiB held, the ledger says 1 GiB; process 7 holds most",
		Limit:        "gpu GPU-1: 3 GiB held, the limit is 1 GiB; process 7 holds most",
	} {
		if v.Kind = kind; v.String() != want {
			t.Errorf("%s; want %s", v, want)
		}
	}
}
