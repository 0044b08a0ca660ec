// Package podspec reads what a pod asks of GPUs and where it was reserved, and names everything that
// pods, nodes and Tranche tell each other through Kubernetes objects: resources and annotations. Node,
// scheduler and webhook use it, so that there is one reading of a pod. Pure: no I/O.
package podspec

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/quantity"
)

const (
	// DomainDefault is the originals' resource domain.
	DomainDefault = "tencent.com"
	// UnitDefault is one unit of the memory resource in bytes.
	UnitDefault = 256 << 20
	// CoresWhole is one GPU in units of the core resource.
	CoresWhole = placement.CoresWhole
	// MaxGPUs is the most GPUs that one container can have: as many as a limits page has room for.
	MaxGPUs = 16
)

// Annotations of ours. Those that a user sets hold for all containers of the pod; with `.NAME` behind
// the key they hold for the container NAME and win over the pod's.
const (
	// GPUCount: the container's cores and memory are totals, divided evenly over so many GPUs.
	GPUCount = "tranche.dev/gpu-count"
	// CoreLimit is Names.CoreLimit for one container: the burst ceiling in hundredths of each GPU.
	CoreLimit = "tranche.dev/core-limit"
	// Class is ClassNormal or ClassLatency.
	Class = "tranche.dev/class"
	// Weight, 1 to 1000, divides time that nobody is guaranteed. Default: the cores.
	Weight = "tranche.dev/weight"
	// Policy is how the pod is placed: least-fragmentation, binpack, spread or topology. Pod only.
	Policy = "tranche.dev/policy"
	// Models and UUIDs are comma lists of what is allowed, NotModels and NotUUIDs of what is not. A model
	// is a whole product name or a part of one between its separators, in any case: A100, A100-SXM4-80GB.
	Models    = "tranche.dev/gpu-model"
	NotModels = "tranche.dev/gpu-model-not"
	UUIDs     = "tranche.dev/gpu-uuid"
	NotUUIDs  = "tranche.dev/gpu-uuid-not"
	// Apart and Together are groups of containers that must not, or must, share GPUs: `a,b;c,d`, or `*`
	// for all. Pod only.
	Apart    = "tranche.dev/apart"
	Together = "tranche.dev/together"
	// Cores and Memory change the limits of a running container: cores in units of the core resource,
	// memory as a quantity (8Gi), both over all of the container's GPUs.
	Cores  = "tranche.dev/cores"
	Memory = "tranche.dev/memory"
)

// Annotations that Tranche writes on pods and nodes.
const (
	// GPUs is where the pod's containers are or shall be: a JSON object from a container's name to the
	// UUIDs of its GPUs. The scheduler reserves with it, the node confirms.
	GPUs = "tranche.dev/gpus"
	// Inventory is what a node publishes, on the Node object (package inventory).
	Inventory = "tranche.dev/inventory"
)

// Classes of containers: those of the latency class go before the others, within their limits.
const (
	ClassNormal  = "normal"
	ClassLatency = "latency"
)

// Names are the names that depend on the cluster's configuration.
type Names struct {
	// Domain of the two resources and of the originals' annotations.
	Domain string
	// Unit is one unit of the memory resource in bytes.
	Unit quantity.Bytes
}

// DefaultNames are those of the originals.
func DefaultNames() Names { return Names{Domain: DomainDefault, Unit: UnitDefault} }

// Validate says what is wrong with the names.
func (n Names) Validate() error {
	if problems := validation.IsDNS1123Subdomain(n.Domain); len(problems) > 0 {
		return fmt.Errorf("resource domain %q: %s", n.Domain, strings.Join(problems, "; "))
	}
	if n.Unit < 1<<20 || n.Unit > 1<<40 {
		return fmt.Errorf("memory unit %v: must be 1 MiB to 1 TiB", n.Unit)
	}
	return nil
}

// Core is the resource of compute, CoresWhole units a GPU.
func (n Names) Core() string { return n.Domain + "/vcuda-core" }

// Memory is the resource of GPU memory.
func (n Names) Memory() string { return n.Domain + "/vcuda-memory" }

// CoreLimit is the originals' annotation for the burst ceiling of a pod's containers.
func (n Names) CoreLimit() string { return n.Domain + "/vcuda-core-limit" }

// Device is an annotation of a container for its runtime: a comma list of device nodes.
func (n Names) Device() string { return n.Domain + "/vcuda-device" }

// PredicateNode, PredicateTime (ns since 1970) and GPUIndex say where the originals' scheduler put a
// pod; GPUAssigned is "false" from then on and "true" once the node did it.
func (n Names) PredicateNode() string { return n.Domain + "/predicate-node" }

// PredicateTime is described at PredicateNode.
func (n Names) PredicateTime() string { return n.Domain + "/predicate-time" }

// GPUIndex is described at PredicateNode; container counts the pod's containers without init containers.
func (n Names) GPUIndex(container int) string {
	return fmt.Sprintf("%s/predicate-gpu-idx-%d", n.Domain, container)
}

// GPUAssigned is described at PredicateNode.
func (n Names) GPUAssigned() string { return n.Domain + "/gpu-assigned" }
