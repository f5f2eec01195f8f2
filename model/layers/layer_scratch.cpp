// SPDX-License-Identifier: MIT
#include <bellows/model/layer_scratch.hpp>

#include <utility>

namespace bellows {

WeightGradientScratch::WeightGradientScratch(Device& device)
    : others_(device, "scratch of weight gradients", MemoryCategory::Scratch,
              QueueRole::ComputeDeferred) {
    if (device.distinct_queues(QueueRole::ComputeDeferred, QueueRole::ComputeDeferredBeside))
        of_experts_.emplace(device, "scratch of experts' weight gradients", MemoryCategory::Scratch,
                            QueueRole::ComputeDeferredBeside);
}

Arena& LayerScratch::arena_of(const NodeInfo& node) noexcept {
    if (node.kind != NodeKind::WeightGradient || of_weight_gradients_ == nullptr)
        return arena_;
    return node.of_experts ? of_weight_gradients_->of_experts() : of_weight_gradients_->of_others();
}

Recording LayerScratch::record(const NodeInfo& node, std::string name, const Work& work) {
    Arena& arena = arena_of(node);
    Recording recording(device_, arena.queue(), std::move(name));
    recording.label(node.name);
    Arena::Frame frame = arena.begin();
    work(recording, frame);
    if (frame.bytes() > 0)
        arena.reserve(frame.bytes());
    return recording;
}

} // namespace bellows
