package simspec

import (
	"os"
	"path/filepath"
	"testing"
)

func TestParse(t *testing.T) {
	dir := t.TempDir()
	yaml := filepath.Join(dir, "spec.yaml")
	content := `driver_version: 550.10
slice_us: 2048
gpus:
- {model: a100-80g, count: 2}
- {name: My GPU, model: t4, memory: 16Gi}
links:
- {between: [0, 1], nvlink: 12}
`
	for path, text := range map[string]string{yaml: content, filepath.Join(dir, "plain"): "gpu model=t4\n"} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for value, want := range map[string]string{
		"t4":                        "gpu model=t4\n",
		"a100-80g:2":                "gpu model=a100-80g count=2\n",
		"a100-80g:2,t4":             "gpu model=a100-80g count=2\ngpu model=t4\n",
		filepath.Join(dir, "plain"): "gpu model=t4\n",
		yaml: "driver_version=550.10\nslice_us=2048\ngpu model=a100-80g count=2\n" +
			"gpu model=t4 memory=16Gi name=My_GPU\nlink 0 1 nvlink=12\n",
	} {
		if got, err := Parse(value); err != nil || got.Text != want {
			t.Errorf("%s: %q, %v; want %q", value, got.Text, err, want)
		}
	}
	for _, value := range []string{"", "t4:", "t4:x", "t4:0", "t4:17", "/dev/zero", "a b", "none.yaml", "/no/such/file", dir, "t4,,t4"} {
		if got, err := Parse(value); err == nil {
			t.Errorf("%q was taken as %+v", value, got)
		}
	}
}
