// images writes Tranche's image as an OCI archive (internal/release). `make images` calls it.
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	"tranche.dev/tranche/internal/release"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

func run() error {
	var c release.Config
	created := flag.Int64("created", 0, "the commit's `time`, in seconds of 1970")
	dir := flag.String("o", "build/image", "`directory` for the archive")
	flag.StringVar(&c.Name, "name", "", "`name` and tag of the image")
	flag.StringVar(&c.Version, "version", "", "`version`")
	flag.StringVar(&c.Revision, "revision", "", "`commit`")
	flag.StringVar(&c.License, "license", "LICENSE", "`file` with the licence")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "images [FLAGS] ARCH,BINARY,ASSETS,GLIBC,COPYRIGHT...")
		flag.PrintDefaults()
	}
	flag.Parse()
	c.Created = time.Unix(*created, 0)
	var platforms []release.Platform
	for _, arg := range flag.Args() {
		f := strings.Split(arg, ",")
		if len(f) != 5 {
			return fmt.Errorf("%q: ARCH,BINARY,ASSETS,GLIBC,COPYRIGHT", arg)
		}
		platforms = append(platforms, release.Platform{Arch: f[0], Binary: f[1], Assets: f[2], Glibc: f[3], GlibcCopyright: f[4]})
	}
	if err := os.MkdirAll(*dir, 0o755); err != nil {
		return err
	}
	files, err := release.Write(*dir, c, platforms)
	if err != nil {
		return err
	}
	for _, file := range files {
		info, err := os.Stat(file)
		if err != nil {
			return err
		}
		fmt.Printf("%s  %.1f MB\n", file, float64(info.Size())/1e6)
	}
	return nil
}
