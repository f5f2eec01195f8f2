// SPDX-License-Identifier: MIT
#pragma once

// What the layers of a stage compute in, one node after another, and where: nodes need their
// scratch while they run, and the queue that runs them. Weight gradients may have both for
// themselves, so that they run beside what the next layer's gradient waits for.

#include <bellows/engine/arena.hpp>
#include <bellows/model/node.hpp>

#include <cstdint>

namespace bellows {

class LayerScratch {
public:
    /// Outlives the slots of its layers. of_weight_gradients: for these alone, of several stages if
    /// its queue is theirs; must outlive it. Null: they are as other nodes.
    explicit LayerScratch(Device& device, QueueRole queue = QueueRole::Compute,
                          Arena* of_weight_gradients = nullptr)
        : arena_(device, "scratch", MemoryCategory::Scratch, queue),
          of_weight_gradients_(of_weight_gradients) {}

    Arena& of(NodeKind kind) noexcept {
        return kind == NodeKind::WeightGradient && of_weight_gradients_ != nullptr
                   ? *of_weight_gradients_
                   : arena_;
    }
    /// Bytes of its own.
    std::uint64_t size() const noexcept { return arena_.size(); }

private:
    Arena arena_;
    Arena* of_weight_gradients_;
};

} // namespace bellows
