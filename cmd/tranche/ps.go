package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"tranche.dev/tranche/internal/machine"
	"tranche.dev/tranche/internal/ps"
)

func psCommand() *cobra.Command {
	var sim, output string
	cmd := &cobra.Command{Use: "ps", Short: "list the running slices with limit and use", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "table" && output != "json" {
				return fmt.Errorf("-o %q: table or json", output)
			}
			if cmd.Flags().Changed("sim") && sim == "" {
				return errors.New("--sim: no value given")
			}
			if err := machine.CheckState(); err != nil {
				return err
			}
			rows, err := ps.List(sim)
			if err != nil {
				return err
			}
			if output == "json" {
				return ps.WriteJSON(cmd.OutOrStdout(), rows)
			}
			return ps.WriteTable(cmd.OutOrStdout(), rows, time.Now())
		}}
	cmd.Flags().StringVar(&sim, "sim", "", "only this simulated machine, written as for tranche run")
	cmd.Flags().StringVarP(&output, "output", "o", "table", "table or json")
	return cmd
}
