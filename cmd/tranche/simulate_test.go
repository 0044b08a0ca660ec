package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The whole output of `tranche simulate` on a cluster of one GPU, and of --fit after it.
func TestSimulateOutput(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cluster.yaml")
	text := `nodes:
- {name: a, count: 1, cpu: "8", ram: 16Gi, gpus: 1, model: T4}
pods:
- {name: p, count: 1, cpu: "1", cores: 60}
- {name: q, count: 1, cpu: "1", cores: 60}
`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"-o", "csv"}, `policy,seed,arrived_pct,allocated_pct,fragmented_pct,refused,refused_largest
least-fragmentation,42,60,60.0000,40.0000,0.0000,0.0000
least-fragmentation,42,120,60.0000,40.0000,1.0000,1.0000
`},
		{[]string{"--fit", "cores=20"}, "1 pods placed, 1 without room; then 2 more of cores=20 fit\n"},
	} {
		cmd := simulateCommand()
		var out, errs bytes.Buffer
		cmd.SetOut(&out)
		cmd.SetErr(&errs)
		cmd.SetArgs(append([]string{"--file", file}, c.args...))
		if err := cmd.Execute(); err != nil || errs.Len() > 0 || out.String() != c.want {
			t.Errorf("%v: %v %s\n%s\nwant\n%s", c.args, err, errs.String(), out.String(), c.want)
		}
	}
}

// The example of the documentation says what the comment in it promises.
func TestSimulateExample(t *testing.T) {
	cmd := simulateCommand()
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SetArgs([]string{"--file", "../../examples/simulate/cluster.yaml", "--fit", "cores=30,memory=8Gi"})
	if err := cmd.Execute(); err != nil || out.String() != "180 pods placed, 0 without room; then 170 more of cores=30,memory=8Gi fit\n" {
		t.Errorf("%v\n%s", err, out.String())
	}
}

// Flags that cannot be meant are refused before anything is replayed.
func TestSimulateRefuses(t *testing.T) {
	for args, want := range map[string]string{
		"--policy=":                          "--policy: names none",
		"--fit=cores=20 --policy=":           "--policy: names none",
		"--fit=cores=20 --policy=spread,fgd": "--fit takes one policy",
		"--fit=cores=20 --svg=plot.svg":      "--fit takes one policy",
		"--fit=cores=20 -o=odd":              "--output odd",
		"--load=0 --protocol=atc23":          "--load 0",
		"--seeds=9223372036854775807":        "--seeds",
	} {
		cmd := simulateCommand()
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		cmd.SetArgs(append(strings.Fields(args), "--file=none.yaml"))
		if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %s", args, err, want)
		}
	}
}

// A plot that cannot be written costs no figures.
func TestSimulatePrintsBeforeItPlots(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "cluster.yaml")
	if err := os.WriteFile(file, []byte("nodes: [{name: a, gpus: 1}]\npods: [{name: p, cores: 60}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := simulateCommand()
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"--file", file, "-o", "csv", "--svg", filepath.Join(dir, "none", "plot.svg")})
	if err := cmd.Execute(); err == nil || !strings.Contains(out.String(), "least-fragmentation,42,60,60.0000") {
		t.Errorf("%v, printed %q", err, out.String())
	}
}
