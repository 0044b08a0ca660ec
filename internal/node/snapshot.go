package node

import (
	"slices"
	"time"

	"tranche.dev/tranche/internal/allocation"
	"tranche.dev/tranche/internal/display"
	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/node/books"
	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/topology"
)

// Snapshot implements display.Source.
func (n *Node) Snapshot() display.Snapshot {
	n.mu.Lock()
	inv, report, tenants := n.inventory, n.report, n.books.Tenants()
	out := display.Snapshot{Node: n.config.NodeName, Version: n.config.Version, Commit: n.config.Commit, Driver: inv.Driver}
	ids := make([]string, len(tenants))
	for i, t := range tenants {
		ids[i] = n.idOf(t)
	}
	for i := range inv.GPUs {
		out.GPUs = append(out.GPUs, n.showGPU(&inv, i, report))
	}
	arbiter := n.arbiter
	n.mu.Unlock()
	for i, t := range tenants {
		out.Tenants = append(out.Tenants, n.showTenant(t, ids[i], &inv))
	}
	showBusy(&out)
	if arbiter != nil {
		s := arbiter.Status()
		out.Arbiter = display.Arbiter{Alive: true, Handovers: s.Handovers, HandoverP50: time.Duration(s.HandoverP50), HandoverP99: time.Duration(s.HandoverP99)}
	}
	out.Counters = n.stats.counters()
	out.Allocate, out.Preferred, out.PreStart = n.stats.allocate.Histogram(), n.stats.preferred.Histogram(), n.stats.start.Histogram()
	return out
}

// showGPU is one GPU. The lock is held.
func (n *Node) showGPU(inv *gpu.Inventory, i int, report gpu.Report) display.GPU {
	g := &inv.GPUs[i]
	free, _ := n.books.Free(g.UUID)
	out := display.GPU{Index: g.Index, Minor: g.Minor, UUID: g.UUID, BusID: g.PCI, Model: g.Name, Memory: g.Memory, Healthy: g.Usable(),
		Reason: unusable(*g), NUMA: g.NUMA, Busy: -1, FreeCores: free.Cores, FreeMemory: int64(free.Units) * int64(n.config.MemoryUnit),
		Idle: free.Cores == placement.CoresWhole && free.Units >= int(g.Memory/uint64(n.config.MemoryUnit))}
	for _, d := range report.Devices {
		if d.UUID == g.UUID {
			out.UsedMemory = d.MemoryUsed
			if d.Utilization != nil {
				out.Busy = *d.Utilization
			}
			for _, p := range d.Processes {
				out.PIDs = append(out.PIDs, p.PID)
			}
		}
	}
	slices.Sort(out.PIDs)
	for j := range inv.GPUs {
		if l := inv.Links.At(i, j); i != j && l.Level != topology.Unknown {
			out.Links = append(out.Links, display.Link{Peer: inv.GPUs[j].Index, Level: display.Level(placementLink(l).Level), NVLinks: l.NVLinks})
		}
	}
	return out
}

func (n *Node) showTenant(t books.Tenant, id string, inv *gpu.Inventory) display.Tenant {
	out := display.Tenant{Container: t.Container, Class: "normal"}
	if t.Pod != nil {
		out.Namespace, out.Pod, out.PodUID = t.Pod.Namespace, t.Pod.Name, t.Pod.UID
		if info := n.table.get(t.Pod.UID); info != nil {
			out.Cluster, out.User = info.Cluster, info.User
		}
	}
	record, _ := n.store.Get(id)
	use, _ := n.store.Use(id) // an allocation that is not bound yet uses nothing
	if !owns(t, record.Owner) {
		record, use = allocation.Record{}, allocation.Use{}
	}
	for i, uuid := range t.UUIDs {
		p := display.Part{Cores: t.Each.Cores, Ceiling: t.Each.Cores, MemoryLimit: uint64(t.Each.Units) * uint64(n.config.MemoryUnit),
			Busy: -1, Share: -1, Wanted: -1}
		if g := inv.Find(uuid); g != nil {
			p.Index, p.BusID = g.Index, g.PCI
		}
		if i < len(record.GPUs) {
			p.Ceiling = max(record.GPUs[i].Ceiling, p.Cores)
			if p.MemoryLimit = 0; record.GPUs[i].MemoryLimited {
				p.MemoryLimit = record.GPUs[i].Memory
			}
			if record.GPUs[i].Latency {
				out.Class = "latency"
			}
		}
		if i < len(use.GPUs) {
			showUse(&p, use, i)
		}
		out.GPUs = append(out.GPUs, p)
	}
	return out
}

// showUse is what a tenant made of its part.
func showUse(p *display.Part, use allocation.Use, i int) {
	u := &use.GPUs[i]
	p.Memory, p.Overhead = u.Memory, u.Overhead
	p.GPUTime, p.Throttled = time.Duration(u.GPUTimeNs), time.Duration(u.ThrottledNs)
	p.Launches, p.Refused = u.Launches, u.AllocsRefused
	if u.Wanted != nil && u.Got != nil {
		p.Share, p.Wanted, p.Busy = *u.Got, *u.Wanted, *u.Got
	}
	for _, process := range use.Processes {
		if process.HostPID > 0 {
			p.PIDs = append(p.PIDs, process.HostPID)
		}
	}
	slices.Sort(p.PIDs)
}

// showBusy is, where the driver does not say how busy a GPU is, what its tenants made of it as far as that is known.
func showBusy(s *display.Snapshot) {
	for i := range s.GPUs {
		g := &s.GPUs[i]
		if g.Busy >= 0 {
			continue
		}
		for _, t := range s.Tenants {
			for _, p := range t.GPUs {
				if p.Index == g.Index && p.Busy >= 0 {
					g.Busy = min(max(g.Busy, 0)+p.Busy, 100)
				}
			}
		}
	}
}
