// Bench measures `tranche node` on 8 simulated GPUs of 141 GiB under a kubelet of the tests': what kubelet waits for a
// pod's calls, in turn with those of a plugin that does nothing, and what the node takes while nothing happens.
// Usage: node TRANCHE [JSON]
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"tranche.dev/tranche/bench/report"
	"tranche.dev/tranche/internal/kubelet/kubelettest"
)

const (
	core    = "tencent.com/vcuda-core"
	memory  = "tencent.com/vcuda-memory"
	pods    = 20 // tenants that the node has meanwhile
	rounds  = 300
	settle  = 35 * time.Second // until what the burst of calls took was given back
	idleFor = 30 * time.Second
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: node TRANCHE [JSON]")
		os.Exit(2)
	}
	if os.Args[1] == "bare" && len(os.Args) == 3 {
		if err := serveBare(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, "bench node, control:", err)
			os.Exit(1)
		}
		return
	}
	rows, err := bench(os.Args[1])
	if err == nil && len(os.Args) > 2 {
		err = report.Write(os.Args[2], rows)
	}
	missed := report.Print(os.Stdout, rows)
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench node:", err)
	}
	if err != nil || missed > 0 {
		os.Exit(1)
	}
}

func bench(tranche string) (rows []report.Row, err error) {
	dir, err := os.MkdirTemp("/dev/shm", "bn")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	k, err := kubelettest.New(dir, 1)
	if err != nil {
		return nil, err
	}
	defer k.Stop()
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.CommandContext(ctx, tranche, "node", "--sim", "h200-141g:8", "--sim-dir", filepath.Join(dir, "sim"), "--device-plugin-path", k.Dir,
		"--pod-resources-socket", k.Resources, "--pods-api-socket", k.Pods, "--virtual-manager-path", filepath.Join(dir, "vm"),
		"--view-path", filepath.Join(dir, "view"), "--checkpoint-path", filepath.Join(dir, "ckpt"), "--display-socket", filepath.Join(dir, "d.sock"),
		"--query-port", strconv.Itoa(port), "--kubeconfig", "/none", "--hostname-override", "bench")
	cmd.Stderr = log
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	defer func() {
		cancel()
		if waitErr := cmd.Wait(); waitErr != nil && !errors.Is(waitErr, context.Canceled) && err == nil {
			text, _ := os.ReadFile(log.Name())
			err = fmt.Errorf("tranche node: %w\n%s", waitErr, text)
		}
	}()
	k.Meter = onCPUOf(cmd.Process.Pid)
	debug.SetGCPercent(1000) // what measures should not be what is measured
	within, stop := context.WithTimeout(ctx, 60*time.Second)
	defer stop()
	if err := k.Registered(within, core, memory); err != nil {
		text, _ := os.ReadFile(log.Name())
		return nil, fmt.Errorf("%w\n%s", err, text)
	}
	label := fmt.Sprintf("sim: %d core and %d memory IDs", k.Healthy(core), k.Healthy(memory))
	nothing, end, err := startBare(ctx, filepath.Join(dir, "bare"))
	if end != nil {
		end = sync.OnceValue(end)
		defer end()
	}
	if err != nil {
		return nil, err
	}
	both := []*kubelettest.Kubelet{k, nothing}
	names := [][2]string{{core, memory}, {bareCore, bareMemory}}
	for i := range pods + rounds {
		for n, k := range both {
			uid, err := admit(ctx, k, i, names[n])
			if err != nil {
				return nil, err
			}
			if i >= pods {
				k.Delete(uid)
			}
		}
	}
	label += "; load average " + load()
	for _, call := range []string{"GetPreferredAllocation", "Allocate", "PreStartContainer"} {
		target := 5.0
		if call == "PreStartContainer" {
			target = 100
		}
		for _, q := range []float64{0.5, 0.99} {
			for n, k := range both {
				for _, of := range []struct {
					name   string
					values []time.Duration
				}{{"", k.Waits()[call]}, {"CPU ", k.Spent()[call]}} {
					slices.Sort(of.values)
					row := report.Row{Case: call, Metric: fmt.Sprintf("%sp%g", of.name, 100*q), Unit: "ms", Value: at(of.values, q), Label: label}
					if n == 0 {
						row.Target, row.Better = target, "lower"
					} else {
						row.Case += " of a plugin that does nothing"
					}
					rows = append(rows, row)
				}
			}
		}
	}
	if err := end(); err != nil {
		return rows, err
	}
	idle, err := idle(cmd.Process.Pid, port)
	for i := range idle {
		idle[i].Label = label
	}
	return append(rows, idle...), err
}

func at(sorted []time.Duration, q float64) float64 {
	return float64(sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]) / float64(time.Millisecond)
}

// idle waits and sees what the node and its probes take meanwhile, scraped once.
func idle(pid, port int) ([]report.Row, error) {
	time.Sleep(settle)
	if err := scrape(port); err != nil {
		return nil, err
	}
	before, began := onCPUs(pid), time.Now()
	time.Sleep(idleFor)
	spent, took := onCPUs(pid)-before, time.Since(began)
	rss, err := memoryOf(pid)
	if err != nil {
		return nil, err
	}
	return []report.Row{{Case: "idle", Metric: "CPU", Unit: "%", Value: 100 * spent.Seconds() / took.Seconds(), Target: 1, Better: "lower"},
		{Case: "idle", Metric: "RSS", Unit: "MB", Value: float64(rss) / 1e6, Target: 60, Better: "lower"}}, nil
}

func scrape(port int) error {
	r, err := http.Get(fmt.Sprintf("http://localhost:%d/metrics", port))
	if err != nil {
		return err
	}
	defer r.Body.Close()
	_, err = io.Copy(io.Discard, r.Body)
	return err
}

func onCPUOf(pid int) func() time.Duration {
	return func() time.Duration { return onCPU(pid) }
}

// onCPU is the processor time of a process, by the scheduler's own count of its threads, which is exact
// (/proc/PID/task/TID/schedstat, first field: nanoseconds). A thread that ended meanwhile is left out.
func onCPU(pid int) (total time.Duration) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	for _, file := range files {
		data, _ := os.ReadFile(file)
		text, _, _ := strings.Cut(string(data), " ")
		n, _ := strconv.ParseInt(text, 10, 64)
		total += time.Duration(n)
	}
	return total
}

// onCPUs is that of a process and of the children that it has now.
func onCPUs(pid int) time.Duration {
	total := onCPU(pid)
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range files {
		data, _ := os.ReadFile(file)
		// The second field after the name, which may have any character, is the parent (proc_pid_stat(5)).
		fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
		if len(fields) > 1 && fields[1] == strconv.Itoa(pid) {
			child, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			total += onCPU(child)
		}
	}
	return total
}

// load is the machine's: what else runs on it shows in what kubelet waits, not in what the calls cost.
func load() string {
	data, _ := os.ReadFile("/proc/loadavg")
	text, _, _ := strings.Cut(string(data), " ")
	return text
}

func memoryOf(pid int) (int64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		if text, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseInt(strings.Fields(text)[0], 10, 64)
			return kib << 10, err
		}
	}
	return 0, errors.New("no VmRSS")
}

func admit(ctx context.Context, k *kubelettest.Kubelet, i int, resources [2]string) (types.UID, error) {
	name := fmt.Sprintf("pod-%d", i)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "bench", UID: types.UID(name), CreationTimestamp: metav1.Now()},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{
			corev1.ResourceName(resources[0]): *resource.NewQuantity(int64(10+i%5*5), resource.DecimalSI), corev1.ResourceName(resources[1]): *resource.NewQuantity(int64(20+i%7*10), resource.DecimalSI)}}}}}}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := k.Admit(ctx, pod); err != nil {
		return pod.UID, err
	}
	_, err := k.StartContainer(ctx, pod.UID, "c")
	return pod.UID, err
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "localhost:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
