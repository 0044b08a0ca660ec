package webhook

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"time"
)

const (
	// An authority lives for years, as whoever trusts it has to be told of another. It is replaced when less than
	// authorityLeft is left.
	authorityLife = 10 * 365 * 24 * time.Hour
	authorityLeft = 365 * 24 * time.Hour
	// A server's certificate is renewed when less than certificateLeft is left. It is in memory only.
	certificateLife = 90 * 24 * time.Hour
	certificateLeft = 30 * 24 * time.Hour
	// Clocks differ.
	ago = time.Hour
)

// Keys of the authority's Secret.
const (
	bundleKey  = "ca.crt" // the authority, and behind it the one before
	privateKey = "ca.key"
)

// authority signs the webhook's certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	// bundle is what the API server is told to trust.
	bundle []byte
}

// newAuthority makes one; before is the bundle of the one that it follows, whose certificates are still served.
func newAuthority(name string, now time.Time, before []byte) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{Subject: pkix.Name{CommonName: name + " CA"}, IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: now.Add(-ago), NotAfter: now.Add(authorityLife)}
	cert, err := sign(template, template, key, key)
	if err != nil {
		return nil, err
	}
	a := &authority{key: key, bundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})}
	if a.cert, err = x509.ParseCertificate(cert); err != nil {
		return nil, err
	}
	if block, _ := pem.Decode(before); block != nil {
		a.bundle = append(a.bundle, pem.EncodeToMemory(block)...)
	}
	return a, nil
}

func sign(template, parent *x509.Certificate, key, parentKey *ecdsa.PrivateKey) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	template.SerialNumber = serial
	return x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, parentKey)
}

// parseAuthority reads the Secret's data.
func parseAuthority(data map[string][]byte) (*authority, error) {
	cert, _ := pem.Decode(data[bundleKey])
	key, _ := pem.Decode(data[privateKey])
	if cert == nil || key == nil {
		return nil, fmt.Errorf("no %s or no %s", bundleKey, privateKey)
	}
	a := &authority{bundle: data[bundleKey]}
	var err error
	if a.cert, err = x509.ParseCertificate(cert.Bytes); err != nil {
		return nil, err
	}
	if a.key, err = x509.ParseECPrivateKey(key.Bytes); err != nil {
		return nil, err
	}
	if !a.cert.IsCA || !a.key.PublicKey.Equal(a.cert.PublicKey) {
		return nil, errors.New("certificate and key are not those of one authority")
	}
	return a, nil
}

// data is what parseAuthority reads.
func (a *authority) data() (map[string][]byte, error) {
	der, err := x509.MarshalECPrivateKey(a.key)
	if err != nil {
		return nil, err
	}
	return map[string][]byte{bundleKey: a.bundle, privateKey: pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})}, nil
}

func (a *authority) same(b *authority) bool {
	return a != nil && b != nil && bytes.Equal(a.cert.Raw, b.cert.Raw)
}

// issue makes a certificate for a server of this name.
func (a *authority) issue(host string, now time.Time) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{Subject: pkix.Name{CommonName: host}, DNSNames: []string{host}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, NotBefore: now.Add(-ago), NotAfter: now.Add(certificateLife)}
	der, err := sign(template, a.cert, key, a.key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, nil
}
