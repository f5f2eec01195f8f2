// SPDX-License-Identifier: MIT
#include <bellows/fp8/gemm.hpp>

#include "dequantize.hpp"
#include "direct.hpp"
#include "listed.hpp"
#include "native.hpp"
#include "operands.hpp"
#include "packed.hpp"
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

// --- Checks

/// Checks of one op's arguments, with what all of them are in every message about shapes.
class Check {
public:
    Check(const char* op, const Product& p) : operands_(op), p_(p) {}

    void require(bool condition, const std::string& message) const {
        operands_.require(condition, message);
    }
    void fits(bool condition, const std::string& message) const {
        require(condition,
                message + ": a is " + describe(p_.a) + ", b is " + describe(p_.b) + ", d is " +
                    describe(p_.d) +
                    (p_.rows == nullptr ? "" : ", rows are " + describe(p_.rows->layout)));
    }

    void storage_and_ranks(std::uint32_t a, std::uint32_t b, std::uint32_t d) const {
        fits(p_.a.values.rank == a && p_.b.values.rank == b && p_.d.rank == d,
             "wanted are " + std::to_string(a) + ", " + std::to_string(b) + " and " +
                 std::to_string(d) + " dimensions");
        require(p_.d.dtype == DType::F32 || p_.d.dtype == DType::BF16,
                "d is " + describe(p_.d) + ", wanted is f32 or bf16");
        operand("a", p_.a, p_.form == GemmForm::TN);
        operand("b", p_.b, p_.form != GemmForm::NT);
    }

private:
    void operand(const char* name, const Operand& o, bool k_along_rows) const {
        const auto say = [&] { return std::string(name) + " is " + describe(o); };
        if (o.transposed) {
            require(k_along_rows && p_.form == GemmForm::TN,
                    say() + " transposed, which belongs into products of tn");
            fits_groups(say(), o.transposed->group_offsets);
            return;
        }
        if (!o.quantized) {
            require(o.values.dtype == DType::F32 || o.values.dtype == DType::BF16,
                    say() + ", wanted is a quantised tensor, f32 or bf16");
            return;
        }
        const Quantized& q = *o.quantized;
        const Matrix codes = operands_.codes((std::string(name) + "'s codes").c_str(), q, true);
        operands_.scales((std::string(name) + "'s scales").c_str(), q, codes);
        const Blocks wrong = k_along_rows ? Blocks::Rows128 : Blocks::Columns128;
        require(q.recipe.blocks != wrong && !(k_along_rows && q.recipe.blocks == Blocks::MX32),
                say() + ", whose scales differ from one k to the next, as k runs along its " +
                    (k_along_rows
                         ? "rows; quantise it in 128x1 or 128x128 blocks (requantize makes "
                           "128x1 of 1x128)"
                         : "columns; quantise it in 1x128 or 128x128 blocks"));
        if (q.recipe.blocks == Blocks::Columns128)
            fits_groups(say(), q.group_offsets);
    }

    /// Blocks along the rows begin anew at each group's first row.
    void fits_groups(const std::string& operand, const TensorView& offsets) const {
        const bool has_offsets = static_cast<bool>(offsets.buffer);
        const bool grouped = p_.form == GemmForm::TN && p_.rows != nullptr;
        require(has_offsets == grouped,
                operand + (grouped ? " without group_offsets, but blocks must begin anew at each "
                                     "group's first row; quantise it with the layout's prefix sums"
                                   : " with group_offsets, which belong into k_grouped_gemm_tn"));
        if (!grouped)
            return;
        const GroupLayout& layout = p_.rows->layout;
        const BufferView mine = offsets.buffer, theirs = layout.values.buffer;
        require(layout.form == GroupLayout::Form::PrefixSums && mine.resource == theirs.resource &&
                    mine.offset == theirs.offset && offsets.extent[0] == layout.values.extent[0],
                operand + ", whose group_offsets are not the prefix sums of the layout, " +
                    describe(layout) + "; its blocks would straddle groups");
    }

    Operands operands_;
    const Product& p_;
};

/// Dense, and grouped products but for the groups.
void check_sizes(const Check& check, const Product& p) {
    const Extents a = extents_of(p.a.values), b = extents_of(p.b.values), d = extents_of(p.d);
    const bool tn = p.form == GemmForm::TN, nt = p.form == GemmForm::NT;
    const std::uint64_t m = tn ? a.columns : a.rows, n = nt ? b.rows : b.columns;
    check.fits((tn ? a.rows : a.columns) == (nt ? b.columns : b.rows), "K differs");
    check.fits(d.columns == n && (d.rows == m || by_slots(p)),
               "d must be " + std::to_string(m) + " x " + std::to_string(n));
}

void check_groups(const Check& check, const Product& p, const TensorView& by_group) {
    const GroupLayout& layout = p.rows->layout;
    check.fits(by_group.extent[0] == layout.groups,
               "the layout has " + std::to_string(layout.groups) + " groups");
    const GroupedRows& rows = *p.rows;
    check.require(p.form != GemmForm::TN || rows.listed(),
                  "rows without a work list are for m_grouped products; take make_grouped_rows");
    if (layout.form == GroupLayout::Form::Ids) {
        const std::uint64_t each = std::max(rows.slots_per_a_row, 1u);
        check.fits(extents_of(p.a.values).rows * each == layout.rows &&
                       extents_of(p.d).rows == layout.rows,
                   "wanted are " + std::to_string(layout.rows) + " rows of d, and of a one for " +
                       std::to_string(each) + " of them");
        const std::string reason = why_not_copied(p);
        check.require(reason.empty(), "a is " + describe(p.a) + ": " + reason);
        return;
    }
    check.fits(
        (rows.slots_per_a_row != 0 || extents_of(p.a.values).rows == layout.rows) &&
            (p.form == GemmForm::TN || rows.d_by_slot || extents_of(p.d).rows == layout.rows),
        "the layout was made for " + std::to_string(layout.rows) + " rows");
    if (!by_slots(p))
        return;
    check.fits(p.form != GemmForm::TN && layout.form != GroupLayout::Form::Masked,
               "only m_grouped contiguous products take rows by slots");
    const TensorView& slots = rows.slots;
    check.require(slots.dtype == DType::I32 && slots.rank == 1 && slots.is_contiguous() &&
                      slots.buffer && slots.extent[0] == layout.rows,
                  "slots are " + describe(slots) + ", wanted is a contiguous i32 [" +
                      std::to_string(layout.rows) + "]");
    const std::string reason = why_not_copied(p);
    check.require(reason.empty(), "a is " + describe(p.a) + ": " + reason);
}

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
    if (p.rows != nullptr && !p.rows->listed() &&
        !(variant == Variant::Streamed && streamed_reads_layout(device, p, way.tile)) &&
        !(variant == Variant::Packed && packed_reads_layout(p))) {
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
    if (!by_slots(p)) {
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
    const Check check(op, p);
    check.fits(d.rank == 2 || d.rank == 3, "wanted are 2 or 3 dimensions");
    check.storage_and_ranks(d.rank, d.rank, d.rank);
    check_sizes(check, p);
    const std::uint64_t batch = extents_of(d).batch;
    check.fits(extents_of(a.values).batch == batch && extents_of(b.values).batch == batch,
               "the batches differ");
    record(recording, op, p, workspace, way);
}

void m_grouped(Recording& recording, const char* op, GemmForm form, const Operand& a,
               const Operand& b, const TensorView& d, const GroupedRows& rows, bool accumulate,
               BufferView workspace, const Way& way) {
    const Product p{form, without_row_count(a), without_row_count(b, form), d, &rows, accumulate};
    const Check check(op, p);
    check.storage_and_ranks(2, 3, 2);
    check_sizes(check, p);
    check_groups(check, p, b.values);
    record(recording, op, p, workspace, way);
}

/// [groups, max_m, columns] as [groups * max_m, columns].
TensorView flat(const Check& check, const char* name, const TensorView& view) {
    check.require(view.extent[0] <= 1 || view.stride[0] == view.extent[1] * view.stride[1],
                  std::string(name) + " " + describe(view) +
                      ": its groups must follow each other without a gap");
    TensorView result = view;
    result.rank = 2;
    result.extent = {view.extent[0] * view.extent[1], view.extent[2]};
    result.stride = {view.stride[1], view.stride[2]};
    return result;
}

Operand flat(const Check& check, const Operand& o) {
    if (!o.quantized)
        return flat(check, "a is", o.values);
    Quantized q = *o.quantized;
    check.require(q.recipe.blocks != Blocks::Blocks128 || q.codes.extent[1] % 128 == 0,
                  "a is " + describe(o) +
                      "; with 128x128 blocks max_m must be a multiple of 128, else quantise it in "
                      "1x128 blocks");
    q.codes = flat(check, "a's codes are", q.codes);
    if (q.scales.rank == 3)
        q.scales = flat(check, "a's scales are", q.scales);
    return q;
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

Variant usual_variant(const Device& device, const Product& p) {
    // One dispatch from ids to results outweighs prepacked weights, which need A packed and a work
    // list beforehand: measured on an H200, by a fifth at this many.
    const bool at_once =
        by_slots(p) && expected_rows(p) <= kFewRows && streamed_reads_layout(device, p);
    if (better_native(p) && why_not_native(device, p).empty())
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
    const Check check(kOp, p);
    check.storage_and_ranks(3, 3, 3);
    check.fits(rows.layout.form == GroupLayout::Form::Masked &&
                   rows.layout.spacing == a.values.extent[1] && d.extent[0] == a.values.extent[0] &&
                   rows.layout.groups == a.values.extent[0] && rows.layout.spacing == d.extent[1],
               "wanted is a masked layout of as many groups and rows of each as a and d have");
    m_grouped(recording, kOp, GemmForm::NT, flat(check, p.a), p.b, flat(check, "d is", d), rows,
              accumulate, workspace, way);
}

void k_grouped_gemm_tn(Recording& recording, const Operand& a, const Operand& b,
                       const TensorView& d, const GroupedRows& rows, bool accumulate,
                       BufferView workspace, Way way) {
    constexpr const char* kOp = "fp8::k_grouped_gemm_tn";
    const Product p{GemmForm::TN, without_row_count(a), without_row_count(b), d, &rows, accumulate};
    const Check check(kOp, p);
    check.storage_and_ranks(2, 2, 3);
    check.require(d.dtype == DType::F32, "d is " + describe(d) + ", wanted is f32");
    check_sizes(check, p);
    check_groups(check, p, d);
    record(recording, kOp, p, workspace, way);
}

} // namespace bellows::fp8
