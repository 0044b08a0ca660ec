package main

import (
	"context"
	"io"
	"os/signal"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
)

// daemon completes the command of a process that serves until SIGINT or SIGTERM: with the flags of set, of which --version
// prints the version instead. serve gets where messages go.
func daemon(cmd *cobra.Command, set *pflag.FlagSet, version *bool, serve func(ctx context.Context, messages io.Writer) error) *cobra.Command {
	cmd.Args = cobra.NoArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *version {
			_, err := io.WriteString(cmd.OutOrStdout(), versionLine())
			return err
		}
		ctx, stop := signal.NotifyContext(cmd.Context(), unix.SIGINT, unix.SIGTERM)
		defer stop()
		return serve(ctx, cmd.ErrOrStderr())
	}
	cmd.Flags().SortFlags = false
	cmd.Flags().SetNormalizeFunc(hyphens)
	cmd.Flags().AddFlagSet(set)
	return cmd
}
