package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/validation"

	"tranche.dev/tranche/internal/node"
)

const nodeLong = `Node makes the GPUs of this machine shareable by pods: it is what the DaemonSet runs. It takes
gpu-manager's flags; those that mean nothing any more are accepted with a warning. An underscore
in a flag's name is as good as a hyphen.

From the environment, as gpu-manager's image took them: NODE_NAME is the default of
--hostname-override, LOG_LEVEL that of --v, and the words of EXTRA_FLAGS follow the command line.`

// nodeCommand is `tranche node`; run keeps the node going until its context ends.
func nodeCommand(run func(context.Context, node.Config) error) *cobra.Command {
	f := newNodeFlags(os.Getenv)
	cmd := &cobra.Command{Use: "node [flags]", Short: "share this machine's GPUs among pods", Long: nodeLong,
		PreRunE: func(*cobra.Command, []string) error { return f.more(strings.Fields(os.Getenv("EXTRA_FLAGS"))) }}
	return daemon(cmd, f.set, &f.version, func(ctx context.Context, messages io.Writer) error {
		c, warnings, err := f.config()
		if err != nil {
			return err
		}
		c.Log = daemonLog(messages, f.verbosity, warnings)
		c.Started = func() {
			if err := notifyReady(os.Getenv("NOTIFY_SOCKET")); err != nil {
				c.Log.Warn("systemd was not told that the node is up", "error", err)
			}
		}
		return run(ctx, c)
	})
}

// config is what the flags say, and a warning for each that says nothing any more.
func (f *nodeFlags) config() (node.Config, []string, error) {
	c := f.c
	warnings := warnObsolete(f.set, obsoleteFlags)
	if f.set.Changed("addr") {
		warnings = append(warnings, "--addr is now --display-socket")
	}
	if f.logLevel != "" {
		warnings = append(warnings, fmt.Sprintf("LOG_LEVEL %q is no number; see --v", f.logLevel))
	}
	if f.driver != "nvidia" {
		return c, nil, fmt.Errorf("--driver %q: only nvidia is known; for a simulated one see --sim", f.driver)
	}
	if f.inCluster && c.Kubeconfig != "" {
		warnings = append(warnings, "--incluster-mode: the service account is used and --kubeconfig is not")
		c.Kubeconfig = ""
	}
	c.WholeOnly, c.NewNamesOnly = !f.share, !f.oldNames
	var bad []string
	if c.Labels, bad = parseLabels(f.labels); len(bad) > 0 {
		warnings = append(warnings, fmt.Sprintf("--node-labels: left out, as they are no KEY=VALUE of a label: %q", bad))
	}
	switch {
	case f.port < 0 || f.port > 65535:
		return c, nil, fmt.Errorf("--query-port %d: a port is at most 65535; 0: no HTTP", f.port)
	case f.port == 0:
		c.QueryPort = -1
	default:
		c.QueryPort = f.port
	}
	var err error
	if c.LiveChange, err = parseLiveChange(f.live); err != nil {
		return c, nil, err
	}
	if err := checkXIDs(c.HealthIgnore); err != nil {
		return c, nil, err
	}
	if c.Bypass != node.BypassOff && c.Bypass != node.BypassReport && c.Bypass != node.BypassKill {
		return c, nil, fmt.Errorf("--bypass %q: report, kill or off", c.Bypass)
	}
	if c.WholeView != node.ViewNvidia && c.WholeView != node.ViewOrigin {
		return c, nil, fmt.Errorf("--driver-view %q: nvidia or origin", c.WholeView)
	}
	if c.PodsFrom != node.PodsAuto && c.PodsFrom != node.PodsKubelet && c.PodsFrom != node.PodsAPIServer {
		return c, nil, fmt.Errorf("--pods-from %q: auto, kubelet or apiserver", c.PodsFrom)
	}
	c.Version = version
	return c, warnings, nil
}

// parseLabels reads KEY=VALUE,KEY=VALUE; it returns items apart that are none, or that the API server would not take: it
// would refuse all that is written of the node with them, the inventory as well.
func parseLabels(text string) (labels map[string]string, bad []string) {
	labels = map[string]string{}
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		key, value, ok := strings.Cut(item, "=")
		if !ok || len(validation.IsQualifiedName(key)) > 0 || len(validation.IsValidLabelValue(value)) > 0 {
			bad = append(bad, item)
			continue
		}
		labels[key] = value
	}
	return labels, bad
}

func parseLiveChange(text string) (node.LiveChange, error) {
	switch text {
	case "off":
		return node.LiveChange{}, nil
	case "on":
		return node.LiveChange{On: true}, nil
	}
	l := node.LiveChange{On: true}
	for name := range strings.SplitSeq(text, ",") {
		if name = strings.TrimSpace(name); name == "" || strings.ToLower(name) != name || strings.ContainsAny(name, " /_=") {
			return l, fmt.Errorf("--live-change %q: off, on, or namespaces with commas between", text)
		}
		l.Namespaces = append(l.Namespaces, name)
	}
	return l, nil
}

func checkXIDs(list []string) error {
	for _, x := range list {
		if _, err := strconv.ParseUint(x, 10, 16); err != nil && x != "all" {
			return fmt.Errorf("--health-ignore-xids %q: XIDs with commas between, or all", x)
		}
	}
	return nil
}

// more reads further flags.
func (f *nodeFlags) more(words []string) error {
	if len(words) == 0 {
		return nil
	}
	if err := f.set.Parse(words); err != nil {
		return fmt.Errorf("EXTRA_FLAGS: %w", err)
	}
	if rest := f.set.Args(); len(rest) > 0 {
		return errors.New("EXTRA_FLAGS: " + rest[0] + " is no flag")
	}
	return nil
}
