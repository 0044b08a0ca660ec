package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"tranche.dev/tranche/internal/assets"
	"tranche.dev/tranche/internal/doctor"
	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/sandbox"
	"tranche.dev/tranche/internal/simroot"
)

func doctorCommand() *cobra.Command {
	var root, sim, output string
	cmd := &cobra.Command{Use: "doctor", Short: "check a machine: driver, GPUs, kubelet, runtime, system", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return fmt.Errorf("-o %q: text or json", output)
			}
			config := doctor.Config{Root: root, Ask: askNVML, Self: doctor.ThisProcess()}
			config.Self.Assets, config.Self.Strict = assets.Version() != "", sandbox.Probe()
			if cmd.Flags().Changed("sim") {
				dir, err := os.MkdirTemp("", "tranche-doctor-")
				if err != nil {
					return err
				}
				defer os.RemoveAll(dir)
				host, err := simroot.Make(dir, sim)
				if err != nil {
					return err
				}
				config.DriverRoot, config.Sim = host.Root, true
			}
			report, err := doctor.Run(cmd.Context(), config)
			if err != nil {
				return err
			}
			write := report.WriteText
			if output == "json" {
				write = report.WriteJSON
			}
			if err := write(cmd.OutOrStdout()); err != nil {
				return err
			}
			if report.Failed() {
				return errors.New("not ready to share GPUs: see the failures above")
			}
			return nil
		}}
	cmd.Flags().StringVar(&root, "root", "/", "the host's root directory, where a container has it mounted")
	cmd.Flags().StringVar(&sim, "sim", "", "simulated GPUs in place of the driver, written as for tranche run")
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

// askNVML asks a driver's own library, whatever this process was given in its place.
func askNVML(library string) (gpu.Prober, error) {
	probe, err := assets.Path(assets.NVMLProbe)
	if err != nil {
		return nil, err
	}
	env := slices.DeleteFunc(os.Environ(), func(e string) bool {
		return strings.HasPrefix(e, "LD_PRELOAD=") || strings.HasPrefix(e, "LD_LIBRARY_PATH=")
	})
	return gpu.NVML{Probe: probe, Library: library, Env: env}, nil
}
