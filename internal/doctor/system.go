package doctor

import (
	"fmt"
	"regexp"
	"strings"
)

// shmLeast is what /dev/shm should have free: a slice takes some 200 KiB.
const shmLeast = 16 << 20

const cgroupDir = "/sys/fs/cgroup"

func (h *host) system(r *Report) {
	v2 := h.kernelHas(cgroupDir + "/cgroup.controllers")
	switch fail := h.failCgroupV1(); {
	case len(names(kernelRoot(h.Root, cgroupDir), cgroupDir)) == 0:
		r.add("system", "cgroups", Skip, "none are mounted in "+cgroupDir, "")
	case v2:
		r.add("system", "cgroups", OK, "version 2", "")
	case h.hasKubelet() && (fail == nil || *fail):
		r.add("system", "cgroups", Warn, "version 1: kubelet from 1.35 on does not start with it",
			"boot with systemd.unified_cgroup_hierarchy=1, or failCgroupV1: false in kubelet's configuration")
	default:
		r.add("system", "cgroups", OK, "version 1", "")
	}
	h.shm(r)
	if kernelFile(h.Root, "/sys/fs/selinux/enforce") == "1" {
		r.add("system", "SELinux", Warn, "enforcing: containers may be refused the libraries and ledgers of their slices",
			"run the DaemonSet as spc_t, and: semanage fcontext -a -t container_file_t '/etc/gpu-manager(/.*)?' && restorecon -R /etc/gpu-manager")
	} else {
		r.add("system", "SELinux", OK, "not enforcing", "")
	}
	if strings.TrimSpace(kernelFile(h.Root, "/sys/module/apparmor/parameters/enabled")) == "Y" {
		r.add("system", "AppArmor", OK, "on; the runtimes' default profiles allow what slices need", "")
	}
	h.permissions(r)
}

func (h *host) kernelHas(name string) bool {
	_, err := place(kernelRoot(h.Root, name), name)
	return err == nil
}

func (h *host) shm(r *Report) {
	local, err := place(h.Root, "/dev/shm")
	if err != nil {
		r.add("system", "/dev/shm", Fail, "not there", "mount -t tmpfs tmpfs /dev/shm")
		return
	}
	size, free, _, err := h.Space(local)
	switch {
	case err != nil:
		r.add("system", "/dev/shm", Warn, err.Error(), "df /dev/shm")
	case free < shmLeast:
		r.add("system", "/dev/shm", Fail, fmt.Sprintf("%d of %d MiB free", free>>20, size>>20),
			fmt.Sprintf("free at least %d MiB, or: mount -o remount,size=64M /dev/shm", shmLeast>>20))
	default:
		r.add("system", "/dev/shm", OK, fmt.Sprintf("%d of %d MiB free", free>>20, size>>20), "")
	}
}

// permissions are those that a node needs; `tranche run` needs none.
func (h *host) permissions(r *Report) {
	var lacks, fixes []string
	if h.Self.UID != 0 || !h.Self.Admin {
		lacks, fixes = append(lacks, "is not a privileged root"), append(fixes, "securityContext.privileged: true")
	}
	if !h.Self.Ptrace {
		lacks, fixes = append(lacks, "lacks CAP_SYS_PTRACE"), append(fixes, "the capability SYS_PTRACE")
	}
	if !h.Self.HostPID {
		lacks, fixes = append(lacks, "does not see the host's processes"), append(fixes, "hostPID: true")
	}
	switch {
	case len(lacks) == 0:
		r.add("system", "permissions", OK, "privileged, sees the host's processes", "")
	case h.hasKubelet():
		r.add("system", "permissions", Warn, "this process "+strings.Join(lacks, ", "), "a `tranche node` needs "+strings.Join(fixes, ", "))
	default:
		r.add("system", "permissions", Skip, "this process "+strings.Join(lacks, ", ")+": `tranche run` needs none of it", "")
	}
	if h.Self.Strict == nil {
		r.add("system", "strict slices", OK, "namespaces and mounts are allowed", "")
	} else {
		r.add("system", "strict slices", Warn, h.Self.Strict.Error(), "`tranche run --strict off`, or allow user namespaces: sysctl kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0")
	}
}

const stateDir = "/etc/gpu-manager"

var sliceID = regexp.MustCompile(`^[0-9a-f]{16}$`)

// own is our state on this machine.
func (h *host) own(r *Report) {
	if h.Self.Assets {
		r.add("tranche", "binary", OK, "carries its libraries", "")
	} else {
		r.add("tranche", "binary", Fail, "was built without its libraries", "use a released binary, or `make build`")
	}
	if why := h.socket("/var/run/gpu-manager.sock"); why == "" {
		r.add("tranche", "node", OK, "one runs here", "")
	} else {
		r.add("tranche", "node", Skip, "none runs here", "")
	}
	if local, err := place(h.Root, stateDir); err != nil {
		r.add("tranche", "state", Skip, stateDir+" is not there yet", "")
	} else if _, free, noexec, err := h.Space(local); err != nil {
		r.add("tranche", "state", Warn, err.Error(), "df "+stateDir)
	} else if noexec {
		r.add("tranche", "state", Fail, stateDir+" is mounted noexec: containers could not load their libraries from it", "mount -o remount,exec, or --volume-config with another base")
	} else if free < 512<<20 {
		r.add("tranche", "state", Warn, fmt.Sprintf("%s has %d MiB free", stateDir, free>>20), "free 512 MiB: a copy of the driver takes as much where hard links cannot")
	} else {
		r.add("tranche", "state", OK, fmt.Sprintf("%s: %s, %d MiB free", stateDir, plural(len(names(h.Root, stateDir+"/vm")), "allocation"), free>>20), "")
	}
	slices := 0
	for _, name := range names(h.Root, "/dev/shm/tranche") {
		if sliceID.MatchString(name) {
			slices++
		}
	}
	r.add("tranche", "slices", OK, plural(slices, "slice")+" of `tranche run`", "")
}
