package gpu

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// probe writes a shell script that stands for nvmlprobe.
func probe(t *testing.T, script string) NVML {
	path := filepath.Join(t.TempDir(), "probe")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	return NVML{Probe: path, Library: "lib", Env: os.Environ(), Timeout: 2 * time.Second}
}

func TestDevices(t *testing.T) {
	n := probe(t, `echo '{"driver_version":"550","devices":[{"index":0,"uuid":"GPU-1","memory_total":5,"mig":null,"processes":[{"pid":1,"used":null}]},{"index":1,"error":"lost","code":15}]}'`)
	r, err := n.Devices(context.Background())
	if err != nil || len(r.Devices) != 2 || r.Devices[0].MemoryTotal != 5 || r.Devices[0].Processes[0].Used != nil || r.Devices[1].Error != "lost" {
		t.Errorf("%+v, %v", r, err)
	}
	for script, want := range map[string]string{
		`echo '{"error":"Driver Not Loaded","code":9}'; exit 1`: "Driver Not Loaded",
		`echo nonsense`: "nvmlprobe",
		`exit 3`:        "exit status 3",
		`exec sleep 60`: "did not answer for 100ms",
	} {
		n := probe(t, script)
		if strings.Contains(script, "sleep") {
			n.Timeout = 100 * time.Millisecond
		}
		if _, err := n.Devices(context.Background()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", script, err, want)
		}
	}
}

func TestWatch(t *testing.T) {
	n := probe(t, `echo '{"devices":[{"index":0}]}'; echo '{"devices":[]}'; echo '{"error":"GPU is lost","code":15}'`)
	var seen []int
	err := n.Watch(context.Background(), time.Second, func(r Report) { seen = append(seen, len(r.Devices)) })
	if err == nil || err.Error() != "GPU is lost" || len(seen) != 2 {
		t.Errorf("%v, %v", seen, err)
	}
	hang := probe(t, `exec sleep 60`)
	hang.Timeout = 100 * time.Millisecond
	if err := hang.Watch(context.Background(), time.Second, func(Report) {}); err == nil || !strings.Contains(err.Error(), "does not answer") {
		t.Error(err)
	}
}

func TestContextBytes(t *testing.T) {
	for name, mib := range map[string]uint64{
		"Tesla T4": 120, "NVIDIA T400": 512, "NVIDIA A100-SXM4-80GB": 430, "NVIDIA H100 80GB HBM3": 540,
		"NVIDIA L40S": 512, "NVIDIA A10": 280, "NVIDIA A1000": 512,
	} {
		if got := ContextBytes(name) >> 20; got != mib {
			t.Errorf("%s: %d MiB, want %d", name, got, mib)
		}
	}
}
