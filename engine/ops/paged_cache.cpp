// SPDX-License-Identifier: MIT
// Entries of a paged cache: appending, gathering, copies of blocks.
#include "paged_cache.hpp"

#include "norm_variant.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <type_traits>

namespace bellows::ops {

PagedMemory paged_memory(const Arguments& arguments, const PagedCache& cache) {
    const CacheShape& shape = cache.shape;
    const bool heads = shape.form == CacheShape::Form::Heads;
    arguments.require(shape.dtype == DType::F32 || shape.dtype == DType::BF16 ||
                          (!heads && shape.dtype == DType::F8E4M3),
                      std::string("a cache of ") + (heads ? "heads" : "latents") + " in " +
                          to_string(shape.dtype) + "; wanted is f32 or bf16, of latents also " +
                          to_string(DType::F8E4M3));
    arguments.require(heads ? shape.kv_heads > 0 && shape.qk_dim > 0 && shape.v_dim > 0
                            : shape.latent > 0,
                      "a cache whose entries have no elements");
    arguments.require(shape.dtype != DType::F8E4M3 || shape.latent % 128 == 0,
                      "a latent of " + std::to_string(shape.latent) + " in " +
                          to_string(shape.dtype) + "; it must be a multiple of 128");
    PagedMemory memory;
    memory.storage = shape.dtype == DType::F32 ? 0 : shape.dtype == DType::BF16 ? 1 : 2;
    memory.units = arguments.u32("an entry", cache_token_bytes(shape) / 16);
    if (heads) {
        memory.first4 = static_cast<std::uint32_t>(shape.kv_heads) *
                        arguments.groups_of_4("qk_dim", shape.qk_dim);
        memory.second4 = static_cast<std::uint32_t>(shape.kv_heads) *
                         arguments.groups_of_4("v_dim", shape.v_dim);
    } else {
        memory.first4 = arguments.groups_of_4("latent", shape.latent);
        memory.second4 = arguments.groups_of_4("rope", shape.rope);
    }
    // Places are u32, kNoPlace is none of them.
    arguments.u32("a place", cache.blocks * kCacheBlock);
    memory.blocks = static_cast<std::uint32_t>(cache.blocks);
    const std::uint64_t bytes = cache_bytes(shape, cache.blocks);
    arguments.require(static_cast<bool>(cache.memory) && cache.memory.bytes >= bytes &&
                          cache.memory.offset % 16 == 0,
                      "a cache of " + std::to_string(cache.blocks) + " blocks needs " +
                          std::to_string(bytes) + " bytes at a multiple of 16, given are " +
                          std::to_string(cache.memory.bytes) + " at byte " +
                          std::to_string(cache.memory.offset));
    memory.memory = cache.memory.sub(0, bytes);
    return memory;
}

namespace {

/// [rows, size] as [rows, 1, size].
TensorView with_heads(const TensorView& view) {
    if (view.rank != 2)
        return view;
    TensorView heads = view;
    heads.rank = 3;
    heads.extent = {view.extent[0], 1, view.extent[1], 0};
    heads.stride = {view.stride[0], 0, view.stride[1], 0};
    return heads;
}

void require_form(const Arguments& arguments, const PagedCache& cache, CacheShape::Form form) {
    arguments.require(cache.shape.form == form, form == CacheShape::Form::Heads
                                                    ? "this is a cache of latents, not of heads"
                                                    : "this is a cache of heads, not of latents");
}

/// The angles of rows, which stand at `positions` of a table of cosines and sines. Without memory:
/// there is no rotation.
struct Angles {
    TensorView table, positions;

    bool any() const { return static_cast<bool>(table.buffer); }
    void check(const Arguments& arguments, std::uint64_t rows, std::uint64_t size) const {
        arguments.rank("table", table, 3);
        arguments.tensor("table", table, DType::F32, {table.extent[0], size / 2, 2});
        arguments.tensor("positions", positions, DType::U32, {rows});
    }
};

/// Both kernels that move entries, a and b being an entry's parts: [rows, heads, size].
template <class K>
void move_entries(Recording& recording, const Arguments& arguments, const PagedCache& cache,
                  const char* a_name, const TensorView& a_view, const char* b_name,
                  const TensorView& b_view, const TensorView& places, const Angles& angles = {}) {
    const PagedMemory memory = paged_memory(arguments, cache);
    const CacheShape& shape = cache.shape;
    const bool of_heads = shape.form == CacheShape::Form::Heads;
    const TensorView a = with_heads(a_view), b = with_heads(b_view);
    arguments.rank(a_name, a, 3);
    arguments.activation(a_name, a);
    const std::uint64_t rows = a.extent[0], heads = of_heads ? shape.kv_heads : 1;
    const std::uint64_t a_size = of_heads ? shape.qk_dim : shape.latent;
    const std::uint64_t b_size = of_heads ? shape.v_dim : shape.rope;
    arguments.strided(a_name, a, a.dtype, {rows, heads, a_size});
    arguments.strided(b_name, b, a.dtype, {rows, heads, b_size});
    arguments.tensor("places", places, DType::U32, {rows});
    if (angles.any())
        angles.check(arguments, rows, a_size);
    if (rows == 0)
        return;
    K kernel;
    kernel.variant = storage_variant<K>(a.dtype);
    kernel.a = arguments.memory(a_name, a);
    kernel.b = b_size == 0 ? kernel.a : arguments.memory(b_name, b);
    kernel.places = arguments.memory("places", places, 1);
    kernel.cache = memory.memory;
    kernel.rows = arguments.u32("rows", rows);
    kernel.num_places = static_cast<std::uint32_t>(cache.blocks * kCacheBlock);
    kernel.units = memory.units;
    kernel.a_size4 = arguments.groups_of_4("a size", a_size);
    kernel.a_row4 = arguments.groups_of_4("a row stride", a.stride[0]);
    kernel.a_head4 = arguments.groups_of_4("a head stride", a.stride[1]);
    kernel.b_size4 = arguments.groups_of_4("a size", b_size);
    kernel.b_row4 = arguments.groups_of_4("a row stride", b.stride[0]);
    kernel.b_head4 = arguments.groups_of_4("a head stride", b.stride[1]);
    kernel.second4 = memory.second4;
    const std::uint64_t items = rows * (memory.first4 + memory.second4);
    arguments.u32("four-element items", items);
    const FlatPlan plan = plan_flat(recording, items, 16);
    kernel.constants = {
        .local_size = plan.local_size, .storage = memory.storage, .first4 = memory.first4};
    if constexpr (std::is_same_v<K, kernels::CacheAppend>) {
        kernel.constants.rotate = angles.any() ? 1 : 0;
        kernel.table = arguments.memory_or("table", angles.table, kernel.places);
        kernel.positions = arguments.memory_or("positions", angles.positions, kernel.places, 1);
    }
    recording.dispatch(kernel, plan.groups);
}

} // namespace

void cache_append_latent(Recording& recording, const PagedCache& cache, const TensorView& latent,
                         const TensorView& key, const TensorView& places) {
    const Arguments arguments("cache_append_latent");
    require_form(arguments, cache, CacheShape::Form::Latent);
    move_entries<kernels::CacheAppend>(recording, arguments, cache, "latent", latent, "key", key,
                                       places);
}

void cache_append_heads(Recording& recording, const PagedCache& cache, const TensorView& keys,
                        const TensorView& values, const TensorView& places) {
    const Arguments arguments("cache_append_heads");
    require_form(arguments, cache, CacheShape::Form::Heads);
    move_entries<kernels::CacheAppend>(recording, arguments, cache, "keys", keys, "values", values,
                                       places);
}

void cache_append_rotated_heads(Recording& recording, const PagedCache& cache,
                                const TensorView& keys, const TensorView& values,
                                const TensorView& table, const TensorView& positions,
                                const TensorView& places) {
    const Arguments arguments("cache_append_rotated_heads");
    require_form(arguments, cache, CacheShape::Form::Heads);
    arguments.require(static_cast<bool>(table.buffer), "the table has no memory");
    move_entries<kernels::CacheAppend>(recording, arguments, cache, "keys", keys, "values", values,
                                       places, {table, positions});
}

void cache_append_normalised_latent(Recording& recording, const PagedCache& cache,
                                    const TensorView& kv, const TensorView& gain, float eps,
                                    const TensorView& table, const TensorView& positions,
                                    const TensorView& places) {
    const Arguments arguments("cache_append_normalised_latent");
    require_form(arguments, cache, CacheShape::Form::Latent);
    const PagedMemory memory = paged_memory(arguments, cache);
    const std::uint64_t latent = cache.shape.latent, rope = cache.shape.rope;
    arguments.rank("kv", kv, 2);
    const std::uint64_t rows = kv.extent[0];
    arguments.strided("kv", kv, kv.dtype, {rows, latent + rope});
    using Kernel = kernels::CacheAppendNormalised;
    const auto variant = norm_variant<Kernel>(arguments, kv, gain, latent);
    const Angles angles{table, positions};
    angles.check(arguments, rows, rope);
    arguments.tensor("places", places, DType::U32, {rows});
    if (rows == 0)
        return;
    // As rmsnorm_forward has it, so that sums have the same order.
    const RowPlan plan = plan_rows(recording, rows, latent / 4, RowWork::Reduction);
    recording.dispatch(Kernel{.variant = variant,
                              .constants = {.local_size = plan.local_size,
                                            .row_per_workgroup = plan.row_per_workgroup,
                                            .storage = memory.storage,
                                            .first4 = memory.first4},
                              .kv = arguments.memory("kv", kv),
                              .gain = arguments.memory("gain", gain),
                              .table = rope == 0 ? arguments.memory("gain", gain)
                                                 : arguments.memory("table", table),
                              .positions = arguments.memory("positions", positions, 1),
                              .places = arguments.memory("places", places, 1),
                              .cache = memory.memory,
                              .rows = arguments.u32("rows", rows),
                              .num_places = static_cast<std::uint32_t>(cache.blocks * kCacheBlock),
                              .units = memory.units,
                              .kv_row4 = arguments.groups_of_4("kv's row stride", kv.stride[0]),
                              .second4 = memory.second4,
                              .eps = eps},
                       plan.groups);
}

void cache_gather_latent(Recording& recording, const PagedCache& cache, const TensorView& places,
                         const TensorView& latent, const TensorView& key) {
    const Arguments arguments("cache_gather_latent");
    require_form(arguments, cache, CacheShape::Form::Latent);
    move_entries<kernels::CacheGather>(recording, arguments, cache, "latent", latent, "key", key,
                                       places);
}

void cache_gather_heads(Recording& recording, const PagedCache& cache, const TensorView& places,
                        const TensorView& keys, const TensorView& values) {
    const Arguments arguments("cache_gather_heads");
    require_form(arguments, cache, CacheShape::Form::Heads);
    move_entries<kernels::CacheGather>(recording, arguments, cache, "keys", keys, "values", values,
                                       places);
}

void cache_copy_blocks(Recording& recording, const PagedCache& cache, const TensorView& pairs) {
    const Arguments arguments("cache_copy_blocks");
    const PagedMemory memory = paged_memory(arguments, cache);
    arguments.rank("pairs", pairs, 2);
    arguments.tensor("pairs", pairs, DType::U32, {pairs.extent[0], 2});
    if (pairs.extent[0] == 0)
        return;
    const std::uint32_t units = arguments.u32("a block", std::uint64_t{memory.units} * kCacheBlock);
    FlatPlan plan = plan_flat(recording, units, 64);
    plan.groups.y = static_cast<std::uint32_t>(std::min(pairs.extent[0], kMaxGroups));
    recording.dispatch(kernels::CacheCopyBlocks{.constants = {.local_size = plan.local_size},
                                                .pairs = arguments.memory("pairs", pairs, 1),
                                                .cache = memory.memory,
                                                .count = arguments.u32("pairs", pairs.extent[0]),
                                                .blocks = memory.blocks,
                                                .units = units},
                       plan.groups);
}

} // namespace bellows::ops
