#!/bin/sh
# SPDX-License-Identifier: MIT
#
# Measures what docs/results.md quotes of a GPU, in one run of about five minutes on an H200:
#
#   bench/gpu_figures.sh OUT [PART...]
#
# OUT gets a JSON file of each part, for bench/compare.py, and table.txt. Parts, by default all in
# this order: contiguous gradients masked bf16 ids layer rates kernels peer. The part `tiles` times
# every tile of every variant, for whoever looks for a better one. From the environment:
#   BELLOWS_BIN      folder of bellows and bench_*, by default build/release/bin
#   BELLOWS_DEVICE   by default gpu
#   BENCH_SECONDS    least time of each row, by default 0.1
#   GGML_TEST        ggml's test-backend-ops, built with Vulkan: the peer of `ids`; without it the
#                    part is left out
set -u

cd "$(dirname "$0")/.."
[ $# -gt 0 ] || {
    sed -n '4,17s/^# \{0,1\}//p' "$0" >&2
    exit 2
}
out=$1
shift
mkdir -p "$out" || exit 2
[ $# -gt 0 ] || set -- contiguous gradients masked bf16 ids layer rates kernels peer
bin=${BELLOWS_BIN:-build/release/bin}
export BELLOWS_DEVICE="${BELLOWS_DEVICE:-gpu}"
failed=0

# What failed is named at the end; the other parts are measured all the same.
measure() { # NAME PROGRAM OPTIONS...
    name=$1
    program=$2
    shift 2
    started=$(date +%s)
    echo "== $name: $program $*"
    "$bin/$program" --seconds "${BENCH_SECONDS:-0.1}" --json "$out/$name.json" "$@" || {
        echo "== $name FAILED"
        failed=$((failed + 1))
    }
    echo "== $name took $(($(date +%s) - started)) s"
}

training=4x8192x4096x7168,4x8192x7168x2048,8x4096x4096x7168,8x4096x7168x2048
decoding=$(for rows in 1 8 20 64; do
    printf '32x%sx4096x7168,32x%sx7168x2048,' "$rows" "$rows"
done)
decoding=${decoding%,}

part_contiguous() {
    measure contiguous_prepacked bench_grouped_gemm --a fp8 --b prepacked --ids none \
        --layout contiguous,dgrad --shape "$training"
    measure contiguous_fp8 bench_grouped_gemm --a fp8 --b fp8 --ids none --layout contiguous \
        --shape "$training"
}
part_gradients() {
    measure weight_gradient bench_grouped_gemm --a fp8 --b fp8 --ids none --layout k \
        --shape "$training"
}
part_masked() {
    measure masked_prepacked bench_grouped_gemm --a fp8 --b prepacked --ids none --layout masked \
        --shape "$decoding"
    measure masked_fp8 bench_grouped_gemm --a fp8 --b fp8 --ids none --layout masked \
        --shape "$decoding"
}
part_bf16() {
    measure bf16 bench_grouped_gemm --a bf16 --b bf16 --ids none --layout contiguous \
        --shape "$training"
}
part_ids() {
    measure ids_prepacked bench_grouped_gemm --a fp8 --b prepacked --filter mul_mat_id
    measure ids_fp8 bench_grouped_gemm --a fp8 --b fp8 --filter mul_mat_id
}
part_layer() {
    measure moe_layer bench_moe_layer
}
part_tiles() {
    set -- bench_grouped_gemm --ids none --tiles
    measure tiles_direct "$@" --a bf16 --b bf16 --layout contiguous --variant direct \
        --shape "$training"
    measure tiles_packed "$@" --a fp8 --b prepacked --layout contiguous,dgrad --variant packed \
        --shape "$training"
    measure tiles_gradient "$@" --a fp8 --b fp8 --layout k --variant packed --shape "$training"
    measure tiles_decoding_packed "$@" --a fp8 --b prepacked --layout masked --variant packed \
        --shape "$decoding"
    measure tiles_decoding_streamed "$@" --a fp8 --b fp8 --layout masked --variant streamed \
        --shape "$decoding"
}
part_rates() {
    measure quantize bench_fp8_quantize
    measure permute bench_permute
}
part_kernels() {
    echo "== kernels: bellows info --kernels --retune"
    "$bin/bellows" info --kernels --retune --device "$BELLOWS_DEVICE" || failed=$((failed + 1))
}
part_peer() {
    if [ -z "${GGML_TEST:-}" ]; then
        echo "== peer: left out, GGML_TEST names no program"
        return
    fi
    echo "== peer: $GGML_TEST perf -o MUL_MAT_ID"
    "$GGML_TEST" perf -o MUL_MAT_ID || failed=$((failed + 1))
}

for part; do
    case $part in
    contiguous | gradients | masked | bf16 | ids | layer | rates | kernels | peer | tiles) ;;
    *)
        echo "gpu_figures: there is no part '$part'" >&2
        exit 2
        ;;
    esac
done
# A pipe has the exit status of its end, so the count goes through a file.
{
    for part; do
        "part_$part"
    done
    echo "$failed" >"$out/failed"
} 2>&1 | tee "$out/table.txt"
failed=$(cat "$out/failed")
rm -f "$out/failed"
[ "$failed" = 0 ] || {
    echo "gpu_figures: $failed of the programs failed; see $out/table.txt" >&2
    exit 1
}
