package driverview

import (
	"cmp"
	"debug/elf"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
)

// driver is the user-space part of one driver version in one place.
type driver struct {
	place     place
	version   string // "" when the file names tell none (WSL)
	libraries []file // of that version or of none, in the loader's order
	foreign   []file // of other versions
	cuda      file
	nvml      file
}

// drivers finds all versions in a place that have both libraries for this machine, in the loader's
// order, and notes what cannot be taken.
func drivers(p place, arch elf.Machine, wanted func(string) bool, rep *Report) []driver {
	var files []file
	seen := map[string]bool{}
	for _, name := range p.libraries(wanted) {
		f, err := p.inspect(name, arch)
		switch {
		case strings.Contains(name, "/stubs/") || strings.Contains(f.path, "/stubs/"):
			err = errors.New("a stub for linking")
		case err == nil && seen[f.path]:
			continue
		}
		if err != nil {
			rep.skip(f.path, err.Error())
			continue
		}
		seen[f.path] = true
		files = append(files, f)
	}
	var out []driver
	for _, f := range files {
		if f.family != cuda || f.arch != arch || slices.ContainsFunc(out, func(d driver) bool { return d.version == f.version }) {
			continue
		}
		i := slices.IndexFunc(files, func(n file) bool { return n.family == nvml && n.arch == arch && n.version == f.version })
		if i < 0 {
			rep.skip(f.path, "no libnvidia-ml of the same version beside it (a compatibility package?)")
			continue
		}
		d := driver{place: p, version: f.version, cuda: f, nvml: files[i]}
		for _, l := range files {
			if l.version == "" || l.version == d.version {
				d.libraries = append(d.libraries, l)
			} else {
				d.foreign = append(d.foreign, l)
			}
		}
		out = append(out, d)
	}
	return out
}

// choose finds the driver: that of the kernel module's version if it is known (not ""), else the
// first.
func choose(all []place, arch elf.Machine, kernel string, wanted func(string) bool, rep *Report) (driver, error) {
	var others []string
	for _, p := range all {
		for _, d := range drivers(p, arch, wanted, rep) {
			if kernel != "" && d.version != "" && d.version != kernel {
				rep.skip(d.cuda.path, fmt.Sprintf("driver %s, the kernel module is %s", d.version, kernel))
				others = append(others, d.version)
				continue
			}
			for _, f := range d.foreign {
				rep.skip(f.path, fmt.Sprintf("of driver %s, not of %s", f.version, d.version))
			}
			return d, nil
		}
	}
	if len(others) > 0 {
		return driver{}, &MismatchError{Kernel: kernel, Libraries: others}
	}
	return driver{}, &NoDriverError{Kernel: kernel}
}

// entry is one file or link of a view.
type entry struct {
	// path in the view.
	path string
	// One of: a file of the host, the target of a link, content of our own.
	file *file
	link string
	data []byte
}

// plan is a view to be: entries by path. What comes first under a name stays.
type plan map[string]entry

func (p plan) add(e entry) bool {
	if _, taken := p[e.path]; taken {
		return false
	}
	p[e.path] = e
	return true
}

func (p plan) sorted() []entry {
	return slices.SortedFunc(maps.Values(p), func(a, b entry) int { return cmp.Compare(a.path, b.path) })
}

// library puts one library with its links into dir. It is false when its name is taken.
func (p plan) library(dir string, f *file, rep *Report) bool {
	if !p.add(entry{path: path.Join(dir, f.name), file: f}) {
		rep.skip(f.path, "another "+f.name+" comes first")
		return false
	}
	rep.take(f.path, path.Join(dir, f.name))
	link := func(name, target string) {
		if name != target {
			p.add(entry{path: path.Join(dir, name), link: target})
		}
	}
	stem, _, _ := strings.Cut(f.name, ".so")
	if f.soname == "" {
		link(stem+".so", f.name)
		return true
	}
	link(f.soname, f.name)
	base, _, _ := strings.Cut(f.soname, ".so")
	link(base+".so", f.soname)
	// For indirect rendering GLX asks for a vendor of this name.
	if stem == "libGLX_nvidia" {
		link("libGLX_indirect.so.0", f.soname)
	}
	return true
}

// Where things lie in a container.
const (
	// MountPath is where the view is mounted.
	MountPath = "/usr/local/nvidia"
	driverDir = "driver"
)

// planView says what goes into a view. ours has our two libraries by family; nil for the vendor's
// driver as it is.
func planView(v Volume, d driver, arch elf.Machine, ours map[family][]byte, rep *Report) plan {
	p := plan{}
	if ours != nil {
		for _, f := range []file{d.cuda, d.nvml} {
			stem := f.family.stem()
			p.add(entry{path: "lib64/" + stem + ".so.1", data: ours[f.family]})
			p.add(entry{path: "lib64/" + stem + ".so", link: stem + ".so.1"})
			p.add(entry{path: driverDir + "/" + stem + "-driver.so.1", file: &f})
			rep.take(f.path, driverDir+"/"+stem+"-driver.so.1")
		}
	}
	for _, f := range d.libraries {
		if f.family == other && !slices.ContainsFunc(v.Libraries, func(item string) bool { return matches(item, f.name) }) {
			continue
		}
		switch {
		case f.arch == arch && (ours == nil || f.family == other):
			if p.library("lib64", &f, rep) && ours != nil && f.version == d.version {
				p.beside(&f)
			}
		case ours == nil || f.family == other:
			p.library("lib", &f, rep)
		case f.arch != arch:
			rep.skip(f.path, "32-bit: no limit would hold in it")
		case f.path != d.cuda.path && f.path != d.nvml.path:
			rep.skip(f.path, "only the first of the driver's "+f.family.stem()+" is used")
		}
	}
	p.binaries(v, d.place, arch, rep)
	p.missing(v, rep)
	return p
}

// beside links a library of the driver's own into the directory that our libraries' run path names:
// what libcuda opens by name (ptxjitcompiler, nvvm, pkcs11, cudadebugger) is then found whatever
// LD_LIBRARY_PATH a pod sets.
func (p plan) beside(f *file) {
	for _, name := range []string{f.name, f.soname} {
		if name != "" {
			p.add(entry{path: path.Join(driverDir, name), link: "../lib64/" + name})
		}
	}
}

// binaries puts in the first of each name that can be taken.
func (p plan) binaries(v Volume, from place, arch elf.Machine, rep *Report) {
	for _, name := range v.Binaries {
		for _, at := range from.binaries(name) {
			f, err := from.inspect(at, arch)
			if err == nil && f.arch != arch {
				err = errors.New("32-bit")
			}
			if err != nil {
				rep.skip(f.path, err.Error())
				continue
			}
			if p.add(entry{path: "bin/" + name, file: &f}) {
				rep.take(f.path, "bin/"+name)
			}
			break
		}
	}
}

// missing notes the items for which there is nothing.
func (p plan) missing(v Volume, rep *Report) {
	names := map[string]bool{}
	for at := range p {
		names[path.Base(at)] = true
	}
	for _, item := range v.Binaries {
		if _, ok := p["bin/"+item]; !ok {
			rep.lack(item)
		}
	}
	for _, item := range v.Libraries {
		if !slices.ContainsFunc(slices.Collect(maps.Keys(names)), func(name string) bool { return matches(item, name) }) {
			rep.lack(item)
		}
	}
}
