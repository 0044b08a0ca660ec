package certs

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// writeCert puts a self-signed certificate of that name into files.
func writeCert(t *testing.T, dir, name string, when time.Time) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"localhost"}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{"tls.crt": {Type: "CERTIFICATE", Bytes: der}, "tls.key": {Type: "EC PRIVATE KEY", Bytes: keyDER}} {
		path := filepath.Join(dir, file)
		if err := errors.Join(os.WriteFile(path, pem.EncodeToMemory(block), 0o600), os.Chtimes(path, when, when)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCertificateIsReadAnew(t *testing.T) {
	dir := t.TempDir()
	writeCert(t, dir, "one", time.Unix(1e9, 0))
	c, err := NewFiles(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"), "", quiet())
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	web := &http.Server{Handler: http.NotFoundHandler(), ReadHeaderTimeout: time.Second, ErrorLog: slog.NewLogLogger(quiet().Handler(), slog.LevelDebug)}
	go func() { _ = web.Serve(tls.NewListener(l, c.TLS())) }() // ends with Close
	defer func() { _ = web.Close() }()
	name := func() string {
		conn, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		return conn.ConnectionState().PeerCertificates[0].Subject.CommonName
	}
	if got := name(); got != "one" {
		t.Error(got)
	}
	writeCert(t, dir, "two", time.Unix(2e9, 0))
	c.mu.Lock()
	c.checked = time.Time{}
	c.mu.Unlock()
	if got := name(); got != "two" {
		t.Error(got)
	}
	if err := os.WriteFile(filepath.Join(dir, "tls.crt"), []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	c.checked = time.Time{}
	c.mu.Unlock()
	if got := name(); got != "two" {
		t.Error(got)
	}
}
