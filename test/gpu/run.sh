#!/bin/sh
# Calibrates a GPU and runs the share scenarios on it; everything needed lies beside this file.
#
#   run.sh [--out DIR] [--gpu N] [--quick] [--sim] [FLAG...]
#
#   --out DIR   where the results go (./gpu-results)
#   --gpu N     the GPU to use (0); nothing else should run on it
#   --quick     a look: some minutes instead of an hour
#   --sim       the same scenarios on the simulated GPU instead, which is made like the calibrated
#               one if DIR has its calibration. No GPU is needed
#   FLAG...     for shares-real, as in: run.sh -cases 30/60 -runs 3
#
# Exit status: 0 all within their targets, 1 some missed, 2 something is wrong, 3 no GPU here.
set -eu

# CUDA counts GPUs as NVML does.
export CUDA_DEVICE_ORDER=PCI_BUS_ID
here=$(cd "$(dirname "$0")" && pwd)
out=gpu-results gpu=0 quick='' sim=''
while [ $# -gt 0 ]; do
	case $1 in
	--out) out=$2; shift 2 ;;
	--gpu) gpu=$2; shift 2 ;;
	--quick) quick=1; shift ;;
	--sim) sim=1; shift ;;
	--help) sed -n '2,/^set/{s/^# \{0,1\}//p}' "$0"; exit 0 ;;
	*) break ;;
	esac
done
mkdir -p "$out"

# shares LABEL FLAG...: the scenarios, with their table on the screen and in a file.
shares() {
	label=$1
	rm -f "$out/shares-$label.json"
	shift
	status=0
	{ "$here/shares-real" ${quick:+-quick} -bin "$here" -simctl "$here/simctl" -json "$out/shares-$label.json" \
		-svg "$out/shares-$label.svg" "$@" && echo 0 >"$out/status" || echo $? >"$out/status"; } 2>&1 |
		tee "$out/shares-$label.txt"
	read -r status <"$out/status"
	rm -f "$out/status"
	exit "$status"
}

if [ -n "$sim" ]; then
	like=
	[ ! -s "$out/machine.yaml" ] || like="-machine $out/machine.yaml"
	# shellcheck disable=SC2086 # a flag and its value, or nothing
	shares sim $like "$@"
fi

if ! [ -e /dev/nvidiactl ] || ! name=$("$here/calibrate" --check --gpu "$gpu" 2>"$out/why"); then
	echo "no GPU here: not run ($(cat "$out/why" 2>/dev/null || echo no /dev/nvidiactl))" >&2
	rm -f "$out/why"
	exit 3
fi
rm -f "$out/why"
echo "calibrating $name"
"$here/calibrate" ${quick:+--quick} --gpu "$gpu" --spec "$out/machine.yaml" >"$out/calibration.json"
grep -A6 '"spec"' "$out/calibration.json"
shares gpu -real -gpu "$gpu" "$@"
