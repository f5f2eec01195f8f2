#!/bin/sh
# SPDX-License-Identifier: MIT
# The launcher ./bellows with a real build: test_launcher.sh LAUNCHER BUILD TOOLCHAIN SYSTEM_DRIVER WORK
set -eu
launcher=$1 build=$2 toolchain=$3 system_driver=$4 work=$5
unset VK_DRIVER_FILES VK_ICD_FILENAMES VK_ADD_DRIVER_FILES VK_LOADER_DRIVERS_DISABLE

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

rm -rf "$work"
mkdir -p "$work/build" "$work/elsewhere"
cp "$launcher" "$work/bellows"
status=0
said=$("$work/bellows" info 2>&1) || status=$?
[ "$status" -eq 2 ] || fail "before a build the exit code is $status"
case $said in *cmake/quickstart.sh*) ;; *) fail "before a build it says: $said" ;; esac

ln -s "$build" "$work/build/release"
ln -s "$toolchain" "$work/build/toolchain"
ln -s ../bellows "$work/elsewhere/linked"
driver_of() { "$@" info --device cpu --json | sed -n 's/.*"driver": "\(.*\)",*/\1/p' | head -n 1; }
private=$(sed -n 's/^mesa-vulkan-drivers \([0-9.]*\).*/\1/p' "$toolchain/versions.txt")

case $(driver_of env VK_DRIVER_FILES="$work/build/toolchain/lvp_icd.json" "$work/bellows") in
*"Mesa $private"*) ;;
*) fail "the toolchain's driver, named by the user, is not used" ;;
esac
case $(driver_of env VK_DRIVER_FILES="$system_driver" "$work/bellows") in
'') fail "no device with the system's driver, named by the user" ;;
*"Mesa $private"*) fail "the user's VK_DRIVER_FILES does not win" ;;
esac
for program in "$work/bellows" "$work/elsewhere/linked"; do
    case $(driver_of "$program") in
    *"Mesa $private"*) ;;
    *) fail "$program does not take the newer lavapipe: $(driver_of "$program")" ;;
    esac
done
status=0
"$work/bellows" train --no-such-flag >/dev/null 2>&1 || status=$?
[ "$status" -eq 2 ] || fail "the program's exit code is lost: $status"
echo "launcher good"
