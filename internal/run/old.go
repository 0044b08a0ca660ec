package run

import (
	"os"
	"path/filepath"
	"time"

	"tranche.dev/tranche/internal/assets"
	"tranche.dev/tranche/internal/driverfind"
)

// removeOldLibraries removes the libraries of slices whose record went without them, as at a reboot:
// the record is in memory, the libraries on a disk. A record may also be where we cannot see it (a
// home directory in several containers), hence only those that are old.
func removeOldLibraries(dir string) {
	for _, id := range assets.Old(dir, time.Now()) {
		slice, ours := driverfind.SliceOf(filepath.Join(dir, id, "lib", "libcuda.so.1"))
		if _, err := os.Stat(slice); !ours || os.IsNotExist(err) {
			_ = os.RemoveAll(filepath.Join(dir, id))
		}
	}
}
