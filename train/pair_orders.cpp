// SPDX-License-Identifier: MIT
#include "pair_orders.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace bellows {

namespace {

/// "stage 0 slot 1 layer 2 DISPATCH(F)", and what may follow a comma → "DISPATCH(F)".
std::string node_of_job(const std::string& job) {
    const std::string name = job.substr(0, job.find(','));
    return name.substr(name.rfind(' ') + 1);
}

std::vector<PairNode> timed(std::vector<PairNode> nodes, const NodeSeconds& seconds,
                            double otherwise) {
    for (PairNode& node : nodes) {
        const auto found = seconds.find(node.name);
        node.seconds = found == seconds.end() ? otherwise : found->second;
    }
    return nodes;
}

bool is_exchange(const PairNode& node) {
    return node.resource == NodeResource::Exchange;
}

/// Nodes [first, end) up to the first whose name stands there already.
std::vector<PairNode> once_each(const std::vector<PairNode>& nodes, std::size_t first) {
    std::set<std::string> seen;
    std::vector<PairNode> layer;
    for (std::size_t i = first; i < nodes.size() && seen.insert(nodes[i].name).second; ++i)
        layer.push_back(nodes[i]);
    return layer;
}

/// What each of a step's own kernels has of the device: an equal share of where several run at
/// once. 0 for what else there is.
std::vector<double> shares_of_device(std::span<const TraceEvent> events) {
    struct Edge {
        std::int64_t ns;
        std::size_t event;
        bool begins;
    };
    std::vector<Edge> edges;
    for (std::size_t i = 0; i < events.size(); ++i)
        if (!events[i].is_job() && !events[i].op.empty() && events[i].by.empty() &&
            events[i].begin_ns < events[i].end_ns) {
            edges.push_back({events[i].begin_ns, i, true});
            edges.push_back({events[i].end_ns, i, false});
        }
    std::ranges::sort(edges, {}, [](const Edge& edge) { return std::pair(edge.ns, edge.begins); });
    std::vector<double> shares(events.size());
    std::set<std::size_t> running;
    std::int64_t since = 0;
    for (const Edge& edge : edges) {
        for (const std::size_t event : running)
            shares[event] +=
                1e-9 * static_cast<double>(edge.ns - since) / static_cast<double>(running.size());
        since = edge.ns;
        edge.begins ? (void)running.insert(edge.event) : (void)running.erase(edge.event);
    }
    return shares;
}

} // namespace

NodeSeconds node_seconds(std::span<const TraceEvent> events,
                         const std::map<std::string, std::size_t>& runs) {
    NodeSeconds means;
    const std::vector<double> shares = shares_of_device(events);
    for (std::size_t i = 0; i < events.size(); ++i) {
        const TraceEvent& event = events[i];
        const auto node = runs.find(event.is_job() ? node_of_job(event.name) : event.category);
        if (node == runs.end() || event.op.empty() || !event.by.empty())
            continue;
        const double seconds =
            event.is_job() ? 1e-9 * static_cast<double>(event.end_ns - event.begin_ns) : shares[i];
        means[node->first] += seconds / static_cast<double>(node->second);
    }
    return means;
}

NodeSeconds mean_of_ranks(HostCollectives& ranks, const NodeSeconds& mine) {
    std::string text;
    for (const auto& [node, value] : mine) {
        std::array<char, 32> exact{};
        std::snprintf(exact.data(), exact.size(), "%a", value);
        text += node + " " + exact.data() + "\n";
    }
    NodeSeconds sums;
    std::map<std::string, double> counts;
    for (const auto& part : ranks.all_gather(std::as_bytes(std::span(text)))) {
        std::istringstream lines({reinterpret_cast<const char*>(part.data()), part.size()});
        std::string node, value;
        while (lines >> node >> value) {
            sums[node] += std::strtod(value.c_str(), nullptr);
            ++counts[node];
        }
    }
    for (auto& [node, sum] : sums)
        sum /= counts[node];
    return sums;
}

PairNodes pair_of(const Stage& forward, const Stage& backward, const NodeSeconds& seconds,
                  double otherwise) {
    return {timed(forward.pair_nodes(NodeKind::Forward), seconds, otherwise),
            timed(backward.pair_nodes(NodeKind::InputGradient), seconds, otherwise),
            timed(backward.pair_nodes(NodeKind::WeightGradient), seconds, otherwise)};
}

PairNodes layer_with_experts(const PairNodes& chunks) {
    const auto sends = std::ranges::find_if(chunks.forward, is_exchange);
    const auto brings = std::ranges::find_if(chunks.input_gradient, is_exchange);
    if (sends == chunks.forward.end() || brings == chunks.input_gradient.end())
        return {};
    PairNodes layer;
    auto first = static_cast<std::size_t>(sends - chunks.forward.begin());
    while (first > 0 && !is_exchange(chunks.forward[first - 1]) &&
           chunks.forward[first].name != "ATTN(F)")
        --first;
    layer.forward = once_each(chunks.forward, first);
    while (!layer.forward.empty() && !is_exchange(layer.forward.back()))
        layer.forward.pop_back(); // the head is of no layer
    const auto back = static_cast<std::size_t>(brings - chunks.input_gradient.begin());
    layer.input_gradient = once_each(chunks.input_gradient, back);
    const auto attention = std::ranges::find(layer.input_gradient, "ATTN(B)", &PairNode::name);
    if (attention != layer.input_gradient.end())
        layer.input_gradient.erase(attention + 1, layer.input_gradient.end());
    const std::size_t end = back + layer.input_gradient.size();
    for (const PairNode& node : chunks.weight_gradient)
        if (node.after > back && node.after <= end) {
            layer.weight_gradient.push_back(node);
            layer.weight_gradient.back().after -= back;
        }
    return layer;
}

} // namespace bellows
