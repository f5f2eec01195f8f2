// SPDX-License-Identifier: MIT
// SwiGLU (include/swiglu.glsl) to E4M3 or E5M2 with a scale per 128 columns: fp8/recipe.hpp, Rows128.
// One pass over memory.
//   gate_up   [rows, 2 * ffn]: gate in the first ffn columns, up in the others; f32, bf16 or bytes
//   gate_up_scales [rows, ceil(2 * ffn / 128)] f32, variants fp8 and fp8_f16 only
//   row_weight [rows] f32, used if has_row_weight; row_count: see include/row_counts.glsl; rows
//   that are not there are neither read nor written
//   codes     [rows, ffn] bytes, zeros up to codes4 fours; scales [rows, ceil(ffn / 128)] f32
// Strides in fours of elements, those of scales in words.
// Dispatch: x as include/rows.glsl says, y = chunks of a row (grid-stride): kept * local_size * wide
// fours for a workgroup per row, a block of 128 columns for an invocation per row, which reads it
// again from the cache. ffn is a multiple of 4 * wide; 16-byte loads: wide is 1 for f32, 2 for bf16,
// 4 for bytes, or 1. Shared memory: include/fp8_row_blocks.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/fp8_four.glsl"
#include "include/swiglu.glsl"
#include "fp8_swiglu.kernel.glsl"
#include "include/row_counts.glsl"
#define ROW_SETS 1u
#include "include/fp8_row_blocks.glsl"
#include "include/fp8_wide.glsl"

uvec2 gate_up_base, codes_base;

Raw4 read(uint row, uint c) {
    return READ4(push.operands.gate_up, row, push.gate_up_stride4, push.operands.gate_up_scales,
                 push.gate_up_scales_stride, c);
}

vec4 hidden(Raw4 gate, Raw4 up, float weight) {
    return swiglu4(VALUE4(gate), VALUE4(up), weight);
}

void store(uint row, uint c, vec4 y, Block block) {
    push.operands.codes.v[row * push.codes_stride4 + c] = encode_block4(y, block, false);
}

void store_scale(uint row, uint c, Block block) {
    push.operands.scales.v[row * push.scales_stride + c / kBlockFours] = block.scale;
}

void store_zeros(uint row, uint c) {
    push.operands.codes.v[row * push.codes_stride4 + c] = 0u;
}

// The `wide` fours from c on.
void read_fours(uint row, uint c, out Raw4 raw[wide]) {
    uint at = row * push.gate_up_stride4 + c;
#if INPUT_FP8
    uint codes[wide];
    read_codes(gate_up_base, at, codes);
    float scale = push.operands.gate_up_scales.v[row * push.gate_up_scales_stride + c / 32u];
    [[unroll]] for (uint w = 0u; w < wide; ++w) {
        raw[w] = Raw4(codes[w], scale);
    }
#else
    read_wide(gate_up_base, at, raw);
#endif
}

void store_kept(uint row, uint first, vec4 y[kept][wide], Block block[kept], bool fits) {
    [[unroll]] for (uint k = 0u; k < kept; ++k) {
        uint c = first + (k * local_size + gl_LocalInvocationIndex) * wide;
        if (c < push.ffn4) {
            uint codes[wide];
            [[unroll]] for (uint w = 0u; w < wide; ++w) {
                codes[w] = encode_block4(y[k][w], block[k], fits);
            }
            write_codes(codes_base, row * push.codes_stride4 + c, codes);
            if (c % kBlockFours == 0u) {
                store_scale(row, c, block[k]);
            }
        } else if (c < push.codes4) {
            [[unroll]] for (uint w = 0u; w < wide; ++w) {
                store_zeros(row, c + w);
            }
        }
    }
}

void chunk_by_workgroup(uint row, uint first, float weight) {
    // Beyond a row's end its last elements are taken once more: their block's maximum stays.
    Raw4 gate[kept][wide], up[kept][wide];
    [[unroll]] for (uint k = 0u; k < kept; ++k) {
        uint c = min(first + (k * local_size + gl_LocalInvocationIndex) * wide, push.ffn4 - wide);
        read_fours(row, c, gate[k]);
        read_fours(row, push.ffn4 + c, up[k]);
    }
    vec4 y[kept][wide];
    [[unroll]] for (uint k = 0u; k < kept; ++k) {
        vec4 gates[wide], ups[wide];
        wide_values(gate[k], up[k], gates, ups);
        uint most = 0u;
        [[unroll]] for (uint w = 0u; w < wide; ++w) {
            y[k][w] = swiglu4(gates[w], ups[w], weight);
            most = max(most, magnitude4(y[k][w]));
        }
        note_most(k, most);
    }
    fold_blocks();
    Block block[kept];
    bool fits = true;
    [[unroll]] for (uint k = 0u; k < kept; ++k) {
        block[k] = folded_block(k);
        fits = fits && fits_block(block[k]);
    }
    if (fits) {
        store_kept(row, first, y, block, true);
    } else {
        store_kept(row, first, y, block, false);
    }
}

void block_by_invocation(uint row, uint first, float weight) {
    uint end = min(first + kBlockFours, push.ffn4), most = 0u;
    FOR_COUNTED(c, first, end) {
        most = max(most, magnitude4(hidden(read(row, c), read(row, push.ffn4 + c), weight)));
    } NEXT_COUNTED(c, end, 1u);
    Block block = block_of(most);
    store_scale(row, first, block);
    FOR_COUNTED(c, first, end) {
        store(row, c, hidden(read(row, c), read(row, push.ffn4 + c), weight), block);
    } NEXT_COUNTED(c, end, 1u);
    if (end == push.ffn4) {
        for (uint c = end; c < push.codes4; ++c) {
            store_zeros(row, c);
        }
    }
}

void compute_row(uint row) {
    float weight = 1.0;
    if (push.has_row_weight != 0u) {
        weight = push.operands.row_weight.v[row];
    }
    FOR_COUNTED(first, kChunk * gl_WorkGroupID.y, push.ffn4) {
        if (row_per_workgroup != 0u) {
            chunk_by_workgroup(row, first, weight);
        } else {
            block_by_invocation(row, first, weight);
        }
    } NEXT_COUNTED(first, push.ffn4, kChunk * gl_NumWorkGroups.y);
}

void main() {
    uint rows = end_of_rows();
    gate_up_base = uvec2(push.operands.gate_up);
    codes_base = uvec2(push.operands.codes);
    FOR_ROWS(row, rows) {
        if (row_is_there(row)) {
            compute_row(row);
        }
    } NEXT_ROW(row, rows);
}
