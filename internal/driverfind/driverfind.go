// Package driverfind finds the NVIDIA driver's user-space libraries as the loader of a program would:
// LD_LIBRARY_PATH in order (cuda-compat lives there), then the loader's cache, then the default
// directories and WSL's. It tells our own libraries, which carry a mark, from the vendor's.
//
// It opens files below Root only, starts nothing, and believes no file: the cache is bounds-checked.
package driverfind

import (
	"bytes"
	"debug/elf"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"tranche.dev/tranche/internal/tenant"
)

// Finder looks for libraries.
type Finder struct {
	// Root is put before absolute paths; "" or "/" for the running system.
	Root string
	// LibraryPath is the LD_LIBRARY_PATH of the program.
	LibraryPath string
	// Cwd resolves relative entries of LibraryPath.
	Cwd string
}

// Library is a file that the loader could take for a name.
type Library struct {
	// Path as the loader would open it (without Root).
	Path string
	// Ours is true of a library of this project; Slice is then the slice directory in it.
	Ours  bool
	Slice string
}

// DefaultDirs are the directories after the cache. The loader of each distribution knows some of
// them; the driver's installers use the others.
func DefaultDirs() []string {
	multiarch := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	return []string{
		"/lib/" + multiarch, "/usr/lib/" + multiarch, "/lib64", "/usr/lib64", "/lib", "/usr/lib",
		"/usr/lib/" + multiarch + "/nvidia/current", "/usr/lib/wsl/lib",
	}
}

// All lists every file that has this name on the loader's way, in its order, links as they are
// found. The first is what the loader takes.
func (f Finder) All(name string) []Library {
	var out []Library
	seen := map[string]bool{}
	add := func(path string) {
		if seen[path] {
			return
		}
		seen[path] = true
		if lib, ok := f.inspect(path); ok {
			out = append(out, lib)
		}
	}
	for _, dir := range f.libraryPath() {
		add(filepath.Join(dir, name))
	}
	cache, _ := os.ReadFile(f.host(CachePath))
	for _, e := range ParseCache(cache) {
		if e.Name == name {
			add(filepath.Clean(e.Path))
		}
	}
	for _, dir := range DefaultDirs() {
		add(filepath.Join(dir, name))
	}
	return out
}

// libraryPath splits LD_LIBRARY_PATH as ld.so does: at colons and semicolons, empty is the current
// directory.
func (f Finder) libraryPath() []string {
	if f.LibraryPath == "" {
		return nil
	}
	var dirs []string
	for _, dir := range strings.FieldsFunc(strings.ReplaceAll(":"+f.LibraryPath+":", "::", ":.:"), func(r rune) bool { return r == ':' || r == ';' }) {
		if !filepath.IsAbs(dir) {
			dir = filepath.Join(f.Cwd, dir)
		}
		dirs = append(dirs, filepath.Clean(dir))
	}
	return dirs
}

func (f Finder) host(path string) string { return filepath.Join(f.Root, path) }

// libraryMax bounds what is read of a file; NVIDIA's libcuda has some 30 to 100 MB.
const libraryMax = 512 << 20

// inspect reads a candidate: not a 64-bit shared object of this machine means that the loader
// passes it by.
func (f Finder) inspect(path string) (Library, bool) {
	file, err := os.Open(f.host(path))
	if err != nil {
		return Library{}, false
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil || !info.Mode().IsRegular() || info.Size() > libraryMax {
		return Library{}, false
	}
	obj, err := elf.NewFile(file)
	if err != nil || obj.Class != elf.ELFCLASS64 || obj.Type != elf.ET_DYN || obj.Machine != machine() {
		return Library{}, false
	}
	lib := Library{Path: path}
	lib.Slice, lib.Ours = sliceOf(obj)
	return lib, true
}

// SliceOf returns the slice directory in a library file; false when it is none of ours.
func SliceOf(path string) (string, bool) {
	lib, _ := Finder{}.inspect(path)
	return lib.Slice, lib.Ours
}

func machine() elf.Machine {
	if runtime.GOARCH == "arm64" {
		return elf.EM_AARCH64
	}
	return elf.EM_X86_64
}

// sliceOf looks for our mark in the initialised data and reads the directory behind it.
func sliceOf(obj *elf.File) (string, bool) {
	for _, name := range []string{".data", ".rodata"} {
		section := obj.Section(name)
		if section == nil || section.Type == elf.SHT_NOBITS || section.Size > 64<<20 {
			continue
		}
		data, err := section.Data()
		i := bytes.Index(data, []byte(tenant.SliceMark))
		if err != nil || i < 0 {
			continue
		}
		field := data[i+len(tenant.SliceMark) : min(i+tenant.SliceField, len(data))]
		dir, _, _ := bytes.Cut(field, []byte{0})
		if len(dir) == 0 {
			return tenant.DirDefault, true
		}
		return string(dir), true
	}
	return "", false
}
