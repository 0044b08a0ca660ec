package main

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"tranche.dev/tranche/internal/assets"
)

func versionCommand() *cobra.Command {
	return &cobra.Command{Use: "version", Short: "print the version", Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		_, err := fmt.Fprint(cmd.OutOrStdout(), versionLine())
		return err
	}}
}

func versionLine() string {
	libraries := assets.Version()
	if libraries == "" {
		libraries = "none: " + assets.ErrMissing.Error()
	}
	return fmt.Sprintf("tranche %s %s/%s, libraries %s\n", version, runtime.GOOS, runtime.GOARCH, libraries)
}
