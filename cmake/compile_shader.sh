#!/bin/sh
# SPDX-License-Identifier: MIT
#
# Compiles one variant of a shader: glslc, spirv-val, spirv-opt, spirv-val.
#
#   compile_shader.sh RAW FINAL SHADERS GENERATED KERNEL SOURCE TOOLS VALIDATE OPTIMISE COMPILER
#                     ARGUMENTS...
#
# SHADERS and GENERATED are the folders of what is included, KERNEL and SOURCE the variant's own
# files in them. RAW, RAW.d and FINAL are written. With BELLOWS_SHADER_CACHE, a folder, what has
# been compiled before from the same files by the same tools (TOOLS: their versions) and ARGUMENTS
# comes from there, in whichever build folder that was.
set -eu

raw=$1 final=$2 shaders=$3 generated=$4 kernel=$5 source=$6 tools=$7 validate=$8 optimise=$9
shift 9
compiler=$1
shift

compile() {
    "$compiler" "$@" "$source" "-I$shaders/include" "-I$generated" \
        -MD -MF "$raw.d" -MT "$raw" -o "$raw"
    "$validate" --target-env vulkan1.3 --scalar-block-layout "$raw"
    "$optimise" --target-env=vulkan1.3 -O --preserve-interface "$raw" -o "$final"
    "$validate" --target-env vulkan1.3 --scalar-block-layout "$final"
}

if [ -z "${BELLOWS_SHADER_CACHE:-}" ]; then
    compile "$@"
    exit 0
fi

key=$( (echo "$tools" "$@" && cat "$0" "$source" "$kernel" "$shaders"/include/*) |
    sha256sum | cut -c1-40)
kept=$BELLOWS_SHADER_CACHE/${key%"${key#??}"}/$key

if [ -f "$kept.spv" ] && cp "$kept.raw.spv" "$raw" && cp "$kept.spv" "$final"; then
    touch -c "$kept.raw.spv" "$kept.spv" "$kept.d" # in use
    sed -e "s|@RAW@|$raw|g" -e "s|@GENERATED@|$generated|g" -e "s|@SHADERS@|$shaders|g" "$kept.d" >"$raw.d"
    exit 0
fi

compile "$@"
# Whole files only, the one that is asked for last.
mkdir -p "$(dirname "$kept")"
sed -e "s|$raw|@RAW@|g" -e "s|$generated|@GENERATED@|g" -e "s|$shaders|@SHADERS@|g" "$raw.d" >"$kept.d.$$"
cp "$raw" "$kept.raw.spv.$$"
cp "$final" "$kept.spv.$$"
for end in d raw.spv spv; do
    mv "$kept.$end.$$" "$kept.$end"
done
