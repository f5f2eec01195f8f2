// SPDX-License-Identifier: MIT
#include <bellows/model/node.hpp>

#include <utility>

namespace bellows {

void LayerSlot::add_recording(NodeKind kind, std::string name, Recording recording) {
    recordings_.push_back(std::make_unique<Recording>(std::move(recording)));
    Recording* kept = recordings_.back().get();
    add_node({std::move(name), kind, [kept] { return kept->device().submit(*kept); }});
}

} // namespace bellows
