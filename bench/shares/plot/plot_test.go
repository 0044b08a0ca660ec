package plot

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestFilesAreXML(t *testing.T) {
	dir := t.TempDir()
	lines, bars := filepath.Join(dir, "l.svg"), filepath.Join(dir, "b.svg")
	if err := Lines(lines, "30 & 60", "s", "%", 100, []Series{{Name: "<a>", X: []float64{0, 1, 2}, Y: []float64{0, 30, 120}, Level: 30}}); err != nil {
		t.Fatal(err)
	}
	if err := Bars(bars, "errors", "points", []Bar{{Name: "a", Value: 2, Limit: 1}, {Name: "b", Value: 0.5}}); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{lines, bars} {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		d := xml.NewDecoder(strings.NewReader(string(text)))
		for {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", path, err)
			}
		}
	}
}
