package display

import (
	"cmp"
	"slices"
	"strconv"

	api "tranche.dev/tranche/api/display"
)

// Usage is what the containers with a slice use and asked for, by pod UID.
func Usage(s Snapshot) *api.UsageResponse {
	memory := map[int]uint64{}
	for _, g := range s.GPUs {
		memory[g.Index] = g.Memory
	}
	out := &api.UsageResponse{}
	for _, t := range s.Tenants {
		uid := text(t.PodUID)
		pod := out.Usage[uid]
		if pod == nil {
			pod = &api.ContainerStat{Stat: map[string]*api.Devices{}, Spec: map[string]*api.Spec{}, Project: text(t.Namespace), User: text(t.User), Cluster: text(t.Cluster)}
			if out.Usage == nil {
				out.Usage = map[string]*api.ContainerStat{}
			}
			out.Usage[uid] = pod
		}
		pod.Stat[text(t.Container)] = devices(t, memory)
		cores, bytes := t.asked(memory)
		pod.Spec[text(t.Container)] = &api.Spec{Gpu: float32(cores) / 100, Mem: float32(bytes >> 20)}
	}
	return out
}

func devices(t Tenant, memory map[int]uint64) *api.Devices {
	out := &api.Devices{}
	for _, p := range sortedParts(t) {
		d := &api.DeviceInfo{Id: text(p.BusID), CardIdx: strconv.Itoa(p.Index), Gpu: float32(max(p.Busy, 0)), Mem: float32(p.Memory >> 20), DeviceMem: float32(memory[p.Index] >> 20)}
		for _, pid := range p.PIDs {
			d.Pids = append(d.Pids, int32(pid))
		}
		out.Dev = append(out.Dev, d)
	}
	return out
}

// asked is a tenant's part of all its GPUs: hundredths of a GPU, and bytes, which are all of a GPU
// where it has no limit.
func (t Tenant) asked(memory map[int]uint64) (cores int, bytes uint64) {
	for _, p := range t.GPUs {
		cores += p.Cores
		bytes += cmp.Or(p.MemoryLimit, memory[p.Index])
	}
	return cores, bytes
}

func sortedParts(t Tenant) []Part {
	return slices.SortedFunc(slices.Values(t.GPUs), func(a, b Part) int { return cmp.Compare(a.Index, b.Index) })
}
