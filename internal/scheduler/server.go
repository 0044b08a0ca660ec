package scheduler

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	extender "k8s.io/kube-scheduler/extender/v1"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// API is what a Server asks of the API server.
type API interface {
	// Pod reads a pod as it is now; nil if there is none of this name.
	Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error)
	// Bind sends a binding, on which the API server works no longer than BindTimeout. Errors are the API server's.
	Bind(ctx context.Context, b Binding) error
	// Event tells a pod's owner something.
	Event(pod types.NamespacedName, uid types.UID, text string)
	// Violations are how many of these pods' evictions, one after the other, a disruption budget forbids.
	Violations(pods []types.NamespacedName) int
	// Evict asks for a pod's eviction; an error says that it is not granted.
	Evict(ctx context.Context, pod types.NamespacedName, uid types.UID) error
}

// MaxBodyDefault is enough for 5,000 whole nodes.
const MaxBodyDefault = 128 << 20

// Server speaks the extender's protocol for a Core. Safe for concurrent use.
type Server struct {
	core    *Core
	api     API
	log     *slog.Logger
	version string
	maxBody int64
	// wait is why verbs are not answered (yet), stopped why they will never be again; both nil: they are.
	wait, stopped atomic.Pointer[string]
	// unanswered is when a binding last ended without an answer.
	unanswered atomic.Pointer[time.Time]
	buffers    sync.Pool
	latency    *prometheus.HistogramVec
	registry   *prometheus.Registry
	evicting   sync.WaitGroup
}

// scratch is what a request needs and the next one can use again.
type scratch struct {
	// body is the memory of all strings in args that were not unmarshalled, and of those in verdict and scores.
	body    []byte
	args    args
	verdict Verdict
	scores  []Score
	out     []byte
}

// NewServer makes a server that is not ready. maxBody 0 means MaxBodyDefault.
func NewServer(core *Core, api API, log *slog.Logger, version string, maxBody int64) *Server {
	s := &Server{core: core, api: api, log: log, version: version, maxBody: maxBody, registry: prometheus.NewRegistry()}
	if s.maxBody == 0 {
		s.maxBody = MaxBodyDefault
	}
	s.buffers.New = func() any { return &scratch{} }
	s.NotReady("starting")
	s.register()
	return s
}

// Ready lets verbs be answered.
func (s *Server) Ready() { s.wait.Store(nil) }

// NotReady answers verbs with 503 and says why.
func (s *Server) NotReady(why string) { s.wait.Store(&why) }

// Stop is NotReady for good, whatever Ready says later.
func (s *Server) Stop(why string) { s.stopped.Store(&why) }

// waits is why verbs are not answered; nil: they are.
func (s *Server) waits() *string {
	if why := s.stopped.Load(); why != nil {
		return why
	}
	return s.wait.Load()
}

// Unanswered is how long ago a binding ended without an answer, on which the API server may still be working. False: none
// ever did.
func (s *Server) Unanswered() (time.Duration, bool) {
	at := s.unanswered.Load()
	if at == nil {
		return 0, false
	}
	return time.Since(*at), true
}

// Wait waits for evictions that are under way.
func (s *Server) Wait() { s.evicting.Wait() }

// Handler serves everything but profiles.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	verb := func(name string, do func(*http.Request, *scratch) ([]byte, error)) {
		timer := s.latency.WithLabelValues(name)
		mux.HandleFunc("POST /scheduler/"+name, func(w http.ResponseWriter, r *http.Request) { s.answer(w, r, timer, do) })
	}
	verb("predicates", s.predicates)
	verb("priorities", s.priorities)
	verb("priorities-others", s.prioritiesOthers)
	verb("bind", s.bindVerb)
	verb("preemption", s.preemption)
	mux.HandleFunc("GET /scheduler/explain/{namespace}/{pod}", s.explain)
	s.status(mux)
	return mux
}

// StatusHandler serves what does no harm to be seen: health, metrics and version, not the verbs.
func (s *Server) StatusHandler() http.Handler {
	mux := http.NewServeMux()
	s.status(mux)
	return mux
}

func (s *Server) status(mux *http.ServeMux) {
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) { writeText(w, s.version) })
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { writeText(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if why := s.waits(); why != nil {
			http.Error(w, *why, http.StatusServiceUnavailable)
			return
		}
		writeText(w, "ok")
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{}))
}

func writeText(w http.ResponseWriter, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = io.WriteString(w, text+"\n") // the client has gone
}

// badRequest is the caller's fault.
type badRequest struct{ error }

func (s *Server) answer(w http.ResponseWriter, r *http.Request, timer prometheus.Observer, do func(*http.Request, *scratch) ([]byte, error)) {
	if why := s.waits(); why != nil {
		http.Error(w, *why, http.StatusServiceUnavailable)
		return
	}
	started := time.Now()
	x, ok := s.buffers.Get().(*scratch)
	if !ok {
		x = &scratch{}
	}
	r.Body = http.MaxBytesReader(w, r.Body, s.maxBody)
	out, err := do(r, x)
	if err != nil {
		var bad badRequest
		code := http.StatusInternalServerError
		if errors.As(err, &bad) {
			code = http.StatusBadRequest
		}
		s.log.Warn("request failed", "path", r.URL.Path, "err", err)
		http.Error(w, err.Error(), code)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(out)))
	_, _ = w.Write(out) // the client has gone
	if cap(out)+cap(x.body) < 8<<20 {
		x.out = out
		s.buffers.Put(x)
	}
	timer.Observe(time.Since(started).Seconds())
}

// read reads a whole body.
func (x *scratch) read(r *http.Request) error {
	b := slices.Grow(x.body[:0], int(min(max(r.ContentLength, 0), 4<<20))+512)
	for {
		n, err := r.Body.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		x.body = b
		switch {
		case err == io.EOF:
			return nil
		case err != nil:
			return badRequest{fmt.Errorf("body: %w", err)}
		}
		b = slices.Grow(b, 512)
	}
}

// ask reads who is asked about, and x.args.
func (x *scratch) ask(r *http.Request) (Asked, error) {
	if err := x.read(r); err != nil {
		return Asked{}, err
	}
	// Not a copy, which would cost more than all the rest: the core keeps none of the names that it is given.
	if err := x.args.parse(unsafe.String(unsafe.SliceData(x.body), len(x.body))); err != nil {
		return Asked{}, badRequest{err}
	}
	asked, err := x.args.asked()
	if err != nil {
		return asked, badRequest{err}
	}
	return asked, nil
}

func (s *Server) predicates(r *http.Request, x *scratch) ([]byte, error) {
	asked, err := x.ask(r)
	if err != nil {
		return nil, err
	}
	a, v := &x.args, &x.verdict
	if err := s.filter(r.Context(), asked, a.names, v); err != nil {
		return json.Marshal(extender.ExtenderFilterResult{Error: err.Error()})
	}
	if v.Event != "" || v.Evict {
		s.unplaced(asked, a.names, v)
	}
	return appendFilter(x.out[:0], a, v), nil
}

// filter is core.Filter, again as things change as long as that is worth it: kube-scheduler knows of a pod's end from a
// watch of its own, and does not try again when ours is later.
func (s *Server) filter(ctx context.Context, asked Asked, names []string, v *Verdict) error {
	v.Again = false
	if err := s.core.Filter(asked, names, v); err != nil || v.Await == 0 {
		return err
	}
	began := time.Now()
	defer func(victims bool) { s.core.Waited(victims, time.Since(began)) }(v.evicts)
	until := began.Add(v.Await)
	event, evict := v.Event, v.Evict
	for s.news(ctx, v, until) {
		v.Again = true
		err := s.core.Filter(asked, names, v)
		if err != nil || len(v.Passed) > 0 || v.Unresolvable != "" {
			s.core.Unheeded(asked.UID, event != "", evict)
			return err
		}
		event, evict = cmp.Or(v.Event, event), v.Evict || evict
	}
	v.Event, v.Evict = event, evict
	return nil
}

// newsEvery is how often it is looked for news while a Filter waits for some.
const newsEvery = 5 * time.Millisecond

// news waits for something after a verdict that may alter it; false: nothing came until then.
func (s *Server) news(ctx context.Context, v *Verdict, until time.Time) bool {
	for time.Now().Before(until) && ctx.Err() == nil {
		if s.core.ChangedSince(v) {
			return true
		}
		time.Sleep(newsEvery)
	}
	return false
}

// unplaced does what is to be done for a pod that found no node, beside saying so.
func (s *Server) unplaced(asked Asked, names []string, v *Verdict) {
	object, err := asked.Object()
	if err != nil || s.waits() != nil {
		s.core.Unheeded(asked.UID, v.Event != "", v.Evict)
		return
	}
	name := types.NamespacedName{Namespace: object.Namespace, Name: object.Name}
	if v.Event != "" {
		s.api.Event(name, asked.UID, v.Event)
	}
	if v.Evict {
		nodes := make([]string, len(names)) // the names are part of the body, which will be another's
		for i := range names {
			nodes[i] = strings.Clone(names[i])
		}
		s.evicting.Go(func() { s.evict(name, asked.UID, nodes) })
	}
}

// evict makes room for a pod.
func (s *Server) evict(name types.NamespacedName, uid types.UID, nodes []string) {
	e, ok := s.core.PlanEviction(uid, nodes, s.api.Violations)
	if !ok {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for i, victim := range e.Pods {
		if s.waits() != nil { // another replica leads, and knows nothing of this
			s.core.AbandonEviction(uid)
			return
		}
		if err := s.api.Evict(ctx, victim, e.UIDs[i]); err != nil && !apierrors.IsNotFound(err) {
			s.log.Warn("an eviction was not granted", "pod", victim.String(), "for", name.String(), "err", err)
			s.core.AbandonEviction(uid)
			return
		}
		s.log.Info("evicted", "pod", victim.String(), "for", name.String(), "node", e.Node)
	}
	s.api.Event(name, uid, fmt.Sprintf("evicted %d pods of lower priority on node %s to make room on its GPUs", len(e.Pods), e.Node))
}

func (s *Server) priorities(r *http.Request, x *scratch) ([]byte, error) {
	asked, err := x.ask(r)
	if err != nil {
		return nil, err
	}
	if x.scores, err = s.core.Prioritize(asked, x.args.names, x.scores); err != nil {
		return nil, err
	}
	return appendScores(x.out[:0], &x.args, x.scores), nil
}

// prioritiesOthers is the verb of a second entry in kube-scheduler's configuration, one for all pods.
func (s *Server) prioritiesOthers(r *http.Request, x *scratch) ([]byte, error) {
	asked, err := x.ask(r)
	if err != nil {
		return nil, err
	}
	if x.scores, err = s.core.PrioritizeOthers(asked, x.args.names, x.scores); err != nil {
		return nil, badRequest{err}
	}
	return appendScores(x.out[:0], &x.args, x.scores), nil
}

func (s *Server) bindVerb(r *http.Request, _ *scratch) ([]byte, error) {
	var in extender.ExtenderBindingArgs
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
		return nil, badRequest{err}
	}
	var out extender.ExtenderBindingResult
	// A caller that gives up does not undo what was begun.
	if err := s.Bind(context.WithoutCancel(r.Context()), in); err != nil {
		out.Error = err.Error()
		s.log.Info("not bound", "pod", in.PodNamespace+"/"+in.PodName, "node", in.Node, "err", err)
	}
	return json.Marshal(out)
}

// begin is core.Bind while verbs are answered. That was asked before the body came, which may have taken long.
func (s *Server) begin(uid types.UID, node string, object *corev1.Pod) (Binding, error) {
	if why := s.waits(); why != nil {
		return Binding{}, errors.New(*why)
	}
	return s.core.Bind(uid, node, object)
}

// Bind binds a pod to the node, on GPUs of the core's choice.
func (s *Server) Bind(ctx context.Context, in extender.ExtenderBindingArgs) error {
	b, err := s.begin(in.PodUID, in.Node, nil)
	if errors.Is(err, ErrUnknownPod) {
		within, cancel := context.WithTimeout(ctx, BindTimeout)
		defer cancel()
		object, readErr := s.api.Pod(within, in.PodNamespace, in.PodName)
		switch {
		case readErr != nil:
			return readErr
		case object == nil || object.UID != in.PodUID:
			return fmt.Errorf("pod %s/%s is gone", in.PodNamespace, in.PodName)
		case object.Spec.NodeName != "":
			s.core.PodRead(object)
		}
		b, err = s.begin(in.PodUID, in.Node, object)
	}
	if err != nil || b.Done {
		return err
	}
	err = s.api.Bind(ctx, b)
	switch {
	case err == nil:
		s.core.Bound(b)
	case apierrors.IsNotFound(err):
		s.core.BindFailed(b, NoPod)
	case apierrors.IsConflict(err):
		return s.conflict(ctx, b, err)
	case refused(err):
		s.core.BindFailed(b, Refused)
	default:
		now := time.Now()
		s.unanswered.Store(&now)
		s.core.BindFailed(b, NoAnswer)
	}
	return err
}

// conflict finds out what stood against a binding: that it was done before, that the pod is on its way out, or
// another pod of its name.
func (s *Server) conflict(ctx context.Context, b Binding, conflict error) error {
	ctx, cancel := context.WithTimeout(ctx, BindTimeout)
	defer cancel()
	object, err := s.api.Pod(ctx, b.Namespace, b.Name)
	switch {
	case err != nil:
		s.core.BindFailed(b, NoAnswer)
	case object == nil || object.UID != b.UID:
		s.core.BindFailed(b, NoPod)
	case object.Spec.NodeName == "":
		s.core.BindFailed(b, Refused)
	default:
		s.core.PodRead(object)
		if object.Spec.NodeName == b.Node {
			return nil
		}
	}
	return conflict
}

// refused tells whether an answer means that the request was not done and will not be. A server's own error
// may hide a write that was done.
func refused(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	code := status.Status().Code
	return code >= 400 && code < 500 && code != http.StatusRequestTimeout
}

func (s *Server) preemption(r *http.Request, _ *scratch) ([]byte, error) {
	var in extender.ExtenderPreemptionArgs
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
		return nil, badRequest{err}
	}
	if in.Pod == nil {
		return nil, badRequest{errors.New("no pod")}
	}
	offers := map[string]Victims{}
	for name, v := range in.NodeNameToMetaVictims {
		if v != nil {
			offers[name] = Victims{Violations: v.NumPDBViolations, UIDs: uidsOf(v.Pods, func(p *extender.MetaPod) types.UID { return types.UID(p.UID) })}
		}
	}
	for name, v := range in.NodeNameToVictims {
		if v != nil {
			offers[name] = Victims{Violations: v.NumPDBViolations, UIDs: uidsOf(v.Pods, func(p *corev1.Pod) types.UID { return p.UID })}
		}
	}
	got, err := s.core.Preempt(AskedPod(in.Pod), offers, s.api.Violations)
	if err != nil {
		return nil, err
	}
	out := extender.ExtenderPreemptionResult{NodeNameToMetaVictims: map[string]*extender.MetaVictims{}}
	for name, v := range got {
		m := &extender.MetaVictims{NumPDBViolations: v.Violations}
		for _, uid := range v.UIDs {
			m.Pods = append(m.Pods, &extender.MetaPod{UID: string(uid)})
		}
		out.NodeNameToMetaVictims[name] = m
	}
	return json.Marshal(out)
}

// uidsOf pods that are there.
func uidsOf[P any](pods []*P, of func(*P) types.UID) []types.UID {
	var out []types.UID
	for _, p := range pods {
		if p != nil {
			out = append(out, of(p))
		}
	}
	return out
}

func (s *Server) explain(w http.ResponseWriter, r *http.Request) {
	e, ok := s.core.Explain(r.PathValue("namespace"), r.PathValue("pod"))
	if !ok {
		http.Error(w, "nothing is known of this pod: it was not asked about lately, or asks for no GPU", http.StatusNotFound)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(e) // the client has gone
}
