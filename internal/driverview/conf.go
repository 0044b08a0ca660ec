package driverview

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"path"
	"strings"
)

// Volume is one view as volume.conf describes it.
type Volume struct {
	// Name is "nvidia" for what tenants get; any other is the vendor's driver as it is.
	Name string
	// Base is the directory that views are made in.
	Base string
	// Binaries are exact file names. A library is matched by its name up to .so: "libcuda.so" and
	// "libcuda" mean libcuda.so and libcuda.so.ANYTHING; a * at the end stands for any more
	// characters before the .so.
	Binaries, Libraries []string
}

// ShareVolume is the name of the volume that has our libraries in front.
const ShareVolume = "nvidia"

// What goes into views without a volume.conf: the original's list, and what drivers have had since.
//
//go:embed volume.conf
var defaultVolumes []byte

// ParseVolumes reads a volume.conf of gpu-manager: JSON, {"volume": [{"name", "base", "mode",
// "components": {"binaries": [], "libraries": []}}]}. Other keys, mode among them, mean nothing.
// Names of files that do not exist are fine. An item of the list with a slash in it is an error.
func ParseVolumes(data []byte) ([]Volume, error) {
	var doc struct {
		Volume []struct {
			Name       string `json:"name"`
			Base       string `json:"base"`
			Components struct {
				Binaries  []string `json:"binaries"`
				Libraries []string `json:"libraries"`
			} `json:"components"`
		} `json:"volume"`
	}
	if err := json.Unmarshal(data, &doc); err != nil {
		return nil, fmt.Errorf("volume.conf: %w", err)
	}
	if len(doc.Volume) == 0 {
		return nil, fmt.Errorf("volume.conf: no \"volume\" in it")
	}
	var out []Volume
	seen := map[string]bool{}
	for i, v := range doc.Volume {
		if !plainName(v.Name) || seen[v.Name] {
			return nil, fmt.Errorf("volume.conf: volume %d: name %q is empty, taken or not a file name", i, v.Name)
		}
		seen[v.Name] = true
		if !path.IsAbs(v.Base) {
			return nil, fmt.Errorf("volume.conf: volume %q: base %q is not an absolute path", v.Name, v.Base)
		}
		for _, item := range append(append([]string{}, v.Components.Binaries...), v.Components.Libraries...) {
			if !plainName(item) {
				return nil, fmt.Errorf("volume.conf: volume %q: %q is not a file name", v.Name, item)
			}
		}
		out = append(out, Volume{Name: v.Name, Base: path.Clean(v.Base), Binaries: v.Components.Binaries, Libraries: v.Components.Libraries})
	}
	return out, nil
}

// plainName is true of what can be the name of a file in a directory.
func plainName(s string) bool {
	return s != "" && s != "." && s != ".." && len(s) <= 255 && !strings.ContainsAny(s, "/\x00\n")
}

// matches says whether a file name is one of a library item.
func matches(item, name string) bool {
	item = strings.TrimSuffix(item, ".so")
	stem, suffix, ok := strings.Cut(name, ".so")
	if !ok || suffix != "" && suffix[0] != '.' {
		return false
	}
	if prefix, ok := strings.CutSuffix(item, "*"); ok {
		return strings.HasPrefix(stem, prefix)
	}
	return stem == item
}

// ParseExtraConfig reads gpu-manager's extra-config.json, {"default": {"devices": ["/dev/..."]}},
// and returns the device nodes that each container gets besides its GPUs. Other keys mean nothing.
func ParseExtraConfig(data []byte) (devices []string, err error) {
	var doc map[string]struct {
		Devices []string `json:"devices"`
	}
	if err := json.Unmarshal(data, &doc); err != nil {
		return nil, fmt.Errorf("extra-config: %w", err)
	}
	for _, dev := range doc["default"].Devices {
		if path.Clean(dev) != dev || !strings.HasPrefix(dev, "/dev/") || strings.ContainsAny(dev, "\x00\n") {
			return nil, fmt.Errorf("extra-config: device %q is not a clean path below /dev", dev)
		}
	}
	return doc["default"].Devices, nil
}
