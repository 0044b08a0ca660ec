package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"tranche.dev/tranche/bench/report"
	"tranche.dev/tranche/bench/shares/plot"
)

// Result is a scenario's verdict.
type Result struct {
	Name, Title   string
	Seconds, Real float64
	*Verdict
}

// Suite plays scenarios in processes of their own: a world cannot be left.
type Suite struct {
	// Program is this one; Dir has world.so and Process, the copy of the meter.
	Program, Dir, Process string
	// Env is added to the environment of its processes.
	Env     []string
	Seconds float64
	Seed    uint64
	Jobs    int
	Out     io.Writer
}

// patience is how much real time a scenario may take before it counts as hung.
const patience = 5 * time.Minute

// Play runs all of them; results are in their order.
func (s *Suite) Play(all []*Scenario) ([]*Result, error) {
	results, errs := make([]*Result, len(all)), make([]error, len(all))
	next := make(chan int)
	var workers sync.WaitGroup
	for range max(s.Jobs, 1) {
		workers.Go(func() {
			for i := range next {
				results[i], errs[i] = s.child(all[i].Name)
			}
		})
	}
	for i := range all {
		next <- i
	}
	close(next)
	workers.Wait()
	return results, errors.Join(errs...)
}

func (s *Suite) child(name string) (*Result, error) {
	cmd := exec.Command(s.Program, "-child", "-scenario", name, "-seconds", strconv.FormatFloat(s.Seconds, 'g', -1, 64),
		"-seed", strconv.FormatUint(s.Seed, 10), "-dir", s.Dir, "-process", s.Process)
	cmd.Env = append(os.Environ(), s.Env...)
	var out, errors bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errors
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	late := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	err := cmd.Wait()
	if !late.Stop() {
		return nil, fmt.Errorf("%s: hung: no end after %v", name, patience)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(errors.String()))
	}
	r := &Result{}
	if err := json.Unmarshal(out.Bytes(), r); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return r, nil
}

// Report prints everything, writes the files, and returns how many figures missed their targets.
func (s *Suite) Report(results []*Result, jsonPath, plots string) (int, error) {
	s.compare(results)
	s.worstFeedback(results)
	fmt.Fprintf(s.Out, "Virtual time, %g s each, seed %d. Shares in points of one GPU by the simulated GPU's own count; label sim.\n", s.Seconds, s.Seed)
	fmt.Fprintf(s.Out, "MAE: of windows of 1 s, each 0.1 s; ideal: that of a periodic schedule of the same unit.\n\n")
	var rows []report.Row
	missed := 0
	for _, r := range results {
		r.print(s.Out)
		rows = append(rows, r.Rows...)
		missed += r.missed()
	}
	fmt.Fprintf(s.Out, "\n%d scenarios, %d figures, %d missed\n", len(results), len(rows), missed)
	for _, r := range rows {
		if r.Missed() {
			fmt.Fprintf(s.Out, "MISS %s: %s %.4g %s, wanted %s\n", r.Case, r.Metric, r.Value, r.Unit, r.Wanted())
		}
	}
	if jsonPath != "" {
		if err := report.Write(jsonPath, rows); err != nil {
			return missed, err
		}
	}
	if plots != "" {
		if err := draw(results, plots); err != nil {
			return missed, err
		}
	}
	return missed, nil
}

// compare adds the figures over two scenarios.
func (s *Suite) compare(results []*Result) {
	by := map[string]*Result{}
	for _, r := range results {
		by[r.Name] = r
	}
	for _, c := range comparisons() {
		of, with := by[c.of], by[c.with]
		if of == nil || with == nil || with.Figures[c.figure] == 0 {
			continue
		}
		row := report.Row{Case: c.of, Metric: c.metric, Value: of.Figures[c.figure] / with.Figures[c.figure], Label: "sim"}
		if c.most > 0 {
			row.Target, row.Better = c.most, "lower"
		}
		of.Rows = append(of.Rows, row)
	}
}

// worstFeedback judges the control over all its kernel shapes.
func (s *Suite) worstFeedback(results []*Result) {
	var last *Result
	worst, n := 0.0, 0
	for _, r := range results {
		if mae, ok := r.Figures["mae"]; ok {
			last, worst, n = r, max(worst, mae), n+1
		}
	}
	if n == len(kernelShapes()) {
		last.Rows = append(last.Rows, report.Row{Case: "control-feedback: the worst shape", Metric: "mean absolute error (a control: this is known of it)",
			Unit: "points", Value: worst, Target: feedbackMAE, Better: "higher", Label: "sim"})
	}
}

func (r *Result) missed() int {
	n := 0
	for _, row := range r.Rows {
		if row.Missed() {
			n++
		}
	}
	return n
}

// print is the scenario's part of the table: its tenants, then what else was asked.
func (r *Result) print(w io.Writer) {
	fmt.Fprintf(w, "%s: %s\n", r.Name, r.Title)
	if len(r.Lines) > 0 {
		fmt.Fprintf(w, "  %-30s %7s %8s %7s %6s %6s %6s %6s\n", "tenant", "target", "mean", "off", "MAE", "most", "max", "ideal")
	}
	for _, l := range r.Lines {
		name, ideal, mark := l.Tenant, "", ""
		if l.Phase != "" {
			name = l.Phase + ", " + l.Tenant
		}
		if l.Ideal > 0 {
			ideal = fmt.Sprintf("%.2f", l.Ideal)
		}
		if l.Missed {
			mark = "  MISS"
		}
		fmt.Fprintf(w, "  %-30s %7.1f %8.3f %+7.3f %6.3f %6.2f %6.2f %6s%s\n", name, l.Target, l.Score.Mean, l.Score.Mean-l.Target,
			l.Score.MAE, l.MAEMost, l.Score.Max, ideal, mark)
	}
	for _, row := range r.Rows {
		if row.Metric == "mean share" && row.Better != "" || row.Metric == "mean absolute error of 1 s windows" && row.Better != "" {
			continue
		}
		mark := ""
		if row.Missed() {
			mark = "  MISS"
		}
		what := strings.TrimPrefix(strings.TrimPrefix(row.Case, r.Name), ": ")
		if what != "" {
			what += ": "
		}
		spread := ""
		if row.Spread != [2]float64{} {
			spread = fmt.Sprintf(" (%.4g to %.4g)", row.Spread[0], row.Spread[1])
		}
		fmt.Fprintf(w, "  %s%s %.4g %s%s %s%s\n", what, row.Metric, row.Value, row.Unit, spread, row.Wanted(), mark)
	}
}

// draw makes a plot of each scenario, and one of all errors.
func draw(results []*Result, dir string) error {
	var bars []plot.Bar
	for _, r := range results {
		var series []plot.Series
		for _, c := range r.Shares {
			series = append(series, c.series())
		}
		path := filepath.Join(dir, r.Name+".svg")
		if err := plot.Lines(path, r.Title+" (sim)", "s", "% of the GPU, 1 s windows", 100, series); err != nil {
			return err
		}
		for _, row := range r.Rows {
			if row.Metric == "mean absolute error of 1 s windows" && row.Better == "lower" {
				bars = append(bars, plot.Bar{Name: row.Case, Value: row.Value, Limit: row.Target})
			}
		}
	}
	return plot.Bars(filepath.Join(dir, "errors.svg"), "Mean absolute error of 1 s windows, points (sim)", "", bars)
}

// points of a line at most.
const points = 600

func (c Curve) series() plot.Series {
	s := plot.Series{Name: c.Name, Level: c.Target}
	step := max(len(c.Share)/points, 1)
	for i := 0; i < len(c.Share); i += step {
		s.X = append(s.X, float64(int64(i)*sampleEvery)/float64(sec))
		s.Y = append(s.Y, c.Share[i])
	}
	return s
}
