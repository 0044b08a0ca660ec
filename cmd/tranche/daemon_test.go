package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"tranche.dev/tranche/internal/ps"
	"tranche.dev/tranche/internal/sandbox"
)

// A process that was started when the supervisor had ended, and whose parent has ended too, keeps
// the slice: by its environment, or, without one, by its mounts.
func TestLateDaemon(t *testing.T) {
	for _, c := range []struct{ strict, env string }{{"off", "env"}, {"on", "env -i"}} {
		if err := sandbox.Probe(); err != nil && c.strict == "on" {
			t.Skip(err)
		}
		if _, err := os.Stat("/etc/ld.so.cache"); err != nil && c.strict == "on" {
			t.Skip("nothing to mount")
		}
		b, dir := newBox(t), t.TempDir()
		fifo, marker := filepath.Join(dir, "go"), filepath.Join(dir, "pid")
		if err := syscall.Mkfifo(fifo, 0o600); err != nil {
			t.Fatal(err)
		}
		// Two generations after the word, which is given when tranche run is gone.
		late := "read x <" + fifo + "; setsid " + c.env + " sh -c 'echo $$ >" + marker + "; exec sleep 60' &"
		out, state := b.run("run", "--sim", "t4", "--cores", "50", "--strict", c.strict, "--", "setsid", "--fork", "sh", "-c", "exec >/dev/null 2>&1 </dev/null; "+late)
		if state.ExitCode() != 0 {
			t.Fatal(out)
		}
		if err := exec.Command("sh", "-c", "echo now >"+fifo).Run(); err != nil {
			t.Fatal(err)
		}
		pid := 0
		rows := b.until("the late one alone", func(r []ps.Row) bool {
			text, _ := os.ReadFile(marker)
			pid, _ = strconv.Atoi(strings.TrimSpace(string(text)))
			return pid != 0 && len(r) == 1 && len(r[0].PIDs) == 1 && r[0].PIDs[0] == pid
		})
		if _, state := b.run("run", "--sim", "t4", "--cores", "60", "--", "true"); state.ExitCode() != 125 {
			t.Errorf("strict %s: what is reserved was given away: %+v", c.strict, rows)
		}
		_ = syscall.Kill(pid, syscall.SIGKILL)
		b.until("free again", func(r []ps.Row) bool { return len(r) == 0 })
	}
}
