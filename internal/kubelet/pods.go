package kubelet

import (
	"context"
	"fmt"
	"hash/maphash"
	"sync"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	pods "k8s.io/kubelet/pkg/apis/pods/v1alpha1"
)

// PodEvents are told what changes. A method may be called again with the same pod.
type PodEvents interface {
	// Changed: a pod was added or is different. The callee keeps the pod.
	Changed(pod *corev1.Pod)
	// Gone: a pod is no more.
	Gone(uid types.UID)
}

// Pods asks kubelet for the pods of this node, by its pods service (v1alpha1; Kubernetes 1.36 and later).
// Safe for concurrent use.
type Pods struct {
	conn   *grpc.ClientConn
	client pods.PodsClient
	keep   func(*corev1.Pod)

	seeds [2]maphash.Seed
	mu    sync.Mutex
	last  map[podBytes]*corev1.Pod // of the last list
}

// podBytes stands for a pod as kubelet sent it: 128 bits of hashes that nobody else can foresee.
type podBytes [2]uint64

// NewPods uses kubelet's socket, usually /var/lib/kubelet/pods-api/pods-api.sock. keep reduces a pod to what is needed, for
// the sake of memory.
func NewPods(socket string, keep func(*corev1.Pod)) (*Pods, error) {
	conn, err := dial(socket)
	if err != nil {
		return nil, err
	}
	return &Pods{conn: conn, client: pods.NewPodsClient(conn), keep: keep, seeds: [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}}, nil
}

// Close ends the connection.
func (p *Pods) Close() error { return p.conn.Close() }

// List returns the pods as kubelet sees them now, static ones too. A pod is listed just before kubelet
// admits it, and one that was refused has its phase Failed. A pod that has not changed since the last list is the same
// pointer, and must not be changed. Kubelet takes 100 calls a second.
func (p *Pods) List(ctx context.Context) ([]*corev1.Pod, error) {
	var answer *pods.ListPodsResponse
	err := retry(ctx, "ListPods", func(ctx context.Context) (err error) {
		answer, err = p.client.ListPods(ctx, &pods.ListPodsRequest{})
		return err
	})
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	out, next := make([]*corev1.Pod, 0, len(answer.GetPods())), make(map[podBytes]*corev1.Pod, len(answer.GetPods()))
	for _, data := range answer.GetPods() {
		key := podBytes{maphash.Bytes(p.seeds[0], data), maphash.Bytes(p.seeds[1], data)}
		pod := p.last[key]
		if pod == nil {
			if pod, err = decode(data); err != nil {
				return nil, err
			}
			p.keep(pod)
		}
		out, next[key] = append(out, pod), pod
	}
	p.last = next
	return out, nil
}

// Watch tells of each pod that is there, and of changes, until ctx ends or kubelet ends the stream; it
// always returns an error.
func (p *Pods) Watch(ctx context.Context, to PodEvents) error {
	stream, err := p.client.WatchPods(ctx, &pods.WatchPodsRequest{})
	if err != nil {
		return fmt.Errorf("kubelet, WatchPods: %w", err)
	}
	for {
		event, err := stream.Recv()
		if err != nil {
			return fmt.Errorf("kubelet, WatchPods: %w", err)
		}
		if event.GetType() == pods.EventType_INITIAL_SYNC_COMPLETE {
			continue
		}
		pod, err := decode(event.GetPod())
		if err != nil {
			return err
		}
		if event.GetType() == pods.EventType_DELETED {
			to.Gone(pod.UID)
			continue
		}
		to.Changed(pod)
	}
}

func decode(data []byte) (*corev1.Pod, error) {
	pod := &corev1.Pod{}
	if err := pod.Unmarshal(data); err != nil {
		return nil, fmt.Errorf("kubelet sent a pod that cannot be read: %w", err)
	}
	return pod, nil
}
