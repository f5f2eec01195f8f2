// SPDX-License-Identifier: MIT
#pragma once

// What the layers of a stage compute in, one node after another, and where: nodes need their
// scratch while they run, and the queue that runs them. Weight gradients may have both for
// themselves, so that they run beside what the next layer's gradient waits for.

#include <bellows/engine/arena.hpp>
#include <bellows/model/node.hpp>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace bellows {

/// Of weight gradients, on ComputeDeferred: those of experts, which are most of them, beside the
/// others where ComputeDeferredBeside is another queue.
class WeightGradientScratch {
public:
    explicit WeightGradientScratch(Device& device);

    Arena& of_experts() noexcept { return of_experts_ ? *of_experts_ : others_; }
    Arena& of_others() noexcept { return others_; }

private:
    Arena others_;
    std::optional<Arena> of_experts_;
};

class LayerScratch {
public:
    using Work = std::function<void(Recording&, Arena::Frame&)>;

    /// Outlives the slots of its layers. of_weight_gradients: for these alone, of several stages if
    /// its queues are theirs; must outlive it. Null: they are as other nodes.
    explicit LayerScratch(Device& device, QueueRole queue = QueueRole::Compute,
                          WeightGradientScratch* of_weight_gradients = nullptr)
        : device_(device), arena_(device, "scratch", MemoryCategory::Scratch, queue),
          of_weight_gradients_(of_weight_gradients) {}

    /// Records what a node does, for its queue and in its scratch. node: for its kind, and its name
    /// in the trace.
    Recording record(const NodeInfo& node, std::string name, const Work& work);
    /// Bytes of its own.
    std::uint64_t size() const noexcept { return arena_.size(); }

private:
    Arena& arena_of(const NodeInfo& node) noexcept;

    Device& device_;
    Arena arena_;
    WeightGradientScratch* of_weight_gradients_;
};

} // namespace bellows
