// Package slice lays out what a tenant's processes load: patched copies of our two libraries in lib/,
// which goes first on the library path, and the driver's files under the names that ours ask for in
// driver/.
package slice

import (
	"bytes"
	"fmt"

	"tranche.dev/tranche/internal/tenant"
)

const (
	simMark  = "@@TRANCHE_SIM@@"
	simField = 256
)

// setField writes value behind a mark that must stand exactly once in the file, in a field of size
// bytes, and fills the rest with pad; keep says whether the mark itself stays.
func setField(file []byte, mark, value string, size int, pad byte, keep bool) error {
	at := bytes.Index(file, []byte(mark))
	if at < 0 || bytes.Count(file, []byte(mark)) != 1 {
		return fmt.Errorf("the library has %d marks %q, expected one", bytes.Count(file, []byte(mark)), mark)
	}
	if keep {
		value = mark + value
	}
	if len(value) >= size || at+size > len(file) {
		return fmt.Errorf("path %q is longer than %d bytes", value, size-1)
	}
	field := file[at : at+size]
	for i := copy(field, value); i < size; i++ {
		field[i] = pad
	}
	return nil
}

// patchOurs makes one of our libraries that of a slice. depth counts the slices around it: each
// asks for the driver by a name of its own, because the loader knows a file by its name and ours
// of an outer slice stands where the driver would.
func patchOurs(file []byte, sliceDir, driverDir string, depth int) error {
	if err := setField(file, tenant.SliceMark, sliceDir, tenant.SliceField, 0, true); err != nil {
		return err
	}
	// One byte less than the field, which is a string: its NUL stays.
	if err := setField(file, tenant.RpathMark, driverDir, tenant.RpathField, '/', false); err != nil {
		return err
	}
	for _, stem := range []string{"libcuda", "libnvidia-ml"} {
		old, renamed := driverName(stem, 0)+"\x00", driverName(stem, depth)+"\x00"
		copy(file, bytes.ReplaceAll(file, []byte(old), []byte(renamed)))
	}
	return nil
}

// MaxDepth bounds slices within slices; the names have one digit for it.
const MaxDepth = 8

// driverName is the name by which our library of this depth asks for what is beneath it.
func driverName(stem string, depth int) string {
	return fmt.Sprintf("%s-driver.so.%d", stem, depth+1)
}

// DepthOf reads from one of our files how many slices are around it; -1 if it cannot be told.
func DepthOf(file []byte) int {
	for depth := range MaxDepth + 1 {
		for _, stem := range []string{"libcuda", "libnvidia-ml"} {
			if bytes.Contains(file, []byte("\x00"+driverName(stem, depth)+"\x00")) {
				return depth
			}
		}
	}
	return -1
}

// PatchOurs writes into one of our library files where a tenant finds its slice and the driver, both
// as the tenant's processes see them. It changes file in place.
func PatchOurs(file []byte, sliceDir, driverDir string) error {
	return patchOurs(file, sliceDir, driverDir, 0)
}

// PatchSim writes into a file of the simulated driver where its machine is. It changes file in place.
func PatchSim(file []byte, dir string) error { return patchSim(file, dir) }

func patchSim(file []byte, dir string) error {
	return setField(file, simMark, dir, simField, 0, true)
}
