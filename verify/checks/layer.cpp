// SPDX-License-Identifier: MIT
// RMSNorm and SwiGLU with their gradients.
#include "verify/checks/families.hpp"

#include "verify/reference/ops.hpp"

#include <bellows/engine/ops.hpp>

namespace bellows::checks {

namespace {

using reference::to_double;

struct NormCase {
    std::uint64_t rows, columns;
    std::uint64_t gap; ///< columns between rows that belong to something else
    bool f32_gain = false;
    Depth depth = Depth::Quick;
};

constexpr auto kNormCases = std::to_array<NormCase>({
    {1, 4, 0},
    {7, 12, 8},
    {65, 36, 0},
    {100, 256, 4},
    {3, 2048, 0},
    {65, 36, 12, true, Depth::Full},
    {100, 256, 0, false, Depth::Full},
    {2, 1540, 4, false, Depth::Full},
});

void check_norm(Check& check, const OpRig& rig, DType dtype, const NormCase& c) {
    check.begin_case(by(c.rows, c.columns));
    constexpr double kEps = 1e-6;
    const auto tensor = [&](const std::vector<float>* values) {
        OpTensor gapped = rig.head(dtype, {c.rows, c.columns + c.gap}, c.columns);
        if (values != nullptr)
            rig.write(gapped.view, *values);
        return gapped;
    };
    const auto x = OpRig::random(dtype, c.rows * c.columns, 1, -3, 3);
    const auto dy = OpRig::random(dtype, c.rows * c.columns, 2);
    const DType gain_type = c.f32_gain ? DType::F32 : dtype;
    const auto gain = OpRig::random(gain_type, c.columns, 3, 0.5, 1.5);
    const auto before = OpRig::random(dtype, c.rows * c.columns, 4);
    const OpTensor x_t = tensor(&x), dy_t = tensor(&dy), y = tensor(nullptr);
    const OpTensor dx = tensor(nullptr), added = tensor(&before);
    const OpTensor gain_t = rig.tensor(gain_type, {c.columns}, gain);
    const OpTensor inv_rms = rig.result(DType::F32, {c.rows});
    const OpTensor d_gain = rig.result(DType::F32, {c.columns});
    const OpTensor twice = rig.result(DType::F32, {c.columns});
    const Buffer scratch = rig.workspace(ops::rmsnorm_wgrad_workspace_bytes(c.rows, c.columns));
    rig.run([&](Recording& recording) {
        ops::rmsnorm_forward(recording, x_t, gain_t, y, inv_rms, static_cast<float>(kEps));
        ops::rmsnorm_dgrad(recording, dy_t, x_t, gain_t, inv_rms, dx, false);
        ops::rmsnorm_dgrad(recording, dy_t, x_t, gain_t, inv_rms, added, true);
        for (const bool accumulate : {false, true})
            ops::rmsnorm_wgrad(recording, dy_t, x_t, inv_rms, twice, accumulate, scratch.view());
        ops::rmsnorm_wgrad(recording, dy_t, x_t, inv_rms, d_gain, false, scratch.view());
    });
    const auto xd = to_double(x), dyd = to_double(dy), gd = to_double(gain);
    const auto expected = reference::rmsnorm_forward(xd, gd, c.rows, c.columns, kEps);
    const auto terms = static_cast<double>(c.columns), lines = static_cast<double>(c.rows);
    check.elements("1 / rms", rig.read(inv_rms), expected.inv_rms, {c.rows},
                   storage_bound(DType::F32, terms));
    check.elements("forward", rig.read(y), expected.y, {c.rows, c.columns},
                   storage_bound(dtype, terms + 4));
    check.untouched("forward", rig.outside(y));
    auto expected_dx =
        reference::rmsnorm_input_grad(dyd, xd, gd, expected.inv_rms, c.rows, c.columns);
    check.elements("input gradient", rig.read(dx), expected_dx, {c.rows, c.columns},
                   storage_bound(dtype, 2 * terms + 16, 2));
    check.untouched("input gradient", rig.outside(dx));
    reference::accumulate(expected_dx, to_double(before));
    check.elements("input gradient", rig.read(added), expected_dx, {c.rows, c.columns},
                   storage_bound(dtype, 2 * terms + 16, 3));
    auto expected_gain = reference::rmsnorm_gain_grad(dyd, xd, expected.inv_rms, c.rows, c.columns);
    const auto gain_bound = storage_bound(DType::F32, lines + terms, 2 * lines);
    check.elements("weight gradient", rig.read(d_gain), expected_gain, {c.columns}, gain_bound);
    reference::accumulate(expected_gain, reference::Vector(expected_gain));
    check.elements("weight gradient", rig.read(twice), expected_gain, {c.columns}, gain_bound);
}

struct SwigluCase {
    std::uint64_t rows, ffn;
    std::int64_t row_count = -1; ///< rows that exist by a count on the device; -1: no count
    bool weighted = true;
    Depth depth = Depth::Quick;
};

constexpr auto kSwigluCases = std::to_array<SwigluCase>({
    {1, 4},
    {3, 12},
    {70, 36, 41},
    {129, 100, 128},
    {5, 260, 0},
    {129, 100, 7, false},
    {1, 4, -1, false, Depth::Full},
    {129, 100, 128, false, Depth::Full},
    {2, 512, -1, false, Depth::Full},
    {1, 1408, -1, true, Depth::Full},
});

void check_swiglu(Check& check, const OpRig& rig, DType dtype, const SwigluCase& c) {
    check.begin_case(by(c.rows, c.ffn) + (c.weighted ? "" : " without weights"));
    const auto gate_up = OpRig::random(dtype, c.rows * 2 * c.ffn, 1, -6, 6);
    const auto d_hidden = OpRig::random(dtype, c.rows * c.ffn, 2);
    const auto weight = reference::random_f32(c.rows, 3, 0, 1);
    OpTensor gate_up_t = rig.tensor(dtype, {c.rows, 2 * c.ffn}, gate_up);
    const OpTensor d_hidden_t = rig.tensor(dtype, {c.rows, c.ffn}, d_hidden);
    const OpTensor weight_t = rig.tensor(DType::F32, {c.rows}, weight);
    const OpTensor hidden = rig.result(dtype, {c.rows, c.ffn});
    const OpTensor d_gate_up = rig.result(dtype, {c.rows, 2 * c.ffn});
    const OpTensor d_weight = rig.result(DType::F32, {c.rows});
    const OpTensor count = rig.tensor(DType::U32, {1}, std::vector<std::int64_t>{c.row_count});
    if (c.row_count >= 0)
        gate_up_t.view = gate_up_t.view.with_row_count(count.view.buffer);
    rig.run([&](Recording& recording) {
        const TensorView w = c.weighted ? weight_t.view : TensorView{};
        ops::swiglu_forward(recording, gate_up_t, w, hidden);
        ops::swiglu_dgrad(recording, d_hidden_t, gate_up_t, w, d_gate_up,
                          c.weighted ? d_weight.view : TensorView{});
    });
    const std::uint64_t rows = c.row_count < 0 ? c.rows : static_cast<std::uint64_t>(c.row_count);
    auto x = to_double(gate_up), dy = to_double(d_hidden), w = to_double(weight);
    x.resize(rows * 2 * c.ffn);
    dy.resize(rows * c.ffn);
    w.resize(c.weighted ? rows : 0);
    const auto head = [&](const char* part, const OpTensor& tensor) {
        const TensorView existing = tensor.view.rows(0, rows);
        check.untouched(part, rig.outside(tensor, existing));
        return rig.read(existing);
    };
    // Some 10 roundings; 1 + gate * (1 - s) may cancel, hence the absolute part.
    check.elements("forward", head("forward", hidden), reference::swiglu_forward(x, w, rows, c.ffn),
                   {rows, c.ffn}, storage_bound(dtype, 12));
    const auto expected = reference::swiglu_input_grad(dy, x, w, rows, c.ffn);
    check.elements("input gradient", head("input gradient", d_gate_up), expected.dx,
                   {rows, 2 * c.ffn}, storage_bound(dtype, 16, 6));
    const auto terms = static_cast<double>(c.ffn);
    if (c.weighted)
        check.elements("gradient of the row weight", head("row weight", d_weight), expected.dweight,
                       {rows}, storage_bound(DType::F32, terms + 12, 36 * terms));
}

} // namespace

void add_layer_checks(std::vector<OpCheck>& checks, Depth depth) {
    add_table(checks, depth, "rmsnorm", kNormCases, check_norm);
    add_table(checks, depth, "swiglu", kSwigluCases, check_swiglu);
}

} // namespace bellows::checks
