// SPDX-License-Identifier: MIT
// Attention over a paged cache of latents on Hopper's warpgroup units: bf16 queries, keys and values,
// f32 sums. Formulas, items and parts: shaders/include/paged_attention.glsl. Keys have 576 elements,
// whose first 512 are the values.
//
// Limits    queries stand without gaps, [rows, heads, 576]; q and cache begin at multiples of 16
//           bytes.
// Launch    384 threads, any number of workgroups: each takes every so-many-th tile of 64 pairs of
//           an item. One thread of the third warpgroup copies queries and blocks of the cache into
//           shared memory, by tensor maps that the kernel writes into its scratch memory. The two
//           others take half of a block's scores each, exchange them as weights, and sum up half of
//           the values' columns each. All workgroups write the same maps.
//           attend_few, for few tiles: without maps, which take as long to write as a block to read;
//           those who multiply copy queries and blocks themselves, a block ahead.
// Bits      Scores are summed in ascending steps of 16 columns, values in ascending steps of 16
//           tokens; inside a step as the units do it. Tokens that a row does not see have weight 0
//           and change no sum.
#include "hopper.cuh"

#include <cuda_bf16.h>

/// Outside of the namespace, whose name in PTX depends on the folder of this file.
extern __shared__ __align__(1024) unsigned char memory[];

namespace {

using namespace hopper;

constexpr u32 kBlock = 64, kPairs = 64;     // tokens of a block, rows and heads of a tile
constexpr u32 kKey = 576, kValue = 512;     // elements
constexpr u32 kBoxBytes = 64 * 128;         // 64 rows of 64 elements
constexpr u32 kBoxes = kKey / 64;
constexpr u32 kTileBytes = kBoxes * kBoxBytes; // of queries, or of a block
constexpr u32 kStages = 2;
constexpr u32 kWeights = (1 + kStages) * kTileBytes; // in shared memory
constexpr u32 kTops = kWeights + kBoxBytes;          // [2, 64] f32: of each half of the scores
constexpr u32 kBarriers = kTops + 2 * kPairs * 4;
constexpr u32 kMaps = kBarriers + 128;
constexpr u32 kConsumers = 256; // threads that multiply
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f, kLowest = -3.0e38f;

struct Push {
    const u64* operands; ///< q, cache, items, parts, tables, o, lse, partial, partial_lse, scratch
    u32 rows, blocks, heads, max_items, table_blocks, chunks, o_row, o_head, has_lse;
    float scale;
};

struct Item {
    u32 row, rows, sequence, keys, first_block, end_block, partial, partial_step;
};

__device__ __forceinline__ const u32* words(const Push& push, u32 operand) {
    return reinterpret_cast<const u32*>(push.operands[operand]);
}

/// d += a b for 64 rows, 32 columns and 16 of k.
__device__ __forceinline__ void multiply_half(float (&d)[16], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "%16, %17, 1, 1, 1, 0, 0;"
                 : BELLOWS_OUT16(0)
                 : "l"(a), "l"(b));
}

__device__ __forceinline__ float exponential(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const u32*>(&pair);
}

__device__ __forceinline__ void meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

/// A tile: items x `chunks` are shared out among workgroups, which take every chunks-th tile of an
/// item, one a round.
struct Task {
    Item item;
    u32 first_pair, pairs; ///< of the item
    u32 keys;              ///< that the item's last row sees
    u32 first_block, end_block;
};

__device__ __forceinline__ Item load_item(const Push& push, u32 task) {
    const uint4* const at =
        reinterpret_cast<const uint4*>(words(push, 2)) + 2 * (task / push.chunks + 1);
    const uint4 a = at[0], b = at[1];
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

__device__ __forceinline__ Task make_task(const Push& push, const Item& item, u32 task, u32 round) {
    Task t;
    t.item = item;
    t.first_pair = (task % push.chunks + round * push.chunks) * kPairs;
    const u32 all = t.item.rows * push.heads;
    t.pairs = t.first_pair < all ? min(all - t.first_pair, kPairs) : 0;
    t.keys = t.item.keys + t.item.rows - 1;
    t.first_block = t.item.first_block;
    t.end_block = t.item.end_block;
    return t;
}

__device__ __forceinline__ Task load_task(const Push& push, u32 task, u32 round) {
    return make_task(push, load_item(push, task), task, round);
}

/// Rows of 576 elements, by all who multiply, as load_box would leave them.
__device__ __forceinline__ void copy_rows(u32 to, u64 from, u32 rows) {
    constexpr u32 kChunks = kKey / 8;
    for (u32 i = threadIdx.x; i < rows * kChunks; i += kConsumers) {
        const u32 row = i / kChunks, chunk = i % kChunks;
        copy_words(to + chunk / 8 * kBoxBytes + row * 128 + (chunk % 8 ^ row % 8) * 16,
                   reinterpret_cast<const float*>(from + 2 * kKey * row + 16 * chunk));
    }
}

__device__ __forceinline__ void copy_block(const Push& push, const Task& t, u32 block, u32 to) {
    const u32 at = words(push, 4)[t.item.sequence * push.table_blocks + block];
    copy_rows(to, push.operands[1] + static_cast<u64>(at) * kBlock * kKey * 2, kBlock);
    asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ __forceinline__ void produce(const Push& push, u32 base, u64 q_map, u64 cache_map,
                                        u32 tasks) {
    const u32 q_full = base + kBarriers, q_empty = q_full + 8, full = q_full + 16,
              empty = full + 8 * kStages;
    u32 stage = 0, parity = 0, q_parity = 0;
    for (u32 i = blockIdx.x, round = 0; i < tasks;) {
        const Task t = load_task(push, i, round++);
        if (t.pairs == 0) {
            i += gridDim.x;
            round = 0;
            continue;
        }
        wait(q_empty, q_parity ^ 1);
        q_parity ^= 1;
        arrive_expecting(q_full, kTileBytes);
        const u32 row = t.item.row * push.heads + t.first_pair;
        for (u32 box = 0; box < kBoxes; ++box)
            load_box(base + box * kBoxBytes, q_map, 64 * box, row, 0, q_full);
        const u32* const table = words(push, 4) + t.item.sequence * push.table_blocks;
        for (u32 block = t.first_block; block < t.end_block; ++block) {
            wait(empty + 8 * stage, parity ^ 1);
            const u32 to = base + (1 + stage) * kTileBytes, done = full + 8 * stage;
            arrive_expecting(done, kTileBytes);
            const u32 first = table[block] * kBlock;
            for (u32 box = 0; box < kBoxes; ++box)
                load_box(to + box * kBoxBytes, cache_map, 64 * box, first, 0, done);
            if (++stage == kStages) {
                stage = 0;
                parity ^= 1;
            }
        }
    }
}

/// What stands in a block behind the last key may be anything: zeros, as 0 times it must be 0.
__device__ __forceinline__ void clear_rest(u32 tile, u32 have) {
    const u32 each = (kBlock - have) * 8;
    for (u32 i = threadIdx.x; i < kBoxes * each; i += kConsumers) {
        const u32 to = tile + i / each * kBoxBytes + (have + i % each / 8) * 128 + i % 8 * 16;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
    fence_shared_writes();
    meet();
}

template <bool kFew>
__device__ __forceinline__ void consume(const Push& push, u32 base, u32 tasks, const Item& first) {
    const u32 q_full = base + kBarriers, q_empty = q_full + 8, full = q_full + 16,
              empty = full + 8 * kStages;
    const u32 group = threadIdx.x / 128, lane = threadIdx.x % 32;
    const u32 first_row = threadIdx.x % 128 / 32 * 16 + lane / 4; // of the tile; the other 8 below
    const u32 first_token = 32 * group + lane % 4 * 2;
    const bool releases = threadIdx.x % 128 == 0;
    const float scale = push.scale * kLog2E;
    u32 stage = 0, parity = 0, q_parity = 0;
    for (u32 i = blockIdx.x, round = 0; i < tasks; ++round) {
        const Task t = kFew && i == blockIdx.x && round == 0 ? make_task(push, first, i, 0)
                                                             : load_task(push, i, round);
        if (t.pairs == 0) {
            i += gridDim.x;
            round = ~0u;
            continue;
        }
        if (kFew) {
            copy_rows(base, push.operands[0] + 2ull * kKey * (t.item.row * push.heads + t.first_pair),
                      t.pairs);
            copy_block(push, t, t.first_block, base + (1 + stage) * kTileBytes);
        }
        u32 seen[2]; // keys of this thread's rows
#pragma unroll
        for (u32 h = 0; h < 2; ++h)
            seen[h] = t.item.keys + (t.first_pair + min(first_row + 8 * h, t.pairs - 1)) / push.heads;
        float sums[128], top[2] = {kLowest, kLowest}, total[2] = {0, 0};
#pragma unroll
        for (u32 k = 0; k < 128; ++k)
            sums[k] = 0;
        if (!kFew)
            wait(q_full, q_parity);
        q_parity ^= 1;
        for (u32 block = t.first_block; block < t.end_block; ++block) {
            if (!kFew) {
                wait(full + 8 * stage, parity);
            } else {
                if (block + 1 < t.end_block) {
                    copy_block(push, t, block + 1, base + (1 + (stage ^ 1)) * kTileBytes);
                    asm volatile("cp.async.wait_group 1;" ::: "memory");
                } else {
                    asm volatile("cp.async.wait_group 0;" ::: "memory");
                }
                fence_shared_writes();
                meet();
            }
            const u32 tile = base + (1 + stage) * kTileBytes;
            const u32 first_key = block * kBlock;
            if (first_key + kBlock > t.keys)
                clear_rest(tile, t.keys - first_key);
            float scores[16];
#pragma unroll
            for (u32 k = 0; k < 16; ++k)
                scores[k] = 0;
            begin_products();
#pragma unroll
            for (u32 box = 0; box < kBoxes; ++box)
#pragma unroll
                for (u32 k = 0; k < 4; ++k)
                    multiply_half(scores, descriptor(base + box * kBoxBytes + k * 32, 16, 1024),
                             descriptor(tile + box * kBoxBytes + group * 4096 + k * 32, 16, 1024));
            commit_products();
            wait_for_products<0>();
            float most[2] = {kLowest, kLowest};
#pragma unroll
            for (u32 k = 0; k < 16; ++k) {
                const u32 h = k / 2 % 2, token = first_key + first_token + k / 4 * 8 + k % 2;
                scores[k] = token < seen[h] ? scores[k] * scale : kLowest;
                most[h] = fmaxf(most[h], scores[k]);
            }
            float fade[2];
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                most[h] = fmaxf(most[h], __shfl_xor_sync(0xffffffff, most[h], 1));
                most[h] = fmaxf(most[h], __shfl_xor_sync(0xffffffff, most[h], 2));
                if (lane % 4 == 0)
                    reinterpret_cast<float*>(memory + kTops)[group * kPairs + first_row + 8 * h] =
                        most[h];
            }
            meet();
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                const float other = reinterpret_cast<const float*>(
                    memory + kTops)[(group ^ 1) * kPairs + first_row + 8 * h];
                const float new_top = fmaxf(top[h], fmaxf(most[h], other));
                fade[h] = top[h] == new_top ? 1.0f : exponential(top[h] - new_top);
                top[h] = new_top;
                total[h] *= fade[h];
            }
#pragma unroll
            for (u32 k = 0; k < 16; k += 2) {
                const u32 h = k / 2 % 2;
                float weight[2];
#pragma unroll
                for (u32 e = 0; e < 2; ++e) {
                    weight[e] = scores[k + e] == kLowest ? 0.0f : exponential(scores[k + e] - top[h]);
                    total[h] += weight[e];
                }
                const u32 row = first_row + 8 * h, chunk = 4 * group + k / 4;
                const u32 to = base + kWeights + row * 128 + (chunk ^ row % 8) * 16 + lane % 4 * 4;
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(bf16_pair(weight[0], weight[1]))
                             : "memory");
            }
            fence_shared_writes();
            if (__any_sync(0xffffffff, fade[0] != 1.0f || fade[1] != 1.0f)) {
#pragma unroll
                for (u32 k = 0; k < 128; ++k)
                    sums[k] *= fade[k / 2 % 2];
            }
            meet();
            begin_products();
#pragma unroll
            for (u32 k = 0; k < 4; ++k)
                multiply<false, true>(sums, descriptor(base + kWeights + k * 32, 16, 1024),
                                      descriptor(tile + group * 4 * kBoxBytes + k * 2048, kBoxBytes,
                                                 1024));
            commit_products();
            wait_for_products<0>();
            if (kFew)
                meet(); // before the next block comes there
            else if (releases)
                arrive(empty + 8 * stage);
            if (++stage == kStages) {
                stage = 0;
                parity ^= 1;
            }
        }
        if (!kFew && releases)
            arrive(q_empty);
        // Each warpgroup has the weights of half of the tokens.
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            total[h] += __shfl_xor_sync(0xffffffff, total[h], 1);
            total[h] += __shfl_xor_sync(0xffffffff, total[h], 2);
        }
        if (lane % 4 == 0)
#pragma unroll
            for (u32 h = 0; h < 2; ++h)
                reinterpret_cast<float*>(memory + kTops)[group * kPairs + first_row + 8 * h] = total[h];
        meet();
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            const float* const parts = reinterpret_cast<const float*>(memory + kTops);
            total[h] = parts[first_row + 8 * h] + parts[kPairs + first_row + 8 * h];
        }
        meet(); // before the next tile's tops
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            const u32 pair = first_row + 8 * h;
            const u32 row = (t.first_pair + pair) / push.heads, head = (t.first_pair + pair) % push.heads;
            if (pair >= t.pairs || t.item.keys + row <= t.first_block * kBlock)
                continue;
            const float inverse = 1.0f / total[h];
            const bool final = words(push, 3)[2 * (t.item.row + row) + 1] == 1;
            const u32 column = kValue / 2 * group + lane % 4 * 2;
            const u64 partial = static_cast<u64>(t.item.partial + row * t.item.partial_step) * push.heads + head;
            if (final) {
                u32* const o = reinterpret_cast<u32*>(
                    push.operands[5] +
                    2 * (static_cast<u64>(t.item.row + row) * push.o_row + static_cast<u64>(head) * push.o_head + column));
#pragma unroll
                for (u32 k = 0; k < 32; ++k)
                    o[4 * k] = bf16_pair(sums[4 * k + 2 * h] * inverse, sums[4 * k + 2 * h + 1] * inverse);
            } else {
                float2* const o =
                    reinterpret_cast<float2*>(push.operands[7] + 4 * (partial * kValue + column));
#pragma unroll
                for (u32 k = 0; k < 32; ++k)
                    o[4 * k] = {sums[4 * k + 2 * h] * inverse, sums[4 * k + 2 * h + 1] * inverse};
            }
            if (group == 0 && lane % 4 == 0) {
                const float log_sum = top[h] + log2f(total[h]);
                if (!final)
                    reinterpret_cast<float*>(push.operands[8])[partial] = log_sum;
                else if (push.has_lse != 0)
                    reinterpret_cast<float*>(
                        push.operands[6])[static_cast<u64>(t.item.row + row) * push.heads + head] = log_sum * kLn2;
            }
        }
    }
}

} // namespace

extern "C" __global__ void __launch_bounds__(384, 1) attend(const __grid_constant__ Push push) {
    const u32 base = shared_address(memory);
    if (threadIdx.x == 0) {
        const u32 q_full = base + kBarriers;
        init_barrier(q_full, 1);
        init_barrier(q_full + 8, 2);
        for (u32 i = 0; i < kStages; ++i) {
            init_barrier(q_full + 16 + 8 * i, 1);
            init_barrier(q_full + 16 + 8 * (kStages + i), 2);
        }
        publish_barriers();
    }
    const u64 q_map = push.operands[9], cache_map = q_map + kMapBytes;
    if (threadIdx.x / 32 == kConsumers / 32) { // one warp
        const u32 lane = threadIdx.x % 32;
        u64* const maps = reinterpret_cast<u64*>(memory + kMaps);
        maps[lane] = 0;
        __syncwarp();
        if (lane == 0) {
            write_map<2>(base + kMaps, {push.operands[0], kKey, push.rows * push.heads, 1, 2ull * kKey,
                                        2ull * kKey, kPairs});
            write_map<2>(base + kMaps + kMapBytes, {push.operands[1], kKey, push.blocks * kBlock, 1,
                                                    2ull * kKey, 2ull * kKey, kBlock});
        }
        __syncwarp();
        publish_map(q_map, base + kMaps);
        publish_map(cache_map, base + kMaps + kMapBytes);
    }
    __syncthreads();
    const u32 tasks = min(words(push, 2)[0], push.max_items) * push.chunks;
    if (threadIdx.x >= kConsumers) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == kConsumers)
            produce(push, base, q_map, cache_map, tasks);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    consume<false>(push, base, tasks, {});
}

extern "C" __global__ void __launch_bounds__(384, 1) attend_few(const __grid_constant__ Push push) {
    if (threadIdx.x >= kConsumers) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    // The first item is on its way before anybody knows how many there are.
    Item first = {};
    if (blockIdx.x / push.chunks < push.max_items)
        first = load_item(push, blockIdx.x);
    const u32 tasks = min(words(push, 2)[0], push.max_items) * push.chunks;
    consume<true>(push, shared_address(memory), tasks, first);
}
