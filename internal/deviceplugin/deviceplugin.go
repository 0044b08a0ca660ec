// Package deviceplugin serves kubelet's device plugin API (v1beta1) for one resource. It holds no state but
// the list of devices that it last told kubelet: every decision is the Allocator's.
package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"tranche.dev/tranche/internal/kubelet/wire"
)

// requestMax is in bytes and more than a usual request has: 4,512 IDs are 240 kB.
const requestMax = 1 << 20

// Allocator decides. Kubelet calls in this order: for a container that it is about to admit Preferred and then
// Allocate, once; before each start of the container, Start. It waits 30 s for Start. An error fails the pod,
// of Start this start of the container.
type Allocator interface {
	// Preferred returns size of the available IDs, all of must among them.
	Preferred(ctx context.Context, available, must []string, size int) ([]string, error)
	// Allocate is told which IDs kubelet took and returns what the container gets. The same IDs may come
	// again.
	Allocate(ctx context.Context, ids []string) (*api.ContainerAllocateResponse, error)
	// Start is told with which IDs a container is about to start.
	Start(ctx context.Context, ids []string) error
}

// Config is what a Plugin needs; all of it.
type Config struct {
	// Dir is kubelet's directory of device plugins, Endpoint the name of our socket there.
	Dir, Endpoint string
	Resource      string
	Allocator     Allocator
}

// Plugin serves one resource. Safe for concurrent use.
type Plugin struct {
	api.UnimplementedDevicePluginServer
	config Config
	codec  *wire.Codec

	mu      sync.Mutex
	devices []*api.Device
	changed chan struct{} // closed at the next change of devices
	server  *grpc.Server
	moved   int // how often Move was called
}

// New makes a plugin without devices that does not listen yet.
func New(config Config) (*Plugin, error) {
	if config.Dir == "" || config.Endpoint == "" || config.Resource == "" || config.Allocator == nil {
		return nil, errors.New("device plugin: directory, endpoint, resource or allocator is missing")
	}
	return &Plugin{config: config, codec: wire.New(), changed: make(chan struct{})}, nil
}

// Options are what kubelet has to know of the plugin.
func (p *Plugin) Options() *api.DevicePluginOptions {
	return &api.DevicePluginOptions{PreStartRequired: true, GetPreferredAllocationAvailable: true}
}

// Resource is the name of what is served.
func (p *Plugin) Resource() string { return p.config.Resource }

// Endpoint is the name of the socket in kubelet's directory.
func (p *Plugin) Endpoint() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.moved == 0 {
		return p.config.Endpoint
	}
	return fmt.Sprintf("%d-%s", p.moved, p.config.Endpoint)
}

// Socket is the path that it listens on.
func (p *Plugin) Socket() string { return filepath.Join(p.config.Dir, p.Endpoint()) }

// Move stops listening and gives the socket another name. A kubelet that is told of a socket again before it saw the end of
// the connection there refuses that name until it starts again ("device plugin already connected").
func (p *Plugin) Move() {
	p.Close()
	p.mu.Lock()
	p.moved++
	p.mu.Unlock()
}

// SetDevices tells kubelet, at once, what there is.
func (p *Plugin) SetDevices(devices []*api.Device) {
	ids := make(map[string]string, len(devices))
	for _, d := range devices {
		ids[d.GetID()] = d.GetID()
	}
	p.codec.Know(ids)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.devices = devices
	close(p.changed)
	p.changed = make(chan struct{})
}

// Listen serves on a new socket, in place of one that was there.
func (p *Plugin) Listen() error {
	p.Close()
	if err := os.Remove(p.Socket()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	l, err := net.Listen("unix", p.Socket())
	if err != nil {
		return fmt.Errorf("device plugin %s: %w", p.config.Resource, err)
	}
	if err := os.Chmod(p.Socket(), 0o600); err != nil {
		_ = l.Close()
		return err
	}
	// Kubelet sends a request in one go instead of a window's 64 KiB at a time.
	server := grpc.NewServer(grpc.ForceServerCodecV2(p.codec), grpc.InitialWindowSize(requestMax), grpc.InitialConnWindowSize(requestMax),
		grpc.ReadBufferSize(128<<10))
	api.RegisterDevicePluginServer(server, p)
	p.mu.Lock()
	p.server = server
	p.mu.Unlock()
	go func() { _ = server.Serve(l) }() // ends with Close
	return nil
}

// Close stops listening. Calls that run are broken off.
func (p *Plugin) Close() {
	p.mu.Lock()
	server := p.server
	p.server = nil
	p.mu.Unlock()
	if server != nil {
		server.Stop()
	}
}

// Ping asks our own socket, as kubelet would.
func (p *Plugin) Ping(ctx context.Context) error {
	conn, err := grpc.NewClient("unix:"+p.Socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = api.NewDevicePluginClient(conn).GetDevicePluginOptions(ctx, &api.Empty{})
	return err
}

// GetDevicePluginOptions implements the API.
func (p *Plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return p.Options(), nil
}

// ListAndWatch implements the API: all devices, at first and after each change.
func (p *Plugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	for {
		p.mu.Lock()
		devices, changed := p.devices, p.changed
		p.mu.Unlock()
		if err := stream.Send(&api.ListAndWatchResponse{Devices: devices}); err != nil {
			return err
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-changed:
		}
	}
}

// GetPreferredAllocation implements the API.
func (p *Plugin) GetPreferredAllocation(ctx context.Context, r *api.PreferredAllocationRequest) (*api.PreferredAllocationResponse, error) {
	out := &api.PreferredAllocationResponse{}
	for _, c := range r.GetContainerRequests() {
		ids, err := p.config.Allocator.Preferred(ctx, c.GetAvailableDeviceIDs(), c.GetMustIncludeDeviceIDs(), int(c.GetAllocationSize()))
		if err != nil {
			return nil, err
		}
		out.ContainerResponses = append(out.ContainerResponses, &api.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return out, nil
}

// Allocate implements the API.
func (p *Plugin) Allocate(ctx context.Context, r *api.AllocateRequest) (*api.AllocateResponse, error) {
	out := &api.AllocateResponse{}
	for _, c := range r.GetContainerRequests() {
		response, err := p.config.Allocator.Allocate(ctx, c.GetDevicesIds())
		if err != nil {
			return nil, err
		}
		out.ContainerResponses = append(out.ContainerResponses, response)
	}
	return out, nil
}

// PreStartContainer implements the API.
func (p *Plugin) PreStartContainer(ctx context.Context, r *api.PreStartContainerRequest) (*api.PreStartContainerResponse, error) {
	if err := p.config.Allocator.Start(ctx, r.GetDevicesIds()); err != nil {
		return nil, err
	}
	return &api.PreStartContainerResponse{}, nil
}
