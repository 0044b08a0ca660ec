package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"tranche.dev/tranche/internal/allocation"
	"tranche.dev/tranche/internal/deviceplugin"
	"tranche.dev/tranche/internal/display"
	"tranche.dev/tranche/internal/driverview"
	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/kubelet"
	"tranche.dev/tranche/internal/node/books"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/state"
)

// Node is one node's. It is made by New and lives as long as Run.
type Node struct {
	config Config
	names  podspec.Names
	log    *slog.Logger
	extra  []string // device nodes that each container gets
	stats  *stats

	host    *host
	store   *allocation.Store
	table   *podTable
	cluster *cluster // nil: no API server
	held    *kubelet.PodResources
	pods    podSource // nil: nobody tells
	plugins [2]*deviceplugin.Plugin
	// offered is what kubelet was told last.
	offering sync.Mutex
	offered  []offered
	arbiter  *allocation.Arbiter // under mu until Run ends
	warnings sync.Map            // of the store's, the last by allocation

	// calling lets one of kubelet's calls, or the tending of allocations, run at a time. Before mu.
	calling sync.Mutex
	over    bool // the node has ended: a call that was broken off must not touch the store any more; under calling

	mu          sync.Mutex
	books       *books.Books
	inventory   gpu.Inventory
	foreign     map[string]books.Amount // by GPU, what others use
	foreignPods map[string]bool         // GPUs that pods of other device plugins have
	foreignUse  map[string]int          // by GPU, units of memory that processes of no tenant hold
	imported    []imported
	lastHeld    []books.Held      // by the last node's checkpoint, until the books are open
	minors      map[string][]int  // by name of the IDs, the device nodes that their container got
	views       map[string]string // by allocation, the driver view that its container has
	report      gpu.Report        // the driver's newest
	registered  [2]bool
	listed      bool              // pods were listed once
	opened      bool              // the books were opened with what kubelet holds
	refusals    map[string]string // live changes that were refused, by container
	published   string            // what was published last
	publishedAt time.Time

	running        sync.WaitGroup
	firstInventory sync.Once
	seen           chan struct{} // closed at the first inventory
	dirty          chan struct{} // the checkpoint is to be written
	tendNow        chan struct{}
}

// New checks the configuration and opens what has to be there from the start: directories, the
// simulated machine. Everything else may come later.
func New(c Config) (*Node, error) {
	if err := c.complete(); err != nil {
		return nil, err
	}
	n := &Node{config: c, log: c.Log, names: podspec.Names{Domain: c.ResourceDomain, Unit: c.MemoryUnit}, stats: newStats(),
		books: books.New(c.MemoryUnit, c.WholeOnly), foreign: map[string]books.Amount{}, foreignPods: map[string]bool{}, foreignUse: map[string]int{},
		minors: map[string][]int{}, views: map[string]string{}, refusals: map[string]string{},
		seen: make(chan struct{}), dirty: make(chan struct{}, 1), tendNow: make(chan struct{}, 1)}
	if err := n.names.Validate(); err != nil {
		return nil, err
	}
	n.table = newPodTable(n.names)
	if err := n.readExtra(); err != nil {
		return nil, err
	}
	var err error
	if n.host, err = openHost(c); err != nil {
		return nil, err
	}
	if sim := n.host.sim; sim != nil && sim.NoDevices != nil {
		n.log.Warn("containers cannot get the simulated GPUs", "error", sim.NoDevices)
	}
	if n.store, err = allocation.Open(allocation.Config{Dir: c.AllocationDir, Now: c.Now}); err != nil {
		return nil, err
	}
	return n, nil
}

func (n *Node) readExtra() error {
	if n.config.ExtraConfig == "" {
		return nil
	}
	data, err := os.ReadFile(n.config.ExtraConfig)
	if err != nil {
		return err
	}
	if n.extra, err = driverview.ParseExtraConfig(data); err != nil {
		return fmt.Errorf("%s: %w", n.config.ExtraConfig, err)
	}
	return nil
}

// gcPercent trades processor time, of which little is used, for memory, which the node takes on every machine.
const gcPercent = 80

// run starts a goroutine that Run waits for.
func (n *Node) run(f func()) { n.running.Go(f) }

// Run is the node's life. It returns when ctx ends, or with what makes it impossible to go on; tenants
// keep their limits either way.
func (n *Node) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer n.stop()
	defer n.running.Wait()
	defer cancel(nil)
	debug.SetGCPercent(gcPercent)
	for _, p := range n.store.Problems() {
		n.log.Warn("set aside", "path", p.Path, "reason", p.Reason)
	}
	if n.store.OnDisk() {
		n.log.Warn("allocations lie on a disk, which can hold up launches; mount a tmpfs there", "path", n.config.AllocationDir)
	}
	n.recall()
	if err := n.openKubernetes(ctx); err != nil {
		return err
	}
	if err := n.serveDisplay(ctx, cancel); err != nil {
		return err
	}
	if err := n.watchGPUs(ctx); err != nil {
		return err
	}
	n.run(func() { n.saving(ctx) })
	n.run(func() { n.serve(ctx, cancel) })
	<-ctx.Done()
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// stop gives back what Run opened.
func (n *Node) stop() {
	if n.arbiter != nil {
		n.arbiter.Stop()
	}
	for _, p := range n.plugins {
		if p != nil {
			p.Close()
		}
	}
	n.calling.Lock()
	n.over = true
	n.calling.Unlock()
	if n.held != nil {
		_ = n.held.Close()
	}
	if n.pods != nil {
		_ = n.pods.Close()
	}
	n.store.Close()
}

// openKubernetes connects to kubelet and to the API server, neither of which has to be there now.
func (n *Node) openKubernetes(ctx context.Context) error {
	if n.config.Standalone {
		return nil
	}
	var err error
	n.cluster, err = openCluster(n.config, func(what string, err error) { n.log.Info("not written to the API server", "what", what, "error", err) })
	if err != nil {
		n.log.Warn("no API server: no events, labels, inventory", "error", err)
	}
	if n.cluster != nil {
		n.run(func() { n.cluster.run(ctx) })
	}
	if n.held, err = kubelet.NewPodResources(n.config.PodResourcesSocket); err != nil {
		return err
	}
	if err := n.openPods(ctx); err != nil {
		return err
	}
	for res, name := range []string{n.names.Core(), n.names.Memory()} {
		endpoint := [2]string{coreSocket, memorySocket}[res]
		n.plugins[res], err = deviceplugin.New(deviceplugin.Config{Dir: n.config.DevicePluginDir, Endpoint: endpoint, Resource: name,
			Allocator: calls{node: n, res: books.Resource(res)}})
		if err != nil {
			return err
		}
	}
	return nil
}

// patience is how long a first look at the GPUs may take before kubelet is told that there are none.
const patience = 10 * time.Second

// serve begins with kubelet once it is known what there is, so that kubelet does not take its pods' devices
// for lost.
func (n *Node) serve(ctx context.Context, failed context.CancelCauseFunc) {
	select {
	case <-ctx.Done():
		return
	case <-n.seen:
	case <-time.After(patience):
		n.log.Warn("the driver does not answer; there are no GPUs until it does")
	}
	n.reopen(ctx)
	n.offer() // GPUs that others have are closed by now
	if err := n.startArbiter(); err != nil {
		failed(err)
		return
	}
	n.run(func() { n.supervise(ctx) })
	if !n.config.Standalone {
		n.run(func() { n.register(ctx, books.Core) })
		n.run(func() { n.register(ctx, books.Memory) })
		n.run(func() { n.remind(ctx) })
	}
	n.run(func() { n.tend(ctx) })
	n.config.Started()
}

// reopen asks kubelet for all that it knows. Where it does not answer yet, tend asks again.
func (n *Node) reopen(ctx context.Context) {
	if err := n.refreshPods(ctx); err != nil {
		n.log.Warn("pods are not known yet", "error", err)
	}
	if n.held == nil {
		return
	}
	if err := n.refreshHeld(ctx); err != nil {
		n.log.Warn("it is not known yet what pods hold", "error", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, r := range n.store.List() {
		for _, g := range r.GPUs {
			if !n.opened {
				n.books.Presume(g.UUID, n.amount(g))
			}
		}
	}
}

// open builds the books from what kubelet holds and what the allocations say, once both lists of kubelet's are there.
// False: they are not. The lock is held.
func (n *Node) open(held []books.Held) bool {
	if n.pods != nil && !n.listed || len(held) == 0 && n.someHold() {
		return false
	}
	n.opened = true
	n.books.Open(held)
	for _, h := range n.recalled() {
		n.books.Recall(h)
	}
	for _, r := range n.store.List() {
		if r.IsBound() && len(r.GPUs) > 0 {
			uuids := make([]string, len(r.GPUs))
			for i, g := range r.GPUs {
				uuids[i] = g.UUID
			}
			n.books.Bound(r.Owner.UID, r.Owner.Namespace, r.Owner.Pod, r.Owner.Container, uuids, n.amount(r.GPUs[0]))
		}
	}
	return true
}

// someHold tells whether a pod that lives has an allocation, so that kubelet must hold something.
func (n *Node) someHold() bool {
	return slices.ContainsFunc(n.store.List(), func(r allocation.Record) bool { return r.IsBound() && n.table.lives(r.Owner.UID) })
}

// podsKnown tells whether pods that are not listed are gone. The lock is held.
func (n *Node) podsKnown() bool { return n.opened && n.pods != nil }

// amount is what an allocation has of a GPU, as the books count.
func (n *Node) amount(g allocation.GPU) books.Amount {
	a := books.Amount{Cores: g.Guaranteed()}
	if g.MemoryLimited {
		a.Units = n.units(g.Memory)
	}
	return a
}

func (n *Node) startArbiter() error {
	root, shared := "/dev/shm/tranche", true
	if sim := n.host.sim; sim != nil {
		root, shared = filepath.Join(sim.Machine, "slices"), false
	}
	registry, err := state.Open(root, shared)
	if err != nil {
		n.log.Warn("slices of `tranche run` are not served", "error", err)
		registry = nil
	}
	a, err := allocation.StartArbiter(allocation.ArbiterConfig{Store: n.store, Registry: registry, Driver: n.host, Warn: n.warnAllocation})
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.arbiter = a
	return nil
}

// warnAllocation tells what is wrong with an allocation, or with the driver, once: it is found again every second.
func (n *Node) warnAllocation(id string, err error) {
	if last, _ := n.warnings.Swap(id, err.Error()); last != err.Error() {
		n.log.Warn("looking after allocations", "id", id, "error", err)
	}
}

// remind tells when the first registration takes too long.
func (n *Node) remind(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-time.After(n.config.WaitTimeout):
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.known() {
		n.log.Warn("not registered with kubelet yet; is this its directory of device plugins?", "directory", n.config.DevicePluginDir, "after", n.config.WaitTimeout)
	}
}

// register keeps one of our plugins known to kubelet, whatever becomes of it. Each has a watch of its own: kubelet
// takes a second registration of a plugin that it has ill.
func (n *Node) register(ctx context.Context, res books.Resource) {
	for wait := newBackoff(); ctx.Err() == nil; wait.sleep(ctx) {
		err := kubelet.WatchSockets(ctx, n.config.DevicePluginDir, n.plugins[res].Endpoint, func(ctx context.Context) error { return n.registerOne(ctx, res) })
		if ctx.Err() == nil {
			n.log.Warn("kubelet's directory of device plugins cannot be watched", "error", err)
		}
	}
}

func (n *Node) registerOne(ctx context.Context, res books.Resource) error {
	p := n.plugins[res]
	err := p.Listen()
	if err == nil {
		err = kubelet.Register(ctx, n.config.DevicePluginDir, p.Endpoint(), p.Resource(), p.Options())
	}
	n.stats.registered(p.Resource(), err)
	n.mu.Lock()
	n.registered[res] = err == nil
	n.mu.Unlock()
	if err != nil {
		p.Move()
		n.log.Warn("not registered with kubelet", "resource", p.Resource(), "error", err)
		return err
	}
	n.log.Info("registered with kubelet", "resource", p.Resource())
	n.mu.Lock()
	n.books.Restarted()
	n.mu.Unlock()
	n.hurry()
	return nil
}

// known tells whether kubelet knows both plugins. The lock is held.
func (n *Node) known() bool { return n.registered[books.Core] && n.registered[books.Memory] }

// serveDisplay answers on HTTP and gRPC.
func (n *Node) serveDisplay(ctx context.Context, failed context.CancelCauseFunc) error {
	server, err := display.New(display.Config{Source: n, Health: n.health, Ready: n.ready, NewNamesOnly: n.config.NewNamesOnly, Log: n.log})
	if err != nil {
		return err
	}
	var web net.Listener
	if n.config.QueryPort > 0 {
		if web, err = net.Listen("tcp", net.JoinHostPort(n.config.QueryAddr, strconv.Itoa(n.config.QueryPort))); err != nil {
			return err
		}
	}
	socket, err := n.displaySocket()
	if err != nil {
		n.log.Warn("nothing is served on the display's socket; pods are all the same", "error", err)
	}
	n.run(func() {
		if err := server.Serve(ctx, web, socket); err != nil {
			failed(err)
		}
	})
	return nil
}

func (n *Node) displaySocket() (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(n.config.DisplaySocket), 0o755); err != nil {
		return nil, err
	}
	return display.ListenUnix(n.config.DisplaySocket)
}

// health calls our own sockets, as kubelet would.
func (n *Node) health(ctx context.Context) error {
	n.mu.Lock()
	registered := n.known()
	n.mu.Unlock()
	if n.config.Standalone || !registered {
		return nil // nobody is to call yet
	}
	for _, p := range n.plugins {
		if err := p.Ping(ctx); err != nil {
			return fmt.Errorf("device plugin %s: %w", p.Resource(), err)
		}
	}
	return nil
}

// ready lists why pods cannot be served now.
func (n *Node) ready() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []string
	select {
	case <-n.seen:
	default:
		out = append(out, "the driver has not answered yet")
	}
	if p := n.inventory.Problem; p.Reason != "" {
		out = append(out, p.String())
	}
	if !n.config.Standalone && !n.known() {
		out = append(out, "not registered with kubelet ("+n.config.DevicePluginDir+")")
	}
	return out
}

// tellProblem tells of what keeps the whole driver from use, and when that is over.
func (n *Node) tellProblem(before, now gpu.Problem) {
	if before == now {
		return
	}
	if now.Reason == "" {
		n.log.Info("the driver is there")
		n.event(n.nodeRef(), corev1.EventTypeNormal, "GPUDriverReady", "the driver answers again")
		return
	}
	n.log.Warn("no GPUs to share", "reason", string(now.Reason), "what", now.Text)
	n.event(n.nodeRef(), corev1.EventTypeWarning, "GPU"+string(now.Reason), now.Text)
}

// tellHealth tells of GPUs that fail and recover, on the node and on the pods that have them.
func (n *Node) tellHealth(before, now gpu.Inventory) {
	for i := range now.GPUs {
		g := &now.GPUs[i]
		was := before.Find(g.UUID)
		if was != nil && was.State.Healthy == g.State.Healthy && was.Excluded == g.Excluded {
			continue
		}
		switch {
		case g.Excluded != "":
			n.log.Info("not shared", "gpu", g.UUID, "reason", g.Excluded)
			n.event(n.nodeRef(), corev1.EventTypeNormal, "GPUExcluded", fmt.Sprintf("gpu %d (%s): %s", g.Index, g.UUID, g.Excluded))
		case !g.State.Healthy:
			text := fmt.Sprintf("gpu %d (%s): %s", g.Index, g.UUID, g.State.Reason)
			n.log.Warn("unhealthy", "gpu", g.UUID, "reason", g.State.Reason)
			n.event(n.nodeRef(), corev1.EventTypeWarning, "GPUUnhealthy", text)
			n.tellTenants(g.UUID, text)
		case was != nil && !was.State.Healthy:
			n.log.Info("healthy again", "gpu", g.UUID)
			n.event(n.nodeRef(), corev1.EventTypeNormal, "GPURecovered", fmt.Sprintf("gpu %d (%s) is healthy again", g.Index, g.UUID))
		}
	}
}

func (n *Node) tellTenants(uuid, text string) {
	n.mu.Lock()
	tenants := n.books.Tenants()
	n.mu.Unlock()
	for _, t := range tenants {
		for _, u := range t.UUIDs {
			if u == uuid && t.Pod != nil {
				n.event(podRef(*t.Pod), corev1.EventTypeWarning, "GPUUnhealthy", text)
			}
		}
	}
}

// Run makes a node and runs it until ctx ends.
func Run(ctx context.Context, c Config) error {
	n, err := New(c)
	if err != nil {
		return err
	}
	return n.Run(ctx)
}
