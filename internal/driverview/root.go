package driverview

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// Root is a host's file system as this process sees it. Paths given to it are the host's, absolute;
// links are followed as the host would follow them and never lead out of it.
type Root struct {
	// Dir is where the host's root is mounted; "" or "/" for the own one.
	Dir string
	// Usr, when set, is where the host's /usr is mounted, and nothing else of the host is there: the
	// DaemonSet of the original gpu-manager mounts /usr at /usr/local/host. Dir is not used then.
	Usr string
}

const linksMax = 40 // as the kernel

// Resolve returns the host path of name without links in it, and where this process finds it. The
// file exists.
func (r Root) Resolve(name string) (real, local string, err error) {
	rest := strings.Split(name, "/")
	real = "/"
	for links := 0; len(rest) > 0; {
		part := rest[0]
		rest = rest[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			real = path.Dir(real)
			continue
		}
		next := path.Join(real, part)
		target, err := r.readlink(next)
		if err != nil {
			return "", "", err
		}
		if target == "" {
			real = next
			continue
		}
		if links++; links > linksMax {
			return "", "", fmt.Errorf("more than %d links", linksMax)
		}
		if path.IsAbs(target) {
			real = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	return real, r.local(real), nil
}

// merged are the links of a root whose /usr is all that is there.
var merged = map[string]string{"/lib": "usr/lib", "/lib32": "usr/lib32", "/lib64": "usr/lib64", "/bin": "usr/bin", "/sbin": "usr/sbin"}

// readlink returns the target of a link, "" for what exists and is none.
func (r Root) readlink(name string) (string, error) {
	if r.Usr != "" {
		if target, ok := merged[name]; ok {
			return target, nil
		}
		if !within(name, "/usr") {
			return "", &os.PathError{Op: "lstat", Path: name, Err: os.ErrNotExist}
		}
	}
	info, err := os.Lstat(r.local(name))
	if err != nil || info.Mode()&os.ModeSymlink == 0 {
		return "", err
	}
	target, err := os.Readlink(r.local(name))
	if err == nil && target == "" {
		err = errors.New("empty link")
	}
	return target, err
}

func (r Root) local(name string) string {
	if r.Usr != "" {
		return filepath.Join(r.Usr, strings.TrimPrefix(name, "/usr"))
	}
	return filepath.Join("/", r.Dir, name)
}

// within says whether a clean path is dir or lies below it.
func within(name, dir string) bool { return name == dir || strings.HasPrefix(name, dir+"/") }

// names lists a directory of the host; none when it is not there.
func (r Root) names(dir string) []string {
	_, local, err := r.Resolve(dir)
	if err != nil {
		return nil
	}
	entries, _ := os.ReadDir(local)
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names
}

// read returns a small file of the host; nil when it is not there.
func (r Root) read(name string) []byte {
	_, local, err := r.Resolve(name)
	if err != nil {
		return nil
	}
	if info, err := os.Stat(local); err != nil || !info.Mode().IsRegular() || info.Size() > 64<<20 {
		return nil
	}
	data, _ := os.ReadFile(local)
	return data
}
