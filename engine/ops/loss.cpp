// SPDX-License-Identifier: MIT
#include "arguments.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/loss.hpp>
#include <bellows/kernels/kernels.hpp>

namespace bellows::ops {

namespace {

/// The kernel works on whole groups of four columns: the memory of a row must reach that far.
BufferView padded_memory(const Arguments& arguments, const char* name, const TensorView& view) {
    TensorView padded = view;
    padded.extent[1] = div_up(view.extent[1], 4) * 4;
    return arguments.memory(name, padded);
}

} // namespace

void cross_entropy(Recording& recording, const TensorView& logits, const TensorView& targets,
                   const TensorView& loss, const TensorView& d_logits, float scale,
                   const TensorView& factor) {
    const Arguments arguments("cross_entropy");
    arguments.rank("logits", logits, 2);
    arguments.activation("logits", logits);
    const std::uint64_t rows = logits.extent[0], vocab = logits.extent[1];
    arguments.require(vocab > 0, "the vocabulary is empty");
    arguments.strided("logits", logits, logits.dtype, {rows, vocab});
    arguments.tensor("targets", targets, DType::U32, {rows});
    arguments.tensor("loss", loss, DType::F32, {rows});
    if (d_logits.buffer) {
        arguments.strided("d_logits", d_logits, logits.dtype, {rows, vocab});
    }
    if (factor.buffer) {
        arguments.tensor("factor", factor, DType::F32, {1});
    }
    if (rows == 0) {
        return;
    }
    const RowPlan plan = plan_rows(recording, rows, div_up(vocab, 4), RowWork::Reduction);
    const BufferView loss_memory = arguments.memory("loss", loss, 1);
    kernels::CrossEntropy kernel{.variant = storage_variant<kernels::CrossEntropy>(logits.dtype),
                                 .constants = {plan.local_size, plan.row_per_workgroup},
                                 .logits = padded_memory(arguments, "logits", logits),
                                 .targets = arguments.memory("targets", targets, 1),
                                 .factor = loss_memory,
                                 .loss = loss_memory,
                                 .d_logits = loss_memory,
                                 .rows = arguments.u32("rows", rows),
                                 .vocab = arguments.u32("vocab", vocab),
                                 .stride4 =
                                     arguments.groups_of_4("logits' row stride", logits.stride[0]),
                                 .scale = scale};
    if (factor.buffer) {
        kernel.factor = arguments.memory("factor", factor, 1);
        kernel.with_factor = 1;
    }
    if (d_logits.buffer) {
        kernel.d_logits = padded_memory(arguments, "d_logits", d_logits);
        kernel.d_stride4 = arguments.groups_of_4("d_logits' row stride", d_logits.stride[0]);
        kernel.with_gradient = 1;
    }
    recording.dispatch(kernel, plan.groups);
}

} // namespace bellows::ops
