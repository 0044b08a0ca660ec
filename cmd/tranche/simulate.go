package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/simulate"
)

// simulateFlags are the flags of `tranche simulate`.
type simulateFlags struct {
	nodes, pods, file, seeds, output, svg string
	policies                              []string
	fit                                   string
	config                                simulate.Config
}

func simulateCommand() *cobra.Command {
	var f simulateFlags
	cmd := &cobra.Command{
		Use:   "simulate (--nodes FILE --pods FILE | --file FILE)",
		Short: "Replay a trace of pods through the scheduler's placement and through others",
		Long: `Replay a trace of pods on a cluster, through the placement code of the scheduler and through baselines from
the literature, and show how much of the GPUs gets allocated and how much is left in fragments.

Traces are CSV in the format of Alibaba's openb trace (cluster-trace-gpu-v2023), or one YAML file with nodes
and pods by shape. With --fit it says how many more pods of a shape there is room for.

Policies: ` + strings.Join(simulate.Policies(), ", ") + ".",
		Example: `  tranche simulate --nodes nodes.csv --pods pods.csv --policy least-fragmentation,fgd,bestfit --protocol atc23 --seeds 42-51
  tranche simulate --file cluster.yaml --fit cores=30,memory=8Gi`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	flags := cmd.Flags()
	flags.StringVar(&f.nodes, "nodes", "", "CSV of nodes: sn, cpu_milli, memory_mib, gpu, model[, gpu_memory_mib]")
	flags.StringVar(&f.pods, "pods", "", "CSV of pods: name, cpu_milli, memory_mib, num_gpu, gpu_milli[, gpu_spec, gpu_memory_mib]")
	flags.StringVar(&f.file, "file", "", "YAML with nodes and pods, instead of --nodes and --pods")
	flags.StringSliceVar(&f.policies, "policy", []string{string(placement.LeastFragmentation)}, "policies, comma separated")
	flags.StringVar(&f.seeds, "seeds", "42", "seeds of the runs: A, A-B, or a comma list")
	flags.Float64Var(&f.config.Load, "load", 1.3, "GPUs asked for over those there are (atc23)")
	flags.StringVar(&f.config.Protocol, "protocol", "plain", "plain: the pods as they stand, once; atc23: shuffled and tuned to --load as in the FGD paper")
	flags.StringVar(&f.config.Memory, "memory", "trace", "GPU memory: trace, as the files have it; synthetic, drawn by the seed (docs/simulate.md)")
	flags.StringVarP(&f.output, "output", "o", "table", "table, csv or json")
	flags.StringVar(&f.svg, "svg", "", "write a plot to this file as well")
	flags.StringVar(&f.fit, "fit", "", "how many more pods of this shape fit: cores=30,memory=8Gi[,gpus=N][,cpu=4][,ram=16Gi][,model=A100]")
	return cmd
}

func (f *simulateFlags) run(cmd *cobra.Command) error {
	write := map[string]func(io.Writer, []simulate.Point) error{"table": simulate.WriteTable, "csv": simulate.WriteCSV, "json": simulate.WriteJSON}[f.output]
	switch {
	case write == nil:
		return fmt.Errorf("--output %s: must be table, csv or json", f.output)
	case len(f.policies) == 0:
		return errors.New("--policy: names none")
	case f.config.Load == 0:
		return errors.New("--load 0: must be more than 0")
	case f.fit != "" && (len(f.policies) > 1 || f.output == "csv" || f.svg != "" || f.config.Protocol == "atc23"):
		return errors.New("--fit takes one policy, tables or json, and the pods as they stand: no csv, --svg or atc23")
	}
	if err := f.read(); err != nil {
		return err
	}
	f.config.Policies = f.policies
	bar := newProgress(cmd.ErrOrStderr())
	f.config.Progress = bar.show
	if f.fit != "" {
		return f.howMany(cmd, bar)
	}
	points, err := simulate.Run(cmd.Context(), f.config)
	bar.clear()
	if err != nil {
		return err
	}
	// The figures first: they may have taken hours.
	if err := write(cmd.OutOrStdout(), points); err != nil || f.svg == "" {
		return err
	}
	var b bytes.Buffer
	if err := simulate.WriteSVG(&b, points); err != nil {
		return err
	}
	return os.WriteFile(f.svg, b.Bytes(), 0o644)
}

func (f *simulateFlags) howMany(cmd *cobra.Command, bar *progress) error {
	shape, err := simulate.ParseShape(f.fit)
	if err != nil {
		return fmt.Errorf("--fit: %w", err)
	}
	fit, err := simulate.HowMany(cmd.Context(), f.config, placement.Policy(f.policies[0]), shape)
	bar.clear()
	if err != nil {
		return err
	}
	if f.output == "json" {
		_, err = fmt.Fprintf(cmd.OutOrStdout(), `{"placed": %d, "failed": %d, "more": %d}`+"\n", fit.Placed, fit.Failed, fit.More)
		return err
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "%d pods placed, %d without room; then %d more of %s fit\n", fit.Placed, fit.Failed, fit.More, f.fit)
	return err
}

// read reads the input files and the seeds.
func (f *simulateFlags) read() error {
	var err error
	if f.config.Seeds, err = parseSeeds(f.seeds); err != nil {
		return err
	}
	if f.file != "" {
		if f.nodes != "" || f.pods != "" {
			return errors.New("--file holds nodes and pods: leave out --nodes and --pods")
		}
		data, err := os.ReadFile(f.file)
		if err != nil {
			return err
		}
		if f.config.Nodes, f.config.Pods, err = simulate.ReadYAML(data); err != nil {
			return fmt.Errorf("%s: %w", f.file, err)
		}
		return nil
	}
	if f.nodes == "" || f.pods == "" {
		return errors.New("what to replay? --nodes and --pods, or --file")
	}
	if f.config.Nodes, err = readFile(f.nodes, simulate.ReadNodes); err != nil {
		return err
	}
	f.config.Pods, err = readFile(f.pods, simulate.ReadPods)
	return err
}

func readFile[T any](path string, read func(io.Reader) ([]T, error)) ([]T, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	out, err := read(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return out, nil
}

// parseSeeds reads 42, 42-51 and 1,2,10-12.
func parseSeeds(text string) ([]int64, error) {
	var out []int64
	for part := range strings.SplitSeq(text, ",") {
		from, to, isRange := strings.Cut(strings.TrimSpace(part), "-")
		if !isRange {
			to = from
		}
		a, err := strconv.ParseInt(from, 10, 64)
		b, err2 := strconv.ParseInt(to, 10, 64)
		if err != nil || err2 != nil || b < a || b == math.MaxInt64 || b-a >= 10_000 || len(out) > 10_000 {
			return nil, fmt.Errorf("--seeds %q: must be a number, A-B, or a comma list of these, at most 10,000", text)
		}
		for ; a <= b; a++ {
			out = append(out, a)
		}
	}
	return out, nil
}

// progress is a bar on a terminal, nothing elsewhere.
type progress struct {
	to   io.Writer
	tty  bool
	last int
}

func newProgress(to io.Writer) *progress {
	p := &progress{to: to, last: -1}
	if file, ok := to.(*os.File); ok {
		_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
		p.tty = err == nil
	}
	return p
}

const barWidth = 40

func (p *progress) show(done, of int) {
	percent := 100 * done / max(of, 1)
	if !p.tty || percent == p.last {
		return
	}
	p.last = percent
	full := barWidth * percent / 100
	fmt.Fprintf(p.to, "\r[%s%s] %3d %%", strings.Repeat("#", full), strings.Repeat(".", barWidth-full), percent)
}

func (p *progress) clear() {
	if p.tty && p.last >= 0 {
		fmt.Fprintf(p.to, "\r%s\r", strings.Repeat(" ", barWidth+10))
	}
}
