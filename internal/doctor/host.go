package doctor

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/driverview"
)

// host reads a machine's files. Paths are the host's; links are followed within its root.
type host struct{ Config }

// node is a file as the kernel has it.
type node struct {
	mode         fs.FileMode
	major, minor uint32 // of a device
}

func newHost(c Config) (*host, error) {
	if c.Root == "" {
		c.Root = "/"
	}
	if info, err := os.Stat(c.Root); err != nil {
		return nil, fmt.Errorf("root: %w", err)
	} else if !info.IsDir() {
		return nil, fmt.Errorf("root: %s is not a directory", c.Root)
	}
	if c.DriverRoot == "" {
		c.DriverRoot = c.Root
	}
	if c.Dial == nil {
		c.Dial = dial
	}
	if c.Space == nil {
		c.Space = space
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.stat == nil {
		c.stat = stat
	}
	return &host{c}, nil
}

func dial(path string) error {
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err != nil {
		return err
	}
	return conn.Close()
}

func space(path string) (size, free uint64, noexec bool, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, 0, false, err
	}
	return st.Blocks * uint64(st.Bsize), st.Bavail * uint64(st.Bsize), st.Flags&unix.ST_NOEXEC != 0, nil
}

func stat(path string) (node, error) {
	info, err := os.Stat(path)
	if err != nil {
		return node{}, err
	}
	n := node{mode: info.Mode()}
	var st unix.Stat_t
	if unix.Stat(path, &st) == nil {
		n.major, n.minor = unix.Major(st.Rdev), unix.Minor(st.Rdev)
	}
	return n, nil
}

// place is a file of the host as this process sees it; an error if it is not there.
func place(root, name string) (string, error) {
	_, local, err := driverview.Root{Dir: root}.Resolve(name)
	return local, err
}

func (h *host) stats(root, name string) (node, error) {
	local, err := place(root, name)
	if err != nil {
		return node{}, err
	}
	return h.stat(local)
}

func (h *host) exists(name string) bool {
	_, err := place(h.Root, name)
	return err == nil
}

const fileMax = 4 << 20

// read is a file's text, "" if it cannot be had.
func read(root, name string) string {
	local, err := place(root, name)
	if err != nil {
		return ""
	}
	f, err := os.Open(local)
	if err != nil {
		return ""
	}
	defer f.Close()
	var b bytes.Buffer
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return ""
	}
	if _, err := b.ReadFrom(&limited{f, fileMax}); err != nil {
		return ""
	}
	return b.String()
}

// limited ends after left bytes.
type limited struct {
	f    *os.File
	left int
}

func (l *limited) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, errors.New("too large")
	}
	n, err := l.f.Read(p[:min(len(p), l.left)])
	l.left -= n
	return n, err
}

func names(root, dir string) []string {
	local, err := place(root, dir)
	if err != nil {
		return nil
	}
	entries, _ := os.ReadDir(local)
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

// kernelFile reads below /proc or /sys. A root that was mounted without them is of this very kernel.
func kernelFile(root, name string) string {
	return read(kernelRoot(root, name), name)
}

func kernelRoot(root, name string) string {
	if top := "/" + strings.SplitN(strings.TrimPrefix(name, "/"), "/", 2)[0]; len(names(root, top)) == 0 {
		return "/"
	}
	return root
}

var moduleVersion = regexp.MustCompile(`NVRM version:.*?\s([0-9]{3,}\.[0-9]+(\.[0-9]+)?)\s`)

// kernelVersion is that of the loaded module (/proc/driver/nvidia/version), "" for none.
func (h *host) kernelVersion() string {
	if m := moduleVersion.FindStringSubmatch(kernelFile(h.DriverRoot, "/proc/driver/nvidia/version")); m != nil {
		return m[1]
	}
	return ""
}

type cards struct {
	count   int
	nouveau bool
}

// cards counts NVIDIA's display controllers on the PCI bus.
func (h *host) cards() cards {
	const dir = "/sys/bus/pci/devices"
	var c cards
	root := kernelRoot(h.DriverRoot, dir)
	for _, name := range names(root, dir) {
		at := path.Join(dir, name)
		if strings.TrimSpace(read(root, at+"/vendor")) != "0x10de" || !strings.HasPrefix(read(root, at+"/class"), "0x03") {
			continue
		}
		c.count++
		if real, _, err := (driverview.Root{Dir: root}).Resolve(at + "/driver"); err == nil && filepath.Base(real) == "nouveau" {
			c.nouveau = true
		}
	}
	return c
}

// major is a character device's number by its driver's name (/proc/devices); 0 if there is none.
func (h *host) major(name string) uint32 {
	for line := range strings.Lines(kernelFile(h.DriverRoot, "/proc/devices")) {
		var n uint32
		var who string
		if _, err := fmt.Sscan(line, &n, &who); err == nil && who == name {
			return n
		}
		if strings.HasPrefix(line, "Block devices") {
			break
		}
	}
	return 0
}

// minors are those of the module's GPUs, sorted (/proc/driver/nvidia/gpus/*/information).
func (h *host) minors() []int {
	const dir = "/proc/driver/nvidia/gpus"
	root := kernelRoot(h.DriverRoot, dir)
	var out []int
	for _, name := range names(root, dir) {
		for line := range strings.Lines(read(root, path.Join(dir, name, "information"))) {
			var n int
			if text, ok := strings.CutPrefix(line, "Device Minor:"); ok {
				if _, err := fmt.Sscan(text, &n); err == nil && n >= 0 && !slices.Contains(out, n) {
					out = append(out, n)
				}
			}
		}
	}
	slices.Sort(out)
	return out
}
