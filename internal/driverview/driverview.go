// Package driverview turns the driver's files on a host into what a container sees: a directory with
// NVIDIA's libraries and programs of one driver version, with our two libraries in front of theirs.
//
// It finds the driver where distributions and installers put it, below the host's root as this
// process sees it, and lays it out in a directory that is named by its content. A view is never
// changed once it is made: another driver, or another version of ours, makes another view beside it,
// and running containers keep theirs until GC is told that nobody does.
//
// It never runs a program of the host, loads none of its libraries, and follows no link out of the
// host's root. docs/driver-view.md has the layout and the reasons.
package driverview

import (
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"

	"tranche.dev/tranche/internal/assets"
	"tranche.dev/tranche/internal/slice"
	"tranche.dev/tranche/internal/tenant"
)

// Config is what New needs. The zero value is that of a process that sees the host's own root.
type Config struct {
	// Root is the host's file system.
	Root Root
	// Base is the directory for views, as this process sees it; "": the base of the first volume.
	// HostBase is the same directory on the host; "": Base.
	Base, HostBase string
	// Volumes says what goes into views (ParseVolumes); nil: a list for current drivers.
	Volumes []Volume
	// KernelVersion is the version of the loaded kernel module; "": what /proc/driver/nvidia/version
	// below Root says, unknown if it is not there. Libraries of another version are not used.
	KernelVersion string
	// Arch is EM_X86_64 or EM_AARCH64; 0: that of this process.
	Arch elf.Machine
	// Asset returns our libraries by name; nil: assets.Read.
	Asset func(name string) ([]byte, error)
}

// Builder makes views. It is safe for concurrent use, by several processes too.
type Builder struct {
	cfg           Config
	share, origin Volume

	mu      sync.Mutex
	current []string          // names of the views of the last Build
	patched map[family][]byte // our libraries as they stand in containers
}

// New checks the configuration. It touches no file.
func New(cfg Config) (*Builder, error) {
	if cfg.Volumes == nil {
		volumes, err := ParseVolumes(defaultVolumes)
		if err != nil {
			return nil, err
		}
		cfg.Volumes = volumes
	}
	if cfg.Asset == nil {
		cfg.Asset = assets.Read
	}
	if cfg.Arch == elf.EM_NONE {
		cfg.Arch = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[runtime.GOARCH]
	}
	if cfg.Arch != elf.EM_X86_64 && cfg.Arch != elf.EM_AARCH64 {
		return nil, fmt.Errorf("driver view: machine %v; x86-64 and aarch64 are known", cfg.Arch)
	}
	b := &Builder{cfg: cfg}
	for _, v := range cfg.Volumes {
		if v.Name == ShareVolume {
			b.share = v
		} else if b.origin.Name == "" {
			b.origin = v
		}
	}
	if b.share.Name == "" {
		return nil, fmt.Errorf("driver view: no volume %q among those of volume.conf", ShareVolume)
	}
	if b.cfg.Base == "" {
		b.cfg.Base = b.share.Base
	}
	if b.cfg.HostBase == "" {
		b.cfg.HostBase = b.cfg.Base
	}
	for _, dir := range []string{b.cfg.Base, b.cfg.HostBase} {
		if !filepath.IsAbs(dir) {
			return nil, fmt.Errorf("driver view: base %q is not an absolute path", dir)
		}
	}
	return b, nil
}

// Set is what one Build found and made.
type Set struct {
	// Version of the driver; "" when its files tell none (WSL).
	Version string
	// NVML is NVIDIA's libnvidia-ml, as this process sees it.
	NVML string
	// Share has our libraries in front. Origin is the vendor's driver as it is, for whole GPUs where
	// an admin wants that; nil when volume.conf has no such volume.
	Share, Origin *View
	// Report says what was looked at and not taken.
	Report Report
}

// NoDriverError says that no driver was found.
type NoDriverError struct{ Kernel string }

func (e *NoDriverError) Error() string {
	if e.Kernel != "" {
		return "kernel module " + e.Kernel + " is loaded, but its libcuda.so.1 and libnvidia-ml.so.1 are nowhere below the host's root: install the driver's libraries"
	}
	return "no NVIDIA driver on this host: no libcuda.so.1 with a libnvidia-ml.so.1 of the same version"
}

// MismatchError says that all libraries are of other versions than the kernel module.
type MismatchError struct {
	Kernel    string
	Libraries []string
}

func (e *MismatchError) Error() string {
	return fmt.Sprintf("driver mismatch: the kernel module is %s, the libraries are %s: reload the module or reboot after an upgrade of the driver",
		e.Kernel, strings.Join(e.Libraries, ", "))
}

// Build finds the driver and makes its views unless they are there. It is idempotent: the same files
// give the same directories, and nothing is written. Call it again, after an error or from time to
// time, to see a driver that came or changed; it costs some 30 ms then. The error is a
// *NoDriverError, a *MismatchError or a failure to read or write; Set.Report is valid with each.
func (b *Builder) Build() (*Set, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	set := &Set{}
	d, err := choose(places(b.cfg.Root, b.cfg.Arch), b.cfg.Arch, b.kernel(), b.wanted, &set.Report)
	if err != nil {
		return set, err
	}
	set.Version, set.NVML = d.version, d.nvml.local
	ours, err := b.ours()
	if err != nil {
		return set, err
	}
	unlock, err := lockBase(b.cfg.Base)
	if err != nil {
		return set, fmt.Errorf("driver view: %w", err)
	}
	defer unlock()
	if set.Share, err = b.view(b.share, d, ours); err != nil {
		return set, err
	}
	current := []string{set.Share.Name}
	if b.origin.Name != "" {
		if set.Origin, err = b.view(b.origin, d, nil); err != nil {
			return set, err
		}
		current = append(current, set.Origin.Name)
	}
	b.current = current
	return set, nil
}

// kernel is the version of the loaded module, "" if it cannot be told.
func (b *Builder) kernel() string {
	if b.cfg.KernelVersion != "" {
		return b.cfg.KernelVersion
	}
	root := b.cfg.Root
	if root.Usr != "" {
		root = Root{} // the file is the kernel's, the same in all containers
	}
	if m := kernelVersion.FindSubmatch(root.read("/proc/driver/nvidia/version")); m != nil {
		return string(m[1])
	}
	return ""
}

// wanted says whether a library's name is in any volume; our two always are.
func (b *Builder) wanted(name string) bool {
	if familyOf(name) != other {
		return true
	}
	return slices.ContainsFunc(append(slices.Clone(b.share.Libraries), b.origin.Libraries...),
		func(item string) bool { return matches(item, name) })
}

// ours are our libraries as they stand in containers.
func (b *Builder) ours() (map[family][]byte, error) {
	if b.patched != nil {
		return b.patched, nil
	}
	out := map[family][]byte{}
	for f, asset := range map[family]string{cuda: assets.CUDA, nvml: assets.NVML} {
		data, err := b.cfg.Asset(asset)
		if err == nil {
			data = slices.Clone(data)
			err = slice.PatchOurs(data, tenant.DirDefault, MountPath+"/"+driverDir)
		}
		if err != nil {
			return nil, fmt.Errorf("driver view: %s: %w", asset, err)
		}
		out[f] = data
	}
	b.patched = out
	return out, nil
}

// view makes one view, or completes the one that is there.
func (b *Builder) view(v Volume, d driver, ours map[family][]byte) (*View, error) {
	out := &View{Version: d.version, arch: b.cfg.Arch, share: ours != nil, needs: d.place.needsOnPaths}
	p := planView(v, d, b.cfg.Arch, ours, &out.Report)
	version := d.version
	if version == "" {
		version = "unversioned"
	}
	out.Name = fmt.Sprintf("%s-%s-%s", v.Name, version, p.key())
	out.Dir, out.HostDir = filepath.Join(b.cfg.Base, out.Name), filepath.Join(b.cfg.HostBase, out.Name)
	_, out.smi = p["bin/nvidia-smi"]
	if err := p.make(out.Dir, &out.Report); err != nil {
		return nil, fmt.Errorf("driver view %s: %w", out.Name, err)
	}
	return out, nil
}

// key names the content of a view: 16 hexadecimal digits. A file of the host counts by its name, size
// and time of change, not by its place.
func (p plan) key() string {
	h := sha256.New()
	for _, e := range p.sorted() {
		switch {
		case e.file != nil:
			fmt.Fprintf(h, "%s file %d %d\n", e.path, e.file.info.Size(), e.file.info.ModTime().UnixNano())
		case e.link != "":
			fmt.Fprintf(h, "%s link %s\n", e.path, e.link)
		default:
			fmt.Fprintf(h, "%s data %x\n", e.path, sha256.Sum256(e.data))
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// viewName is how views are called; nothing else in the base directory is touched.
var viewName = regexp.MustCompile(`^.+-(unversioned|[0-9]+\.[0-9.]+)-[0-9a-f]{16}$`)

// GC removes the views in the base directory that are neither those of the last Build nor in inUse
// (names: View.Name), and what an interrupted Build left. Whoever gives a view to a container records
// its name first, and one process alone calls GC on a base directory: it cannot know what another one
// has just built. It returns what it removed; without a Build before it removes nothing.
func (b *Builder) GC(inUse []string) (removed []string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.current == nil {
		return nil, nil
	}
	unlock, err := lockBase(b.cfg.Base)
	if err != nil {
		return nil, fmt.Errorf("driver view: %w", err)
	}
	defer unlock()
	entries, err := os.ReadDir(b.cfg.Base)
	if err != nil {
		return nil, fmt.Errorf("driver view: %w", err)
	}
	for _, e := range entries {
		name := e.Name()
		unfinished := strings.HasPrefix(name, tempPrefix)
		if !e.IsDir() || !unfinished && (!viewName.MatchString(name) || slices.Contains(b.current, name) || slices.Contains(inUse, name)) {
			continue
		}
		if e := os.RemoveAll(filepath.Join(b.cfg.Base, name)); e != nil {
			err = errors.Join(err, e)
			continue
		}
		if !unfinished {
			removed = append(removed, name)
		}
	}
	return removed, err
}
