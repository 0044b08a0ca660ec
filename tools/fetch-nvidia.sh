#!/bin/sh
# Downloads the NVIDIA libraries that the tests compare with, from Debian's non-free component:
#
#   build/nvidia/535/{libcuda.so.1,libnvidia-ml.so.1,nvidia-smi}   bookworm, CUDA 12.2
#   build/nvidia/550/{libcuda.so.1,libnvidia-ml.so.1,nvidia-smi}   trixie, CUDA 12.4
#   build/nvidia/cudart11/libcudart.so                             bookworm, CUDA 11.8
#   build/nvidia/cudart12/libcudart.so                             trixie, CUDA 12.4
#   build/nvidia/root535/                                          only with --root: most of driver 535, as Debian lays it out
#
# Nothing is installed on the machine and its own apt configuration stays as it is: sources, lists
# and cache are private, below build/nvidia/apt. The files are NVIDIA's and are never committed.
#
# Exit codes: 0 all files are there, 3 they cannot be had here (no network, no apt, not x86-64),
# 1 something is wrong. Safe to run at any time; a second run does nothing.
# With --mirror it only prints which Debian mirror this machine uses.
set -eu

die() { echo "fetch-nvidia: $2" >&2; exit "$1"; }

cd "$(dirname "$0")/.."
root=$PWD/build/nvidia
keyrings=/usr/share/keyrings

# The mirror that this machine already uses for Debian itself, else Debian's own.
mirror() {
	{
		sed -n 's/^URIs:[[:space:]]*//p' /etc/apt/sources.list.d/*.sources
		sed -n 's/^deb[[:space:]]\(\[[^]]*\][[:space:]]*\)\{0,1\}\([^[:space:]]*\).*/\2/p' \
			/etc/apt/sources.list /etc/apt/sources.list.d/*.list
	} 2>/dev/null | tr ' ' '\n' | sed 's|/*$||' | grep -E '^https?://.*/debian$' | head -n 1
}
uri=$(mirror)
uri=${uri:-http://deb.debian.org/debian}

if [ "${1-}" = --mirror ]; then
	echo "$uri"
	exit 0
fi

complete() {
	for d in 535 550; do
		for f in libcuda.so.1 libnvidia-ml.so.1 nvidia-smi; do
			[ -s "$root/$d/$f" ] || return 1
		done
	done
	[ -s "$root/cudart11/libcudart.so" ] && [ -s "$root/cudart12/libcudart.so" ]
}

# What a node's driver has besides: compilers, debugger, codecs, GL.
root_packages="libcuda1 libnvidia-ml1 nvidia-smi libnvidia-ptxjitcompiler1 libnvidia-nvvm4 libnvidia-pkcs11-openssl3
	libcudadebugger1 libnvcuvid1 libnvidia-encode1 libnvidia-allocator1 libnvidia-cfg1 nvidia-opencl-icd nvidia-cuda-mps
	libnvidia-glcore libnvidia-eglcore libglx-nvidia0 libegl-nvidia0"
want_root=
if [ "${1-}" = --root ]; then
	want_root=1
fi

complete && { [ -z "$want_root" ] || [ -d "$root/root535" ]; } && exit 0
mkdir -p "$root"
if command -v flock >/dev/null 2>&1 && [ -z "${FETCH_NVIDIA_LOCKED-}" ]; then
	FETCH_NVIDIA_LOCKED=1 exec flock "$root/lock" "$0" "$@" # two suites may start at once
fi

[ "$(uname -m)" = x86_64 ] || die 3 "the files are for x86-64; this machine is $(uname -m)"
for tool in apt-get dpkg-deb; do
	command -v "$tool" >/dev/null 2>&1 || die 3 "no $tool: not a Debian-like machine"
done
[ -r "$keyrings/debian-archive-keyring.gpg" ] ||
	die 3 "no $keyrings/debian-archive-keyring.gpg: install debian-archive-keyring"

# Trixie is also the older machine's keyring's to verify: Debian adds the next release's keys to
# stable well before it comes out.
setup_apt() {
	apt=$root/apt
	mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/empty.d"
	for suite in bookworm trixie; do
		echo "deb [arch=amd64 signed-by=$keyrings/debian-archive-keyring.gpg] $uri $suite non-free"
	done >"$apt/sources.list"
	cat >"$apt/conf" <<-CONF
		Dir::Etc::sourcelist "$apt/sources.list";
		Dir::Etc::sourceparts "$apt/empty.d";
		Dir::Etc::preferencesparts "$apt/empty.d";
		Dir::State::lists "$apt/lists";
		Dir::Cache "$apt/cache";
		Dir::Cache::pkgcache "";
		Acquire::Languages "none";
		Acquire::Retries "3";
		Acquire::http::Timeout "20";
		Acquire::https::Timeout "20";
		APT::Sandbox::User "root";
		APT::Update::Post-Invoke-Success "";
		APT::Update::Error-Mode "any";
		#clear APT::Update::Post-Invoke;
		#clear APT::Update::Post-Invoke-Success;
		#clear Acquire::IndexTargets::deb::DEP-11;
	CONF
	APT_CONFIG=$apt/conf
	export APT_CONFIG
}

# fetch PACKAGE SUITE DIRECTORY: download and unpack. The exact version is asked for, because
# `apt-get download pkg/suite` would warn about, and mix, versions.
fetch() {
	version=$(apt-cache madison "$1" | awk -F'|' -v s="$2/" 'index($3, s) { gsub(/ /, "", $2); print $2; exit }')
	[ -n "$version" ] || die 1 "$uri has no $1 in $2"
	mkdir -p "$root/debs"
	(cd "$root/debs" && apt-get -qq download "$1=$version") || die 3 "cannot download $1 $version from $uri"
	mkdir -p "$3"
	dpkg-deb -x "$root/debs/$1_$(echo "$version" | sed 's/:/%3a/g')_amd64.deb" "$3"
	rm -f "$root/debs/$1"_*.deb
}

# take DIRECTORY NAME-PATTERN TARGET: one regular file of an unpacked package's /usr/lib, put in
# place at once.
take() {
	file=$(find "$1/usr/lib" -type f -name "$2" | head -n 1)
	[ -n "$file" ] || die 1 "no $2 in $1"
	mkdir -p "$(dirname "$3")"
	cp "$file" "$3.new"
	chmod 755 "$3.new"
	mv "$3.new" "$3"
}

setup_apt
echo "fetch-nvidia: from $uri (non-free), about 45 MB" >&2
apt-get -qq update >"$root/apt/update.log" 2>&1 || {
	grep -E '^(E|W|Err)' "$root/apt/update.log" | head -n 3 >&2
	die 3 "$uri cannot be reached or verified"
}

tmp=$root/unpack
for pair in 535:bookworm 550:trixie; do
	complete && break
	d=${pair%%:*} suite=${pair##*:}
	rm -rf "$tmp"
	fetch libcuda1 "$suite" "$tmp"
	take "$tmp" 'libcuda.so.*' "$root/$d/libcuda.so.1"
	fetch libnvidia-ml1 "$suite" "$tmp"
	take "$tmp" 'libnvidia-ml.so.*' "$root/$d/libnvidia-ml.so.1"
	fetch nvidia-smi "$suite" "$tmp"
	take "$tmp" nvidia-smi "$root/$d/nvidia-smi"
done
for pair in 11:bookworm:libcudart11.0 12:trixie:libcudart12; do
	complete && break
	rest=${pair#*:}
	rm -rf "$tmp"
	fetch "${rest#*:}" "${rest%:*}" "$tmp"
	take "$tmp" 'libcudart.so.*' "$root/cudart${pair%%:*}/libcudart.so"
done
if [ -n "$want_root" ] && [ ! -d "$root/root535" ]; then
	rm -rf "$tmp"
	for package in $root_packages; do
		fetch "$package" bookworm "$tmp"
	done
	# As the packages' own scripts would.
	mkdir -p "$tmp/etc/alternatives" "$tmp/usr/bin"
	ln -s /usr/lib/nvidia/current/nvidia-smi "$tmp/etc/alternatives/nvidia--nvidia-smi"
	ln -s /etc/alternatives/nvidia--nvidia-smi "$tmp/usr/bin/nvidia-smi"
	mv "$tmp" "$root/root535"
fi
rm -rf "$tmp"
complete || die 1 "files are missing in $root after the download"
