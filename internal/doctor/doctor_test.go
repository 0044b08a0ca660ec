package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"tranche.dev/tranche/internal/gpu"
)

// Each file of testdata is a host, a line for each thing that it has, and below `---` the whole report.
//
//	file PATH CONTENT      CONTENT with \n and \t
//	lib PATH               a library of this machine's kind
//	link PATH TARGET
//	sock PATH [dead]       dead: nobody listens
//	dev PATH MAJOR MINOR
//	nvml JSON              what nvmlprobe says; none: it is not asked
//	self WORDS             root, ptrace, hostpid, nostrict, noassets; default: an ordinary user
//	space SIZE FREE [noexec]   of every file system, MiB; default 64 60
func TestReports(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) < 8 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		given, want, _ := strings.Cut(string(data), "---\n")
		r, err := Run(t.Context(), fakeHost(t, given))
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		var got bytes.Buffer
		if err := r.WriteText(&got); err != nil {
			t.Fatal(err)
		}
		if got.String() != want {
			t.Errorf("%s:\n%s", file, got.String())
			if os.Getenv("UPDATE") != "" {
				_ = os.WriteFile(file, []byte(given+"---\n"+got.String()), 0o644)
			}
		}
		for _, c := range r.Checks {
			if needs := c.Status == Warn || c.Status == Fail; needs != (c.Fix != "") || c.Text == "" {
				t.Errorf("%s: %+v", file, c)
			}
		}
	}
}

// answer is nvmlprobe with a line to say.
type answer struct{ line string }

func (a answer) Inventory(context.Context) (gpu.Report, error) {
	var r gpu.Report
	if err := json.Unmarshal([]byte(a.line), &r); err != nil {
		return r, err
	}
	if r.Error != "" {
		return r, &gpu.NVMLError{Code: r.Code, Text: r.Error}
	}
	return r, nil
}

func (answer) WatchHealth(context.Context, time.Duration, func(gpu.Health)) error {
	return errors.New("doctor does not wait")
}

func fakeHost(t *testing.T, given string) Config {
	t.Helper()
	root := t.TempDir()
	c := Config{Root: root, Self: Self{UID: 1000, Assets: true}, Now: func() time.Time { return time.Unix(0, 0) }}
	size, free, noexec := uint64(64), uint64(60), false
	for line := range strings.Lines(given) {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] == "#" {
			continue
		}
		rest := strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(line), f[0]))
		var err error
		switch f[0] {
		case "file":
			_, content, _ := strings.Cut(rest, " ")
			err = put(root, f[1], strings.NewReplacer(`\n`, "\n", `\t`, "\t").Replace(content))
		case "lib":
			err = put(root, f[1], sharedObject())
		case "link":
			at := filepath.Join(root, f[1])
			if err = os.MkdirAll(filepath.Dir(at), 0o755); err == nil {
				err = os.Symlink(f[2], at)
			}
		case "sock", "dev":
			err = put(root, f[1], "fake "+line)
		case "nvml":
			c.Ask = func(string) (gpu.Prober, error) { return answer{rest}, nil }
		case "self":
			for _, word := range f[1:] {
				switch word {
				case "root":
					c.Self.UID, c.Self.Admin = 0, true
				case "ptrace":
					c.Self.Ptrace = true
				case "hostpid":
					c.Self.HostPID = true
				case "nostrict":
					c.Self.Strict = errors.New("user namespaces are not allowed")
				case "noassets":
					c.Self.Assets = false
				default:
					t.Fatal(line)
				}
			}
		case "space":
			_, err = fmt.Sscan(rest, &size, &free)
			noexec = len(f) > 3
		default:
			t.Fatal(line)
		}
		if err != nil {
			t.Fatal(line, err)
		}
	}
	c.stat = fakeStat
	c.Space = func(string) (uint64, uint64, bool, error) { return size << 20, free << 20, noexec, nil }
	c.Dial = func(path string) error {
		if data, _ := os.ReadFile(path); strings.HasSuffix(strings.TrimSpace(string(data)), " dead") {
			return errors.New("connection refused")
		}
		return nil
	}
	return c
}

func put(root, name, content string) error {
	at := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return err
	}
	return os.WriteFile(at, []byte(content), 0o644)
}

// fakeStat takes what a file says of itself for what it is.
func fakeStat(path string) (node, error) {
	n, err := stat(path)
	if err != nil || !n.mode.IsRegular() {
		return n, err
	}
	data, _ := os.ReadFile(path)
	var at string
	switch text := string(data); {
	case strings.HasPrefix(text, "fake sock "):
		n.mode = fs.ModeSocket
	case strings.HasPrefix(text, "fake dev "):
		n.mode = fs.ModeDevice | fs.ModeCharDevice
		if _, err := fmt.Sscanf(text, "fake dev %s %d %d", &at, &n.major, &n.minor); err != nil {
			return n, err
		}
	}
	return n, nil
}

// sharedObject is the header of an ELF file and no more.
func sharedObject() string {
	h := make([]byte, 64)
	copy(h, "\x7fELF\x02\x01\x01")
	h[16], h[18], h[20], h[52], h[54], h[58] = 3, map[string]byte{"amd64": 62, "arm64": 183}[runtime.GOARCH], 1, 64, 56, 64
	return string(h)
}

func TestJSON(t *testing.T) {
	r := Report{Checks: []Check{{"driver", "kernel module", Fail, "not loaded", "modprobe <nvidia>"}, {"gpus", "NVML", Skip, "not asked", ""}}}
	var got bytes.Buffer
	if err := r.WriteJSON(&got); err != nil {
		t.Fatal(err)
	}
	want := `{
  "failed": true,
  "checks": [
    {
      "area": "driver",
      "name": "kernel module",
      "status": "fail",
      "text": "not loaded",
      "fix": "modprobe <nvidia>"
    },
    {
      "area": "gpus",
      "name": "NVML",
      "status": "skip",
      "text": "not asked"
    }
  ]
}
`
	if got.String() != want {
		t.Error(got.String())
	}
}

func TestRoot(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, root := range []string{file, file + "-not"} {
		if _, err := Run(t.Context(), Config{Root: root}); err == nil || !strings.HasPrefix(err.Error(), "root: ") {
			t.Errorf("%s: %v", root, err)
		}
	}
}

func TestThisProcess(t *testing.T) {
	const status = "Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t0000000000280000\nCapBnd:\t000001ffffffffff\n"
	if got := capabilities(status); got != 1<<19|1<<21 {
		t.Errorf("%x", got)
	}
	if got := capabilities("Name:\tx\n"); got != 0 {
		t.Errorf("%x", got)
	}
	if s := ThisProcess(); int(s.UID) != os.Geteuid() {
		t.Errorf("%+v", s)
	}
}
