package webhook

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Path is where pods are sent.
const Path = "/mutate"

// maxBody is more than an object that the API server can store (1.5 MiB in its own format) takes as JSON.
const maxBody = 4 << 20

// maxTurns requests are in memory at a time, as anybody in the cluster may send some.
const maxTurns = 8

// Server speaks the API server's protocol (admission.k8s.io/v1) for a Mutator. Safe for concurrent use.
type Server struct {
	mutator  *Mutator
	gpus     func() []GPU
	log      *slog.Logger
	version  string
	wait     atomic.Pointer[string] // why it is not ready; nil: it is
	registry *prometheus.Registry
	outcomes *prometheus.CounterVec
	latency  prometheus.Histogram
	// turns bounds the requests that are in memory at a time.
	turns chan struct{}
}

// NewServer makes a server that is not ready. gpus tells those of the cluster.
func NewServer(m *Mutator, gpus func() []GPU, log *slog.Logger, version string) *Server {
	s := &Server{mutator: m, gpus: gpus, log: log, version: version, registry: prometheus.NewRegistry(), turns: make(chan struct{}, maxTurns)}
	s.outcomes = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "tranche_webhook_pods_total", Help: "Pods, by what became of them."}, []string{"outcome"})
	s.latency = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "tranche_webhook_request_duration_seconds", Help: "Time to answer.",
		Buckets: prometheus.ExponentialBuckets(0.00005, 2, 18)})
	s.registry.MustRegister(s.outcomes, s.latency, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	s.NotReady("starting")
	return s
}

// Ready says on /readyz that pods may be sent.
func (s *Server) Ready() { s.wait.Store(nil) }

// NotReady says on /readyz why pods should not be sent; those that come are answered all the same.
func (s *Server) NotReady(why string) { s.wait.Store(&why) }

// Handler serves the API server.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+Path, s.mutate)
	return mux
}

// StatusHandler serves health, metrics and version.
func (s *Server) StatusHandler() http.Handler {
	mux := http.NewServeMux()
	text := func(t string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, t+"\n") } // the client has gone
	}
	mux.HandleFunc("GET /version", text(s.version))
	mux.HandleFunc("GET /healthz", text("ok"))
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		if why := s.wait.Load(); why != nil {
			http.Error(w, *why, http.StatusServiceUnavailable)
			return
		}
		text("ok")(w, r)
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{}))
	return mux
}

func (s *Server) mutate(w http.ResponseWriter, r *http.Request) {
	started := time.Now()
	select {
	case s.turns <- struct{}{}:
		defer func() { <-s.turns }()
	case <-r.Context().Done():
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	var review admissionv1.AdmissionReview
	if err == nil {
		review, err = s.review(body)
	}
	var out []byte
	if err == nil {
		out, err = json.Marshal(review)
	}
	if err != nil {
		s.outcomes.WithLabelValues("error").Inc()
		s.log.Warn("a request that cannot be read", "err", err)
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(out) // the client has gone
	s.latency.Observe(time.Since(started).Seconds())
}

// review answers a request.
func (s *Server) review(body []byte) (admissionv1.AdmissionReview, error) {
	var in admissionv1.AdmissionReview
	if err := json.Unmarshal(body, &in); err != nil {
		return in, fmt.Errorf("AdmissionReview: %w", err)
	}
	q := in.Request
	if q == nil || in.APIVersion != admissionv1.SchemeGroupVersion.String() || in.Kind != "AdmissionReview" {
		return in, fmt.Errorf("no request of an AdmissionReview of %s: %s %s", admissionv1.SchemeGroupVersion, in.APIVersion, in.Kind)
	}
	answer := &admissionv1.AdmissionResponse{UID: q.UID, Allowed: true}
	out := admissionv1.AdmissionReview{TypeMeta: in.TypeMeta, Response: answer}
	if q.Operation != admissionv1.Create || q.Resource.Resource != "pods" || q.Resource.Group != "" || q.SubResource != "" {
		return out, nil
	}
	if err := checkQuantities(q.Object.Raw); err != nil {
		return in, fmt.Errorf("pod: %w", err)
	}
	var pod corev1.Pod
	if err := json.Unmarshal(q.Object.Raw, &pod); err != nil {
		return in, fmt.Errorf("pod: %w", err)
	}
	name := q.Namespace + "/" + pod.Name + pod.GenerateName
	ops, warnings, err := s.mutator.Mutate(&pod, s.gpus())
	outcome := "unchanged"
	switch {
	case refused(err):
		outcome = "refused"
		s.log.Info("refused", "pod", name, "why", err)
		answer.Allowed = false
		answer.Result = &metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonInvalid, Code: http.StatusUnprocessableEntity, Message: "tranche: " + err.Error()}
	case err != nil:
		return in, err
	case len(ops) > 0:
		outcome = "changed"
		if answer.Patch, err = json.Marshal(ops); err != nil {
			return in, err
		}
		kind := admissionv1.PatchTypeJSONPatch
		answer.PatchType = &kind
		s.log.Debug("changed", "pod", name, "patch", string(answer.Patch))
	}
	for _, text := range warnings {
		answer.Warnings = append(answer.Warnings, "tranche: "+text)
	}
	s.outcomes.WithLabelValues(outcome).Inc()
	return out, nil
}
