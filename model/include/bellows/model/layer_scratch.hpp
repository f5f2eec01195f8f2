// SPDX-License-Identifier: MIT
#pragma once

// What the layers of a stage compute in, one node after another, and where: nodes need their
// scratch while they run, and the queue that runs them. Weight gradients may have both for
// themselves, so that they run beside what the next layer's gradient waits for.

#include <bellows/engine/arena.hpp>
#include <bellows/model/node.hpp>

#include <cstdint>
#include <optional>

namespace bellows {

struct LayerQueues {
    QueueRole compute = QueueRole::Compute;          ///< forwards and input gradients
    QueueRole weight_gradients = QueueRole::Compute; ///< scratch of their own, if another VkQueue
};

class LayerScratch {
public:
    /// Outlives the slots of its layers.
    explicit LayerScratch(Device& device, const LayerQueues& queues = {})
        : arena_(device, "scratch", MemoryCategory::Scratch, queues.compute) {
        if (device.distinct_queues(queues.compute, queues.weight_gradients))
            of_weight_gradients_.emplace(device, "scratch of weight gradients",
                                         MemoryCategory::Scratch, queues.weight_gradients);
    }

    Arena& of(NodeKind kind) noexcept {
        return kind == NodeKind::WeightGradient && of_weight_gradients_ ? *of_weight_gradients_
                                                                        : arena_;
    }
    /// Bytes of both.
    std::uint64_t size() const noexcept {
        return arena_.size() + (of_weight_gradients_ ? of_weight_gradients_->size() : 0);
    }

private:
    Arena arena_;
    std::optional<Arena> of_weight_gradients_;
};

} // namespace bellows
