package charttest

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	schedulerv1 "k8s.io/kube-scheduler/config/v1"
	"sigs.k8s.io/yaml"
)

const sample = "../scheduler/kube-scheduler-config.yaml"

// The sample for kube-scheduler has only what the oldest and the newest Kubernetes know, down to the plugins' arguments.
func TestSample(t *testing.T) {
	text, err := os.ReadFile(sample)
	if err != nil {
		t.Fatal(err)
	}
	for _, mod := range []string{"go-1.29.mod", "go.mod"} {
		check := filepath.Join(t.TempDir(), "check")
		build := exec.Command("go", "build", "-trimpath", "-modfile="+mod, "-o", check, "./check")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		run := func(text string) (string, error) {
			cmd := exec.Command(check)
			cmd.Stdin = strings.NewReader(text)
			out, err := cmd.CombinedOutput()
			return string(out), err
		}
		if out, err := run(string(text)); err != nil || out != "  kubescheduler.config.k8s.io/v1 KubeSchedulerConfiguration \n" {
			t.Errorf("%s: %v\n%s", mod, err, out)
		}
		for field, at := range map[string]string{"oddity": "  weight: 4\n", "oddities": "      defaultingType: List\n"} {
			indent := at[:len(at)-len(strings.TrimLeft(at, " "))]
			odd := bytes.Replace(text, []byte(at), []byte(at+indent+field+": 1\n"), 1)
			if out, err := run(string(odd)); err == nil || !strings.Contains(out, `unknown field "`) || !strings.Contains(out, field) {
				t.Errorf("%s: %s is taken: %v\n%s", mod, field, err, out)
			}
		}
	}
}

// The chart's kube-scheduler weighs the extender and its own preferences as the sample does, which is what was measured.
func TestWeights(t *testing.T) {
	type weighs struct {
		Extender int64
		Plugins  *schedulerv1.Plugins
		Args     string
		Nodes    *int32
	}
	read := func(text string) weighs {
		t.Helper()
		var c schedulerv1.KubeSchedulerConfiguration
		if err := yaml.Unmarshal([]byte(text), &c); err != nil || len(c.Extenders) == 0 || len(c.Profiles) != 1 {
			t.Fatalf("%v\n%s", err, text)
		}
		w := weighs{c.Extenders[0].Weight, c.Profiles[0].Plugins, "", c.PercentageOfNodesToScore}
		for _, p := range c.Profiles[0].PluginConfig {
			w.Args += p.Name + string(p.Args.Raw)
		}
		return w
	}
	text, err := os.ReadFile(sample)
	if err != nil {
		t.Fatal(err)
	}
	want, found := read(string(text)), 0
	for _, d := range documents(template(t, newest), "ConfigMap") {
		var m corev1.ConfigMap
		if err := yaml.Unmarshal([]byte(d), &m); err != nil {
			t.Fatal(err)
		}
		if text := m.Data["scheduler.yaml"]; text != "" {
			found++
			if got := read(text); !reflect.DeepEqual(got, want) {
				t.Errorf("the chart weighs %+v, the sample %+v", got, want)
			}
		}
	}
	if found != 1 {
		t.Errorf("%d configurations of kube-scheduler", found)
	}
}

// What helm prints for the cluster's own scheduler is what the sample says.
func TestNotesExtenders(t *testing.T) {
	extenders := func(text string) []schedulerv1.Extender {
		t.Helper()
		var c schedulerv1.KubeSchedulerConfiguration
		if err := yaml.UnmarshalStrict([]byte(text), &c); err != nil || len(c.Extenders) != 2 {
			t.Fatalf("%v\n%s", err, text)
		}
		return c.Extenders
	}
	text, err := os.ReadFile(sample)
	if err != nil {
		t.Fatal(err)
	}
	out, err := helm(t, "install", "tranche", chart, "--namespace", "tranche", "--dry-run=client",
		"--set", "scheduler.mode=extender,scheduler.service.clusterIP=10.96.3.4,scheduler.service.tlsSecret=t")
	_, printed, found := strings.Cut(out, "\n  extenders:\n")
	if err != nil || !found {
		t.Fatalf("%v\n%s", err, out)
	}
	if got, want := extenders("  extenders:\n"+printed), extenders(string(text)); !reflect.DeepEqual(got, want) {
		t.Errorf("the notes say %+v, the sample %+v", got, want)
	}
}
