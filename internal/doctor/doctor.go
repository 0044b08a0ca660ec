// Package doctor looks at a machine as a node or a `tranche run` would use it and says what is in order,
// what is not, and what to do about it.
//
// It only looks: it starts nothing but nvmlprobe, writes nothing, and asks nobody over a network. All files
// are read below the host's root that it is given.
package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"tranche.dev/tranche/internal/driverview"
	"tranche.dev/tranche/internal/gpu"
)

// Status is the outcome of a check.
type Status string

// Outcomes. Skip is for what does not apply to this machine.
const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "fail"
	Skip Status = "skip"
)

// Check is one line of the report.
type Check struct {
	Area   string `json:"area"` // driver, gpus, kubernetes, runtime, system, tranche
	Name   string `json:"name"`
	Status Status `json:"status"`
	Text   string `json:"text"`          // what was found
	Fix    string `json:"fix,omitempty"` // what to do; never empty with Warn and Fail
}

// Self is what this process may do.
type Self struct {
	UID uint32
	// Admin and Ptrace: CAP_SYS_ADMIN and CAP_SYS_PTRACE.
	Admin, Ptrace bool
	// HostPID: it sees the processes of the host.
	HostPID bool
	// Assets is false in a binary that was built without its libraries.
	Assets bool
	// Strict is nil if this user may make the namespaces of `tranche run --strict`.
	Strict error
}

// Config is where to look. Every field but Self has a default.
type Config struct {
	// Root is where the host's root directory is seen; default /.
	Root string
	// DriverRoot is the same for the driver's files: the root of a simulated host; default Root.
	DriverRoot string
	// Sim: the GPUs are simulated; what only hardware has is skipped.
	Sim bool
	// Ask returns what asks this NVML library; nil: NVML is not asked.
	Ask func(library string) (gpu.Prober, error)
	// Dial tries a unix socket; default: connect.
	Dial func(path string) error
	// Space is the size of a mounted file system and what is free of it, bytes; default statfs.
	Space func(path string) (size, free uint64, noexec bool, err error)
	Self  Self
	Now   func() time.Time

	stat func(path string) (node, error)
}

// Report is the outcome.
type Report struct {
	Checks []Check `json:"checks"`
}

// Failed says whether anything has to be done before GPUs can be shared here.
func (r *Report) Failed() bool { return r.count(Fail) > 0 }

func (r *Report) count(s Status) int {
	n := 0
	for _, c := range r.Checks {
		if c.Status == s {
			n++
		}
	}
	return n
}

func (r *Report) add(area, name string, s Status, text, fix string) {
	r.Checks = append(r.Checks, Check{area, name, s, text, fix})
}

// Run looks at everything. It takes as long as the driver does to answer.
func Run(ctx context.Context, config Config) (Report, error) {
	h, err := newHost(config)
	if err != nil {
		return Report{}, err
	}
	var r Report
	found := h.driver(&r)
	inv := h.gpus(ctx, &r, found)
	h.deviceNodes(&r, inv)
	h.kubernetes(&r)
	h.runtimes(&r)
	h.system(&r)
	h.own(&r)
	return r, nil
}

// WriteJSON writes the report for programs.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(struct {
		Failed bool    `json:"failed"`
		Checks []Check `json:"checks"`
	}{r.Failed(), r.Checks})
}

// WriteText writes the report for people: a line for each check, and the fix below what needs one.
func (r *Report) WriteText(w io.Writer) error {
	var b strings.Builder
	area := ""
	for _, c := range r.Checks {
		if c.Area != area {
			area = c.Area
			fmt.Fprintf(&b, "%s\n", area)
		}
		fmt.Fprintf(&b, "  %-4s  %-17s %s\n", c.Status, c.Name, c.Text)
		if c.Fix != "" {
			fmt.Fprintf(&b, "        %-17s fix: %s\n", "", c.Fix)
		}
	}
	fmt.Fprintf(&b, "%d ok, %s, %s, %d skipped\n", r.count(OK), plural(r.count(Warn), "warning"), plural(r.count(Fail), "failure"), r.count(Skip))
	_, err := io.WriteString(w, b.String())
	return err
}

// driver checks the kernel module and the libraries; it returns what NVML to ask, "" for none.
func (h *host) driver(r *Report) driverview.Found {
	version := h.kernelVersion()
	cards := h.cards()
	switch {
	case version != "":
		r.add("driver", "kernel module", OK, version, "")
	case cards.count == 0:
		r.add("driver", "kernel module", Fail, "not loaded, and no NVIDIA GPU is on the PCI bus",
			"run on a machine with a GPU, or look at it all with --sim a100-80g")
	case cards.nouveau:
		r.add("driver", "kernel module", Fail, fmt.Sprintf("not loaded; nouveau holds %s", plural(cards.count, "GPU")),
			"install NVIDIA's driver, blacklist nouveau and reboot")
	default:
		r.add("driver", "kernel module", Fail, fmt.Sprintf("not loaded, though %s on the PCI bus", are(cards.count, "GPU")),
			"install NVIDIA's driver of at least 450, or load it: modprobe nvidia")
	}
	builder, err := driverview.New(driverview.Config{Root: driverview.Root{Dir: h.DriverRoot}, KernelVersion: version})
	if err != nil {
		r.add("driver", "libraries", Fail, err.Error(), "report this")
		return driverview.Found{}
	}
	found, err := builder.Find()
	var mismatch *driverview.MismatchError
	switch {
	case errors.As(err, &mismatch):
		r.add("driver", "libraries", Fail, fmt.Sprintf("of %s, the kernel module is %s", strings.Join(mismatch.Libraries, ", "), mismatch.Kernel),
			"reboot, or unload and load the module: the driver was upgraded under it")
	case err != nil:
		r.add("driver", "libraries", Fail, "no libcuda.so.1 with a libnvidia-ml.so.1 of the same version",
			"install the driver's libraries (Debian: libcuda1 and libnvidia-ml1; RHEL: nvidia-driver-cuda-libs)")
	default:
		r.add("driver", "libraries", OK, strings.TrimSpace(fmt.Sprintf("%s %s, %s", found.Version, found.CUDA, found.NVML)), "")
	}
	return found
}

// gpus asks NVML.
func (h *host) gpus(ctx context.Context, r *Report, found driverview.Found) gpu.Inventory {
	if h.Ask == nil || found.NVMLHere == "" {
		r.add("gpus", "NVML", Skip, "not asked: no library to ask", "")
		return gpu.Inventory{}
	}
	prober, err := h.Ask(found.NVMLHere)
	if err != nil {
		r.add("gpus", "NVML", Fail, err.Error(), "use a released binary, or `make build`")
		return gpu.Inventory{}
	}
	inv := gpu.Look(ctx, prober, h.Now())
	if p := inv.Problem; p.Reason != "" {
		fix := map[gpu.Reason]string{gpu.NoDriver: "modprobe nvidia", gpu.Mismatch: "reboot, or unload and load the module",
			gpu.NoGPU:    "nvidia-smi and dmesg tell why the driver has none",
			gpu.NoAnswer: "nvidia-smi and dmesg tell more; a GPU that hangs needs a reset or a reboot"}[p.Reason]
		r.add("gpus", "NVML", Fail, p.Text, fix)
		return inv
	}
	r.add("gpus", "NVML", OK, fmt.Sprintf("driver %s, CUDA %s, %s", inv.Driver, inv.CUDA, plural(len(inv.GPUs)+len(inv.Unidentified), "GPU")), "")
	for _, g := range inv.GPUs {
		name, text := fmt.Sprintf("gpu %d", g.Index), fmt.Sprintf("%s, %s, %d MiB", g.Name, g.UUID, g.Memory>>20)
		switch {
		case !g.State.Healthy:
			r.add("gpus", name, Fail, text+": "+g.State.Reason, "drain it and do as the driver says; docs/health.md has the steps")
		case g.Excluded != "":
			what, fix, _ := strings.Cut(g.Excluded, ": ")
			r.add("gpus", name, Warn, text+"; left out: "+what, fix)
		default:
			r.add("gpus", name, OK, text, "")
		}
	}
	for _, u := range inv.Unidentified {
		r.add("gpus", fmt.Sprintf("gpu %d", u.Index), Fail, u.Error, "nvidia-smi and dmesg tell more; it needs a reset or a reboot")
	}
	if n := len(inv.GPUs); n > 1 {
		pairs, nvlinked := n*(n-1)/2, 0
		for i := range n {
			for j := range i {
				if inv.Links.At(i, j).NVLinks > 0 {
					nvlinked++
				}
			}
		}
		r.add("gpus", "links", OK, fmt.Sprintf("NVLink between %d of %s", nvlinked, plural(pairs, "pair")), "")
	}
	return inv
}

func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

func are(n int, noun string) string {
	if n == 1 {
		return "1 " + noun + " is"
	}
	return plural(n, noun) + " are"
}
