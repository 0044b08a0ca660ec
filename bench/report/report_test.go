package report

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestMissed(t *testing.T) {
	for _, c := range []struct {
		row    Row
		missed bool
	}{
		{Row{Value: 30.2, Target: 30, Better: "nearest", Off: 0.3}, false},
		{Row{Value: 30.4, Target: 30, Better: "nearest", Off: 0.3}, true},
		{Row{Value: 1, Target: 1, Better: "lower"}, false},
		{Row{Value: 1.1, Target: 1, Better: "lower"}, true},
		{Row{Value: 96.9, Target: 97, Better: "higher"}, true},
		{Row{Value: 5}, false},
	} {
		if got := c.row.Missed(); got != c.missed {
			t.Errorf("%+v: missed is %v, want %v", c.row, got, c.missed)
		}
	}
}

func TestAppend(t *testing.T) {
	path := filepath.Join(t.TempDir(), "shares.json")
	first := Row{Case: "a", Metric: "mean", Unit: "points", Value: 30.0123456, Spread: [2]float64{29, 31},
		Target: 30, Better: "nearest", Off: 0.3, Label: "sim"}
	for _, rows := range [][]Row{{first}, {{Case: "b", Metric: "longest wait", Unit: "ms", Value: 2, Label: "sim"}}} {
		if err := Append(path, rows); err != nil {
			t.Fatal(err)
		}
	}
	read := func() string {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	want := `[
 {"case":"a","metric":"mean","unit":"points","value":30.0123,"spread":[29.0000,31.0000],"target":30.0000,"better":"nearest","tolerance":0.3000,"label":"sim"},
 {"case":"b","metric":"longest wait","unit":"ms","value":2.0000,"spread":[2.0000,2.0000],"target":null,"label":"sim"}
]
`
	if got := read(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if err := Write(path, nil); err != nil || read() != "[\n]\n" {
		t.Errorf("%v: %s", err, read())
	}
}

func TestPrint(t *testing.T) {
	var out strings.Builder
	missed := Print(&out, []Row{{Case: "a", Metric: "p50", Unit: "ms", Value: 2, Target: 1, Better: "lower"}, {Case: "b", Metric: "p50", Unit: "ms", Value: 3}})
	want := "a                                  p50                               2.000 ms     <= 1  MISSED\n" +
		"b                                  p50                               3.000 ms     \n"
	if missed != 1 || out.String() != want {
		t.Errorf("%d missed\n%s\nwant\n%s", missed, out.String(), want)
	}
}
