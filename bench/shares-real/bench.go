package main

import (
	"errors"
	"fmt"
	"math"
	"math/rand"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/bench/report"
)

// Bench runs trials on a machine and keeps the figures.
type Bench struct {
	Config
	machine Machine
	dir     string
	rows    []report.Row
	bars    []bar
	missed  int
	late    int
	host    []float64 // how busy the processors were, by trial
	random  *rand.Rand
	running atomic.Pointer[Running]
}

// NewBench makes a place for the trials' files.
func NewBench(c Config) (*Bench, error) {
	base := "/dev/shm"
	if _, err := os.Stat(base); err != nil {
		base = ""
	}
	dir, err := os.MkdirTemp(base, "tranche-shares-*")
	if err != nil {
		return nil, err
	}
	b := &Bench{Config: c, dir: dir, random: rand.New(rand.NewSource(c.Seed))}
	if c.Real {
		b.machine, err = newGPUMachine(c.GPU)
	} else {
		b.machine, err = newSimMachine(dir, c)
	}
	if err != nil {
		b.Close()
		return nil, err
	}
	if !c.list {
		fmt.Printf("Tenants side by side on %s.\n%d runs of %.0f s; \"off\" is the median's distance from its target, \"1 s off\" the mean distance in windows of 1 s.\n",
			b.machine.Title(), c.Runs, c.Seconds)
	}
	return b, nil
}

// Close removes the trials' files.
func (b *Bench) Close() { _ = os.RemoveAll(b.dir) }

// endOnSignal leaves no tenant behind.
func (b *Bench) endOnSignal() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	go func() {
		<-signals
		if r := b.running.Load(); r != nil {
			r.stop()
		}
		b.Close()
		os.Exit(130)
	}()
}

func (b *Bench) stateDir() string { return filepath.Join(b.dir, "state") }

// runs does a trial as often as asked. One that began too late is done again, once each.
func (b *Bench) runs(t Trial) ([]Outcome, error) { return b.some(b.Runs, t) }

func (b *Bench) some(n int, t Trial) ([]Outcome, error) {
	var out []Outcome
	for range n {
		o, err := b.run(t)
		if errors.Is(err, errLate) {
			b.late++
			o, err = b.run(t)
		}
		if err != nil {
			return out, err
		}
		out = append(out, o)
		b.host = append(b.host, o.Host)
	}
	return out, nil
}

// Figure is one value of each run.
type Figure struct {
	Case, Metric, Unit string
	Values             []float64
	// Target with what is good: "lower" and "higher" than it, or within Within of it ("nearest"). "": there is
	// no target.
	Target float64
	Within float64
	Better string
	// Windows, when not empty, are the mean errors in windows of one second, printed beside.
	Windows []float64
}

// held is what is good where the target holds, else nothing.
func held(better string, holds bool) string {
	if !holds {
		return ""
	}
	return better
}

// heading begins a table of figures.
func (b *Bench) heading(title string) {
	fmt.Printf("\n%s\n%-52s %8s %8s %7s %8s %8s %8s\n", title, "", "target", "median", "off", "lowest", "highest", "1 s off")
}

// figure prints one and keeps it.
func (b *Bench) figure(f Figure) {
	row := b.keep(f)
	target, off, windows, mark := "", "", "", ""
	if f.Better != "" {
		target = number(f.Target)
	}
	if f.Better == "nearest" {
		off = fmt.Sprintf("%+.2f", row.Value-f.Target)
	}
	if row.Missed() {
		mark = "  MISSED"
		b.missed++
	}
	if len(f.Windows) > 0 {
		windows = number(median(f.Windows))
		b.keep(Figure{Case: f.Case, Metric: f.Metric + ", mean error in 1 s windows", Unit: "points", Values: f.Windows})
	}
	line := fmt.Sprintf("%-52s %8s %8s %7s %8s %8s %8s", f.Metric, target, number(row.Value), off, number(row.Spread[0]), number(row.Spread[1]), windows)
	fmt.Println(strings.TrimRight(line, " ") + mark)
}

func (b *Bench) keep(f Figure) report.Row {
	row := report.Row{Case: "real time: " + f.Case, Metric: f.Metric, Unit: f.Unit, Value: median(f.Values), Label: b.machine.Label(),
		Spread: [2]float64{slices.Min(f.Values), slices.Max(f.Values)}, Target: f.Target, Off: f.Within, Better: f.Better}
	b.rows = append(b.rows, row)
	return row
}

func number(v float64) string {
	if math.Abs(v) < 10 {
		return strconv.FormatFloat(v, 'f', 3, 64)
	}
	return strconv.FormatFloat(v, 'f', 2, 64)
}

// crowded is how busy processors may be, in percent, for launches to come in time.
const crowded = 70

func (b *Bench) summary() {
	fmt.Println()
	if b.late > 0 {
		fmt.Printf("%d runs began too late on this machine and were done again\n", b.late)
	}
	if len(b.host) > 0 {
		b.keep(Figure{Case: "host", Metric: "processors busy", Unit: "%", Values: b.host})
		fmt.Printf("the processors were busy for %.0f %% of the time in the median run, %.0f %% in the worst;"+
			" above %d %% the figures tell more of this machine than of the limits\n", median(b.host), slices.Max(b.host), crowded)
	}
	if b.missed > 0 {
		fmt.Printf("%d figures missed their target\n", b.missed)
	} else {
		fmt.Println("all within their targets")
	}
}

// write writes the files that were asked for. That of figures may hold others' already: ours are added.
func (b *Bench) write() error {
	if b.JSON != "" {
		if err := report.Append(b.JSON, b.rows); err != nil {
			return err
		}
	}
	if b.SVG != "" {
		return writeFile(b.SVG, plot("GPU time by tenant in real time, % of one GPU ("+b.machine.Label()+")", b.bars))
	}
	return nil
}

func writeFile(path, text string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(text), 0o644)
}
