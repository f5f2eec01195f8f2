// SPDX-License-Identifier: MIT
#include "native.hpp"

#include "operands.hpp"
#include "slots.hpp"

#include <bellows/engine/ops.hpp>
#include <bellows/fp8/quantize.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <limits>

namespace bellows::fp8 {

namespace {

using Dense = kernels::HopperFp8Gemm;
using Rows = kernels::HopperFp8GroupedGemm;
using Along = kernels::HopperFp8GemmTn;
// The same where rows are few (gemm_fp8_few.cu), with the same bits; experts': native_experts.cpp.
using FewDense = kernels::HopperFp8FewGemm;

constexpr std::uint64_t kBlock = 128; // codes that share a scale, and columns of a tile

// --- Operands

/// Codes with k side by side, [rows, k] or [batch, rows, k], and how their scales go on.
struct Codes {
    TensorView codes;
    BufferView scales;
    std::uint64_t scale_row = 0;   ///< to the next row, of 128 x 128 blocks to the next 128
    std::uint64_t scale_block = 0; ///< to the next 128 of k
    std::uint64_t scale_batch = 0;
};

/// [batch, columns, rows]; rows are padded to 16 bytes.
TensorView turned(const TensorView& codes, BufferView memory) {
    const Extents e = extents_of(codes);
    TensorView t = codes;
    t.buffer = memory;
    t.extent[t.rank - 2] = e.columns;
    t.extent[t.rank - 1] = e.rows;
    t.stride[t.rank - 1] = 1;
    t.stride[t.rank - 2] = round_up(e.rows, 16);
    if (t.rank == 3)
        t.stride[0] = e.columns * t.stride[1];
    return t;
}

std::uint64_t turned_bytes(const TensorView& codes) {
    const Extents e = extents_of(codes);
    return round_up(e.batch * e.columns * round_up(e.rows, 16), 256);
}

/// Codes and scales as they stand. by_k: memory has k as its rows.
Codes as_they_stand(const Quantized& q, bool by_k) {
    const TensorView& s = q.scales;
    Codes c{q.codes, s.buffer, s.stride[s.rank - 2], 1, s.rank == 3 ? s.stride[0] : 0};
    if (by_k)
        std::swap(c.scale_row, c.scale_block);
    return c;
}

bool turned_ahead(const Operand& o) {
    return o.prepacked && o.prepacked->variant == Variant::Native;
}

/// Weights whose k runs along rows, transposed in `workspace`, if not ahead.
Codes turned_weights(Recording& recording, const Operand& o, BufferView workspace) {
    const Quantized& q = *o.quantized;
    Codes c = as_they_stand(q, true);
    c.codes = turned(q.codes, turned_ahead(o) ? o.prepacked->memory : workspace);
    if (!turned_ahead(o))
        transpose_codes(recording, q.codes, c.codes);
    return c;
}

std::uint64_t turned_columns_bytes(const Quantized& q) {
    return round_up(q.codes.extent[1] * kBlock * q.scales.extent[0], 256);
}

/// A matrix that is summed over its rows; one that is not transposed takes its memory from the
/// front of `workspace`.
Codes columns(Recording& recording, const Operand& o, BufferView& workspace) {
    const auto of = [](const Transposed& t) {
        return Codes{t.codes, t.scales.buffer, 1, t.scales.stride[0], 0};
    };
    if (o.transposed)
        return of(*o.transposed);
    const Quantized& q = *o.quantized;
    const std::uint64_t bytes = turned_columns_bytes(q);
    const Transposed t = {TensorView::contiguous(workspace.sub(0, bytes), q.codes.dtype,
                                                 {q.codes.extent[1], kBlock * q.scales.extent[0]}),
                          q.scales, q.recipe, q.group_offsets, q.codes.extent[0]};
    workspace = workspace.sub(bytes, workspace.bytes - bytes);
    transpose_codes(recording, q, t.codes);
    return of(t);
}

bool scaled_by(const Operand& o, Blocks blocks) {
    return o.quantized && o.quantized->recipe.format == Format::E4M3 &&
           o.quantized->recipe.blocks == blocks;
}

// --- Grids

std::uint64_t processors(const Device& device) {
    constexpr std::uint64_t kUsual = 132;
    return device.info().processors != 0 ? device.info().processors : kUsual;
}

struct Grid {
    bool high = false; ///< tiles of 256 rows, not 128
    Groups groups;
};

/// rows: of D, or of each of `groups` of them on average.
Grid grid_for(const Device& device, std::uint64_t rows, std::uint64_t columns, std::uint64_t groups,
              bool counted) {
    constexpr std::uint64_t kHigh = 256, kLow = 128;
    constexpr std::uint64_t kHighCost = 19, kLowCost = 10; // of a tile
    const std::uint64_t workgroups = processors(device);
    const std::uint64_t wide = div_up(columns, kBlock) * groups;
    // Where the device alone knows rows, a group's last tile is half full on average.
    const auto tiles = [&](std::uint64_t height) {
        return counted ? div_up(wide * (2 * rows + height), 2 * height)
                       : wide * div_up(rows, height);
    };
    const bool high =
        div_up(tiles(kHigh), workgroups) * kHighCost <= div_up(tiles(kLow), workgroups) * kLowCost;
    const std::uint64_t most = wide * div_up(rows, high ? kHigh : kLow) + (counted ? wide : 0);
    return {high,
            {static_cast<std::uint32_t>(std::clamp<std::uint64_t>(most, 1, workgroups)), 1, 1}};
}

// --- What stands against it

std::string why_not_codes(const char* name, const TensorView& codes) {
    const std::uint64_t ld = codes.stride[codes.rank - 2], rows = codes.extent[codes.rank - 2];
    return rows * ld <= std::numeric_limits<std::uint32_t>::max()
               ? ""
               : std::string(name) + " is " + describe(codes) + ", more than 4 GiB";
}

std::string why_not_result(const TensorView& d) {
    const std::uint64_t ld = d.stride[d.rank - 2], batch = d.rank == 3 ? d.stride[0] : 0;
    return d.stride[d.rank - 1] == 1 && d.extent[d.rank - 1] % 8 == 0 && ld % 8 == 0 &&
                   batch % 8 == 0 && d.buffer.offset % 16 == 0
               ? ""
               : "d is " + describe(d) +
                     "; it takes rows that begin at multiples of 16 bytes and have multiples of 8 "
                     "elements";
}

/// Fills what all kernels have.
template <class K>
K filled(const Operands& operands, const Product& p, const Codes& a, const Codes& b,
         typename K::Variant variant) {
    const TensorView& d = p.d;
    K kernel;
    kernel.variant = variant;
    kernel.a = a.codes.buffer;
    kernel.a_scales = a.scales;
    kernel.b = b.codes.buffer;
    kernel.b_scales = b.scales;
    kernel.d = d.buffer;
    kernel.n = operands.u32("N", extents_of(d).columns);
    kernel.lda = operands.u32("the stride of a", a.codes.stride[a.codes.rank - 2]);
    kernel.ldb = operands.u32("the stride of b", b.codes.stride[b.codes.rank - 2]);
    kernel.ldd = operands.u32("the stride of d", d.stride[d.rank - 2]);
    kernel.f32 = d.dtype == DType::F32 ? 1 : 0;
    kernel.accumulate = p.accumulate ? 1 : 0;
    return kernel;
}

template <class K>
K filled(const Operands& operands, const Product& p, const Codes& a, const Codes& b, bool high) {
    using Variant = typename K::Variant;
    return filled<K>(operands, p, a, b, high ? Variant::rows_256 : Variant::rows_128);
}

std::uint32_t batch_stride(const Operands& operands, const char* what, const TensorView& view) {
    return view.rank == 3 ? operands.u32(what, view.stride[0]) : 0;
}

void record_along(Recording& recording, const Operands& operands, const Product& p,
                  BufferView workspace) {
    const Codes a = columns(recording, p.a, workspace), b = columns(recording, p.b, workspace);
    const Extents d = extents_of(p.d);
    const Grid grid = grid_for(recording.device(), d.rows, d.columns, d.batch, false);
    auto kernel = filled<Along>(operands, p, a, b, grid.high);
    const ops::GroupTiles* list = p.rows != nullptr ? &p.rows->tiles : nullptr;
    kernel.group_begins = list != nullptr ? list->rows.begins.buffer : kernel.a;
    kernel.group_ends = list != nullptr ? list->rows.ends.buffer : kernel.a;
    kernel.m = operands.u32("M", d.rows);
    kernel.k = operands.u32("K", extents_of(a.codes).columns);
    kernel.groups = list != nullptr ? operands.u32("groups", d.batch) : 0;
    kernel.stride_d = batch_stride(operands, "the stride of d", p.d);
    kernel.ld_a_scales = operands.u32("the stride of a's scales", a.scale_block);
    kernel.ld_b_scales = operands.u32("the stride of b's scales", b.scale_block);
    recording.dispatch(kernel, grid.groups);
}

template <class K>
void set_scales_of_weights(K& kernel, const Operands& operands, const Codes& b) {
    kernel.b_scale_rows = operands.u32("the stride of b's scales", b.scale_row);
    kernel.b_scale_block = operands.u32("the stride of b's scales", b.scale_block);
    kernel.stride_b_scales = operands.u32("the stride of b's scales", b.scale_batch);
}

// --- Few rows

constexpr std::uint64_t kFewColumns = 64, kFewTurn = 64; // of a team
constexpr std::uint64_t kMostFewRows = 512;

/// Whether a dense product goes the way of few rows. On an H200 K = 2048 takes so 5 us for 8 rows
/// and 7 for 64, where tiles of 128 x 128 take 11 to 15; once processors have more than two
/// workgroups each, 19 beside 12.
bool few_rows(const Device& device, const Product& p) {
    const Extents d = extents_of(p.d);
    const std::uint64_t turns = div_up(d.rows, kFewTurn);
    return p.form == GemmForm::NT && p.rows == nullptr && d.batch == 1 && d.rows <= kMostFewRows &&
           (turns <= 1 || turns * div_up(d.columns, kFewColumns) <= 2 * processors(device));
}

void record_few(Recording& recording, const Operands& operands, const Product& p) {
    const Codes a = as_they_stand(*p.a.quantized, false), b = as_they_stand(*p.b.quantized, false);
    const Extents d = extents_of(p.d);
    auto kernel = filled<FewDense>(operands, p, a, b, FewDense::Variant::dense);
    kernel.m = operands.u32("M", d.rows);
    kernel.k = operands.u32("K", extents_of(a.codes).columns);
    kernel.ld_a_scales = operands.u32("the stride of a's scales", a.scale_row);
    kernel.b_scale_rows = operands.u32("the stride of b's scales", b.scale_row);
    kernel.b_scale_block = operands.u32("the stride of b's scales", b.scale_block);
    recording.dispatch(kernel, {operands.u32("rows", div_up(d.rows, kFewTurn)),
                                operands.grid("columns", div_up(d.columns, kFewColumns)), 1});
}

} // namespace

bool native_reads_layout(const Product& p) {
    return p.form == GemmForm::NT && p.rows != nullptr &&
           p.rows->layout.form == GroupLayout::Form::Ids && why_not_by_ids(p).empty() &&
           expected_rows(p) <= kFewRows;
}

std::string why_not_native(const Device& device) {
    return device.why_not(Dense::info(), static_cast<std::uint32_t>(Dense::Variant::rows_128));
}

std::string why_not_native(const Device& device, const Product& p) {
    if (p.form == GemmForm::TN) {
        for (const Operand* o : {&p.a, &p.b})
            if (o->transposed ? o->transposed->recipe.format != Format::E4M3
                              : !scaled_by(*o, Blocks::Columns128))
                return "it takes e4m3 operands in 128x1 blocks";
        if (p.a.values.rank != 2)
            return "it takes one matrix or groups of rows";
    } else if (!scaled_by(p.a, Blocks::Rows128) || !scaled_by(p.b, Blocks::Blocks128)) {
        return "it takes e4m3 activations in 1x128 blocks and e4m3 weights in 128x128 blocks";
    }
    if (extents_of(p.a.values).rows == 0 || extents_of(p.a.values).columns == 0)
        return "it needs operands that are not empty";
    const auto codes = [](const Operand& o) {
        return o.transposed ? o.transposed->codes : o.values;
    };
    for (const std::string& lacking :
         {why_not_codes("a", codes(p.a)), why_not_codes("b", codes(p.b)), why_not_result(p.d)})
        if (!lacking.empty())
            return lacking;
    return why_not_native(device);
}

std::string native_class() {
    return "wgmma-e4m3-k32";
}

bool better_native(const Device& device, const Product& p) {
    if (few_rows(device, p) || native_reads_layout(p))
        return true;
    // Up to a tile's rows a product takes what reading the weights takes, and streaming shaders as
    // much for fewer: on an H200, of 32 groups of 4096 x 7168, 319 us for 96 rows (725 packed), and
    // streaming takes 722 for 64 rows.
    constexpr std::uint64_t kStreamedRows = 32;
    return expected_rows(p) > kStreamedRows;
}

std::uint64_t native_ahead_bytes(const Quantized& b, GemmForm form) {
    return form == GemmForm::NN ? turned_bytes(b.codes) : 0;
}

void turn_ahead(Recording& recording, const Operands& operands, const Quantized& b,
                BufferView memory, std::uint64_t first, std::uint64_t count) {
    operands.require(scaled_by(b, Blocks::Blocks128),
                     "b is " + describe(Operand(b)) + ", wanted is e4m3 in 128x128 blocks");
    const TensorView to = turned(b.codes, memory);
    if (b.codes.rank == 3)
        transpose_codes(recording, b.codes.rows(first, count), to.rows(first, count));
    else
        transpose_codes(recording, b.codes, to);
}

std::uint64_t native_bytes(const Device& device, const Operand& a, const Operand& b) {
    if (!why_not_native(device).empty())
        return 0;
    const auto bytes = [](const Operand& o) -> std::uint64_t {
        if (!o.quantized || turned_ahead(o))
            return 0;
        const Blocks blocks = o.quantized->recipe.blocks;
        return blocks == Blocks::Columns128  ? turned_columns_bytes(*o.quantized)
               : blocks == Blocks::Blocks128 ? turned_bytes(o.quantized->codes)
                                             : 0;
    };
    return bytes(a) + bytes(b);
}

void record_native(Recording& recording, const char* op, const Product& p, BufferView workspace) {
    const Operands operands(op);
    const Extents d = extents_of(p.d);
    if (d.batch == 0 || d.rows == 0 || d.columns == 0)
        return;
    if (p.form == GemmForm::TN) {
        record_along(recording, operands, p, workspace);
        return;
    }
    if (p.rows != nullptr && p.rows->layout.form == GroupLayout::Form::Ids) {
        record_native_by_ids(recording, op, p);
        return;
    }
    if (few_rows(recording.device(), p)) {
        record_few(recording, operands, p);
        return;
    }
    const Codes a = as_they_stand(*p.a.quantized, false);
    const Codes b = p.form == GemmForm::NN ? turned_weights(recording, p.b, workspace)
                                           : as_they_stand(*p.b.quantized, false);
    const std::uint32_t k = operands.u32("K", extents_of(a.codes).columns);
    if (p.rows == nullptr) {
        const Grid grid = grid_for(recording.device(), d.rows, d.columns, d.batch, false);
        auto kernel = filled<Dense>(operands, p, a, b, grid.high);
        set_scales_of_weights(kernel, operands, b);
        kernel.m = operands.u32("M", d.rows);
        kernel.k = k;
        kernel.stride_a = batch_stride(operands, "the stride of a", a.codes);
        kernel.stride_b = batch_stride(operands, "the stride of b", b.codes);
        kernel.stride_d = batch_stride(operands, "the stride of d", p.d);
        kernel.batches = operands.u32("batches", d.batch);
        kernel.ld_a_scales = operands.u32("the stride of a's scales", a.scale_row);
        kernel.stride_a_scales = operands.u32("the stride of a's scales", a.scale_batch);
        recording.dispatch(kernel, grid.groups);
        return;
    }
    const GroupedRows& rows = *p.rows;
    const std::uint64_t groups = rows.layout.groups;
    const Grid grid = grid_for(recording.device(), expected_rows(p), d.columns, groups, true);
    auto kernel = filled<Rows>(operands, p, a, b, grid.high);
    set_scales_of_weights(kernel, operands, b);
    kernel.group_begins = rows.tiles.rows.begins.buffer;
    kernel.group_ends = rows.tiles.rows.ends.buffer;
    kernel.slots = rows.d_by_slot ? rows.slots.buffer : kernel.a;
    kernel.rows = operands.u32("rows", extents_of(a.codes).rows);
    kernel.k = k;
    kernel.groups = operands.u32("groups", groups);
    kernel.stride_b = batch_stride(operands, "the stride of b", b.codes);
    kernel.ld_a_scales = operands.u32("the stride of a's scales", a.scale_row);
    kernel.d_by_slot = rows.d_by_slot ? 1 : 0;
    recording.dispatch(kernel, grid.groups);
}

} // namespace bellows::fp8
