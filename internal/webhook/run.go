package webhook

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"tranche.dev/tranche/internal/certs"
	"tranche.dev/tranche/internal/pause"
	"tranche.dev/tranche/internal/podspec"
)

// Config of a webhook. Zero values mean defaults.
type Config struct {
	Mutator Mutator
	// Client speaks to the API server: needed to issue a certificate, and for HAMi's memory in percent.
	Client kubernetes.Interface
	// Address serves the API server, default :9443; StatusAddress health and metrics, by HTTP; empty: not at all.
	Address, StatusAddress string
	// CertFile and KeyFile are a certificate by somebody else. Without them it is issued here.
	CertFile, KeyFile string
	// SecretNamespace, SecretName: where the authority is kept; Configuration: the MutatingWebhookConfiguration
	// that is told of it; Host: the name by which the API server calls, SERVICE.NAMESPACE.svc.
	SecretNamespace, SecretName, Configuration, Host string
	// Linger is how long requests are answered after the end was asked for, until the API server has heard of it;
	// default 5 s.
	Linger  time.Duration
	Version string
	Log     *slog.Logger
	// Listening is told the address; tests use port 0.
	Listening func(net.Addr)
}

const (
	// syncEvery is how often a certificate that is issued here is looked after.
	syncEvery = 10 * time.Second
	// retryEvery is the same while something is missing.
	retryEvery = time.Second
	// callTimeout is for what it asks of the API server.
	callTimeout = 10 * time.Second
)

// Run serves until the context ends, or an error.
func Run(ctx context.Context, config Config) error {
	if err := config.complete(); err != nil {
		return err
	}
	r := &runner{Config: config, fleet: newFleet(), ready: map[string]string{}}
	r.server = NewServer(&config.Mutator, r.fleet.gpus, config.Log, config.Version)
	return r.run(ctx)
}

func (c *Config) complete() error {
	if err := c.Mutator.Validate(); err != nil {
		return err
	}
	own := c.SecretName != ""
	switch {
	case (c.CertFile == "") != (c.KeyFile == ""):
		return errors.New("a certificate needs its key, and the other way round")
	case own == (c.CertFile != ""):
		return errors.New("either a certificate and its key, or the Secret in which an authority of its own is kept")
	case own && (c.SecretNamespace == "" || c.Configuration == "" || c.Host == ""):
		return errors.New("an authority of its own needs the Secret's namespace, the MutatingWebhookConfiguration and the name by which the API server calls")
	case c.Client == nil && (own || c.Mutator.HAMi != nil):
		return errors.New("no API server")
	}
	if c.Address == "" {
		c.Address = ":9443"
	}
	if c.Linger == 0 {
		c.Linger = 5 * time.Second
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	return nil
}

type runner struct {
	Config
	fleet  *fleet
	server *Server

	mu    sync.Mutex
	ready map[string]string // what is waited for, and why; empty: it is there
}

// await says why a part is not ready; empty: it is. The server is ready when all parts are.
func (r *runner) await(part, why string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ready[part] = why
	for _, why := range r.ready {
		if why != "" {
			r.server.NotReady(why)
			return
		}
	}
	r.server.Ready()
}

func (r *runner) run(ctx context.Context) error {
	work, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	r.await("all", "starting")
	var wg sync.WaitGroup
	settings, err := r.certificate(work, &wg)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", r.Address)
	if err != nil {
		return err
	}
	if r.Listening != nil {
		r.Listening(listener.Addr())
	}
	var servers []*http.Server
	serve := func(l net.Listener, h http.Handler) {
		s := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 10 * time.Second, IdleTimeout: 5 * time.Minute, ErrorLog: slog.NewLogLogger(r.Log.Handler(), slog.LevelDebug)}
		servers = append(servers, s)
		wg.Go(func() {
			if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				cancel(err)
			}
		})
	}
	serve(tls.NewListener(listener, settings), r.server.Handler())
	if r.StatusAddress != "" {
		status, err := net.Listen("tcp", r.StatusAddress)
		if err != nil {
			cancel(fmt.Errorf("status: %w", err))
		} else {
			serve(status, r.server.StatusHandler())
		}
	}
	if r.Mutator.HAMi != nil {
		if err := r.watchNodes(work, &wg); err != nil {
			cancel(err)
		}
	}
	r.await("all", "")
	select {
	case <-ctx.Done():
		r.await("all", "stopping")
		// Until then the API server may still call here.
		pause.For(work, r.Linger)
	case <-work.Done():
	}
	late, done := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer done()
	for _, s := range servers {
		if err := s.Shutdown(late); err != nil {
			r.Log.Warn("requests were cut off", "err", err)
		}
	}
	cancel(nil)
	wg.Wait()
	if err := context.Cause(work); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// certificate is what is served, from files or issued here.
func (r *runner) certificate(ctx context.Context, wg *sync.WaitGroup) (*tls.Config, error) {
	if r.CertFile != "" {
		files, err := certs.NewFiles(r.CertFile, r.KeyFile, "", r.Log)
		if err != nil {
			return nil, err
		}
		return files.TLS(), nil
	}
	b := &bootstrap{client: r.Client, namespace: r.SecretNamespace, secret: r.SecretName, configuration: r.Configuration, host: r.Host, now: time.Now, log: r.Log}
	r.await("certificate", "the certificate is being made")
	wg.Go(func() {
		for {
			call, done := context.WithTimeout(ctx, callTimeout)
			err := b.sync(call)
			done()
			next := syncEvery
			if err != nil && ctx.Err() == nil {
				next = retryEvery
				r.Log.Warn("the certificate cannot be looked after", "err", err)
			}
			if err == nil {
				r.await("certificate", "")
			} else if b.serving.Load() == nil {
				r.await("certificate", err.Error())
			}
			if !pause.For(ctx, next) {
				return
			}
		}
	})
	return b.tls(), nil
}

// watchNodes keeps the fleet as the nodes' inventories have it.
func (r *runner) watchNodes(ctx context.Context, wg *sync.WaitGroup) error {
	r.await("nodes", "nodes are being read")
	factory := informers.NewSharedInformerFactoryWithOptions(r.Client, 0, informers.WithTransform(slimNode))
	seen := func(o any) {
		n, ok := o.(*corev1.Node)
		if !ok {
			return
		}
		if err := r.fleet.set(n.Name, n.Annotations[podspec.Inventory]); err != nil {
			r.Log.Warn("an inventory that cannot be read", "node", n.Name, "err", err)
		}
	}
	h, err := factory.Core().V1().Nodes().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: seen, UpdateFunc: func(_, o any) { seen(o) },
		DeleteFunc: func(o any) {
			if name, err := cache.DeletionHandlingMetaNamespaceKeyFunc(o); err == nil {
				_ = r.fleet.set(name, "") // nothing has no errors
			}
		},
	})
	if err != nil {
		return err
	}
	factory.Start(ctx.Done())
	wg.Go(func() {
		if cache.WaitForCacheSync(ctx.Done(), h.HasSynced) {
			r.await("nodes", "")
		}
		<-ctx.Done()
		factory.Shutdown()
	})
	return nil
}

// slimNode keeps of a node what is looked at.
func slimNode(o any) (any, error) {
	n, ok := o.(*corev1.Node)
	if !ok {
		return o, nil
	}
	slim := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion}}
	if text := n.Annotations[podspec.Inventory]; text != "" {
		slim.Annotations = map[string]string{podspec.Inventory: text}
	}
	return slim, nil
}
