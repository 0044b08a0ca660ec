package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// bootstrap gives the webhook a certificate that the API server trusts, without anybody's help: an authority in a
// Secret, which all replicas share, and its certificate in the webhook's configuration. Both objects are made by
// whoever installs; bootstrap fills them in, and again when somebody emptied them.
type bootstrap struct {
	client            kubernetes.Interface
	namespace, secret string
	configuration     string
	host              string // the Service's name
	now               func() time.Time
	log               *slog.Logger

	authority *authority // whose certificate is served
	serving   atomic.Pointer[tls.Certificate]
}

// tls serves the certificate that there is at a handshake.
func (b *bootstrap) tls() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"}, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		if c := b.serving.Load(); c != nil {
			return c, nil
		}
		return nil, errors.New("there is no certificate yet")
	}}
}

// sync does what is missing. Not for concurrent use. When it returns without error, what is served is trusted.
func (b *bootstrap) sync(ctx context.Context) error {
	a, err := b.shared(ctx)
	if err != nil {
		return fmt.Errorf("secret %s/%s: %w", b.namespace, b.secret, err)
	}
	if err := b.trust(ctx, a.bundle); err != nil {
		return fmt.Errorf("MutatingWebhookConfiguration %s: %w", b.configuration, err)
	}
	now := b.now()
	if c := b.serving.Load(); c != nil && a.same(b.authority) && c.Leaf.NotAfter.Sub(now) > certificateLeft {
		return nil
	}
	c, err := a.issue(b.host, now)
	if err != nil {
		return err
	}
	b.authority = a
	b.serving.Store(c)
	b.log.Info("certificate issued", "host", b.host, "until", c.Leaf.NotAfter)
	return nil
}

// shared is the authority of the Secret, made anew if there is none that will do. Of two replicas that make one, the
// API server lets one win; the other finds it at its next try.
func (b *bootstrap) shared(ctx context.Context) (*authority, error) {
	secrets := b.client.CoreV1().Secrets(b.namespace)
	s, err := secrets.Get(ctx, b.secret, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	now := b.now()
	a, err := parseAuthority(s.Data)
	if err == nil && a.cert.NotAfter.Sub(now) > authorityLeft && a.cert.NotBefore.Before(now) {
		return a, nil
	}
	b.log.Info("a new authority is made", "secret", b.namespace+"/"+b.secret, "found", err)
	if a, err = newAuthority(b.host, now, s.Data[bundleKey]); err != nil {
		return nil, err
	}
	if s.Data, err = a.data(); err != nil {
		return nil, err
	}
	_, err = secrets.Update(ctx, s, metav1.UpdateOptions{})
	return a, err
}

// trust writes the bundle into the webhook's configuration.
func (b *bootstrap) trust(ctx context.Context, bundle []byte) error {
	configurations := b.client.AdmissionregistrationV1().MutatingWebhookConfigurations()
	c, err := configurations.Get(ctx, b.configuration, metav1.GetOptions{})
	if err != nil {
		return err
	}
	type hook struct {
		Name   string `json:"name"`
		Client struct {
			Bundle []byte `json:"caBundle"`
		} `json:"clientConfig"`
	}
	var change struct {
		Webhooks []hook `json:"webhooks"`
	}
	for i := range c.Webhooks {
		if !bytes.Equal(c.Webhooks[i].ClientConfig.CABundle, bundle) {
			h := hook{Name: c.Webhooks[i].Name}
			h.Client.Bundle = bundle
			change.Webhooks = append(change.Webhooks, h)
		}
	}
	if len(change.Webhooks) == 0 {
		return nil
	}
	patch, err := json.Marshal(change)
	if err != nil {
		return err
	}
	b.log.Info("the API server is told whom to trust", "configuration", b.configuration)
	_, err = configurations.Patch(ctx, b.configuration, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	return err
}
