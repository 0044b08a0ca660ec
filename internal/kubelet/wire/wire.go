// Package wire is gRPC's protobuf codec for kubelet's messages: thousands of device IDs are 200 to 300 KB, for which gRPC's
// own pool clears 1 MiB each time, and which are the same in each call. It changes no byte on the wire.
package wire

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unicode/utf8"

	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec that is wrapped
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	plugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Codec is used in place of gRPC's protobuf codec. Safe for concurrent use.
type Codec struct {
	encoding.CodecV2
	buffers mem.BufferPool
	known   atomic.Pointer[map[string]string]
}

// New makes one.
func New() *Codec {
	return &Codec{CodecV2: encoding.GetCodecV2("proto"),
		buffers: mem.NewTieredBufferPool(4<<10, 16<<10, 32<<10, 64<<10, 128<<10, 256<<10, 384<<10, 512<<10, 1<<20)}
}

// Know gives the device IDs that requests will name, each by itself: those are not copied out of every request again.
// The map must not change any more.
func (c *Codec) Know(ids map[string]string) { c.known.Store(&ids) }

// Unmarshal implements encoding.CodecV2.
func (c *Codec) Unmarshal(data mem.BufferSlice, v any) error {
	message, ok := v.(proto.Message)
	if !ok {
		return fmt.Errorf("a %T is no protobuf message", v)
	}
	buffer := data.MaterializeToBuffer(c.buffers)
	defer buffer.Free()
	if request, ok := message.(*plugin.PreferredAllocationRequest); ok {
		return c.preferred(buffer.ReadOnlyData(), request)
	}
	return proto.Unmarshal(buffer.ReadOnlyData(), message)
}

// preferred reads a PreferredAllocationRequest (k8s.io/kubelet, pkg/apis/deviceplugin/v1beta1/api.proto), which names
// every free device.
func (c *Codec) preferred(data []byte, to *plugin.PreferredAllocationRequest) error {
	proto.Reset(to)
	return fields(data, func(n protowire.Number, bytes []byte, _ uint64) error {
		if n != 1 || bytes == nil {
			return nil
		}
		r := &plugin.ContainerPreferredAllocationRequest{}
		to.ContainerRequests = append(to.ContainerRequests, r)
		size := len(bytes)
		return fields(bytes, func(n protowire.Number, bytes []byte, number uint64) (err error) {
			switch {
			case n == 1 && bytes != nil:
				r.AvailableDeviceIDs, err = c.add(r.AvailableDeviceIDs, bytes, size)
			case n == 2 && bytes != nil:
				r.MustIncludeDeviceIDs, err = c.add(r.MustIncludeDeviceIDs, bytes, 0)
			case n == 3 && bytes == nil:
				r.AllocationSize = int32(number)
			}
			return err
		})
	})
}

// add appends an ID of a message of size bytes.
func (c *Codec) add(to []string, id []byte, size int) ([]string, error) {
	if to == nil { // the rest has IDs of about this length
		to = make([]string, 0, size/(len(id)+2)+1)
	}
	if known := c.known.Load(); known != nil {
		if s, ok := (*known)[string(id)]; ok {
			return append(to, s), nil
		}
	}
	if !utf8.Valid(id) {
		return to, errors.New("a device ID is not UTF-8")
	}
	return append(to, string(id)), nil
}

// fields calls f for each field of a message, with its bytes, never nil, or, for a varint, with its number. Fields of other
// kinds are skipped.
func fields(data []byte, f func(n protowire.Number, bytes []byte, number uint64) error) error {
	for len(data) > 0 {
		number, kind, n := protowire.ConsumeTag(data)
		if n < 0 {
			return protowire.ParseError(n)
		}
		if number > protowire.MaxValidNumber { // ConsumeTag lets these pass, proto.Unmarshal does not
			return fmt.Errorf("field number %d is out of range", number)
		}
		data = data[n:]
		var bytes []byte
		var varint uint64
		switch kind {
		case protowire.BytesType:
			bytes, n = protowire.ConsumeBytes(data)
		case protowire.VarintType:
			varint, n = protowire.ConsumeVarint(data)
		default:
			n = protowire.ConsumeFieldValue(number, kind, data)
		}
		if n < 0 {
			return protowire.ParseError(n)
		}
		data = data[n:]
		if kind != protowire.BytesType && kind != protowire.VarintType {
			continue
		}
		if err := f(number, bytes, varint); err != nil {
			return err
		}
	}
	return nil
}
