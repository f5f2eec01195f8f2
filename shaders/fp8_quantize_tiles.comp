// SPDX-License-Identifier: MIT
// Tiles of 128 x 128 to E4M3 or E5M2 with scales of blocks that span rows: fp8/recipe.hpp,
// Columns128 and Blocks128; and Rows128 beside Columns128, from one pass over memory. Variants fp8 and
// fp8_f16 read rows that were quantised as Rows128, the latter E4M3 with power-of-two scales, to be
// E4M3 with power-of-two scales again, in f16 arithmetic where a tile's scales allow it; mode columns,
// without also_rows, not in the CPU drivers' form.
//   x            [batch, rows, columns] f32, bf16 or bytes (input_format)
//   x_scales     [rows, ceil(columns / 128)] f32, variants fp8 and fp8_f16 only
//   codes        [batch, rows, columns] bytes; with `decoded` (mode columns, power-of-two scales) bf16
//                instead, code * scale, and no scales: what stands up to a multiple of 8 columns is
//                unspecified; with `transposed` (mode columns, without also_rows) [columns, 128 *
//                row tiles], a tile's rows from 128 * tile on and 0 behind them
//   scales       mode columns: [batch, row tiles, columns] f32, blocks: [batch, row tiles, column
//                tiles] f32
//   row_codes, row_scales  like x and x_scales, in mode columns if also_rows
//   row_count    [1] u32: rows that are there
//   group_offsets [groups + 1] u32, if groups > 0: include/fp8_groups.glsl
//   slots        [rows] i32, variants fp8 and fp8_f16 only, if slots_per_row > 0: row r of x and its
//                scales stands at row slots[r] / slots_per_row
// Absent rows count as zero and are neither read nor written; a tile without rows leaves its scales
// alone. Strides in eights of elements, those of scales in words.
// Forms: local_size = 16 * lanes_x: each invocation keeps 8 rows x 8 columns of a tile of 128 rows;
//   lanes_x = 16, or 8 in mode columns without also_rows: tiles of 64 columns. lanes_x = local_size =
//   8 (CPU drivers): 128 rows x 16 columns each, x read again from the cache.
// Dispatch: x = column tiles, y = row tiles (grid-stride), z = batch.
// Shared memory: 1.5 KiB; 8.5 KiB more if also_rows, 8 KiB more if transposed (none for CPU drivers),
// 1 KiB more for blocks, 0.5 KiB more if decoded.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/fp8_eight.glsl"
#include "include/fp8_groups.glsl"
#include "include/fp8_turn.glsl"
#if INPUT_F16
#include "include/fp8_pairs.glsl"
#endif
#include "fp8_quantize_tiles.kernel.glsl"

layout(local_size_x_id = 0) in;

const uint kKept = 8u;
const uint lanes_y = local_size / lanes_x;
const bool streamed = lanes_y == 1u;
const uint tile_groups = streamed ? 16u : lanes_x; // eights of columns of a tile
const uint row_pitch = lanes_x + 1u; // odd: rows one below the other are in different banks

shared uint column_most[128];
shared vec4 column_factor[32];
shared vec4 column_scale[decoded != 0u ? 32u : 1u];
shared uint row_most[also_rows != 0u ? 128u * row_pitch : 1u];
shared float row_factor[128];
shared uvec4 lane_most[blocks != 0u ? local_size / 4u + 4u : 1u];
// Codes of a tile's columns, eight rows in an element.
shared uvec2 turned[transposed != 0u && !streamed ? 16u * 8u * lanes_x : 1u];

uvec2 x_base, codes_base, scales_base;
uint lane_x, lane_y;
// The largest magnitudes of this invocation's eight columns; of bf16 those of even and odd columns,
// shifted up by a bit, with what does not matter below.
uvec4 low_most, high_most;

// Where a row stands in x.
uint place_of(uint row) {
#if INPUT_FP8
    if (push.slots_per_row != 0u) {
        return uint(push.operands.slots.v[row]) / push.slots_per_row;
    }
#endif
    return row;
}

// Which rows of a tile an invocation keeps: with `transposed` eight that follow one another.
uint kept_row(uint k) {
    return transposed != 0u ? kKept * lane_y + k : k * lanes_y + lane_y;
}

// The same of the rows that an invocation keeps, all looked up at once. Absent ones take a row that
// is there, which changes no maximum.
uint[kKept] kept_places(TileRows rows) {
    uint places[kKept];
    [[unroll]] for (uint k = 0u; k < kKept; ++k) {
        places[k] = min(rows.first + kept_row(k), rows.end - 1u);
    }
#if INPUT_FP8
    if (push.slots_per_row != 0u) {
        [[unroll]] for (uint k = 0u; k < kKept; ++k) {
            places[k] = uint(push.operands.slots.v[places[k]]);
        }
        [[unroll]] for (uint k = 0u; k < kKept; ++k) {
            places[k] /= push.slots_per_row;
        }
    }
#endif
    return places;
}

// What a value of the row there stands for is multiplied by, FP8 only.
float factor_at(uint place, uint group) {
#if INPUT_FP8
    uint block = min(group, (push.columns - 1u) / 8u) / 16u;
    return push.operands.x_scales.v[place * push.x_scales_stride + block];
#else
    return 1.0;
#endif
}

float factor_of(uint row, uint group) {
    return factor_at(place_of(row), group);
}

// `finite`: no code of E4M3 is NaN, which saves arithmetic.
Eight values(Raw8 raw, float factor, bool finite) {
#if INPUT_FP8
    if (finite && input_format == FP8_E4M3) {
        return scaled(Eight(fp8_decode_finite4(FP8_E4M3, raw.x),
                            fp8_decode_finite4(FP8_E4M3, raw.y)),
                      factor);
    }
    return scaled(Eight(fp8_decode4(input_format, raw.x), fp8_decode4(input_format, raw.y)),
                  factor);
#else
    return unpack8(raw);
#endif
}

Raw8 load(uint row, uint group) {
    return load_clear8(x_base, place_of(row) * push.x_stride8, group, push.columns);
}

void note(uint i, bool first_time, Raw8 raw, float factor, bool finite) {
#if INPUT_BF16
    uvec4 low = raw << 17, high = raw << 1;
#else
    Eight x = values(raw, factor, finite);
    uvec4 low = magnitude4(x.low), high = magnitude4(x.high);
#endif
    low_most = max(low_most, low);
    high_most = max(high_most, high);
    if (also_rows != 0u) {
        uint most = max4(max(low, high)), at = i * row_pitch + lane_x;
        row_most[at] = first_time ? most : max(row_most[at], most);
    }
}

// The magnitude that one of the above stands for.
uint magnitude_of(uint most) {
#if INPUT_BF16
    return (most >> 1) & 0x7FFF0000u;
#else
    return most;
#endif
}

uint column_magnitude(uint i) {
#if INPUT_BF16
    return magnitude_of(i % 2u == 0u ? low_most[i / 2u] : high_most[i / 2u]);
#else
    return i < 4u ? low_most[i] : high_most[i - 4u];
#endif
}

void finish_columns(uint tile_group) {
    [[unroll]] for (uint i = 0u; i < 8u; ++i) {
        uint column = 8u * tile_group + i;
        if (streamed) {
            column_most[column] = column_magnitude(i);
        } else {
            atomicMax(column_most[column], column_magnitude(i));
        }
    }
}

void scale_columns(uint tile) {
    for (uint c = gl_LocalInvocationIndex; c < 8u * tile_groups; c += local_size) {
        float scale = fp8_scale(format, rule, column_most[c]);
        column_factor[c / 4u][c % 4u] = fp8_inverse(rule, scale);
        uint column = 8u * tile_groups * gl_WorkGroupID.x + c;
        if (decoded != 0u) {
            column_scale[c / 4u][c % 4u] = scale;
        } else if (column < push.columns) {
            WriteUint(scales_base).v[tile * push.scales_stride + column] = floatBitsToUint(scale);
        }
    }
}

void scale_rows(TileRows rows) {
    for (uint r = gl_LocalInvocationIndex; r < rows.end - rows.first; r += local_size) {
        uint most = 0u;
        for (uint x = 0u; x < lanes_x; ++x) {
            most = max(most, row_most[r * row_pitch + x]);
        }
        float scale = fp8_scale(format, rule, magnitude_of(most));
        row_factor[r] = fp8_inverse(rule, scale);
        push.operands.row_scales
            .v[(rows.first + r) * push.row_scales_stride + gl_WorkGroupID.x] = scale;
    }
}

// All invocations call it, between two barriers of the caller's: a sixteenth of them folds sixteen
// maxima each, then each folds those (CPU drivers: there are eight).
void scale_block(uint tile) {
    uint lane = gl_LocalInvocationIndex, most = 0u;
    uint mine = magnitude_of(max4(max(low_most, high_most)));
    lane_most[lane / 4u][lane % 4u] = mine;
    barrier();
    if (streamed) {
        most = max4(max(lane_most[0], lane_most[1]));
    } else {
        uint at = local_size / 4u + lane / 4u;
        if (lane < local_size / 16u) {
            uvec4 folded = max(max(lane_most[4u * lane], lane_most[4u * lane + 1u]),
                               max(lane_most[4u * lane + 2u], lane_most[4u * lane + 3u]));
            lane_most[at][lane % 4u] = max4(folded);
        }
        barrier();
        uvec4 folded = lane_most[local_size / 4u];
        for (uint i = 1u; i < local_size / 64u; ++i) {
            folded = max(folded, lane_most[local_size / 4u + i]);
        }
        most = max4(folded);
    }
    if (lane == 0u) {
        float scale = fp8_scale(format, rule, most);
        row_factor[0] = fp8_inverse(rule, scale);
        WriteUint(scales_base).v[tile * push.scales_stride + gl_WorkGroupID.x] =
            floatBitsToUint(scale);
    }
}

// Inverse scales of eight columns, and whether they all fit: fp8_block_fits. With `decoded` their
// scales, too.
struct Columns {
    vec4 low;
    vec4 high;
    vec4 scale_low;
    vec4 scale_high;
    bool fit;
};

Columns columns_of(uint tile_group) {
    Columns c = Columns(vec4(0), vec4(0), vec4(0), vec4(0), false);
    if (blocks == 0u) {
        c.low = column_factor[2u * tile_group];
        c.high = column_factor[2u * tile_group + 1u];
        if (decoded != 0u) {
            c.scale_low = column_scale[2u * tile_group];
            c.scale_high = column_scale[2u * tile_group + 1u];
        }
        c.fit = true;
        [[unroll]] for (uint i = 0u; i < 4u; ++i) {
            c.fit = c.fit && fp8_block_fits(format, c.low[i]) && fp8_block_fits(format, c.high[i]);
        }
    }
    return c;
}

uvec2 encode_columns(Eight x, Columns c, bool fit) {
    if (fit) {
        return uvec2(fp8_encode_fitting4(format, x.low, c.low),
                     fp8_encode_fitting4(format, x.high, c.high));
    }
    return uvec2(fp8_encode4(format, x.low * c.low), fp8_encode4(format, x.high * c.high));
}

void store_decoded(uint row, uint group, Eight x) {
    WriteUvec4(codes_base).v[row * push.codes_stride8 + group] = bf16_pack_exact(x);
}

// With `decoded` as decode_columns wants them, once for all rows.
Columns lifted(Columns c) {
    if (decoded != 0u) {
        float lift = fp8_lift(format), lower = fp8_lower(format);
        return Columns(c.low * lift, c.high * lift, c.scale_low * lower, c.scale_high * lower,
                       c.fit);
    }
    return c;
}

// What codes of lifted columns stand for.
Eight decode_columns(Eight x, Columns c) {
    return Eight(fp8_round_lifted4(format, x.low, c.low, c.scale_low),
                 fp8_round_lifted4(format, x.high, c.high, c.scale_high));
}

uvec2 stored(uvec2 codes, uint group) {
    return push.columns % 16u != 0u ? keep_present(codes, present(group, push.columns)) : codes;
}

// `fit`: all columns, or the block, fit. columns: lifted.
void store(uint i, uint row, uint tile_group, Raw8 raw, float factor, Columns columns, bool fit,
           bool finite) {
    uint group = tile_groups * gl_WorkGroupID.x + tile_group;
    if (group >= push.codes_groups) {
        return;
    }
    Eight x = values(raw, factor, finite);
    if (decoded != 0u) {
        store_decoded(row, group, decode_columns(x, columns));
        return;
    }
    uvec2 codes = blocks != 0u ? encode_block8(format, x, row_factor[0], fit)
                               : encode_columns(x, columns, fit);
    WriteUvec2(codes_base).v[row * push.codes_stride8 + group] = stored(codes, group);
    if (also_rows != 0u) {
        codes = encode_block8(format, x, row_factor[i],
                              !streamed && fp8_block_fits(format, row_factor[i]));
        push.operands.row_codes.v[row * push.row_codes_stride8 + group] = stored(codes, group);
    }
}

// Where a column's codes of rows 8 * y to 8 * y + 7 stand in `turned`: those that neighbouring
// invocations write at once, and those that they read, are in different banks.
uint turned_at(uint column, uint y) {
    return 16u * column + (y ^ (column >> 2 & 14u | column & 1u));
}

// Codes of the rows that an invocation keeps, to `turned`.
void turn_kept(TileRows rows, uvec2 codes[kKept]) {
    [[unroll]] for (uint k = 0u; k < kKept; ++k) {
        codes[k] = rows.first + kept_row(k) < rows.end ? codes[k] : uvec2(0);
    }
    [[unroll]] for (uint h = 0u; h < 2u; ++h) {
        uvec4 top = turn4(uvec4(codes[0][h], codes[1][h], codes[2][h], codes[3][h]));
        uvec4 bottom = turn4(uvec4(codes[4][h], codes[5][h], codes[6][h], codes[7][h]));
        [[unroll]] for (uint i = 0u; i < 4u; ++i) {
            turned[turned_at(8u * lane_x + 4u * h + i, lane_y)] = uvec2(top[i], bottom[i]);
        }
    }
}

// `turned` to memory, the 128 bytes of a column by neighbouring invocations.
void store_turned(uint tile) {
    barrier();
    for (uint at = gl_LocalInvocationIndex; at < 64u * tile_groups; at += local_size) {
        uint c = at / 8u, part = at % 8u, column = 8u * tile_groups * gl_WorkGroupID.x + c;
        if (column < push.columns) {
            WriteUvec4(codes_base).v[column * (push.codes_stride8 / 2u) + 8u * tile + part] =
                uvec4(turned[turned_at(c, 2u * part)], turned[turned_at(c, 2u * part + 1u)]);
        }
    }
}

// Four rows' codes of eight columns, a column in a word.
struct Words {
    uvec4 low;
    uvec4 high;
};

// Of the rows from `row` on, which is there; 0 of those that are not.
Words turned_rows(uint row, TileRows rows, uint group, Columns columns) {
    uvec2 codes[4];
    [[unroll]] for (uint k = 0u; k < 4u; ++k) {
        uint r = min(row + k, rows.end - 1u);
        Eight x = values(load(r, group), factor_of(r, group), false);
        codes[k] = row + k < rows.end ? encode_columns(x, columns, false) : uvec2(0);
    }
    return Words(turn4(uvec4(codes[0].x, codes[1].x, codes[2].x, codes[3].x)),
                 turn4(uvec4(codes[0].y, codes[1].y, codes[2].y, codes[3].y)));
}

void scales(uint tile, TileRows rows) {
    if (blocks != 0u) {
        scale_block(tile);
    } else {
        scale_columns(tile);
        if (also_rows != 0u) {
            scale_rows(rows);
        }
    }
}

void note_kept(Raw8 raw[kKept], float factor[kKept], bool finite) {
    [[unroll]] for (uint k = 0u; k < kKept; ++k) {
        note(kept_row(k), true, raw[k], factor[k], finite);
    }
}

// `usual`: finite values whose blocks fit.
void store_kept(TileRows rows, Raw8 raw[kKept], float factor[kKept], Columns columns, bool usual) {
    if (transposed != 0u) {
        uvec2 codes[kKept];
        [[unroll]] for (uint k = 0u; k < kKept; ++k) {
            codes[k] = encode_columns(values(raw[k], factor[k], usual), columns, usual);
        }
        turn_kept(rows, codes);
        return;
    }
    [[unroll]] for (uint k = 0u; k < kKept; ++k) {
        uint i = kept_row(k);
        if (rows.first + i < rows.end) {
            store(i, rows.first + i, lane_x, raw[k], factor[k], columns, usual, usual);
        }
    }
}

void tile_in_registers(uint tile, TileRows rows) {
    uint group = tile_groups * gl_WorkGroupID.x + lane_x;
    if (gl_LocalInvocationIndex < 8u * tile_groups) {
        column_most[gl_LocalInvocationIndex] = 0u;
    }
    Raw8 raw[kKept];
    float factor[kKept];
    uint places[kKept] = kept_places(rows);
    [[unroll]] for (uint k = 0u; k < kKept; ++k) {
        raw[k] = load8(x_base, places[k] * push.x_stride8, group, push.columns);
        factor[k] = factor_at(places[k], group);
    }
    if (rows_end_within_eights(push.columns)) {
        [[unroll]] for (uint k = 0u; k < kKept; ++k) {
            raw[k] = clear8(raw[k], group, push.columns);
        }
    }
    barrier();
    bool finite = true;
#if INPUT_FP8
    uint nans = 0u;
    [[unroll]] for (uint k = 0u; k < kKept; ++k) {
        nans |= fp8_e4m3_nan_bits(raw[k].x) | fp8_e4m3_nan_bits(raw[k].y);
    }
    finite = (nans & 0x80808080u) == 0u;
#endif
    low_most = uvec4(0);
    high_most = uvec4(0);
    if (finite) {
        note_kept(raw, factor, true);
    } else {
        note_kept(raw, factor, false);
    }
    if (blocks == 0u) {
        finish_columns(lane_x);
    }
    barrier();
    scales(tile, rows);
    barrier();
    Columns columns = lifted(columns_of(lane_x));
    if (finite && (blocks != 0u ? fp8_block_fits(format, row_factor[0]) : columns.fit)) {
        store_kept(rows, raw, factor, columns, true);
    } else {
        store_kept(rows, raw, factor, columns, false);
    }
    if (transposed != 0u) {
        store_turned(tile);
    }
    barrier();
}

#if INPUT_F16
// The exponents of the scales of a tile's rows, row kept_row(k) of lane_y at 8 lane_y + k; ODD_SCALE
// for what is no power of two.
shared uvec4 row_exponents[32];
const uint ODD_SCALE = 1024u;

void note_exponents(TileRows rows) {
    for (uint r = gl_LocalInvocationIndex; r < 128u; r += local_size) {
        uint bits = floatBitsToUint(factor_of(min(rows.first + r, rows.end - 1u),
                                              tile_groups * gl_WorkGroupID.x));
        uint at = transposed != 0u ? r : kKept * (r % lanes_y) + r / lanes_y;
        row_exponents[at / 4u][at % 4u] = (bits & 0x807FFFFFu) == 0u ? bits >> 23 : ODD_SCALE;
    }
}

// What follows for an invocation's part of a tile for which arithmetic in f16 is not exact.
void note_again(TileRows rows, uint group) {
    low_most = uvec4(0);
    high_most = uvec4(0);
    for (uint k = 0u; k < kKept; ++k) {
        uint i = kept_row(k), row = min(rows.first + i, rows.end - 1u);
        note(i, true, load(row, group), factor_of(row, group), false);
    }
    finish_columns(lane_x);
}

void store_again(TileRows rows, uint group, Columns c) {
    if (transposed != 0u) {
        for (uint h = 0u; h < 2u; ++h) {
            uint row = rows.first + kept_row(4u * h);
            Words words = Words(uvec4(0), uvec4(0));
            if (row < rows.end) {
                words = turned_rows(row, rows, group, c);
            }
            [[unroll]] for (uint i = 0u; i < 4u; ++i) {
                turned[turned_at(8u * lane_x + i, lane_y)][h] = words.low[i];
                turned[turned_at(8u * lane_x + 4u + i, lane_y)][h] = words.high[i];
            }
        }
        return;
    }
    Columns columns = lifted(c);
    for (uint k = 0u; k < kKept; ++k) {
        uint i = kept_row(k), row = rows.first + i;
        if (row < rows.end) {
            store(i, row, lane_x, load(row, group), factor_of(row, group), columns, false, false);
        }
    }
}

// What the codes of pairs by these inverse scales stand for, with the signs of `codes`.
Eight decode_pairs(f16vec2 x[4], uvec2 codes, f16vec2 inverse[4], Columns c) {
    vec4 y[2];
    [[unroll]] for (uint h = 0u; h < 2u; ++h) {
        f16vec2 even = fp8_round_pair(x[2u * h] * inverse[2u * h]);
        f16vec2 odd = fp8_round_pair(x[2u * h + 1u] * inverse[2u * h + 1u]);
        vec4 magnitude = vec4(even.x, odd.x, even.y, odd.y) *
                         (h == 0u ? c.scale_low : c.scale_high);
        uvec4 signs = uvec4(codes[h] << 24, codes[h] << 16, codes[h] << 8, codes[h]) & 0x80000000u;
        y[h] = uintBitsToFloat(floatBitsToUint(magnitude) | signs);
    }
    return Eight(y[0], y[1]);
}

bool all_zero(uvec2 codes) {
    return ((codes.x | codes.y) & 0x7F7F7F7Fu) == 0u;
}

// Values are held as f16 times 2^(7 - e), e the largest exponent of the scales of the invocation's
// rows: at most 448 * 2^7, and not below f16's normal numbers for scales down to 2^(e - 12). Rows of
// zeros may have any. A column's inverse scale times 2^(e - 7) must be a normal number, too.
void tile_in_pairs(uint tile, TileRows rows) {
    uint group = tile_groups * gl_WorkGroupID.x + lane_x;
    if (gl_LocalInvocationIndex < 8u * tile_groups) {
        column_most[gl_LocalInvocationIndex] = 0u;
    }
    uvec2 raw[kKept];
    uint places[kKept] = kept_places(rows);
    [[unroll]] for (uint k = 0u; k < kKept; ++k) {
        raw[k] = load8(x_base, places[k] * push.x_stride8, group, push.columns);
    }
    note_exponents(rows);
    if (rows_end_within_eights(push.columns)) {
        [[unroll]] for (uint k = 0u; k < kKept; ++k) {
            raw[k] = clear8(raw[k], group, push.columns);
        }
    }
    barrier();
    uvec4 exponents[2] = {row_exponents[2u * lane_y], row_exponents[2u * lane_y + 1u]};
    uint peak = max4(max(exponents[0], exponents[1]));
    uvec4 least = min(exponents[0], exponents[1]);
    uint nans = 0u;
    [[unroll]] for (uint k = 0u; k < kKept; ++k) {
        nans |= fp8_e4m3_nan_bits(raw[k].x) | fp8_e4m3_nan_bits(raw[k].y);
    }
    bool usual = (nans & 0x80808080u) == 0u && peak - 98u <= 246u - 98u; // 2^-29 to 2^119
    if (usual && min(min(least.x, least.y), min(least.z, least.w)) + 12u < peak) {
        [[unroll]] for (uint k = 0u; k < kKept; ++k) {
            usual = usual && (exponents[k / 4u][k % 4u] + 12u >= peak || all_zero(raw[k]));
        }
    }
    f16vec2 x[kKept][4], most[4];
    [[unroll]] for (uint k = 0u; k < kKept; ++k) {
        // 2^(7 - distance), twice as f16
        int below = max(int(exponents[k / 4u][k % 4u]) - int(peak), -12);
        f16vec2 factor = unpackFloat2x16(uint(below + 22) * 0x04000400u);
        [[unroll]] for (uint h = 0u; h < 2u; ++h) {
            f16vec2 even, odd;
            fp8_decode_pairs(raw[k][h], even, odd);
            x[k][2u * h] = even * factor;
            x[k][2u * h + 1u] = odd * factor;
        }
        [[unroll]] for (uint q = 0u; q < 4u; ++q) {
            most[q] = k == 0u ? x[0][q] : max(most[q], x[k][q]);
        }
    }
    float unit = uintBitsToFloat((peak - 7u) << 23);
    if (usual) {
        [[unroll]] for (uint q = 0u; q < 4u; ++q) {
            uint column = 8u * lane_x + q / 2u * 4u + q % 2u;
            atomicMax(column_most[column], floatBitsToUint(float(most[q].x) * unit));
            atomicMax(column_most[column + 2u], floatBitsToUint(float(most[q].y) * unit));
        }
    } else {
        note_again(rows, group);
    }
    barrier();
    scale_columns(tile);
    barrier();
    Columns columns = columns_of(lane_x);
    vec4 low = columns.low * unit, high = columns.high * unit;
    uvec4 beyond = max(floatBitsToUint(low) - 0x38800000u, floatBitsToUint(high) - 0x38800000u);
    usual = usual && max4(beyond) <= 0x47000000u - 0x38800000u; // 2^-14 to 2^15
    if (!usual) {
        store_again(rows, group, columns);
    } else if (group < push.codes_groups) {
        f16vec2 inverse[4] = {f16vec2(low.xz), f16vec2(low.yw), f16vec2(high.xz), f16vec2(high.yw)};
        uvec2 codes[kKept];
        [[unroll]] for (uint k = 0u; k < kKept; ++k) {
            uint row = rows.first + kept_row(k);
            if (row < rows.end && decoded != 0u) {
                store_decoded(row, group, decode_pairs(x[k], raw[k], inverse, columns));
            } else if (row < rows.end || transposed != 0u) {
                codes[k] = uvec2(fp8_encode_pairs(x[k][0] * inverse[0], x[k][1] * inverse[1]),
                                 fp8_encode_pairs(x[k][2] * inverse[2], x[k][3] * inverse[3]));
                codes[k] += raw[k] & 0x80808080u;
                if (transposed == 0u) {
                    WriteUvec2(codes_base).v[row * push.codes_stride8 + group] =
                        stored(codes[k], group);
                }
            }
        }
        if (transposed != 0u) {
            turn_kept(rows, codes);
        }
    }
    if (transposed != 0u) {
        store_turned(tile);
    }
    barrier();
}
#endif

void store_streamed_turned(uint tile, TileRows rows, uint group, Columns columns) {
    FOR_COUNTED(i, 0u, 32u) {
        uint row = rows.first + 4u * i;
        Words words = Words(uvec4(0), uvec4(0));
        if (row < rows.end) {
            words = turned_rows(row, rows, group, columns);
        }
        [[unroll]] for (uint c = 0u; c < 8u; ++c) {
            uint column = 8u * group + c;
            if (column < push.columns) {
                uvec2 base = address_add(codes_base, column, push.codes_stride8, 3u);
                WriteUint(base).v[32u * tile + i] = c < 4u ? words.low[c] : words.high[c - 4u];
            }
        }
    } NEXT_COUNTED(i, 32u, 1u);
}

void tile_streamed(uint tile, TileRows rows) {
    uint count = rows.end - rows.first;
    uvec4 most_low = uvec4(0), most_high = uvec4(0);
    for (uint part = 0u; part < 2u; ++part) {
        uint group = 16u * gl_WorkGroupID.x + 8u * part + lane_x;
        low_most = uvec4(0);
        high_most = uvec4(0);
        FOR_COUNTED(i, 0u, count) {
            uint row = rows.first + i;
            note(i, part == 0u, load(row, group), factor_of(row, group), false);
        } NEXT_COUNTED(i, count, 1u);
        finish_columns(8u * part + lane_x);
        most_low = max(most_low, low_most);
        most_high = max(most_high, high_most);
    }
    low_most = most_low;
    high_most = most_high;
    barrier();
    scales(tile, rows);
    barrier();
    for (uint part = 0u; part < 2u; ++part) {
        uint tile_group = 8u * part + lane_x, group = 16u * gl_WorkGroupID.x + tile_group;
        Columns columns = lifted(columns_of(tile_group));
        if (transposed != 0u) {
            store_streamed_turned(tile, rows, group, columns);
        } else {
            FOR_COUNTED(i, 0u, count) {
                uint row = rows.first + i;
                store(i, row, tile_group, load(row, group), factor_of(row, group), columns, false,
                      false);
            } NEXT_COUNTED(i, count, 1u);
        }
    }
    barrier();
}

void main() {
    uint rows = push.rows;
    if (push.has_row_count != 0u) {
        rows = min(rows, push.operands.row_count.v[0]);
    }
    uint batch = gl_WorkGroupID.z;
    x_base = address_add(uvec2(push.operands.x), batch, push.x_batch8, X_LOG2_BYTES);
    codes_base = address_add(uvec2(push.operands.codes), batch, push.codes_batch8,
                             decoded != 0u ? 4u : 3u);
    scales_base = address_add(uvec2(push.operands.scales), batch, push.scales_batch, 2u);
    lane_x = gl_LocalInvocationIndex % lanes_x;
    lane_y = gl_LocalInvocationIndex / lanes_x;
    FOR_COUNTED(tile, gl_WorkGroupID.y, push.row_tiles) {
        TileRows tile_rows = plain_tile(tile, rows);
        if (push.groups != 0u) {
            tile_rows =
                grouped_tile(uvec2(push.operands.group_offsets), push.groups, tile, rows);
        }
        if (tile_rows.first < tile_rows.end) {
#if INPUT_F16
            tile_in_pairs(tile, tile_rows);
#else
            if (streamed) {
                tile_streamed(tile, tile_rows);
            } else {
                tile_in_registers(tile, tile_rows);
            }
#endif
        }
    } NEXT_COUNTED(tile, push.row_tiles, gl_NumWorkGroups.y);
}
