package scheduler

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	extender "k8s.io/kube-scheduler/extender/v1"
)

// fakeAPI answers as a test says.
type fakeAPI struct {
	pod     *corev1.Pod
	podErr  error
	bindErr error
	bound   []Binding
	events  []string
	evicted []string
}

func (f *fakeAPI) Pod(context.Context, string, string) (*corev1.Pod, error) { return f.pod, f.podErr }
func (f *fakeAPI) Bind(_ context.Context, b Binding) error {
	f.bound = append(f.bound, b)
	return f.bindErr
}
func (f *fakeAPI) Event(pod types.NamespacedName, _ types.UID, text string) {
	f.events = append(f.events, pod.String()+": "+text)
}
func (f *fakeAPI) Violations([]types.NamespacedName) int { return 0 }
func (f *fakeAPI) Evict(_ context.Context, pod types.NamespacedName, _ types.UID) error {
	f.evicted = append(f.evicted, pod.String())
	return nil
}

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

func post(t *testing.T, url string, in, out any) int {
	t.Helper()
	body, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.Post(url, "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode == http.StatusOK {
		if err := json.Unmarshal(text, out); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
	return resp.StatusCode
}

// serve answers one request without a connection.
func serve(t *testing.T, h http.Handler, verb string, in any) *httptest.ResponseRecorder {
	t.Helper()
	body, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/scheduler/"+verb, bytes.NewReader(body)))
	return w
}

func TestVerbs(t *testing.T) {
	c := testCore(t, CoreConfig{Evict: true}, testNode("a", 1, "T4", 16*gib), testNode("b", 1, "T4", 16*gib))
	api := &fakeAPI{}
	s := NewServer(c, api, quiet(), "tranche 1", 10_000)
	web := httptest.NewServer(s.Handler())
	defer web.Close()
	names := []string{"a", "b"}
	p := testPod("p", 60, 8)
	in := extender.ExtenderArgs{Pod: p, NodeNames: &names}
	var filtered extender.ExtenderFilterResult
	if code := post(t, web.URL+"/scheduler/predicates", in, &filtered); code != http.StatusServiceUnavailable {
		t.Error("answered before it was ready:", code)
	}
	s.Ready()
	if post(t, web.URL+"/scheduler/predicates", in, &filtered); !reflect.DeepEqual(*filtered.NodeNames, names) {
		t.Errorf("%+v", filtered)
	}
	var scores extender.HostPriorityList
	if post(t, web.URL+"/scheduler/priorities", in, &scores); len(scores) != 2 || scores[0].Score+scores[1].Score < 10 {
		t.Errorf("%+v", scores)
	}
	var bound extender.ExtenderBindingResult
	post(t, web.URL+"/scheduler/bind", extender.ExtenderBindingArgs{PodName: "p", PodNamespace: "ns", PodUID: p.UID, Node: "a"}, &bound)
	if bound.Error != "" || len(api.bound) != 1 || api.bound[0].Annotations["tencent.com/predicate-node"] != "a" {
		t.Errorf("%+v %+v", bound, api.bound)
	}
	big := testPod("big", 100, 0)
	only := []string{"a"}
	var none extender.ExtenderFilterResult
	post(t, web.URL+"/scheduler/predicates", extender.ExtenderArgs{Pod: big, NodeNames: &only}, &none)
	if len(*none.NodeNames) != 0 || none.FailedNodes["a"] != "asked 100 cores: cores and memory short" && none.FailedNodes["a"] == "" || len(api.events) != 1 || !strings.Contains(api.events[0], "nearest: a (gpu 0: 40 cores, 14 GiB free)") {
		t.Errorf("%+v %v", none, api.events)
	}
	bad := testPod("bad", 30, 0)
	var odd extender.ExtenderFilterResult
	post(t, web.URL+"/scheduler/predicates", extender.ExtenderArgs{Pod: bad, NodeNames: &names}, &odd)
	if len(odd.FailedAndUnresolvableNodes) != 2 || !strings.Contains(odd.FailedAndUnresolvableNodes["a"], "need memory as well") {
		t.Errorf("%+v", odd)
	}
	var pre extender.ExtenderPreemptionResult
	post(t, web.URL+"/scheduler/preemption", extender.ExtenderPreemptionArgs{Pod: priority(testPod("high", 60, 8), 7),
		NodeNameToMetaVictims: map[string]*extender.MetaVictims{"b": {Pods: []*extender.MetaPod{{UID: "x"}}}}}, &pre)
	if len(pre.NodeNameToMetaVictims) != 1 || pre.NodeNameToMetaVictims["b"].Pods[0].UID != "x" {
		t.Errorf("%+v", pre)
	}
	if code := post(t, web.URL+"/scheduler/predicates", strings.Repeat("x", 20_000), nil); code != http.StatusBadRequest {
		t.Error("a body beyond the limit:", code)
	}
	for path, want := range map[string]string{"/version": "tranche 1", "/healthz": "ok", "/readyz": "ok", "/scheduler/explain/ns/big": `"phase": "asked"`,
		"/scheduler/explain/ns/who": "nothing is known", "/metrics": `tranche_scheduler_reservations{phase="assumed"} 1`} {
		resp, err := http.Get(web.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		if err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s: %s %v, want %s", path, text, err, want)
		}
		_ = resp.Body.Close()
	}
	s.Wait()
}

func status(code int32) error {
	err := apierrors.NewGenericServerResponse(int(code), "post", schema.GroupResource{Resource: "pods"}, "p", "", 0, false)
	return err
}

// What becomes of a pod whose binding fails in each way.
func TestBindOutcomes(t *testing.T) {
	at := func(node string) *corev1.Pod { p := testPod("p", 60, 8); p.Spec.NodeName = node; return p }
	other := testPod("p", 60, 8)
	other.UID = "another"
	for _, c := range []struct {
		name    string
		bindErr error
		pod     *corev1.Pod
		podErr  error
		phase   string // "": forgotten
		ok      bool
	}{
		{"done", nil, nil, nil, "assumed", true},
		{"gone", status(404), nil, nil, "", false},
		{"done before", status(409), at("a"), nil, "assumed", true},
		{"done elsewhere", status(409), at("b"), nil, "assumed", false},
		{"not done", status(409), at(""), nil, "asked", false},
		{"replaced", status(409), other, nil, "", false},
		{"conflict and silence", status(409), nil, errors.New("no answer"), "unsure", false},
		{"forbidden", status(403), nil, nil, "asked", false},
		{"server error", status(500), nil, nil, "unsure", false},
		{"no answer", context.DeadlineExceeded, nil, nil, "unsure", false},
	} {
		core := testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib), testNode("b", 1, "T4", 16*gib))
		p := testPod("p", 60, 8)
		filter(t, core, p, "a", "b")
		s := NewServer(core, &fakeAPI{pod: c.pod, podErr: c.podErr, bindErr: c.bindErr}, quiet(), "", 0)
		s.Ready()
		err := s.Bind(t.Context(), extender.ExtenderBindingArgs{PodName: "p", PodNamespace: "ns", PodUID: p.UID, Node: "a"})
		phase := ""
		if q := core.pods[p.UID]; q != nil {
			phase = q.phase.String()
		}
		if phase != c.phase || (err == nil) != c.ok {
			t.Errorf("%s: %s %v, want %s", c.name, phase, err, c.phase)
		}
	}
	// After a restart the pod is not known: it is read.
	core := testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib))
	api := &fakeAPI{pod: at("")}
	s := NewServer(core, api, quiet(), "", 0)
	s.Ready()
	if err := s.Bind(t.Context(), extender.ExtenderBindingArgs{PodName: "p", PodNamespace: "ns", PodUID: "uid-p", Node: "a"}); err != nil || len(api.bound) != 1 {
		t.Error(err, api.bound)
	}
}
