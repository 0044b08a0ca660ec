package driverview

import (
	"bytes"
	"debug/elf"
	"os"
	"reflect"
	"testing"
)

func TestMatches(t *testing.T) {
	for _, c := range []struct {
		item, name string
		want       bool
	}{
		{"libcuda.so", "libcuda.so", true}, {"libcuda.so", "libcuda.so.535.1.2", true}, {"libcuda", "libcuda.so.1", true},
		{"libcuda", "libcudart.so.12", false}, {"libGL.so", "libGLX.so.0", false}, {"libGL*", "libGLX_nvidia.so.0", true},
		{"libnvidia-pkcs11*", "libnvidia-pkcs11-openssl3.so.550.1", true}, {"libcuda", "libcuda.a", false}, {"libcuda", "libcuda.sources", false},
		{"*", "libc.so.6", true}, {"", "libc.so.6", false},
	} {
		if got := matches(c.item, c.name); got != c.want {
			t.Errorf("matches(%q, %q) = %v", c.item, c.name, got)
		}
	}
}

func TestParseVolumes(t *testing.T) {
	for _, c := range []struct {
		text string
		want []Volume
		err  string
	}{
		{text: `{"volume":[{"name":"nvidia","base":"/a/b/","mode":"ro","components":{"binaries":["nvidia-smi"],"libraries":["libcuda.so"]}}],"x":1}`,
			want: []Volume{{Name: "nvidia", Base: "/a/b", Binaries: []string{"nvidia-smi"}, Libraries: []string{"libcuda.so"}}}},
		{text: `{`, err: "volume.conf: unexpected end of JSON input"},
		{text: `{"volume":[]}`, err: `volume.conf: no "volume" in it`},
		{text: `{"volume":[{"name":"","base":"/a"}]}`, err: `volume.conf: volume 0: name "" is empty, taken or not a file name`},
		{text: `{"volume":[{"name":"a","base":"/a"},{"name":"a","base":"/a"}]}`, err: `volume.conf: volume 1: name "a" is empty, taken or not a file name`},
		{text: `{"volume":[{"name":"a","base":"b"}]}`, err: `volume.conf: volume "a": base "b" is not an absolute path`},
		{text: `{"volume":[{"name":"a","base":"/b","components":{"binaries":["../../bin/sh"]}}]}`, err: `volume.conf: volume "a": "../../bin/sh" is not a file name`},
	} {
		got, err := ParseVolumes([]byte(c.text))
		if text := errorText(err); text != c.err || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, %s", c.text, got, text)
		}
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// The original's file is in the tests of the format: it must stay readable.
func TestOriginalVolumeConf(t *testing.T) {
	data, err := os.ReadFile("testdata/gpu-manager.conf")
	if err != nil {
		t.Fatal(err)
	}
	got, err := ParseVolumes(data)
	if err != nil || len(got) != 2 || got[0].Name != "nvidia" || got[1].Name != "origin" || len(got[0].Libraries) != 30 || len(got[1].Binaries) != 5 {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestParseExtraConfig(t *testing.T) {
	for _, c := range []struct {
		text string
		want []string
		err  string
	}{
		{text: `{}`},
		{text: `{"default":{"devices":["/dev/infiniband/uverbs0","/dev/fuse"]},"T4":{"devices":["x"]}}`, want: []string{"/dev/infiniband/uverbs0", "/dev/fuse"}},
		{text: `{"default":{"devices":["/dev/../etc/shadow"]}}`, err: `extra-config: device "/dev/../etc/shadow" is not a clean path below /dev`},
		{text: `{"default":{"devices":["/etc/shadow"]}}`, err: `extra-config: device "/etc/shadow" is not a clean path below /dev`},
		{text: `[]`, err: `extra-config: json: cannot unmarshal array into Go value of type map[string]struct { Devices []string "json:\"devices\"" }`},
	} {
		got, err := ParseExtraConfig([]byte(c.text))
		if text := errorText(err); text != c.err || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %v, %s", c.text, got, text)
		}
	}
}

func FuzzParseVolumes(f *testing.F) {
	f.Add([]byte(small))
	f.Add(defaultVolumes)
	f.Add([]byte(`{"volume":[{"name":"..","base":"/"}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		volumes, err := ParseVolumes(data)
		if err != nil {
			return
		}
		// What was taken may become names of files in a view: none leads out of it.
		for _, v := range volumes {
			for _, item := range append(append([]string{v.Name}, v.Binaries...), v.Libraries...) {
				if !plainName(item) {
					t.Errorf("%q was taken", item)
				}
			}
		}
	})
}

func FuzzParseExtraConfig(f *testing.F) {
	f.Add([]byte(`{"default":{"devices":["/dev/fuse"]}}`))
	f.Add([]byte(`{"default":{"devices":["/dev/./fuse"]}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		devices, _ := ParseExtraConfig(data)
		for _, d := range devices {
			if !within(d, "/dev") || d == "/dev" {
				t.Errorf("%q was taken", d)
			}
		}
	})
}

// Whatever an ELF file says, its SONAME is a name in the view's directory.
func FuzzReadELF(f *testing.F) {
	f.Add(object{machine: 62, soname: "libcuda.so.1", needed: []string{"libc.so.6"}, abi: []uint32{2, 3, 99}}.bytes(), "libnvidia-tls.so.1")
	f.Add(object{machine: 3, soname: "libEGL.so.1", interp: "/lib/ld"}.bytes(), "libEGL.so.1")
	f.Fuzz(func(t *testing.T, data []byte, name string) {
		obj, err := elf.NewFile(bytes.NewReader(data))
		if err != nil {
			return
		}
		lib := file{name: name}
		if err := lib.read(obj); err == nil && lib.soname != "" && !plainName(lib.soname) {
			t.Errorf("soname %q", lib.soname)
		}
	})
}
