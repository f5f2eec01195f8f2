// SPDX-License-Identifier: MIT
#include "product_check.hpp"

#include "slots.hpp"

#include <bellows/fp8/gemm.hpp>

#include <algorithm>

namespace bellows::fp8 {

void ProductCheck::fits(bool condition, const std::string& message) const {
    require(condition, message + ": a is " + describe(p_.a) + ", b is " + describe(p_.b) +
                           ", d is " + describe(p_.d) +
                           (p_.rows == nullptr ? "" : ", rows are " + describe(p_.rows->layout)));
}

void ProductCheck::storage_and_ranks(std::uint32_t a, std::uint32_t b, std::uint32_t d) const {
    fits(p_.a.values.rank == a && p_.b.values.rank == b && p_.d.rank == d,
         "wanted are " + std::to_string(a) + ", " + std::to_string(b) + " and " +
             std::to_string(d) + " dimensions");
    require(p_.d.dtype == DType::F32 || p_.d.dtype == DType::BF16,
            "d is " + describe(p_.d) + ", wanted is f32 or bf16");
    operand("a", p_.a, p_.form == GemmForm::TN);
    operand("b", p_.b, p_.form != GemmForm::NT);
}

void ProductCheck::operand(const char* name, const Operand& o, bool k_along_rows) const {
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
                (k_along_rows ? "rows; quantise it in 128x1 or 128x128 blocks (requantize makes "
                                "128x1 of 1x128)"
                              : "columns; quantise it in 1x128 or 128x128 blocks"));
    if (q.recipe.blocks == Blocks::Columns128)
        fits_groups(say(), q.group_offsets);
}

/// Blocks along the rows begin anew at each group's first row.
void ProductCheck::fits_groups(const std::string& operand, const TensorView& offsets) const {
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

void ProductCheck::sizes() const {
    const Extents a = extents_of(p_.a.values), b = extents_of(p_.b.values), d = extents_of(p_.d);
    const bool tn = p_.form == GemmForm::TN, nt = p_.form == GemmForm::NT;
    const std::uint64_t m = tn ? a.columns : a.rows, n = nt ? b.rows : b.columns;
    fits((tn ? a.rows : a.columns) == (nt ? b.columns : b.rows), "K differs");
    fits(d.columns == n && (d.rows == m || by_slots(p_)),
         "d must be " + std::to_string(m) + " x " + std::to_string(n));
}

void ProductCheck::groups(const TensorView& by_group) const {
    const GroupLayout& layout = p_.rows->layout;
    fits(by_group.extent[0] == layout.groups,
         "the layout has " + std::to_string(layout.groups) + " groups");
    const GroupedRows& rows = *p_.rows;
    require(p_.form != GemmForm::TN || rows.listed(),
            "rows without a work list are for m_grouped products; take make_grouped_rows");
    if (layout.form == GroupLayout::Form::Ids) {
        const std::uint64_t each = std::max(rows.slots_per_a_row, 1u);
        fits(extents_of(p_.a.values).rows * each == layout.rows &&
                 extents_of(p_.d).rows == layout.rows,
             "wanted are " + std::to_string(layout.rows) + " rows of d, and of a one for " +
                 std::to_string(each) + " of them");
        const std::string reason = why_not_copied(p_);
        require(reason.empty(), "a is " + describe(p_.a) + ": " + reason);
        return;
    }
    fits((rows.slots_per_a_row != 0 || extents_of(p_.a.values).rows == layout.rows) &&
             (p_.form == GemmForm::TN || rows.d_by_slot || extents_of(p_.d).rows == layout.rows),
         "the layout was made for " + std::to_string(layout.rows) + " rows");
    if (!by_slots(p_))
        return;
    fits(p_.form != GemmForm::TN && layout.form != GroupLayout::Form::Masked,
         "only m_grouped contiguous products take rows by slots");
    const TensorView& slots = rows.slots;
    require(slots.dtype == DType::I32 && slots.rank == 1 && slots.is_contiguous() && slots.buffer &&
                slots.extent[0] == layout.rows,
            "slots are " + describe(slots) + ", wanted is a contiguous i32 [" +
                std::to_string(layout.rows) + "]");
    const std::string reason = why_not_copied(p_);
    require(reason.empty(), "a is " + describe(p_.a) + ": " + reason);
}

TensorView ProductCheck::flat(const char* name, const TensorView& view) const {
    require(view.extent[0] <= 1 || view.stride[0] == view.extent[1] * view.stride[1],
            std::string(name) + " " + describe(view) +
                ": its groups must follow each other without a gap");
    TensorView result = view;
    result.rank = 2;
    result.extent = {view.extent[0] * view.extent[1], view.extent[2]};
    result.stride = {view.stride[1], view.stride[2]};
    return result;
}

Operand ProductCheck::flat(const Operand& o) const {
    if (!o.quantized)
        return flat("a is", o.values);
    Quantized q = *o.quantized;
    require(q.recipe.blocks != Blocks::Blocks128 || q.codes.extent[1] % 128 == 0,
            "a is " + describe(o) +
                "; with 128x128 blocks max_m must be a multiple of 128, else quantise it in "
                "1x128 blocks");
    q.codes = flat("a's codes are", q.codes);
    if (q.scales.rank == 3)
        q.scales = flat("a's scales are", q.scales);
    return q;
}

} // namespace bellows::fp8
