#!/bin/sh
# SPDX-License-Identifier: MIT
#
# Runs a program with the newer lavapipe of the private toolchain folder. That driver needs newer
# system libraries than an older distribution has, so a copy of the program is made whose ELF
# interpreter and library path point into the folder; what the folder lacks (MPI, sanitizers) still
# comes from the system. The copy can start itself again like any other program.
#
#   cmake/with_new_lavapipe.sh PROGRAM [ARGUMENTS...]     run the copy
#   cmake/with_new_lavapipe.sh --copy PROGRAM [COPY]      only make it
#
# COPY is ../bin-new/NAME beside the program's folder. BELLOWS_TOOLCHAIN names another folder than
# build/toolchain of this source tree.
set -eu

toolchain=${BELLOWS_TOOLCHAIN:-$(cd "$(dirname "$0")/.." && pwd)/build/toolchain}
only_copy=no
if [ "${1:-}" = --copy ]; then
    only_copy=yes
    shift
fi
[ $# -ge 1 ] || { echo "usage: $0 [--copy] PROGRAM [ARGUMENTS...]" >&2; exit 2; }
program=$1
shift

[ -e "$toolchain/loader" ] || {
    echo "$0: no toolchain folder at $toolchain; run cmake/toolchain.sh" >&2
    exit 1
}
command -v patchelf >/dev/null || { echo "$0: needs the program 'patchelf'" >&2; exit 1; }
toolchain=$(cd "$toolchain" && pwd)

if [ "$only_copy" = yes ] && [ $# -ge 1 ]; then
    copy=$1
else
    copy=$(cd "$(dirname "$program")" && pwd)/../bin-new/$(basename "$program")
fi
if [ ! -e "$copy" ] || [ "$program" -nt "$copy" ] || [ "$only_copy" = yes ]; then
    mkdir -p "$(dirname "$copy")"
    new=$copy.$$
    cp --reflink=auto "$program" "$new"
    # An old-style run path: it also serves the libraries that a driver or plug-in asks for.
    old_path=$(patchelf --print-rpath "$new")
    patchelf --set-interpreter "$toolchain/loader" --force-rpath \
        --set-rpath "$toolchain/lib${old_path:+:$old_path}" "$new"
    mv "$new" "$copy"
fi
[ "$only_copy" = no ] || exit 0

VK_DRIVER_FILES=$toolchain/lvp_icd.json
VK_ADD_LAYER_PATH=$toolchain/layers
export VK_DRIVER_FILES VK_ADD_LAYER_PATH
exec "$copy" "$@"
