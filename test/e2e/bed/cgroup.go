package bed

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// hierarchy is one cgroup hierarchy of the host as this process sees it.
type hierarchy struct {
	// controllers as in /proc/self/cgroup: "cpu,cpuacct", "name=systemd", or "" for version 2.
	controllers string
	// mount is where its visible root is, own where this process is.
	mount, own string
}

// hierarchies reads the texts of /proc/self/cgroup and /proc/self/mountinfo. A hierarchy that is
// mounted nowhere is left out.
func hierarchies(cgroup, mountinfo string) []hierarchy {
	type mounted struct{ root, at string }
	mounts := map[string]mounted{}
	for line := range strings.Lines(mountinfo) {
		before, after, ok := strings.Cut(line, " - ")
		where, what := strings.Fields(before), strings.Fields(after)
		if !ok || len(where) < 5 || len(what) < 3 {
			continue
		}
		key := ""
		switch what[0] {
		case "cgroup2":
		case "cgroup":
			key = controllersOf(what[2])
		default:
			continue
		}
		if _, seen := mounts[key]; !seen {
			mounts[key] = mounted{root: where[3], at: where[4]}
		}
	}
	var out []hierarchy
	for line := range strings.Lines(cgroup) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		key := f[1]
		if key != "" && !strings.HasPrefix(key, "name=") {
			key = controllersOf(key)
		}
		m, ok := mounts[key]
		if !ok {
			continue
		}
		// A path outside of what is mounted ("/../x", or another container's) is not ours to use.
		own := m.at
		if rest, inside := strings.CutPrefix(f[2], strings.TrimSuffix(m.root, "/")); inside {
			if dir := filepath.Join(m.at, rest); isDir(dir) && !strings.Contains(rest, "..") {
				own = dir
			}
		}
		out = append(out, hierarchy{controllers: f[1], mount: m.at, own: own})
	}
	return out
}

// controllersOf picks the controllers, or the name, out of a hierarchy's mount options, in one order.
func controllersOf(options string) string {
	var out []string
	for _, o := range strings.Split(options, ",") {
		if strings.HasPrefix(o, "name=") {
			return o
		}
		switch o {
		case "cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "net_cls", "net_prio", "perf_event", "hugetlb", "rdma", "misc":
			out = append(out, o)
		}
	}
	slices.Sort(out)
	return strings.Join(out, ",")
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// makeCgroups makes a cgroup of that name in every hierarchy, below this process's own, since a process
// must be below one path in all of them for kubelet and runc; it returns their directories. With
// version 2 alone it is below the visible root: see delegate.
func makeCgroups(name string) ([]string, error) {
	cgroup, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	all := hierarchies(string(cgroup), string(mountinfo))
	if len(all) == 0 {
		return nil, errors.New("no cgroup hierarchy is mounted on this machine")
	}
	var dirs []string
	for _, h := range all {
		parent := h.own
		if len(all) == 1 && h.controllers == "" {
			parent = h.mount
			if err := delegate(parent); err != nil {
				return dirs, err
			}
		}
		dir := filepath.Join(parent, name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return dirs, err
		}
		dirs = append(dirs, dir)
		if h.controllers == "cpuset" {
			if err := copyCpuset(parent, dir); err != nil {
				return dirs, err
			}
		}
	}
	return dirs, nil
}

// copyCpuset gives a new version 1 cpuset what its parent has: no process can join it before.
func copyCpuset(parent, dir string) error {
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		value, err := os.ReadFile(filepath.Join(parent, file))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, file), value, 0); err != nil {
			return err
		}
	}
	return nil
}

// delegate turns on every controller for the children of a version 2 cgroup. The kernel refuses that
// for one which has processes, unless it is the real root; in a container these are moved into a child
// first, as container runtimes inside containers do.
func delegate(dir string) error {
	if _, err := os.Stat(filepath.Join(dir, "cgroup.type")); err == nil {
		if err := evacuate(dir, "bed-host"); err != nil {
			return err
		}
	}
	controllers, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return err
	}
	for _, c := range strings.Fields(string(controllers)) {
		// One that cannot be had (cpu with real-time processes about) is kubelet's to complain of.
		_ = os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+c), 0)
	}
	return nil
}

// evacuate moves all processes of a version 2 cgroup into a child of it.
func evacuate(dir, child string) error {
	leaf := filepath.Join(dir, child)
	made := isDir(leaf)
	for range 100 {
		pids, err := cgroupPids(dir)
		if err != nil {
			return err
		}
		if len(pids) == 0 {
			return nil
		}
		if !made {
			if err := os.Mkdir(leaf, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
			made = true
		}
		for _, pid := range pids {
			if err := join(leaf, pid); err != nil && !errors.Is(err, errNoProcess) {
				return err
			}
		}
	}
	return fmt.Errorf("%s: processes keep appearing in it", dir)
}

func cgroupPids(dir string) ([]string, error) {
	f, err := os.Open(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var out []string
	for s := bufio.NewScanner(f); s.Scan(); {
		if s.Text() != "0" { // 0: not in our PID namespace
			out = append(out, s.Text())
		}
	}
	return out, nil
}

// errNoProcess: it ended meanwhile, or is a kernel thread that stays where it is.
var errNoProcess = errors.New("no such process")

func join(dir, pid string) error {
	err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(pid), 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return errNoProcess
	}
	return err
}

// removeCgroups removes the cgroups and all below. What still has processes a while after their end was
// asked for is an error.
func removeCgroups(dirs []string, within time.Duration) error {
	var left error
	for _, dir := range dirs {
		err := removeTree(dir)
		for deadline := time.Now().Add(within); err != nil && time.Now().Before(deadline); err = removeTree(dir) {
			time.Sleep(20 * time.Millisecond)
		}
		left = errors.Join(left, err)
	}
	return left
}

// removeTree removes a directory of cgroups, children first; their files go with them.
func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
