#!/bin/sh
# embed.sh BUILD DIR NAME...: puts BUILD/NAME, without debug information and packed, at DIR/NAME.gz and lists
# the SHA-256 of what was packed in DIR/SHA256SUMS. STRIP: the strip of another processor.
set -eu
build=$1 dir=$2
shift 2
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
for name in "$@"; do
	mkdir -p "$tmp/$(dirname "$name")" "$dir/$(dirname "$name")"
	"${STRIP:-strip}" --strip-debug -o "$tmp/$name" "$build/$name"
	gzip -9 -n <"$tmp/$name" >"$dir/$name.gz.new"
	mv "$dir/$name.gz.new" "$dir/$name.gz"
done
(cd "$tmp" && sha256sum "$@") >"$dir/SHA256SUMS.new"
mv "$dir/SHA256SUMS.new" "$dir/SHA256SUMS"
