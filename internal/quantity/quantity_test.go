package quantity

import "testing"

func TestParse(t *testing.T) {
	for text, want := range map[string]Bytes{
		"8Gi": 8 << 30, "512Mi": 512 << 20, "1G": 1e9, "1.5Gi": 3 << 29, "8GB": 8e9, "8GiB": 8 << 30,
		"8 GiB": 8 << 30, "1048576": 1 << 20, "1e9": 1e9, "64Ki": 64 << 10, "64K": 64000, "64kB": 64000,
		"100B": 100, "1T": 1e12, "8gi": 8 << 30, "8gib": 8 << 30, "8GIB": 8 << 30, "8gb": 8e9, "512mb": 512e6, "64kib": 64 << 10,
		"79.2Gi": 85040352460, "1.1Gi": 1181116006, "1.0001": 1,
	} {
		got, err := Parse(text)
		if err != nil || got != want {
			t.Errorf("Parse(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{
		"", "Gi", "-1Gi", "0", "0.5", "8Xi", "0x10", "1/2", "100Ti", "1e999999999", "1_000", "8GiBB", "NaN", "1m", "8g", "8b", "8i", "8gbi",
	} {
		if got, err := Parse(text); err == nil {
			t.Errorf("Parse(%q) = %d; want an error", text, got)
		}
	}
}

func TestAsksBack(t *testing.T) {
	for text, want := range map[string]string{
		"8g": "8g: write 8Gi (gibibytes) or 8G (gigabytes)", "1.5 m": "1.5m: write 1.5Mi (mebibytes) or 1.5M (megabytes)",
		"x": `"x": not an amount of memory; write it as 8Gi, 512Mi, 8GB or in bytes`,
	} {
		if _, err := Parse(text); err == nil || err.Error() != want {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestString(t *testing.T) {
	for b, want := range map[Bytes]string{
		8 << 30: "8 GiB", 3 << 29: "1.5 GiB", 640 << 20: "640 MiB", 12: "12 B", 2048: "2 KiB", 81050 << 20: "79.1 GiB",
	} {
		if got := b.String(); got != want {
			t.Errorf("%d: %q, want %q", b, got, want)
		}
	}
}
