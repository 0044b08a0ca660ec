// Package kubelettest is a kubelet for tests, as far as device plugins see it: it behaves like Kubernetes
// 1.37's device manager (pkg/kubelet/cm/devicemanager), pods service and PodResources service, over real
// sockets in a directory. Its order of resources, and what it takes when it is not told, are random by a
// seed. It runs no container.
package kubelettest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	deviceplugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	podsapi "k8s.io/kubelet/pkg/apis/pods/v1alpha1"
)

// Kubelet is one. Its methods that admit and start are for one goroutine, as kubelet admits one pod at a
// time; the services answer meanwhile.
type Kubelet struct {
	// Dir is the directory of device plugins; Pods and Resources are the sockets of the two services.
	Dir, Pods, Resources string
	random               *rand.Rand

	mu        sync.Mutex
	server    []*grpc.Server
	endpoints map[string]*endpoint
	pods      map[types.UID]*corev1.Pod
	order     []types.UID
	books     map[types.UID]map[string]map[string]*grant // pod, container, resource
	used      map[string]map[string]bool                 // resource, IDs: may have some that are in no book
	reusable  map[string]map[string]bool
	reuser    types.UID
	watchers  map[chan *podsapi.WatchPodsEvent]bool
	hidden    map[types.UID]bool // while kubelet initialises: pods that it has not come to
	registers chan string
	waits     map[string][]time.Duration
	spent     map[string][]time.Duration

	// Meter, where set before the first call, is what the plugins' process has spent of the processor so far.
	Meter func() time.Duration
}

type endpoint struct {
	conn    *grpc.ClientConn
	client  deviceplugin.DevicePluginClient
	options *deviceplugin.DevicePluginOptions
	stop    context.CancelFunc
	healthy map[string]bool // by ID; false: unhealthy
}

type grant struct {
	ids      map[string]bool
	response *deviceplugin.ContainerAllocateResponse
}

// New starts a kubelet on sockets below dir, which must be short.
func New(dir string, seed uint64) (*Kubelet, error) {
	k := &Kubelet{Dir: filepath.Join(dir, "dp"), Pods: filepath.Join(dir, "pods.sock"), Resources: filepath.Join(dir, "res.sock"),
		random: rand.New(rand.NewPCG(seed, 1)), pods: map[types.UID]*corev1.Pod{}, books: map[types.UID]map[string]map[string]*grant{},
		used: map[string]map[string]bool{}, reusable: map[string]map[string]bool{}, registers: make(chan string, 64)}
	if err := os.MkdirAll(k.Dir, 0o755); err != nil {
		return nil, err
	}
	return k, k.Start()
}

// Start begins, again after Stop: it removes the sockets of plugins, which have to register anew, and keeps its
// books, which it has from its checkpoint.
func (k *Kubelet) Start() error {
	entries, err := os.ReadDir(k.Dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.Remove(filepath.Join(k.Dir, e.Name())); err != nil {
			return err
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.endpoints, k.watchers = map[string]*endpoint{}, map[chan *podsapi.WatchPodsEvent]bool{}
	k.used = k.held()
	for _, s := range []struct {
		socket   string
		register func(*grpc.Server)
	}{
		{k.Pods, func(s *grpc.Server) { podsapi.RegisterPodsServer(s, &podsService{k: k}) }},
		{k.Resources, func(s *grpc.Server) { podresources.RegisterPodResourcesListerServer(s, &lister{k: k}) }},
		{filepath.Join(k.Dir, "kubelet.sock"), func(s *grpc.Server) { deviceplugin.RegisterRegistrationServer(s, &registry{k: k}) }},
	} {
		_ = os.Remove(s.socket)
		l, err := net.Listen("unix", s.socket)
		if err != nil {
			return err
		}
		server := grpc.NewServer()
		s.register(server)
		go func() { _ = server.Serve(l) }()
		k.server = append(k.server, server)
	}
	return nil
}

// Initialise lets the services be as they are while kubelet has not heard of all of its pods: it lists none, and the devices of
// those only that are admitted from now on. Initialised ends that.
func (k *Kubelet) Initialise() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.hidden = map[types.UID]bool{}
	for uid := range k.pods {
		k.hidden[uid] = true
	}
}

// Initialised is described at Initialise.
func (k *Kubelet) Initialised() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.hidden = nil
}

// Stop ends the services, and forgets the plugins.
func (k *Kubelet) Stop() {
	k.mu.Lock()
	servers, endpoints := k.server, k.endpoints
	k.server, k.endpoints = nil, map[string]*endpoint{}
	k.mu.Unlock()
	for _, s := range servers {
		s.Stop()
	}
	for _, e := range endpoints {
		e.stop()
		_ = e.conn.Close()
	}
}

// Registered waits until a plugin of each resource has registered and told its devices.
func (k *Kubelet) Registered(ctx context.Context, resources ...string) error {
	for {
		missing := ""
		k.mu.Lock()
		for _, r := range resources {
			if e := k.endpoints[r]; e == nil || e.healthy == nil {
				missing = r
			}
		}
		k.mu.Unlock()
		if missing == "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s has not registered: %w", missing, ctx.Err())
		case <-k.registers:
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Healthy counts the healthy devices of a resource.
func (k *Kubelet) Healthy(resource string) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	n := 0
	if e := k.endpoints[resource]; e != nil {
		for _, ok := range e.healthy {
			if ok {
				n++
			}
		}
	}
	return n
}

// Admit does what kubelet does with a new pod: lists it, and gives its containers their devices. A pod that is
// refused has the phase Failed from then on.
func (k *Kubelet) Admit(ctx context.Context, pod *corev1.Pod) error {
	err := k.allocate(ctx, k.List(pod))
	if err != nil {
		k.SetPhase(pod.UID, corev1.PodFailed)
	}
	return err
}

// List makes a pod known that is about to be admitted, and returns kubelet's own.
func (k *Kubelet) List(pod *corev1.Pod) *corev1.Pod {
	k.mu.Lock()
	pod = pod.DeepCopy()
	if pod.Status.Phase == "" {
		pod.Status.Phase = corev1.PodPending
	}
	if k.pods[pod.UID] == nil {
		k.order = append(k.order, pod.UID)
	}
	k.pods[pod.UID] = pod
	k.mu.Unlock()
	k.tell(podsapi.EventType_ADDED, pod)
	return pod
}

func (k *Kubelet) allocate(ctx context.Context, pod *corev1.Pod) error {
	k.mu.Lock()
	if k.reuser != pod.UID {
		k.reuser, k.reusable = pod.UID, map[string]map[string]bool{}
	}
	k.mu.Unlock()
	for _, c := range pod.Spec.InitContainers {
		sidecar := c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
		if err := k.container(ctx, pod, &c, !sidecar); err != nil {
			return err
		}
	}
	for _, c := range pod.Spec.Containers {
		if err := k.container(ctx, pod, &c, false); err != nil {
			return err
		}
	}
	return nil
}

// container gives one container its devices. What an init container got is handed on.
func (k *Kubelet) container(ctx context.Context, pod *corev1.Pod, c *corev1.Container, handsOn bool) error {
	k.collect()
	for _, resource := range k.shuffled(slices.Sorted(maps.Keys(c.Resources.Limits))) {
		q := c.Resources.Limits[corev1.ResourceName(resource)]
		if err := k.resource(ctx, pod, c, resource, int(q.Value())); err != nil {
			return fmt.Errorf("container %s, %s: %w", c.Name, resource, err)
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for resource, g := range k.books[pod.UID][c.Name] {
		if k.reusable[resource] == nil {
			k.reusable[resource] = map[string]bool{}
		}
		for id := range g.ids {
			if handsOn {
				k.reusable[resource][id] = true
			} else {
				delete(k.reusable[resource], id)
			}
		}
	}
	return nil
}

func (k *Kubelet) shuffled(names []corev1.ResourceName) []string {
	out := make([]string, len(names))
	for i, j := range k.random.Perm(len(names)) {
		out[i] = string(names[j])
	}
	return out
}

// collect takes back what pods have that are gone or over.
func (k *Kubelet) collect() {
	k.mu.Lock()
	defer k.mu.Unlock()
	before := len(k.books)
	for uid := range k.books {
		if p := k.pods[uid]; p == nil || over(p) {
			delete(k.books, uid)
		}
	}
	if len(k.books) != before {
		k.used = k.held()
	}
}

func over(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded
}

func (k *Kubelet) held() map[string]map[string]bool {
	out := map[string]map[string]bool{}
	for _, containers := range k.books {
		for _, resources := range containers {
			for resource, g := range resources {
				if out[resource] == nil {
					out[resource] = map[string]bool{}
				}
				maps.Copy(out[resource], g.ids)
			}
		}
	}
	return out
}

// resource is devicesToAllocate and what follows of allocateContainerResources.
func (k *Kubelet) resource(ctx context.Context, pod *corev1.Pod, c *corev1.Container, resource string, needed int) error {
	k.mu.Lock()
	e := k.endpoints[resource]
	if e == nil || needed == 0 {
		k.mu.Unlock()
		return nil
	}
	if g := k.books[pod.UID][c.Name][resource]; g != nil {
		k.mu.Unlock()
		return nil
	}
	chosen := map[string]bool{}
	take := func(ids []string) bool {
		if k.used[resource] == nil {
			k.used[resource] = map[string]bool{}
		}
		for _, id := range ids {
			if len(chosen) < needed && !chosen[id] {
				chosen[id], k.used[resource][id] = true, true
			}
		}
		return len(chosen) == needed
	}
	full := take(k.mixed(k.reusable[resource]))
	var available []string
	for id, ok := range e.healthy {
		if ok && !k.used[resource][id] {
			available = append(available, id)
		}
	}
	k.mu.Unlock()
	slices.Sort(available)
	if !full {
		if len(available) < needed-len(chosen) {
			return fmt.Errorf("requested number of devices unavailable for %s. Requested: %d, Available: %d", resource, needed-len(chosen), len(available))
		}
		must := slices.Collect(maps.Keys(chosen))
		done := k.called("GetPreferredAllocation")
		r, err := e.client.GetPreferredAllocation(ctx, &deviceplugin.PreferredAllocationRequest{ContainerRequests: []*deviceplugin.ContainerPreferredAllocationRequest{{
			AvailableDeviceIDs: append(slices.Clone(available), must...), MustIncludeDeviceIDs: must, AllocationSize: int32(needed)}}})
		done()
		if err != nil {
			return k.lost(fmt.Errorf("device plugin GetPreferredAllocation rpc failed with err: %w", err))
		}
		k.mu.Lock()
		isFree := map[string]bool{}
		for _, id := range available {
			isFree[id] = true
		}
		var preferred []string
		if len(r.GetContainerResponses()) > 0 {
			preferred = r.GetContainerResponses()[0].GetDeviceIDs()
		}
		preferred = slices.DeleteFunc(preferred, func(id string) bool { return !isFree[id] })
		if !take(preferred) {
			take(k.mixed(isFree))
		}
		k.mu.Unlock()
	}
	ids := slices.Collect(maps.Keys(chosen))
	done := k.called("Allocate")
	r, err := e.client.Allocate(ctx, &deviceplugin.AllocateRequest{ContainerRequests: []*deviceplugin.ContainerAllocateRequest{{DevicesIds: ids}}})
	done()
	if err != nil {
		return k.lost(err)
	}
	if len(r.GetContainerResponses()) != 1 {
		return errors.New("no containers return in allocation response")
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.books[pod.UID] == nil {
		k.books[pod.UID] = map[string]map[string]*grant{}
	}
	if k.books[pod.UID][c.Name] == nil {
		k.books[pod.UID][c.Name] = map[string]*grant{}
	}
	k.books[pod.UID][c.Name][resource] = &grant{ids: chosen, response: r.GetContainerResponses()[0]}
	return nil
}

// lost restores what is used from the books, after a call that failed.
func (k *Kubelet) lost(err error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.used = k.held()
	return err
}

// mixed are the keys in an order by chance.
func (k *Kubelet) mixed(set map[string]bool) []string {
	ids := slices.Sorted(maps.Keys(set))
	k.random.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return ids
}

// Started is what a container gets from the plugins, merged as kubelet does: in random order, what comes first
// stays.
type Started struct {
	Env    map[string]string
	Mounts map[string]string // host path by path in the container
	// ReadOnly has the paths of Mounts that are.
	ReadOnly    map[string]bool
	Devices     map[string]string // host path by path in the container
	Annotations map[string]string
}

// StartContainer does what kubelet does before each start of a container, and returns what the container gets.
func (k *Kubelet) StartContainer(ctx context.Context, uid types.UID, container string) (Started, error) {
	k.mu.Lock()
	grants := maps.Clone(k.books[uid][container])
	k.mu.Unlock()
	out := Started{Env: map[string]string{}, Mounts: map[string]string{}, ReadOnly: map[string]bool{}, Devices: map[string]string{}, Annotations: map[string]string{}}
	resources := slices.Sorted(maps.Keys(grants))
	k.random.Shuffle(len(resources), func(i, j int) { resources[i], resources[j] = resources[j], resources[i] })
	for _, resource := range resources {
		k.mu.Lock()
		e := k.endpoints[resource]
		k.mu.Unlock()
		if e == nil {
			return out, fmt.Errorf("endpoint not found in cache for a registered resource: %s", resource)
		}
		if !e.options.GetPreStartRequired() {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, deviceplugin.KubeletPreStartContainerRPCTimeoutInSecs*time.Second)
		done := k.called("PreStartContainer")
		_, err := e.client.PreStartContainer(ctx, &deviceplugin.PreStartContainerRequest{DevicesIds: slices.Collect(maps.Keys(grants[resource].ids))})
		cancel()
		done()
		if err != nil {
			return out, fmt.Errorf("device plugin PreStartContainer rpc failed with err: %w", err)
		}
	}
	for _, resource := range resources {
		out.merge(grants[resource].response)
	}
	return out, nil
}

func (s *Started) merge(r *deviceplugin.ContainerAllocateResponse) {
	first := func(to map[string]string, key, value string) {
		if _, ok := to[key]; !ok {
			to[key] = value
		}
	}
	for k, v := range r.GetEnvs() {
		first(s.Env, k, v)
	}
	for _, m := range r.GetMounts() {
		if _, ok := s.Mounts[m.GetContainerPath()]; !ok {
			s.ReadOnly[m.GetContainerPath()] = m.GetReadOnly()
		}
		first(s.Mounts, m.GetContainerPath(), m.GetHostPath())
	}
	for _, d := range r.GetDevices() {
		first(s.Devices, d.GetContainerPath(), d.GetHostPath())
	}
	for k, v := range r.GetAnnotations() {
		first(s.Annotations, k, v)
	}
}

// called begins to measure a call of a plugin; what it returns ends it.
func (k *Kubelet) called(call string) (done func()) {
	meter := k.Meter
	if meter == nil {
		meter = func() time.Duration { return 0 }
	}
	before, began := meter(), time.Now()
	return func() {
		took, spent := time.Since(began), meter()-before
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.waits == nil {
			k.waits, k.spent = map[string][]time.Duration{}, map[string][]time.Duration{}
		}
		k.waits[call], k.spent[call] = append(k.waits[call], took), append(k.spent[call], spent)
	}
}

// Waits are how long kubelet has waited for plugins, by call.
func (k *Kubelet) Waits() map[string][]time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	return maps.Clone(k.waits)
}

// Spent is what Meter said of the same calls.
func (k *Kubelet) Spent() map[string][]time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	return maps.Clone(k.spent)
}

// IDs are what kubelet gave a container of a resource, sorted.
func (k *Kubelet) IDs(uid types.UID, container, resource string) []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	g := k.books[uid][container][resource]
	if g == nil {
		return nil
	}
	return slices.Sorted(maps.Keys(g.ids))
}

// SetPhase changes a pod's; Update any of it.
func (k *Kubelet) SetPhase(uid types.UID, phase corev1.PodPhase) {
	k.Update(uid, func(p *corev1.Pod) { p.Status.Phase = phase })
}

// Update is described at SetPhase.
func (k *Kubelet) Update(uid types.UID, f func(*corev1.Pod)) {
	k.mu.Lock()
	pod := k.pods[uid]
	if pod != nil {
		pod = pod.DeepCopy()
		f(pod)
		k.pods[uid] = pod
	}
	k.mu.Unlock()
	if pod != nil {
		k.tell(podsapi.EventType_MODIFIED, pod)
	}
}

// Delete makes a pod gone.
func (k *Kubelet) Delete(uid types.UID) {
	k.mu.Lock()
	pod := k.pods[uid]
	delete(k.pods, uid)
	k.order = slices.DeleteFunc(k.order, func(u types.UID) bool { return u == uid })
	k.mu.Unlock()
	if pod != nil {
		k.tell(podsapi.EventType_DELETED, &corev1.Pod{ObjectMeta: pod.ObjectMeta})
	}
}

func (k *Kubelet) tell(kind podsapi.EventType, pod *corev1.Pod) {
	data, err := pod.Marshal()
	if err != nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for w := range k.watchers {
		select {
		case w <- &podsapi.WatchPodsEvent{Type: kind, Pod: data}:
		default:
			delete(k.watchers, w)
			close(w)
		}
	}
}

type registry struct {
	deviceplugin.UnimplementedRegistrationServer
	k *Kubelet
}

// Register implements the API; it connects back.
func (r *registry) Register(_ context.Context, q *deviceplugin.RegisterRequest) (*deviceplugin.Empty, error) {
	conn, err := grpc.NewClient("unix:"+filepath.Join(r.k.Dir, q.GetEndpoint()), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	e := &endpoint{conn: conn, client: deviceplugin.NewDevicePluginClient(conn), stop: cancel}
	if e.options, err = e.client.GetDevicePluginOptions(ctx, &deviceplugin.Empty{}); err != nil {
		cancel()
		return nil, err
	}
	r.k.mu.Lock()
	if old := r.k.endpoints[q.GetResourceName()]; old != nil {
		old.stop()
	}
	r.k.endpoints[q.GetResourceName()] = e
	r.k.mu.Unlock()
	go r.k.listen(ctx, q.GetResourceName(), e)
	return &deviceplugin.Empty{}, nil
}

// listen takes in what a plugin tells of its devices.
func (k *Kubelet) listen(ctx context.Context, resource string, e *endpoint) {
	stream, err := e.client.ListAndWatch(ctx, &deviceplugin.Empty{})
	for err == nil {
		var r *deviceplugin.ListAndWatchResponse
		if r, err = stream.Recv(); err != nil {
			break
		}
		healthy := map[string]bool{}
		for _, d := range r.GetDevices() {
			healthy[d.GetID()] = d.GetHealth() == deviceplugin.Healthy
		}
		k.mu.Lock()
		e.healthy = healthy
		k.mu.Unlock()
		select {
		case k.registers <- resource:
		default:
		}
	}
	// A plugin that is gone leaves unhealthy devices.
	k.mu.Lock()
	for id := range e.healthy {
		e.healthy[id] = false
	}
	k.mu.Unlock()
}

type lister struct {
	podresources.UnimplementedPodResourcesListerServer
	k *Kubelet
}

// List implements the API: no terminal pods, no init containers but those that keep running.
func (l *lister) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	l.k.mu.Lock()
	defer l.k.mu.Unlock()
	out := &podresources.ListPodResourcesResponse{}
	for _, uid := range l.k.order {
		pod := l.k.pods[uid]
		if over(pod) || l.k.hidden[uid] {
			continue
		}
		p := &podresources.PodResources{Name: pod.Name, Namespace: pod.Namespace}
		containers := slices.Clone(pod.Spec.Containers)
		for _, c := range pod.Spec.InitContainers {
			if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
				containers = append(containers, c)
			}
		}
		for _, c := range containers {
			r := &podresources.ContainerResources{Name: c.Name}
			for resource, g := range l.k.books[uid][c.Name] {
				r.Devices = append(r.Devices, &podresources.ContainerDevices{ResourceName: resource, DeviceIds: slices.Collect(maps.Keys(g.ids))})
			}
			p.Containers = append(p.Containers, r)
		}
		out.PodResources = append(out.PodResources, p)
	}
	return out, nil
}

type podsService struct {
	podsapi.UnimplementedPodsServer
	k *Kubelet
}

// ListPods implements the API.
func (s *podsService) ListPods(context.Context, *podsapi.ListPodsRequest) (*podsapi.ListPodsResponse, error) {
	s.k.mu.Lock()
	defer s.k.mu.Unlock()
	if s.k.hidden != nil {
		return nil, status.Error(codes.FailedPrecondition, "Kubelet is initializing")
	}
	out := &podsapi.ListPodsResponse{}
	for _, uid := range s.k.order {
		data, err := s.k.pods[uid].Marshal()
		if err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
		out.Pods = append(out.Pods, data)
	}
	return out, nil
}

// WatchPods implements the API.
func (s *podsService) WatchPods(_ *podsapi.WatchPodsRequest, stream grpc.ServerStreamingServer[podsapi.WatchPodsEvent]) error {
	w := make(chan *podsapi.WatchPodsEvent, 100)
	s.k.mu.Lock()
	if s.k.hidden != nil {
		s.k.mu.Unlock()
		return status.Error(codes.FailedPrecondition, "Kubelet is initializing")
	}
	s.k.watchers[w] = true
	var first []*podsapi.WatchPodsEvent
	for _, uid := range s.k.order {
		data, err := s.k.pods[uid].Marshal()
		if err == nil {
			first = append(first, &podsapi.WatchPodsEvent{Type: podsapi.EventType_ADDED, Pod: data})
		}
	}
	s.k.mu.Unlock()
	for _, e := range append(first, &podsapi.WatchPodsEvent{Type: podsapi.EventType_INITIAL_SYNC_COMPLETE}) {
		if err := stream.Send(e); err != nil {
			return err
		}
	}
	for {
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case e, ok := <-w:
			if !ok {
				return status.Error(codes.ResourceExhausted, "watch client channel closed")
			}
			if err := stream.Send(e); err != nil {
				return err
			}
		}
	}
}
