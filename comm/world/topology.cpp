// SPDX-License-Identifier: MIT
#include <bellows/comm/topology.hpp>

#include <bellows/base/error.hpp>

#include <algorithm>
#include <map>
#include <numeric>
#include <string>

namespace bellows {
namespace {

void require_below(int value, int limit, const char* what) {
    if (value < 0 || value >= limit)
        throw Error(ErrorCode::InvalidArgument, std::string(what) + " " + std::to_string(value) +
                                                    " does not exist: there are " +
                                                    std::to_string(limit));
}

} // namespace

Topology::Topology(std::span<const int> node_labels) {
    if (node_labels.empty())
        throw Error(ErrorCode::InvalidArgument, "a topology needs at least one rank");
    std::map<int, int> node_of_label;
    for (int rank = 0; rank < static_cast<int>(node_labels.size()); ++rank) {
        const auto [entry, is_new] = node_of_label.emplace(
            node_labels[static_cast<std::size_t>(rank)], static_cast<int>(ranks_of_node_.size()));
        if (is_new)
            ranks_of_node_.emplace_back();
        auto& members = ranks_of_node_[static_cast<std::size_t>(entry->second)];
        node_of_rank_.push_back(entry->second);
        local_rank_.push_back(static_cast<int>(members.size()));
        members.push_back(rank);
    }
}

Topology Topology::blocks(int size, int ranks_per_node) {
    if (size < 1 || ranks_per_node < 1)
        throw Error(ErrorCode::InvalidArgument,
                    std::to_string(size) + " ranks cannot be put on nodes of " +
                        std::to_string(ranks_per_node) + " ranks; both must be at least 1");
    std::vector<int> labels(static_cast<std::size_t>(size));
    for (int rank = 0; rank < size; ++rank)
        labels[static_cast<std::size_t>(rank)] = rank / ranks_per_node;
    return Topology(labels);
}

int Topology::node(int rank) const {
    require_below(rank, size(), "rank");
    return node_of_rank_[static_cast<std::size_t>(rank)];
}

int Topology::local_rank(int rank) const {
    require_below(rank, size(), "rank");
    return local_rank_[static_cast<std::size_t>(rank)];
}

int Topology::local_size(int rank) const {
    return static_cast<int>(ranks_of_node(node(rank)).size());
}

std::span<const int> Topology::ranks_of_node(int node) const {
    require_below(node, num_nodes(), "node");
    return ranks_of_node_[static_cast<std::size_t>(node)];
}

Group::Group(std::vector<int> ranks) : ranks_(std::move(ranks)) {
    const bool ascending =
        std::adjacent_find(ranks_.begin(), ranks_.end(), std::greater_equal<>{}) == ranks_.end();
    if (ranks_.empty() || ranks_.front() < 0 || !ascending)
        throw Error(
            ErrorCode::InvalidArgument,
            "a group of ranks must be non-empty, without negative ranks, and ascend strictly");
}

Group Group::all(int world_size) {
    std::vector<int> ranks(static_cast<std::size_t>(std::max(world_size, 0)));
    std::iota(ranks.begin(), ranks.end(), 0);
    return Group(std::move(ranks));
}

int Group::rank_at(int index) const {
    require_below(index, size(), "group member");
    return ranks_[static_cast<std::size_t>(index)];
}

int Group::index_of(int rank) const noexcept {
    const auto at = std::lower_bound(ranks_.begin(), ranks_.end(), rank);
    return at != ranks_.end() && *at == rank ? static_cast<int>(at - ranks_.begin()) : -1;
}

} // namespace bellows
