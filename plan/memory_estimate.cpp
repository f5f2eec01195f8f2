// SPDX-License-Identifier: MIT
#include <bellows/plan/memory_estimate.hpp>

#include <bellows/base/error.hpp>
#include <bellows/comm/sizes.hpp>
#include <bellows/engine/sizes.hpp>
#include <bellows/schedule/schedule.hpp>
#include <bellows/shape/groups.hpp>
#include <bellows/shape/layer.hpp>
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
          const ComputeMemory& compute, LayerTable kinds);

    bool fp8() const noexcept { return slot.fp8(); }

    const ModelConfig& model;
    LayerTable layers;
    SlotShape slot;     ///< of a rank's micro-batch in any layer
    std::uint64_t act;  ///< bytes of an activation
    bool copies;        ///< linear layers have copies of their weights, 2 bytes an element
    bool apart;         ///< weight gradients have scratch of their own
    bool experts_apart; ///< those of experts, too
    bool documents;     ///< each token has the ends of its document
    std::uint64_t ep;
    std::uint64_t slots;      ///< of a rank for experts that are placed; 0: none are
    std::uint64_t rows;       ///< that come to a rank's experts in one micro-batch
    std::uint64_t handle = 0; ///< bytes of an exchange's, with the records that it moves
};

Sizes::Sizes(const ModelConfig& m, const TrainingShape& shape, const RunLayout& layout,
             const ComputeMemory& compute, LayerTable kinds)
    : model(m), layers(kinds), act(size_of(activation_type(shape.precision))),
      copies(compute.copies && act == 2), apart(compute.apart),
      experts_apart(compute.experts_apart), documents(shape.document_mask), ep(layout.ep) {
    slot.tokens = shape.batch * shape.seq /
                  std::max<std::uint64_t>(std::uint64_t{layout.dp} * shape.micro_batches, 1);
    slot.seq = std::max<std::uint64_t>(shape.seq, 1);
    slot.activation = activation_type(shape.precision);
    slot.linear = linear_precision(shape.precision);
    slots = expert_slots_of_rank(m, shape, layout);
    slot.local_experts = slots > 0 ? slots : (m.routed_experts + ep - 1) / ep;
    // The ranks of an exchange send each other all their tokens' slots.
    slot.expert_rows = ops::moe_capacity(slot.tokens * ep, m.top_k,
                                         std::max<std::uint64_t>(slot.local_experts, 1), 1);
    slot.packs_operands = compute.tiles;
    slot.weights_packed = copies;
    rows = std::min(slot.tokens * m.top_k * 5 / 4, slot.expert_rows);
}

/// What the nodes of some layers use one after another, by whose scratch it is.
struct ScratchBytes {
    std::uint64_t of_layers = 0;
    std::uint64_t of_weight_gradients = 0, of_experts = 0; ///< where these have their own

    std::uint64_t& of(const NodeInfo& node, const Sizes& s) noexcept {
        if (node.kind != NodeKind::WeightGradient || !s.apart)
            return of_layers;
        return node.of_experts && s.experts_apart ? of_experts : of_weight_gradients;
    }
};

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

/// What products read of a parameter.
std::uint64_t weight_bytes(const ParameterInfo& info, const Sizes& s) {
    const std::uint64_t size = stored_elements(info);
    const bool in_fp8 = s.fp8() && is_linear(info);
    std::uint64_t bytes = size * ((s.act == kF32 || kept_in_f32(info) ? kF32 : 0) +
                                  (s.act == 2 && !in_fp8 ? 2 : 0) + (in_fp8 ? 1 : 0));
    if (s.copies && is_linear(info)) // but for few that are small
        bytes += 2 * (in_fp8 ? packed_bytes(info) : size);
    return bytes;
}

/// Weights and gradients of the slots that experts are placed in. Returns the gradients.
std::uint64_t add_slots(MemoryEstimate& e, const Schedule& schedule, std::uint64_t rank,
                        const Sizes& s) {
    std::uint64_t gradients = 0;
    if (s.slots > 0)
        for (const ParameterInfo& info :
             slot_parameters(s.model, schedule, rank, 0, s.slots, s.layers)) {
            e.of(MemoryCategory::Weights) += weight_bytes(info, s);
            gradients += stored_elements(info) * kF32;
        }
    e.of(MemoryCategory::Gradients) += gradients;
    return gradients;
}

/// Returns what passing first values takes.
std::uint64_t add_parameters(MemoryEstimate& e, const RunLayout& layout, const Schedule& schedule,
                             std::uint64_t rank, const Sizes& s) {
    std::uint64_t elements = 0, experts = 0, largest = 0, weights = 0, head_gradient = 0;
    const auto held = parameters_of_rank(s.model, schedule, rank, 0, layout.ep, s.layers);
    for (const ParameterInfo& info : held) {
        const std::uint64_t size = stored_elements(info);
        elements += size;
        experts += info.kind == ParameterKind::Expert ? size : 0;
        largest = std::max(largest, size);
        head_gradient += info.both_ends ? size : 0;
        weights += weight_bytes(info, s);
    }
    e.of(MemoryCategory::Weights) +=
        weights + schedule.chunks[rank].size() * s.slot.seq * s.model.rope_head_dim() * kF32;
    e.of(MemoryCategory::Gradients) += (elements + head_gradient) * kF32;
    e.of(MemoryCategory::Optimizer) +=
        updated_elements(held, ranks_with_copies(layout, schedule, rank), layout.ep) *
        (s.act == kF32 ? 2 : 3) * kF32; // moments, master weights
    // Experts' and others apart, through a buffer of the host and, where they are not kept, one of
    // the device.
    const std::uint64_t side_by_side = std::max(experts, elements - experts);
    return std::max(std::min(side_by_side, kInitialisedAtOnce), largest) * kF32 *
           (s.act == kF32 ? 1 : 2);
}

/// What a chunk keeps for its micro-batches in flight. Returns the bytes of rows in scratch, which
/// get their memory with the first step; `scratch` becomes what its nodes use.
std::uint64_t add_chunk(MemoryEstimate& all, ScratchBytes& scratch, const Sizes& s,
                        const Schedule& schedule, std::uint64_t rank, std::uint32_t phase) {
    const std::uint64_t stage = schedule.chunks[rank][phase].stage;
    MemoryEstimate slot; // of one micro-batch in flight
    std::uint64_t rows = 0;
    const auto add = [&](const BufferInfo& buffer) {
        const std::uint64_t bytes = buffer.bytes(s.rows);
        const bool later =
            buffer.rows != RowCount::Fixed && buffer.category == MemoryCategory::Scratch;
        (later ? rows : slot.of(buffer.category)) += bytes;
    };
    const auto add_stream = [&] {
        add(residual_stream(s.model, s.slot));
        add(residual_gradient(s.model, s.slot));
    };
    for (const PlacedLayer& layer : placed_layers(s.model, stage, schedule.num_stages, s.layers)) {
        std::ranges::for_each(layer.kind->buffers(s.model, s.slot), add);
        bool exchanges = false;
        for (const NodeInfo& node : layer.kind->nodes(s.model, s.slot)) {
            std::uint64_t& most = scratch.of(node, s);
            most = std::max(most, node.scratch_bytes);
            exchanges |= node.resource == NodeResource::Exchange;
        }
        if (exchanges)
            slot.of(MemoryCategory::Communication) += s.handle;
        if (layer.kind->place == LayerPlace::Body || layer.kind->place == LayerPlace::ModuleFront)
            add_stream();
        if (layer.kind->place == LayerPlace::ModuleFront)
            slot.of(MemoryCategory::Activations) += 2 * s.slot.tokens * kF32; // ids and targets
    }
    add_stream();
    slot.of(MemoryCategory::Activations) += 2 * s.slot.tokens * kF32; // ids and targets
    if (s.documents)
        slot.of(MemoryCategory::Activations) += 2 * s.slot.tokens * kF32; // ends of documents
    const std::uint64_t slots = schedule.peak_in_flight(rank, phase);
    for (std::size_t i = 0; i < all.bytes.size(); ++i)
        all.bytes[i] += slots * slot.bytes[i];
    return slots * rows;
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

/// What collective operations pass on.
struct TravellingBytes {
    std::uint64_t gradients; ///< of the reductions
    std::uint64_t of_slots;  ///< gradients of experts in slots, which take more than weights
};

/// Staging of the collective operations, and of the pipes: of a neighbour two messages each way.
std::uint64_t network_bytes(const Sizes& s, bool linked, const RunLayout& layout,
                            const Schedule& schedule, std::uint64_t rank,
                            const TravellingBytes& travelling) {
    const CollectivesOptions options;
    const std::uint64_t chunk =
        linked ? std::max(options.chunk_bytes, options.link_chunk_bytes) : options.chunk_bytes;
    const std::uint64_t replicas = ranks_with_copies(layout, schedule, rank);
    const auto staging = [&](std::uint64_t all) { // what goes out and what comes in
        return 2 * std::min<std::uint64_t>(all, chunk * options.chunks_in_flight *
                                                    options.collectives_in_flight);
    };
    // A slot's expert is another rank's but for its share.
    std::uint64_t bytes = staging(travelling.of_slots) * (s.ep - 1) / s.ep;
    for (const std::uint64_t members : {replicas, replicas / s.ep})
        if (members > 1)
            bytes += staging(travelling.gradients);
    return bytes +
           neighbours_elsewhere(schedule, rank) * 4 * s.slot.tokens * s.model.hidden * s.act;
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
                               std::uint64_t rank, const ComputeMemory& compute, LayerTable kinds) {
    Sizes s(m, shape, layout, compute, kinds);
    if (m.moe_layers() > 0) {
        const auto first = static_cast<int>(rank * layout.dp);
        const ExchangeConfig exchange = exchange_config(m, shape, layout, rank, 0, s.slot.tokens);
        s.handle = exchange_handle_bytes(topology, first, exchange) +
                   exchange_record_bytes(topology, first, exchange);
    }
    const Schedule schedule = pipeline_schedule(m, shape, layout);
    MemoryEstimate all;
    std::uint64_t rows = 0; // of experts, in the scratch of all slots
    ScratchBytes of_rank;   // weight gradients' own is the rank's, others' the chunk's
    for (std::uint32_t phase = 0; phase < schedule.chunks[rank].size(); ++phase) {
        of_rank.of_layers = 0;
        rows += add_chunk(all, of_rank, s, schedule, rank, phase);
        all.of(MemoryCategory::Scratch) += of_rank.of_layers;
    }
    // The weights' first values come before there are rows.
    const std::uint64_t first_values = add_parameters(all, layout, schedule, rank, s);
    TravellingBytes travelling{.gradients = all.of(MemoryCategory::Gradients), .of_slots = 0};
    travelling.of_slots = add_slots(all, schedule, rank, s);
    all.of(MemoryCategory::Scratch) +=
        of_rank.of_weight_gradients + of_rank.of_experts + std::max(rows, first_values);
    all.of(MemoryCategory::Communication) +=
        network_bytes(s, compute.linked, layout, schedule, rank, travelling);
    return all;
}

MemoryEstimate estimate_memory(const ModelConfig& m, const TrainingShape& shape,
                               const RunLayout& layout, std::uint64_t rank,
                               const ComputeMemory& compute, LayerTable kinds) {
    const auto ranks = static_cast<int>(layout.pp * layout.dp);
    return estimate_memory(m, shape, layout, Topology::blocks(ranks, ranks), rank, compute, kinds);
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
