// SPDX-License-Identifier: MIT
// Gradients of SwiGLU (include/swiglu.glsl), quantised with a scale per 128 columns (fp8/recipe.hpp,
// Rows128), stored, or both. One pass over memory.
//   d_out     [rows, ffn] f32 or bf16
//   gate_up   [rows, 2 * ffn] as d_out, or bytes with gate_up_scales [rows, ceil(2 * ffn / 128)] f32
//   row_weight, d_row_weight [rows] f32, used if has_row_weight; row_count [1] u32: rows that are
//   there, the others are neither read nor written
//   d_gate_up [rows, 2 * ffn] as d_out, if `stored`; may be gate_up
//   codes     [rows, 2 * ffn] bytes, scales [rows, ffn / 64] f32, if `quantized`: ffn is then a
//             multiple of 128
// Strides in fours of elements, those of scales in words.
// Dispatch: as fp8_swiglu's, but y = 1 with has_row_weight; sums over a row then have the order of
// swiglu_dgrad's. Shared memory: include/fp8_row_blocks.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/fp8_four.glsl"
#include "include/swiglu.glsl"
#include "fp8_swiglu_dgrad.kernel.glsl"
#define ROW_SETS 2u
const uint wide = 1u;
#include "include/fp8_row_blocks.glsl"

Raw4 read(uint row, uint c) {
    return READ4(push.operands.gate_up, row, push.gate_up_stride4, push.operands.gate_up_scales,
                 push.gate_up_scales_stride, c);
}

S4 read_d_out(uint row, uint c) {
    return push.operands.d_out.v[row * push.d_out_stride4 + c];
}

SwigluGradient gradient(Raw4 gate, Raw4 up, S4 d_out, float weight) {
    return swiglu_gradient4(VALUE4(gate), VALUE4(up), load4(d_out), weight);
}

void store(uint row, uint c, vec4 x) {
    if (stored != 0u) {
        push.operands.d_gate_up.v[row * push.d_gate_up_stride4 + c] = store4(x);
    }
}

void store_codes(uint row, uint c, vec4 x, Block block) {
    push.operands.codes.v[row * push.codes_stride4 + c] = encode_block4(x, block);
    if (c % kBlockFours == 0u) {
        push.operands.scales.v[row * push.scales_stride + c / kBlockFours] = block.scale;
    }
}

vec4 chunk_by_workgroup(uint row, uint first, float weight, vec4 d_weight) {
    Raw4 gate[kept], up[kept];
    S4 d_out[kept];
    [[unroll]] for (uint k = 0u; k < kept; ++k) {
        uint c = first + k * local_size + gl_LocalInvocationIndex;
        gate[k] = kNothing4;
        up[k] = kNothing4;
        d_out[k] = S4(0);
        if (c < push.ffn4) {
            gate[k] = read(row, c);
            up[k] = read(row, push.ffn4 + c);
            d_out[k] = read_d_out(row, c);
        }
    }
    vec4 d_gate[kept], d_up[kept];
    [[unroll]] for (uint k = 0u; k < kept; ++k) {
        uint c = first + k * local_size + gl_LocalInvocationIndex;
        d_gate[k] = vec4(0);
        d_up[k] = vec4(0);
        if (c < push.ffn4) {
            SwigluGradient g = gradient(gate[k], up[k], d_out[k], weight);
            d_weight = add_terms(d_weight, g.d_weight);
            d_gate[k] = g.d_gate;
            d_up[k] = g.d_up;
            store(row, c, g.d_gate);
            store(row, push.ffn4 + c, g.d_up);
        }
        if (quantized != 0u) {
            note_most(k, magnitude4(d_gate[k]));
            note_most(kept + k, magnitude4(d_up[k]));
        }
    }
    if (quantized != 0u) {
        fold_blocks();
        [[unroll]] for (uint k = 0u; k < kept; ++k) {
            uint c = first + k * local_size + gl_LocalInvocationIndex;
            if (c < push.ffn4) {
                store_codes(row, c, d_gate[k], folded_block(k));
                store_codes(row, push.ffn4 + c, d_up[k], folded_block(kept + k));
            }
        }
    }
    return d_weight;
}

vec4 block_by_invocation(uint row, uint first, float weight, vec4 d_weight) {
    uint end = min(first + kBlockFours, push.ffn4);
    Block gate_block, up_block;
    if (quantized != 0u) {
        uint gate_most = 0u, up_most = 0u;
        FOR_COUNTED(c, first, end) {
            SwigluGradient g = gradient(read(row, c), read(row, push.ffn4 + c),
                                        read_d_out(row, c), weight);
            gate_most = max(gate_most, magnitude4(g.d_gate));
            up_most = max(up_most, magnitude4(g.d_up));
        } NEXT_COUNTED(c, end, 1u);
        gate_block = block_of(gate_most);
        up_block = block_of(up_most);
    }
    FOR_COUNTED(c, first, end) {
        SwigluGradient g =
            gradient(read(row, c), read(row, push.ffn4 + c), read_d_out(row, c), weight);
        d_weight = add_terms(d_weight, g.d_weight);
        store(row, c, g.d_gate);
        store(row, push.ffn4 + c, g.d_up);
        if (quantized != 0u) {
            store_codes(row, c, g.d_gate, gate_block);
            store_codes(row, push.ffn4 + c, g.d_up, up_block);
        }
    } NEXT_COUNTED(c, end, 1u);
    return d_weight;
}

void main() {
    uint rows = push.rows;
    if (push.has_row_count != 0u) {
        rows = min(rows, push.operands.row_count.v[0]);
    }
    FOR_ROWS(row, rows) {
        float weight = 1.0;
        if (push.has_row_weight != 0u) {
            weight = push.operands.row_weight.v[row];
        }
        vec4 d_weight = vec4(0);
        FOR_COUNTED(first, kChunk * gl_WorkGroupID.y, push.ffn4) {
            if (row_per_workgroup != 0u) {
                d_weight = chunk_by_workgroup(row, first, weight, d_weight);
            } else {
                d_weight = block_by_invocation(row, first, weight, d_weight);
            }
        } NEXT_COUNTED(first, push.ffn4, kChunk * gl_NumWorkGroups.y);
        if (push.has_row_weight != 0u) {
            float sum = row_sum(sum4(d_weight));
            if (row_leader()) {
                push.operands.d_row_weight.v[row] = sum;
            }
        }
    } NEXT_ROW(row, rows);
}
