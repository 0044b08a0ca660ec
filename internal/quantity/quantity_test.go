package quantity

import "testing"

func TestParse(t *testing.T) {
	for text, want := range map[string]Bytes{
		"8Gi": 8 << 30, "512Mi": 512 << 20, "1G": 1e9, "1.5Gi": 3 << 29, "8GB": 8e9, "8GiB": 8 << 30,
		"8 GiB": 8 << 30, "1048576": 1 << 20, "1e9": 1e9, "64Ki": 64 << 10, "64K": 64000, "64kB": 64000,
		"100B": 100, "1T": 1e12,
	} {
		got, err := Parse(text)
		if err != nil || got != want {
			t.Errorf("Parse(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{
		"", "Gi", "-1Gi", "0", "8gi", "8Xi", "0x10", "1/2", "1.0001", "100Ti", "1e999999999", "1_000", "8GiBB", "NaN", "1m",
	} {
		if got, err := Parse(text); err == nil {
			t.Errorf("Parse(%q) = %d; want an error", text, got)
		}
	}
}

func TestString(t *testing.T) {
	for b, want := range map[Bytes]string{
		8 << 30: "8 GiB", 3 << 29: "1.5 GiB", 640 << 20: "640 MiB", 12: "12 B", 2048: "2 KiB",
	} {
		if got := b.String(); got != want {
			t.Errorf("%d: %q, want %q", b, got, want)
		}
	}
}
