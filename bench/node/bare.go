package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"google.golang.org/grpc"
	plugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"tranche.dev/tranche/internal/kubelet"
	"tranche.dev/tranche/internal/kubelet/kubelettest"
)

// bareGPUs are the GPUs of the control, and bareIDs how many IDs each has of either resource.
const bareGPUs = 8

func bareIDs() map[string]int { return map[string]int{bareCore: 100, bareMemory: 560} }

// What the control's pods ask for.
const (
	bareCore   = "bare.example/core"
	bareMemory = "bare.example/memory"
)

// bare is the control: a device plugin with as many IDs of the same length, over gRPC as it comes, which takes the first that
// are free and does nothing else. What it takes is what kubelet's interface costs here.
type bare struct {
	plugin.UnimplementedDevicePluginServer
	devices []*plugin.Device
}

// startBare runs the control in a process of its own, under a kubelet of its own.
func startBare(ctx context.Context, dir string) (k *kubelettest.Kubelet, end func() error, err error) {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, nil, err
	}
	if k, err = kubelettest.New(dir, 1); err != nil {
		return nil, nil, err
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "bare", k.Dir)
	cmd.Stderr = os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	if err := cmd.Start(); err != nil {
		k.Stop()
		return nil, nil, err
	}
	k.Meter = onCPUOf(cmd.Process.Pid)
	end = func() error {
		defer k.Stop()
		return errors.Join(cmd.Process.Signal(os.Interrupt), cmd.Wait())
	}
	return k, end, k.Registered(ctx, bareCore, bareMemory)
}

// serveBare is that process.
func serveBare(dir string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	for resource, n := range bareIDs() {
		b := &bare{}
		for g := range bareGPUs {
			for i := range n {
				b.devices = append(b.devices, &plugin.Device{ID: fmt.Sprintf("GPU-5e110000-0000-4000-8000-%012d::%d", g, i), Health: plugin.Healthy})
			}
		}
		endpoint := fmt.Sprintf("bare-%d.sock", n)
		l, err := net.Listen("unix", filepath.Join(dir, endpoint))
		if err != nil {
			return err
		}
		server := grpc.NewServer()
		plugin.RegisterDevicePluginServer(server, b)
		defer server.Stop()
		go func() { _ = server.Serve(l) }() // ends with Stop
		options, _ := b.GetDevicePluginOptions(ctx, nil)
		if err := kubelet.Register(ctx, dir, endpoint, resource, options); err != nil {
			return err
		}
	}
	<-ctx.Done()
	return nil
}

// GetDevicePluginOptions implements the API.
func (*bare) GetDevicePluginOptions(context.Context, *plugin.Empty) (*plugin.DevicePluginOptions, error) {
	return &plugin.DevicePluginOptions{PreStartRequired: true, GetPreferredAllocationAvailable: true}, nil
}

// ListAndWatch implements the API.
func (b *bare) ListAndWatch(_ *plugin.Empty, stream grpc.ServerStreamingServer[plugin.ListAndWatchResponse]) error {
	if err := stream.Send(&plugin.ListAndWatchResponse{Devices: b.devices}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

// GetPreferredAllocation implements the API.
func (*bare) GetPreferredAllocation(_ context.Context, r *plugin.PreferredAllocationRequest) (*plugin.PreferredAllocationResponse, error) {
	out := &plugin.PreferredAllocationResponse{}
	for _, c := range r.GetContainerRequests() {
		if int(c.GetAllocationSize()) > len(c.GetAvailableDeviceIDs()) {
			return nil, errors.New("too few are free")
		}
		out.ContainerResponses = append(out.ContainerResponses, &plugin.ContainerPreferredAllocationResponse{DeviceIDs: c.GetAvailableDeviceIDs()[:c.GetAllocationSize()]})
	}
	return out, nil
}

// Allocate implements the API.
func (*bare) Allocate(_ context.Context, r *plugin.AllocateRequest) (*plugin.AllocateResponse, error) {
	return &plugin.AllocateResponse{ContainerResponses: make([]*plugin.ContainerAllocateResponse, len(r.GetContainerRequests()))}, nil
}

// PreStartContainer implements the API.
func (*bare) PreStartContainer(context.Context, *plugin.PreStartContainerRequest) (*plugin.PreStartContainerResponse, error) {
	return &plugin.PreStartContainerResponse{}, nil
}
