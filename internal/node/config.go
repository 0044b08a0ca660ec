package node

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"

	"tranche.dev/tranche/internal/quantity"
)

// What may be done when a process uses a GPU past its slice.
const (
	BypassOff    = "off"
	BypassReport = "report"
	BypassKill   = "kill"
)

// What containers with whole GPUs see of the driver.
const (
	ViewNvidia = "nvidia" // our libraries in front, as for everybody else
	ViewOrigin = "origin" // the vendor's libraries alone; nothing is limited
)

// Who tells of the node's pods.
const (
	PodsAuto      = "auto"      // kubelet, where its pods service is there at the start, else the API server
	PodsKubelet   = "kubelet"   // its pods service (Kubernetes 1.36 and later)
	PodsAPIServer = "apiserver" // by a watch on this node's pods
)

// Config is everything that a node can be told. The zero value of a field means its default.
type Config struct {
	// NodeName is the node's name in Kubernetes; default the host's name in lower case.
	NodeName string
	// Standalone runs without kubelet and without an API server.
	Standalone bool
	// Kubeconfig is a file; empty: the service account's.
	Kubeconfig string

	// ResourceDomain is the part of resource names before the slash; default tencent.com.
	ResourceDomain string
	// MemoryUnit is how many bytes one unit of the memory resource is; default 256 MiB.
	MemoryUnit quantity.Bytes
	// WholeOnly refuses parts of a GPU.
	WholeOnly bool
	// TopologyHints gives kubelet the NUMA node of each ID.
	TopologyHints bool

	// DevicePluginDir holds kubelet's registration socket and our own; default
	// /var/lib/kubelet/device-plugins.
	DevicePluginDir string
	// PodResourcesSocket and PodsSocket are kubelet's; the second is there from Kubernetes 1.36 on.
	PodResourcesSocket string
	PodsSocket         string
	// PodsFrom is PodsAuto (the default), PodsKubelet or PodsAPIServer.
	PodsFrom string
	// WaitTimeout is how long a first registration may take until it is reported; default 1 min.
	WaitTimeout time.Duration

	// AllocationDir holds a directory for each container with a slice; default /etc/gpu-manager/vm.
	// It and ViewDir must have the same path on the host.
	AllocationDir string
	// ViewDir holds what containers see of the driver; default the base that VolumeConfig names, which in the
	// built-in list is /etc/gpu-manager/vdriver.
	ViewDir string
	// CheckpointDir holds the node's own cache; default /etc/gpu-manager/checkpoint.
	CheckpointDir string

	// HostRoot is where the host's root directory is seen; default /.
	HostRoot string
	// DriverRoots are directories in which a driver is looked for, as the host names them, before
	// the usual places.
	DriverRoots []string
	// VolumeConfig lists the driver's files (volume.conf); empty: the built-in list.
	VolumeConfig string
	// ExtraConfig is a file with more devices for each container; empty: none.
	ExtraConfig string
	// WholeView is what containers with whole GPUs see: ViewNvidia (the default) or ViewOrigin.
	WholeView string
	// Sim describes simulated GPUs, which take the place of the driver; SimDir is where they live.
	Sim    string
	SimDir string

	// Labels are put on the node object. The value of gaia.tencent.com/gpu-model is replaced by the
	// model that was found.
	Labels map[string]string
	// CheckPeriod is how often allocations are compared with what kubelet says; default 30 s.
	CheckPeriod time.Duration

	LiveChange LiveChange
	// Bypass is BypassOff, BypassReport (the default) or BypassKill.
	Bypass string
	// HealthIgnore are XIDs that say nothing about a GPU's health, besides the usual ones; "all"
	// turns health watching off.
	HealthIgnore []string

	// QueryAddr and QueryPort are where HTTP is served; default localhost:5678. A negative port: not
	// at all.
	QueryAddr string
	QueryPort int
	// DisplaySocket is where gRPC is served; default /var/run/gpu-manager.sock.
	DisplaySocket string
	// NewNamesOnly leaves the originals' metric names out.
	NewNamesOnly bool

	// Version and Commit are what the display tells.
	Version, Commit string
	// Started is called once, when the node listens for kubelet and its display; nil: nobody waits.
	Started func()
	// Log is where messages go; default slog.Default().
	Log *slog.Logger
	// Now is the clock; default time.Now.
	Now func() time.Time

	// client takes the place of what Kubeconfig says, in tests.
	client kubernetes.Interface
}

// LiveChange says whose running pods may change their limits through annotations. Off by default: who may
// patch a pod could raise his own limit.
type LiveChange struct {
	On bool
	// Namespaces restricts it; empty: all.
	Namespaces []string
}

// Allows tells whether pods of a namespace may change.
func (l LiveChange) Allows(namespace string) bool {
	if !l.On || len(l.Namespaces) == 0 {
		return l.On
	}
	for _, n := range l.Namespaces {
		if n == namespace {
			return true
		}
	}
	return false
}

// complete fills defaults in and checks the rest.
func (c *Config) complete() error {
	if c.NodeName == "" {
		host, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("no node name given and the host has none: %w", err)
		}
		c.NodeName = strings.ToLower(host)
	}
	for _, d := range []struct {
		to    *string
		value string
	}{
		{&c.ResourceDomain, "tencent.com"},
		{&c.DevicePluginDir, "/var/lib/kubelet/device-plugins"},
		{&c.PodResourcesSocket, "/var/lib/kubelet/pod-resources/kubelet.sock"},
		{&c.PodsSocket, "/var/lib/kubelet/pods-api/pods-api.sock"},
		{&c.AllocationDir, "/etc/gpu-manager/vm"},
		{&c.CheckpointDir, "/etc/gpu-manager/checkpoint"},
		{&c.HostRoot, "/"},
		{&c.WholeView, ViewNvidia},
		{&c.SimDir, "/run/tranche/sim"},
		{&c.Bypass, BypassReport},
		{&c.PodsFrom, PodsAuto},
		{&c.QueryAddr, "localhost"},
		{&c.DisplaySocket, "/var/run/gpu-manager.sock"},
	} {
		if *d.to == "" {
			*d.to = d.value
		}
	}
	for _, d := range []struct {
		to    *time.Duration
		value time.Duration
	}{{&c.WaitTimeout, time.Minute}, {&c.CheckPeriod, 30 * time.Second}} {
		if *d.to <= 0 {
			*d.to = d.value
		}
	}
	if c.MemoryUnit == 0 {
		c.MemoryUnit = 256 << 20
	}
	if c.QueryPort == 0 {
		c.QueryPort = 5678
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Started == nil {
		c.Started = func() {}
	}
	return c.check()
}

func (c *Config) check() error {
	if c.MemoryUnit < 1<<20 {
		return fmt.Errorf("memory unit %v: less than 1 MiB; kubelet would have to keep too many IDs", c.MemoryUnit)
	}
	if problems := validation.IsDNS1123Subdomain(c.NodeName); len(problems) > 0 {
		return fmt.Errorf("node name %q: %s", c.NodeName, strings.Join(problems, "; "))
	}
	if c.WholeView != ViewNvidia && c.WholeView != ViewOrigin {
		return fmt.Errorf("driver view %q: neither %s nor %s", c.WholeView, ViewNvidia, ViewOrigin)
	}
	switch c.Bypass {
	case BypassOff, BypassReport, BypassKill:
	default:
		return fmt.Errorf("bypass %q: none of %s, %s, %s", c.Bypass, BypassOff, BypassReport, BypassKill)
	}
	for _, dir := range []string{c.DevicePluginDir, c.AllocationDir, c.ViewDir, c.CheckpointDir, c.HostRoot, c.PodResourcesSocket, c.PodsSocket, c.DisplaySocket} {
		if dir != "" && !filepath.IsAbs(dir) {
			return fmt.Errorf("%s: not an absolute path", dir)
		}
	}
	switch c.PodsFrom {
	case PodsAuto, PodsKubelet, PodsAPIServer:
	default:
		return fmt.Errorf("pods from %q: none of %s, %s, %s", c.PodsFrom, PodsAuto, PodsKubelet, PodsAPIServer)
	}
	// sockaddr_un holds 108 bytes with the NUL. A number may come before the name (deviceplugin.Plugin.Move).
	if s := filepath.Join(c.DevicePluginDir, memorySocket); len(s) > 107-len("10000-") {
		return fmt.Errorf("%s: too long for a socket", s)
	}
	if strings.ContainsRune(c.ResourceDomain, '/') {
		return errors.New("resource domain " + c.ResourceDomain + ": without a slash please")
	}
	return nil
}

// Names of our sockets in the device plugin directory.
const (
	coreSocket   = "vcore.sock"
	memorySocket = "vmemory.sock"
)
