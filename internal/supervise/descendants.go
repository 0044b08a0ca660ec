package supervise

import (
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/tenant"
)

// Descendants lists the living processes below this one. As subreaper this process is the parent of
// what its child left behind.
func Descendants() []tenant.Process {
	parents := map[int]int{}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			parents[pid] = parentOf(pid)
		}
	}
	var out []tenant.Process
	for pid := range parents {
		for up, hops := parents[pid], 0; up > 1 && hops < 100; up, hops = parents[up], hops+1 {
			if up != os.Getpid() {
				continue
			}
			if p, ok := tenant.Find(pid); ok && !p.Gone() {
				out = append(out, p)
			}
			break
		}
	}
	return out
}

func parentOf(pid int) int {
	data, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	i := strings.LastIndexByte(string(data), ')')
	fields := strings.Fields(string(data[i+1:]))
	if len(fields) < 2 {
		return 0
	}
	parent, _ := strconv.Atoi(fields[1])
	return parent
}

// reapOrphans waits for dead processes that were left to us. The command and the probe have others
// that wait for them.
func reapOrphans(child int) {
	for range 64 {
		var info unix.Siginfo
		if unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil) != nil {
			return
		}
		// si_pid stands behind si_signo, si_errno, si_code and the padding of 64-bit systems.
		pid := int(*(*int32)(unsafe.Add(unsafe.Pointer(&info), 16)))
		if pid == 0 || pid == child || isProbe(pid) {
			return
		}
		_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
	}
}

func isProbe(pid int) bool {
	name, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
	return err != nil || strings.TrimSpace(string(name)) == "nvmlprobe"
}
