// SPDX-License-Identifier: MIT
#pragma once

// `bellows plan experts`: where experts and their replicas go, from measured loads, as JSON or as a
// table. Pure functions but for the last.

#include <bellows/shape/eplb.hpp>

#include <string>
#include <string_view>
#include <vector>

namespace bellows {

/// [layers][experts], the same number of experts in each layer.
using ExpertLoads = std::vector<std::vector<double>>;

/// Reads {"loads": [[load of each expert] of each layer]}; other keys are left alone. name: of the
/// file, for messages. Throws Error{Corrupt} where the text is no JSON object and
/// Error{InvalidArgument} where loads are missing, negative, not numbers, too large, too many, or
/// layers differ in length.
ExpertLoads parse_expert_loads(std::string_view text, const std::string& name);

struct ExpertPlanOptions {
    ExpertLoads loads;
    EplbOptions eplb;
    bool json = false; ///< else a table
};

/// {"physical_to_logical": [[expert of each slot, -1: free] of each layer], "max_over_mean": [of
/// each layer]}. Throws as rebalance_experts() does.
std::string expert_plan_json(const ExpertPlanOptions& options);
/// A line per layer: the highest load of a rank over the mean before and after, and the experts
/// with the highest loads.
std::string expert_plan_text(const ExpertPlanOptions& options);

/// Prints one of them. Returns an exit code; throws as rebalance_experts() does.
int print_expert_plan(const ExpertPlanOptions& options);

} // namespace bellows
