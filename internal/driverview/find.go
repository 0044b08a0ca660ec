package driverview

import (
	"debug/elf"
	"path"
	"slices"

	"tranche.dev/tranche/internal/driverfind"
)

// place is where an installer of the driver puts it. A driver is taken from one place as a whole.
type place struct {
	// name tells the place in reports; a host path.
	name string
	root Root
	// cache says that the loader's cache of root is asked first.
	cache        bool
	libraryDirs  []string
	binaryDirs   []string
	needsOnPaths []string // host directories that the libraries open by path
}

// at is a path of the place as the host knows it.
func (p place) at(file string) string {
	if p.root.Usr == "" && p.name != plainPlace {
		return path.Join(p.name, file)
	}
	return file
}

const plainPlace = "/"

// places lists where drivers are looked for, the most particular first: a driver that somebody put
// into a place of its own is meant to be the one that containers use.
func places(root Root, arch elf.Machine) []place {
	libs, bins := libraryDirs(arch), []string{"/usr/bin", "/usr/sbin", "/usr/local/bin", "/bin", "/sbin", "/opt/bin"}
	out := []place{}
	if root.Usr == "" {
		// The driver container of the GPU operator is a root of its own: its links are meant within it.
		if _, local, err := root.Resolve(operatorRoot); err == nil && local != root.local("/") {
			out = append(out, place{name: operatorRoot, root: Root{Dir: local}, cache: true, libraryDirs: libs, binaryDirs: bins})
		}
		if _, local, err := root.Resolve(gkeRoot); err == nil {
			out = append(out, place{name: gkeRoot, root: Root{Dir: local}, libraryDirs: []string{"/lib64", "/lib"}, binaryDirs: []string{"/bin"}})
		}
		out = append(out, place{name: plainPlace, root: root, libraryDirs: []string{"/run/opengl-driver/lib", "/run/opengl-driver-32/lib"},
			binaryDirs: []string{"/run/current-system/sw/bin"}})
	}
	return append(out,
		place{name: plainPlace, root: root, libraryDirs: []string{wslRoot + "/lib"}, binaryDirs: []string{wslRoot + "/lib"},
			needsOnPaths: []string{wslRoot + "/drivers"}},
		place{name: plainPlace, root: root, cache: true, libraryDirs: libs, binaryDirs: bins})
}

const (
	operatorRoot = "/run/nvidia/driver"
	gkeRoot      = "/home/kubernetes/bin/nvidia"
	wslRoot      = "/usr/lib/wsl"
)

// libraryDirs are the directories in which distributions and NVIDIA's installer put libraries, 32-bit
// ones last.
func libraryDirs(arch elf.Machine) []string {
	t := triplet(arch)
	dirs := []string{"/usr/lib/" + t, "/usr/lib/" + t + "/nvidia/current", "/usr/lib64", "/usr/lib64/nvidia", "/lib/" + t, "/lib64",
		"/usr/lib", "/usr/lib/nvidia", "/lib"}
	if arch == elf.EM_X86_64 {
		dirs = append(dirs, "/usr/lib/i386-linux-gnu", "/usr/lib/i386-linux-gnu/nvidia/current", "/usr/lib32", "/usr/lib32/nvidia")
	}
	return dirs
}

func triplet(arch elf.Machine) string {
	if arch == elf.EM_AARCH64 {
		return "aarch64-linux-gnu"
	}
	return "x86_64-linux-gnu"
}

// libraries lists the paths below the place's root whose names are wanted, in the order in which the
// loader would come to them; links are not followed, so one file may be there several times.
func (p place) libraries(wanted func(name string) bool) []string {
	var out []string
	if p.cache {
		for _, e := range driverfind.ParseCacheAll(p.root.read(driverfind.CachePath)) {
			if wanted(path.Base(e.Path)) && path.IsAbs(e.Path) {
				out = append(out, path.Clean(e.Path))
			}
		}
	}
	for _, dir := range p.libraryDirs {
		for _, name := range p.root.names(dir) {
			if wanted(name) && !slices.Contains(out, path.Join(dir, name)) {
				out = append(out, path.Join(dir, name))
			}
		}
	}
	return out
}

// binaries lists the paths of this name.
func (p place) binaries(name string) []string {
	var out []string
	for _, dir := range p.binaryDirs {
		if slices.Contains(p.root.names(dir), name) {
			out = append(out, path.Join(dir, name))
		}
	}
	return out
}
