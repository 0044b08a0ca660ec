package node

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
)

// apiServer is as much of one as the node needs: this node's pods, listed and watched, and events. It answers nothing else,
// and no list of other nodes' pods.
type apiServer struct {
	t *testing.T

	mu      sync.Mutex
	log     []metav1.WatchEvent // the version of a change is its place, from 1
	pods    map[string]*corev1.Pod
	changed chan struct{} // closed at the next change
	events  []string
	patches []string
}

func newAPIServer(t *testing.T) (s *apiServer, kubeconfig string) {
	s = &apiServer{t: t, pods: map[string]*corev1.Pod{}, changed: make(chan struct{})}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	writeFile(t, kubeconfig, "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: "+server.URL+"}}]\ncontexts: [{name: c, context: {cluster: c}}]\ncurrent-context: c\n")
	return s, kubeconfig
}

// set makes a pod known, or changes it; nil: it is gone.
func (s *apiServer) set(name string, pod *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	kind := "ADDED"
	if old := s.pods[name]; old != nil {
		if kind = "MODIFIED"; pod == nil {
			kind, pod = "DELETED", old
		}
	}
	pod = pod.DeepCopy()
	pod.ResourceVersion = strconv.Itoa(len(s.log) + 1)
	if s.pods[name] = pod; kind == "DELETED" {
		delete(s.pods, name)
	}
	s.add(kind, pod)
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *apiServer) add(kind string, pod *corev1.Pod) {
	pod.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
	data, err := json.Marshal(pod)
	if err != nil {
		s.t.Error(err)
	}
	s.log = append(s.log, metav1.WatchEvent{Type: kind})
	s.log[len(s.log)-1].Object.Raw = data
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	switch {
	case r.Method == http.MethodGet && r.URL.Path == "/api/v1/pods" && q.Get("fieldSelector") == "spec.nodeName=node" && q.Get("watch") != "":
		s.watch(w, r)
	case r.Method == http.MethodGet && r.URL.Path == "/api/v1/pods" && q.Get("fieldSelector") == "spec.nodeName=node":
		s.list(w)
	case r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/events"):
		s.event(w, r)
	case r.Method == http.MethodPatch:
		s.mu.Lock()
		s.patches = append(s.patches, r.URL.Path)
		s.mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"kind":"Pod","apiVersion":"v1"}`)
	default:
		http.Error(w, r.Method+" "+r.URL.String(), http.StatusForbidden)
	}
}

func (s *apiServer) list(w http.ResponseWriter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(len(s.log))}}
	for _, p := range s.pods {
		list.Items = append(list.Items, *p)
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(list)
}

func (s *apiServer) watch(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	out := json.NewEncoder(w)
	s.mu.Lock()
	at, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	if r.URL.Query().Get("sendInitialEvents") == "true" {
		at = len(s.log)
		for _, p := range s.pods {
			_ = out.Encode(map[string]any{"type": "ADDED", "object": p})
		}
		_ = out.Encode(map[string]any{"type": "BOOKMARK", "object": &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
			ObjectMeta: metav1.ObjectMeta{ResourceVersion: strconv.Itoa(at), Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}}})
	}
	for {
		for ; at < len(s.log); at++ {
			_ = out.Encode(s.log[at])
		}
		changed := s.changed
		s.mu.Unlock()
		w.(http.Flusher).Flush()
		select {
		case <-r.Context().Done():
			return
		case <-changed:
		}
		s.mu.Lock()
	}
}

func (s *apiServer) event(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	object, _, decodeErr := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
	e, ok := object.(*corev1.Event)
	if err != nil || decodeErr != nil || !ok {
		s.t.Errorf("%v %v %T", err, decodeErr, object)
		return
	}
	s.mu.Lock()
	s.events = append(s.events, fmt.Sprintf("%s %s %s: %s", e.InvolvedObject.Kind, e.InvolvedObject.Name, e.Reason, e.Message))
	s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(e)
}

func (s *apiServer) told(text string) func() bool {
	return func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return slices.ContainsFunc(s.events, func(e string) bool { return strings.Contains(e, text) })
	}
}

// Kubelet before 1.36 does not tell of its pods; the API server does, and may be late.
func TestPodsFromTheAPIServer(t *testing.T) {
	api, kubeconfig := newAPIServer(t)
	w := newWorld(t, "a100-80g:2", 31, func(c *Config) {
		c.Kubeconfig, c.PodsSocket = kubeconfig, "/none"
		c.LiveChange = LiveChange{On: true}
	})
	gpus, units := w.uuids(), w.gpus[0].Units
	known := func(p *corev1.Pod) {
		t.Helper()
		api.set(p.Name, p)
		eventually(t, 10*time.Second, p.Name+" is known", func() bool { return w.node.table.get(string(p.UID)) != nil })
	}
	// Two of the same size: kubelet admits them as it hears of them, however old they are. The second has a ceiling, which only
	// the API server knows.
	first, second := w.pod(pinned(gpus[1]), containerSpec{name: "c", cores: 30, units: 8}), w.pod(nil, containerSpec{name: "c", cores: 30, units: 8})
	second.Annotations = map[string]string{"tencent.com/vcuda-core-limit": "80"}
	first.CreationTimestamp = metav1.NewTime(second.CreationTimestamp.Add(time.Minute))
	known(first)
	known(second)
	w.mustAdmit(first)
	w.mustAdmit(second)
	// One that the API server tells of after it was admitted.
	late := w.pod(nil, containerSpec{name: "c", cores: 40, units: 16})
	late.Annotations = map[string]string{"tencent.com/vcuda-core-limit": "50"}
	w.mustAdmit(late)
	known(late)
	var got []string
	for _, p := range []*corev1.Pod{first, second, late} {
		got = append(got, p.Name+" "+strings.Join(limits(t, w.start(p, "c")), " "))
	}
	want := []string{"pod-1 30-30 2048Mi", "pod-2 30-80 2048Mi", "pod-3 40-50 4096Mi"}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("limits %q, want %q", got, want)
	}
	if on := w.gpusOf(first, "c", core); !reflect.DeepEqual(on, gpus[1:]) {
		t.Errorf("the pinned one is on %q", on)
	}
	// Annotations change limits, a refusal is told, an end gives back.
	first.Annotations["tranche.dev/cores"] = "20"
	api.set(first.Name, first)
	eventually(t, 10*time.Second, "the change is told", api.told("Pod pod-1 GPULimitsChanged: container c: limits of each GPU are now 20 cores"))
	large := w.pod(nil, containerSpec{name: "c", cores: 100, units: 320})
	known(large)
	if err := w.admit(large); err == nil {
		t.Error("a pod was admitted that fits nowhere")
	}
	eventually(t, 10*time.Second, "the refusal is told", api.told("Pod pod-4 GPURefused: "))
	w.end()
	w.startNode()
	if n := len(w.node.store.List()); n != 3 {
		t.Errorf("%d allocations after a restart of the node", n)
	}
	for _, p := range []*corev1.Pod{first, second, late, large} {
		w.kubelet.Delete(p.UID)
		api.set(p.Name, nil)
	}
	eventually(t, 20*time.Second, "nothing is left", func() bool { return len(w.node.store.List()) == 0 })
	w.untilFree(fmt.Sprintf("100/%d 100/%d", units, units))
	api.mu.Lock()
	defer api.mu.Unlock()
	if !slices.Contains(api.patches, "/api/v1/nodes/node") || !slices.Contains(api.patches, "/api/v1/namespaces/test/pods/pod-3") {
		t.Errorf("written: %q", api.patches)
	}
}

// A pod that the API server tells of a moment after kubelet's first call is on its GPU with both resources.
func TestPodToldLate(t *testing.T) {
	api, kubeconfig := newAPIServer(t)
	w := newWorld(t, "a100-80g:2", 32, func(c *Config) { c.Kubeconfig, c.PodsSocket = kubeconfig, "/none" })
	uuid := w.uuids()[1]
	eventually(t, 10*time.Second, "pods are listed", func() bool { _, err := w.node.pods.List(t.Context()); return err == nil })
	for range 4 {
		p := w.pod(pinned(uuid), containerSpec{name: "c", cores: 20, units: 8})
		time.AfterFunc(podLate/5, func() { api.set(p.Name, p) })
		w.mustAdmit(p)
		for _, res := range []string{core, memory} {
			if on := w.gpusOf(p, "c", res); !reflect.DeepEqual(on, []string{uuid}) {
				t.Errorf("%s of %s is on %q, want %s", res, p.Name, on, uuid)
			}
		}
		w.start(p, "c")
	}
}

// Kubelet admits the younger of two pods of a size first, so its calls are taken for the older one's. That one is placed as it
// asks all the same, whether or not the younger has started.
func TestPodsOutOfOrder(t *testing.T) {
	api, kubeconfig := newAPIServer(t)
	w := newWorld(t, "a100-80g:2", 33, func(c *Config) { c.Kubeconfig, c.PodsSocket = kubeconfig, "/none" })
	gpus, units := w.uuids(), w.gpus[0].Units
	for _, started := range []bool{true, false} {
		older, younger := w.pod(pinned(gpus[1]), containerSpec{name: "c", cores: 20, units: 8}), w.pod(nil, containerSpec{name: "c", cores: 20, units: 8})
		for _, p := range []*corev1.Pod{older, younger} {
			api.set(p.Name, p)
			eventually(t, 10*time.Second, p.Name+" is known", func() bool { return w.node.table.lives(string(p.UID)) })
		}
		w.mustAdmit(younger)
		if started {
			w.start(younger, "c")
		}
		w.mustAdmit(older)
		for _, res := range []string{core, memory} {
			if on := w.gpusOf(older, "c", res); !reflect.DeepEqual(on, gpus[1:]) {
				t.Errorf("younger started %v: %s is on %q, want %s", started, res, on, gpus[1])
			}
		}
		for _, p := range []*corev1.Pod{older, younger} {
			if got := limits(t, w.start(p, "c")); !reflect.DeepEqual(got, []string{"20-20 2048Mi"}) {
				t.Errorf("younger started %v: limits %q", started, got)
			}
		}
		w.untilFree(fmt.Sprintf("100/%d 60/%d", units, units-16))
		for _, p := range []*corev1.Pod{older, younger} {
			w.kubelet.Delete(p.UID)
			api.set(p.Name, nil)
		}
		w.untilFree(fmt.Sprintf("100/%d 100/%d", units, units))
	}
}
