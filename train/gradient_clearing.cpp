// SPDX-License-Identifier: MIT
#include "gradient_clearing.hpp"

#include <bellows/engine/device.hpp>

#include <algorithm>
#include <optional>

namespace bellows {

namespace {

constexpr std::uint64_t kAlignment = 1024; // elements that a piece begins at a multiple of

} // namespace

std::vector<std::size_t> nodes_behind_exchanges(std::span<const Node* const> nodes) {
    const auto is_exchange = [&](std::size_t i) {
        return nodes[i]->resource == NodeResource::Exchange;
    };
    const auto is_beside = [&](std::size_t i) {
        return i > 0 && is_exchange(i - 1) && nodes[i]->beside_exchange;
    };
    std::vector<std::size_t> behind;
    for (std::size_t i = 1; i < nodes.size(); ++i)
        if (!is_exchange(i) && !is_beside(i) && (is_exchange(i - 1) || is_beside(i - 1)))
            behind.push_back(i);
    return behind;
}

GradientClearing::GradientClearing(const ParameterStore& parameters,
                                   std::span<const Node* const> nodes)
    : device_(parameters.device()) {
    std::vector<std::size_t> places = nodes_behind_exchanges(nodes);
    if (places.empty()) {
        fills_ = false;
        places.push_back(0);
    }
    const TensorView gradients = parameters.flat_gradients();
    const std::uint64_t all = gradients.num_elements();
    const std::uint64_t most =
        (all / places.size() + kAlignment) / kAlignment * kAlignment; // of a piece
    std::uint64_t first = 0;
    for (const std::size_t place : places) {
        const std::uint64_t count = std::min(most, all - first);
        if (count == 0)
            break;
        auto piece =
            std::make_unique<Recording>(device_, QueueRole::ComputeDeferred, "clear gradients");
        piece->fill(gradients.rows(first, count).buffer, 0);
        pieces_.push_back({place, std::move(piece)});
        first += count;
    }
}

void GradientClearing::hand_in(std::span<const TimePoint> waits) {
    std::optional<TracedAs> nothing;
    if (!fills_)
        nothing.emplace(device_, "");
    device_.submit(*pieces_[next_].recording, waits);
    ++next_;
}

void GradientClearing::before(std::size_t node, const TimePoint& behind) {
    while (next_ < pieces_.size() && pieces_[next_].before <= node)
        hand_in({&behind, 1});
}

void GradientClearing::finish() {
    while (next_ < pieces_.size())
        hand_in({});
}

} // namespace bellows
