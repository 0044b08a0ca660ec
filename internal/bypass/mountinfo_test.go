package bypass

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

const sample = `21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
33 21 0:25 / /dev/shm rw,nosuid - tmpfs tmpfs rw
34 21 0:25 /node\040vm /srv/vm rw shared:7 master:2 - tmpfs tmpfs rw
40 21 0:25 /node\040vm/0123/limits\134x /etc/tranche/slice ro,nosuid - tmpfs tmpfs rw
41 21 0:25 /node\040vm/4567//deleted /etc/tranche/slice2 ro,nosuid - tmpfs tmpfs rw
42 21 0:26 /node\040vm/89ab /etc/tranche/slice3 ro,nosuid - tmpfs tmpfs rw
`

func TestMounts(t *testing.T) {
	mounts, err := ParseMounts([]byte(sample))
	if err != nil || len(mounts) != 6 || mounts[2] != (Mount{"0:25", "/node vm", "/srv/vm"}) || mounts[3].Root != `/node vm/0123/limits\x` {
		t.Fatalf("%+v %v", mounts, err)
	}
	for dir, want := range map[string]string{
		"/srv/vm":    "{0:25 /node vm} true",
		"/srv/vm/a":  "{0:25 /node vm/a} true",
		"/srv/vmx":   "{254:0 /srv/vmx} true",
		"/dev/shm":   "{0:25 } true",
		"/dev/shm/x": "{0:25 /x} true",
	} {
		p, ok := placeOf(mounts, dir)
		if got := fmt.Sprint(p, ok); got != want {
			t.Errorf("%s: %s; want %s", dir, got, want)
		}
	}
	// Of another file system, or deeper than an entry: not ours.
	p, _ := placeOf(mounts, "/srv/vm")
	if name, ok := p.entryOf(mounts); name != "4567" || !ok {
		t.Errorf("%q %v", name, ok)
	}
	if name, ok := p.entryOf(mounts[:4]); ok {
		t.Errorf("%q", name)
	}
	for bad, want := range map[string]string{
		"21 1 254:0 / /\n":                         "5 fields",
		strings.Replace(sample, `\040`, `\04`, 1):  "is no escape",
		strings.Replace(sample, `\040`, `\777`, 1): "is no escape",
		strings.Replace(sample, `\134x`, `\1`, 1):  "cut short",
	} {
		if _, err := ParseMounts([]byte(bad)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want %s", bad, err, want)
		}
	}
	own, err := mountsOf(os.Getpid())
	if err != nil || len(own) == 0 {
		t.Errorf("%+v %v", own, err)
	}
}

func FuzzMounts(f *testing.F) {
	for _, seed := range []string{"", sample, `1 2 3:4 \ / a b c d e`, `1 2 3:4 /\040 /\ a - b c d`} {
		f.Add([]byte(seed), "/srv/vm/x")
	}
	f.Fuzz(func(t *testing.T, data []byte, dir string) {
		mounts, err := ParseMounts(data)
		if err != nil {
			return
		}
		if strings.Count(string(data), "\n") > len(mounts) {
			t.Errorf("%d mounts of %q", len(mounts), data)
		}
		p, ok := placeOf(mounts, dir)
		if name, is := p.entryOf(mounts); ok && is && (name == "" || strings.Contains(name, "/")) {
			t.Errorf("%q", name)
		}
	})
}
