package books

import (
	"slices"
	"strings"
	"testing"
)

// Whatever kubelet sends as IDs, the answer is a refusal or IDs that were offered.
func FuzzPreferred(f *testing.F) {
	f.Add("GPU-a::0 GPU-a::1 GPU-b::7", 2)
	f.Add("GPU-a::-1", 1)
	f.Add("GPU-c::0", 1)
	f.Add("::", 0)
	f.Fuzz(func(t *testing.T, text string, size int) {
		b := New(1<<28, false)
		b.SetGPUs([]GPU{{UUID: "GPU-a", Units: 8, Bytes: 1 << 31}, {UUID: "GPU-b", Index: 1, Minor: 1, Units: 8, Bytes: 1 << 31}}, nil)
		available := strings.Fields(text)
		for _, res := range []Resource{Core, Memory} {
			c, err := b.Preferred(res, available, nil, size)
			if err != nil {
				continue
			}
			if len(c.IDs) != size {
				t.Fatalf("%d of %d IDs", len(c.IDs), size)
			}
			set, _ := b.parse(res, available)
			got, bad := b.parse(res, c.IDs)
			if bad != "" || !set.contains(got) || slices.Contains(c.IDs, "") {
				t.Fatalf("%q of %q", c.IDs, available)
			}
		}
	})
}
