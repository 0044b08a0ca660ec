package release

import (
	"archive/tar"
	"bytes"
	"debug/buildinfo"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// programs are small static ones with a module in them, in place of tranche, by processor: they need no
// libraries. They are built once.
var programs map[string]string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "release-*")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	programs = map[string]string{}
	for arch := range layouts {
		programs[arch] = filepath.Join(dir, arch)
		cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", programs[arch], "./testdata/program")
		cmd.Env = append(os.Environ(), "GOOS=linux", "GOARCH="+arch, "CGO_ENABLED=0")
		if text, err := cmd.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "%v\n%s", err, text)
			return 1
		}
	}
	return m.Run()
}

// fake is a Platform and a Config over files that stand in for glibc.
func fake(t *testing.T, arch string) (Config, Platform) {
	t.Helper()
	dir := t.TempDir()
	put := func(name, text string) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return file
	}
	for _, name := range append(slices.Clone(glibc), layouts[arch].loader) {
		put(name, "\x00GNU C Library (Debian GLIBC 2.36-9+deb12u14) stable release version 2.36.\n\x00"+name)
	}
	sum := strings.Repeat("ab", 32)
	return Config{Name: "example.org/tranche:1.2.3", Version: "1.2.3", Revision: "abc", Created: time.Unix(1700000000, 0), License: put("LICENSE", "free")},
		Platform{Arch: arch, Binary: programs[arch], Assets: put("SHA256SUMS", sum+"  lib/libcuda.so.1\n"+sum+"  bin/nvmlprobe\n"), Glibc: dir, GlibcCopyright: put("copyright", "LGPL")}
}

func TestImage(t *testing.T) {
	c, p := fake(t, "arm64")
	image, list, err := Image(c, p)
	if err != nil {
		t.Fatal(err)
	}
	var files []string
	for _, l := range image.Layers {
		for _, f := range l {
			files = append(files, f.To)
		}
	}
	want := []string{"/bin", "/lib", "/lib64", "/usr/bin/", "/usr/lib64/", "/etc/passwd", "/etc/group", "/run/", "/var/run", "/tmp/",
		"/usr/lib/ld-linux-aarch64.so.1", "/usr/share/doc/libc6/copyright",
		"/usr/lib/aarch64-linux-gnu/libc.so.6", "/usr/lib/aarch64-linux-gnu/libdl.so.2", "/usr/lib/aarch64-linux-gnu/libm.so.6",
		"/usr/lib/aarch64-linux-gnu/libpthread.so.0", "/usr/lib/aarch64-linux-gnu/librt.so.1",
		"/usr/bin/tranche", "/usr/share/doc/tranche/LICENSE", "/usr/share/doc/tranche/sbom.spdx.json"}
	if !slices.Equal(files, want) {
		t.Errorf("files\n%q\nwant\n%q", files, want)
	}
	if image.User != "65532:65532" || image.Labels["org.opencontainers.image.version"] != "1.2.3" {
		t.Errorf("user %s, labels %v", image.User, image.Labels)
	}
	var d document
	if err := json.Unmarshal(list, &d); err != nil {
		t.Fatal(err)
	}
	var got []string
	ids := map[string]bool{}
	for _, k := range d.Packages {
		locator := ""
		if len(k.External) > 0 {
			locator = " " + k.External[0].Locator
		}
		got = append(got, k.Name+" "+k.Version+locator)
		ids[k.ID] = true
	}
	info, err := buildinfo.ReadFile(p.Binary)
	if err != nil || len(info.Deps) == 0 {
		t.Fatal(err, info)
	}
	wanted := []string{"tranche 1.2.3", "stdlib " + strings.TrimPrefix(runtime.Version(), "go") + " pkg:golang/stdlib@" + strings.TrimPrefix(runtime.Version(), "go")}
	for _, m := range info.Deps {
		wanted = append(wanted, m.Path+" "+m.Version+" pkg:golang/"+m.Path+"@"+m.Version)
	}
	wanted = append(wanted, "lib/libcuda.so.1 1.2.3", "bin/nvmlprobe 1.2.3", "glibc 2.36-9+deb12u14 pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=arm64")
	if !slices.Equal(got, wanted) {
		t.Errorf("contents\n%q\nwant\n%q", got, wanted)
	}
	if len(ids) != len(d.Packages) || len(d.Relationships) != len(d.Packages) || d.Creation.Created != "2023-11-14T22:13:20Z" {
		t.Errorf("%d ids, %d relationships of %d packages, %s", len(ids), len(d.Relationships), len(d.Packages), d.Creation.Created)
	}
}

func TestImageRefuses(t *testing.T) {
	c, p := fake(t, "amd64")
	tests := map[string]struct {
		change func(*Platform)
		want   string
	}{
		"another processor's binary": {func(p *Platform) { p.Arch = "arm64" }, "GOARCH=amd64, want arm64"},
		"no such processor":          {func(p *Platform) { p.Arch = "riscv64" }, "amd64 and arm64"},
		"no binary":                  {func(p *Platform) { p.Binary = p.Assets }, "not"},
		"no glibc":                   {func(p *Platform) { p.Glibc = t.TempDir() }, "no such file"},
		"no list of what it carries": {func(p *Platform) { p.Assets = c.License }, "no sum and name"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			q := p
			test.change(&q)
			if _, _, err := Image(c, q); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q", err, test.want)
			}
		})
	}
}

// The same files give the same archive, and the programs in it are for the processors that it says.
func TestWrite(t *testing.T) {
	c, amd := fake(t, "amd64")
	_, arm := fake(t, "arm64")
	var archives [2][]byte
	for i := range archives {
		dir := t.TempDir()
		files, err := Write(dir, c, []Platform{amd, arm})
		if err != nil {
			t.Fatal(err)
		}
		if archives[i], err = os.ReadFile(files[0]); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(archives[0], archives[1]) {
		t.Error("the same files gave other bytes")
	}
	checkArchive(t, archives[0])
}

// TestBuilt looks at what `make images` made, where it did.
func TestBuilt(t *testing.T) {
	archive, err := os.ReadFile("../../build/image/tranche.tar")
	if err != nil {
		t.Skip("no archive: make images")
	}
	checkArchive(t, archive)
}

// checkArchive wants the program for amd64 and arm64 in an archive's layers.
func checkArchive(t *testing.T, archive []byte) {
	t.Helper()
	blobs := map[string][]byte{}
	each(t, archive, func(name string, content []byte) { blobs[name] = content })
	read := func(digest string, v any) {
		if err := json.Unmarshal(blobs["blobs/sha256/"+strings.TrimPrefix(digest, "sha256:")], v); err != nil {
			t.Fatalf("%s: %v", digest, err)
		}
	}
	type manifest struct {
		Digest   string
		Platform struct{ Architecture string }
	}
	var top, index struct{ Manifests []manifest }
	if err := json.Unmarshal(blobs["index.json"], &top); err != nil {
		t.Fatal(err)
	}
	read(top.Manifests[0].Digest, &index)
	got := map[string]elf.Machine{}
	for _, m := range index.Manifests {
		var image struct{ Layers []struct{ Digest string } }
		read(m.Digest, &image)
		for _, l := range image.Layers {
			each(t, blobs["blobs/sha256/"+strings.TrimPrefix(l.Digest, "sha256:")], func(name string, content []byte) {
				if name != "usr/bin/tranche" {
					return
				}
				f, err := elf.NewFile(bytes.NewReader(content))
				if err != nil {
					t.Fatal(err)
				}
				for _, p := range f.Progs {
					if p.Type == elf.PT_INTERP {
						t.Errorf("%s: the binary needs a loader", m.Platform.Architecture)
					}
				}
				got[m.Platform.Architecture] = f.Machine
			})
		}
	}
	if len(got) != 2 || got["amd64"] != elf.EM_X86_64 || got["arm64"] != elf.EM_AARCH64 {
		t.Errorf("programs %v", got)
	}
}

func each(t *testing.T, archive []byte, f func(string, []byte)) {
	t.Helper()
	for in := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(in)
		if err != nil {
			t.Fatal(err)
		}
		f(h.Name, content)
	}
}
