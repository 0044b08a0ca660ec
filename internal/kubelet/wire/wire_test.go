package wire

import (
	"fmt"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	plugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func request(ids int) *plugin.AllocateRequest {
	r := &plugin.ContainerAllocateRequest{}
	for i := range ids {
		r.DevicesIds = append(r.DevicesIds, fmt.Sprintf("GPU-00000000-0000-0000-0000-000000000000::%d", i))
	}
	return &plugin.AllocateRequest{ContainerRequests: []*plugin.ContainerAllocateRequest{r}}
}

// A message comes back as it was, also out of the parts in which a connection delivers it.
func TestCodec(t *testing.T) {
	c := New()
	for _, ids := range []int{0, 1, 700, 4512, 40000} {
		data, err := c.Marshal(request(ids))
		if err != nil {
			t.Fatal(err)
		}
		var parts mem.BufferSlice
		for rest := data.Materialize(); len(rest) > 0; {
			n := min(len(rest), 16<<10)
			parts, rest = append(parts, mem.SliceBuffer(rest[:n])), rest[n:]
		}
		for range 2 { // the second time from a used buffer
			got := &plugin.AllocateRequest{}
			if err := c.Unmarshal(parts, got); err != nil {
				t.Fatal(err)
			}
			if !proto.Equal(got, request(ids)) {
				t.Errorf("%d IDs: not what was sent", ids)
			}
		}
	}
	if err := c.Unmarshal(mem.BufferSlice{mem.SliceBuffer{0xff}}, &plugin.AllocateRequest{}); err == nil {
		t.Error("a damaged message was read")
	}
	if err := c.Unmarshal(nil, "text"); err == nil {
		t.Error("a string was taken for a message")
	}
	if c.Name() != "proto" {
		t.Error(c.Name())
	}
}

// A request of free devices is read as protobuf reads it, with IDs that are known and without, fields that are not, and
// damage.
func FuzzPreferred(f *testing.F) {
	of := func(n int) []string { return request(n).ContainerRequests[0].DevicesIds }
	for _, r := range []*plugin.PreferredAllocationRequest{
		{},
		{ContainerRequests: []*plugin.ContainerPreferredAllocationRequest{{}}},
		{ContainerRequests: []*plugin.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: of(9), MustIncludeDeviceIDs: of(2), AllocationSize: 3},
			{AvailableDeviceIDs: []string{"", "not known"}, AllocationSize: -1}}},
	} {
		data, err := proto.Marshal(r)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
		f.Add(append(data, 0x78, 0x01)) // field 15, a number
		f.Add(append(data, 0x0a))       // cut off
		f.Add(append(data, 0x0a, 0x03, 0x0a, 0x01, 0xff))
	}
	known := map[string]string{}
	for _, id := range of(5) {
		known[id] = id
	}
	c := New()
	c.Know(known)
	f.Fuzz(func(t *testing.T, data []byte) {
		want, got := &plugin.PreferredAllocationRequest{}, &plugin.PreferredAllocationRequest{}
		wantErr := proto.Unmarshal(data, want)
		err := c.Unmarshal(mem.BufferSlice{mem.SliceBuffer(data)}, got)
		if (err == nil) != (wantErr == nil) {
			t.Fatalf("%v, protobuf says %v", err, wantErr)
		}
		want.ProtoReflect().SetUnknown(nil)
		for _, r := range want.ContainerRequests {
			r.ProtoReflect().SetUnknown(nil)
		}
		if err == nil && !proto.Equal(got, want) {
			t.Errorf("%v, protobuf reads %v", got, want)
		}
	})
}
