package quota

import (
	"fmt"
	"testing"
)

func TestParse(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{`{"a":{"quota":{"M40":4,"P100":0.5},"pool":["public"]}}`, `map[a:{{-1 -1} [{M40 {400 -1}} {P100 {50 -1}}] [public]}] <nil>`},
		{`{"a":{"M40":4},"b":{}}`, `map[a:{{-1 -1} [{M40 {400 -1}}] []} b:{{-1 -1} [] []}] <nil>`},
		{`{"a":{"cores":250,"memory":"64Gi"}}`, `map[a:{{250 68719476736} [] []}] <nil>`},
		{`{"a":{"cores":250}}`, `map[a:{{250 -1} [] []}] <nil>`},
		{`{"a":{"cores":250,"M40":4}}`, `map[] gpu_quota: namespace a: json: unknown field "M40"`},
		{`{"a":{"memory":64}}`, `map[] gpu_quota: namespace a: json: cannot unmarshal number into Go struct field entry.memory of type string`},
		{`{"a":{"memory":"0"}}`, `map[a:{{-1 0} [] []}] <nil>`},
		{`{"a":{"quota":{"T4":1},"models":{"T4":{"cores":400,"memory":"1Gi"},"V100":{"memory":"2Gi"}}}}`,
			`map[a:{{-1 -1} [{T4 {100 1073741824}} {V100 {-1 2147483648}}] []}] <nil>`},
		{`{"a":{"quota":{"M40":-1}}}`, `map[] gpu_quota: namespace a: model M40: -1 cards: must be 0 to 1000000`},
		{`{"a":{"qota":{"M40":1}}}`, `map[] gpu_quota: namespace a: json: unknown field "qota"`},
		{`{"a":{"memory":"lots"}}`, `map[] gpu_quota: namespace a: memory "lots": must be an amount, as 64Gi`},
		{`[]`, `map[] gpu_quota: not an object of namespaces: json: cannot unmarshal array into Go value of type map[string]json.RawMessage`},
	} {
		q, err := Parse(map[string]string{Key: c.text})
		if got := fmt.Sprint(q, err); got != fmt.Sprint(c.want) {
			t.Errorf("%s:\n%s\nwant\n%s", c.text, got, c.want)
		}
	}
	if _, err := Parse(nil); err == nil {
		t.Error("no key, and no error")
	}
}

func TestRefuse(t *testing.T) {
	q, err := Parse(map[string]string{Key: `{"a":{"quota":{"T4":2},"models":{"A100":{"memory":"40Gi"}},"cores":250,"pool":["public"]}}`})
	if err != nil {
		t.Fatal(err)
	}
	n := q["a"]
	t4, a100 := Place{Pool: "public", Model: "Tesla T4"}, Place{Pool: "public", Model: "NVIDIA A100-SXM4-80GB"}
	used := Used{}
	used.Add(t4, Amount{150, 1 << 30})
	used.Add(a100, Amount{10, 30 << 30})
	for _, c := range []struct {
		place        Place
		cores, gib   int64
		reason, more string
	}{
		{t4, 50, 1, "", ""},
		{t4, 60, 1, "quota of the namespace exceeded for T4", "T4: 60 cores asked, 150 of 200 used"},
		{a100, 90, 10, "", ""},
		{a100, 91, 1, "quota of the namespace exceeded", "91 cores asked, 160 of 250 used"},
		{a100, 10, 11, "quota of the namespace exceeded for A100", "A100: memory 11 GiB asked, 30 GiB of 40 GiB used"},
		{Place{Pool: "other", Model: "Tesla T4"}, 1, 1, "quota: GPU pool not allowed for the namespace", `pool "other" is none of public`},
		{Place{Pool: "public", Model: "Tesla V100"}, 1, 1, "quota: GPU model not allowed for the namespace", `model "Tesla V100" has no quota`},
		{Place{Pool: "public", Label: "T4", Model: "odd name"}, 50, 1, "", ""},
	} {
		if reason, more := n.Refuse(used, c.place, Amount{c.cores, c.gib << 30}); reason != c.reason || more != c.more {
			t.Errorf("%+v: %q %q, want %q %q", c, reason, more, c.reason, c.more)
		}
	}
	used.Add(t4, Amount{-150, -1 << 30})
	if len(used) != 1 {
		t.Errorf("what is used up is kept: %v", used)
	}
}

// What is taken can be judged.
func FuzzParse(f *testing.F) {
	f.Add(`{"a":{"quota":{"M40":4},"pool":["public"],"cores":3,"memory":"1Gi"}}`)
	f.Add(`{"a":{"M40":1e300}}`)
	f.Fuzz(func(t *testing.T, text string) {
		q, err := Parse(map[string]string{Key: text})
		if err != nil {
			return
		}
		for _, n := range q {
			n.Refuse(Used{Place{Model: "M40"}: {1, 1}}, Place{Model: "M40"}, Amount{1, 1})
			for _, m := range n.Models {
				if m.Limit.Cores < -1 || m.Limit.Memory < -1 {
					t.Errorf("%+v", m)
				}
			}
		}
	})
}
