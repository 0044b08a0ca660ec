// Package charttest holds the chart against what it must be: Helm's own checks, the types of the oldest and the
// newest Kubernetes, the flags of the programs that it starts, and complete output for a few sets of values
// (golden/, remade by -update). `make chart` runs it.
package charttest

import (
	"bytes"
	"flag"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write golden files, manifests and the table of values anew")

const (
	chart  = "../helm/tranche"
	oldest = "1.29.0"
	newest = "1.37.2"
)

// helm runs it, or skips the test where `make chart` has not built it.
func helm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	program := os.Getenv("TRANCHE_HELM")
	if program == "" {
		t.Skip("TRANCHE_HELM names no helm: make chart")
	}
	cmd := exec.Command(program, args...)
	// Nothing of this user's, nothing from elsewhere.
	home := t.TempDir()
	cmd.Env = []string{"HOME=" + home, "HELM_CONFIG_HOME=" + home, "HELM_CACHE_HOME=" + home, "HELM_DATA_HOME=" + home, "KUBECONFIG=" + home + "/none"}
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	err := cmd.Run()
	return out.String() + said.String(), err
}

func template(t *testing.T, kube string, args ...string) string {
	t.Helper()
	args = append([]string{"template", "tranche", chart, "--namespace", "tranche", "--kube-version", kube}, args...)
	out, err := helm(t, args...)
	if err != nil {
		t.Fatalf("helm %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// sets are the files of values.
func sets(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("values/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(err, files)
	}
	return files
}

func golden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != got {
		t.Errorf("%s is not what the chart gives (make chart CHART_ARGS=-update, and look at the difference)", file)
	}
}

func TestLint(t *testing.T) {
	for _, set := range sets(t) {
		for _, kube := range []string{oldest, newest} {
			if out, err := helm(t, "lint", "--strict", "--kube-version", kube, "-f", set, chart); err != nil {
				t.Errorf("%s, %s: %v\n%s", set, kube, err, out)
			}
		}
	}
}

// Every set of values gives what it gave, and objects that Kubernetes has in this form.
func TestTemplate(t *testing.T) {
	if err := os.MkdirAll("golden", 0o755); err != nil {
		t.Fatal(err)
	}
	for _, kube := range []struct{ version, mod string }{{oldest, "go-1.29.mod"}, {newest, "go.mod"}} {
		check := filepath.Join(t.TempDir(), "check")
		build := exec.Command("go", "build", "-trimpath", "-modfile="+kube.mod, "-o", check, "./check")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		for _, set := range sets(t) {
			name := strings.TrimSuffix(filepath.Base(set), ".yaml") + "-" + strings.Join(strings.Split(kube.version, ".")[:2], ".")
			t.Run(name, func(t *testing.T) {
				out := template(t, kube.version, "-f", set)
				cmd := exec.Command(check)
				cmd.Stdin = strings.NewReader(out)
				list, err := cmd.CombinedOutput()
				if err != nil {
					t.Errorf("%v\n%s", err, list)
				}
				if !bytes.Contains(list, []byte("\n")) {
					t.Error("nothing came out")
				}
				golden(t, filepath.Join("golden", name+".yaml"), out)
			})
		}
	}
}

// What helm prints after an installation.
func TestNotes(t *testing.T) {
	for _, set := range sets(t) {
		out, err := helm(t, "install", "tranche", chart, "--namespace", "tranche", "--dry-run=client", "-f", set)
		_, notes, found := strings.Cut(out, "\nNOTES:\n")
		if err != nil || !found {
			t.Fatalf("%s: %v\n%s", set, err, out)
		}
		golden(t, filepath.Join("golden", strings.TrimSuffix(filepath.Base(set), ".yaml")+"-notes.txt"), notes)
	}
}

// The plain manifests are the chart's.
func TestManifests(t *testing.T) {
	for file, args := range map[string][]string{
		"tranche.yaml":           nil,
		"tranche-simulated.yaml": {"--set", "simulated=a100-80g:2", "--set", "node.nodeSelector=null"},
	} {
		text := "# Made from the chart by `make chart CHART_ARGS=-update`, for Kubernetes " + newest + ": kubectl apply -f. First write your image for\n" +
			"# tranche.dev/tranche:0.0.0-dev (three times), and the cluster's version for that of registry.k8s.io/kube-scheduler (once).\n" +
			"# Kubernetes 1.29 has no ValidatingAdmissionPolicy (delete it and its binding) and no appArmorProfile. `helm template\n" +
			"# --kube-version` writes all this as it must be: docs/install.md.\n" +
			"apiVersion: v1\nkind: Namespace\nmetadata:\n  name: tranche\n  labels: {pod-security.kubernetes.io/enforce: privileged}\n"
		golden(t, filepath.Join("../manifests", file), text+template(t, newest, args...))
	}
}

// What is not a value, or makes no sense, is refused with the reason.
func TestRefused(t *testing.T) {
	for set, want := range map[string]string{
		"node.acess=privileged":                           "acess",
		"node.access=root":                                "privileged",
		"node.bypass=maybe":                               "report",
		"node.maxUnavailable=0":                           "maxUnavailable",
		"node.maxUnavailable=0%":                          "maxUnavailable",
		"node.maxUnavailable=101%":                        "maxUnavailable",
		"node.access=runtimeClass,node.runtimeClassName=": "runtimeClassName",
		"node.kubeletDir=var/lib/kubelet":                 "kubeletDir",
		"scheduler.mode=extender":                         "tlsSecret",
		"scheduler.replicas=0":                            "replicas",
		"scheduler.name=default-scheduler":                "the cluster's own",
		"scheduler.quotaNamespace=":                       "quotaNamespace",
		"scheduler.service.port=10260":                    "10260 has metrics",
		"memoryUnit=lots":                                 "memoryUnit",
		"resourceDomain=a..b":                             "resourceDomain",
		"priorityClasses.value=-2147483649":               "priorityClasses",
		"priorityClasses.value=2000000000":                "priorityClasses",
		"webhook.failurePolicy=Maybe":                     "Ignore",
		"webhook.certificates=secret":                     "tlsSecret",
		"webhook.hami.defaultCores=101":                   "defaultCores",
	} {
		out, err := helm(t, "template", "tranche", chart, "--set", set)
		if err == nil || !strings.Contains(out, want) {
			t.Errorf("%s: %v, want it refused with %q:\n%s", set, err, want, out)
		}
	}
	for _, name := range []string{"team.tranche", "1tranche"} {
		if out, err := helm(t, "template", name, chart); err == nil || !strings.Contains(out, "a letter first") {
			t.Errorf("release %s: %v\n%s", name, err, out)
		}
	}
}

// Values that YAML would read as numbers are strings all the same.
func TestQuoted(t *testing.T) {
	out := template(t, newest, "--set-string", "simulated=1,scheduler.name=12", "--set", "scheduler.weight=2000000,node.maxUnavailable=7")
	for _, want := range []string{`- schedulerName: "12"`, `- "--scheduler-name=12"`, `- "--sim=1"`, "weight: 2000000\n", "maxUnavailable: 7\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %s", want)
		}
	}
}

// The programs know all flags that they are started with.
func TestFlags(t *testing.T) {
	const program = "../../build/bin/tranche"
	if _, err := os.Stat(program); err != nil {
		t.Skip("no binary: make build")
	}
	for _, set := range sets(t) {
		for _, pod := range pods(t, template(t, newest, "-f", set)) {
			for _, c := range pod.Spec.Containers {
				if len(c.Args) == 0 {
					continue
				}
				out, err := exec.Command(program, append(slices.Clone(c.Args), "--version")...).CombinedOutput()
				if err != nil || !bytes.HasPrefix(out, []byte("tranche ")) {
					t.Errorf("%s: %q: %v\n%s", set, c.Args, err, out)
				}
			}
		}
	}
}

// documents are the objects of a kind.
func documents(out, kind string) []string {
	var found []string
	for _, d := range strings.Split("\n"+out, "\n---") {
		if strings.Contains(d, "\nkind: "+kind+"\n") {
			found = append(found, d)
		}
	}
	return found
}

func pods(t *testing.T, out string) []corev1.PodTemplateSpec {
	t.Helper()
	var all []corev1.PodTemplateSpec
	for _, text := range documents(out, "DaemonSet") {
		var d appsv1.DaemonSet
		if err := yaml.UnmarshalStrict([]byte(text), &d); err != nil {
			t.Fatal(err)
		}
		all = append(all, d.Spec.Template)
	}
	for _, text := range documents(out, "Deployment") {
		var d appsv1.Deployment
		if err := yaml.UnmarshalStrict([]byte(text), &d); err != nil {
			t.Fatal(err)
		}
		all = append(all, d.Spec.Template)
	}
	return all
}

// Mounts have volumes, and what containers get has the same path for node and host.
func TestMounts(t *testing.T) {
	for _, set := range sets(t) {
		for _, pod := range pods(t, template(t, newest, "-f", set)) {
			volumes := map[string]corev1.Volume{}
			for _, v := range pod.Spec.Volumes {
				volumes[v.Name] = v
			}
			used := map[string]bool{}
			for _, c := range pod.Spec.Containers {
				for _, m := range c.VolumeMounts {
					v, ok := volumes[m.Name]
					if used[m.Name] = true; !ok {
						t.Errorf("%s: %s has no volume", set, m.Name)
					}
					if v.HostPath != nil && m.Name != "host" && v.HostPath.Path != m.MountPath {
						t.Errorf("%s: %s is %s on the host and %s here", set, m.Name, v.HostPath.Path, m.MountPath)
					}
				}
			}
			if len(used) != len(volumes) {
				t.Errorf("%s: volumes %v, used %v", set, volumes, used)
			}
		}
	}
}

// A change of the number of copies, there or back, changes the strategy's type in no case: the API server would refuse it.
func TestReplicas(t *testing.T) {
	for mode, want := range map[string]string{"own": "1", "extender": "100%"} {
		for _, n := range []string{"1", "2"} {
			out := template(t, newest, "--set", "node.enabled=false,webhook.enabled=false,scheduler.service.tlsSecret=t,scheduler.mode="+mode+",scheduler.replicas="+n)
			var d appsv1.Deployment
			if list := documents(out, "Deployment"); len(list) != 1 || yaml.UnmarshalStrict([]byte(list[0]), &d) != nil {
				t.Fatalf("%q", list)
			}
			s := d.Spec.Strategy
			if s.Type != appsv1.RollingUpdateDeploymentStrategyType || s.RollingUpdate.MaxSurge.String() != "0" || s.RollingUpdate.MaxUnavailable.String() != want {
				t.Errorf("mode %s, %s copies: %+v", mode, n, s)
			}
			if budgets := documents(out, "PodDisruptionBudget"); (len(budgets) == 1) != (mode == "own" && n == "2") {
				t.Errorf("mode %s, %s copies: %d budgets", mode, n, len(budgets))
			}
		}
	}
}

// Helm merges maps: null takes a default away.
func TestNodeSelector(t *testing.T) {
	for set, want := range map[string]map[string]string{
		`{}`:   {"nvidia-device-enable": "enable"},
		`null`: nil,
		`{"nvidia-device-enable": null, "pool": "gpus"}`: {"pool": "gpus"},
	} {
		out := template(t, newest, "--set", "scheduler.mode=none", "--set-json", "node.nodeSelector="+set)
		if all := pods(t, out); len(all) != 1 || !maps.Equal(all[0].Spec.NodeSelector, want) {
			t.Errorf("%s: %+v", set, all)
		}
	}
}

// The dashboard asks for metrics that there are.
func TestDashboard(t *testing.T) {
	board, err := os.ReadFile(chart + "/dashboards/tranche.json")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, file := range []string{"../../docs/metrics.md", "../../internal/scheduler/metrics.go"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile("`(tranche_[a-z0-9_]+)`|\"(tranche_scheduler_[a-z_]*[a-z])\"|(?:count|gauge)\\(\"([a-z_]+)\"").FindAllStringSubmatch(string(text), -1) {
			known[m[1]], known[m[2]], known["tranche_scheduler_"+m[3]] = true, true, true
		}
	}
	asked := regexp.MustCompile(`tranche_[a-z0-9_]+`).FindAllString(string(board), -1)
	if len(asked) < 20 {
		t.Errorf("only %q", asked)
	}
	for _, name := range asked {
		if !known[name] && !known[strings.TrimSuffix(name, "_bucket")] {
			t.Errorf("%s is no metric", name)
		}
	}
}
