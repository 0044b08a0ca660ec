package image

import (
	"os"
	"path/filepath"
	"runtime"

	"tranche.dev/tranche/internal/release"
)

// Glibc are libraries of glibc that driver libraries need and programs need not.
func Glibc() []string {
	return []string{"libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libgcc_s.so.1", "libstdc++.so.6"}
}

// Test has a shell and its tools, glibc, gpuload, nvidia-smi if it was fetched, and more programs. root is the repository's, where
// things were built.
func Test(root, name string, programs ...string) (Image, error) {
	programs = append([]string{"busybox", filepath.Join(root, "build/bin/gpuload")}, programs...)
	if smi := filepath.Join(root, "build/nvidia/535/nvidia-smi"); exists(smi) {
		programs = append(programs, smi)
	}
	layer, err := Userland(Glibc(), programs...)
	return Image{Name: name, Layers: []Layer{layer}}, err
}

// Tranche is the image that `make images` makes, of this machine's processor.
func Tranche(root, name string) (Image, error) {
	glibc := map[string]string{"amd64": "/lib/x86_64-linux-gnu", "arm64": "/lib/aarch64-linux-gnu"}[runtime.GOARCH]
	image, _, err := release.Image(
		release.Config{Name: name, Version: "1", Revision: "test", License: filepath.Join(root, "LICENSE")},
		release.Platform{Arch: runtime.GOARCH, Binary: filepath.Join(root, "build/bin/tranche"), Assets: filepath.Join(root, "internal/assets/files/SHA256SUMS"),
			Glibc: glibc, GlibcCopyright: "/usr/share/doc/libc6/copyright"})
	return image, err
}

// KubeScheduler has a kube-scheduler's static binary, as the official image has it.
func KubeScheduler(name, binary string) Image {
	return Image{Name: name, Layers: []Layer{{{To: "/usr/local/bin/kube-scheduler", From: binary, Mode: 0o755}, {To: "/tmp/", Mode: os.ModeSticky | 0o777}}}}
}
