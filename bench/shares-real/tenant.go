package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// Tenant is a slice and its load.
type Tenant struct {
	Name    string
	Cores   int // 0: no compute limit
	Burst   int // 0: none
	Latency bool
	Load    string  // gpuload's flags
	Target  float64 // percent of the GPU that it must get, 0: none
}

// Report is what gpuload says at its end.
type Report struct {
	KernelsPerSecond float64 `json:"kernels_per_s"`
	Latency          *struct {
		Requests int     `json:"requests"`
		P50      float64 `json:"p50_ms"`
		P99      float64 `json:"p99_ms"`
		Max      float64 `json:"max_ms"`
	} `json:"latency"`
	Wakes []int64 `json:"wakes_ns"`
	Probe *Probe  `json:"probe"`
}

// Probe is what the kernels recorded on the GPU: the time that they ran, by buckets of its clock.
type Probe struct {
	Bucket int64   `json:"bucket_ns"`
	First  int64   `json:"first"`
	Busy   []int64 `json:"busy_ns"`
	Gaps   int64   `json:"gaps"`
}

// Series of the whole recording.
func (p *Probe) Series() Series {
	s := Series{{At: p.First * p.Bucket}}
	var sum int64
	for i, b := range p.Busy {
		sum += b
		s = append(s, Point{At: (p.First + int64(i) + 1) * p.Bucket, Busy: sum})
	}
	return s
}

// process is a running tenant: `tranche run`, which runs gpuload.
type process struct {
	tenant Tenant
	cmd    *exec.Cmd
	out    *os.File
	done   chan struct{}
	err    error
	killed bool // `tranche run`, by us
}

// start runs gpuload for so many seconds from its first launch.
func (t Tenant) start(b *Bench, seconds float64) (*process, error) {
	memory := "2Gi"
	if strings.Contains(t.Load, "--procs") {
		memory = "4Gi" // a context each
	}
	args := append([]string{"run", "--name", t.Name, "--memory", memory}, b.machine.RunFlags()...)
	if t.Cores > 0 {
		args = append(args, "--cores", strconv.Itoa(t.Cores))
	}
	if t.Burst > 0 {
		args = append(args, "--burst", strconv.Itoa(t.Burst))
	}
	if t.Latency {
		args = append(args, "--class", "latency")
	}
	args = append(args, "--", filepath.Join(b.Bin, "gpuload"), "--json", "--time", fmt.Sprintf("%.2f", seconds),
		"--seed", strconv.Itoa(b.random.Intn(1e6)))
	args = append(args, b.machine.LoadFlags()...)
	args = append(args, strings.Fields(t.Load)...)
	out, err := os.CreateTemp(b.dir, "out-*")
	if err != nil {
		return nil, err
	}
	p := &process{tenant: t, out: out, done: make(chan struct{})}
	p.cmd = b.tranche(args...)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// report reads what gpuload printed, after the end.
func (p *process) report() (Report, error) {
	var r Report
	text, err := os.ReadFile(p.out.Name())
	if err != nil {
		return r, err
	}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, `{"kernel_ns"`) {
			return r, json.Unmarshal([]byte(line), &r)
		}
	}
	return r, fmt.Errorf("tenant %s: gpuload did not report: %w: %s", p.tenant.Name, errors.Join(p.err), text)
}

func (p *process) close() {
	name := p.out.Name()
	_ = p.out.Close()
	_ = os.Remove(name)
}
