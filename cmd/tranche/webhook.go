package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/quantity"
	"tranche.dev/tranche/internal/webhook"
)

const webhookLong = `Webhook is what the API server asks about pods before it makes them. Pods that ask for slices and
name no scheduler are sent to Tranche's. With --hami, what pods ask in HAMi's words (nvidia.com/gpu,
gpumem, gpumem-percentage, gpucores) is said in Tranche's; what has no translation is refused.

Its certificate comes from files, or it makes one: with --authority-secret it keeps an authority in
that Secret and tells the API server of it in --configuration.`

// webhookFlags are the flags of `tranche webhook` and what they were set to.
type webhookFlags struct {
	set *pflag.FlagSet
	c   webhook.Config

	kubeconfig, master string
	domain             string
	unit               quantity.Bytes
	hami               bool
	defaults           webhook.HAMi
	secret             string
	verbosity          int
	version            bool
}

func newWebhookFlags() *webhookFlags {
	f := &webhookFlags{set: pflag.NewFlagSet("webhook", pflag.ContinueOnError), unit: podspec.UnitDefault}
	s, c := f.set, &f.c
	s.SortFlags = false
	s.SetNormalizeFunc(hyphens)
	s.StringVar(&c.Mutator.Scheduler, "scheduler-name", "tranche-scheduler", "`name` of the scheduler for pods that name none; empty: the cluster's own")
	s.BoolVar(&f.hami, "hami", false, "translate HAMi's resources and annotations")
	s.Var((*bytesValue)(&f.defaults.DefaultMemory), "hami-default-memory", "memory of each GPU for containers that say nothing of it, as HAMi's defaultMem; without this flag all of it")
	s.IntVar(&f.defaults.DefaultCores, "hami-default-cores", 0, "`cores` of each GPU for containers that say nothing of it, as HAMi's defaultCores; 0: not limited")
	s.StringVar(&f.domain, "resource-domain", podspec.DomainDefault, "`domain` of the resources: DOMAIN/vcuda-core and DOMAIN/vcuda-memory")
	s.Var((*bytesValue)(&f.unit), "memory-unit", "one unit of DOMAIN/vcuda-memory")
	s.StringVar(&c.Address, "address", ":9443", "`address` for the API server")
	s.StringVar(&c.StatusAddress, "status-address", "", "`address` of health, metrics and version; empty: none")
	s.StringVar(&c.CertFile, "tls-cert-file", "", "`file` of the certificate; it is read again when it changes")
	s.StringVar(&c.KeyFile, "tls-private-key-file", "", "`file` of its key")
	s.StringVar(&f.secret, "authority-secret", "", "`NAMESPACE/NAME` of the Secret for an authority of its own")
	s.StringVar(&c.Configuration, "configuration", "", "`name` of the MutatingWebhookConfiguration that is told of the authority")
	s.StringVar(&c.Host, "host", "", "`name` by which the API server calls: SERVICE.NAMESPACE.svc")
	s.StringVar(&f.kubeconfig, "kubeconfig", "", "`file` that says how to reach the API server; without one the pod's service account")
	s.StringVar(&f.master, "master", "", "`URL` of the API server, in place of the kubeconfig's")
	s.IntVarP(&f.verbosity, "v", "v", 0, "`verbosity`: 5 and more, every pod")
	s.Var(&versionValue{&f.version}, "version", "print the version and exit")
	s.Lookup("version").NoOptDefVal = "true"
	return f
}

// webhookCommand is `tranche webhook`; run serves until its context ends.
func webhookCommand(run func(context.Context, webhook.Config) error) *cobra.Command {
	f := newWebhookFlags()
	cmd := &cobra.Command{Use: "webhook [flags]", Short: "send pods to Tranche's scheduler, translate HAMi's resources", Long: webhookLong}
	return daemon(cmd, f.set, &f.version, func(ctx context.Context, messages io.Writer) error {
		c, err := f.config()
		if err != nil {
			return err
		}
		c.Log = daemonLog(messages, f.verbosity, nil)
		return run(ctx, c)
	})
}

// config is what the flags say.
func (f *webhookFlags) config() (webhook.Config, error) {
	c := f.c
	c.Mutator.Names = podspec.Names{Domain: f.domain, Unit: f.unit}
	if f.hami {
		c.Mutator.HAMi = &f.defaults
	}
	if f.secret != "" {
		namespace, name, ok := strings.Cut(f.secret, "/")
		if !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
			return c, fmt.Errorf("--authority-secret %q: must be NAMESPACE/NAME", f.secret)
		}
		c.SecretNamespace, c.SecretName = namespace, name
	}
	c.Version = strings.TrimSpace(versionLine())
	if f.secret == "" && !f.hami {
		return c, nil // nothing is asked of the API server
	}
	rc, err := f.connect()
	if err != nil {
		return c, fmt.Errorf("API server: %w", err)
	}
	rc.UserAgent = "tranche-webhook/" + version
	c.Client, err = kubernetes.NewForConfig(rc)
	return c, err
}

func (f *webhookFlags) connect() (*rest.Config, error) {
	if f.kubeconfig == "" && f.master == "" {
		return rest.InClusterConfig()
	}
	return clientcmd.BuildConfigFromFlags(f.master, f.kubeconfig)
}
