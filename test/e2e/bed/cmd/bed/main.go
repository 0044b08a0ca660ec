// Command bed brings up a bed by hand and keeps it until it is interrupted. With -chart Tranche is installed on it, with simulated GPUs
// on each node, and the image of the examples is there. It runs in the repository, after `make build`.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"tranche.dev/tranche/test/e2e/bed"
	"tranche.dev/tranche/test/e2e/image"
)

const (
	testImage     = "tranche.local/test:1"
	trancheImage  = "tranche.local/tranche:1"
	kubeScheduler = "tranche.local/kube-scheduler"
	simulated     = "a100-80g:2"
)

func main() {
	bed.InitMachine()
	nodes := flag.Int("nodes", 1, "how many nodes, 1 to 9")
	images := flag.String("images", "", "OCI tars to import, separated by commas")
	chart := flag.Bool("chart", false, "install Tranche's chart, with simulated GPUs, and bring the examples' image")
	flag.Parse()
	if err := run(*nodes, strings.FieldsFunc(*images, func(r rune) bool { return r == ',' }), *chart); err != nil {
		fmt.Fprintln(os.Stderr, "bed:", err)
		os.Exit(1)
	}
}

func run(nodes int, images []string, chart bool) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	b, err := bed.Up(ctx, bed.Config{Nodes: nodes, Images: images, Say: func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, format+"\n", args...)
	}})
	if err != nil {
		return err
	}
	defer func() {
		if down := b.Down(); err == nil {
			err = down
		}
	}()
	if chart {
		if err := install(ctx, b); err != nil {
			return err
		}
	}
	fmt.Printf("\nLogs are in %s/log. A shell in a machine, with kubectl, helm and ctr:\n", b.Dir)
	for _, m := range append([]*bed.Machine{b.Control}, b.Nodes...) {
		fmt.Printf("  %-8s %s\n", m.Name, m.Shell())
	}
	fmt.Println("Ctrl-C ends it.")
	<-ctx.Done()
	fmt.Fprintln(os.Stderr, "bed: ends")
	return nil
}

// install does what docs/install.md says.
func install(ctx context.Context, b *bed.Bed) error {
	test, err := image.Test(".", testImage)
	if err != nil {
		return err
	}
	tranche, err := image.Tranche(".", trancheImage)
	if err != nil {
		return err
	}
	version, err := b.Client.Discovery().ServerVersion()
	if err != nil {
		return err
	}
	for i, made := range []image.Image{test, tranche, image.KubeScheduler(kubeScheduler+":"+version.GitVersion, b.Program("kube-scheduler"))} {
		file := filepath.Join(b.Dir, fmt.Sprintf("image-%d.tar", i))
		if err := image.Write(file, made); err != nil {
			return err
		}
		for _, n := range b.Nodes {
			if err := n.ImportImage(ctx, file); err != nil {
				return err
			}
		}
	}
	if _, err := b.Kubectl(ctx, "label", "node", "--all", "nvidia-device-enable=enable"); err != nil {
		return err
	}
	dir, err := filepath.Abs("deploy/helm/tranche")
	if err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "bed: helm install")
	out, err := b.Control.Exec(ctx, "helm", "install", "tranche", dir, "--namespace", "tranche", "--create-namespace", "--wait", "--timeout", "3m",
		"--set", "image.repository=tranche.local/tranche", "--set-string", "image.tag=1", "--set", "scheduler.kubeScheduler.repository="+kubeScheduler,
		"--set", "simulated="+simulated, "--set", "node.liveChange=on", "--set", "scheduler.quotaConfigMap=tranche-quota")
	if err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
}
