package driverview

import (
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"

	"tranche.dev/tranche/internal/driverfind"
)

// family tells the two libraries that ours stand in front of from all others.
type family int

const (
	other family = iota
	cuda
	nvml
)

func (f family) stem() string { return [...]string{"", "libcuda", "libnvidia-ml"}[f] }

// file is one that can go into a view.
type file struct {
	// name is that of the real file, path the real file's on the host (as reports show it), local
	// where this process reads it.
	name, path, local string
	info              fs.FileInfo
	arch              elf.Machine
	soname            string
	family            family
	// version of the driver by the file's name; "" when the name has none.
	version string
}

// fileMax bounds what is taken for a library or a program of the driver.
const fileMax = 2 << 30

var (
	driverVersion = regexp.MustCompile(`^[0-9]{3,}\.[0-9]+(\.[0-9]+)?$`)
	// kernelVersion is the first such number in the text of /proc/driver/nvidia/version.
	kernelVersion = regexp.MustCompile(`NVRM version:.*?\s([0-9]{3,}\.[0-9]+(\.[0-9]+)?)\s`)
)

// inspect reads the file that name leads to in the place. The error says why it cannot be taken; it
// is a note in a report, no failure.
func (p place) inspect(name string, arch elf.Machine) (file, error) {
	real, local, err := p.root.Resolve(name)
	if err != nil {
		return file{path: p.at(name)}, plain(err)
	}
	f := file{name: path.Base(real), path: p.at(real), local: local}
	if f.info, err = os.Stat(local); err != nil {
		return f, plain(err)
	}
	if !f.info.Mode().IsRegular() || f.info.Size() > fileMax {
		return f, errors.New("not a regular file of a likely size")
	}
	obj, err := elf.Open(local)
	if err != nil {
		return f, errors.New("not an ELF file")
	}
	defer obj.Close()
	f.arch = obj.Machine
	if obj.Class == elf.ELFCLASS32 && f.arch != elf.EM_386 {
		f.arch = elf.EM_NONE
	}
	if f.arch != arch && !(f.arch == elf.EM_386 && arch == elf.EM_X86_64) {
		return f, fmt.Errorf("for another machine (%v, %v)", obj.Machine, obj.Class)
	}
	return f, f.read(obj)
}

// read takes from the object what is needed of it, of a program as of a library.
func (f *file) read(obj *elf.File) error {
	if interp := obj.Section(".interp"); interp != nil && !strings.Contains(f.name, ".so") {
		data, err := interp.Data()
		if loader := strings.TrimRight(string(data), "\x00"); err != nil || !slices.Contains(loaders, loader) {
			return fmt.Errorf("its loader %q is not in containers", loader)
		}
		return nil
	}
	if names, err := obj.DynString(elf.DT_SONAME); err == nil && len(names) > 0 && plainName(names[0]) {
		f.soname = names[0]
	}
	f.family = familyOf(f.name)
	if f.family == other {
		f.family = familyOf(f.soname)
	}
	if _, suffix, ok := strings.Cut(f.name, ".so."); ok && driverVersion.MatchString(suffix) {
		f.version = suffix
	}
	if f.family != other && f.version == "" { // ours never has a driver's version in its name
		if _, ours := driverfind.SliceOf(f.local); ours {
			return errors.New("a library of tranche, not the driver's")
		}
	}
	return blacklisted(f.name, obj)
}

// loaders are the program interpreters that images have.
var loaders = []string{"/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1", "/lib/ld-linux.so.2"}

func familyOf(name string) family {
	for _, f := range []family{cuda, nvml} {
		if matches(f.stem(), name) {
			return f
		}
	}
	return other
}

// tlsABI is that of the kernel version 2.3.99 in an ABI note: libnvidia-tls of the new kind.
var tlsABI = [3]uint32{2, 3, 99}

// blacklisted keeps out what the original keeps out: GL libraries that are not of NVIDIA's stack (nor
// of the vendor-neutral one), and libnvidia-tls for threads of before NPTL.
func blacklisted(name string, obj *elf.File) error {
	stem, _, _ := strings.Cut(name, ".so")
	switch stem {
	case "libEGL", "libGLESv1_CM", "libGLESv2", "libGL":
		needed, err := obj.DynString(elf.DT_NEEDED)
		if err != nil {
			return fmt.Errorf("cannot be read: %w", err)
		}
		for _, n := range needed {
			if glStack.MatchString(n) {
				return nil
			}
		}
		return errors.New("another vendor's: it needs neither NVIDIA's glcore nor libGLdispatch")
	case "libnvidia-tls":
		note := obj.Section(".note.ABI-tag")
		if note == nil {
			return nil
		}
		data, err := note.Data()
		if err != nil || len(data) < 32 {
			return errors.New("its ABI note cannot be read")
		}
		for i, want := range tlsABI {
			if binary.LittleEndian.Uint32(data[20+4*i:]) != want {
				return errors.New("thread-local storage of the old ABI")
			}
		}
	}
	return nil
}

var glStack = regexp.MustCompile(`^(libnvidia-e?glcore|libGLdispatch)\.so`)

// plain is an error without the path that the report names already.
func plain(err error) error {
	var at *fs.PathError
	if errors.As(err, &at) {
		return at.Err
	}
	return err
}
