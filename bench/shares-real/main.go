// Shares-real runs tenants side by side on one GPU, in real time, each a `tranche run` of gpuload, and
// scores the GPU time that each got against what it was promised. On a simulated GPU the score comes
// from the simulated machine's own count, on a real one from what the kernels record on the GPU
// themselves (gpuload --probe): never from our ledger. It is one static binary without dependencies, so that it
// can be carried to a machine with a GPU.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"time"
)

func main() {
	config, err := parse(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "shares-real:", err)
		os.Exit(2)
	}
	missed, err := run(config)
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "shares-real:", err)
		os.Exit(2)
	case missed > 0:
		os.Exit(1)
	}
}

// Config is what the command line asks for.
type Config struct {
	Runs    int
	Seconds float64
	Settle  float64
	Real    bool // a real GPU
	GPU     int
	Only    *regexp.Regexp
	JSON    string
	SVG     string
	Bin     string // directory with tranche and gpuload
	Simctl  string
	Machine string // the simulated machine
	Seed    int64
	list    bool
}

func parse(args []string) (Config, error) {
	var c Config
	var only string
	quick := false
	f := flag.NewFlagSet("shares-real", flag.ContinueOnError)
	f.IntVar(&c.Runs, "runs", 5, "runs of each case; the median counts")
	f.Float64Var(&c.Seconds, "seconds", 20, "scored time of a run")
	f.Float64Var(&c.Settle, "settle", 2, "time before it, from when all tenants have launched")
	f.BoolVar(&quick, "quick", false, "one run of 5 s each")
	f.BoolVar(&c.Real, "real", false, "on a real GPU instead of a simulated one")
	f.IntVar(&c.GPU, "gpu", 0, "index of the real GPU")
	f.StringVar(&only, "cases", "", "cases whose name matches this expression")
	f.StringVar(&c.JSON, "json", "", "file that the figures are added to")
	f.StringVar(&c.SVG, "svg", "", "file for the plot")
	f.StringVar(&c.Bin, "bin", "", "directory with tranche and gpuload (default: this program's, else build/bin)")
	f.StringVar(&c.Simctl, "simctl", "build/sim/simctl", "the simulated machine's own count")
	f.StringVar(&c.Machine, "machine", "h200-141g", "the simulated machine, as for tranche run --sim; its first GPU is used")
	f.Int64Var(&c.Seed, "seed", 0, "of random moments; 0: from the clock")
	f.BoolVar(&c.list, "list", false, "list the cases and end")
	if err := f.Parse(args); err != nil {
		return c, err
	}
	if f.NArg() > 0 {
		return c, fmt.Errorf("%s: not a flag", f.Arg(0))
	}
	if quick {
		c.Runs, c.Seconds, c.Settle = 1, 5, 1
	}
	if c.Runs < 1 || c.Seconds < 1 || c.Settle < 0 {
		return c, errors.New("-runs and -seconds start at 1")
	}
	if c.Seed == 0 {
		c.Seed = time.Now().UnixNano() % 1e9
	}
	var err error
	if c.Only, err = regexp.Compile(only); err != nil {
		return c, err
	}
	c.Bin, err = findBin(c.Bin)
	return c, err
}

// findBin is where the programs are that lie beside this one, or where make puts them.
func findBin(dir string) (string, error) {
	candidates := []string{dir}
	if dir == "" {
		candidates = []string{"build/bin"}
		if self, err := os.Executable(); err == nil {
			candidates = append([]string{filepath.Dir(self)}, candidates...)
		}
	}
	for _, d := range candidates {
		if _, err := os.Stat(filepath.Join(d, "gpuload")); err == nil {
			return filepath.Abs(d)
		}
	}
	return "", fmt.Errorf("no gpuload in %v: run make, or name the directory with -bin", candidates)
}

// run does the cases and returns how many targets were missed.
func run(c Config) (missed int, err error) {
	b, err := NewBench(c)
	if err != nil {
		return 0, err
	}
	defer b.Close()
	b.endOnSignal()
	for _, k := range cases(b.machine) {
		switch {
		case !c.Only.MatchString(k.Name):
			continue
		case c.list:
			fmt.Println(k.Name)
			continue
		}
		if err := k.Run(b); err != nil {
			return b.missed, fmt.Errorf("%s: %w", k.Name, err)
		}
	}
	if c.list {
		return 0, nil
	}
	b.summary()
	return b.missed, b.write()
}
