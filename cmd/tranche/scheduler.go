package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/quantity"
	"tranche.dev/tranche/internal/scheduler"
)

const schedulerLong = `Scheduler is the extender of kube-scheduler that chooses nodes and GPUs for pods. It takes
gpu-admission's flags; those that mean nothing any more are accepted with a warning. An underscore
in a flag's name is as good as a hyphen.`

// schedulerFlags are the flags of `tranche scheduler` and what they were set to.
type schedulerFlags struct {
	set *pflag.FlagSet
	c   scheduler.Config

	kubeconfig, master string
	inCluster          bool
	quotaConfig        string // gpu-admission's --config
	quotaMap           string
	mode, policy       string
	domain             string
	unit               quantity.Bytes
	hold               time.Duration
	qps                float32
	burst              int
	verbosity          int
	version            bool
}

// schedulerObsolete are gpu-admission's flags that mean nothing here.
var schedulerObsolete = []obsoleteFlag{
	{name: "log-dir", instead: "messages go to standard error"},
	{name: "log-file", instead: "messages go to standard error"},
	{name: "log-file-max-size", instead: "messages go to standard error"},
	{name: "log-flush-frequency", instead: "messages are not kept back"},
	{name: "stderrthreshold", instead: "all messages go to standard error; --v says how many"},
	{name: "vmodule", instead: "use --v"},
	{name: "log-backtrace-at", instead: "see /debug/pprof/goroutine at --pprofAddress"},
	{name: "skip-headers", instead: "messages have one form", boolean: true},
	{name: "skip-log-headers", instead: "messages have one form", boolean: true},
	{name: "add-dir-header", instead: "messages have one form", boolean: true},
}

func newSchedulerFlags() *schedulerFlags {
	f := &schedulerFlags{set: pflag.NewFlagSet("scheduler", pflag.ContinueOnError), unit: 256 << 20}
	s, c := f.set, &f.c
	s.SortFlags = false
	s.SetNormalizeFunc(hyphens)
	s.StringVar(&f.mode, "mode", "ranked", "`how` nodes are offered: ranked, all that fit, with scores; exact, the best one only")
	s.StringVar(&f.policy, "policy", string(placement.LeastFragmentation), "`policy` for pods that name none: least-fragmentation, binpack, spread or topology")
	s.DurationVar(&f.hold, "hold", 30*time.Second, "how long a GPU is held for a pod that is not bound")
	s.BoolVar(&c.Core.Evict, "evict", false, "evict pods of lower priority where only fragmentation keeps a pod out, which kube-scheduler does not; by the Eviction API, within disruption budgets")
	s.StringVar(&f.quotaMap, "quota-configmap", "", "`NAMESPACE/NAME` of the ConfigMap with quotas; default: what --config names, else none")
	s.StringVar(&c.Core.ModelLabel, "quota-model-label", "", "`label` of nodes with their GPU model; default: what --config names, else "+scheduler.ModelLabelDefault)
	s.StringVar(&c.Core.PoolLabel, "quota-pool-label", "", "`label` of nodes with their pool; default: what --config names, else "+scheduler.PoolLabelDefault)
	s.StringVar(&f.domain, "resource-domain", "tencent.com", "`domain` of the resources: DOMAIN/vcuda-core and DOMAIN/vcuda-memory")
	s.Var((*bytesValue)(&f.unit), "memory-unit", "one unit of DOMAIN/vcuda-memory")
	s.StringVar(&c.CertFile, "tls-cert-file", "", "`file` of the certificate; it is read again when it changes. Without one: HTTP")
	s.StringVar(&c.KeyFile, "tls-private-key-file", "", "`file` of its key")
	s.StringVar(&c.ClientCAFile, "client-ca-file", "", "`file` of the CA by which clients must be certified")
	s.BoolVar(&c.Elect, "leader-elect", false, "let one of several replicas answer; the others are not ready")
	s.StringVar(&c.LeaseNamespace, "leader-elect-resource-namespace", "kube-system", "`namespace` of the lease")
	s.StringVar(&c.LeaseName, "leader-elect-resource-name", "tranche-scheduler", "`name` of the lease")
	s.Float32Var(&f.qps, "kube-api-qps", 300, "requests a second to the API server; one for each bind")
	s.IntVar(&f.burst, "kube-api-burst", 600, "requests at once")
	s.Int64Var(&c.MaxBody, "max-body", scheduler.MaxBodyDefault, "most `bytes` of a request")
	s.StringVar(&f.kubeconfig, "kubeconfig", "", "`file` that says how to reach the API server; without one the pod's service account")
	s.StringVar(&f.master, "master", "", "`URL` of the API server, in place of the kubeconfig's")
	s.StringVar(&c.Address, "address", "127.0.0.1:3456", "`address` of the extender")
	s.StringVar(&c.StatusAddress, "status-address", "", "`address` of health, metrics and version without the extender; empty: none")
	s.StringVar(&c.ProfileAddress, "pprofAddress", "127.0.0.1:3457", "`address` of Go's profiles; empty: none")
	s.StringVar(&f.quotaConfig, "config", "", "`file` gpu-admission.config, which names the ConfigMap with quotas and the labels")
	s.BoolVar(&f.inCluster, "incluster-mode", false, "use the pod's service account even if a kubeconfig is given")
	s.IntVarP(&f.verbosity, "v", "v", 0, "`verbosity`: 5 and more, every step")
	s.Bool("logtostderr", true, "messages go to standard error, always")
	s.Bool("alsologtostderr", true, "messages go to standard error, always")
	s.Var(&versionValue{&f.version}, "version", "print the version and exit")
	s.Lookup("version").NoOptDefVal = "true"
	addObsolete(s, schedulerObsolete)
	return f
}

// schedulerCommand is `tranche scheduler`; run serves until its context ends.
func schedulerCommand(run func(context.Context, scheduler.Config) error) *cobra.Command {
	f := newSchedulerFlags()
	cmd := &cobra.Command{Use: "scheduler [flags]", Short: "choose nodes and GPUs for pods, as kube-scheduler's extender", Long: schedulerLong}
	return daemon(cmd, f.set, &f.version, func(ctx context.Context, messages io.Writer) error {
		c, warnings, err := f.config()
		if err != nil {
			return err
		}
		c.Log = daemonLog(messages, f.verbosity, warnings)
		if c.Client, err = f.client(); err != nil {
			return err
		}
		return run(ctx, c)
	})
}

// config is what the flags say, without the client, and a warning for each that says nothing any more.
func (f *schedulerFlags) config() (scheduler.Config, []string, error) {
	c := f.c
	warnings := warnObsolete(f.set, schedulerObsolete)
	switch f.mode {
	case "ranked", "exact":
		c.Core.Exact = f.mode == "exact"
	default:
		return c, nil, fmt.Errorf("--mode %q: ranked or exact", f.mode)
	}
	c.Core.Policy = placement.Policy(f.policy)
	if err := c.Core.Policy.Validate(); err != nil {
		return c, nil, fmt.Errorf("--policy: %w", err)
	}
	if f.hold < time.Second || f.hold > time.Hour {
		return c, nil, fmt.Errorf("--hold %v: must be 1s to 1h", f.hold)
	}
	if !(f.qps > 0) || f.burst < 1 {
		return c, nil, fmt.Errorf("--kube-api-qps %v, --kube-api-burst %d: must be more than 0", f.qps, f.burst)
	}
	if c.MaxBody < 1 {
		return c, nil, fmt.Errorf("--max-body %d: must be more than 0", c.MaxBody)
	}
	c.Core.HoldTicks = int(f.hold / time.Second)
	c.Core.Names.Domain, c.Core.Names.Unit = f.domain, f.unit
	if f.quotaConfig != "" {
		q, err := scheduler.ReadQuotaConfig(f.quotaConfig)
		if err != nil {
			return c, nil, fmt.Errorf("--config: %w", err)
		}
		c.QuotaNamespace, c.QuotaName = q.QuotaConfigMapNamespace, q.QuotaConfigMapName
		if c.Core.ModelLabel == "" {
			c.Core.ModelLabel = q.GPUModelLabel
		}
		if c.Core.PoolLabel == "" {
			c.Core.PoolLabel = q.GPUPoolLabel
		}
	}
	if f.quotaMap != "" {
		namespace, name, ok := strings.Cut(f.quotaMap, "/")
		if !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
			return c, nil, fmt.Errorf("--quota-configmap %q: must be NAMESPACE/NAME", f.quotaMap)
		}
		c.QuotaNamespace, c.QuotaName = namespace, name
	}
	if f.inCluster && f.kubeconfig != "" {
		warnings = append(warnings, "--incluster-mode: the service account is used and --kubeconfig is not")
		f.kubeconfig = ""
	}
	c.Version = strings.TrimSpace(versionLine())
	return c, warnings, nil
}

// client speaks to the API server.
func (f *schedulerFlags) client() (kubernetes.Interface, error) {
	var rc *rest.Config
	var err error
	if f.kubeconfig == "" && f.master == "" {
		rc, err = rest.InClusterConfig()
	} else {
		rc, err = clientcmd.BuildConfigFromFlags(f.master, f.kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("API server: %w", err)
	}
	rc.QPS, rc.Burst = f.qps, f.burst
	rc.ContentType, rc.AcceptContentTypes = "application/vnd.kubernetes.protobuf", "application/vnd.kubernetes.protobuf,application/json"
	rc.UserAgent = "tranche-scheduler/" + version
	return kubernetes.NewForConfig(rc)
}
