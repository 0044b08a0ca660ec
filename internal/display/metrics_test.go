package display

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
)

// scrape is what Prometheus gets, without what the Go runtime tells of itself.
func scrape(t *testing.T, c Config, path string) string {
	t.Helper()
	s, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	w := httptest.NewRecorder()
	s.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
	if w.Code != http.StatusOK {
		t.Fatalf("%s: %d %s", path, w.Code, w.Body)
	}
	var out strings.Builder
	for line := range strings.Lines(w.Body.String()) {
		name := strings.TrimPrefix(strings.TrimPrefix(line, "# HELP "), "# TYPE ")
		if !strings.HasPrefix(name, "go_") && !strings.HasPrefix(name, "process_") {
			out.WriteString(line)
		}
	}
	return out.String()
}

func TestMetrics(t *testing.T) {
	got := scrape(t, Config{Source: fixed(example())}, "/metrics")
	golden(t, "testdata/metrics.txt", got)
	if other := scrape(t, Config{Source: fixed(example())}, "/metric"); other != got {
		t.Errorf("/metric differs from /metrics:\n%s", other)
	}
	own := scrape(t, Config{Source: fixed(example()), NewNamesOnly: true}, "/metrics")
	if problems, err := promlint.New(strings.NewReader(own)).Lint(); err != nil || len(problems) > 0 {
		t.Errorf("%v %v", problems, err)
	}
	var without strings.Builder
	for line := range strings.Lines(got) {
		if !strings.Contains(line, "container_gpu_") && !strings.Contains(line, "container_request_") {
			without.WriteString(line)
		}
	}
	if own != without.String() {
		t.Errorf("with new names only:\n%s", own)
	}
	scrape(t, Config{Source: fixed{}}, "/metrics")
}

// What would fail a scrape as a whole must not: a pod twice, and text that is not UTF-8.
func TestMetricsOfBadText(t *testing.T) {
	s := example()
	s.Tenants = append(s.Tenants, s.Tenants[0], Tenant{Namespace: "n\xff", Pod: "p\n\"", GPUs: []Part{{Busy: -1}}})
	s.GPUs = append(s.GPUs, s.GPUs[0])
	got := scrape(t, Config{Source: fixed(s)}, "/metrics")
	for _, line := range []string{
		`tranche_tenant_cores{container="train",gpu="0",namespace="ml",pod="train-0"} 30` + "\n",
		`tranche_tenant_cores{container="",gpu="0",namespace="n` + "\uFFFD" + `",pod="p\n\""} 0` + "\n",
	} {
		if strings.Count(got, line) != 1 {
			t.Errorf("not once: %s\n%s", line, got)
		}
	}
}

// docs/metrics.md lists what the registry has.
func TestMetricsPage(t *testing.T) {
	const path = "../../docs/metrics.md"
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text := string(page)
	f := newFamilies()
	for name, list := range map[string][]*metric{"own": f.own, "old": f.old} {
		begin, end := fmt.Sprintf("<!-- %s: generated -->\n", name), fmt.Sprintf("<!-- %s: end -->\n", name)
		before, rest, found := strings.Cut(text, begin)
		_, after, ended := strings.Cut(rest, end)
		if !found || !ended {
			t.Fatalf("%s has no %q or no %q", path, begin, end)
		}
		var b strings.Builder
		b.WriteString("| name | type | labels | meaning |\n| --- | --- | --- | --- |\n")
		for _, m := range list {
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", m.name, m.kind, strings.Join(m.labels, ", "), m.help)
		}
		text = before + begin + b.String() + end + after
	}
	golden(t, path, text)
}

func BenchmarkScrape(b *testing.B) {
	s := example()
	for len(s.Tenants) < 160 {
		t := s.Tenants[len(s.Tenants)%4]
		t.Pod = fmt.Sprint("pod-", len(s.Tenants))
		s.Tenants = append(s.Tenants, t)
	}
	server, err := New(Config{Source: fixed(s)})
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		server.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/metrics", nil))
	}
}
