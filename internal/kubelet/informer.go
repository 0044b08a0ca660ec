package kubelet

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// APIPods takes kubelet's place for those versions that do not tell of their pods: it watches the pods of
// one node at the API server, which may know less than kubelet does.
type APIPods struct {
	store    cache.Store
	informer cache.Controller

	mu    sync.Mutex
	order map[types.UID]uint64
	last  uint64
}

// NewAPIPods makes one for a node. keep reduces a pod to what is needed, for the sake of memory; to is told
// of changes while Run runs.
func NewAPIPods(client kubernetes.Interface, node string, keep func(*corev1.Pod), to PodEvents) *APIPods {
	selector := fields.OneTermEqualSelector("spec.nodeName", node)
	list := cache.NewFilteredListWatchFromClient(client.CoreV1().RESTClient(), "pods", corev1.NamespaceAll,
		func(o *metav1.ListOptions) { o.FieldSelector = selector.String() })
	p := &APIPods{order: map[types.UID]uint64{}}
	p.store, p.informer = cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: list,
		ObjectType:    &corev1.Pod{},
		ResyncPeriod:  10 * time.Minute,
		Transform: func(o any) (any, error) {
			if pod, ok := o.(*corev1.Pod); ok {
				keep(pod)
			}
			return o, nil
		},
		Handler: p.handler(to),
	})
	return p
}

func (p *APIPods) handler(to PodEvents) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerDetailedFuncs{
		AddFunc: func(o any, first bool) {
			if pod, ok := o.(*corev1.Pod); ok {
				p.added(pod, first)
				to.Changed(pod)
			}
		},
		UpdateFunc: func(was, now any) {
			pod, ok := now.(*corev1.Pod)
			if !ok {
				return
			}
			if old, ok := was.(*corev1.Pod); ok && old.UID != pod.UID { // its end was missed
				p.gone(old.UID, to)
				p.added(pod, false)
			}
			to.Changed(pod)
		},
		DeleteFunc: func(o any) {
			if last, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = last.Obj
			}
			if pod, ok := o.(*corev1.Pod); ok {
				p.gone(pod.UID, to)
			}
		},
	}
}

func (p *APIPods) gone(uid types.UID, to PodEvents) {
	p.mu.Lock()
	delete(p.order, uid)
	p.mu.Unlock()
	to.Gone(uid)
}

// added notes a pod's order: the version at which it came to this node, which is that of its binding. (Kubernetes compares
// versions of one resource as numbers.) first: it was there when the watch began.
func (p *APIPods) added(pod *corev1.Pod, first bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if first {
		p.order[pod.UID] = 0
		return
	}
	if version, err := strconv.ParseUint(pod.ResourceVersion, 10, 64); err == nil {
		p.last = version
	}
	p.order[pod.UID] = p.last
}

// Order is where kubelet, which watches the same, takes a pod on: after those with a smaller one. 0 have those that were there
// when the watch began; kubelet takes them on by their age.
func (p *APIPods) Order(uid types.UID) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.order[uid]
}

// Run watches until ctx ends. While the API server is away it keeps what it knows.
func (p *APIPods) Run(ctx context.Context) { p.informer.RunWithContext(ctx) }

// Close has nothing to close: Run ends with its context.
func (p *APIPods) Close() error { return nil }

// List returns the pods as the API server last told.
func (p *APIPods) List(context.Context) ([]*corev1.Pod, error) {
	if !p.informer.HasSynced() {
		return nil, fmt.Errorf("the API server has not yet told this node's pods")
	}
	all := p.store.List()
	out := make([]*corev1.Pod, 0, len(all))
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, o := range all {
		pod, ok := o.(*corev1.Pod)
		if !ok {
			continue
		}
		if _, ordered := p.order[pod.UID]; ordered { // else it is just about to be
			out = append(out, pod)
		}
	}
	return out, nil
}
