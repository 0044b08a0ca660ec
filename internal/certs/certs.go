// Package certs serves TLS with certificates from files that somebody else renews: cert-manager, a Secret's mount.
package certs

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// Files serves a certificate from files and reads them again when they change. Safe for concurrent use.
type Files struct {
	cert, key, clientCA string
	log                 *slog.Logger

	mu      sync.Mutex
	checked time.Time
	mark    string
	config  *tls.Config
}

// NewFiles reads the files once: an error now is better than one at the first handshake. clientCA may be empty:
// then clients need no certificate.
func NewFiles(cert, key, clientCA string, log *slog.Logger) (*Files, error) {
	c := &Files{cert: cert, key: key, clientCA: clientCA, log: log}
	var err error
	c.mark = c.look()
	c.config, err = c.read()
	return c, err
}

// TLS is a configuration for servers.
func (c *Files) TLS() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return c.current(), nil }}
}

// current is the configuration for a handshake. Files that cannot be read leave the last one in force.
func (c *Files) current() *tls.Config {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.checked) < time.Second {
		return c.config
	}
	c.checked = time.Now()
	mark := c.look()
	if mark == c.mark {
		return c.config
	}
	config, err := c.read()
	if err != nil {
		c.log.Warn("the certificate has changed but cannot be read; the old one is served", "err", err)
		return c.config
	}
	c.log.Info("certificate read anew", "file", c.cert)
	c.mark, c.config = mark, config
	return config
}

// look is what shows that the files have changed.
func (c *Files) look() string {
	mark := ""
	for _, name := range []string{c.cert, c.key, c.clientCA} {
		if info, err := os.Stat(name); err == nil {
			mark += fmt.Sprintf("%d/%d ", info.ModTime().UnixNano(), info.Size())
		}
	}
	return mark
}

func (c *Files) read() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		return nil, fmt.Errorf("certificate %s, key %s: %w", c.cert, c.key, err)
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2", "http/1.1"}}
	if c.clientCA == "" {
		return config, nil
	}
	pem, err := os.ReadFile(c.clientCA)
	if err != nil {
		return nil, fmt.Errorf("clients' CA: %w", err)
	}
	config.ClientCAs, config.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
	if !config.ClientCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("clients' CA %s: no certificate in it", c.clientCA)
	}
	return config, nil
}
