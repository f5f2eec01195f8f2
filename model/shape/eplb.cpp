// SPDX-License-Identifier: MIT
#include <bellows/shape/eplb.hpp>

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <string>

namespace bellows {

namespace {

[[noreturn]] void refuse(const std::string& why) {
    throw Error(ErrorCode::InvalidArgument, "balancing experts: " + why);
}

std::string text(std::uint64_t value) {
    return std::to_string(value);
}

void check_loads(std::span<const double> loads) {
    if (loads.empty() || loads.size() > kMostPlacedExperts)
        refuse("there must be loads of 1 to " + text(kMostPlacedExperts) + " experts, not of " +
               text(loads.size()));
    for (std::size_t expert = 0; expert < loads.size(); ++expert)
        if (!std::isfinite(loads[expert]) || loads[expert] < 0)
            refuse("the load of expert " + text(expert) + " is " + std::to_string(loads[expert]) +
                   "; loads are finite and at least 0");
    if (!std::isfinite(std::accumulate(loads.begin(), loads.end(), 0.0)))
        refuse("the sum of the loads is not finite; divide them by their largest");
}

/// Fewer than 2^32 of anything.
std::uint32_t u32(std::uint64_t value) {
    return static_cast<std::uint32_t>(value);
}

/// Items by descending weight, equals by index.
std::vector<std::uint32_t> heaviest_first(std::span<const double> weights) {
    std::vector<std::uint32_t> order(weights.size());
    std::iota(order.begin(), order.end(), 0u);
    std::ranges::stable_sort(order, std::greater<>{},
                             [&](std::uint32_t item) { return weights[item]; });
    return order;
}

/// Packs with at most `room` items, of which no two in one pack have the same name.
class DistinctPacks {
public:
    DistinctPacks(std::span<const double> weights, std::span<const std::uint32_t> names,
                  std::uint64_t packs, std::uint64_t room)
        : weights_(weights), names_(names), room_(room), items_(packs), loads_(packs, 0.0) {}

    /// There are at most room * packs items, and at most `packs` of one name.
    BalancedPacks pack() {
        if (room_ == 1) // each pack has one: as balanced_packing() does
            for (std::uint32_t item = 0; item < weights_.size(); ++item)
                items_[item].push_back(item);
        else
            for (const std::uint32_t item : heaviest_first(weights_))
                add(item);
        BalancedPacks out;
        out.pack.resize(weights_.size());
        out.place.resize(weights_.size());
        for (std::size_t pack = 0; pack < items_.size(); ++pack)
            for (std::size_t place = 0; place < items_[pack].size(); ++place) {
                out.pack[items_[pack][place]] = u32(pack);
                out.place[items_[pack][place]] = u32(place);
            }
        return out;
    }

private:
    bool holds(std::size_t pack, std::uint32_t name) const {
        return std::ranges::any_of(items_[pack],
                                   [&](std::uint32_t item) { return names_[item] == name; });
    }
    void put(std::uint32_t item, std::size_t pack) {
        items_[pack].push_back(item);
        loads_[pack] += weights_[item];
    }

    void add(std::uint32_t item) {
        std::optional<std::size_t> best;
        for (std::size_t pack = 0; pack < items_.size(); ++pack)
            if (items_[pack].size() < room_ && !holds(pack, names_[item]) &&
                (!best || loads_[pack] < loads_[*best]))
                best = pack;
        if (best)
            put(item, *best);
        else
            make_place(item);
    }

    /// Every pack with room holds the name. Some pack lacks it, as there are no more items of a
    /// name than packs, so that one is full: it has more names than a pack with room, and one of
    /// them is not there.
    void make_place(std::uint32_t item) {
        double lowest = std::numeric_limits<double>::infinity();
        std::size_t from = 0, place = 0, to = 0;
        for (std::size_t open = 0; open < items_.size(); ++open) {
            if (items_[open].size() == room_)
                continue;
            for (std::size_t full = 0; full < items_.size(); ++full) {
                if (items_[full].size() < room_ || holds(full, names_[item]))
                    continue;
                for (std::size_t at = 0; at < room_; ++at) {
                    const std::uint32_t moved = items_[full][at];
                    const double load = std::max(loads_[full] - weights_[moved] + weights_[item],
                                                 loads_[open] + weights_[moved]);
                    if (load < lowest && !holds(open, names_[moved])) {
                        lowest = load;
                        from = full;
                        place = at;
                        to = open;
                    }
                }
            }
        }
        const std::uint32_t moved = items_[from][place];
        items_[from][place] = item;
        loads_[from] += weights_[item] - weights_[moved];
        put(moved, to);
    }

    std::span<const double> weights_;
    std::span<const std::uint32_t> names_;
    std::uint64_t room_;
    std::vector<std::vector<std::uint32_t>> items_; ///< of each pack
    std::vector<double> loads_;
};

/// By node: its logical experts, group by group, ascending by the place that the group has there.
std::vector<std::vector<std::uint32_t>>
experts_of_nodes(std::span<const double> loads, std::uint64_t groups, std::uint64_t nodes) {
    const std::uint64_t size = loads.size() / groups;
    std::vector<double> sums(groups, 0.0);
    for (std::size_t expert = 0; expert < loads.size(); ++expert)
        sums[expert / size] += loads[expert];
    const BalancedPacks packs = balanced_packing(sums, nodes);
    std::vector<std::vector<std::uint32_t>> experts(
        nodes, std::vector<std::uint32_t>(loads.size() / nodes));
    for (std::size_t expert = 0; expert < loads.size(); ++expert) {
        const std::size_t group = expert / size;
        experts[packs.pack[group]][packs.place[group] * size + expert % size] = u32(expert);
    }
    return experts;
}

void check_sizes(std::uint64_t experts, const EplbOptions& options) {
    if (options.groups == 0 || options.nodes == 0 || options.ranks == 0)
        refuse("groups, nodes and ranks are at least 1, not " + text(options.groups) + ", " +
               text(options.nodes) + " and " + text(options.ranks));
    if (options.replicas < experts)
        refuse(text(experts) + " experts need at least as many slots, not " +
               text(options.replicas));
    if (options.ranks > kMostExpertSlots || options.replicas > kMostExpertSlots ||
        options.ranks * div_up(options.replicas, options.ranks) > kMostExpertSlots)
        refuse("ranks may have " + text(kMostExpertSlots) + " slots together, which " +
               text(options.replicas) + " replicas on " + text(options.ranks) + " ranks go beyond");
    if (!is_hierarchical(options))
        return;
    if (experts % options.groups != 0)
        refuse(text(options.groups) + " groups do not divide " + text(experts) +
               " experts; groups are of equal size, and without groups there is 1");
    if (options.ranks % options.nodes != 0)
        refuse(text(options.nodes) + " nodes do not divide " + text(options.ranks) +
               " ranks; nodes have as many ranks each, and 1 node leaves them out of account");
}

} // namespace

BalancedPacks balanced_packing(std::span<const double> weights, std::uint64_t packs) {
    if (packs == 0 || weights.size() % packs != 0)
        refuse(text(packs) + " packs do not divide " + text(weights.size()) +
               " items; packs are of equal size");
    const std::uint64_t room = weights.size() / packs;
    BalancedPacks out{std::vector<std::uint32_t>(weights.size(), 0),
                      std::vector<std::uint32_t>(weights.size(), 0)};
    if (room == 1) {
        std::iota(out.pack.begin(), out.pack.end(), 0u);
        return out;
    }
    std::vector<double> loads(packs, 0.0);
    std::vector<std::uint32_t> items(packs, 0);
    for (const std::uint32_t item : heaviest_first(weights)) {
        std::optional<std::size_t> best;
        for (std::size_t pack = 0; pack < packs; ++pack)
            if (items[pack] < room && (!best || loads[pack] < loads[*best]))
                best = pack;
        out.pack[item] = u32(*best);
        out.place[item] = items[*best]++;
        loads[*best] += weights[item];
    }
    return out;
}

ExpertReplicas replicate_experts(std::span<const double> loads, std::uint64_t replicas,
                                 std::uint64_t most) {
    check_loads(loads);
    if (replicas < loads.size() || most == 0)
        refuse(text(loads.size()) + " experts need at least one replica each, not " +
               text(replicas) + " in all");
    ExpertReplicas out;
    out.expert.resize(loads.size());
    std::iota(out.expert.begin(), out.expert.end(), 0u);
    out.replica.resize(loads.size(), 0);
    out.count.resize(loads.size(), 1);
    while (out.expert.size() < replicas) {
        std::optional<std::size_t> hottest;
        for (std::size_t expert = 0; expert < loads.size(); ++expert)
            if (out.count[expert] < most && (!hottest || loads[expert] / out.count[expert] >
                                                             loads[*hottest] / out.count[*hottest]))
                hottest = expert;
        if (!hottest)
            break;
        out.expert.push_back(u32(*hottest));
        out.replica.push_back(out.count[*hottest]++);
    }
    return out;
}

bool is_hierarchical(const EplbOptions& options) noexcept {
    return options.nodes > 0 && options.groups % options.nodes == 0;
}

BalancedExperts rebalance_experts(std::span<const double> loads, const EplbOptions& options) {
    check_loads(loads);
    check_sizes(loads.size(), options);
    const bool hierarchical = is_hierarchical(options);
    const std::uint64_t groups = hierarchical ? options.groups : 1;
    const std::uint64_t nodes = hierarchical ? options.nodes : 1;
    const std::uint64_t ranks_of_node = options.ranks / nodes;
    const std::uint64_t room = div_up(options.replicas, options.ranks);
    const bool distinct = options.distinct || options.replicas % options.ranks != 0;

    BalancedExperts out;
    out.placement = {loads.size(), options.ranks, room,
                     std::vector<std::int32_t>(options.ranks * room, kFreeSlot)};
    out.replica_of_slot.assign(options.ranks * room, -1);
    const std::vector<std::vector<std::uint32_t>> experts = experts_of_nodes(loads, groups, nodes);
    for (std::uint64_t node = 0; node < nodes; ++node) {
        std::vector<double> own;
        for (const std::uint32_t expert : experts[node])
            own.push_back(loads[expert]);
        const ExpertReplicas replicas =
            distinct ? replicate_experts(own, share_of(options.replicas, nodes, node).count,
                                         ranks_of_node)
                     : replicate_experts(own, options.replicas / nodes);
        std::vector<double> shares;
        for (const std::uint32_t expert : replicas.expert)
            shares.push_back(own[expert] / replicas.count[expert]);
        const BalancedPacks packs =
            distinct ? DistinctPacks(shares, replicas.expert, ranks_of_node, room).pack()
                     : balanced_packing(shares, ranks_of_node);
        for (std::size_t i = 0; i < shares.size(); ++i) {
            const std::uint64_t rank = node * ranks_of_node + packs.pack[i];
            const std::uint64_t slot = rank * room + packs.place[i];
            out.placement.expert_of_slot[slot] =
                static_cast<std::int32_t>(experts[node][replicas.expert[i]]);
            out.replica_of_slot[slot] = static_cast<std::int32_t>(replicas.replica[i]);
        }
    }
    return out;
}

} // namespace bellows
