package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/quantity"
	"tranche.dev/tranche/internal/run"
	"tranche.dev/tranche/internal/supervise"
)

const runLong = `Run gives a command a slice of a GPU that it cannot exceed: a share of the compute and an amount of
memory. It ends as the command ends. No daemon and no root are needed, and with --sim no GPU.`

const runExample = `  tranche run --cores 30 --memory 8Gi -- python train.py
  tranche run --cores 200 -- torchrun train.py           two whole GPUs
  tranche run --sim a100-80g:2 --memory 4Gi -- ./program  on simulated GPUs`

func runCommand() *cobra.Command {
	var c run.Config
	var strict string
	var values amounts
	cmd := &cobra.Command{Use: "run [flags] -- COMMAND [ARG...]", Short: "run a command in a slice of a GPU", Long: runLong, Example: runExample,
		RunE: func(cmd *cobra.Command, args []string) error {
			err := checkFlags(cmd, args)
			if err == nil {
				err = values.fill(&c.Asked)
			}
			if err == nil {
				err = fillRun(&c, strict)
			}
			if err != nil {
				return &run.Status{Code: run.Failed, Err: err}
			}
			c.Command, c.Stderr = args, os.Stderr
			state, err := run.Run(c)
			if err != nil {
				var status *run.Status
				if !errors.As(err, &status) {
					err = &run.Status{Code: run.Failed, Err: err}
				}
				return err
			}
			supervise.Exit(state)
			return nil
		}}
	f := cmd.Flags()
	f.SetInterspersed(false)
	f.SortFlags = false
	f.StringVar(&values.cores, "cores", "", "compute in hundredths of a GPU: 1 to 100, or n*100 for n whole GPUs (default: not limited)")
	f.StringVar(&values.memory, "memory", "", "memory of each GPU: 8Gi, 512Mi, 8GB, bytes (default: what is not reserved by others)")
	f.StringSliceVar(&c.Asked.GPUs, "gpu", nil, "GPUs to use, by index or UUID or the beginning of one (default: best fit)")
	f.StringVar(&values.burst, "burst", "", "ceiling in hundredths of a GPU, up to which the slice may use time that others leave (default: --cores)")
	f.StringVar(&values.weight, "weight", "", "1 to 1000: how time that nobody is guaranteed is divided (default: as --cores)")
	f.StringVar(&values.class, "class", "", "latency: goes before others, within its limit; or normal (default normal)")
	f.StringVar(&c.Sim, "sim", "", "run on simulated GPUs: MODEL[:COUNT],..., a spec file (text or YAML), or a directory with one")
	f.StringVar(&c.Name, "name", "", "name of the slice in tranche ps (default: the command)")
	f.StringVar(&c.Trace, "trace", "", "show each decision of the libraries on standard error, or append it to a file")
	f.Lookup("trace").NoOptDefVal = "1"
	f.StringVar(&strict, "strict", "auto", "cover the system's own driver files with the slice's: auto, on or off")
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &run.Status{Code: run.Failed, Err: err} })
	return cmd
}

// checkFlags refuses what would be taken for something else.
func checkFlags(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return errors.New("run: no command given; tranche run [flags] -- COMMAND [ARG...]")
	}
	// --trace FILE -- COMMAND: FILE would be the command.
	if cmd.Flags().Changed("trace") && cmd.Flags().ArgsLenAtDash() < 0 && len(args) > 1 && args[1] == "--" {
		return fmt.Errorf("--trace takes its file behind =, as in --trace=%s", args[0])
	}
	return checkValues(cmd)
}

// checkValues refuses flags that were given without a value.
func checkValues(cmd *cobra.Command) error {
	for _, name := range []string{"cores", "memory", "burst", "weight", "class", "sim", "name", "strict", "trace"} {
		if f := cmd.Flags().Lookup(name); f != nil && f.Changed && f.Value.String() == "" {
			return fmt.Errorf("--%s: no value given", name)
		}
	}
	if cmd.Flags().Changed("gpu") {
		gpus, err := cmd.Flags().GetStringSlice("gpu")
		if err != nil {
			return err
		}
		if len(gpus) == 0 || slices.Contains(gpus, "") {
			return errors.New("--gpu: a GPU without a name; give indices or UUIDs with commas, as in --gpu 0,1")
		}
	}
	return nil
}

// amounts are flags of run and set that are more than text.
type amounts struct{ cores, memory, burst, weight, class string }

func (v amounts) fill(a *run.Asked) (err error) {
	if v.cores != "" {
		if a.Cores, err = strconv.Atoi(v.cores); err != nil || a.Cores < 1 {
			return fmt.Errorf("--cores %s: 1 to 100 of one GPU, or a multiple of 100 for whole GPUs", v.cores)
		}
	}
	if v.burst != "" {
		if a.Burst, err = strconv.Atoi(v.burst); err != nil || a.Burst < 1 {
			return fmt.Errorf("--burst %s: from --cores to 100", v.burst)
		}
	}
	if v.weight != "" {
		if a.Weight, err = strconv.Atoi(v.weight); err != nil || a.Weight < 1 {
			return fmt.Errorf("--weight %s: 1 to 1000", v.weight)
		}
	}
	if v.memory != "" {
		if a.Memory, err = quantity.Parse(v.memory); err != nil {
			return fmt.Errorf("--memory %w", err)
		}
	}
	a.Class = v.class
	return nil
}

// fillRun takes in the other ones.
func fillRun(c *run.Config, strict string) error {
	switch c.Strict = run.Strictness(strict); c.Strict {
	case run.Auto, run.On, run.Off:
	default:
		return fmt.Errorf("--strict %s: auto, on or off", strict)
	}
	if len(c.Name) > 63 {
		return fmt.Errorf("--name %s: longer than 63 bytes", c.Name)
	}
	if c.Trace != "" && c.Trace != "1" {
		return openTrace(&c.Trace)
	}
	return nil
}

// openTrace finds out now whether the libraries can append to the file: they are silent when they
// cannot.
func openTrace(file *string) error {
	path, err := filepath.Abs(*file)
	if err != nil {
		return fmt.Errorf("--trace: %w", err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NONBLOCK, 0o644)
	if err != nil {
		return fmt.Errorf("--trace: %w", err)
	}
	*file = path
	return f.Close()
}
