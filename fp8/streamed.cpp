// SPDX-License-Identifier: MIT
#include "streamed.hpp"

#include "few_rows.hpp"
#include "matrix_constants.hpp"
#include "operands.hpp"
#include "stream_operands.hpp"

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <optional>

namespace bellows::fp8 {

namespace {

constexpr std::uint64_t kGridColumns = 32; // of a step of a work list's grid
constexpr std::uint64_t kScaleColumns = 128;
constexpr std::uint64_t kMostFewRows =
    20; // more of them want workgroup memory, measured on an H200

// --- The kernel on matrix units for more than a few rows

struct Cut {
    MatrixShape shape;
    Tile tile;

    std::uint32_t rows() const { return shape.m * tile.fragments_m; }
    std::uint32_t columns() const { return shape.n * tile.fragments_n * tile.warps_n; }
};

/// What the shader declares, with some room for its words.
std::uint64_t shared_bytes(const Cut& c) {
    const std::uint64_t matrices = std::uint64_t{4} * c.tile.warps_n * c.shape.m * c.shape.n;
    const std::uint64_t a =
        std::max<std::uint64_t>(std::uint64_t{16} * c.rows() * (c.tile.step_k / 8 + 1), matrices);
    return a + std::uint64_t{16} * c.columns() * (c.tile.step_k / 16 + 1) + 4 * c.rows() + 64;
}

bool fits(const DeviceInfo& info, const Cut& c) {
    const Tile& t = c.tile;
    const std::uint64_t local_size = std::uint64_t{info.subgroup_size} * t.warps_n;
    if (t.warps_m != 1 || t.warps_k != 1 || t.stages != 1 || c.columns() == 0 ||
        kScaleColumns % c.columns() != 0 || c.columns() % kGridColumns != 0 || c.rows() == 0 ||
        c.rows() > local_size || t.ahead == 0 || local_size > info.max_workgroup_invocations ||
        shared_bytes(c) > info.shared_memory_bytes)
        return false;
    const std::uint64_t chunks = std::uint64_t{c.shape.n} * t.fragments_n * t.step_k / 16;
    return (t.step_k == 32 || t.step_k == 64 || t.step_k == 128) && 16 % c.shape.k == 0 &&
           chunks % info.subgroup_size == 0 &&
           c.shape.k * c.shape.n % (2 * info.subgroup_size) == 0;
}

/// For sums, and the codes of B on their way.
std::uint64_t registers(const DeviceInfo& info, const Cut& c) {
    const std::uint64_t columns = std::uint64_t{c.shape.n} * c.tile.fragments_n;
    return (c.rows() * columns + c.tile.ahead * columns * c.tile.step_k / 4) / info.subgroup_size;
}

/// For so many rows of a group, as few as the device does well with.
Tile tile_for(const MatrixShape& shape, std::uint64_t rows) {
    const auto fragments = [](std::uint64_t extent, std::uint32_t side) {
        return static_cast<std::uint32_t>(std::max<std::uint64_t>(extent / side, 1));
    };
    const std::uint64_t height = rows <= 12 ? 16 : rows <= 24 ? 32 : rows <= 48 ? 64 : 96;
    return {.fragments_m = fragments(height, shape.m),
            .fragments_n = fragments(height > 16 ? 32 : 16, shape.n),
            .warps_n = 4,
            .step_k = height > 16 ? 64u : 128u,
            .ahead = 2};
}

/// Nothing when the device has no such matrices.
std::optional<Cut> cut_for(const Device& device, const Product& p, const Tile& tile = {}) {
    const DeviceInfo& info = device.info();
    if (info.subgroup_size == 0)
        return std::nullopt;
    for (const GemmClass& c : gemm_classes(device)) {
        if (c.units != GemmClass::Units::F16 || !c.why_not.empty())
            continue;
        const Cut cut{c.shape, tile != Tile{} ? tile : tile_for(c.shape, expected_rows(p))};
        if (fits(info, cut))
            return cut;
    }
    return std::nullopt;
}

std::string why_not_units(const Device& device, const Product& p, const Tile& tile = {}) {
    if (std::string lacking = why_not_on_units<kernels::Fp8StreamGemm>(device, p, tile);
        !lacking.empty())
        return lacking;
    if (!cut_for(device, p, tile))
        return no_cut(tile);
    return "";
}

/// The work list of a kernel that reads one.
template <class K>
void bind_list(K& kernel, const Product& p) {
    kernel.tiles = p.rows != nullptr ? p.rows->tiles.tiles : kernel.b_codes;
    kernel.ends = p.rows != nullptr ? p.rows->tiles.rows.ends.buffer : kernel.b_codes;
    kernel.from_list = p.rows != nullptr ? 1 : 0;
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

std::vector<NamedTile> tiles_on_units(const Device& device, const Product& p) {
    return changed_tiles(device.info(), cut_for(device, p).value(),
                         {[](Tile& t) { t.step_k = t.step_k == 64 ? 128 : 64; },
                          [](Tile& t) { t.ahead = t.ahead == 1 ? 2 : 1; },
                          [](Tile& t) { t.ahead = 3; }, [](Tile& t) { t.fragments_n /= 2; },
                          [](Tile& t) { t.fragments_m /= 2; }});
}

void record_on_units(Recording& recording, const Operands& operands, const Product& p,
                     const Tile& tile) {
    using K = kernels::Fp8StreamGemm;
    const Cut cut = cut_for(recording.device(), p, tile).value();
    K kernel;
    kernel.variant = p.d.dtype == DType::BF16 ? K::Variant::f16_bf16 : K::Variant::f16_f32;
    set_tile(kernel.constants, recording.device().info().subgroup_size, cut.shape, cut.tile);
    kernel.constants.warps = cut.tile.warps_n;
    kernel.constants.step_k = cut.tile.step_k;
    kernel.constants.ahead = cut.tile.ahead;
    bind_others(kernel, operands, p);
    bind_a(kernel, operands, *p.a.quantized, StreamA<K>{&K::a_codes, &K::lda16, &K::a_batch16});
    bind_list(kernel, p);
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
    bind_others(kernel, operands, p);
    bind_list(kernel, p);
    kernel.b_shift = scale_shift(*p.b.quantized);
    const bool bf16 = p.d.dtype == DType::BF16;
    if (p.a.quantized) {
        kernel.variant = bf16 ? K::Variant::fp8_bf16 : K::Variant::fp8_f32;
        bind_a(kernel, operands, *p.a.quantized, StreamA<K>{&K::a, &K::lda, &K::a_batch});
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

/// "" when the kernel for few rows computes the product.
std::string why_not_few(const Device& device, const Product& p, const Tile& tile = {}) {
    if (tile != Tile{} ? tile.step_k != 0
                       : expected_rows(p) > kMostFewRows && why_not_units(device, p).empty())
        return "more rows than few";
    return why_not_few_rows(device, p, tile);
}

} // namespace

std::string why_not_streamed(const Device& device, const Product& p, const Tile& tile) {
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
    if (why_not_few(device, p, tile).empty())
        return "";
    const std::string units = why_not_units(device, p, tile);
    return units.empty() || (tile == Tile{} && sequential(device, p)) ? "" : units;
}

std::string streamed_class(const Device& device, const Product& p) {
    if (why_not_few(device, p).empty())
        return few_rows_class(device, p);
    if (!why_not_units(device, p).empty())
        return GemmClass{}.name;
    return "streamed-f16-k" + std::to_string(cut_for(device, p)->shape.k);
}

bool streamed_reads_layout(const Device& device, const Product& p, const Tile& tile) {
    return why_not_few(device, p, tile).empty();
}

bool better_streamed(const Device&, const Product& p) {
    return expected_rows(p) <= kFewRows;
}

std::vector<NamedTile> streamed_tiles(const Device& device, const Product& p) {
    if (why_not_few(device, p).empty())
        return few_rows_tiles(device, p);
    return why_not_units(device, p).empty() ? tiles_on_units(device, p) : std::vector<NamedTile>{};
}

void record_streamed(Recording& recording, const char* op, const Product& p, const Tile& tile) {
    const Operands operands(op);
    const Extents d = extents_of(p.d);
    if (d.batch == 0 || d.rows == 0 || d.columns == 0)
        return;
    if (why_not_few(recording.device(), p, tile).empty())
        record_few_rows(recording, op, p, tile);
    else if (why_not_units(recording.device(), p, tile).empty())
        record_on_units(recording, operands, p, tile);
    else
        record_fma(recording, operands, p);
}

} // namespace bellows::fp8
