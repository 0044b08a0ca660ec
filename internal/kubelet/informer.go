package kubelet

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// APIPods takes kubelet's place for those versions that do not tell of their pods: it watches the pods of
// one node at the API server, which may know less than kubelet does.
type APIPods struct {
	store    cache.Store
	informer cache.Controller
}

// NewAPIPods makes one for a node. keep reduces a pod to what is needed, for the sake of memory; to is told
// of changes while Run runs.
func NewAPIPods(client kubernetes.Interface, node string, keep func(*corev1.Pod), to PodEvents) *APIPods {
	selector := fields.OneTermEqualSelector("spec.nodeName", node)
	list := cache.NewFilteredListWatchFromClient(client.CoreV1().RESTClient(), "pods", corev1.NamespaceAll,
		func(o *metav1.ListOptions) { o.FieldSelector = selector.String() })
	p := &APIPods{}
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
		Handler: handler(to),
	})
	return p
}

func handler(to PodEvents) cache.ResourceEventHandler {
	changed := func(o any) {
		if pod, ok := o.(*corev1.Pod); ok {
			to.Changed(pod)
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    changed,
		UpdateFunc: func(_, now any) { changed(now) },
		DeleteFunc: func(o any) {
			if last, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = last.Obj
			}
			if pod, ok := o.(*corev1.Pod); ok {
				to.Gone(pod.UID)
			}
		},
	}
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
	for _, o := range all {
		if pod, ok := o.(*corev1.Pod); ok {
			out = append(out, pod)
		}
	}
	return out, nil
}
