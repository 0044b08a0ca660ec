// Package quantity reads amounts of memory as people write them: Kubernetes quantities (8Gi, 512Mi,
// 1G, 1e9, plain bytes) and the plain units of other tools (8GB, 8gib, 512MB). Fractions of a byte are
// dropped.
package quantity

import (
	"fmt"
	"math"
	"math/big"
	"strings"
)

// Bytes is an amount of memory.
type Bytes uint64

// units by their letter, decimal; with an i behind it they are powers of 1024.
const units = "kmgtp"

func pow(base, n int64) *big.Int { return new(big.Int).Exp(big.NewInt(base), big.NewInt(n), nil) }

// Parse reads a positive amount. The case of letters does not count where the unit is beyond doubt
// (gi, gib, gb); a lone lower-case letter is asked back, as m is a thousandth in Kubernetes, and g is
// 2^30 bytes in some tools.
func Parse(s string) (Bytes, error) {
	text := strings.TrimSpace(s)
	end := strings.LastIndexAny(text, "0123456789.")
	if end < 0 {
		return 0, bad(s)
	}
	number := text[:end+1]
	unit, err := unit(number, strings.TrimSpace(text[end+1:]))
	if err != nil {
		return 0, err
	}
	if unit == nil || strings.ContainsAny(number, "/_+-xXbBoOpP") || len(number) > 40 || !Computable(number) {
		return 0, bad(s)
	}
	value, ok := new(big.Rat).SetString(number)
	if !ok {
		return 0, bad(s)
	}
	value.Mul(value, new(big.Rat).SetInt(unit))
	bytes := new(big.Int).Quo(value.Num(), value.Denom())
	switch {
	case bytes.Sign() <= 0:
		return 0, fmt.Errorf("%s: not more than 0", s)
	case !bytes.IsUint64() || bytes.Uint64() > 1<<45:
		return 0, fmt.Errorf("%s: more memory than any GPU has", s)
	}
	return Bytes(bytes.Uint64()), nil
}

// unit is the factor that the suffix of number stands for; nil for none that is known.
func unit(number, suffix string) (*big.Int, error) {
	lower := strings.ToLower(suffix)
	if lower == "" || suffix == "B" {
		return big.NewInt(1), nil
	}
	power := int64(strings.IndexByte(units, lower[0])) + 1
	letter := strings.ToUpper(lower[:1])
	switch {
	case power < 1:
		return nil, nil
	case lower[1:] == "i" || lower[1:] == "ib":
		return pow(1024, power), nil
	case lower[1:] == "b", suffix == letter, suffix == "k":
		return pow(1000, power), nil
	case lower[1:] == "":
		name := map[string]string{"M": "meb mega", "G": "gib giga", "T": "teb tera", "P": "peb peta"}[letter]
		binary, decimal, _ := strings.Cut(name, " ")
		return nil, fmt.Errorf("%s%s: write %s%si (%sibytes) or %s%s (%sbytes)", number, suffix, number, letter, binary, number, letter, decimal)
	}
	return nil, nil
}

func bad(s string) error {
	return fmt.Errorf("%q: not an amount of memory; write it as 8Gi, 512Mi, 8GB or in bytes", s)
}

// String gives the amount in the largest binary unit with at most one decimal: 8 GiB, 1.5 GiB,
// 640 MiB, 12 B. It rounds down, so that what is said to be free can be asked for.
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

func decimal(v float64) string {
	return strings.TrimSuffix(fmt.Sprintf("%.1f", math.Floor(v*10)/10), ".0")
}
