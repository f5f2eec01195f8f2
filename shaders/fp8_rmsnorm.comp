// SPDX-License-Identifier: MIT
// RMSNorm (include/rmsnorm.glsl) to E4M3 or E5M2 with a scale per 128 columns: fp8/recipe.hpp,
// Rows128. One pass over memory.
//   x, y     [rows, columns] of the variant's storage, y if store_y; gain [columns]
//   inv_rms  [rows] f32
//   codes    [rows, columns] bytes, zeros up to codes4 fours; scales [rows, ceil(columns / 128)] f32
//   row_count [1] u32: rows that are there; the others are neither read nor written
// Strides in fours of elements, those of scales in words.
// Dispatch: see include/rows.glsl; sums over a row have the order of rmsnorm_forward's. With `whole`
// a workgroup holds a row in registers, else x is read once more from the cache.
// Shared memory: include/fp8_row_blocks.glsl, at most 10.5 KiB.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/gain.glsl"
#include "include/rmsnorm.glsl"
#include "fp8_rmsnorm.kernel.glsl"
#define ROW_SETS 1u
const uint wide = 1u;
#include "include/fp8_row_blocks.glsl"

vec4 normalised(S4 x, uint c, float inv_rms) {
    return rms_scaled(load4(x), inv_rms, load4(push.operands.gain.v[c]));
}

S4 read(uint row, uint c) {
    return push.operands.x.v[row * push.x_stride4 + c];
}

void store(uint row, uint c, vec4 y, Block block) {
    push.operands.codes.v[row * push.codes_stride4 + c] = encode_block4(y, block);
    if (store_y != 0u) {
        push.operands.y.v[row * push.y_stride4 + c] = store4(y);
    }
}

void store_scale(uint row, uint c, Block block) {
    push.operands.scales.v[row * push.scales_stride + c / kBlockFours] = block.scale;
}

void store_zeros(uint row, uint c) {
    push.operands.codes.v[row * push.codes_stride4 + c] = 0u;
}

float sum_of_squares(uint row) {
    vec4 squares = vec4(0);
    FOR_COLUMNS(c, push.columns4) {
        squares = add_squares(squares, load4(read(row, c)));
    } NEXT_COLUMN(c, push.columns4);
    return sum4(squares);
}

float inverse_of(uint row, float squares) {
    float inv_rms = rms_inverse(row_sum(squares), push.columns4, push.eps);
    if (row_leader()) {
        push.operands.inv_rms.v[row] = inv_rms;
    }
    return inv_rms;
}

void row_by_workgroup(uint row) {
    uint lane = gl_LocalInvocationIndex;
    S4 x[kept];
    float inv_rms;
    if (whole != 0u) {
        [[unroll]] for (uint k = 0u; k < kept; ++k) {
            uint c = k * local_size + lane;
            x[k] = S4(0);
            if (c < push.columns4) {
                x[k] = read(row, c);
            }
        }
        vec4 squares = vec4(0);
        [[unroll]] for (uint k = 0u; k < kept; ++k) {
            squares = add_squares(squares, load4(x[k]));
        }
        inv_rms = inverse_of(row, sum4(squares));
    } else {
        inv_rms = inverse_of(row, sum_of_squares(row));
    }
    for (uint first = lane; first - lane < push.columns4; first += kChunk) {
        vec4 y[kept];
        [[unroll]] for (uint k = 0u; k < kept; ++k) {
            uint c = first + k * local_size;
            y[k] = vec4(0);
            if (c < push.columns4) {
                if (whole == 0u) {
                    x[k] = read(row, c);
                }
                y[k] = normalised(x[k], c, inv_rms);
            }
            note_most(k, magnitude4(y[k]));
        }
        fold_blocks();
        [[unroll]] for (uint k = 0u; k < kept; ++k) {
            uint c = first + k * local_size;
            if (c < push.columns4) {
                Block block = folded_block(k);
                store(row, c, y[k], block);
                if (c % kBlockFours == 0u) {
                    store_scale(row, c, block);
                }
            } else if (c < push.codes4) {
                store_zeros(row, c);
            }
        }
    }
}

void row_by_invocation(uint row) {
    float inv_rms = inverse_of(row, sum_of_squares(row));
    FOR_COUNTED(first, 0u, push.columns4) {
        uint end = min(first + kBlockFours, push.columns4), most = 0u;
        FOR_COUNTED(c, first, end) {
            most = max(most, magnitude4(normalised(read(row, c), c, inv_rms)));
        } NEXT_COUNTED(c, end, 1u);
        Block block = block_of(most);
        store_scale(row, first, block);
        FOR_COUNTED(c, first, end) {
            store(row, c, normalised(read(row, c), c, inv_rms), block);
        } NEXT_COUNTED(c, end, 1u);
    } NEXT_COUNTED(first, push.columns4, kBlockFours);
    for (uint c = push.columns4; c < push.codes4; ++c) {
        store_zeros(row, c);
    }
}

void main() {
    uint rows = push.rows;
    if (push.has_row_count != 0u) {
        rows = min(rows, push.operands.row_count.v[0]);
    }
    FOR_ROWS(row, rows) {
        if (row_per_workgroup != 0u) {
            row_by_workgroup(row);
        } else {
            row_by_invocation(row);
        }
    } NEXT_ROW(row, rows);
}
