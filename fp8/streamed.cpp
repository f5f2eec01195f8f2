// SPDX-License-Identifier: MIT
#include "streamed.hpp"

#include "operands.hpp"
#include "slots.hpp"

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/matrix_images.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <optional>

namespace bellows::fp8 {

namespace {

constexpr std::uint64_t kGridColumns = 32; // of a step of a work list's grid
constexpr std::uint64_t kScaleColumns = 128;

// --- The kernels on matrix units

constexpr std::uint64_t kDirectRows = 16; // more of them want workgroup memory, measured on an H200
constexpr std::uint32_t kSplitK = 4;      // sums are added in this order, whatever the rows

struct Cut {
    MatrixShape shape;
    StreamTile tile;
    MatrixSlots slots; ///< if the tile has split_k

    bool direct() const { return tile.split_k != 0; }
    std::uint32_t rows() const { return shape.m * tile.fragments_m; }
    std::uint32_t columns() const { return shape.n * tile.fragments_n * tile.warps; }
    std::uint32_t subgroups() const { return tile.warps * std::max(tile.split_k, 1u); }
};

/// What the kernels' shaders declare, with some room for their words.
std::uint64_t shared_bytes(const Cut& c) {
    const std::uint64_t matrices = std::uint64_t{4} * c.subgroups() * c.shape.m * c.shape.n;
    if (c.direct())
        return std::max<std::uint64_t>(matrices, std::uint64_t{2} * std::max(c.shape.m, c.shape.n) *
                                                     c.shape.k) +
               4 * c.rows() + 64;
    const std::uint64_t a =
        std::max<std::uint64_t>(std::uint64_t{16} * c.rows() * (c.tile.step_k / 8 + 1), matrices);
    return a + std::uint64_t{16} * c.columns() * (c.tile.step_k / 16 + 1) + 4 * c.rows() + 64;
}

bool fits(const DeviceInfo& info, const Cut& c) {
    const std::uint64_t local_size = std::uint64_t{info.subgroup_size} * c.subgroups();
    if (c.columns() == 0 || kScaleColumns % c.columns() != 0 || c.columns() % kGridColumns != 0 ||
        c.rows() > local_size || c.tile.ahead == 0 || local_size > info.max_workgroup_invocations ||
        shared_bytes(c) > info.shared_memory_bytes)
        return false;
    if (c.direct()) {
        const std::uint32_t segment = 16 * c.shape.k / c.slots.per_k;
        return c.tile.step_k != 0 && c.tile.step_k % segment == 0 && 128 % c.tile.step_k == 0;
    }
    const std::uint64_t chunks = std::uint64_t{c.shape.n} * c.tile.fragments_n * c.tile.step_k / 16;
    return (c.tile.step_k == 32 || c.tile.step_k == 64 || c.tile.step_k == 128) &&
           16 % c.shape.k == 0 && chunks % info.subgroup_size == 0 &&
           c.shape.k * c.shape.n % (2 * info.subgroup_size) == 0;
}

/// For so many rows of a group, as few as the device does well with.
StreamTile tile_for(const MatrixShape& shape, std::uint64_t rows, bool direct) {
    const auto fragments = [](std::uint64_t extent, std::uint32_t side) {
        return static_cast<std::uint32_t>(std::max<std::uint64_t>(extent / side, 1));
    };
    if (direct)
        return {.fragments_m = fragments(kDirectRows, shape.m),
                .fragments_n = fragments(2 * kGridColumns, shape.n),
                .warps = 1,
                .step_k = 128,
                .ahead = 1,
                .split_k = kSplitK};
    const std::uint64_t height = rows <= 12 ? 16 : rows <= 24 ? 32 : rows <= 48 ? 64 : 96;
    return {.fragments_m = fragments(height, shape.m),
            .fragments_n = fragments(height > 16 ? 32 : 16, shape.n),
            .warps = 4,
            .step_k = height > 16 ? 64u : 128u,
            .ahead = 2};
}

/// Nothing when the device has no such matrices.
std::optional<Cut> cut_for(const Device& device, std::uint64_t rows) {
    const DeviceInfo& info = device.info();
    if (info.subgroup_size == 0)
        return std::nullopt;
    for (const GemmClass& c : gemm_classes(device)) {
        if (c.units != GemmClass::Units::F16 || !c.why_not.empty())
            continue;
        const auto forced = forced_stream_tile(device);
        const bool few = rows <= kDirectRows;
        const auto slots = (forced ? forced->split_k != 0 : few) ? matrix_slots(device, c.shape)
                                                                 : std::optional<MatrixSlots>();
        for (const bool direct : {true, false}) {
            if (direct ? !slots : forced && forced->split_k != 0)
                continue;
            const Cut cut{c.shape, forced ? *forced : tile_for(c.shape, rows, direct),
                          slots.value_or(MatrixSlots{})};
            if (cut.direct() == direct && fits(info, cut))
                return cut;
        }
    }
    return std::nullopt;
}

std::string why_not_units(const Device& device, const Product& p) {
    using K = kernels::Fp8StreamGemm;
    if (device.info().is_cpu && !forced_stream_tile(device))
        return "a CPU's matrices are slower than its f32 arithmetic";
    const std::string lacking =
        device.why_not(K::info(), static_cast<std::uint32_t>(K::Variant::f16_f32));
    if (!lacking.empty())
        return lacking;
    for (const Operand* o : {&p.a, &p.b})
        if (!o->quantized || o->quantized->recipe.rule != ScaleRule::PowerOfTwo)
            return "matrix units take e4m3 operands with power-of-two scales";
    if (p.b.quantized->recipe.blocks != Blocks::Blocks128)
        return "matrix units take weights in 128x128 blocks";
    if (!cut_for(device, expected_rows(p)))
        return "the device has no subgroup matrices of f16 that fit";
    return "";
}

// --- Operands as both kernels want them

struct Source {
    const Matrix codes;
    const Scales scales;

    Source(const Operands& operands, const char* name, const Quantized& q)
        : codes(operands.codes((std::string(name) + "'s codes").c_str(), q, true)),
          scales(operands.scales((std::string(name) + "'s scales").c_str(), q, codes)) {}
};

std::uint32_t shift(const Quantized& q) {
    return q.recipe.blocks == Blocks::Blocks128 ? 7 : 0;
}

/// What the kernels have in common: B, D and rows.
template <class K>
void fill(K& kernel, const Operands& operands, const Product& p) {
    const Extents d = extents_of(p.d);
    const Source b(operands, "b", *p.b.quantized);
    operands.u32("the number of words of a matrix of b", 2 * b.codes.rows * b.codes.stride8);
    const BufferView nothing = b.codes.memory;
    kernel.tiles = p.rows != nullptr ? p.rows->tiles.tiles : nothing;
    kernel.ends = p.rows != nullptr ? p.rows->tiles.rows.ends.buffer : nothing;
    kernel.b_codes = b.codes.memory;
    kernel.b_scales = b.scales.memory;
    kernel.d = p.d.buffer;
    kernel.m = operands.u32("M", d.rows);
    kernel.n = operands.u32("N", d.columns);
    kernel.k = operands.u32("K", extents_of(p.a.values).columns);
    kernel.ldb16 = b.codes.stride8 / 2;
    kernel.b_batch16 = b.codes.batch8 / 2;
    kernel.b_scale_ld = b.scales.stride;
    kernel.b_scale_batch = b.scales.batch;
    const std::uint64_t ld = p.d.stride[p.d.rank - 2];
    const std::uint64_t stride_d = p.d.rank == 3 ? p.d.stride[0] : 0;
    kernel.ldd = operands.u32("the stride of d", ld);
    kernel.stride_d = operands.u32("the stride of d", stride_d);
    operands.u32("the number of elements of d", d.rows * ld);
    const std::uint64_t element = size_of(p.d.dtype);
    operands.require(p.d.stride[p.d.rank - 1] == 1 && ld * element % 4 == 0 &&
                         stride_d * element % 4 == 0 && p.d.buffer.offset % 4 == 0,
                     "rows of d must begin at multiples of 4 bytes: " + describe(p.d));
    kernel.constants.aligned = d.columns % 4 == 0 && ld % 4 == 0 && stride_d % 4 == 0 &&
                                       p.d.buffer.offset % (4 * element) == 0
                                   ? 1
                                   : 0;
    kernel.from_list = p.rows != nullptr ? 1 : 0;
    kernel.accumulate = p.accumulate ? 1 : 0;
    kernel.slots = nothing;
    if (by_slots(p)) {
        kernel.slots = p.rows->slots.buffer;
        kernel.slots_per_a_row = p.rows->slots_per_a_row;
        kernel.constants.a_by_slot = p.rows->slots_per_a_row != 0 ? 1 : 0;
        kernel.constants.d_by_slot = p.rows->d_by_slot ? 1 : 0;
    }
}

template <class K>
void dispatch(Recording& recording, const Operands& operands, const Product& p, const K& kernel,
              std::uint64_t tile_rows, BufferView grid, std::uint64_t unit) {
    const Extents d = extents_of(p.d);
    if (p.rows == nullptr) {
        recording.dispatch(kernel, {operands.u32("tiles", div_up(d.rows, tile_rows)),
                                    operands.grid("tiles", div_up(d.columns, unit)),
                                    operands.grid("batches", d.batch)});
        return;
    }
    operands.require(static_cast<bool>(grid),
                     "the work list was not made for N = " + std::to_string(d.columns));
    recording.dispatch_indirect(kernel, grid);
}

template <class K>
void record_with(Recording& recording, const Operands& operands, const Product& p, const Cut& cut,
                 K kernel) {
    kernel.variant = p.d.dtype == DType::BF16 ? K::Variant::f16_bf16 : K::Variant::f16_f32;
    kernel.constants.local_size = recording.device().info().subgroup_size * cut.subgroups();
    kernel.constants.mma_m = cut.shape.m;
    kernel.constants.mma_n = cut.shape.n;
    kernel.constants.mma_k = cut.shape.k;
    kernel.constants.fragments_m = cut.tile.fragments_m;
    kernel.constants.fragments_n = cut.tile.fragments_n;
    kernel.constants.ahead = cut.tile.ahead;
    fill(kernel, operands, p);
    const Source a(operands, "a", *p.a.quantized);
    operands.u32("the number of words of a", 2 * a.codes.rows * a.codes.stride8);
    kernel.a_codes = a.codes.memory;
    kernel.a_scales = a.scales.memory;
    kernel.lda16 = a.codes.stride8 / 2;
    kernel.a_batch16 = a.codes.batch8 / 2;
    kernel.a_scale_ld = a.scales.stride;
    kernel.a_scale_batch = a.scales.batch;
    kernel.a_shift = shift(*p.a.quantized);
    if (p.rows == nullptr) {
        kernel.constants.unit = cut.columns();
        dispatch(recording, operands, p, kernel, cut.rows(), {}, cut.columns());
        return;
    }
    const ops::GroupTiles& list = p.rows->tiles;
    kernel.tile_rows = list.tile_rows;
    const bool wide = list.width_on_units * kGridColumns == cut.columns();
    kernel.constants.unit = wide ? cut.columns() : static_cast<std::uint32_t>(kGridColumns);
    dispatch(recording, operands, p, kernel, 0, list.grid(kernel.n, wide), 0);
}

void record_on_units(Recording& recording, const Operands& operands, const Product& p) {
    const Cut cut = cut_for(recording.device(), expected_rows(p)).value();
    if (!cut.direct()) {
        kernels::Fp8StreamGemm kernel;
        kernel.constants.warps = cut.tile.warps;
        kernel.constants.step_k = cut.tile.step_k;
        record_with(recording, operands, p, cut, kernel);
        return;
    }
    kernels::Fp8DirectGemm kernel;
    kernel.constants.warps_n = cut.tile.warps;
    kernel.constants.warps_k = cut.tile.split_k;
    kernel.constants.per_k = cut.slots.per_k;
    kernel.constants.order_a = cut.slots.order_a;
    kernel.constants.order_b = cut.slots.order_b;
    kernel.constants.k_stride = cut.slots.k_stride;
    kernel.constants.segments = cut.tile.step_k / (16 * cut.shape.k / cut.slots.per_k);
    record_with(recording, operands, p, cut, kernel);
}

// --- The kernel of f32 arithmetic

bool aligned(const TensorView& a) {
    const std::uint64_t batch = a.rank == 3 ? a.stride[0] : 0;
    return a.stride[a.rank - 2] % 4 == 0 && batch % 4 == 0 &&
           a.buffer.offset % (4 * size_of(a.dtype)) == 0;
}

void record_fma(Recording& recording, const Operands& operands, const Product& p) {
    const DeviceInfo& info = recording.device().info();
    const std::uint64_t expected = expected_rows(p);
    using K = kernels::Fp8StreamFma;
    K kernel;
    kernel.constants.local_size = info.is_cpu ? 8 : 64;
    kernel.constants.rows = expected <= 4 ? 4 : expected <= 8 ? 8 : 16;
    kernel.constants.share_a =
        info.is_cpu && info.subgroup_size == 8 && p.a.quantized.has_value() ? 1 : 0;
    fill(kernel, operands, p);
    kernel.b_shift = shift(*p.b.quantized);
    const bool bf16 = p.d.dtype == DType::BF16;
    if (p.a.quantized) {
        kernel.variant = bf16 ? K::Variant::fp8_bf16 : K::Variant::fp8_f32;
        const Source a(operands, "a", *p.a.quantized);
        kernel.a = a.codes.memory;
        kernel.a_scales = a.scales.memory;
        kernel.lda = a.codes.stride8 / 2;
        kernel.a_batch = a.codes.batch8 / 2;
        kernel.a_scale_ld = a.scales.stride;
        kernel.a_scale_batch = a.scales.batch;
        kernel.a_shift = shift(*p.a.quantized);
    } else {
        const TensorView& a = p.a.values;
        const bool narrow = a.dtype == DType::BF16;
        kernel.variant = narrow ? (bf16 ? K::Variant::bf16_bf16 : K::Variant::bf16_f32)
                                : (bf16 ? K::Variant::f32_bf16 : K::Variant::f32_f32);
        operands.require(a.stride[a.rank - 1] == 1,
                         "a is " + describe(a) + "; its last stride must be 1");
        kernel.a = a.buffer;
        kernel.a_scales = kernel.b_scales;
        kernel.lda = operands.u32("the stride of a", a.stride[a.rank - 2]);
        kernel.a_batch = operands.u32("the stride of a", a.rank == 3 ? a.stride[0] : 0);
        operands.u32("the number of elements of a", extents_of(a).rows * kernel.lda);
        kernel.constants.aligned_a = aligned(a) ? 1 : 0;
    }
    const std::uint64_t rows = kernel.constants.rows * kernel.constants.local_size / 8;
    kernel.tile_rows = p.rows != nullptr ? p.rows->tiles.tile_rows : operands.u32("rows", rows);
    dispatch(recording, operands, p, kernel, rows,
             p.rows != nullptr ? p.rows->tiles.grid(kernel.n, false) : BufferView{}, kGridColumns);
}

/// Whether f32 arithmetic has the bits that the other ways would give.
bool sequential(const Device& device, const Product& p) {
    const auto fits_bf16 = [](const Operand& o) {
        return o.quantized ? o.quantized->recipe.rule == ScaleRule::PowerOfTwo
                           : o.values.dtype == DType::BF16;
    };
    return gemm_class(device).units == GemmClass::Units::None || !fits_bf16(p.a) || !fits_bf16(p.b);
}

} // namespace

std::string why_not_streamed(const Device& device, const Product& p) {
    if (p.form != GemmForm::NT)
        return "it takes weights whose k runs along columns (nt)";
    for (const Operand* o : {&p.a, &p.b}) {
        if (!o->quantized && o == &p.a)
            continue;
        if (!o->quantized || o->quantized->recipe.format != Format::E4M3 ||
            (o->quantized->recipe.blocks != Blocks::Rows128 &&
             o->quantized->recipe.blocks != Blocks::Blocks128))
            return "it takes e4m3 weights, and activations in e4m3, bf16 or f32, with scales of "
                   "128 along k";
    }
    if (extents_of(p.a.values).columns == 0)
        return "it needs operands that are not empty";
    const std::string units = why_not_units(device, p);
    return units.empty() || sequential(device, p) ? "" : units;
}

std::string streamed_class(const Device& device, const Product& p) {
    const auto cut =
        why_not_units(device, p).empty() ? cut_for(device, expected_rows(p)) : std::nullopt;
    if (!cut)
        return GemmClass{}.name;
    return (cut->direct() ? "streamed-split" + std::to_string(cut->tile.split_k) + "-f16-k"
                          : std::string("streamed-f16-k")) +
           std::to_string(cut->shape.k);
}

bool better_streamed(const Device&, const Product& p) {
    return expected_rows(p) <= kFewRows;
}

void record_streamed(Recording& recording, const char* op, const Product& p) {
    const Operands operands(op);
    const Extents d = extents_of(p.d);
    if (d.batch == 0 || d.rows == 0 || d.columns == 0)
        return;
    if (why_not_units(recording.device(), p).empty())
        record_on_units(recording, operands, p);
    else
        record_fma(recording, operands, p);
}

} // namespace bellows::fp8
