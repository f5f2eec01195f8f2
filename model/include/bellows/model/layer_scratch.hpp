// SPDX-License-Identifier: MIT
#pragma once

// What the layers of a stage compute in, one node after another, and where: nodes need their
// scratch while they run, and the queue that runs them. Weight gradients may have both for
// themselves, so that they run beside what the next layer's gradient waits for.

#include <bellows/engine/arena.hpp>
#include <bellows/model/node.hpp>

#include <cstdint>
#include <functional>
#include <string>

namespace bellows {

class LayerScratch {
public:
    using Work = std::function<void(Recording&, Arena::Frame&)>;

    /// Outlives the slots of its layers. of_weight_gradients: for these alone, of several stages if
    /// its queue is theirs; must outlive it. Null: they are as other nodes.
    explicit LayerScratch(Device& device, QueueRole queue = QueueRole::Compute,
                          Arena* of_weight_gradients = nullptr)
        : device_(device), arena_(device, "scratch", MemoryCategory::Scratch, queue),
          of_weight_gradients_(of_weight_gradients) {}

    /// What a node of this kind does, for its queue and in its scratch. label: in the trace.
    Recording record(NodeKind kind, std::string name, const std::string& label, const Work& work);
    /// Bytes of its own.
    std::uint64_t size() const noexcept { return arena_.size(); }

private:
    Device& device_;
    Arena arena_;
    Arena* of_weight_gradients_;
};

} // namespace bellows
