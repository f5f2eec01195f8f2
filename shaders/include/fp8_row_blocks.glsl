// SPDX-License-Identifier: MIT
// Rows128 blocks (fp8/recipe.hpp) of rows that a kernel computes, shared out as include/rows.glsl
// says: to an invocation, or to a workgroup whose invocations hold up to `kept` fours of elements
// each at once, local_size apart; local_size is then a multiple of 32, the fours of a block.
// ROW_SETS (1 or 2): how many results are quantised side by side.
// The kernel declares the constants local_size, row_per_workgroup, kept, format, rule.
// Shared memory: 5 * ROW_SETS * kept * local_size bytes, beside that of include/rows.glsl.
#ifndef BELLOWS_FP8_ROW_BLOCKS_GLSL
#define BELLOWS_FP8_ROW_BLOCKS_GLSL

#include "fp8.glsl"
#include "rows.glsl"

const uint kBlockFours = 32u;
const uint kSlots = ROW_SETS * kept * local_size;

shared uvec4 four_most[kSlots / 4u];
shared uvec4 quad_most[kSlots / 16u];

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

// Codes of four elements of a block; NaN where its scale is.
uint encode_block4(vec4 x, Block block) {
    bool poisoned = (floatBitsToUint(block.inverse) & 0x7FFFFFFFu) > FP8_INFINITY;
    return poisoned ? FP8_NAN_CODES : fp8_encode_finite4(format, x * block.inverse);
}

// The workgroup's way: each invocation notes all its fours, absent ones as 0, by `k` = set * kept +
// step; all call fold_blocks(); then each asks for the blocks in which its fours stand.
void note_four(uint k, vec4 x) {
    uint at = k * local_size + gl_LocalInvocationIndex;
    four_most[at / 4u][at % 4u] = magnitude4(x);
}

void fold_blocks() {
    barrier();
    for (uint at = gl_LocalInvocationIndex; at < kSlots / 4u; at += local_size) {
        quad_most[at / 4u][at % 4u] = most4(four_most[at]);
    }
    barrier();
}

Block folded_block(uint k) {
    uint at = (k * local_size + gl_LocalInvocationIndex) / kBlockFours * 2u;
    return block_of(most4(max(quad_most[at], quad_most[at + 1u])));
}

// Chunks of a row's fours, as many as a workgroup, or an invocation's block, takes at once.
const uint kChunk = row_per_workgroup != 0u ? kept * local_size : kBlockFours;

#endif
