package main

import (
	"context"

	"github.com/spf13/cobra"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// kubeletCommand is what differs between versions; main.go is one file for all.
func kubeletCommand() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }
