// SPDX-License-Identifier: MIT
#include "pair_parts.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <sstream>
#include <string_view>
#include <unordered_set>
#include <utility>

namespace bellows {

namespace {

[[noreturn]] void refuse(const std::string& why) {
    throw Error(ErrorCode::InvalidArgument, why);
}

constexpr std::array<const char*, kNumPairParts> kNameEnds = {"(F)", "(B)", "(W)"};

PairPart part_of(OpKind kind) {
    const auto found = std::ranges::find(kKindOfPart, kind);
    if (found == kKindOfPart.end())
        refuse("a pair's order is of forwards, input gradients and weight gradients");
    return static_cast<PairPart>(found - kKindOfPart.begin());
}

PairPart part_of(const std::string& name) {
    for (std::size_t part = 0; part < kNumPairParts; ++part)
        if (name.size() > 3 && name.ends_with(kNameEnds[part]))
            return static_cast<PairPart>(part);
    refuse("the order of a pair's nodes has " + in_quotes(name) +
           ", whose end is none of (F), (B) and (W)");
}

void check_needs(const PairNodes& nodes) {
    for (const PairNode& node : nodes.weight_gradient)
        if (node.after > nodes.input_gradient.size())
            refuse(node.name + " needs " + std::to_string(node.after) + " input gradients of " +
                   std::to_string(nodes.input_gradient.size()));
}

/// Hands nodes in as a pattern tells.
class Interleaving {
public:
    Interleaving(const PairNodes& nodes, const PairPattern& pattern)
        : nodes_(nodes), pattern_(pattern), names_(pattern.begin(), pattern.end()) {}

    PairOrder run() {
        for (std::size_t before = order_.size() + 1; before != order_.size();) {
            before = order_.size();
            for (const std::string& name : pattern_)
                go(name);
        }
        for (std::size_t part = 0; part < kNumPairParts; ++part)
            hand_in(static_cast<PairPart>(part), nodes_of(nodes_, part).size());
        return std::move(order_);
    }

private:
    /// Up to and with the part's next node of that name, if there is one.
    void go(const std::string& name) {
        const PairPart part = part_of(name);
        const auto& nodes = nodes_of(nodes_, part);
        const auto next = std::find_if(nodes.begin() + static_cast<std::ptrdiff_t>(next_[part]),
                                       nodes.end(), [&](const auto& n) { return n.name == name; });
        if (next == nodes.end())
            return;
        hand_in(part, static_cast<std::size_t>(next - nodes.begin()) + 1);
        hand_in(part, behind_exchanges(part));
        if (part == kWeight) // it may have brought input gradients along
            hand_in(kInput, behind_exchanges(kInput));
    }

    /// Behind the last exchange before the part's next node that the pattern names.
    std::size_t behind_exchanges(PairPart part) const {
        const auto& nodes = nodes_of(nodes_, part);
        std::size_t behind = next_[part];
        for (std::size_t i = behind; i < nodes.size() && !names_.contains(nodes[i].name); ++i)
            if (nodes[i].resource == NodeResource::Exchange)
                behind = i + 1;
        return behind;
    }

    void hand_in(PairPart part, std::size_t until) {
        for (; next_[part] < until; ++next_[part]) {
            if (part == kWeight)
                hand_in(kInput, nodes_.weight_gradient[next_[part]].after);
            order_.push_back(kKindOfPart[part]);
        }
    }

    const PairNodes& nodes_;
    const PairPattern& pattern_;
    std::unordered_set<std::string_view> names_;
    std::array<std::size_t, kNumPairParts> next_{}; ///< of each part
    PairOrder order_;
};

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kRounding = 1e-9; ///< of all nodes' time: what is closer begins at once

/// Runs nodes that are handed in, in the time that each takes.
class PairSimulation {
public:
    PairSimulation(const PairNodes& nodes, const PairOrder& order)
        : done_(order.size()), until_{{{0}, {0}, {0}}} {
        for (const OpKind kind : order) {
            const PairPart part = part_of(kind);
            const std::size_t index = positions_[part].size();
            const PairNode& node = nodes_of(nodes, part)[index];
            const bool computes = node.resource == NodeResource::Compute;
            (computes ? compute_ : exchange_).push_back(handed_.size());
            (computes ? times_.compute : times_.exchange) += node.seconds;
            positions_[part].push_back(handed_.size());
            handed_.push_back({&node, part, needs_of(nodes, part, index)});
        }
        times_.nodes.resize(order.size());
    }

    PairTimes run() {
        do {
            run_exchanges();
        } while (run_compute());
        for (const OpTime& time : times_.nodes)
            times_.time = std::max(times_.time, time.end);
        times_.hidden = overlap();
        return std::move(times_);
    }

    PairTimes run_in_rows(double crowding) {
        std::array<Row, kNumPairParts + 1> rows; // and of exchanges
        for (const std::size_t at : compute_)
            rows[handed_[at].part].nodes.push_back(at);
        Row& exchanges = rows.back();
        exchanges.nodes = exchange_;
        for (double now = 0;;) {
            for (Row& row : rows)
                begin_next(row, now);
            const auto computing = std::count_if(rows.begin(), rows.end() - 1,
                                                 [](const Row& row) { return row.running; });
            if (computing == 0 && !exchanges.running)
                break;
            const auto slowness = [&](const Row& row) {
                return &row == &exchanges ? 1 : 1 + static_cast<double>(computing - 1) * crowding;
            };
            const auto left = [&](const Row& row) { return row.left * slowness(row); };
            double step = kNever;
            for (const Row& row : rows)
                if (row.running)
                    step = std::min(step, left(row));
            if (computing > 0 && exchanges.running)
                times_.hidden += step;
            now += step;
            for (Row& row : rows) {
                if (!row.running)
                    continue;
                if (left(row) <= step) {
                    row.running = false;
                    end_node(row.nodes[row.next++], now);
                } else {
                    row.left -= step / slowness(row);
                }
            }
            times_.time = now;
        }
        return std::move(times_);
    }

private:
    struct Row {
        std::vector<std::size_t> nodes;
        std::size_t next = 0;
        bool running = false; ///< the next
        double left = 0;      ///< of it, if it ran alone
    };

    void begin_next(Row& row, double now) {
        if (row.running || row.next == row.nodes.size() || ready(row.nodes[row.next]) == kNever)
            return;
        row.running = true;
        row.left = handed_[row.nodes[row.next]].node->seconds;
        times_.nodes[row.nodes[row.next]].start = now;
    }

    struct Handed {
        const PairNode* node = nullptr;
        PairPart part = kForward;
        PairNeeds needs;
    };

    double ready(std::size_t at) const {
        const PairNeeds& needs = handed_[at].needs;
        const auto& until = until_[needs.part];
        return needs.count < until.size() ? until[needs.count] : kNever;
    }

    void run_node(std::size_t at, double& free) {
        const double start = times_.nodes[at].start = std::max(free, ready(at));
        free = start + handed_[at].node->seconds;
        end_node(at, free);
    }

    void end_node(std::size_t at, double end) {
        times_.nodes[at].end = end;
        done_[at] = true;
        const auto& positions = positions_[handed_[at].part];
        auto& until = until_[handed_[at].part];
        while (until.size() <= positions.size() && done_[positions[until.size() - 1]])
            until.push_back(std::max(until.back(), times_.nodes[positions[until.size() - 1]].end));
    }

    /// Those of which it is known when they begin.
    void run_exchanges() {
        while (num_exchanged_ < exchange_.size() && ready(exchange_[num_exchanged_]) < kNever)
            run_node(exchange_[num_exchanged_++], exchange_free_);
    }

    /// The one that could begin first. What is not known to be ready yet waits for a compute node
    /// that is still to come, and so cannot be that one. False once there is none.
    bool run_compute() {
        const double tie = kRounding * (times_.compute + times_.exchange);
        auto first = compute_.end();
        for (auto at = compute_.begin(); at != compute_.end(); ++at)
            if (ready(*at) < kNever &&
                (first == compute_.end() || ready(*at) < ready(*first) - tie))
                first = at;
        if (first == compute_.end())
            return false;
        run_node(*first, compute_free_);
        computed_.push_back(*first);
        compute_.erase(first);
        return true;
    }

    /// Of the exchanges with the compute nodes, both of which run one after the other.
    double overlap() const {
        double sum = 0;
        auto at = computed_.begin();
        for (const std::size_t exchange : exchange_) {
            const OpTime& time = times_.nodes[exchange];
            while (at != computed_.end() && times_.nodes[*at].end <= time.start)
                ++at;
            for (auto with = at; with != computed_.end(); ++with) {
                const OpTime& other = times_.nodes[*with];
                if (other.start >= time.end)
                    break;
                sum += std::max(0.0,
                                std::min(time.end, other.end) - std::max(time.start, other.start));
            }
        }
        return sum;
    }

    std::vector<Handed> handed_;                                    ///< in that order
    std::array<std::vector<std::size_t>, kNumPairParts> positions_; ///< there, of a part's nodes
    std::vector<std::size_t> compute_;                              ///< still to run
    std::vector<std::size_t> exchange_, computed_; ///< in the order in which they run
    std::size_t num_exchanged_ = 0;
    std::vector<bool> done_;
    /// [part][k]: when its first k nodes have ended, as far as known.
    std::array<std::vector<double>, kNumPairParts> until_;
    double compute_free_ = 0, exchange_free_ = 0;
    PairTimes times_;
};

void check_seconds(const PairNodes& nodes) {
    double all = 0;
    for (std::size_t part = 0; part < kNumPairParts; ++part)
        for (const PairNode& node : nodes_of(nodes, part)) {
            if (!std::isfinite(node.seconds) || node.seconds < 0)
                refuse("no simulation of a pair: the time of " + node.name +
                       " must be finite and not negative");
            all += node.seconds;
        }
    if (!std::isfinite(all))
        refuse("no simulation of a pair: its nodes' times add up to no finite time");
}

} // namespace

PairOrder one_after_the_other(const PairNodes& nodes) {
    PairOrder order;
    for (std::size_t part = 0; part < kNumPairParts; ++part)
        order.insert(order.end(), nodes_of(nodes, part).size(), kKindOfPart[part]);
    return order;
}

PairOrder interleave(const PairNodes& nodes, const PairPattern& pattern) {
    if (pattern.empty())
        refuse("the order of a pair's nodes is empty");
    check_needs(nodes);
    return Interleaving(nodes, pattern).run();
}

PairNodes repeated(const PairNodes& layer, std::size_t layers) {
    PairNodes nodes;
    for (std::size_t i = 0; i < layers; ++i) {
        nodes.forward.insert(nodes.forward.end(), layer.forward.begin(), layer.forward.end());
        for (PairNode node : layer.weight_gradient) {
            node.after += nodes.input_gradient.size();
            nodes.weight_gradient.push_back(std::move(node));
        }
        nodes.input_gradient.insert(nodes.input_gradient.end(), layer.input_gradient.begin(),
                                    layer.input_gradient.end());
    }
    return nodes;
}

void verify(const PairNodes& nodes, const PairOrder& order) {
    check_needs(nodes);
    std::array<std::size_t, kNumPairParts> next{};
    for (const OpKind kind : order) {
        const PairPart part = part_of(kind);
        if (next[part] == nodes_of(nodes, part).size())
            refuse("an order of a pair has more than its " + std::to_string(next[part]) +
                   " nodes that end in " + kNameEnds[part]);
        const PairNode& node = nodes_of(nodes, part)[next[part]++];
        if (part == kWeight && node.after > next[kInput])
            refuse("an order of a pair has " + node.name + " after " +
                   std::to_string(next[kInput]) + " input gradients; it needs " +
                   std::to_string(node.after));
    }
    for (std::size_t part = 0; part < kNumPairParts; ++part)
        if (next[part] < nodes_of(nodes, part).size())
            refuse("an order of a pair lacks " + nodes_of(nodes, part)[next[part]].name);
}

PairTimes simulate_pair(const PairNodes& nodes, const PairOrder& order) {
    verify(nodes, order);
    check_seconds(nodes);
    return PairSimulation(nodes, order).run();
}

PairTimes simulate_pair(const PairNodes& nodes, const PairOrder& order, double crowding) {
    verify(nodes, order);
    check_seconds(nodes);
    if (!(crowding >= 0 && crowding <= 1))
        refuse("no simulation of a pair: its rows' crowding must be between 0 and 1");
    return PairSimulation(nodes, order).run_in_rows(crowding);
}

double crowding_of(const PairNodes& nodes, const PairOrder& order, double seconds) {
    constexpr int kHalvings = 30;
    PairNodes alone = nodes;
    for (const OpKind kind : kKindOfPart)
        for (PairNode& node : alone.of(kind))
            if (node.resource == NodeResource::Exchange)
                node.seconds = 0;
    double low = 0, high = 1;
    for (int i = 0; i < kHalvings; ++i) {
        const double middle = (low + high) / 2;
        (simulate_pair(alone, order, middle).time < seconds ? low : high) = middle;
    }
    return (low + high) / 2;
}

std::vector<BackwardNode> fill_backward(const PairNodes& nodes) {
    check_needs(nodes);
    check_seconds(nodes);
    const auto& inputs = nodes.input_gradient;
    const auto& weights = nodes.weight_gradient;
    std::vector<bool> handed_in(weights.size());
    std::vector<BackwardNode> order;
    const auto hand_in = [&](std::size_t weight) {
        order.push_back({OpKind::WeightGradient, weight});
        handed_in[weight] = true;
    };
    // Of those that need no more than `ended` input gradients and take at most twice as long, which
    // is as much beyond it as it saves.
    const auto closest = [&](double seconds, std::size_t ended) {
        std::size_t best = weights.size();
        const auto off = [&](std::size_t i) { return std::abs(weights[i].seconds - seconds); };
        for (std::size_t i = 0; i < weights.size(); ++i)
            if (!handed_in[i] && weights[i].after <= ended && weights[i].seconds <= 2 * seconds &&
                (best == weights.size() || off(i) < off(best)))
                best = i;
        return best;
    };
    double left = 0;       // of the last exchanges, while nothing else computes
    std::size_t begun = 0; // the first of these
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        if (inputs[i].resource == NodeResource::Exchange) {
            begun = left > 0 ? begun : i;
            left += inputs[i].seconds;
        } else if (needs_of(nodes, kInput, i).count < i) {
            left = std::max(0.0, left - inputs[i].seconds);
        } else {
            while (left > 0) {
                const std::size_t weight = closest(left, begun);
                if (weight == weights.size())
                    break;
                left -= weights[weight].seconds;
                hand_in(weight);
            }
            left = 0;
        }
        order.push_back({OpKind::InputGradient, i});
    }
    for (std::size_t i = 0; i < weights.size(); ++i)
        if (!handed_in[i])
            hand_in(i);
    return order;
}

std::string to_text(const PairPattern& pattern) {
    std::string text;
    for (const std::string& name : pattern)
        text += (text.empty() ? "" : " ") + name;
    return text;
}

PairPattern parse_pattern(const std::string& text) {
    PairPattern pattern;
    std::istringstream names(text);
    for (std::string name; names >> name; pattern.push_back(name))
        (void)part_of(name);
    return pattern;
}

PairNodes moe_layer_nodes() {
    constexpr auto kCompute = NodeResource::Compute, kExchange = NodeResource::Exchange;
    return {.forward = {{"ATTN(F)", kCompute},
                        {"ROUTER(F)", kCompute},
                        {"DISPATCH(F)", kExchange},
                        {"SHARED(F)", kCompute, 0, true},
                        {"MLP(F)", kCompute},
                        {"COMBINE(F)", kExchange}},
            .input_gradient = {{"DISPATCH(B)", kExchange},
                               {"SHARED(B)", kCompute, 0, true},
                               {"MLP(B)", kCompute},
                               {"COMBINE(B)", kExchange},
                               {"ROUTER(B)", kCompute},
                               {"ATTN(B)", kCompute}},
            .weight_gradient = {{"MLP(W)", kCompute, 0, false, 3},
                                {"SHARED(W)", kCompute, 0, false, 5},
                                {"ATTN(W)", kCompute, 0, false, 6}}};
}

void check_names(const PairPattern& pattern) {
    const PairNodes layer = moe_layer_nodes();
    for (const std::string& name : pattern) {
        std::string all;
        bool found = false;
        for (const auto* part : {&layer.forward, &layer.input_gradient, &layer.weight_gradient})
            for (const PairNode& node : *part) {
                all += (all.empty() ? "" : ", ") + node.name;
                found = found || node.name == name;
            }
        if (!found)
            throw Error(ErrorCode::InvalidArgument,
                        "there is no " + in_quotes(name) + " in a pair, there are " + all);
    }
}

std::string to_text(const PairMode& mode) {
    return mode.kind == PairMode::Kind::Auto    ? "auto"
           : mode.kind == PairMode::Kind::Apart ? "apart"
                                                : to_text(mode.pattern);
}

PairMode parse_pair_mode(const std::string& text) {
    if (text == "auto")
        return {PairMode::Kind::Auto};
    if (text == "apart")
        return {PairMode::Kind::Apart};
    try {
        PairMode mode{PairMode::Kind::Pattern, parse_pattern(text)};
        check_names(mode.pattern);
        if (mode.pattern.empty())
            throw Error(ErrorCode::InvalidArgument, "it is empty");
        return mode;
    } catch (const Error& error) {
        throw Error(ErrorCode::InvalidArgument,
                    in_quotes(text) + " is neither auto nor apart: " + error.message());
    }
}

} // namespace bellows
