// Shares plays scenarios of several tenants on simulated GPUs in virtual time and scores what each gets by
// the GPUs' own count: the shipped meter and the shipped arbiter, and controls that must fail.
//
//	shares                               all scenarios, tables, JSON and plots
//	shares -run 'whole|burst'            those whose names match
//	shares -scenario NAME -v -trace      one, in this process, with a time line on stderr
//
// Ends with 1 when a figure missed its target.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"time"
)

type options struct {
	scenario, run, json, plots string
	dir, process               string
	seconds                    float64
	seed                       uint64
	trace, launches            bool
	verbose, list              bool
	child, quick               bool
	jobs                       int
}

func main() {
	runtime.LockOSThread() // the meter's thread-local pointer lives there
	var o options
	flag.StringVar(&o.scenario, "scenario", "", "play only this one, in this process")
	flag.StringVar(&o.run, "run", "", "play those whose name matches this regular expression")
	flag.Float64Var(&o.seconds, "seconds", 120, "virtual seconds of each")
	flag.Uint64Var(&o.seed, "seed", 1, "of all random numbers")
	flag.BoolVar(&o.trace, "trace", false, "a time line on stderr: turns, who runs, launches that waited")
	flag.BoolVar(&o.launches, "launches", false, "the same with every launch")
	flag.BoolVar(&o.verbose, "v", false, "what the tenants' programs saw")
	flag.BoolVar(&o.list, "list", false, "names and titles of the scenarios")
	flag.BoolVar(&o.quick, "quick", false, "only the scenarios of the tests")
	flag.StringVar(&o.json, "json", "", "write the figures to this file")
	flag.StringVar(&o.plots, "plots", "", "draw SVG files into this directory")
	flag.IntVar(&o.jobs, "jobs", 2, "scenarios at a time")
	flag.StringVar(&o.dir, "dir", "", "where world.so and process.so are; default: beside this program")
	flag.StringVar(&o.process, "process", "process.so", "the copy of the meter that processes load")
	flag.BoolVar(&o.child, "child", false, "internal: print the result as JSON")
	flag.Parse()
	missed, err := o.main()
	if err != nil {
		fmt.Fprintln(os.Stderr, "shares:", err)
	}
	if err != nil || missed > 0 {
		os.Exit(1)
	}
}

func (o *options) main() (missed int, err error) {
	all := scenarios()
	if o.list {
		for _, s := range all {
			fmt.Printf("%-32s %s\n", s.Name, s.Title)
		}
		return 0, nil
	}
	exe, err := os.Executable()
	if err != nil {
		return 0, err
	}
	if o.dir == "" {
		o.dir = filepath.Dir(exe)
	}
	if o.scenario != "" {
		return o.one(all)
	}
	pattern, err := regexp.Compile(o.run)
	if err != nil {
		return 0, err
	}
	var chosen []*Scenario
	for _, s := range all {
		if pattern.MatchString(s.Name) && (s.Quick || !o.quick) {
			chosen = append(chosen, s)
		}
	}
	suite := Suite{Program: exe, Dir: o.dir, Process: o.process, Seconds: o.seconds, Seed: o.seed, Jobs: o.jobs, Out: os.Stdout}
	results, err := suite.Play(chosen)
	if err != nil {
		return 0, err
	}
	return suite.Report(results, o.json, o.plots)
}

// one plays a scenario in this process.
func (o *options) one(all []*Scenario) (int, error) {
	s := find(all, o.scenario)
	if s == nil {
		return 0, fmt.Errorf("no scenario %q; -list names them", o.scenario)
	}
	s.Machine.Seed, s.Process = o.seed, o.process
	if o.trace {
		s.Machine.Trace = 1
	}
	if o.launches {
		s.Machine.Trace = 2
	}
	began := time.Now()
	out, err := play(s, o.dir, int64(o.seconds*float64(sec)))
	if err != nil {
		return 0, err
	}
	r := Result{Name: s.Name, Title: s.Title, Seconds: o.seconds, Real: time.Since(began).Seconds(), Verdict: judge(out)}
	if o.child {
		return 0, json.NewEncoder(os.Stdout).Encode(r)
	}
	r.print(os.Stdout)
	if o.verbose {
		fmt.Println(out.summary())
	}
	fmt.Printf("seed %d, %g s virtual, %.1f s real\n", o.seed, o.seconds, r.Real)
	return r.missed(), nil
}

// find returns the scenario of that name; without a slice length, that of 2 ms.
func find(all []*Scenario, name string) *Scenario {
	for _, n := range []string{name, name + "@2ms"} {
		for _, s := range all {
			if s.Name == n {
				return s
			}
		}
	}
	return nil
}
