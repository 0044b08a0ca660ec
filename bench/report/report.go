// Package report keeps the figures of benchmarks: rows of build/bench/NAME.json, checked against their targets.
package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
)

// Row is one figure. The zero Target with no Better is a figure without one.
type Row struct {
	Case   string
	Metric string
	Unit   string
	Value  float64
	// Spread is the least and the greatest of the values that Value stands for; zero: it is the only one.
	Spread [2]float64
	Target float64
	// Better is "lower" or "higher" than the target, "nearest" to it within Off, or "" when the figure is
	// only told.
	Better string
	Off    float64
	// Label is "sim" or "gpu", the machine that it is a figure of, with a colon and more about it if need be.
	Label string
}

// Missed tells whether the row has a target and is on its wrong side.
func (r Row) Missed() bool {
	const rounding = 1e-9
	switch r.Better {
	case "lower":
		return !(r.Value <= r.Target+rounding)
	case "higher":
		return !(r.Value >= r.Target-rounding)
	case "nearest":
		return !(math.Abs(r.Value-r.Target) <= r.Off+rounding)
	}
	return false
}

// Wanted is the target in words.
func (r Row) Wanted() string {
	switch r.Better {
	case "lower":
		return fmt.Sprintf("<= %.4g", r.Target)
	case "higher":
		return fmt.Sprintf(">= %.4g", r.Target)
	case "nearest":
		return fmt.Sprintf("%.4g +- %.4g", r.Target, r.Off)
	}
	return ""
}

// Print writes a line a row, and returns how many missed their targets.
func Print(w io.Writer, rows []Row) int {
	missed := 0
	for _, r := range rows {
		verdict := ""
		if r.Missed() {
			verdict = "  MISSED"
			missed++
		}
		fmt.Fprintf(w, "%-34s %-28s %10.3f %-6s %s%s\n", r.Case, r.Metric, r.Value, r.Unit, r.Wanted(), verdict)
	}
	return missed
}

// Finish prints rows, writes them to a file where one is named, and with check calls missed targets an error.
func Finish(rows []Row, file string, check bool) error {
	missed := Print(os.Stdout, rows)
	if file != "" {
		if err := Write(file, rows); err != nil {
			return err
		}
	}
	if check && missed > 0 {
		return fmt.Errorf("%d targets missed", missed)
	}
	return nil
}

// Write makes a file of the rows, in place of what was there.
func Write(path string, rows []Row) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return Append(path, rows)
}

// row is the file's form, the same in all files of build/bench.
type row struct {
	Case   string    `json:"case"`
	Metric string    `json:"metric"`
	Unit   string    `json:"unit"`
	Value  figure    `json:"value"`
	Spread [2]figure `json:"spread"`
	Target *figure   `json:"target"`
	Better string    `json:"better,omitempty"`
	Off    figure    `json:"tolerance,omitempty"`
	Label  string    `json:"label"`
}

func (r Row) spread() [2]figure {
	if r.Spread == [2]float64{} {
		return [2]figure{figure(r.Value), figure(r.Value)}
	}
	return [2]figure{figure(r.Spread[0]), figure(r.Spread[1])}
}

// figure is written with four digits behind the point.
type figure float64

// MarshalJSON writes null for what is no number.
func (f figure) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(f)) || math.IsInf(float64(f), 0) {
		return []byte("null"), nil
	}
	return fmt.Appendf(nil, "%.4f", float64(f)), nil
}

// Append adds rows to the file, which is made if need be.
func Append(path string, rows []Row) error {
	var all []json.RawMessage
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil {
		if err := json.Unmarshal(old, &all); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	for _, r := range rows {
		out := row{Case: r.Case, Metric: r.Metric, Unit: r.Unit, Value: figure(r.Value),
			Spread: r.spread(), Better: r.Better, Off: figure(r.Off), Label: r.Label}
		if r.Better != "" {
			t := figure(r.Target)
			out.Target = &t
		}
		line, err := json.Marshal(out)
		if err != nil {
			return err
		}
		all = append(all, line)
	}
	var text bytes.Buffer
	text.WriteString("[")
	for i, line := range all {
		if i > 0 {
			text.WriteString(",")
		}
		text.WriteString("\n ")
		text.Write(line)
	}
	text.WriteString("\n]\n")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, text.Bytes(), 0o644)
}
