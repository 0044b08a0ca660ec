package bed

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// authority signs the bed's certificates. All keys are ECDSA P-256, all certificates hold for a week.
type authority struct {
	dir  string
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
}

// newAuthority writes ca.crt and, for the controller manager, ca.key.
func newAuthority(dir string) (*authority, error) {
	a := &authority{dir: dir}
	template := &x509.Certificate{Subject: pkix.Name{CommonName: "bed-ca"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign | x509.KeyUsageDigitalSignature}
	return a, a.issue("ca", template)
}

// client writes NAME.crt and NAME.key for a user in a group ("" for none).
func (a *authority) client(name, user, group string) error {
	subject := pkix.Name{CommonName: user}
	if group != "" {
		subject.Organization = []string{group}
	}
	return a.issue(name, &x509.Certificate{Subject: subject, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
}

// server writes NAME.crt and NAME.key for names and addresses.
func (a *authority) server(name string, hosts ...string) error {
	t := &x509.Certificate{Subject: pkix.Name{CommonName: name}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			t.IPAddresses = append(t.IPAddresses, ip)
		} else {
			t.DNSNames = append(t.DNSNames, h)
		}
	}
	return a.issue(name, t)
}

// issue signs a certificate for a new key, the authority's own first of all.
func (a *authority) issue(name string, template *x509.Certificate) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 100))
	if err != nil {
		return err
	}
	template.SerialNumber = serial
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(7*24*time.Hour)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		return fmt.Errorf("certificate %s: %w", name, err)
	}
	if a.cert == nil {
		a.key = key
		if a.cert, err = x509.ParseCertificate(der); err != nil {
			return err
		}
	}
	if err := a.write(name+".crt", "CERTIFICATE", der); err != nil {
		return err
	}
	return a.writeKey(name, key)
}

// keyPair writes NAME.key and NAME.pub, without a certificate.
func (a *authority) keyPair(name string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return err
	}
	if err := a.write(name+".pub", "PUBLIC KEY", public); err != nil {
		return err
	}
	return a.writeKey(name, key)
}

func (a *authority) writeKey(name string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return a.write(name+".key", "EC PRIVATE KEY", der)
}

func (a *authority) write(file, kind string, der []byte) error {
	return os.WriteFile(filepath.Join(a.dir, file), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}
