package run

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/assets"
	"tranche.dev/tranche/internal/machine"
	"tranche.dev/tranche/internal/quantity"
	"tranche.dev/tranche/internal/sandbox"
	"tranche.dev/tranche/internal/slice"
	"tranche.dev/tranche/internal/state"
	"tranche.dev/tranche/internal/supervise"
	"tranche.dev/tranche/internal/tenant"
)

// Strictness says when the system's driver files are covered.
type Strictness string

// Values of --strict.
const (
	Auto Strictness = "auto"
	On   Strictness = "on"
	Off  Strictness = "off"
)

// Config is a `tranche run`.
type Config struct {
	Asked   Asked
	Sim     string
	Name    string
	Trace   string // "", "1", or a file
	Strict  Strictness
	Command []string
	Stderr  io.Writer
}

// Failed is the exit status of `tranche run` when it could not run the command.
const Failed = 125

// Status is an error with the exit status that it means.
type Status struct {
	Code int
	Err  error
}

func (s *Status) Error() string { return s.Err.Error() }
func (s *Status) Unwrap() error { return s.Err }

// EnterStatus is the exit status of the sandbox's second stage, which stands for the command's.
func EnterStatus(err error) int {
	var e *sandbox.ExecError
	if errors.As(err, &e) {
		return supervise.StartStatus(err)
	}
	return Failed
}

// lookPath finds the command as a shell does; an error says no more than the name and why.
func lookPath(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err == nil || errors.Is(err, exec.ErrDot) {
		return path, nil
	}
	status := supervise.StartStatus(err)
	var lookup *exec.Error
	var at *os.PathError
	switch {
	case errors.As(err, &at):
		err = fmt.Errorf("%s: %w", name, at.Err)
	case errors.As(err, &lookup):
		err = fmt.Errorf("%s: %w", name, lookup.Err)
	}
	return "", &Status{Code: status, Err: err}
}

// Run runs the command and returns how it ended. An error means that it was not started.
func Run(config Config) (*os.ProcessState, error) {
	if err := config.Asked.Validate(); err != nil {
		return nil, err
	}
	path, err := lookPath(config.Command[0])
	if err != nil {
		return nil, err
	}
	libraryPath := os.Getenv("LD_LIBRARY_PATH")
	m, err := machine.Open(config.Sim, libraryPath)
	if err != nil {
		return nil, err
	}
	strict, err := config.strict()
	if err != nil {
		return nil, err
	}
	own, layout, err := reserve(config, m, strict)
	if err != nil {
		return nil, err
	}
	defer own.Release()
	arbiter := takePart(config, m, own, layout)

	cmd := &exec.Cmd{Path: path, Args: config.Command, Env: environment(config, m, layout, libraryPath),
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}
	// What the command leaves behind stays ours to see, until we end.
	_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	signals := supervise.Catch()
	defer signals.Stop()
	if strict {
		err = sandbox.Start(cmd, sandbox.Cover(layout, libraryPath))
	} else {
		err = cmd.Start()
	}
	if err != nil {
		arbiter.stop()
		own.Remove()
		var at *os.PathError
		if errors.As(err, &at) {
			err = fmt.Errorf("%s: %w", config.Command[0], at.Err)
		}
		return nil, &Status{Code: supervise.StartStatus(err), Err: err}
	}
	signals.Forward(cmd.Process)
	return look(config, m, own, layout, cmd, arbiter)
}

// look supervises the running command to its end.
func look(config Config, m *machine.Machine, own *state.Own, layout slice.Layout, cmd *exec.Cmd, arbiter *candidate) (*os.ProcessState, error) {
	child, _ := tenant.Find(cmd.Process.Pid)
	driver, err := m.Driver(layout.BaseNVML)
	var s *supervise.Supervisor
	if err == nil {
		s, err = supervise.New(supervise.Config{Slice: own, Driver: driver, Child: child, Arbiter: arbiter.use, Warn: func(err error) {
			config.say("memory beyond allocations (contexts, modules) is not measured: %v", err)
		}})
	}
	if err != nil {
		config.say("not supervised: %v", err)
	}
	_ = cmd.Wait()
	// What it runs itself is not to be taken for what the command left behind.
	arbiter.stop()
	var over bool
	if s != nil {
		over = s.Stop(supervise.Descendants)
	}
	if over {
		own.Remove()
	}
	return cmd.ProcessState, nil
}

func (c Config) say(format string, args ...any) {
	fmt.Fprintf(c.Stderr, "tranche: "+format+"\n", args...)
}

// strict decides whether system paths are covered.
func (c Config) strict() (bool, error) {
	if c.Strict == Off {
		return false, nil
	}
	err := sandbox.Probe()
	if err != nil && c.Strict == On {
		return false, fmt.Errorf("--strict on: %w; --strict off runs without covering the system's driver files", err)
	}
	if err != nil {
		c.say("the system's driver files are not covered (%v); the limits can be avoided by loading them", err)
	}
	return err == nil, nil
}

// reserve takes the slice under the machine's lock and lays it out.
func reserve(config Config, m *machine.Machine, strict bool) (*state.Own, slice.Layout, error) {
	none := slice.Layout{}
	gpus, err := m.GPUs(context.Background())
	if err != nil {
		return nil, none, err
	}
	libraries, err := assets.Slices()
	if err != nil {
		return nil, none, err
	}
	removeOldLibraries(libraries)
	unlock, err := m.Registry.Lock()
	if err != nil {
		return nil, none, err
	}
	defer unlock()
	slices, err := m.Registry.List()
	if err != nil {
		return nil, none, err
	}
	m.Registry.RemoveDead(slices)
	reserved, limits, err := decide(config.Asked, gpus, slices)
	if err != nil {
		return nil, none, err
	}
	config.remark(reserved, limits, m.Parent)
	id := state.NewID()
	info := state.Info{Name: config.name(), Command: config.Command, Started: time.Now(), Parent: m.Parent,
		GPUs: reserved, Libraries: filepath.Join(libraries, id)}
	own, err := m.Registry.Create(id, info, limits)
	if err != nil {
		return nil, none, err
	}
	layout, err := slice.Make(info.Libraries, own.Dir, m.Beneath, strict && m.Beneath.Sim == "")
	if err != nil {
		own.Remove()
		return nil, none, err
	}
	return own, layout, nil
}

// remark says what the user will not expect.
func (c Config) remark(reserved []state.GPU, limits []tenant.Device, parent string) {
	for i, d := range limits {
		r := reserved[i]
		if d.MemoryLimited && d.MemoryLimit < d.ContextBytes {
			c.say("memory %v on gpu %d is less than a first CUDA context takes (%v); no program will start there",
				quantity.Bytes(d.MemoryLimit), r.Index, quantity.Bytes(d.ContextBytes))
		}
		if parent == "" {
			continue
		}
		if asked := c.Asked.coresEach(); asked > d.Cores {
			c.say("gpu %d: %d cores asked, the slice around this one has %d", r.Index, asked, d.Cores)
		}
		if uint64(c.Asked.Memory) > d.MemoryLimit {
			c.say("gpu %d: memory %v asked, the slice around this one has %v", r.Index, c.Asked.Memory, quantity.Bytes(d.MemoryLimit))
		}
	}
}

func (c Config) name() string {
	if c.Name != "" {
		return c.Name
	}
	return filepath.Base(c.Command[0])
}

// environment is the command's: ours, our libraries first, and the switches that were asked for.
func environment(config Config, m *machine.Machine, l slice.Layout, libraryPath string) []string {
	set := map[string]string{"LD_LIBRARY_PATH": l.Lib}
	if libraryPath != "" {
		set["LD_LIBRARY_PATH"] += ":" + libraryPath
	}
	if m.Sim != "" {
		set[machine.SimDirEnv] = m.Sim
	}
	if dir := machine.StateDir(); dir != "" {
		set[machine.StateDirEnv] = dir
	}
	if config.Trace != "" {
		set["TRANCHE_TRACE"] = config.Trace
	}
	var env []string
	for _, e := range os.Environ() {
		name, _, _ := strings.Cut(e, "=")
		if _, ours := set[name]; !ours {
			env = append(env, e)
		}
	}
	for name, value := range set {
		env = append(env, name+"="+value)
	}
	return env
}
