package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"tranche.dev/tranche/internal/sandbox"
)

// forStrictness calls f with each value of --strict that this machine has.
func forStrictness(t *testing.T, f func(t *testing.T, strict string)) {
	t.Run("off", func(t *testing.T) { f(t, "off") })
	t.Run("on", func(t *testing.T) {
		if err := sandbox.Probe(); err != nil {
			t.Skip(err)
		}
		f(t, "on")
	})
}

// What the caller left open has the same numbers in the command, and nothing else is open.
func TestDescriptors(t *testing.T) {
	dir := t.TempDir()
	var files []*os.File // 3, not 4, 5
	for _, text := range []string{"three", "", "five"} {
		if text == "" {
			files = append(files, nil)
			continue
		}
		path := filepath.Join(dir, text)
		if err := os.WriteFile(path, []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		files = append(files, f)
	}
	script := []string{"sh", "-c", "cat /proc/self/fd/3 /proc/self/fd/5; " +
		"for f in /proc/$$/fd/*; do printf '%s ' ${f##*/}; done"} // no pipe, which would be a descriptor for a moment
	direct := exec.Command(script[0], script[1:]...)
	direct.ExtraFiles = files
	want, err := direct.Output()
	if err != nil || !strings.HasPrefix(string(want), "three\nfive\n0 ") {
		t.Fatalf("%v: %q", err, want)
	}
	forStrictness(t, func(t *testing.T, strict string) {
		cmd := newBox(t).command(append([]string{"run", "--sim", "t4", "--strict", strict, "--"}, script...)...)
		cmd.ExtraFiles = files
		if out, err := cmd.CombinedOutput(); err != nil || string(out) != string(want) {
			t.Errorf("%v: %q, want %q", err, out, want)
		}
	})
}

func TestStatusOfWhatCannotStart(t *testing.T) {
	forStrictness(t, func(t *testing.T, strict string) {
		b, dir := newBox(t), t.TempDir()
		for name, c := range map[string]struct {
			content string
			code    int
			want    string
		}{
			"no-interpreter-line": {"echo hi\n", 126, ": exec format error\n"},
			"bad-elf":             {"\x7fELFnothing", 126, ": exec format error\n"},
			"no-interpreter":      {"#!/no/such/program\n", 127, ": no such file or directory\n"},
		} {
			path := filepath.Join(dir, name)
			if err := os.WriteFile(path, []byte(c.content), 0o755); err != nil {
				t.Fatal(err)
			}
			out, state := b.run("run", "--sim", "t4", "--strict", strict, "--", path)
			if state.ExitCode() != c.code || out != "tranche: "+path+c.want {
				t.Errorf("%s: %d, %q", name, state.ExitCode(), out)
			}
		}
	})
}

// In a chroot "/" is no mount point, and root may make no user namespace.
func TestStrictInChroot(t *testing.T) {
	if os.Getuid() != 0 || sandbox.Probe() != nil {
		t.Skip("needs root with mount namespaces")
	}
	dir := t.TempDir()
	script := `set -e
for d in bin lib lib64 usr; do
	if test -L /$d; then cp -P /$d $R/; elif test -d /$d; then mkdir $R/$d; mount --bind /$d $R/$d; fi
done
mkdir $R/proc $R/dev $R/tmp $R/tmp/in $R/etc
cp /etc/ld.so.cache $R/etc/ || :
cp ` + program + ` $R/tmp/tranche
mount -t proc proc $R/proc
mount --rbind /dev $R/dev
set +e
chroot $R /bin/sh -c 'cd /tmp/in && TRANCHE_STATE_DIR=/tmp/s XDG_CACHE_HOME=/tmp/c ../tranche run --sim t4 --strict on -- sh -c "
	pwd; grep -c \" /etc/ld.so.cache \" /proc/self/mountinfo"'
echo outside $(grep -c /etc/ld.so.cache /proc/self/mountinfo)`
	if _, err := os.Stat("/etc/ld.so.cache"); err != nil {
		t.Skip("no loader's cache to be covered")
	}
	cmd := exec.Command("unshare", "-m", "--propagation", "private", "sh", "-c", "mount --make-rshared / && "+script)
	cmd.Env = append(os.Environ(), "R="+dir)
	out, err := cmd.CombinedOutput()
	if string(out) != "/tmp/in\n1\noutside 0\n" {
		t.Errorf("%v: %s", err, out)
	}
}
