#!/bin/sh
# The libraries and `tranche run --sim` inside a Debian 11 file system (glibc 2.31): made once by
# debootstrap in build/debian11, entered by chroot in a mount namespace of its own. Needs root.
# Exit codes: 0 all well, 1 a failure, 3 it cannot be done here (not root, no network).
set -eu

cd "$(dirname "$0")/.."
build=$PWD/build
root=$build/debian11/root
PATH=$PATH:/usr/sbin:/sbin

unable() {
	echo "debian11: not tested: $1" >&2
	[ "${CI-}" != true ] || exit 1
	exit 3
}
fail() { echo "debian11: FAILED: $1" >&2; exit 1; }

[ "$(id -u)" = 0 ] || unable "needs root (chroot)"
command -v debootstrap >/dev/null || unable "no debootstrap: run \`make setup-e2e\`"

if [ ! -e "$root.complete" ]; then
	rm -rf "$root"
	mkdir -p "$root"
	uri=$(tools/fetch-nvidia.sh --mirror)
	echo "debian11: debootstrap bullseye from $uri" >&2
	debootstrap --variant=minbase bullseye "$root" "$uri" >"$root.log" 2>&1 || {
		tail -n 5 "$root.log" >&2
		rm -rf "$root"
		unable "debootstrap failed"
	}
	rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
	touch "$root.complete"
fi

if [ "${1-}" != inside ]; then
	exec unshare --mount --pid --fork -- "$0" inside
fi

mount --make-rprivate /
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/tmp"
mount --rbind /dev "$root/dev"
mkdir -p "$root/tmp/bin" "$root/tmp/lib" "$root/tmp/sim" "$root/tmp/driver"
cp "$build"/bin/tranche "$build"/bin/gpuload "$build"/bin/nvmlprobe "$root/tmp/bin/"
cp "$build"/lib/*.so.1 "$root/tmp/lib/"
cp "$build"/sim/*.so.1 "$build"/sim/simctl "$root/tmp/sim/"
ln -s ../sim/libcuda.so.1 "$root/tmp/driver/libcuda-driver.so.1"
ln -s ../sim/libnvidia-ml.so.1 "$root/tmp/driver/libnvidia-ml-driver.so.1"

# inside COMMAND...: in the file system, with a plain environment.
inside() {
	chroot "$root" /usr/bin/env -i PATH=/tmp/bin:/tmp/sim:/usr/bin:/bin HOME=/root TMPDIR=/tmp \
		TRANCHE_STATE_DIR=/tmp/state "$@"
}

glibc=$(inside ldd --version | head -n 1 | grep -o '[0-9.]*$')
[ "$glibc" = 2.31 ] || fail "glibc is $glibc, not Debian 11's 2.31"

# Every symbol of each library is found: the loader would say so, and go on.
for library in lib/libcuda.so.1 lib/libnvidia-ml.so.1 sim/libcuda.so.1 sim/libnvidia-ml.so.1; do
	said=$(inside LD_BIND_NOW=1 LD_LIBRARY_PATH=/tmp/driver LD_PRELOAD=/tmp/$library /bin/true 2>&1) ||
		fail "$library: $said"
	[ -z "$said" ] || fail "$library: $said"
done
inside simctl models >/dev/null || fail "simctl"

# field NAME: a number of the JSON object in $out.
field() { echo "$out" | sed -n "s/.*\"$1\": *\([0-9.]*\).*/\1/p" | head -n 1; }

# A slice of 2 GiB: with the context, three times 512 MiB fit and the fourth is refused, by CUDA.
out=$(inside tranche run --sim a100-80g --memory 2Gi -- gpuload --alloc plain:512Mi:6 --json) ||
	fail "tranche run, memory: $out"
echo "$out"
[ "$(field count)" = 3 ] || fail "three allocations fit, not $(field count)"
echo "$out" | grep -q CUDA_ERROR_OUT_OF_MEMORY || fail "the fourth was refused for another reason"

# A fifth of a GPU, after the first two seconds.
out=$(inside tranche run --sim a100-80g --cores 20 -- gpuload --kernel 1ms --time 4 --json) ||
	fail "tranche run, compute: $out"
echo "$out"
field share_after_2s | awk '{ exit !($1 > 0.17 && $1 < 0.23) }' ||
	fail "20 cores gave a share of $(field share_after_2s)"

code=0
inside tranche run --sim a100-80g --memory 1Gi -- sh -c 'exit 7' || code=$?
[ "$code" = 7 ] || fail "the command's exit code was 7, tranche run's $code"
inside tranche ps >/dev/null || fail "tranche ps"
echo "debian11: libraries, tranche run --sim and gpuload work on Debian 11 (glibc $glibc)"
