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

// Sample is how busy a process kept a GPU's multiprocessors shortly before At, in per cent.
type Sample struct {
	PID int   `json:"pid"`
	SM  int   `json:"sm"`
	At  int64 `json:"at"` // microseconds of the driver's clock
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
	Utilization    *float64  `json:"utilization_gpu"` // of the driver's last sample period, in per cent; nil: not told
	Processes      []Process `json:"processes"`
	Samples        []Sample  `json:"samples"`
	Error          string    `json:"error"`
	Code           int       `json:"code"` // NVML's, with Error

	// With Inventory only. -1: not told.
	Minor       int      `json:"minor"`
	NUMA        int      `json:"numa"`
	ComputeMode int      `json:"compute_mode"`
	PCIeMBps    int      `json:"pcie_mbps"`
	NVLinkMBps  int      `json:"nvlink_mbps"`
	Ancestors   []int    `json:"ancestors"`
	NVLinks     []NVLink `json:"nvlinks"`
	Reading
}

// NVLink is the other end of one NVLink that is up: a GPU, a switch, or other.
type NVLink struct {
	Type string `json:"type"`
	PCI  string `json:"pci"`
}

// UnmarshalJSON sets what the driver did not tell to -1.
func (d *Device) UnmarshalJSON(data []byte) error {
	type plain Device
	p := plain{Minor: -1, NUMA: -1, ComputeMode: -1, PCIeMBps: -1, NVLinkMBps: -1}
	err := json.Unmarshal(data, &p)
	*d = Device(p)
	return err
}

// Reading is what a GPU says of its own health. Nil: the driver has no such figure.
type Reading struct {
	// Recovery is what has to be done before the GPU is fit again: NVML's nvmlDeviceGpuRecoveryAction_t,
	// 0 nothing.
	Recovery *int `json:"recovery"`
	// Energy counts mJ since the driver set the GPU up.
	Energy *uint64 `json:"energy"`
}

// XID is a critical error. UUID is "" if the driver did not say which GPU's.
type XID struct {
	UUID string `json:"uuid"`
	XID  int    `json:"xid"`
}

// Health is a line of WatchHealth: readings of every GPU, or one XID.
type Health struct {
	Devices []Device `json:"devices"`
	XID     *XID     `json:"event"`
	Error   string   `json:"error"`
	Code    int      `json:"code"`
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
	// WatchUse is Watch with the newest samples of each process that was busy since the last report;
	// none where the driver has none (MIG, vGPU).
	WatchUse(ctx context.Context, every time.Duration, f func(Report)) error
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
func (n NVML) Devices(ctx context.Context) (Report, error) { return n.once(ctx, "devices") }

// Inventory implements Prober.
func (n NVML) Inventory(ctx context.Context) (Report, error) { return n.once(ctx, "inventory") }

func (n NVML) once(ctx context.Context, mode string) (Report, error) {
	ctx, cancel := context.WithTimeout(ctx, n.timeout())
	defer cancel()
	cmd := exec.CommandContext(ctx, n.Probe, n.Library, mode)
	cmd.Env, cmd.WaitDelay = n.Env, time.Second
	out, err := cmd.Output()
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
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
		return r, &NVMLError{Code: r.Code, Text: r.Error}
	}
	return r, nil
}

// NVMLError is what NVML, or the loader in its place, said.
type NVMLError struct {
	Code int // nvmlReturn_t
	Text string
}

func (e *NVMLError) Error() string { return e.Text }

// Watch implements Driver. Each report must come within Timeout after it is due.
func (n NVML) Watch(ctx context.Context, every time.Duration, f func(Report)) error {
	return watch(ctx, n, "watch", every, reported(f))
}

// WatchUse implements Driver, as Watch does.
func (n NVML) WatchUse(ctx context.Context, every time.Duration, f func(Report)) error {
	return watch(ctx, n, "use", every, reported(f))
}

// WatchHealth implements Prober.
func (n NVML) WatchHealth(ctx context.Context, every time.Duration, f func(Health)) error {
	return watch(ctx, n, "health", every, func(line []byte) error {
		var h Health
		if err := json.Unmarshal(line, &h); err != nil {
			return fmt.Errorf("nvmlprobe: %w", err)
		}
		if h.Error != "" {
			return &NVMLError{Code: h.Code, Text: h.Error}
		}
		f(h)
		return nil
	})
}

func reported(f func(Report)) func([]byte) error {
	return func(line []byte) error {
		r, err := parse(line, nil)
		if err == nil {
			f(r)
		}
		return err
	}
}

// watch calls f with each line of a probe that runs until ctx ends, f fails, or it does.
func watch(ctx context.Context, n NVML, mode string, every time.Duration, f func([]byte) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	cmd := exec.CommandContext(ctx, n.Probe, n.Library, mode, fmt.Sprint(every.Milliseconds()))
	cmd.Env, cmd.WaitDelay = n.Env, time.Second
	// The probe ends when its standard input does: it cannot outlive us, and tells what it has before.
	in, hold, err := os.Pipe()
	if err != nil {
		return err
	}
	defer hold.Close()
	cmd.Stdin, cmd.Cancel = in, hold.Close
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	_ = in.Close()
	if err != nil {
		return err
	}
	limit := n.timeout() + every
	late := time.AfterFunc(limit, func() { cancel(errors.New("NVML does not answer")) })
	defer late.Stop()
	err = lines(out, func(line []byte) error { late.Reset(limit); return f(line) })
	cancel(nil)
	_ = cmd.Wait()
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}

func lines(out io.Reader, f func([]byte) error) error {
	scan := bufio.NewScanner(out)
	scan.Buffer(nil, lineMax)
	for scan.Scan() {
		if err := f(scan.Bytes()); err != nil {
			return err
		}
	}
	return scan.Err()
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
