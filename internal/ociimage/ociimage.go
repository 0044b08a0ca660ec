// Package ociimage writes container images as OCI archives from files of this machine: no registry, no
// container tool, no root. The same files give the same bytes, whenever and wherever. It never reads an
// archive. The format is the OCI image layout 1.0 in a tar, as containerd, podman, skopeo and crane take it.
package ociimage

import (
	"archive/tar"
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
)

// Image is one platform's image.
type Image struct {
	// Name with a tag, such as "tranche.local/pause:1".
	Name string
	// Arch is Go's name of the processor; default this machine's.
	Arch       string
	Entrypoint []string
	// User is "UID" or "UID:GID"; default root.
	User string
	// Env has NAME=value beside a PATH.
	Env    []string
	Labels map[string]string
	Layers []Layer
}

// Layer is a list of files. Directories that they need are added.
type Layer []File

// File is one of a layer: a copy of From, else Data, a link if Link is set, or a directory if To ends
// with a slash. To is absolute.
type File struct {
	To   string
	From string
	Link string
	Data []byte
	Mode os.FileMode // permissions; 0 is From's, 0755 for directories and 0644 for Data
}

// Write writes images of one name, each for another processor, to a file, in place at once.
func Write(file string, images ...Image) (err error) {
	if len(images) == 0 {
		return errors.New("no image to write")
	}
	tmp, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file))
	if err != nil {
		return err
	}
	defer func() {
		_ = tmp.Close()
		if err != nil {
			_ = os.Remove(tmp.Name())
		}
	}()
	if err := write(tmp, images); err != nil {
		return fmt.Errorf("image %s: %w", images[0].Name, err)
	}
	if err := tmp.Chmod(0o644); err != nil {
		return err
	}
	if err := tmp.Close(); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), file)
}

const (
	indexType    = "application/vnd.oci.image.index.v1+json"
	manifestType = "application/vnd.oci.image.manifest.v1+json"
	configType   = "application/vnd.oci.image.config.v1+json"
	layerType    = "application/vnd.oci.image.layer.v1.tar"

	defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

type object = map[string]any

// archive is the tar; blobs that are in it already, as layers that images share, are left out.
type archive struct {
	*tar.Writer
	have map[string]bool
}

func write(w io.Writer, images []Image) error {
	out := archive{tar.NewWriter(w), map[string]bool{}}
	manifests := []object{}
	seen := map[string]bool{}
	for _, i := range images {
		i.Arch = cmp.Or(i.Arch, runtime.GOARCH)
		if i.Name != images[0].Name || seen[i.Arch] {
			return fmt.Errorf("%s for %s is beside it: one name, and each processor once", i.Name, i.Arch)
		}
		seen[i.Arch] = true
		manifest, err := out.image(i)
		if err != nil {
			return err
		}
		manifests = append(manifests, manifest)
	}
	top := manifests[0]
	if len(images) > 1 {
		var err error
		if top, err = out.blob(indexType, object{"schemaVersion": 2, "mediaType": indexType, "manifests": manifests}); err != nil {
			return err
		}
	}
	name := images[0].Name
	top["annotations"] = object{"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name[strings.LastIndex(name, ":")+1:]}
	index, err := json.Marshal(object{"schemaVersion": 2, "mediaType": indexType, "manifests": []object{top}})
	if err != nil {
		return err
	}
	if err := out.add("index.json", index); err != nil {
		return err
	}
	if err := out.add("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return err
	}
	return out.Close()
}

// image writes an image's blobs and describes its manifest.
func (a *archive) image(i Image) (object, error) {
	var diffs []string
	layers := []object{}
	for _, l := range i.Layers {
		digest, size, err := measure(l)
		if err != nil {
			return nil, err
		}
		diffs = append(diffs, "sha256:"+digest)
		layers = append(layers, descriptor(layerType, digest, size))
		if a.have[digest] {
			continue
		}
		a.have[digest] = true
		if err := a.WriteHeader(blobHeader(digest, size)); err != nil {
			return nil, err
		}
		if err := l.write(a); err != nil {
			return nil, err
		}
	}
	run := object{"Entrypoint": i.Entrypoint, "Env": append([]string{defaultPath}, i.Env...)}
	if i.User != "" {
		run["User"] = i.User
	}
	if len(i.Labels) > 0 {
		run["Labels"] = i.Labels
	}
	config, err := a.blob(configType, object{"architecture": i.Arch, "os": "linux", "created": "1970-01-01T00:00:00Z",
		"rootfs": object{"type": "layers", "diff_ids": diffs}, "config": run})
	if err != nil {
		return nil, err
	}
	manifest, err := a.blob(manifestType, object{"schemaVersion": 2, "mediaType": manifestType, "config": config, "layers": layers})
	if err != nil {
		return nil, err
	}
	manifest["platform"] = object{"architecture": i.Arch, "os": "linux"}
	return manifest, nil
}

func (a *archive) blob(kind string, content any) (object, error) {
	text, err := json.Marshal(content)
	if err != nil {
		return nil, err
	}
	digest := fmt.Sprintf("%x", sha256.Sum256(text))
	return descriptor(kind, digest, int64(len(text))), a.add("blobs/sha256/"+digest, text)
}

func (a *archive) add(name string, content []byte) error {
	if err := a.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))}); err != nil {
		return err
	}
	_, err := a.Write(content)
	return err
}

func blobHeader(digest string, size int64) *tar.Header {
	return &tar.Header{Name: "blobs/sha256/" + digest, Typeflag: tar.TypeReg, Mode: 0o644, Size: size}
}

func descriptor(kind, digest string, size int64) object {
	return object{"mediaType": kind, "digest": "sha256:" + digest, "size": size}
}

// measure writes a layer to nowhere, for its digest and size: layers may be larger than memory.
func measure(l Layer) (digest string, size int64, err error) {
	m := meter{Hash: sha256.New()}
	err = l.write(&m)
	return fmt.Sprintf("%x", m.Sum(nil)), m.size, err
}

type meter struct {
	hash.Hash
	size int64
}

func (m *meter) Write(p []byte) (int, error) {
	m.size += int64(len(p))
	return m.Hash.Write(p)
}

func (l Layer) write(out io.Writer) error {
	w := tar.NewWriter(out)
	files := append(Layer(nil), l...)
	sort.SliceStable(files, func(i, j int) bool { return files[i].To < files[j].To })
	dirs := map[string]bool{"/": true}
	var mkdir func(dir string, mode os.FileMode) error
	mkdir = func(dir string, mode os.FileMode) error {
		if dirs[dir] {
			return nil
		}
		dirs[dir] = true
		if err := mkdir(path.Dir(dir), 0o755); err != nil {
			return err
		}
		return w.WriteHeader(&tar.Header{Name: dir[1:] + "/", Typeflag: tar.TypeDir, Mode: unixMode(mode)})
	}
	last := ""
	for _, f := range files {
		if !path.IsAbs(f.To) {
			return fmt.Errorf("%q is not an absolute path", f.To)
		}
		if f.To == last {
			return fmt.Errorf("%s is there twice", f.To)
		}
		last = f.To
		var err error
		if strings.HasSuffix(f.To, "/") {
			err = mkdir(path.Clean(f.To), orMode(f.Mode, 0o755))
		} else if err = mkdir(path.Dir(f.To), 0o755); err == nil {
			err = f.write(w)
		}
		if err != nil {
			return err
		}
	}
	return w.Close()
}

func (f File) write(w *tar.Writer) error {
	name := f.To[1:]
	if f.Link != "" {
		return w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: f.Link, Mode: 0o777})
	}
	var content io.Reader = bytes.NewReader(f.Data)
	size, mode := int64(len(f.Data)), orMode(f.Mode, 0o644)
	if f.From != "" {
		in, err := os.Open(f.From)
		if err != nil {
			return err
		}
		defer in.Close()
		info, err := in.Stat()
		if err != nil {
			return err
		}
		content, size, mode = in, info.Size(), orMode(f.Mode, info.Mode())
	}
	if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: unixMode(mode), Size: size}); err != nil {
		return err
	}
	_, err := io.CopyN(w, content, size)
	return err
}

func orMode(mode, other os.FileMode) os.FileMode {
	if mode == 0 {
		return other
	}
	return mode
}

func unixMode(mode os.FileMode) int64 {
	m := int64(mode.Perm())
	if mode&os.ModeSticky != 0 {
		m |= 0o1000
	}
	return m
}
