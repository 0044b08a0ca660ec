package ociimage

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// entries reads a tar into lines "mode name -> link: content".
func entries(t *testing.T, r io.Reader) (lines []string, content map[string][]byte) {
	t.Helper()
	content = map[string][]byte{}
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return lines, content
		}
		if err != nil {
			t.Fatal(err)
		}
		if content[h.Name], err = io.ReadAll(in); err != nil {
			t.Fatal(err)
		}
		line := fmt.Sprintf("%04o %s", h.Mode, h.Name)
		if h.Linkname != "" {
			line += " -> " + h.Linkname
		}
		lines = append(lines, line)
	}
}

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "program")
	if err := os.WriteFile(program, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	i := Image{Name: "example.org/a/b:7", Entrypoint: []string{"/usr/bin/x", "y"}, Env: []string{"A=b"}, Layers: []Layer{
		{{To: "/usr/bin/x", From: program}, {To: "/bin", Link: "usr/bin"}, {To: "/tmp/", Mode: os.ModeSticky | 0o777}, {To: "/etc/a", Data: []byte("a")}},
		{{To: "/etc/b", Data: []byte("b"), Mode: 0o600}},
	}}
	var files [2][]byte
	for n := range files {
		file := filepath.Join(dir, fmt.Sprint(n))
		if err := Write(file, i); err != nil {
			t.Fatal(err)
		}
		var err error
		if files[n], err = os.ReadFile(file); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(files[0], files[1]) {
		t.Error("the same image gave other bytes")
	}

	_, blobs := entries(t, bytes.NewReader(files[0]))
	type ref struct {
		Digest    string
		Size      int
		MediaType string
	}
	// get finds a blob and checks its name.
	get := func(r ref) []byte {
		blob := blobs["blobs/sha256/"+strings.TrimPrefix(r.Digest, "sha256:")]
		if got := fmt.Sprintf("sha256:%x", sha256.Sum256(blob)); got != r.Digest || len(blob) != r.Size {
			t.Fatalf("%s: %d bytes with %s, want %d", r.Digest, len(blob), got, r.Size)
		}
		return blob
	}
	decode := func(text []byte, v any) {
		if err := json.Unmarshal(text, v); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
	}
	var index struct {
		Manifests []struct {
			ref
			Annotations map[string]string
		}
	}
	decode(blobs["index.json"], &index)
	if len(index.Manifests) != 1 || index.Manifests[0].Annotations["io.containerd.image.name"] != i.Name {
		t.Fatalf("index %s", blobs["index.json"])
	}
	var manifest struct {
		Config ref
		Layers []ref
	}
	decode(get(index.Manifests[0].ref), &manifest)
	var config struct {
		Config struct{ Entrypoint, Env []string }
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	decode(get(manifest.Config), &config)
	if got := fmt.Sprint(config.Config); got != "{[/usr/bin/x y] [PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin A=b]}" {
		t.Errorf("config %s", got)
	}
	var got strings.Builder
	for n, l := range manifest.Layers {
		if config.RootFS.DiffIDs[n] != l.Digest {
			t.Errorf("layer %d: diff id %s, digest %s", n, config.RootFS.DiffIDs[n], l.Digest)
		}
		lines, _ := entries(t, bytes.NewReader(get(l)))
		fmt.Fprintf(&got, "%s\n\n", strings.Join(lines, "\n"))
	}
	want := `0777 bin -> usr/bin
0755 etc/
0644 etc/a
1777 tmp/
0755 usr/
0755 usr/bin/
0755 usr/bin/x

0755 etc/
0600 etc/b

`
	if got.String() != want {
		t.Errorf("layers\n%swant\n%s", got.String(), want)
	}
}

func TestWriteErrors(t *testing.T) {
	tests := []struct {
		name string
		file File
		want string
	}{
		{"relative", File{To: "a"}, `"a" is not an absolute path`},
		{"twice", File{To: "/b"}, "/b is there twice"},
		{"missing", File{To: "/c", From: "/no/such/file"}, "no such file"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "x.tar")
			err := Write(file, Image{Name: "x:1", Layers: []Layer{{{To: "/b"}, test.file}}})
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q", err, test.want)
			}
			if left, err := os.ReadDir(filepath.Dir(file)); len(left) > 0 || err != nil {
				t.Errorf("left %v, %v", left, err)
			}
		})
	}
}

// Images for two processors share an index, and a layer that both have is there once.
func TestWriteSeveral(t *testing.T) {
	file := filepath.Join(t.TempDir(), "x.tar")
	common := Layer{{To: "/etc/common", Data: []byte("c")}}
	of := func(arch string) Image {
		return Image{Name: "example.org/a:2", Arch: arch, User: "65532", Labels: map[string]string{"k": "v"},
			Layers: []Layer{common, {{To: "/bin/x", Data: []byte(arch), Mode: 0o755}}}}
	}
	if err := Write(file, of("amd64"), of("arm64")); err != nil {
		t.Fatal(err)
	}
	in, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	lines, blobs := entries(t, in)
	if len(lines) != 10 { // 3 layers, 2 configurations, 2 manifests, their index, index.json, oci-layout
		t.Errorf("entries %q", lines)
	}
	type manifest struct {
		MediaType, Digest string
		Annotations       map[string]string
		Platform          map[string]string
	}
	read := func(name string, v any) {
		text, ok := blobs[strings.Replace(name, "sha256:", "blobs/sha256/", 1)]
		if !ok {
			t.Fatalf("no %s", name)
		}
		if err := json.Unmarshal(text, v); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
	}
	var top, index struct{ Manifests []manifest }
	read("index.json", &top)
	if len(top.Manifests) != 1 || top.Manifests[0].MediaType != indexType || top.Manifests[0].Annotations["io.containerd.image.name"] != "example.org/a:2" {
		t.Fatalf("top %+v", top)
	}
	read(top.Manifests[0].Digest, &index)
	var got []string
	for _, m := range index.Manifests {
		var image struct{ Config struct{ Digest string } }
		read(m.Digest, &image)
		var config struct {
			Architecture string
			Config       struct {
				User   string
				Labels map[string]string
			}
		}
		read(image.Config.Digest, &config)
		got = append(got, fmt.Sprint(m.Platform, config))
	}
	want := "map[architecture:amd64 os:linux] {amd64 {65532 map[k:v]}} map[architecture:arm64 os:linux] {arm64 {65532 map[k:v]}}"
	if strings.Join(got, " ") != want {
		t.Errorf("got  %s\nwant %s", strings.Join(got, " "), want)
	}
	for _, bad := range [][]Image{{}, {of("amd64"), of("amd64")}, {of("amd64"), {Name: "other:1", Arch: "arm64"}}} {
		if err := Write(filepath.Join(t.TempDir(), "y.tar"), bad...); err == nil {
			t.Errorf("written: %+v", bad)
		}
	}
}
