package state

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/tenant"
)

// processMax bounds what is read of a process.
const processMax = 4 << 20

// findUsers looks for processes of slices that nobody supervises any more: those that were born
// after the supervisor wrote use.json last. A process belongs to a slice when the slice's library
// directory is in its environment as it was started, in its mounts (--strict), or in its memory
// map. Of other users' processes only the mounts can be read.
func findUsers(all []Slice) {
	var dead []*Slice
	for i := range all {
		if s := &all[i]; !s.Alive && s.Info.PIDNS == tenant.PIDNamespace() {
			dead = append(dead, s)
		}
	}
	if len(dead) == 0 {
		return
	}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		var st unix.Stat_t
		if unix.Stat("/proc/"+e.Name(), &st) != nil {
			continue
		}
		// Root's processes too: what a set-uid program or an undumpable one is shows as root's.
		mine := func(s *Slice) bool { return int(st.Uid) == s.UID || st.Uid == 0 && s.Mine }
		if !slices.ContainsFunc(dead, mine) {
			continue
		}
		shown := look(pid)
		for _, s := range dead {
			if !mine(s) || !shown.has(s.ID) {
				continue
			}
			if p, ok := tenant.Find(pid); ok && !p.Gone() {
				s.Alive = true
				s.Use.Processes = append(s.Use.Processes, p)
			}
		}
	}
}

// looks is what a process shows of the libraries that it may load.
type looks struct{ environment, maps, mounts []byte }

func look(pid int) looks {
	of := func(file string) []byte { return readHead(fmt.Sprintf("/proc/%d/%s", pid, file)) }
	return looks{environment: of("environ"), maps: of("maps"), mounts: of("mountinfo")}
}

// has looks for the slice's library directory; all of the slice's files may be mounted.
func (l looks) has(id string) bool {
	dir := "/slices/" + id + "/"
	lib := []byte(dir + "lib")
	return bytes.Contains(l.environment, lib) || bytes.Contains(l.maps, lib) || bytes.Contains(l.mounts, []byte(dir))
}

func readHead(path string) []byte {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	data, _ := io.ReadAll(io.LimitReader(f, processMax))
	return data
}
