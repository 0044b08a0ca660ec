package assets

import (
	"os"
	"path/filepath"
	"regexp"
	"time"
)

// keep is how long the files of another version stay after their last use.
const keep = 30 * 24 * time.Hour

var hexName = regexp.MustCompile(`^[0-9a-f]{16}$`)

// use marks this version's directory as used today, and once a day calls for what is old.
func use(base string) {
	dir := filepath.Join(base, Version())
	now := time.Now()
	if info, err := os.Stat(dir); err != nil || now.Sub(info.ModTime()) < 24*time.Hour && now.After(info.ModTime()) {
		return
	}
	if os.Chtimes(dir, now, now) == nil {
		removeOld(base, now)
	}
}

// removeOld removes the files of other versions that were not used for long.
func removeOld(base string, now time.Time) {
	for _, name := range Old(base, now) {
		if name != Version() {
			_ = os.RemoveAll(filepath.Join(base, name))
		}
	}
}

// Old lists the directories in dir that are named by 16 hexadecimal digits, as all of ours are, and
// have not changed for 30 days.
func Old(dir string, now time.Time) []string {
	entries, _ := os.ReadDir(dir)
	var out []string
	for _, e := range entries {
		info, err := e.Info()
		if err == nil && info.IsDir() && hexName.MatchString(e.Name()) && now.Sub(info.ModTime()) > keep {
			out = append(out, e.Name())
		}
	}
	return out
}

// Slices is the directory for the libraries of slices, below Home.
func Slices() (string, error) {
	base, err := Home()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(base, "slices")
	return dir, ownDir(dir, 0o711)
}

// ownDir makes a directory in one that only this user writes to; whatever else has its name goes.
func ownDir(dir string, mode os.FileMode) error {
	info, err := os.Lstat(dir)
	if err == nil && (!info.IsDir() || !ownedByMe(info)) {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	if err := os.Mkdir(dir, mode); err != nil && !os.IsExist(err) {
		return err
	}
	if err == nil && info.Mode().Perm() == mode {
		return nil
	}
	return os.Chmod(dir, mode)
}
