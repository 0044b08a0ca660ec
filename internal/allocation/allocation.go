// Package allocation keeps the allocations of one node: for each container with a slice a directory that the
// container sees, with its limits page and its ledger (include/tranche_abi.h), and a record of whose it is.
// It looks after all of them from one process: what dead processes held, what the ledger cannot see, the
// arbiter. It never decides who gets what, knows nothing of Kubernetes, and trusts nothing in a ledger.
//
// Invariants
//   - A directory under its own name is whole: limits, ledger and record of one binding, or reserved only.
//   - A binding has a ledger of its own. An earlier one stays beside it until no process of it lives.
//   - Limits change in place, under one writer; a container that runs sees them at its next launch.
package allocation

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"tranche.dev/tranche/internal/tenant"
)

// GPU is what an allocation has of one GPU. The order within an allocation is that of the container's devices.
type GPU struct {
	UUID  string `json:"uuid"`
	Index int    `json:"index"` // as NVML counts, when the allocation was bound
	Minor int    `json:"minor"` // of /dev/nvidiaN, then
	Name  string `json:"name"`
	// Cores in hundredths of the GPU, 1 to 100: guaranteed, and the limit where CoresLimited, unless Ceiling,
	// Cores to 100, is higher; 0: as Cores. MemoryOnly: it asked for memory alone, and is guaranteed nothing of the one core
	// that a library needs to be told.
	Cores        int  `json:"cores"`
	MemoryOnly   bool `json:"memory_only"`
	Ceiling      int  `json:"ceiling,omitempty"`
	CoresLimited bool `json:"cores_limited"`
	// Memory in bytes: the limit where MemoryLimited, else what the container is shown.
	Memory        uint64 `json:"memory"`
	MemoryLimited bool   `json:"memory_limited"`
	// ContextBytes is charged for a process's context until it is measured (gpu.ContextBytes).
	ContextBytes uint64 `json:"context_bytes"`
	// Latency class, and weight, 1 to 1000, where time that nobody is guaranteed is divided; 0: as Cores.
	Latency bool `json:"latency,omitempty"`
	Weight  int  `json:"weight,omitempty"`
}

// Guaranteed is what of the GPU's compute nobody else is given, in hundredths.
func (g GPU) Guaranteed() int {
	if g.MemoryOnly {
		return 0
	}
	return g.Cores
}

// UnmarshalJSON reads records of before MemoryOnly as well: memory alone was one core with a ceiling of 100 there.
func (g *GPU) UnmarshalJSON(data []byte) error {
	type plain GPU
	var p struct {
		plain
		MemoryOnly *bool `json:"memory_only"`
	}
	if err := json.Unmarshal(data, &p); err != nil {
		return err
	}
	*g = GPU(p.plain)
	if g.MemoryOnly = g.Cores == 1 && g.Ceiling == 100; p.MemoryOnly != nil {
		g.MemoryOnly = *p.MemoryOnly
	}
	return nil
}

// Owner is the container that an allocation is bound to.
type Owner struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	UID       string `json:"uid"` // the pod's
	Container string `json:"container"`
}

func (o Owner) String() string { return o.Namespace + "/" + o.Pod + "/" + o.Container }

// Record is what is known of an allocation.
type Record struct {
	ID string `json:"id"`
	// Serial grows with each binding of the allocation; 0: it is only reserved, and Owner and GPUs are empty.
	Serial uint64    `json:"serial"`
	Owner  Owner     `json:"owner"`
	GPUs   []GPU     `json:"gpus"`
	Bound  time.Time `json:"bound"`
	// Changes counts live changes since then.
	Changes uint64 `json:"changes,omitempty"`
	// Problem is why an allocation that was bound is not any more: its files are damaged. The next Bind
	// mends it.
	Problem string `json:"-"`
}

// IsBound tells whether the allocation belongs to a container.
func (r Record) IsBound() bool { return r.Serial > 0 && r.Problem == "" }

var idPattern = regexp.MustCompile(`^[0-9a-f]{32}$`)

// IDOf names the allocation of a set of device IDs, whatever their order: 32 hexadecimal digits.
func IDOf(devices []string) string {
	sorted := slices.Clone(devices)
	slices.Sort(sorted)
	sum := sha256.Sum256([]byte(strings.Join(slices.Compact(sorted), "\x00")))
	return hex.EncodeToString(sum[:16])
}

// Mount is a mount of a container.
type Mount struct {
	Host, Container string
	ReadOnly        bool
}

// Mounts are those of an allocation's container: its directory, and over it the ledger, the one file there
// that the container may write. The paths stay the same over all bindings.
func (s *Store) Mounts(id string) []Mount {
	dir := filepath.Join(s.config.HostDir, id)
	return []Mount{
		{Host: dir, Container: tenant.DirDefault, ReadOnly: true},
		{Host: filepath.Join(dir, tenant.FileLedger), Container: filepath.Join(tenant.DirDefault, tenant.FileLedger)},
	}
}

const (
	memoryMax = 1 << 46
	textMax   = 256
)

// check says what cannot be in a binding.
func check(owner Owner, gpus []GPU) error {
	for _, text := range []string{owner.Namespace, owner.Pod, owner.UID, owner.Container} {
		if text == "" || len(text) > textMax {
			return fmt.Errorf("owner %q: a name is missing, or longer than %d characters", owner, textMax)
		}
	}
	return checkGPUs(gpus)
}

func checkGPUs(gpus []GPU) error {
	if len(gpus) < 1 || len(gpus) > tenant.MaxDevices {
		return fmt.Errorf("%d GPUs in an allocation; 1 to %d can be", len(gpus), tenant.MaxDevices)
	}
	seen := map[string]bool{}
	for _, g := range gpus {
		if g.UUID == "" || len(g.UUID) > 47 || seen[g.UUID] {
			return fmt.Errorf("GPU %q: no UUID, too long a one, or twice in the allocation", g.UUID)
		}
		seen[g.UUID] = true
		if err := g.check(); err != nil {
			return fmt.Errorf("GPU %s: %w", g.UUID, err)
		}
	}
	return nil
}

func (g GPU) check() error {
	switch {
	case g.Cores < 1 || g.Cores > 100:
		return fmt.Errorf("%d cores; 1 to 100 can be", g.Cores)
	case g.MemoryOnly && g.Cores != 1:
		return fmt.Errorf("%d cores for memory alone; 1 must be", g.Cores)
	case g.Ceiling != 0 && (g.Ceiling < g.Cores || g.Ceiling > 100):
		return fmt.Errorf("a ceiling of %d cores over %d; it can be up to 100", g.Ceiling, g.Cores)
	case g.Memory > memoryMax || g.MemoryLimited && g.Memory == 0:
		return fmt.Errorf("a memory limit of %d bytes", g.Memory)
	case g.Weight < 0 || g.Weight > 1000:
		return fmt.Errorf("a weight of %d; 1 to 1000 can be, or 0 for that of the cores", g.Weight)
	case len(g.Name) > textMax:
		return fmt.Errorf("a name of %d characters", len(g.Name))
	}
	return nil
}

// devices are the entries of the limits page.
func devices(gpus []GPU) []tenant.Device {
	out := make([]tenant.Device, len(gpus))
	for i, g := range gpus {
		out[i] = tenant.Device{UUID: g.UUID, MemoryLimit: g.Memory, MemoryLimited: g.MemoryLimited, ContextBytes: g.ContextBytes,
			Cores: g.Cores, CoresCeiling: max(g.Cores, g.Ceiling), CoresLimited: g.CoresLimited, Latency: g.Latency, Weight: g.Weight}
	}
	return out
}
