package doctor

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// hostPIDNamespace is the first PID namespace of every Linux kernel (PROC_PID_INIT_INO).
const hostPIDNamespace = "pid:[4026531836]"

// ThisProcess is what the calling process may do. Assets and Strict are the caller's to know.
func ThisProcess() Self {
	status, _ := os.ReadFile("/proc/self/status")
	effective := capabilities(string(status))
	namespace, _ := os.Readlink("/proc/self/ns/pid")
	return Self{UID: uint32(os.Geteuid()), HostPID: namespace == hostPIDNamespace,
		Admin: effective>>unix.CAP_SYS_ADMIN&1 != 0, Ptrace: effective>>unix.CAP_SYS_PTRACE&1 != 0}
}

// capabilities are the effective ones of a /proc/PID/status, a bit each.
func capabilities(status string) uint64 {
	for line := range strings.Lines(status) {
		var bits uint64
		if _, err := fmt.Sscanf(line, "CapEff: %x", &bits); err == nil {
			return bits
		}
	}
	return 0
}
