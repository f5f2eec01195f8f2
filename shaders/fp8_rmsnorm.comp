// SPDX-License-Identifier: MIT
// RMSNorm (include/rmsnorm.glsl) to E4M3 or E5M2 with a scale per 128 columns: fp8/recipe.hpp,
// Rows128. One pass over memory.
//   x, y     [rows, columns] of the variant's storage, y if store_y; gain [columns]
//   inv_rms  [rows] f32
//   codes    [rows, columns] bytes, zeros up to codes4 fours; scales [rows, ceil(columns / 128)] f32
//   row_count [1] u32: rows that are there; the others are neither read nor written
// Strides in fours of elements, those of scales in words.
// Dispatch: see include/rows.glsl; sums over a row have the order of rmsnorm_forward's. With `whole`
// a workgroup holds a row in registers, else x is read once more from the cache. With `steps` the
// blocks' maxima are taken beside the sum, as those of |x * gain|. With `sum_columns` a workgroup has
// an invocation for each four, or two, of a row, and as many of them as that take the sum, which has
// the same order as without.
// Shared memory: include/fp8_row_blocks.glsl, at most 10.5 KiB.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/gain.glsl"
#include "include/rmsnorm.glsl"
#include "fp8_rmsnorm.kernel.glsl"
#define ROW_SETS 1u
#define NOTED_STEPS (steps > kept ? steps : kept)
#include "include/fp8_row_blocks.glsl"
#include "include/fp8_wide.glsl"

uvec2 x_base, codes_base;

vec4 normalised(S4 x, uint c, float inv_rms) {
    return rms_scaled(load4(x), inv_rms, load4(push.operands.gain.v[c]));
}

S4 read(uint row, uint c) {
    return push.operands.x.v[row * push.x_stride4 + c];
}

void store(uint row, uint c, vec4 y, Block block) {
    push.operands.codes.v[row * push.codes_stride4 + c] = encode_block4(y, block, false);
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

float keep_inverse(uint row, float sum) {
    float inv_rms = rms_inverse(sum, push.columns4, push.eps);
    if (row_leader()) {
        push.operands.inv_rms.v[row] = inv_rms;
    }
    return inv_rms;
}

float inverse_of(uint row, vec4 squares[wide]) {
    float sums[wide];
    [[unroll]] for (uint w = 0u; w < wide; ++w) {
        sums[w] = sum4(squares[w]);
    }
    return keep_inverse(row, wide_row_sum(sums));
}

// The same where the first sum_columns (32, 64 or 128) invocations read the row for the sum, in the
// order that wide_row_sum has with so many columns.
float inverse_by_few(uint row) {
    uint lane = gl_LocalInvocationIndex;
    if (lane < sum_columns) {
        vec4 squares = vec4(0);
        for (uint c = lane; c < push.columns4; c += sum_columns) {
            squares = add_squares(squares, load4(read(row, c)));
        }
        column_sums[lane] = sum4(squares);
    }
    barrier();
    if (lane < 32u) {
        precise float sum = column_sums[lane];
        if (sum_columns > 64u) {
            precise float odd = column_sums[lane + 32u] + column_sums[lane + 96u];
            sum = sum + column_sums[lane + 64u];
            sum = sum + odd;
        } else if (sum_columns > 32u) {
            sum = sum + column_sums[lane + 32u];
        }
        folded_sums[lane / 4u][lane % 4u] = sum;
    }
    barrier();
    vec4 sums[4];
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        sums[i] = folded_sums[i] + folded_sums[i + 4u];
    }
    vec4 four = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    vec2 two = four.xy + four.zw;
    return keep_inverse(row, two.x + two.y);
}

uint column_of(uint first, uint k) {
    return first + (k * local_size + gl_LocalInvocationIndex) * wide;
}

// Beyond a row's end its last elements are taken once more: their block's maximum stays.
void read_chunk(uint row, uint first, out S4 x[kept][wide]) {
    [[unroll]] for (uint k = 0u; k < kept; ++k) {
        uint c = min(column_of(first, k), push.columns4 - wide);
        read_wide(x_base, row * push.x_stride4 + c, x[k]);
    }
}

uint step_of(uint first, uint k) {
    return first / (local_size * wide) + k;
}

void add_chunk(uint first, S4 x[kept][wide], inout vec4 squares[wide]) {
    [[unroll]] for (uint k = 0u; k < kept; ++k) {
        uint c = column_of(first, k), most = 0u;
        bool here = c < push.columns4;
        [[unroll]] for (uint w = 0u; w < wide; ++w) {
            vec4 own = load4(here ? x[k][w] : S4(0));
            squares[w] = add_squares(squares[w], own);
            if (steps != 0u) {
                uint at = min(c, push.columns4 - wide) + w;
                precise vec4 product = own * load4(push.operands.gain.v[at]);
                most = max(most, magnitude4(product));
            }
        }
        if (steps != 0u) {
            note_most(step_of(first, k), most);
        }
    }
}

// With power-of-two scales a block's inverse scale, lifted, may be multiplied to inv_rms beforehand:
// |x| * inv_rms is below the root of the number of columns, so that nothing overflows, and a product
// that underflows ends as 0 in any case. Only with a gain above 2^93 would an x * inv_rms that is a
// subnormal number, which drivers may flush, count at all.
const bool kScalesFirst = rule == FP8_POWER_OF_TWO && store_y == 0u;

float lifted_inverse(float inv_rms, Block block) {
    return inv_rms * (block.inverse * fp8_lift(format));
}

bool fits_row(Block block, float inv_rms) {
    uint bits = floatBitsToUint(lifted_inverse(inv_rms, block));
    return fits_block(block) &&
           (!kScalesFirst || bits - 0x0D800000u < 0x7B800000u - 0x0D800000u); // 2^-100 to 2^120
}

void store_fours(uint row, uint c, S4 x[wide], float inv_rms, Block block, bool fits) {
    uint codes[wide];
    S4 rounded[wide];
    [[unroll]] for (uint w = 0u; w < wide; ++w) {
        if (kScalesFirst && fits) {
            vec4 lifted = normalised(x[w], c + w, lifted_inverse(inv_rms, block));
            codes[w] = fp8_code_lifted4(format, lifted, floatBitsToUint(lifted));
        } else {
            vec4 y = normalised(x[w], c + w, inv_rms);
            codes[w] = encode_block4(y, block, fits);
            rounded[w] = store4(y);
        }
    }
    write_codes(codes_base, row * push.codes_stride4 + c, codes);
    if (store_y != 0u) {
        write_wide(uvec2(push.operands.y), row * push.y_stride4 + c, rounded);
    }
    if (c % kBlockFours == 0u) {
        store_scale(row, c, block);
    }
}

void store_kept(uint row, uint first, S4 x[kept][wide], float inv_rms, Block block[kept],
                bool fits) {
    [[unroll]] for (uint k = 0u; k < kept; ++k) {
        uint c = column_of(first, k);
        if (c < push.columns4) {
            store_fours(row, c, x[k], inv_rms, block[k], fits);
        }
    }
}

// Stores a chunk whose blocks are folded, the first at step `at`.
void store_chunk(uint row, uint first, uint at, S4 x[kept][wide], float inv_rms) {
    Block block[kept];
    bool fits = true;
    [[unroll]] for (uint k = 0u; k < kept; ++k) {
        block[k] = folded_block(at + k);
        fits = fits && fits_row(block[k], inv_rms);
    }
    if (fits) {
        store_kept(row, first, x, inv_rms, block, true);
    } else {
        store_kept(row, first, x, inv_rms, block, false);
    }
}

// The largest magnitude of block b of a row.
uint block_most(uint row, uint b, float inv_rms) {
    uint most = 0u, end = min(kBlockFours * (b + 1u), push.columns4);
    for (uint c = kBlockFours * b; c < end; ++c) {
        most = max(most, magnitude4(normalised(read(row, c), c, inv_rms)));
    }
    return most;
}

// The scales of a row's blocks from the maxima of |x * gain|: times inv_rms these differ from what is
// quantised by four roundings, 4 units in the last place at most. Where twice as many to either side
// make another scale, or numbers are at the ends of f32's range, the block is looked at once more.
void fold_row(uint row, float inv_rms) {
    for (uint b = gl_LocalInvocationIndex; b < kBlocks; b += local_size) {
        precise float estimate = uintBitsToFloat(folded_most(b)) * inv_rms;
        uint most = floatBitsToUint(estimate);
        bool usual = most < 0x7E000000u && inv_rms < uintBitsToFloat(0x71800000u); // 2^100
        if (!usual ||
            fp8_scale(format, rule, max(most, 8u) - 8u) != fp8_scale(format, rule, most + 8u)) {
            most = block_most(row, b, inv_rms);
        }
        keep_block(b, most);
    }
    barrier();
}

shared float kept_inverse;

// What is normalised is computed twice, for the maxima and for the codes: in registers it would take
// twice as many as x does. The factor comes back from shared memory, or else compilers keep it all.
void quantize_chunk(uint row, uint first, S4 x[kept][wide]) {
    float inv_rms = kept_inverse;
    [[unroll]] for (uint k = 0u; k < kept; ++k) {
        uint c = min(column_of(first, k), push.columns4 - wide), most = 0u;
        [[unroll]] for (uint w = 0u; w < wide; ++w) {
            most = max(most, magnitude4(normalised(x[k][w], c + w, inv_rms)));
        }
        note_most(k, most);
    }
    fold_blocks();
    store_chunk(row, first, 0u, x, kept_inverse);
}

void row_by_workgroup(uint row) {
    for (uint c = push.columns4 + gl_LocalInvocationIndex; c < push.codes4; c += local_size) {
        store_zeros(row, c);
    }
    S4 x[kept][wide];
    if (sum_columns != 0u) {
        read_chunk(row, 0u, x);
        float inv_rms = inverse_by_few(row);
        if (row_leader()) {
            kept_inverse = inv_rms;
        }
        barrier();
        quantize_chunk(row, 0u, x);
        return;
    }
    vec4 squares[wide];
    [[unroll]] for (uint w = 0u; w < wide; ++w) {
        squares[w] = vec4(0);
    }
    for (uint first = 0u; first < push.columns4; first += kChunk) {
        read_chunk(row, first, x);
        add_chunk(first, x, squares);
        if (whole != 0u) {
            break;
        }
    }
    float inv_rms = inverse_of(row, squares);
    if (steps != 0u) {
        fold_row(row, inv_rms);
        for (uint first = 0u; first < push.columns4; first += kChunk) {
            read_chunk(row, first, x);
            store_chunk(row, first, step_of(first, 0u), x, inv_rms);
        }
        return;
    }
    if (row_leader()) {
        kept_inverse = inv_rms;
    }
    barrier();
    if (whole != 0u) {
        quantize_chunk(row, 0u, x);
        return;
    }
    for (uint first = 0u; first < push.columns4; first += kChunk) {
        read_chunk(row, first, x);
        quantize_chunk(row, first, x);
    }
}

void row_by_invocation(uint row) {
    vec4 squares[wide];
    squares[0] = vec4(0);
    FOR_COLUMNS(c, push.columns4) {
        squares[0] = add_squares(squares[0], load4(read(row, c)));
    } NEXT_COLUMN(c, push.columns4);
    float inv_rms = inverse_of(row, squares);
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
    x_base = uvec2(push.operands.x);
    codes_base = uvec2(push.operands.codes);
    FOR_ROWS(row, rows) {
        if (row_per_workgroup != 0u) {
            row_by_workgroup(row);
        } else {
            row_by_invocation(row);
        }
    } NEXT_ROW(row, rows);
}
