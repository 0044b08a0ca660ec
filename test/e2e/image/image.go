// Package image makes container images for the bed from files of this machine.
package image

import "tranche.dev/tranche/internal/ociimage"

// What an image is made of, and how it is written, is ociimage's.
type (
	Image = ociimage.Image
	Layer = ociimage.Layer
	File  = ociimage.File
)

// Write writes an image to a file.
func Write(file string, i Image) error { return ociimage.Write(file, i) }
