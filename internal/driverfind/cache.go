package driverfind

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"runtime"
	"sort"
	"strings"
)

// CachePath is the loader's cache.
const CachePath = "/etc/ld.so.cache"

// The format since glibc 2.2, alone or behind one of the older format: header, entries, strings,
// extensions. Offsets count from the header.
const (
	cacheMagic   = "glibc-ld.so.cache1.1"
	headerSize   = 48
	entrySize    = 24
	extMagic     = 0xeaa42174
	extHWCaps    = 1
	flagTypeMask = 0xff
	flagELF6     = 3 // ELF_LIBC6
)

// CacheEntry is one library that the cache knows.
type CacheEntry struct {
	Name, Path string
	flags      int32
	osVersion  uint32
	hwcap      uint64
}

// Arch is the machine of the entry's ABI: EM_X86_64, EM_AARCH64, EM_386, or EM_NONE for any other.
// A cache names none for 32-bit x86, the same as for every 32-bit ABI without a flag of its own.
func (e CacheEntry) Arch() elf.Machine {
	switch e.flags {
	case 0x0300 | flagELF6:
		return elf.EM_X86_64
	case 0x0a00 | flagELF6:
		return elf.EM_AARCH64
	case flagELF6:
		return elf.EM_386
	}
	return elf.EM_NONE
}

// abiFlag is the entry flag of this machine's 64-bit ABI.
func abiFlag() int32 {
	if runtime.GOARCH == "arm64" {
		return 0x0a00 | flagELF6
	}
	return 0x0300 | flagELF6
}

// cacheBody is data from the header of the newer format on; nil when there is none.
func cacheBody(data []byte) []byte {
	i := bytes.Index(data, []byte(cacheMagic))
	if i < 0 || len(data)-i < headerSize {
		return nil
	}
	return data[i:]
}

// ParseCache lists the entries of this machine's ABI in the cache's order. What is damaged is left
// out.
func ParseCache(data []byte) []CacheEntry {
	var out []CacheEntry
	for _, e := range parseAll(cacheBody(data)) {
		if e.flags == abiFlag() {
			out = append(out, e)
		}
	}
	return out
}

// ParseCacheAll lists the entries of all ABIs in the cache's order. What is damaged is left out.
func ParseCacheAll(data []byte) []CacheEntry { return parseAll(cacheBody(data)) }

func parseAll(body []byte) []CacheEntry {
	if body == nil {
		return nil
	}
	n := binary.NativeEndian.Uint32(body[20:])
	if uint64(n)*entrySize > uint64(len(body)-headerSize) {
		return nil
	}
	out := make([]CacheEntry, 0, n)
	for i := range int(n) {
		raw := body[headerSize+i*entrySize:]
		name, ok1 := stringAt(body, binary.NativeEndian.Uint32(raw[4:]))
		path, ok2 := stringAt(body, binary.NativeEndian.Uint32(raw[8:]))
		if !ok1 || !ok2 {
			continue
		}
		out = append(out, CacheEntry{Name: name, Path: path, flags: int32(binary.NativeEndian.Uint32(raw)),
			osVersion: binary.NativeEndian.Uint32(raw[12:]), hwcap: binary.NativeEndian.Uint64(raw[16:])})
	}
	return out
}

func stringAt(body []byte, off uint32) (string, bool) {
	if uint64(off) >= uint64(len(body)) {
		return "", false
	}
	end := bytes.IndexByte(body[off:], 0)
	if end < 0 || end > 4096 {
		return "", false
	}
	return string(body[off : int(off)+end]), true
}

// ReplaceInCache returns a cache in which each name of paths leads to its path and to nothing else;
// all other entries stay. Nil when data is not a cache that can be understood.
func ReplaceInCache(data []byte, paths map[string]string) []byte {
	body := cacheBody(data)
	if body == nil {
		return nil
	}
	hwcaps, known := hwcapNames(body)
	var entries []CacheEntry
	for _, e := range parseAll(body) {
		if _, replaced := paths[e.Name]; replaced && e.flags == abiFlag() {
			continue
		}
		// An entry of a glibc-hwcaps subdirectory means nothing without the list of their names.
		if e.hwcap>>62&1 != 0 && !known {
			continue
		}
		entries = append(entries, e)
	}
	for name, path := range paths {
		entries = append(entries, CacheEntry{Name: name, Path: path, flags: abiFlag()})
	}
	// The loader searches by bisection in descending order.
	sort.SliceStable(entries, func(i, j int) bool { return compareNames(entries[i].Name, entries[j].Name) > 0 })
	return writeCache(body, entries, hwcaps)
}

// hwcapNames reads the extension that names glibc-hwcaps subdirectories, in order. False when there
// is an extension of another kind of layout.
func hwcapNames(body []byte) ([]string, bool) {
	off := binary.NativeEndian.Uint32(body[32:])
	if off == 0 {
		return nil, true
	}
	if uint64(off)+8 > uint64(len(body)) || binary.NativeEndian.Uint32(body[off:]) != extMagic {
		return nil, false
	}
	count := binary.NativeEndian.Uint32(body[off+4:])
	var names []string
	for i := range uint64(min(count, 64)) {
		at := uint64(off) + 8 + i*16
		if at+16 > uint64(len(body)) {
			return nil, false
		}
		tag, start, size := binary.NativeEndian.Uint32(body[at:]), binary.NativeEndian.Uint32(body[at+8:]), binary.NativeEndian.Uint32(body[at+12:])
		if tag != extHWCaps {
			continue
		}
		for k := uint64(0); k+4 <= uint64(size); k += 4 {
			if uint64(start)+k+4 > uint64(len(body)) {
				return nil, false
			}
			name, ok := stringAt(body, binary.NativeEndian.Uint32(body[uint64(start)+k:]))
			if !ok {
				return nil, false
			}
			names = append(names, name)
		}
	}
	return names, true
}

func writeCache(old []byte, entries []CacheEntry, hwcaps []string) []byte {
	stringsAt := headerSize + len(entries)*entrySize
	var text []byte
	offsets := map[string]uint32{}
	intern := func(s string) uint32 {
		if at, ok := offsets[s]; ok {
			return at
		}
		at := uint32(stringsAt + len(text))
		text = append(append(text, s...), 0)
		offsets[s] = at
		return at
	}
	e := binary.NativeEndian
	var table []byte
	for _, entry := range entries {
		table = e.AppendUint32(table, uint32(entry.flags))
		table = e.AppendUint32(table, intern(entry.Name))
		table = e.AppendUint32(table, intern(entry.Path))
		table = e.AppendUint32(table, entry.osVersion)
		table = e.AppendUint64(table, entry.hwcap)
	}
	var list []byte
	for _, name := range hwcaps {
		list = e.AppendUint32(list, intern(name))
	}
	for (stringsAt+len(text))%4 != 0 {
		text = append(text, 0)
	}
	out := append([]byte{}, old[:headerSize]...)
	e.PutUint32(out[20:], uint32(len(entries)))
	e.PutUint32(out[24:], uint32(len(text)))
	e.PutUint32(out[32:], 0)
	out = append(append(out, table...), text...)
	if len(hwcaps) > 0 {
		at := uint32(len(out))
		e.PutUint32(out[32:], at)
		out = e.AppendUint32(out, extMagic)
		out = e.AppendUint32(out, 1)
		for _, v := range []uint32{extHWCaps, 0, at + 24, uint32(len(list))} {
			out = e.AppendUint32(out, v)
		}
		out = append(out, list...)
	}
	return out
}

// compareNames is the loader's order: as text, but runs of digits by value.
func compareNames(a, b string) int {
	for a != "" {
		da, db := isDigit(a), isDigit(b)
		switch {
		case da && !db:
			return 1
		case !da && db:
			return -1
		case da:
			na, ra := cutNumber(a)
			nb, rb := cutNumber(b)
			if na != nb {
				return na - nb
			}
			a, b = ra, rb
		case b == "":
			return 1
		case a[0] != b[0]:
			return int(a[0]) - int(b[0])
		default:
			a, b = a[1:], b[1:]
		}
	}
	return -len(b)
}

func isDigit(s string) bool { return s != "" && s[0] >= '0' && s[0] <= '9' }

func cutNumber(s string) (int, string) {
	n := 0
	for isDigit(s) {
		n = n*10 + int(s[0]-'0')
		s = s[1:]
	}
	return n, s
}

// Names of the driver's libraries as programs ask for them.
var Names = []string{"libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so"}

// IsDriverName is true of every file name under which one of the two libraries is installed, the
// versioned real files included.
func IsDriverName(name string) bool {
	for _, base := range []string{"libcuda.so", "libnvidia-ml.so"} {
		if name == base || strings.HasPrefix(name, base+".") {
			return true
		}
	}
	return false
}
