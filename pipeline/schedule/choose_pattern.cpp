// SPDX-License-Identifier: MIT
// The search for the order in which the nodes of a pair of layers hide most.

#include "pair_parts.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <limits>
#include <optional>
#include <random>
#include <utility>

namespace bellows {

namespace {

constexpr double kGain = 1e-3; ///< what is shorter by less than this share counts as equal
constexpr double kRounding = 1e-9;
/// What a search tries: patterns, and nodes of all of them together.
constexpr std::size_t kMostPatterns = 1000, kMostNodes = 60'000;

/// As a backward follows a forward; each name as often as a layer has it.
PairPattern names_of(const PairNodes& layer) {
    PairPattern names;
    for (std::size_t part = 0; part < kNumPairParts; ++part)
        for (const PairNode& node : nodes_of(layer, part))
            names.push_back(node.name);
    return names;
}

/// DeepSeek-V3's order (report, figure 4), with each exchange right behind what it needs; its
/// DISPATCH(B) is COMBINE(B) here, as gradients go to the experts first. A name that it does not
/// have stays behind the one before it.
PairPattern published_pattern(const PairPattern& names) {
    static const PairPattern kOrder = parse_pattern(
        "DISPATCH(B) ATTN(F) ROUTER(F) DISPATCH(F) SHARED(F) SHARED(B) MLP(B) FFN(B) COMBINE(B) "
        "ROUTER(B) MLP(W) SHARED(W) FFN(W) MLP(F) FFN(F) COMBINE(F) ATTN(B) ATTN(W)");
    PairPattern pattern;
    for (const std::string& name : kOrder)
        pattern.insert(pattern.end(), static_cast<std::size_t>(std::ranges::count(names, name)),
                       name);
    for (std::size_t i = 0; i < names.size(); ++i) {
        if (std::ranges::find(kOrder, names[i]) != kOrder.end())
            continue;
        const auto before = i == 0 ? pattern.end() : std::ranges::find(pattern, names[i - 1]);
        pattern.insert(before == pattern.end() ? pattern.begin() : before + 1, names[i]);
    }
    return pattern;
}

/// List scheduling: the node next that could begin first, of several at once the one of the part
/// of which most is left, weight gradients last.
class EagerOrder {
public:
    explicit EagerOrder(const PairNodes& nodes) : nodes_(nodes) {
        for (const PairPart part : {kForward, kInput})
            for (const PairNode& node : nodes_of(nodes, part))
                left_[part] += node.seconds;
    }

    PairOrder run() {
        for (std::optional<PairPart> part = first(); part; part = first())
            hand_in(*part);
        return std::move(order_);
    }

private:
    const PairNode& next_of(PairPart part) const { return nodes_of(nodes_, part)[next_[part]]; }
    double& free_of(PairPart part) {
        return free_[static_cast<std::size_t>(next_of(part).resource)];
    }

    double start_of(PairPart part) {
        const PairNeeds needs = needs_of(nodes_, part, next_[part]);
        return std::max(free_of(part), until_[needs.part][needs.count]);
    }

    std::optional<PairPart> first() {
        std::optional<PairPart> best;
        for (const PairPart part : {kForward, kInput, kWeight}) {
            if (next_[part] == nodes_of(nodes_, part).size() ||
                (part == kWeight && next_of(part).after > next_[kInput]))
                continue;
            if (!best) {
                best = part;
                continue;
            }
            const double lead = start_of(*best) - start_of(part);
            const double tie = kRounding * (left_[kForward] + left_[kInput]);
            if (lead > tie || (lead > -tie && left_[part] > left_[*best] + tie))
                best = part;
        }
        return best;
    }

    void hand_in(PairPart part) {
        const double end = start_of(part) + next_of(part).seconds;
        free_of(part) = end;
        until_[part].push_back(std::max(until_[part].back(), end));
        if (part != kWeight)
            left_[part] -= next_of(part).seconds;
        ++next_[part];
        order_.push_back(kKindOfPart[part]);
    }

    const PairNodes& nodes_;
    std::array<std::size_t, kNumPairParts> next_{};
    std::array<double, kNumPairParts> left_{};
    std::array<double, 2> free_{};                                          ///< of a resource
    std::array<std::vector<double>, kNumPairParts> until_{{{0}, {0}, {0}}}; ///< [part][first k]
    PairOrder order_;
};

/// The order in which list scheduling hands in the middle layers' nodes.
PairPattern eager_pattern(const PairNodes& layer, std::size_t layers) {
    PairPattern pattern;
    std::array<std::size_t, kNumPairParts> next{};
    for (const OpKind kind : EagerOrder(repeated(layer, layers)).run()) {
        const auto part =
            static_cast<std::size_t>(std::ranges::find(kKindOfPart, kind) - kKindOfPart.begin());
        const auto& nodes = nodes_of(layer, part);
        const std::size_t index = next[part]++;
        if (index / nodes.size() == layers / 2)
            pattern.push_back(nodes[index % nodes.size()].name);
    }
    return pattern;
}

/// The best pattern so far, and how many may still be tried.
class Search {
public:
    /// bound: what no pattern is shorter than.
    Search(const PairNodes& nodes, std::size_t num_nodes, double bound)
        : nodes_(nodes), bound_(bound), left_(std::min(kMostPatterns, kMostNodes / num_nodes)) {}

    /// From a pattern to better ones as long as there are. The first counts in any case.
    void descend(PairPattern pattern) {
        double time = time_of(pattern);
        while (improve(pattern, time)) {
        }
        if (is_shorter(time, time_)) {
            time_ = time;
            best_ = std::move(pattern);
        }
    }

    /// From neighbours of the best, which are a few exchanged names away, until all is tried.
    void wander() {
        std::minstd_rand random; // the same everywhere
        while (!ends(time_) && best_.size() > 1) {
            constexpr int kSwaps = 3;
            PairPattern pattern = best_;
            for (int i = 0; i < kSwaps; ++i) {
                std::string& name = pattern[random() % pattern.size()];
                std::swap(name, pattern[random() % pattern.size()]);
            }
            spend();
            descend(std::move(pattern));
        }
    }

    double time() const { return time_; }
    PairPattern take() { return std::move(best_); }

private:
    double time_of(const PairPattern& pattern) const {
        return simulate_pair(nodes_, interleave(nodes_, pattern)).time;
    }
    static bool is_shorter(double time, double than) { return time < than * (1 - kGain); }
    bool ends(double time) const { return left_ == 0 || !is_shorter(bound_, time); }
    void spend() { --left_; }

    bool take_if_shorter(PairPattern& pattern, double& time, PairPattern tried) {
        if (ends(time) || tried == pattern)
            return false;
        spend();
        const double now = time_of(tried);
        if (!is_shorter(now, time))
            return false;
        time = now;
        pattern = std::move(tried);
        return true;
    }

    /// Another place to begin the round, a name at another place, two that change places.
    bool improve(PairPattern& pattern, double& time) {
        bool improved = false;
        const auto at = [](PairPattern& of, std::size_t index) {
            return of.begin() + static_cast<std::ptrdiff_t>(index);
        };
        for (std::size_t from = 0; from < pattern.size(); ++from) {
            PairPattern turned = pattern;
            std::rotate(turned.begin(), at(turned, from), turned.end());
            improved |= take_if_shorter(pattern, time, std::move(turned));
            for (std::size_t to = 0; to < pattern.size(); ++to) {
                PairPattern moved = pattern;
                if (from < to)
                    std::rotate(at(moved, from), at(moved, from + 1), at(moved, to + 1));
                else
                    std::rotate(at(moved, to), at(moved, from), at(moved, from + 1));
                improved |= take_if_shorter(pattern, time, std::move(moved));
                PairPattern swapped = pattern;
                std::swap(swapped[from], swapped[to]);
                if (from + 1 < to)
                    improved |= take_if_shorter(pattern, time, std::move(swapped));
            }
        }
        return improved;
    }

    const PairNodes& nodes_;
    double bound_;
    std::size_t left_;
    PairPattern best_;
    double time_ = std::numeric_limits<double>::infinity();
};

} // namespace

PairPattern choose_pattern(const PairNodes& layer, std::size_t layers) {
    const PairPattern names = names_of(layer);
    if (names.empty() || layers == 0)
        throw Error(ErrorCode::InvalidArgument, "a pair without nodes has no order to choose");
    const PairNodes nodes = repeated(layer, layers);
    const PairTimes apart = simulate_pair(nodes, one_after_the_other(nodes));
    Search search(nodes, layers * names.size(), std::max(apart.compute, apart.exchange));
    search.descend(published_pattern(names));
    search.descend(eager_pattern(layer, layers));
    search.descend(names);
    search.wander();
    if (search.time() <= apart.time * (1 + kRounding))
        return search.take();
    // The first part by its last name; the rest, unnamed, comes one after the other.
    const std::size_t first = !layer.forward.empty()          ? layer.forward.size()
                              : !layer.input_gradient.empty() ? layer.input_gradient.size()
                                                              : names.size();
    return {names[first - 1]};
}

} // namespace bellows
