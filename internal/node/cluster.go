package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"tranche.dev/tranche/internal/node/books"
	"tranche.dev/tranche/internal/podspec"
)

// cluster writes to the API server: events, our annotations on pods, labels and inventory of the node. What is
// to be written waits in a queue that holds the newest of each, so nobody waits for the API server and
// nothing is lost but events beyond queueMax while it is away.
type cluster struct {
	client kubernetes.Interface
	node   string
	now    func() time.Time
	failed func(what string, err error)

	mu     sync.Mutex
	todo   []write
	recent map[string]time.Time // events of the last eventQuiet
	wake   chan struct{}
}

// write is one thing to be written; a later one of the same key replaces it.
type write struct {
	key string
	do  func(context.Context) error
	// state is what an object is to be, of which there are a few for each pod; else it is an event.
	state bool
	// dropped is told where it cannot be written and is not tried again; nil: nobody is.
	dropped func()
}

const (
	queueMax     = 1000
	writeTimeout = 10 * time.Second
	// The same event is told once in so long.
	eventQuiet = time.Minute
)

// openCluster finds the API server.
func openCluster(c Config, failed func(string, error)) (*cluster, error) {
	if c.client != nil {
		return newCluster(c.client, c.NodeName, c.Now, failed), nil
	}
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if c.Kubeconfig == "" {
		config, err = rest.InClusterConfig()
	}
	if err != nil {
		return nil, err
	}
	config.UserAgent = "tranche-node"
	config.ContentType, config.AcceptContentTypes = "application/vnd.kubernetes.protobuf", "application/vnd.kubernetes.protobuf,application/json"
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	return newCluster(client, c.NodeName, c.Now, failed), nil
}

func newCluster(client kubernetes.Interface, node string, now func() time.Time, failed func(string, error)) *cluster {
	return &cluster{client: client, node: node, now: now, failed: failed, recent: map[string]time.Time{}, wake: make(chan struct{}, 1)}
}

func (c *cluster) add(w write) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.todo {
		if c.todo[i].key == w.key {
			c.todo[i] = w
			return
		}
	}
	if w.state || len(c.todo) < queueMax {
		c.todo = append(c.todo, w)
	}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (c *cluster) next() (write, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.todo) == 0 {
		return write{}, false
	}
	w := c.todo[0]
	c.todo = c.todo[1:]
	return w, true
}

// run writes until ctx ends.
func (c *cluster) run(ctx context.Context) {
	wait := newBackoff()
	for ctx.Err() == nil {
		w, ok := c.next()
		if !ok {
			select {
			case <-ctx.Done():
			case <-c.wake:
			}
			continue
		}
		err := c.write(ctx, w)
		switch {
		case err == nil:
			wait.reset()
		case passing(err):
			c.again(w)
			c.failed(w.key, err)
			wait.sleep(ctx)
		default:
			if w.dropped != nil {
				w.dropped()
			}
			if !apierrors.IsNotFound(err) || w.dropped != nil { // else the pod is gone
				c.failed(w.key, err)
			}
		}
	}
}

func (c *cluster) write(ctx context.Context, w write) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	return w.do(ctx)
}

// again puts a write back, behind the others, unless there is a newer one by now: what the API server does not take for
// one pod, as its webhook does not answer, holds up nothing else.
func (c *cluster) again(w write) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, other := range c.todo {
		if other.key == w.key {
			return
		}
	}
	c.todo = append(c.todo, w)
}

// passing is true of what the API server may take later.
func passing(err error) bool {
	var known apierrors.APIStatus
	if !errors.As(err, &known) {
		return true // it was not reached
	}
	return apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) || apierrors.IsTooManyRequests(err) ||
		apierrors.IsInternalError(err) || apierrors.IsServiceUnavailable(err) || apierrors.IsConflict(err)
}

// patch is a merge patch of an object's metadata.
func patch(labels, annotations map[string]*string) ([]byte, error) {
	meta := map[string]any{}
	if len(labels) > 0 {
		meta["labels"] = labels
	}
	if len(annotations) > 0 {
		meta["annotations"] = annotations
	}
	return json.Marshal(map[string]any{"metadata": meta})
}

// patchNode sets labels or annotations of the node; nil removes one. dropped is told where they are not taken.
func (c *cluster) patchNode(what string, labels, annotations map[string]*string, dropped func()) {
	data, err := patch(labels, annotations)
	if err != nil {
		c.failed(what, err)
		return
	}
	c.add(write{key: "node " + what, state: true, dropped: dropped, do: func(ctx context.Context) error {
		_, err := c.client.CoreV1().Nodes().Patch(ctx, c.node, types.MergePatchType, data, metav1.PatchOptions{})
		return err
	}})
}

// patchPod sets annotations of a pod, if it is still the same one.
func (c *cluster) patchPod(pod books.Pod, what string, annotations map[string]*string) {
	data, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID, "annotations": annotations}})
	if err != nil {
		c.failed(what, err)
		return
	}
	c.add(write{key: "pod " + pod.UID + " " + what, state: true, do: func(ctx context.Context) error {
		_, err := c.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, data, metav1.PatchOptions{})
		if apierrors.IsConflict(err) || apierrors.IsInvalid(err) {
			return nil // another pod of that name by now
		}
		return err
	}})
}

// event tells of an object.
func (c *cluster) event(about corev1.ObjectReference, kind, reason, text string) {
	now := c.now()
	key := fmt.Sprintf("event %s/%s %s %s", about.Namespace, about.Name, reason, text)
	c.mu.Lock()
	for k, at := range c.recent {
		if now.Sub(at) > eventQuiet {
			delete(c.recent, k)
		}
	}
	_, told := c.recent[key]
	if !told {
		c.recent[key] = now
	}
	c.mu.Unlock()
	if told {
		return
	}
	namespace := about.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	text = podspec.Short(text)
	at := metav1.NewTime(now)
	e := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Name: eventName(about.Name, now), Namespace: namespace},
		InvolvedObject: about, Type: kind, Reason: reason, Message: text, Count: 1, FirstTimestamp: at, LastTimestamp: at,
		Source: corev1.EventSource{Component: "tranche-node", Host: c.node}, ReportingController: "tranche.dev/node", ReportingInstance: c.node,
	}
	c.add(write{key: key, do: func(ctx context.Context) error {
		_, err := c.client.CoreV1().Events(namespace).Create(ctx, e, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return err
	}})
}

// eventName is one that the API server takes: at most 253 characters, and names of pods may have as many.
func eventName(about string, now time.Time) string {
	return fmt.Sprintf("%s.%x", strings.TrimRight(about[:min(len(about), 230)], "-."), now.UnixNano())
}

// podRef names a pod. The UID may not be known yet.
func podRef(p books.Pod) corev1.ObjectReference {
	if strings.Contains(p.UID, "/") {
		p.UID = ""
	}
	return corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: types.UID(p.UID)}
}

// event tells of something, if there is an API server.
func (n *Node) event(about corev1.ObjectReference, kind, reason, text string) {
	if n.cluster != nil {
		n.cluster.event(about, kind, reason, text)
	}
}

func (n *Node) nodeRef() corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: n.config.NodeName, UID: types.UID(n.config.NodeName)}
}
