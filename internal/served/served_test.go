package served

import (
	"path/filepath"
	"testing"
	"time"

	"tranche.dev/tranche/internal/state"
	"tranche.dev/tranche/internal/tenant"
)

// The limits that a core knows of are guaranteed ones, of a whole GPU too, and follow the record.
func TestReserved(t *testing.T) {
	r, err := state.Open(filepath.Join(t.TempDir(), "slices"), false)
	if err != nil {
		t.Fatal(err)
	}
	for _, cores := range []int{0, 30, 100} {
		info := state.Info{Name: "n", Command: []string{"c"}, Started: time.Now(), GPUs: []state.GPU{{UUID: "GPU-1", Cores: 1, ReservedCores: max(cores, 1)}}}
		o, err := r.Create(state.NewID(), info, []tenant.Device{{UUID: "GPU-1", Cores: 1, CoresCeiling: 1}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(o.Remove)
		s, dir, err := r.OpenMember(o.ID)
		if err != nil {
			t.Fatal(err)
		}
		_ = dir.Close()
		s.Info.GPUs[0].ReservedCores = cores
		reserved := served{registry: r}.reserved(s)
		if got := reserved(0); got != max(cores, 1) || reserved(1) != 0 {
			t.Errorf("%d: %d", cores, got)
		}
		to := state.Change{GPUs: s.Info.GPUs, Limits: []tenant.Device{{UUID: "GPU-1", Cores: 7, CoresCeiling: 7}}}
		to.GPUs[0].ReservedCores = 7
		if _, err := r.Change(s, to); err != nil {
			t.Fatal(err)
		}
		if got := reserved(0); got != 7 {
			t.Errorf("%d after a change: %d", cores, got)
		}
	}
}
