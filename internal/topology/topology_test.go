package topology

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// Each table of testdata is laid out as drivers 418, 470, 550 and 570 print it, of a machine that is sold
// like this; beside it lies how it is read: the table of GPUs, then GB/s.
func TestParse(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) != 4 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		m, err := Parse(string(text))
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		got := m.String() + "\n"
		for _, row := range m {
			for j, l := range row {
				got += fmt.Sprintf("%s%g", map[bool]string{true: "\t"}[j > 0], l.GBps)
			}
			got += "\n"
		}
		wantFile := strings.TrimSuffix(file, ".txt") + ".want"
		if os.Getenv("UPDATE") != "" {
			if err := os.WriteFile(wantFile, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(wantFile)
		if err != nil || got != string(want) {
			t.Errorf("%s: %v\n%s", file, err, got)
		}
		// What we print we read.
		if again, err := Parse(m.String()); err != nil || !reflect.DeepEqual(again, m) {
			t.Errorf("%s: again: %v\n%v", file, err, again)
		}
	}
}

func TestParseErrors(t *testing.T) {
	for text, want := range map[string]string{
		"": "no line that begins with GPU0", "No devices were found\n": "no line that begins",
		"\tGPU0\tGPU1\nGPU0\tX\tPIX\n": "no row of GPU1", "\tGPU0\tGPU1\nGPU0\tX\n": "row GPU0 has 1 cells of 2",
		"\tGPU0\tGPU1\nGPU0\tX\tPIX\nGPU1\tPXB\tX\n":       "cell 0,1 is",
		"\tGPU0\tGPU1\nGPU0\tX\tNVX\nGPU1\tPXB\tX\n":       `GPU0 to GPU1: "NVX" is no link`,
		"\tGPU0\tGPU1\nGPU0\tX\tNV0\nGPU1\tNV0\tX\n":       `"NV0" is no link`,
		"\tGPU0\tGPU1\nGPU0\tX\tX\nGPU1\tX\tX\n":           "cell 0,1 is X",
		"\tGPU0\nGPU0\tPIX\n":                              "cell 0,0 is PIX",
		"\t" + strings.Repeat("GPU1\t", parseMax+1) + "\n": "65 GPUs, at most 64",
	} {
		if m, err := Parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, %v, want %s", text, m, err, want)
		}
	}
	for text, want := range map[string]Matrix{
		"\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n":   New(1),
		"\tGPU0\tGPU1\nGPU0\tX\tSOC\nGPU1\tSOC\tX": {{{Level: Self}, {Level: SYS, GBps: 6.3}}, {{Level: SYS, GBps: 6.3}, {Level: Self}}},
	} {
		if m, err := Parse(text); err != nil || !reflect.DeepEqual(m, want) {
			t.Errorf("%q: %v, %v", text, m, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.txt")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(text))
	}
	f.Add("\tGPU0\nGPU0\t X \n")
	f.Fuzz(func(t *testing.T, text string) {
		m, err := Parse(text)
		if err != nil {
			return
		}
		if err := m.Validate(); err != nil {
			t.Error(err)
		}
		if again, err := Parse(m.String()); err != nil || !reflect.DeepEqual(again, m) {
			t.Errorf("%v\n%v: %v", m, again, err)
		}
	})
}

// lanes are n links to a bus, or to switches.
func lanes(bus string, n int) []Lane {
	var out []Lane
	for range n {
		out = append(out, Lane{Switch: bus == "", Peer: bus})
	}
	return out
}

func TestBuild(t *testing.T) {
	for name, c := range map[string]struct {
		nodes []Node
		want  Link // between the first two
	}{
		"one board":               {[]Node{{Bus: "a", Ancestors: []int{-1, 0}}, {Bus: "b", Ancestors: []int{0, -1}}}, Link{Level: PIX, GBps: 15.8}},
		"PCIe 5 and PCIe 4":       {[]Node{{Bus: "a", Ancestors: []int{-1, 30}, PCIeMBps: 63008}, {Bus: "b", PCIeMBps: 31504}}, Link{Level: PHB, GBps: 25.2}},
		"the other one tells":     {[]Node{{Bus: "a", Ancestors: []int{-1, -1}}, {Bus: "b", Ancestors: []int{50, -1}}}, Link{Level: SYS, GBps: 6.3}},
		"nothing told":            {[]Node{{Bus: "a"}, {Bus: "b"}}, Link{}},
		"two lanes":               {[]Node{{Bus: "a", Ancestors: []int{-1, 40}, Lanes: append(lanes("b", 2), lanes("c", 4)...), LaneMBps: 25781}, {Bus: "b", Lanes: lanes("a", 2)}, {Bus: "c"}}, Link{Level: NODE, NVLinks: 2, GBps: 50}},
		"one end is down":         {[]Node{{Bus: "a", Ancestors: []int{-1, 40}, Lanes: lanes("b", 2)}, {Bus: "b", Lanes: lanes("a", 1)}}, Link{Level: NODE, NVLinks: 1, GBps: 25}},
		"switches":                {[]Node{{Bus: "a", Ancestors: []int{-1, 50}, Lanes: lanes("", 18), LaneMBps: 26562}, {Bus: "b", Lanes: lanes("", 17), LaneMBps: 26562}}, Link{Level: SYS, NVLinks: 17, Switched: true, GBps: 451.6}},
		"one without the switch":  {[]Node{{Bus: "a", Ancestors: []int{-1, 20}, Lanes: lanes("", 12)}, {Bus: "b"}}, Link{Level: PXB, GBps: 15}},
		"links to something else": {[]Node{{Bus: "", Ancestors: []int{-1, 20}, Lanes: []Lane{{}, {}}}, {Bus: "", Lanes: []Lane{{}}}}, Link{Level: PXB, GBps: 15}},
	} {
		m := Build(c.nodes)
		if got := m.At(0, 1); got != c.want || m.Validate() != nil {
			t.Errorf("%s: %+v, want %+v (%v)", name, got, c.want, m.Validate())
		}
	}
}

// Whatever nodes tell, the matrix is one, and the order of the nodes is only that.
func TestBuildRandom(t *testing.T) {
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 1))
	for range 500 {
		n := rng.IntN(9)
		nodes := make([]Node, n)
		for i := range nodes {
			nodes[i] = Node{Bus: fmt.Sprint(i), LaneMBps: rng.IntN(3) * 20000, PCIeMBps: rng.IntN(3) * 15000, Ancestors: make([]int, n)}
			for j := range nodes[i].Ancestors {
				nodes[i].Ancestors[j] = rng.IntN(7)*10 - 10
			}
			for range rng.IntN(12) {
				nodes[i].Lanes = append(nodes[i].Lanes, Lane{Switch: rng.IntN(2) == 0, Peer: fmt.Sprint(rng.IntN(n))})
			}
		}
		for i := range nodes { // both ends of a pair tell the same level
			for j := range i {
				nodes[j].Ancestors[i] = nodes[i].Ancestors[j]
			}
		}
		m := Build(nodes)
		if err := m.Validate(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		order := rng.Perm(n)
		shuffled := make([]Node, n)
		for a, i := range order {
			shuffled[a] = nodes[i]
			shuffled[a].Ancestors = make([]int, n)
			for b, j := range order {
				shuffled[a].Ancestors[b] = nodes[i].Ancestors[j]
			}
		}
		if got := Build(shuffled); !reflect.DeepEqual(got, m.Pick(order)) {
			t.Fatalf("seed %d: order %v\n%v\n%v", seed, order, got, m)
		}
	}
}

func TestMatrixJSON(t *testing.T) {
	m := Build([]Node{{Bus: "a", Ancestors: []int{-1, 20}, Lanes: lanes("b", 2)}, {Bus: "b", Lanes: lanes("a", 2)}})
	text, err := json.Marshal(m)
	if want := `[[{"level":"X","gbps":0},{"level":"PXB","nvlinks":2,"gbps":50}],[{"level":"PXB","nvlinks":2,"gbps":50},{"level":"X","gbps":0}]]`; err != nil || string(text) != want {
		t.Errorf("%s, %v", text, err)
	}
	var again Matrix
	if err := json.Unmarshal(text, &again); err != nil || !reflect.DeepEqual(again, m) {
		t.Errorf("%v, %v", again, err)
	}
	if err := json.Unmarshal([]byte(`[[{"level":"NVL"}]]`), &again); err == nil {
		t.Error("read")
	}
	if l := m.At(2, 0); l != (Link{}) {
		t.Error(l)
	}
	if err := (Matrix{{{Level: Self}}, {{}, {Level: Self}}}).Validate(); err == nil || !strings.Contains(err.Error(), "row 0 has 1 cells") {
		t.Error(err)
	}
}
