package bed

import (
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestHierarchies(t *testing.T) {
	tests := []struct {
		name, cgroup, mountinfo string
		dirs                    []string // below ROOT
		want                    []hierarchy
	}{
		{
			name: "version 2, a session of systemd",
			cgroup: `0::/user.slice/session-1.scope
`,
			mountinfo: `22 1 8:1 / / rw - ext4 /dev/root rw
35 24 0:30 / ROOT/cg rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate
`,
			dirs: []string{"cg/user.slice/session-1.scope"},
			want: []hierarchy{{"", "ROOT/cg", "ROOT/cg/user.slice/session-1.scope"}},
		},
		{
			name: "version 2, in a container that sees its own part",
			cgroup: `0::/
`,
			mountinfo: `35 24 0:30 / ROOT/cg ro,nosuid - cgroup2 cgroup rw
`,
			want: []hierarchy{{"", "ROOT/cg", "ROOT/cg"}},
		},
		{
			name: "version 1 and an empty version 2, joined controllers, one nested",
			cgroup: `9:name=systemd:/
4:memory:/a/b
3:cpu,cpuacct:/
2:cpuset:/
0::/
`,
			mountinfo: `31 23 0:28 / ROOT/cg rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / ROOT/cg/cpu,cpuacct rw - cgroup cgroup rw,cpuacct,cpu
35 31 0:32 / ROOT/cg/memory rw - cgroup cgroup rw,memory
40 31 0:37 / ROOT/cg/systemd rw - cgroup cgroup rw,xattr,name=systemd
41 31 0:38 / ROOT/cg/unified rw - cgroup2 cgroup2 rw
`,
			dirs: []string{"cg/memory/a/b"},
			want: []hierarchy{
				{"name=systemd", "ROOT/cg/systemd", "ROOT/cg/systemd"},
				{"memory", "ROOT/cg/memory", "ROOT/cg/memory/a/b"},
				{"cpu,cpuacct", "ROOT/cg/cpu,cpuacct", "ROOT/cg/cpu,cpuacct"},
				{"", "ROOT/cg/unified", "ROOT/cg/unified"},
			},
		},
		{
			name: "a container of docker with version 1: its part is mounted, its path is the host's",
			cgroup: `4:memory:/docker/0123
3:cpuset:/elsewhere
2:pids:/../x
`,
			mountinfo: `35 31 0:32 /docker/0123 ROOT/cg/memory rw - cgroup cgroup rw,memory
36 31 0:33 /docker/0123 ROOT/cg/cpuset rw - cgroup cgroup rw,cpuset
37 31 0:34 / ROOT/cg/pids rw - cgroup cgroup rw,pids
`,
			want: []hierarchy{
				{"memory", "ROOT/cg/memory", "ROOT/cg/memory"},
				{"cpuset", "ROOT/cg/cpuset", "ROOT/cg/cpuset"},
				{"pids", "ROOT/cg/pids", "ROOT/cg/pids"},
			},
		},
		{name: "nothing mounted", cgroup: "0::/\n", mountinfo: "22 1 8:1 / / rw - ext4 /dev/root rw\n"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			root := t.TempDir()
			for _, d := range append(test.dirs, "cg/unified", "cg/memory", "cg/cpuset", "cg/pids", "cg/systemd", "cg/cpu,cpuacct") {
				if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			got := hierarchies(test.cgroup, strings.ReplaceAll(test.mountinfo, "ROOT", root))
			for i := range got {
				got[i].mount = strings.ReplaceAll(got[i].mount, root, "ROOT")
				got[i].own = strings.ReplaceAll(got[i].own, root, "ROOT")
			}
			if !reflect.DeepEqual(got, test.want) {
				t.Errorf("got  %v\nwant %v", got, test.want)
			}
		})
	}
}

// A version 2 cgroup with a process in it, as a container's own: it is made to take children with
// controllers by moving the process into one. Tried in the host's own hierarchy, wherever it is.
func TestDelegate(t *testing.T) {
	unable(t, able())
	cgroup, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(hierarchies(string(cgroup), string(mountinfo)), func(h hierarchy) bool { return h.controllers == "" })
	if i < 0 {
		t.Skip("version 2 is not mounted here")
	}
	dir, err := os.MkdirTemp(hierarchies(string(cgroup), string(mountinfo))[i].own, "bed-test-")
	if err != nil {
		t.Skipf("no cgroup can be made: %v", err)
	}
	t.Cleanup(func() {
		if err := removeCgroups([]string{dir}, 10*time.Second); err != nil {
			t.Error(err)
		}
	})
	sleep := exec.Command("sleep", "1000")
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sleep.Process.Kill(); _ = sleep.Wait() })
	pid := strconv.Itoa(sleep.Process.Pid)
	if err := join(dir, pid); err != nil {
		t.Fatal(err)
	}
	for range 2 { // a second bed finds it done
		if err := delegate(dir); err != nil {
			t.Fatal(err)
		}
	}
	read := func(file string) string {
		text, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(text))
	}
	if got := read("cgroup.procs"); got != "" {
		t.Errorf("processes %q are in the cgroup itself", got)
	}
	if got := read("bed-host/cgroup.procs"); got != pid {
		t.Errorf("processes in its child: %q, want %s", got, pid)
	}
	// There are none where version 1 has them.
	if on, all := read("cgroup.subtree_control"), read("cgroup.controllers"); on != all {
		t.Errorf("controllers %q of %q are on", on, all)
	}
}
