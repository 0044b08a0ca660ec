// Package machine opens the machine that a command is to run on: the real one, a simulated one, or
// the slice that this process is in already.
package machine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"tranche.dev/tranche/internal/assets"
	"tranche.dev/tranche/internal/driverfind"
	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/simspec"
	"tranche.dev/tranche/internal/slice"
	"tranche.dev/tranche/internal/state"
	"tranche.dev/tranche/internal/tenant"
)

// SimDirEnv tells the simulated driver where its machine is.
const SimDirEnv = "TRANCHE_SIM_DIR"

// StateDirEnv moves all state, for tests.
const StateDirEnv = "TRANCHE_STATE_DIR"

// Machine is what a command can run on.
type Machine struct {
	Registry *state.Registry
	Beneath  slice.Beneath
	// Parent is the id in Registry of the slice around us, "" if none is known there.
	Parent string
	// Sim is the directory of the simulated machine, "" for real GPUs.
	Sim string
}

// NoGPU is the error of a machine that has none.
type NoGPU struct{ Why error }

func (e *NoGPU) Error() string {
	return fmt.Sprintf("no GPU here (%v); a simulated one does too: --sim a100-80g", e.Why)
}

// StateDir is where StateDirEnv moves the state to, absolute; "" for the default places.
func StateDir() string {
	dir := os.Getenv(StateDirEnv)
	if dir == "" {
		return ""
	}
	if abs, err := filepath.Abs(dir); err == nil {
		return abs
	}
	return dir
}

// realRoot is the registry of real GPUs; simBase holds this user's simulated machines.
func realRoot() string {
	if dir := StateDir(); dir != "" {
		return filepath.Join(dir, "gpu")
	}
	return "/dev/shm/tranche"
}

func simBase() string {
	if dir := StateDir(); dir != "" {
		return filepath.Join(dir, "sim")
	}
	return fmt.Sprintf("/dev/shm/tranche-sim-%d", os.Getuid())
}

// Open finds the machine for a command that will run with this library path.
func Open(sim, libraryPath string) (*Machine, error) {
	if assets.Version() == "" {
		return nil, assets.ErrMissing
	}
	cwd, _ := os.Getwd()
	beneath, err := slice.FindBeneath(driverfind.Finder{LibraryPath: libraryPath, Cwd: cwd})
	if sim != "" {
		return openSim(sim, beneath, err)
	}
	var none *slice.ErrNoDriver
	if errors.As(err, &none) {
		return nil, &NoGPU{Why: err}
	}
	if err != nil {
		return nil, err
	}
	m := &Machine{Beneath: beneath}
	root, shared := realRoot(), StateDir() == ""
	// A slice around us says which registry it is in; in a container it says nothing.
	if id := filepath.Base(beneath.Outer); beneath.Outer != "" && idPattern.MatchString(id) {
		root, m.Parent = filepath.Dir(beneath.Outer), id
		shared = root == "/dev/shm/tranche"
	}
	m.Registry, err = state.Open(root, shared)
	return m, err
}

var idPattern = regexp.MustCompile(`^[0-9a-f]{16}$`)

func openSim(value string, beneath slice.Beneath, beneathErr error) (*Machine, error) {
	dir, err := prepareSim(value)
	if err != nil {
		return nil, fmt.Errorf("--sim %s: %w", value, err)
	}
	registry, err := state.Open(filepath.Join(dir, "slices"), false)
	if err != nil {
		return nil, err
	}
	m := &Machine{Registry: registry, Sim: dir, Beneath: slice.Beneath{Sim: dir}}
	// The same simulated machine again, from within one of its slices.
	if beneathErr == nil && beneath.Outer != "" && filepath.Dir(beneath.Outer) == registry.Root {
		m.Beneath, m.Parent = beneath, filepath.Base(beneath.Outer)
	}
	return m, nil
}

// SimDir returns the directory of the machine that --sim means, made or not.
func SimDir(value string) (string, error) {
	spec, err := simspec.Parse(value)
	if err != nil || spec.Dir != "" {
		return spec.Dir, err
	}
	dir := simDir(spec.Text)
	if _, err := os.Stat(filepath.Join(dir, "spec")); err != nil {
		return dir, checkSpec(spec)
	}
	return dir, nil
}

// simDir is named by the spec and by the driver, whose state file it holds.
func simDir(text string) string {
	sum := sha256.Sum256([]byte(assets.Version() + "\n" + text))
	return filepath.Join(simBase(), hex.EncodeToString(sum[:8]))
}

func prepareSim(value string) (string, error) {
	spec, err := simspec.Parse(value)
	if err != nil {
		return "", err
	}
	dir := spec.Dir
	if dir == "" {
		dir = simDir(spec.Text)
		if err := os.MkdirAll(filepath.Dir(simBase()), 0o755); err != nil {
			return "", err
		}
		if _, err := state.Open(simBase(), false); err != nil {
			return "", err
		}
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return "", err
		}
		if _, err := os.Stat(filepath.Join(dir, "spec")); err != nil {
			if err := checkSpec(spec); err != nil {
				return "", err
			}
			if err := assets.WriteFile(filepath.Join(dir, "spec"), []byte(spec.Text), 0o600); err != nil {
				return "", err
			}
		}
	}
	if _, err = simGPUs(dir); err != nil {
		err = errors.New(explain(err.Error(), spec))
	}
	return dir, err
}

// checkSpec lets the simulator judge the text.
func checkSpec(spec simspec.Spec) error {
	_, err := simctlWith(spec.Text, "check", specFile)
	if err == nil {
		return nil
	}
	return errors.New(explain(strings.TrimPrefix(err.Error(), specFile+": "), spec))
}

const specFile = "/dev/stdin"

var (
	specLine   = regexp.MustCompile(`^line (\d+): `)
	modelsHint = " (simctl models lists them)"
)

// explain puts the simulator's complaint into the terms of what the user wrote.
func explain(said string, spec simspec.Spec) string {
	if m := specLine.FindStringSubmatch(said); m != nil {
		n, _ := strconv.Atoi(m[1])
		switch {
		case n >= 1 && n <= len(spec.Lines):
			said = fmt.Sprintf("line %d: %s", spec.Lines[n-1], said[len(m[0]):])
		case spec.Short:
			said = strings.TrimPrefix(said[len(m[0]):], "gpu: ")
		}
	}
	if strings.Contains(said, "count: bad value") {
		return fmt.Sprintf("%s; 1 to %d", said, simspec.MaxGPUs)
	}
	if before, _, ok := strings.Cut(said, modelsHint); ok {
		return before + "; there are " + strings.Join(models(), ", ")
	}
	return said
}

// models lists what can be simulated.
func models() []string {
	out, _ := simctl("models")
	var names []string
	for line := range strings.Lines(string(out)) {
		if name, _, ok := strings.Cut(line, " "); ok {
			names = append(names, name)
		}
	}
	return names
}

type simGPU struct {
	UUID    string `json:"uuid"`
	Context uint64 `json:"context"`
}

func simGPUs(dir string) ([]simGPU, error) {
	out, err := simctl(dir, "gpus", "--json")
	if err != nil {
		return nil, err
	}
	var gpus []simGPU
	return gpus, json.Unmarshal(out, &gpus)
}

func simctl(args ...string) ([]byte, error) { return simctlWith("", args...) }

func simctlWith(stdin string, args ...string) ([]byte, error) {
	path, err := assets.Path(assets.SimCtl)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	if stdin != "" {
		cmd.Stdin = strings.NewReader(stdin)
	}
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil && said.Len() > 0 {
		return nil, errors.New(strings.TrimPrefix(strings.TrimSpace(said.String()), "simctl: "))
	}
	return out, err
}

// Driver asks this machine's NVML, never a slice's. library is the file to ask, "" for what Open
// found.
func (m *Machine) Driver(library string) (gpu.Driver, error) {
	probe, err := assets.Path(assets.NVMLProbe)
	if err != nil {
		return nil, err
	}
	if library == "" {
		library = m.Beneath.BaseNVML
	}
	if library == "" && m.Sim != "" {
		if library, err = assets.Path(assets.SimNVML); err != nil {
			return nil, err
		}
	}
	return gpu.NVML{Probe: probe, Library: library, Env: m.probeEnv()}, nil
}

// probeEnv is our environment without what would change the probe.
func (m *Machine) probeEnv() []string {
	var env []string
	for _, e := range os.Environ() {
		name, _, _ := strings.Cut(e, "=")
		switch {
		case name == "LD_PRELOAD", name == "TRANCHE_TRACE", name == "TRANCHE_SIM_TRACE", m.Sim != "" && name == SimDirEnv:
		default:
			env = append(env, e)
		}
	}
	if m.Sim != "" {
		env = append(env, SimDirEnv+"="+m.Sim)
	}
	return env
}

// GPU is one that a command may get.
type GPU struct {
	Index   int
	UUID    string
	Name    string
	Memory  uint64
	Context uint64
	// Outer is what the slice around us may use of it; nil when there is none.
	Outer *tenant.Device
}

// GPUs lists the machine's GPUs that answer, inside a slice that slice's.
func (m *Machine) GPUs(ctx context.Context) ([]GPU, error) {
	driver, err := m.Driver("")
	if err != nil {
		return nil, err
	}
	report, err := driver.Devices(ctx)
	if err != nil {
		return nil, &NoGPU{Why: err}
	}
	var gpus []GPU
	var why error = errors.New("the driver lists none")
	for _, d := range report.Devices {
		if d.Error != "" || d.UUID == "" {
			why = fmt.Errorf("gpu %d: %s", d.Index, d.Error)
			continue
		}
		gpus = append(gpus, GPU{Index: d.Index, UUID: d.UUID, Name: d.Name,
			Memory: d.MemoryTotal - min(d.MemoryReserved, d.MemoryTotal), Context: gpu.ContextBytes(d.Name)})
	}
	if m.Sim != "" {
		m.simContexts(gpus)
	}
	if m.Beneath.Outer != "" {
		if gpus, err = m.within(gpus); err != nil {
			return nil, err
		}
	}
	if len(gpus) == 0 {
		return nil, &NoGPU{Why: why}
	}
	return gpus, nil
}

func (m *Machine) simContexts(gpus []GPU) {
	sims, _ := simGPUs(m.Sim)
	for i := range gpus {
		for _, s := range sims {
			if s.UUID == gpus[i].UUID {
				gpus[i].Context = s.Context
			}
		}
	}
}

// within keeps the GPUs of the slice around us, in its order and with its numbers.
func (m *Machine) within(all []GPU) ([]GPU, error) {
	limits, err := tenant.OpenLimits(m.Beneath.Outer)
	if err != nil {
		return nil, fmt.Errorf("the slice around this command: %w", err)
	}
	defer limits.Close()
	devices, err := limits.Devices()
	if err != nil {
		return nil, err
	}
	var out []GPU
	for i := range devices {
		for _, g := range all {
			if g.UUID == devices[i].UUID {
				g.Index, g.Outer, g.Context = i, &devices[i], devices[i].ContextBytes
				out = append(out, g)
			}
		}
	}
	return out, nil
}

// CheckState tells whether the records of slices can be read. None at all is fine.
func CheckState() error {
	for _, dir := range []string{realRoot(), simBase()} {
		if _, err := os.ReadDir(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("the record of slices cannot be read: %w", err)
		}
	}
	return nil
}

// Registries lists what exists on this machine for this user: real GPUs, then simulated machines.
// For each the simulated machine's directory is given, "" for real GPUs.
func Registries() map[string]*state.Registry {
	out := map[string]*state.Registry{}
	if info, err := os.Lstat(realRoot()); err == nil && info.IsDir() {
		out[""] = &state.Registry{Root: realRoot()}
	}
	sims, _ := filepath.Glob(filepath.Join(simBase(), "*", "slices"))
	for _, root := range sims {
		out[filepath.Dir(root)] = &state.Registry{Root: root}
	}
	return out
}
