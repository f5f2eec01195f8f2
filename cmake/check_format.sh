#!/bin/sh
# SPDX-License-Identifier: MIT
# Checks (or with --fix, applies) the formatting of all C++ sources.
#   cmake/check_format.sh [--fix]
set -eu
cd "$(dirname "$0")/.."
program=
for name in clang-format-19 clang-format; do
    if command -v "$name" >/dev/null && "$name" --version | grep -q 'version 19\.'; then
        program=$name
        break
    fi
done
[ -n "$program" ] || { echo "$0: needs clang-format 19 (package clang-format-19)" >&2; exit 1; }
mode="--dry-run --Werror"
[ "${1:-}" != --fix ] || mode=-i
find base engine fp8 comm pipeline model text checkpoint run plan train serve verify app examples tests bench cmake \
    -name '*.cpp' -o -name '*.hpp' | sort | xargs "$program" $mode --style=file
