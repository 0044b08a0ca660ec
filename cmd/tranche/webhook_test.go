package main

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"

	"tranche.dev/tranche/internal/webhook"
)

// webhookConfig is what the command would run.
func webhookConfig(args ...string) (webhook.Config, error) {
	var got webhook.Config
	cmd := webhookCommand(func(_ context.Context, c webhook.Config) error { got = c; return nil })
	cmd.SetErr(&bytes.Buffer{})
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetArgs(args)
	err := cmd.Execute()
	return got, err
}

func TestWebhookFlags(t *testing.T) {
	c, err := webhookConfig("--master=http://127.0.0.1:1", "--authority_secret=ns/name", "--configuration=c", "--host=h", "--hami", "--hami-default-memory=4Gi", "--hami-default-cores=20", "--scheduler-name=", "--memory-unit=1Gi")
	if err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprintf("%q %+v %v %s/%s %s %s %s", c.Mutator.Scheduler, *c.Mutator.HAMi, c.Mutator.Names, c.SecretNamespace, c.SecretName, c.Configuration, c.Host, c.Address)
	if want := `"" {DefaultMemory:4 GiB DefaultCores:20} {tencent.com 1 GiB} ns/name c h :9443`; got != want || c.Client == nil {
		t.Errorf("%s\nwant %s", got, want)
	}
	// With a certificate of others nothing is asked of the API server.
	if c, err = webhookConfig("--tls-cert-file=a", "--tls-private-key-file=b"); err != nil || c.Client != nil || c.Mutator.HAMi != nil || c.Mutator.Scheduler != "tranche-scheduler" {
		t.Errorf("%v %+v", err, c)
	}
	for args, want := range map[string]string{
		"--authority-secret=x --master=http://127.0.0.1:1": "must be NAMESPACE/NAME", "--hami": "API server", "--hami-default-memory=lots": "lots", "more": "unknown command",
	} {
		if _, err := webhookConfig(strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
	}
}
