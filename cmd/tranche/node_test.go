package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"tranche.dev/tranche/internal/node"
)

var update = flag.Bool("update", false, "write generated pages again")

// nodeRun is what `tranche node ARGS` starts, and what it says before.
func nodeRun(t *testing.T, args ...string) (c node.Config, ran bool, output string, err error) {
	t.Helper()
	var out bytes.Buffer
	cmd := nodeCommand(func(_ context.Context, got node.Config) error {
		c, ran = got, true
		got.Log.Debug("every step")
		return nil
	})
	cmd.SetArgs(append([]string{}, args...)) // nil would be the test's own
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	err = cmd.ExecuteContext(t.Context())
	c.Log, c.Started = nil, nil
	return c, ran, out.String(), err
}

func nodeEnv(t *testing.T, name, level, extra string) {
	t.Setenv("NODE_NAME", name)
	t.Setenv("LOG_LEVEL", level)
	t.Setenv("EXTRA_FLAGS", extra)
}

func nodeDefaults() node.Config {
	return node.Config{ResourceDomain: "tencent.com", MemoryUnit: 256 << 20, SimDir: "/run/tranche/sim", HostRoot: "/", WholeView: "nvidia", Bypass: "report", PodsFrom: "auto",
		PodResourcesSocket: "/var/lib/kubelet/pod-resources/kubelet.sock", PodsSocket: "/var/lib/kubelet/pods-api/pods-api.sock", DisplaySocket: "/var/run/gpu-manager.sock",
		QueryPort: 5678, QueryAddr: "localhost", CheckPeriod: 30 * time.Second, WaitTimeout: time.Minute, Labels: map[string]string{},
		AllocationDir: "/etc/gpu-manager/vm", DevicePluginDir: "/var/lib/kubelet/device-plugins", CheckpointDir: "/etc/gpu-manager/checkpoint", Version: version}
}

// Every flag of gpu-manager, of all its versions: what it becomes, or the one warning that it gives.
func TestNodeTakesGPUManagersFlags(t *testing.T) {
	nodeEnv(t, "", "", "")
	runtimeSocket := "the runtime is not asked; kubelet is, at --pod-resources-socket"
	stderr := "messages go to standard error, which kubelet or systemd keeps"
	for _, c := range []struct {
		arg     string
		set     func(*node.Config)
		warning string
	}{
		{"--driver=nvidia", nil, ""},
		{"--extra-config=/e.json", func(c *node.Config) { c.ExtraConfig = "/e.json" }, ""},
		{"--volume-config=/v.conf", func(c *node.Config) { c.VolumeConfig = "/v.conf" }, ""},
		{"--query-port=80", func(c *node.Config) { c.QueryPort = 80 }, ""},
		{"--query-port=0", func(c *node.Config) { c.QueryPort = -1 }, ""},
		{"--query-addr=0.0.0.0", func(c *node.Config) { c.QueryAddr = "0.0.0.0" }, ""},
		{"--kubeconfig=/k", func(c *node.Config) { c.Kubeconfig = "/k" }, ""},
		{"--sample-period=3", nil, "--sample-period has no meaning any more: the driver is asked 4 times a second while a container uses a GPU, else every 2 s; ledgers are read at each request"},
		{"--node-labels=a=b,gaia.tencent.com/gpu-model=", func(c *node.Config) { c.Labels = map[string]string{"a": "b", "gaia.tencent.com/gpu-model": ""} }, ""},
		{"--node-labels=a=b,c,d=e=f", func(c *node.Config) { c.Labels = map[string]string{"a": "b"} }, `--node-labels: left out, as they are no KEY=VALUE of a label: ["c" "d=e=f"]`},
		{"--node-labels=a=b,c_d/e=f,g=h i", func(c *node.Config) { c.Labels = map[string]string{"a": "b"} }, `--node-labels: left out, as they are no KEY=VALUE of a label: ["c_d/e=f" "g=h i"]`},
		{"--hostname-override=n1", func(c *node.Config) { c.NodeName = "n1" }, ""},
		{"--virtual-manager-path=/vm", func(c *node.Config) { c.AllocationDir = "/vm" }, ""},
		{"--device-plugin-path=/dp", func(c *node.Config) { c.DevicePluginDir = "/dp" }, ""},
		{"--checkpoint-path=/cp", func(c *node.Config) { c.CheckpointDir = "/cp" }, ""},
		{"--share-mode=true", nil, ""},
		{"--share-mode", nil, ""},
		{"--share-mode=false", func(c *node.Config) { c.WholeOnly = true }, ""},
		{"--allocation-check-period=60", func(c *node.Config) { c.CheckPeriod = time.Minute }, ""},
		{"--wait-timeout=90s", func(c *node.Config) { c.WaitTimeout = 90 * time.Second }, ""},
		{"--incluster-mode=true", nil, ""},
		{"--standalone=true", func(c *node.Config) { c.Standalone = true }, ""},
		{"--addr=/a.sock", func(c *node.Config) { c.DisplaySocket = "/a.sock" }, "--addr is now --display-socket"},
		{"--container-runtime=docker", nil, "--container-runtime has no meaning any more: any runtime will do"},
		{"--container-runtime-endpoint=/var/run/dockershim.sock", nil, "--container-runtime-endpoint has no meaning any more: " + runtimeSocket},
		{"--docker-endpoint=unix:////var/run/docker.sock", nil, "--docker-endpoint has no meaning any more: " + runtimeSocket},
		{"--runtime-request-timeout=5s", nil, "--runtime-request-timeout has no meaning any more: the runtime is not asked"},
		{"--cgroup-driver=systemd", nil, "--cgroup-driver has no meaning any more: cgroups are not looked at; any driver will do"},
		{"--v=4", nil, ""},
		{"-v=4", nil, ""},
		{"--logtostderr", nil, ""},
		{"--logtostderr=false", nil, ""},
		{"--alsologtostderr=true", nil, ""},
		{"--log-dir=/var/log/gpu-manager", nil, "--log-dir has no meaning any more: " + stderr},
		{"--log-file=/f", nil, "--log-file has no meaning any more: " + stderr},
		{"--log-file-max-size=10", nil, "--log-file-max-size has no meaning any more: " + stderr},
		{"--stderrthreshold=2", nil, "--stderrthreshold has no meaning any more: all messages go to standard error; --v says how many"},
		{"--vmodule=a=5", nil, "--vmodule has no meaning any more: use --v"},
		{"--log-backtrace-at=a.go:1", nil, "--log-backtrace-at has no meaning any more: see /debug/pprof/goroutine on the loopback address"},
		{"--skip-headers", nil, "--skip-headers has no meaning any more: messages have one form"},
		{"--skip-log-headers=true", nil, "--skip-log-headers has no meaning any more: messages have one form"},
		{"--add-dir-header", nil, "--add-dir-header has no meaning any more: messages have one form"},
	} {
		want := nodeDefaults()
		if c.set != nil {
			c.set(&want)
		}
		name, value, _ := strings.Cut(c.arg, "=")
		for _, args := range [][]string{{c.arg}, {"--" + strings.ReplaceAll(strings.TrimLeft(name, "-"), "-", "_") + strings.TrimPrefix(c.arg, name)}, {c.arg, c.arg}} {
			got, ran, output, err := nodeRun(t, args...)
			if err != nil || !ran || !reflect.DeepEqual(got, want) {
				t.Errorf("%q (%s): %v\n%+v\nwant\n%+v", args, value, err, got, want)
			}
			if c.warning == "" && output != "" {
				t.Errorf("%q: unexpected %s", args, output)
			}
			if c.warning != "" && (strings.Count(output, "\n") != 1 || !strings.Contains(output, "level=WARN msg="+fmt.Sprintf("%q", c.warning))) {
				t.Errorf("%q: %swant one line: %s", args, output, c.warning)
			}
		}
	}
}

func TestNodeOwnFlags(t *testing.T) {
	nodeEnv(t, "", "", "")
	want := nodeDefaults()
	want.ResourceDomain, want.MemoryUnit, want.Sim, want.SimDir, want.DriverRoots = "example.org", 1<<30, "a100:4", "/s", []string{"/a,b", "/c"}
	want.HostRoot, want.ViewDir, want.WholeView, want.TopologyHints, want.Bypass, want.PodsFrom = "/host", "/view", "origin", true, "kill", "kubelet"
	want.LiveChange = node.LiveChange{On: true, Namespaces: []string{"ml", "web"}}
	want.HealthIgnore, want.PodResourcesSocket, want.PodsSocket, want.DisplaySocket, want.NewNamesOnly = []string{"13", "31"}, "/pr", "/pods", "/ds", true
	got, _, output, err := nodeRun(t, "--resource-domain=example.org", "--memory-unit=1Gi", "--sim=a100:4", "--sim-dir=/s", "--driver-root=/a,b", "--driver-root=/c",
		"--host-root=/host", "--view-path=/view", "--driver-view=origin", "--topology-hints", "--bypass=kill", "--live-change=ml, web",
		"--health-ignore-xids=13,31", "--pods-from=kubelet", "--pod-resources-socket=/pr", "--pods-api-socket=/pods", "--display-socket=/ds", "--metrics-old-names=false")
	if err != nil || output != "" || !reflect.DeepEqual(got, want) {
		t.Errorf("%v %s\n%+v\nwant\n%+v", err, output, got, want)
	}
	for _, c := range []struct {
		value string
		want  node.LiveChange
	}{{"off", node.LiveChange{}}, {"on", node.LiveChange{On: true}}} {
		if got, _, _, err := nodeRun(t, "--live-change", c.value); err != nil || !reflect.DeepEqual(got.LiveChange, c.want) {
			t.Errorf("%s: %+v %v", c.value, got.LiveChange, err)
		}
	}
}

func TestNodeRefusesFlags(t *testing.T) {
	nodeEnv(t, "", "", "")
	for arg, want := range map[string]string{
		"--driver=dummy":                `--driver "dummy": only nvidia is known`,
		"--query-port=65536":            "--query-port 65536: a port is at most 65535",
		"--wait-timeout=0":              `"0": seconds, or a duration such as 500ms`,
		"--wait-timeout=-1":             `"-1": seconds`,
		"--wait-timeout=99999999999999": "seconds, or a duration",
		"--memory-unit=1g":              "1g: write 1Gi",
		"--live-change=":                `--live-change "": off, on, or namespaces`,
		"--live-change=a,,b":            `--live-change "a,,b"`,
		"--live-change=ON":              `--live-change "ON"`,
		"--health-ignore-xids=x":        `--health-ignore-xids "x"`,
		"--bypass=end":                  `--bypass "end": report, kill or off`,
		"--driver-view=both":            `--driver-view "both": nvidia or origin`,
		"--pods-from=informer":          `--pods-from "informer": auto, kubelet or apiserver`,
		"--node-name=x":                 "unknown flag: --node-name",
		"word":                          `unknown command "word"`,
	} {
		if _, ran, _, err := nodeRun(t, arg); err == nil || ran || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: ran %v, %v\nwant %s", arg, ran, err, want)
		}
	}
}

// The environment of gpu-manager's image, with its DaemonSet's values.
func TestNodeEnvironment(t *testing.T) {
	nodeEnv(t, "n1", "5", "--incluster-mode=true  --query_port=99")
	want := nodeDefaults()
	want.NodeName, want.QueryPort, want.QueryAddr = "n1", 99, "0.0.0.0"
	got, _, output, err := nodeRun(t, "--query-port=98", "--kubeconfig=/k", "--query-addr=0.0.0.0")
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v\n%+v\nwant\n%+v", err, got, want)
	}
	if lines := strings.Split(output, "\n"); len(lines) != 3 || !strings.Contains(lines[0], "--incluster-mode: the service account is used") || !strings.Contains(lines[1], "every step") {
		t.Errorf("%s", output)
	}
	if got, _, output, _ := nodeRun(t, "--hostname-override=n2", "--v=0"); got.NodeName != "n2" || output != "" {
		t.Errorf("flags against the environment: %q %s", got.NodeName, output)
	}
	nodeEnv(t, "", "high", "")
	if _, ran, output, err := nodeRun(t); !ran || err != nil || strings.Count(output, "\n") != 1 || !strings.Contains(output, `LOG_LEVEL \"high\" is no number`) {
		t.Errorf("ran %v, %v, %s", ran, err, output)
	}
	for extra, want := range map[string]string{"--nonsense": "EXTRA_FLAGS: unknown flag: --nonsense", "word": "EXTRA_FLAGS: word is no flag"} {
		nodeEnv(t, "", "", extra)
		if _, ran, _, err := nodeRun(t); ran || err == nil || err.Error() != want {
			t.Errorf("%s: %v", extra, err)
		}
	}
}

// Every item is a label or is said to be none.
func FuzzParseLabels(f *testing.F) {
	for _, seed := range []string{"", "a=b", "a=b,c=d", "a", "=", "a==b", " a = b ,", "a=,b"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		labels, bad := parseLabels(text)
		for item := range strings.SplitSeq(text, ",") {
			item = strings.TrimSpace(item)
			key, _, _ := strings.Cut(item, "=")
			if _, ok := labels[key]; item != "" && !ok && !slices.Contains(bad, item) {
				t.Errorf("%q is in neither %v nor %v", item, labels, bad)
			}
		}
		if _, ok := labels[""]; ok {
			t.Errorf("a label without a key in %v", labels)
		}
	})
}

func TestNodeVersion(t *testing.T) {
	nodeEnv(t, "", "", "")
	for _, arg := range []string{"--version", "--version=true", "--version=raw"} {
		if _, ran, output, err := nodeRun(t, arg); ran || err != nil || output != versionLine() {
			t.Errorf("%s: ran %v, %q, %v", arg, ran, output, err)
		}
	}
	if _, ran, _, err := nodeRun(t, "--version=false"); !ran || err != nil {
		t.Error("--version=false", ran, err)
	}
}

func TestNotifyReady(t *testing.T) {
	if err := notifyReady(""); err != nil {
		t.Error("nobody asked:", err)
	}
	path := filepath.Join(t.TempDir(), "notify")
	if err := notifyReady(path); err == nil {
		t.Error("no error without a socket")
	}
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := notifyReady(path); err != nil {
		t.Fatal(err)
	}
	if err := l.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	buffer := make([]byte, 100)
	if n, err := l.Read(buffer); err != nil || string(buffer[:n]) != "READY=1" {
		t.Errorf("%q %v", buffer[:n], err)
	}
}

// docs/node-flags.md says what the command takes; `make generate` writes it.
func TestNodeFlagsPage(t *testing.T) {
	const path = "../../docs/node-flags.md"
	got := nodeFlagsPage(newNodeFlags(func(string) string { return "" }))
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if want, err := os.ReadFile(path); err != nil || got != string(want) {
		t.Errorf("%s is not current (%v): make generate", path, err)
	}
}

func nodeFlagsPage(f *nodeFlags) string {
	var b strings.Builder
	b.WriteString("<!-- Generated from cmd/tranche by `make generate`. -->\n\n# Flags of `tranche node`\n\n" + nodeLong + "\n")
	table := func(title string, names []string) {
		fmt.Fprintf(&b, "\n## %s\n\n| flag | default | meaning |\n| --- | --- | --- |\n", title)
		for _, name := range names {
			flag := f.set.Lookup(name)
			if flag.Hidden {
				continue
			}
			value, usage := pflag.UnquoteUsage(flag)
			if value == "raw" {
				value = ""
			}
			if value != "" {
				value = "=" + strings.ToUpper(value)
			}
			preset := flag.DefValue
			if preset != "" && preset != "[]" {
				preset = "`" + preset + "`"
			} else {
				preset = ""
			}
			fmt.Fprintf(&b, "| `--%s%s` | %s | %s |\n", name, value, preset, usage)
		}
	}
	table("Ours", f.own)
	table("gpu-manager's, with their meaning", f.kept)
	b.WriteString("\nOther than in gpu-manager: GPUs are shared unless `--share-mode=false`; a registration that takes longer than\n" +
		"`--wait-timeout` is reported and goes on; periods may be fractions of a second. `--addr` of old unit files is\n`--display-socket`.\n" +
		"\n## gpu-manager's, without meaning\n\nAccepted, with one warning.\n\n| flag | instead |\n| --- | --- |\n")
	for _, o := range obsoleteFlags {
		fmt.Fprintf(&b, "| `--%s` | %s |\n", o.name, o.instead)
	}
	return b.String()
}
