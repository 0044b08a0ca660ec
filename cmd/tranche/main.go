// The tranche command: slices of a GPU. One file per subcommand; they turn flags into a Config and
// call internal packages.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"tranche.dev/tranche/internal/node"
	"tranche.dev/tranche/internal/run"
	"tranche.dev/tranche/internal/sandbox"
	"tranche.dev/tranche/internal/scheduler"
	"tranche.dev/tranche/internal/webhook"
)

// version is set by the build.
var version = "unknown"

func main() {
	// The second stage of `tranche run --strict` becomes the user's command: nothing else first.
	if len(os.Args) == 3 && os.Args[1] == sandbox.EnterCommand {
		if err := sandbox.Enter(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, "tranche:", err)
			os.Exit(run.EnterStatus(err))
		}
		return
	}
	root := &cobra.Command{Use: "tranche", Short: "Slices of a GPU", Version: version, SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true}}
	root.SetVersionTemplate(versionLine())
	// A chart starts these, and its image may be of another version.
	daemons := []*cobra.Command{nodeCommand(node.Run), schedulerCommand(scheduler.Run), webhookCommand(webhook.Run)}
	for _, c := range daemons {
		c.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
			return fmt.Errorf("%w; this is tranche %s: chart and image must be of the same version", err, version)
		})
	}
	root.AddCommand(daemons...)
	root.AddCommand(runCommand(), psCommand(), setCommand(), doctorCommand(), simulateCommand(), versionCommand())
	if err := root.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "tranche:", err)
		code := 1
		var status *run.Status
		if errors.As(err, &status) {
			code = status.Code
		}
		os.Exit(code)
	}
}
