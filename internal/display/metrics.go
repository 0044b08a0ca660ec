package display

import (
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// kind is a metric's type in words of the exposition format.
type kind string

const (
	gauge     kind = "gauge"
	counter   kind = "counter"
	histogram kind = "histogram"
)

// metric is one family.
type metric struct {
	name, help string
	kind       kind
	labels     []string
	desc       *prometheus.Desc
}

func family(kind kind, name, help string, labels ...string) *metric {
	return &metric{name, help, kind, labels, prometheus.NewDesc(name, help, labels, nil)}
}

// families are all that a collector can give. The two groups are documented apart.
type families struct {
	old, own []*metric

	oldBusy, oldMemory, oldCards, oldAsked                                        *metric
	info, gpuInfo, healthy, gpuBytes, gpuUsed, freeCores, freeBytes, idle         *metric
	gpuBusy, gpuProcesses, gpuTenants, nvlinks                                    *metric
	tenant, cores, ceiling, usedCores, share, wanted, limit, used, overhead       *metric
	gpuTime, throttled, launches, refused, processes                              *metric
	arbiter, handovers, handoverP50, handoverP99                                  *metric
	allocations, preferences, starts, registrations, violations, changes, replans *metric
	calls                                                                         *metric
}

func newFamilies() *families {
	f := &families{}
	old := func(to **metric, name, help, label string) {
		*to = family(gauge, name, help, "pod_name", "namespace", "node", "container_name", label)
		f.old = append(f.old, *to)
	}
	own := func(to **metric, kind kind, name, help string, labels ...string) {
		*to = family(kind, "tranche_"+name, help, labels...)
		f.own = append(f.own, *to)
	}
	ofGPU := func(to **metric, name, help string) { own(to, gauge, "gpu_"+name, help, "gpu", "uuid") }
	ofTenant := func(to **metric, kind kind, name, help string) {
		own(to, kind, "tenant_"+name, help, "namespace", "pod", "container", "gpu")
	}

	old(&f.oldBusy, "container_gpu_utilization", "GPU time used, in percent of a GPU; gpu is gpu<index> or total.", "gpu")
	old(&f.oldMemory, "container_gpu_memory_total", "GPU memory used, in MiB; gpu_memory is gpu<index> or total.", "gpu_memory")
	old(&f.oldCards, "container_request_gpu_utilization", "GPUs asked for, 0.3 being thirty hundredths of one; req_of_gpu is total.", "req_of_gpu")
	old(&f.oldAsked, "container_request_gpu_memory", "GPU memory asked for, in MiB; without a limit that of its GPUs; req_of_gpu_memory is total.", "req_of_gpu_memory")

	own(&f.info, gauge, "info", "1, with what runs on the node.", "node", "version", "commit", "driver")
	own(&f.gpuInfo, gauge, "gpu_info", "1, with what the GPU is.", "gpu", "uuid", "minor", "bus_id", "model", "numa")
	ofGPU(&f.healthy, "healthy", "1 when the GPU is shared; 0 when it is not: failed, gone, in MIG mode.")
	ofGPU(&f.freeCores, "cores_free", "Cores, which are hundredths of the GPU, that no tenant was given. Negative: more was given than there is.")
	ofGPU(&f.gpuBytes, "memory_bytes", "Memory of the GPU.")
	ofGPU(&f.freeBytes, "memory_free_bytes", "Memory that no tenant was given. Negative: more was given than there is.")
	ofGPU(&f.gpuUsed, "memory_used_bytes", "Memory in use, by anybody, as the driver says.")
	ofGPU(&f.idle, "idle", "1 when nobody was given a part of the GPU.")
	ofGPU(&f.gpuBusy, "busy_ratio", "Part of the last sample period with work running, 0 to 1. Missing while it is not known.")
	ofGPU(&f.gpuProcesses, "processes", "Processes that use the GPU, tenants' or not.")
	ofGPU(&f.gpuTenants, "tenants", "Containers with a slice of the GPU.")
	own(&f.nvlinks, gauge, "gpu_nvlinks", "NVLink connections between two GPUs, named by their index; a pair without any is missing.", "gpu", "peer")

	own(&f.tenant, gauge, "tenant_info", "1, with who the tenant is.", "namespace", "pod", "container", "pod_uid", "class", "user", "cluster")
	ofTenant(&f.cores, gauge, "cores", "Cores that the tenant is guaranteed, in hundredths of the GPU.")
	ofTenant(&f.ceiling, gauge, "cores_ceiling", "Cores that it may use while others leave time.")
	ofTenant(&f.usedCores, gauge, "cores_used", "Cores used in the last sample period.")
	ofTenant(&f.share, gauge, "cores_share", "Cores that the arbiter gives it now. Missing without an arbiter.")
	ofTenant(&f.wanted, gauge, "cores_wanted", "Part of the time with work waiting or running, in hundredths. Missing while it is not known.")
	ofTenant(&f.limit, gauge, "memory_limit_bytes", "Memory that it may use. Missing when it is not limited.")
	ofTenant(&f.used, gauge, "memory_used_bytes", "Memory that counts against the limit.")
	ofTenant(&f.overhead, gauge, "memory_overhead_bytes", "Part of the used memory that the driver took by itself. Negative: less than was charged.")
	ofTenant(&f.gpuTime, counter, "gpu_seconds_total", "GPU time used.")
	ofTenant(&f.throttled, counter, "throttled_seconds_total", "Time that launches waited for their turn, all threads together.")
	ofTenant(&f.launches, counter, "launches_total", "Kernels and graphs launched.")
	ofTenant(&f.refused, counter, "allocations_refused_total", "Allocations of memory that the limit refused.")
	ofTenant(&f.processes, gauge, "processes", "The tenant's processes on the GPU.")

	own(&f.arbiter, gauge, "arbiter_up", "1 when the arbiter answered within the last second; without it tenants hold their limits by themselves.")
	own(&f.handovers, counter, "arbiter_handovers_total", "Times a GPU went from one tenant to another.")
	own(&f.handoverP50, gauge, "arbiter_handover_p50_seconds", "How long that took lately, in half of the cases at most.")
	own(&f.handoverP99, gauge, "arbiter_handover_p99_seconds", "How long that took lately, in 99 of 100 cases at most.")

	own(&f.allocations, counter, "allocations_total", "Allocate calls of kubelet; reason is empty when granted.", "resource", "result", "reason")
	own(&f.preferences, counter, "preferences_total", "GetPreferredAllocation calls of kubelet.", "resource", "result")
	own(&f.starts, counter, "container_starts_total", "PreStartContainer calls of kubelet; reason is empty when it succeeded.", "result", "reason")
	own(&f.registrations, counter, "registrations_total", "Registrations of the device plugins with kubelet.", "resource", "result")
	own(&f.violations, counter, "violations_total", "Uses of a GPU past the slice; kind is what was seen, action what was done.", "kind", "action")
	own(&f.changes, counter, "live_changes_total", "Changes of a running tenant's limits; reason is empty when made.", "result", "reason")
	own(&f.replans, counter, "replans_total", "Pods that were not given the GPU that the scheduler had picked.", "reason")
	own(&f.calls, histogram, "call_seconds", "How long kubelet's calls took; call is Allocate, GetPreferredAllocation or PreStartContainer.", "call")
	return f
}

// collector makes the metrics of one snapshot for each scrape.
type collector struct {
	source Source
	f      *families
	old    bool
}

func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range c.f.own {
		ch <- m.desc
	}
	if c.old {
		for _, m := range c.f.old {
			ch <- m.desc
		}
	}
}

func (c *collector) Collect(ch chan<- prometheus.Metric) {
	s := c.source.Snapshot()
	e := emitter{ch: ch, seen: map[string]bool{}}
	c.collectNode(e, s)
	c.collectTenants(e, s)
	c.collectCounters(e, s)
	if c.old {
		c.collectOld(e, s)
	}
}

func (c *collector) collectNode(e emitter, s Snapshot) {
	f := c.f
	tenants := map[int]int{}
	for _, t := range s.Tenants {
		for _, p := range t.GPUs {
			tenants[p.Index]++
		}
	}
	e.value(f.info, 1, s.Node, s.Version, s.Commit, s.Driver)
	for _, g := range s.GPUs {
		id := []string{strconv.Itoa(g.Index), g.UUID}
		e.value(f.gpuInfo, 1, id[0], id[1], strconv.Itoa(g.Minor), g.BusID, g.Model, strconv.Itoa(g.NUMA))
		e.value(f.healthy, bit(g.Healthy), id...)
		e.value(f.freeCores, float64(g.FreeCores), id...)
		e.value(f.gpuBytes, float64(g.Memory), id...)
		e.value(f.freeBytes, float64(g.FreeMemory), id...)
		e.value(f.gpuUsed, float64(g.UsedMemory), id...)
		e.value(f.idle, bit(g.Idle), id...)
		e.known(f.gpuBusy, g.Busy/100, id...)
		e.value(f.gpuProcesses, float64(len(g.PIDs)), id...)
		e.value(f.gpuTenants, float64(tenants[g.Index]), id...)
		for _, l := range g.Links {
			if l.NVLinks > 0 {
				e.value(f.nvlinks, float64(l.NVLinks), strconv.Itoa(min(g.Index, l.Peer)), strconv.Itoa(max(g.Index, l.Peer)))
			}
		}
	}
	e.value(f.arbiter, bit(s.Arbiter.Alive))
	e.value(f.handovers, float64(s.Arbiter.Handovers))
	e.value(f.handoverP50, s.Arbiter.HandoverP50.Seconds())
	e.value(f.handoverP99, s.Arbiter.HandoverP99.Seconds())
}

func (c *collector) collectTenants(e emitter, s Snapshot) {
	f := c.f
	for _, t := range s.Tenants {
		e.value(f.tenant, 1, t.Namespace, t.Pod, t.Container, t.PodUID, t.Class, t.User, t.Cluster)
		for _, p := range t.GPUs {
			id := []string{t.Namespace, t.Pod, t.Container, strconv.Itoa(p.Index)}
			e.value(f.cores, float64(p.Cores), id...)
			e.value(f.ceiling, float64(p.Ceiling), id...)
			e.known(f.usedCores, p.Busy, id...)
			e.known(f.share, p.Share, id...)
			e.known(f.wanted, p.Wanted, id...)
			if p.MemoryLimit > 0 {
				e.value(f.limit, float64(p.MemoryLimit), id...)
			}
			e.value(f.used, float64(p.Memory), id...)
			e.value(f.overhead, float64(p.Overhead), id...)
			e.value(f.gpuTime, p.GPUTime.Seconds(), id...)
			e.value(f.throttled, p.Throttled.Seconds(), id...)
			e.value(f.launches, float64(p.Launches), id...)
			e.value(f.refused, float64(p.Refused), id...)
			e.value(f.processes, float64(len(p.PIDs)), id...)
		}
	}
}

func (c *collector) collectCounters(e emitter, s Snapshot) {
	f, n := c.f, s.Counters
	sums := sums{}
	for _, x := range n.Allocations {
		sums.add(f.allocations, x.N, x.Labels[:])
	}
	for _, pairs := range []struct {
		m      *metric
		counts []Count2
	}{{f.preferences, n.Preferences}, {f.starts, n.Starts}, {f.registrations, n.Registrations}, {f.violations, n.Violations}, {f.changes, n.LiveChanges}} {
		for _, x := range pairs.counts {
			sums.add(pairs.m, x.N, x.Labels[:])
		}
	}
	for _, x := range n.Replans {
		sums.add(f.replans, x.N, []string{x.Label})
	}
	for _, x := range sums {
		e.value(x.m, float64(x.n), x.labels...)
	}
	e.histogram(f.calls, s.Allocate, "Allocate")
	e.histogram(f.calls, s.Preferred, "GetPreferredAllocation")
	e.histogram(f.calls, s.PreStart, "PreStartContainer")
}

// collectOld gives gpu-manager's metrics.
func (c *collector) collectOld(e emitter, s Snapshot) {
	f := c.f
	memory := map[int]uint64{}
	for _, g := range s.GPUs {
		memory[g.Index] = g.Memory
	}
	for _, t := range s.Tenants {
		id := func(last string) []string { return []string{t.Pod, t.Namespace, s.Node, t.Container, last} }
		var busy float64
		var used uint64
		for _, p := range t.GPUs {
			gpu := id("gpu" + strconv.Itoa(p.Index))
			e.value(f.oldBusy, max(p.Busy, 0), gpu...)
			e.value(f.oldMemory, float64(p.Memory>>20), gpu...)
			busy, used = busy+max(p.Busy, 0), used+p.Memory>>20
		}
		cores, bytes := t.asked(memory)
		e.value(f.oldBusy, busy, id("total")...)
		e.value(f.oldMemory, float64(used), id("total")...)
		e.value(f.oldCards, float64(cores)/100, id("total")...)
		e.value(f.oldAsked, float64(bytes>>20), id("total")...)
	}
}

// sums adds counts with equal labels up.
type sums map[string]*sum

type sum struct {
	m      *metric
	n      uint64
	labels []string
}

func (s sums) add(m *metric, n uint64, labels []string) {
	k := key(m, labels)
	if s[k] == nil {
		s[k] = &sum{m: m, labels: labels}
	}
	s[k].n += n
}

// emitter sends samples. Of several with the same labels (a pod of the same name that is still
// being forgotten) only the first is sent: one duplicate would fail the scrape.
type emitter struct {
	ch   chan<- prometheus.Metric
	seen map[string]bool
}

func (e emitter) value(m *metric, v float64, labels ...string) {
	if !e.first(m, labels) {
		return
	}
	kind := prometheus.GaugeValue
	if m.kind == counter {
		kind = prometheus.CounterValue
	}
	e.ch <- prometheus.MustNewConstMetric(m.desc, kind, v, labels...)
}

// known sends v unless it is negative, which stands for unknown.
func (e emitter) known(m *metric, v float64, labels ...string) {
	if v >= 0 {
		e.value(m, v, labels...)
	}
}

func (e emitter) histogram(m *metric, h Histogram, labels ...string) {
	if !e.first(m, labels) {
		return
	}
	buckets := map[float64]uint64{}
	for i, bound := range latencyBounds {
		buckets[bound.Seconds()] = 0
		if i < len(h.Buckets) {
			buckets[bound.Seconds()] = h.Buckets[i]
		}
	}
	e.ch <- prometheus.MustNewConstHistogram(m.desc, h.Count, h.Sum.Seconds(), buckets, labels...)
}

// first makes the labels fit to be sent, and tells whether they were not sent before.
func (e emitter) first(m *metric, labels []string) bool {
	for i := range labels {
		labels[i] = text(labels[i])
	}
	k := key(m, labels)
	if e.seen[k] {
		return false
	}
	e.seen[k] = true
	return true
}

func key(m *metric, labels []string) string { return m.name + "\xff" + strings.Join(labels, "\xff") }

// text is s with what is not UTF-8 replaced: neither protobuf nor Prometheus takes such.
func text(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

func bit(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// scrapeTimeout bounds a scrape; a Source takes milliseconds.
const scrapeTimeout = 5 * time.Second
