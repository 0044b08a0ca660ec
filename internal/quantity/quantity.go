// Package quantity reads amounts of memory as people write them: Kubernetes quantities (8Gi, 512Mi,
// 1G, 1e9, plain bytes) and the plain units of other tools (8GB, 8GiB, 512MB). It never rounds: a
// quantity that is not a whole number of bytes is refused.
package quantity

import (
	"fmt"
	"math/big"
	"strings"
)

// Bytes is an amount of memory.
type Bytes uint64

var units = map[string]*big.Int{
	"":  big.NewInt(1),
	"k": pow(1000, 1), "M": pow(1000, 2), "G": pow(1000, 3), "T": pow(1000, 4), "P": pow(1000, 5),
	"Ki": pow(1024, 1), "Mi": pow(1024, 2), "Gi": pow(1024, 3), "Ti": pow(1024, 4), "Pi": pow(1024, 5),
}

func pow(base, n int64) *big.Int { return new(big.Int).Exp(big.NewInt(base), big.NewInt(n), nil) }

// Parse reads a positive amount. Letter case counts as in Kubernetes, but for K, which is k.
func Parse(s string) (Bytes, error) {
	text := strings.TrimSpace(s)
	end := strings.LastIndexAny(text, "0123456789.")
	if end < 0 {
		return 0, bad(s)
	}
	number, suffix := text[:end+1], strings.TrimSpace(text[end+1:])
	if len(suffix) > 0 && suffix != "B" {
		suffix = strings.TrimSuffix(suffix, "B")
	} else if suffix == "B" {
		suffix = ""
	}
	if suffix == "K" {
		suffix = "k"
	}
	unit, ok := units[suffix]
	if !ok || strings.ContainsAny(number, "/_+-xXbBoOpP") || len(number) > 40 || !shortExponent(number) {
		return 0, bad(s)
	}
	value, ok := new(big.Rat).SetString(number)
	if !ok {
		return 0, bad(s)
	}
	value.Mul(value, new(big.Rat).SetInt(unit))
	switch {
	case value.Sign() <= 0:
		return 0, fmt.Errorf("%q is not more than 0", s)
	case !value.IsInt():
		return 0, fmt.Errorf("%q is not a whole number of bytes", s)
	case !value.Num().IsUint64() || value.Num().Uint64() > 1<<45:
		return 0, fmt.Errorf("%q is more memory than any GPU has", s)
	}
	return Bytes(value.Num().Uint64()), nil
}

// shortExponent keeps 1e999999999 from becoming a number of that many digits.
func shortExponent(number string) bool {
	i := strings.IndexAny(number, "eE")
	return i < 0 || len(number)-i <= 3
}

func bad(s string) error {
	return fmt.Errorf("%q is not an amount of memory; write it as 8Gi, 512Mi, 8GB or in bytes", s)
}

// String gives the amount in the largest binary unit that keeps at most one decimal exact enough to
// read: 8 GiB, 1.5 GiB, 640 MiB, 12 B.
func (b Bytes) String() string {
	switch {
	case b >= 1<<30:
		return decimal(float64(b)/(1<<30)) + " GiB"
	case b >= 1<<20:
		return decimal(float64(b)/(1<<20)) + " MiB"
	case b >= 1<<10:
		return decimal(float64(b)/(1<<10)) + " KiB"
	}
	return fmt.Sprintf("%d B", uint64(b))
}

func decimal(v float64) string { return strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0") }
