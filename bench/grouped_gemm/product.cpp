// SPDX-License-Identifier: MIT
#include "grouped_gemm/product.hpp"

#include <bellows/base/rounding.hpp>

#include <algorithm>
#include <cmath>

namespace bellows::bench {

namespace {

/// A device's own FP8 units keep fewer bits of a sum than f32 has: 1.3e-4 of its terms' magnitude
/// in the mean on an H200.
constexpr double kNativeTolerance = 1e-3;

TensorView words(OpData& data, const std::vector<std::uint64_t>& values) {
    const TensorView view = data.empty(DType::U32, {values.size()});
    const std::vector<std::uint32_t> narrow(values.begin(), values.end());
    data.device().upload(view.buffer.sub(0, narrow.size() * 4),
                         std::span<const std::uint32_t>(narrow));
    return view;
}

} // namespace

const char* name_of(GroupedLayout layout) {
    static constexpr const char* kNames[] = {"contiguous", "dgrad", "masked", "k"};
    return kNames[static_cast<int>(layout)];
}

std::string name_of(const GroupedShape& s) {
    return std::to_string(s.groups) + "x" + std::to_string(s.m) + "x" + std::to_string(s.n) + "x" +
           std::to_string(s.k);
}

GroupedProduct::GroupedProduct(Device& device, const GroupedCase& c) : case_(c), data_(device) {
    make_groups();
    make_operands();
}

void GroupedProduct::make_groups() {
    const GroupedShape& s = case_.shape;
    const bool masked = case_.layout == GroupedLayout::Masked, k = case_.layout == GroupedLayout::K;
    const std::uint64_t max_m = round_up(4 * s.m, 128), suits = fp8::m_alignment(data_.device());
    const std::uint64_t spacing = k || s.m < suits ? 1 : suits;
    reference::Random random(1);
    std::uint64_t at = 0;
    for (std::uint64_t g = 0; g < s.groups; ++g) {
        const double rows =
            static_cast<double>(s.m) * (case_.even ? 1.0 : random.uniform(0.7, 1.3));
        begins_.push_back(masked ? g * max_m : at);
        ends_.push_back(begins_.back() + std::max<std::uint64_t>(1, std::llround(rows)));
        at = round_up(ends_.back(), spacing);
    }
    if (masked) {
        std::vector<std::uint64_t> counts;
        for (std::uint64_t g = 0; g < s.groups; ++g)
            counts.push_back(ends_[g] - begins_[g]);
        groups_ = fp8::GroupLayout::masked(words(data_, counts), max_m);
    } else if (k) {
        std::vector<std::uint64_t> offsets = begins_;
        offsets.push_back(at);
        groups_ = fp8::GroupLayout::prefix_sums(words(data_, offsets), at);
    } else {
        groups_ = fp8::GroupLayout::aligned_ends(words(data_, ends_), spacing, at);
    }
    rows_ = groups_.rows;
    groups_.expected_rows = s.m;
}

void GroupedProduct::make_operands() {
    const GroupedShape& s = case_.shape;
    using fp8::Blocks;
    switch (case_.layout) {
    case GroupedLayout::Contiguous:
    case GroupedLayout::Dgrad: {
        const bool dgrad = case_.layout == GroupedLayout::Dgrad;
        a_ = random_operand(data_, case_.a, Blocks::Rows128, {rows_, dgrad ? s.n : s.k}, 2);
        d_ = data_.empty(case_.d, {rows_, dgrad ? s.k : s.n});
        break;
    }
    case GroupedLayout::Masked:
        a_ = random_operand(data_, case_.a, Blocks::Rows128, {s.groups, groups_.spacing, s.k}, 2);
        d_ = data_.empty(case_.d, {s.groups, groups_.spacing, s.n});
        break;
    case GroupedLayout::K:
        a_ = random_operand(data_, case_.a, Blocks::Columns128, {rows_, s.n}, 2, groups_.values);
        b_ = random_operand(data_, case_.b, Blocks::Columns128, {rows_, s.k}, 3, groups_.values);
        d_ = data_.empty(DType::F32, {s.groups, s.n, s.k});
        break;
    }
    Device& device = data_.device();
    if (case_.layout != GroupedLayout::K)
        b_ = random_operand(data_, case_.b, Blocks::Blocks128, {s.groups, s.n, s.k}, 3);
    variant_ = variant_of(device, case_.way, form(), a_, b_, d_, fp8::unlisted_rows(groups_));
    if (case_.layout != GroupedLayout::K)
        b_ = prepacked(data_, case_.b, b_, form(), variant_);
    read_a_ = a_;
    read_b_ = b_;
    if (case_.layout == GroupedLayout::K && case_.b.prepacked && variant_ == fp8::Variant::Native) {
        read_a_ = transposed(data_, a_);
        read_b_ = transposed(data_, b_);
    }
    list_ = data_.bytes(fp8::grouped_rows_bytes(device, groups_));
    workspace_ = data_.bytes(
        case_.layout == GroupedLayout::Masked
            ? fp8::gemm_workspace_bytes(device, read_a_, read_b_, fp8::unlisted_rows(groups_))
            : fp8::gemm_workspace_bytes(device, read_a_, read_b_));
    Recording zero(device, QueueRole::Compute, "zero");
    zero.fill(d_.buffer.sub(0, d_.num_bytes()), 0);
    device.submit(zero).wait();
}

void GroupedProduct::record(Recording& r) const {
    const std::uint64_t n = d_.extent[d_.rank - 1];
    const auto rows = case_.layout == GroupedLayout::Masked
                          ? fp8::unlisted_rows(groups_)
                          : fp8::make_grouped_rows(r, groups_, {n, 0, 0, 0}, list_);
    switch (case_.layout) {
    case GroupedLayout::Contiguous:
        return fp8::m_grouped_gemm_nt_contiguous(r, read_a_, read_b_, d_, rows, false, workspace_,
                                                 case_.way);
    case GroupedLayout::Dgrad:
        return fp8::m_grouped_gemm_nn_contiguous(r, read_a_, read_b_, d_, rows, false, workspace_,
                                                 case_.way);
    case GroupedLayout::Masked:
        return fp8::m_grouped_gemm_nt_masked(r, read_a_, read_b_, d_, rows, false, workspace_,
                                             case_.way);
    case GroupedLayout::K:
        return fp8::k_grouped_gemm_tn(r, read_a_, read_b_, d_, rows, true, workspace_, case_.way);
    }
}

GemmForm GroupedProduct::form() const {
    return case_.layout == GroupedLayout::Dgrad ? GemmForm::NN
           : case_.layout == GroupedLayout::K   ? GemmForm::TN
                                                : GemmForm::NT;
}

std::vector<fp8::NamedTile> GroupedProduct::tiles() const {
    const fp8::GroupedRows rows = fp8::unlisted_rows(groups_);
    return fp8::tiles(data_.device(), case_.way.variant, form(), read_a_, read_b_, d_, &rows);
}

/// First and last element of the first and last group, and others.
std::string GroupedProduct::check_samples() const {
    Device& device = data_.device();
    const HostOperand a(device, a_), b(device, b_), d(device, d_);
    const GroupedShape& s = case_.shape;
    const bool k_grouped = case_.layout == GroupedLayout::K;
    const bool dgrad = case_.layout == GroupedLayout::Dgrad;
    const std::uint64_t columns = dgrad || k_grouped ? s.k : s.n;
    reference::Random random(7);
    for (int sample = 0; sample < 100; ++sample) {
        const auto pick = [&](std::uint64_t count) {
            return sample == 0 ? 0 : sample == 1 ? count - 1 : random.below(count);
        };
        const std::uint64_t g = pick(s.groups), first = begins_[g], count = ends_[g] - first;
        const std::uint64_t i = pick(k_grouped ? s.n : count), j = pick(columns);
        double sum = 0, actual = 0, scale = 1;
        if (k_grouped) {
            double squares = 0; // of a sum over many rows that may come out small
            for (std::uint64_t r = first; r < ends_[g]; ++r) {
                const double product = a.at(0, r, i, g, first) * b.at(0, r, j, g, first);
                sum += product;
                squares += product * product;
            }
            scale = std::max(scale, std::sqrt(squares));
            actual = d.at(g, i, j);
        } else {
            const bool masked = case_.layout == GroupedLayout::Masked;
            const std::uint64_t row = masked ? i : first + i;
            for (std::uint64_t l = 0; l < (dgrad ? s.n : s.k); ++l)
                sum += a.at(masked ? g : 0, row, l) * (dgrad ? b.at(g, l, j) : b.at(g, j, l));
            actual = d.at(masked ? g : 0, row, j);
        }
        const std::string what = "d of group " + std::to_string(g) + ", row " + std::to_string(i);
        const double within = variant_ == fp8::Variant::Native
                                  ? std::max(kNativeTolerance, tolerance(d_.dtype))
                                  : tolerance(d_.dtype);
        const std::string wrong = compare(what.c_str(), j, actual, sum, within, scale);
        if (!wrong.empty())
            return wrong;
    }
    return "";
}

Workload GroupedProduct::workload() {
    const GroupedShape& s = case_.shape;
    std::uint64_t rows = 0;
    for (std::uint64_t g = 0; g < s.groups; ++g)
        rows += ends_[g] - begins_[g];
    const bool k = case_.layout == GroupedLayout::K;
    const double read =
        operand_bytes(a_, 1, rows) +
        (k ? operand_bytes(b_, 1, rows) : operand_bytes(b_, s.groups, b_.values.extent[1]));
    const double written = k ? 2 * operand_bytes(d_, s.groups, s.n) : operand_bytes(d_, 1, rows);
    return {[this](Recording& recording) { record(recording); }, [this] { return check_samples(); },
            read + written,
            2 * static_cast<double>(rows) * static_cast<double>(s.n) * static_cast<double>(s.k)};
}

} // namespace bellows::bench
