package deviceplugin_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"tranche.dev/tranche/internal/deviceplugin"
)

// scribe writes down what it is called with, and answers that; it refuses what begins with "no".
type scribe struct {
	calls []string
	hung  chan error // how the context of a call for "slow" ended
}

func (s *scribe) call(format string, args ...any) error {
	s.calls = append(s.calls, fmt.Sprintf(format, args...))
	if strings.Contains(s.calls[len(s.calls)-1], "no") {
		return status.Error(codes.ResourceExhausted, "there is none: "+s.calls[len(s.calls)-1])
	}
	return nil
}

func (s *scribe) Preferred(_ context.Context, available, must []string, size int) ([]string, error) {
	return must, s.call("preferred %q %q %d", available, must, size)
}

func (s *scribe) Allocate(_ context.Context, ids []string) (*api.ContainerAllocateResponse, error) {
	return &api.ContainerAllocateResponse{Envs: map[string]string{"IDS": strings.Join(ids, " ")}}, s.call("allocate %q", ids)
}

func (s *scribe) Start(ctx context.Context, ids []string) error {
	if ids[0] == "slow" {
		<-ctx.Done()
		s.hung <- ctx.Err()
		return ctx.Err()
	}
	return s.call("start %q", ids)
}

func newPlugin(t *testing.T) (*deviceplugin.Plugin, *scribe) {
	t.Helper()
	dir, err := os.MkdirTemp("", "dp") // short enough for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s := &scribe{hung: make(chan error, 1)}
	p, err := deviceplugin.New(deviceplugin.Config{Dir: dir, Endpoint: "p.sock", Resource: "example.com/thing", Allocator: s})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p, s
}

// dial is kubelet's end.
func dial(t *testing.T, p *deviceplugin.Plugin) api.DevicePluginClient {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+p.Socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return api.NewDevicePluginClient(conn)
}

func TestNew(t *testing.T) {
	whole := deviceplugin.Config{Dir: "/d", Endpoint: "e", Resource: "r", Allocator: &scribe{}}
	for name, spoil := range map[string]func(*deviceplugin.Config){
		"directory": func(c *deviceplugin.Config) { c.Dir = "" }, "endpoint": func(c *deviceplugin.Config) { c.Endpoint = "" },
		"resource": func(c *deviceplugin.Config) { c.Resource = "" }, "allocator": func(c *deviceplugin.Config) { c.Allocator = nil },
	} {
		c := whole
		spoil(&c)
		if _, err := deviceplugin.New(c); err == nil {
			t.Errorf("no %s: no error", name)
		}
	}
	if p, err := deviceplugin.New(whole); err != nil || p.Socket() != "/d/e" || p.Resource() != "r" {
		t.Errorf("%v, %v", p, err)
	}
}

// What kubelet asks comes to the allocator as it is, and its answers and refusals come back so.
func TestCalls(t *testing.T) {
	p, s := newPlugin(t)
	if err := p.Listen(); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(p.Socket()); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v", info, err)
	}
	c, ctx := dial(t, p), t.Context()
	options, err := c.GetDevicePluginOptions(ctx, &api.Empty{})
	if err != nil || !proto.Equal(options, &api.DevicePluginOptions{PreStartRequired: true, GetPreferredAllocationAvailable: true}) || !proto.Equal(options, p.Options()) {
		t.Errorf("options %v, %v", options, err)
	}
	preferred, err := c.GetPreferredAllocation(ctx, &api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: []string{"a", "b"}, MustIncludeDeviceIDs: []string{"b"}, AllocationSize: 2}, {AvailableDeviceIDs: []string{"c"}, AllocationSize: 1}}})
	want := &api.PreferredAllocationResponse{ContainerResponses: []*api.ContainerPreferredAllocationResponse{{DeviceIDs: []string{"b"}}, {}}}
	if err != nil || !proto.Equal(preferred, want) {
		t.Errorf("preferred %v, %v", preferred, err)
	}
	allocated, err := c.Allocate(ctx, &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: []string{"a", "b"}}, {DevicesIds: []string{"c"}}}})
	wantAllocated := &api.AllocateResponse{ContainerResponses: []*api.ContainerAllocateResponse{{Envs: map[string]string{"IDS": "a b"}}, {Envs: map[string]string{"IDS": "c"}}}}
	if err != nil || !proto.Equal(allocated, wantAllocated) {
		t.Errorf("allocated %v, %v", allocated, err)
	}
	if started, err := c.PreStartContainer(ctx, &api.PreStartContainerRequest{DevicesIds: []string{"a", "b"}}); err != nil || !proto.Equal(started, &api.PreStartContainerResponse{}) {
		t.Errorf("started %v, %v", started, err)
	}
	_, first := c.GetPreferredAllocation(ctx, &api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: []string{"no"}}}})
	_, second := c.Allocate(ctx, &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: []string{"no"}}}})
	_, third := c.PreStartContainer(ctx, &api.PreStartContainerRequest{DevicesIds: []string{"no"}})
	var refused []string
	for _, err := range []error{first, second, third} {
		refused = append(refused, status.Code(err).String()+" "+status.Convert(err).Message())
	}
	if want := []string{`ResourceExhausted there is none: preferred ["no"] [] 0`, `ResourceExhausted there is none: allocate ["no"]`,
		`ResourceExhausted there is none: start ["no"]`}; !reflect.DeepEqual(refused, want) {
		t.Errorf("refused %q, want %q", refused, want)
	}
	if want := []string{`preferred ["a" "b"] ["b"] 2`, `preferred ["c"] [] 1`, `allocate ["a" "b"]`, `allocate ["c"]`, `start ["a" "b"]`,
		`preferred ["no"] [] 0`, `allocate ["no"]`, `start ["no"]`}; !reflect.DeepEqual(s.calls, want) {
		t.Errorf("calls %q, want %q", s.calls, want)
	}
	// A kubelet that hangs up is not worked for any more.
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if _, err := c.PreStartContainer(short, &api.PreStartContainerRequest{DevicesIds: []string{"slow"}}); status.Code(err) != codes.DeadlineExceeded {
		t.Error(err)
	}
	if err := <-s.hung; err == nil {
		t.Error("the call's context did not end")
	}
}

func named(ids ...string) []*api.Device {
	var out []*api.Device
	for _, id := range ids {
		out = append(out, &api.Device{ID: id, Health: api.Healthy, Topology: &api.TopologyInfo{Nodes: []*api.NUMANode{{ID: 1}}}})
	}
	return out
}

// Whoever listens hears all devices at first and at each change, as soon as it comes; when the plugin stops, his stream ends.
func TestListAndWatch(t *testing.T) {
	p, _ := newPlugin(t)
	if err := p.Listen(); err != nil {
		t.Fatal(err)
	}
	type stream = grpc.ServerStreamingClient[api.ListAndWatchResponse]
	hear := func(who string, s stream, want ...*api.Device) {
		t.Helper()
		if got, err := s.Recv(); err != nil || !proto.Equal(got, &api.ListAndWatchResponse{Devices: want}) {
			t.Errorf("%s: %v, %v", who, got, err)
		}
	}
	listen := func() stream {
		s, err := dial(t, p).ListAndWatch(t.Context(), &api.Empty{})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	a := listen()
	hear("a, nothing there", a)
	p.SetDevices(named("x", "y"))
	hear("a, the first devices", a, named("x", "y")...)
	b := listen()
	hear("b, what is there", b, named("x", "y")...)
	sick := named("x", "y")
	sick[1].Health = api.Unhealthy
	p.SetDevices(sick)
	hear("a, one is ill", a, sick...)
	hear("b, one is ill", b, sick...)
	p.SetDevices(nil)
	hear("a, all are gone", a)
	hear("b, all are gone", b)
	p.SetDevices(named("z")) // of changes that come faster than they are heard the last one counts
	p.SetDevices(named("w"))
	for got := []string(nil); !reflect.DeepEqual(got, []string{"w"}); {
		list, err := a.Recv()
		if err != nil {
			t.Fatal(err)
		}
		got = nil
		for _, d := range list.GetDevices() {
			got = append(got, d.GetID())
		}
	}
	p.Close()
	for {
		if _, err := b.Recv(); err != nil {
			break
		}
	}
}

// A kubelet that starts removes the socket; the plugin listens anew, at the same place or, where kubelet still has that name,
// at another. Whoever was connected notices.
func TestListenAgain(t *testing.T) {
	p, _ := newPlugin(t)
	if err := p.Ping(t.Context()); err == nil {
		t.Error("it answers before it listens")
	}
	dir := filepath.Dir(p.Socket())
	if err := os.WriteFile(p.Socket(), nil, 0o644); err != nil { // left by one that was killed
		t.Fatal(err)
	}
	p.SetDevices(named("x"))
	for _, step := range []struct {
		name string
		do   func()
		want []string
	}{
		{"the first time", func() {}, []string{"p.sock"}},
		{"the socket was removed", func() { _ = os.Remove(p.Socket()) }, []string{"p.sock"}},
		{"again", func() {}, []string{"p.sock"}},
		{"moved", p.Move, []string{"1-p.sock"}},
		{"moved twice", func() { p.Move(); p.Move() }, []string{"3-p.sock"}},
	} {
		step.do()
		if err := p.Listen(); err != nil {
			t.Fatal(step.name, err)
		}
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, e := range entries {
			got = append(got, e.Name())
		}
		if !reflect.DeepEqual(got, step.want) || p.Endpoint() != step.want[0] {
			t.Errorf("%s: there are %q, its endpoint is %s; want %q", step.name, got, p.Endpoint(), step.want)
		}
		if err := p.Ping(t.Context()); err != nil {
			t.Errorf("%s: %v", step.name, err)
		}
		stream, err := dial(t, p).ListAndWatch(t.Context(), &api.Empty{})
		if err != nil {
			t.Fatal(err)
		}
		if list, err := stream.Recv(); err != nil || len(list.GetDevices()) != 1 {
			t.Errorf("%s: %v, %v", step.name, list, err)
		}
		defer func() {
			if _, err := stream.Recv(); err == nil {
				t.Errorf("%s: the stream of then goes on", step.name)
			}
		}()
	}
	p.Close()
	if err := p.Ping(t.Context()); err == nil {
		t.Error("it answers after it was closed")
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := p.Listen(); err == nil || !strings.Contains(err.Error(), "device plugin example.com/thing: ") {
		t.Errorf("without a directory: %v", err)
	}
}
