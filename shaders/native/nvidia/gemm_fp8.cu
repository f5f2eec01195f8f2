// SPDX-License-Identifier: MIT
// Products of e4m3 codes with scales on Hopper's warpgroup units (fp8/gemm.hpp, Variant::Native).
// A scale of A stands for 128 codes of a row along k, one of B for 128 x 128 codes (FORM 0) or for
// 128 codes of a row (FORM 1). Sums of 128 of k, in ascending steps of 32, are the units' own, with
// fewer bits than f32 has; each is multiplied by its scales and added in f32, in ascending order.
// Bits of an element depend on its row of A and its row of B alone.
//
//   FORM 0, nt   D = A * transpose(B) (+ D), A [m, k], B [n, k]: dense with batches, and by_rows,
//                where the rows of A and D belong to groups, each with a B of its own
//   FORM 1, tn   A and B are transposed operands (fp8/recipe.hpp, Transposed) [m, k] and [n, k]:
//                D[g] (+)= A * transpose(B) over the blocks of 128 of k of group g
//
// Built once for each form and height of the tile (write_ptx.sh): HEIGHT rows, 256 or 128, by 128
// columns.
//
// Limits    codes and d begin at multiples of 16 bytes; the codes' leading dimensions and strides
//           are multiples of 16, those of d and n multiples of 8 elements.
// Launch    384 threads, any number of workgroups: each takes every so-many-th tile. Two
//           warpgroups multiply; one thread of the third copies boxes of codes into a ring of
//           stages, by tensor maps that the kernel writes into its scratch memory, and a warp of it
//           copies scales into a ring of slots.
#include "output.cuh"

#ifndef FORM
#error "FORM and HEIGHT are set by write_ptx.sh"
#endif

/// Outside of the namespace, whose name in PTX depends on the folder of this file.
extern __shared__ __align__(1024) unsigned char memory[];

namespace {

using namespace hopper;

constexpr bool kTransposed = FORM == 1;
constexpr u32 kRows = HEIGHT, kColumns = 128, kDepth = 128; // of a tile, and of k in a stage
constexpr u32 kParts = kRows / 128;                         // of 64 rows, of each warpgroup
constexpr u32 kStages = HEIGHT == 256 ? (kTransposed ? 3 : 4) : (kTransposed ? 4 : 6);
// A slot holds the scales of so many blocks of k: of FORM 0, where those of a row follow one another,
// four, which 16 bytes bring.
constexpr u32 kSlots = 4, kSlotBlocks = kTransposed ? 1 : 4;
constexpr u32 kBand = 2048 / HEIGHT;                        // rows of tiles that run together
constexpr u32 kABytes = kRows * kDepth, kBBytes = kColumns * kDepth;
constexpr u32 kStageBytes = kABytes + kBBytes;
constexpr u32 kSlotB = kRows * kSlotBlocks;                 // where B's scales begin in a slot
constexpr u32 kSlotScales = kSlotB + (kTransposed ? kColumns : kSlotBlocks);
constexpr u32 kScales = kStages * kStageBytes;              // in shared memory
constexpr u32 kBarriers = kScales + kSlots * kSlotScales * 4, kMaps = kBarriers + 256;
constexpr u32 kResults = kMaps + 256;                       // pieces of D, of FORM 1
constexpr u32 kConsumers = 256;                             // threads that multiply
constexpr u32 kWarps = kConsumers / 32;
constexpr u32 kNowhere = ~0u;                               // the place of a row that D lacks

/// Where a tile stands.
struct Tile {
    u32 a_row, a_matrix, b_matrix; ///< of the maps
    u32 column;                    ///< of D, a row of B
    u32 code, blocks;              ///< first code of k, and blocks of 128
    u32 row, end;                  ///< of D
    u64 matrix;                    ///< of D, in elements from its begin
    const float *a_scales, *b_scales; ///< of the first block; of A's first row, and B's
};

/// Work: next(t, tile) gives the tile of a number, if there is one, to a thread that asks in
/// ascending order.
template <class Work>
__device__ __forceinline__ void gemm(const Work& work, const Output& out, u64 scratch) {
    const u32 base = shared_address(memory);
    const u32 full = base + kBarriers, empty = full + 8 * kStages;
    const u32 scaled = empty + 8 * kStages, taken = scaled + 8 * kSlots;
    const u32 group = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; ++i) {
            init_barrier(full + 8 * i, 1);
            init_barrier(empty + 8 * i, kWarps);
        }
        for (u32 i = 0; i < kSlots; ++i) {
            init_barrier(scaled + 8 * i, 32);
            init_barrier(taken + 8 * i, kWarps);
        }
        publish_barriers();
    }
    const u64 a_map = scratch, b_map = scratch + kMapBytes;
    if (warp == kWarps) {
        u64* const maps = reinterpret_cast<u64*>(memory + kMaps);
        maps[lane] = 0;
        __syncwarp();
        if (lane == 0) {
            write_map<1>(base + kMaps, work.a_map());
            write_map<1>(base + kMaps + kMapBytes, work.b_map());
        }
        __syncwarp();
        publish_map(a_map, base + kMaps);
        publish_map(b_map, base + kMaps + kMapBytes);
    }
    __syncthreads();
    Work mine = work;
    Tile tile;
    u32 stage = 0, parity = 0, slot = 0, slot_parity = 0;
    const auto next_stage = [&] {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    };
    const auto next_slot = [&] {
        if (++slot == kSlots) {
            slot = 0;
            slot_parity ^= 1;
        }
    };
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == kConsumers) {
            for (u32 t = blockIdx.x; mine.next(t, tile); t += gridDim.x)
                for (u32 i = 0; i < tile.blocks; ++i) {
                    wait(empty + 8 * stage, parity ^ 1);
                    const u32 a = base + stage * kStageBytes, done = full + 8 * stage;
                    const u32 k = tile.code + i * kDepth;
                    arrive_expecting(done, kStageBytes);
                    load_box(a + kABytes, b_map, k, tile.column, tile.b_matrix, done);
                    load_box(a, a_map, k, tile.a_row, tile.a_matrix, done);
                    next_stage();
                }
        } else if (warp == kWarps + 1) {
            for (u32 t = blockIdx.x; mine.next(t, tile); t += gridDim.x) {
                const float *a = tile.a_scales, *b = tile.b_scales;
                const u32 a_last = mine.a_rows() - 1 - tile.a_row;
                const u32 b_last = mine.columns() - 1 - tile.column;
                for (u32 i = 0; i < tile.blocks; i += kSlotBlocks) {
                    wait(taken + 8 * slot, slot_parity ^ 1);
                    const u32 to = base + kScales + slot * kSlotScales * 4;
                    if (kTransposed) { // rows go on to a multiple of 8
#pragma unroll
                        for (u32 r = 4 * lane; r < kRows; r += 128)
                            copy_words(to + 4 * r, a + min(r, a_last & ~3u));
                        copy_words(to + 4 * (kSlotB + 4 * lane), b + min(4 * lane, b_last & ~3u));
                    } else {
                        const bool whole = mine.whole_scales();
                        const u32 here = min(tile.blocks - i, kSlotBlocks);
#pragma unroll 1
                        for (u32 r = lane; r < kRows; r += 32) {
                            const float* from =
                                a + static_cast<u64>(min(r, a_last)) * mine.a_scale_row();
                            if (whole)
                                copy_words(to + 16 * r, from);
                            else
                                for (u32 j = 0; j < here; ++j)
                                    copy_word(to + 16 * r + 4 * j, from + j);
                        }
                        if (lane < here)
                            copy_word(to + 4 * (kSlotB + lane), b + lane * mine.b_scale_block());
                    }
                    arrive_after_copies(scaled + 8 * slot);
                    a += kSlotBlocks * mine.a_scale_block();
                    b += kSlotBlocks * mine.b_scale_block();
                    next_slot();
                }
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const u32 first_row = group * kParts * 64 + warp % 4 * 16 + lane / 4;
    u32 behind = kNowhere; // the slot whose scales were read last
    float sums[kParts][64], part[64];
    for (u32 t = blockIdx.x; mine.next(t, tile); t += gridDim.x) {
#pragma unroll
        for (u32 p = 0; p < kParts; ++p)
#pragma unroll
            for (u32 i = 0; i < 64; ++i)
                sums[p][i] = 0;
        for (u32 i = 0; i < tile.blocks; ++i) {
            wait(full + 8 * stage, parity);
            const u32 a = base + stage * kStageBytes + group * kParts * 8192;
            const u32 b = base + stage * kStageBytes + kABytes;
            float scale[kParts][2];
            const u32 of_slot = i % kSlotBlocks;
            const u32 scales = base + kScales + slot * kSlotScales * 4;
#pragma unroll
            for (u32 p = 0; p < kParts; ++p) {
                begin_products();
#pragma unroll
                for (u32 k = 0; k < kDepth / 32; ++k)
                    multiply_codes(part, descriptor(a + p * 8192 + k * 32, 16, 1024),
                                   descriptor(b + k * 32, 16, 1024), k != 0);
                commit_products();
                if (p == 0) {
                    if (of_slot == 0) {
                        // A slot is given back when the next one is needed: by then it has been
                        // read.
                        if (behind != kNowhere && lane == 0)
                            arrive(taken + 8 * behind);
                        behind = slot;
                        wait(scaled + 8 * slot, slot_parity);
                    }
                    const float of_b = kTransposed ? 1 : read_shared(scales + 4 * (kSlotB + of_slot));
#pragma unroll
                    for (u32 q = 0; q < kParts; ++q)
#pragma unroll
                        for (u32 half = 0; half < 2; ++half) {
                            const u32 row = first_row + q * 64 + half * 8;
                            const float of_a = read_shared(scales + 4 * (row * kSlotBlocks + of_slot));
                            scale[q][half] = kTransposed ? of_a : of_a * of_b;
                        }
                    if (of_slot == kSlotBlocks - 1 || i == tile.blocks - 1)
                        next_slot();
                }
                wait_for_products<0>();
                if (p == kParts - 1 && lane == 0)
                    arrive(empty + 8 * stage);
#pragma unroll
                for (u32 j = 0; j < kColumns / 8; ++j) {
                    float2 of_b = make_float2(1, 1);
                    if (kTransposed)
                        of_b = read_shared2(scales + 4 * (kSlotB + 8 * j + 2 * (lane % 4)));
#pragma unroll
                    for (u32 half = 0; half < 2; ++half) {
                        const float x = part[4 * j + 2 * half], y = part[4 * j + 2 * half + 1];
                        float &to_x = sums[p][4 * j + 2 * half], &to_y = sums[p][4 * j + 2 * half + 1];
                        to_x = __fmaf_rn(kTransposed ? __fmul_rn(x, of_b.x) : x, scale[p][half], to_x);
                        to_y = __fmaf_rn(kTransposed ? __fmul_rn(y, of_b.y) : y, scale[p][half], to_y);
                    }
                }
            }
            next_stage();
        }
        if (tile.blocks == 0 && out.accumulate)
            continue;
        if (kTransposed && out.f32) {
#pragma unroll
            for (u32 p = 0; p < kParts; ++p) {
                const u32 row = tile.row + group * kParts * 64 + p * 64;
                store_by_copies(out, sums[p], row, tile.end, tile.column,
                                tile.matrix + static_cast<u64>(row) * out.ld,
                                base + kResults + group * kPieces * kPieceBytes, 1 + group);
            }
            continue;
        }
#pragma unroll
        for (u32 p = 0; p < kParts; ++p) {
            bool here[2];
            u64 at[2];
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 row = tile.row + first_row + p * 64 + half * 8;
                const u32 place = row < tile.end ? mine.place_of(row) : kNowhere;
                here[half] = place != kNowhere;
                at[half] = tile.matrix + static_cast<u64>(place) * out.ld;
            }
            store(out, sums[p], tile.column, here, at);
        }
    }
    if (kTransposed)
        wait_for_copies();
}

__device__ __forceinline__ Matrices codes(u64 address, u32 rows, u32 columns, u32 ld, u32 count,
                                          u64 stride, u32 box_rows) {
    return {address, columns, rows, count, ld, count > 1 ? stride : ld, box_rows};
}

__device__ __forceinline__ const float* scales_at(u64 address, u64 offset) {
    return reinterpret_cast<const float*>(address) + offset;
}

#if FORM == 0
/// Whether every row's scales are fours of them at multiples of 16 bytes.
__device__ __forceinline__ bool whole_fours(u64 scales, u32 k, u32 ld, u32 stride) {
    return scales % 16 == 0 && tiles(k, kDepth) % 4 == 0 && ld % 4 == 0 && stride % 4 == 0;
}

// --- dense and batched

struct Dense {
    const u64* operands; ///< a, a_scales, b, b_scales, d, scratch
    u32 m, n, k, lda, ldb, ldd, stride_a, stride_b, stride_d, batches;
    /// In scales: from a row of A to the next; of B from 128 rows to the next and along k.
    u32 ld_a_scales, stride_a_scales, b_scale_rows, b_scale_block, stride_b_scales;
    u32 f32, accumulate;
};

struct DenseWork {
    const Dense& push;

    __device__ u32 columns() const { return push.n; }
    __device__ u32 a_rows() const { return push.m; }
    __device__ u32 a_scale_row() const { return push.ld_a_scales; }
    __device__ u32 a_scale_block() const { return 1; }
    __device__ u32 b_scale_block() const { return push.b_scale_block; }
    __device__ bool whole_scales() const {
        return whole_fours(push.operands[1], push.k, push.ld_a_scales, push.stride_a_scales);
    }
    __device__ u32 place_of(u32 row) const { return row; }
    __device__ Matrices a_map() const {
        return codes(push.operands[0], push.m, push.k, push.lda, push.batches, push.stride_a, kRows);
    }
    __device__ Matrices b_map() const {
        return codes(push.operands[2], push.n, push.k, push.ldb, push.batches, push.stride_b,
                     kColumns);
    }
    __device__ bool next(u32 t, Tile& tile) const {
        const u32 high = tiles(push.m, kRows), wide = tiles(push.n, kColumns);
        const u32 batch = t / (high * wide);
        if (batch >= push.batches)
            return false;
        u32 row, column;
        place<kBand>(t % (high * wide), high, wide, row, column);
        tile = {row * kRows, batch, batch, column * kColumns, 0, tiles(push.k, kDepth), row * kRows,
                push.m, static_cast<u64>(batch) * push.stride_d,
                scales_at(push.operands[1], static_cast<u64>(batch) * push.stride_a_scales +
                                                static_cast<u64>(row * kRows) * push.ld_a_scales),
                scales_at(push.operands[3], static_cast<u64>(batch) * push.stride_b_scales +
                                                static_cast<u64>(column) * push.b_scale_rows)};
        return true;
    }
};

// --- grouped over rows

struct Rows {
    const u64* operands; ///< group_begins, group_ends, slots, a, a_scales, b, b_scales, d, scratch
    u32 rows, n, k, lda, ldb, ldd, groups, stride_b;
    u32 ld_a_scales, b_scale_rows, b_scale_block, stride_b_scales;
    u32 f32, accumulate, d_by_slot;
};

struct RowsWork {
    const Rows& push;
    u32 group = ~0u, first = 0, count = 0, begin = 0, end = 0; ///< tiles of groups from `first` on

    __device__ explicit RowsWork(const Rows& p) : push(p) {}
    __device__ u32 list(u32 i, u32 at) const {
        return reinterpret_cast<const u32*>(push.operands[i])[at];
    }
    __device__ u32 columns() const { return push.n; }
    __device__ u32 a_rows() const { return push.rows; }
    __device__ u32 a_scale_row() const { return push.ld_a_scales; }
    __device__ u32 a_scale_block() const { return 1; }
    __device__ u32 b_scale_block() const { return push.b_scale_block; }
    __device__ bool whole_scales() const {
        return whole_fours(push.operands[4], push.k, push.ld_a_scales, 0);
    }
    __device__ u32 place_of(u32 row) const { return push.d_by_slot != 0 ? list(2, row) : row; }
    __device__ Matrices a_map() const {
        return codes(push.operands[3], push.rows, push.k, push.lda, 1, 0, kRows);
    }
    __device__ Matrices b_map() const {
        return codes(push.operands[5], push.n, push.k, push.ldb, push.groups, push.stride_b,
                     kColumns);
    }
    __device__ bool next(u32 t, Tile& tile) {
        const u32 wide = tiles(push.n, kColumns);
        while (t >= first + count) {
            if (++group >= push.groups)
                return false;
            first += count;
            begin = list(0, group);
            end = list(1, group);
            count = begin < end ? tiles(end - begin, kRows) * wide : 0;
        }
        u32 high, column;
        place<kBand>(t - first, tiles(end - begin, kRows), wide, high, column);
        const u32 row = begin + high * kRows;
        tile = {row, 0, group, column * kColumns, 0, tiles(push.k, kDepth), row, end, 0,
                scales_at(push.operands[4], static_cast<u64>(row) * push.ld_a_scales),
                scales_at(push.operands[6], static_cast<u64>(group) * push.stride_b_scales +
                                                static_cast<u64>(column) * push.b_scale_rows)};
        return true;
    }
};
#else
// --- transposed operands, of one matrix or grouped along the sum

struct Along {
    const u64* operands; ///< group_begins, group_ends, a, a_scales, b, b_scales, d, scratch
    u32 m, n, k, lda, ldb, ldd, groups, stride_d; ///< groups 0: one, of all k
    u32 ld_a_scales, ld_b_scales;                       ///< from a block to the next
    u32 f32, accumulate;
};

struct AlongWork {
    const Along& push;

    __device__ u32 list(u32 i, u32 at) const {
        return reinterpret_cast<const u32*>(push.operands[i])[at];
    }
    __device__ u32 columns() const { return push.n; }
    __device__ u32 a_rows() const { return push.m; }
    __device__ u32 a_scale_row() const { return 1; }
    __device__ u32 a_scale_block() const { return push.ld_a_scales; }
    __device__ u32 b_scale_block() const { return push.ld_b_scales; }
    __device__ bool whole_scales() const { return true; }
    __device__ u32 place_of(u32 row) const { return row; }
    __device__ Matrices a_map() const {
        return codes(push.operands[2], push.m, push.k, push.lda, 1, 0, kRows);
    }
    __device__ Matrices b_map() const {
        return codes(push.operands[4], push.n, push.k, push.ldb, 1, 0, kColumns);
    }
    __device__ bool next(u32 t, Tile& tile) const {
        const u32 high = tiles(push.m, kRows), wide = tiles(push.n, kColumns);
        const u32 group = t / (high * wide);
        if (group >= max(push.groups, 1))
            return false;
        u32 first = 0, blocks = tiles(push.k, kDepth);
        if (push.groups != 0) {
            const u32 begin = list(0, group), end = list(1, group);
            first = begin / kDepth + group;
            blocks = begin < end ? tiles(end - begin, kDepth) : 0;
        }
        u32 row, column;
        place<kBand>(t % (high * wide), high, wide, row, column);
        tile = {row * kRows, 0, 0, column * kColumns, first * kDepth, blocks, row * kRows, push.m,
                static_cast<u64>(group) * push.stride_d,
                scales_at(push.operands[3], static_cast<u64>(first) * push.ld_a_scales + row * kRows),
                scales_at(push.operands[5],
                          static_cast<u64>(first) * push.ld_b_scales + column * kColumns)};
        return true;
    }
};
#endif

} // namespace

#if FORM == 0
extern "C" __global__ void __launch_bounds__(384, 1) dense(const __grid_constant__ Dense push) {
    gemm(DenseWork{push}, {push.operands[4], push.ldd, push.n, push.f32 != 0, push.accumulate != 0, 1},
         push.operands[5]);
}
extern "C" __global__ void __launch_bounds__(384, 1) by_rows(const __grid_constant__ Rows push) {
    gemm(RowsWork{push}, {push.operands[7], push.ldd, push.n, push.f32 != 0, push.accumulate != 0, 1},
         push.operands[8]);
}
#else
extern "C" __global__ void __launch_bounds__(384, 1) along(const __grid_constant__ Along push) {
    gemm(AlongWork{push}, {push.operands[6], push.ldd, push.n, push.f32 != 0, push.accumulate != 0, 1},
         push.operands[7]);
}
#endif
