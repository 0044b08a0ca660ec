package display

import (
	"flag"
	"os"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write expected output and generated pages again")

const gib = 1 << 30

type fixed Snapshot

func (f fixed) Snapshot() Snapshot { return Snapshot(f) }

// example is a node with four GPUs, two and two behind a switch: one in parts, one whole, one free,
// one failed.
func example() Snapshot {
	gpu := func(index int, links ...Link) GPU {
		return GPU{Index: index, Minor: index + 1, UUID: []string{"GPU-a0", "GPU-b1", "GPU-c2", "GPU-d3"}[index], BusID: []string{"00000000:3B:00.0", "00000000:3C:00.0", "00000000:AF:00.0", "00000000:B0:00.0"}[index],
			Model: "NVIDIA A100-SXM4-40GB", Memory: 40 * gib, FreeCores: 100, FreeMemory: 40 * gib, Idle: true, Healthy: true, NUMA: index / 2, Links: links}
	}
	gpus := []GPU{
		gpu(0, Link{1, LevelSwitch, 12}, Link{2, LevelSystem, 0}, Link{3, LevelSystem, 0}),
		gpu(1, Link{0, LevelSwitch, 12}, Link{2, LevelSystem, 0}, Link{3, LevelSystem, 0}), gpu(2, Link{3, LevelSwitch, 4}), gpu(3)}
	gpus[0].FreeCores, gpus[0].FreeMemory, gpus[0].Idle, gpus[0].UsedMemory, gpus[0].Busy, gpus[0].PIDs = 20, 24*gib, false, 9*gib, 71, []int{410, 977}
	gpus[1].FreeCores, gpus[1].FreeMemory, gpus[1].Idle, gpus[1].UsedMemory, gpus[1].Busy, gpus[1].PIDs = 0, 0, false, 30*gib, 99, []int{1200}
	gpus[3].Healthy, gpus[3].Reason, gpus[3].Busy = false, "XID 79: fallen off\nthe bus", -1
	return Snapshot{
		Node: "n1", Version: "v0.4.0", Commit: "4b825dc6", Driver: "550.54.15", GPUs: gpus,
		Tenants: []Tenant{
			{Namespace: "ml", Pod: "train-0", PodUID: "11111111-2222", Container: "train", Cluster: "c1", User: "ann", Class: "normal", GPUs: []Part{{Index: 0, BusID: gpus[0].BusID, Cores: 30, Ceiling: 60, MemoryLimit: 8 * gib,
				Memory: 6 * gib, Overhead: 300 << 20, Busy: 41.5, Share: 42, Wanted: 100, GPUTime: 90 * time.Second, Throttled: 1500 * time.Millisecond, Launches: 12000, Refused: 3, PIDs: []int{410}}}},
			{Namespace: "ml", Pod: "train-0", PodUID: "11111111-2222", Container: "side", Cluster: "c1", User: "ann", Class: "normal", GPUs: []Part{{Index: 0, BusID: gpus[0].BusID, Cores: 20, Ceiling: 20, MemoryLimit: 4 * gib, Share: -1, Wanted: -1}}},
			{Namespace: "web", Pod: "serve", PodUID: "33333333-4444", Container: "serve", Class: "latency", GPUs: []Part{{Index: 0, BusID: gpus[0].BusID, Cores: 30, Ceiling: 30, MemoryLimit: 4 * gib,
				Memory: 3 * gib, Busy: 29, Share: 30, Wanted: 33, GPUTime: 10 * time.Second, Launches: 7, PIDs: []int{977}}}},
			{Namespace: "web", Pod: "whole", PodUID: "55555555-6666", Container: "w", Class: "normal", GPUs: []Part{{Index: 1, BusID: gpus[1].BusID, Cores: 100, Ceiling: 100, Memory: 30 * gib, Busy: 99, Share: -1, Wanted: -1, PIDs: []int{1200}}}},
		},
		Arbiter: Arbiter{Alive: true, Handovers: 5120, HandoverP50: 31 * time.Microsecond, HandoverP99: 210 * time.Microsecond},
		Counters: Counters{
			Allocations:   []Count3{{[3]string{"tencent.com/vcuda-core", "granted", ""}, 4}, {[3]string{"tencent.com/vcuda-core", "refused", "mixed"}, 1}, {[3]string{"tencent.com/vcuda-core", "refused", "mixed"}, 2}},
			Preferences:   []Count2{{[2]string{"tencent.com/vcuda-core", "chosen"}, 5}},
			Starts:        []Count2{{[2]string{"started", ""}, 4}, {[2]string{"failed", "kubelet"}, 1}},
			Registrations: []Count2{{[2]string{"tencent.com/vcuda-memory", "ok"}, 2}},
			Violations:    []Count2{{[2]string{"unregistered", "reported"}, 1}},
			LiveChanges:   []Count2{{[2]string{"refused", "off"}, 1}},
			Replans:       []Count1{{"taken", 1}},
		},
		Allocate: Histogram{Count: 5, Sum: 4 * time.Millisecond, Buckets: []uint64{0, 0, 1, 3, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5}},
	}
}

// golden compares with a file, or writes it with -update.
func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s is not what is given now (go test ./internal/display -update writes it again). Now:\n%s", path, got)
	}
}
