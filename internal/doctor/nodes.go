package doctor

import (
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"tranche.dev/tranche/internal/gpu"
)

// nvidiaMajor is that of nvidiactl and nvidiaN, by the kernel's list.
const nvidiaMajor = 195

// deviceNodes checks what containers get: by minor number, not by index.
func (h *host) deviceNodes(r *Report, inv gpu.Inventory) {
	if h.kernelVersion() == "" {
		r.add("gpus", "device nodes", Skip, "the kernel module makes them", "")
		return
	}
	minors := h.minors()
	for _, g := range inv.GPUs {
		if g.Minor >= 0 && !slices.Contains(minors, g.Minor) {
			minors = append(minors, g.Minor)
		}
	}
	slices.Sort(minors)
	wanted := []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}
	for _, m := range minors {
		wanted = append(wanted, fmt.Sprintf("nvidia%d", m))
	}
	uvm := h.major("nvidia-uvm")
	var missing, wrong, there []string
	for _, name := range wanted {
		n, err := h.stats(h.DriverRoot, "/dev/"+name)
		switch {
		case err != nil:
			missing = append(missing, "/dev/"+name)
		case h.Sim:
			there = append(there, name)
		case n.mode&fs.ModeCharDevice == 0:
			wrong = append(wrong, fmt.Sprintf("/dev/%s is no device", name))
		case strings.HasPrefix(name, "nvidia-uvm") && uvm != 0 && n.major != uvm:
			wrong = append(wrong, fmt.Sprintf("/dev/%s has major %d, the kernel says %d", name, n.major, uvm))
		case !strings.HasPrefix(name, "nvidia-uvm") && n.major != nvidiaMajor:
			wrong = append(wrong, fmt.Sprintf("/dev/%s has major %d, not %d", name, n.major, nvidiaMajor))
		default:
			there = append(there, name)
		}
	}
	const create = "nvidia-modprobe -u -c 0 (and -c N for each nvidiaN), at boot: nvidia-persistenced or the driver's udev rules"
	switch {
	case len(wrong) > 0:
		if len(missing) > 0 {
			wrong = append(wrong, "missing: "+strings.Join(missing, " "))
		}
		r.add("gpus", "device nodes", Fail, strings.Join(wrong, "; "), "remove them, then "+create)
	case len(missing) > 0:
		r.add("gpus", "device nodes", Fail, "missing: "+strings.Join(missing, " "), create)
	default:
		r.add("gpus", "device nodes", OK, "/dev: "+strings.Join(there, " "), "")
	}
}
