package scheduler

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	extender "k8s.io/kube-scheduler/extender/v1"

	"tranche.dev/tranche/internal/inventory"
	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/quota"
)

// A leader that has lost its lease while it was still reading must not answer when it has read.
func TestStopIsForGood(t *testing.T) {
	s := NewServer(testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib)), &fakeAPI{}, quiet(), "", 0)
	web := httptest.NewServer(s.Handler())
	defer web.Close()
	s.Ready()
	names := []string{"a"}
	in := extender.ExtenderArgs{Pod: testPod("p", 60, 8), NodeNames: &names}
	if code := post(t, web.URL+"/scheduler/predicates", in, &extender.ExtenderFilterResult{}); code != http.StatusOK {
		t.Error(code)
	}
	s.Stop("the lease was lost")
	s.Ready()
	if code := post(t, web.URL+"/scheduler/predicates", in, nil); code != http.StatusServiceUnavailable {
		t.Error("answered without a lease:", code)
	}
}

// hooked calls before it reads a pod.
type hooked struct {
	fakeAPI
	before func()
}

func (h *hooked) Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	if _, ok := ctx.Deadline(); !ok {
		return nil, errors.New("no deadline")
	}
	h.before()
	return h.fakeAPI.Pod(ctx, namespace, name)
}

// A bind that was begun while we led, but whose body or pod comes later, is not sent.
func TestNoBindWithoutLease(t *testing.T) {
	core := testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib))
	p := testPod("p", 60, 8)
	api := &hooked{fakeAPI: fakeAPI{pod: p}}
	s := NewServer(core, api, quiet(), "", 0)
	s.Ready()
	api.before = func() { s.Stop("the lease was lost") }
	err := s.Bind(t.Context(), extender.ExtenderBindingArgs{PodName: "p", PodNamespace: "ns", PodUID: p.UID, Node: "a"})
	if err == nil || err.Error() != "the lease was lost" || len(api.bound) != 0 {
		t.Error(err, api.bound)
	}

	filter(t, core, p, "a")
	s = NewServer(core, api, quiet(), "", 0)
	s.Ready()
	web := httptest.NewServer(s.Handler())
	defer web.Close()
	body, writer := io.Pipe()
	answer := make(chan string, 1)
	go func() {
		resp, err := http.Post(web.URL+"/scheduler/bind", "application/json", body)
		if err != nil {
			answer <- err.Error()
			return
		}
		defer func() { _ = resp.Body.Close() }()
		text, _ := io.ReadAll(resp.Body) // the test sees what came
		answer <- string(text)
	}()
	for _, part := range []string{`{"PodName":"p","PodNamespace":"ns",`, `"PodUID":"uid-p","Node":"a"}`} {
		if _, err := io.WriteString(writer, part); err != nil {
			t.Fatal(err)
		}
		s.Stop("the lease was lost")
	}
	_ = writer.Close() // never fails
	if got := <-answer; !strings.Contains(got, "the lease was lost") || len(api.bound) != 0 {
		t.Error(got, api.bound)
	}
}

// What the API server may still be doing is known, so that the lease is kept until then.
func TestUnanswered(t *testing.T) {
	core := testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib))
	api := &fakeAPI{pod: testPod("p", 60, 8), bindErr: status(403)}
	s := NewServer(core, api, quiet(), "", 0)
	s.Ready()
	in := extender.ExtenderBindingArgs{PodName: "p", PodNamespace: "ns", PodUID: "uid-p", Node: "a"}
	if err := s.Bind(t.Context(), in); err == nil {
		t.Error("bound")
	}
	if _, ok := s.Unanswered(); ok {
		t.Error("a refusal is an answer")
	}
	api.bindErr = context.DeadlineExceeded
	if err := s.Bind(t.Context(), in); err == nil {
		t.Error("bound")
	}
	if ago, ok := s.Unanswered(); !ok || ago < 0 || ago > time.Minute {
		t.Error(ago, ok)
	}
}

// Victims that are null, of either form, are none.
func TestNullVictims(t *testing.T) {
	s := NewServer(testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib)), &fakeAPI{}, quiet(), "", 0)
	s.Ready()
	web := httptest.NewServer(s.Handler())
	defer web.Close()
	for _, body := range []string{`"NodeNameToMetaVictims":{"a":null,"b":{"Pods":[null]}}`, `"NodeNameToVictims":{"a":null,"b":{"Pods":[null]}}`} {
		resp, err := http.Post(web.URL+"/scheduler/preemption", "application/json", strings.NewReader(`{"Pod":`+mustJSON(t, testPod("p", 60, 8))+`,`+body+`}`))
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != http.StatusOK || string(text) != `{"nodeNameToMetaVictims":{}}` && string(text) != `{"NodeNameToMetaVictims":{}}` {
			t.Error(resp.Status, string(text), err)
		}
		_ = resp.Body.Close()
	}
}

// A request without names asks about no node, not about all.
func TestNoNames(t *testing.T) {
	c := testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib))
	p := testPod("p", 60, 8)
	if v := filter(t, c, p); len(v.Passed) != 0 || c.pods[p.UID].phase != asked {
		t.Errorf("%+v", v)
	}
	for _, rank := range []func(Asked, []string, []Score) ([]Score, error){c.Prioritize, c.PrioritizeOthers} {
		if got, err := rank(AskedPod(p), nil, nil); err != nil || len(got) != 0 || c.pods[p.UID].phase != asked {
			t.Error(got, err)
		}
	}
	if got, err := c.PrioritizeOthers(AskedPod(testPod("plain")), nil, nil); err != nil || len(got) != 0 {
		t.Error(got, err)
	}
}

// What is wrong with a pod is said once for each node: an annotation that is quoted must not make that gigabytes.
func TestLongProblem(t *testing.T) {
	c := testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib))
	p := testPod("p", 60, 8)
	p.Annotations[podspec.Weight] = strings.Repeat("ü", 100_000)
	v := filter(t, c, p, "a")
	if v.Unresolvable == "" || len(v.Unresolvable) > 510 || !utf8.ValidString(v.Unresolvable) || v.Event != v.Unresolvable {
		t.Errorf("%d bytes, event of %d: %.80q", len(v.Unresolvable), len(v.Event), v.Unresolvable)
	}
}

// Quotas that have come are not forgotten because there were none a moment ago.
func TestNoQuotas(t *testing.T) {
	c := testCore(t, CoreConfig{}, testNode("a", 1, "T4", 16*gib))
	p := testPod("p", 60, 8)
	var v Verdict
	c.SetQuotas(nil, true)
	if err := c.Filter(AskedPod(p), []string{"a"}, &v); err == nil {
		t.Error("decided without quotas")
	}
	c.SetQuotas(quota.Quotas{"ns": {Total: quota.Amount{Cores: 10, Memory: -1}}}, false)
	c.NoQuotas()
	if v := filter(t, c, p, "a"); len(v.Passed) != 0 {
		t.Errorf("%+v", v)
	}
	c.SetQuotas(nil, true)
	c.NoQuotas()
	if v := filter(t, c, p, "a"); len(v.Passed) != 1 {
		t.Errorf("%+v", v)
	}
}

// A client that does not go on with its request is cut off.
func TestSlowRequest(t *testing.T) {
	client := fake.NewClientset(testNode("a", 1, "T4", 16*gib))
	ctx, cancel := context.WithCancel(t.Context())
	address, ended := make(chan net.Addr, 1), make(chan error, 1)
	go func() {
		ended <- Run(ctx, Config{Client: client, Elect: true, Address: "127.0.0.1:0", Log: quiet(), Listening: func(a net.Addr) { address <- a }, readTimeout: 200 * time.Millisecond})
	}()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	r := &replicaOf{t: t, url: "http://" + (<-address).String()}
	eventually(t, "does not lead", func() bool { code, _ := r.ready(); return code == http.StatusOK })
	conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := errors.Join(conn.SetDeadline(time.Now().Add(20*time.Second)), func() error {
		_, err := io.WriteString(conn, "POST /scheduler/predicates HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
		return err
	}()); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || resp.StatusCode != http.StatusBadRequest {
		t.Errorf("%v, %+v", err, resp)
	}
}

// An API server that is away costs a tick one question, not one for each pod.
func TestAskGivesUp(t *testing.T) {
	for _, c := range []struct {
		err  error
		asks int
	}{{errors.New("no route to host"), 1}, {status(403), 3}} {
		client := fake.NewClientset()
		asks := 0
		client.PrependReactor("get", "pods", func(clienttesting.Action) (bool, runtime.Object, error) { asks++; return true, nil, c.err })
		core := testCore(t, CoreConfig{})
		r := &runner{config: Config{Log: quiet()}, core: core, kube: &kube{client: client}}
		r.ask(t.Context(), []Check{{Name: "a"}, {Name: "b"}, {Name: "c"}})
		if asks != c.asks {
			t.Errorf("%v: asked %d times, want %d", c.err, asks, c.asks)
		}
	}
}

// When one address cannot be had, the others are let go.
func TestListenAllOrNone(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	var first net.Addr
	core := testCore(t, CoreConfig{})
	r := &runner{config: Config{Address: "127.0.0.1:0", StatusAddress: "127.0.0.1:0", ProfileAddress: taken.Addr().String(), Log: quiet(), Listening: func(a net.Addr) { first = a }},
		core: core, server: NewServer(core, &fakeAPI{}, quiet(), "", 0)}
	if out, err := r.listen(); err == nil || !strings.Contains(err.Error(), "profiles") || len(out) != 0 {
		t.Fatal(out, err)
	}
	again, err := net.Listen("tcp", first.String())
	if err != nil {
		t.Fatal("the first address is still taken:", err)
	}
	_ = again.Close()
}

// However often a pod is asked for, one plan to evict for it is made at a time.
func TestOnePlanAtATime(t *testing.T) {
	c := testCore(t, CoreConfig{Evict: true}, testNode("a", 1, "T4", 16*gib))
	low := testPod("low", 60, 8)
	bind(t, c, low, "a")
	low.Spec.NodeName = "a"
	c.PodSeen(low)
	p := priority(testPod("p", 60, 8), 7)
	var got []bool
	for range 2 {
		got = append(got, filter(t, c, p, "a").Evict)
	}
	if _, ok := c.PlanEviction(p.UID, []string{"a"}, forbidden); ok {
		t.Error("who may not be evicted is")
	}
	got = append(got, filter(t, c, p, "a").Evict)
	c.AbandonEviction(p.UID)
	got = append(got, filter(t, c, p, "a").Evict)
	if want := []bool{true, false, true, true}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// On a node with two models, a quota for one leaves the other out.
func TestQuotaOnMixedNode(t *testing.T) {
	inv := inventory.Node{Unit: podspec.UnitDefault, Domain: podspec.DomainDefault}
	for i, model := range []string{"Tesla V100-SXM2-16GB", "Tesla T4", "Tesla V100-SXM2-16GB", "Tesla T4"} {
		inv.GPUs = append(inv.GPUs, inventory.GPU{Index: i, UUID: fmt.Sprintf("GPU-%d", i), Model: model, Memory: 16 * gib})
	}
	text, err := inventory.Encode(inv)
	if err != nil {
		t.Fatal(err)
	}
	n := testNode("a", 0, "", 0)
	n.Annotations[podspec.Inventory] = text
	c := testCore(t, CoreConfig{}, n)
	c.SetQuotas(quota.Quotas{"ns": {Total: quota.Amount{Cores: -1, Memory: -1}, Models: []quota.Model{{Name: "T4", Limit: quota.Amount{Cores: 150, Memory: -1}}}}}, false)
	at := func(p *corev1.Pod) string {
		if v := filter(t, c, p, "a"); len(v.Passed) == 0 {
			return v.Failed[0].Why
		}
		b := bind(t, c, p, "a")
		return b.Annotations[podspec.GPUs]
	}
	for i, want := range []string{`{"c0":["GPU-1"]}`, `{"c0":["GPU-3"]}`, "quota: GPU model not allowed for the namespace"} {
		if got := at(testPod(fmt.Sprint("p", i), 70, 8)); got != want {
			t.Errorf("pod %d: %s, want %s", i, got, want)
		}
	}
	// Another namespace has no quota and takes what is free.
	p := testPod("other", 100, 0)
	p.Namespace = "free"
	if got := at(p); got != `{"c0":["GPU-0"]}` && got != `{"c0":["GPU-2"]}` {
		t.Error(got)
	}
	// The bind alone heeds it too, after a restart.
	c.PodGone(types.UID("uid-p0"))
	late := testPod("late", 80, 8)
	if b := bind(t, c, late, "a"); b.Annotations[podspec.GPUs] != `{"c0":["GPU-1"]}` {
		t.Error(b.Annotations)
	}
}

// A node that claims more memory than there can be has much, not less than none.
func TestCapacityBeyondReason(t *testing.T) {
	n := testNode("a", 0, "", 0)
	n.Annotations = nil
	n.Status.Capacity = corev1.ResourceList{"tencent.com/vcuda-core": resource.MustParse("100"), "tencent.com/vcuda-memory": resource.MustParse("60000000000")}
	c := testCore(t, CoreConfig{}, n)
	if got, _ := c.cluster.Node("a"); got.GPUs[0].FreeMemory != mostMemory {
		t.Error(got.GPUs[0].FreeMemory)
	}
}
