package machine

import (
	"fmt"
	"path/filepath"

	"tranche.dev/tranche/internal/state"
)

// Chosen is Registries, or with --sim the one of that simulated machine, made or not.
func Chosen(sim string) (map[string]*state.Registry, error) {
	all := Registries()
	if sim == "" {
		return all, nil
	}
	dir, err := SimDir(sim)
	if err != nil {
		return nil, fmt.Errorf("--sim %s: %w", sim, err)
	}
	if r := all[dir]; r != nil {
		return map[string]*state.Registry{dir: r}, nil
	}
	// A machine in a directory of the user's own is not among those of the state directory.
	return map[string]*state.Registry{dir: {Root: filepath.Join(dir, "slices")}}, nil
}
