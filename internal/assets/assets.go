// Package assets holds what the binary carries: the two libraries that go into a tenant's
// processes, the simulated driver, and nvmlprobe. They are unpacked into a directory of the user's
// own that is named by their content, and every file is verified by its SHA-256 at each use: a
// damaged or foreign file is replaced, never used.
package assets

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Names of the assets.
const (
	CUDA      = "lib/libcuda.so.1"
	NVML      = "lib/libnvidia-ml.so.1"
	SimCUDA   = "sim/libcuda.so.1"
	SimNVML   = "sim/libnvidia-ml.so.1"
	SimCtl    = "sim/simctl"
	NVMLProbe = "bin/nvmlprobe"
)

//go:embed files
var files embed.FS

const sumsFile = "files/SHA256SUMS"

// ErrMissing says that the binary was built without its libraries.
var ErrMissing = errors.New("this tranche binary was built without its libraries (plain `go build`); build it with `make build`")

// sums maps asset names to their SHA-256; empty in a binary without assets.
var sums = sync.OnceValue(func() map[string]string {
	out := map[string]string{}
	list, _ := files.ReadFile(sumsFile)
	for line := range strings.Lines(string(list)) {
		if sum, name, ok := strings.Cut(strings.TrimSpace(line), "  "); ok {
			out[name] = sum
		}
	}
	return out
})

// Version identifies the set of assets; "" for a binary without them.
func Version() string {
	list, err := files.ReadFile(sumsFile)
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(list)
	return hex.EncodeToString(sum[:8])
}

// Read returns an asset's content.
func Read(name string) ([]byte, error) {
	want, ok := sums()[name]
	if !ok {
		return nil, ErrMissing
	}
	packed, err := files.ReadFile("files/" + name + ".gz")
	if err != nil {
		return nil, ErrMissing
	}
	r, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, fmt.Errorf("asset %s: %w", name, err)
	}
	data, err := io.ReadAll(r)
	if err == nil && sumOf(data) != want {
		err = errors.New("content does not match its sum")
	}
	if err != nil {
		return nil, fmt.Errorf("asset %s: %w", name, err)
	}
	return data, nil
}

// Path returns a file with the asset's content, executable, in the user's own directory. It
// verifies the file and replaces it when it is not what it should be.
func Path(name string) (string, error) {
	want, ok := sums()[name]
	if !ok {
		return "", ErrMissing
	}
	base, err := Home()
	if err != nil {
		return "", err
	}
	path := filepath.Join(base, Version(), name)
	for _, dir := range []string{filepath.Join(base, Version()), filepath.Dir(path)} {
		if err := ownDir(dir, 0o700); err != nil {
			return "", err
		}
	}
	use(base)
	if matches(path, want) {
		return path, nil
	}
	if info, err := os.Lstat(path); err == nil && info.IsDir() {
		if err := os.RemoveAll(path); err != nil {
			return "", err
		}
	}
	data, err := Read(name)
	if err != nil {
		return "", err
	}
	if err := WriteFile(path, data, 0o700); err != nil {
		return "", err
	}
	if !matches(path, want) {
		return "", fmt.Errorf("%s: the file system does not keep what was written", path)
	}
	return path, nil
}

func matches(path, want string) bool {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() || info.Mode().Perm() != 0o700 || !ownedByMe(info) {
		return false
	}
	h := sha256.New()
	_, err = io.Copy(h, f)
	return err == nil && hex.EncodeToString(h.Sum(nil)) == want
}

// WriteFile puts a file in place at once (rename), whatever the umask.
func WriteFile(path string, data []byte, mode os.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Chmod(mode)
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

func sumOf(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}
