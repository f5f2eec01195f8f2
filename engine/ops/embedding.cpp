// SPDX-License-Identifier: MIT
#include "arguments.hpp"

#include <bellows/engine/embedding.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>

namespace bellows::ops {

void embedding_forward(Recording& recording, const TensorView& ids, const TensorView& table,
                       const TensorView& embedded) {
    const Arguments arguments("embedding_forward");
    arguments.rank("ids", ids, 1);
    arguments.rank("table", table, 2);
    arguments.activation("table", table);
    arguments.activation("embedded", embedded);
    arguments.require(table.dtype == DType::F32 || embedded.dtype == DType::BF16,
                      "a bf16 table gives bf16, not f32");
    const std::uint64_t tokens = ids.extent[0], vocab = table.extent[0];
    const std::uint64_t columns = table.extent[1];
    arguments.multiple_of_4("columns", columns);
    arguments.tensor("ids", ids, DType::U32, {tokens});
    arguments.tensor("table", table, table.dtype, {vocab, columns});
    arguments.tensor("embedded", embedded, embedded.dtype, {tokens, columns});
    if (tokens == 0 || columns == 0) {
        return;
    }
    using Variant = kernels::EmbeddingForward::Variant;
    const Variant variant = table.dtype == DType::BF16      ? Variant::bf16_bf16
                            : embedded.dtype == DType::BF16 ? Variant::f32_bf16
                                                            : Variant::f32;
    const RowPlan plan = plan_rows(recording, tokens, columns / 4, RowWork::Elementwise);
    recording.dispatch(
        kernels::EmbeddingForward{.variant = variant,
                                  .constants = {plan.local_size, plan.row_per_workgroup},
                                  .ids = arguments.memory("ids", ids, 1),
                                  .table = arguments.memory("table", table),
                                  .embedded = arguments.memory("embedded", embedded),
                                  .tokens = arguments.u32("tokens", tokens),
                                  .vocab = arguments.u32("vocab", vocab),
                                  .columns4 = arguments.groups_of_4("columns", columns)},
        plan.groups);
}

void embedding_wgrad(Recording& recording, const TensorView& ids, const TensorView& d_embedded,
                     const TensorView& d_table, bool accumulate, BufferView workspace) {
    const Arguments arguments("embedding_wgrad");
    arguments.rank("ids", ids, 1);
    arguments.rank("d_table", d_table, 2);
    arguments.activation("d_embedded", d_embedded);
    const std::uint64_t tokens = ids.extent[0], vocab = d_table.extent[0];
    const std::uint64_t columns = d_table.extent[1];
    arguments.multiple_of_4("columns", columns);
    arguments.tensor("ids", ids, DType::U32, {tokens});
    arguments.tensor("d_embedded", d_embedded, d_embedded.dtype, {tokens, columns});
    arguments.tensor("d_table", d_table, DType::F32, {vocab, columns});
    arguments.workspace(workspace, embedding_wgrad_workspace_bytes(tokens));
    const BufferView d_table_memory = arguments.memory("d_table", d_table);
    if (!accumulate) {
        recording.fill(d_table_memory, 0);
    }
    if (tokens == 0 || columns == 0) {
        return;
    }
    const BufferView ids_memory = arguments.memory("ids", ids, 4);
    const BufferView next = workspace.sub(0, 4 * tokens);
    const BufferView has_previous = workspace.sub(4 * tokens, 4 * tokens);
    recording.fill(has_previous, 0);
    const FlatPlan links = plan_flat(recording, tokens, 1);
    recording.dispatch(kernels::EmbeddingLinks{.constants = {.local_size = links.local_size},
                                               .ids = ids_memory,
                                               .next = next,
                                               .has_previous = has_previous,
                                               .tokens = arguments.u32("tokens", tokens)},
                       links.groups);
    const RowPlan plan = plan_rows(recording, tokens, columns / 4, RowWork::WholeWorkgroup);
    recording.dispatch(
        kernels::EmbeddingWgrad{.variant =
                                    storage_variant<kernels::EmbeddingWgrad>(d_embedded.dtype),
                                .constants = {plan.local_size, plan.row_per_workgroup},
                                .ids = ids_memory,
                                .next = next,
                                .has_previous = has_previous,
                                .d_out = arguments.memory("d_embedded", d_embedded),
                                .d_table = d_table_memory,
                                .tokens = arguments.u32("tokens", tokens),
                                .vocab = arguments.u32("vocab", vocab),
                                .columns4 = arguments.groups_of_4("columns", columns)},
        plan.groups);
}

} // namespace bellows::ops
