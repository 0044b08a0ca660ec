package allocation

import (
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"tranche.dev/tranche/internal/bypass"
	"tranche.dev/tranche/internal/gpu"
	"tranche.dev/tranche/internal/tenant"
	"tranche.dev/tranche/test/fixture"
)

// seen is what the watch said so far.
type seen struct {
	sync.Mutex
	began, ended []bypass.Violation
	foreign      []bypass.Foreign
	killed       []bypass.Killed
}

func (s *seen) get() seen {
	s.Lock()
	defer s.Unlock()
	return seen{began: s.began, ended: s.ended, foreign: s.foreign, killed: s.killed}
}

func (b *box) watch(kill bool) *seen {
	b.Helper()
	core := bypass.Config{Patience: time.Second, MemoryPatience: 2 * time.Second, Calm: time.Second, Slack: 512 << 20}
	w, err := bypass.NewWatch(bypass.WatchConfig{Core: core, Dir: b.store.config.Dir, Tenants: b.store.Tenants, Kill: kill, Every: 100 * time.Millisecond})
	if err != nil {
		b.Fatal(err)
	}
	out := &seen{}
	superviseStore(b, b.store, SuperviseConfig{Driver: b.driver(), Warn: func(id string, err error) { b.Errorf("%s: %v", id, err) },
		Report: func(r gpu.Report) {
			result, killed, looked, err := w.Take(r)
			if err != nil {
				b.Error(err)
			}
			out.Lock()
			defer out.Unlock()
			out.began, out.ended, out.killed = append(out.began, result.Began...), append(out.ended, result.Ended...), append(out.killed, killed...)
			if looked {
				out.foreign = result.Foreign
			}
		}})
	return out
}

const vendors = " --libcuda /usr/local/nvidia/driver/libcuda-driver.so.1"

// elsewhere leaves for a root file system that shows nothing of the slice.
const elsewhere = `N=/tmp/elsewhere; mkdir $N; mount -t tmpfs tmpfs $N
cd $N; mkdir -p old usr opt/build proc dev ./$TRANCHE_SIM_DIR; ln -s usr/bin usr/lib usr/lib64 .
for d in /usr /opt/build /proc /dev $TRANCHE_SIM_DIR; do mount --rbind $d .$d; done
pivot_root . old; umount -l /old; if grep tranche/slice /proc/self/mountinfo; then exit 3; fi
`

// A process in a tenant's container that opens the vendor's file by its path is found, also where it has left
// the container's mounts; one that does not is not; one that is no tenant's is told apart.
func TestBypass(t *testing.T) {
	b := newBox(t, GPU{Cores: 30, CoresLimited: true, Memory: 2 << 30, MemoryLimited: true, ContextBytes: 512 << 20})
	s := b.watch(false)
	b.start(gpuload + " --alloc plain:64Mi:4 --hold 60")
	b.until("the honest one", func(u Use) bool { return len(u.Processes) == 1 && u.Processes[0].HostPID != 0 })

	outside := exec.Command(fixture.Build("bin", "gpuload"), "--alloc", "plain:64Mi:4", "--hold", "60")
	outside.Env = append(os.Environ(), "LD_LIBRARY_PATH="+fixture.Build("sim"), "TRANCHE_SIM_DIR="+b.sim)
	if err := outside.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = outside.Process.Kill(); _ = outside.Wait() })
	end := b.start(gpuload + vendors + " --alloc plain:64Mi:4 --hold 60")
	await(t, func() bool { got := s.get(); return len(got.began) == 1 && len(got.foreign) == 1 }, func() string { return fmt.Sprintf("%+v", s.get()) })
	got := s.get()
	v, f := got.began[0], got.foreign[0]
	if v.Kind != bypass.Unregistered || v.Tenant != testID || v.GPU != fixture.SimUUID || command(v.PID) != "gpuload" || v.Used < 256<<20 {
		t.Errorf("%+v", v)
	}
	if u, _ := b.store.Use(testID); len(u.Processes) != 1 || u.Processes[0].HostPID == v.PID {
		t.Errorf("%+v", u)
	}
	if f.PID != outside.Process.Pid || f.Used < 256<<20 {
		t.Errorf("%+v", f)
	}
	end()
	await(t, func() bool { return len(s.get().ended) == 1 }, func() string { return fmt.Sprintf("%+v", s.get()) })

	b.start("unshare --user --map-root-user --mount sh -ec '" + elsewhere + "exec " + gpuload + vendors + " --alloc plain:64Mi:64 --hold 60'")
	await(t, func() bool { return len(s.get().began) == 3 }, func() string { return fmt.Sprintf("%+v", s.get()) })
	if v := s.get().began[2]; v.Kind != bypass.Limit || v.Tenant != testID || v.Used < 4<<30 || v.Allowed != 2<<30 {
		t.Errorf("%+v", v)
	}
}

// Where the admin wants it, it is ended, and nothing else.
func TestBypassKill(t *testing.T) {
	b := newBox(t, GPU{Cores: 30, CoresLimited: true, Memory: 2 << 30, MemoryLimited: true, ContextBytes: 512 << 20})
	s := b.watch(true)
	b.start(gpuload + " --alloc plain:64Mi:4 --hold 60")
	cmd := b.command(gpuload + vendors + " --alloc plain:64Mi:4 --hold 60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 128+int(syscall.SIGKILL) { // as its shell tells
		t.Errorf("%v", cmd.ProcessState)
	}
	await(t, func() bool { return len(s.get().killed) == 1 }, func() string { return fmt.Sprintf("%+v", s.get()) })
	if k := s.get().killed[0]; k.Err != nil || k.Kind != bypass.Unregistered {
		t.Errorf("%+v", k)
	}
	u := b.until("the honest one", func(u Use) bool { return len(u.Processes) == 1 && u.Processes[0].HostPID != 0 })
	if p, ok := tenant.Find(u.Processes[0].HostPID); !ok || p.Gone() {
		t.Error("the honest one was ended")
	}
}
