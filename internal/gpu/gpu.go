// Package gpu asks what GPUs there are and what processes hold on them. NVML runs in a process of its
// own (tools/nvmlprobe), so a driver that hangs or crashes costs a timeout, and this binary needs no
// cgo.
package gpu

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

// Process is a process on a GPU as NVML shows it. Used is nil where the driver cannot tell.
type Process struct {
	PID  int     `json:"pid"`
	Used *uint64 `json:"used"`
}

// Device is one GPU. Error is set, and little else, for one that does not answer.
type Device struct {
	Index          int       `json:"index"`
	UUID           string    `json:"uuid"`
	Name           string    `json:"name"`
	PCI            string    `json:"pci"`
	MemoryTotal    uint64    `json:"memory_total"`
	MemoryUsed     uint64    `json:"memory_used"`
	MemoryReserved uint64    `json:"memory_reserved"`
	MIG            bool      `json:"mig"`
	Processes      []Process `json:"processes"`
	Error          string    `json:"error"`
}

// Report is one answer of the driver.
type Report struct {
	DriverVersion string   `json:"driver_version"`
	CUDAVersion   int      `json:"cuda_version"`
	Devices       []Device `json:"devices"`
	Error         string   `json:"error"`
	Code          int      `json:"code"`
}

// Driver asks. Safe for concurrent use.
type Driver interface {
	// Devices lists the GPUs, or says why there are none.
	Devices(ctx context.Context) (Report, error)
	// Watch calls f with a report every interval until ctx ends or the driver stops answering.
	Watch(ctx context.Context, every time.Duration, f func(Report)) error
}

// NVML asks one NVML library through nvmlprobe.
type NVML struct {
	Probe   string
	Library string
	// Env is the probe's environment.
	Env []string
	// Timeout bounds one answer; the default is 20 s, as a driver that was idle may take long.
	Timeout time.Duration
}

const lineMax = 4 << 20

func (n NVML) timeout() time.Duration {
	if n.Timeout > 0 {
		return n.Timeout
	}
	return 20 * time.Second
}

// Devices implements Driver.
func (n NVML) Devices(ctx context.Context) (Report, error) {
	ctx, cancel := context.WithTimeout(ctx, n.timeout())
	defer cancel()
	cmd := exec.CommandContext(ctx, n.Probe, n.Library, "devices")
	cmd.Env, cmd.WaitDelay = n.Env, time.Second
	out, err := cmd.Output()
	if ctx.Err() != nil {
		return Report{}, fmt.Errorf("NVML (%s) did not answer for %v", n.Library, n.timeout())
	}
	return parse(bytes.TrimSpace(out), err)
}

func parse(line []byte, failed error) (Report, error) {
	var r Report
	if len(line) == 0 && failed != nil {
		return r, fmt.Errorf("nvmlprobe: %w", failed)
	}
	if err := json.Unmarshal(line, &r); err != nil {
		return r, fmt.Errorf("nvmlprobe: %w", err)
	}
	if r.Error != "" {
		return r, errors.New(r.Error)
	}
	return r, nil
}

// Watch implements Driver. Each report must come within Timeout.
func (n NVML) Watch(ctx context.Context, every time.Duration, f func(Report)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	cmd := exec.CommandContext(ctx, n.Probe, n.Library, "watch", fmt.Sprint(every.Milliseconds()))
	cmd.Env, cmd.WaitDelay = n.Env, time.Second
	// The probe ends when its standard input does: it cannot outlive us.
	in, hold, err := os.Pipe()
	if err != nil {
		return err
	}
	defer hold.Close()
	cmd.Stdin = in
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	_ = in.Close()
	if err != nil {
		return err
	}
	late := time.AfterFunc(n.timeout(), func() { cancel(errors.New("NVML does not answer")) })
	defer late.Stop()
	err = reports(out, func(r Report) { late.Reset(n.timeout()); f(r) })
	cancel(nil)
	_ = cmd.Wait()
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}

func reports(out io.Reader, f func(Report)) error {
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, lineMax)
	for lines.Scan() {
		r, err := parse(lines.Bytes(), nil)
		if err != nil {
			return err
		}
		f(r)
	}
	return lines.Err()
}

// ContextBytes is what a first CUDA context is expected to take on a GPU of this name, until it has
// been measured. Figures of drivers 535 and 550; rounded up.
func ContextBytes(name string) uint64 {
	for _, m := range []struct {
		part string
		mib  uint64
	}{
		{"H200", 540}, {"H100", 540}, {"H20", 500}, {"H800", 540}, {"GH200", 540}, {"B200", 640}, {"A100", 430}, {"A800", 430},
		{"A30", 320}, {"A40", 320}, {"A10", 280}, {"L40", 400}, {"L4", 240}, {"V100", 320}, {"P100", 320}, {"P40", 180}, {"T4", 120},
	} {
		if containsWord(name, m.part) {
			return m.mib << 20
		}
	}
	return 512 << 20
}

// containsWord finds part in name where no letter or digit stands beside it: T4 is in "Tesla T4", not
// in "T400"; a memory size may follow behind a dash.
func containsWord(name, part string) bool {
	for i := 0; i+len(part) <= len(name); i++ {
		if name[i:i+len(part)] == part && !wordAt(name, i-1) && !wordAt(name, i+len(part)) {
			return true
		}
	}
	return false
}

func wordAt(s string, i int) bool {
	return i >= 0 && i < len(s) && (s[i] >= '0' && s[i] <= '9' || s[i] >= 'A' && s[i] <= 'Z')
}
