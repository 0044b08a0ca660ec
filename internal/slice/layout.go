package slice

import (
	"debug/elf"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"tranche.dev/tranche/internal/assets"
	"tranche.dev/tranche/internal/driverfind"
)

// Beneath is what our libraries of a slice stand in front of.
type Beneath struct {
	// CUDA and NVML are the files below ours: the vendor's, or ours of an outer slice. Empty with
	// Sim.
	CUDA, NVML string
	// BaseNVML is the vendor's NVML at the bottom, for the supervisor.
	BaseNVML string
	// Depth is the number of slices around this one, Outer the directory of the next one.
	Depth int
	Outer string
	// Sim is the directory of a simulated machine: the embedded simulated driver is used.
	Sim string
}

// ErrNoDriver says that no libcuda or no libnvidia-ml was found.
type ErrNoDriver struct{ Name string }

func (e *ErrNoDriver) Error() string {
	return "no NVIDIA driver: no " + e.Name + " where the loader looks"
}

// FindBeneath finds the driver of a command that runs with this library path.
func FindBeneath(f driverfind.Finder) (Beneath, error) {
	cuda, err := first(f, "libcuda.so.1")
	if err != nil {
		return Beneath{}, err
	}
	nvml, err := first(f, "libnvidia-ml.so.1")
	if err != nil {
		return Beneath{}, err
	}
	b := Beneath{CUDA: cuda.Path, NVML: nvml.Path, BaseNVML: nvml.Path}
	if cuda.Ours != nvml.Ours || cuda.Slice != nvml.Slice {
		return b, fmt.Errorf("%s and %s do not belong together: LD_LIBRARY_PATH mixes a slice's libraries with others", cuda.Path, nvml.Path)
	}
	if !cuda.Ours {
		return b, nil
	}
	b.Outer = cuda.Slice
	data, err := os.ReadFile(b.CUDA)
	if err != nil {
		return b, err
	}
	if b.Depth = DepthOf(data) + 1; b.Depth < 1 || b.Depth > MaxDepth {
		return b, fmt.Errorf("%s: slices within slices, deeper than %d", b.CUDA, MaxDepth)
	}
	links, err := chain(b.NVML, "libnvidia-ml", b.Depth)
	if err == nil {
		b.BaseNVML = links[len(links)-1].Target
	}
	return b, err
}

// first is the library that the loader takes; ours of a slice that is no more are passed by.
func first(f driverfind.Finder, name string) (driverfind.Library, error) {
	for _, lib := range f.All(name) {
		if lib.Ours {
			if _, err := os.Stat(filepath.Join(lib.Slice, "limits")); err != nil {
				continue
			}
		}
		real, err := filepath.EvalSymlinks(lib.Path)
		if err != nil {
			continue
		}
		lib.Path = real
		return lib, nil
	}
	return driverfind.Library{}, &ErrNoDriver{Name: name}
}

// link is where a library of ours finds what is beneath it.
type link struct{ Dir, Name, Target string }

// chain follows one of our libraries down to the vendor's: a link for each slice, outermost last.
func chain(path, stem string, depth int) ([]link, error) {
	var links []link
	for d := depth - 1; d >= 0; d-- {
		obj, err := elf.Open(path)
		if err != nil {
			return nil, err
		}
		rpath, err := obj.DynString(elf.DT_RPATH)
		_ = obj.Close()
		if err != nil || len(rpath) != 1 {
			return nil, fmt.Errorf("%s: no driver directory in it", path)
		}
		l := link{Dir: strings.TrimRight(rpath[0], "/"), Name: driverName(stem, d)}
		if l.Target, err = filepath.EvalSymlinks(filepath.Join(l.Dir, l.Name)); err != nil {
			return nil, err
		}
		links, path = append(links, l), l.Target
	}
	return links, nil
}

// Layout is where a slice's libraries lie.
type Layout struct {
	Dir, Lib, Driver string
	// BaseNVML is the file that the supervisor asks.
	BaseNVML string
	// Aside pairs the driver's files with the empty files in Driver that they are to be bound onto,
	// in order, in a private mount namespace; empty when links do.
	Aside []Bind
}

// Bind is one bind mount of a file, or of a directory with what is mounted below it.
type Bind struct{ From, To string }

// At gives the paths of the layout at dir without making anything.
func At(dir string) Layout {
	return Layout{Dir: dir, Lib: filepath.Join(dir, "lib"), Driver: filepath.Join(dir, "driver")}
}

// Make lays out a slice below dir. With aside the driver's files are not linked: the caller mounts
// Layout.Aside, because their own paths are going to be covered by ours.
func Make(dir, sliceDir string, b Beneath, aside bool) (Layout, error) {
	l := At(dir)
	for _, d := range []string{l.Lib, l.Driver} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return l, err
		}
		if err := os.Chmod(d, 0o755); err != nil {
			return l, err
		}
	}
	for _, part := range []struct{ stem, asset, sim, file string }{
		{"libcuda", assets.CUDA, assets.SimCUDA, b.CUDA},
		{"libnvidia-ml", assets.NVML, assets.SimNVML, b.NVML},
	} {
		if err := l.putOurs(part.stem, part.asset, sliceDir, b.Depth); err != nil {
			return l, err
		}
		target := filepath.Join(l.Driver, driverName(part.stem, b.Depth))
		if err := l.putDriver(target, part.sim, part.file, b.Sim, aside); err != nil {
			return l, err
		}
	}
	if aside {
		if err := l.putOuter(b); err != nil {
			return l, err
		}
	}
	l.BaseNVML = b.BaseNVML
	if b.Sim != "" {
		l.BaseNVML = filepath.Join(l.Driver, driverName("libnvidia-ml", b.Depth))
	}
	return l, nil
}

// putOuter keeps the slices around this one working: their links lead to files that are going to be
// covered. A directory with those files, bound aside, takes the place of each one's driver directory.
func (l *Layout) putOuter(b Beneath) error {
	var files, dirs []Bind
	for _, part := range []struct{ stem, file string }{{"libcuda", b.CUDA}, {"libnvidia-ml", b.NVML}} {
		links, err := chain(part.file, part.stem, b.Depth)
		if err != nil {
			return err
		}
		for k, at := range links {
			dir := filepath.Join(l.Dir, fmt.Sprintf("outer-%d", k))
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return err
			}
			file := filepath.Join(dir, at.Name)
			if err := assets.WriteFile(file, nil, 0o755); err != nil {
				return err
			}
			files = append(files, Bind{From: at.Target, To: file})
			if part.stem == "libcuda" {
				dirs = append(dirs, Bind{From: dir, To: at.Dir})
			}
		}
	}
	l.Aside = append(append(l.Aside, files...), dirs...)
	return nil
}

func (l Layout) putOurs(stem, asset, sliceDir string, depth int) error {
	file, err := assets.Read(asset)
	if err == nil {
		err = patchOurs(file, sliceDir, l.Driver, depth)
	}
	if err == nil {
		err = assets.WriteFile(filepath.Join(l.Lib, stem+".so.1"), file, 0o755)
	}
	if err == nil {
		err = os.Symlink(stem+".so.1", filepath.Join(l.Lib, stem+".so"))
	}
	return err
}

func (l *Layout) putDriver(target, simAsset, file, sim string, aside bool) error {
	switch {
	case sim != "":
		data, err := assets.Read(simAsset)
		if err == nil {
			err = patchSim(data, sim)
		}
		if err == nil {
			err = assets.WriteFile(target, data, 0o755)
		}
		return err
	case aside:
		l.Aside = append(l.Aside, Bind{From: file, To: target})
		return assets.WriteFile(target, nil, 0o755)
	}
	return os.Symlink(file, target)
}
