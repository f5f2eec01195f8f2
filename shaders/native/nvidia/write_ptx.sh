#!/bin/sh
# SPDX-License-Identifier: MIT
#
# Writes the PTX of Hopper's kernels beside their sources, where the build takes it from. Building
# Bellows needs no CUDA; changing these kernels does.
#
#   write_ptx.sh           writes all files
#   write_ptx.sh --check   compares them with what the sources give; exits with 77 where there is no
#                          nvcc, or another version than the one that has written the files
#
# NVCC names the compiler, by default nvcc.
set -eu

cd "$(dirname "$0")"
nvcc=${NVCC:-nvcc}
check=${1:-}
folder=.
if [ "$check" = --check ]; then
    if ! command -v "$nvcc" >/dev/null; then
        echo "there is no $nvcc"
        exit 77
    fi
    release=$("$nvcc" --version | sed -n 's/.*release .*, \(V[0-9.]*\)$/\1/p')
    if ! grep -q "Cuda compilation tools, release .*, $release\$" gemm_bf16_nt_256.ptx; then
        echo "nvcc $release has not written these files"
        exit 77
    fi
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi

# write NAME SOURCE DEFINES...
write() {
    file=$1.ptx
    source=$2
    shift 2
    "$nvcc" -std=c++17 -O3 -ptx -arch=sm_90a "$@" -o "$folder/$file" "$source"
    # The oldest that has tensormap.replace: drivers from 545 on take it.
    sed -i 's/^\.version .*/.version 8.3/' "$folder/$file"
    [ "$folder" = . ] || cmp "$folder/$file" "$file"
}
form=0
for name in nt nn tn; do
    for width in 256 64; do
        write gemm_bf16_${name}_$width gemm_bf16.cu -DFORM=$form -DWIDTH=$width
    done
    form=$((form + 1))
done
write paged_latent paged_latent.cu
write gemm_bf16_few gemm_bf16_few.cu
write gemm_fp8_few gemm_fp8_few.cu
write experts_fp8 experts_fp8.cu
write route route.cu
write latent_values latent_values.cu
form=0
for name in nt tn; do
    for height in 256 128; do
        write gemm_fp8_${name}_$height gemm_fp8.cu -DFORM=$form -DHEIGHT=$height
    done
    form=$((form + 1))
done
