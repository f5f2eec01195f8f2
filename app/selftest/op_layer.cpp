// SPDX-License-Identifier: MIT
// RMSNorm, SwiGLU, embedding and the softmax cross-entropy, each with its gradients.
#include "app/selftest/suite.hpp"

#include "reference/ops.hpp"

#include <bellows/engine/ops.hpp>

namespace bellows::selftest {

namespace {

using reference::to_double;

void check_norm(Check& check, const OpRig& rig, DType dtype, std::uint64_t rows,
                std::uint64_t columns, std::uint64_t gap) {
    check.begin_case(std::to_string(rows) + " x " + std::to_string(columns));
    constexpr double kEps = 1e-6;
    const auto strided = [&] {
        OpTensor whole = rig.result(dtype, {rows, columns + gap});
        whole.view = ops::slice(whole.view, 1, 0, columns);
        return whole;
    };
    const auto x = OpRig::random(dtype, rows * columns, 1, -3, 3);
    const auto dy = OpRig::random(dtype, rows * columns, 2);
    const auto gain = OpRig::random(dtype, columns, 3, 0.5, 1.5);
    const OpTensor x_t = strided(), dy_t = strided(), y = strided(), dx = strided();
    rig.write(x_t.view, x);
    rig.write(dy_t.view, dy);
    const OpTensor gain_t = rig.tensor(dtype, {columns}, gain);
    const OpTensor inv_rms = rig.result(DType::F32, {rows});
    const OpTensor d_gain = rig.result(DType::F32, {columns});
    const Buffer scratch = rig.workspace(ops::rmsnorm_wgrad_workspace_bytes(rows, columns));
    rig.run([&](Recording& recording) {
        ops::rmsnorm_forward(recording, x_t, gain_t, y, inv_rms, static_cast<float>(kEps));
        ops::rmsnorm_dgrad(recording, dy_t, x_t, gain_t, inv_rms, dx, false);
        ops::rmsnorm_wgrad(recording, dy_t, x_t, inv_rms, d_gain, false, scratch.view());
    });
    const auto xd = to_double(x), dyd = to_double(dy), gd = to_double(gain);
    const auto expected = reference::rmsnorm_forward(xd, gd, rows, columns, kEps);
    const auto terms = static_cast<double>(columns), lines = static_cast<double>(rows);
    check.elements("forward", rig.read(y), expected.y, {rows, columns},
                   storage_bound(dtype, terms + 4));
    check.elements("input gradient", rig.read(dx),
                   reference::rmsnorm_input_grad(dyd, xd, gd, expected.inv_rms, rows, columns),
                   {rows, columns}, storage_bound(dtype, 2 * terms + 16, 2));
    check.elements("weight gradient", rig.read(d_gain),
                   reference::rmsnorm_gain_grad(dyd, xd, expected.inv_rms, rows, columns),
                   {columns}, storage_bound(DType::F32, lines + terms, 2 * lines));
}

/// row_count: rows that exist by a count on the device; -1: no count.
void check_swiglu(Check& check, const OpRig& rig, DType dtype, std::uint64_t all_rows,
                  std::uint64_t ffn, std::int64_t row_count) {
    check.begin_case(std::to_string(all_rows) + " x " + std::to_string(ffn));
    const auto gate_up = OpRig::random(dtype, all_rows * 2 * ffn, 1, -6, 6);
    const auto d_hidden = OpRig::random(dtype, all_rows * ffn, 2);
    const auto weight = reference::random_f32(all_rows, 3, 0, 1);
    OpTensor gate_up_t = rig.tensor(dtype, {all_rows, 2 * ffn}, gate_up);
    const OpTensor d_hidden_t = rig.tensor(dtype, {all_rows, ffn}, d_hidden);
    const OpTensor weight_t = rig.tensor(DType::F32, {all_rows}, weight);
    const OpTensor hidden = rig.result(dtype, {all_rows, ffn});
    const OpTensor d_gate_up = rig.result(dtype, {all_rows, 2 * ffn});
    const OpTensor d_weight = rig.result(DType::F32, {all_rows});
    const OpTensor count = rig.tensor(DType::U32, {1}, std::vector<std::int64_t>{row_count});
    if (row_count >= 0)
        gate_up_t.view = gate_up_t.view.with_row_count(count.view.buffer);
    rig.run([&](Recording& recording) {
        ops::swiglu_forward(recording, gate_up_t, weight_t, hidden);
        ops::swiglu_dgrad(recording, d_hidden_t, gate_up_t, weight_t, d_gate_up, d_weight);
    });
    const std::uint64_t rows = row_count < 0 ? all_rows : static_cast<std::uint64_t>(row_count);
    auto x = to_double(gate_up), dy = to_double(d_hidden), w = to_double(weight);
    x.resize(rows * 2 * ffn);
    dy.resize(rows * ffn);
    w.resize(rows);
    const auto head = [&](const char* part, std::vector<float> values, std::uint64_t columns) {
        check.untouched_from(part, values, rows * columns);
        values.resize(rows * columns);
        return values;
    };
    // Some 10 roundings; 1 + gate * (1 - s) may cancel, hence the absolute part.
    check.elements("forward", head("forward", rig.read(hidden), ffn),
                   reference::swiglu_forward(x, w, rows, ffn), {rows, ffn},
                   storage_bound(dtype, 12));
    const auto expected = reference::swiglu_input_grad(dy, x, w, rows, ffn);
    check.elements("input gradient", head("input gradient", rig.read(d_gate_up), 2 * ffn),
                   expected.dx, {rows, 2 * ffn}, storage_bound(dtype, 16, 6));
    const auto terms = static_cast<double>(ffn);
    check.elements("gradient of the row weight", head("row weight", rig.read(d_weight), 1),
                   expected.dweight, {rows}, storage_bound(DType::F32, terms + 12, 36 * terms));
}

/// used: ids are drawn from the first so many.
void check_embedding(Check& check, const OpRig& rig, DType dtype, std::uint64_t tokens,
                     std::uint64_t vocab, std::uint64_t columns, std::uint64_t used) {
    check.begin_case(std::to_string(tokens) + " tokens of " + std::to_string(vocab));
    const auto ids = reference::random_indices(tokens, 1, used);
    const auto table = OpRig::random(dtype, vocab * columns, 2);
    const auto d_embedded = OpRig::random(dtype, tokens * columns, 3);
    const OpTensor ids_t = rig.tensor(DType::U32, {tokens}, ids);
    const OpTensor table_t = rig.tensor(dtype, {vocab, columns}, table);
    const OpTensor d_embedded_t = rig.tensor(dtype, {tokens, columns}, d_embedded);
    const OpTensor embedded = rig.result(dtype, {tokens, columns});
    const OpTensor d_table = rig.result(DType::F32, {vocab, columns});
    const Buffer scratch = rig.workspace(ops::embedding_wgrad_workspace_bytes(tokens));
    rig.run([&](Recording& recording) {
        ops::embedding_forward(recording, ids_t, table_t, embedded);
        ops::embedding_wgrad(recording, ids_t, d_embedded_t, d_table, false, scratch.view());
        ops::embedding_wgrad(recording, ids_t, d_embedded_t, d_table, true, scratch.view());
    });
    check.exact("forward", rig.read(embedded),
                reference::embedding_forward(to_double(table), ids, columns));
    auto expected = reference::embedding_weight_grad(to_double(d_embedded), ids, vocab, columns);
    reference::accumulate(expected, reference::Vector(expected));
    const auto terms = static_cast<double>(tokens);
    check.elements("weight gradient", rig.read(d_table), expected, {vocab, columns},
                   storage_bound(DType::F32, terms, terms));
}

void check_loss(Check& check, const OpRig& rig, DType dtype, std::uint64_t rows,
                std::uint64_t vocab, std::uint64_t stride) {
    check.begin_case(std::to_string(rows) + " x " + std::to_string(vocab));
    constexpr float kScale = 1.0f / 64;
    const auto logits = OpRig::random(dtype, rows * vocab, 1, -8, 8);
    auto targets = reference::random_indices(rows, 2, vocab);
    for (std::size_t i = 2; i < targets.size(); i += 5)
        targets[i] = -1;
    const OpTensor whole = rig.result(dtype, {rows, stride});
    const TensorView logits_t = ops::slice(whole.view, 1, 0, vocab); // the gradient overwrites it
    rig.write(logits_t, logits);
    const OpTensor targets_t = rig.tensor(DType::U32, {rows}, targets);
    const OpTensor loss = rig.result(DType::F32, {rows});
    rig.run([&](Recording& recording) {
        ops::cross_entropy(recording, logits_t, targets_t, loss, logits_t, kScale);
    });
    const auto expected = reference::cross_entropy(to_double(logits), targets, vocab, kScale);
    const auto terms = static_cast<double>(vocab);
    // The logarithm of the sum errs by the sum's relative error, the difference by that of 16.
    check.elements("loss", rig.read(loss), expected.losses, {rows},
                   reference::within((terms + 40) * reference::kF32Epsilon, 1e-6));
    check.elements("gradient", rig.read(logits_t), expected.dlogits, {rows, vocab},
                   storage_bound(dtype, terms + 40, kScale));
}

} // namespace

void add_layer_checks(std::vector<OpCheck>& checks) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
        checks.push_back(
            {"ops", with_storage("rmsnorm", dtype), [dtype](Check& check, const OpRig& rig) {
                 check_norm(check, rig, dtype, 1, 4, 0);
                 check_norm(check, rig, dtype, 7, 12, 8);
                 check_norm(check, rig, dtype, 65, 36, 0);
                 check_norm(check, rig, dtype, 100, 256, 4);
                 check_norm(check, rig, dtype, 3, 2048, 0);
             }});
        checks.push_back(
            {"ops", with_storage("swiglu", dtype), [dtype](Check& check, const OpRig& rig) {
                 check_swiglu(check, rig, dtype, 1, 4, -1);
                 check_swiglu(check, rig, dtype, 3, 12, -1);
                 check_swiglu(check, rig, dtype, 70, 36, 41);
                 check_swiglu(check, rig, dtype, 129, 100, 128);
                 check_swiglu(check, rig, dtype, 5, 260, 0);
             }});
        checks.push_back(
            {"ops", with_storage("embedding", dtype), [dtype](Check& check, const OpRig& rig) {
                 check_embedding(check, rig, dtype, 1, 1, 4, 1);
                 check_embedding(check, rig, dtype, 257, 256, 20, 256);
                 check_embedding(check, rig, dtype, 301, 50, 132, 3);
             }});
        checks.push_back(
            {"ops", with_storage("cross entropy", dtype), [dtype](Check& check, const OpRig& rig) {
                 check_loss(check, rig, dtype, 1, dtype == DType::F32 ? 1 : 2, 4);
                 check_loss(check, rig, dtype, 3, dtype == DType::F32 ? 5 : 6, 8);
                 check_loss(check, rig, dtype, 37, 258, 264);
                 check_loss(check, rig, dtype, 9, 5002, 5004);
             }});
    }
}

} // namespace bellows::selftest
