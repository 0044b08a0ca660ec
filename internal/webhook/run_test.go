package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"tranche.dev/tranche/internal/inventory"
	"tranche.dev/tranche/internal/podspec"
)

// bodyOf reads and closes it.
func bodyOf(t *testing.T, resp *http.Response) []byte {
	t.Helper()
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

const host = "w.tranche.svc"

// cluster has what an installation makes: an empty Secret, and a configuration that trusts nobody; and a node.
func cluster(t *testing.T) *fake.Clientset {
	t.Helper()
	text, err := inventory.Encode(inventory.Node{Unit: podspec.UnitDefault, Domain: podspec.DomainDefault, GPUs: []inventory.GPU{{UUID: "GPU-1", Model: "Tesla T4", Memory: 15 * gib}}})
	if err != nil {
		t.Fatal(err)
	}
	return fake.NewClientset(
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "tranche", Name: "w"}},
		&admissionregistrationv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "w"}, Webhooks: []admissionregistrationv1.MutatingWebhook{{Name: "a.tranche.dev"}, {Name: "b.tranche.dev"}}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Annotations: map[string]string{podspec.Inventory: text}}},
	)
}

// bundles are what each webhook of the configuration trusts.
func bundles(t *testing.T, c *fake.Clientset) [][]byte {
	t.Helper()
	w, err := c.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(t.Context(), "w", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var out [][]byte
	for _, h := range w.Webhooks {
		out = append(out, h.ClientConfig.CABundle)
	}
	return out
}

func newBootstrap(c *fake.Clientset, now *time.Time) *bootstrap {
	return &bootstrap{client: c, namespace: "tranche", secret: "w", configuration: "w", host: host, now: func() time.Time { return *now }, log: quiet()}
}

// trusted tells whether what is served at a time is trusted by whoever has the bundle.
func trusted(t *testing.T, b *bootstrap, bundle []byte, at time.Time) bool {
	t.Helper()
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(bundle) {
		t.Fatalf("no certificate in %q", bundle)
	}
	c, err := b.tls().GetCertificate(nil)
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: host, CurrentTime: at})
	return err == nil
}

func TestBootstrap(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	c := cluster(t)
	one, two := newBootstrap(c, &now), newBootstrap(c, &now)
	if _, err := one.tls().GetCertificate(nil); err == nil {
		t.Error("a certificate from nowhere")
	}
	sync := func(who ...*bootstrap) [][]byte {
		t.Helper()
		for _, b := range who {
			if err := b.sync(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		all := bundles(t, c)
		for _, b := range who {
			for _, bundle := range all {
				if !trusted(t, b, bundle, now) {
					t.Error("the API server does not trust what is served")
				}
			}
		}
		return all
	}
	first := sync(one, two)
	served := one.serving.Load()
	if !one.authority.same(two.authority) || len(first) != 2 {
		t.Error("two replicas have two authorities")
	}
	// Nothing to do: nothing is written.
	before := len(c.Actions())
	sync(one, two)
	if slices.ContainsFunc(c.Actions()[before:], func(a k8stesting.Action) bool { return a.GetVerb() != "get" }) || one.serving.Load() != served {
		t.Errorf("%v", c.Actions()[before:])
	}
	// Somebody emptied the configuration.
	w, err := c.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(t.Context(), "w", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w.Webhooks[1].ClientConfig.CABundle = nil
	if _, err := c.AdmissionregistrationV1().MutatingWebhookConfigurations().Update(t.Context(), w, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	sync(one)
	// Its own certificate ends soon.
	now = now.Add(certificateLife - certificateLeft + time.Hour)
	sync(one)
	if one.serving.Load() == served {
		t.Error("the certificate was not renewed")
	}
	// The authority ends soon: another, and the old one is trusted beside it until all replicas know.
	now = now.Add(authorityLife - authorityLeft)
	if err := two.sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after := bundles(t, c)[0]; bytes.Equal(after, first[0]) || !trusted(t, one, after, one.serving.Load().Leaf.NotAfter.Add(-time.Hour)) || !trusted(t, two, after, now) {
		t.Error("the new authority is not trusted beside the old one")
	}
	sync(one, two)
	if one.authority.same(two.authority) == false {
		t.Error("two authorities")
	}
	// Somebody damaged the Secret.
	s, err := c.CoreV1().Secrets("tranche").Get(t.Context(), "w", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	s.Data[privateKey] = []byte("damaged")
	if _, err := c.CoreV1().Secrets("tranche").Update(t.Context(), s, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	sync(one, two)
}

// Of two that make an authority at once, one wins, and the other takes it over.
func TestBootstrapConflict(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	c := cluster(t)
	one, two := newBootstrap(c, &now), newBootstrap(c, &now)
	raced := false
	c.PrependReactor("update", "secrets", func(k8stesting.Action) (bool, runtime.Object, error) {
		if raced {
			return false, nil, nil
		}
		raced = true
		a, err := newAuthority(host, now, nil)
		if err != nil {
			return true, nil, err
		}
		won := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "tranche", Name: "w"}}
		if won.Data, err = a.data(); err == nil {
			err = c.Tracker().Update(schema.GroupVersionResource{Version: "v1", Resource: "secrets"}, won, "tranche")
		}
		if err != nil {
			return true, nil, err
		}
		return true, nil, apierrors.NewConflict(schema.GroupResource{Resource: "secrets"}, "w", errors.New("it was changed"))
	})
	if err := one.sync(t.Context()); !apierrors.IsConflict(err) || one.serving.Load() != nil {
		t.Errorf("%v", err)
	}
	if err := errors.Join(one.sync(t.Context()), two.sync(t.Context())); err != nil || !one.authority.same(two.authority) {
		t.Errorf("%v: two authorities", err)
	}
}

// What is missing is named, and how.
func TestBootstrapMissing(t *testing.T) {
	now := time.Now()
	c := cluster(t)
	b := newBootstrap(c, &now)
	b.configuration = "none"
	if err := b.sync(t.Context()); err == nil || !strings.HasPrefix(err.Error(), "MutatingWebhookConfiguration none: ") || b.serving.Load() != nil {
		t.Error(err)
	}
	b.secret = "none"
	if err := b.sync(t.Context()); err == nil || !strings.HasPrefix(err.Error(), "secret tranche/none: ") {
		t.Error(err)
	}
}

// question is what the API server sends about a pod.
func question(t *testing.T, raw []byte, edit func(*admissionv1.AdmissionRequest)) []byte {
	t.Helper()
	q := &admissionv1.AdmissionRequest{UID: "u1", Operation: admissionv1.Create, Namespace: "ns", Resource: metav1.GroupVersionResource{Version: "v1", Resource: "pods"}, Object: runtime.RawExtension{Raw: raw}}
	if edit != nil {
		edit(q)
	}
	out, err := json.Marshal(admissionv1.AdmissionReview{TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"}, Request: q})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestServer(t *testing.T) {
	s := NewServer(hami(), func() []GPU { return nil }, quiet(), "tranche 1")
	web, status := httptest.NewServer(s.Handler()), httptest.NewServer(s.StatusHandler())
	defer web.Close()
	defer status.Close()
	post := func(body []byte) string {
		t.Helper()
		resp, err := http.Post(web.URL+Path, "application/json", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		text := bodyOf(t, resp)
		if resp.StatusCode != http.StatusOK {
			return resp.Status
		}
		var out admissionv1.AdmissionReview
		if err := json.Unmarshal(text, &out); err != nil || out.Request != nil || out.Response.UID != "u1" || out.APIVersion != "admission.k8s.io/v1" {
			t.Fatalf("%v %s", err, text)
		}
		a := out.Response
		if a.PatchType != nil && *a.PatchType != admissionv1.PatchTypeJSONPatch || (a.PatchType == nil) != (a.Patch == nil) {
			t.Errorf("%s", text)
		}
		said := ""
		if a.Result != nil {
			said = fmt.Sprint(a.Result.Code, " ", a.Result.Message)
		}
		return strings.TrimSpace(fmt.Sprint(a.Allowed, " ", string(a.Patch), said, strings.Join(a.Warnings, ";")))
	}
	for _, c := range []struct {
		name string
		body []byte
		want string
	}{
		{"a slice", question(t, short(t, "a core=30 memory=8"), nil), `true [{"op":"add","path":"/spec/schedulerName","value":"tranche-scheduler"}]`},
		{"no slice", question(t, short(t, "a"), nil), "true"},
		{"a warning", question(t, short(t, "a core=30"), nil), `true [{"op":"add","path":"/spec/schedulerName","value":"tranche-scheduler"}]` +
			"tranche: container a: tencent.com/vcuda-memory: 30 cores, a part of a GPU, need memory as well: say how many units of 256 MiB the container may use"},
		{"refused", question(t, short(t, "a gpumem-percentage=50"), nil), "false 422 tranche: container a: nvidia.com/gpumem-percentage: a part of a GPU's memory, and no GPU that this pod may have is known: " +
			"say how many MiB in nvidia.com/gpumem"},
		{"an update", question(t, short(t, "a core=30 memory=8"), func(q *admissionv1.AdmissionRequest) { q.Operation = admissionv1.Update }), "true"},
		{"another resource", question(t, short(t, "a core=30 memory=8"), func(q *admissionv1.AdmissionRequest) { q.Resource.Resource = "podtemplates" }), "true"},
		{"a subresource", question(t, short(t, "a core=30 memory=8"), func(q *admissionv1.AdmissionRequest) { q.SubResource = "binding" }), "true"},
		{"no pod", question(t, []byte(`{"spec": 5}`), nil), "400 Bad Request"},
		{"no review", []byte(`{}`), "400 Bad Request"},
		{"no JSON", []byte(`x`), "400 Bad Request"},
		{"too much", bytes.Repeat([]byte(" "), maxBody+1), "400 Bad Request"},
	} {
		if got := post(c.body); got != c.want {
			t.Errorf("%s: %s\nwant %s", c.name, got, c.want)
		}
	}
	get := func(path string) string {
		t.Helper()
		resp, err := http.Get(status.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		text := bodyOf(t, resp)
		return fmt.Sprint(resp.StatusCode, " ", string(text))
	}
	if got := get("/readyz"); got != "503 starting\n" {
		t.Error(got)
	}
	s.Ready()
	for path, want := range map[string]string{"/readyz": "200 ok\n", "/healthz": "200 ok\n", "/version": "200 tranche 1\n",
		"/metrics": "tranche_webhook_pods_total{outcome=\"changed\"} 2\ntranche_webhook_pods_total{outcome=\"error\"} 4\n" +
			"tranche_webhook_pods_total{outcome=\"refused\"} 1\ntranche_webhook_pods_total{outcome=\"unchanged\"} 1\n"} {
		if got := get(path); !strings.Contains(got, want) {
			t.Errorf("%s: %s", path, got)
		}
	}
}

// The whole of it: ready when it is trusted and knows the GPUs, and then a pod comes by TLS.
func TestRun(t *testing.T) {
	c := cluster(t)
	ctx, cancel := context.WithCancel(t.Context())
	address, ended := make(chan net.Addr, 1), make(chan error, 1)
	config := Config{Mutator: *hami(), Client: c, Address: "127.0.0.1:0", SecretNamespace: "tranche", SecretName: "w", Configuration: "w", Host: host,
		Linger: time.Nanosecond, Log: quiet(), Listening: func(a net.Addr) { address <- a }}
	go func() { ended <- Run(ctx, config) }()
	at := (<-address).String()
	body := question(t, short(t, "a gpumem-percentage=50 gpucores=30"), nil)
	var out admissionv1.AdmissionReview
	deadline := time.Now().Add(time.Minute)
	for {
		roots := x509.NewCertPool()
		if roots.AppendCertsFromPEM(bundles(t, c)[0]) {
			client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: host, MinVersion: tls.VersionTLS12}}}
			if resp, err := client.Post("https://"+at+Path, "application/json", bytes.NewReader(body)); err == nil {
				err := json.NewDecoder(resp.Body).Decode(&out)
				_ = resp.Body.Close()
				if err != nil {
					t.Fatal(err)
				}
				if out.Response.Allowed {
					break
				}
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("no answer: %+v", out.Response)
		}
		time.Sleep(20 * time.Millisecond)
	}
	if !strings.Contains(string(out.Response.Patch), `"value":"Tesla T4"`) {
		t.Errorf("%s", out.Response.Patch)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestConfig(t *testing.T) {
	own := Config{Mutator: *hami(), Client: fake.NewClientset(), SecretNamespace: "a", SecretName: "b", Configuration: "c", Host: "d"}
	for want, edit := range map[string]func(*Config){
		"a certificate needs its key":   func(c *Config) { c.CertFile = "x" },
		"either a certificate":          func(c *Config) { c.CertFile, c.KeyFile = "x", "y" },
		"or the Secret":                 func(c *Config) { c.SecretName = "" },
		"an authority of its own needs": func(c *Config) { c.Host = "" },
		"no API server":                 func(c *Config) { c.Client = nil },
		"resource domain":               func(c *Config) { c.Mutator.Names.Domain = "" },
	} {
		c := own
		edit(&c)
		if err := c.complete(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if err := own.complete(); err != nil || own.Address != ":9443" || own.Linger != 5*time.Second {
		t.Errorf("%v %+v", err, own)
	}
}

// The GPUs follow the nodes; an inventory that cannot be read is none.
func TestFleet(t *testing.T) {
	f := newFleet()
	show := func() string {
		var out []string
		for _, g := range f.gpus() {
			out = append(out, g.UUID)
		}
		return strings.Join(out, " ")
	}
	node := func(uuids ...string) string {
		n := inventory.Node{Unit: podspec.UnitDefault, Domain: podspec.DomainDefault}
		for i, u := range uuids {
			n.GPUs = append(n.GPUs, inventory.GPU{Index: i, UUID: u, Model: "m", Memory: gib})
		}
		text, err := inventory.Encode(n)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	for _, step := range []struct {
		node, text, want string
		bad              bool
	}{
		{"n2", node("c"), "c", false}, {"n1", node("a", "b"), "a b c", false}, {"n1", node("a"), "a c", false}, {"n3", "", "a c", false},
		{"n1", "damaged", "c", true}, {"n2", "", "", false},
	} {
		if err := f.set(step.node, step.text); (err != nil) != step.bad || show() != step.want {
			t.Errorf("%+v: %v, %s", step, err, show())
		}
	}
}
