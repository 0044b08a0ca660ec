package state

import "testing"

func TestLooks(t *testing.T) {
	const id = "0123456789abcdef"
	for _, c := range []struct {
		what string
		l    looks
		want bool
	}{
		{"first on the library path", looks{environment: []byte("A=1\x00LD_LIBRARY_PATH=/c/tranche/slices/" + id + "/lib:/x\x00")}, true},
		{"the end of the environment", looks{environment: []byte("LD_LIBRARY_PATH=/c/tranche/slices/" + id + "/lib\x00")}, true},
		{"the loader's cache mounted", looks{mounts: []byte("107 87 254:0 /c/tranche/slices/" + id + "/ld.so.cache /etc/ld.so.cache rw - ext4 /dev/vda rw\n")}, true},
		{"a library mapped", looks{maps: []byte("7f00-7f01 r-xp 0 fe:00 1 /c/tranche/slices/" + id + "/lib/libcuda.so.1\n")}, true},
		{"the ledger mapped, as by tranche ps", looks{maps: []byte("7f00-7f01 rw-s 0 fe:00 1 /dev/shm/tranche-sim-0/1/slices/" + id + "/ledger\n")}, false},
		{"the name alone", looks{environment: []byte("X=" + id + "\x00")}, false},
		{"another slice", looks{environment: []byte("LD_LIBRARY_PATH=/c/tranche/slices/1123456789abcdef/lib\x00")}, false},
		{"nothing to be read", looks{}, false},
	} {
		if got := c.l.has(id); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
}
