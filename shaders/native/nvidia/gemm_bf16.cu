// SPDX-License-Identifier: MIT
// Products of bf16 tensors on Hopper's warpgroup units, D = alpha * A * B (+ D), with f32 sums in
// ascending steps of 16 of k; inside a step as the units do it. Bits of an element depend on its
// row of A and its column of B alone. Formulas and operands: shaders/gemm_nt.comp,
// grouped_gemm_nt.comp and their nn and tn.
//
// Built once for each form and width of the tile (write_ptx.sh): FORM 0 nt, 1 nn, 2 tn; WIDTH
// columns of a tile, 256 or 64. Tiles are 128 rows high.
//
// Limits    a, b, d begin at multiples of 16 bytes; leading dimensions, strides and n are multiples
//           of 8 elements.
// Launch    384 threads, any number of workgroups: each takes every so-many-th tile. Two
//           warpgroups multiply, one thread of the third copies boxes of A and B into a ring of
//           stages, by tensor maps that the kernel writes into its scratch memory. All workgroups
//           write the same bytes there.
#include "output.cuh"

#ifndef FORM
#error "FORM and WIDTH are set by write_ptx.sh"
#endif

/// Outside of the namespace, whose name in PTX depends on the folder of this file.
extern __shared__ __align__(1024) unsigned char memory[];

namespace {

using namespace hopper;

constexpr bool kAByK = FORM == 2, kBByK = FORM != 0;
constexpr u32 kRows = 128, kColumns = WIDTH, kDepth = 64; // of a tile, and of k in a stage
constexpr u32 kStages = WIDTH == 256 ? (kAByK ? 3 : 4) : (kAByK ? 6 : 8);
constexpr u32 kBand = 16;                // rows of tiles that run together
constexpr u32 kBoxBytes = 64 * 128;      // of 64 rows
constexpr u32 kABytes = kRows * 128, kBBytes = kColumns * 128, kStageBytes = kABytes + kBBytes;
constexpr u32 kBarriers = kStages * kStageBytes, kMaps = kBarriers + 128; // in shared memory
constexpr u32 kResults = kMaps + 256;    // pieces of D, of FORM 2
constexpr u32 kConsumers = 256; // threads that multiply

/// Where a tile stands.
struct Tile {
    u32 a_row, a_matrix;   ///< of A's map; tn: of columns
    u32 b_matrix;          ///< of B's map
    u32 column;            ///< of B and D
    u32 k_begin, k_end;    ///< rows of A and B where memory has k as its rows, else 0 .. k
    u32 row, end;          ///< of D
    u64 matrix;            ///< of D, in elements from its begin
};

/// Work: count() and tile(t) say what there is to do, a_map() and b_map() what the operands are.
template <class Work>
__device__ __forceinline__ void gemm(const Work& work, const Output& out, u64 scratch) {
    const u32 base = shared_address(memory), full = base + kBarriers, empty = full + 8 * kStages;
    const u32 group = threadIdx.x / 128, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; ++i) {
            init_barrier(full + 8 * i, 1);
            init_barrier(empty + 8 * i, 2);
        }
        publish_barriers();
    }
    const u64 a_map = scratch, b_map = scratch + kMapBytes;
    if (threadIdx.x / 32 == kConsumers / 32) { // one warp
        u64* const maps = reinterpret_cast<u64*>(memory + kMaps);
        maps[lane] = 0;
        __syncwarp();
        if (lane == 0) {
            write_map<2>(base + kMaps, work.a_map());
            write_map<2>(base + kMaps + kMapBytes, work.b_map());
        }
        __syncwarp();
        publish_map(a_map, base + kMaps);
        publish_map(b_map, base + kMaps + kMapBytes);
    }
    __syncthreads();
    const u32 count = work.count();
    u32 stage = 0, parity = 0;
    const auto next = [&] {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    };
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x != kConsumers)
            return;
        for (u32 t = blockIdx.x; t < count; t += gridDim.x) {
            const Tile tile = work.tile(t);
            for (u32 k = tile.k_begin; k < tile.k_end; k += kDepth) {
                wait(empty + 8 * stage, parity ^ 1);
                const u32 a = base + stage * kStageBytes, b = a + kABytes, done = full + 8 * stage;
                arrive_expecting(done, kStageBytes);
                if (kBByK) {
#pragma unroll
                    for (u32 i = 0; i < kColumns / 64; ++i)
                        load_box(b + i * kBoxBytes, b_map, tile.column + 64 * i, k, tile.b_matrix,
                                 done);
                } else {
                    load_box(b, b_map, k, tile.column, tile.b_matrix, done);
                }
                if (kAByK) {
#pragma unroll
                    for (u32 i = 0; i < kRows / 64; ++i)
                        load_box(a + i * kBoxBytes, a_map, tile.a_row + 64 * i, k, tile.a_matrix,
                                 done);
                } else {
                    load_box(a, a_map, k, tile.a_row, tile.a_matrix, done);
                }
                next();
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const u32 first_row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const bool releases = threadIdx.x % 128 == 0;
    float sums[kColumns / 2];
    for (u32 t = blockIdx.x; t < count; t += gridDim.x) {
        const Tile tile = work.tile(t);
#pragma unroll
        for (u32 i = 0; i < kColumns / 2; ++i)
            sums[i] = 0;
        u32 before = 0;
        for (u32 k = tile.k_begin; k < tile.k_end; k += kDepth) {
            wait(full + 8 * stage, parity);
            const u32 a = base + stage * kStageBytes + group * kBoxBytes;
            const u32 b = base + stage * kStageBytes + kABytes;
            if (Work::kRagged && k + kDepth > tile.k_end) { // rows behind the group's last
                const u32 have = tile.k_end - k, each = (64 - have) * 8;
                for (u32 i = threadIdx.x; i < (kRows + kColumns) / 64 * each; i += kConsumers) {
                    const u32 to = base + stage * kStageBytes + i / each * kBoxBytes +
                                   (have + i % each / 8) * 128 + i % 8 * 16;
                    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0)
                                 : "memory");
                }
                fence_shared_writes();
                asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
            }
            begin_products();
#pragma unroll
            for (u32 i = 0; i < kDepth / 16; ++i)
                multiply<kAByK, kBByK>(
                    sums,
                    kAByK ? descriptor(a + i * 2048, kBoxBytes, 1024) : descriptor(a + i * 32, 16, 1024),
                    kBByK ? descriptor(b + i * 2048, kBoxBytes, 1024) : descriptor(b + i * 32, 16, 1024));
            commit_products();
            if (k != tile.k_begin) {
                wait_for_products<1>();
                if (releases)
                    arrive(empty + 8 * before);
            }
            before = stage;
            next();
        }
        wait_for_products<0>();
        if (tile.k_begin < tile.k_end && releases)
            arrive(empty + 8 * before);
        else if (tile.k_begin >= tile.k_end && out.accumulate)
            continue;
        if (kAByK && out.f32) {
            const u32 row = tile.row + group * 64;
            store_by_copies(out, sums, row, tile.end, tile.column,
                            tile.matrix + static_cast<u64>(row) * out.ld,
                            base + kResults + group * kPieces * kPieceBytes, 2 + group);
            continue;
        }
        bool here[2];
        u64 at[2];
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 row = tile.row + first_row + half * 8;
            here[half] = row < tile.end;
            at[half] = tile.matrix + static_cast<u64>(row) * out.ld;
        }
        store(out, sums, tile.column, here, at);
    }
    if (kAByK)
        wait_for_copies();
}

/// An operand's map: `rows` x `columns` as memory has them. A single matrix has any stride.
__device__ __forceinline__ Matrices matrices(u64 address, u32 rows, u32 columns, u32 ld, u32 count,
                                             u64 stride, u32 box_rows) {
    return {address, columns, rows, count, 2ull * ld, 2 * (count > 1 ? stride : ld), box_rows};
}
/// A is m x k, B is n x k or k x n.
__device__ __forceinline__ Matrices a_matrices(u64 address, u32 m, u32 k, u32 ld, u32 count,
                                               u64 stride) {
    return kAByK ? matrices(address, k, m, ld, count, stride, 64)
                 : matrices(address, m, k, ld, count, stride, kRows);
}
__device__ __forceinline__ Matrices b_matrices(u64 address, u32 n, u32 k, u32 ld, u32 count,
                                               u64 stride) {
    return kBByK ? matrices(address, k, n, ld, count, stride, 64)
                 : matrices(address, n, k, ld, count, stride, kColumns);
}

// --- dense and batched

struct Dense {
    const u64* operands; ///< a, b, d, scratch
    u32 m, n, k, lda, ldb, ldd, stride_a, stride_b, stride_d, batches, f32, accumulate;
    float alpha;
};

struct DenseWork {
    static constexpr bool kRagged = false;
    const Dense& push;

    __device__ u32 in_matrix() const { return tiles(push.m, kRows) * tiles(push.n, kColumns); }
    __device__ u32 count() const { return in_matrix() * push.batches; }
    __device__ Matrices a_map() const {
        return a_matrices(push.operands[0], push.m, push.k, push.lda, push.batches, push.stride_a);
    }
    __device__ Matrices b_map() const {
        return b_matrices(push.operands[1], push.n, push.k, push.ldb, push.batches, push.stride_b);
    }
    __device__ Tile tile(u32 t) const {
        const u32 batch = t / in_matrix();
        u32 row, column;
        place<kBand>(t % in_matrix(), tiles(push.m, kRows), tiles(push.n, kColumns), row, column);
        return {row * kRows, batch, batch, column * kColumns, 0, push.k, row * kRows, push.m,
                static_cast<u64>(batch) * push.stride_d};
    }
};

#if FORM != 2
// --- grouped over rows

struct Rows {
    const u64* operands; ///< group_ends, tiles, grid, a, b, d, scratch
    u32 rows, n, k, lda, ldb, ldd, groups, stride_b, f32, accumulate;
    float alpha;
};

struct RowsWork {
    static constexpr bool kRagged = false;
    const Rows& push;

    __device__ const u32* list(u32 i) const {
        return reinterpret_cast<const u32*>(push.operands[i]);
    }
    __device__ u32 high() const { return *list(2); }
    __device__ u32 count() const { return high() * tiles(push.n, kColumns); }
    __device__ Matrices a_map() const {
        return a_matrices(push.operands[3], push.rows, push.k, push.lda, 1, 0);
    }
    __device__ Matrices b_map() const {
        return b_matrices(push.operands[4], push.n, push.k, push.ldb, push.groups, push.stride_b);
    }
    __device__ Tile tile(u32 t) const {
        u32 place_of, column;
        place<kBand>(t, high(), tiles(push.n, kColumns), place_of, column);
        const u32 group = list(1)[2 * place_of], row = list(1)[2 * place_of + 1];
        return {row, 0, group, column * kColumns, 0, push.k, row, list(0)[group], 0};
    }
};
#else
// --- grouped along the sum

struct Along {
    const u64* operands; ///< group_begins, group_ends, a, b, d, scratch
    u32 rows, m, n, lda, ldb, ldd, groups, stride_d, f32, accumulate;
    float alpha;
};

struct AlongWork {
    static constexpr bool kRagged = true;
    const Along& push;

    __device__ const u32* list(u32 i) const {
        return reinterpret_cast<const u32*>(push.operands[i]);
    }
    __device__ u32 in_matrix() const { return tiles(push.m, kRows) * tiles(push.n, kColumns); }
    __device__ u32 count() const { return in_matrix() * push.groups; }
    __device__ Matrices a_map() const {
        return a_matrices(push.operands[2], push.m, push.rows, push.lda, 1, 0);
    }
    __device__ Matrices b_map() const {
        return b_matrices(push.operands[3], push.n, push.rows, push.ldb, 1, 0);
    }
    __device__ Tile tile(u32 t) const {
        const u32 group = t / in_matrix();
        u32 row, column;
        place<kBand>(t % in_matrix(), tiles(push.m, kRows), tiles(push.n, kColumns), row, column);
        return {row * kRows, 0, 0, column * kColumns, list(0)[group], list(1)[group], row * kRows,
                push.m, static_cast<u64>(group) * push.stride_d};
    }
};
#endif

} // namespace

extern "C" __global__ void __launch_bounds__(384, 1) dense(const __grid_constant__ Dense push) {
    gemm(DenseWork{push}, {push.operands[2], push.ldd, push.n, push.f32 != 0, push.accumulate != 0, push.alpha},
         push.operands[3]);
}
#if FORM != 2
extern "C" __global__ void __launch_bounds__(384, 1) by_rows(const __grid_constant__ Rows push) {
    gemm(RowsWork{push}, {push.operands[5], push.ldd, push.n, push.f32 != 0, push.accumulate != 0, push.alpha},
         push.operands[6]);
}
#else
extern "C" __global__ void __launch_bounds__(384, 1) along(const __grid_constant__ Along push) {
    gemm(AlongWork{push}, {push.operands[4], push.ldd, push.n, push.f32 != 0, push.accumulate != 0, push.alpha},
         push.operands[5]);
}
#endif
