package node

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"tranche.dev/tranche/internal/kubelet"
	"tranche.dev/tranche/internal/node/books"
	"tranche.dev/tranche/internal/pause"
	"tranche.dev/tranche/internal/podspec"
)

// podInfo is what is kept of a pod that asks for GPUs.
type podInfo struct {
	books.Pod
	// Cluster and User are shown (display.Tenant).
	Cluster, User string
	// Compat32 has the containers that want 32-bit libraries as well.
	Compat32 map[string]bool
	// Changes are the limits that its annotations want by now, ChangeErrors what is wrong with them.
	Changes      []podspec.Change
	ChangeErrors []error
}

// reduce keeps of a pod what inform reads, for the sake of memory.
func reduce(pod *corev1.Pod) {
	pod.ManagedFields, pod.Labels, pod.OwnerReferences, pod.Finalizers = nil, nil, nil, nil
	delete(pod.Annotations, corev1.LastAppliedConfigAnnotation)
	spec := corev1.PodSpec{NodeName: pod.Spec.NodeName}
	for _, c := range pod.Spec.InitContainers {
		spec.InitContainers = append(spec.InitContainers, reduceContainer(c))
	}
	for _, c := range pod.Spec.Containers {
		spec.Containers = append(spec.Containers, reduceContainer(c))
	}
	status := corev1.PodStatus{Phase: pod.Status.Phase}
	for _, s := range pod.Status.InitContainerStatuses {
		status.InitContainerStatuses = append(status.InitContainerStatuses, corev1.ContainerStatus{Name: s.Name, State: s.State})
	}
	pod.Spec, pod.Status = spec, status
}

func reduceContainer(c corev1.Container) corev1.Container {
	out := corev1.Container{Name: c.Name, RestartPolicy: c.RestartPolicy, Resources: corev1.ResourceRequirements{Limits: c.Resources.Limits}}
	for _, e := range c.Env {
		if e.Name == "SUBMITTER" || e.Name == "compat32" {
			out.Env = append(out.Env, e)
		}
	}
	return out
}

// inform reads a pod; nil if it wants no GPU.
func inform(pod *corev1.Pod, names podspec.Names) *podInfo {
	if !podspec.Wants(pod, names) {
		return nil
	}
	out := &podInfo{Pod: books.Pod{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name, Created: pod.CreationTimestamp.Time,
		Over:     pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed,
		InitDone: map[string]bool{}},
		Cluster: pod.Annotations["clusterName"], Compat32: map[string]bool{}}
	var err error
	if out.Ask, err = podspec.Parse(pod, names); err != nil {
		out.Problem, out.Written = err.Error(), written(pod, names)
	} else {
		out.Changes, out.ChangeErrors = podspec.Changes(pod, names)
	}
	if r, ok, err := podspec.Reserved(pod, names); ok && err == nil {
		out.Reserved = r.Places
	}
	for _, s := range pod.Status.InitContainerStatuses {
		if t := s.State.Terminated; t != nil && t.ExitCode == 0 {
			out.InitDone[s.Name] = true
		}
	}
	for i, c := range append(pod.Spec.Containers[:len(pod.Spec.Containers):len(pod.Spec.Containers)], pod.Spec.InitContainers...) {
		for _, e := range c.Env {
			switch {
			case e.Name == "compat32" && strings.EqualFold(e.Value, "true"):
				out.Compat32[c.Name] = true
			case e.Name == "SUBMITTER" && i == 0:
				out.User = e.Value
			}
		}
	}
	return out
}

// written are a pod's containers with the numbers that kubelet will ask for, whether they make sense or not.
func written(pod *corev1.Pod, names podspec.Names) []podspec.Container {
	var out []podspec.Container
	for i, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		cores, units := c.Resources.Limits[corev1.ResourceName(names.Core())], c.Resources.Limits[corev1.ResourceName(names.Memory())]
		if !cores.IsZero() || !units.IsZero() {
			out = append(out, podspec.Container{Name: c.Name, Init: i < len(pod.Spec.InitContainers),
				Sidecar: c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways && i < len(pod.Spec.InitContainers), Cores: int(cores.Value()), Units: units.Value()})
		}
	}
	return out
}

// podSource tells this node's pods: kubelet, or the API server in its place.
type podSource interface {
	List(ctx context.Context) ([]*corev1.Pod, error)
	Close() error
}

// podTable is what is known of pods. Safe for concurrent use.
type podTable struct {
	names podspec.Names
	// order tells books.Pod.Order.
	order func(types.UID) uint64
	mu    sync.Mutex
	pods  map[string]*podInfo
	// listed has what was read of the pods of the last list, nil for those that want no GPU. Most are the same in the next.
	listed map[*corev1.Pod]*podInfo
	// changed has room for one, and something in it when pods changed.
	changed chan struct{}
}

func newPodTable(names podspec.Names) *podTable {
	return &podTable{names: names, order: func(types.UID) uint64 { return 0 }, pods: map[string]*podInfo{}, changed: make(chan struct{}, 1)}
}

func (t *podTable) inform(pod *corev1.Pod) *podInfo {
	info := inform(pod, t.names)
	if info != nil {
		info.Order = t.order(pod.UID)
	}
	return info
}

// Changed implements kubelet.PodEvents. Limits of a pod that is known change with a list only.
func (t *podTable) Changed(pod *corev1.Pod) {
	info := t.inform(pod)
	if info == nil {
		return
	}
	t.mu.Lock()
	// Kubelet tells of a change of state with annotations that may be older than those it listed. (Its copy's resource version
	// stays the first one.)
	if known := t.pods[info.UID]; known != nil {
		info.Changes, info.ChangeErrors = known.Changes, known.ChangeErrors
	}
	t.pods[info.UID] = info
	t.mu.Unlock()
	t.tell()
}

// Gone implements kubelet.PodEvents.
func (t *podTable) Gone(uid types.UID) {
	t.mu.Lock()
	_, known := t.pods[string(uid)]
	delete(t.pods, string(uid))
	t.mu.Unlock()
	if known {
		t.tell()
	}
}

func (t *podTable) tell() {
	select {
	case t.changed <- struct{}{}:
	default:
	}
}

// set takes a whole list in.
func (t *podTable) set(pods []*corev1.Pod) {
	next, listed := make(map[string]*podInfo, len(pods)), make(map[*corev1.Pod]*podInfo, len(pods))
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, pod := range pods {
		info, known := t.listed[pod]
		if !known {
			info = t.inform(pod)
		}
		listed[pod] = info
		if info != nil {
			next[info.UID] = info
		}
	}
	t.pods, t.listed = next, listed
}

func (t *podTable) get(uid string) *podInfo {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.pods[uid]
}

// lives tells whether a pod is known and has not ended.
func (t *podTable) lives(uid string) bool {
	p := t.get(uid)
	return p != nil && !p.Over
}

func (t *podTable) all() []*podInfo {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]*podInfo, 0, len(t.pods))
	for _, p := range t.pods {
		out = append(out, p)
	}
	return out
}

// asks are the pods for the books.
func (t *podTable) asks() []books.Pod {
	var out []books.Pod
	for _, p := range t.all() {
		out = append(out, p.Pod)
	}
	return out
}

// refreshPods takes in what kubelet knows now. Without a source, or when it is away, what was known stays.
func (n *Node) refreshPods(ctx context.Context) error {
	if n.pods == nil {
		return nil
	}
	list, err := n.pods.List(ctx)
	if err != nil {
		return err
	}
	n.table.set(list)
	n.mu.Lock()
	n.listed = true
	n.books.SetPods(n.table.asks())
	n.mu.Unlock()
	return nil
}

// podLate is for how long the API server's word of a pod may come after kubelet's first call for it.
const podLate = 500 * time.Millisecond

// awaitPod waits for the pod of a call to be known where the API server tells of pods: kubelet heard of it the same way, and
// may be some milliseconds ahead. Placed as a stranger it would not get the GPUs that were reserved for it. Who is not known by
// then, as a static pod whose mirror is late, is a stranger.
func (n *Node) awaitPod(ctx context.Context, res books.Resource, must []string, size int) {
	if _, ok := n.pods.(*kubelet.APIPods); !ok {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, podLate)
	defer cancel()
	for !n.knowsCaller(res, must, size) {
		if !pause.For(ctx, podLate/50) || n.refreshPods(ctx) != nil {
			return
		}
	}
}

// watchPods keeps the table up to date while kubelet's pods service tells.
func (n *Node) watchPods(ctx context.Context, pods *kubelet.Pods) {
	for wait := newBackoff(); ctx.Err() == nil; wait.sleep(ctx) {
		began := n.config.Now()
		err := pods.Watch(ctx, n.table)
		if n.config.Now().Sub(began) > wait.most {
			wait.reset()
		}
		n.log.Debug("pods are no longer told", "error", err)
	}
}

// openPods chooses who tells of pods.
func (n *Node) openPods(ctx context.Context) error {
	from := n.config.PodsFrom
	if from == PodsAuto {
		from = n.podsSource(ctx)
	}
	n.log.Info("pods are told", "by", from)
	switch {
	case from == PodsKubelet:
		pods, err := kubelet.NewPods(n.config.PodsSocket, reduce)
		if err != nil {
			return err
		}
		n.pods = pods
		n.run(func() { n.watchPods(ctx, pods) })
	case n.cluster == nil:
		n.log.Warn("nobody tells of pods: kubelet has no pods service and there is no API server", "socket", n.config.PodsSocket)
	default:
		informer := kubelet.NewAPIPods(n.cluster.client, n.config.NodeName, reduce, n.table)
		n.pods, n.table.order = informer, informer.Order
		n.run(func() { informer.Run(ctx) })
	}
	return nil
}

// podsSource is kubelet where it has the service. Whether it does is asked: a socket may be there without it.
func (n *Node) podsSource(ctx context.Context) string {
	if _, err := os.Stat(n.config.PodsSocket); err != nil {
		return PodsAPIServer
	}
	pods, err := kubelet.NewPods(n.config.PodsSocket, reduce)
	if err != nil {
		return PodsAPIServer
	}
	defer pods.Close()
	if _, err := pods.List(ctx); kubelet.Missing(err) {
		return PodsAPIServer
	}
	return PodsKubelet
}
