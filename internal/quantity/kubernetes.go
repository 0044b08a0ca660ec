package quantity

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// ParseKubernetes is resource.ParseQuantity for text of anybody's: that computes 1e999999999 to its last digit, which takes
// more time and memory than there is. So much text and such exponents are refused here.
func ParseKubernetes(text string) (resource.Quantity, error) {
	text = strings.TrimSpace(text)
	if len(text) > 40 || !Computable(text) {
		return resource.Quantity{}, fmt.Errorf("%.40q: too long, or an exponent of more than two digits", text)
	}
	return resource.ParseQuantity(text)
}

// Computable tells whether a quantity of Kubernetes can be computed at all: its exponent has at most two digits. What is no
// quantity can.
func Computable(text string) bool {
	i := strings.IndexAny(text, "eE")
	if i < 0 {
		return true
	}
	digits := strings.TrimLeft(text[i+1:], "+-")
	return len(digits) <= 2 || strings.Trim(digits, "0123456789") != ""
}
