// SPDX-License-Identifier: MIT
#include "arguments.hpp"

#include <bellows/engine/moe.hpp>
#include <bellows/kernels/kernels.hpp>

namespace bellows::ops {

namespace {

/// Checks the tensors that both directions share; returns ffn.
std::uint64_t check(const Arguments& arguments, const TensorView& gate_up,
                    const TensorView& row_weight, const TensorView& hidden,
                    const char* hidden_name) {
    arguments.rank("gate_up", gate_up, 2);
    arguments.rank(hidden_name, hidden, 2);
    arguments.activation("gate_up", gate_up);
    const std::uint64_t rows = gate_up.extent[0], ffn = hidden.extent[1];
    arguments.multiple_of_4("ffn", ffn);
    arguments.tensor("gate_up", gate_up, gate_up.dtype, {rows, 2 * ffn});
    arguments.tensor(hidden_name, hidden, gate_up.dtype, {rows, ffn});
    if (row_weight.buffer) {
        arguments.tensor("row_weight", row_weight, DType::F32, {rows});
    }
    return ffn;
}

} // namespace

void swiglu_forward(Recording& recording, const TensorView& gate_up, const TensorView& row_weight,
                    const TensorView& hidden) {
    const Arguments arguments("swiglu_forward");
    const std::uint64_t ffn = check(arguments, gate_up, row_weight, hidden, "hidden");
    const std::uint64_t rows = gate_up.extent[0];
    if (rows == 0 || ffn == 0) {
        return;
    }
    const RowPlan plan = plan_rows(recording, rows, ffn / 4, RowWork::Elementwise);
    const BufferView gate_up_memory = arguments.memory("gate_up", gate_up);
    recording.dispatch(
        kernels::SwigluForward{
            .variant = storage_variant<kernels::SwigluForward>(gate_up.dtype),
            .constants = {plan.local_size, plan.row_per_workgroup},
            .gate_up = gate_up_memory,
            .row_weight = arguments.memory_or("row_weight", row_weight, gate_up_memory, 1),
            .row_count = gate_up.row_counts_or(gate_up_memory),
            .hidden = arguments.memory("hidden", hidden),
            .rows = arguments.u32("rows", rows),
            .ffn4 = arguments.groups_of_4("ffn", ffn),
            .has_row_weight = row_weight.buffer ? 1u : 0u,
            .rows_per_count = arguments.u32("rows of a count", gate_up.counted_rows())},
        plan.groups);
}

void swiglu_dgrad(Recording& recording, const TensorView& d_hidden, const TensorView& gate_up,
                  const TensorView& row_weight, const TensorView& d_gate_up,
                  const TensorView& d_row_weight) {
    const Arguments arguments("swiglu_dgrad");
    const std::uint64_t ffn = check(arguments, gate_up, row_weight, d_hidden, "d_hidden");
    const std::uint64_t rows = gate_up.extent[0];
    arguments.tensor("d_gate_up", d_gate_up, gate_up.dtype, {rows, 2 * ffn});
    arguments.require(static_cast<bool>(row_weight.buffer) ==
                          static_cast<bool>(d_row_weight.buffer),
                      "row_weight and d_row_weight must both be given or both be left out");
    if (d_row_weight.buffer) {
        arguments.tensor("d_row_weight", d_row_weight, DType::F32, {rows});
    }
    if (rows == 0 || ffn == 0) {
        return;
    }
    const RowWork work = row_weight.buffer ? RowWork::Reduction : RowWork::Elementwise;
    const RowPlan plan = plan_rows(recording, rows, ffn / 4, work);
    const BufferView gate_up_memory = arguments.memory("gate_up", gate_up);
    const BufferView d_gate_up_memory = arguments.memory("d_gate_up", d_gate_up);
    recording.dispatch(
        kernels::SwigluDgrad{
            .variant = storage_variant<kernels::SwigluDgrad>(gate_up.dtype),
            .constants = {plan.local_size, plan.row_per_workgroup},
            .d_out = arguments.memory("d_hidden", d_hidden),
            .gate_up = gate_up_memory,
            .row_weight = arguments.memory_or("row_weight", row_weight, gate_up_memory, 1),
            .row_count = arguments.row_count_or(gate_up, gate_up_memory),
            .d_gate_up = d_gate_up_memory,
            .d_row_weight = arguments.memory_or("d_row_weight", d_row_weight, d_gate_up_memory, 1),
            .rows = arguments.u32("rows", rows),
            .ffn4 = arguments.groups_of_4("ffn", ffn),
            .has_row_weight = row_weight.buffer ? 1u : 0u,
            .has_row_count = gate_up.row_count ? 1u : 0u},
        plan.groups);
}

} // namespace bellows::ops
