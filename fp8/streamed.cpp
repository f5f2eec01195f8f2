// SPDX-License-Identifier: MIT
#include "streamed.hpp"

#include "operands.hpp"
#include "stream_operands.hpp"
#include "stream_units.hpp"

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <string>

namespace bellows::fp8 {

namespace {

constexpr std::uint64_t kGridColumns = 32; // of a step of a work list's grid

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
    kernel.tiles = p.rows != nullptr ? p.rows->tiles.tiles : kernel.b_codes;
    kernel.ends = p.rows != nullptr ? p.rows->tiles.rows.ends.buffer : kernel.b_codes;
    kernel.from_list = p.rows != nullptr ? 1 : 0;
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
    if (p.rows != nullptr) {
        const BufferView grid = p.rows->tiles.grid(kernel.n, false);
        operands.require(static_cast<bool>(grid),
                         "the work list was not made for N = " + std::to_string(kernel.n));
        kernel.tile_rows = p.rows->tiles.tile_rows;
        recording.dispatch_indirect(kernel, grid);
        return;
    }
    const Extents d = extents_of(p.d);
    const std::uint64_t rows = kernel.constants.rows * kernel.constants.local_size / 8;
    kernel.tile_rows = operands.u32("rows", rows);
    recording.dispatch(kernel, {operands.u32("tiles", div_up(d.rows, rows)),
                                operands.grid("tiles", div_up(d.columns, kGridColumns)),
                                operands.grid("batches", d.batch)});
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
    const std::string units = why_not_stream_units(device, p, tile);
    return units.empty() || (tile == Tile{} && sequential(device, p)) ? "" : units;
}

std::string streamed_class(const Device& device, const Product& p) {
    return why_not_stream_units(device, p).empty() ? stream_units_class(device, p)
                                                   : GemmClass{}.name;
}

bool streamed_reads_layout(const Device& device, const Product& p, const Tile& tile) {
    const bool row_groups =
        p.rows != nullptr && p.rows->layout.form == GroupLayout::Form::RowGroups;
    return (!row_groups || p.rows->listed()) && why_not_stream_units(device, p, tile).empty();
}

bool better_streamed(const Device&, const Product& p) {
    return expected_rows(p) <= kFewRows;
}

std::vector<NamedTile> streamed_tiles(const Device& device, const Product& p) {
    return why_not_stream_units(device, p).empty() ? stream_units_tiles(device, p)
                                                   : std::vector<NamedTile>{};
}

void record_streamed(Recording& recording, const char* op, const Product& p, const Tile& tile) {
    const Operands operands(op);
    const Extents d = extents_of(p.d);
    if (d.batch == 0 || d.rows == 0 || d.columns == 0)
        return;
    if (why_not_stream_units(recording.device(), p, tile).empty())
        record_stream_units(recording, op, p, tile);
    else
        record_fma(recording, operands, p);
}

} // namespace bellows::fp8
