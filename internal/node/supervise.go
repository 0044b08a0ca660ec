package node

import (
	"context"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"

	"tranche.dev/tranche/internal/allocation"
	"tranche.dev/tranche/internal/bypass"
	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/node/books"
	"tranche.dev/tranche/internal/placement"
)

// supervise looks after tenants and what uses GPUs beside them.
func (n *Node) supervise(ctx context.Context) {
	watch, err := bypass.NewWatch(bypass.WatchConfig{Dir: n.config.AllocationDir, Tenants: n.store.Tenants,
		Kill: n.config.Bypass == BypassKill, Now: n.config.Now})
	if err != nil {
		n.log.Warn("use of GPUs past the slices is not watched", "error", err)
		watch = nil
	}
	n.store.Supervise(ctx, allocation.SuperviseConfig{Driver: n.host, Warn: n.warnAllocation, Report: func(r gpu.Report) {
		n.mu.Lock()
		n.report = r
		n.mu.Unlock()
		if watch != nil {
			n.look(watch, r)
		}
	}})
}

// look takes a report of the driver to those who use GPUs past their slice, and to others.
func (n *Node) look(watch *bypass.Watch, r gpu.Report) {
	result, killed, due, err := watch.Take(r)
	if err != nil {
		n.log.Debug("processes on GPUs that cannot be told where they belong", "error", err)
	}
	if !due {
		return
	}
	if n.config.Bypass != BypassOff {
		n.tellViolations(result, killed)
	}
	use := map[string]int{}
	for _, f := range result.Foreign {
		use[f.GPU] += n.units(f.Used)
	}
	n.mu.Lock()
	changed := !maps.Equal(n.foreignUse, use)
	n.foreignUse = use
	n.mu.Unlock()
	if changed {
		n.hurry()
	}
}

// others are what is used of each GPU by others than our tenants: all of it where another device plugin gave it away,
// what gpu-manager gave to pods that still live, and memory that processes of neither hold. The lock is held.
func (n *Node) others() map[string]books.Amount {
	out := map[string]books.Amount{}
	for _, g := range n.inventory.GPUs {
		a := n.importedOn(g.Minor)
		a.Units = max(a.Units, n.foreignUse[g.UUID]) // the processes of those pods are among them
		if n.foreignPods[g.UUID] {
			a = books.Amount{Cores: placement.CoresWhole, Units: int(g.Memory / uint64(n.config.MemoryUnit))}
		}
		if a != (books.Amount{}) {
			out[g.UUID] = a
		}
	}
	return out
}

// importedOn is what pods of gpu-manager have of a GPU. The lock is held.
func (n *Node) importedOn(minor int) books.Amount {
	var out books.Amount
	for _, i := range n.imported {
		if i.Minor == minor && (!n.podsKnown() || n.table.lives(i.UID)) {
			out.Cores = min(out.Cores+i.Cores, placement.CoresWhole)
			out.Units += n.units(i.Memory)
		}
	}
	return out
}

// tellViolations tells of each that began.
func (n *Node) tellViolations(result bypass.Result, killed []bypass.Killed) {
	done := map[string]string{}
	for _, k := range killed {
		what := "ended"
		if k.Err != nil {
			what = "failed"
			n.log.Warn("a process could not be ended", "violation", k.String(), "error", k.Err)
		}
		done[fmt.Sprint(k.PID, k.Kind)] = what
	}
	for _, v := range result.Began {
		what := done[fmt.Sprint(v.PID, v.Kind)]
		if what == "" {
			what = "reported"
		}
		n.stats.violation(string(v.Kind), what)
		n.log.Warn("use of a GPU past the slice", "allocation", v.Tenant, "what", v.String(), "done", what)
		if record, ok := n.store.Get(v.Tenant); ok && record.IsBound() {
			pod := books.Pod{Namespace: record.Owner.Namespace, Name: record.Owner.Pod, UID: record.Owner.UID}
			n.event(podRef(pod), corev1.EventTypeWarning, "GPUBypass", fmt.Sprintf("container %s: %v (%s)", record.Owner.Container, v, what))
		}
	}
}
