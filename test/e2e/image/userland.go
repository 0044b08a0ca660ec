package image

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Userland is a layer that is laid out like Debian (/bin, /lib and /lib64 are links into /usr): the
// programs in /usr/bin, the shared libraries that they need from this machine in /usr/lib, and what
// programs expect in /etc and /tmp. A program is a path, or a name to be found in PATH. One that is
// busybox brings its tools as links to it. Libraries that a program opens later, of its own, are not
// found: name them in extra, as they are called ("libm.so.6").
func Userland(extra []string, programs ...string) (Layer, error) {
	layer := Layer{
		{To: "/bin", Link: "usr/bin"}, {To: "/sbin", Link: "usr/sbin"}, {To: "/lib", Link: "usr/lib"}, {To: "/lib64", Link: "usr/lib64"},
		{To: "/usr/bin/"}, {To: "/usr/sbin/"}, {To: "/usr/lib/"}, {To: "/usr/lib64/"},
		{To: "/etc/passwd", Data: []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")},
		{To: "/etc/group", Data: []byte("root:x:0:\nnogroup:x:65534:\n")},
		{To: "/root/"}, {To: "/run/"}, {To: "/var/run", Link: "/run"}, {To: "/tmp/", Mode: os.ModeSticky | 0o777},
	}
	have := map[string]bool{}
	add := func(f File) {
		if !have[f.To] {
			have[f.To] = true
			layer = append(layer, f)
		}
	}
	var links []File
	for _, p := range programs {
		path, err := exec.LookPath(p)
		if err != nil {
			return nil, err
		}
		add(File{To: "/usr/bin/" + filepath.Base(p), From: path, Mode: 0o755})
		libraries, err := needed(path)
		if err != nil {
			return nil, err
		}
		for _, l := range libraries {
			add(File{To: merged(l), From: l, Mode: 0o755})
			for _, e := range extra {
				if other := filepath.Join(filepath.Dir(l), e); exists(other) {
					add(File{To: merged(other), From: other, Mode: 0o755})
				}
			}
		}
		if filepath.Base(p) == "busybox" {
			list, err := exec.Command(path, "--list").Output()
			if err != nil {
				return nil, fmt.Errorf("%s --list: %w", path, err)
			}
			for _, applet := range strings.Fields(string(list)) {
				links = append(links, File{To: "/usr/bin/" + applet, Link: "busybox"})
			}
		}
	}
	for _, f := range links {
		add(f)
	}
	return layer, nil
}

// resolved is a line of ldd that has a path: "name => path (address)" or "path (address)".
var resolved = regexp.MustCompile(`(?m)^\s*(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$`)

// needed lists the shared libraries that a program loads at its start, the loader too; none for a
// static one.
func needed(program string) ([]string, error) {
	cmd := exec.Command("ldd", program)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C"} // no LD_LIBRARY_PATH, no LD_PRELOAD
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) && strings.Contains(string(out), "not a dynamic executable") {
		return nil, nil
	}
	if err != nil || strings.Contains(string(out), "not found") {
		return nil, fmt.Errorf("ldd %s: %v: %s", program, err, strings.TrimSpace(string(out)))
	}
	var list []string
	for _, m := range resolved.FindAllStringSubmatch(string(out), -1) {
		list = append(list, m[1])
	}
	slices.Sort(list)
	return slices.Compact(list), nil
}

// merged is where a library of this machine is in the image: /lib/x/y is /usr/lib/x/y.
func merged(path string) string {
	for _, top := range []string{"/lib/", "/lib64/", "/lib32/"} {
		if strings.HasPrefix(path, top) {
			return "/usr" + path
		}
	}
	return path
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }
