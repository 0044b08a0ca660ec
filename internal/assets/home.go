package assets

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// pathMax leaves room for what is put below Home within the fields of the library files.
const pathMax = 150

// Home is the user's own directory for files that are executed or loaded: the first of the
// candidates that is ours, writable, and not mounted noexec.
var Home = sync.OnceValues(func() (string, error) {
	var tried []string
	for _, dir := range Candidates() {
		err := usable(dir)
		if err == nil {
			return dir, nil
		}
		tried = append(tried, err.Error())
	}
	return "", fmt.Errorf("no directory for the libraries; set XDG_CACHE_HOME to one that can be written and is not mounted noexec\n%s",
		strings.Join(tried, "\n"))
})

// Candidates lists the places for Home, best first. All of a user's runs must agree on it, so it
// depends on nothing else.
func Candidates() []string {
	var out []string
	if dir := os.Getenv("XDG_CACHE_HOME"); filepath.IsAbs(dir) {
		out = append(out, filepath.Join(dir, "tranche"))
	}
	uid := os.Getuid()
	if uid == 0 {
		// Reachable for commands that root starts under another user.
		out = append(out, "/var/cache/tranche")
	}
	if dir, err := os.UserHomeDir(); err == nil && filepath.IsAbs(dir) {
		out = append(out, filepath.Join(dir, ".cache", "tranche"))
	}
	for _, tmp := range []string{"/tmp", "/var/tmp"} {
		out = append(out, fmt.Sprintf("%s/tranche-%d", tmp, uid))
	}
	return out
}

// usable makes dir if need be and checks it. Files are loaded from it, so nobody else may be able
// to write to it.
func usable(dir string) error {
	// The path goes into library files, LD_LIBRARY_PATH and DT_RPATH.
	if strings.ContainsAny(dir, ":;$\n") || len(dir) > pathMax {
		return fmt.Errorf("%s: not a path that the loader can take", dir)
	}
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if !info.IsDir() || !ownedByMe(info) {
		return fmt.Errorf("%s: not a directory of this user", dir)
	}
	if info.Mode().Perm() != 0o711 {
		if err := os.Chmod(dir, 0o711); err != nil {
			return err
		}
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	if fs.Flags&unix.ST_NOEXEC != 0 {
		return fmt.Errorf("%s: mounted noexec", dir)
	}
	if err := unix.Access(dir, unix.W_OK|unix.X_OK); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	return nil
}

func ownedByMe(info os.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(st.Uid) == os.Getuid()
}
