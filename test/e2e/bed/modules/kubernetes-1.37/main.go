// Command kube is every Kubernetes program that the bed runs, in one binary: one link instead of six,
// and a third of the size. Its own name picks the program, else its first argument.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

func main() {
	name := filepath.Base(os.Args[0])
	make := program(name)
	if make == nil && len(os.Args) > 1 {
		name, os.Args = os.Args[1], os.Args[1:]
		make = program(name)
	}
	if make == nil {
		fmt.Fprintln(os.Stderr, "usage: kube {kube-apiserver|kube-controller-manager|kube-scheduler|kube-proxy|kubelet|kubectl} ...")
		os.Exit(2)
	}
	if name == "kubectl" {
		if err := cli.RunNoErrOutput(make()); err != nil {
			kubectlutil.CheckErr(err)
		}
		return
	}
	os.Exit(cli.Run(make()))
}

// program is nil for a name that it does not know.
func program(name string) func() *cobra.Command {
	switch name {
	case "kube-apiserver":
		return apiserver.NewAPIServerCommand
	case "kube-controller-manager":
		return controllers.NewControllerManagerCommand
	case "kube-scheduler":
		return func() *cobra.Command { return scheduler.NewSchedulerCommand() }
	case "kube-proxy":
		return proxy.NewProxyCommand
	case "kubelet":
		return kubeletCommand
	case "kubectl":
		return kubectl.NewDefaultKubectlCommand
	}
	return nil
}
