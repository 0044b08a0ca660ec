package main

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"tranche.dev/tranche/internal/assets"
)

func versionCommand() *cobra.Command {
	return &cobra.Command{Use: "version", Short: "print the version", Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		libraries := assets.Version()
		if libraries == "" {
			libraries = "none: " + assets.ErrMissing.Error()
		}
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "tranche %s %s/%s, libraries %s\n", version, runtime.GOOS, runtime.GOARCH, libraries)
		return err
	}}
}
