// SPDX-License-Identifier: MIT
#include <bellows/model/node.hpp>

#include <utility>

namespace bellows {

void LayerSlot::add_recording(Node node, Recording recording) {
    recordings_.push_back(std::make_unique<Recording>(std::move(recording)));
    node.submit = [kept = recordings_.back().get()](std::span<const TimePoint> waits) {
        return kept->device().submit(*kept, waits);
    };
    add_node(std::move(node));
}

} // namespace bellows
