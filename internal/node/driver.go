package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	plugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"tranche.dev/tranche/internal/assets"
	"tranche.dev/tranche/internal/driverview"
	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/node/books"
	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/quantity"
	"tranche.dev/tranche/internal/simroot"
)

// host finds and lays out the driver, and asks it.
type host struct {
	// builders look for the driver, one after the other, each below another root.
	builders []*driverview.Builder
	probe    string
	// sim is the simulated machine; nil with a real driver.
	sim *simroot.Sim

	mu      sync.Mutex
	builder *driverview.Builder // that found it
	set     *driverview.Set     // nil: no driver
	nvml    gpu.NVML
}

func openHost(c Config) (*host, error) {
	h := &host{}
	var err error
	if h.probe, err = assets.Path(assets.NVMLProbe); err != nil {
		return nil, err
	}
	view := driverview.Config{Base: c.ViewDir}
	roots := []string{c.HostRoot}
	for i := len(c.DriverRoots) - 1; i >= 0; i-- {
		roots = append([]string{filepath.Join(c.HostRoot, c.DriverRoots[i])}, roots...)
	}
	if c.Sim != "" {
		if h.sim, err = simroot.Make(c.SimDir, c.Sim); err != nil {
			return nil, err
		}
		roots = []string{h.sim.Root}
	}
	if c.VolumeConfig != "" {
		data, err := os.ReadFile(c.VolumeConfig)
		if err != nil {
			return nil, err
		}
		if view.Volumes, err = driverview.ParseVolumes(data); err != nil {
			return nil, fmt.Errorf("%s: %w", c.VolumeConfig, err)
		}
	}
	for _, root := range roots {
		view.Root = driverview.Root{Dir: root}
		b, err := driverview.New(view)
		if err != nil {
			return nil, err
		}
		h.builders = append(h.builders, b)
	}
	return h, nil
}

// build finds the driver in the first root that has one.
func (h *host) build() (b *driverview.Builder, set *driverview.Set, err error) {
	for _, b = range h.builders {
		var none *driverview.NoDriverError
		if set, err = b.Build(); !errors.As(err, &none) {
			return b, set, err
		}
	}
	return b, set, err
}

// collect removes driver views that are not in use.
func (h *host) collect(inUse []string) ([]string, error) {
	h.mu.Lock()
	b := h.builder
	h.mu.Unlock()
	if b == nil {
		return nil, nil
	}
	return b.GC(inUse)
}

// Open implements gpu.WatcherConfig.Open: the driver as it is now.
func (h *host) Open() (gpu.Prober, error) {
	b, set, err := h.build()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.builder, h.set = b, set
	if err != nil {
		h.set = nil
		p := gpu.Problem{Reason: gpu.NoAnswer, Text: err.Error()}
		var none *driverview.NoDriverError
		var mismatch *driverview.MismatchError
		switch {
		case errors.As(err, &none):
			p.Reason = gpu.NoDriver
		case errors.As(err, &mismatch):
			p.Reason = gpu.Mismatch
		}
		return nil, &gpu.ProblemError{Problem: p}
	}
	h.nvml = gpu.NVML{Probe: h.probe, Library: set.NVML}
	return h.nvml, nil
}

// views are those of the driver that is there; false: none is.
func (h *host) views() (*driverview.Set, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.set, h.set != nil
}

var errNoDriver = errors.New("no driver")

func (h *host) driver() (gpu.NVML, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.set == nil {
		return gpu.NVML{}, errNoDriver
	}
	return h.nvml, nil
}

// Devices, Watch and WatchUse implement gpu.Driver over whichever driver is there.
func (h *host) Devices(ctx context.Context) (gpu.Report, error) {
	d, err := h.driver()
	if err != nil {
		return gpu.Report{}, err
	}
	return d.Devices(ctx)
}

// Watch is described at Devices.
func (h *host) Watch(ctx context.Context, every time.Duration, f func(gpu.Report)) error {
	d, err := h.driver()
	if err != nil {
		return err
	}
	return d.Watch(ctx, every, f)
}

// WatchUse is described at Devices.
func (h *host) WatchUse(ctx context.Context, every time.Duration, f func(gpu.Report)) error {
	d, err := h.driver()
	if err != nil {
		return err
	}
	return d.WatchUse(ctx, every, f)
}

// deviceNodes are the device nodes of a container with these GPUs, as it sees them and as the host does.
func (h *host) deviceNodes(root string, minors []int, extra []string) ([]*plugin.DeviceSpec, error) {
	prefix := ""
	if h.sim != nil {
		root, prefix = h.sim.Root, h.sim.Root
	}
	var out []*plugin.DeviceSpec
	add := func(path string, must bool) error {
		if _, err := os.Stat(filepath.Join(root, path)); err != nil {
			if must {
				return fmt.Errorf("device node: %w", err)
			}
			return nil
		}
		out = append(out, &plugin.DeviceSpec{ContainerPath: path, HostPath: prefix + path, Permissions: "rwm"})
		return nil
	}
	for _, m := range minors {
		if err := add(fmt.Sprintf("/dev/nvidia%d", m), true); err != nil {
			return nil, err
		}
	}
	for _, path := range []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"} {
		if err := add(path, false); err != nil {
			return nil, err
		}
	}
	for _, path := range extra {
		out = append(out, &plugin.DeviceSpec{ContainerPath: path, HostPath: path, Permissions: "rwm"})
	}
	return out, nil
}

// watchGPUs keeps books, plugins and the rest up to date with what GPUs there are.
func (n *Node) watchGPUs(ctx context.Context) error {
	xids, err := gpu.ParseXIDs(strings.Join(n.config.HealthIgnore, ","), "")
	if err != nil {
		return err
	}
	known := n.recallFaults()
	w, err := gpu.NewWatcher(gpu.WatcherConfig{Open: n.host.Open, XIDs: xids, Now: n.config.Now, Log: n.log,
		Known: known.Faults, KnownDriver: known.Driver, Remember: n.rememberFaults})
	if err != nil {
		return err
	}
	n.run(func() { w.Watch(ctx, n.tookInventory) })
	return nil
}

// tookInventory takes a new inventory in.
func (n *Node) tookInventory(inv gpu.Inventory) {
	n.mu.Lock()
	before := n.inventory
	n.inventory = inv
	n.setGPUs()
	n.mu.Unlock()
	n.offer()
	n.tellUnit(before, inv)
	n.tellProblem(before.Problem, inv.Problem)
	n.tellHealth(before, inv)
	n.firstInventory.Do(func() { close(n.seen) })
	n.publish()
}

// tellUnit warns of new GPUs with less memory than one unit of the memory resource: they offer none of it.
func (n *Node) tellUnit(before, inv gpu.Inventory) {
	for _, g := range inv.GPUs {
		if g.Memory > 0 && g.Memory < uint64(n.config.MemoryUnit) && before.Find(g.UUID) == nil {
			n.log.Warn("a GPU has less memory than one unit of "+n.names.Memory()+": none of it can be asked for; use a smaller --memory-unit",
				"gpu", g.UUID, "memory", quantity.Bytes(g.Memory), "unit", n.config.MemoryUnit)
		}
	}
}

// setGPUs gives the books the GPUs as they are. The lock is held.
func (n *Node) setGPUs() {
	n.foreign = n.others()
	gpus := make([]books.GPU, len(n.inventory.GPUs))
	for i, g := range n.inventory.GPUs {
		gpus[i] = books.GPU{UUID: g.UUID, Index: g.Index, Minor: g.Minor, Model: g.Name, Bytes: g.Memory,
			Units: int(g.Memory / uint64(n.config.MemoryUnit)), Closed: closed(g), Foreign: n.foreign[g.UUID]}
		if gpus[i].Closed == "" && n.foreignPods[g.UUID] {
			gpus[i].Closed = "used by pods of another device plugin"
		}
	}
	var links placement.Links
	if len(n.inventory.Links) == len(gpus) {
		links = make(placement.Links, len(gpus))
		for i := range links {
			links[i] = make([]placement.Link, len(gpus))
			for j := range links[i] {
				links[i][j] = placementLink(n.inventory.Links.At(i, j))
			}
		}
	}
	n.books.SetGPUs(gpus, links)
}

func closed(g gpu.GPU) string {
	switch {
	case g.Excluded != "":
		return g.Excluded
	case !g.State.Healthy:
		return "unhealthy"
	}
	return ""
}

// offer tells kubelet the IDs. A GPU that is never shared has none.
func (n *Node) offer() {
	n.offering.Lock()
	defer n.offering.Unlock()
	n.mu.Lock()
	now := []offered{}
	var ids [2][][]string
	for _, g := range n.books.GPUs() {
		known := n.inventory.Find(g.UUID)
		if known == nil || known.Excluded != "" {
			continue
		}
		o := offered{uuid: g.UUID, units: g.Units, health: plugin.Healthy, numa: -1}
		if g.Closed != "" {
			o.health = plugin.Unhealthy
		}
		if n.config.TopologyHints {
			o.numa = known.NUMA
		}
		now = append(now, o)
		for _, res := range []books.Resource{books.Core, books.Memory} {
			ids[res] = append(ids[res], n.books.IDs(g.UUID, res))
		}
	}
	n.mu.Unlock()
	if n.offered != nil && slices.Equal(n.offered, now) {
		return
	}
	n.offered = now
	for res, p := range n.plugins {
		if p != nil {
			p.SetDevices(devices(now, ids[res]))
		}
	}
}

// offered is what kubelet was told of a GPU's devices; nothing else of them changes.
type offered struct {
	uuid   string
	units  int
	health string
	numa   int // negative: not told
}

func devices(gpus []offered, ids [][]string) []*plugin.Device {
	var out []*plugin.Device
	for i, g := range gpus {
		var topology *plugin.TopologyInfo
		if g.numa >= 0 {
			topology = &plugin.TopologyInfo{Nodes: []*plugin.NUMANode{{ID: int64(g.numa)}}}
		}
		for _, id := range ids[i] {
			out = append(out, &plugin.Device{ID: id, Health: g.health, Topology: topology})
		}
	}
	return out
}
