package release

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"
)

// The form is SPDX 2.3 in JSON (spdx.github.io/spdx-spec/v2.3); only what is used of it.
type (
	document struct {
		Version       string         `json:"spdxVersion"`
		License       string         `json:"dataLicense"`
		ID            string         `json:"SPDXID"`
		Name          string         `json:"name"`
		Namespace     string         `json:"documentNamespace"`
		Creation      creation       `json:"creationInfo"`
		Packages      []spdxPackage  `json:"packages"`
		Relationships []relationship `json:"relationships"`
	}
	creation struct {
		Created  string   `json:"created"`
		Creators []string `json:"creators"`
	}
	spdxPackage struct {
		ID            string      `json:"SPDXID"`
		Name          string      `json:"name"`
		Version       string      `json:"versionInfo,omitempty"`
		Location      string      `json:"downloadLocation"`
		Analyzed      bool        `json:"filesAnalyzed"`
		Concluded     string      `json:"licenseConcluded"`
		Declared      string      `json:"licenseDeclared"`
		Copyright     string      `json:"copyrightText"`
		Checksums     []checksum  `json:"checksums,omitempty"`
		External      []reference `json:"externalRefs,omitempty"`
		SourceComment string      `json:"sourceInfo,omitempty"`
	}
	checksum struct {
		Algorithm string `json:"algorithm"`
		Value     string `json:"checksumValue"`
	}
	reference struct {
		Category string `json:"referenceCategory"`
		Type     string `json:"referenceType"`
		Locator  string `json:"referenceLocator"`
	}
	relationship struct {
		From string `json:"spdxElementId"`
		Kind string `json:"relationshipType"`
		To   string `json:"relatedSpdxElement"`
	}
)

const unknown = "NOASSERTION"

// sbom lists what is in a platform's image: the binary, the Go modules and the programs and libraries in C that it
// has inside, and glibc.
func sbom(c Config, p Platform, info *buildinfo.BuildInfo, glibc string) ([]byte, error) {
	binary, err := os.ReadFile(p.Binary)
	if err != nil {
		return nil, err
	}
	sum := fmt.Sprintf("%x", sha256.Sum256(binary))
	d := document{Version: "SPDX-2.3", License: "CC0-1.0", ID: "SPDXRef-DOCUMENT", Name: "tranche " + c.Version + " " + p.Arch,
		Namespace: "https://tranche.dev/spdx/tranche-" + c.Version + "-" + p.Arch + "-" + sum[:16],
		Creation:  creation{c.Created.UTC().Format(time.RFC3339), []string{"Tool: tranche-images-" + c.Version}}}
	add := func(within, kind string, k spdxPackage) {
		k.ID = fmt.Sprintf("SPDXRef-Package-%d", len(d.Packages))
		if k.Declared == "" {
			k.Declared = unknown
		}
		k.Location, k.Concluded, k.Copyright = unknown, unknown, unknown
		d.Packages = append(d.Packages, k)
		d.Relationships = append(d.Relationships, relationship{within, kind, k.ID})
	}
	const main = "SPDXRef-Package-0"
	add(d.ID, "DESCRIBES", spdxPackage{Name: "tranche", Version: c.Version, Declared: "Apache-2.0",
		Checksums: []checksum{{"SHA256", sum}}, SourceComment: "commit " + c.Revision})
	goVersion := strings.TrimPrefix(info.GoVersion, "go")
	add(main, "CONTAINS", spdxPackage{Name: "stdlib", Version: goVersion, Declared: "BSD-3-Clause", External: purl("pkg:golang/stdlib@" + goVersion)})
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		add(main, "CONTAINS", spdxPackage{Name: m.Path, Version: m.Version, External: purl("pkg:golang/" + m.Path + "@" + m.Version),
			SourceComment: "go.sum " + m.Sum})
	}
	list, err := os.ReadFile(p.Assets)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(list)) {
		sum, name, ok := strings.Cut(strings.TrimSpace(line), "  ")
		if !ok || len(sum) != 2*sha256.Size {
			return nil, fmt.Errorf("%s: %q is no sum and name", p.Assets, line)
		}
		add(main, "CONTAINS", spdxPackage{Name: name, Version: c.Version, Declared: "Apache-2.0", Checksums: []checksum{{"SHA256", sum}}})
	}
	add(d.ID, "DESCRIBES", spdxPackage{Name: "glibc", Version: glibc, Declared: "LGPL-2.1-or-later",
		External: purl("pkg:deb/debian/libc6@" + glibc + "?arch=" + p.Arch)})
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	err = e.Encode(d)
	return out.Bytes(), err
}

func purl(locator string) []reference {
	return []reference{{"PACKAGE-MANAGER", "purl", strings.ReplaceAll(locator, "+", "%2B")}}
}
