// Package display shows what a node's GPUs and tenants do: gRPC GPUDisplay and its HTTP form as
// gpu-manager gave them (/graph, /usage, /version), Prometheus metrics under the old names and
// our own, health, readiness, and a page for people.
//
// It shows and never changes anything. Everything comes from one Snapshot per request, so a
// request costs no call to a driver, a kubelet or an API server, and its figures agree with each
// other.
package display

import "time"

// Source gives what is to be shown. Snapshot may be called from several goroutines at once, must
// return within milliseconds and must not wait for a driver or another process: it copies what
// its owner knows. The caller does not write to the slices of a Snapshot; neither may its owner
// after it was returned.
type Source interface {
	Snapshot() Snapshot
}

// Snapshot is the node at one moment. The zero value is a node that knows nothing yet.
type Snapshot struct {
	// Node is the node's name in the cluster.
	Node string
	// Version is that of the program; Commit is what it was built from, "" when unknown.
	Version, Commit string
	// Driver is the vendor's driver version, "" while there is none.
	Driver string
	// GPUs in the order of their Index.
	GPUs []GPU
	// Tenants in any order.
	Tenants  []Tenant
	Arbiter  Arbiter
	Counters Counters
	// Latency of the calls that kubelet makes, both resources together.
	Allocate, Preferred, PreStart Histogram
}

// GPU is one GPU of the node.
type GPU struct {
	// Index is the driver's number of the GPU, Minor the number in /dev/nvidia<minor>.
	Index, Minor int
	UUID         string
	// BusID as the driver writes it: 00000000:3B:00.0.
	BusID string
	Model string
	// Memory is all of it, in bytes; UsedMemory is what the driver says is taken, by anybody.
	Memory, UsedMemory uint64
	// FreeCores (hundredths of the GPU) and FreeMemory (bytes) can still be given to tenants.
	// Negative when more is given than there is.
	FreeCores  int
	FreeMemory int64
	// Idle: nobody has been given a part of it, so that it can be taken whole.
	Idle bool
	// Healthy, and otherwise in Reason why it is not shared: an XID, MIG, gone.
	Healthy bool
	Reason  string
	// Busy is the part of the last sample period with work running, 0 to 100; negative: unknown.
	Busy float64
	// PIDs are the host's process IDs of all that use the GPU, tenants' or not, ascending.
	PIDs []int
	// NUMA is the GPU's NUMA node, negative when it has none.
	NUMA int
	// Links to other GPUs. A pair may be listed at either end or at both.
	Links []Link
}

// Link is how near another GPU is.
type Link struct {
	// Peer is the Index of the other GPU.
	Peer  int
	Level Level
	// NVLinks is the number of NVLink connections between the two, 0 for none.
	NVLinks int
}

// Level is the nearest thing that two GPUs have in common, with NVML's numbers
// (nvmlGpuTopologyLevel_t). Larger is further.
type Level int

// The levels. LevelBoard is two GPUs of one board, which are shown as LevelSwitch, as ever.
const (
	LevelBoard    Level = 0  // one board
	LevelSwitch   Level = 10 // PIX: one PCIe switch
	LevelSwitches Level = 20 // PXB: several PCIe switches
	LevelBridge   Level = 30 // PHB: one host bridge
	LevelNode     Level = 40 // CPU: one NUMA node
	LevelSystem   Level = 50 // SYS: anything
)

// Tenant is a container with a slice.
type Tenant struct {
	Namespace, Pod, PodUID, Container string
	// Cluster is the pod's annotation clusterName, User the value of SUBMITTER in the environment
	// of its first container. Both for /usage.
	Cluster, User string
	// Class is "latency" or "normal".
	Class string
	// GPUs of the slice, one to many.
	GPUs []Part
}

// Part is a tenant's slice of one GPU, and what it made of it.
type Part struct {
	// Index and BusID of the GPU.
	Index int
	BusID string
	// Cores are guaranteed and Ceiling may be used while others leave time, both in hundredths of
	// the GPU. Ceiling is at least Cores.
	Cores, Ceiling int
	// MemoryLimit in bytes; 0: not limited.
	MemoryLimit uint64
	// Memory in bytes that counts against the limit. Overhead is the part of it that the driver
	// took by itself (contexts, modules) beyond what was charged; negative: less than charged.
	Memory   uint64
	Overhead int64
	// Busy is GPU time used in the last sample period, in hundredths of the GPU.
	Busy float64
	// Share is what the arbiter gives now, and Wanted the part of the time with work waiting or
	// running, both in hundredths of the GPU; negative: not known.
	Share, Wanted float64
	// Since the container began: GPU time; time that launches waited for their turn, all threads
	// together; launches; allocations of memory that were refused.
	GPUTime, Throttled time.Duration
	Launches, Refused  uint64
	// PIDs are the host's process IDs of the tenant on this GPU, ascending.
	PIDs []int
}

// Arbiter is who divides GPU time among the tenants.
type Arbiter struct {
	// Alive: it answered within the last second.
	Alive bool
	// Handovers is how often a GPU went from one tenant to another; HandoverP50 and HandoverP99
	// are how long that took lately.
	Handovers                uint64
	HandoverP50, HandoverP99 time.Duration
}

// Counters count since the program began. What has the same labels is added up. The texts are of
// small fixed sets, since each makes a time series of its own.
type Counters struct {
	// Allocations by resource, by result ("granted", "refused") and, where refused, by reason.
	Allocations []Count3
	// Preferences are calls of GetPreferredAllocation, by resource and by result.
	Preferences []Count2
	// Starts are calls of PreStartContainer, by result and reason.
	Starts []Count2
	// Registrations with kubelet, by resource and result.
	Registrations []Count2
	// Violations by kind ("unregistered", "memory"), and by what was done ("reported", "ended").
	Violations []Count2
	// LiveChanges of a running tenant's limits, by result and reason.
	LiveChanges []Count2
	// Replans are pods that were not given the GPU which the scheduler had picked, by reason.
	Replans []Count1
}

// Count1, Count2 and Count3 are counts with so many labels.
type (
	Count1 struct {
		Label string
		N     uint64
	}
	Count2 struct {
		Labels [2]string
		N      uint64
	}
	Count3 struct {
		Labels [3]string
		N      uint64
	}
)
