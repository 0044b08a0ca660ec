package node

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"tranche.dev/tranche/internal/node/books"
)

// The checkpoint is a cache: kubelet and the allocations' directories hold all that matters. It has what they do
// not tell: IDs of init containers, the device nodes that containers got, driver views that are in use.
const (
	checkpointFile    = "tranche_node_checkpoint"
	checkpointVersion = 1
	checkpointMax     = 16 << 20
	saveEvery         = 500 * time.Millisecond // once something changed it is written at once, and then after this
	// originalFile is gpu-manager's.
	originalFile = "gpumanager_internal_checkpoint"
)

type checkpoint struct {
	Held     []books.Held      `json:"held,omitempty"`
	Minors   map[string][]int  `json:"minors,omitempty"`
	Views    map[string]string `json:"views,omitempty"`
	Imported []imported        `json:"imported,omitempty"`
	// Looked: gpu-manager's checkpoint was looked for.
	Looked bool `json:"looked"`
}

// imported is a container that gpu-manager had placed; it counts as somebody else's until its pod is gone.
type imported struct {
	UID    string `json:"uid"`
	Minor  int    `json:"minor"`
	Cores  int    `json:"cores"`
	Memory uint64 `json:"memory"`
}

type sealed struct {
	Version int             `json:"version"`
	Sum     string          `json:"sha256"`
	Data    json.RawMessage `json:"data"`
}

func encodeCheckpoint(c checkpoint) ([]byte, error) {
	data, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	// A sealed, without another pass over data.
	return fmt.Appendf(nil, `{"version":%d,"sha256":"%x","data":%s}`, checkpointVersion, sha256.Sum256(data), data), nil
}

func decodeCheckpoint(text []byte) (checkpoint, error) {
	var s sealed
	var c checkpoint
	if err := json.Unmarshal(text, &s); err != nil {
		return c, err
	}
	if s.Version != checkpointVersion {
		return c, fmt.Errorf("version %d, this is %d", s.Version, checkpointVersion)
	}
	if sum := sha256.Sum256(s.Data); s.Sum != hex.EncodeToString(sum[:]) {
		return c, errors.New("the checksum does not fit")
	}
	if err := json.Unmarshal(s.Data, &c); err != nil {
		return checkpoint{}, err
	}
	for _, h := range c.Held {
		if h.Resource != books.Core && h.Resource != books.Memory {
			return checkpoint{}, fmt.Errorf("resource %d", h.Resource)
		}
	}
	return c, nil
}

// parseOriginal reads gpu-manager's checkpoint.
func parseOriginal(text []byte) ([]imported, error) {
	var doc struct {
		PodGPUMapping map[string]map[string]struct {
			Devices []string
			Cores   int
			Memory  uint64
		}
	}
	if err := json.Unmarshal(text, &doc); err != nil {
		return nil, err
	}
	var out []imported
	for uid, containers := range doc.PodGPUMapping {
		for _, c := range containers {
			for _, d := range c.Devices {
				digits, ok := strings.CutPrefix(d, "/dev/nvidia")
				minor, err := strconv.Atoi(digits)
				if !ok || err != nil || minor < 0 || minor > 1024 || c.Cores < 0 || c.Cores > 100*1024 {
					return nil, fmt.Errorf("device %q with %d cores", d, c.Cores)
				}
				out = append(out, imported{UID: uid, Minor: minor, Cores: min(c.Cores, 100), Memory: c.Memory / uint64(len(c.Devices))})
			}
		}
	}
	return out, nil
}

func (n *Node) checkpointPath() string { return filepath.Join(n.config.CheckpointDir, checkpointFile) }

func readBounded(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err == nil && info.Size() > checkpointMax {
		err = fmt.Errorf("%s: %d bytes, more than %d", path, info.Size(), checkpointMax)
	}
	if err != nil {
		return nil, err
	}
	return os.ReadFile(path)
}

// recall reads the checkpoint. One that is missing or damaged is no error.
func (n *Node) recall() {
	var c checkpoint
	text, err := readBounded(n.checkpointPath())
	if err == nil {
		c, err = decodeCheckpoint(text)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		n.log.Warn("the checkpoint is not used", "path", n.checkpointPath(), "error", err)
	}
	if !c.Looked {
		c.Imported = n.importOriginal()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.imported, n.lastHeld = c.Imported, c.Held
	for id, m := range c.Minors {
		n.minors[id] = m
	}
	for id, v := range c.Views {
		n.views[id] = v
	}
}

func (n *Node) importOriginal() []imported {
	path := filepath.Join(n.config.CheckpointDir, originalFile)
	text, err := readBounded(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var out []imported
	if err == nil {
		out, err = parseOriginal(text)
	}
	if err != nil {
		n.log.Warn("gpu-manager's checkpoint is not used", "path", path, "error", err)
		return nil
	}
	n.log.Info("pods of gpu-manager keep their GPUs until they end", "containers' GPUs", len(out))
	return out
}

// recalled are the IDs that the last node's notes have. The lock is held.
func (n *Node) recalled() []books.Held {
	out := n.lastHeld
	n.lastHeld = nil
	return out
}

// save has the checkpoint written soon.
func (n *Node) save() {
	select {
	case n.dirty <- struct{}{}:
	default:
	}
}

func (n *Node) saving(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			n.saveNow()
			return
		case <-n.dirty:
		}
		n.saveNow()
		select {
		case <-ctx.Done():
		case <-time.After(saveEvery):
		}
	}
}

// replaceFile writes beside and renames: what is in it need not survive a power failure, but must not be half there.
func replaceFile(path string, text []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// saveNow writes what is known now.
func (n *Node) saveNow() {
	n.mu.Lock()
	c := checkpoint{Minors: maps.Clone(n.minors), Views: maps.Clone(n.views), Imported: n.imported, Looked: true, Held: slices.Clone(n.lastHeld)}
	for _, t := range n.books.Tenants() {
		for res, ids := range t.IDs {
			if t.Pod != nil && len(ids) > 0 {
				c.Held = append(c.Held, books.Held{Namespace: t.Pod.Namespace, Pod: t.Pod.Name, Container: t.Container, Resource: books.Resource(res), IDs: ids})
			}
		}
	}
	n.mu.Unlock()
	text, err := encodeCheckpoint(c)
	if err == nil {
		err = replaceFile(n.checkpointPath(), text)
	}
	if err != nil {
		n.log.Warn("the checkpoint cannot be written", "error", err)
	}
}
