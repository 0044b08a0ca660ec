package allocation

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

const (
	recordFile    = "record.json"
	recordVersion = 1
	recordMax     = 64 << 10
)

// sealed is the record's file: SHA-256 is that of the record's own bytes. There is no fsync: what a loss of
// power tears is noticed by the sum, no container of that time runs any more, and the next one's binding
// makes it anew.
type sealed struct {
	Version int             `json:"version"`
	SHA256  string          `json:"sha256"`
	Record  json.RawMessage `json:"record"`
}

func encodeRecord(r Record) ([]byte, error) {
	body, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(body)
	return json.Marshal(sealed{Version: recordVersion, SHA256: hex.EncodeToString(sum[:]), Record: body})
}

// decodeRecord takes nothing that encodeRecord cannot have written.
func decodeRecord(data []byte) (Record, error) {
	var s sealed
	var r Record
	if err := json.Unmarshal(data, &s); err != nil {
		return r, err
	}
	if s.Version != recordVersion {
		return r, fmt.Errorf("version %d, not %d", s.Version, recordVersion)
	}
	if sum := sha256.Sum256(s.Record); hex.EncodeToString(sum[:]) != s.SHA256 {
		return r, errors.New("its checksum is wrong")
	}
	if err := json.Unmarshal(s.Record, &r); err != nil {
		return r, err
	}
	if !idPattern.MatchString(r.ID) || r.Serial == 0 {
		return r, fmt.Errorf("binding %d of %q", r.Serial, r.ID)
	}
	return r, check(r.Owner, r.GPUs)
}

func readRecord(dir string) (Record, error) {
	path := filepath.Join(dir, recordFile)
	f, err := os.Open(path)
	if err != nil {
		return Record{}, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, recordMax))
	if err != nil {
		return Record{}, err
	}
	r, err := decodeRecord(data)
	if err != nil {
		return Record{}, fmt.Errorf("%s is damaged: %w", path, err)
	}
	return r, nil
}

// writeRecord puts the record in place at once.
func writeRecord(dir string, r Record) error {
	data, err := encodeRecord(r)
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, ".record")
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(dir, recordFile))
}
