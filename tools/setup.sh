#!/bin/sh
# Installs what building, testing and the demo need, on a Debian-like machine that has git, Go and
# make. As root it installs with apt-get what is missing and says what; else it prints the line that
# would. Does nothing where everything is there.
#   setup.sh          for `make`, `make test` and `make demo`
#   setup.sh e2e      also for `make e2e` and `make arm64`
set -eu

# packages: one "PACKAGE PROBE" a line. PROBE is a command, or a file if it begins with /.
packages() {
	cat <<-LIST
		gcc gcc
		libc6-dev /usr/include/stdio.h
		binutils ld
		ca-certificates /etc/ssl/certs/ca-certificates.crt
		util-linux flock
		ffmpeg ffmpeg
	LIST
	[ "${1-}" = e2e ] && cat <<-LIST
		debootstrap debootstrap
		debian-archive-keyring /usr/share/keyrings/debian-archive-keyring.gpg
		gcc-aarch64-linux-gnu aarch64-linux-gnu-gcc
		libc6-dev-arm64-cross /usr/aarch64-linux-gnu/include/stdio.h
		pkg-config pkg-config
		libseccomp-dev /usr/include/seccomp.h
		busybox-static busybox
		iproute2 ip
		nftables nft
	LIST
	return 0
}

# Go is not a Debian package here: Debian 12's is too old.
if ! command -v go >/dev/null 2>&1; then
	echo "setup: Go is missing: install $(sed -n 's/^go /Go /p' "$(dirname "$0")/../go.mod") or newer (https://go.dev/dl)," >&2
	echo "setup: and put its bin directory into PATH" >&2
	exit 1
fi

# debootstrap is in /usr/sbin, which a user's path need not have.
PATH=$PATH:/usr/sbin:/sbin
missing=$(packages "$@" | while read -r package probe; do
	case $probe in
	/*) [ -e "$probe" ] || echo "$package" ;;
	*) command -v "$probe" >/dev/null 2>&1 || echo "$package" ;;
	esac
done | tr '\n' ' ')
[ -n "$missing" ] || exit 0

install="apt-get install -y --no-install-recommends $missing"
if ! command -v apt-get >/dev/null 2>&1; then
	echo "setup: please install what these Debian packages hold: $missing" >&2
	exit 1
fi
if [ "$(id -u)" != 0 ]; then
	echo "setup: missing: $missing" >&2
	echo "setup: run: sudo apt-get update && sudo $install" >&2
	exit 1
fi
echo "setup: installing $missing" >&2
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# shellcheck disable=SC2086
if ! { apt-get -qq update && apt-get -qq -o Dpkg::Use-Pty=0 ${install#apt-get}; } >"$log" 2>&1; then
	tail -n 20 "$log" >&2
	echo "setup: $install failed" >&2
	exit 1
fi
