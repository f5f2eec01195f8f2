// SPDX-License-Identifier: MIT
// Rows128 blocks (fp8/recipe.hpp) of rows that a kernel computes, shared out as include/rows.glsl
// says: to an invocation, or to a workgroup whose invocations hold up to `kept` times `wide`
// neighbouring fours of elements each at once, local_size * wide apart; local_size is then a
// multiple of 32 / wide, the invocations of a block.
// ROW_SETS (1 or 2): how many results are quantised side by side. NOTED_STEPS, if not ROW_SETS * kept:
// how many maxima an invocation notes before they are folded.
// The kernel declares the constants local_size, row_per_workgroup, kept, wide, format, rule.
// Shared memory: about (4 + wide / 4) * NOTED_STEPS * local_size bytes, beside that of
// include/rows.glsl.
#ifndef BELLOWS_FP8_ROW_BLOCKS_GLSL
#define BELLOWS_FP8_ROW_BLOCKS_GLSL

#include "fp8.glsl"
#include "rows.glsl"

const uint kBlockFours = 32u;
const uint kBlockLanes = kBlockFours / wide;
#ifndef NOTED_STEPS
#define NOTED_STEPS (ROW_SETS * kept)
#endif
const uint kSlots = NOTED_STEPS * local_size;
const uint kBlocks = kSlots / kBlockLanes;

shared uvec4 lane_most[kSlots / 4u];
shared float block_scale[kBlocks + 1u], block_inverse[kBlocks + 1u];

uint most4(uvec4 x) {
    return max(max(x.x, x.y), max(x.z, x.w));
}

uint magnitude4(vec4 x) {
    return most4(floatBitsToUint(x) & 0x7FFFFFFFu);
}

struct Block {
    float scale;
    float inverse;
};

Block block_of(uint most) {
    float scale = fp8_scale(format, rule, most);
    return Block(scale, fp8_inverse(rule, scale));
}

bool fits_block(Block block) {
    return fp8_block_fits(format, block.inverse);
}

// `fits`: the block is known to, which saves arithmetic.
uint encode_block4(vec4 x, Block block, bool fits) {
    return fits ? fp8_encode_fitting4(format, x, block.inverse)
                : fp8_encode_any4(format, x, block.inverse);
}

// The workgroup's way: each invocation notes the largest magnitude of its fours, absent ones as 0,
// by `k` = set * kept + step; all call fold_blocks(); then each asks for the blocks in which its
// fours stand.
void note_most(uint k, uint most) {
    uint at = k * local_size + gl_LocalInvocationIndex;
    lane_most[at / 4u][at % 4u] = most;
}

uint folded_most(uint b) {
    uvec4 most = uvec4(0);
    [[unroll]] for (uint i = 0u; i < kBlockLanes / 4u; ++i) {
        most = max(most, lane_most[b * (kBlockLanes / 4u) + i]);
    }
    return most4(most);
}

void keep_block(uint b, uint most) {
    Block block = block_of(most);
    block_scale[b] = block.scale;
    block_inverse[b] = block.inverse;
}

void fold_blocks() {
    barrier();
    for (uint b = gl_LocalInvocationIndex; b < kBlocks; b += local_size) {
        keep_block(b, folded_most(b));
    }
    barrier();
}

Block folded_block(uint k) {
    uint b = (k * local_size + gl_LocalInvocationIndex) / kBlockLanes;
    return Block(block_scale[b], block_inverse[b]);
}

// The sum over a row of what its invocations' `wide` columns of fours hold: with local_size * wide of
// 32, 64 or 128 the order is that of rows.glsl's row_sum with so many invocations of one column each.
shared float column_sums[row_per_workgroup != 0u ? local_size * wide : 1u];
shared vec4 folded_sums[8];

float wide_row_sum(float x[wide]) {
    if (row_per_workgroup == 0u) {
        return x[0];
    }
    const uint columns = local_size * wide;
    uint lane = gl_LocalInvocationIndex;
    [[unroll]] for (uint w = 0u; w < wide; ++w) {
        column_sums[lane * wide + w] = x[w];
    }
    barrier();
    for (uint i = lane; i < 32u; i += local_size) {
        precise float sum = column_sums[i];
        if (columns == 128u) {
            precise float odd = column_sums[(i + 32u) % columns] + column_sums[(i + 96u) % columns];
            sum = sum + column_sums[(i + 64u) % columns];
            sum = sum + odd;
        } else if (columns == 64u) {
            sum = sum + column_sums[(i + 32u) % columns];
        }
        folded_sums[i / 4u][i % 4u] = sum;
    }
    barrier();
    vec4 sums[4];
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        sums[i] = folded_sums[i] + folded_sums[i + 4u];
    }
    vec4 four = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    vec2 two = four.xy + four.zw;
    return two.x + two.y;
}

// Chunks of a row's fours, as many as a workgroup, or an invocation's block, takes at once.
const uint kChunk = row_per_workgroup != 0u ? kept * local_size * wide : kBlockFours;

#endif
