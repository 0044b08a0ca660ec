package kubelet_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podsapi "k8s.io/kubelet/pkg/apis/pods/v1alpha1"

	"tranche.dev/tranche/internal/kubelet"
)

// waiting is kubelet's registry when it cannot reach the plugin.
type waiting struct {
	api.UnimplementedRegistrationServer
	called chan struct{}
}

func (w waiting) Register(ctx context.Context, _ *api.RegisterRequest) (*api.Empty, error) {
	w.called <- struct{}{}
	<-ctx.Done()
	return nil, ctx.Err()
}

func touch(t *testing.T, path string) {
	t.Helper()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

// A kubelet that starts removes the plugins' sockets, and may have listened to a registration before we know.
func TestRegisterWithoutItsSocket(t *testing.T) {
	w := waiting{called: make(chan struct{}, 1)}
	dir := filepath.Dir(serve(t, kubelet.Socket, func(s *grpc.Server) { api.RegisterRegistrationServer(s, w) }))
	own := filepath.Join(dir, "p.sock")
	touch(t, own)
	done := make(chan error, 1)
	began := time.Now()
	go func() { done <- kubelet.Register(t.Context(), dir, "p.sock", "example.com/thing", nil) }()
	<-w.called
	if err := os.Remove(own); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err == nil || !strings.Contains(err.Error(), "vanished") {
		t.Errorf("it said %v", err)
	}
	if took := time.Since(began); took > 4*time.Second {
		t.Errorf("it waited %v", took)
	}
}

// What failed is tried again, and what vanished; what is in order is left alone.
func TestWatchSockets(t *testing.T) {
	dir := t.TempDir()
	own, socket := filepath.Join(dir, "p.sock"), filepath.Join(dir, kubelet.Socket)
	ctx, cancel := context.WithCancel(t.Context())
	var calls atomic.Int32
	done := make(chan error, 1)
	go func() {
		done <- kubelet.WatchSockets(ctx, dir, func() string { return "p.sock" }, func(context.Context) error {
			touch(t, own)
			switch calls.Add(1) {
			case 1:
				return errors.New("not the first time")
			case 3: // kubelet came back just before it was told of the plugin
				touch(t, socket+".new")
				if err := os.Rename(socket+".new", socket); err != nil {
					t.Error(err)
				}
			}
			return nil
		})
	}()
	touch(t, socket)
	eventually(t, "a second attempt", func() bool { return calls.Load() == 2 })
	touch(t, filepath.Join(dir, "other.sock"))
	if err := os.Remove(own); err != nil {
		t.Fatal(err)
	}
	eventually(t, "an attempt after the plugin's socket vanished", func() bool { return calls.Load() == 3 })
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	touch(t, socket+".new")
	if err := os.Rename(socket+".new", socket); err != nil {
		t.Fatal(err)
	}
	eventually(t, "an attempt with another kubelet", func() bool { return calls.Load() == 4 })
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) || calls.Load() != 4 {
		t.Errorf("it ended with %v after %d calls", err, calls.Load())
	}
}

// starting is kubelet's pods service while its first pods are being admitted.
type starting struct {
	podsapi.UnimplementedPodsServer
}

func (starting) ListPods(context.Context, *podsapi.ListPodsRequest) (*podsapi.ListPodsResponse, error) {
	return nil, status.Error(codes.FailedPrecondition, "Kubelet is initializing")
}

// Kubelet may wait for the very call in which its pods are listed.
func TestListWhileKubeletStarts(t *testing.T) {
	socket := serve(t, "pods.sock", func(s *grpc.Server) { podsapi.RegisterPodsServer(s, starting{}) })
	pods, err := kubelet.NewPods(socket, keepAll)
	if err != nil {
		t.Fatal(err)
	}
	defer pods.Close()
	began := time.Now()
	_, err = pods.List(t.Context())
	if took := time.Since(began); err == nil || !strings.Contains(err.Error(), "initializing") || took > 3*time.Second {
		t.Errorf("it said %v after %v", err, took)
	}
}

// serve serves on a socket of that name until the end of the test.
func serve(t *testing.T, name string, register func(*grpc.Server)) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, name)
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	register(server)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	return socket
}
