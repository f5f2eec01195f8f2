// SPDX-License-Identifier: MIT
#include "attention_tile.hpp"
#include "paged_cache.hpp"
#include "paged_form.hpp"
#include "runtime/device_impl.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <bit>

namespace bellows::ops {

namespace {

struct PagedForms {
    bool share_on_cpu = false;
};

/// What the kernels are told about queries, keys and values.
struct Shape {
    std::uint64_t rows = 0, heads = 0, kv_heads = 0;
    std::uint32_t key4 = 0, value4 = 0, first_value4 = 0;

    std::uint32_t group() const { return static_cast<std::uint32_t>(heads / kv_heads); }
    std::uint32_t entry4() const { return first_value4 == 0 ? key4 : key4 + value4; }
};

Shape check_shape(const Arguments& arguments, const TensorView& q, const PagedCache& cache,
                  const TensorView& o) {
    const CacheShape& of = cache.shape;
    const bool heads = of.form == CacheShape::Form::Heads;
    arguments.rank("q", q, 3);
    arguments.activation("q", q);
    Shape shape{.rows = q.extent[0], .heads = q.extent[1], .kv_heads = heads ? of.kv_heads : 1};
    const std::uint64_t key = heads ? of.qk_dim : of.latent + of.rope;
    const std::uint64_t value = heads ? of.v_dim : of.latent;
    arguments.strided("q", q, q.dtype, {shape.rows, shape.heads, key});
    arguments.strided("o", o, q.dtype, {shape.rows, shape.heads, value});
    arguments.require(shape.heads % shape.kv_heads == 0,
                      std::to_string(shape.kv_heads) + " heads of keys and values do not divide " +
                          std::to_string(shape.heads) + " of queries");
    shape.key4 = arguments.groups_of_4("a key", key);
    shape.value4 = arguments.groups_of_4("a value", value);
    shape.first_value4 = heads ? static_cast<std::uint32_t>(shape.kv_heads) * shape.key4 : 0;
    return shape;
}

/// Views of a step's plan and workspace, checked.
struct Step {
    BufferView items, parts, tables, partial, partial_lse, lse;
    std::uint32_t max_items = 0, table_blocks = 0;
    bool has_lse = false;
};

Step check_step(const Arguments& arguments, const Shape& shape, const PagedWork& work,
                const TensorView& lse, BufferView workspace, BufferView o) {
    arguments.tensor("items", work.items, DType::U32, {work.capacity.item_words()});
    arguments.tensor("rows of the plan", work.rows, DType::U32, {shape.rows, PagedPlan::kRowWords});
    arguments.rank("tables", work.tables, 2);
    arguments.tensor("tables", work.tables, DType::U32,
                     {work.tables.extent[0], work.tables.extent[1]});
    const std::uint64_t v_dim = 4 * std::uint64_t{shape.value4};
    const std::uint64_t bytes = paged_attention_workspace_bytes(work.capacity, shape.heads, v_dim);
    const std::uint64_t results = work.capacity.partials * shape.heads;
    arguments.workspace(workspace, bytes);
    arguments.require(bytes <= kKernelReach, "the workspace of " + std::to_string(bytes) +
                                                 " bytes is too large for one kernel");
    Step step;
    step.items = arguments.memory("items", work.items, 1);
    step.parts = arguments.memory("rows of the plan", work.rows, 1);
    step.tables =
        work.tables.num_elements() == 0 ? step.items : arguments.memory("tables", work.tables, 1);
    // Without partial results the kernels still want addresses of something that they may write.
    step.partial = bytes == 0 ? o : workspace.sub(0, results * v_dim * sizeof(float));
    step.partial_lse =
        bytes == 0 ? o : workspace.sub(results * v_dim * sizeof(float), results * sizeof(float));
    step.max_items = arguments.u32("items", work.capacity.items);
    step.table_blocks = arguments.u32("blocks of a table", work.tables.extent[1]);
    step.has_lse = static_cast<bool>(lse.buffer);
    if (step.has_lse)
        arguments.tensor("lse", lse, DType::F32, {shape.rows, shape.heads});
    step.lse = arguments.memory_or("lse", lse, step.partial_lse, 1);
    return step;
}

/// Invocations of a workgroup whose scores and sums fit its memory.
std::uint32_t lanes_that_fit(const Arguments& arguments, const Device& device,
                             std::uint64_t value4) {
    const DeviceInfo& info = device.info();
    std::uint32_t lanes = info.is_cpu ? 8 : 32;
    const std::uint64_t bytes = 16 * value4 + 4 * kCacheBlock;
    while (lanes > 1 && lanes * bytes > info.shared_memory_bytes)
        lanes /= 2;
    arguments.require(lanes * bytes <= info.shared_memory_bytes,
                      "values of " + std::to_string(4 * value4) +
                          " elements are too large for this device");
    return lanes;
}

/// Workgroups that keep the device busy, but no more than there can be tasks.
Groups grid(const Device& device, std::uint64_t tasks) {
    const DeviceInfo& info = device.info();
    const std::uint64_t most = info.is_cpu ? 64 : 16 * std::max<std::uint64_t>(info.processors, 64);
    return {static_cast<std::uint32_t>(
        std::clamp<std::uint64_t>(tasks, 1, std::min(most, kMaxGroups)))};
}

} // namespace

void share_paged_entries(Device& device, bool share) {
    device.impl().memory_of<PagedForms>().share_on_cpu = share;
}

std::optional<PagedTile> paged_tile(const Device& device, std::uint64_t entry4,
                                    std::uint64_t value4) {
    using Kernel = kernels::PagedAttention;
    const DeviceInfo& info = device.info();
    if (info.is_cpu && !device.impl().memory_of<PagedForms>().share_on_cpu)
        return std::nullopt;
    const auto variant = static_cast<std::uint32_t>(Kernel::Variant::f32);
    PagedTile tile;
    if (!device.why_not(Kernel::info(), variant).empty() || info.subgroup_size < 8 ||
        info.max_workgroup_invocations < tile.local_size)
        return std::nullopt;
    constexpr std::uint64_t kShared = 20 * 1024, kMostColumns = 4;
    const std::uint64_t fit = kShared / (16 * entry4);
    if (fit < 4 || value4 > kMostColumns * tile.local_size)
        return std::nullopt;
    tile.tile = static_cast<std::uint32_t>(std::min<std::uint64_t>(std::bit_floor(fit), 32));
    tile.columns = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(
        std::bit_ceil(value4), tile.local_size / tile.pairs, tile.local_size));
    return tile;
}

namespace {

/// Elements of a key and of a value.
struct Dims {
    std::uint64_t key, value;
    bool latent, codes;
    explicit Dims(const CacheShape& of)
        : key(of.form == CacheShape::Form::Heads ? of.qk_dim : of.latent + of.rope),
          value(of.form == CacheShape::Form::Heads ? of.v_dim : of.latent),
          latent(of.form == CacheShape::Form::Latent), codes(of.dtype == DType::F8E4M3) {}
};

constexpr std::uint64_t kScaled = 128; ///< elements to a scale of FP8

/// Whether the kernel's loops come out even.
bool shares_out(const PagedMatrixTile& tile, const Dims& dims, std::uint64_t lanes) {
    const auto [m, n, k] = tile.shape;
    const std::uint64_t scaled = dims.latent ? dims.value : dims.key, rest = dims.key - scaled;
    const std::uint64_t of_row = lanes * tile.parts / m; // invocations
    const auto even = [](std::uint64_t size, std::uint64_t by) { return size % by == 0; };
    return even(lanes * tile.parts, m) && even(m, tile.parts) && of_row > 0 &&
           even(lanes, of_row) && even(tile.block, 2 * of_row) && even(tile.block, n) &&
           even(tile.block, k) && even(scaled, tile.parts * k) && even(rest, tile.parts * k) &&
           even(dims.value, tile.parts * n) && even(dims.key, 8) && even(dims.value, 8) &&
           tile.block >= m;
}

/// The variant for products of bf16 that the device takes.
template <class K>
typename K::Variant units_variant(const Device& device) {
    return device.impl().gemm.gemm_class.units == GemmClass::Units::BF16 ? K::Variant::bf16
                                                                         : K::Variant::f16;
}

} // namespace

std::uint64_t PagedMatrixTile::shared_bytes(const CacheShape& cache) const {
    const Dims dims(cache);
    // In words of 16 bytes: eight elements of a matrix, or four floats.
    const std::uint64_t x = (dims.key + 8) / 8, y = dims.latent ? 0 : (dims.value + 8) / 8;
    const std::uint64_t scales = dims.codes ? parts * block / 4 : 0;
    const std::uint64_t results = warps() * (shape.m * shape.n / 4);
    if (in_lane)
        return 16 * std::max(block * (x + y), results);
    return 16 * (block * (x + y) + scales + warps() * shape.m * ((block + 4) / 4) + pairs() / 4);
}

std::optional<PagedMatrixTile> paged_matrix_tile(const Device& device, const CacheShape& cache,
                                                 DType queries) {
    using Kernel = kernels::PagedAttentionCoopmat;
    const DeviceInfo& info = device.info();
    const GemmClass& gemm_class = device.impl().gemm.gemm_class;
    const Dims dims(cache);
    if (queries != DType::BF16 || cache.dtype == DType::F32 ||
        gemm_class.units == GemmClass::Units::None ||
        !device.why_not(Kernel::info(), static_cast<std::uint32_t>(units_variant<Kernel>(device)))
             .empty())
        return std::nullopt;
    // Registers hold that many columns of a key and of a value's sums. A CPU driver compiles each
    // product of a tile to code of its own, so that large parts take it minutes.
    constexpr std::uint64_t kMostKeys = 192, kMostValues = 128;
    constexpr std::uint32_t kMostParts = 4;
    const std::uint64_t most_keys = info.is_cpu ? 64 : kMostKeys,
                        most_values = info.is_cpu ? 32 : kMostValues;
    PagedMatrixTile tile{.shape = gemm_class.shape};
    const auto parts_for = [&](std::uint64_t keys, std::uint64_t values) {
        return std::bit_ceil(std::max(div_up(dims.key, keys), div_up(dims.value, values)));
    };
    const std::uint64_t parts =
        dims.codes ? dims.value / kScaled
                   : std::min<std::uint64_t>(parts_for(most_keys, most_values), kMostParts);
    if (parts > kMostParts || !std::has_single_bit(parts) ||
        parts_for(kMostKeys, kMostValues) > parts)
        return std::nullopt;
    tile.parts = static_cast<std::uint32_t>(parts);
    const std::uint32_t of_lane = tile.shape.m * tile.shape.k / info.subgroup_size;
    if (tile.parts == 1 && !dims.codes && of_lane % 2 == 0 &&
        !passes_weights_through_memory(device)) {
        tile.in_lane = matrix_slots(device, tile.shape, gemm_class.units);
        if (tile.in_lane && !tile.in_lane->like_a)
            tile.in_lane.reset();
    }
    tile.few_bands = dims.latent ? 1 : 2;
    // Codes are worth sharing among bands, as decoding them takes long.
    const bool small = info.is_cpu || dims.codes;
    const std::uint32_t most_bands = info.is_cpu || !dims.latent ? 4 / tile.parts
                                     : dims.codes                ? 4
                                                                 : 1;
    for (const std::uint32_t block : {small ? 16u : 32u, small ? 32u : 16u}) {
        tile.block = block;
        if (!shares_out(tile, dims, info.subgroup_size))
            continue;
        for (tile.bands = most_bands; tile.bands > 0; tile.bands /= 2)
            if (tile.shared_bytes(cache) <= info.shared_memory_bytes &&
                tile.warps() * info.subgroup_size <= info.max_workgroup_invocations)
                return tile;
    }
    return std::nullopt;
}

namespace {

/// Bands do not change bits: where sequences have few rows, as in decoding, few bands leave less
/// idle.
std::optional<PagedMatrixTile> tile_for_step(const Device& device, const CacheShape& cache,
                                             DType queries, const Shape& shape,
                                             std::uint64_t sequences) {
    auto tile = paged_matrix_tile(device, cache, queries);
    if (tile && shape.rows * shape.group() <= sequences * tile->few_bands * tile->shape.m)
        tile->bands = std::min(tile->bands, tile->few_bands);
    return tile;
}

constexpr std::uint64_t kNativePairs = 64; ///< of a workgroup
constexpr std::uint64_t kFewRows = 8; ///< of a step whose tiles are not worth maps; bits are alike

/// Whether the device has a kernel of its own for queries and entries of these types.
bool has_native(const Device& device, const CacheShape& cache, DType queries) {
    constexpr std::uint64_t kLatent = 512, kRope = 64;
    return cache.form == CacheShape::Form::Latent && cache.dtype == DType::BF16 &&
           cache.latent == kLatent && cache.rope == kRope && queries == DType::BF16 &&
           device.why_not(kernels::HopperPagedLatent::info(), 0).empty();
}

bool serves_native(const Device& device, const TensorView& q, const PagedCache& cache,
                   const TensorView& o, const PagedWork& work) {
    constexpr std::uint64_t kAlignment = 16;
    const auto aligned = [](const BufferView& memory) { return memory.offset % kAlignment == 0; };
    return has_native(device, cache.shape, q.dtype) && q.is_contiguous() && aligned(q.buffer) &&
           aligned(cache.memory) && aligned(work.items.buffer) && o.stride[0] % 2 == 0 &&
           o.stride[1] % 2 == 0 && o.buffer.offset % 4 == 0;
}

void record_native(Recording& recording, const Arguments& arguments, const TensorView& q,
                   const PagedCache& cache, const PagedWork& work, const TensorView& o,
                   const Step& step, const Shape& shape, float scale) {
    using Kernel = kernels::HopperPagedLatent;
    Kernel kernel;
    if (shape.rows <= kFewRows &&
        recording.device()
            .why_not(Kernel::info(), static_cast<std::uint32_t>(Kernel::Variant::few))
            .empty())
        kernel.variant = Kernel::Variant::few;
    kernel.q = arguments.memory("q", q);
    kernel.cache = cache.memory;
    kernel.items = step.items;
    kernel.parts = step.parts;
    kernel.tables = step.tables;
    kernel.o = arguments.memory("o", o);
    kernel.lse = step.lse;
    kernel.partial = step.partial;
    kernel.partial_lse = step.partial_lse;
    kernel.rows = arguments.u32("rows", shape.rows);
    kernel.blocks = arguments.u32("blocks", cache.blocks);
    kernel.heads = arguments.u32("heads", shape.heads);
    kernel.max_items = step.max_items;
    kernel.table_blocks = step.table_blocks;
    kernel.chunks = arguments.u32("parts of a row", div_up(shape.heads, kNativePairs));
    kernel.o_row = arguments.u32("o's row stride", o.stride[0]);
    kernel.o_head = arguments.u32("o's head stride", o.stride[1]);
    kernel.has_lse = step.has_lse ? 1u : 0u;
    kernel.scale = scale;
    const std::uint64_t tasks = work.capacity.items * kernel.chunks;
    arguments.u32("items of all heads", tasks);
    recording.dispatch(kernel, {static_cast<std::uint32_t>(std::clamp<std::uint64_t>(
                                   tasks, 1, recording.device().info().processors))});
}

} // namespace

std::uint64_t paged_rows_per_item(const Device& device, const CacheShape& cache, DType queries,
                                  std::uint64_t heads) {
    const auto on_units = paged_matrix_tile(device, cache, queries);
    const std::uint64_t pairs = has_native(device, cache, queries) ? kNativePairs
                                : on_units                         ? on_units->pairs()
                                : device.info().is_cpu             ? 8
                                                                   : PagedTile().pairs;
    const std::uint64_t group = cache.form == CacheShape::Form::Heads
                                    ? heads / std::max<std::uint64_t>(cache.kv_heads, 1)
                                    : heads;
    return std::max<std::uint64_t>(pairs / std::max<std::uint64_t>(group, 1), 1);
}

namespace {

/// Everything but the combination of parts.
void attend_parts(Recording& recording, const Arguments& arguments, const TensorView& q,
                  const PagedCache& cache, const PagedWork& work, const TensorView& o,
                  const Shape& shape, const Step& step, float scale) {
    const PagedMemory memory = paged_memory(arguments, cache);
    const BufferView o_memory = arguments.memory("o", o);
    const auto heads = arguments.u32("heads", shape.heads);
    const std::uint32_t o_row4 = arguments.groups_of_4("o's row stride", o.stride[0]);
    const std::uint32_t o_head4 = arguments.groups_of_4("o's head stride", o.stride[1]);
    // `pairs` rows and heads to a workgroup.
    const auto attend = [&]<class K>(K kernel, std::uint32_t local_size, std::uint32_t pairs) {
        kernel.q = arguments.memory("q", q);
        kernel.cache = memory.memory;
        kernel.items = step.items;
        kernel.parts = step.parts;
        kernel.tables = step.tables;
        kernel.o = o_memory;
        kernel.lse = step.lse;
        kernel.partial = step.partial;
        kernel.partial_lse = step.partial_lse;
        kernel.heads = heads;
        kernel.max_items = step.max_items;
        kernel.table_blocks = step.table_blocks;
        kernel.q_row4 = arguments.groups_of_4("q's row stride", q.stride[0]);
        kernel.q_head4 = arguments.groups_of_4("q's head stride", q.stride[1]);
        kernel.o_row4 = o_row4;
        kernel.o_head4 = o_head4;
        kernel.has_lse = step.has_lse ? 1u : 0u;
        kernel.scale = scale;
        auto& c = kernel.constants;
        c.local_size = local_size;
        c.storage = memory.storage;
        c.first4 = memory.first4;
        c.units = memory.units;
        c.key4 = shape.key4;
        c.value4 = shape.value4;
        c.first_value4 = shape.first_value4;
        c.kv_heads = static_cast<std::uint32_t>(shape.kv_heads);
        c.group = shape.group();
        c.chunks = static_cast<std::uint32_t>(div_up(shape.group(), pairs));
        const std::uint64_t tasks = work.capacity.items * shape.kv_heads * c.chunks;
        arguments.u32("items of all heads", tasks);
        recording.dispatch(kernel, grid(recording.device(), tasks));
    };
    if (serves_native(recording.device(), q, cache, o, work)) {
        record_native(recording, arguments, q, cache, work, o, step, shape, scale);
    } else if (const auto units = tile_for_step(recording.device(), cache.shape, q.dtype, shape,
                                                work.tables.extent[0])) {
        kernels::PagedAttentionCoopmat kernel;
        kernel.variant = units_variant<kernels::PagedAttentionCoopmat>(recording.device());
        kernel.constants.mma_m = units->shape.m;
        kernel.constants.mma_n = units->shape.n;
        kernel.constants.mma_k = units->shape.k;
        kernel.constants.warps = units->warps();
        kernel.constants.parts = units->parts;
        kernel.constants.block = units->block;
        if (units->in_lane)
            set_lanes(kernel.constants, units->shape, *units->in_lane,
                      recording.device().info().subgroup_size);
        attend(kernel, units->warps() * recording.device().info().subgroup_size, units->pairs());
    } else if (const auto tile = paged_tile(recording.device(), shape.entry4(), shape.value4)) {
        kernels::PagedAttention kernel;
        kernel.variant = storage_variant<kernels::PagedAttention>(q.dtype);
        kernel.constants.pairs = tile->pairs;
        kernel.constants.tile = tile->tile;
        kernel.constants.columns = tile->columns;
        attend(kernel, tile->local_size, tile->pairs);
    } else {
        const std::uint32_t lanes = lanes_that_fit(arguments, recording.device(), shape.value4);
        using Lanes = kernels::PagedAttentionLanes;
        attend(Lanes{.variant = storage_variant<Lanes>(q.dtype)}, lanes, lanes);
    }
}

} // namespace

PagedParts paged_attention_parts(Recording& recording, const TensorView& q, const PagedCache& cache,
                                 const PagedWork& work, const TensorView& o, float scale,
                                 BufferView workspace) {
    const Arguments arguments("paged_attention_parts");
    const Shape shape = check_shape(arguments, q, cache, o);
    const Step step = check_step(arguments, shape, work, {}, workspace, arguments.memory("o", o));
    if (shape.rows > 0 && shape.heads > 0)
        attend_parts(recording, arguments, q, cache, work, o, shape, step, scale);
    const std::uint64_t partials = work.capacity.partials;
    return {.rows = work.rows,
            .sums = TensorView::contiguous(
                step.partial, DType::F32, {partials, shape.heads, 4 * std::uint64_t{shape.value4}}),
            .log_of_sums =
                TensorView::contiguous(step.partial_lse, DType::F32, {partials, shape.heads})};
}

void paged_attention(Recording& recording, const TensorView& q, const PagedCache& cache,
                     const PagedWork& work, const TensorView& o, const TensorView& lse, float scale,
                     BufferView workspace) {
    const Arguments arguments("paged_attention");
    const Shape shape = check_shape(arguments, q, cache, o);
    const BufferView o_memory = arguments.memory("o", o);
    const Step step = check_step(arguments, shape, work, lse, workspace, o_memory);
    if (shape.rows == 0 || shape.heads == 0)
        return;
    attend_parts(recording, arguments, q, cache, work, o, shape, step, scale);
    using Combine = kernels::PagedAttentionCombine;
    const std::uint32_t segments = recording.device().info().is_cpu ? 1 : shape.value4;
    const std::uint64_t results = shape.rows * shape.heads * segments;
    arguments.u32("results", results);
    const FlatPlan plan = plan_flat(recording, results, 1);
    recording.dispatch(Combine{.variant = storage_variant<Combine>(q.dtype),
                               .constants = {.local_size = plan.local_size},
                               .parts = step.parts,
                               .partial = step.partial,
                               .partial_lse = step.partial_lse,
                               .o = o_memory,
                               .lse = step.lse,
                               .rows = arguments.u32("rows", shape.rows),
                               .heads = arguments.u32("heads", shape.heads),
                               .segments = segments,
                               .segment4 = shape.value4 / segments,
                               .o_row4 = arguments.groups_of_4("o's row stride", o.stride[0]),
                               .o_head4 = arguments.groups_of_4("o's head stride", o.stride[1]),
                               .has_lse = step.has_lse ? 1u : 0u},
                       plan.groups);
}

} // namespace bellows::ops
