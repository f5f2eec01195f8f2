// SPDX-License-Identifier: MIT
// Rows to E4M3 or E5M2, each block of a row (128 columns, or 32 for MX) with a scale of its own:
// fp8/recipe.hpp, Rows128 and MX32. One pass over memory.
//   x       [batch, rows, columns] f32 or bf16
//   codes   [batch, rows, columns] bytes
//   scales  [batch, rows, blocks] f32, or bytes for MX, four to a word
//   row_count [1] u32: rows that are there; the others are neither read nor written
// Strides in eights of elements, those of scales in words. Row strides of x and codes reach beyond
// the last column to a multiple of 8, and of 16.
// Forms: lanes 16 or 8: so many invocations per 128 columns, lanes_x (a multiple of them) side by
//   side, the others on the next rows; at_once blocks of rows at a time, their loads first: four, or
//   one where rows are few, which is less code to fetch. lanes 1: an invocation per 128 columns (CPU
//   drivers: no barrier), which holds them.
// Dispatch (grid-stride in x): x = row blocks of at_once * local_size / lanes_x rows, y = ceil(eights
//   of codes * lanes / (16 * lanes_x)), z = batch; or x = ceil(rows * ceil(columns / 128) /
//   local_size), y = 1.
// Shared memory: 4 * at_once * local_size bytes.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/fp8_eight.glsl"
#include "fp8_quantize_rows.kernel.glsl"

layout(local_size_x_id = 0) in;

const uint kSteps = at_once;
const uint kEights = lanes == 8u ? 2u : 1u; // of an invocation of a row
shared uvec4 most[kSteps * local_size / 4u];

uvec2 x_base, codes_base, scales_base;

bool columns_end_within_codes() {
    return push.columns % 16u != 0u;
}

uvec2 coded(uint group, Raw8 raw, float inverse, bool fits) {
    uvec2 codes = encode_block8(format, unpack8(raw), inverse, fits);
    return columns_end_within_codes() ? keep_present(codes, present(group, push.columns)) : codes;
}

// The exponent byte of an MX scale.
uint mx_code(float scale) {
    return (floatBitsToUint(scale) >> 23) & 0xFFu;
}

// Byte i of the scales' word `block`, 0 where a row has no such block.
uint mx_byte(uint block, uint i, float scale) {
    return 128u * block + 32u * i < push.columns ? mx_code(scale) << (8u * i) : 0u;
}

void store_scale(uint row, uint block, uint word) {
    WriteUint(scales_base).v[row * push.scales_stride + block] = word;
}

// The largest magnitudes of the quarters of a block whose first invocation is `first`.
uvec4 quarters(uint step_index, uint first) {
    uint at = (step_index * local_size + first) / 4u;
    if (lanes == 8u) {
        uvec4 low = most[at], high = most[at + 1u];
        return uvec4(max(low.xz, low.yw), max(high.xz, high.yw));
    }
    return uvec4(max4(most[at]), max4(most[at + 1u]), max4(most[at + 2u]), max4(most[at + 3u]));
}

float scale_of(uint amax) {
    return fp8_scale(format, rule, amax);
}

// The inverse scale of the block of this invocation's elements; its first one stores the scale.
float finish_block(uint i, uint row, uint group, bool row_is_there) {
    uint lane = gl_LocalInvocationIndex, first = lane / lanes * lanes;
    uvec4 quarter = quarters(i, first);
    uint block = group / 16u;
    bool leader = row_is_there && lane == first && 128u * block < push.columns;
    if (mx != 0u) {
        if (leader) {
            uint word = 0u;
            [[unroll]] for (uint q = 0u; q < 4u; ++q) {
                word |= mx_byte(block, q, scale_of(quarter[q]));
            }
            store_scale(row, block, word);
        }
        uint mine = (lane - first) * 4u / lanes; // selections: an index would go through memory
        uvec2 pair = mine < 2u ? quarter.xy : quarter.zw;
        return fp8_inverse(rule, scale_of(mine % 2u == 0u ? pair.x : pair.y));
    }
    float scale = scale_of(max4(quarter));
    if (leader) {
        store_scale(row, block, floatBitsToUint(scale));
    }
    return fp8_inverse(rule, scale);
}

void store_codes(uint row, uint group, Raw8 raw[kEights], float inverse, bool fits) {
    uint at = row * push.codes_stride8 + group;
    uvec2 codes = coded(group, raw[0], inverse, fits);
    if (kEights == 2u) {
        uvec2 next = coded(group + 1u, raw[kEights - 1u], inverse, fits);
        WriteUvec4(codes_base).v[at / 2u] = uvec4(codes, next);
    } else {
        WriteUvec2(codes_base).v[at] = codes;
    }
}

void quantize_by_lanes(uint rows) {
    uint lane = gl_LocalInvocationIndex;
    uint rows_per_step = local_size / lanes_x;
    uint group = (gl_WorkGroupID.y * lanes_x + lane % lanes_x) * kEights;
    uint tile_rows = kSteps * rows_per_step;
    for (uint first = gl_WorkGroupID.x * tile_rows; first < rows;
         first += gl_NumWorkGroups.x * tile_rows) {
        Raw8 raw[kSteps][kEights];
        [[unroll]] for (uint i = 0u; i < kSteps; ++i) {
            uint row = min(first + i * rows_per_step + lane / lanes_x, rows - 1u);
            [[unroll]] for (uint e = 0u; e < kEights; ++e) {
                raw[i][e] = load8(x_base, row * push.x_stride8, group + e, push.columns);
            }
        }
        if (rows_end_within_eights(push.columns)) {
            [[unroll]] for (uint i = 0u; i < kSteps; ++i) {
                [[unroll]] for (uint e = 0u; e < kEights; ++e) {
                    raw[i][e] = clear8(raw[i][e], group + e, push.columns);
                }
            }
        }
        [[unroll]] for (uint i = 0u; i < kSteps; ++i) {
            uint mine = raw_magnitude8(raw[i][0]);
            if (kEights == 2u) {
                mine = max(mine, raw_magnitude8(raw[i][kEights - 1u]));
            }
            most[(i * local_size + lane) / 4u][lane % 4u] = mine;
        }
        barrier();
        float inverse[kSteps];
        bool fits = true;
        [[unroll]] for (uint i = 0u; i < kSteps; ++i) {
            uint row = first + i * rows_per_step + lane / lanes_x;
            inverse[i] = finish_block(i, row, group, row < rows);
            fits = fits && fp8_block_fits(format, inverse[i]);
        }
        if (group < push.codes_groups) {
            if (fits) {
                [[unroll]] for (uint i = 0u; i < kSteps; ++i) {
                    uint row = first + i * rows_per_step + lane / lanes_x;
                    if (row < rows) {
                        store_codes(row, group, raw[i], inverse[i], true);
                    }
                }
            } else {
                [[unroll]] for (uint i = 0u; i < kSteps; ++i) {
                    uint row = first + i * rows_per_step + lane / lanes_x;
                    if (row < rows) {
                        store_codes(row, group, raw[i], inverse[i], false);
                    }
                }
            }
        }
        barrier();
    }
}

void store_block(uint row, uint first, const uint eights, Raw8 raw[16], float inverse, bool fits) {
    [[unroll]] for (uint i = 0u; i < eights; ++i) {
        if (first + i < push.codes_groups) {
            write_uvec2(codes_base, row * push.codes_stride8 + first + i,
                        coded(first + i, raw[i], inverse, fits));
        }
    }
}

// So many eights from `first` on as one block; returns its scale. What begins a line of the cache is
// read before all else: a CPU then waits for the lines of all invocations at once, not for one after
// another.
float quantize_block(uint row, uint first, const uint eights) {
    const uint eights_of_line = 64u >> X_LOG2_BYTES;
    uint amax = 0u;
    [[unroll]] for (uint i = 0u; i < eights; i += eights_of_line) {
        Raw8 begins = load8(x_base, row * push.x_stride8, first + i, push.columns);
        amax = max(amax, raw_magnitude_of_first(begins));
    }
    Raw8 raw[16];
    [[unroll]] for (uint i = 0u; i < eights; ++i) {
        raw[i] = load_clear8(x_base, row * push.x_stride8, first + i, push.columns);
        amax = max(amax, raw_magnitude8(raw[i]));
    }
    float scale = scale_of(amax);
    float inverse = fp8_inverse(rule, scale);
    if (fp8_block_fits(format, inverse)) {
        store_block(row, first, eights, raw, inverse, true);
    } else {
        store_block(row, first, eights, raw, inverse, false);
    }
    return scale;
}

void quantize_by_blocks(uint rows) {
    uint blocks = div_up(push.columns, 128u);
    for (uint item = gl_GlobalInvocationID.x; item < rows * blocks;
         item += gl_NumWorkGroups.x * local_size) {
        uint row = item / blocks, block = item % blocks, group = 16u * block;
        if (mx == 0u) {
            store_scale(row, block, floatBitsToUint(quantize_block(row, group, 16u)));
        } else {
            uint word = 0u;
            for (uint q = 0u; q < 4u; ++q) {
                uint first = group + 4u * q;
                word |= mx_byte(block, q, quantize_block(row, first, 4u));
            }
            store_scale(row, block, word);
        }
    }
}

void main() {
    uint rows = push.rows;
    if (push.has_row_count != 0u) {
        rows = min(rows, push.operands.row_count.v[0]);
    }
    uint batch = gl_WorkGroupID.z;
    x_base = address_add(uvec2(push.operands.x), batch, push.x_batch8, X_LOG2_BYTES);
    codes_base = address_add(uvec2(push.operands.codes), batch, push.codes_batch8, 3u);
    scales_base = address_add(uvec2(push.operands.scales), batch, push.scales_batch, 2u);
    if (lanes == 1u) {
        quantize_by_blocks(rows);
    } else {
        quantize_by_lanes(rows);
    }
}
