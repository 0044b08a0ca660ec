package node

import (
	"os"
	"slices"
	"strings"
	"testing"

	"k8s.io/client-go/kubernetes/fake"

	"tranche.dev/tranche/internal/display"
	"tranche.dev/tranche/test/fixture"
)

// A process in a container opens the vendor's library by its path: it is ended, the pod has an event, and a metric counts. One that
// keeps to its slice is left alone.
func TestBypassEnds(t *testing.T) {
	fixture.NeedContainers(t)
	var client *fake.Clientset
	w := newWorld(t, "a100-80g", 51, func(c *Config) {
		client = fakeCluster(c)
		c.Bypass = BypassKill
	})
	if err := os.Chmod(w.dir, 0o755); err != nil { // the container's user is nobody
		t.Fatal(err)
	}
	pod := w.pod(nil, containerSpec{name: "honest", cores: 30, units: 8 * gib}, containerSpec{name: "c", cores: 30, units: 8 * gib})
	w.mustAdmit(pod)
	ended := map[string]chan error{}
	for name, library := range map[string]string{"honest": "", "c": " --libcuda /usr/local/nvidia/driver/libcuda-driver.so.1"} {
		s := w.start(pod, name)
		c := fixture.Container{Slice: s.Mounts["/etc/tranche/slice"], View: s.Mounts["/usr/local/nvidia"], Shared: []string{w.node.host.sim.Machine}}
		cmd := c.Command(t, "exec /opt/build/bin/gpuload"+library+" --alloc plain:64Mi:4 --hold 600", "LD_LIBRARY_PATH="+s.Env["LD_LIBRARY_PATH"])
		var out strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		over := make(chan error, 1)
		ended[name] = over
		go func() { over <- cmd.Wait() }()
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			if t.Failed() {
				t.Logf("%s: %s", name, out.String())
			}
		})
	}
	w.eventually(client, "Pod "+pod.Name+" GPUBypass: container c: process ")
	select {
	case err := <-ended["c"]:
		if err == nil || err.Error() != "signal: killed" {
			t.Errorf("it ended with %v", err)
		}
	case err := <-ended["honest"]:
		t.Fatalf("the honest one ended: %v", err)
	}
	told := events(t, client)
	i := slices.IndexFunc(told, func(e string) bool { return strings.Contains(e, "GPUBypass") })
	if !strings.HasSuffix(told[i], "it has loaded a driver library other than the slice's (ended)") || strings.Contains(strings.Join(told, "\n"), "container honest") {
		t.Errorf("events %q", told)
	}
	if got := w.node.stats.counters().Violations; !slices.Equal(got, []display.Count2{{Labels: [2]string{"unregistered", "ended"}, N: 1}}) {
		t.Errorf("counted %+v", got)
	}
	select {
	case err := <-ended["honest"]:
		t.Errorf("the honest one ended: %v", err)
	default:
	}
}
