package display

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"strings"
	"time"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/emptypb"

	api "tranche.dev/tranche/api/display"
)

// Bounds of what a client can make us hold. What is asked of us fits into a line.
const (
	maxConnections = 128
	maxHeader      = 16 << 10
	maxBody        = 16 << 10
	maxScrapes     = 4
	readTimeout    = 5 * time.Second
	writeTimeout   = 15 * time.Second
	idleTimeout    = time.Minute
	healthTimeout  = 5 * time.Second
	stopTimeout    = 2 * time.Second
)

// Config is what a Server shows.
type Config struct {
	// Source is required.
	Source Source
	// Health calls the node's own sockets as kubelet would; nil: nothing to call. It may be called
	// from several goroutines and keeps to its context's deadline.
	Health func(context.Context) error
	// Ready gives the reasons why the node can't serve pods now, each a line; none: it can. It must
	// not wait.
	Ready func() []string
	// NewNamesOnly leaves gpu-manager's metric names out.
	NewNamesOnly bool
	// Log is where a failing connection is told; default slog.Default().
	Log *slog.Logger
}

// Server answers over HTTP and gRPC.
type Server struct {
	c        Config
	template *template.Template
	http     http.Handler
}

// New makes a Server, which serves nothing yet.
func New(c Config) (*Server, error) {
	if c.Source == nil {
		return nil, errors.New("display: no source given")
	}
	if c.Health == nil {
		c.Health = func(context.Context) error { return nil }
	}
	if c.Ready == nil {
		c.Ready = func() []string { return nil }
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	page, err := parsePage()
	if err != nil {
		return nil, err
	}
	s := &Server{c: c, template: page}
	s.http, err = s.handler()
	return s, err
}

// ServeHTTP answers one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.http.ServeHTTP(w, r) }

// Serve answers on the listeners, of which either may be nil, until the context ends or one of them
// fails. It closes them.
func (s *Server) Serve(ctx context.Context, http, grpc net.Listener) error {
	var stops []func()
	failed := make(chan error, 2)
	if http != nil {
		stops = append(stops, s.serveHTTP(http, failed))
	}
	if grpc != nil {
		stops = append(stops, s.serveGRPC(grpc, failed))
	}
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	for _, stop := range stops {
		stop()
	}
	return err
}

func (s *Server) serveHTTP(l net.Listener, failed chan<- error) func() {
	server := &http.Server{Handler: s.http, MaxHeaderBytes: maxHeader, ReadHeaderTimeout: readTimeout, ReadTimeout: readTimeout,
		WriteTimeout: writeTimeout, IdleTimeout: idleTimeout, ErrorLog: slog.NewLogLogger(s.c.Log.Handler(), slog.LevelDebug)}
	go func() {
		if err := server.Serve(netutil.LimitListener(l, maxConnections)); !errors.Is(err, http.ErrServerClosed) {
			failed <- fmt.Errorf("http on %v: %w", l.Addr(), err)
		}
	}()
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
		defer cancel()
		if server.Shutdown(ctx) != nil {
			_ = server.Close()
		}
	}
}

func (s *Server) serveGRPC(l net.Listener, failed chan<- error) func() {
	server := grpc.NewServer(grpc.MaxRecvMsgSize(maxBody), grpc.MaxHeaderListSize(maxHeader), grpc.MaxConcurrentStreams(maxScrapes), grpc.ConnectionTimeout(readTimeout))
	api.RegisterGPUDisplayServer(server, service{source: s.c.Source})
	go func() {
		if err := server.Serve(netutil.LimitListener(l, maxConnections)); err != nil {
			failed <- fmt.Errorf("grpc on %v: %w", l.Addr(), err)
		}
	}()
	return server.Stop
}

// ListenUnix listens on a unix socket that root alone can use. A socket that a dead process left is
// replaced; one that somebody answers on is not.
func ListenUnix(path string) (net.Listener, error) {
	l, err := net.Listen("unix", path)
	if errors.Is(err, unix.EADDRINUSE) {
		conn, dialErr := net.DialTimeout("unix", path, time.Second)
		if dialErr == nil {
			_ = conn.Close()
			return nil, fmt.Errorf("%s: another process answers on it; is a second manager running?", path)
		}
		info, statErr := os.Lstat(path)
		if statErr != nil || info.Mode().Type() != os.ModeSocket || !errors.Is(dialErr, unix.ECONNREFUSED) {
			return nil, err
		}
		if err := os.Remove(path); err != nil {
			return nil, err
		}
		l, err = net.Listen("unix", path)
	}
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		_ = l.Close()
		return nil, err
	}
	return l, nil
}

// service is GPUDisplay over a Source.
type service struct {
	api.UnimplementedGPUDisplayServer
	source Source
}

func (s service) PrintGraph(context.Context, *emptypb.Empty) (*api.GraphResponse, error) {
	return &api.GraphResponse{Graph: text(Graph(s.source.Snapshot()))}, nil
}

func (s service) PrintUsages(context.Context, *emptypb.Empty) (*api.UsageResponse, error) {
	return Usage(s.source.Snapshot()), nil
}

func (s service) Version(context.Context, *emptypb.Empty) (*api.VersionResponse, error) {
	snapshot := s.source.Snapshot()
	version := snapshot.Commit
	if version == "" {
		version = snapshot.Version
	}
	return &api.VersionResponse{Version: text(version)}, nil
}

func (s *Server) handler() (http.Handler, error) {
	gateway := runtime.NewServeMux(
		runtime.WithMarshalerOption(runtime.MIMEWildcard, compactJSON()),
		runtime.WithMarshalerOption("text/plain", plainText{compactJSON()}))
	if err := api.RegisterGPUDisplayHandlerServer(context.Background(), gateway, service{source: s.c.Source}); err != nil {
		return nil, err
	}
	metrics, err := s.metrics()
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	for _, path := range []string{"/graph", "/usage", "/version"} {
		mux.Handle("GET "+path, gateway)
	}
	mux.Handle("GET /metrics", metrics)
	mux.Handle("GET /metric", metrics)
	mux.HandleFunc("GET /healthz", s.healthz)
	mux.HandleFunc("GET /readyz", s.readyz)
	mux.HandleFunc("GET /{$}", s.page)
	mux.HandleFunc("/debug/pprof/", local(pprof.Index))
	mux.HandleFunc("/debug/pprof/cmdline", local(pprof.Cmdline))
	mux.HandleFunc("/debug/pprof/profile", local(pprof.Profile))
	mux.HandleFunc("/debug/pprof/symbol", local(pprof.Symbol))
	mux.HandleFunc("/debug/pprof/trace", local(pprof.Trace))
	return http.MaxBytesHandler(guarded(mux), maxBody), nil
}

func (s *Server) metrics() (http.Handler, error) {
	registry := prometheus.NewRegistry()
	for _, c := range []prometheus.Collector{
		&collector{source: s.c.Source, f: newFamilies(), old: !s.c.NewNamesOnly},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	} {
		if err := registry.Register(c); err != nil {
			return nil, err
		}
	}
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError, MaxRequestsInFlight: maxScrapes, Timeout: scrapeTimeout,
		ErrorLog: slog.NewLogLogger(s.c.Log.Handler(), slog.LevelWarn)}), nil
}

func (s *Server) healthz(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), healthTimeout)
	defer cancel()
	if err := s.c.Health(ctx); err != nil {
		answer(w, http.StatusServiceUnavailable, err.Error())
		return
	}
	answer(w, http.StatusOK, "ok")
}

func (s *Server) readyz(w http.ResponseWriter, _ *http.Request) {
	var lines []string
	for _, reason := range s.c.Ready() {
		lines = append(lines, oneLine(reason))
	}
	if len(lines) == 0 {
		answer(w, http.StatusOK, "ok")
		return
	}
	answer(w, http.StatusServiceUnavailable, strings.Join(lines, "\n"))
}

func answer(w http.ResponseWriter, status int, message string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = fmt.Fprintln(w, message)
}

// guarded keeps browsers from taking an answer for something else, or from caching it.
func guarded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'")
		h.Set("Cache-Control", "no-store")
		next.ServeHTTP(w, r)
	})
}

// local answers only what came from this host over its loopback interface, as a port forward does.
func local(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		to, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
		if to == nil || !loopback(to.String()) || !loopback(r.RemoteAddr) {
			answer(w, http.StatusForbidden, "profiles are given on the loopback address only: try a port forward")
			return
		}
		next(w, r)
	}
}

func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	return err == nil && net.ParseIP(host).IsLoopback()
}

// compact is JSON as gpu-manager's gateway wrote it: names as in the .proto, nothing for zero
// values, no spaces. (protojson puts spaces in at random, so that nobody relies on its form.)
type compact struct{ *runtime.JSONPb }

func compactJSON() compact {
	return compact{&runtime.JSONPb{MarshalOptions: protojson.MarshalOptions{UseProtoNames: true}}}
}

func (c compact) Marshal(v any) ([]byte, error) {
	raw, err := c.JSONPb.Marshal(v)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = json.Compact(&out, raw)
	return out.Bytes(), err
}

// plainText gives the graph as it is to who asks for text/plain.
type plainText struct{ compact }

func (p plainText) Marshal(v any) ([]byte, error) {
	if g, ok := v.(*api.GraphResponse); ok {
		return []byte(g.GetGraph()), nil
	}
	return p.compact.Marshal(v)
}

func (p plainText) ContentType(v any) string {
	if _, ok := v.(*api.GraphResponse); ok {
		return "text/plain; charset=utf-8"
	}
	return p.compact.ContentType(v)
}
