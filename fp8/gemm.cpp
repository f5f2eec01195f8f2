// SPDX-License-Identifier: MIT
#include <bellows/fp8/gemm.hpp>

#include "dequantize.hpp"
#include "direct.hpp"
#include "listed.hpp"
#include "native.hpp"
#include "operands.hpp"
#include "packed.hpp"
#include "product_check.hpp"
#include "slots.hpp"
#include "streamed.hpp"
#include "tiles.hpp"

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/fp8/quantize.hpp>

#include <algorithm>

namespace bellows::fp8 {

namespace {

/// In the order of Variant.
constexpr std::array<std::string_view, kVariants.size() + 1> kVariantNames = {
    "device", "decoded", "packed", "streamed", "direct", "native"};

/// Whether what a kernel takes of a device for such a tile is far from 2^32.
bool plausible(const Tile& t) {
    constexpr std::uint32_t kMost = 256;
    return std::max({t.fragments_m, t.fragments_n, t.warps_m, t.warps_n, t.warps_k, t.step_k,
                     t.stages, t.ahead}) <= kMost;
}

// --- Decoding

/// What holds every code * scale without rounding, for power-of-two scales.
DType decoded_dtype(const Quantized& q) {
    return q.recipe.rule == ScaleRule::PowerOfTwo ? DType::BF16 : DType::F32;
}

/// Memory of the decoded operand, whose rows are padded to eights of elements; 0 for others.
std::uint64_t decoded_bytes(const Operand& o) {
    if (!o.quantized)
        return 0;
    const Extents e = extents_of(o.values);
    return round_up(
        e.batch * e.rows * round_up(e.columns, 8) * size_of(decoded_dtype(*o.quantized)), 256);
}

/// Records the decoding of the rows of groups, of all without groups.
TensorView decode(Recording& recording, const Operand& o, BufferView memory,
                  const ops::GroupTiles* groups) {
    if (!o.quantized)
        return o.values;
    const Quantized& q = *o.quantized;
    TensorView y = o.values;
    const Extents e = extents_of(y);
    y.buffer = memory;
    y.dtype = decoded_dtype(q);
    y.stride[y.rank - 1] = 1;
    y.stride[y.rank - 2] = round_up(e.columns, 8);
    if (y.rank == 3)
        y.stride[0] = e.rows * y.stride[1];
    if (groups != nullptr && q.recipe.blocks != Blocks::Columns128)
        dequantize_groups(recording, q, y, *groups);
    else
        dequantize(recording, q, y);
    return y;
}

// --- The product

/// Operands are decoded ahead of a product of bf16 or f32 tensors.
void record_decoded(Recording& recording, const Product& p, BufferView workspace) {
    const std::uint64_t a_bytes = decoded_bytes(p.a), b_bytes = decoded_bytes(p.b);
    const ops::GroupTiles* tiles = p.rows == nullptr ? nullptr : &p.rows->tiles;
    const bool tn = p.form == GemmForm::TN;
    const TensorView a = decode(recording, p.a, workspace.sub(0, a_bytes), tiles);
    const TensorView b = decode(recording, p.b, workspace.sub(a_bytes, b_bytes),
                                tn ? tiles : nullptr); // weights have groups of their own
    if (tiles == nullptr) {
        const auto gemm = tn ? ops::gemm_tn : p.form == GemmForm::NT ? ops::gemm_nt : ops::gemm_nn;
        gemm(recording, a, b, p.d, p.accumulate, 1.0f);
    } else if (tn) {
        ops::grouped_gemm_tn(recording, a, b, p.d, tiles->rows, p.accumulate);
    } else {
        const auto gemm = p.form == GemmForm::NT ? ops::grouped_gemm_nt : ops::grouped_gemm_nn;
        gemm(recording, a, b, p.d, *tiles, p.accumulate, 1.0f);
    }
}

/// Whether rows need no list and no copies.
bool takes_layout(const Device& device, const Product& p, const Way& way) {
    if (p.rows == nullptr || p.rows->listed())
        return false;
    return way.variant == Variant::Streamed ? streamed_reads_layout(device, p, way.tile)
           : way.variant == Variant::Packed
               ? packed_reads_layout(p)
               : way.variant == Variant::Native && native_reads_layout(p);
}

void record(Recording& recording, const char* op, Product p, BufferView workspace, const Way& way) {
    const Operands operands(op);
    const Device& device = recording.device();
    Variant variant = way.variant;
    operands.require(variant != Variant::Device || way.tile == Tile{},
                     "a tile goes with a variant that is named");
    operands.workspace(workspace, p.rows != nullptr
                                      ? gemm_workspace_bytes(device, p.a, p.b, *p.rows, variant)
                                      : gemm_workspace_bytes(device, p.a, p.b, variant));
    if (variant == Variant::Device)
        variant = usual_variant(device, p);
    GroupedRows with_list;
    const bool as_they_stand = takes_layout(device, p, {variant, way.tile});
    if (p.rows != nullptr && !p.rows->listed() && !as_they_stand) {
        const GroupLayout& layout = p.rows->layout;
        const std::uint64_t bytes = listing_bytes(device, layout.rows, layout.groups);
        with_list = listed(recording, *p.rows, extents_of(p.d).columns, workspace.sub(0, bytes));
        workspace = workspace.sub(bytes, workspace.bytes - bytes);
        p.rows = &with_list;
    }
    const std::string reason = why_not(device, p, {variant, way.tile});
    operands.require(reason.empty(), std::string("the ") + to_string(variant) +
                                         " variant does not serve: " + reason);
    if (variant == Variant::Streamed) {
        record_streamed(recording, op, p, way.tile);
        return;
    }
    if (variant == Variant::Packed) {
        record_packed(recording, op, p, way.tile, workspace);
        return;
    }
    if (variant == Variant::Direct) {
        record_direct(recording, op, p, way.tile);
        return;
    }
    const auto record_ordered = [&](const Product& product, BufferView rest) {
        if (variant == Variant::Native)
            record_native(recording, op, product, rest);
        else
            record_decoded(recording, product, rest);
    };
    if (!by_slots(p) || as_they_stand) {
        record_ordered(p, workspace);
        return;
    }
    const bool native = variant == Variant::Native; // puts rows of D where they belong itself
    operands.require(native || !(p.accumulate && p.rows->d_by_slot && p.d.dtype == DType::BF16),
                     "d is " + describe(p.d) +
                         "; rows of d that stand by slots are added to f32 alone by the decoded "
                         "variant: take an f32 d");
    const std::uint64_t bytes =
        copies_bytes(p.a, p.b, p.rows->layout.rows, p.rows->d_by_slot && !native);
    const InGroups ordered(recording, op, p, !native, workspace.sub(0, bytes));
    record_ordered(ordered.product(), workspace.sub(bytes, workspace.bytes - bytes));
    ordered.put_back(recording);
}

/// Row counts of views are not looked at. What was packed for another form is of no use.
Operand without_row_count(Operand o, std::optional<GemmForm> form = std::nullopt) {
    if (o.prepacked && o.prepacked->form != form)
        o.prepacked.reset();
    o.values.row_count = {};
    if (o.quantized)
        o.quantized->codes.row_count = {};
    return o;
}

void dense(Recording& recording, const char* op, GemmForm form, const Operand& a, const Operand& b,
           const TensorView& d, bool accumulate, BufferView workspace, const Way& way) {
    const Product p{form, without_row_count(a), without_row_count(b, form), d, nullptr, accumulate};
    const ProductCheck check(op, p);
    check.fits(d.rank == 2 || d.rank == 3, "wanted are 2 or 3 dimensions");
    check.storage_and_ranks(d.rank, d.rank, d.rank);
    check.sizes();
    const std::uint64_t batch = extents_of(d).batch;
    check.fits(extents_of(a.values).batch == batch && extents_of(b.values).batch == batch,
               "the batches differ");
    record(recording, op, p, workspace, way);
}

void m_grouped(Recording& recording, const char* op, GemmForm form, const Operand& a,
               const Operand& b, const TensorView& d, const GroupedRows& rows, bool accumulate,
               BufferView workspace, const Way& way) {
    const Product p{form, without_row_count(a), without_row_count(b, form), d, &rows, accumulate};
    const ProductCheck check(op, p);
    check.storage_and_ranks(2, 3, 2);
    check.sizes();
    check.groups(b.values);
    record(recording, op, p, workspace, way);
}

} // namespace

Operand::Operand(const Transposed& t) : values(t.codes), transposed(t) {
    values.extent = {t.rows, t.codes.extent[0]};
    values.stride = {1, t.codes.stride[0]};
}

std::string describe(const Operand& operand) {
    if (!operand.quantized && !operand.transposed)
        return describe(operand.values);
    std::string text =
        describe(operand.transposed ? operand.transposed->recipe : operand.quantized->recipe) + " ";
    const std::string shape = describe(operand.values);
    return text + shape.substr(shape.find('['));
}

const char* to_string(Variant variant) noexcept {
    return kVariantNames[static_cast<std::size_t>(variant)].data();
}

std::optional<Variant> variant_of(std::string_view name) {
    const auto found = std::find(kVariantNames.begin(), kVariantNames.end(), name);
    return found == kVariantNames.end()
               ? std::nullopt
               : std::optional(static_cast<Variant>(found - kVariantNames.begin()));
}

std::string why_not(const Device& device, Variant variant) {
    return variant == Variant::Packed   ? why_not_packed(device)
           : variant == Variant::Direct ? why_not_direct(device)
           : variant == Variant::Native ? why_not_native(device)
                                        : "";
}

std::string why_not(const Device& device, const Product& p, const Way& way) {
    const auto& [variant, tile] = way;
    if (!plausible(tile))
        return kNoSuchTile;
    return variant == Variant::Packed         ? why_not_packed(device, p, tile)
           : variant == Variant::Streamed     ? why_not_streamed(device, p, tile)
           : variant == Variant::Direct       ? why_not_direct(device, p, tile)
           : tile != Tile{}                   ? "it has no tiles"
           : variant == Variant::Native       ? why_not_native(device, p)
           : p.a.transposed || p.b.transposed ? "its operands are transposed"
                                              : "";
}

bool reads_layout(const Device& device, const Operand& a, const Operand& b, const TensorView& d,
                  const GroupedRows& rows, const Way& way) {
    const Product p{GemmForm::NT, a, b, d, &rows, false};
    return takes_layout(device, p, way) && why_not(device, p, way).empty();
}

Variant usual_variant(const Device& device, const Product& p) {
    // One dispatch from ids to results outweighs prepacked weights, which need A packed and a work
    // list beforehand: measured on an H200, by a fifth at this many.
    const bool at_once =
        by_slots(p) && expected_rows(p) <= kFewRows && streamed_reads_layout(device, p);
    if (better_native(device, p) && why_not_native(device, p).empty())
        return Variant::Native;
    if (packed_ahead(p.b) && !at_once && why_not_packed(device, p).empty())
        return Variant::Packed;
    if (better_streamed(device, p) && why_not_streamed(device, p).empty())
        return Variant::Streamed;
    if (better_packed(device, p) && why_not_packed(device, p).empty())
        return Variant::Packed;
    if (why_not_direct(device, p).empty() && better_direct(device, p))
        return Variant::Direct;
    return Variant::Decoded;
}

std::string numeric_class(const Device& device, const Product& p, Variant variant) {
    if (variant == Variant::Packed)
        return packed_class(device, p);
    if (variant == Variant::Streamed)
        return streamed_class(device, p);
    if (variant == Variant::Direct)
        return direct_class(device);
    if (variant == Variant::Native)
        return native_class();
    const auto bf16 = [](const Operand& o) {
        return (o.quantized ? decoded_dtype(*o.quantized) : o.values.dtype) == DType::BF16;
    };
    return bf16(p.a) && bf16(p.b) ? gemm_class(device).name : GemmClass{}.name;
}

std::uint64_t gemm_workspace_bytes(const Device& device, const Operand& a, const Operand& b,
                                   Variant variant) {
    const std::uint64_t decoded = decoded_bytes(a) + decoded_bytes(b);
    switch (variant) {
    case Variant::Decoded:
        return decoded;
    case Variant::Packed:
        return packed_bytes(a, b);
    case Variant::Native:
        return native_bytes(device, a, b);
    case Variant::Streamed:
    case Variant::Direct:
        return 0;
    case Variant::Device:
        break;
    }
    return std::max({decoded, packed_bytes(a, b), native_bytes(device, a, b)});
}

namespace {

std::uint64_t workspace_by_slots(const Device& device, const Operand& a, const Operand& b,
                                 std::uint64_t rows, bool of_d, Variant variant) {
    const bool in_place = variant == Variant::Packed || variant == Variant::Streamed;
    const std::uint64_t copies =
        in_place ? 0 : copies_bytes(a, b, rows, of_d && variant != Variant::Native);
    return copies + gemm_workspace_bytes(device, with_rows(a, rows), b, variant);
}

} // namespace

std::uint64_t gemm_workspace_bytes(const Device& device, const Operand& a, const Operand& b,
                                   std::uint64_t rows, Variant variant) {
    return workspace_by_slots(device, a, b, rows, true, variant);
}

std::uint64_t gemm_workspace_bytes(const Device& device, const Operand& a, const Operand& b,
                                   const GroupedRows& rows, Variant variant) {
    const Product p{GemmForm::NT, a, b, {}, &rows, false};
    const GroupLayout& layout = rows.layout;
    const bool d_by_slot = rows.d_by_slot || layout.form == GroupLayout::Form::Ids;
    return (rows.listed() ? 0 : listing_bytes(device, layout.rows, layout.groups)) +
           (by_slots(p) ? workspace_by_slots(device, a, b, layout.rows, d_by_slot, variant)
                        : gemm_workspace_bytes(device, a, b, variant));
}

void gemm_nt(Recording& recording, const Operand& a, const Operand& b, const TensorView& d,
             bool accumulate, BufferView workspace, Way way) {
    dense(recording, "fp8::gemm_nt", GemmForm::NT, a, b, d, accumulate, workspace, way);
}

void gemm_nn(Recording& recording, const Operand& a, const Operand& b, const TensorView& d,
             bool accumulate, BufferView workspace, Way way) {
    dense(recording, "fp8::gemm_nn", GemmForm::NN, a, b, d, accumulate, workspace, way);
}

void gemm_tn(Recording& recording, const Operand& a, const Operand& b, const TensorView& d,
             bool accumulate, BufferView workspace, Way way) {
    dense(recording, "fp8::gemm_tn", GemmForm::TN, a, b, d, accumulate, workspace, way);
}

void m_grouped_gemm_nt_contiguous(Recording& recording, const Operand& a, const Operand& b,
                                  const TensorView& d, const GroupedRows& rows, bool accumulate,
                                  BufferView workspace, Way way) {
    m_grouped(recording, "fp8::m_grouped_gemm_nt_contiguous", GemmForm::NT, a, b, d, rows,
              accumulate, workspace, way);
}

void m_grouped_gemm_nn_contiguous(Recording& recording, const Operand& a, const Operand& b,
                                  const TensorView& d, const GroupedRows& rows, bool accumulate,
                                  BufferView workspace, Way way) {
    m_grouped(recording, "fp8::m_grouped_gemm_nn_contiguous", GemmForm::NN, a, b, d, rows,
              accumulate, workspace, way);
}

void m_grouped_gemm_nt_masked(Recording& recording, const Operand& a, const Operand& b,
                              const TensorView& d, const GroupedRows& rows, bool accumulate,
                              BufferView workspace, Way way) {
    constexpr const char* kOp = "fp8::m_grouped_gemm_nt_masked";
    const Product p{
        GemmForm::NT, without_row_count(a), without_row_count(b, GemmForm::NT), d, &rows,
        accumulate};
    const ProductCheck check(kOp, p);
    check.storage_and_ranks(3, 3, 3);
    check.fits(rows.layout.form == GroupLayout::Form::Masked &&
                   rows.layout.spacing == a.values.extent[1] && d.extent[0] == a.values.extent[0] &&
                   rows.layout.groups == a.values.extent[0] && rows.layout.spacing == d.extent[1],
               "wanted is a masked layout of as many groups and rows of each as a and d have");
    m_grouped(recording, kOp, GemmForm::NT, check.flat(p.a), p.b, check.flat("d is", d), rows,
              accumulate, workspace, way);
}

void k_grouped_gemm_tn(Recording& recording, const Operand& a, const Operand& b,
                       const TensorView& d, const GroupedRows& rows, bool accumulate,
                       BufferView workspace, Way way) {
    constexpr const char* kOp = "fp8::k_grouped_gemm_tn";
    const Product p{GemmForm::TN, without_row_count(a), without_row_count(b), d, &rows, accumulate};
    const ProductCheck check(kOp, p);
    check.storage_and_ranks(2, 2, 3);
    check.require(d.dtype == DType::F32, "d is " + describe(d) + ", wanted is f32");
    check.sizes();
    check.groups(d);
    record(recording, kOp, p, workspace, way);
}

} // namespace bellows::fp8
