package inventory

import (
	"errors"
	"reflect"
	"strings"
	"testing"
)

func sample() Node {
	return Node{Version: Version, Driver: "550.163.01", CUDA: "12.4", Unit: 256 << 20, Domain: "tencent.com",
		GPUs: []GPU{
			{Index: 0, Minor: 1, UUID: "GPU-a", Model: "NVIDIA A100-SXM4-80GB", Memory: 80 << 30, NUMA: 0},
			{Index: 1, UUID: "GPU-b", Model: "NVIDIA A100-SXM4-80GB", Memory: 80 << 30, NUMA: -1, Unusable: "unhealthy: XID 79", Foreign: Amount{Cores: 100}},
			{Index: 2, UUID: "GPU-c", Model: "Tesla T4", Memory: 15 << 30, Raised: Amount{Cores: 5, Memory: 1 << 30}},
		},
		Links: []string{"NV12+NODE", "SYS X"},
	}
}

const sampleText = `{"version":1,"driver":"550.163.01","cuda":"12.4","unit":268435456,"domain":"tencent.com","gpus":[` +
	`{"index":0,"minor":1,"uuid":"GPU-a","model":"NVIDIA A100-SXM4-80GB","memory":85899345920,"numa":0},` +
	`{"index":1,"minor":0,"uuid":"GPU-b","model":"NVIDIA A100-SXM4-80GB","memory":85899345920,"numa":-1,"unusable":"unhealthy: XID 79","foreign":{"cores":100}},` +
	`{"index":2,"minor":0,"uuid":"GPU-c","model":"Tesla T4","memory":16106127360,"numa":0,"raised":{"cores":5,"memory":1073741824}}],` +
	`"links":["NV12+NODE","SYS X"]}`

func TestText(t *testing.T) {
	text, err := Encode(sample())
	if err != nil || text != sampleText {
		t.Errorf("%v\n%s\nwant\n%s", err, text, sampleText)
	}
	back, err := Decode(text)
	if err != nil || !reflect.DeepEqual(back, sample()) {
		t.Errorf("%v\n%+v", err, back)
	}
}

func TestMatrix(t *testing.T) {
	n := sample()
	m, err := n.Matrix()
	want := [][]Link{
		{{}, {NVLinks: 12, Level: "NODE"}, {Level: "SYS"}},
		{{NVLinks: 12, Level: "NODE"}, {}, {}},
		{{Level: "SYS"}, {}, {}},
	}
	if err != nil || !reflect.DeepEqual(m, want) {
		t.Errorf("%v\n%+v", err, m)
	}
	links := n.Links
	n.SetMatrix(m)
	if !reflect.DeepEqual(n.Links, links) {
		t.Errorf("%q", n.Links)
	}
}

func TestRefused(t *testing.T) {
	for _, c := range []struct{ change, to, says string }{
		{`"version":1`, `"version":2`, "inventory of another version: 2, this is 1"},
		{`GPU-b`, `GPU-a`, "there twice"},
		{`"index":2`, `"index":1`, "there twice"},
		{`"index":2`, `"index":-2`, "out of range"},
		{`"unit":268435456`, `"unit":1`, "GPUs need both"},
		{`"memory":16106127360`, `"memory":-1`, "cannot unmarshal"},
		{`"cores":100`, `"cores":101`, "used by others"},
		{`"NV12+NODE"`, `"NV12+NODE X"`, "must be 1"},
		{`"NV12+NODE"`, `"NV0"`, "NV needs"},
		{`"NV12+NODE"`, `"FOO"`, "no connection"},
		{`["NV12+NODE",`, `[`, "links of 1 GPUs"},
		{`{"version"`, `["version"`, "not JSON"},
	} {
		_, err := Decode(strings.Replace(sampleText, c.change, c.to, 1))
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %s", c.to, err, c.says)
		}
	}
	if _, err := Decode(`{"version":7}`); !errors.Is(err, ErrVersion) {
		t.Error(err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(sampleText)
	f.Add(`{"version":1,"gpus":[]}`)
	f.Fuzz(func(t *testing.T, text string) {
		n, err := Decode(text)
		if err != nil {
			return
		}
		out, err := Encode(n)
		if err != nil {
			t.Fatalf("%v: %q", err, text)
		}
		back, err := Decode(out)
		if err != nil || len(back.GPUs) != len(n.GPUs) {
			t.Fatalf("%v: %q", err, out)
		}
		if _, err := back.Matrix(); err != nil {
			t.Fatal(err)
		}
	})
}
