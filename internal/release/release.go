// Package release puts Tranche's image together from what was built: the binary, the little of glibc that the
// programs inside it need, and a list of what is in there. It never builds, downloads or pushes, and what it
// makes depends on nothing but the files it is given.
package release

import (
	"debug/buildinfo"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"tranche.dev/tranche/internal/ociimage"
)

// User is who an image runs as unless it is told otherwise; the node is, and runs as root.
const User = "65532:65532"

// Platform is what an image for one processor is made of.
type Platform struct {
	// Arch is Go's name of the processor.
	Arch string
	// Binary is the tranche command for it, with its libraries inside (make build).
	Binary string
	// Assets is the list of what it carries: lines "SHA-256  NAME", as embed.sh writes it.
	Assets string
	// Glibc is a directory with glibc's libraries for it, and GlibcCopyright the text that goes with them.
	Glibc, GlibcCopyright string
}

// Config is what all platforms have in common.
type Config struct {
	// Name is the image's with a tag.
	Name string
	// Version is Tranche's, Revision the commit's.
	Version, Revision string
	// Created is the commit's time, for the list of contents.
	Created time.Time
	// License is Tranche's, a file.
	License string
}

// layout is where a processor's loader and libraries are.
type layout struct{ loader, loaderDir, triplet string }

var layouts = map[string]layout{
	"amd64": {"ld-linux-x86-64.so.2", "/usr/lib64", "x86_64-linux-gnu"},
	"arm64": {"ld-linux-aarch64.so.1", "/usr/lib", "aarch64-linux-gnu"},
}

// Of glibc: what nvmlprobe, simctl and NVIDIA's libnvidia-ml load. The binary itself is static.
var glibc = []string{"libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"}

// Image is a platform's image and its list of contents (SPDX 2.3, JSON).
func Image(c Config, p Platform) (ociimage.Image, []byte, error) {
	var none ociimage.Image
	at, ok := layouts[p.Arch]
	if !ok {
		return none, nil, fmt.Errorf("processor %q: there are images for amd64 and arm64", p.Arch)
	}
	info, err := buildinfo.ReadFile(p.Binary)
	if err != nil {
		return none, nil, err
	}
	for key, want := range map[string]string{"GOOS": "linux", "GOARCH": p.Arch, "CGO_ENABLED": "0"} {
		if got := setting(info, key); got != want {
			return none, nil, fmt.Errorf("%s was built with %s=%s, want %s", p.Binary, key, got, want)
		}
	}
	version, err := glibcVersion(filepath.Join(p.Glibc, "libc.so.6"))
	if err != nil {
		return none, nil, err
	}
	list, err := sbom(c, p, info, version)
	if err != nil {
		return none, nil, err
	}
	base := ociimage.Layer{
		{To: "/bin", Link: "usr/bin"}, {To: "/lib", Link: "usr/lib"}, {To: "/lib64", Link: "usr/lib64"},
		{To: "/usr/bin/"}, {To: "/usr/lib64/"},
		{To: "/etc/passwd", Data: []byte("root:x:0:0:root:/:/usr/sbin/nologin\ntranche:x:65532:65532:tranche:/:/usr/sbin/nologin\n")},
		{To: "/etc/group", Data: []byte("root:x:0:\ntranche:x:65532:\n")},
		{To: "/run/"}, {To: "/var/run", Link: "/run"}, {To: "/tmp/", Mode: os.ModeSticky | 0o777},
		{To: at.loaderDir + "/" + at.loader, From: filepath.Join(p.Glibc, at.loader), Mode: 0o755},
		{To: "/usr/share/doc/libc6/copyright", From: p.GlibcCopyright, Mode: 0o644},
	}
	for _, name := range glibc {
		base = append(base, ociimage.File{To: "/usr/lib/" + at.triplet + "/" + name, From: filepath.Join(p.Glibc, name), Mode: 0o755})
	}
	return ociimage.Image{Name: c.Name, Arch: p.Arch, User: User, Entrypoint: []string{"/usr/bin/tranche"},
		Labels: map[string]string{
			"org.opencontainers.image.title":       "tranche",
			"org.opencontainers.image.description": "Slices of a GPU for containers",
			"org.opencontainers.image.version":     c.Version,
			"org.opencontainers.image.revision":    c.Revision,
			"org.opencontainers.image.licenses":    "Apache-2.0",
		},
		Layers: []ociimage.Layer{base, {
			{To: "/usr/bin/tranche", From: p.Binary, Mode: 0o755},
			{To: "/usr/share/doc/tranche/LICENSE", From: c.License, Mode: 0o644},
			{To: "/usr/share/doc/tranche/sbom.spdx.json", Data: list},
		}}}, list, nil
}

func setting(info *buildinfo.BuildInfo, key string) string {
	for _, s := range info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}

var glibcText = regexp.MustCompile(`GNU C Library \(([^)]*)\) stable release version ([0-9.]+[0-9])`)

// glibcVersion reads what a libc says of itself: "Debian GLIBC 2.36-9+deb12u14" or, without a maker's, "2.36".
func glibcVersion(libc string) (string, error) {
	data, err := os.ReadFile(libc)
	if err != nil {
		return "", err
	}
	m := glibcText.FindSubmatch(data)
	if m == nil {
		return "", fmt.Errorf("%s does not tell its version: no glibc?", libc)
	}
	if maker, version, ok := strings.Cut(string(m[1]), " GLIBC "); ok && maker == "Debian" {
		return version, nil
	}
	return string(m[2]), nil
}

// Write writes the archive with an image for each platform to dir/tranche.tar, and each one's list of contents
// beside it. It returns the files.
func Write(dir string, c Config, platforms []Platform) ([]string, error) {
	if c.Version == "" || !strings.Contains(c.Name, ":") {
		return nil, errors.New("an image needs a version, and a name with a tag")
	}
	var images []ociimage.Image
	var files []string
	for _, p := range platforms {
		i, list, err := Image(c, p)
		if err != nil {
			return nil, err
		}
		images = append(images, i)
		file := filepath.Join(dir, "tranche-"+p.Arch+".spdx.json")
		if err := os.WriteFile(file, list, 0o644); err != nil {
			return nil, err
		}
		files = append(files, file)
	}
	archive := filepath.Join(dir, "tranche.tar")
	return slices.Concat([]string{archive}, files), ociimage.Write(archive, images...)
}
