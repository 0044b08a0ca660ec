package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	plugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"tranche.dev/tranche/internal/allocation"
	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/node/books"
	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/podspec"
)

// calls are kubelet's for one resource: implements deviceplugin.Allocator. One runs at a time over both
// resources, as kubelet does it for Preferred and Allocate anyway.
type calls struct {
	node *Node
	res  books.Resource
}

var errOver = errors.New("tranche node has ended")

// Preferred is described at deviceplugin.Allocator.
func (c calls) Preferred(ctx context.Context, available, must []string, size int) ([]string, error) {
	n := c.node
	defer n.stats.time(&n.stats.preferred, time.Now())
	n.calling.Lock()
	defer n.calling.Unlock()
	if n.over {
		return nil, errOver
	}
	// A pod is listed just before its first call; what is known from before may be over by now.
	if err := n.refreshPods(ctx); err != nil {
		n.log.Warn("a pod is placed by what was known of pods before", "error", err)
	}
	if !n.knowsCaller(c.res, must, size) {
		// Its turn may have been taken for another pod's: what kubelet holds shows whose it was.
		if err := n.refreshHeld(ctx); err != nil {
			n.log.Debug("a pod is placed by what was known of devices before", "error", err)
		}
		n.awaitPod(ctx, c.res, must, size)
	}
	choice, err := n.prefer(c.res, available, must, size)
	var refusal *books.Refusal
	if errors.As(err, &refusal) && refusal.Reason == books.NoRoom && n.refreshHeld(ctx) == nil {
		// Kubelet frees what ended pods held just before it asks; both resources at once.
		choice, err = n.prefer(c.res, available, must, size)
	}
	n.stats.preference(c.res, err)
	if err != nil {
		return nil, n.refused(c.res, choice.Pod, err)
	}
	if choice.Replanned != "" && choice.Pod != nil {
		n.stats.replan()
		n.event(podRef(*choice.Pod), corev1.EventTypeNormal, "Replanned", "placed anew by the node: "+choice.Replanned)
	}
	return choice.IDs, nil
}

func (n *Node) knowsCaller(res books.Resource, must []string, size int) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.books.KnowsCaller(res, must, size)
}

func (n *Node) prefer(res books.Resource, available, must []string, size int) (books.Choice, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.books.Preferred(res, available, must, size)
}

// refused tells a refusal where it can be seen, and makes it an answer for kubelet.
func (n *Node) refused(res books.Resource, pod *books.Pod, err error) error {
	text := podspec.Short(err.Error())
	if pod != nil {
		n.event(podRef(*pod), corev1.EventTypeWarning, "GPURefused", text)
	}
	var refusal *books.Refusal
	if errors.As(err, &refusal) {
		n.mu.Lock()
		n.books.Fail(refusal)
		n.mu.Unlock()
	}
	n.log.Warn("refused", "resource", res.String(), "pod", podName(pod), "why", text)
	return status.Error(codes.ResourceExhausted, text)
}

func podName(p *books.Pod) string {
	if p == nil {
		return "unknown"
	}
	return p.Namespace + "/" + p.Name
}

// Allocate is described at deviceplugin.Allocator.
func (c calls) Allocate(ctx context.Context, ids []string) (*plugin.ContainerAllocateResponse, error) {
	n := c.node
	defer n.stats.time(&n.stats.allocate, time.Now())
	n.calling.Lock()
	defer n.calling.Unlock()
	if n.over {
		return nil, errOver
	}
	n.mu.Lock()
	expected := n.books.Expects(c.res, ids)
	n.mu.Unlock()
	if !expected {
		if err := n.refreshPods(ctx); err != nil {
			n.log.Warn("IDs are granted by what was known of pods before", "error", err)
		}
	}
	n.mu.Lock()
	grant, err := n.books.Allocate(c.res, ids)
	n.mu.Unlock()
	var refusal *books.Refusal
	if errors.As(err, &refusal) {
		n.stats.allocation(c.res, refusal.Reason)
		return nil, n.refused(c.res, refusal.Pod, err)
	}
	out := &plugin.ContainerAllocateResponse{}
	if err == nil && grant.Carries {
		out, err = n.response(grant)
	}
	if err != nil {
		n.stats.allocation(c.res, "failed")
		return nil, n.refused(c.res, grant.Pod, err)
	}
	n.stats.allocation(c.res, "")
	n.save()
	n.log.Info("granted", "resource", c.res.String(), "pod", podName(grant.Pod), "container", grant.Container, "ids", len(ids), "gpus", uuidsOf(grant.GPUs))
	return out, nil
}

func uuidsOf(gpus []books.GPU) []string {
	out := make([]string, len(gpus))
	for i, g := range gpus {
		out[i] = g.UUID
	}
	return out
}

// allocationID names the allocation of device IDs on GPUs with these device nodes: the mounts that kubelet keeps for
// a container lead nowhere once a GPU has another node.
func allocationID(ids []string, gpus []books.GPU) string {
	all := slices.Clone(ids)
	for _, g := range gpus {
		all = append(all, fmt.Sprintf("%s/dev/nvidia%d", g.UUID, g.Minor))
	}
	return allocation.IDOf(all)
}

// Start is described at deviceplugin.Allocator.
func (c calls) Start(ctx context.Context, ids []string) error {
	n := c.node
	defer n.stats.time(&n.stats.start, time.Now())
	n.calling.Lock()
	defer n.calling.Unlock()
	if n.over {
		return errOver
	}
	binding, err := n.starting(ctx, c.res, ids)
	if err == nil && !binding.Nothing {
		err = n.bind(binding)
	}
	if err == nil {
		n.stats.started("")
		return nil
	}
	reason := "failed"
	var refusal *books.Refusal
	if errors.As(err, &refusal) {
		reason = refusal.Reason
	}
	n.stats.started(reason)
	if binding.Pod.Name != "" {
		n.event(podRef(binding.Pod), corev1.EventTypeWarning, "GPUStartFailed", fmt.Sprintf("container %s: %v", binding.Container, err))
	}
	n.log.Warn("a container is not started", "pod", podName(&binding.Pod), "container", binding.Container, "error", err)
	return status.Error(codes.FailedPrecondition, podspec.Short(err.Error()))
}

// starting asks kubelet who holds the IDs.
func (n *Node) starting(ctx context.Context, res books.Resource, ids []string) (books.Binding, error) {
	if err := n.refreshHeld(ctx); err != nil {
		return books.Binding{}, err
	}
	n.mu.Lock()
	binding, err := n.books.Start(res, ids)
	n.mu.Unlock()
	if binding.Nothing {
		return binding, nil
	}
	// Which of its containers it is may depend on what ended meanwhile; and the pod may be new.
	if refreshErr := n.refreshPods(ctx); refreshErr != nil {
		n.log.Debug("a container is bound by what was known of pods before", "error", refreshErr)
		return binding, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.books.Start(res, ids)
}

// refreshHeld takes in what kubelet holds for whom.
func (n *Node) refreshHeld(ctx context.Context) error {
	if n.held == nil {
		return errors.New("there is no kubelet")
	}
	all, err := n.held.List(ctx)
	if err != nil {
		return err
	}
	ours, foreign := n.split(all)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.opened || !n.open(ours) {
		n.books.Reconcile(ours)
	}
	if !maps.Equal(n.foreignPods, foreign) {
		n.foreignPods = foreign
		n.setGPUs()
		n.hurry()
	}
	return nil
}

// bind writes the container's limits, after it has made sure that its device nodes are those of its GPUs.
func (n *Node) bind(b books.Binding) error {
	id := allocationID(b.IDs, b.GPUs)
	if was, moved := n.moved(b); moved {
		return &books.Refusal{Reason: books.Moved, Text: fmt.Sprintf("%s; delete the pod, so that it gets device nodes of its GPUs", was)}
	}
	owner := allocation.Owner{Namespace: b.Pod.Namespace, Pod: b.Pod.Name, UID: b.Pod.UID, Container: b.Container}
	if err := n.store.Bind(id, owner, n.limits(b)); err != nil {
		return fmt.Errorf("the limits cannot be written: %w", err)
	}
	n.mu.Lock()
	n.minors[allocation.IDOf(b.IDs)] = minorsOf(b.GPUs)
	n.mu.Unlock()
	n.save()
	n.confirm(b)
	n.log.Info("bound", "pod", podName(&b.Pod), "container", b.Container, "allocation", id, "gpus", uuidsOf(b.GPUs))
	return nil
}

func minorsOf(gpus []books.GPU) []int {
	out := make([]int, len(gpus))
	for i, g := range gpus {
		out[i] = g.Minor
	}
	return out
}

// moved tells of a GPU whose device node is another than when the container got it.
func (n *Node) moved(b books.Binding) (string, bool) {
	n.mu.Lock()
	was, known := n.minors[allocation.IDOf(b.IDs)]
	n.mu.Unlock()
	for i, g := range b.GPUs {
		if g.Closed == "gone" {
			return fmt.Sprintf("gpu %s is gone", g.UUID), true
		}
		if known && i < len(was) && was[i] != g.Minor {
			return fmt.Sprintf("gpu %s was /dev/nvidia%d when the container got it and is /dev/nvidia%d now", g.UUID, was[i], g.Minor), true
		}
	}
	return "", false
}

// limits are a container's on its GPUs. Without an ask, of a pod that is not known, what kubelet gave counts; of one whose
// limits were changed, what they were changed to.
func (n *Node) limits(b books.Binding) []allocation.GPU {
	each, ask := b.Each, b.Ask
	change, changed, err := n.wanted(&b.Pod, b.Container)
	changed = changed && err == nil && each == books.Amount{Cores: change.Cores, Units: n.units(uint64(change.Memory))}
	out := make([]allocation.GPU, len(b.GPUs))
	for i, g := range b.GPUs {
		a := allocation.GPU{UUID: g.UUID, Index: g.Index, Minor: g.Minor, Name: g.Model, Cores: max(each.Cores, 1), MemoryOnly: each.Cores == 0,
			CoresLimited: each.Cores < placement.CoresWhole, Memory: uint64(each.Units) * uint64(n.config.MemoryUnit),
			ContextBytes: gpu.ContextBytes(g.Model)}
		a.MemoryLimited = each.Units > 0
		if !a.MemoryLimited {
			a.Memory = g.Bytes
		}
		if each.Cores == 0 {
			a.Ceiling = placement.CoresWhole
		}
		if ask != nil {
			a.Ceiling, a.Latency, a.Weight = max(ask.Ceiling, a.Cores), ask.Latency, ask.Weight
		}
		if changed {
			a.Ceiling = max(change.Ceiling, a.Cores)
		}
		if changed && change.Memory > 0 {
			a.Memory = uint64(change.Memory)
		}
		a.Memory = min(a.Memory, max(g.Bytes, uint64(n.config.MemoryUnit)))
		out[i] = a
	}
	return out
}

// units is how many units an amount of memory takes.
func (n *Node) units(bytes uint64) int {
	unit := uint64(n.config.MemoryUnit)
	return int((bytes + unit - 1) / unit)
}

// response is what a container gets: devices, the driver's files, its allocation.
func (n *Node) response(g books.Grant) (*plugin.ContainerAllocateResponse, error) {
	set, ok := n.host.views()
	if !ok {
		return nil, errors.New("there is no driver on this node")
	}
	for _, gpu := range g.GPUs {
		if gpu.Minor < 0 {
			return nil, fmt.Errorf("gpu %s: the driver does not tell its device node", gpu.UUID)
		}
	}
	whole := g.Each.Cores == placement.CoresWhole
	view, vendors := set.Share, false
	if whole && n.config.WholeView == ViewOrigin && set.Origin != nil {
		view, vendors = set.Origin, true
	}
	out := &plugin.ContainerAllocateResponse{Envs: view.Env(n.compat32(g)), Annotations: n.annotations(g)}
	for _, m := range view.Mounts() {
		out.Mounts = append(out.Mounts, &plugin.Mount{HostPath: m.HostPath, ContainerPath: m.ContainerPath, ReadOnly: m.ReadOnly})
	}
	var err error
	if out.Devices, err = n.host.deviceNodes(n.config.HostRoot, minorsOf(g.GPUs), n.extra); err != nil {
		return nil, err
	}
	if sim := n.host.sim; sim != nil {
		out.Mounts = append(out.Mounts, &plugin.Mount{HostPath: sim.Machine, ContainerPath: sim.Machine})
	}
	id := allocationID(g.IDs, g.GPUs)
	if !vendors {
		for _, m := range n.store.Mounts(id) {
			out.Mounts = append(out.Mounts, &plugin.Mount{HostPath: m.Host, ContainerPath: m.Container, ReadOnly: m.ReadOnly})
		}
	}
	n.mu.Lock()
	n.minors[allocation.IDOf(g.IDs)], n.views[id] = minorsOf(g.GPUs), view.Name
	n.mu.Unlock()
	return out, n.store.Reserve(id)
}

func (n *Node) compat32(g books.Grant) bool {
	if g.Pod == nil {
		return false
	}
	info := n.table.get(g.Pod.UID)
	return info != nil && info.Compat32[g.Container]
}

// annotations are those of gpu-manager for the runtime.
func (n *Node) annotations(g books.Grant) map[string]string {
	devices := ""
	for i, minor := range minorsOf(g.GPUs) {
		if i > 0 {
			devices += ","
		}
		devices += fmt.Sprintf("/dev/nvidia%d", minor)
	}
	return map[string]string{
		n.names.Core():   fmt.Sprint(g.Each.Cores * len(g.GPUs)),
		n.names.Memory(): fmt.Sprint(uint64(g.Each.Units) * uint64(n.config.MemoryUnit) * uint64(len(g.GPUs))),
		n.names.Device(): devices,
	}
}
