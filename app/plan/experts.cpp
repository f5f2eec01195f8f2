// SPDX-License-Identifier: MIT
#include "app/plan/experts.hpp"

#include "app/exit_code.hpp"
#include "app/units.hpp"
#include "base/strict_json.hpp"

#include <bellows/base/error.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <numeric>

namespace bellows {

namespace {

constexpr std::size_t kMostLayers = 1024;
constexpr double kHighestLoad = 1e300; // the sum of all that a file can hold is finite

[[noreturn]] void refuse(const std::string& why) {
    throw Error(ErrorCode::InvalidArgument, why);
}

double parse_load(const nlohmann::json& value, const std::string& place) {
    const std::string wanted = "; a load is a number from 0 to 1e300";
    if (!value.is_number())
        refuse(place + " is " + value.type_name() + wanted);
    const double load = value.get<double>();
    if (!(load >= 0 && load <= kHighestLoad))
        refuse(place + " is " + number(load) + wanted);
    return load;
}

std::vector<BalancedExperts> place_all(const ExpertPlanOptions& options) {
    std::vector<BalancedExperts> layers;
    for (const std::vector<double>& loads : options.loads)
        layers.push_back(rebalance_experts(loads, options.eplb));
    return layers;
}

double balance_of(const ExpertPlacement& placement, const std::vector<double>& loads) {
    return max_over_mean(rank_loads(placement, loads));
}

/// "17: 12.5 % x4, 3: 9.1 % x2": the experts with the highest loads, their share of the layer's
/// load, their replicas.
std::string hottest_experts(const ExpertPlacement& placement, const std::vector<double>& loads) {
    constexpr std::size_t kShown = 3;
    std::vector<std::size_t> order(loads.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, std::greater<>{}, [&](std::size_t e) { return loads[e]; });
    const double sum = std::accumulate(loads.begin(), loads.end(), 0.0);
    const std::vector<std::uint32_t> replicas = replica_counts(placement);
    std::string text;
    for (std::size_t i = 0; i < std::min(kShown, order.size()); ++i)
        text += (i == 0 ? "" : ", ") + std::to_string(order[i]) + ": " +
                percent(sum > 0 ? loads[order[i]] / sum : 0) + " x" +
                std::to_string(replicas[order[i]]);
    return text;
}

/// "12 experts in 13 of 15 slots, 3 on each of 5 ranks".
std::string sizes_of(const ExpertPlacement& placement) {
    const auto text = [](std::uint64_t value) { return std::to_string(value); };
    const auto free = std::ranges::count(placement.expert_of_slot, kFreeSlot);
    return text(placement.num_experts) + " experts in " +
           text(placement.num_slots() - static_cast<std::uint64_t>(free)) + " of " +
           text(placement.num_slots()) + " slots, " + text(placement.slots_of_rank) +
           " on each of " + text(placement.num_ranks) + " ranks";
}

/// Says what nodes and groups do; it is empty where there is one node.
std::string nodes_of(const EplbOptions& options) {
    const std::string nodes = std::to_string(options.nodes) + " nodes";
    if (options.nodes == 1)
        return "";
    return is_hierarchical(options)
               ? "; each group on one of " + nodes
               : "; " + nodes + " do not divide " + std::to_string(options.groups) +
                     " groups and make no difference";
}

/// "3 layers (0, 7, 8)", cut after a few.
std::string some_layers(const std::vector<std::size_t>& layers) {
    constexpr std::size_t kShown = 8;
    std::string text =
        std::to_string(layers.size()) + (layers.size() == 1 ? " layer (" : " layers (");
    for (std::size_t i = 0; i < std::min(kShown, layers.size()); ++i)
        text += (i == 0 ? "" : ", ") + std::to_string(layers[i]);
    return text + (layers.size() > kShown ? ", ...)" : ")");
}

} // namespace

ExpertLoads parse_expert_loads(std::string_view text, const std::string& name) {
    const std::string file = in_quotes(name);
    const nlohmann::json json = parse_strict_object(text, file);
    const std::string wanted = "; it needs {\"loads\": [[load of each expert] of each layer]}";
    const auto found = json.find("loads");
    if (found == json.end())
        refuse(file + " has no key \"loads\"" + wanted);
    if (!found->is_array() || found->empty())
        refuse(file + ": loads is " + (found->is_array() ? "empty" : found->type_name()) + wanted);
    if (found->size() > kMostLayers)
        refuse(file + " has loads of " + std::to_string(found->size()) + " layers; at most " +
               std::to_string(kMostLayers) + " can be placed at once");
    ExpertLoads loads;
    for (const nlohmann::json& layer : *found) {
        const std::string place = file + ": loads[" + std::to_string(loads.size()) + "]";
        if (!layer.is_array() || layer.empty())
            refuse(place + " is " + (layer.is_array() ? "empty" : layer.type_name()) + wanted);
        if (layer.size() > kMostPlacedExperts)
            refuse(place + " has " + std::to_string(layer.size()) +
                   " experts; a layer has at most " + std::to_string(kMostPlacedExperts));
        if (layer.size() != found->front().size())
            refuse(place + " has " + std::to_string(layer.size()) + " experts, loads[0] has " +
                   std::to_string(found->front().size()) +
                   "; put layers with other numbers of experts into other files");
        std::vector<double>& row = loads.emplace_back();
        for (const nlohmann::json& value : layer)
            row.push_back(parse_load(value, place + "[" + std::to_string(row.size()) + "]"));
    }
    return loads;
}

std::string expert_plan_json(const ExpertPlanOptions& options) {
    nlohmann::ordered_json json = {{"physical_to_logical", nlohmann::ordered_json::array()},
                                   {"max_over_mean", nlohmann::ordered_json::array()}};
    const std::vector<BalancedExperts> layers = place_all(options);
    for (std::size_t layer = 0; layer < layers.size(); ++layer) {
        const ExpertPlacement& placement = layers[layer].placement;
        json["physical_to_logical"].push_back(placement.expert_of_slot);
        json["max_over_mean"].push_back(balance_of(placement, options.loads[layer]));
    }
    return json.dump() + "\n";
}

std::string expert_plan_text(const ExpertPlanOptions& options) {
    const std::vector<BalancedExperts> layers = place_all(options);
    const ExpertPlacement& first = layers.front().placement;
    const ExpertPlacement plain = plain_placement(first.num_experts, first.num_ranks);
    std::string text = sizes_of(first) + nodes_of(options.eplb) +
                       "\n\nlayer   before    after   hottest experts\n";
    std::vector<std::size_t> twice;
    for (std::size_t layer = 0; layer < layers.size(); ++layer) {
        const ExpertPlacement& placement = layers[layer].placement;
        const std::vector<double>& loads = options.loads[layer];
        char row[64];
        std::snprintf(row, sizeof row, "%5zu %8.4g %8.4g   ", layer, balance_of(plain, loads),
                      balance_of(placement, loads));
        text += row + hottest_experts(placement, loads) + "\n";
        if (!exchange_obstacle(placement).empty())
            twice.push_back(layer);
    }
    text += "\nbefore, after: the highest load of a rank over the mean, 1 is best; before is "
            "contiguous blocks\nhottest experts: their share of the layer's load, their replicas\n";
    if (!twice.empty())
        text += "in " + some_layers(twice) +
                " a rank has two replicas of one expert, which no exchange takes; --distinct "
                "places them apart\n";
    return text;
}

int print_expert_plan(const ExpertPlanOptions& options) {
    const std::string text = options.json ? expert_plan_json(options) : expert_plan_text(options);
    std::fputs(text.c_str(), stdout);
    return kExitGood;
}

} // namespace bellows
