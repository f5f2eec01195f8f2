// SPDX-License-Identifier: MIT
#include "grouped_gemm/product.hpp"

#include <bellows/fp8/quantize.hpp>

#include <algorithm>
#include <set>

namespace bellows::bench {

std::string name_of(const MulMatIdShape& s) {
    return std::to_string(s.tokens) + "x" + std::to_string(s.experts) + "x" +
           std::to_string(s.top_k) + "x" + std::to_string(s.n) + "x" + std::to_string(s.k);
}

MulMatId::MulMatId(Device& device, const MulMatIdShape& s, const OperandStorage& a,
                   const OperandStorage& b, const fp8::Way& way)
    : shape_(s), way_(way), data_(device) {
    choose();
    const std::uint64_t slots = s.tokens * s.top_k;
    const DType act = a.fp8 ? DType::F32 : a.dtype; // ggml's activations are f32
    x_ = random_tensor(data_, act, {s.tokens, s.k}, 2);
    results_ = data_.empty(DType::F32, {slots, s.n});
    b_ = random_operand(data_, b, fp8::Blocks::Blocks128, {s.experts, s.n, s.k}, 3);
    a_ = x_;
    if (a.fp8) {
        const fp8::Recipe recipe{.rule = a.rule};
        a_ = fp8::make_quantized(data_.bytes(fp8::quantized_bytes(recipe, {s.tokens, s.k})), recipe,
                                 {s.tokens, s.k});
    }
    b_ = prepacked(data_, b, b_, GemmForm::NT,
                   variant_of(device, way_, GemmForm::NT, a_, b_, results_, rows()));
    workspace_ = data_.bytes(fp8::gemm_workspace_bytes(device, a_, b_, rows(), way_.variant));
}

/// Different experts for each token, all equally likely.
void MulMatId::choose() {
    reference::Random random(5);
    for (std::uint64_t t = 0; t < shape_.tokens; ++t) {
        std::set<std::int32_t> mine;
        while (mine.size() < shape_.top_k) {
            const auto expert = static_cast<std::int32_t>(random.below(shape_.experts));
            if (mine.insert(expert).second)
                chosen_.push_back(expert);
        }
    }
    ids_ = data_.empty(DType::I32, {shape_.tokens, shape_.top_k});
    data_.device().upload(ids_.buffer.sub(0, chosen_.size() * 4),
                          std::span<const std::int32_t>(chosen_));
}

fp8::GroupedRows MulMatId::rows() const {
    return fp8::unlisted_rows(fp8::GroupLayout::by_ids(ids_, shape_.experts));
}

std::vector<fp8::NamedTile> MulMatId::tiles() const {
    const fp8::GroupedRows groups = rows();
    return fp8::tiles(data_.device(), way_.variant, GemmForm::NT, a_, b_, results_, &groups);
}

/// Tokens are quantised once.
void MulMatId::record(Recording& r) const {
    if (a_.quantized)
        fp8::quantize(r, x_, *a_.quantized);
    fp8::m_grouped_gemm_nt_contiguous(r, a_, b_, results_, rows(), false, workspace_, way_);
}

std::string MulMatId::check_samples() const {
    Device& device = data_.device();
    const HostOperand a(device, a_), b(device, b_), results(device, results_);
    const std::uint64_t slots = shape_.tokens * shape_.top_k;
    reference::Random random(7);
    for (int sample = 0; sample < 100; ++sample) {
        const auto pick = [&](std::uint64_t count) {
            return sample == 0 ? 0 : sample == 1 ? count - 1 : random.below(count);
        };
        const std::uint64_t slot = pick(slots), column = pick(shape_.n);
        const auto expert = static_cast<std::uint64_t>(chosen_[slot]);
        double sum = 0;
        for (std::uint64_t l = 0; l < shape_.k; ++l)
            sum += a.at(0, slot / shape_.top_k, l) * b.at(expert, column, l);
        const std::string what = "result of slot " + std::to_string(slot);
        const std::string wrong =
            compare(what.c_str(), column, results.at(0, slot, column), sum, tolerance(DType::F32));
        if (!wrong.empty())
            return wrong;
    }
    return "";
}

Workload MulMatId::workload() {
    const std::uint64_t slots = shape_.tokens * shape_.top_k;
    const std::uint64_t experts = std::set<std::int32_t>(chosen_.begin(), chosen_.end()).size();
    return {[this](Recording& recording) { record(recording); }, [this] { return check_samples(); },
            operand_bytes(b_, experts, shape_.n) + bytes_of({ids_, x_, results_}),
            2 * static_cast<double>(slots) * static_cast<double>(shape_.n) *
                static_cast<double>(shape_.k)};
}

} // namespace bellows::bench
