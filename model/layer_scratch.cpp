// SPDX-License-Identifier: MIT
#include <bellows/model/layer_scratch.hpp>

#include <utility>

namespace bellows {

Recording LayerScratch::record(NodeKind kind, std::string name, const std::string& label,
                               const Work& work) {
    Arena& arena = kind == NodeKind::WeightGradient && of_weight_gradients_ != nullptr
                       ? *of_weight_gradients_
                       : arena_;
    Recording recording(device_, arena.queue(), std::move(name));
    recording.label(label);
    Arena::Frame frame = arena.begin();
    work(recording, frame);
    if (frame.bytes() > 0)
        arena.reserve(frame.bytes());
    return recording;
}

} // namespace bellows
