package quantity

import (
	"strings"
	"testing"
)

func TestParseKubernetes(t *testing.T) {
	for text, want := range map[string]int64{"8Gi": 8 << 30, " 1e3 ": 1000, "1E": 1e18, "2Ei": 2 << 60, "1e+09": 1e9, "5e-1": 1, "12": 12} {
		if q, err := ParseKubernetes(text); err != nil || q.Value() != want {
			t.Errorf("%q: %v, %v; want %d", text, q.Value(), err, want)
		}
	}
	for _, text := range []string{"1e100", "1e-2000000000", "1E+000000000000000001", strings.Repeat("9", 41), "e", ""} {
		if q, err := ParseKubernetes(text); err == nil {
			t.Errorf("%q: %v", text, q.String())
		}
	}
}
