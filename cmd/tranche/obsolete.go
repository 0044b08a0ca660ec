package main

import (
	"fmt"
	"io"
	"log/slog"

	"github.com/spf13/pflag"
)

// obsoleteFlag is one of the originals' that means nothing here. Instead says why not, or what does.
type obsoleteFlag struct {
	name, instead string
	boolean       bool
}

// addObsolete accepts the flags, and does not list them.
func addObsolete(set *pflag.FlagSet, flags []obsoleteFlag) {
	for _, o := range flags {
		if o.boolean {
			set.Bool(o.name, false, "")
		} else {
			set.String(o.name, "", "")
		}
		set.Lookup(o.name).Hidden = true
	}
}

// warnObsolete is a warning for each of the flags that was given.
func warnObsolete(set *pflag.FlagSet, flags []obsoleteFlag) (warnings []string) {
	for _, o := range flags {
		if set.Changed(o.name) {
			warnings = append(warnings, fmt.Sprintf("--%s has no meaning any more: %s", o.name, o.instead))
		}
	}
	return warnings
}

// daemonLog is where a daemon says what it does, after the warnings about its flags. klog's 0 to 4 are what
// happens to pods and GPUs, from 5 on every step.
func daemonLog(w io.Writer, verbosity int, warnings []string) *slog.Logger {
	level := slog.LevelInfo
	if verbosity >= 5 {
		level = slog.LevelDebug
	}
	log := slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level}))
	for _, text := range warnings {
		log.Warn(text)
	}
	return log
}
