// Package simroot makes a directory that looks like the root of a host with NVIDIA's driver: the
// simulated driver under the names of a real one, stand-ins for the device nodes, and what the kernel
// module says of itself. The node treats it as it treats a host's root, so that with simulated GPUs
// every part takes the path that it takes with real ones.
//
// It never touches anything outside the directory that it is given, but for the mode of the state of a
// machine that lies elsewhere.
package simroot

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/assets"
	"tranche.dev/tranche/internal/simspec"
	"tranche.dev/tranche/internal/slice"
)

// Sim is a simulated host.
type Sim struct {
	// Root is to be used as the host's root.
	Root string
	// Machine is the directory of the simulated machine. It must be in each container under this very
	// path, writable: the simulated driver in the container has the path in it.
	Machine string
	// Version is the driver's.
	Version string
	// GPUs is how many there are; their minor numbers are 0 to GPUs-1.
	GPUs int
	// NoDevices says why the stand-ins are empty files and no device nodes: no container runtime can
	// hand them out. Nil when they are device nodes.
	NoDevices error
}

// versionDefault is what the simulated driver reports when the spec says nothing (docs/simulator.md).
const versionDefault = "550.163.01"

// pathMax is the room for the machine's path in the simulated driver.
const pathMax = 200

// Make makes or completes a simulated host below dir, an absolute path, from the value of a --sim flag
// (package simspec): models, a file, or the directory of a machine, which is then used where it is.
// The same call again changes nothing; another spec than the one before is an error, as programs
// may be running on the machine.
func Make(dir, spec string) (*Sim, error) {
	if !filepath.IsAbs(dir) || len(dir) > pathMax {
		return nil, fmt.Errorf("simulated host: %q is not an absolute path of at most %d bytes", dir, pathMax)
	}
	s := &Sim{Root: filepath.Join(dir, "root"), Machine: filepath.Join(dir, "machine")}
	if err := s.machine(spec); err != nil {
		return nil, fmt.Errorf("simulated host: --sim %s: %w", spec, err)
	}
	for _, step := range []func() error{s.libraries, s.kernel, s.devices} {
		if err := step(); err != nil {
			return nil, fmt.Errorf("simulated host %s: %w", dir, err)
		}
	}
	return s, nil
}

// machine makes the machine's directory and has the simulator judge the spec.
func (s *Sim) machine(value string) error {
	spec, err := simspec.Parse(value)
	if err != nil {
		return err
	}
	if spec.Dir != "" {
		s.Machine = spec.Dir
	} else if err := s.writeSpec(spec.Text); err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(s.Machine, "spec"))
	if err != nil {
		return err
	}
	s.Version = versionIn(text)
	out, err := simctl(s.Machine, "gpus", "--json")
	if err != nil {
		return err
	}
	var gpus []struct{}
	if err := json.Unmarshal(out, &gpus); err != nil {
		return fmt.Errorf("simctl: %w", err)
	}
	s.GPUs = len(gpus)
	// Containers run as any user.
	return os.Chmod(filepath.Join(s.Machine, "state"), 0o666)
}

func (s *Sim) writeSpec(text string) error {
	if err := os.MkdirAll(s.Machine, 0o755); err != nil {
		return err
	}
	file := filepath.Join(s.Machine, "spec")
	old, err := os.ReadFile(file)
	switch {
	case err == nil && bytes.Equal(old, []byte(text)):
		return nil
	case err == nil:
		return fmt.Errorf("%s has another machine; remove %s or choose another directory", file, filepath.Dir(s.Machine))
	case !errors.Is(err, os.ErrNotExist):
		return err
	}
	// A spec that is wrong leaves nothing behind.
	draft := filepath.Join(s.Machine, ".draft")
	if err := os.WriteFile(draft, []byte(text), 0o644); err != nil {
		return err
	}
	defer os.Remove(draft)
	if _, err := simctl("check", draft); err != nil {
		said := strings.ReplaceAll(err.Error(), draft+": ", "")
		if before, _, ok := strings.Cut(said, " (simctl models lists them)"); ok {
			said = before + "; there are " + strings.Join(models(), ", ")
		}
		return errors.New(said)
	}
	return assets.WriteFile(file, []byte(text), 0o644)
}

// models lists what can be simulated.
func models() []string {
	out, _ := simctl("models") // without it the complaint stands alone
	var names []string
	for line := range strings.Lines(string(out)) {
		name, _, _ := strings.Cut(line, " ")
		names = append(names, name)
	}
	return names
}

var versionItem = regexp.MustCompile(`^driver_version=([0-9]+(\.[0-9]+)+)$`)

// versionIn is the driver's version by a spec's text.
func versionIn(spec []byte) string {
	for line := range strings.Lines(string(spec)) {
		line, _, _ = strings.Cut(line, "#")
		for _, item := range strings.Fields(line) {
			if m := versionItem.FindStringSubmatch(item); m != nil {
				return m[1]
			}
		}
	}
	return versionDefault
}

// libraries puts the simulated driver where Debian and Ubuntu have the real one.
func (s *Sim) libraries() error {
	dir := filepath.Join(s.Root, "usr/lib", map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH])
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for stem, asset := range map[string]string{"libcuda": assets.SimCUDA, "libnvidia-ml": assets.SimNVML} {
		data, err := assets.Read(asset)
		if err == nil {
			err = slice.PatchSim(data, s.Machine)
		}
		if err == nil {
			err = put(filepath.Join(dir, stem+".so."+s.Version), data)
		}
		if err == nil {
			err = link(filepath.Join(dir, stem+".so.1"), stem+".so."+s.Version)
		}
		if err == nil {
			err = link(filepath.Join(dir, stem+".so"), stem+".so.1")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// kernel says what the kernel module would.
func (s *Sim) kernel() error {
	file := filepath.Join(s.Root, "proc/driver/nvidia/version")
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return put(file, []byte("NVRM version: NVIDIA UNIX x86_64 Kernel Module  "+s.Version+"  (simulated)\n"))
}

// devices makes the stand-ins: device nodes that do what /dev/null does, as every container may use
// it.
func (s *Sim) devices() error {
	dir := filepath.Join(s.Root, "dev")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	names := []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}
	for i := range s.GPUs {
		names = append(names, fmt.Sprintf("nvidia%d", i))
	}
	for _, name := range names {
		if err := s.device(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

func (s *Sim) device(path string) error {
	null := unix.Mkdev(1, 3)
	var st unix.Stat_t
	there := unix.Lstat(path, &st) == nil
	if there && st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == null {
		return nil
	}
	temp := filepath.Join(filepath.Dir(path), ".new-"+filepath.Base(path))
	if err := os.RemoveAll(temp); err != nil {
		return err
	}
	err := unix.Mknod(temp, unix.S_IFCHR|0o666, int(null))
	if errors.Is(err, unix.EPERM) {
		s.NoDevices = fmt.Errorf("mknod %s: %w: containers need device nodes, which only root of the host can make", path, err)
		if there {
			return nil
		}
		return os.WriteFile(path, nil, 0o644)
	}
	if err == nil {
		err = os.Chmod(temp, 0o666) // whatever the umask
	}
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		return fmt.Errorf("device node %s: %w", path, err)
	}
	return nil
}

// put writes a file unless it is there with this content.
func put(path string, data []byte) error {
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return nil
	}
	return assets.WriteFile(path, data, 0o755)
}

func link(path, target string) error {
	if old, err := os.Readlink(path); err == nil && old == target {
		return nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.Symlink(target, path)
}

func simctl(args ...string) ([]byte, error) {
	path, err := assets.Path(assets.SimCtl)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var said strings.Builder
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil && said.Len() > 0 {
		return nil, errors.New(strings.TrimPrefix(strings.TrimSpace(said.String()), "simctl: "))
	}
	return out, err
}
