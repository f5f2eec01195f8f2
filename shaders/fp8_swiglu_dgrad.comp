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
#include "include/fp8_row_blocks.glsl"
#include "include/fp8_wide.glsl"

uvec2 gate_up_base, codes_base, d_out_base;

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
    push.operands.codes.v[row * push.codes_stride4 + c] = encode_block4(x, block, false);
    if (c % kBlockFours == 0u) {
        push.operands.scales.v[row * push.scales_stride + c / kBlockFours] = block.scale;
    }
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

void store_fours(uint row, uint c, vec4 x[wide]) {
    if (stored != 0u) {
        S4 rounded[wide];
        [[unroll]] for (uint w = 0u; w < wide; ++w) {
            rounded[w] = store4(x[w]);
        }
        write_wide(uvec2(push.operands.d_gate_up), row * push.d_gate_up_stride4 + c, rounded);
    }
}

void store_codes(uint row, uint c, vec4 x[wide], Block block, bool fits) {
    uint codes[wide];
    [[unroll]] for (uint w = 0u; w < wide; ++w) {
        codes[w] = encode_block4(x[w], block, fits);
    }
    write_codes(codes_base, row * push.codes_stride4 + c, codes);
    if (c % kBlockFours == 0u) {
        push.operands.scales.v[row * push.scales_stride + c / kBlockFours] = block.scale;
    }
}

void store_kept(uint row, uint first, vec4 d_gate[kept][wide], vec4 d_up[kept][wide],
                Block gate_block[kept], Block up_block[kept], bool fits) {
    [[unroll]] for (uint k = 0u; k < kept; ++k) {
        uint c = first + (k * local_size + gl_LocalInvocationIndex) * wide;
        if (c < push.ffn4) {
            store_codes(row, c, d_gate[k], gate_block[k], fits);
            store_codes(row, push.ffn4 + c, d_up[k], up_block[k], fits);
        }
    }
}

uint most_wide(vec4 x[wide]) {
    uint most = 0u;
    [[unroll]] for (uint w = 0u; w < wide; ++w) {
        most = max(most, magnitude4(x[w]));
    }
    return most;
}

void chunk_by_workgroup(uint row, uint first, float weight, inout vec4 d_weight[wide]) {
    // Beyond a row's end its last elements are taken once more, for nothing.
    Raw4 gate[kept][wide], up[kept][wide];
    S4 d_out[kept][wide];
    [[unroll]] for (uint k = 0u; k < kept; ++k) {
        uint c = min(first + (k * local_size + gl_LocalInvocationIndex) * wide, push.ffn4 - wide);
        read_fours(row, c, gate[k]);
        read_fours(row, push.ffn4 + c, up[k]);
        read_wide(d_out_base, row * push.d_out_stride4 + c, d_out[k]);
    }
    vec4 d_gate[kept][wide], d_up[kept][wide];
    [[unroll]] for (uint k = 0u; k < kept; ++k) {
        uint c = first + (k * local_size + gl_LocalInvocationIndex) * wide;
        vec4 gates[wide], ups[wide];
        wide_values(gate[k], up[k], gates, ups);
        [[unroll]] for (uint w = 0u; w < wide; ++w) {
            SwigluGradient g = swiglu_gradient4(gates[w], ups[w], load4(d_out[k][w]), weight);
            d_gate[k][w] = g.d_gate;
            d_up[k][w] = g.d_up;
            if (c < push.ffn4) {
                d_weight[w] = add_terms(d_weight[w], g.d_weight);
            }
        }
        if (c < push.ffn4) {
            store_fours(row, c, d_gate[k]);
            store_fours(row, push.ffn4 + c, d_up[k]);
        }
        if (quantized != 0u) {
            note_most(k, most_wide(d_gate[k]));
            note_most(kept + k, most_wide(d_up[k]));
        }
    }
    if (quantized != 0u) {
        fold_blocks();
        Block gate_block[kept], up_block[kept];
        bool fits = true;
        [[unroll]] for (uint k = 0u; k < kept; ++k) {
            gate_block[k] = folded_block(k);
            up_block[k] = folded_block(kept + k);
            fits = fits && fits_block(gate_block[k]) && fits_block(up_block[k]);
        }
        if (fits) {
            store_kept(row, first, d_gate, d_up, gate_block, up_block, true);
        } else {
            store_kept(row, first, d_gate, d_up, gate_block, up_block, false);
        }
    }
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
    gate_up_base = uvec2(push.operands.gate_up);
    codes_base = uvec2(push.operands.codes);
    d_out_base = uvec2(push.operands.d_out);
    FOR_ROWS(row, rows) {
        float weight = 1.0;
        if (push.has_row_weight != 0u) {
            weight = push.operands.row_weight.v[row];
        }
        vec4 d_weight[wide];
        [[unroll]] for (uint w = 0u; w < wide; ++w) {
            d_weight[w] = vec4(0);
        }
        FOR_COUNTED(first, kChunk * gl_WorkGroupID.y, push.ffn4) {
            if (row_per_workgroup != 0u) {
                chunk_by_workgroup(row, first, weight, d_weight);
            } else {
                d_weight[0] = block_by_invocation(row, first, weight, d_weight[0]);
            }
        } NEXT_COUNTED(first, push.ffn4, kChunk * gl_NumWorkGroups.y);
        if (push.has_row_weight != 0u) {
            float sums[wide];
            [[unroll]] for (uint w = 0u; w < wide; ++w) {
                sums[w] = sum4(d_weight[w]);
            }
            float sum = wide_row_sum(sums);
            if (row_leader()) {
                push.operands.d_row_weight.v[row] = sum;
            }
        }
    } NEXT_ROW(row, rows);
}
