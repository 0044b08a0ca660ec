package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"tranche.dev/tranche/test/e2e/image"
)

// The images, all of them with pull policy Never.
const (
	testImageName    = "tranche.local/test:1"    // a shell and its tools, glibc, gpuload, and nvidia-smi if it was fetched
	ffmpegImageName  = "tranche.local/ffmpeg:1"  // the same and ffmpeg, 250 MB
	trancheImageName = "tranche.local/tranche:1" // build/bin/tranche and glibc
)

// root is the repository's.
const root = "../.."

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

// testImage, ffmpegImage and trancheImage write a tar for bed.Config.Images or Machine.ImportImage.
func testImage(t testing.TB) (string, error) {
	return made(t)(image.Test(root, testImageName))
}

func ffmpegImage(t testing.TB) (string, error) {
	return made(t)(image.Test(root, ffmpegImageName, "ffmpeg"))
}

// made writes an image that could be made.
func made(t testing.TB) func(image.Image, error) (string, error) {
	return func(i image.Image, err error) (string, error) {
		if err != nil {
			return "", err
		}
		file := filepath.Join(t.TempDir(), "image.tar")
		return file, image.Write(file, i)
	}
}

// trancheImage has glibc for the programs that tranche carries, as the image that is released.
func trancheImage(t testing.TB) (string, error) {
	layer, err := image.Userland(image.Glibc(), "../../build/bin/tranche", "../../build/bin/nvmlprobe")
	return made(t)(image.Image{Name: trancheImageName, Entrypoint: []string{"/usr/bin/tranche"}, Layers: []image.Layer{layer}}, err)
}

// What the images are for runs in them.
func TestImages(t *testing.T) {
	b := shared.up(t)
	node := b.Nodes[0]
	tests := []struct {
		name    string
		write   func(testing.TB) (string, error)
		command string
		want    string
	}{
		{trancheImageName, trancheImage, "[/usr/bin/tranche, version]", "tranche "},
		{ffmpegImageName, ffmpegImage, "[ffmpeg, -version]", "ffmpeg version"},
	}
	for i, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			made := phase(t, "written and imported")
			tar, err := test.write(t)
			if err != nil {
				t.Fatal(err)
			}
			if err := node.ImportImage(t.Context(), tar); err != nil {
				t.Fatal(err)
			}
			made()
			pod := b.CreatePod(t, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: image-%d}
spec:
  nodeName: %s
  restartPolicy: Never
  containers: [{name: c, image: "%s", command: %s}]
`, i, node.Name, test.name, test.command))
			b.WaitPhase(t, pod, corev1.PodSucceeded, time.Minute)
			if got := b.PodLogs(t, pod, ""); !strings.HasPrefix(got, test.want) {
				t.Errorf("it said %q, want %q", got, test.want)
			}
		})
	}
}
