package driverview

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"sort"
)

// object describes an ELF file that is just enough for a reader: no code, only what inspect looks at.
type object struct {
	machine elf.Machine // EM_386 gives a 32-bit file
	soname  string
	needed  []string
	interp  string
	abi     []uint32 // of a .note.ABI-tag: major, minor, sub
	data    string   // .data
}

// section is one of a file to be.
type section struct {
	name string
	typ  elf.SectionType
	link uint32
	body []byte
}

// bytes makes the file.
func (o object) bytes() []byte {
	le, wide := binary.LittleEndian, o.machine != elf.EM_386
	word := func(b []byte, v uint64) []byte {
		if wide {
			return le.AppendUint64(b, v)
		}
		return le.AppendUint32(b, uint32(v))
	}
	strtab, dynamic := []byte{0}, []byte{}
	dyn := func(tag elf.DynTag, s string) {
		dynamic = word(word(dynamic, uint64(tag)), uint64(len(strtab)))
		strtab = append(append(strtab, s...), 0)
	}
	if o.soname != "" {
		dyn(elf.DT_SONAME, o.soname)
	}
	for _, n := range o.needed {
		dyn(elf.DT_NEEDED, n)
	}
	dynamic = word(word(dynamic, 0), 0)
	sections := []section{{}, {".dynstr", elf.SHT_STRTAB, 0, strtab}, {".dynamic", elf.SHT_DYNAMIC, 1, dynamic},
		{".data", elf.SHT_PROGBITS, 0, []byte(o.data)}}
	if o.interp != "" {
		sections = append(sections, section{".interp", elf.SHT_PROGBITS, 0, append([]byte(o.interp), 0)})
	}
	if o.abi != nil {
		note := []byte{}
		for _, v := range []uint32{4, 16, 1, 0x554e47, 0, o.abi[0], o.abi[1], o.abi[2]} {
			note = le.AppendUint32(note, v)
		}
		sections = append(sections, section{".note.ABI-tag", elf.SHT_NOTE, 0, note})
	}
	names := []byte{0}
	at := make([]int, len(sections)+1)
	sections = append(sections, section{".shstrtab", elf.SHT_STRTAB, 0, nil})
	for i, s := range sections[1:] {
		at[i+1] = len(names)
		names = append(append(names, s.name...), 0)
	}
	sections[len(sections)-1].body = names

	size, entry, class := 64, 64, elf.ELFCLASS64
	if !wide {
		size, entry, class = 52, 40, elf.ELFCLASS32
	}
	var body, table []byte
	for i, s := range sections {
		table = le.AppendUint32(le.AppendUint32(table, uint32(at[i])), uint32(s.typ))
		for _, v := range []uint64{0, 0, uint64(size + len(body)), uint64(len(s.body))} { // flags, address, offset, size
			table = word(table, v)
		}
		table = le.AppendUint32(le.AppendUint32(table, s.link), 0)
		table = word(word(table, 1), uint64(map[elf.SectionType]int{elf.SHT_DYNAMIC: len(word(word(nil, 0), 0))}[s.typ]))
		body = append(body, s.body...)
	}
	head := append([]byte(elf.ELFMAG), byte(class), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT))
	head = append(head, make([]byte, 9)...)
	head = le.AppendUint16(le.AppendUint16(head, uint16(elf.ET_DYN)), uint16(o.machine))
	head = le.AppendUint32(head, uint32(elf.EV_CURRENT))
	for _, v := range []uint64{0, 0, uint64(size + len(body))} { // entry, program headers, section headers
		head = word(head, v)
	}
	head = le.AppendUint32(head, 0)
	for _, v := range []int{size, 0, 0, entry, len(sections), len(sections) - 1} {
		head = le.AppendUint16(head, uint16(v))
	}
	return bytes.Join([][]byte{head, body, table}, nil)
}

// ldCache makes a loader's cache of names and paths, with the flag of each path's ABI.
func ldCache(entries map[string]int32) []byte {
	paths := make([]string, 0, len(entries))
	for p := range entries {
		paths = append(paths, p)
	}
	sort.Strings(paths)
	e := binary.NativeEndian
	head := append([]byte("glibc-ld.so.cache1.1"), make([]byte, 28)...)
	e.PutUint32(head[20:], uint32(len(paths)))
	at := len(head) + 24*len(paths)
	var table, text []byte
	for _, p := range paths {
		name := p[bytes.LastIndexByte([]byte(p), '/')+1:]
		table = e.AppendUint32(table, uint32(entries[p]))
		for _, s := range []string{name, p} {
			table = e.AppendUint32(table, uint32(at+len(text)))
			text = append(text, fmt.Sprintf("%s\x00", s)...)
		}
		table = append(table, make([]byte, 12)...)
	}
	return append(append(head, table...), text...)
}
