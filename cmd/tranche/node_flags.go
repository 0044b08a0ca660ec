package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"tranche.dev/tranche/internal/node"
	"tranche.dev/tranche/internal/quantity"
)

// nodeFlags are the flags of `tranche node` and what they were set to.
type nodeFlags struct {
	set *pflag.FlagSet
	// kept are gpu-manager's that mean what they meant, own are ours; in the order of the help.
	kept, own []string

	c         node.Config
	driver    string
	inCluster bool
	share     bool
	oldNames  bool
	labels    string
	port      int
	live      string
	verbosity int
	logLevel  string // LOG_LEVEL, when it is no number
	version   bool
}

// obsoleteFlags are gpu-manager's.
var obsoleteFlags = []obsoleteFlag{
	{name: "container-runtime-endpoint", instead: "the runtime is not asked; kubelet is, at --pod-resources-socket"},
	{name: "container-runtime", instead: "any runtime will do"},
	{name: "docker-endpoint", instead: "the runtime is not asked; kubelet is, at --pod-resources-socket"},
	{name: "runtime-request-timeout", instead: "the runtime is not asked"},
	{name: "cgroup-driver", instead: "cgroups are not looked at; any driver will do"},
	{name: "sample-period", instead: "the driver is asked 4 times a second while a container uses a GPU, else every 2 s; ledgers are read at each request"},
	{name: "log-dir", instead: "messages go to standard error, which kubelet or systemd keeps"},
	{name: "log-file", instead: "messages go to standard error, which kubelet or systemd keeps"},
	{name: "log-file-max-size", instead: "messages go to standard error, which kubelet or systemd keeps"},
	{name: "stderrthreshold", instead: "all messages go to standard error; --v says how many"},
	{name: "vmodule", instead: "use --v"},
	{name: "log-backtrace-at", instead: "see /debug/pprof/goroutine on the loopback address"},
	{name: "skip-headers", instead: "messages have one form", boolean: true},
	{name: "skip-log-headers", instead: "messages have one form", boolean: true},
	{name: "add-dir-header", instead: "messages have one form", boolean: true},
}

func newNodeFlags(env func(string) string) *nodeFlags {
	f := &nodeFlags{set: pflag.NewFlagSet("node", pflag.ContinueOnError), c: node.Config{MemoryUnit: 256 << 20, WaitTimeout: time.Minute, CheckPeriod: 30 * time.Second}}
	f.set.SortFlags = false
	f.set.SetNormalizeFunc(hyphens)
	if level := env("LOG_LEVEL"); level != "" {
		var err error
		if f.verbosity, err = strconv.Atoi(level); err != nil {
			f.logLevel = level
		}
	}
	f.addOwn()
	f.own = f.since(0)
	f.addKept(env)
	f.kept = f.since(len(f.own))
	addObsolete(f.set, obsoleteFlags)
	return f
}

// since are the names of the flags that were defined after the first n.
func (f *nodeFlags) since(n int) (names []string) {
	f.set.VisitAll(func(flag *pflag.Flag) { names = append(names, flag.Name) })
	return names[n:]
}

func (f *nodeFlags) addOwn() {
	s, c := f.set, &f.c
	s.StringVar(&c.ResourceDomain, "resource-domain", "tencent.com", "`domain` of the resources: DOMAIN/vcuda-core and DOMAIN/vcuda-memory")
	s.Var((*bytesValue)(&c.MemoryUnit), "memory-unit", "one unit of DOMAIN/vcuda-memory")
	s.StringVar(&c.Sim, "sim", "", "simulated GPUs in place of the machine's: a `machine` as for tranche run")
	s.StringVar(&c.SimDir, "sim-dir", "/run/tranche/sim", "`directory` of the simulated GPUs")
	s.StringArrayVar(&c.DriverRoots, "driver-root", nil, "look for the driver in this `directory` first, as the host names it: /run/nvidia/driver; may be given several times")
	s.StringVar(&c.HostRoot, "host-root", "/", "`directory` where the host's root is seen")
	s.StringVar(&c.ViewDir, "view-path", "", "`directory` for what containers see of the driver; the same path on the host. Default: the base that --volume-config names, else /etc/gpu-manager/vdriver")
	s.StringVar(&c.WholeView, "driver-view", node.ViewNvidia, "the `view`: what containers with whole GPUs see of the driver: nvidia, as all others; origin, the vendor's files alone, and no memory limit")
	s.BoolVar(&c.TopologyHints, "topology-hints", false, "tell kubelet's Topology Manager the NUMA node of each ID; it counts IDs, not GPUs, and may refuse what would fit")
	s.StringVar(&f.live, "live-change", "off", "let annotations change the limits of running pods: off, on, or only in these `namespaces`, with commas between. Whoever may patch a pod can then raise its limits to what is free")
	s.StringVar(&c.Bypass, "bypass", node.BypassReport, "what is `done` when a process in a slice uses a GPU past its limits: report, kill or off")
	s.StringSliceVar(&c.HealthIgnore, "health-ignore-xids", nil, "`XIDs` that do not make a GPU unhealthy, besides those that programs cause; all: watch no health")
	s.StringVar(&c.PodResourcesSocket, "pod-resources-socket", "/var/lib/kubelet/pod-resources/kubelet.sock", "kubelet's PodResources `socket`")
	s.StringVar(&c.PodsSocket, "pods-api-socket", "/var/lib/kubelet/pods-api/pods-api.sock", "kubelet's pods API `socket`")
	s.StringVar(&c.PodsFrom, "pods-from", node.PodsAuto, "`who` tells of pods: kubelet, by its pods API; apiserver, by a watch; auto, kubelet if its pods API is there at the start")
	s.StringVar(&c.DisplaySocket, "display-socket", "/var/run/gpu-manager.sock", "`socket` of the gRPC service GPUDisplay")
	s.BoolVar(&f.oldNames, "metrics-old-names", true, "give gpu-manager's metrics too")
}

func (f *nodeFlags) addKept(env func(string) string) {
	s, c := f.set, &f.c
	s.StringVar(&f.driver, "driver", "nvidia", "`kind` of the GPUs: nvidia")
	s.StringVar(&c.ExtraConfig, "extra-config", "", "`file` with devices that every container gets besides its GPUs")
	s.StringVar(&c.VolumeConfig, "volume-config", "", "`file` that lists what of the driver containers see; without one a list that is built in")
	s.IntVar(&f.port, "query-port", 5678, "`port` for HTTP; 0: none")
	s.StringVar(&c.QueryAddr, "query-addr", "localhost", "`address` for HTTP; there is no authentication")
	s.StringVar(&c.Kubeconfig, "kubeconfig", "", "`file` that says how to reach the API server; without one the pod's service account")
	s.BoolVar(&f.inCluster, "incluster-mode", false, "use the pod's service account even if a kubeconfig is given")
	s.BoolVar(&c.Standalone, "standalone", false, "run without kubelet and API server")
	s.StringVar(&f.labels, "node-labels", "", "`labels` for the node, KEY=VALUE with commas between; the value of gaia.tencent.com/gpu-model is replaced by the model")
	s.StringVar(&c.NodeName, "hostname-override", env("NODE_NAME"), "`name` of the node in Kubernetes; default: the host's")
	s.StringVar(&c.AllocationDir, "virtual-manager-path", "/etc/gpu-manager/vm", "`directory` with what containers share with the node; the same path on the host")
	s.StringVar(&c.DevicePluginDir, "device-plugin-path", "/var/lib/kubelet/device-plugins", "`directory` of kubelet's device plugin sockets")
	s.StringVar(&c.CheckpointDir, "checkpoint-path", "/etc/gpu-manager/checkpoint", "`directory` of the node's cache; gpu-manager's checkpoint is read from it once")
	s.BoolVar(&f.share, "share-mode", true, "share GPUs; false: give whole ones only")
	s.Var((*secondsValue)(&c.CheckPeriod), "allocation-check-period", "how often allocations are compared with kubelet's: seconds, or 1m")
	s.Var((*secondsValue)(&c.WaitTimeout), "wait-timeout", "how long the first registration with kubelet may take before that is reported")
	s.StringVar(&c.DisplaySocket, "addr", "/var/run/gpu-manager.sock", "now --display-socket")
	s.Lookup("addr").Hidden = true
	s.IntVarP(&f.verbosity, "v", "v", f.verbosity, "`verbosity`: 0 to 4, what happens to pods and GPUs; 5 and more, every step")
	s.Bool("logtostderr", true, "messages go to standard error, always")
	s.Bool("alsologtostderr", true, "messages go to standard error, always")
	s.Var(&versionValue{&f.version}, "version", "print the version and exit")
	s.Lookup("version").NoOptDefVal = "true"
}

// hyphens makes --query_port the flag --query-port.
func hyphens(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
}

// secondsValue is a duration that may be written as seconds.
type secondsValue time.Duration

func (v *secondsValue) Set(text string) error {
	d, err := time.ParseDuration(text)
	if _, numberErr := strconv.Atoi(text); numberErr == nil {
		d, err = time.ParseDuration(text + "s")
	}
	if err != nil || d <= 0 || d > 24*time.Hour {
		return fmt.Errorf("%q: seconds, or a duration such as 500ms, up to a day", text)
	}
	*v = secondsValue(d)
	return nil
}

func (v *secondsValue) String() string { return time.Duration(*v).String() }
func (v *secondsValue) Type() string   { return "seconds" }

// bytesValue is an amount of memory.
type bytesValue quantity.Bytes

func (v *bytesValue) Set(text string) error {
	b, err := quantity.Parse(text)
	*v = bytesValue(b)
	return err
}

func (v *bytesValue) String() string {
	return strings.NewReplacer(" ", "", "iB", "i").Replace(quantity.Bytes(*v).String())
}
func (v *bytesValue) Type() string { return "amount" }

// versionValue is true, false, or raw as gpu-manager had it, which is true.
type versionValue struct{ on *bool }

func (v *versionValue) Set(text string) error {
	on, err := strconv.ParseBool(text)
	if text == "raw" {
		on, err = true, nil
	}
	*v.on = on
	return err
}

func (v *versionValue) String() string { return strconv.FormatBool(v.on != nil && *v.on) }
func (v *versionValue) Type() string   { return "raw" }
