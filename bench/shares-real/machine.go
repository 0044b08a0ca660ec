package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"tranche.dev/tranche/internal/simspec"
)

// Machine is where tenants run.
type Machine interface {
	// Label of figures measured here: "sim" or "gpu".
	Label() string
	// Title for people.
	Title() string
	// Fresh makes the machine as new, for the next trial.
	Fresh() error
	// RunFlags are for `tranche run`, WhichFlags for `tranche ps` and `set`, LoadFlags for gpuload.
	RunFlags() []string
	WhichFlags() []string
	LoadFlags() []string
	// Truth is the GPU time of each process so far, by pid, and when that was; nil where it can only be
	// told when the programs have ended.
	Truth() (at int64, busy map[int]int64, err error)
}

// simMachine is a directory of the simulated driver.
type simMachine struct {
	dir, simctl, name, spec string
}

func newSimMachine(base string, c Config) (*simMachine, error) {
	if _, err := os.Stat(c.Simctl); err != nil {
		return nil, fmt.Errorf("%w: run make, or name it with -simctl", err)
	}
	spec, err := simspec.Parse(c.Machine)
	if err != nil {
		return nil, fmt.Errorf("-machine %s: %w", c.Machine, err)
	}
	return &simMachine{dir: filepath.Join(base, "machine"), simctl: c.Simctl, name: c.Machine, spec: spec.Text}, nil
}

func (m *simMachine) Label() string { return "sim" }
func (m *simMachine) Title() string {
	return "a simulated GPU (" + m.name + "), scored by its own count"
}
func (m *simMachine) RunFlags() []string   { return []string{"--sim", m.dir, "--gpu", "0"} }
func (m *simMachine) WhichFlags() []string { return []string{"--sim", m.dir} }
func (m *simMachine) LoadFlags() []string  { return nil }

func (m *simMachine) Fresh() error {
	if err := os.RemoveAll(m.dir); err != nil {
		return err
	}
	if err := os.MkdirAll(m.dir, 0o700); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(m.dir, "spec"), []byte(m.spec), 0o600)
}

func (m *simMachine) Truth() (int64, map[int]int64, error) {
	out, err := exec.Command(m.simctl, m.dir, "truth", "--json").Output()
	if err != nil {
		return 0, nil, fmt.Errorf("simctl truth: %w", err)
	}
	var truth struct {
		Now   int64 `json:"now_ns"`
		Procs []struct {
			PID  int   `json:"pid"`
			Busy int64 `json:"busy_ns"`
		} `json:"procs"`
	}
	if err := json.Unmarshal(out, &truth); err != nil {
		return 0, nil, fmt.Errorf("simctl truth: %w: %s", err, out)
	}
	busy := map[int]int64{}
	for _, p := range truth.Procs {
		busy[p.PID] = p.Busy
	}
	return truth.Now, busy, nil
}

// gpuMachine is a real GPU.
type gpuMachine struct {
	index int
	name  string
}

// newGPUMachine finds the GPU by NVIDIA's driver, or says that there is none.
func newGPUMachine(index int) (*gpuMachine, error) {
	if _, err := os.Stat("/dev/nvidiactl"); err != nil {
		return nil, fmt.Errorf("no GPU here: %w", err)
	}
	m := &gpuMachine{index: index, name: "GPU " + strconv.Itoa(index)}
	out, err := exec.Command("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", strconv.Itoa(index)).Output()
	if err == nil {
		m.name = strings.TrimSpace(string(out))
	}
	return m, nil
}

func (m *gpuMachine) Label() string                        { return "gpu" }
func (m *gpuMachine) Title() string                        { return m.name + ", scored by what the kernels record on the GPU" }
func (m *gpuMachine) RunFlags() []string                   { return []string{"--gpu", strconv.Itoa(m.index)} }
func (m *gpuMachine) WhichFlags() []string                 { return nil }
func (m *gpuMachine) LoadFlags() []string                  { return []string{"--probe"} }
func (m *gpuMachine) Truth() (int64, map[int]int64, error) { return 0, nil, nil }

// Fresh lets the driver put away what the last trial's programs left.
func (m *gpuMachine) Fresh() error {
	time.Sleep(200 * time.Millisecond)
	return nil
}
