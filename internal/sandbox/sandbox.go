// Package sandbox starts a command in a private mount namespace in which every path of the system's
// driver libraries shows a slice's. Root needs only the namespace; others get a user namespace that
// maps their own user and group and no more.
//
// The mounts are made by a second stage of this program (Enter), which then becomes the command:
// process number, signals and exit status are the command's.
package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/assets"
	"tranche.dev/tranche/internal/driverfind"
	"tranche.dev/tranche/internal/slice"
)

// EnterCommand is the hidden subcommand of the second stage.
const EnterCommand = "__enter"

// ExecError says that the second stage did everything but could not become the command.
type ExecError struct {
	Path string
	Err  error
}

func (e *ExecError) Error() string { return e.Path + ": " + e.Err.Error() }
func (e *ExecError) Unwrap() error { return e.Err }

// plan is what the second stage does: mounts in order, then exec.
type plan struct {
	Binds []slice.Bind
	Path  string
	Argv  []string
	// DropCaps is set in a user namespace.
	DropCaps bool
}

// Probe tells whether this user may make the namespaces and mounts, by doing it. The error says why
// not.
func Probe() error {
	_, err := works()
	return err
}

// works finds the kind of namespaces that can be had: with or without one for users.
var works = sync.OnceValues(func() (userNS bool, err error) {
	kinds := []bool{true}
	if os.Getuid() == 0 {
		kinds = []bool{false, true}
	}
	for _, userNS = range kinds {
		if err = try(userNS); err == nil {
			return userNS, nil
		}
	}
	return userNS, err
})

func try(userNS bool) error {
	self, err := filepath.EvalSymlinks("/proc/self/exe")
	if err != nil {
		return err
	}
	cmd := exec.Command(self)
	var said strings.Builder
	cmd.Stderr = &said
	p := plan{Binds: []slice.Bind{{From: os.DevNull, To: os.DevNull}}, DropCaps: userNS}
	if err := start(cmd, p, userNS); err != nil {
		return fmt.Errorf("namespaces are not permitted: %w", err)
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("mounts are not permitted: %s", strings.TrimPrefix(strings.TrimSpace(said.String()), "tranche: "))
	}
	return nil
}

// Start starts cmd, whose Path and Args are the command's own, under the binds.
func Start(cmd *exec.Cmd, binds []slice.Bind) error {
	userNS, err := works()
	if err != nil {
		return err
	}
	p := plan{Binds: binds, Path: cmd.Path, Argv: cmd.Args, DropCaps: userNS}
	self, err := filepath.EvalSymlinks("/proc/self/exe")
	if err != nil {
		return err
	}
	cmd.Path = self
	return start(cmd, p, userNS)
}

func start(cmd *exec.Cmd, p plan, userNS bool) error {
	data, err := json.Marshal(p)
	if err != nil {
		return err
	}
	fd, err := share(data)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	cmd.Args = []string{"tranche", EnterCommand, strconv.Itoa(fd)}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	attr := cmd.SysProcAttr
	attr.Cloneflags |= unix.CLONE_NEWNS
	if userNS {
		attr.Cloneflags |= unix.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: os.Getuid(), HostID: os.Getuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: os.Getgid(), HostID: os.Getgid(), Size: 1}}
		attr.AmbientCaps = []uintptr{unix.CAP_SYS_ADMIN}
	}
	return cmd.Start()
}

// share puts data into a file of memory that the next child inherits, under a number that is free in
// this process: what the caller left open keeps its own numbers. The child has all of it even if we
// die at once.
func share(data []byte) (fd int, err error) {
	fd, err = unix.MemfdCreate("tranche-plan", 0)
	if err != nil {
		return -1, fmt.Errorf("memfd: %w", err)
	}
	for rest := data; len(rest) > 0 && err == nil; {
		var n int
		n, err = unix.Write(fd, rest)
		rest = rest[max(n, 0):]
	}
	if err == nil {
		_, err = unix.Seek(fd, 0, io.SeekStart)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("memfd: %w", err)
	}
	return fd, nil
}

// Enter is the second stage; fd has the plan. It returns only on failure, or for a plan without a
// command.
func Enter(fd string) error {
	runtime.LockOSThread()
	p, err := readPlan(fd)
	if err != nil {
		return fmt.Errorf("internal command: %w", err)
	}
	if err := isolate(); err != nil {
		return fmt.Errorf("mount propagation: %w", err)
	}
	for _, b := range p.Binds {
		if err := unix.Mount(b.From, b.To, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("bind %s over %s: %w", b.From, b.To, err)
		}
	}
	if p.DropCaps {
		if err := dropCaps(); err != nil {
			return err
		}
	}
	if p.Path == "" {
		return nil
	}
	return &ExecError{Path: p.Path, Err: syscall.Exec(p.Path, p.Argv, os.Environ())}
}

func readPlan(fd string) (p plan, err error) {
	n, err := strconv.Atoi(fd)
	if err != nil || n < 3 {
		return p, errors.New("no plan")
	}
	f := os.NewFile(uintptr(n), "plan")
	if f == nil {
		return p, errors.New("no plan")
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, 16<<20))
	if err != nil {
		return p, err
	}
	return p, json.Unmarshal(data, &p)
}

// isolate keeps what is mounted here here; what the system mounts later is still seen.
func isolate() error {
	err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, "")
	if errors.Is(err, unix.EINVAL) {
		// In a chroot "/" is no mount point. The mount that it lies in has no path here.
		return outsideRoot(func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, "") })
	}
	return err
}

// outsideRoot calls f with the namespace's own root, then comes back to ours. It needs the calling
// thread to be locked, CAP_SYS_CHROOT, and /proc.
func outsideRoot(f func() error) error {
	// The other threads share root and working directory with this one, which setns refuses.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	var fds []int
	for _, path := range []string{"/proc/thread-self/ns/mnt", "/", "."} {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		defer unix.Close(fd)
		fds = append(fds, fd)
	}
	// Entering the namespace that we are in moves us to its root.
	if err := unix.Setns(fds[0], unix.CLONE_NEWNS); err != nil {
		return err
	}
	err := f()
	for _, step := range []func() error{
		func() error { return unix.Fchdir(fds[1]) },
		func() error { return unix.Chroot(".") },
		func() error { return unix.Fchdir(fds[2]) },
	} {
		if e := step(); e != nil {
			return fmt.Errorf("back into the chroot: %w", e)
		}
	}
	return err
}

// dropCaps gives up what the user namespace gave; for uid 0 exec would give it all back.
func dropCaps() error {
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("ambient capabilities: %w", err)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if err := unix.Capset(&header, &none[0]); err != nil {
		return fmt.Errorf("capabilities: %w", err)
	}
	return nil
}

// Cover lists the binds that show the slice's libraries wherever the system has the driver's: in the
// directories of the library path, of the loader's cache, the defaults, and CUDA's compatibility
// directories; links lead to the real files, versioned ones included. The toolkit's stubs stay: they
// reach no GPU. The loader's cache is covered by one that leads to the slice's, for systems that have
// no driver in place.
func Cover(l slice.Layout, libraryPath string) []slice.Bind {
	binds := append([]slice.Bind{}, l.Aside...)
	cache, _ := os.ReadFile(driverfind.CachePath)
	for _, file := range systemFiles(cache, libraryPath) {
		if !strings.HasPrefix(file.To, l.Dir+"/") {
			binds = append(binds, slice.Bind{From: filepath.Join(l.Lib, file.From), To: file.To})
		}
	}
	if len(cache) == 0 {
		return binds
	}
	paths := map[string]string{}
	for _, name := range driverfind.Names {
		paths[name] = filepath.Join(l.Lib, name)
	}
	file := filepath.Join(l.Dir, "ld.so.cache")
	if changed := driverfind.ReplaceInCache(cache, paths); changed != nil && assets.WriteFile(file, changed, 0o644) == nil {
		binds = append(binds, slice.Bind{From: file, To: driverfind.CachePath})
	}
	return binds
}

// systemFiles lists the real files behind the driver's names, each once (To), with the library that
// each is (From).
func systemFiles(cache []byte, libraryPath string) []slice.Bind {
	dirs := append(filepath.SplitList(libraryPath), driverfind.DefaultDirs()...)
	for _, e := range driverfind.ParseCache(cache) {
		if driverfind.IsDriverName(e.Name) {
			dirs = append(dirs, filepath.Dir(e.Path))
		}
	}
	compat, _ := filepath.Glob("/usr/local/cuda*/compat")
	dirs = append(dirs, compat...)
	seen := map[string]bool{}
	var out []slice.Bind
	for _, dir := range dirs {
		if dir == "" || strings.HasSuffix(filepath.Clean(dir), "/stubs") {
			continue
		}
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			if !driverfind.IsDriverName(e.Name()) {
				continue
			}
			real, err := filepath.EvalSymlinks(filepath.Join(dir, e.Name()))
			if err != nil || seen[real] {
				continue
			}
			if info, err := os.Stat(real); err != nil || !info.Mode().IsRegular() {
				continue
			}
			seen[real] = true
			stem, _, _ := strings.Cut(e.Name(), ".so")
			out = append(out, slice.Bind{From: stem + ".so.1", To: real})
		}
	}
	return out
}
