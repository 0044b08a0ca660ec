package scheduler

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"tranche.dev/tranche/internal/certs"
	"tranche.dev/tranche/internal/pause"
)

// Config of a scheduler. Zero values mean defaults.
type Config struct {
	Core CoreConfig
	// Client speaks to the API server.
	Client kubernetes.Interface
	// Address serves the extender, default 127.0.0.1:3456. ProfileAddress serves profiles; empty: not at all.
	Address, ProfileAddress string
	// StatusAddress serves health, metrics and version by HTTP, for probes where Address is not to be reached;
	// empty: Address alone does.
	StatusAddress string
	// CertFile and KeyFile turn TLS on; ClientCAFile then asks clients for certificates.
	CertFile, KeyFile, ClientCAFile string
	// Elect lets one of several replicas answer, by a lease.
	Elect                     bool
	LeaseNamespace, LeaseName string
	// QuotaNamespace and QuotaName are the ConfigMap of quotas; empty name: there are none.
	QuotaNamespace, QuotaName string
	// MaxBody is the most bytes of a request; default MaxBodyDefault.
	MaxBody int64
	Version string
	Log     *slog.Logger
	// Listening is told the address; tests use port 0.
	Listening func(net.Addr)
	// readTimeout in place of the usual, for tests.
	readTimeout time.Duration
}

// A leader that cannot renew its lease gives up renewDeadline after it last did, and another takes over
// leaseDuration after: in between, all bindings of the old one are done, which take sendTimeout to arrive and BindTimeout
// then.
const (
	leaseDuration = 24 * time.Second
	renewDeadline = 12 * time.Second
	retryPeriod   = 2 * time.Second
	// shutdownTimeout is more than a bind takes.
	shutdownTimeout = 2 * BindTimeout
	// sendTimeout is how long an answer to a binding is waited for, and so the longest that one is on its way, turns at
	// the client's rate limit included.
	sendTimeout = BindTimeout + time.Second
	// readTimeout is how long a request may take to arrive: more than kube-scheduler waits for its answer.
	readTimeout = 30 * time.Second
	_           = uint(leaseDuration - renewDeadline - sendTimeout - BindTimeout) // or it does not compile
)

// Run serves until the context ends, or an error. One of them is to have lost the lease: what is known by then
// cannot be trusted, so the process should start anew.
func Run(ctx context.Context, config Config) error {
	if err := config.complete(); err != nil {
		return err
	}
	core, err := NewCore(config.Core)
	if err != nil {
		return err
	}
	k, err := newKube(config.Client, core, &config)
	if err != nil {
		return err
	}
	defer k.stop()
	server := NewServer(core, k, config.Log, config.Version, config.MaxBody)
	r := &runner{config: config, core: core, kube: k, server: server}
	return r.run(ctx)
}

func (c *Config) complete() error {
	if c.Client == nil {
		return errors.New("no API server")
	}
	for _, d := range []struct {
		to    *string
		value string
	}{{&c.Address, "127.0.0.1:3456"}, {&c.LeaseName, component}, {&c.LeaseNamespace, "kube-system"}, {&c.QuotaNamespace, "kube-system"}} {
		if *d.to == "" {
			*d.to = d.value
		}
	}
	if (c.CertFile == "") != (c.KeyFile == "") {
		return errors.New("a certificate needs its key, and the other way round")
	}
	if c.ClientCAFile != "" && c.CertFile == "" {
		return errors.New("clients' certificates can be asked for only with a certificate of our own")
	}
	if c.readTimeout == 0 {
		c.readTimeout = readTimeout
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.Core.Warn == nil {
		c.Core.Warn = c.Log.Warn
	}
	return nil
}

type runner struct {
	config Config
	core   *Core
	kube   *kube
	server *Server
}

func (r *runner) run(ctx context.Context) error {
	listeners, err := r.listen()
	if err != nil {
		return err
	}
	// What works on outlives ctx: a graceful stop answers what was begun.
	work, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	var wg sync.WaitGroup
	var servers []*http.Server
	for _, l := range listeners {
		s := &http.Server{Handler: l.handler, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: r.config.readTimeout, IdleTimeout: 5 * time.Minute, ErrorLog: slog.NewLogLogger(r.config.Log.Handler(), slog.LevelDebug)}
		servers = append(servers, s)
		wg.Go(func() {
			if err := s.Serve(l.Listener); !errors.Is(err, http.ErrServerClosed) {
				cancel(err)
			}
		})
	}
	leading := make(chan struct{})
	wg.Go(func() {
		defer close(leading)
		if err := r.lead(work); err != nil {
			cancel(err)
		}
	})
	select {
	case <-ctx.Done():
	case <-work.Done():
	}
	r.server.Stop("stopping")
	late, done := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer done()
	for _, s := range servers {
		if err := s.Shutdown(late); err != nil {
			r.config.Log.Warn("requests were cut off", "err", err)
		}
	}
	r.server.Wait()
	// The lease goes last, when no binding of ours can still be done.
	if ago, ok := r.server.Unanswered(); ok {
		pause.For(work, BindTimeout-ago)
	}
	cancel(nil)
	wg.Wait()
	if err := context.Cause(work); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

type listener struct {
	net.Listener
	handler http.Handler
}

// listen opens all addresses, or none.
func (r *runner) listen() (out []listener, err error) {
	defer func() {
		if err != nil {
			for _, l := range out {
				err = errors.Join(err, l.Close())
			}
			out = nil
		}
	}()
	open := func(what, address string, h http.Handler) error {
		l, err := net.Listen("tcp", address)
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		out = append(out, listener{l, h})
		return nil
	}
	if err := open("extender", r.config.Address, r.server.Handler()); err != nil {
		return out, err
	}
	if r.config.Listening != nil {
		r.config.Listening(out[0].Addr())
	}
	if r.config.CertFile != "" {
		c, err := certs.NewFiles(r.config.CertFile, r.config.KeyFile, r.config.ClientCAFile, r.config.Log)
		if err != nil {
			return out, err
		}
		out[0].Listener = tls.NewListener(out[0].Listener, c.TLS())
	}
	if r.config.StatusAddress != "" {
		if err := open("status", r.config.StatusAddress, r.server.StatusHandler()); err != nil {
			return out, err
		}
	}
	if r.config.ProfileAddress == "" {
		return out, nil
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	return out, open("profiles", r.config.ProfileAddress, mux)
}

// lead reads what is there, and decides while this replica has the lease.
func (r *runner) lead(ctx context.Context) error {
	r.server.NotReady("nodes and pods are being read")
	if err := r.kube.run(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	if !r.config.Elect {
		// Bindings of a process before this one may still be on their way.
		r.server.NotReady("waiting for bindings of a process before this one")
		if !pause.For(ctx, BindTimeout) {
			return nil
		}
		r.decide(ctx)
		return nil
	}
	r.server.NotReady("another replica leads")
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	id := host + "_" + string(uuid.NewUUID())
	e, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{LeaseMeta: metav1.ObjectMeta{Namespace: r.config.LeaseNamespace, Name: r.config.LeaseName},
			Client: r.config.Client.CoordinationV1(), LockConfig: resourcelock.ResourceLockConfig{Identity: id}},
		LeaseDuration: leaseDuration, RenewDeadline: renewDeadline, RetryPeriod: retryPeriod, ReleaseOnCancel: true, Name: component,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: r.decide,
			OnStoppedLeading: func() { r.server.Stop("the lease was lost") },
		},
	})
	if err != nil {
		return err
	}
	e.Run(ctx)
	if ctx.Err() != nil {
		return nil
	}
	return errors.New("the lease was lost")
}

// decide starts from a list that was read after all bindings of others were done, and answers until the
// context ends.
func (r *runner) decide(ctx context.Context) {
	for {
		list, err := r.kube.list(ctx)
		if err == nil {
			r.core.Resync(list)
			break
		}
		r.config.Log.Warn("pods cannot be listed", "err", err)
		if !pause.For(ctx, time.Second) {
			return
		}
	}
	r.config.Log.Info("deciding", "address", r.config.Address)
	r.server.Ready()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			r.ask(ctx, r.core.Tick())
		}
	}
}

// ask finds out what became of pods.
func (r *runner) ask(ctx context.Context, checks []Check) {
	for _, q := range checks {
		ctx, cancel := context.WithTimeout(ctx, BindTimeout)
		object, err := r.kube.Pod(ctx, q.Namespace, q.Name)
		cancel()
		if err != nil {
			r.config.Log.Warn("it is not known what became of a pod", "pod", q.Namespace+"/"+q.Name, "err", err)
			// Ticks must not wait for an API server that is away; the others are asked again.
			var status apierrors.APIStatus
			if !errors.As(err, &status) {
				return
			}
			continue
		}
		r.core.Checked(q, object)
	}
}

// QuotaConfig is gpu-admission's configuration file.
type QuotaConfig struct {
	QuotaConfigMapName, QuotaConfigMapNamespace, GPUModelLabel, GPUPoolLabel string
}

// ReadQuotaConfig reads gpu-admission.config. SkipBindTime, which guarded against a race that is none any more,
// is taken and means nothing.
func ReadQuotaConfig(name string) (QuotaConfig, error) {
	q := QuotaConfig{QuotaConfigMapName: "gpuquota", QuotaConfigMapNamespace: "kube-system", GPUModelLabel: ModelLabelDefault, GPUPoolLabel: PoolLabelDefault}
	data, err := os.ReadFile(name)
	if err != nil {
		return q, err
	}
	if err := json.Unmarshal(data, &q); err != nil {
		return q, fmt.Errorf("%s: %w", name, err)
	}
	if q.QuotaConfigMapName == "" || q.QuotaConfigMapNamespace == "" {
		return q, fmt.Errorf("%s: QuotaConfigMapName and QuotaConfigMapNamespace must not be empty", name)
	}
	return q, nil
}
