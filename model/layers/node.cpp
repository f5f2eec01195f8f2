// SPDX-License-Identifier: MIT
#include <bellows/model/node.hpp>

#include <algorithm>
#include <utility>

namespace bellows {

void LayerSlot::add_recording(const NodeInfo& node, Recording recording) {
    recordings_.push_back(std::make_unique<Recording>(std::move(recording)));
    add_node({node, [kept = recordings_.back().get()](std::span<const TimePoint> waits) {
                  return kept->device().submit(*kept, waits);
              }});
}

NodeLists::NodeLists(std::span<const std::unique_ptr<LayerSlot>> slots)
    : last_weight_gradient_(slots.size()) {
    const auto collect = [&](NodeKind kind, const LayerSlot& slot) {
        for (const Node& node : slot.nodes(kind))
            nodes_[static_cast<std::size_t>(kind)].push_back(&node);
    };
    for (const auto& slot : slots)
        collect(NodeKind::Forward, *slot);
    for (std::size_t i = slots.size(); i-- > 0;) {
        const LayerSlot& slot = *slots[i];
        const std::size_t before = of(NodeKind::InputGradient).size();
        const std::size_t own = slot.nodes(NodeKind::InputGradient).size();
        collect(NodeKind::InputGradient, slot);
        collect(NodeKind::WeightGradient, slot);
        for (const Node& node : slot.nodes(NodeKind::WeightGradient))
            after_.push_back(before + std::min(own, node.after));
        last_weight_gradient_[i] = after_.empty() ? 0 : after_.size() - 1;
    }
}

std::vector<PairNode> NodeLists::pair_nodes(NodeKind kind) const {
    std::vector<PairNode> pair;
    for (const Node* node : of(kind))
        pair.push_back({.name = node->name,
                        .resource = node->resource,
                        .beside_exchange = node->beside_exchange,
                        .after = kind == NodeKind::WeightGradient ? after_[pair.size()] : 0});
    return pair;
}

} // namespace bellows
