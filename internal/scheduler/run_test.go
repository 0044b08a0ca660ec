package scheduler

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	extender "k8s.io/kube-scheduler/extender/v1"

	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/quota"
)

// running replica of the scheduler.
type replicaOf struct {
	t    *testing.T
	url  string
	stop func() error
}

// start runs one with a lease until the test ends or stop is called.
func start(t *testing.T, client kubernetes.Interface) *replicaOf {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	address := make(chan net.Addr, 1)
	ended := make(chan error, 1)
	go func() {
		ended <- Run(ctx, Config{Client: client, Elect: true, Address: "127.0.0.1:0", QuotaName: "gpuquota", Log: quiet(), Listening: func(a net.Addr) { address <- a }})
	}()
	r := &replicaOf{t: t}
	var err error
	stopped := false
	r.stop = func() error {
		if !stopped {
			cancel()
			err, stopped = <-ended, true
		}
		return err
	}
	t.Cleanup(func() {
		if err := r.stop(); err != nil {
			t.Error(err)
		}
	})
	select {
	case a := <-address:
		r.url = "http://" + a.String()
	case err := <-ended:
		ended <- err
		t.Fatal(err)
	}
	return r
}

// ready returns the status of /readyz and its text.
func (r *replicaOf) ready() (int, string) {
	resp, err := http.Get(r.url + "/readyz")
	if err != nil {
		r.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.StatusCode, strings.TrimSpace(string(text))
}

// filter asks for one pod and node "a", and returns why not; empty: it passes.
func (r *replicaOf) filter(p *corev1.Pod) string {
	names := []string{"a"}
	var out extender.ExtenderFilterResult
	if code := post(r.t, r.url+"/scheduler/predicates", extender.ExtenderArgs{Pod: p, NodeNames: &names}, &out); code != http.StatusOK {
		return http.StatusText(code)
	}
	return out.Error + out.FailedNodes["a"]
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(what)
		}
	}
}

// One of two replicas answers. The other takes over when the first ends, and knows what was bound meanwhile.
func TestOneReplicaLeads(t *testing.T) {
	client := fake.NewClientset(testNode("a", 1, "T4", 16*gib))
	first := start(t, client)
	leads := func(r *replicaOf) func() bool {
		return func() bool { code, _ := r.ready(); return code == http.StatusOK }
	}
	eventually(t, "the first does not lead", leads(first))
	second := start(t, client)
	eventually(t, "the second does not stand by", func() bool { _, why := second.ready(); return why == "another replica leads" })
	p := testPod("p", 100, 0)
	if why := first.filter(p); why != "" {
		t.Error(why)
	}
	if why := second.filter(p); why != "Service Unavailable" {
		t.Error("the one that stands by answers:", why)
	}
	bound := p.DeepCopy()
	bound.Spec.NodeName, bound.Annotations[podspec.GPUs] = "a", `{"c0":["GPU-a-0"]}`
	if _, err := client.CoreV1().Pods("ns").Create(t.Context(), bound, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := first.stop(); err != nil {
		t.Error(err)
	}
	eventually(t, "the second does not take over", leads(second))
	if why := second.filter(testPod("q", 10, 1)); !strings.Contains(why, "short") {
		t.Error("the GPU is given twice:", why)
	}
	if err := client.CoreV1().Pods("ns").Delete(t.Context(), "p", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the GPU is not let go", func() bool { return second.filter(testPod("q", 10, 1)) == "" })
}

// Quotas follow the ConfigMap: none without one, the last that could be read otherwise.
func TestQuotasFollowTheirConfigMap(t *testing.T) {
	client := fake.NewClientset(testNode("a", 1, "T4", 16*gib))
	r := start(t, client)
	eventually(t, "no quotas", func() bool { code, _ := r.ready(); return code == http.StatusOK })
	maps := client.CoreV1().ConfigMaps("kube-system")
	p := testPod("p", 50, 4)
	is := func(what, why string) {
		t.Helper()
		eventually(t, what, func() bool { return r.filter(p) == why })
	}
	is("without a ConfigMap", "")
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "gpuquota", Namespace: "kube-system"}, Data: map[string]string{quota.Key: `{"ns":{"cores":40}}`}}
	if _, err := maps.Create(t.Context(), m, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	is("40 cores", "quota of the namespace exceeded")
	for _, step := range []struct{ text, why string }{{"{", "quota of the namespace exceeded"}, {`{"ns":{"cores":50}}`, ""}, {`{"ns":{"V100":1}}`, "quota: GPU model not allowed for the namespace"}} {
		m.Data[quota.Key] = step.text
		if _, err := maps.Update(t.Context(), m, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		if step.text == "{" {
			eventually(t, "no event of quotas that cannot be read", func() bool {
				list, err := client.CoreV1().Events("kube-system").List(t.Context(), metav1.ListOptions{})
				return err == nil && len(list.Items) == 1 && list.Items[0].Reason == "QuotaUnreadable"
			})
		}
		is(step.text, step.why)
	}
	if err := maps.Delete(t.Context(), m.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	is("deleted", "")
}

func TestBudgetCovers(t *testing.T) {
	p := testPod("p", 30, 1)
	p.Labels = map[string]string{"app": "a"}
	for _, of := range []struct {
		what     string
		selector *metav1.LabelSelector
		want     bool
	}{
		{"none", nil, false},
		{"empty", &metav1.LabelSelector{}, true},
		{"its label", &metav1.LabelSelector{MatchLabels: map[string]string{"app": "a"}}, true},
		{"another's", &metav1.LabelSelector{MatchLabels: map[string]string{"app": "b"}}, false},
	} {
		b := &policyv1.PodDisruptionBudget{Spec: policyv1.PodDisruptionBudgetSpec{Selector: of.selector}}
		if got := covers(b, p); got != of.want {
			t.Errorf("selector %s: %v", of.what, got)
		}
	}
}
