package main

import (
	"errors"
	"os"

	"github.com/spf13/cobra"

	"tranche.dev/tranche/internal/run"
)

const setLong = `Set changes what a running slice may use. What is not given stays as it is. More is given only when it
is free on the GPU; less takes nothing away from the programs that run, but holds from now on.`

const setExample = `  tranche set train --cores 50 --memory 12Gi
  tranche set train --gpu 1 --burst 100`

func setCommand() *cobra.Command {
	var c run.SetConfig
	var values amounts
	cmd := &cobra.Command{Use: "set NAME|ID [flags]", Short: "change the limits of a running slice", Long: setLong, Example: setExample,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return errors.New("set: which slice? tranche set NAME|ID [flags]; tranche ps lists them")
			}
			err := checkValues(cmd)
			if err == nil {
				err = values.fill(&c.Asked)
			}
			if err != nil {
				return err
			}
			c.Slice, c.Stderr = args[0], os.Stderr
			return run.Set(c)
		}}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&values.cores, "cores", "", "compute in hundredths of each GPU, 1 to 100")
	f.StringVar(&values.memory, "memory", "", "memory of each GPU: 8Gi, 512Mi, 8GB, bytes")
	f.StringVar(&values.burst, "burst", "", "ceiling for time that others leave, from --cores to 100; the same as --cores: none")
	f.StringVar(&values.weight, "weight", "", "1 to 1000: how time that nobody is guaranteed is divided")
	f.StringVar(&values.class, "class", "", "latency: goes before others, within its limit; or normal")
	f.StringSliceVar(&c.Asked.GPUs, "gpu", nil, "only these of the slice's GPUs, by index or UUID (default: all of them)")
	f.StringVar(&c.Sim, "sim", "", "only slices of this simulated machine, written as for tranche run")
	return cmd
}
