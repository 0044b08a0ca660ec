package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"tranche.dev/tranche/internal/allocation"
	"tranche.dev/tranche/internal/kubelet"
	"tranche.dev/tranche/internal/node/books"
	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/podspec"
)

const (
	// liveEvery is how often pods are listed for changed annotations, where those count.
	liveEvery = time.Second
	// settleTime lets changes that come together be looked at together.
	settleTime = 100 * time.Millisecond
	// callTimeout bounds what is asked of kubelet outside of its own calls.
	callTimeout = 10 * time.Second
)

// hurry makes tend look soon.
func (n *Node) hurry() {
	select {
	case n.tendNow <- struct{}{}:
	default:
	}
}

// tend compares what there is with what kubelet says, from time to time and when pods change: gives back what
// gone pods had, changes limits of running ones, tells the cluster.
func (n *Node) tend(ctx context.Context) {
	every := n.config.CheckPeriod
	if n.config.LiveChange.On {
		every = min(every, liveEvery)
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	var full time.Time
	for {
		list := true
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-n.tendNow:
		case <-n.table.changed:
			list = false
			select {
			case <-ctx.Done():
				return
			case <-time.After(settleTime):
			}
		}
		now := n.config.Now()
		n.tendOnce(ctx, list, now.Sub(full) >= n.config.CheckPeriod)
		if now.Sub(full) >= n.config.CheckPeriod {
			full = now
			debug.FreeOSMemory() // what a burst of calls took
		}
	}
}

// tendOnce is one look: list asks for pods anew, full for what kubelet holds as well.
func (n *Node) tendOnce(ctx context.Context, list, full bool) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	n.calling.Lock()
	defer n.calling.Unlock()
	listed := false
	switch {
	case list:
		err := n.refreshPods(ctx)
		if listed = err == nil && n.pods != nil; err != nil {
			n.log.Debug("pods are not listed", "error", err)
		}
	default:
		n.mu.Lock()
		n.books.SetPods(n.table.asks())
		n.mu.Unlock()
	}
	n.mu.Lock()
	opened := n.opened
	n.mu.Unlock()
	held := false
	// Kubelet lists what pods hold before it has any; nothing is given back before both lists are there.
	if (full || listed && !opened) && n.held != nil {
		err := n.refreshHeld(ctx)
		if held = err == nil; err != nil {
			n.log.Debug("kubelet does not say what pods hold", "error", err)
		}
	}
	n.mu.Lock()
	n.setGPUs()
	n.mu.Unlock()
	n.offer()
	n.clean(full && listed && held)
	n.changeLimits()
	n.publish()
}

// split divides what kubelet holds into our resources and GPUs that other device plugins gave away.
func (n *Node) split(all []kubelet.Held) (ours []books.Held, foreign map[string]bool) {
	foreign = map[string]bool{}
	for _, h := range all {
		switch h.Resource {
		case n.names.Core():
			ours = append(ours, books.Held{Namespace: h.Namespace, Pod: h.Pod, Container: h.Container, Resource: books.Core, IDs: h.IDs})
		case n.names.Memory():
			ours = append(ours, books.Held{Namespace: h.Namespace, Pod: h.Pod, Container: h.Container, Resource: books.Memory, IDs: h.IDs})
		default:
			for _, id := range h.IDs {
				if uuid, _, _ := strings.Cut(id, "::"); strings.HasPrefix(uuid, "GPU-") {
					foreign[uuid] = true
				}
			}
		}
	}
	return ours, foreign
}

// clean removes the allocations of pods that are gone, and driver views that nobody has if it is known who has some.
func (n *Node) clean(views bool) {
	n.mu.Lock()
	if !n.podsKnown() {
		n.mu.Unlock()
		return
	}
	live, keys := map[string]bool{}, map[string]bool{}
	for _, t := range n.books.Tenants() {
		live[n.idOf(t)] = true
		keys[allocation.IDOf(idsOf(t))] = true
	}
	maps.DeleteFunc(n.minors, func(key string, _ []int) bool { return !keys[key] })
	pods := map[string]bool{}
	for _, p := range n.books.Pods() {
		pods[p.UID] = true
	}
	n.mu.Unlock()
	for _, r := range n.store.List() {
		if live[r.ID] || r.Serial > 0 && pods[r.Owner.UID] {
			continue
		}
		if err := n.store.Remove(r.ID); err != nil {
			n.log.Warn("the allocation of a pod that is gone cannot be removed", "id", r.ID, "pod", r.Owner.String(), "error", err)
			continue
		}
		n.log.Info("removed", "allocation", r.ID, "pod", r.Owner.String())
		n.warnings.Delete(r.ID)
		n.mu.Lock()
		delete(n.views, r.ID)
		n.mu.Unlock()
		n.save()
	}
	if views {
		n.cleanViews()
	}
}

// idsOf are the IDs that name a tenant's allocation.
func idsOf(t books.Tenant) []string {
	if len(t.IDs[books.Core]) > 0 {
		return t.IDs[books.Core]
	}
	return t.IDs[books.Memory]
}

// idOf names the allocation of a tenant. The lock is held.
func (n *Node) idOf(t books.Tenant) string {
	ids := idsOf(t)
	gpus := make([]books.GPU, 0, len(t.UUIDs))
	for i, u := range t.UUIDs {
		g := books.GPU{UUID: u}
		if was := n.minors[allocation.IDOf(ids)]; i < len(was) {
			g.Minor = was[i]
		} else if known := n.inventory.Find(u); known != nil {
			g.Minor = known.Minor
		}
		gpus = append(gpus, g)
	}
	return allocationID(ids, gpus)
}

// viewsInUse are those of all allocations, and of containers that have none any more: after a reboot kubelet starts them with
// the mounts that they had. False: of some it is not known, as a node before this one gave them.
func (n *Node) viewsInUse() (names []string, all bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	ids := map[string]bool{}
	for _, r := range n.store.List() {
		ids[r.ID] = true
	}
	for _, t := range n.books.Tenants() {
		ids[n.idOf(t)] = true
	}
	for id := range ids {
		view, known := n.views[id]
		if !known {
			return nil, false
		}
		names = append(names, view)
	}
	return names, true
}

func (n *Node) cleanViews() {
	inUse, all := n.viewsInUse()
	if !all {
		return
	}
	removed, err := n.host.collect(inUse)
	if err != nil {
		n.log.Warn("driver views that nobody has cannot be removed", "error", err)
	}
	if len(removed) > 0 {
		n.log.Info("removed", "views", removed)
	}
}

// owns tells whether the allocation under a tenant's IDs is its own. Kubelet gives the IDs of a pod that is gone
// before that pod's allocation is removed.
func owns(t books.Tenant, o allocation.Owner) bool {
	if t.Pod == nil || o.Container != t.Container || o.Namespace != t.Pod.Namespace || o.Pod != t.Pod.Name {
		return t.Pod == nil
	}
	return o.UID == t.Pod.UID || strings.Contains(o.UID, "/") // bound when only its name was known
}

// changeLimits makes the limits of running containers what their pods' annotations say.
func (n *Node) changeLimits() {
	if !n.config.LiveChange.On {
		return
	}
	n.mu.Lock()
	tenants := n.books.Tenants()
	maps.DeleteFunc(n.refusals, func(key, _ string) bool {
		return !slices.ContainsFunc(tenants, func(t books.Tenant) bool { return t.Pod != nil && refusalOf(t) == key })
	})
	n.mu.Unlock()
	for _, t := range tenants {
		if t.Pod == nil || t.Ask == nil {
			continue
		}
		switch c, ok, err := n.wanted(t.Pod, t.Container); {
		case err != nil:
			n.refuseChange(t, err.Error(), "wrong")
		case ok:
			n.changeLimit(t, c)
		}
	}
}

// wanted is what a container is to have by its pod's annotations, as asked where they change nothing; false where they
// do not count, or say nothing of it. The error says what is wrong with them.
func (n *Node) wanted(p *books.Pod, container string) (podspec.Change, bool, error) {
	info := n.table.get(p.UID)
	if info == nil || !n.config.LiveChange.Allows(p.Namespace) {
		return podspec.Change{}, false, nil
	}
	for _, err := range info.ChangeErrors {
		var e *podspec.Error
		if !errors.As(err, &e) || e.Container == "" || e.Container == container {
			return podspec.Change{}, false, err
		}
	}
	for _, c := range info.Changes {
		if c.Container == container {
			return c, true, nil
		}
	}
	return podspec.Change{}, false, nil
}

func (n *Node) changeLimit(t books.Tenant, c podspec.Change) {
	n.mu.Lock()
	id := n.idOf(t)
	n.mu.Unlock()
	record, ok := n.store.Get(id)
	if !ok || !record.IsBound() || !owns(t, record.Owner) {
		return
	}
	to := make([]allocation.GPU, len(record.GPUs))
	same := true
	free := map[string]allocation.Free{}
	for i, g := range record.GPUs {
		next := g
		next.Cores, next.MemoryOnly, next.CoresLimited = max(c.Cores, 1), c.Cores == 0, c.Cores < placement.CoresWhole
		next.Ceiling = max(c.Ceiling, next.Cores)
		if c.Memory > 0 {
			next.Memory, next.MemoryLimited = uint64(c.Memory), true
		}
		to[i] = next
		same = same && next == g
		n.mu.Lock()
		room := n.books.Room(t.Pod.UID, g.UUID)
		n.mu.Unlock()
		free[g.UUID] = allocation.Free{Cores: room.Cores, Memory: uint64(max(room.Units, 0)) * uint64(n.config.MemoryUnit)}
	}
	if same {
		n.mu.Lock()
		delete(n.refusals, refusalOf(t))
		n.mu.Unlock()
		return
	}
	if err := allocation.Fits(record.GPUs, to, free); err != nil {
		n.refuseChange(t, err.Error(), "not-free")
		return
	}
	if err := n.store.Change(id, to); err != nil {
		n.refuseChange(t, err.Error(), "failed")
		return
	}
	n.mu.Lock()
	n.books.Change(t.Pod.UID, t.Container, n.amount(to[0]))
	delete(n.refusals, refusalOf(t))
	n.mu.Unlock()
	n.stats.change("")
	text := fmt.Sprintf("container %s: limits of each GPU are now %d cores (up to %d) and %v", t.Container, c.Cores, to[0].Ceiling, c.Memory)
	n.log.Info("limits changed", "pod", podName(t.Pod), "container", t.Container, "cores", c.Cores, "ceiling", to[0].Ceiling, "memory", c.Memory.String())
	n.event(podRef(*t.Pod), corev1.EventTypeNormal, "GPULimitsChanged", text)
}

// refusalOf is the key of what a container was told last of a change that was not made.
func refusalOf(t books.Tenant) string { return t.Pod.UID + "/" + t.Container }

// refuseChange tells once why a change is not made.
func (n *Node) refuseChange(t books.Tenant, why, reason string) {
	n.mu.Lock()
	told := n.refusals[refusalOf(t)] == why
	n.refusals[refusalOf(t)] = why
	n.mu.Unlock()
	if told {
		return
	}
	n.stats.change(reason)
	n.log.Warn("limits are not changed", "pod", podName(t.Pod), "container", t.Container, "why", why)
	n.event(podRef(*t.Pod), corev1.EventTypeWarning, "GPULimitsRefused", fmt.Sprintf("container %s: %s", t.Container, why))
}
