// SPDX-License-Identifier: MIT
// Packs A, whose sum runs along its rows, for fp8_packed_gemm: include/fp8_packed.glsl. Rows of
// groups may stand anywhere. A code that is NaN makes NaN its block.
//
// rows    of a work list (rows_from LIST): tile t is rows list[2t + 1] .. ends[list[2t]] of group
//         list[2t], and their codes and scales stand at row slots[row] / slots_per_row with
//         slots_per_row (-1: a row that is not there). Otherwise tile t is the (t % batch_tiles)-th of
//         `extent` rows of batch entry t / batch_tiles, of which there are ends[entry] with COUNTS.
// source  codes, rows of ld16 sixteens that end in zeros
// source_scales  those of (row, block) at (row >> x_shift) * stride_x + block, plus batch entry *
//         batch_stride; x_shift 7: one for all rows of a tile
// A block of zeros has the peak for a scale, so that its own, the least there is, does not widen the
// spread. scales are written where the spread is wide alone, as nothing else reads them.
// Constants  local_size 128; subgroup; mma_m, mma_k as the product's
// Dispatch x = blocks / 4, y = tiles, z = 4: 32 rows each. Shared 10 KiB.
#version 460
#extension GL_GOOGLE_include_directive : require
#define MATRIX_BF16 0
#include "include/coopmat.glsl"
#include "include/fp8_pack.glsl"

#include "fp8_pack_rows.kernel.glsl"

layout(local_size_x_id = 0) in;

const uint ROWS = SPREAD_ROWS;
const uint PITCH = 17u;   // units of 16 bytes from one row to the next: 128 f16 and padding
const uint AT_ONCE = 4u;  // blocks
const uint IN_ROW = 8u;   // sixteens of codes in a block's row
const uint LOADS = 2u;    // of a block, per invocation
const uint LANES = 4u;    // of a row, for its scales
const uint SCALES = 16u;  // that a lane reads at once
const uint FAR = 8u;      // powers of two
const uint ONE = 0x3F800000u;

shared uvec4 stage[ROWS * PITCH];
shared uint factors[ROWS * AT_ONCE];
shared uint peaks[ROWS];
shared uint least[ROWS];
shared uint widest;

#define MATRIX coopmat<float16_t, gl_ScopeSubgroup, mma_m, mma_k, gl_MatrixUseA>
#define MATRICES (ROWS / mma_m)

uint first_row, end_row;
uvec2 codes, scales;

// Where row `i` of the workgroup's stands, or -1.
int source_row(uint i) {
    uint row = first_row + i;
    if (row >= end_row) {
        return -1;
    }
    if (push.slots_per_row == 0u) {
        return int(row);
    }
    int slot = push.operands.slots.v[row];
    return slot < 0 ? -1 : slot / int(push.slots_per_row);
}

uint load_scale(int row, uint block) {
    return ReadUint(scales).v[(uint(row) >> push.x_shift) * push.stride_x + block];
}

bool is_zero(int row, uint block) {
    uint any = 0u, end = min(block * IN_ROW + IN_ROW, (push.k + 15u) / 16u);
    for (uint at = block * IN_ROW; at < end; ++at) {
        uvec4 chunk = ReadUvec4(codes).v[uint(row) * push.ld16 + at] & 0x7F7F7F7Fu;
        any |= chunk.x | chunk.y | chunk.z | chunk.w;
    }
    return any == 0u;
}

// Of a block, where its scale does not count.
uint kept_scale(int row, uint block, uint scale, uint peak) {
    bool far = scale < peak && (peak - scale) >> 23 > FAR;
    return far && is_zero(row, block) ? peak : scale;
}

// The rows' peaks, and how far the smallest scales lie below them.
void find_peaks(int row, uint i, uint part) {
    if (part == 0u) {
        peaks[i] = 0u;
        least[i] = FP8_INFINITY;
    }
    if (gl_LocalInvocationIndex == 0u) {
        widest = 0u;
    }
    barrier();
    uint most = 0u, smallest = FP8_INFINITY;
    for (uint first = part; row >= 0 && first < push.blocks; first += LANES * SCALES) {
        uint scale[SCALES];
        [[unroll]] for (uint s = 0u; s < SCALES; ++s) {
            scale[s] = load_scale(row, min(first + s * LANES, push.blocks - 1u));
        }
        [[unroll]] for (uint s = 0u; s < SCALES; ++s) {
            most = max(most, scale[s] > FP8_INFINITY ? 0u : scale[s]);
            smallest = min(smallest, scale[s]);
        }
    }
    atomicMax(peaks[i], most);
    atomicMin(least[i], smallest);
    barrier();
    uint peak = peaks[i] == 0u ? ONE : peaks[i];
    smallest = min(least[i], peak);
    barrier();
    if ((peak - smallest) >> 23 > FAR) {
        smallest = peak;
        for (uint block = part; row >= 0 && block < push.blocks; block += LANES) {
            smallest = min(smallest, kept_scale(row, block, load_scale(row, block), peak));
        }
    }
    if (part == 0u) {
        peaks[i] = peak;
    }
    atomicMax(widest, (peak - smallest) >> 23);
    barrier();
}

uint pair_of(MATRIX m, uint i) {
    return packFloat2x16(f16vec2(m[2u * i], m[2u * i + 1u]));
}

// Matrix `matrix` of a step of a block, of the tile's 128 / mma_m.
void save(uint place, uint step, uint matrix) {
    const uint UNITS = ELEMENTS_A / 8u;
    uint to = (place * 4u + step) * (TILE / mma_m) + matrix;
    [[unroll]] for (uint depth = 0u; depth < DEPTHS; ++depth) {
        MATRIX m;
        coopMatLoad(m, stage,
                    matrix % MATRICES * mma_m * PITCH + step * 4u + depth * (mma_k / 8u), PITCH,
                    gl_CooperativeMatrixLayoutRowMajor);
        [[unroll]] for (uint u = 0u; u < UNITS; ++u) {
            push.operands.image.v[((to * DEPTHS + depth) * UNITS + u) * subgroup +
                                  gl_SubgroupInvocationID] =
                in_registers(uvec4(pair_of(m, 4u * u), pair_of(m, 4u * u + 1u),
                                   pair_of(m, 4u * u + 2u), pair_of(m, 4u * u + 3u)));
        }
    }
}

uvec4 scaled_eight(uvec4 from, uint part, uint factor) {
    uvec4 y = eight_halves(from, part);
    bool any_nan = has_nan(from);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        if (any_nan) {
            y[i] = with_nans(y[i], from, part * 8u + 2u * i);
        }
        y[i] = times(y[i], factor);
    }
    return y;
}

void main() {
    uint tile = gl_WorkGroupID.y, part = gl_WorkGroupID.z, lane = gl_LocalInvocationIndex;
    uint first_block = gl_WorkGroupID.x * AT_ONCE;
    codes = uvec2(push.operands.source);
    scales = uvec2(push.operands.source_scales);
    if (push.rows_from == ROWS_LIST) {
        // All of these at once: the list has room for every tile of the grid.
        uint count = push.operands.tile_count.v[0], group = push.operands.list.v[2u * tile];
        first_row = push.operands.list.v[2u * tile + 1u];
        if (tile >= count) {
            return;
        }
        end_row = push.operands.ends.v[group];
    } else {
        uint entry = tile / push.batch_tiles;
        first_row = tile % push.batch_tiles * TILE;
        end_row = push.extent;
        if (push.rows_from == ROWS_COUNTS) {
            end_row = min(end_row, push.operands.ends.v[entry]);
        }
        codes = address_add(codes, entry, push.batch_stride16, 4u);
        scales = address_add(scales, entry, push.batch_stride, 2u);
    }
    end_row = min(end_row, first_row + TILE);
    first_row += part * ROWS;
    if (first_row >= end_row) {
        return; // rows of D that nobody asks for
    }
    uvec4 loaded[AT_ONCE * LOADS];
    [[unroll]] for (uint l = 0u; l < LOADS; ++l) {
        int row = source_row(l * (ROWS / LOADS) + lane / IN_ROW);
        [[unroll]] for (uint b = 0u; b < AT_ONCE; ++b) {
            uint at = (first_block + b) * IN_ROW + lane % IN_ROW;
            loaded[b * LOADS + l] = uvec4(0u);
            if (row >= 0 && 16u * at < push.k) {
                loaded[b * LOADS + l] = ReadUvec4(codes).v[uint(row) * push.ld16 + at];
            }
        }
    }
    uint row_here = lane / LANES, block = first_block + lane % LANES;
    int row = source_row(row_here);
    find_peaks(row, row_here, lane % LANES);
    uint peak = peaks[row_here];
    bool wide = widest > SPREAD;
    uint scale = ONE;
    if (row >= 0 && block < push.blocks) {
        scale = kept_scale(row, block, load_scale(row, block), peak);
    }
    factors[lane] = packed_factor(peak, wide && scale <= FP8_INFINITY ? peak : scale);
    uint x = part * ROWS + row_here;
    if (wide && block < push.blocks) {
        push.operands.scales.v[(tile * push.blocks + block) * TILE + x] = scale;
    }
    if (gl_WorkGroupID.x == 0u && lane % LANES == 0u) {
        push.operands.peaks.v[tile * TILE + x] = peak;
    }
    if (gl_WorkGroupID.x == 0u && lane == 0u) {
        push.operands.spread.v[tile * (TILE / ROWS) + part] = widest;
    }
    [[unroll]] for (uint b = 0u; b < AT_ONCE; ++b) {
        if (first_block + b >= push.blocks) {
            break;
        }
        barrier();
        [[unroll]] for (uint l = 0u; l < LOADS; ++l) {
            uint i = l * (ROWS / LOADS) + lane / IN_ROW, to = i * PITCH + lane % IN_ROW * 2u;
            uint factor = factors[i * LANES + b];
            stage[to] = scaled_eight(loaded[b * LOADS + l], 0u, factor);
            stage[to + 1u] = scaled_eight(loaded[b * LOADS + l], 1u, factor);
        }
        barrier();
        for (uint j = gl_SubgroupID; j < 4u * MATRICES; j += local_size / subgroup) {
            save(tile * push.blocks + first_block + b, j / MATRICES,
                 part * MATRICES + j % MATRICES);
        }
    }
}
