package webhook

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// The examples that users of HAMi and gpu-manager start from.
func TestPublished(t *testing.T) {
	text, err := os.ReadFile("testdata/pods.yaml")
	if err != nil {
		t.Fatal(err)
	}
	documents := strings.Split(string(text), "\n---\n")[1:]
	if len(documents) < 18 {
		t.Errorf("%d pods", len(documents))
	}
	for _, d := range documents {
		pod, want, ok := strings.Cut(d, "# want:\n")
		if !ok {
			t.Fatalf("no result behind\n%s", d)
		}
		want = regexp.MustCompile("(?m)^# ").ReplaceAllString(strings.TrimSpace(want), "")
		raw, err := yaml.YAMLToJSON([]byte(pod))
		if err != nil {
			t.Fatal(err)
		}
		out, _, err := mutate(t, hami(), raw, a100s)
		got := ""
		if err != nil {
			got = err.Error()
		} else {
			got = strings.TrimSpace(strings.TrimPrefix(regexp.MustCompile(`\(requests 0\)`).ReplaceAllString(show(out), ""), "scheduler tranche-scheduler\n"))
		}
		if got != want {
			t.Errorf("%s\n%s\nwant\n%s", pod, got, want)
		}
	}
}
