// SPDX-License-Identifier: MIT
#include <bellows/plan/memory_estimate.hpp>

#include <bellows/base/error.hpp>
#include <bellows/comm/sizes.hpp>
#include <bellows/engine/sizes.hpp>
#include <bellows/schedule/schedule.hpp>
#include <bellows/shape/groups.hpp>
#include <bellows/shape/sharded_ranges.hpp>
#include <bellows/shape/stages.hpp>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

namespace bellows {

namespace {

constexpr std::uint64_t kF32 = 4;

/// The sizes that everything is made of.
struct Sizes {
    Sizes(const ModelConfig& m, const TrainingShape& shape, const RunLayout& layout,
          const ComputeMemory& compute)
        : model(m), act(size_of(activation_type(shape.precision))),
          fp8(linear_precision(shape.precision) == LinearPrecision::Fp8), tiles(compute.tiles),
          copies(compute.copies && act == 2), apart(compute.apart),
          experts_apart(compute.experts_apart), seq(std::max<std::uint64_t>(shape.seq, 1)),
          tokens(shape.batch * shape.seq /
                 std::max<std::uint64_t>(std::uint64_t{layout.dp} * shape.micro_batches, 1)),
          ep(layout.ep), local_experts((model.routed_experts + ep - 1) / ep),
          // The ranks of an exchange send each other all their tokens' slots.
          rows(std::min(tokens * model.top_k * 5 / 4,
                        ops::moe_capacity(tokens * ep, model.top_k,
                                          std::max<std::uint64_t>(local_experts, 1), 1))) {}

    const ModelConfig& model;
    std::uint64_t act;    ///< bytes of an activation
    bool fp8;             ///< linear layers compute in FP8
    bool tiles;           ///< FP8 products may pack their operands into tiles
    bool copies;          ///< linear layers have copies of their weights, 2 bytes an element
    bool apart;           ///< weight gradients have scratch of their own
    bool experts_apart;   ///< those of experts, too
    std::uint64_t seq;    ///< tokens of a sequence
    std::uint64_t tokens; ///< of a rank's micro-batch
    std::uint64_t ep, local_experts;
    std::uint64_t rows;       ///< of a rank's experts in one micro-batch
    std::uint64_t handle = 0; ///< bytes of an exchange's, with the records that it moves
};

/// Codes and scales of a row in 1 x 128 blocks, and of about as many values in 128 x 1 blocks.
std::uint64_t quantized_row(std::uint64_t columns) {
    return columns + (columns + 127) / 128 * kF32;
}

/// What enters a linear layer and is kept.
std::uint64_t kept_row(const Sizes& s, std::uint64_t columns) {
    return s.fp8 ? quantized_row(columns) : columns * s.act;
}

/// A SwiGLU's input and output, or its input in FP8 and then that one's gradient.
std::uint64_t swiglu_row(const Sizes& s, std::uint64_t ffn) {
    return s.fp8 ? quantized_row(2 * ffn) : 3 * ffn * s.act;
}
std::uint64_t swiglu_gradient_row(const Sizes& s, std::uint64_t ffn) {
    return s.fp8 ? quantized_row(2 * ffn) : 0;
}

void add_attention(MemoryEstimate& e, const Sizes& s) {
    const ModelConfig& m = s.model;
    const std::uint64_t kv = m.kv_lora_rank + m.qk_rope_head_dim;
    const std::uint64_t queries = m.heads * m.qk_head_dim();
    const std::uint64_t keys_and_values = m.heads * (m.qk_nope_head_dim + m.v_head_dim);
    e.of(MemoryCategory::Activations) +=
        s.tokens *
        (kept_row(s, m.hidden) + kept_row(s, m.q_lora_rank) + kept_row(s, m.kv_lora_rank) +
         (m.q_lora_rank + kv + m.heads * m.v_head_dim) * s.act +
         (s.fp8 ? 0 : (queries + keys_and_values) * s.act) + (3 + m.heads) * kF32);
    e.of(MemoryCategory::DeferredWgrad) +=
        s.tokens * ((m.hidden + 2 * m.q_lora_rank + kv + m.kv_lora_rank) * s.act +
                    (s.fp8 ? quantized_row(queries) + quantized_row(keys_and_values) : 0));
}

void add_dense(MemoryEstimate& e, const Sizes& s) {
    e.of(MemoryCategory::Activations) +=
        s.tokens * (kept_row(s, s.model.hidden) + swiglu_row(s, s.model.dense_ffn) + kF32);
    e.of(MemoryCategory::DeferredWgrad) +=
        s.tokens * (s.model.hidden * s.act + swiglu_gradient_row(s, s.model.dense_ffn));
}

void add_experts(MemoryEstimate& e, const Sizes& s) {
    const ModelConfig& m = s.model;
    e.of(MemoryCategory::Activations) +=
        s.tokens * (m.hidden * s.act + swiglu_row(s, m.shared_ffn()) +
                    (1 + m.routed_experts + 2 * m.top_k) * kF32) +
        s.rows * ((s.fp8 ? 0 : 2 * m.hidden * s.act) + swiglu_row(s, m.moe_ffn));
    e.of(MemoryCategory::DeferredWgrad) += s.tokens * (m.routed_experts * kF32 + m.hidden * s.act +
                                                       swiglu_gradient_row(s, m.shared_ffn())) +
                                           s.rows * swiglu_gradient_row(s, m.moe_ffn);
    e.of(MemoryCategory::Scratch) +=
        s.tokens * ((m.routed_experts + m.top_k) * kF32 + m.shared_ffn() * s.act) +
        (m.balance_loss_alpha > 0 ? s.tokens / s.seq * m.routed_experts * kF32 : 0) +
        ops::rmsnorm_wgrad_workspace_bytes(s.tokens, m.hidden);
    e.of(MemoryCategory::Communication) += s.handle;
}

/// Scratch rows of an MoE layer, bound with the first step.
std::uint64_t scratch_row_bytes(const Sizes& s) {
    return s.rows * ((s.model.moe_ffn + s.model.hidden) * s.act + kF32);
}

/// Rows of operands of a product of as many matrices, which may fill up tiles.
std::uint64_t filled_rows(const Sizes& s, std::uint64_t rows, std::uint64_t matrices) {
    return rows + (s.tiles ? 128 * matrices : 0);
}

/// The weight gradients of an FFN in FP8, at most: its input and the SwiGLU's output quantised
/// anew, and a product's operands packed, with the rows that fill up tiles of 128 of each matrix.
/// Where products take the operands' values, they are quantised to these alone. `rows` are as many
/// as could come.
std::uint64_t fp8_weight_gradient_bytes(const Sizes& s, std::uint64_t rows, std::uint64_t ffn,
                                        std::uint64_t matrices) {
    const std::uint64_t hidden = s.model.hidden;
    return rows * (quantized_row(hidden) + quantized_row(ffn)) +
           filled_rows(s, rows, matrices) * (2 * ffn + hidden) * 2;
}

/// An FFN in FP8: its input gradient, which has a SwiGLU's in both forms, or its weight gradients,
/// unless these are apart.
std::uint64_t fp8_ffn_bytes(const Sizes& s, std::uint64_t rows, std::uint64_t ffn,
                            std::uint64_t matrices) {
    return std::max(rows * (2 * ffn * s.act + quantized_row(2 * ffn)) +
                        filled_rows(s, rows, matrices) * 2 * ffn * 2 +
                        (s.copies ? 0 : matrices * 2 * ffn * s.model.hidden * 2),
                    s.apart ? 0 : fp8_weight_gradient_bytes(s, rows, ffn, matrices));
}

/// Rows that could come to a rank's experts.
std::uint64_t expert_rows(const Sizes& s) {
    return ops::moe_capacity(s.tokens * s.ep, s.model.top_k,
                             std::max<std::uint64_t>(s.local_experts, 1), 1);
}

/// What layers use one after another in FP8.
std::uint64_t fp8_scratch_bytes(const Sizes& s) {
    const ModelConfig& m = s.model;
    const std::uint64_t queries = m.heads * m.qk_head_dim();
    const std::uint64_t keys_and_values = m.heads * (m.qk_nope_head_dim + m.v_head_dim);
    const std::uint64_t attention =
        s.tokens *
        ((4 * queries + 2 * m.heads * m.v_head_dim + 2 * queries + keys_and_values) * s.act +
         quantized_row(queries) + quantized_row(keys_and_values));
    return std::max({attention, fp8_ffn_bytes(s, s.tokens, m.dense_ffn, 1),
                     fp8_ffn_bytes(s, s.tokens, m.shared_ffn(), 1),
                     fp8_ffn_bytes(s, expert_rows(s), m.moe_ffn, s.local_experts)});
}

/// What weight gradients use for themselves, if they do: all of a rank's.
std::uint64_t apart_bytes(const Sizes& s) {
    if (!s.apart)
        return 0;
    const ModelConfig& m = s.model;
    const std::uint64_t sums =
        3 * ops::rmsnorm_wgrad_workspace_bytes(s.tokens, m.hidden) +
        (m.moe_layers() > 0
             ? ops::gemm_tn_tall_workspace_bytes(s.tokens, m.routed_experts, m.hidden)
             : 0);
    if (!s.fp8)
        return sums;
    const std::uint64_t widest =
        m.heads * std::max({m.qk_head_dim(), m.v_head_dim, m.qk_nope_head_dim + m.v_head_dim});
    const std::uint64_t attention =
        s.tokens * (2 * quantized_row(m.hidden) + quantized_row(widest) + (m.hidden + widest) * 2);
    const std::uint64_t others =
        std::max({attention, fp8_weight_gradient_bytes(s, s.tokens, m.dense_ffn, 1),
                  fp8_weight_gradient_bytes(s, s.tokens, m.shared_ffn(), 1)});
    const std::uint64_t experts =
        fp8_weight_gradient_bytes(s, expert_rows(s), m.moe_ffn, s.local_experts);
    return sums + (s.experts_apart ? others + experts : std::max(others, experts));
}

/// What layers use one after another.
std::uint64_t scratch_bytes(const Sizes& s) {
    const ModelConfig& m = s.model;
    const std::uint64_t attention =
        m.heads * (3 * m.qk_head_dim() + 2 * m.v_head_dim + m.qk_nope_head_dim + m.v_head_dim) +
        m.heads * m.qk_head_dim();
    return std::max(s.fp8 ? fp8_scratch_bytes(s) : 0,
                    s.tokens * std::max(attention, m.dense_ffn) * s.act) +
           ops::rmsnorm_wgrad_workspace_bytes(s.tokens, m.hidden);
}

/// Of a rank's dense parameters.
std::uint64_t ranks_with_copies(const RunLayout& layout, const Schedule& schedule,
                                std::uint64_t rank) {
    return layout.dp * copies_of_rank(schedule, rank).size();
}

/// Elements whose moments the rank keeps that has most.
std::uint64_t updated_elements(const std::vector<ParameterInfo>& held, std::uint64_t members,
                               std::uint64_t ep) {
    const std::vector<GradientRange> ranges = layer_ranges(in_stored_order(held));
    std::vector<GradientRange> buckets = gradient_buckets(ranges, kGradientBucketBytes);
    Sharing sharing(members, members / ep);
    sharing.share_out(buckets, ranges);
    std::uint64_t elements =
        std::ranges::max(sharing.given(false)) + std::ranges::max(sharing.given(true));
    for (const GradientRange& bucket : buckets)
        if (bucket.shares.empty())
            elements += bucket.count;
    return elements;
}

/// Of an FP8 matrix packed for one form of product: tiles of 128 x 128 with their scales.
std::uint64_t packed_bytes(const ParameterInfo& info) {
    constexpr std::uint64_t kTile = 128;
    const auto tiles = [](std::uint64_t extent) { return (extent + kTile - 1) / kTile; };
    const std::uint64_t down = tiles(info.shape[0]), across = tiles(info.shape[1]);
    return down * across * (kTile * kTile + kTile * kF32) +
           std::max(down, across) * (kTile + 4) * kF32;
}

/// Returns what passing first values takes.
std::uint64_t add_parameters(MemoryEstimate& e, const RunLayout& layout, const Schedule& schedule,
                             std::uint64_t rank, const Sizes& s) {
    std::uint64_t elements = 0, experts = 0, largest = 0, weights = 0;
    const auto held = parameters_of_rank(s.model, schedule, rank, 0, layout.ep);
    for (const ParameterInfo& info : held) {
        const std::uint64_t size = stored_elements(info);
        elements += size;
        experts += info.kind == ParameterKind::Expert ? size : 0;
        largest = std::max(largest, size);
        const bool in_fp8 = s.fp8 && is_linear(info);
        weights += size * ((s.act == kF32 || kept_in_f32(info) ? kF32 : 0) +
                           (s.act == 2 && !in_fp8 ? 2 : 0) + (in_fp8 ? 1 : 0));
        if (s.copies && is_linear(info)) // but for few that are small
            weights += 2 * (in_fp8 ? packed_bytes(info) : size);
    }
    e.of(MemoryCategory::Weights) +=
        weights + schedule.chunks[rank].size() * s.seq * s.model.qk_rope_head_dim * kF32;
    e.of(MemoryCategory::Gradients) += elements * kF32;
    e.of(MemoryCategory::Optimizer) +=
        updated_elements(held, ranks_with_copies(layout, schedule, rank), layout.ep) *
        (s.act == kF32 ? 2 : 3) * kF32; // moments, master weights
    // Experts' and others apart, through a buffer of the host and, where they are not kept, one of
    // the device.
    const std::uint64_t side_by_side = std::max(experts, elements - experts);
    return std::max(std::min(side_by_side, kInitialisedAtOnce), largest) * kF32 *
           (s.act == kF32 ? 1 : 2);
}

/// What a chunk keeps for its micro-batches in flight. Returns its slots of layers with experts.
std::uint64_t add_chunk(MemoryEstimate& all, const Sizes& s, const Schedule& schedule,
                        std::uint64_t rank, std::uint32_t phase) {
    const ModelConfig& m = s.model;
    const std::uint64_t stage = schedule.chunks[rank][phase].stage;
    const LayerRange range = layers_of_stage(m, stage, schedule.num_stages);
    std::uint64_t moe_layers = 0;
    MemoryEstimate slot; // of one micro-batch in flight
    for (std::uint64_t layer = range.first; layer < range.end; ++layer) {
        add_attention(slot, s);
        m.is_moe(layer) ? add_experts(slot, s) : add_dense(slot, s);
        moe_layers += m.is_moe(layer) ? 1 : 0;
    }
    const std::uint64_t stream = s.tokens * m.hidden * s.act;
    const std::uint64_t streams = 2 * (range.end - range.first) + 1;
    slot.of(MemoryCategory::Activations) += streams * stream + 2 * s.tokens * kF32;
    slot.of(MemoryCategory::DeferredWgrad) += streams * stream;
    if (stage + 1 == schedule.num_stages) {
        slot.of(MemoryCategory::Activations) += stream + s.tokens * (m.vocabulary * s.act + kF32);
        slot.of(MemoryCategory::DeferredWgrad) += stream;
    }
    const std::uint64_t slots = schedule.peak_in_flight(rank, phase);
    for (std::size_t i = 0; i < all.bytes.size(); ++i)
        all.bytes[i] += slots * slot.bytes[i];
    return slots * moe_layers;
}

/// Stages before and behind a rank's own that are other ranks': in training no others take a pipe.
std::uint64_t neighbours_elsewhere(const Schedule& schedule, std::uint64_t rank) {
    const auto places = chunk_places(schedule);
    std::uint64_t count = 0;
    for (const ScheduleChunk& chunk : schedule.chunks[rank])
        for (const std::uint64_t stage : {chunk.stage - 1, chunk.stage + 1}) // -1: beyond any
            count += stage < schedule.num_stages && places[chunk.stream][stage].rank != rank;
    return count;
}

/// Staging of the two reductions and of the pipes: of a neighbour two messages each way.
std::uint64_t network_bytes(const Sizes& s, bool linked, const RunLayout& layout,
                            const Schedule& schedule, std::uint64_t rank, std::uint64_t gradients) {
    const CollectivesOptions options;
    const std::uint64_t chunk =
        linked ? std::max(options.chunk_bytes, options.link_chunk_bytes) : options.chunk_bytes;
    const std::uint64_t replicas = ranks_with_copies(layout, schedule, rank);
    std::uint64_t bytes = 0;
    for (const std::uint64_t members : {replicas, replicas / s.ep})
        if (members > 1)
            bytes += 2 * std::min<std::uint64_t>(gradients, chunk * options.chunks_in_flight *
                                                                options.collectives_in_flight);
    return bytes + neighbours_elsewhere(schedule, rank) * 4 * s.tokens * s.model.hidden * s.act;
}

} // namespace

std::uint64_t MemoryEstimate::total() const noexcept {
    return std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
}

MemoryCategory MemoryEstimate::largest() const noexcept {
    return static_cast<MemoryCategory>(std::max_element(bytes.begin(), bytes.end()) -
                                       bytes.begin());
}

MemoryEstimate estimate_memory(const ModelConfig& m, const TrainingShape& shape,
                               const RunLayout& layout, const Topology& topology,
                               std::uint64_t rank, const ComputeMemory& compute) {
    Sizes s(m, shape, layout, compute);
    if (m.moe_layers() > 0) {
        const auto first = static_cast<int>(rank * layout.dp);
        const ExchangeConfig exchange =
            exchange_config(m, shape.precision, layout, rank, 0, s.tokens);
        s.handle = exchange_handle_bytes(topology, first, exchange) +
                   exchange_record_bytes(topology, first, exchange);
    }
    const Schedule schedule = pipeline_schedule(m, shape, layout);
    MemoryEstimate all;
    std::uint64_t rows = 0; // of experts, in the scratch of all slots
    for (std::uint32_t phase = 0; phase < schedule.chunks[rank].size(); ++phase)
        rows += add_chunk(all, s, schedule, rank, phase);
    // The weights' first values come before there are rows.
    const std::uint64_t first_values = add_parameters(all, layout, schedule, rank, s);
    all.of(MemoryCategory::Scratch) += schedule.chunks[rank].size() * scratch_bytes(s) +
                                       apart_bytes(s) +
                                       std::max(rows * scratch_row_bytes(s), first_values);
    all.of(MemoryCategory::Communication) +=
        network_bytes(s, compute.linked, layout, schedule, rank, all.of(MemoryCategory::Gradients));
    return all;
}

MemoryEstimate estimate_memory(const ModelConfig& m, const TrainingShape& shape,
                               const RunLayout& layout, std::uint64_t rank,
                               const ComputeMemory& compute) {
    const auto ranks = static_cast<int>(layout.pp * layout.dp);
    return estimate_memory(m, shape, layout, Topology::blocks(ranks, ranks), rank, compute);
}

void require_memory(const MemoryEstimate& estimate, std::uint64_t device_bytes,
                    std::uint64_t sharing, const std::string& device) {
    const std::uint64_t room = device_bytes / std::max<std::uint64_t>(sharing, 1);
    if (estimate.total() <= room)
        return;
    const MemoryCategory largest = estimate.largest();
    const bool parameters = largest == MemoryCategory::Weights ||
                            largest == MemoryCategory::Gradients ||
                            largest == MemoryCategory::Optimizer;
    throw Error(ErrorCode::InvalidArgument,
                "the run needs " + describe_memory(estimate.bytes) + " on each rank, but " +
                    device + " has " + format_bytes(device_bytes) +
                    (sharing > 1 ? " for " + std::to_string(sharing) + " ranks" : "") +
                    "; most goes into " + to_string(largest) + ": " +
                    (parameters ? "take a smaller model, or more devices with --pp or --ep"
                                : "lower --batch or --seq, or raise --micro-batches"));
}

} // namespace bellows
