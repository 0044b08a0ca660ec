package driverview

import (
	"fmt"
	"slices"
	"strings"
)

// Report says what became of what was found. Its zero value is empty.
type Report struct {
	Taken   []Taken
	Skipped []Skipped
	// Missing are items of volume.conf for which nothing was found; most are not in every driver.
	Missing []string
	// Linked and Copied count the files that Build wrote, CopiedBytes what the copies take.
	Linked, Copied int
	CopiedBytes    int64
}

// Taken is a file of the host and what it is in the view.
type Taken struct{ HostPath, As string }

// Skipped is a file of the host that is not in the view.
type Skipped struct{ HostPath, Why string }

func (r *Report) take(path, as string) { r.Taken = append(r.Taken, Taken{path, as}) }

func (r *Report) skip(path, why string) {
	if s := (Skipped{path, why}); !slices.Contains(r.Skipped, s) {
		r.Skipped = append(r.Skipped, s)
	}
}

func (r *Report) lack(item string) { r.Missing = append(r.Missing, item) }

// String is the report for people, a line for each file.
func (r *Report) String() string {
	var b strings.Builder
	for _, t := range r.Taken {
		fmt.Fprintf(&b, "taken    %s as %s\n", t.HostPath, t.As)
	}
	for _, s := range r.Skipped {
		fmt.Fprintf(&b, "skipped  %s: %s\n", s.HostPath, s.Why)
	}
	if len(r.Missing) > 0 {
		fmt.Fprintf(&b, "missing  %s\n", strings.Join(r.Missing, " "))
	}
	if r.Linked+r.Copied > 0 {
		fmt.Fprintf(&b, "written  %d hard links, %d copies of %d MiB\n", r.Linked, r.Copied, r.CopiedBytes>>20)
	}
	return b.String()
}
