package node

import (
	"reflect"
	"testing"

	"tranche.dev/tranche/internal/node/books"
)

func FuzzCheckpoint(f *testing.F) {
	good, err := encodeCheckpoint(checkpoint{Looked: true, Minors: map[string][]int{"a": {0, 1}}, Views: map[string]string{"b": "nvidia-1"},
		Held:     []books.Held{{Namespace: "n", Pod: "p", Container: "c", Resource: books.Memory, IDs: []string{"GPU-1::0"}}},
		Imported: []imported{{UID: "u", Minor: 1, Cores: 50, Memory: 1 << 30}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"version":1,"sha256":"","data":{}}`))
	f.Add([]byte(`{"version":2}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := decodeCheckpoint(text)
		if err != nil {
			return
		}
		again, err := encodeCheckpoint(c)
		if err != nil {
			t.Fatal(err)
		}
		if d, err := decodeCheckpoint(again); err != nil || !reflect.DeepEqual(c, d) {
			t.Fatalf("%+v became %+v, %v", c, d, err)
		}
	})
}

func FuzzFaults(f *testing.F) {
	f.Add([]byte(`{"version":1,"boot":"b","driver":"550.1","faults":[{"uuid":"GPU-1","xid":79,"energy":5}]}`))
	f.Add([]byte(`{"version":1,"faults":[{"uuid":"","xid":-1}]}`))
	f.Add([]byte(`{"version":2}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		got, err := parseFaults(text)
		if err != nil && !reflect.DeepEqual(got, faults{}) {
			t.Fatalf("%+v with %v", got, err)
		}
		for _, x := range got.Faults {
			if x.UUID == "" || x.XID <= 0 {
				t.Fatalf("%+v", got)
			}
		}
	})
}

func FuzzOriginalCheckpoint(f *testing.F) {
	f.Add([]byte(`{"PodGPUMapping":{"uid":{"c":{"Devices":["/dev/nvidia0","/dev/nvidia3"],"Cores":200,"Memory":8053063680}}}}`))
	f.Add([]byte(`{"PodGPUMapping":{"uid":{"c":{"Devices":["/dev/nvidia-1"],"Cores":50}}}}`))
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		list, err := parseOriginal(text)
		for _, i := range list {
			if err != nil || i.Minor < 0 || i.Cores < 0 || i.Cores > 100 {
				t.Fatalf("%+v, %v", i, err)
			}
		}
	})
}

func TestOriginalCheckpoint(t *testing.T) {
	got, err := parseOriginal([]byte(`{"PodGPUMapping":{"u":{"c":{"Devices":["/dev/nvidia0","/dev/nvidia3"],"Cores":200,"Memory":8192}}}}`))
	want := []imported{{UID: "u", Minor: 0, Cores: 100, Memory: 4096}, {UID: "u", Minor: 3, Cores: 100, Memory: 4096}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestModelLabel(t *testing.T) {
	for name, want := range map[string]string{"Tesla M40 24GB": "M40", "NVIDIA H100 80GB HBM3": "H100", "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB", "": "", "NVIDIA": "NVIDIA"} {
		if got := modelOf(name); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
}
