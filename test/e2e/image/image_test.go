package image

import (
	"path/filepath"
	"strings"
	"testing"
)

// Programs come with their libraries, in places that the links /lib and /lib64 do not hide.
func TestUserland(t *testing.T) {
	layer, err := Userland([]string{"libm.so.6"}, "cat", "sh")
	if err != nil {
		t.Fatal(err)
	}
	to := map[string]bool{}
	for _, f := range layer {
		to[filepath.Base(f.To)] = true
		if strings.HasPrefix(f.To, "/lib") && f.Link == "" {
			t.Errorf("%s would be beside the link /lib", f.To)
		}
	}
	for _, want := range []string{"cat", "sh", "libc.so.6", "libm.so.6", "passwd"} {
		if !to[want] {
			t.Errorf("no %s in %v", want, to)
		}
	}
	if _, err := Userland(nil, "no-such-program"); err == nil {
		t.Error("a program that is not there was taken")
	}
}
