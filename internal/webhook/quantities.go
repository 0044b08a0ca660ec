package webhook

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"tranche.dev/tranche/internal/quantity"
)

// quantityFields are the fields of a pod that hold quantities, at any depth.
func quantityFields() []string {
	return []string{"limits", "requests", "overhead", "sizeLimit", "divisor", "allocatedResources", "quantity"}
}

// checkQuantities refuses a pod, as valid JSON, with quantities that cannot be computed: to unmarshal one of them would not end.
func checkQuantities(raw []byte) error {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	fields := quantityFields()
	var walk func(within bool) error
	walk = func(within bool) error {
		token, err := d.Token()
		if err != nil {
			return err
		}
		switch v := token.(type) {
		case json.Delim:
			for d.More() {
				of := within
				if v == '{' {
					key, err := d.Token()
					if err != nil {
						return err
					}
					name, _ := key.(string) // keys are strings
					of = of || slices.ContainsFunc(fields, func(f string) bool { return strings.EqualFold(f, name) })
				}
				if err := walk(of); err != nil {
					return err
				}
			}
			_, err = d.Token()
			return err
		case string:
			return computable(within, v)
		case json.Number:
			return computable(within, v.String())
		}
		return nil
	}
	return walk(false)
}

func computable(within bool, text string) error {
	if within && !quantity.Computable(text) {
		return fmt.Errorf("quantity %.40q: an exponent of more than two digits", text)
	}
	return nil
}
