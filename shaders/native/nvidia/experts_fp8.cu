// SPDX-License-Identifier: MIT
// Products of a router's experts for few rows on Hopper's warpgroup units: e4m3 codes with scales, and
// what gemm_fp8.cu computes as nt, bit for bit, where reading the weights takes longer than
// multiplying them. Rows of weights are the units' 64 rows, and rows of A their columns, of which they
// take any eight.
//
//   by_ids   D = A * transpose(B) (+ D): row r of D is that of slot r, whose group ids[r] names; row
//            r / slots_per_a_row of A is multiplied. Slots with other ids are left alone.
//   swiglu   D = silu(gate) * up of such products, as codes with a scale for 128 columns: the matrix
//            of a group has the rows of gate and, `up` behind them, as many of up. The bits are
//            those of by_ids to bf16 (or f32), then of fp8_swiglu.comp.
//
// Groups from `routed` on are the shared experts: their weights are other tensors' parts.
//
// Limits    codes and d begin at multiples of 16 bytes; the codes' leading dimensions and strides are
//           multiples of 16, those of d and n multiples of 8 elements (swiglu: n of 128); at most
//           4096 slots and 256 groups.
// Launch    512 threads, a workgroup for each processor: together they share the groups that have
//           rows evenly, by 64 columns (swiglu: 128) of a group. A workgroup takes up to four such
//           units at once, each by a team of 128 threads, with the same rows. All threads fill a ring
//           of stages of 128 of k by copies of 16 bytes, which run ahead into what comes next: the
//           memory is never idle between two groups.
#include "codes.cuh"
#include "few.cuh"

/// Outside of the namespace, whose name in PTX depends on the folder of this file.
extern __shared__ __align__(1024) unsigned char memory[];

namespace {

using namespace hopper;

constexpr u32 kDepth = 128; // of k in a stage
constexpr u32 kUnits = 4, kWorkers = kUnits * kThreads, kStages = 5;
constexpr u32 kMostGroups = 256, kMostSlots = 4096, kMostParts = kMostGroups + kMostSlots / kMostRows;
constexpr u32 kScaleWords = kMostRows + 8; // of a stage: of rows, then each unit's of weights

// In shared memory: stages, each of weights and rows; their scales; results on their way to D, eight
// rows of each unit; slots by group; counts of groups; parts; how many these are.
constexpr u32 kRowsAt = kUnits * kWeightBytes, kStageBytes = kRowsAt + kMostRows * kRowBytes;
constexpr u32 kScalesAt = kStages * kStageBytes;
constexpr u32 kTurnedAt = kScalesAt + kStages * kScaleWords * 4, kTurnedBytes = 8 * kPitch * 4;
constexpr u32 kSlotsAt = kTurnedAt + kUnits * kTurnedBytes;
constexpr u32 kCountsAt = kSlotsAt + 2 * kMostSlots;
constexpr u32 kPartsAt = kCountsAt + 4 * kMostGroups;
constexpr u32 kTotalsAt = kPartsAt + 8 * kMostParts;
static_assert(kTotalsAt + 32 <= 227328, "manifest.json has these bytes");

/// copy_16 of weights: memory gives twice as much of a row as one stage takes, for the next one.
__device__ __forceinline__ void copy_weights_16(u32 to, u64 from, u32 there) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there)
                 : "memory");
}

/// Where groups have their weights. Strides of codes in bytes, of scales in words.
struct Weights {
    u32 ld, stride;                           ///< to the next row, and to the next group
    u32 scale_rows, scale_block, scale_stride; ///< to the next 128 rows, 128 of k, and group
    u32 up;                                   ///< rows from gate to up (swiglu)
};

struct ByIds {
    const u64* operands; ///< as the enumeration has them
    u32 slots, top_k, has_count, slots_per_a_row; ///< top_k: of a counted row of ids
    u32 n, k, lda, ldd, ld_a_scales, ld_d_scales;
    Weights routed_weights, shared_weights;
    u32 groups, routed; ///< all, and how many of them are not shared experts
    u32 f32, accumulate; ///< swiglu: f32 if gate and up are not rounded to bf16
    u32 powers;         ///< scales of codes are powers of two
    // swiglu: weights of the product behind, [k, n] of each group, if next_ld is not 0
    u32 next_ld, next_stride, next_shared_ld;
};
enum Operand {
    kIds,
    kRowCount,
    kA,
    kAScales,
    kB,
    kBScales,
    kSharedB,
    kSharedBScales,
    kD,
    kDScales,
    kNextB,
    kNextSharedB
};

/// Up to 64 rows of a group, whose slots begin at `first` of those by group.
struct Part {
    u32 group, rows, first;
};

/// Parts' units that this workgroup has still to take.
struct Walk {
    u32 next, end;
};

/// What all workgroups share out, and what this one takes of this product and of the one behind.
struct Totals {
    u32 parts, cost;
    Walk own, behind;
};

__device__ __forceinline__ Totals& totals() {
    return *reinterpret_cast<Totals*>(memory + kTotalsAt);
}

/// Time of a part's unit, measured: up to 8 rows it is that of reading weights.
__device__ __forceinline__ u32 cost_of(u32 rows) {
    return rows <= 8 ? 8 : rows <= 16 ? 9 : rows <= 32 ? 13 : rows <= 48 ? 15 : 18;
}

/// What the workgroup takes at once.
struct Piece {
    Part part;
    u32 column, units;
};

template <bool kSwiglu>
__device__ __forceinline__ bool take_piece(Walk& walk, u32 wide, Piece& piece) {
    if (walk.next >= walk.end)
        return false;
    const u32 part = walk.next / wide, unit = walk.next % wide;
    const uint2 words = *reinterpret_cast<const uint2*>(memory + kPartsAt + 8 * part);
    piece.part = {words.x & 0xffff, words.x >> 16, words.y & 0xffff};
    if (kSwiglu) {
        piece.column = unit * 2 * kColumns;
        piece.units = kUnits;
        ++walk.next;
        return true;
    }
    const u32 left = min(wide - unit, walk.end - walk.next);
    const u32 pieces = (left + kUnits - 1) / kUnits;
    piece.column = unit * kColumns;
    piece.units = (left + pieces - 1) / pieces; // as even as they come
    walk.next += piece.units;
    return true;
}

__device__ __forceinline__ const unsigned short* slots_of(const Part& part) {
    return reinterpret_cast<const unsigned short*>(memory + kSlotsAt) + part.first;
}

/// Asks the second cache for what this workgroup reads first in the product behind, while memory has
/// nothing else to do.
__device__ __forceinline__ void fetch_next(const ByIds& push) {
    constexpr u32 kBytes = 512; // of a row
    const u32 wide = (push.k + kColumns - 1) / kColumns;
    Walk walk = totals().behind;
    Piece piece;
    if (push.next_ld == 0 || !take_piece<false>(walk, wide, piece) ||
        threadIdx.x >= piece.units * kColumns)
        return;
    const u32 group = piece.part.group, row = min(piece.column + threadIdx.x, push.k - 1);
    const u64 from =
        group < push.routed
            ? push.operands[kNextB] + static_cast<u64>(group) * push.next_stride +
                  static_cast<u64>(row) * push.next_ld
            : push.operands[kNextSharedB] + static_cast<u64>(group - push.routed) * push.n +
                  static_cast<u64>(row) * push.next_shared_ld;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(min(push.n, kBytes))
                 : "memory");
}

/// This thread's copies: what it copies next, and where to.
struct Copies {
    Walk walk;
    bool some;        ///< something is left to copy
    u32 block, stage;
    u64 weights;      ///< its first row of its unit; the others are 16 rows apart
    u32 ld, left;     ///< to the next row; rows behind the first that there are
    u64 row;          ///< of A
    const float* scale;
    u32 scale_step;
    bool has_weights, has_row, has_scale;
};

template <bool kSwiglu>
__device__ __forceinline__ void begin_piece(Copies& copies, const ByIds& push, u32 wide) {
    Piece piece;
    copies.some = take_piece<kSwiglu>(copies.walk, wide, piece);
    copies.block = 0;
    if (!copies.some) {
        if (kSwiglu)
            fetch_next(push);
        return;
    }
    const u64* const o = push.operands;
    const u32 unit = threadIdx.x / kThreads, thread = threadIdx.x % kThreads;
    const u32 group = piece.part.group;
    const bool shared = group >= push.routed;
    const Weights& w = shared ? push.shared_weights : push.routed_weights;
    const u64 number = shared ? group - push.routed : group;
    const u32 of_unit = kSwiglu ? piece.column + unit % 2 * kColumns + unit / 2 * w.up
                                : piece.column + unit * kColumns;
    const u32 last = kSwiglu ? w.up + push.n - 1 : push.n - 1;
    const u32 row = min(of_unit + thread / 8, last);
    copies.has_weights = unit < piece.units;
    copies.left = last - row;
    copies.ld = w.ld;
    copies.weights = o[shared ? kSharedB : kB] + number * w.stride + static_cast<u64>(row) * w.ld;
    const unsigned short* const slots = slots_of(piece.part);
    const u32 r = threadIdx.x / 8;
    copies.has_row = r < piece.part.rows;
    copies.row = o[kA] +
                 (copies.has_row ? static_cast<u64>(slots[r] / push.slots_per_a_row) * push.lda : 0);
    if (thread == kThreads - 1) {
        copies.has_scale = copies.has_weights;
        copies.scale = reinterpret_cast<const float*>(o[shared ? kSharedBScales : kBScales]) +
                       number * w.scale_stride + static_cast<u64>(of_unit / 128) * w.scale_rows;
        copies.scale_step = w.scale_block;
    } else {
        copies.has_scale = threadIdx.x < piece.part.rows;
        copies.scale = reinterpret_cast<const float*>(o[kAScales]) +
                       (copies.has_scale ? static_cast<u64>(slots[threadIdx.x] / push.slots_per_a_row) *
                                               push.ld_a_scales
                                         : 0);
        copies.scale_step = 1;
    }
}

/// Begins the copies of one stage, a group of copies even where nothing is left.
template <bool kSwiglu>
__device__ __forceinline__ void copy_stage(Copies& copies, const ByIds& push, u32 wide, u32 blocks) {
    if (copies.some) {
        const u32 base = shared_address(memory), stage = base + copies.stage * kStageBytes;
        const u32 unit = threadIdx.x / kThreads, thread = threadIdx.x % kThreads;
        const u32 chunk = thread % 8, row = thread / 8, r = threadIdx.x / 8;
        const u32 at = copies.block * kDepth + chunk * 16;
        const u32 there = at >= push.k ? 0 : min(push.k - at, 16), from = there != 0 ? at : 0;
        const u32 swizzled = (chunk ^ row % 8) << 4; // r % 8 is row % 8, too
        if (copies.has_weights) {
            const u32 to = stage + unit * kWeightBytes + row * kRowBytes + swizzled;
#pragma unroll
            for (u32 j = 0; j < kColumns / 16; ++j)
                copy_weights_16(to + j * 16 * kRowBytes,
                        copies.weights + static_cast<u64>(min(16 * j, copies.left)) * copies.ld + from,
                        there);
        }
        if (copies.has_row)
            copy_16(stage + kRowsAt + r * kRowBytes + swizzled, copies.row + from, there);
        if (copies.has_scale) {
            const u32 word = thread == kThreads - 1 ? kMostRows + unit : threadIdx.x;
            copy_word(base + kScalesAt + 4 * (copies.stage * kScaleWords + word),
                      copies.scale + static_cast<u64>(copies.block) * copies.scale_step);
        }
        copies.stage = copies.stage + 1 == kStages ? 0 : copies.stage + 1;
        if (++copies.block == blocks)
            begin_piece<kSwiglu>(copies, push, wide);
    }
    commit_copies();
}

/// Eight rows of this thread's unit, in shared memory with D's columns side by side.
template <u32 kSums>
__device__ __forceinline__ void turn(u32 unit, u32 thread, const float (&sums)[kSums], u32 first) {
    float* const turned = reinterpret_cast<float*>(memory + kTurnedAt + unit * kTurnedBytes);
    const u32 lane = thread % 32, warp = thread / 32, quad = lane % 4;
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
        turned[(2 * quad + i % 2) * kPitch + warp * 16 + lane / 4 + i / 2 * 8] = sums[first + i];
}
__device__ __forceinline__ float4 turned_four(u32 unit, u32 row, u32 column) {
    return *reinterpret_cast<const float4*>(memory + kTurnedAt + unit * kTurnedBytes +
                                            4 * (row * kPitch + column));
}

/// Four columns of a row of D.
__device__ __forceinline__ void store_four(const ByIds& push, u64 element, float4 v) {
    const u64 d = push.operands[kD];
    if (push.f32 != 0) {
        float4* const to = reinterpret_cast<float4*>(d + 4 * element);
        if (push.accumulate != 0) {
            const float4 old = *to;
            v = make_float4(v.x + old.x, v.y + old.y, v.z + old.z, v.w + old.w);
        }
        *to = v;
        return;
    }
    uint2* const to = reinterpret_cast<uint2*>(d + 2 * element);
    if (push.accumulate != 0) {
        const uint2 old = *to;
        const float2 low = of_pair(old.x), high = of_pair(old.y);
        v = make_float4(v.x + low.x, v.y + low.y, v.z + high.x, v.w + high.y);
    }
    *to = make_uint2(bf16_pair(v.x, v.y), bf16_pair(v.z, v.w));
}

template <u32 kRows>
__device__ __forceinline__ void store_rows(const ByIds& push, const Piece& piece,
                                           float (&sums)[kRows / 2]) {
    const u32 unit = threadIdx.x / kThreads, thread = threadIdx.x % kThreads;
    if (unit >= piece.units)
        return;
    const Team team{thread, 1 + unit, nullptr};
    const unsigned short* const slots = slots_of(piece.part);
    const u32 row = thread / 16, column = 4 * (thread % 16);
    const u32 to = piece.column + unit * kColumns + column;
#pragma unroll
    for (u32 j = 0; j < kRows / 8; ++j) {
        if (8 * j >= piece.part.rows)
            break;
        turn(unit, thread, sums, 4 * j);
        team.sync();
        if (8 * j + row < piece.part.rows && to < push.n)
            store_four(push, static_cast<u64>(slots[8 * j + row]) * push.ldd + to,
                       turned_four(unit, row, column));
        team.sync();
    }
}

// --- SwiGLU, with the arithmetic of include/swiglu.glsl

__device__ __forceinline__ float logistic(float x) {
    const float high = -1.44269502f, low = -1.92596299e-8f;
    const float limited = fminf(fmaxf(x, -87.0f), 87.0f);
    const float exponent = __fmul_rn(limited, high);
    const float rest = __fmaf_rn(limited, -high, exponent);
    const float error = __fmaf_rn(limited, -low, rest);
    float power, result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    const float corrected = __fmaf_rn(power, __fmul_rn(error, -0.693147181f), power);
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(__fadd_rn(1.0f, corrected)));
    return result;
}

__device__ __forceinline__ float swiglu_of(float gate, float up) {
    return __fmul_rn(__fmul_rn(gate, logistic(gate)), up);
}

/// A warp for each of eight rows: units 0 and 1 have gate, 2 and 3 up.
template <u32 kRows>
__device__ __forceinline__ void store_hidden(const ByIds& push, const Piece& piece,
                                             float (&sums)[kRows / 2]) {
    const u32 unit = threadIdx.x / kThreads, thread = threadIdx.x % kThreads;
    const u32 row = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned short* const slots = slots_of(piece.part);
#pragma unroll
    for (u32 j = 0; j < kRows / 8; ++j) {
        if (8 * j >= piece.part.rows)
            break;
        turn(unit, thread, sums, 4 * j);
        __syncthreads();
        if (row < 8 && 8 * j + row < piece.part.rows) {
            float4 gate = turned_four(lane / 16, row, 4 * (lane % 16)),
                   up = turned_four(2 + lane / 16, row, 4 * (lane % 16));
            if (push.f32 == 0) {
                const float2 a = of_pair(bf16_pair(gate.x, gate.y)), b = of_pair(bf16_pair(gate.z, gate.w)),
                             c = of_pair(bf16_pair(up.x, up.y)), d = of_pair(bf16_pair(up.z, up.w));
                gate = make_float4(a.x, a.y, b.x, b.y);
                up = make_float4(c.x, c.y, d.x, d.y);
            }
            const float y[4] = {swiglu_of(gate.x, up.x), swiglu_of(gate.y, up.y),
                                swiglu_of(gate.z, up.z), swiglu_of(gate.w, up.w)};
            const Block block = code_block(y, push.powers != 0);
            const u64 slot = slots[8 * j + row];
            *reinterpret_cast<u32*>(push.operands[kD] + slot * push.ldd + piece.column + 4 * lane) = block.codes;
            if (lane == 0)
                reinterpret_cast<float*>(push.operands[kDScales])[slot * push.ld_d_scales +
                                                                  piece.column / 128] = block.scale;
        }
        __syncthreads();
    }
}

/// kRows: of the piece at most.
template <bool kSwiglu, u32 kRows>
__device__ __forceinline__ void multiply_piece(Copies& copies, const ByIds& push, u32 wide, u32 blocks,
                                               const Piece& piece, u32& stage) {
    const u32 base = shared_address(memory);
    const u32 unit = threadIdx.x / kThreads, quad = threadIdx.x % 4;
    float sums[kRows / 2], part[kRows / 2];
#pragma unroll
    for (u32 i = 0; i < kRows / 2; ++i)
        sums[i] = 0;
#pragma unroll 1
    for (u32 i = 0; i < blocks; ++i) {
        wait_for_groups<kStages - 2>();
        fence_shared_writes();
        __syncthreads(); // also: nobody reads the stage any more that is copied to next
        const u32 codes = base + stage * kStageBytes;
        begin_products(); // of what is there, even if the piece has no such unit
#pragma unroll
        for (u32 k = 0; k < kDepth / 32; ++k)
            multiply_few(part, descriptor(codes + unit * kWeightBytes + k * 32, 16, 1024),
                         descriptor(codes + kRowsAt + k * 32, 16, 1024), k != 0);
        commit_products();
        copy_stage<kSwiglu>(copies, push, wide, blocks);
        const u32 scales = base + kScalesAt + 4 * stage * kScaleWords;
        const float of_b = read_shared(scales + 4 * (kMostRows + unit));
        const auto scale_at = [&](u32 j) {
            const float2 of_a = read_shared2(scales + 4 * (8 * j + 2 * quad));
            return make_float2(of_a.x * of_b, of_a.y * of_b);
        };
        constexpr bool kEarly = kRows <= 32; // while units multiply, if there are registers
        float2 scale[kRows / 8];
#pragma unroll
        for (u32 j = 0; j < kRows / 8 && kEarly; ++j)
            scale[j] = scale_at(j);
        wait_for_products<0>();
#pragma unroll
        for (u32 j = 0; j < kRows / 8; ++j) {
            if (!kEarly)
                scale[j] = scale_at(j);
            add_scaled(sums, part, 4 * j, scale[j]);
        }
        stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    if (kSwiglu)
        store_hidden<kRows>(push, piece, sums);
    else
        store_rows<kRows>(push, piece, sums);
}

/// A warp lists a group's slots in ascending order.
__device__ __forceinline__ void list_slots(const u32* ids, u32 slots, u32 group, unsigned short* to) {
    const u32 lane = threadIdx.x % 32;
    u32 listed = 0;
#pragma unroll 4
    for (u32 first = 0; first < slots; first += 32) {
        const u32 slot = first + lane;
        const bool here = slot < slots && __ldg(ids + min(slot, slots - 1)) == group;
        const u32 mask = __ballot_sync(~0u, here);
        if (here)
            to[listed + __popc(mask & ((1u << lane) - 1))] = slot;
        listed += __popc(mask);
    }
}

/// Slots by group, and the parts of groups that have any. Where a row stands in its part makes no
/// difference to its bits, but all workgroups have to agree on the part.
__device__ __forceinline__ void make_parts(const ByIds& push) {
    constexpr u32 kKept = 4; // ids of a thread
    const u32* const ids = reinterpret_cast<const u32*>(push.operands[kIds]);
    u32* const counts = reinterpret_cast<u32*>(memory + kCountsAt);
    unsigned short* const by_group = reinterpret_cast<unsigned short*>(memory + kSlotsAt);
    u32 slots = push.slots;
    if (push.has_count != 0)
        slots = min(slots, *reinterpret_cast<const u32*>(push.operands[kRowCount]) * push.top_k);
    for (u32 group = threadIdx.x; group < push.groups; group += kWorkers)
        counts[group] = 0;
    u32 kept[kKept];
#pragma unroll
    for (u32 j = 0; j < kKept; ++j) {
        const u32 slot = threadIdx.x + j * kWorkers;
        kept[j] = slot < slots ? ids[slot] : ~0u;
    }
    const auto for_each = [&](auto take) {
#pragma unroll
        for (u32 j = 0; j < kKept; ++j)
            if (kept[j] < push.groups)
                take(threadIdx.x + j * kWorkers, kept[j]);
        for (u32 slot = threadIdx.x + kKept * kWorkers; slot < slots; slot += kWorkers)
            if (ids[slot] < push.groups)
                take(slot, ids[slot]);
    };
    __syncthreads();
    for_each([&](u32, u32 group) { atomicAdd(counts + group, 1); });
    __syncthreads();
    if (threadIdx.x < 32) {
        u32 rows_before = 0, parts_before = 0, cost_before = 0;
        for (u32 first = 0; first < push.groups; first += 32) {
            const u32 group = first + threadIdx.x;
            const u32 rows = group < push.groups ? counts[group] : 0;
            const u32 parts = (rows + kMostRows - 1) / kMostRows;
            const u32 each = parts != 0 ? (rows + parts - 1) / parts : 0;
            const u32 last = parts != 0 ? rows - (parts - 1) * each : 0;
            const u32 cost = parts != 0 ? (parts - 1) * cost_of(each) + cost_of(last) : 0;
            u32 r = rows, p = parts, c = cost;
#pragma unroll
            for (u32 d = 1; d < 32; d *= 2) {
                const u32 other_r = __shfl_up_sync(~0u, r, d), other_p = __shfl_up_sync(~0u, p, d),
                          other_c = __shfl_up_sync(~0u, c, d);
                if (threadIdx.x >= d) {
                    r += other_r;
                    p += other_p;
                    c += other_c;
                }
            }
            const u32 slot = rows_before + r - rows, part = parts_before + p - parts,
                      in_front = cost_before + c - cost;
            if (group < push.groups)
                counts[group] = slot; // where the group's slots begin
            for (u32 i = 0; i < parts; ++i)
                *reinterpret_cast<uint2*>(memory + kPartsAt + 8 * (part + i)) =
                    make_uint2(group | (i + 1 < parts ? each : last) << 16,
                               (slot + i * each) | (in_front + i * cost_of(each)) << 16);
            rows_before += __shfl_sync(~0u, r, 31);
            parts_before += __shfl_sync(~0u, p, 31);
            cost_before += __shfl_sync(~0u, c, 31);
        }
        if (threadIdx.x == 0)
            totals() = {parts_before, cost_before, {0, 0}, {0, 0}};
    }
    __syncthreads();
    for_each([&](u32 slot, u32 group) { by_group[atomicAdd(counts + group, 1)] = slot; });
    __syncthreads();
    for (u32 group = threadIdx.x / 32; group < push.groups; group += kWorkers / 32) {
        const u32 begin = group != 0 ? counts[group - 1] : 0; // counts are where groups end by now
        if (counts[group] - begin > kMostRows)
            list_slots(ids, slots, group, by_group + begin);
    }
    __syncthreads();
}

/// This workgroup's share of the parts' cost, in units of which a part has `wide`. A thread for each
/// part calls it.
__device__ __forceinline__ void share(u32 wide, Walk& walk) {
    const Totals& all = totals();
    const u64 cost = static_cast<u64>(all.cost) * wide;
    const u64 begin = cost * blockIdx.x / gridDim.x, end = cost * (blockIdx.x + 1) / gridDim.x;
    if (threadIdx.x == 0 && blockIdx.x + 1 == gridDim.x)
        walk.end = all.parts * wide;
    if (threadIdx.x >= all.parts)
        return;
    const uint2 words = *reinterpret_cast<const uint2*>(memory + kPartsAt + 8 * threadIdx.x);
    const u32 each = cost_of(words.x >> 16);
    const u64 from = static_cast<u64>(words.y >> 16) * wide, to = from + each * wide;
    if (from <= begin && begin < to)
        walk.next = threadIdx.x * wide + static_cast<u32>(begin - from) / each;
    if (from <= end && end < to)
        walk.end = threadIdx.x * wide + static_cast<u32>(end - from) / each;
}

template <bool kSwiglu>
__device__ __forceinline__ void multiply_all(const ByIds& push) {
    make_parts(push);
    const u32 wide = kSwiglu ? push.n / 128 : (push.n + kColumns - 1) / kColumns;
    const u32 blocks = (push.k + kDepth - 1) / kDepth;
    share(wide, totals().own);
    if (kSwiglu)
        share((push.k + kColumns - 1) / kColumns, totals().behind);
    __syncthreads();
    Walk walk = totals().own;
    Copies copies;
    copies.walk = walk;
    copies.stage = 0;
    begin_piece<kSwiglu>(copies, push, wide);
#pragma unroll 1
    for (u32 i = 0; i < kStages - 1; ++i)
        copy_stage<kSwiglu>(copies, push, wide, blocks);
    u32 stage = 0;
    Piece piece;
#pragma unroll 1
    while (take_piece<kSwiglu>(walk, wide, piece)) {
#define BELLOWS_PIECE(rows)                                                                        \
    multiply_piece<kSwiglu, rows>(copies, push, wide, blocks, piece, stage)
        BELLOWS_WITH_ROWS(piece.part.rows, BELLOWS_PIECE);
    }
    wait_for_groups<0>();
}

} // namespace

extern "C" __global__ void __launch_bounds__(512, 1) by_ids(const __grid_constant__ ByIds push) {
    multiply_all<false>(push);
}

extern "C" __global__ void __launch_bounds__(512, 1) swiglu(const __grid_constant__ ByIds push) {
    multiply_all<true>(push);
}
