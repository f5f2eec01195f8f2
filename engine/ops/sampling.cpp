// SPDX-License-Identifier: MIT
#include "sampling_form.hpp"

#include "arguments.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/engine/sampling.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <bit>

namespace bellows::ops {

namespace {

// As in shaders/include/sampling.glsl and sampling_bins.glsl: a row is split alike on every device.
constexpr std::uint64_t kChunk = 2048, kRecordWords = 8, kBinWords = 3 * 512 + 4 + 2 * 4096;

struct Layout {
    std::uint64_t chunks, changed_stride;       ///< of a row
    std::uint64_t changed, bins, records, tops; ///< bytes
};

Layout layout_of(std::uint64_t rows, std::uint64_t vocabulary) {
    Layout layout{};
    layout.chunks = div_up(vocabulary, kChunk);
    layout.changed_stride = div_up(vocabulary, 4) * 4;
    layout.changed = 4 * rows * layout.changed_stride;
    layout.bins = 4 * rows * kBinWords;
    layout.records = 4 * rows * layout.chunks * kRecordWords;
    layout.tops = 4 * rows * layout.chunks * 2 * kMostTopLogProbs;
    return layout;
}

void check(const Arguments& arguments, const SampleBatch& batch) {
    arguments.rank("logits", batch.logits, 2);
    const std::uint64_t rows = batch.logits.extent[0], vocabulary = batch.logits.extent[1];
    arguments.require(vocabulary > 0, "the vocabulary is empty");
    arguments.strided("logits", batch.logits, DType::F32, {rows, vocabulary});
    arguments.tensor("settings", batch.settings, DType::U32, {rows, sizeof(SampleSettings) / 4});
    for (const auto& [name, view] :
         {std::pair{"history", &batch.history}, std::pair{"biases", &batch.biases}}) {
        if (view->buffer) {
            arguments.rank(name, *view, 2);
            arguments.tensor(name, *view, DType::U32, {view->extent[0], 2});
        }
    }
    if (batch.allowed.buffer) {
        arguments.tensor("allowed", batch.allowed, DType::U32, {div_up(vocabulary, 32)});
    }
    arguments.tensor("tokens", batch.tokens, DType::U32, {rows});
    arguments.tensor("log_probs", batch.log_probs, DType::F32, {rows});
    arguments.require(static_cast<bool>(batch.top_tokens.buffer) ==
                          static_cast<bool>(batch.top_log_probs.buffer),
                      "top_tokens and top_log_probs go together");
    if (batch.top_tokens.buffer) {
        arguments.rank("top_tokens", batch.top_tokens, 2);
        const std::uint64_t n = batch.top_tokens.extent[1];
        arguments.require(n <= std::min(vocabulary, kMostTopLogProbs),
                          "top_tokens is " + describe(batch.top_tokens) + ", wanted are at most " +
                              std::to_string(std::min(vocabulary, kMostTopLogProbs)) + " columns");
        arguments.tensor("top_tokens", batch.top_tokens, DType::U32, {rows, n});
        arguments.tensor("top_log_probs", batch.top_log_probs, DType::F32, {rows, n});
    }
}

} // namespace

std::uint64_t sample_workspace_bytes(std::uint64_t rows, std::uint64_t vocabulary) {
    const Layout layout = layout_of(rows, vocabulary);
    return layout.changed + layout.bins + layout.records + layout.tops;
}

SampleForm sample_form(const Recording& recording, std::uint64_t vocabulary) {
    const DeviceInfo& info = recording.device().info();
    const std::uint32_t most = std::bit_floor(info.max_workgroup_invocations);
    if (info.is_cpu) {
        // Barriers are slow there, workgroups of one subgroup are not. But lavapipe of Mesa 22.3
        // leaves all loops of a kernel when an invocation has gone round them 65535 times.
        constexpr std::uint64_t kFewColumns = 8192;
        return {8, vocabulary <= kFewColumns ? 8 : std::min(128u, most), kMaxGroups};
    }
    return {std::min(256u, most), std::min(1024u, most), kMaxGroups};
}

void sample(Recording& recording, const SampleBatch& batch, BufferView workspace) {
    sample(recording, batch, workspace, sample_form(recording, batch.logits.extent[1]));
}

void sample(Recording& recording, const SampleBatch& batch, BufferView workspace,
            const SampleForm& form) {
    const Arguments arguments("sample");
    check(arguments, batch);
    const std::uint64_t rows = batch.logits.extent[0], vocabulary = batch.logits.extent[1];
    arguments.workspace(workspace, sample_workspace_bytes(rows, vocabulary));
    if (rows == 0) {
        return;
    }
    const Layout layout = layout_of(rows, vocabulary);
    const auto groups_for = [&](std::uint64_t workgroups) {
        return Groups{.x = static_cast<std::uint32_t>(std::min(workgroups, form.most_groups))};
    };
    std::uint64_t used = 0;
    const auto part = [&](std::uint64_t bytes) {
        used += bytes;
        return workspace.sub(used - bytes, bytes);
    };
    const BufferView changed = part(layout.changed), bins = part(layout.bins);
    const BufferView records = part(layout.records), tops = part(layout.tops);
    arguments.require(std::max(layout.changed, layout.bins) <= kKernelReach,
                      "logits are " + describe(batch.logits) +
                          ", too many for one kernel, which reaches 4 GiB of the workspace");
    const BufferView logits = arguments.memory("logits", batch.logits, 1);
    const BufferView settings = arguments.memory("settings", batch.settings, 1);
    const BufferView tokens = arguments.memory("tokens", batch.tokens, 1);
    const BufferView log_probs = arguments.memory("log_probs", batch.log_probs, 1);
    const std::uint64_t top_n = batch.top_tokens.buffer ? batch.top_tokens.extent[1] : 0;
    const auto entries = [](const TensorView& view) { return view.buffer ? view.extent[0] : 0; };
    const auto entry_memory = [&](const char* name, const TensorView& view) {
        return entries(view) == 0 ? logits : arguments.memory(name, view, 1);
    };
    const kernels::SampleChunks by_chunk{
        .constants = {.local_size = form.chunk_invocations},
        .logits = logits,
        .settings = settings,
        .history = entry_memory("history", batch.history),
        .biases = entry_memory("biases", batch.biases),
        .allowed = arguments.memory_or("allowed", batch.allowed, logits, 1),
        .changed = changed,
        .records = records,
        .tops = tops,
        .bins = bins,
        .rows = arguments.u32("rows", rows),
        .vocabulary = arguments.u32("vocabulary", vocabulary),
        .stride = arguments.u32("logits' row stride", batch.logits.stride[0]),
        .changed_stride = arguments.u32("vocabulary", layout.changed_stride),
        .chunks = arguments.u32("chunks of a row", layout.chunks),
        .top_n = arguments.u32("top_tokens' columns", top_n),
        .history_capacity = arguments.u32("history", entries(batch.history)),
        .bias_capacity = arguments.u32("biases", entries(batch.biases)),
        .has_allowed = batch.allowed.buffer ? 1u : 0u};
    recording.dispatch(by_chunk, groups_for(rows * layout.chunks));
    recording.dispatch(kernels::SampleBins{.constants = {.local_size = form.chunk_invocations},
                                           .settings = settings,
                                           .changed = changed,
                                           .records = records,
                                           .bins = bins,
                                           .rows = by_chunk.rows,
                                           .vocabulary = by_chunk.vocabulary,
                                           .changed_stride = by_chunk.changed_stride,
                                           .chunks = by_chunk.chunks},
                       groups_for(rows * layout.chunks));
    recording.dispatch(
        kernels::SampleRows{
            .constants = {.local_size = form.row_invocations},
            .logits = logits,
            .settings = settings,
            .changed = changed,
            .records = records,
            .tops = tops,
            .bins = bins,
            .tokens = tokens,
            .log_probs = log_probs,
            .top_tokens = top_n == 0 ? tokens : arguments.memory("top_tokens", batch.top_tokens, 1),
            .top_log_probs =
                top_n == 0 ? log_probs : arguments.memory("top_log_probs", batch.top_log_probs, 1),
            .rows = by_chunk.rows,
            .vocabulary = by_chunk.vocabulary,
            .stride = by_chunk.stride,
            .changed_stride4 = by_chunk.changed_stride / 4,
            .chunks = by_chunk.chunks,
            .top_n = by_chunk.top_n},
        groups_for(rows));
}

void take_drawn(Recording& recording, const TensorView& drawn, const TensorView& tokens) {
    const Arguments arguments("take_drawn");
    arguments.rank("drawn", drawn, 1);
    arguments.rank("tokens", tokens, 1);
    arguments.tensor("drawn", drawn, DType::U32, {drawn.extent[0]});
    arguments.tensor("tokens", tokens, DType::U32, {tokens.extent[0]});
    if (tokens.extent[0] == 0 || drawn.extent[0] == 0) {
        return;
    }
    const FlatPlan plan = plan_flat(recording, tokens.extent[0], 1);
    recording.dispatch(kernels::SampleTake{.constants = {.local_size = plan.local_size},
                                           .tokens = arguments.memory("tokens", tokens, 1),
                                           .drawn = arguments.memory("drawn", drawn, 1),
                                           .num_tokens = arguments.u32("tokens", tokens.extent[0]),
                                           .num_drawn = arguments.u32("drawn", drawn.extent[0])},
                       plan.groups);
}

} // namespace bellows::ops
