// Package nvidiasmi runs NVIDIA's own nvidia-smi, of two driver releases, on the simulated
// libnvidia-ml.so.1: that it prints whole, right tables is the proof that the simulated NVML says
// what NVIDIA's says. The processes it shows are real ones, which hold memory and run kernels on
// the simulated libcuda.so.1.
package nvidiasmi

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"tranche.dev/tranche/test/fixture"
)

const mib = 1 << 20

// release is one nvidia-smi and the driver version that the machine must have for it.
type release struct{ smi, driver, cuda, cudaShown string }

var releases = []release{
	{"535", "535.261.03", "12020", "12.2"},
	{"550", "550.163.01", "12040", "12.4"},
}

// machine is a simulated machine in a directory of its own.
type machine struct {
	t   *testing.T
	r   release
	smi string
	dir string
	lib string // where programs find the libraries
}

func newMachine(t *testing.T, r release, spec ...string) machine {
	t.Helper()
	fixture.Need(t, fixture.Build("sim", "libnvidia-ml.so.1"))
	m := machine{t, r, fixture.NVIDIA(t, r.smi, "nvidia-smi"), t.TempDir(), fixture.Build("sim")}
	lines := append([]string{"driver_version=" + r.driver, "cuda_version=" + r.cuda}, spec...)
	if err := os.WriteFile(filepath.Join(m.dir, "spec"), []byte(strings.Join(lines, "\n")+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return m
}

func (m machine) env() []string {
	return append(os.Environ(), "TRANCHE_SIM_DIR="+m.dir, "LD_LIBRARY_PATH="+m.lib)
}

// run returns what nvidia-smi printed and its exit code.
func (m machine) run(args ...string) (string, int) {
	m.t.Helper()
	return m.exec(m.smi, args...)
}

// program returns what a program without arguments printed.
func (m machine) program(path string) string {
	m.t.Helper()
	out, code := m.exec(path)
	if code != 0 {
		m.t.Fatalf("%s: exit code %d\n%s", path, code, out)
	}
	return out
}

func (m machine) exec(name string, args ...string) (string, int) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = m.env()
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil || ctx.Err() != nil {
		m.t.Fatalf("%s %v: %v, %v\n%s", name, args, err, ctx.Err(), out)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// must is run for what has to succeed.
func (m machine) must(args ...string) string {
	m.t.Helper()
	out, code := m.run(args...)
	if code != 0 {
		m.t.Fatalf("nvidia-smi %v: exit code %d\n%s", args, code, out)
	}
	return out
}

// csv returns the rows of a query, without the header, fields trimmed.
func (m machine) csv(query string) [][]string {
	m.t.Helper()
	var rows [][]string
	for _, line := range strings.Split(strings.TrimSpace(m.must(query, "--format=csv,noheader,nounits")), "\n") {
		if line == "" {
			continue
		}
		fields := strings.Split(line, ",")
		for i := range fields {
			fields[i] = strings.TrimSpace(fields[i])
		}
		rows = append(rows, fields)
	}
	return rows
}

func (m machine) ctl(args ...string) string {
	m.t.Helper()
	out, err := exec.Command(fixture.Need(m.t, fixture.Build("sim", "simctl")), append([]string{m.dir}, args...)...).CombinedOutput()
	if err != nil {
		m.t.Fatalf("simctl %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// load starts a process that holds memory and keeps GPU 0 busy, and returns its pid.
func (m machine) load(args ...string) int {
	m.t.Helper()
	fixture.Need(m.t, fixture.Build("sim", "libcuda.so.1"))
	cmd := exec.Command(fixture.Need(m.t, fixture.Build("bin", "gpuload")), args...)
	cmd.Env = m.env()
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return cmd.Process.Pid
}

// eventually waits for a condition that some process is about to bring about.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("%s: not within 20 s", what)
}

func each(t *testing.T, spec []string, f func(t *testing.T, m machine)) {
	for _, r := range releases {
		t.Run(r.smi, func(t *testing.T) { f(t, newMachine(t, r, spec...)) })
	}
}

func wantAll(t *testing.T, out string, patterns ...string) {
	t.Helper()
	for _, p := range patterns {
		if !regexp.MustCompile(p).MatchString(out) {
			t.Errorf("nothing matches %q in\n%s", p, out)
		}
	}
}

func TestTableOfIdleGPUs(t *testing.T) {
	spec := []string{"gpu model=a100-80g uuid=GPU-00112233-4455-6677-8899-aabbccddeeff", "gpu model=t4", "gpu model=h200-141g"}
	each(t, spec, func(t *testing.T, m machine) {
		out := m.must()
		wantAll(t, out,
			`NVIDIA-SMI `+m.r.driver+` +Driver Version: `+m.r.driver+` +CUDA Version: `+m.r.cudaShown,
			`0  NVIDIA A100-SXM4-80GB +On`, `0MiB / +81920MiB`, `400W`,
			`1  Tesla T4 +On`, `P8 .* 70W .*0MiB / +15360MiB`,
			`2  NVIDIA H200 +On`, `700W`,
			`0% +Default`, `No running processes found`)
		if strings.Contains(out, "ERR!") {
			t.Errorf("an error in the table:\n%s", out)
		}
		if rows := m.csv("--query-gpu=name,uuid,utilization.gpu"); rows[0][1] != "GPU-00112233-4455-6677-8899-aabbccddeeff" {
			t.Errorf("uuid of the spec: %q", rows[0])
		}
		wantAll(t, m.must("-L"), `GPU 0: NVIDIA A100-SXM4-80GB \(UUID: GPU-00112233-`, `GPU 2: NVIDIA H200`)
		wantAll(t, m.must("-q"), `Product Architecture +: Ampere`, `Product Architecture +: Turing`,
			`Product Architecture +: Hopper`, `Host Max +: 4`, `Persistence Mode +: Enabled`)
		wantAll(t, m.must("dmon", "-c", "1"), `(?m)^ +2 +75 +30`)
	})
}

func TestTopology(t *testing.T) {
	spec := []string{"gpu model=a100-40g count=4", "link 0 1 nvlink=12",
		"link 0 2 nvlink=0 pcie=SYS", "link 0 3 nvlink=0 pcie=NODE", "link 1 2 nvlink=0 pcie=PHB",
		"link 1 3 nvlink=0 pcie=PXB", "link 2 3 nvlink=0 pcie=PIX"}
	each(t, spec, func(t *testing.T, m machine) {
		out := m.must("topo", "-m")
		wantAll(t, out, `(?m)^GPU0\t X \tNV12\tSYS\tNODE\t`, `(?m)^GPU1\tNV12\t X \tPHB\tPXB\t`,
			`(?m)^GPU3\tNODE\tPXB\tPIX\t X `)
		wantAll(t, m.must("nvlink", "-s"), `Link 11: 25 GB/s`)
	})
}

func TestSwitchedTopology(t *testing.T) {
	spec := []string{"gpu model=h100-80g count=3", "link 0 1 nvlink=18", "link 0 2 nvlink=18", "link 1 2 nvlink=18"}
	each(t, spec, func(t *testing.T, m machine) {
		wantAll(t, m.must("topo", "-m"), `(?m)^GPU0\t X \tNV18\tNV18`, `(?m)^GPU2\tNV18\tNV18\t X `)
	})
}

// A process has its context and what it allocated; the simulator's own count is the judge.
func TestProcesses(t *testing.T) {
	each(t, []string{"gpu model=a100-40g context=300Mi", "gpu model=t4"}, func(t *testing.T, m machine) {
		pid := m.load("--alloc", "plain:256Mi:2", "--hold", "60")
		const want = 300 + 512
		find := func() int {
			for _, row := range m.csv("--query-compute-apps=pid,used_memory,name") {
				if row[0] == strconv.Itoa(pid) {
					used, err := strconv.Atoi(row[1])
					if err != nil || !strings.HasSuffix(row[2], "gpuload") {
						t.Fatalf("row %q", row)
					}
					return used
				}
			}
			return -1
		}
		eventually(t, fmt.Sprintf("process %d with %d MiB", pid, want), func() bool { return find() == want })
		wantAll(t, m.must(), fmt.Sprintf(`0 +N/A +N/A +%d +C .*gpuload +%dMiB`, pid, want))
		rows := m.csv("--query-gpu=memory.used")
		if rows[0][0] != strconv.Itoa(want) || rows[1][0] != "0" {
			t.Errorf("memory.used %v, want [[%d] [0]]", rows, want)
		}
		if truth := m.truth(pid); truth != want*mib {
			t.Errorf("simctl counts %d bytes, nvidia-smi %d MiB", truth, want)
		}

		p, _ := os.FindProcess(pid)
		p.Kill()
		p.Wait()
		eventually(t, "memory back after kill -9", func() bool {
			return find() < 0 && m.csv("--query-gpu=memory.used")[0][0] == "0"
		})
	})
}

// truth is the simulator's own count of what a process holds, bytes.
func (m machine) truth(pid int) int64 {
	m.t.Helper()
	var total int64
	var procs []struct {
		Pid    int   `json:"pid"`
		Memory int64 `json:"memory"`
	}
	out := m.ctl("procs", "--json")
	if err := json.Unmarshal([]byte(out), &procs); err != nil {
		m.t.Fatalf("simctl procs --json: %v\n%s", err, out)
	}
	for _, p := range procs {
		if p.Pid == pid {
			total += p.Memory
		}
	}
	return total
}

// Kernels of 10 ms without a pause, alone: the GPU is busy nearly all the time; then two share it.
func TestUtilisation(t *testing.T) {
	each(t, []string{"gpu model=a100-40g"}, func(t *testing.T, m machine) {
		util := func() int {
			n, err := strconv.Atoi(m.csv("--query-gpu=utilization.gpu")[0][0])
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		if u := util(); u != 0 {
			t.Errorf("idle GPU: %d %%", u)
		}
		first := m.load("--kernel", "10ms", "--time", "60")
		eventually(t, "a busy GPU", func() bool { return util() >= 90 })
		second := m.load("--kernel", "10ms", "--time", "60")
		sm := func(pid int) int {
			return pmonRow(m.must("pmon", "-c", "1"), 0, pid)
		}
		eventually(t, "two processes share the GPU", func() bool {
			a, b := sm(first), sm(second)
			return a >= 30 && a <= 65 && b >= 30 && b <= 65
		})
	})
}

func TestHiddenProcesses(t *testing.T) {
	each(t, []string{"gpu model=a100-40g hide_processes=1"}, func(t *testing.T, m machine) {
		pid := m.load("--alloc", "plain:64Mi", "--hold", "60")
		eventually(t, "the memory is used", func() bool { return m.csv("--query-gpu=memory.used")[0][0] != "0" })
		out, _ := m.run()
		if strings.Contains(out, strconv.Itoa(pid)+" ") {
			t.Errorf("process %d is shown:\n%s", pid, out)
		}
	})
}

func TestLostGPU(t *testing.T) {
	each(t, []string{"gpu model=t4 count=2"}, func(t *testing.T, m machine) {
		m.must("-L")
		m.ctl("lose", "1")
		out, _ := m.run("-L")
		wantAll(t, out, `GPU 0: Tesla T4`, `GPU is lost`)
		if strings.Contains(out, "GPU 1: Tesla T4") {
			t.Errorf("the lost GPU is listed:\n%s", out)
		}
	})
}
