package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"tranche.dev/tranche/internal/gpu"
)

// faultsFile has the XIDs that made GPUs unhealthy, for the next node. Without it, or after a reboot, there are none: an
// admin who knows better than the driver removes it while no node runs.
const (
	faultsFile    = "tranche_node_faults.json"
	faultsVersion = 1
)

type faults struct {
	Version int `json:"version"`
	// Boot is the kernel's id of this boot, Driver the release of the driver.
	Boot   string      `json:"boot"`
	Driver string      `json:"driver"`
	Faults []gpu.Fault `json:"faults"`
}

func parseFaults(text []byte) (faults, error) {
	var f faults
	if err := json.Unmarshal(text, &f); err != nil {
		return faults{}, err
	}
	if f.Version != faultsVersion {
		return faults{}, fmt.Errorf("version %d, this is %d", f.Version, faultsVersion)
	}
	for _, x := range f.Faults {
		if x.UUID == "" || x.XID <= 0 {
			return faults{}, fmt.Errorf("XID %d of GPU %q", x.XID, x.UUID)
		}
	}
	return f, nil
}

// bootID is another at each boot; empty where the kernel does not tell.
func bootID() string {
	text, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(text))
}

func (n *Node) faultsPath() string { return filepath.Join(n.config.CheckpointDir, faultsFile) }

// recallFaults reads what the last node left, if the machine has not been booted since.
func (n *Node) recallFaults() faults {
	var f faults
	text, err := readBounded(n.faultsPath())
	if err == nil {
		f, err = parseFaults(text)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		n.log.Warn("faults of before are not known", "path", n.faultsPath(), "error", err)
	}
	if f.Boot != bootID() {
		return faults{}
	}
	for _, x := range f.Faults {
		n.log.Warn("unhealthy since before this start; remove the file while no node runs if it is fit", "gpu", x.UUID, "xid", x.XID, "path", n.faultsPath())
	}
	return f
}

// rememberFaults writes them for the next node.
func (n *Node) rememberFaults(list []gpu.Fault, driver string) {
	text, err := json.MarshalIndent(faults{Version: faultsVersion, Boot: bootID(), Driver: driver, Faults: list}, "", "  ")
	if err == nil {
		err = replaceFile(n.faultsPath(), text)
	}
	if err != nil {
		n.log.Warn("faults of GPUs cannot be remembered over a restart", "error", err)
	}
}
