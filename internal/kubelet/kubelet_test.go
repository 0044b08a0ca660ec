package kubelet_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"tranche.dev/tranche/internal/deviceplugin"
	"tranche.dev/tranche/internal/kubelet"
	"tranche.dev/tranche/internal/kubelet/kubelettest"
)

func keepAll(*corev1.Pod) {}

// greedy gives whatever is asked, the first of what there is.
type greedy struct{ started chan []string }

func (greedy) Preferred(_ context.Context, available, _ []string, size int) ([]string, error) {
	return available[:size], nil
}

func (greedy) Allocate(_ context.Context, ids []string) (*api.ContainerAllocateResponse, error) {
	if len(ids) > 2 {
		return nil, errors.New("too many")
	}
	return &api.ContainerAllocateResponse{Envs: map[string]string{"GOT": ids[0]}}, nil
}

func (g greedy) Start(_ context.Context, ids []string) error {
	g.started <- ids
	return nil
}

// seen collects what is told of pods.
type seen struct {
	mu   sync.Mutex
	told []string
}

func (s *seen) Changed(p *corev1.Pod) { s.add(string(p.UID) + " " + string(p.Status.Phase)) }
func (s *seen) Gone(uid types.UID)    { s.add(string(uid) + " gone") }
func (s *seen) add(text string)       { s.mu.Lock(); defer s.mu.Unlock(); s.told = append(s.told, text) }
func (s *seen) is(want []string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return reflect.DeepEqual(s.told, want)
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("never: " + what)
		}
	}
}

func TestKubelet(t *testing.T) {
	dir, err := os.MkdirTemp("", "kl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	k, err := kubelettest.New(dir, 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Stop)
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	const name = "example.com/thing"
	g := greedy{started: make(chan []string, 1)}
	p, err := deviceplugin.New(deviceplugin.Config{Dir: k.Dir, Endpoint: "p.sock", Resource: name, Allocator: g})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	p.SetDevices([]*api.Device{{ID: "x", Health: api.Healthy}, {ID: "y", Health: api.Unhealthy}, {ID: "z", Health: api.Healthy}})
	go func() {
		_ = kubelet.WatchSockets(ctx, k.Dir, p.Endpoint, func(ctx context.Context) error {
			if err := p.Listen(); err != nil {
				t.Error(err)
			}
			err := kubelet.Register(ctx, k.Dir, p.Endpoint(), name, p.Options())
			if err != nil && ctx.Err() == nil {
				t.Error(err)
			}
			return err
		})
	}()
	if err := k.Registered(ctx, name); err != nil {
		t.Fatal(err)
	}
	if n := k.Healthy(name); n != 2 {
		t.Errorf("%d healthy devices", n)
	}

	pods, err := kubelet.NewPods(k.Pods, keepAll)
	if err != nil {
		t.Fatal(err)
	}
	defer pods.Close()
	var s seen
	go func() { _ = pods.Watch(ctx, &s) }()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: "n", UID: "1"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c",
		Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{name: *resource.NewQuantity(1, resource.DecimalSI)}}}}}}
	if err := k.Admit(ctx, pod); err != nil {
		t.Fatal(err)
	}
	list, err := pods.List(ctx)
	if err != nil || len(list) != 1 || list[0].UID != "1" {
		t.Errorf("pods %v, %v", list, err)
	}
	if again, err := pods.List(ctx); err != nil || len(again) != 1 || again[0] != list[0] {
		t.Errorf("a pod that did not change was read again: %v, %v", again, err)
	}
	started, err := k.StartContainer(ctx, "1", "c")
	if err != nil {
		t.Fatal(err)
	}
	ids := <-g.started
	if !reflect.DeepEqual(started.Env, map[string]string{"GOT": ids[0]}) {
		t.Errorf("the container got %v, it starts with %v", started.Env, ids)
	}
	held, err := kubelet.NewPodResources(k.Resources)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	want := []kubelet.Held{{Namespace: "n", Pod: "a", Container: "c", Resource: name, IDs: ids}}
	if got, err := held.List(ctx); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("held %+v, %v; want %+v", got, err, want)
	}
	eventually(t, "the pod is told", func() bool { return s.is([]string{"1 Pending"}) })
	k.Update("1", func(p *corev1.Pod) { p.Annotations = map[string]string{"a": "b"} })
	if now, err := pods.List(ctx); err != nil || len(now) != 1 || now[0] == list[0] || now[0].Annotations["a"] != "b" {
		t.Errorf("a pod that changed: %v, %v", now, err)
	}
	k.Delete("1")
	eventually(t, "its end is told", func() bool { return s.is([]string{"1 Pending", "1 Pending", "1 gone"}) })

	k.Stop()
	if err := k.Start(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := k.Registered(ctx, name); err != nil {
		t.Fatal(err)
	}
	t.Logf("registered again after %v", time.Since(began))
	p.SetDevices([]*api.Device{{ID: "x", Health: api.Healthy}})
	eventually(t, "a device leaves", func() bool { return k.Healthy(name) == 1 })
	if _, err := os.Lstat(filepath.Join(k.Dir, "p.sock")); err != nil {
		t.Error(err)
	}
}
