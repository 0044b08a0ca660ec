package bypass

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
)

// Mount is a line of /proc/PID/mountinfo (proc_pid_mountinfo(5)), as far as it is needed.
type Mount struct {
	// Device is the file system's, "major:minor".
	Device string
	// Root is the directory or file of the file system that is mounted, Point where. A root that was removed
	// ends in "//deleted".
	Root, Point string
}

// ParseMounts reads a mountinfo. A line that cannot be read is an error: a mount that is not seen would be a
// tenant that is not seen.
func ParseMounts(mountinfo []byte) ([]Mount, error) {
	var out []Mount
	for line := range bytes.Lines(mountinfo) {
		line = bytes.TrimSuffix(line, []byte("\n"))
		// 36 35 98:0 /root /point rw,noatime shared:1 - ext3 /dev/root rw
		fields := strings.Split(string(line), " ")
		if len(fields) < 10 {
			return nil, fmt.Errorf("mountinfo: %d fields in %.200q", len(fields), line)
		}
		m := Mount{Device: fields[2]}
		var err error
		if m.Root, err = unescape(fields[3]); err != nil {
			return nil, err
		}
		if m.Point, err = unescape(fields[4]); err != nil {
			return nil, err
		}
		out = append(out, m)
	}
	return out, nil
}

// unescape undoes the kernel's \ooo for space, tab, newline and backslash.
func unescape(s string) (string, error) {
	if !strings.Contains(s, `\`) {
		return s, nil
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '\\' {
			b.WriteByte(s[i])
			continue
		}
		if i+3 >= len(s) {
			return "", errors.New("mountinfo: an escape is cut short")
		}
		v := 0
		for _, d := range []byte(s[i+1 : i+4]) {
			if d < '0' || d > '7' {
				return "", fmt.Errorf("mountinfo: %q is no escape", s[i:i+4])
			}
			v = v*8 + int(d-'0')
		}
		if v > 255 {
			return "", fmt.Errorf("mountinfo: %q is no escape", s[i:i+4])
		}
		b.WriteByte(byte(v))
		i += 3
	}
	return b.String(), nil
}

// place is where a directory lies: in which file system, and where from its root, which is empty.
type place struct{ device, root string }

// placeOf finds an absolute directory among mounts: the last one at the longest path around it counts.
func placeOf(mounts []Mount, dir string) (place, bool) {
	best, found := Mount{}, false
	for _, m := range mounts {
		if within(dir, m.Point) && (!found || len(m.Point) >= len(best.Point)) {
			best, found = m, true
		}
	}
	if !found {
		return place{}, false
	}
	rest := strings.TrimPrefix(dir, strings.TrimSuffix(best.Point, "/"))
	return place{device: best.Device, root: strings.TrimSuffix(best.Root, "/") + rest}, true
}

func within(dir, around string) bool {
	return around == "/" || dir == around || strings.HasPrefix(dir, around+"/")
}

// entryOf is the name of the entry of our directory that one of the mounts shows, at whatever point.
func (p place) entryOf(mounts []Mount) (string, bool) {
	for _, m := range mounts {
		name, ok := strings.CutPrefix(m.Root, strings.TrimSuffix(p.root, "/")+"/")
		if !ok || m.Device != p.device {
			continue
		}
		name = strings.TrimSuffix(name, "//deleted")
		if name != "" && !strings.Contains(name, "/") {
			return name, true
		}
	}
	return "", false
}
