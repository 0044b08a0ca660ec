package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tranche.dev/tranche/internal/scheduler"
)

// schedulerConfig is what the command would run, with the warnings that it writes.
func schedulerConfig(t *testing.T, args ...string) (scheduler.Config, string, error) {
	t.Helper()
	var got scheduler.Config
	cmd := schedulerCommand(func(_ context.Context, c scheduler.Config) error { got = c; return nil })
	var out bytes.Buffer
	cmd.SetErr(&out)
	cmd.SetOut(&out)
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetArgs(append([]string{"--master", "http://127.0.0.1:1"}, args...))
	err := cmd.Execute()
	return got, out.String(), err
}

// gpu-admission's command lines are taken as they are.
func TestSchedulerTakesOldFlags(t *testing.T) {
	file := filepath.Join(t.TempDir(), "gpu-admission.config")
	if err := os.WriteFile(file, []byte(`{"QuotaConfigMapName":"q","GPUModelLabel":"m","GPUPoolLabel":"p","SkipBindTime":300}`), 0o600); err != nil {
		t.Fatal(err)
	}
	c, out, err := schedulerConfig(t, "--address", "0.0.0.0:3456", "--pprofAddress=127.0.0.1:0", "--v=4", "--logtostderr=true", "--log_flush_frequency=5s", "--config", file, "--incluster-mode=false")
	if err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprintln(c.Address, c.ProfileAddress, c.QuotaNamespace, c.QuotaName, c.Core.ModelLabel, c.Core.PoolLabel, c.Core.Exact, c.Core.HoldTicks)
	if want := "0.0.0.0:3456 127.0.0.1:0 kube-system q m p false 30\n"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if strings.Count(out, "has no meaning any more") != 1 {
		t.Error(out)
	}
}

func TestSchedulerRefuses(t *testing.T) {
	for args, want := range map[string]string{
		"--mode=odd": "ranked or exact", "--policy=odd": "--policy: policy", "--hold=0s": "must be 1s to 1h",
		"--kube-api-qps=0": "must be more than 0", "--kube-api-qps=NaN": "must be more than 0", "--kube-api-burst=-1": "must be more than 0", "--max-body=-1": "must be more than 0",
		"--quota-configmap=x": "must be NAMESPACE/NAME", "--config=/none": "no such file",
	} {
		if _, _, err := schedulerConfig(t, args); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
	}
}
