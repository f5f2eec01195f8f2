// SPDX-License-Identifier: MIT
#pragma once

// Which rank lives on which node, and ordered groups of ranks: plain values, the same on every
// rank, made once at set-up. Nodes are numbered by their lowest rank, ranks of a node in ascending
// order.

#include <span>
#include <vector>

namespace bellows {

class Topology {
public:
    /// node_labels[r]: any label that is equal exactly for ranks of one node.
    /// Throws Error{InvalidArgument} if there is no rank.
    explicit Topology(std::span<const int> node_labels);

    /// Nodes of `ranks_per_node` consecutive ranks each, the last one possibly smaller.
    /// Throws Error{InvalidArgument} unless both are at least 1.
    static Topology blocks(int size, int ranks_per_node);

    int size() const noexcept { return static_cast<int>(node_of_rank_.size()); }
    int num_nodes() const noexcept { return static_cast<int>(ranks_of_node_.size()); }

    /// Throw Error{InvalidArgument} for a rank or node that does not exist.
    int node(int rank) const;
    int local_rank(int rank) const;
    int local_size(int rank) const;
    std::span<const int> ranks_of_node(int node) const;
    bool same_node(int rank, int other) const { return node(rank) == node(other); }

private:
    std::vector<int> node_of_rank_;
    std::vector<int> local_rank_;
    std::vector<std::vector<int>> ranks_of_node_;
};

/// A non-empty set of world ranks in ascending order: the members of a collective.
class Group {
public:
    /// Throws Error{InvalidArgument} unless the ranks ascend strictly and none is negative.
    explicit Group(std::vector<int> ranks);

    static Group all(int world_size);

    int size() const noexcept { return static_cast<int>(ranks_.size()); }
    std::span<const int> ranks() const noexcept { return ranks_; }
    /// World rank of the member with this index; throws Error{InvalidArgument} beyond the end.
    int rank_at(int index) const;
    /// Position of a world rank in the group, or -1.
    int index_of(int rank) const noexcept;
    bool contains(int rank) const noexcept { return index_of(rank) >= 0; }
    bool operator==(const Group&) const = default;

private:
    std::vector<int> ranks_;
};

} // namespace bellows
